package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"harness-s/env"
	"harness-s/env/dbbench"
	"harness-s/kernels"
	"harness-s/model"
	"harness-s/model/chat"
	"harness-s/trainer"
)

// doctorCmd says what is wrong and what to type: hs doctor.
type doctorCmd struct {
	configFlags
	Parity string `type:"path" help:"Run the parity fixture in DIR and check its bounds; nothing else is checked." placeholder:"DIR"`
	Deep   bool   `help:"Also check the matrix-product rate, the planner against TapeMachine, the SHA-256 of every file of the checkpoint and the sampler against the trainer."`
	Gold   int    `help:"Replay this many gold solutions of the environment." placeholder:"N"`
	Ckpt   string `type:"path" aliases:"model" help:"Checkpoint to check instead of model.path, also as --model." placeholder:"DIR"`
	GPUGib string `name:"gpu-gib" help:"Plan the memory on a GPU with N GiB for the configuration; config.json of the checkpoint is enough, and nothing else is checked." placeholder:"N"`
}

// finding is the result of one check.
type finding struct {
	ID     string `json:"id"`
	Name   string `json:"name"`
	Status string `json:"status"` // OK, WARN, FAIL, SKIP
	Fact   string `json:"fact"`
	Hint   string `json:"hint,omitempty"`
}

// Run prints a table; exit code 0 without FAIL, 1 with a missed parity bound, 3 when something needed is not ready.
func (c *doctorCmd) Run(ctx context.Context, g *globals) error {
	if c.Parity != "" {
		return c.parity(g)
	}
	if c.Ckpt != "" {
		c.Set = append(c.Set, fmt.Sprintf("model.path=%q", c.Ckpt))
	}
	if c.Preset == "" && len(c.Config) == 0 {
		c.Preset = "demo"
	}
	var found []finding
	add := func(id, name string, check func() (string, string, string)) {
		g.progress.report(trainer.Progress{Phase: "doctor", Note: name})
		status, fact, hint := check()
		if hint == "" && (status == "FAIL" || status == "WARN") {
			hint = "hs doctor --json > doctor.json and add it to a bug report"
		}
		found = append(found, finding{id, name, status, fact, hint})
	}
	res, err := c.load(g)
	if err != nil {
		return err
	}
	cfg := res.Config
	if c.GPUGib != "" {
		return c.plan(g, cfg)
	}
	var memory *trainer.MemoryPlan
	var turns *turnFacts
	add("D01", "machine", checkMachine)
	add("D02", "GPU", func() (string, string, string) { return checkGPU(g) })
	dev, derr := g.device(cfg.Model.Device, cfg.Run.Threads, cfg.Model.Gemm)
	add("D04", "kernels", func() (string, string, string) {
		if derr != nil {
			return "FAIL", derr.Error(), hintOf(derr)
		}
		if !dev.Stores(cfg.DType()) {
			return "FAIL", fmt.Sprintf("%s does not compute in %v, which model.dtype = %q asks for", dev.Info().Name, cfg.DType(), cfg.Model.DType), "--device emu or cuda:N, or --set model.dtype=auto"
		}
		return "OK", fmt.Sprintf("%s in %v, ABI %d, %s, %d threads%s", dev.Info().Name, cfg.DType(), abiVersion(), dev.Info().Build, dev.Info().Threads, g.autoNote()), ""
	})
	if derr == nil {
		defer dev.Close()
		if c.Deep {
			add("D05", "matrix product", func() (string, string, string) { return checkGemm(dev) })
			add("D06", "gradients", func() (string, string, string) { return checkTape(dev) })
		}
		add("D07", "memory", func() (status, fact, hint string) {
			memory, status, fact, hint = checkPlan(cfg, dev)
			return status, fact, hint
		})
		add("D08", "checkpoint", func() (status, fact, hint string) {
			turns, status, fact, hint = checkModel(cfg, dev)
			return status, fact, hint
		})
		if c.Deep {
			add("D15", "checksums", func() (string, string, string) { return checkSums(cfg.Model.Path) })
		}
		if c.Deep {
			add("D09", "sampler", func() (string, string, string) { return checkGap(ctx, cfg, dev) })
		}
	}
	add("D10", "environment", func() (string, string, string) { return c.checkEnv(ctx, cfg) })
	add("D12", "run folder", func() (string, string, string) { return checkDisk(g.Root) })
	add("D13", "harness pool", func() (string, string, string) {
		p, err := openPool(cfg)
		if err != nil {
			return "FAIL", err.Error(), advice(err)
		}
		return "OK", fmt.Sprintf("original %s and %d auxiliaries, digest %.12s", p.Original().Name, len(p.Auxiliaries()), p.Digest()), ""
	})
	add("D14", "variables", checkVars)
	g.progress.clear()
	worst := 0
	for _, f := range found {
		if f.Status == "FAIL" {
			worst = exitNotReady
		}
		if !g.JSON {
			fmt.Fprintf(g.out, "%-4s %-15s %-5s %s\n", f.ID, f.Name, f.Status, indented(f.Fact))
			if f.Hint != "" {
				fmt.Fprintf(g.out, "%26s-> %s\n", "", f.Hint)
			}
		}
	}
	if g.JSON {
		if err := g.emit(map[string]any{"version": fullVersion(), "ok": worst == 0, "checks": found, "memory": memory, "turns": turns}); err != nil {
			return err
		}
	} else {
		if memory != nil && c.Ckpt != "" {
			fmt.Fprintln(g.out)
			printMemory(g.out, memory)
		}
		fmt.Fprintf(g.out, "\nfor a bug report: hs %s, %s, %s/%s, config %.12s\n", fullVersion(), runtime.Version(), runtime.GOOS, runtime.GOARCH, cfg.Digest())
	}
	if worst != 0 {
		return exitError{code: worst, silent: true}
	}
	return nil
}

