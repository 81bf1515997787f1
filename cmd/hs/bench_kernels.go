package main

import (
	"context"
	"fmt"
	"reflect"
	"slices"
	"strings"

	"harness-s/kernels"
	"harness-s/trainer"
)

// benchKernels times every kernel of gpu.md 6 against its floor. Without --like, on the CPU, it times float32 products too, for
// comparison with other programs.
type benchKernels struct {
	benchFlags
	Filter string `help:"Only kernels whose name contains this." placeholder:"TEXT"`
}

// kernelCase is an op at a shape. Its floor is the larger of its bytes over the copy ceiling and its operations over the part of the
// product ceiling that its kind reaches.
type kernelCase struct {
	name         string // op/shape
	op           kernels.Op
	bytes, flops float64
	share        float64 // of the product ceiling; 0 = all
	args         func(r *kernelRig) any
}

func (k kernelCase) floor(x ceilings) float64 {
	share := k.share
	if share == 0 {
		share = 1
	}
	return max(k.bytes/x.CopyBytesPerS, k.flops/(x.GemmFLOPS*share))
}

// kernelScale are the sizes that cases are made for.
type kernelScale struct {
	T, long, seq, wave int64   // training tokens, of K7, of a sequence of them, of the head
	B                  []int64 // sequences in decode
	ctx                int64
	optim              int64 // parameters
}

var (
	fullScale = kernelScale{T: 16384, long: 32768, seq: 4096, wave: 16384, B: []int64{64, 256}, ctx: 4096, optim: 1 << 28}
	cpuScale  = kernelScale{T: 256, long: 512, seq: 128, wave: 256, B: []int64{8}, ctx: 256, optim: 1 << 20}
	emuScale  = kernelScale{T: 32, long: 48, seq: 16, wave: 32, B: []int64{2}, ctx: 32, optim: 1 << 12}
)

func (c *benchKernels) Run(ctx context.Context, g *globals) error {
	b, err := openBenchDevice(ctx, g, c.benchFlags)
	if err != nil {
		return err
	}
	defer b.close()
	scale, scaled := cpuScale, " (sizes scaled down for a CPU: gates are a GPU's)"
	if b.gpu() {
		scale, scaled = fullScale, ""
	} else if b.dev.Info().Backend == "emu" {
		scale = emuScale
	}
	b.header("GFLOP/s", "GB/s")
	g.say("kernels: %s at T %d, B %v, context %d%s", b.name, scale.T, scale.B, scale.ctx, scaled)
	out := map[string]any{"scaled_down": scaled != ""}
	if c.Like == "" && !b.gpu() && c.Filter == "" {
		if err := c.products(b, out); err != nil {
			return err
		}
	}
	for i, k := range slices.DeleteFunc(kernelCases(b.cfg, scale), func(k kernelCase) bool { return !strings.Contains(k.name, c.Filter) }) {
		if err := ctx.Err(); err != nil {
			return err
		}
		g.progress.report(trainer.Progress{Phase: "bench", Done: i, Note: k.name})
		if err := c.run(b, k); err != nil {
			return fmt.Errorf("bench %s: %w", k.name, err)
		}
	}
	g.progress.clear()
	return b.emit("kernels", out)
}

// products are float32 products at sizes that other programs are measured at.
func (c *benchKernels) products(b *bench, out map[string]any) error {
	for _, s := range [][3]int64{{8192, 128, 384}, {64, 128, 384}, {1024, 1024, 1024}} {
		if b.dev.Info().Backend == "emu" {
			s = [3]int64{64, 64, 64}
		}
		rate, err := gemmRate(b.dev, s[0], s[1], s[2], 4*c.Count)
		if err != nil {
			return err
		}
		b.g.say("BenchmarkGemm/m=%d/k=%d/n=%d %d %.0f ns/op %.1f GFLOP/s", s[0], s[1], s[2], 4*c.Count, 2*float64(s[0]*s[1]*s[2])/rate, rate)
		out[fmt.Sprintf("gemm_%dx%dx%d_gflops", s[0], s[1], s[2])] = rate
	}
	return nil
}

// coldBytes is what the operands of runs that follow each other hold together, several times a GPU's L2, so that none is read from it.
const coldBytes = 256 << 20

// run times one case. On a GPU small operands are made several times and used in turn.
func (c *benchKernels) run(b *bench, k kernelCase) error {
	st := b.dev.NewStream()
	defer st.Close()
	r := &kernelRig{dev: b.dev, st: st, dt: b.dt}
	defer r.free()
	sets, reps := 1, 1
	if b.gpu() {
		if k.bytes > 0 {
			sets = max(1, min(16, int(coldBytes/k.bytes)))
		}
		if f := k.floor(b.ceil); f > 0 {
			reps = max(1, min(200, int(5e-3/f))) // some 5 ms between two marks
		}
	}
	args := make([]any, sets)
	for i := range args {
		args[i] = k.args(r)
		r.finish(k.op, args[i])
		if r.err != nil {
			return r.err
		}
	}
	secs, err := timeOps(b.dev, st, c.Count, reps, func() {
		for i := range reps {
			st.Run(k.op, reflect.ValueOf(args[i%sets]).UnsafePointer())
		}
	})
	if err != nil {
		return err
	}
	unit, work := "GB/s", k.bytes/1e9
	if k.flops > 0 && k.floor(b.ceil) > k.bytes/b.ceil.CopyBytesPerS {
		unit, work = "GFLOP/s", k.flops/1e9
	}
	b.add(benchRow{Name: "Kernel/model=" + b.name + "/op=" + k.name, Unit: unit, Floor: k.floor(b.ceil), Gate: gateText(b.name, "kernels", "op="+k.name)}, secs, work)
	return nil
}
