package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"harness-s/model"
)

// benchDecode has two forms: the sweep of gpu.md 3.3, whose contexts are not computed (model.Runner.Pretend), and, with --prompt or on the
// CPU, a batch of prompts that is prefilled and decoded.
type benchDecode struct {
	benchFlags
	Batch  []int `help:"Sequences, a list; default 64, or 1,32,64,128,256 on a GPU." placeholder:"N,..."`
	Ctx    []int `help:"Contexts in tokens, a list: the sweep. Default on a GPU 1024,4096,16384." placeholder:"N,..."`
	Steps  int   `default:"16" help:"Decode steps of a measured run of the sweep."`
	Prompt int   `default:"0" help:"Prompt tokens per sequence, all different, computed; 0 = the sweep on a GPU, 256 elsewhere." placeholder:"N"`
	New    int   `default:"128" help:"Tokens to sample per sequence after --prompt."`
}

func (c *benchDecode) Run(ctx context.Context, g *globals) error {
	for _, n := range slices.Concat(c.Batch, c.Ctx) {
		if n < 1 {
			return usage("e.g. --batch 1,64 --ctx 1024,4096", "batch %v, ctx %v: want numbers from 1", c.Batch, c.Ctx)
		}
	}
	if c.New < 2 || c.Prompt < 0 || c.Steps < 1 || c.Prompt > 0 && len(c.Ctx) > 0 {
		return usage("e.g. --batch 64 --prompt 256 --new 128, or --batch 64,256 --ctx 4096", "prompt %d, new %d, steps %d, ctx %v: want new >= 2, steps >= 1, and prompt or ctx", c.Prompt, c.New, c.Steps, c.Ctx)
	}
	b, err := openBench(ctx, g, c.benchFlags, false)
	if err != nil {
		return err
	}
	defer b.close()
	sweep := len(c.Ctx) > 0 || c.Prompt == 0 && b.gpu()
	if c.Prompt == 0 {
		c.Prompt = 256
	}
	if !sweep {
		if len(c.Batch) == 0 {
			c.Batch = []int{64}
		}
		return c.generate(ctx, b)
	}
	if len(c.Batch) == 0 {
		c.Batch = []int{1, 32, 64, 128, 256}
	}
	if len(c.Ctx) == 0 {
		c.Ctx = []int{1024, 4096, 16384}
	}
	b.header("tok/s")
	for _, n := range c.Batch {
		for _, at := range c.Ctx {
			if err := c.cell(ctx, b, n, at, len(c.Batch)*len(c.Ctx) > 1); err != nil {
				return err
			}
		}
	}
	return b.emit("decode", nil)
}

// cell measures steps of a batch at a context. One that does not fit is an error when it is the only one.
func (c *benchDecode) cell(ctx context.Context, b *bench, batch, at int, several bool) error {
	cell := fmt.Sprintf("batch=%d/ctx=%d", batch, at)
	name := "Decode/model=" + b.name + "/" + cell
	steps := c.Steps * (b.f.Count + 1)
	o := model.RunnerOptions{MaxSeqs: batch, MaxTokens: batch * (at + steps + 16), MaxContext: at + steps + 16, PageSize: 16, MaxRows: max(16, batch)}
	if err := b.fit(model.Layout{Runner: o, Context: at + steps}, fmt.Sprintf("%d sequences of %d tokens", batch, at)); err != nil {
		if several && errors.As(err, &exitError{}) {
			b.skip(name, err)
			return nil
		}
		return err
	}
	r, err := model.NewRunner(b.m, o)
	if err != nil {
		return err
	}
	defer r.Close()
	work, ids := make([]model.Work, batch), make([]model.SeqID, batch)
	for i := range work {
		if ids[i], err = r.Acquire(); err != nil {
			return err
		}
		work[i] = model.Work{Seq: ids[i], Append: []int32{int32(i % b.cfg.VocabSize)}, Sample: true, Sampling: model.Sampling{Temperature: 1}, Key: model.Key{Lo: uint64(i), Hi: 7}}
	}
	if err := r.Pretend(ids, at, 1); err != nil {
		return err
	}
	ops, ran := b.dev.NumOps(), 0
	secs, err := b.time(ctx, func() error {
		ran += c.Steps
		return ahead(ctx, r, work, c.Steps)
	})
	if err != nil {
		return err
	}
	for i := range secs {
		secs[i] /= float64(c.Steps)
	}
	mean := float64(at) + float64(steps)/2
	b.add(benchRow{Name: name, Unit: "tok/s", Floor: b.shape.decode(b.ceil, float64(batch), mean, b.form()), Gate: gateText(b.name, "decode", cell),
		More: map[string]float64{"ops/step": float64(b.dev.NumOps()-ops) / float64(ran)}}, secs, float64(batch))
	return nil
}

