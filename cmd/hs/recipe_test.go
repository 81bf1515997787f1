package main

import (
	"path/filepath"
	"strings"
	"testing"
)

// A run with narrow moments and split weights from the command line: the number of threads changes nothing, going on gives the same
// weights, other storage is refused, and evaluation and conversion take its checkpoint.
func TestRecipeRun(t *testing.T) {
	dir := t.TempDir()
	set := []string{"--preset", "demo"}
	for _, s := range []string{"task.per_step=2", "task.val=6", "eval.tasks=2", "router.evidence_tasks=2", "save.every=1", "optim.states=8bit", "optim.master=hilo"} {
		set = append(set, "--set", s)
	}
	train := func(more ...string) (int, string, string) {
		return hs(t, append([]string{"-C", dir, "train", "--json"}, more...)...)
	}
	sum := func(more ...string) string {
		t.Helper()
		code, out, e := train(more...)
		if code != 0 {
			t.Fatalf("train %v: exit code %d: %s", more, code, e)
		}
		return lastJSON(t, out)["weights_sha256"].(string)
	}
	want := sum(append(set, "--run", "a", "--steps", "2")...)
	if got := sum(append(set, "--run", "b", "--steps", "2", "--threads", "1")...); got != want {
		t.Errorf("weights %s on one thread, %s on all", got, want)
	}
	if got := sum("--run", "a", "--resume", "--from-step", "1"); got != want {
		t.Errorf("weights %s after going on from step 1, %s without interruption", got, want)
	}
	for _, c := range []struct{ set, want string }{
		{"optim.states=bf16", "optim.states is bf16, the checkpoint was made with 8bit"}, {"optim.master=fp32", "optim.master is fp32, the checkpoint was made with hilo"},
		{"optim.states=int8", `optim.states = "int8"`}, {"optim.master=bf16", "allowed auto | fp32 | hilo"},
	} {
		if code, _, e := train("--run", "a", "--resume", "--set", c.set); code == 0 || !strings.Contains(e, c.want) {
			t.Errorf("resume with %s: exit code %d, no %q in %s", c.set, code, c.want, e)
		}
	}
	for _, args := range []string{"eval --run a --tasks 2", "convert --run a --out " + filepath.Join(dir, "bf16")} {
		if code, _, e := hs(t, append([]string{"-C", dir}, strings.Fields(args)...)...); code != 0 {
			t.Errorf("%s: exit code %d: %s", args, code, e)
		}
	}
}
