package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"time"

	"harness-s/kernels"
	"harness-s/model"
	"harness-s/trainer"
)

// benchCmd measures on the machine it runs on. Lines are Go benchmark text, so benchstat compares any two outputs; --json adds one
// object as the last line. Warm-up is excluded; figures are medians of --count runs. %peak is the floor of gpu.md 3 and 6 over the measured
// time, and the floor is counted in the ceilings that this very run measured on this device (bench_floor.go, bench_ceilings.go).
type benchCmd struct {
	Decode  benchDecode  `cmd:"" help:"Decode steps of random contexts, batch by context: tokens/s. On the CPU: prefill and decode a batch of random prompts."`
	Prefill benchPrefill `cmd:"" help:"One random prompt per length: tokens/s."`
	Train   benchTrain   `cmd:"" help:"Forward, backward and AdamW on random rows: tokens/s."`
	Step    benchStep    `cmd:"" help:"A whole GRPO step on random prompts: rollouts/s and per GPU hour."`
	Kernels benchKernels `cmd:"" help:"Every kernel at the model's shapes against its floor."`
	Gates   benchGates   `cmd:"" help:"The results of the others, from the files of their --json lines, against the gates of gpu.md 2."`
}

type benchFlags struct {
	storageFlag
	Ckpt   string `type:"path" help:"Hugging Face directory; default the shipped tiny checkpoint."`
	Like   string `help:"Random weights of a released size, made on the device: 0.8b, 2b, 4b, 9b, or tiny for the shape of the shipped checkpoint. No tokenizer: ids are random." placeholder:"SIZE"`
	Layers int    `help:"With --like: only so many layers, a multiple of 4." placeholder:"N"`
	Gemm   string `default:"own" enum:"own,cublaslt,openblas" help:"Matrix product of the table: own, cublaslt (cuda), openblas (cpu)."`
	Count  int    `default:"5" help:"Measured runs."`
}

// bench is one run of a benchmark: what it runs on and what it has measured.
type bench struct {
	g     *globals
	f     benchFlags
	dev   *kernels.Device
	m     *model.Model
	cfg   *model.Config
	shape floorShape
	name  string // of the model
	dt    kernels.DType
	ceil  ceilings
	rows  []benchRow
}

// benchRow is one configuration; JSON keys are stable.
type benchRow struct {
	Name    string             `json:"name"`
	Seconds float64            `json:"seconds"` // median of the runs
	Rate    float64            `json:"rate"`    // work / seconds
	Unit    string             `json:"unit"`
	Floor   float64            `json:"floor_seconds,omitempty"`
	Peak    float64            `json:"peak_pct,omitempty"` // floor / seconds
	Gate    string             `json:"gate,omitempty"`
	More    map[string]float64 `json:"more,omitempty"`
	NoFit   string             `json:"no_fit,omitempty"` // why it was not run
}

// gpu reports whether the device is a true GPU, for which sizes need not be scaled down.
func (b *bench) gpu() bool { return b.dev.Info().Backend == "cuda" }

// form is how the device decodes.
func (b *bench) form() decodeForm {
	return decodeForm{replay: kernels.GDNRing(b.dt, b.cfg.LinKeyDim, b.cfg.LinValueDim), logits: b.dt != kernels.BF16}
}

// openBench opens the device, measures its ceilings and loads or makes the model; train tells how.
func openBench(ctx context.Context, g *globals, f benchFlags, train bool) (*bench, error) {
	return openBenchShared(ctx, g, f, train, false)
}

// openBenchShared is openBench; with shared, sampler and executor use a GPU's memory by turns.
func openBenchShared(ctx context.Context, g *globals, f benchFlags, train, shared bool) (_ *bench, err error) {
	b, err := openBenchDevice(ctx, g, f)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			b.close()
		}
	}()
	o := f.options(g, train)
	if train {
		o.Optim, o.Shared = b.recipe(), shared
	}
	if f.Like == "" {
		b.m, err = loadStored(f.Ckpt, b.dev, o)
	} else {
		if err = b.fit(model.Layout{Train: train, Recipe: o.Optim, Runner: model.RunnerOptions{MaxSeqs: 1, MaxTokens: 16, MaxRows: 16}, Exec: model.ExecOptions{MaxRows: 64}}, b.f.Like); err != nil {
			return nil, err
		}
		b.m, err = model.NewMeasured(b.cfg, b.dev, 1, o)
	}
	if err != nil {
		return nil, err
	}
	b.cfg = b.m.Config
	b.shape = shapeOf(b.cfg, b.dt.Size())
	return b, nil
}

// openBenchDevice is openBench without the model's weights: the configuration alone.
func openBenchDevice(ctx context.Context, g *globals, f benchFlags) (b *bench, err error) {
	if f.Ckpt != "" && f.Like != "" {
		return nil, usage("leave one of them out", "--ckpt %s and --like %s: want one model", f.Ckpt, f.Like)
	}
	if f.Count < 1 {
		return nil, usage("e.g. --count 5", "count %d: want at least 1", f.Count)
	}
	b = &bench{g: g, f: f, name: f.Like, dt: trainer.StorageOf(f.DType, g.deviceName(g.Device))}
	switch {
	case f.Like != "" && f.Like != "tiny":
		_, b.cfg, err = model.Like(f.Like, f.Layers, map[kernels.DType]string{kernels.F32: "F32", kernels.BF16: "BF16"}[b.dt])
	case f.Layers != 0:
		return nil, usage("--like 4b --layers 8", "--layers %d goes with --like of a released size", f.Layers)
	default:
		b.name = "tiny"
		if f.Ckpt != "" {
			b.name = "ckpt"
		}
		b.cfg, err = modelConfig(f.Ckpt)
	}
	if err != nil {
		return nil, err
	}
	if f.Layers != 0 {
		b.name = fmt.Sprintf("%s-%dl", f.Like, f.Layers)
	}
	b.shape = shapeOf(b.cfg, b.dt.Size())
	if b.ceil, err = measureCeilings(ctx, g, b.dt, f.Gemm); err != nil {
		return nil, err
	}
	b.dev, err = g.device(g.Device, g.Threads, f.Gemm)
	return b, err
}