// ahead makes n decode steps as the scheduler does: each is submitted before the tokens of the one before are waited for.
func ahead(ctx context.Context, r *model.Runner, work []model.Work, n int) error {
	var before *model.Pending
	for range n {
		if err := ctx.Err(); err != nil {
			return err
		}
		p, err := r.Submit(work)
		if err != nil {
			return err
		}
		if before != nil {
			if _, err := before.Wait(); err != nil {
				return err
			}
		}
		before = p
		next(work)
	}
	_, err := before.Wait()
	return err
}

// next makes works feed the tokens that the last step sampled.
func next(work []model.Work) {
	for i := range work {
		work[i].Append, work[i].FromLast, work[i].Ctr = nil, true, work[i].Ctr+1
	}
}

// generate computes prompts and samples from them.
func (c *benchDecode) generate(ctx context.Context, b *bench) error {
	b.header("tok/s")
	var out map[string]any
	for _, batch := range c.Batch {
		o := model.RunnerOptions{MaxSeqs: batch, MaxTokens: batch * (c.Prompt + c.New + 16), MaxContext: c.Prompt + c.New + 16, PageSize: 16, MaxRows: max(1024, batch)}
		if err := b.fit(model.Layout{Runner: o, Context: c.Prompt + c.New}, fmt.Sprintf("%d sequences of %d tokens", batch, c.Prompt+c.New)); err != nil {
			return err
		}
		prefill, decode, total, err := c.batchOf(ctx, b, o, batch)
		if err != nil {
			return err
		}
		n, x := float64(batch), b.ceil
		mid := float64(c.Prompt) + float64(c.New)/2
		b.add(benchRow{Name: fmt.Sprintf("Prefill/batch=%d/prompt=%d", batch, c.Prompt), Unit: "tok/s", Floor: n * float64(c.Prompt) * b.shape.prefillFLOPs(float64(c.Prompt)) / x.GemmFLOPS},
			prefill, n*float64(c.Prompt))
		b.add(benchRow{Name: fmt.Sprintf("Decode/batch=%d/ctx=%d", batch, c.Prompt+c.New), Unit: "tok/s", Floor: float64(c.New-1) * b.shape.decode(x, n, mid, b.form())}, decode, n*float64(c.New-1))
		b.add(benchRow{Name: fmt.Sprintf("Generate/batch=%d/prompt=%d/new=%d", batch, c.Prompt, c.New), Unit: "tok/s"}, total, n*float64(c.New))
		if out == nil {
			out = map[string]any{"batch": batch, "prompt": c.Prompt, "new": c.New, "prefill_tokens_per_s": n * float64(c.Prompt) / median(prefill),
				"decode_tokens_per_s": n * float64(c.New-1) / median(decode), "generate_tokens_per_s": n * float64(c.New) / median(total)}
		}
	}
	return b.emit("decode", out)
}

func (c *benchDecode) batchOf(ctx context.Context, b *bench, o model.RunnerOptions, batch int) (prefill, decode, total []float64, err error) {
	r, err := model.NewRunner(b.m, o)
	if err != nil {
		return nil, nil, nil, err
	}
	defer r.Close()
	rng := rand.New(rand.NewPCG(1, 2))
	prompts := make([][]int32, batch)
	for i := range prompts {
		prompts[i] = randomIDs(rng, c.Prompt, int(b.m.ValidVocab()))
	}
	total, err = b.time(ctx, func() error {
		p, d, err := c.once(ctx, r, prompts)
		prefill, decode = append(prefill, p), append(decode, d)
		return err
	})
	if err != nil {
		return nil, nil, nil, err
	}
	return prefill[1:], decode[1:], total, nil
}

