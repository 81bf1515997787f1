package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"time"

	"harness-s/kernels"
	"harness-s/model"
	"harness-s/trainer"
)

// benchCmd measures on the machine it runs on. Lines are Go benchmark text, so benchstat compares any two outputs; --json adds one
// object as the last line. Warm-up is excluded; figures are medians of --count runs.
type benchCmd struct {
	Decode  benchDecode  `cmd:"" help:"Prefill and decode a batch of random prompts: tokens/s."`
	Prefill benchDecode  `cmd:"" help:"As decode; the prefill figure is the headline."`
	Train   benchTrain   `cmd:"" help:"Forward, backward and AdamW on random rows: tokens/s."`
	Step    benchStep    `cmd:"" help:"A whole GRPO step on random prompts: rollouts/s."`
	Kernels benchKernels `cmd:"" help:"Matrix products at the model's shapes: GFLOP/s."`
}

type benchFlags struct {
	storageFlag
	Ckpt  string `type:"path" help:"Hugging Face directory; default the shipped tiny checkpoint."`
	Count int    `default:"5" help:"Measured runs."`
}

func (f benchFlags) header(g *globals, dev *kernels.Device) {
	i := dev.Info()
	g.say("hs-version: %s\ndevice: %s\ndtype: %v\nbuild: %s\nthreads: %d\ngoos: %s\ngoarch: %s", fullVersion(), i.Name, trainer.StorageOf(f.DType, g.deviceName(g.Device)), i.Build, i.Threads, runtime.GOOS, runtime.GOARCH)
	g.say("Unit tok/s better=higher")
}

// median of a non-empty list.
func median(v []float64) float64 {
	s := slices.Clone(v)
	slices.Sort(s)
	if n := len(s); n%2 == 0 {
		return (s[n/2-1] + s[n/2]) / 2
	}
	return s[len(s)/2]
}

func randomIDs(r *rand.Rand, n, vocab int) []int32 {
	ids := make([]int32, n)
	for i := range ids {
		ids[i] = int32(r.IntN(vocab))
	}
	return ids
}

type benchDecode struct {
	benchFlags
	Batch  int `default:"64" help:"Sequences."`
	Prompt int `default:"256" help:"Prompt tokens per sequence, all different."`
	New    int `default:"128" help:"Tokens to sample per sequence."`
}

func (c *benchDecode) Run(ctx context.Context, g *globals) error {
	if c.Batch < 1 || c.Prompt < 1 || c.New < 2 || c.Count < 1 {
		return usage("e.g. --batch 64 --prompt 256 --new 128 --count 5", "batch %d, prompt %d, new %d, count %d: want batch, prompt and count >= 1 and new >= 2", c.Batch, c.Prompt, c.New, c.Count)
	}
	dev, m, err := g.openModel(c.Ckpt, c.options(g, false))
	if err != nil {
		return err
	}
	defer dev.Close()
	defer m.Close()
	r, err := model.NewRunner(m, model.RunnerOptions{MaxSeqs: c.Batch, MaxTokens: c.Batch * (c.Prompt + c.New + 16), PageSize: 16, MaxRows: max(1024, c.Batch)})
	if err != nil {
		return err
	}
	defer r.Close()
	rng := rand.New(rand.NewPCG(1, 2))
	prompts := make([][]int32, c.Batch)
	for i := range prompts {
		prompts[i] = randomIDs(rng, c.Prompt, int(m.ValidVocab()))
	}
	var prefill, decode, total []float64
	for i := -1; i < c.Count; i++ {
		g.progress.report(trainer.Progress{Phase: "bench", Done: i + 1, Total: c.Count})
		p, d, err := c.once(ctx, r, prompts)
		if err != nil {
			return err
		}
		if i >= 0 {
			prefill, decode, total = append(prefill, p), append(decode, d), append(total, p+d)
		}
	}
	g.progress.clear()
	c.header(g, dev)
	out := map[string]any{
		"bench": "decode", "batch": c.Batch, "prompt": c.Prompt, "new": c.New, "threads": dev.Info().Threads, "params": m.Config.NumParams(),
		"prefill_tokens_per_s":  float64(c.Batch*c.Prompt) / median(prefill),
		"decode_tokens_per_s":   float64(c.Batch*(c.New-1)) / median(decode),
		"generate_tokens_per_s": float64(c.Batch*c.New) / median(total),
	}
	for i := range total {
		g.say("BenchmarkPrefill/batch=%d/prompt=%d 1 %.0f ns/op %.0f tok/s", c.Batch, c.Prompt, prefill[i]*1e9, float64(c.Batch*c.Prompt)/prefill[i])
		g.say("BenchmarkDecode/batch=%d/ctx=%d 1 %.0f ns/op %.0f tok/s", c.Batch, c.Prompt+c.New, decode[i]*1e9, float64(c.Batch*(c.New-1))/decode[i])
		g.say("BenchmarkGenerate/batch=%d/prompt=%d/new=%d 1 %.0f ns/op %.0f tok/s", c.Batch, c.Prompt, c.New, total[i]*1e9, float64(c.Batch*c.New)/total[i])
	}
	if g.JSON {
		return g.emit(out)
	}
	return nil
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
	got, err := r.Step(ctx, work)
	if err != nil {
		return 0, 0, err
	}
	mid := time.Now()
	for n := 1; n < c.New; n++ {
		for i := range work {
			work[i].Append, work[i].Ctr = []int32{got[i].Token}, uint64(n)
		}
		if got, err = r.Step(ctx, work); err != nil {
			return 0, 0, err
		}
	}
	end := time.Now()
	return mid.Sub(start).Seconds(), end.Sub(mid).Seconds(), r.Reset()
}

