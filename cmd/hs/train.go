package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"syscall"
	"time"

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
	if c.FromStep != 0 && !c.Resume {
		return usage(fmt.Sprintf("hs train --run NAME --resume --from-step %d", c.FromStep), "--from-step needs --resume")
	}
	signal.Ignore(syscall.SIGPIPE) // a pager or tee that ends costs lines, not the run
	res, err := c.configuration(g)
	if err != nil {
		return err
	}
	cfg := res.Config
	c.Name = cfg.Run.Name
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
	err = c.stopped(g, dir, cfg, sum, err)
	sum.TotalSeconds = time.Since(start).Seconds()
	sum.PeakRSSMiB = peakRSSMiB()
	c.table(g, sum)
	if oerr := dir.Owned(); oerr != nil {
		return cmp.Or(err, oerr)
	}
	werr := dir.WriteJSON("summary.json", sum)
	rerr := writeReport(dir.Dir(), dir.Path("report.html"), sum)
	if rerr == nil {
		g.say("report: %s", dir.Path("report.html"))
	}
	switch werr = errors.Join(werr, rerr); {
	case err != nil && werr != nil: // err decides the exit code and what to do
		g.logger().Warn("report", "err", werr)
	case werr != nil:
		err = &trainer.Error{Op: "report", Err: werr, Hint: fmt.Sprintf("the training itself is done and saved; write the report again with: %s", c.again(g))}
	}
	if g.JSON && err == nil {
		return g.emit(sum)
	}
	return err
}

// stopped adds to the error of a run what is saved and what goes on with it.
func (c *trainCmd) stopped(g *globals, dir *trainer.RunDir, cfg trainer.Config, sum *trainer.Summary, err error) error {
	if err == nil {
		return nil
	}
	saved := 0
	if steps, lerr := dir.Checkpoints(cfg.Save, nil).List(); lerr == nil && len(steps) > 0 {
		saved = steps[len(steps)-1]
	}
	next := c.again(g)
	interrupted := errors.Is(err, trainer.ErrInterrupted)
	if interrupted && saved > 0 && saved == sum.Steps {
		return &trainer.Error{Op: "train", Err: err, Hint: "go on with: " + next}
	}
	g.progress.clear()
	what := "nothing is saved yet, start again with: "
	if dir.Owned() != nil {
		return err
	}
	if saved > 0 {
		what = fmt.Sprintf("saved up to step %d, go on with: ", saved)
	}
	fmt.Fprintln(g.errOut, what+next)
	if interrupted {
		return exitError{code: exitInterrupted, silent: true, err: &trainer.Error{Op: "train", Err: err, Hint: what + next}}
	}
	return err
}

// again is the command that goes on with the run.
func (c *trainCmd) again(g *globals) string {
	s := "hs train --run " + c.Name + " --resume"
	if root, err := filepath.Abs("runs"); err != nil || g.Root != root {
		s += " -C " + g.Root
	}
	return s
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
	res, err := f.load(g)
	if err == nil {
		res.Config = res.Config.Fixed()
	}
	return res, err
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
	warn := func(err error) { g.logger().Warn("resume", "err", err) }
	ck := dir.Checkpoints(cfg.Save, warn)
	if err = ck.Recover(); err != nil {
		return nil, nil, err
	}
	step := c.FromStep
	if step == 0 {
		if step, err = ck.Latest(); errors.Is(err, trainer.ErrNoCheckpoint) {
			g.say("no checkpoint was written yet: starting again from step 0 with the same configuration")
			return dir, nil, nil
		} else if err != nil {
			return nil, nil, err
		}
	}
	loaded, err := ck.Load(step)
	if err != nil {
		if steps, lerr := ck.List(); lerr == nil && !slices.Contains(steps, step) {
			err = usage(fmt.Sprintf("checkpoints of this run: %v", steps), "--from-step %d: there is no such checkpoint", step)
		}
		return nil, nil, err
	}
	g.say("going on after step %d", step)
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
		load = func(s *session) (*model.Model, error) { return s.policy(loaded.ModelDir) }
	}
	s, err := g.open(cfg, true, log, load)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	g.say("%s", s.describe())
	if text := cfg.LoRA.Caution(cfg.Optim.LR); text != "" {
		log.Warn(text)
	}
	if c.Resume { // the last moment before anything of the run is changed
		step := 0
		if loaded != nil {
			step = loaded.Step
			if err := trainer.CheckResume(cfg, s.deps, loaded); err != nil {
				return nil, err
			}
		}
		if err := dir.BeginResume(step, time.Now(), func(err error) { log.Warn("resume", "err", err) }); err != nil {
			return nil, err
		}
	}
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
	interrupt, stop = orHangup(interrupt)
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

// orHangup returns a channel that closes when stop does, or when the terminal goes away, unless the process was started to outlive it (nohup).
func orHangup(stop <-chan struct{}) (<-chan struct{}, func()) {
	if signal.Ignored(syscall.SIGHUP) {
		return stop, func() {}
	}
	sig, closed, quit := make(chan os.Signal, 1), make(chan struct{}), make(chan struct{})
	signal.Notify(sig, syscall.SIGHUP)
	go func() {
		select {
		case <-sig:
		case <-stop:
		case <-quit:
			return
		}
		close(closed)
	}()
	return closed, func() { signal.Stop(sig); close(quit) }
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
	all := "in all"
	if c.Resume {
		all = "since it was resumed"
	}
	fmt.Fprintf(g.out, "groups %d · all-fail %d · rescued %d · rescues with a success %d · %.0f s training, %.0f s %s, %.0f MiB peak\n",
		s.Groups, s.AllFailGroups, s.RescuedGroups, s.RescueSuccesses, s.TrainSeconds, s.TotalSeconds, all, s.PeakRSSMiB)
}