// indented lines the rest of a fact of several lines up with its first one, and cuts a long one.
func indented(fact string) string {
	const most = 6
	lines := strings.Split(fact, "\n")
	if n := len(lines) - most; n > 0 {
		lines = append(lines[:most], fmt.Sprintf("and %d more; --json has all", n))
	}
	return strings.Join(lines, "\n"+strings.Repeat(" ", 27))
}

// parityFiles are what a fixture consists of.
var parityFiles = [...]string{"config.json", "model.safetensors", "expect.safetensors"}

func (c *doctorCmd) parity(g *globals) error {
	for _, name := range parityFiles {
		if _, err := os.Stat(filepath.Join(c.Parity, name)); err != nil {
			return &trainer.Error{Op: "read parity fixture", Err: err, Hint: "a fixture is a directory with " + strings.Join(parityFiles[:], ", ") +
				"; the repository has some in model/testdata/reference, and make reference remakes them"}
		}
	}
	dev, err := g.openDevice()
	if err != nil {
		return err
	}
	defer dev.Close()
	rep, err := model.RunParity(c.Parity, dev)
	if err != nil {
		return err
	}
	if !g.JSON {
		row := func(name string, v, bound float64, note string) {
			mark := "OK"
			if !(v <= bound) {
				mark = "FAIL"
			}
			fmt.Fprintf(g.out, "%-20s %-5s %.3g (bound %.3g) %s\n", name, mark, v, bound, note)
		}
		row("logits_max_abs", rep.LogitsMaxAbs, rep.LogitsBound, "")
		row("loss_abs", rep.LossAbs, rep.LogitsBound, "")
		row("grad_max_rel", rep.GradMaxRel, rep.GradBound, rep.GradWorst)
		row("ragged_max_abs", rep.RaggedMaxAbs, rep.RaggedBound, "packed")
		row("decode_max_abs", rep.DecodeMaxAbs, rep.LogitsBound, "prefill + decode against full forward")
		row("tape_grad_max_rel", rep.TapeGradMaxRel, rep.GradBound, rep.TapeWorst)
		if rep.GreedyEqual {
			fmt.Fprintln(g.out, "greedy               OK    identical")
		} else {
			fmt.Fprintf(g.out, "greedy               FAIL  first other token at %d\n", rep.GreedyDiffAt)
		}
	} else if err := g.emit(rep); err != nil {
		return err
	}
	if !rep.OK {
		fmt.Fprintln(g.errOut, "error: parity missed:", strings.Join(rep.Failures, "; "))
		fmt.Fprintln(g.errOut, "hint: if the shipped fixtures pass (hs doctor --parity model/testdata/reference/edges), this fixture's weights or expectations are damaged: make it again")
		return exitError{code: exitFailure, silent: true}
	}
	return nil
}