type benchTrain struct {
	benchFlags
	Rows   int `default:"16" help:"Rows of a batch."`
	Length int `default:"512" help:"Tokens of a row."`
	LoRA   int `name:"lora" default:"0" help:"Rank of a LoRA adapter on every linear layer, 0 = train all weights." placeholder:"RANK"`
}

func (c *benchTrain) Run(ctx context.Context, g *globals) error {
	if c.Rows < 1 || c.Length < 2 || c.Count < 1 || c.LoRA < 0 {
		return usage("e.g. --rows 16 --length 512 --count 5", "rows %d, length %d, count %d, lora %d: want rows and count >= 1, length >= 2 and lora >= 0", c.Rows, c.Length, c.Count, c.LoRA)
	}
	dev, m, err := g.openModel(c.Ckpt, c.options(g, c.LoRA == 0))
	if err != nil {
		return err
	}
	defer dev.Close()
	defer m.Close()
	if c.LoRA > 0 {
		l, _ := trainer.LoRAConfig{Rank: c.LoRA, Targets: []string{model.AllLinear}}.Adapter()
		if err := m.Adapt(l, model.AdaptOptions{Train: true, Optim: c.options(g, true).Optim}); err != nil {
			return err
		}
	}
	// Microbatches of whole rows keep the working set near the caches; gradients accumulate over them as in training.
	micro := max(1, min(c.Rows, 1024/c.Length))
	x, err := model.NewExec(m, model.ExecOptions{Temperature: 1, MaxRows: micro * c.Length, MaxTargets: micro * c.Length})
	if err != nil {
		return err
	}
	defer x.Close()
	rng := rand.New(rand.NewPCG(3, 4))
	var batches []*model.Batch
	for at := 0; at < c.Rows; at += micro {
		b := &model.Batch{}
		for r := at; r < min(at+micro, c.Rows); r++ {
			base := int32(len(b.IDs))
			b.IDs = append(b.IDs, randomIDs(rng, c.Length, int(m.ValidVocab()))...)
			b.Segments = append(b.Segments, model.Segment{Len: int32(c.Length), Parent: -1})
			for t := 0; t < c.Length-1; t++ {
				b.Rows, b.Targets = append(b.Rows, base+int32(t)), append(b.Targets, b.IDs[int(base)+t+1])
			}
		}
		batches = append(batches, b)
	}
	coef := trainer.SFTCoefficient(c.Rows * (c.Length - 1))
	step := func() error {
		if err := x.ZeroGrad(); err != nil {
			return err
		}
		for _, b := range batches {
			if _, err := x.Forward(b); err != nil {
				return err
			}
			d := make([]float32, len(b.Rows))
			for i := range d {
				d[i] = coef
			}
			if err := x.Backward(d, nil); err != nil {
				return err
			}
		}
		norm, err := x.GradNorm()
		if err != nil {
			return err
		}
		return x.Step(model.Hyper{LR: 1e-6, Beta1: 0.9, Beta2: 0.999, Eps: 1e-8, Decay: 0.01, ClipNorm: 1, GradNorm: norm})
	}
	var secs []float64
	for i := -1; i < c.Count; i++ {
		if err := ctx.Err(); err != nil {
			return err
		}
		g.progress.report(trainer.Progress{Phase: "bench", Done: i + 1, Total: c.Count})
		start := time.Now()
		if err := step(); err != nil {
			return err
		}
		if i >= 0 {
			secs = append(secs, time.Since(start).Seconds())
		}
	}
	g.progress.clear()
	c.header(g, dev)
	tokens := float64(c.Rows * c.Length)
	for _, s := range secs {
		g.say("BenchmarkTrain/rows=%d/length=%d 1 %.0f ns/op %.0f tok/s", c.Rows, c.Length, s*1e9, tokens/s)
	}
	if g.JSON {
		return g.emit(map[string]any{"bench": "train", "rows": c.Rows, "length": c.Length, "threads": dev.Info().Threads, "params": m.Config.NumParams(),
			"trained": m.NumTrainable(), "train_tokens_per_s": tokens / median(secs), "peak_mib": float64(x.PeakBytes()) / (1 << 20)})
	}
	return nil
}

