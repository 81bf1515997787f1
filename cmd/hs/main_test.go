package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"harness-s/env"
	"harness-s/env/dbbench"
	"harness-s/env/harness"
	"harness-s/kernels"
	"harness-s/model"
	"harness-s/trainer"
)

// hs runs a command line in process.
func hs(t *testing.T, args ...string) (code int, out, errOut string) {
	t.Helper()
	var o, e bytes.Buffer
	code = run(args, &o, &e)
	return code, o.String(), e.String()
}

// lastJSON decodes the last line of stdout, the contract of --json.
func lastJSON(t *testing.T, out string) map[string]any {
	t.Helper()
	if n := strings.Count(out, "\n{"); n > 1 || n == 1 && out[0] == '{' {
		t.Fatalf("more than one JSON object on stdout:\n%s", out)
	}
	lines := strings.Split(strings.TrimSpace(out), "\n")
	var v map[string]any
	if err := json.Unmarshal([]byte(lines[len(lines)-1]), &v); err != nil {
		t.Fatalf("last line is not a JSON object: %v\n%s", err, out)
	}
	return v
}

func TestUsage(t *testing.T) {
	missing := filepath.Join(t.TempDir(), "none.toml")
	bad := filepath.Join(t.TempDir(), "bad.toml")
	if err := os.WriteFile(bad, []byte("[rollout]\ntemprature = 0.5\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	runs := t.TempDir()
	rows := filepath.Join(t.TempDir(), "rows.jsonl")
	if err := os.WriteFile(rows, []byte("\n{\"description\": \"x\", oops}\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name string
		args []string
		code int
		want []string // in stderr
	}{
		{"unknown command", []string{"trian"}, exitUsage, []string{"error:", "trian"}},
		{"unknown flag", []string{"train", "--stepz", "3"}, exitUsage, []string{"--stepz"}},
		{"missing config", []string{"config", "check", "-c", missing}, exitUsage, []string{"none.toml", "hint: write one with: hs init"}},
		{"misspelt key", []string{"config", "check", "-c", bad}, exitUsage, []string{"bad.toml", "temprature", "temperature"}},
		{"misspelt --set", []string{"config", "check", "--set", "optim.lrr=1e-3"}, exitUsage, []string{"optim.lrr", "optim.lr"}},
		{"value out of range", []string{"config", "check", "--set", "rollout.temperature=-1"}, exitUsage, []string{"rollout.temperature", "-1"}},
		{"unknown preset", []string{"config", "show", "--preset", "dmo"}, exitUsage, []string{"dmo", "demo"}},
		{"no run", []string{"-C", t.TempDir(), "show", "nope"}, exitUsage, []string{"nope"}},
		{"no GPU", []string{"bench", "kernels", "--device", "cuda:0"}, exitNotReady, []string{"cuda:0"}},
		{"bad bench size", []string{"bench", "decode", "--batch", "0"}, exitUsage, []string{"batch [0]"}},
		{"unknown env", []string{"env", "check", "appworld"}, exitUsage, []string{"appworld", "dbbench"}},
		{"missing rows", []string{"env", "check", "dbbench", "--data", missing}, exitUsage, []string{"none.toml", "hint: pass a JSONL file"}},
		{"broken rows", []string{"env", "check", "dbbench", "--data", rows}, exitUsage, []string{"rows.jsonl: line 2 column 22 near \"oops}\"", "hint: each line"}},
		{"dead database of gold", []string{"env", "check", "dbbench", "--count", "1", "--dsn", "root@tcp(127.0.0.1:1)/"}, exitNotReady, []string{"refused", "hint: start the database server"}},
		{"train on missing rows", []string{"-C", runs, "train", "--set", "task.data=" + missing}, exitUsage, []string{"none.toml", "hint: pass a JSONL file"}},
		{"train on a bad DSN", []string{"-C", runs, "train", "--set", "task.dsn=garbage"}, exitUsage, []string{"parse dsn", "hint: check the dsn"}},
		{"bad DSN", []string{"env", "check", "dbbench", "--count", "1", "--dsn", "garbage"}, exitUsage, []string{"parse dsn", "hint: check the dsn"}},
		{"misspelt subcommand", []string{"env", "chek"}, exitUsage, []string{"did you mean \"check\"", "hint: hs env --help"}},
		{"init into a directory", []string{"init", "-o", t.TempDir()}, exitUsage, []string{"is a directory", "hs.toml"}},
		{"init without its folder", []string{"init", "-o", filepath.Join(missing, "hs.toml")}, exitUsage, []string{"hint: mkdir -p"}},
		{"parity of nothing", []string{"doctor", "--parity", t.TempDir()}, exitFailure, []string{"config.json", "hint: a fixture is"}},
		{"routed without a run", []string{"eval", "--mode", "routed"}, exitUsage, []string{"hint: hs eval --run NAME --mode routed"}},
		{"eval of no run", []string{"-C", runs, "eval", "--run", "nope"}, exitUsage, []string{`no run "nope"`}},
		{"report nowhere", []string{"-C", runs, "eval", "--out", filepath.Join(missing, "e.json")}, exitUsage, []string{"hint: mkdir -p"}},
		{"unknown task", []string{"play", "nope"}, exitUsage, []string{`"nope"`, "hint: tasks are for instance: "}},
		{"filter at the wrong level", []string{"show", "a/1", "--failed"}, exitUsage, []string{"hs show RUN/STEP/TASK --failed"}},
		{"test split without record", []string{"eval", "--split", "test"}, exitUsage, []string{"--out"}},
		{"resume another run", []string{"-C", t.TempDir(), "train", "--run", "nope", "--resume"}, exitUsage, []string{`no run "nope"`, "hint: hs ls"}},
		{"dead database", []string{"-C", t.TempDir(), "play", "--set", "task.dsn=root@tcp(127.0.0.1:1)/"}, exitNotReady, []string{"reach database", "hint: start the server"}},
		{"resume nothing", []string{"-C", t.TempDir(), "train", "--resume"}, exitUsage, []string{"no runs"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			code, out, errOut := hs(t, append(c.args, "--json")...)
			if code != c.code {
				t.Errorf("exit code %d, want %d; stderr:\n%s", code, c.code, errOut)
			}
			if v := lastJSON(t, out); v["ok"] != false || v["exit_code"] != float64(code) || v["error"] == "" || v["hint"] == "" {
				t.Errorf("--json of a failure: %v", v)
			}
			for _, w := range c.want {
				if !strings.Contains(errOut, w) {
					t.Errorf("stderr lacks %q:\n%s", w, errOut)
				}
			}
		})
	}
}

// TestJSONOfEveryCommand checks that the last line of stdout is an object whatever the command, and that -q leaves stderr empty.
func TestJSONOfEveryCommand(t *testing.T) {
	dir := t.TempDir()
	for _, c := range []struct {
		args string
		key  string
	}{
		{"version", "version"}, {"--version", "version"}, {"ls", "runs"}, {"env ls", "environments"}, {"env check --count 2", "passed"},
		{"config show", "config"}, {"config check", "digest"}, {"config diff --preset demo", "diff"}, {"config doc", "keys"}, {"config doc --metrics", "metrics"},
		{"init --list", "presets"}, {"init -o " + filepath.Join(dir, "hs.toml"), "path"}, {"doctor", "checks"}, {"play", "spans"},
		{"eval --tasks 2", "pass1"}, {"train --dry-run", "ok"}, {"sft --unpack " + filepath.Join(dir, "tiny"), "unpacked"},
	} {
		code, out, errOut := hs(t, append(strings.Fields(c.args), "--json", "-q", "-C", dir)...)
		if code != 0 || errOut != "" {
			t.Errorf("%s: exit code %d, stderr %q", c.args, code, errOut)
			continue
		}
		if n := strings.Count(out, "\n"); n != 1 && !strings.HasPrefix(c.args, "train") {
			t.Errorf("%s: %d lines on stdout, want the object alone", c.args, n)
		}
		if v := lastJSON(t, out); v[c.key] == nil {
			t.Errorf("%s: no key %q in %.200s", c.args, c.key, out)
		}
	}
}

func TestQuietUnpack(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "tiny")
	if code, out, e := hs(t, "sft", "--unpack", dir, "-q"); code != 0 || out+e != "" {
		t.Errorf("exit code %d, %q %q", code, out, e)
	}
	if code, _, e := hs(t, "doctor", "--ckpt", dir, "-C", t.TempDir()); code != 0 {
		t.Errorf("unpacked checkpoint: exit code %d %s", code, e)
	}
}

func TestHelp(t *testing.T) {
	for _, args := range [][]string{nil, {"help"}, {"--help"}} {
		if code, out, _ := hs(t, args...); code != 0 || !strings.Contains(out, "Run one episode") {
			t.Errorf("%q: exit code %d, %.80q", args, code, out)
		}
	}
	_, want, _ := hs(t, "show", "--help")
	if code, out, _ := hs(t, "help", "show"); code != 0 || out != want {
		t.Errorf("help show: exit code %d, %.80q", code, out)
	}
}

// TestPlayOrigins checks that the printed transcript tells template, task and policy apart, and uses colour only when asked.
func TestPlayOrigins(t *testing.T) {
	_, out, _ := hs(t, "play", "-q")
	for _, k := range []string{"[system] You", "[policy] ", "[tool] "} {
		if !strings.Contains(out, k) {
			t.Errorf("no %q in\n%s", k, out)
		}
	}
	if strings.Contains(out, "\x1b[") {
		t.Error("colour off a terminal")
	}
	if _, out, _ = hs(t, "play", "-q", "--color", "always"); !strings.Contains(out, "\x1b[1;32m") {
		t.Error("no colour with --color always")
	}
}

func TestLocked(t *testing.T) {
	host, err := os.Hostname()
	must(t, err)
	for text, want := range map[string]bool{
		fmt.Sprintf(`{"pid":%d,"host":%q}`, os.Getpid(), host): true,
		fmt.Sprintf(`{"pid":%d,"host":%q}`, 1<<30, host):       false, // above every pid
		`{"pid":1,"host":"elsewhere"}`:                         true,
		"":                                                     false,
	} {
		dir := t.TempDir()
		must(t, os.WriteFile(filepath.Join(dir, "hs.lock"), []byte(text), 0o644))
		if got := locked(dir); got != want {
			t.Errorf("lock %s: %v, want %v", text, got, want)
		}
	}
	if locked(t.TempDir()) {
		t.Error("locked without a lock")
	}
}

// roomy is an environment whose server takes so many attempts.
type roomy struct {
	env.Env
	most int
	err  error
}

func (r roomy) MaxAttempts(context.Context) (int, error) { return r.most, r.err }

func TestCheckRoom(t *testing.T) {
	var cfg trainer.Config
	cfg.Rollout.Slots = 64
	for _, c := range []struct {
		e    env.Env
		live int
		want string
	}{
		{roomy{}, 0, ""}, {roomy{most: 128}, 0, ""}, {roomy{most: 127}, 0, "rollout.live=127"}, {roomy{most: 127}, 127, ""}, {roomy{most: 127}, 200, "rollout.live=127"},
		{roomy{err: env.ErrInfra}, 0, "start the database server"}, {struct{ env.Env }{}, 0, ""},
	} {
		cfg.Rollout.Live = c.live
		err := checkRoom(t.Context(), c.e, cfg)
		if (err == nil) != (c.want == "") || !strings.Contains(advice(err), c.want) {
			t.Errorf("%+v with live %d: %v, hint %q", c.e, c.live, err, advice(err))
		}
	}
}

func TestReport(t *testing.T) {
	cause := errors.New("cause")
	for _, c := range []struct {
		err  error
		code int
		want string
	}{
		{nil, exitOK, ""},
		{cause, exitFailure, "error: cause\n"},
		{&kernels.Error{Op: "a", Err: kernels.ErrNoDevice, Hint: "h"}, exitNotReady, "hint: h\n"},
		{fmt.Errorf("x: %w", &model.Error{Op: "a", Err: cause, Hint: "h"}), exitFailure, "hint: h\n"},
		{errors.Join(cause, &harness.Error{Op: "a", Err: &trainer.Error{Op: "b", Err: cause, Hint: "h"}}), exitFailure, "hint: h\n"},
		{&env.InfraError{Phase: "open", Err: &dbbench.Error{Op: "a", Err: cause, Hint: "h"}}, exitNotReady, "hint: h\n"},
		{&trainer.Error{Op: "a", Err: trainer.ErrGate, Hint: "outer"}, exitGate, "hint: outer\n"},
		{fmt.Errorf("x: %w", trainer.ErrEnvDown), exitNotReady, "environment is down\n"},
		{fmt.Errorf("x: %w", trainer.ErrLocked), exitUsage, "live process\n"},
		{&trainer.Error{Op: "train", Err: trainer.ErrInterrupted, Hint: "go on"}, exitInterrupted, "checkpoint; go on\n"},
	} {
		var b bytes.Buffer
		if code := report(&b, c.err); code != c.code || !strings.HasSuffix(b.String(), c.want) {
			t.Errorf("%v: code %d, want %d; printed %q, want %q", c.err, code, c.code, b.String(), c.want)
		}
	}
}

func TestVersionAndDocs(t *testing.T) {
	code, out, _ := hs(t, "version", "--json")
	if v := lastJSON(t, out); code != 0 || v["version"] != version || v["build"] != "cpu" {
		t.Errorf("version: code %d, %v", code, v)
	}
	code, out, _ = hs(t, "config", "doc")
	if code != 0 || !strings.Contains(out, "rescue.mode") || !strings.Contains(out, "siblings") {
		t.Errorf("config doc: code %d\n%s", code, out)
	}
	code, out, _ = hs(t, "config", "doc", "--metrics")
	if code != 0 || !strings.Contains(out, "gap/max") {
		t.Errorf("metric doc: code %d", code)
	}
	code, out, _ = hs(t, "init", "--list")
	if code != 0 || !strings.Contains(out, "demo") {
		t.Errorf("init --list: code %d %q", code, out)
	}
}

func TestInitWritesAConfigThatLoads(t *testing.T) {
	path := filepath.Join(t.TempDir(), "hs.toml")
	if code, _, e := hs(t, "init", "demo", "-o", path); code != 0 {
		t.Fatalf("init: %d %s", code, e)
	}
	if code, _, _ := hs(t, "init", "demo", "-o", path); code != exitUsage {
		t.Errorf("init replaced an existing file")
	}
	_, fromPreset, _ := hs(t, "config", "show", "--preset", "demo")
	code, fromFile, e := hs(t, "config", "show", "-c", path)
	if code != 0 || fromFile != fromPreset {
		t.Errorf("written file resolves differently: code %d %s", code, e)
	}
	code, out, _ := hs(t, "config", "show", "-c", path, "--set", "run.seed=9", "--origin")
	if code != 0 || !strings.Contains(out, "--set") {
		t.Errorf("origin: %d\n%s", code, out)
	}
}

func TestParityCommand(t *testing.T) {
	src := filepath.Join(root, "model", "testdata", "reference", "threeper")
	code, out, e := hs(t, "doctor", "--parity", src, "--json")
	if v := lastJSON(t, out); code != 0 || v["ok"] != true {
		t.Fatalf("parity: code %d %v %s", code, v, e)
	}
	// One corrupted weight must be noticed.
	dir := t.TempDir()
	for _, n := range []string{"config.json", "model.safetensors", "expect.safetensors"} {
		b, err := os.ReadFile(filepath.Join(src, n))
		if err != nil {
			t.Fatal(err)
		}
		if n == "model.safetensors" {
			b[len(b)-2] ^= 0x40 // exponent bit of the last weight
		}
		if err := os.WriteFile(filepath.Join(dir, n), b, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if code, _, _ := hs(t, "doctor", "--parity", dir); code != exitFailure {
		t.Errorf("corrupted weight: exit code %d, want %d", code, exitFailure)
	}
}

func TestBrokenCheckpoints(t *testing.T) {
	src := filepath.Join(root, "model", "testdata", "reference", "threeper")
	copyTo := func(t *testing.T, change func(dir string)) string {
		dir := t.TempDir()
		for _, n := range []string{"config.json", "model.safetensors"} {
			b, err := os.ReadFile(filepath.Join(src, n))
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(dir, n), b, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		change(dir)
		return dir
	}
	for _, c := range []struct {
		name   string
		change func(dir string)
		want   string
	}{
		{"truncated", func(dir string) { must(t, os.Truncate(filepath.Join(dir, "model.safetensors"), 5000)) }, "model.safetensors"},
		{"missing", func(dir string) { must(t, os.Remove(filepath.Join(dir, "model.safetensors"))) }, "model.safetensors"},
		{"missing shard", func(dir string) {
			must(t, os.Remove(filepath.Join(dir, "model.safetensors")))
			must(t, os.WriteFile(filepath.Join(dir, "model.safetensors.index.json"), []byte(`{"metadata":{},"weight_map":{"model.norm.weight":"model-00001-of-00002.safetensors"}}`), 0o644))
		}, "model-00001-of-00002.safetensors"},
		{"NaN", func(dir string) {
			path := filepath.Join(dir, "model.safetensors")
			b, err := os.ReadFile(path)
			must(t, err)
			copy(b[len(b)-4:], []byte{0, 0, 0xc0, 0x7f})
			must(t, os.WriteFile(path, b, 0o644))
		}, "non-finite"},
		{"no config", func(dir string) { must(t, os.Remove(filepath.Join(dir, "config.json"))) }, "config.json"},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := copyTo(t, c.change)
			code, _, e := hs(t, "bench", "decode", "--ckpt", dir, "--batch", "1", "--prompt", "2", "--new", "2", "--count", "1")
			want := exitFailure
			if c.name == "no config" { // no checkpoint at all: the flag is wrong
				want = exitUsage
			}
			if code != want || !strings.Contains(e, c.want) || !strings.Contains(e, "hint:") {
				t.Errorf("exit code %d, stderr %q: want code %d, %q and a hint", code, e, want, c.want)
			}
		})
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestBenchContracts(t *testing.T) {
	for cmd, keys := range map[string][]string{
		"decode --batch 2,1 --ctx 40,7 --steps 2 --count 1":              {"peak_gib"},
		"prefill --length 20,9 --count 1":                                {"peak_gib"},
		"train --rows 2 --length 20,8 --recompute none,layers --count 1": {"train_tokens_per_s"},
		"decode --batch 2 --prompt 20 --new 3 --count 1":                 {"generate_tokens_per_s", "prefill_tokens_per_s", "decode_tokens_per_s"},
		"train --rows 2 --length 20 --count 1":                           {"train_tokens_per_s"},
		"step --groups 2 --attempts 2 --prompt 20 --new 4 --count 1":     {"rollouts_per_s", "gap_max"},
		"kernels --count 1": {"gemm_64x128x384_gflops"},
	} {
		args := append([]string{"bench"}, strings.Fields(cmd)...)
		if args[1] != "kernels" {
			args = append(args, "--ckpt", filepath.Join(root, "model", "testdata", "reference", "edges"))
		}
		code, out, e := hs(t, append(args, "--json")...)
		if code != 0 {
			t.Errorf("%s: exit code %d: %s", cmd, code, e)
			continue
		}
		v := lastJSON(t, out)
		for _, k := range keys {
			if _, ok := v[k].(float64); !ok {
				t.Errorf("%s: no number %q in %v", cmd, k, v)
			}
		}
		benchLines(t, e)
	}
}

// benchLines checks that benchstat reads every result: a name, a count and pairs of a number and a unit.
func benchLines(t *testing.T, text string) {
	t.Helper()
	n := 0
	for line := range strings.Lines(text) {
		if !strings.HasPrefix(line, "Benchmark") {
			continue
		}
		n++
		f := strings.Fields(line)
		bad := len(f) < 4 || len(f)%2 != 0
		for i := 2; i < len(f) && !bad; i += 2 {
			v, err := strconv.ParseFloat(f[i], 64)
			bad = err != nil || !(v >= 0)
		}
		if bad {
			t.Errorf("not a benchmark line: %s", line)
		}
	}
	if n == 0 {
		t.Errorf("no benchmark lines in\n%s", text)
	}
}

// TestTrainEndToEnd trains two steps of a very small run from the shipped checkpoint and reads everything back.
func TestTrainEndToEnd(t *testing.T) {
	if _, err := model.TinyFS(); err != nil {
		t.Fatalf("the shipped checkpoint does not load: %v", err)
	}
	dir := t.TempDir()
	small := []string{"--set", "task.per_step=2", "--set", "task.val=6", "--set", "eval.tasks=4", "--set", "router.evidence_tasks=2", "--set", "save.every=1"}
	code, out, e := hs(t, append([]string{"-C", dir, "train", "--preset", "demo", "--run", "a", "--steps", "2", "--json"}, small...)...)
	if code != 0 {
		t.Fatalf("train: exit code %d: %s", code, e)
	}
	v := lastJSON(t, out)
	for _, k := range []string{"pass1_before", "pass1_after", "pass3_before", "pass3_after", "groups", "all_fail_groups", "rescued_groups", "rescue_successes", "steps", "train_seconds", "total_seconds", "peak_rss_mib"} {
		if _, ok := v[k].(float64); !ok {
			t.Errorf("summary lacks %q: %v", k, v)
		}
	}
	want, _ := v["weights_sha256"].(string)
	if !strings.Contains(out, "step 1/2") || !strings.Contains(out, "  resc ") || !strings.Contains(out, "Pass@3") {
		t.Errorf("no step line or table in\n%s", out)
	}
	// A used directory is refused with the three ways out.
	code, _, e = hs(t, append([]string{"-C", dir, "train", "--preset", "demo", "--run", "a", "--steps", "2"}, small...)...)
	if code != exitUsage || !strings.Contains(e, "--resume") || !strings.Contains(e, "--clean") {
		t.Errorf("used directory: exit code %d: %s", code, e)
	}
	// Going back to step 1 and on again gives the same weights.
	code, out, e = hs(t, "-C", dir, "train", "--run", "a", "--resume", "--from-step", "1", "--json")
	if code != 0 || lastJSON(t, out)["weights_sha256"] != want {
		t.Errorf("resume from step 1: exit code %d, weights differ: %s", code, e)
	}
	for _, c := range [][]string{{"ls"}, {"show"}, {"show", "a"}, {"show", "a/1"}, {"show", "a/1", "--rescued"}, {"show", "a/1/0"}, {"show", "a/1/0", "--failed"}, {"show", "a/1/0/0"}, {"report", "a"}} {
		code, out, e := hs(t, append([]string{"-C", dir, "--json"}, c...)...)
		if code != 0 {
			t.Errorf("%v: exit code %d %s\n%.300s", c, code, e, out)
		}
		lastJSON(t, out)
		if code, _, e := hs(t, append([]string{"-C", dir}, c...)...); code != 0 {
			t.Errorf("%v: exit code %d %s", c, code, e)
		}
	}
	for _, mode := range []string{"original", "routed"} {
		code, out, e := hs(t, "-C", dir, "eval", "--run", "a", "--mode", mode, "--tasks", "3", "--json")
		if v := lastJSON(t, out); code != 0 || v["mode"] != mode || v["tasks"] != 3.0 {
			t.Errorf("eval of a run, %s: exit code %d %v %s", mode, code, v["error"], e)
		}
	}
	for path, want := range map[string]string{"b": "runs here: a", "a/9": "run a has steps 1 to 2", "a/1x": "run a has steps 1 to 2", "a/1/9": "tasks are 0 to 1", "a/1/0/99": "attempts are 0 to "} {
		if code, _, e := hs(t, "-C", dir, "show", path); code != exitUsage || !strings.Contains(e, want) {
			t.Errorf("show %s: exit code %d, no %q in %s", path, code, want, e)
		}
	}
	html, err := os.ReadFile(filepath.Join(dir, "a", "report.html"))
	if err != nil || !bytes.Contains(html, []byte("<svg")) || !bytes.Contains(html, []byte("Pass@3")) {
		t.Errorf("report: %v", err)
	}
}

func TestEnvCheckGenerated(t *testing.T) {
	code, out, e := hs(t, "env", "check", "dbbench", "--count", "30", "--json")
	v := lastJSON(t, out)
	if code != 0 || v["rows"] != 30.0 || v["passed"] != 30.0 {
		t.Errorf("env check: exit code %d %v %s", code, v, e)
	}
}
