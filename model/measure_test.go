package model

import (
	"context"
	"math"
	"testing"

	"harness-s/kernels"
)

// TestMeasured: the model and the contexts that benchmarks measure with are dense, finite and of the sizes asked for.
func TestMeasured(t *testing.T) {
	dev := execDevice(t, 2)
	cfg := execConfig(LinearAttention, FullAttention)
	for _, o := range []LoadOptions{{}, {Train: true, Optim: Recipe{HiLo: true}}} {
		m := must[*Model](t)(NewMeasured(cfg, dev, 3, o))
		for _, e := range m.Params.Entries() {
			zero, v := 0, must[[]float32](t)(m.Params.Master(e.Name))
			for _, x := range v {
				if x == 0 {
					zero++
				} else if len(e.Shape) == 2 && (math.Abs(float64(x)) > 0.2 || x != kernels.FromBF16(kernels.ToBF16(x))) {
					t.Fatalf("%s holds %v", e.Name, x)
				}
			}
			if len(e.Shape) == 2 && zero > len(v)/10 {
				t.Errorf("%s: %d of %d values are 0", e.Name, zero, len(v))
			}
		}
		m.Close()
	}
	m := must[*Model](t)(NewMeasured(cfg, dev, 3, LoadOptions{}))
	t.Cleanup(m.Close)
	r := must[*Runner](t)(NewRunner(m, RunnerOptions{MaxSeqs: 3, MaxTokens: 300, PageSize: 16, MaxRows: 16}))
	t.Cleanup(r.Close)
	ids := []SeqID{acquire(t, r), acquire(t, r)}
	check(t, r.Pretend(ids, 100, 1))
	if r.Len(ids[1]) != 100 || r.FreePages() != 19-14 {
		t.Errorf("length %d, %d free pages", r.Len(ids[1]), r.FreePages())
	}
	got := must[[]Sampled](t)(r.Step(context.Background(), []Work{{Seq: ids[0], Append: []int32{1}, Sample: true, Sampling: Sampling{Temperature: 1}}}))
	if lp := float64(got[0].LogProb); !(lp < 0) || math.IsInf(lp, 0) {
		t.Errorf("log-prob %v after a context that was not computed", lp)
	}
	if err := r.Pretend(ids, 200, 1); err == nil {
		t.Error("more tokens than pages")
	}
}