func (b *bench) close() {
	if b.m != nil {
		b.m.Close()
	}
	_ = b.dev.Close() // a benchmark that failed may leave buffers; one that did not has closed them
}

// fit refuses what does not fit on a GPU, with the numbers; other devices allocate from the machine's memory and say so themselves.
func (b *bench) fit(l model.Layout, what string) error {
	if !strings.HasPrefix(b.g.deviceName(b.g.Device), "cuda") {
		return nil
	}
	pl, err := model.NewMemoryPlanner(b.cfg, b.dev)
	if err != nil {
		return err
	}
	defer pl.Close()
	l.Placement, l.DType = model.OnGPU, b.dt
	fp, err := pl.Footprint(l)
	if err != nil {
		return err
	}
	need := fp.Phase(model.Rollout)
	if l.Train {
		need = max(need, fp.Phase(model.Training))
	}
	if have := b.dev.Info().Arena; need > have {
		return exitError{code: exitNotReady, err: &trainer.Error{Op: "fit " + what, Err: fmt.Errorf("needs %s, the device has %s: %s too much", gib(need), gib(have), gib(need-have)),
			Hint: "a smaller batch, context or --like, or --recompute layers"}}
	}
	return nil
}

// time runs f as often as --count says after one warm-up, and returns the seconds of each run. f ends with everything done.
func (b *bench) time(ctx context.Context, f func() error) ([]float64, error) {
	var secs []float64
	for i := -1; i < b.f.Count; i++ {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		b.g.progress.report(trainer.Progress{Phase: "bench", Done: i + 1, Total: b.f.Count})
		start := time.Now()
		if err := f(); err != nil {
			return nil, err
		}
		if i >= 0 {
			secs = append(secs, time.Since(start).Seconds())
		}
	}
	b.g.progress.clear()
	return secs, nil
}

// header prints what benchstat keeps as configuration.
func (b *bench) header(units ...string) {
	i, g := b.dev.Info(), b.g
	g.say("hs-version: %s\ndevice: %s\nmodel: %s\ndtype: %v\nbuild: %s\nthreads: %d\ngoos: %s\ngoarch: %s", fullVersion(), i.Name, b.name, b.dt, i.Build, i.Threads, runtime.GOOS, runtime.GOARCH)
	g.say("ceiling-copy: %.4g B/s\nceiling-gemm: %.4g FLOP/s (%s)", b.ceil.CopyBytesPerS, b.ceil.GemmFLOPS, b.ceil.Gemm)
	for _, u := range append(units, "%peak") {
		g.say("Unit %s better=higher", u)
	}
}

// add prints a configuration, a line per run, and keeps it. work is what one run does, in units of unit's numerator.
func (b *bench) add(row benchRow, secs []float64, work float64) {
	if row.Gate != "" {
		b.g.say("# gate %s", row.Gate)
	}
	for _, s := range secs {
		line := fmt.Sprintf("Benchmark%s 1 %.0f ns/op %.6g %s", row.Name, s*1e9, work/s, row.Unit)
		if row.Floor > 0 {
			line += fmt.Sprintf(" %.1f %%peak", 100*row.Floor/s)
		}
		for _, k := range sortedKeys(row.More) {
			line += fmt.Sprintf(" %.6g %s", row.More[k], k)
		}
		b.g.say("%s", line)
	}
	row.Seconds = median(secs)
	row.Rate = work / row.Seconds
	if row.Floor > 0 {
		row.Peak = 100 * row.Floor / row.Seconds
	}
	b.rows = append(b.rows, row)
}

// skip keeps a configuration that does not fit.
func (b *bench) skip(name string, why error) {
	b.g.say("# %s: %v", name, why)
	b.rows = append(b.rows, benchRow{Name: name, NoFit: why.Error()})
}

// emit prints the JSON object of a benchmark.
func (b *bench) emit(kind string, more map[string]any) error {
	if !b.g.JSON {
		return nil
	}
	i := b.dev.Info()
	out := map[string]any{"bench": kind, "model": b.name, "device": i.Name, "backend": i.Backend, "build": i.Build, "dtype": b.dt.String(), "threads": i.Threads,
		"params": b.cfg.NumParams(), "ceilings": b.ceil, "peak_gib": b.peakGiB(), "cells": b.rows, "version": fullVersion()}
	for k, v := range more {
		out[k] = v
	}
	return b.g.emit(out)
}

// peakGiB is the most memory that the device held in this run.
func (b *bench) peakGiB() float64 {
	l := b.dev.Ledger()
	return float64(l[len(l)-1].PeakBytes) / (1 << 30)
}

func sortedKeys(m map[string]float64) []string {
	var ks []string
	for k := range m {
		ks = append(ks, k)
	}
	slices.Sort(ks)
	return ks
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