type benchStep struct {
	benchFlags
	Groups   int `default:"8" help:"Groups of a step."`
	Attempts int `default:"8" help:"Attempts of a group."`
	Prompt   int `default:"256" help:"Prompt tokens, shared by a group."`
	New      int `default:"128" help:"Tokens to sample per attempt."`
}

func (c *benchStep) Run(ctx context.Context, g *globals) error {
	if c.Groups < 1 || c.Attempts < 2 || c.Prompt < 2 || c.New < 1 || c.Count < 1 {
		return usage("e.g. --groups 8 --attempts 8 --prompt 256 --new 128", "groups %d, attempts %d, prompt %d, new %d: want groups >= 1, attempts >= 2, prompt >= 2, new >= 1", c.Groups, c.Attempts, c.Prompt, c.New)
	}
	cfg := trainer.Defaults()
	cfg.Model.Device = g.deviceName(g.Device)
	o := c.options(g, true)
	o.Shared = cfg.Placement() == model.OnGPU
	dev, m, err := g.openModel(c.Ckpt, o)
	if err != nil {
		return err
	}
	defer dev.Close()
	defer m.Close()
	cfg.Rollout.Slots = c.Groups * c.Attempts
	cfg.Model.MaxLen = c.Prompt + c.New + 16
	d, err := trainer.AssembleBench(cfg, m, trainer.AssembleOptions{Train: true})
	if err != nil {
		return err
	}
	defer d.Close()
	rep, err := trainer.BenchStep(ctx, cfg, d, trainer.BenchStepOptions{Groups: c.Groups, Attempts: c.Attempts, Prompt: c.Prompt, New: c.New, Steps: c.Count, Vocab: int(m.ValidVocab()), Seed: 1})
	if err != nil {
		return err
	}
	c.header(g, dev)
	g.say("Unit rollouts/s better=higher")
	g.say("BenchmarkStep/groups=%d/attempts=%d/prompt=%d/new=%d %d %.0f ns/op %.2f rollouts/s", c.Groups, c.Attempts, c.Prompt, c.New, rep.Steps, rep.StepSeconds*1e9, rep.RolloutsPerS)
	if g.JSON {
		return g.emit(rep)
	}
	return nil
}

type benchKernels struct {
	Count int `default:"20" help:"Measured runs per shape."`
}

func (c *benchKernels) Run(ctx context.Context, g *globals) error {
	dev, err := g.openDevice()
	if err != nil {
		return err
	}
	defer dev.Close()
	benchFlags{storageFlag: storageFlag{DType: "float32"}}.header(g, dev)
	g.say("Unit GFLOP/s better=higher")
	out := map[string]any{"bench": "kernels", "threads": dev.Info().Threads}
	for _, s := range [][3]int64{{8192, 128, 384}, {64, 128, 384}, {1024, 1024, 1024}} {
		rate, err := gemmRate(dev, s[0], s[1], s[2], c.Count)
		if err != nil {
			return err
		}
		g.say("BenchmarkGemm/m=%d/k=%d/n=%d %d %.0f ns/op %.1f GFLOP/s", s[0], s[1], s[2], c.Count, 2*float64(s[0]*s[1]*s[2])/rate, rate)
		out[fmt.Sprintf("gemm_%dx%dx%d_gflops", s[0], s[1], s[2])] = rate
	}
	if g.JSON {
		return g.emit(out)
	}
	return nil
}

// gemmRate is the median GFLOP/s of C[m,n] = A[m,k] B[n,k]^T in float32.
func gemmRate(dev *kernels.Device, m, k, n int64, count int) (float64, error) {
	buf, err := dev.Alloc(4*(m*k+n*k+m*n), "bench gemm")
	if err != nil {
		return 0, err
	}
	defer buf.Free()
	st := dev.NewStream()
	defer st.Close()
	rng := rand.New(rand.NewPCG(5, 6))
	v := make([]float32, m*k+n*k)
	for i := range v {
		v[i] = rng.Float32() - 0.5
	}
	st.UploadF32(buf.Ptr(), v)
	a := kernels.GemmArgs{DType: kernels.F32, Flags: kernels.TransB, M: m, N: n, K: k, A: buf.Ptr(), LDA: k, B: buf.At(4 * m * k), LDB: k, C: buf.At(4 * (m*k + n*k)), LDC: n}
	ws, err := gemmScratch(dev, &a)
	if err != nil {
		return 0, err
	}
	if ws != nil {
		defer ws.Free()
	}
	flops := 2 * float64(m*k*n)
	reps := max(1, int(2e8/flops))
	var secs []float64
	for i := -2; i < count; i++ {
		start := time.Now()
		for range reps {
			st.Gemm(&a)
		}
		if i >= 0 {
			secs = append(secs, time.Since(start).Seconds()/float64(reps))
		}
	}
	if err := st.Sync(); err != nil {
		return 0, err
	}
	return flops / median(secs) / 1e9, nil
}
