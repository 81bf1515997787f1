package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"harness-s/model"
)

// A LoRA run from the command line: its checkpoints are adapters, going on gives the same weights, and everything that takes a checkpoint
// takes one of the run.
func TestLoRARun(t *testing.T) {
	dir := t.TempDir()
	base := filepath.Join(dir, "base")
	if err := model.UnpackTiny(base); err != nil {
		t.Fatal(err)
	}
	set := []string{"--preset", "demo", "--run", "a"}
	for _, s := range []string{"task.per_step=2", "task.val=6", "eval.tasks=4", "router.evidence_tasks=2", "save.every=1", "lora.rank=2", `lora.targets=["q_proj", "up_proj", "in_proj_qkv"]`, "optim.lr=2e-3", "model.path=" + base} {
		set = append(set, "--set", s)
	}
	train := func(more ...string) (int, string, string) {
		return hs(t, append([]string{"-C", dir, "train", "--json"}, more...)...)
	}
	code, out, e := train(append(set, "--steps", "2")...)
	if code != 0 || !strings.Contains(e, "LoRA rank 2 on q_proj up_proj in_proj_qkv") {
		t.Fatalf("train: exit code %d: %s", code, e)
	}
	want := lastJSON(t, out)["weights_sha256"].(string)
	code, out, e = train("--run", "a", "--resume", "--from-step", "1")
	if code != 0 || lastJSON(t, out)["weights_sha256"] != want {
		t.Errorf("resume from step 1: exit code %d, weights differ: %s", code, e)
	}
	other := filepath.Join(dir, "other") // the base with one bit of one weight changed
	if err := os.CopyFS(other, os.DirFS(base)); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(filepath.Join(other, "model.safetensors"))
	if err != nil {
		t.Fatal(err)
	}
	b[len(b)-2] ^= 1
	if err := os.WriteFile(filepath.Join(other, "model.safetensors"), b, 0o644); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ set, want string }{
		{"lora.rank=3", "lora.rank is 3, the checkpoint was made with 2"}, {"lora.alpha=8", "lora.alpha is 8, the checkpoint was made with 4"},
		{`lora.targets=["q_proj"]`, "lora.targets are"}, {"lora.rank=0", "lora.rank = 0"}, {"model.path=" + other, "stands beside base weights"},
		{"model.path=" + filepath.Join(dir, "gone"), "its frozen weights"}, {"run.seed=9", "seed is 9"},
	} {
		if code, _, e := train("--run", "a", "--resume", "--set", c.set); code == 0 || !strings.Contains(e, c.want) {
			t.Errorf("resume with %s: exit code %d, no %q in %s", c.set, code, c.want, e)
		}
	}
	saved := filepath.Join(dir, "a", "checkpoints", "step_000002", "model")
	if !model.IsAdapter(saved) {
		t.Fatalf("%s is no adapter", saved)
	}
	// The bfloat16 base is 3.7 MB, a whole checkpoint in float32 would be 7.4 MB.
	if st, err := os.Stat(filepath.Join(saved, "adapter_model.safetensors")); err != nil || st.Size() > 200_000 {
		t.Errorf("the adapter has %d bytes (%v)", st.Size(), err)
	}

	ids := filepath.Join(dir, "ids.json")
	if err := os.WriteFile(ids, []byte("[1, 2, 3, 4, 5, 6, 7, 8]"), 0o644); err != nil {
		t.Fatal(err)
	}
	sum := func(args ...string) float64 {
		t.Helper()
		code, out, e := hs(t, append([]string{"-C", dir, "score", "--ids", ids, "--json"}, args...)...)
		if code != 0 {
			t.Fatalf("score %v: exit code %d: %s", args, code, e)
		}
		return lastJSON(t, out)["sum"].(float64)
	}
	merged, peft, tuned := filepath.Join(dir, "merged"), filepath.Join(dir, "peft"), sum("--ckpt", saved)
	for _, args := range [][]string{{"--run", "a", "--dtype", "f32", "--out", merged}, {"--run", "a", "--as", "adapter", "--out", peft}} {
		if code, _, e := hs(t, append([]string{"-C", dir, "convert"}, args...)...); code != 0 {
			t.Fatalf("convert %v: exit code %d: %s", args, code, e)
		}
	}
	for _, args := range [][]string{{"--ckpt", merged}, {"--adapter", peft}, {"--ckpt", base, "--adapter", peft}, {"--ckpt", base, "--adapter", saved}} {
		if got := sum(args...); got != tuned {
			t.Errorf("score %v: %v, the run's checkpoint gives %v", args, got, tuned)
		}
	}
	if plain := sum("--ckpt", base); plain == tuned {
		t.Error("the adapter changes nothing")
	}
	m, err := model.ReadSafetensors(filepath.Join(merged, "model.safetensors"))
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	for _, args := range []string{"eval --run a --tasks 2", "eval --ckpt " + base + " --adapter " + peft + " --tasks 2", "generate --prompt hello --max-new 3 --ckpt " + base + " --adapter " + peft} {
		if code, _, e := hs(t, append([]string{"-C", dir}, strings.Fields(args)...)...); code != 0 {
			t.Errorf("%s: exit code %d: %s", args, code, e)
		}
	}
	for args, want := range map[string]string{
		"convert --ckpt " + base + " --as adapter --out " + filepath.Join(dir, "x"):       "the model has none",
		"score --ids " + ids + " --ckpt " + peft + " --adapter " + peft:                   "is an adapter itself",
		"sft --preset tiny --new tiny --set lora.rank=2 --out " + filepath.Join(dir, "y"): "beside frozen ones",
		"train --preset demo --run b --set model.path=" + peft:                            "training starts from a whole checkpoint",
		"train --preset demo --run b --set lora.rank=1 --set lora.targets=[\"w1\"]":       "is no linear layer of this model",
		"train --preset demo --run b --set lora.targets=[]":                               "lora.targets",
	} {
		if code, _, e := hs(t, append([]string{"-C", dir}, strings.Fields(args)...)...); code == 0 || !strings.Contains(e, want) {
			t.Errorf("%s: exit code %d, no %q in %s", args, code, want, e)
		}
	}
	if err := os.Rename(base, base+"2"); err != nil {
		t.Fatal(err)
	}
	if code, _, e := hs(t, "score", "--ids", ids, "--ckpt", saved); code == 0 || !strings.Contains(e, "is not a directory here") {
		t.Errorf("score without the base: exit code %d: %s", code, e)
	}
	if got := sum("--ckpt", base+"2", "--adapter", saved); got != tuned {
		t.Errorf("score with the moved base: %v, want %v", got, tuned)
	}
}
