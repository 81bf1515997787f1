package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"harness-s/kernels"
	"harness-s/model"
	"harness-s/trainer"
)

// smallRun are settings of a run that the emulator gets through: one task of four attempts a step, with contrast in both of two steps.
func smallRun() (set []string) {
	for _, s := range []string{"model.dtype=float32", "run.seed=5", "task.per_step=1", "rollout.group=4", "rollout.max_turns=2", "rollout.max_new=40", "rollout.temperature=1.2",
		"rollout.slots=4", "router.evidence_tasks=0", "rescue.mode=off", "rescue.attempts=2", "rescue.min_group=2", "eval.tasks=1", "eval.attempts=1", "eval.k=1", "task.val=2",
		"rollout.episode_deadline=1h", "rollout.stall_after=1h", "save.every=1", "optim.lr=1e-3", "model.max_len=512"} {
		set = append(set, "--set", s)
	}
	return set
}

// metricsOf are the values of a run's first step that do not depend on the machine.
func metricsOf(t *testing.T, dir, run string) map[string]float64 {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(dir, run, "metrics.jsonl"))
	must(t, err)
	line, _, _ := bytes.Cut(b, []byte("\n"))
	_, values, err := trainer.ParseRecord(line)
	must(t, err)
	maps.DeleteFunc(values, func(k string, v float64) bool { return trainer.MachineDependent(k) || strings.HasPrefix(k, "eval/") })
	return values
}

// weightsOf is the hash of a checkpoint's weights.
func weightsOf(t *testing.T, path string) string {
	t.Helper()
	dev, err := kernels.Open("cpu", kernels.Options{})
	must(t, err)
	defer dev.Close()
	m, err := loadStored(path, dev, model.LoadOptions{})
	must(t, err)
	defer m.Close()
	sum, err := m.WeightsSHA256()
	must(t, err)
	return sum
}

// TestEmuTurns: a run whose sampler and executor take turns in one region has the metrics and weights of a run with both side by side, and
// those of one that went on from a checkpoint in between.
func TestEmuTurns(t *testing.T) {
	emulated(t)
	dir := t.TempDir()
	train := func(args ...string) string {
		t.Helper()
		code, out, e := hs(t, append([]string{"-C", dir, "--device", "emu", "train", "--json"}, args...)...)
		if code != 0 {
			t.Fatalf("%v: exit code %d: %s", args, code, e)
		}
		return lastJSON(t, out)["weights_sha256"].(string)
	}
	want := train(append(smallRun(), "--preset", "demo", "--run", "a", "--steps", "2")...)
	half := weightsOf(t, filepath.Join(dir, "a", "checkpoints", "step_000001", "model"))
	first := metricsOf(t, dir, "a")
	t.Logf("%g trained tokens in step 1, gap %g", first["tokens/trained"], first["gap/max"])
	if first["tokens/trained"] == 0 || first["gap/max"] != 0 || half == want {
		t.Errorf("nothing was trained (then another run.seed has contrast), or sampler and trainer differ by %g", first["gap/max"])
	}
	if got := train("--run", "a", "--resume", "--from-step", "1"); got != want {
		t.Errorf("weights %s after going on from step 1, %s without interruption", got, want)
	}
	sum := trainApart(t, dir, "b")
	if sum.WeightsSHA256 != half {
		t.Errorf("weights %s side by side, %s by turns", sum.WeightsSHA256, half)
	}
	if apart := metricsOf(t, dir, "b"); !maps.Equal(apart, first) {
		t.Errorf("metrics by turns\n%v\nside by side\n%v", first, apart)
	}
}

// trainApart is a step of the small run on the emulated device with gradients that have memory of their own.
func trainApart(t *testing.T, root, name string) *trainer.Summary {
	t.Helper()
	g := &globals{Root: root, Device: "emu", Quiet: true, out: io.Discard, errOut: io.Discard, progress: newProgress(io.Discard, true)}
	flags := configFlags{Preset: "demo", Set: []string{"run.steps=1", fmt.Sprintf("run.name=%q", name)}}
	for i, s := range smallRun() {
		if i%2 == 1 {
			flags.Set = append(flags.Set, s)
		}
	}
	res, err := flags.load(g)
	must(t, err)
	cfg := res.Config.Fixed()
	s, err := g.open(cfg, true, slog.New(slog.DiscardHandler), func(s *session) (*model.Model, error) {
		return trainer.LoadPolicy(cfg, "", func(dir string, o model.LoadOptions) (*model.Model, error) {
			if !o.Shared {
				t.Error("gradients have memory of their own on emu")
			}
			o.Shared = false
			return loadStored(dir, s.dev, o)
		})
	})
	must(t, err)
	defer s.close()
	if s.deps.Phases != nil {
		t.Error("the memory has phases")
	}
	dir, err := trainer.CreateRun(root, name, cfg.Commented(), trainer.Manifest{Created: time.Unix(1, 0)}, false)
	must(t, err)
	defer dir.Close()
	app, err := dir.Appender("metrics.jsonl")
	must(t, err)
	sink := trainer.JSONLSink(app)
	sum, err := trainer.Run(context.Background(), cfg, s.deps, trainer.RunOptions{Dir: dir, Sinks: []trainer.Sink{sink}})
	must(t, errors.Join(err, sink.Close()))
	return sum
}

