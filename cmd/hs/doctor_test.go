package main

import (
	"encoding/binary"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// damage flips bits of one element of a tensor in a safetensors file: header length, JSON header, data.
func damage(t *testing.T, path, tensor string, elem, size int, mask byte) {
	t.Helper()
	b, err := os.ReadFile(path)
	must(t, err)
	n := int(binary.LittleEndian.Uint64(b))
	var header map[string]struct {
		Offsets [2]int `json:"data_offsets"`
	}
	raw := map[string]json.RawMessage{}
	must(t, json.Unmarshal(b[8:8+n], &raw))
	delete(raw, "__metadata__")
	rest, err := json.Marshal(raw)
	must(t, err)
	must(t, json.Unmarshal(rest, &header))
	h, ok := header[tensor]
	if !ok {
		t.Fatalf("no tensor %s in %s", tensor, path)
	}
	at := 8 + n + h.Offsets[0] + elem*size
	if size == 4 {
		at += 3 // sign and exponent of a float32
	}
	b[at] ^= mask
	must(t, os.WriteFile(path, b, 0o644))
}

// TestParityNamesTheBound damages one number of a fixture at a time: exit code 1, and the message names what missed its bound.
func TestParityNamesTheBound(t *testing.T) {
	for _, c := range []struct {
		file, tensor string
		elem, size   int
		mask         byte
		want         string
	}{
		{"model.safetensors", "model.norm.weight", 3, 4, 0x80, "logits_max_abs is"},
		{"expect.safetensors", "grad.model.norm.weight", 3, 4, 0x80, "grad_max_rel (model.norm.weight) is"},
		{"expect.safetensors", "loss", 0, 4, 0x80, "loss_abs is"},
		{"expect.safetensors", "ragged.logprob", 5, 4, 0x80, "ragged_max_abs is"},
		{"expect.safetensors", "greedy.tokens", 2, 8, 0x01, "greedy token 2 differs"},
	} {
		t.Run(c.tensor, func(t *testing.T) {
			dir := t.TempDir()
			must(t, os.CopyFS(dir, os.DirFS(filepath.Join(root, "model", "testdata", "reference", "threeper"))))
			damage(t, filepath.Join(dir, c.file), c.tensor, c.elem, c.size, c.mask)
			code, out, e := hs(t, "doctor", "--parity", dir, "--json")
			if code != exitFailure || !strings.Contains(e, c.want) || !strings.Contains(e, "hint:") || lastJSON(t, out)["ok"] != false {
				t.Errorf("exit code %d, want %d and %q in\n%s", code, exitFailure, c.want, e)
			}
		})
	}
}

// TestDoctorChecks reads the findings of a healthy machine and of one that is not: each has a status and a fact, and what is wrong also
// says what to type.
func TestDoctorChecks(t *testing.T) {
	checks := func(wantCode int, args ...string) map[string]finding {
		code, out, e := hs(t, append([]string{"-C", filepath.Join(t.TempDir(), "runs"), "doctor", "--json"}, args...)...)
		if code != wantCode {
			t.Fatalf("doctor %q: exit code %d, want %d: %s%s", args, code, wantCode, out, e)
		}
		lastJSON(t, out)
		var v struct{ Checks []finding }
		must(t, json.Unmarshal([]byte(out), &v))
		found := map[string]finding{}
		for _, f := range v.Checks {
			found[f.ID] = f
			if !strings.Contains(" OK WARN FAIL SKIP ", " "+f.Status+" ") || f.Fact == "" || f.Hint == "" && (f.Status == "WARN" || f.Status == "FAIL") {
				t.Errorf("doctor %q: %+v", args, f)
			}
		}
		return found
	}
	ok := checks(exitOK, "--deep", "--gold", "2")
	for _, id := range []string{"D01", "D04", "D05", "D06", "D07", "D08", "D09", "D10", "D12", "D13", "D14", "D15"} {
		if ok[id].Status != "OK" {
			t.Errorf("%s: %+v", id, ok[id])
		}
	}
	if f := checks(exitNotReady, "--ckpt", t.TempDir())["D08"]; f.Status != "FAIL" || !strings.Contains(f.Fact, "config.json") {
		t.Errorf("missing checkpoint: %+v", f)
	}
	if f := checks(exitNotReady, "--device", "cpu", "--set", "model.dtype=bfloat16")["D04"]; f.Status != "FAIL" || !strings.Contains(f.Fact, "does not compute in bf16") {
		t.Errorf("bfloat16 on the CPU: %+v", f)
	}
	if f := checks(exitNotReady, "--device", "cuda:0")["D04"]; f.Status != "FAIL" || !strings.Contains(f.Fact, "cuda:0") {
		t.Errorf("no GPU: %+v", f)
	}
	if f := checks(exitNotReady, "--set", "task.dsn=root@tcp(127.0.0.1:1)/")["D10"]; f.Status != "FAIL" || !strings.Contains(f.Hint, "start the server") {
		t.Errorf("dead database: %+v", f)
	}
}

// TestDoctorTurns: how a turn begins, is sampled and ends, as text and as JSON, and what the configuration changes of it.
func TestDoctorTurns(t *testing.T) {
	runs := filepath.Join(t.TempDir(), "runs")
	_, out, _ := hs(t, "-C", runs, "doctor")
	for _, want := range []string{"stop: <|im_end|> 980 (chat template), <|endoftext|> 982 (config.json eos_token_id)", "template: built-in Qwen3.5 format, thinking off",
		"hs generate: temperature 1, top_p 1, top_k 0, min_p 0 (generation_config.json)", "rollout: temperature 1, top_p 1, top_k 0; evaluation: temperature 1"} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
	code, out, _ := hs(t, "-C", runs, "doctor", "--json", "--set", `model.stop=["<|im_end|>"]`, "--set", "model.thinking=on")
	v, ok := lastJSON(t, out)["turns"].(map[string]any)
	if !ok || code != exitOK || v["thinking"] != true || len(v["stop"].([]any)) != 1 || v["stop"].([]any)[0].(map[string]any)["from"] != "model.stop" {
		t.Errorf("exit code %d, %v", code, v)
	}
	code, out, _ = hs(t, "-C", runs, "doctor", "--set", `model.stop=["<|imend|>"]`)
	if code != exitNotReady || !strings.Contains(out, `model.stop[0] = "<|imend|>": allowed a token`) || !strings.Contains(out, `-> model.stop = ["<|im_end|>"]`) {
		t.Errorf("exit code %d\n%s", code, out)
	}
	code, _, e := hs(t, "-C", runs, "train", "--run", "x", "--set", `model.stop=["<|imend|>"]`)
	if code != exitUsage || !strings.Contains(e, "<|imend|>") {
		t.Errorf("train: exit code %d, %s", code, e)
	}
}

// TestDoctorLeavesNothing checks that looking at the run folder does not create it.
func TestDoctorLeavesNothing(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "runs")
	if status, fact, _ := checkDisk(dir); status != "OK" {
		t.Fatalf("%s: %s", status, fact)
	}
	if _, err := os.Stat(dir); err == nil {
		t.Error("doctor created the run folder")
	}
}

func TestIndented(t *testing.T) {
	if got := indented("a\nb"); got != "a\n"+strings.Repeat(" ", 27)+"b" {
		t.Errorf("%q", got)
	}
	if got := indented(strings.Repeat("x\n", 20)); !strings.HasSuffix(got, "and 15 more; --json has all") {
		t.Errorf("%q", got)
	}
}