// once fills the caches with the prompts (sampling each first token) and samples the rest; seconds of the two phases.
func (c *benchDecode) once(ctx context.Context, r *model.Runner, prompts [][]int32) (prefill, decode float64, err error) {
	work := make([]model.Work, len(prompts))
	for i, p := range prompts {
		id, err := r.Acquire()
		if err != nil {
			return 0, 0, err
		}
		work[i] = model.Work{Seq: id, Append: p, Sample: true, Sampling: model.Sampling{Temperature: 1}, Key: model.Key{Lo: uint64(i), Hi: 7}}
	}
	start := time.Now()
	if _, err := r.Step(ctx, work); err != nil {
		return 0, 0, err
	}
	mid := time.Now()
	next(work)
	if err := ahead(ctx, r, work, c.New-1); err != nil {
		return 0, 0, err
	}
	end := time.Now()
	return mid.Sub(start).Seconds(), end.Sub(mid).Seconds(), r.Reset()
}

// benchPrefill computes one prompt per length.
type benchPrefill struct {
	benchFlags
	Length []int `help:"Prompt lengths, a list; default 256, or 1024,4096,16384 on a GPU." placeholder:"N,..."`
	Batch  int   `default:"1" help:"Prompts computed together."`
	Rows   int   `default:"4096" help:"Rows of one pass; longer prompts are cut."`
}

func (c *benchPrefill) Run(ctx context.Context, g *globals) error {
	for _, n := range append(c.Length, c.Batch, c.Rows) {
		if n < 1 {
			return usage("e.g. --length 1024,4096 --batch 1", "length %v, batch %d, rows %d: want numbers from 1", c.Length, c.Batch, c.Rows)
		}
	}
	b, err := openBench(ctx, g, c.benchFlags, false)
	if err != nil {
		return err
	}
	defer b.close()
	if len(c.Length) == 0 {
		if c.Length = []int{256}; b.gpu() {
			c.Length = []int{1024, 4096, 16384}
		}
	}
	b.header("tok/s")
	for _, n := range c.Length {
		o := model.RunnerOptions{MaxSeqs: c.Batch, MaxTokens: c.Batch * (n + 16), MaxContext: n + 16, PageSize: 16, MaxRows: max(c.Batch, min(c.Rows, c.Batch*n))}
		cell := fmt.Sprintf("batch=%d/prompt=%d", c.Batch, n)
		name := "Prefill/model=" + b.name + "/" + cell
		if err := b.fit(model.Layout{Runner: o, Context: n}, fmt.Sprintf("%d prompts of %d tokens", c.Batch, n)); err != nil {
			b.skip(name, err)
			continue
		}
		secs, err := c.prompts(ctx, b, o, n)
		if err != nil {
			return err
		}
		tokens := float64(c.Batch * n)
		b.add(benchRow{Name: name, Unit: "tok/s", Floor: tokens * b.shape.prefillFLOPs(float64(n)) / b.ceil.GemmFLOPS, Gate: gateText(b.name, "prefill", cell)}, secs, tokens)
	}
	return b.emit("prefill", nil)
}

func (c *benchPrefill) prompts(ctx context.Context, b *bench, o model.RunnerOptions, n int) ([]float64, error) {
	r, err := model.NewRunner(b.m, o)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	rng := rand.New(rand.NewPCG(1, 2))
	return b.time(ctx, func() error {
		if err := r.Reset(); err != nil {
			return err
		}
		work := make([]model.Work, c.Batch)
		for i := range work {
			id, err := r.Acquire()
			if err != nil {
				return err
			}
			work[i] = model.Work{Seq: id, Append: randomIDs(rng, n, int(b.m.ValidVocab())), Sample: true, Sampling: model.Sampling{Temperature: 1}}
		}
		_, err := r.Step(ctx, work)
		return err
	})
}
