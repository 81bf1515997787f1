package trainer

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"harness-s/env"
)

var _ env.Recorder = (*RunDir)(nil)

func at(s int64) time.Time { return time.Unix(1_000_000+s, 0).UTC() }

func create(t *testing.T, root, name string) *RunDir {
	t.Helper()
	r, err := CreateRun(root, name, []byte("[run]\n"), Manifest{Created: at(0), Version: "v", Seed: 3}, false)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func closeRun(t *testing.T, r *RunDir) {
	t.Helper()
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestRunDirectoryGuard(t *testing.T) {
	root := t.TempDir()
	r := create(t, root, "a")
	for _, s := range subdirs {
		if _, err := os.Stat(r.Path(s)); err != nil {
			t.Error(err)
		}
	}
	if _, err := CreateRun(root, "a", nil, Manifest{}, true); !errors.Is(err, ErrLocked) {
		t.Errorf("clean of a live run: %v", err)
	}
	if _, err := OpenRun(root, "a", at(1)); !errors.Is(err, ErrLocked) {
		t.Errorf("second process: %v", err)
	}
	closeRun(t, r)
	_, err := CreateRun(root, "a", nil, Manifest{}, false)
	if !errors.Is(err, ErrRunExists) {
		t.Fatalf("used directory: %v", err)
	}
	for _, way := range []string{"--resume", "--run NAME", "--clean"} {
		if !strings.Contains(Hint(err), way) {
			t.Errorf("hint %q does not name %s", Hint(err), way)
		}
	}
	r, err = CreateRun(root, "a", []byte("x"), Manifest{Created: at(2)}, true)
	if err != nil {
		t.Fatal(err)
	}
	closeRun(t, r)
	foreign := filepath.Join(root, "home")
	if err := os.MkdirAll(filepath.Join(foreign, "precious"), 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err := CreateRun(root, "home", nil, Manifest{}, true); err == nil {
		t.Error("clean removed a directory that is not a run")
	}
	if _, err := os.Stat(filepath.Join(foreign, "precious")); err != nil {
		t.Error(err)
	}
	for _, name := range []string{"", "..", "a/b", ".x"} {
		if _, err := CreateRun(root, name, nil, Manifest{}, false); err == nil {
			t.Errorf("name %q accepted", name)
		}
	}
	if _, err := OpenRun(root, "none", at(0)); err == nil || Hint(err) == "" {
		t.Errorf("open of a missing run: %v", err)
	}
}

// What a kill during the creation of a run leaves is not in anyone's way; a run that did not start leaves nothing.
func TestUnfinishedCreation(t *testing.T) {
	root := t.TempDir()
	dir := filepath.Join(root, "a")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{lockFile + ".123", "run.toml.tmp", manifestFile} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("{"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for _, s := range subdirs[:3] {
		if err := os.Mkdir(filepath.Join(dir, s), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	r, err := CreateRun(root, "a", []byte("x"), Manifest{Created: at(0)}, false)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Discard(); err != nil {
		t.Error(err)
	}
	closeRun(t, r)
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("discarded run: %v", err)
	}
}

func TestStaleLock(t *testing.T) {
	root := t.TempDir()
	closeRun(t, create(t, root, "a"))
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	write := func(o lockOwner) {
		b, err := json.Marshal(o)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(root, "a", lockFile), b, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write(lockOwner{PID: 1 << 30, Host: host}) // above every pid_max
	r, err := OpenRun(root, "a", at(1))
	if err != nil {
		t.Fatalf("dead owner: %v", err)
	}
	closeRun(t, r)
	began, running, err := processStart(os.Getpid())
	if err != nil || !running {
		t.Fatalf("own process: running %v, %v", running, err)
	}
	write(lockOwner{PID: os.Getpid(), Began: began - 1, Host: host})
	if r, err = OpenRun(root, "a", at(1)); err != nil {
		t.Fatalf("dead owner whose number is used again: %v", err)
	}
	closeRun(t, r)
	write(lockOwner{PID: os.Getpid(), Began: began, Host: host})
	if _, err := OpenRun(root, "a", at(1)); !errors.Is(err, ErrLocked) {
		t.Errorf("live owner: %v", err)
	}
	write(lockOwner{PID: 1 << 30, Host: host + "-other"})
	if _, err := OpenRun(root, "a", at(1)); !errors.Is(err, ErrLocked) || !strings.Contains(Hint(err), lockFile) {
		t.Errorf("owner on another host: %v", err)
	}
	if err := os.WriteFile(filepath.Join(root, "a", lockFile), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	r, err = OpenRun(root, "a", at(1))
	if err != nil {
		t.Fatalf("empty lock: %v", err)
	}
	closeRun(t, r)
}

func TestResumeTruncatesRecords(t *testing.T) {
	root := t.TempDir()
	r := create(t, root, "a")
	for _, name := range []string{"metrics.jsonl", "events.jsonl"} {
		a, err := r.Appender(name)
		if err != nil {
			t.Fatal(err)
		}
		for step := 1; step <= 9; step++ {
			if err := a.Write(map[string]any{"step": step, "x": "<&>"}); err != nil {
				t.Fatal(err)
			}
		}
		if err := a.Close(); err != nil {
			t.Fatal(err)
		}
	}
	for step := 1; step <= 9; step++ {
		if err := r.WriteRollouts(step, []any{map[string]int{"i": step}, map[string]int{"i": -step}}); err != nil {
			t.Fatal(err)
		}
	}
	if err := r.WriteJSON("evals/step_000008.json", 1); err != nil {
		t.Fatal(err)
	}
	for v, step := range []int{0, 6, 7} {
		if err := r.WriteJSON(fmt.Sprintf("evidence/v%03d.json", v), map[string]int{"step": step}); err != nil {
			t.Fatal(err)
		}
	}
	ck := r.Checkpoints(SaveConfig{Keep: 9}, nil)
	for _, step := range []int{3, 6, 9} {
		save(t, ck, step, "x")
	}
	cut, err := os.OpenFile(r.Path("metrics.jsonl"), os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := cut.WriteString(`{"step":10,"half`); err != nil {
		t.Fatal(err)
	}
	if err := cut.Close(); err != nil {
		t.Fatal(err)
	}
	closeRun(t, r)
	r, err = OpenRun(root, "a", at(5))
	if err != nil {
		t.Fatal(err)
	}
	defer closeRun(t, r)
	if err := r.BeginResume(6, at(6), func(err error) { t.Error(err) }); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(r.Path("metrics.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(string(b), "\n"); n != 6 || strings.Contains(string(b), "half") || !strings.Contains(string(b), "<&>") {
		t.Errorf("metrics after resume:\n%s", b)
	}
	files, err := filepath.Glob(r.Path("rollouts", "*"))
	if err != nil || len(files) != 6 {
		t.Errorf("rollouts %v %v", files, err)
	}
	if _, err := os.Stat(r.Path("evals", "step_000008.json")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("evaluation past the step: %v", err)
	}
	if names, err := filepath.Glob(r.Path("evidence", "*")); err != nil || len(names) != 2 {
		t.Errorf("evidence %v %v", names, err)
	}
	if steps, err := ck.List(); err != nil || !cmp.Equal(steps, []int{3, 6}) {
		t.Errorf("checkpoints %v %v", steps, err)
	}
	if to, err := os.Readlink(r.Path("checkpoints", "latest")); err != nil || to != "step_000006" {
		t.Errorf("latest checkpoint %q %v", to, err)
	}
	var lines []string
	if err := ReadRollouts(r.Dir(), 6, func(l []byte) error { lines = append(lines, string(l)); return nil }); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{`{"i":6}`, `{"i":-6}`}, lines); diff != "" {
		t.Error(diff)
	}
	m := r.Manifest()
	if r.Attempt != 2 || len(m.Attempts) != 2 || m.Attempts[1].Resume != 6 || m.Attempts[1].Number != 2 {
		t.Errorf("attempts %+v", m.Attempts)
	}
	f, err := r.LogFile()
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if to, err := os.Readlink(r.Path("logs", "latest")); err != nil || to != "attempt_2.log" {
		t.Errorf("latest log %q %v", to, err)
	}
}

// A damaged line does not cost the run: the good ones stay, the file as it was is kept.
func TestResumeSetsDamagedLinesAside(t *testing.T) {
	r := create(t, t.TempDir(), "a")
	defer closeRun(t, r)
	text := "{\"step\":1}\n\x00\x00garbage\n{\"step\":2}\n{\"step\":3}\n"
	if err := os.WriteFile(r.Path("events.jsonl"), []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	var warned error
	if err := r.BeginResume(2, at(7), func(err error) { warned = err }); err != nil {
		t.Fatal(err)
	}
	if warned == nil || !strings.Contains(warned.Error(), "events.jsonl: 1 damaged") {
		t.Errorf("warned %v", warned)
	}
	for name, want := range map[string]string{"events.jsonl": "{\"step\":1}\n{\"step\":2}\n", "events.jsonl" + damagedMark: text} {
		if b, err := os.ReadFile(r.Path(name)); err != nil || string(b) != want {
			t.Errorf("%s: %q %v", name, b, err)
		}
	}
	// Starting again from step 0 makes the events before step 1 again.
	if err := os.WriteFile(r.Path("events.jsonl"), []byte("{\"step\":0}\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := r.BeginResume(0, at(8), nil); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(r.Path("events.jsonl")); err != nil || len(b) > 0 {
		t.Errorf("events after a start from step 0: %q %v", b, err)
	}
}

// A process whose directory was removed and made anew by another must not write there, nor release the other's lock.
func TestReplacedDirectoryIsLeftAlone(t *testing.T) {
	root := t.TempDir()
	r := create(t, root, "a")
	if err := r.Owned(); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(r.Dir()); err != nil {
		t.Fatal(err)
	}
	if err := r.Owned(); err == nil || Hint(err) == "" {
		t.Errorf("removed: %v", err)
	}
	if err := os.Mkdir(r.Dir(), 0o755); err != nil {
		t.Fatal(err)
	}
	lock := r.Path(lockFile)
	if err := os.WriteFile(lock, []byte(`{"pid":1,"host":"other"}`), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := r.Owned(); err == nil || !strings.Contains(err.Error(), "process 1 on other") {
		t.Errorf("replaced: %v", err)
	}
	if err := r.Close(); err == nil {
		t.Error("closed a run that is not there")
	}
	if _, err := os.Stat(lock); err != nil {
		t.Errorf("lock of the other process: %v", err)
	}
}

// A resume that a kill cuts short must not leave a checkpoint whose records are gone.
func TestResumeDropsCheckpointsFirst(t *testing.T) {
	r := create(t, t.TempDir(), "a")
	defer closeRun(t, r)
	ck := r.Checkpoints(SaveConfig{Keep: 9}, nil)
	save(t, ck, 3, "x")
	save(t, ck, 6, "x")
	if err := os.Mkdir(r.Path("metrics.jsonl"), 0o755); err != nil { // stops the resume there
		t.Fatal(err)
	}
	if err := r.BeginResume(3, at(1), nil); err == nil {
		t.Fatal("resumed")
	}
	if last, err := ck.Latest(); err != nil || last != 3 {
		t.Errorf("latest checkpoint %d %v", last, err)
	}
}

func TestManifestRecordsUnsealing(t *testing.T) {
	root := t.TempDir()
	r := create(t, root, "a")
	defer closeRun(t, r)
	if err := r.RecordUnseal(env.UnsealRecord{ID: "u1", Reason: "final", Split: env.Test}); err != nil {
		t.Fatal(err)
	}
	m, err := ReadManifest(r.Dir())
	if err != nil {
		t.Fatal(err)
	}
	if len(m.Unsealed) != 1 || m.Unsealed[0].ID != "u1" || m.Name != "a" || m.Seed != 3 {
		t.Errorf("%+v", m)
	}
	// A record that cannot be written must not exist in memory either.
	if err := os.Remove(r.Path(manifestFile)); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(r.Path(manifestFile, "in the way"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := r.RecordUnseal(env.UnsealRecord{ID: "u2"}); err == nil {
		t.Error("a failed write was not reported")
	}
	if n := len(r.Manifest().Unsealed); n != 1 {
		t.Errorf("%d unsealings after a failed write", n)
	}
}

func TestWriteAtomicFailures(t *testing.T) {
	for n := 1; n <= 6; n++ {
		path := filepath.Join(t.TempDir(), "f")
		if err := WriteAtomic(path, []byte("old")); err != nil {
			t.Fatal(err)
		}
		fs := &faultyFiles{at: n, err: fmt.Errorf("injected")}
		err := writeAtomic(fs, path, []byte("new"))
		b, rerr := os.ReadFile(path)
		if rerr != nil {
			t.Fatal(rerr)
		}
		if s := string(b); s != "old" && s != "new" || err == nil && s != "new" || err == nil && fs.n >= n {
			t.Errorf("failure at %d: %q, %v", n, s, err)
		}
	}
}