// TestDoctorOnEmu: the plan of the emulated device is that of a GPU, with the workspaces of its own kernels.
func TestDoctorOnEmu(t *testing.T) {
	emulated(t)
	for _, c := range [][2]string{{"auto", "bfloat16"}, {"float32", "float32"}} {
		_, out, _ := hs(t, "-C", t.TempDir(), "--device", "emu", "doctor", "--json", "--set", "model.dtype="+c[0])
		m, ok := lastJSON(t, out)["memory"].(map[string]any)
		if !ok || m["placement"] != "gpu" || m["kernels"] != "emu" || m["dtype"] != c[1] || m["fits"] != true {
			t.Errorf("%v: %v", c, m)
		}
	}
	dir := configOnly(t, "4b")
	_, out, _ := hs(t, "doctor", "--model", dir, "--preset", "dbbench", "--gpu-gib", "139", "--set", "model.max_len=4096")
	if !strings.Contains(out, "workspaces of the kernels         of libhs_") {
		t.Errorf("no source of the workspaces in\n%s", out)
	}
	t.Setenv("HS_LIB_DIR", t.TempDir())
	t.Chdir(t.TempDir())
	_, out, _ = hs(t, "doctor", "--model", dir, "--preset", "dbbench", "--gpu-gib", "139", "--set", "model.max_len=4096")
	if !strings.Contains(out, "not counted but for an estimate of the largest: neither libhs_cuda.so (make cuda) nor libhs_emu.so (make emu) was found") || !strings.Contains(out, "logits of one wave") {
		t.Errorf("the missing libraries are not told in\n%s", out)
	}
}

// TestStartRefuses: a run that does not fit into the memory of its device is refused before anything is loaded.
func TestStartRefuses(t *testing.T) {
	emulated(t)
	g := &globals{Device: "emu"}
	res, err := configFlags{Preset: "demo", Set: []string{"model.max_len=512"}}.load(g)
	must(t, err)
	for _, c := range []struct {
		mib  int64
		want []string
	}{{16, []string{"does not fit", "too much", "MiB"}}, {1 << 12, nil}} {
		dev, err := kernels.Open("emu", kernels.Options{LibDir: os.Getenv("HS_LIB_DIR"), ArenaBytes: c.mib << 20})
		must(t, err)
		err = checkFits(res.Config, dev)
		for _, w := range c.want {
			if err == nil || !strings.Contains(err.Error(), w) {
				t.Errorf("%d MiB: %v lacks %q", c.mib, err, w)
			}
		}
		var code exitError
		if c.want == nil && err != nil || c.want != nil && (!errors.As(err, &code) || code.code != exitNotReady || !strings.Contains(hintOf(err), "--set ")) {
			t.Errorf("%d MiB: %v, hint %s", c.mib, err, hintOf(err))
		}
		must(t, dev.Close())
	}
}

// TestAuto: without the driver layer "auto" is the CPU, in float32, and doctor and run say so; a device that was named is no matter of auto.
func TestAuto(t *testing.T) {
	if name, _ := kernels.Auto(kernels.Options{}); name != "cpu" {
		t.Skip("this build finds a GPU: go test ./kernels -tags gpu -run CUDAAuto")
	}
	facts := func(args ...string) string {
		t.Helper()
		_, out, _ := hs(t, append([]string{"-C", t.TempDir(), "doctor", "--json"}, args...)...)
		return fmt.Sprint(lastJSON(t, out)["checks"])
	}
	const why = "no GPU driver layer (make gpu)"
	if f := facts(); !strings.Contains(f, "auto is cpu: this build has "+why) || !strings.Contains(f, "(auto: this build has "+why) || !strings.Contains(f, "cpu in f32") {
		t.Error(f)
	}
	if f := facts("--device", "cpu"); strings.Contains(f, "(auto: ") {
		t.Error(f)
	}
	if code, _, e := hs(t, "eval", "--device", "cuda:0"); code != exitNotReady || !strings.Contains(e, "no GPU driver layer") {
		t.Errorf("exit code %d: %s", code, e)
	}
}
