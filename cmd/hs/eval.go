package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"harness-s/env"
	"harness-s/model"
	"harness-s/router"
	"harness-s/trainer"
)

// evalCmd scores a checkpoint: hs eval.
type evalCmd struct {
	configFlags
	RunName  string `name:"run" help:"Score the newest checkpoint of this run under its run.toml; its evidence serves --mode routed." placeholder:"NAME"`
	Ckpt     string `type:"path" help:"Hugging Face directory; default model.path, or the newest checkpoint of --run."`
	Adapter  string `type:"path" help:"LoRA adapter, a PEFT directory; its base is --ckpt or model.path, or what the adapter names." placeholder:"DIR"`
	Split    string `help:"val or test; default eval.split."`
	K        int    `help:"k of Pass@k; default eval.k."`
	Attempts int    `help:"Attempts per task; default eval.attempts."`
	Tasks    int    `help:"Tasks, 0 = all; default eval.tasks." default:"-1"`
	Mode     string `default:"original" enum:"original,routed" help:"original: the original harness. routed: the router's first choice for each task."`
	Out      string `type:"path" help:"Write the full report as JSON; needed for --split test, whose unsealing it records."`
}

// Run evaluates.
func (c *evalCmd) Run(ctx context.Context, g *globals) error {
	if c.Split == "test" && c.Out == "" {
		return needsOut()
	}
	if c.Out != "" && !isDir(filepath.Dir(c.Out)) {
		return usage("mkdir -p "+filepath.Dir(c.Out), "--out: no directory %s", filepath.Dir(c.Out))
	}
	evidence, err := c.fromRun(g)
	if err != nil {
		return err
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
	load := func(s *session) (*model.Model, error) {
		return loadAdapted(cfg.Model.Path, c.Adapter, s.dev, toRun(cfg))
	}
	s, err := g.open(cfg, false, g.logger(), load)
	if err != nil {
		return err
	}
	defer s.close()
	if err := checkRoom(ctx, s.env, cfg); err != nil {
		return err
	}
	g.say("%s", s.describe())
	rep, err := trainer.Evaluate(ctx, cfg, s.deps, trainer.EvalOptions{
		Split: env.Split(cfg.Eval.Split), Mode: c.Mode, K: cfg.Eval.K, Attempts: cfg.Eval.Attempts, Tasks: cfg.Eval.Tasks, Temperature: cfg.Eval.Temperature,
		Resamples: cfg.Eval.Resamples, Seed: cfg.Run.Seed, Recorder: rec, Reason: "hs eval", Progress: g.progress.report, Evidence: evidence,
	})
	g.progress.clear()
	if err != nil {
		return err
	}
	g.say("%s, %s harness, %d tasks x %d attempts (95%% bootstrap interval)", rep.Split, rep.Mode, rep.Tasks, rep.Attempts)
	g.say("  Pass@1 %5.1f %%  [%.1f, %.1f]", 100*rep.Pass1.Strict.Mean, 100*rep.Pass1.Strict.Low, 100*rep.Pass1.Strict.High)
	g.say("  Pass@%d %5.1f %%  [%.1f, %.1f]", rep.K, 100*rep.PassK.Strict.Mean, 100*rep.PassK.Strict.Low, 100*rep.PassK.Strict.High)
	if rep.PassK.Missing > 0 {
		g.say("  %d attempts missing after re-runs; over complete tasks: Pass@1 %.1f %%, Pass@%d %.1f %%", rep.PassK.Missing, 100*rep.Pass1.Complete.Mean, rep.K, 100*rep.PassK.Complete.Mean)
	}
	for _, q := range rep.ByGroup {
		g.say("  %-12s %4d tasks  Pass@1 %5.1f %%  Pass@%d %5.1f %%  %s", q.Group, q.Tasks, 100*q.Pass1, rep.K, 100*q.PassK, bar(q.PassK, 20))
	}
	if g.JSON {
		if err := g.emit(rep); err != nil {
			return err
		}
	}
	if c.Out == "" { // written last: a full disk then costs the file, not the result
		return nil
	}
	b, err := json.MarshalIndent(rep, "", " ")
	if err != nil {
		return fmt.Errorf("encode report: %w", err)
	}
	return trainer.WriteAtomic(c.Out, append(b, '\n'))
}

// fromRun points configuration and checkpoint at --run, and returns the newest evidence for routed mode.
func (c *evalCmd) fromRun(g *globals) (*router.View, error) {
	if c.RunName == "" {
		if c.Mode == trainer.ModeRouted {
			return nil, usage("hs eval --run NAME --mode routed", "routed mode needs the evidence of a run")
		}
		return nil, nil
	}
	if c.Preset != "" {
		return nil, usage("leave --preset out; --set changes single keys", "--run brings its own configuration")
	}
	dir, err := g.runDir(c.RunName)
	if err != nil {
		return nil, err
	}
	c.Config = append([]string{filepath.Join(dir, "run.toml")}, c.Config...)
	if c.Ckpt == "" && c.Adapter == "" {
		if c.Ckpt = newestCheckpoint(dir); c.Ckpt == "" {
			return nil, usage("give --ckpt DIR, or let the run write its first checkpoint", "run %s has no checkpoint yet", c.RunName)
		}
	}
	if c.Mode != trainer.ModeRouted {
		return nil, nil
	}
	names, err := filepath.Glob(filepath.Join(dir, "evidence", "v*.json"))
	if err != nil {
		return nil, err
	}
	if len(names) == 0 {
		return nil, usage("train it with router.evidence_tasks above 0, or use --mode original", "run %s has no evidence", c.RunName)
	}
	slices.Sort(names)
	b, err := os.ReadFile(names[len(names)-1])
	if err != nil {
		return nil, err
	}
	return router.ParseView(b)
}

// newestCheckpoint is the model directory of the last complete checkpoint of a run, "" without one.
func newestCheckpoint(dir string) string {
	done, _ := filepath.Glob(filepath.Join(dir, "checkpoints", "step_*", "DONE"))
	if len(done) == 0 {
		return ""
	}
	slices.Sort(done)
	return filepath.Join(filepath.Dir(done[len(done)-1]), "model")
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