func checkMachine() (string, string, string) {
	var lim unix.Rlimit
	nofile := "unknown"
	status, hint := "OK", ""
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &lim); err == nil {
		nofile = strconv.FormatUint(lim.Cur, 10)
		if lim.Cur < 1024 {
			status, hint = "WARN", "ulimit -n 4096"
		}
	}
	return status, fmt.Sprintf("%s/%s, %d cores, %s memory, %s open files", runtime.GOOS, runtime.GOARCH, runtime.NumCPU(), memTotal(), nofile), hint
}

func memTotal() string {
	n := ramBytes()
	if n == 0 {
		return "unknown"
	}
	return fmt.Sprintf("%.1f GiB", float64(n)/(1<<30))
}

// checkGPU says what the first GPU is, or why it cannot be used, and what the device "auto" is on this machine.
func checkGPU(g *globals) (status, fact, hint string) {
	name, why := g.auto()
	auto := fmt.Sprintf("; auto is %s: %s", name, why)
	found, _ := filepath.Glob("/dev/nvidia[0-9]*")
	if !kernels.GPUBuild {
		if len(found) == 0 {
			return "SKIP", "no /dev/nvidia*" + auto, ""
		}
		return "WARN", fmt.Sprintf("%d GPU device file(s) found%s", len(found), auto), "make gpu cuda"
	}
	dev, err := g.device("cuda:0", 0, "own")
	if err == nil {
		i := dev.Info()
		if err = dev.Close(); err == nil {
			return "OK", fmt.Sprintf("cuda:0: %s, %s%s", i.Build, gib(i.MemTotal), auto), ""
		}
	}
	if len(found) == 0 && errors.Is(err, kernels.ErrNoDevice) {
		return "SKIP", err.Error() + auto, ""
	}
	return "FAIL", err.Error(), advice(err)
}

func checkGemm(dev *kernels.Device) (string, string, string) {
	var parts []string
	for _, s := range [][3]int64{{8192, 128, 384}, {1024, 1024, 1024}} {
		rate, err := gemmRate(dev, s[0], s[1], s[2], 10)
		if err != nil {
			return "FAIL", err.Error(), advice(err)
		}
		parts = append(parts, fmt.Sprintf("%dx%dx%d %.0f GFLOP/s", s[0], s[1], s[2], rate))
	}
	return "OK", strings.Join(parts, ", "), ""
}

// checkPlan plans the configured training on this machine's device; nothing is allocated.
func checkPlan(cfg trainer.Config, dev *kernels.Device) (p *trainer.MemoryPlan, status, fact, hint string) {
	ram := ramBytes()
	p, err := planMemory(cfg, dev, trainer.DeviceBudget(cfg, dev.Info(), ram))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, "SKIP", "no plan without a config.json, see D08", ""
	}
	if err != nil {
		return nil, "FAIL", err.Error(), advice(err)
	}
	const mib = 1 << 20
	together := "together"
	if p.Placement == model.OnGPU.String() {
		together = "by turns"
	}
	fact = fmt.Sprintf("sampling %.1f MiB, an update of %d rows %.1f MiB, %s %.1f MiB; rollout.slots up to %d and model.micro_rows up to %d fit",
		float64(p.Rollout)/mib, p.MicroRows, float64(p.Train)/mib, together, float64(p.Peak)/mib, p.MaxSlots, p.MaxRows.None)
	switch {
	case p.Budget == 0:
		return p, "WARN", fact + "; this machine does not tell its memory", "compare with the memory you have"
	case !p.Fits:
		return p, "FAIL", fact + ": more than this machine's memory", p.Hint()
	}
	return p, "OK", fact, ""
}

