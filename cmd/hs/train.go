package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"time"

	"harness-s/env"
	"harness-s/model"
	"harness-s/trainer"
)

// trainCmd is the method: hs train.
type trainCmd struct {
	configFlags
	Name     string `name:"run" help:"Name of the run; default run.name of the configuration." placeholder:"NAME"`
	Resume   bool   `help:"Go on with --run (default: the newest run) from its last checkpoint, under its own run.toml."`
	FromStep int    `help:"With --resume: go on from this checkpoint." placeholder:"N"`
	Clean    bool   `help:"Delete a run of that name first."`
	Steps    int    `help:"Override run.steps." default:"-1" placeholder:"N"`
	DryRun   bool   `help:"Resolve, check and print; train nothing."`
}

// Run trains and prints step lines, a table before/after, and with --json the summary as last line.
func (c *trainCmd) Run(ctx context.Context, g *globals) error {
	start := time.Now()
	if c.Clean && c.Resume {
		return usage("choose one of them", "--clean deletes the run that --resume would go on with")
	}
	res, err := c.configuration(g)
	if err != nil {
		return err
	}
	cfg := res.Config
	if c.DryRun {
		_, err := g.out.Write(cfg.TOML())
		return err
	}
	var dir *trainer.RunDir
	var loaded *trainer.Loaded
	if c.Resume {
		if dir, loaded, err = c.reopen(g, cfg); err != nil {
			return err
		}
	} else {
		dir, err = trainer.CreateRun(g.Root, cfg.Run.Name, cfg.TOML(), trainer.Manifest{
			Created: start, Version: version, Commit: commit, Go: runtime.Version(), ABI: abiVersion(), Seed: cfg.Run.Seed, Config: cfg.Digest(),
		}, c.Clean)
		if err != nil {
			return err
		}
	}
	defer dir.Close()
	sum, err := c.train(ctx, g, cfg, dir, loaded)
	if sum == nil { // nothing was started
		if !c.Resume {
			err = errors.Join(err, dir.Discard())
		}
		return err
	}
	if errors.Is(err, trainer.ErrInterrupted) {
		err = &trainer.Error{Op: "train", Err: err, Hint: fmt.Sprintf("go on with: hs train --run %s --resume", cfg.Run.Name)}
	}
	sum.TotalSeconds = time.Since(start).Seconds()
	sum.PeakRSSMiB = peakRSSMiB()
	c.table(g, sum)
	if rerr := writeReport(dir.Dir(), dir.Path("report.html"), sum); rerr != nil {
		err = errors.Join(err, rerr)
	} else {
		g.say("report: %s", dir.Path("report.html"))
	}
	if werr := dir.WriteJSON("summary.json", sum); werr != nil {
		err = errors.Join(err, werr)
	}
	if g.JSON && err == nil {
		return g.emit(sum)
	}
	return err
}

// configuration resolves the flags. A resumed run reads its own run.toml, on top of which only --set and --steps may change things.
func (c *trainCmd) configuration(g *globals) (*trainer.Resolved, error) {
	f := c.configFlags
	if c.Steps >= 0 {
		f.Set = append(f.Set, fmt.Sprintf("run.steps=%d", c.Steps))
	}
	if c.Resume {
		if c.Name == "" {
			name, err := newestRun(g.Root)
			if err != nil {
				return nil, err
			}
			c.Name = name
		}
		if _, err := os.Stat(filepath.Join(g.Root, c.Name, "run.toml")); err != nil {
			return nil, g.noRun(c.Name)
		}
		if f.Preset != "" || len(f.Config) > 0 {
			g.logger().Warn("a resumed run reads its own run.toml: --preset and --config are not used", "run", c.Name)
		}
		f.Preset, f.Config = "", []string{filepath.Join(g.Root, c.Name, "run.toml")}
	}
	if c.Name != "" {
		f.Set = append(f.Set, fmt.Sprintf("run.name=%q", c.Name))
	}
	return f.load(g)
}

