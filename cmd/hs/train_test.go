package main

import (
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"harness-s/trainer"
)

// A run whose checkpoints are all damaged is refused; nothing of it changes.
func TestResumeOfDamagedCheckpointsIsRefused(t *testing.T) {
	root := t.TempDir()
	cfg := trainer.Defaults()
	cfg.Run.Name = "a"
	dir, err := trainer.CreateRun(root, "a", cfg.TOML(), trainer.Manifest{Created: time.Unix(1, 0)}, false)
	if err != nil {
		t.Fatal(err)
	}
	if err := dir.Close(); err != nil {
		t.Fatal(err)
	}
	ckpt := dir.Path("checkpoints", "step_000005")
	if err := os.Mkdir(ckpt, 0o755); err != nil {
		t.Fatal(err)
	}
	metrics := dir.Path("metrics.jsonl")
	for _, name := range []string{metrics, filepath.Join(ckpt, "DONE")} {
		if err := os.WriteFile(name, []byte("{\"step\":5}\n"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		args string
		code int
		want string
	}{
		{"--resume", exitFailure, "none of steps [5] is whole"},
		{"--resume --from-step 3", exitUsage, "checkpoints of this run: [5]"},
		{"--from-step 3", exitUsage, "--from-step needs --resume"},
	} {
		code, _, errOut := hs(t, append([]string{"train", "--run", "a", "-C", root}, strings.Fields(c.args)...)...)
		if code != c.code || !strings.Contains(errOut, c.want) {
			t.Errorf("%s: exit code %d\n%s", c.args, code, errOut)
		}
	}
	if b, err := os.ReadFile(metrics); err != nil || string(b) != "{\"step\":5}\n" {
		t.Errorf("metrics %q %v", b, err)
	}
	if _, err := os.Stat(ckpt); err != nil {
		t.Error(err)
	}
}

// The end of the terminal is a request to stop, like Ctrl-C.
func TestHangupAsksToStop(t *testing.T) {
	heard := make(chan os.Signal, 2)
	signal.Notify(heard, syscall.SIGHUP) // also when the test itself runs under nohup
	defer signal.Stop(heard)
	stop, done := orHangup(make(chan struct{}))
	defer done()
	if err := syscall.Kill(os.Getpid(), syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	<-stop
	interrupted := make(chan struct{})
	stop, done = orHangup(interrupted)
	defer done()
	close(interrupted)
	<-stop
}
