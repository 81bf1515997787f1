package main

import (
	"encoding/json"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// emulated makes the emulated CUDA device findable, or skips the test.
func emulated(t *testing.T) {
	t.Helper()
	if os.Getenv("HS_LIB_DIR") == "" {
		t.Setenv("HS_LIB_DIR", filepath.Join("..", "..", "build"))
	}
	code, out, _ := hs(t, "score", "--device", "emu", "--ids", write(t, "ids.json", "[1,2]"), "--json")
	if code == exitNotReady {
		t.Skip("no libhs_emu.so in HS_LIB_DIR or build: make emu")
	}
	if v := lastJSON(t, out); code != 0 {
		if e, _ := v["error"].(string); strings.Contains(e, "no kernel") {
			t.Skipf("%s: make emu", e)
		}
		t.Fatalf("exit code %d: %v", code, v)
	}
}

// TestEmuMissing: without its library the device says what to type.
func TestEmuMissing(t *testing.T) {
	t.Setenv("HS_LIB_DIR", t.TempDir())
	code, out, e := hs(t, "generate", "--device", "emu", "--prompt", "x", "--json")
	v := lastJSON(t, out)
	if hint, _ := v["hint"].(string); code != exitNotReady || !strings.Contains(hint, "make emu") || !strings.Contains(e, "libhs_emu.so") {
		t.Errorf("exit code %d, %v: %s", code, v, e)
	}
}

// TestEmuScore: log-probs on the emulated device are those of the CPU to float32's precision, and in bfloat16, its default, to that of a model
// whose every value is rounded to eight bits.
func TestEmuScore(t *testing.T) {
	emulated(t)
	text := write(t, "text", "<|im_start|>user\nHow many rows has the table?<|im_end|>\n<|im_start|>assistant\n")
	score := func(args ...string) (lp []float64, sum float64) {
		t.Helper()
		code, out, e := hs(t, append([]string{"score", "--text", text, "--json"}, args...)...)
		if code != 0 {
			t.Fatalf("%v: exit code %d: %s", args, code, e)
		}
		var r scoreResult
		must(t, json.Unmarshal([]byte(out[strings.LastIndex(strings.TrimSpace(out), "\n")+1:]), &r))
		for _, x := range r.LogProbs[1:] {
			lp = append(lp, *x)
		}
		return lp, r.Sum
	}
	want, _ := score("--device", "cpu")
	for _, c := range []struct {
		dtype string
		bound float64
	}{{"float32", 1e-4}, {"bfloat16", 0.5}, {"auto", 0.5}} {
		got, _ := score("--device", "emu", "--dtype", c.dtype)
		var most float64
		for i := range want {
			most = max(most, math.Abs(got[i]-want[i]))
		}
		t.Logf("%s: log-probs differ by %.2g at most", c.dtype, most)
		if !(most <= c.bound) || c.dtype != "float32" && most < 1e-4 {
			t.Errorf("%s: bound %g", c.dtype, c.bound)
		}
	}
	if code, _, e := hs(t, "score", "--text", text, "--device", "cpu", "--dtype", "bfloat16"); code == 0 || !strings.Contains(e, "device cpu does not compute in bf16") {
		t.Errorf("bfloat16 on the CPU: exit code %d: %s", code, e)
	}
}

// TestEmuRun: a training step on the emulated device in bfloat16, its default: sampler and trainer agree in every bit, and run.toml says what
// "auto" stood for, so that an evaluation of the run computes the same elsewhere.
func TestEmuRun(t *testing.T) {
	emulated(t)
	dir := t.TempDir()
	args := []string{"-C", dir, "--device", "emu", "train", "--json", "--preset", "demo", "--run", "a", "--steps", "1"}
	for _, s := range []string{"run.seed=14", "task.per_step=1", "rollout.group=4", "rollout.max_turns=2", "rollout.max_new=40", "rollout.temperature=1.2", "rollout.slots=4",
		"router.evidence_tasks=0", "rescue.mode=off", "rescue.attempts=2", "rescue.min_group=2", "eval.tasks=1", "eval.attempts=1", "eval.k=1", "task.val=2",
		"rollout.episode_deadline=1h", "rollout.stall_after=1h"} {
		args = append(args, "--set", s)
	}
	if code, _, e := hs(t, args...); code != 0 {
		t.Fatalf("exit code %d: %s", code, e)
	}
	text, err := os.ReadFile(filepath.Join(dir, "a", "run.toml"))
	must(t, err)
	for _, line := range []string{`dtype = "bfloat16"`, `master = "hilo"`} {
		if !strings.Contains(strings.Join(strings.Fields(string(text)), " "), line) {
			t.Errorf("run.toml lacks %s", line)
		}
	}
	b, err := os.ReadFile(filepath.Join(dir, "a", "metrics.jsonl"))
	must(t, err)
	var m map[string]float64
	must(t, json.Unmarshal(b, &m))
	t.Logf("%g trained tokens, gradient norm %g, gap %g, %.1f s", m["tokens/trained"], m["grad/norm"], m["gap/max"], m["time/total"])
	if gap, ok := m["gap/max"]; !ok || gap != 0 || m["tokens/trained"] == 0 || !(m["grad/norm"] > 0) {
		t.Errorf("log-probs of sampler and trainer differ by %g (measured: %t)", gap, ok)
	}
}
