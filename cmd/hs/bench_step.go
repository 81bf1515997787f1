package main

import (
	"context"
	"fmt"

	"harness-s/model"
	"harness-s/trainer"
)

// benchStep is the GRPO step of gpu.md 3.6 through the real scheduler, sampler and executor, on random prompts.
type benchStep struct {
	benchFlags
	Groups    int    `default:"0" help:"Groups of a step; default 8, or 64 on a GPU." placeholder:"N"`
	Attempts  int    `default:"8" help:"Attempts of a group."`
	Prompt    int    `default:"0" help:"Prompt tokens, shared by a group; default 256, or 512 on a GPU." placeholder:"N"`
	New       int    `default:"0" help:"Tokens to sample per attempt; default 128, or 2048 on a GPU." placeholder:"N"`
	Slots     int    `default:"0" help:"Sequences decoded together; default all, at most 256." placeholder:"N"`
	Micro     int    `default:"0" help:"Rows of a micro-batch; default that of a configuration." placeholder:"N"`
	Recompute string `default:"none" enum:"none,layers" help:"none, or layers."`
}

func (c *benchStep) Run(ctx context.Context, g *globals) error {
	if c.Groups < 0 || c.Attempts < 2 || c.Prompt < 0 || c.Prompt == 1 || c.New < 0 || c.Slots < 0 || c.Micro < 0 {
		return usage("e.g. --groups 8 --attempts 8 --prompt 256 --new 128", "groups %d, attempts %d, prompt %d, new %d, slots %d, micro %d: want groups >= 1, attempts >= 2, prompt >= 2, new >= 1", c.Groups, c.Attempts, c.Prompt, c.New, c.Slots, c.Micro)
	}
	cfg := trainer.Defaults()
	cfg.Model.Device, cfg.Model.DType = g.deviceName(g.Device), c.DType
	b, err := openBenchShared(ctx, g, c.benchFlags, true, cfg.Placement() == model.OnGPU)
	if err != nil {
		return err
	}
	defer b.close()
	set := func(p *int, cpu, gpu int) {
		if *p == 0 {
			if *p = cpu; b.gpu() {
				*p = gpu
			}
		}
	}
	set(&c.Groups, 8, 64)
	set(&c.Prompt, 256, 512)
	set(&c.New, 128, 2048)
	set(&c.Slots, min(256, c.Groups*c.Attempts), min(256, c.Groups*c.Attempts))
	cfg.Rollout.Slots = c.Slots
	cfg.Model.MaxLen = c.Prompt + c.New + 16
	cfg.Model.MicroRows, cfg.Model.Recompute = c.Micro, c.Recompute
	l := trainer.MemoryLayout(cfg, model.OnGPU)
	l.Recipe = b.recipe()
	if err := b.fit(l, fmt.Sprintf("a step of %d x %d attempts", c.Groups, c.Attempts)); err != nil {
		return err
	}
	d, err := trainer.AssembleBench(cfg, b.m, trainer.AssembleOptions{Train: true})
	if err != nil {
		return err
	}
	defer d.Close()
	rep, err := trainer.BenchStep(ctx, cfg, d, trainer.BenchStepOptions{Groups: c.Groups, Attempts: c.Attempts, Prompt: c.Prompt, New: c.New, Steps: c.Count, Vocab: int(b.m.ValidVocab()), Seed: 1})
	if err != nil {
		return err
	}
	n := float64(c.Groups * c.Attempts)
	f := b.shape.step(b.ceil, float64(c.Groups), float64(c.Attempts), float64(c.Prompt), float64(c.New), float64(min(c.Slots, c.Groups*c.Attempts)), b.form())
	cell := fmt.Sprintf("groups=%d/attempts=%d/prompt=%d/new=%d", c.Groups, c.Attempts, c.Prompt, c.New)
	b.header("rollouts/s")
	b.add(benchRow{Name: "Step/model=" + b.name + "/" + cell, Unit: "rollouts/s",
		Floor: f.Prefill + f.Decode + f.Train, Gate: gateText(b.name, "step", cell),
		More: map[string]float64{"rollouts/device-h": 3600 * rep.RolloutsPerS, "sample-s": rep.SampleSeconds, "train-s": rep.TrainSeconds, "peak-GiB": b.peakGiB(), "gap-max": rep.GapMax}},
		[]float64{rep.StepSeconds}, n)
	if b.g.JSON {
		return b.emit("step", map[string]any{"groups": rep.Groups, "attempts": rep.Attempts, "prompt": rep.Prompt, "new": rep.New, "steps": rep.Steps, "step_seconds": rep.StepSeconds,
			"sample_seconds": rep.SampleSeconds, "train_seconds": rep.TrainSeconds, "rollouts_per_s": rep.RolloutsPerS, "rollouts_per_device_hour": 3600 * rep.RolloutsPerS,
			"sample_tokens_per_s": rep.SampleTokensPerS, "train_tokens_per_s": rep.TrainTokensPerS, "train_rows": rep.TrainRows, "gap_max": rep.GapMax,
			"floor_prefill_seconds": f.Prefill, "floor_decode_seconds": f.Decode, "floor_train_seconds": f.Train})
	}
	return nil
}
