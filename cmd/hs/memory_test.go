package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"harness-s/model"
)

// configOnly is a directory with the config.json of a released size and nothing else.
func configOnly(t *testing.T, size string) string {
	t.Helper()
	text, _, err := model.Like(size, 0, "BF16")
	must(t, err)
	return filepath.Dir(write(t, "config.json", string(text)))
}

// TestDoctorPlansMemory reads the plan for a GPU as text and as JSON; exit code 3 says that it does not fit.
func TestDoctorPlansMemory(t *testing.T) {
	dir := configOnly(t, "4b")
	flags := []string{"doctor", "--model", dir, "--preset", "dbbench", "--set", "model.max_len=4096", "--set", "model.recompute=layers", "--gpu-gib"}
	code, out, e := hs(t, append(flags, "139")...)
	if code != exitOK || e != "" {
		t.Fatalf("exit code %d: %s%s", code, out, e)
	}
	for _, want := range []string{"bfloat16 on a GPU of 139.0 GiB; 4.21 billion parameters", "context 4096, 64 slots, 4096 rows per micro-batch, recompute layers",
		"weights                               7.83      7.83\n", "key-value pages                       8.00         -\n", "gradients                                -     15.67\n",
		"recurrent states                      4.51         -\n", "headroom", "(5.00 kept free)", "largest that fits               rollout.slots ", "GFLOP forward"} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
	width := 0
	for _, line := range strings.Split(out, "\n")[2:12] { // the columns line up
		if width == 0 {
			width = len(line)
		}
		if len(line) != width {
			t.Errorf("a row of %d characters, the first has %d: %q", len(line), width, line)
		}
	}
	code, out, _ = hs(t, append(flags, "139", "--json")...)
	raw := lastJSON(t, out)
	if m, ok := raw["memory"].(map[string]any); !ok || m["max_rows"].(map[string]any)["layers"] == nil || m["lines"].([]any)[0].(map[string]any)["phase"] != "resident" {
		t.Errorf("%v", raw)
	}
	if code != exitOK || raw["ok"] != true {
		t.Errorf("exit code %d, %v", code, raw)
	}
	code, out, e = hs(t, append(flags, "20.5")...)
	if code != exitNotReady || !strings.Contains(out, "shortfall") || !strings.Contains(e, "too much") || !strings.Contains(e, "hint: ") {
		t.Errorf("20.5 GiB: exit code %d\n%s%s", code, out, e)
	}
	if code, out, _ = hs(t, append(flags, "20.5", "--json")...); code != exitNotReady || lastJSON(t, out)["ok"] != false {
		t.Errorf("20.5 GiB: exit code %d\n%s", code, out)
	}
}

// TestDoctorOnCPU: without --gpu-gib the plan is this machine's, and a directory without weights is reported as such.
func TestDoctorOnCPU(t *testing.T) {
	root := filepath.Join(t.TempDir(), "runs")
	code, out, _ := hs(t, "-C", root, "doctor", "--model", configOnly(t, "9b"))
	if code != exitNotReady || !strings.Contains(out, "float32 on this machine's CPU") || !strings.Contains(out, "side by side") || !strings.Contains(out, "model.safetensors") {
		t.Errorf("exit code %d\n%s", code, out)
	}
	code, out, _ = hs(t, "-C", root, "doctor", "--json")
	m, ok := lastJSON(t, out)["memory"].(map[string]any)
	if code != exitOK || !ok || m["placement"] != "cpu" || m["fits"] != true {
		t.Errorf("exit code %d, %v", code, m)
	}
}

