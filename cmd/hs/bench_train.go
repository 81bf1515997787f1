package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"harness-s/kernels"
	"harness-s/model"
	"harness-s/trainer"
)

type benchTrain struct {
	benchFlags
	Rows      int      `default:"0" help:"Rows of a batch; default 16, or as many as fill a micro-batch on a GPU." placeholder:"N"`
	Length    []int    `help:"Tokens of a row, a list; default 512, or 4096,16384 on a GPU." placeholder:"N,..."`
	Recompute []string `help:"none, layers, or both; default none, on a GPU none,layers." placeholder:"MODE,..."`
	Micro     int      `default:"0" help:"Tokens of a micro-batch; default 1024, or 16384 on a GPU." placeholder:"N"`
	LoRA      int      `name:"lora" default:"0" help:"Rank of a LoRA adapter on every linear layer, 0 = train all weights." placeholder:"RANK"`
}

func (c *benchTrain) check() error {
	for _, n := range c.Length {
		if n < 2 {
			return usage("e.g. --length 4096,16384", "length %v: want numbers from 2", c.Length)
		}
	}
	for _, m := range c.Recompute {
		if m != "none" && m != "layers" {
			return usage("--recompute none,layers", "recompute %q: want none or layers", m)
		}
	}
	if c.Rows < 0 || c.LoRA < 0 || c.Micro < 0 {
		return usage("e.g. --rows 16 --length 512 --count 5", "rows %d, lora %d, micro %d: want numbers from 0", c.Rows, c.LoRA, c.Micro)
	}
	return nil
}

func (c *benchTrain) Run(ctx context.Context, g *globals) error {
	if err := c.check(); err != nil {
		return err
	}
	b, err := openBench(ctx, g, c.benchFlags, c.LoRA == 0)
	if err != nil {
		return err
	}
	defer b.close()
	if c.LoRA > 0 {
		l, _ := trainer.LoRAConfig{Rank: c.LoRA, Targets: []string{model.AllLinear}}.Adapter()
		if err := b.m.Adapt(l, model.AdaptOptions{Train: true, Optim: b.recipe()}); err != nil {
			return err
		}
	}
	lengths, modes, micro := []int{512}, []string{"none"}, 1024
	if b.gpu() {
		lengths, modes, micro = []int{4096, 16384}, []string{"none", "layers"}, 16384
	}
	if len(c.Length) > 0 {
		lengths = c.Length
	}
	if len(c.Recompute) > 0 {
		modes = c.Recompute
	}
	if c.Micro > 0 {
		micro = c.Micro
	}
	b.header("tok/s")
	var out map[string]any
	for _, length := range lengths {
		for _, mode := range modes {
			got, err := c.cell(ctx, b, length, mode, micro)
			if err != nil {
				return err
			}
			if out == nil {
				out = got
			}
		}
	}
	return b.emit("train", out)
}

// cell measures steps of batches of one length, and the optimiser alone. Micro-batches of whole rows accumulate as in training.
func (c *benchTrain) cell(ctx context.Context, b *bench, length int, mode string, micro int) (map[string]any, error) {
	per, rows := max(1, micro/length), c.Rows
	if rows == 0 {
		if rows = per; !b.gpu() {
			rows = 16
		}
	}
	per = min(per, rows)
	cell := fmt.Sprintf("rows=%d/length=%d/recompute=%s", rows, length, mode)
	name := "Train/model=" + b.name + "/" + cell
	xo := model.ExecOptions{Temperature: 1, MaxRows: per * length, MaxTargets: per * length, Recompute: mode == "layers"}
	if b.dev.Info().Table != "cpu" {
		xo.MaxStates = model.PlannedStates(xo.MaxRows)
	}
	l := model.Layout{Train: true, Recipe: b.recipe(), Exec: xo, Runner: model.RunnerOptions{MaxSeqs: 1, MaxTokens: 16, MaxRows: 16}}
	if a := b.m.Adapter; a != nil {
		l.LoRA = &a.LoRA
	}
	if err := b.fit(l, fmt.Sprintf("a micro-batch of %d tokens, recompute %s", per*length, mode)); err != nil {
		if errors.As(err, &exitError{}) {
			b.skip(name, err)
			return nil, nil
		}
		return nil, err
	}
	x, err := model.NewExec(b.m, xo)
	if err != nil {
		return nil, err
	}
	defer x.Close()
	batches := trainBatches(b, rows, length, per)
	coef := trainer.SFTCoefficient(rows * (length - 1))
	var optim []float64
	ops, ran := b.dev.NumOps(), 0
	secs, err := b.time(ctx, func() error {
		if err := x.ZeroGrad(); err != nil {
			return err
		}
		for _, batch := range batches {
			if _, err := x.Forward(batch); err != nil {
				return err
			}
			d := make([]float32, len(batch.Rows))
			for i := range d {
				d[i] = coef
			}
			if err := x.Backward(d, nil); err != nil {
				return err
			}
		}
		start := time.Now()
		norm, err := x.GradNorm()
		if err != nil {
			return err
		}
		err = x.Step(model.Hyper{LR: 1e-6, Beta1: 0.9, Beta2: 0.999, Eps: 1e-8, Decay: 0.01, ClipNorm: 1, GradNorm: norm})
		optim, ran = append(optim, time.Since(start).Seconds()), ran+1
		return err
	})
	if err != nil {
		return nil, err
	}
	tokens, T := float64(rows*length), float64(length)
	useful := b.shape.usefulFLOPs(T)
	if c.LoRA > 0 {
		useful = b.shape.usefulFLOPs(T) - 2*(b.shape.body+b.shape.head) // no gradients of the frozen matrices (gpu.md 3.8)
	}
	mfu := 100 * useful * tokens / median(secs) / b.ceil.GemmFLOPS
	peak := b.peakGiB()
	b.add(benchRow{Name: name, Unit: "tok/s", Floor: tokens * b.shape.hardwareFLOPs(T, mode == "layers") / b.ceil.GemmFLOPS, Gate: gateText(b.name, "train", cell),
		More: map[string]float64{"%mfu": mfu, "optim-s": median(optim[1:]), "peak-GiB": peak, "ops/step": float64(b.dev.NumOps()-ops) / float64(ran)}}, secs, tokens)
	return map[string]any{"rows": rows, "length": length, "trained": b.m.NumTrainable(), "train_tokens_per_s": tokens / median(secs), "peak_mib": float64(x.PeakBytes()) / (1 << 20)}, nil
}

// recipe is how weights and moments are stored in training: recipe H of gpu.md 3.7 in bfloat16, float32 elsewhere.
func (b *bench) recipe() model.Recipe {
	o := b.f.options(b.g, true).Optim
	if b.dt == kernels.BF16 {
		o.States = kernels.StateBF16
	}
	return o
}

// trainBatches are rows of random tokens, per of them in a micro-batch.
func trainBatches(b *bench, rows, length, per int) []*model.Batch {
	rng := rand.New(rand.NewPCG(3, 4))
	var out []*model.Batch
	for at := 0; at < rows; at += per {
		x := &model.Batch{}
		for r := at; r < min(at+per, rows); r++ {
			base := int32(len(x.IDs))
			x.IDs = append(x.IDs, randomIDs(rng, length, int(b.m.ValidVocab()))...)
			x.Segments = append(x.Segments, model.Segment{Len: int32(length), Parent: -1})
			for t := 0; t < length-1; t++ {
				x.Rows, x.Targets = append(x.Rows, base+int32(t)), append(x.Targets, x.IDs[int(base)+t+1])
			}
		}
		out = append(out, x)
	}
	return out
}