// turnFacts say how a turn begins, is sampled and ends; the JSON keys are stable.
type turnFacts struct {
	Stop     []trainer.StopToken      `json:"stop"`
	Template chat.Family              `json:"template"`
	Thinking bool                     `json:"thinking"`
	Generate trainer.SamplingDefaults `json:"generate"` // hs generate
	Rollout  trainer.SamplingDefaults `json:"rollout"`
	Eval     trainer.SamplingDefaults `json:"eval"`
}

func checkModel(cfg trainer.Config, dev *kernels.Device) (turns *turnFacts, status, fact, hint string) {
	m, err := loadStored(cfg.Model.Path, dev, toRun(cfg))
	if err != nil {
		return nil, "FAIL", err.Error(), advice(err)
	}
	defer m.Close()
	sum, err := m.WeightsSHA256()
	if err != nil {
		return nil, "FAIL", err.Error(), advice(err)
	}
	name := cfg.Model.Path
	if name == "" {
		name = "shipped tiny checkpoint"
	}
	if m.Tok == nil {
		return nil, "WARN", fmt.Sprintf("%s: %d parameters, no tokenizer.json", name, m.Config.NumParams()), "copy tokenizer.json next to config.json"
	}
	if turns, err = turnsOf(cfg, m); err != nil {
		return nil, "FAIL", err.Error(), advice(err)
	}
	return turns, "OK", fmt.Sprintf("%s: %d parameters, vocabulary %d, weights %.12s\n%s", name, m.Config.NumParams(), m.Tok.VocabSize(), sum, turns), ""
}

func turnsOf(cfg trainer.Config, m *model.Model) (*turnFacts, error) {
	r, err := trainer.RendererOf(m, cfg.Model.Thinking)
	if err != nil {
		return nil, err
	}
	t := &turnFacts{Template: r.Family(), Thinking: r.Thinks(chat.Options{})}
	if t.Stop, err = trainer.StopSet(m, cfg.Model.Stop); err != nil {
		return nil, err
	}
	if t.Generate, err = trainer.SamplingOf(m, r); err != nil {
		return nil, err
	}
	t.Rollout = trainer.SamplingDefaults{Temperature: cfg.Rollout.Temperature, TopP: cfg.Rollout.TopP, TopK: cfg.Rollout.TopK, From: "rollout"}
	t.Eval = trainer.SamplingDefaults{Temperature: cfg.Eval.Temperature, TopP: 1, From: "eval"}
	return t, nil
}

// String is the facts in four lines.
func (t *turnFacts) String() string {
	var stop []string
	for _, s := range t.Stop {
		stop = append(stop, fmt.Sprintf("%s %d (%s)", cmp.Or(s.Token, "token"), s.ID, s.From))
	}
	thinking := "off"
	if t.Thinking {
		thinking = "on"
	}
	return fmt.Sprintf("stop: %s\ntemplate: %s, thinking %s\nhs generate: %s\nrollout: temperature %g, top_p %g, top_k %d; evaluation: temperature %g",
		strings.Join(stop, ", "), t.Template, thinking, samplingText(t.Generate), t.Rollout.Temperature, t.Rollout.TopP, t.Rollout.TopK, t.Eval.Temperature)
}