// reopen takes over an existing run at a valid checkpoint.
func (c *trainCmd) reopen(g *globals, cfg trainer.Config) (_ *trainer.RunDir, _ *trainer.Loaded, err error) {
	dir, err := trainer.OpenRun(g.Root, cfg.Run.Name, time.Now())
	if err != nil {
		return nil, nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, dir.Close())
		}
	}()
	ck := dir.Checkpoints(cfg.Save, func(err error) { g.logger().Warn("checkpoint", "err", err) })
	if err = ck.Recover(); err != nil {
		return nil, nil, err
	}
	step := c.FromStep
	if step == 0 {
		if step, err = ck.Latest(); errors.Is(err, trainer.ErrNoCheckpoint) {
			g.say("no checkpoint was written yet: starting again from step 0 with the same configuration")
			return dir, nil, dir.BeginResume(0, time.Now())
		} else if err != nil {
			return nil, nil, err
		}
	}
	loaded, err := ck.Load(step)
	if err != nil {
		return nil, nil, err
	}
	if err = dir.BeginResume(step, time.Now()); err != nil {
		return nil, nil, err
	}
	return dir, loaded, nil
}

func (c *trainCmd) train(ctx context.Context, g *globals, cfg trainer.Config, dir *trainer.RunDir, loaded *trainer.Loaded) (_ *trainer.Summary, err error) {
	logFile, err := dir.LogFile()
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, logFile.Close()) }()
	log := slog.New(fanout{slog.NewJSONHandler(logFile, &slog.HandlerOptions{Level: slog.LevelDebug}), g.logger().Handler()})
	var load func(*session) (*model.Model, error)
	if loaded != nil {
		load = func(s *session) (*model.Model, error) { return loadModel(loaded.ModelDir, s.dev, true) }
	}
	s, err := g.open(cfg, true, log, load)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	g.say("%s", s.describe())
	info := s.env.Info()
	if err := dir.UpdateManifest(func(m *trainer.Manifest) {
		m.Device, m.Env, m.Pool, m.Data = s.dev.Info().Build, &info, s.pool.Digest(), info.DataDigest
	}); err != nil {
		return nil, err
	}
	sinks, err := c.sinks(g, dir)
	if err != nil {
		return nil, err
	}
	defer func() {
		for _, k := range sinks {
			err = errors.Join(err, k.Close())
		}
	}()
	interrupt, stop := g.interruptible(ctx)
	defer stop()
	o := trainer.RunOptions{Dir: dir, Sinks: sinks, Progress: g.progress.report, Interrupt: interrupt, Event: func(e trainer.Event) {
		if e.Event == "warning" {
			g.progress.clear()
			log.Warn(e.Text, "step", e.Step)
		}
	}}
	if loaded != nil {
		o.Resume = loaded.Step
	}
	return trainer.Run(ctx, cfg, s.deps, o)
}

func (c *trainCmd) sinks(g *globals, dir *trainer.RunDir) ([]trainer.Sink, error) {
	app, err := dir.Appender("metrics.jsonl")
	if err != nil {
		return nil, err
	}
	tb, err := trainer.TBSink(dir.Path("tb"), dir.Name(), time.Now)
	if err != nil {
		return nil, errors.Join(err, app.Close())
	}
	return []trainer.Sink{trainer.JSONLSink(app), tb, trainer.ConsoleSink(clearing{g.out, g.progress})}, nil
}

// clearing removes the progress line before each write.
type clearing struct {
	w io.Writer
	p *progress
}

func (c clearing) Write(b []byte) (int, error) {
	c.p.clear()
	return c.w.Write(b)
}

func (c *trainCmd) table(g *globals, s *trainer.Summary) {
	g.progress.clear()
	if s.Before == nil || s.After == nil {
		return
	}
	fmt.Fprintf(g.out, "\nvalidation under the original harness, %d tasks x %d attempts (95%% bootstrap interval)\n", s.After.Tasks, s.After.Attempts)
	fmt.Fprintf(g.out, "  %-8s %-24s %-24s %s\n", "", "before", "after", "change")
	row := func(name string, a, b trainer.Interval) {
		cell := func(i trainer.Interval) string {
			return fmt.Sprintf("%5.1f %%  [%.1f, %.1f]", 100*i.Mean, 100*i.Low, 100*i.High)
		}
		fmt.Fprintf(g.out, "  %-8s %-24s %-24s %+.1f points\n", name, cell(a), cell(b), 100*(b.Mean-a.Mean))
	}
	row("Pass@1", s.Before.Pass1.Strict, s.After.Pass1.Strict)
	row(fmt.Sprintf("Pass@%d", s.After.K), s.Before.PassK.Strict, s.After.PassK.Strict)
	fmt.Fprintf(g.out, "groups %d · all-fail %d · rescued %d · rescues with a success %d · %.0f s training, %.0f s in all, %.0f MiB peak\n",
		s.Groups, s.AllFailGroups, s.RescuedGroups, s.RescueSuccesses, s.TrainSeconds, s.TotalSeconds, s.PeakRSSMiB)
}