// TestInitSizes writes a configuration for a GPU, reads it back and plans it again: the file holds the numbers of the plan.
func TestInitSizes(t *testing.T) {
	dir, file := configOnly(t, "4b"), filepath.Join(t.TempDir(), "hs.toml")
	code, out, e := hs(t, "init", "--model", dir, "--gpu-gib", "139", "--set", "model.max_len=4096", "-o", file, "--json")
	if code != exitOK || e != "" {
		t.Fatalf("exit code %d: %s%s", code, out, e)
	}
	plan := lastJSON(t, out)["memory"].(map[string]any)
	text, err := os.ReadFile(file)
	must(t, err)
	for _, want := range []string{"# memory in GiB, bfloat16 on a GPU of 139.0 GiB", "\nslots = 256\n", fmt.Sprintf("\nmicro_rows = %v\n", plan["micro_rows"]),
		"\nmax_len = 4096\n", "\nper_step = 32\n", "# sequences decoded together [1 .. 65536]\n", dir} {
		if !strings.Contains(string(text), want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
	code, out, e = hs(t, "doctor", "-c", file, "--gpu-gib", "139", "--json")
	again, ok := lastJSON(t, out)["memory"].(map[string]any)
	if code != exitOK || !ok || fmt.Sprint(again) != fmt.Sprint(plan) {
		t.Errorf("exit code %d, %s; the file's plan\n%v\nthe printed one\n%v", code, e, again, plan)
	}
	if code, _, e = hs(t, "init", "--model", dir, "--gpu-gib", "139", "-o", file); code != exitUsage || !strings.Contains(e, "--force") {
		t.Errorf("replaced a file: exit code %d, %s", code, e)
	}
}

// TestInitRefuses: what does not fit, and what was mistyped, leaves no file.
func TestInitRefuses(t *testing.T) {
	file := filepath.Join(t.TempDir(), "hs.toml")
	big := configOnly(t, "9b")
	for _, c := range []struct {
		name string
		args []string
		code int
		want []string
	}{
		{"too small", []string{"init", "--model", big, "--gpu-gib", "16", "-o", file}, exitNotReady,
			[]string{"8.95 billion parameters at a context of 32768 tokens", "16.0 GiB of which 5.0 GiB stay free", "needs", "GiB too much", "hint: "}},
		{"tiny", []string{"init", "--model", big, "--gpu-gib", "1", "-o", file}, exitNotReady, []string{"too much", "hint: "}},
		{"zero", []string{"init", "--gpu-gib", "0", "-o", file}, exitUsage, []string{`--gpu-gib is "0", want a number above 0`, "hint: --gpu-gib 139"}},
		{"negative", []string{"init", "--gpu-gib=-80", "-o", file}, exitUsage, []string{`--gpu-gib is "-80"`}},
		{"not a number", []string{"init", "--gpu-gib", "NaN", "-o", file}, exitUsage, []string{`--gpu-gib is "NaN"`}},
		{"infinite", []string{"init", "--gpu-gib", "inf", "-o", file}, exitUsage, []string{`--gpu-gib is "inf"`}},
		{"unit", []string{"doctor", "--gpu-gib", "80GB"}, exitUsage, []string{`--gpu-gib is "80GB"`, "without a unit"}},
		{"doctor of nothing", []string{"doctor", "--model", file + "x", "--gpu-gib", "80"}, exitUsage, []string{"config.json", "hint: give the directory"}},
		{"init of nothing", []string{"init", "--model", file + "x", "-o", file}, exitUsage, []string{"config.json", "hint: give the directory"}},
		{"not a model", []string{"init", "--model", filepath.Dir(write(t, "config.json", `{"model_type": "llama"}`)), "-o", file}, exitUsage, []string{"llama", "hint: only dense"}},
		{"bad key", []string{"init", "--set", "model.maxlen=4", "-o", file}, exitUsage, []string{"model.max_len"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			code, out, e := hs(t, append(c.args, "--json")...)
			if v := lastJSON(t, out); code != c.code || v["ok"] != false || v["hint"] == "" {
				t.Errorf("exit code %d, want %d; %v", code, c.code, v)
			}
			for _, w := range c.want {
				if !strings.Contains(e, w) {
					t.Errorf("stderr lacks %q:\n%s", w, e)
				}
			}
			if _, err := os.Stat(file); err == nil {
				t.Fatal("a file was written")
			}
		})
	}
}