func (c *doctorCmd) checkEnv(ctx context.Context, cfg trainer.Config) (string, string, string) {
	e, err := openEnv(cfg)
	if err != nil {
		return "FAIL", err.Error(), advice(err)
	}
	defer e.Close()
	start := time.Now()
	if err := e.Health(ctx); err != nil {
		return "FAIL", err.Error(), advice(err)
	}
	if err := checkRoom(ctx, e, cfg); err != nil {
		return "FAIL", err.Error(), advice(err)
	}
	tasks, err := e.Tasks(ctx, env.Val)
	if err != nil || len(tasks) == 0 {
		return "FAIL", fmt.Sprintf("validation split: %d tasks, %v", len(tasks), err), "raise task.val, or give more rows with task.data"
	}
	a, err := e.Open(ctx, tasks[0], env.OpenOptions{AttemptID: "doctor"})
	if err != nil {
		return "FAIL", err.Error(), advice(err)
	}
	v, gerr := a.Grade(ctx)
	if err := errors.Join(gerr, a.Close(ctx)); err != nil {
		return "FAIL", err.Error(), advice(err)
	}
	i := e.Info()
	fact := fmt.Sprintf("%s, %s back-end: open and grade in %.1f ms, doing nothing is graded %s", i.Label, i.Backend, time.Since(start).Seconds()*1000, v.Outcome)
	if v.Success {
		return "FAIL", fact + ": the grader accepts an empty episode", "hs env check dbbench"
	}
	if c.Gold > 0 {
		rep, err := goldOf(ctx, cfg, c.Gold, nil)
		if err != nil {
			return "FAIL", err.Error(), advice(err)
		}
		fact += fmt.Sprintf("; gold %d of %d", rep.Passed, rep.Rows)
		if rep.Passed < rep.Rows {
			return "WARN", fact, "hs env check dbbench lists the rows"
		}
	}
	return "OK", fact, ""
}

// goldOf replays the gold of the first n rows of the configured data, or of generated tasks.
func goldOf(ctx context.Context, cfg trainer.Config, n int, progress func(done, total int)) (dbbench.GoldReport, error) {
	var rows []dbbench.NamedRow
	var err error
	if cfg.Task.Data != "" {
		rows, err = dbbench.ReadRows(cfg.Task.Data)
	} else {
		rows, err = dbbench.TinyRows(cfg.Task.Seed, env.Val, max(n, 1))
	}
	if err != nil {
		return dbbench.GoldReport{}, err
	}
	if n > 0 && n < len(rows) {
		rows = rows[:n]
	}
	return dbbench.GoldReplay(ctx, rows, dbbench.Options{DSN: cfg.Task.DSN, StepTimeout: cfg.Rollout.StepTimeout.D()}, progress)
}

func checkDisk(root string) (string, string, string) {
	if _, err := os.Stat(root); errors.Is(err, fs.ErrNotExist) {
		defer os.Remove(root) // the check leaves nothing behind
	}
	if err := os.MkdirAll(root, 0o755); err != nil {
		return "FAIL", err.Error(), "choose another folder with -C"
	}
	probe := filepath.Join(root, ".doctor")
	start := time.Now()
	if err := trainer.WriteAtomic(probe, []byte("ok")); err != nil {
		return "FAIL", err.Error(), "choose another folder with -C"
	}
	took := time.Since(start)
	if err := os.Remove(probe); err != nil {
		return "FAIL", err.Error(), ""
	}
	free, err := trainer.FreeBytes(root)
	if err != nil {
		return "WARN", err.Error(), ""
	}
	fact := fmt.Sprintf("%s writable, fsync %.1f ms, %.1f GiB free", root, took.Seconds()*1000, float64(free)/(1<<30))
	if free < 256<<20 {
		return "FAIL", fact, "free some space or choose another disk with -C"
	}
	return "OK", fact, ""
}

// checkVars lists the variables this program reads.
func checkVars() (string, string, string) {
	var set []string
	for _, kv := range os.Environ() {
		if strings.HasPrefix(kv, "HS_") || strings.HasPrefix(kv, "CUDA_") {
			set = append(set, strings.SplitN(kv, "=", 2)[0])
		}
	}
	slices.Sort(set)
	if len(set) == 0 {
		return "OK", "none of HS_*, CUDA_* set", ""
	}
	return "OK", strings.Join(set, " "), ""
}

// peakRSSMiB is the highest resident size of this process so far.
func peakRSSMiB() float64 {
	var u unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return float64(u.Maxrss) / 1024
}