// evalCmd scores a checkpoint: hs eval.
type evalCmd struct {
	configFlags
	Ckpt     string `type:"path" help:"Hugging Face directory; default model.path."`
	Split    string `help:"val or test; default eval.split."`
	K        int    `help:"k of Pass@k; default eval.k."`
	Attempts int    `help:"Attempts per task; default eval.attempts."`
	Tasks    int    `help:"Tasks, 0 = all; default eval.tasks." default:"-1"`
	Mode     string `default:"original" enum:"original,routed" help:"original or routed."`
	Out      string `type:"path" help:"Write the full report as JSON; needed for --split test, whose unsealing it records."`
}

// Run evaluates.
func (c *evalCmd) Run(ctx context.Context, g *globals) error {
	if c.Split == "test" && c.Out == "" {
		return needsOut()
	}
	for _, s := range []struct {
		on       bool
		key, val string
	}{{c.Ckpt != "", "model.path", fmt.Sprintf("%q", c.Ckpt)}, {c.Split != "", "eval.split", fmt.Sprintf("%q", c.Split)}, {c.K > 0, "eval.k", fmt.Sprint(c.K)},
		{c.Attempts > 0, "eval.attempts", fmt.Sprint(c.Attempts)}, {c.Tasks >= 0, "eval.tasks", fmt.Sprint(c.Tasks)}} {
		if s.on {
			c.Set = append(c.Set, s.key+"="+s.val)
		}
	}
	if c.Preset == "" && len(c.Config) == 0 && c.Ckpt == "" {
		c.Preset = "demo"
	}
	res, err := c.load(g)
	if err != nil {
		return err
	}
	cfg := res.Config
	var rec env.Recorder
	if cfg.Eval.Split == "test" {
		if c.Out == "" {
			return needsOut()
		}
		rec = &sealFile{path: c.Out + ".unsealed.jsonl"}
	}
	s, err := g.open(cfg, false, g.logger(), nil)
	if err != nil {
		return err
	}
	defer s.close()
	g.say("%s", s.describe())
	rep, err := trainer.Evaluate(ctx, cfg, s.deps, trainer.EvalOptions{
		Split: env.Split(cfg.Eval.Split), Mode: c.Mode, K: cfg.Eval.K, Attempts: cfg.Eval.Attempts, Tasks: cfg.Eval.Tasks, Temperature: cfg.Eval.Temperature,
		Resamples: cfg.Eval.Resamples, Seed: cfg.Run.Seed, Recorder: rec, Reason: "hs eval", Progress: g.progress.report,
	})
	g.progress.clear()
	if err != nil {
		return err
	}
	if c.Out != "" {
		b, err := json.MarshalIndent(rep, "", " ")
		if err != nil {
			return fmt.Errorf("encode report: %w", err)
		}
		if err := trainer.WriteAtomic(c.Out, append(b, '\n')); err != nil {
			return err
		}
	}
	g.say("%s, %s harness, %d tasks x %d attempts", rep.Split, rep.Mode, rep.Tasks, rep.Attempts)
	g.say("  Pass@1 %5.1f %%  [%.1f, %.1f]", 100*rep.Pass1.Strict.Mean, 100*rep.Pass1.Strict.Low, 100*rep.Pass1.Strict.High)
	g.say("  Pass@%d %5.1f %%  [%.1f, %.1f]", rep.K, 100*rep.PassK.Strict.Mean, 100*rep.PassK.Strict.Low, 100*rep.PassK.Strict.High)
	if rep.PassK.Missing > 0 {
		g.say("  %d attempts missing after re-runs; over complete tasks: Pass@1 %.1f %%, Pass@%d %.1f %%", rep.PassK.Missing, 100*rep.Pass1.Complete.Mean, rep.K, 100*rep.PassK.Complete.Mean)
	}
	for _, q := range rep.ByGroup {
		g.say("  %-12s %4d tasks  Pass@1 %5.1f %%  Pass@%d %5.1f %%  %s", q.Group, q.Tasks, 100*q.Pass1, rep.K, 100*q.PassK, bar(q.PassK, 20))
	}
	if g.JSON {
		return g.emit(rep)
	}
	return nil
}

func needsOut() error {
	return usage("add --out FILE.json: opening the test split is recorded beside the result", "the test split needs --out")
}

// sealFile records an unsealing beside an evaluation that belongs to no run.
type sealFile struct {
	mu   sync.Mutex
	path string
}

