package model

import (
	"testing"

	"harness-s/kernels"
)

// tinyLike is the shape of the shipped checkpoint.
func tinyLike() *Config {
	c := &Config{
		VocabSize: 1024, Hidden: 128, Intermediate: 384, NumLayers: 8, NumHeads: 4, NumKVHeads: 2, HeadDim: 32, RotaryDim: 8, RopeTheta: 1e7, RMSEps: 1e-6,
		LinKeyHeads: 2, LinKeyDim: 32, LinValueHeads: 4, LinValueDim: 32, ConvKernel: 4, TieEmbeddings: true, MaxPositions: 4096, EOS: []int32{0}, InitRange: 0.05,
	}
	for l := range c.NumLayers {
		t := LinearAttention
		if l%4 == 3 {
			t = FullAttention
		}
		c.LayerTypes = append(c.LayerTypes, t)
	}
	return c
}

// BenchmarkTrain is one forward, backward and optimiser step of the shipped shape on 16 sequences of 512 tokens.
func BenchmarkTrain(b *testing.B) {
	m := randomModel(b, execDevice(b, 0), tinyLike(), kernels.F32)
	e := newExec(b, m, ExecOptions{MaxRows: 16 * 512})
	segs := make([][2]int32, 16)
	for i := range segs {
		segs[i] = [2]int32{512, -1}
	}
	batch := tree(1, 1024, segs...)
	coef := coefficients(2, len(batch.Rows))
	b.ReportAllocs()
	for b.Loop() {
		check(b, e.ZeroGrad())
		must[*Output](b)(e.Forward(batch))
		check(b, e.Backward(coef, nil))
		g := must[float64](b)(e.GradNorm())
		check(b, e.Step(Hyper{LR: 1e-4, Beta1: 0.9, Beta2: 0.98, Eps: 1e-8, ClipNorm: 1, GradNorm: g}))
	}
	b.ReportMetric(float64(16*512*b.N)/b.Elapsed().Seconds(), "tok/s")
	b.ReportMetric(float64(e.PeakBytes())/(1<<20), "MiB")
}