// RecordUnseal appends and syncs one line before the split opens.
func (s *sealFile) RecordUnseal(r env.UnsealRecord) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	b, err := json.Marshal(r)
	if err != nil {
		return fmt.Errorf("record unsealing: %w", err)
	}
	f, err := os.OpenFile(s.path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return fmt.Errorf("record unsealing: %w", err)
	}
	_, werr := f.Write(append(b, '\n'))
	if err := errors.Join(werr, f.Sync(), f.Close()); err != nil {
		return fmt.Errorf("record unsealing in %s: %w", s.path, err)
	}
	return nil
}

// sftCmd is the warm start: hs sft.
type sftCmd struct {
	configFlags
	New  string `help:"tiny = fresh tokenizer and weights; default trains model.path."`
	Ckpt string `type:"path" help:"Start from this checkpoint instead of model.path."`
	Out  string `type:"path" help:"Directory of the result, Hugging Face layout."`
	Pack string `type:"path" help:"Pack this checkpoint directory for embedding instead of training." placeholder:"DIR"`
	Into string `type:"path" help:"Where --pack writes." placeholder:"DIR"`
}

// Run trains on demonstrations.
func (c *sftCmd) Run(ctx context.Context, g *globals) error {
	if c.Pack != "" {
		if c.Into == "" {
			return usage("hs sft --pack DIR --into DIR", "--pack needs --into")
		}
		return model.WriteTiny(c.Pack, c.Into)
	}
	if c.Out == "" {
		return usage("hs sft --preset tiny --new tiny --out DIR", "--out is missing")
	}
	if c.New != "" && c.New != "tiny" {
		return usage("--new tiny", "--new %q: only tiny can be made fresh", c.New)
	}
	if c.Ckpt != "" {
		c.Set = append(c.Set, fmt.Sprintf("model.path=%q", c.Ckpt))
	}
	res, err := c.load(g)
	if err != nil {
		return err
	}
	cfg := res.Config
	var load func(*session) (*model.Model, error)
	if c.New == "tiny" {
		load = func(s *session) (*model.Model, error) {
			return trainer.NewTiny(ctx, cfg, s.env, s.pool, s.dev, g.progress.report)
		}
	}
	s, err := g.open(cfg, true, g.logger(), load)
	if err != nil {
		return err
	}
	defer s.close()
	g.say("%s", s.describe())
	rep, err := trainer.RunSFT(ctx, cfg, s.deps, trainer.SFTOptions{Out: c.Out, Progress: g.progress.report, Step: func(st trainer.SFTStep) {
		if st.HeldOut > 0 || st.Step%20 == 0 || st.Step == st.Steps {
			g.progress.clear()
			line := fmt.Sprintf("sft %5d/%d  loss %.4f  |g| %.3f  lr %.2e  %d tokens  %.2fs", st.Step, st.Steps, st.Loss, st.GradNorm, st.LR, st.Tokens, st.Seconds)
			if st.HeldOut > 0 {
				line += fmt.Sprintf("  held-out %.4f", st.HeldOut)
			}
			g.say("%s", line)
		}
	}})
	g.progress.clear()
	if err != nil {
		return err
	}
	g.say("%d demonstrations, held-out loss %.4f -> %.4f, weights %s", rep.Demos, rep.HeldOutBefore, rep.HeldOut, rep.WeightsSHA256)
	g.say("checkpoint: %s", c.Out)
	if g.JSON {
		return g.emit(rep)
	}
	return nil
}

// fanout sends a record to several handlers.
type fanout []slog.Handler

// Enabled reports whether any handler wants the level.
func (f fanout) Enabled(ctx context.Context, l slog.Level) bool {
	for _, h := range f {
		if h.Enabled(ctx, l) {
			return true
		}
	}
	return false
}

// Handle passes the record on.
func (f fanout) Handle(ctx context.Context, r slog.Record) error {
	var errs []error
	for _, h := range f {
		if h.Enabled(ctx, r.Level) {
			errs = append(errs, h.Handle(ctx, r.Clone()))
		}
	}
	return errors.Join(errs...)
}

// WithAttrs and WithGroup apply to every handler.
func (f fanout) WithAttrs(as []slog.Attr) slog.Handler {
	out := make(fanout, len(f))
	for i, h := range f {
		out[i] = h.WithAttrs(as)
	}
	return out
}

// WithGroup applies to every handler.
func (f fanout) WithGroup(name string) slog.Handler {
	out := make(fanout, len(f))
	for i, h := range f {
		out[i] = h.WithGroup(name)
	}
	return out
}
