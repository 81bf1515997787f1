package model

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"harness-s/kernels"
)

// TestFiniteDifferences checks the gradient of the whole model, entropy bonus included, along random directions of every parameter in float64.
func TestFiniteDifferences(t *testing.T) {
	for _, tied := range []bool{true, false} {
		t.Run(fmt.Sprintf("tied=%t", tied), func(t *testing.T) {
			cfg := execConfig()
			cfg.TieEmbeddings = tied
			m := randomModel(t, execDevice(t, 0), cfg, kernels.F64)
			e := newExec(t, m, ExecOptions{MaxRows: 96, Entropy: true, Temperature: 1.25})
			b := tree(3, cfg.VocabSize, [2]int32{5, -1}, [2]int32{7, 0}, [2]int32{3, 0}, [2]int32{66, -1}, [2]int32{1, 3}, [2]int32{4, 4})
			dl, de := coefficients(1, len(b.Rows)), coefficients(2, len(b.Rows))
			loss := func() float64 {
				must[*Output](t)(e.Forward(b))
				n := int64(len(b.Rows))
				lp, ent := e.reals(t, e.address(e.prog.logp), n), e.reals(t, e.address(e.prog.ent), n)
				var s float64
				for i := range lp {
					s += float64(dl[i])*lp[i] + float64(de[i])*ent[i]
				}
				return s
			}
			_, grads := e.train(t, b, dl, de)
			rng := rand.New(rand.NewPCG(17, 19))
			const h = 1e-6
			for _, p := range m.Params.Entries() {
				at := m.Params.Ptr(Weights, p.Name)
				w := e.reals(t, at, p.Len)
				for range 2 {
					dir, moved := make([]float64, p.Len), make([]float64, p.Len)
					var want, norm float64
					for i := range dir {
						dir[i] = rng.NormFloat64()
						want += dir[i] * grads[p.Name][i]
						norm += grads[p.Name][i] * grads[p.Name][i]
					}
					move := func(s float64) float64 {
						for i := range w {
							moved[i] = w[i] + s*dir[i]
						}
						m.Params.stream.Upload(at, bytesOf(moved))
						return loss()
					}
					// Central differences of two widths, extrapolated: what is left is of order h^4 (the l2norm of short vectors bends sharply).
					wide, narrow := (move(2*h)-move(-2*h))/(4*h), (move(h)-move(-h))/(2*h)
					got := (4*narrow - wide) / 3
					m.Params.stream.Upload(at, bytesOf(w))
					if tol := 2e-6 * max(math.Sqrt(norm), 1); math.Abs(got-want) > tol {
						t.Errorf("%s: finite difference %.9g, gradient %.9g, tolerance %.2g", p.Name, got, want, tol)
					}
					if norm == 0 {
						t.Errorf("%s: gradient is zero", p.Name)
					}
				}
			}
		})
	}
}

// forests are packed trees with the edge cases of gpu.md 7.5.
func forests() map[string][][2]int32 {
	return map[string][][2]int32{
		"group":         {{9, -1}, {4, 0}, {6, 0}, {1, 0}},
		"one token":     {{1, -1}, {1, 0}, {1, 1}, {1, 2}, {1, 3}, {1, 0}},
		"short parents": {{2, -1}, {1, 0}, {2, 1}, {5, 2}, {3, 1}},
		"chunk - 1":     {{63, -1}, {3, 0}, {70, 0}},
		"chunk":         {{64, -1}, {3, 0}, {64, 0}},
		"chunk + 1":     {{65, -1}, {3, 0}, {66, 0}},
		"two trees":     {{5, -1}, {12, -1}, {2, 0}, {3, 1}, {7, 0}, {130, 3}},
	}
}

// separate unpacks a forest into one root sequence per leaf; rows shared by several leaves are copied. It returns the batch and, for every
// target of the forest, a target of the copy that stands for it.
func separate(b *Batch) (*Batch, []int) {
	start := make([]int32, len(b.Segments))
	hasChild := make([]bool, len(b.Segments))
	at := int32(0)
	for s, seg := range b.Segments {
		start[s] = at
		at += seg.Len
		if seg.Parent >= 0 {
			hasChild[seg.Parent] = true
		}
	}
	out := &Batch{}
	stands := make([]int, len(b.Rows))
	for i := range stands {
		stands[i] = -1
	}
	for leaf := range b.Segments {
		if hasChild[leaf] {
			continue
		}
		var path []int
		for s := int32(leaf); s >= 0; s = b.Segments[s].Parent {
			path = append([]int{int(s)}, path...)
		}
		var rows []int32 // forest row of every row of the copy
		for _, s := range path {
			for i := range b.Segments[s].Len {
				rows = append(rows, start[s]+i)
			}
		}
		base := int32(len(out.IDs))
		out.Segments = append(out.Segments, Segment{Len: int32(len(rows)), Parent: -1})
		for i, r := range rows {
			out.IDs = append(out.IDs, b.IDs[r])
			for j, fr := range b.Rows {
				if fr != r || stands[j] >= 0 {
					continue
				}
				// A target after the last row of a segment belongs to the child it names; elsewhere to the next row.
				if i+1 < len(rows) && rows[i+1] != r+1 && b.Targets[j] != b.IDs[rows[i+1]] {
					continue
				}
				stands[j] = len(out.Rows)
				out.Rows = append(out.Rows, base+int32(i))
				out.Targets = append(out.Targets, b.Targets[j])
			}
		}
	}
	return out, stands
}

func TestForestEqualsSeparate(t *testing.T) {
	d := execDevice(t, 0)
	for name, segs := range forests() {
		for _, c := range []struct {
			dt  kernels.DType
			tol float64
		}{{kernels.F64, 1e-10}, {kernels.F32, 3e-5}} {
			t.Run(fmt.Sprintf("%s/%v", name, c.dt), func(t *testing.T) {
				m := randomModel(t, d, execConfig(), c.dt)
				e := newExec(t, m, ExecOptions{})
				b := tree(uint64(len(name)), 61, segs...)
				sep, stands := separate(b)
				coef := coefficients(4, len(b.Rows))
				sepCoef := make([]float32, len(sep.Rows))
				for i, j := range stands {
					if j < 0 {
						t.Fatalf("target %d has no copy", i)
					}
					sepCoef[j] = coef[i]
				}
				gotLP, got := e.train(t, b, coef, nil)
				wantLP, want := e.train(t, sep, sepCoef, nil)
				for i, j := range stands {
					if math.Abs(gotLP[i]-wantLP[j]) > c.tol {
						t.Errorf("logp of target %d is %v, separate %v", i, gotLP[i], wantLP[j])
					}
				}
				compareGrads(t, "forest", got, want, 10*c.tol)
			})
		}
	}
}

// TestGroupOrder: log-probs keep their bits wherever a group lies in the pack.
func TestGroupOrder(t *testing.T) {
	m := randomModel(t, execDevice(t, 0), execConfig(), kernels.F32)
	e := newExec(t, m, ExecOptions{})
	groups := []*Batch{
		tree(1, 61, [2]int32{9, -1}, [2]int32{4, 0}, [2]int32{6, 0}),
		tree(2, 61, [2]int32{70, -1}, [2]int32{3, 0}, [2]int32{1, 0}),
		tree(3, 61, [2]int32{1, -1}, [2]int32{33, 0}),
	}
	pack := func(order ...int) (*Batch, map[int][2]int) {
		out, spans := &Batch{}, map[int][2]int{}
		for _, g := range order {
			b := groups[g]
			rows, segs := int32(len(out.IDs)), int32(len(out.Segments))
			for _, s := range b.Segments {
				if s.Parent >= 0 {
					s.Parent += segs
				}
				out.Segments = append(out.Segments, s)
			}
			out.IDs = append(out.IDs, b.IDs...)
			spans[g] = [2]int{len(out.Rows), len(out.Rows) + len(b.Rows)}
			for i, r := range b.Rows {
				out.Rows = append(out.Rows, r+rows)
				out.Targets = append(out.Targets, b.Targets[i])
			}
		}
		return out, spans
	}
	want := make([][]float32, len(groups))
	for g, b := range groups {
		want[g] = must[*Output](t)(e.Forward(b)).LogProb
	}
	for _, order := range [][]int{{0, 1, 2}, {2, 1, 0}, {1, 0, 2}, {1, 2, 0}} {
		b, spans := pack(order...)
		out := must[*Output](t)(e.Forward(b))
		for g, s := range spans {
			if !slices.Equal(out.LogProb[s[0]:s[1]], want[g]) {
				t.Errorf("order %v: log-probs of group %d differ from those of the group alone", order, g)
			}
		}
	}
}

func TestMicroBatches(t *testing.T) {
	m := randomModel(t, execDevice(t, 0), execConfig(), kernels.F64)
	e := newExec(t, m, ExecOptions{})
	b := tree(5, 61, [2]int32{30, -1}, [2]int32{17, -1}, [2]int32{65, -1})
	coef := coefficients(6, len(b.Rows))
	_, want := e.train(t, b, coef, nil)
	check(t, e.ZeroGrad())
	row, tgt := 0, 0
	for _, s := range b.Segments {
		n := int(s.Len)
		part := &Batch{IDs: b.IDs[row : row+n], Segments: []Segment{s}}
		first := tgt
		for ; tgt < len(b.Rows) && int(b.Rows[tgt]) < row+n; tgt++ {
			part.Rows = append(part.Rows, b.Rows[tgt]-int32(row))
			part.Targets = append(part.Targets, b.Targets[tgt])
		}
		must[*Output](t)(e.Forward(part))
		check(t, e.Backward(coef[first:tgt], nil))
		row += n
	}
	compareGrads(t, "three micro-batches", e.gradients(t), want, 1e-12)
}

func TestRecomputeBits(t *testing.T) {
	m := randomModel(t, execDevice(t, 0), execConfig(), kernels.F32)
	b := tree(8, 61, [2]int32{40, -1}, [2]int32{30, 0}, [2]int32{65, 0})
	coef := coefficients(9, len(b.Rows))
	lp, want := newExec(t, m, ExecOptions{}).train(t, b, coef, nil)
	lp2, got := newExec(t, m, ExecOptions{Recompute: true}).train(t, b, coef, nil)
	if !slices.Equal(lp, lp2) {
		t.Error("log-probs differ")
	}
	sameBits(t, "recompute", got, want)
}

func TestThreadsGiveSameBits(t *testing.T) {
	var lps [][]float64
	var grads []map[string][]float64
	b := tree(8, 61, [2]int32{40, -1}, [2]int32{30, 0}, [2]int32{65, 0}, [2]int32{129, -1})
	for _, n := range []int{1, 2, 1} {
		m := randomModel(t, execDevice(t, n), execConfig(), kernels.F32)
		lp, g := newExec(t, m, ExecOptions{}).train(t, b, coefficients(9, len(b.Rows)), nil)
		lps, grads = append(lps, lp), append(grads, g)
	}
	for i := 1; i < len(lps); i++ {
		if !slices.Equal(lps[i], lps[0]) {
			t.Errorf("run %d: log-probs differ", i)
		}
		sameBits(t, fmt.Sprintf("run %d", i), grads[i], grads[0])
	}
}

// TestLogits: log softmax of the logits is the log-prob, with and without targets.
func TestLogits(t *testing.T) {
	m := randomModel(t, execDevice(t, 0), execConfig(), kernels.F32)
	e := newExec(t, m, ExecOptions{})
	b := tree(2, 61, [2]int32{12, -1}, [2]int32{3, 0})
	out := must[*Output](t)(e.Forward(b))
	bare := &Batch{IDs: b.IDs, Segments: b.Segments}
	z := must[[]float32](t)(e.Logits(bare))
	for i, r := range b.Rows {
		row := z[int(r)*61 : int(r)*61+61]
		var sum, ent float64
		for _, x := range row {
			sum += math.Exp(float64(x))
		}
		for _, x := range row {
			lp := float64(x) - math.Log(sum)
			ent -= math.Exp(lp) * lp
		}
		want := float64(row[b.Targets[i]]) - math.Log(sum)
		if math.Abs(want-float64(out.LogProb[i])) > 1e-5 || math.Abs(ent-float64(out.Entropy[i])) > 1e-4 {
			t.Errorf("target %d: logp %v entropy %v, from logits %v %v", i, out.LogProb[i], out.Entropy[i], want, ent)
		}
	}
}

// TestManyStates: a forest of one-token segments has two states per row and outgrows the first arena.
func TestManyStates(t *testing.T) {
	m := randomModel(t, execDevice(t, 0), execConfig(LinearAttention), kernels.F32)
	e := newExec(t, m, ExecOptions{MaxRows: 300})
	segs := make([][2]int32, 300)
	for i := range segs {
		segs[i] = [2]int32{1, int32(i) - 1}
	}
	b := tree(1, 61, segs...)
	one := tree(1, 61, [2]int32{300, -1})
	got, want := must[*Output](t)(e.Forward(b)), must[*Output](t)(e.Forward(one))
	for i := range want.LogProb {
		if d := math.Abs(float64(got.LogProb[i] - want.LogProb[i])); d > 1e-4 {
			t.Fatalf("target %d: %v in pieces, %v whole", i, got.LogProb[i], want.LogProb[i])
		}
	}
}

func TestStepLearns(t *testing.T) {
	m := randomModel(t, execDevice(t, 0), execConfig(), kernels.F32)
	e := newExec(t, m, ExecOptions{})
	b := tree(4, 61, [2]int32{20, -1}, [2]int32{9, 0})
	ones := make([]float32, len(b.Rows))
	for i := range ones {
		ones[i] = -1 / float32(len(ones))
	}
	mean := func() (s float64) {
		for _, x := range must[*Output](t)(e.Forward(b)).LogProb {
			s += float64(x) / float64(len(b.Rows))
		}
		return s
	}
	before := mean()
	for range 30 {
		check(t, e.ZeroGrad())
		must[*Output](t)(e.Forward(b))
		check(t, e.Backward(ones, nil))
		g := must[float64](t)(e.GradNorm())
		check(t, e.Step(Hyper{LR: 1e-2, Beta1: 0.9, Beta2: 0.98, Eps: 1e-8, ClipNorm: 1, GradNorm: g}))
	}
	if after := mean(); after < before+1 {
		t.Errorf("mean log-prob %.3f, after 30 steps %.3f", before, after)
	}
	if m.Params.Version != 30 || m.Params.OptStep != 30 {
		t.Errorf("version %d, optimiser step %d after 30 steps", m.Params.Version, m.Params.OptStep)
	}
}

// TestStepByHand: the first AdamW step moves by lr*sign(g) (bias-corrected m/sqrt(v) is g/|g|), and only matrices decay.
func TestStepByHand(t *testing.T) {
	m := randomModel(t, execDevice(t, 0), execConfig(), kernels.F64)
	e := newExec(t, m, ExecOptions{})
	b := tree(4, 61, [2]int32{20, -1})
	_, grads := e.train(t, b, coefficients(1, len(b.Rows)), nil)
	var sq float64
	for _, g := range grads {
		for _, x := range g {
			sq += x * x
		}
	}
	norm := must[float64](t)(e.GradNorm())
	if math.Abs(norm-math.Sqrt(sq)) > 1e-9*norm {
		t.Errorf("gradient norm %v, by hand %v", norm, math.Sqrt(sq))
	}
	before := map[string][]float64{}
	for _, p := range m.Params.Entries() {
		before[p.Name] = e.reals(t, m.Params.Ptr(Weights, p.Name), p.Len)
	}
	check(t, e.Step(Hyper{LR: 0.01, Beta1: 0.9, Beta2: 0.98, Eps: 1e-12, Decay: 0.5, ClipNorm: norm / 2, GradNorm: norm}))
	for _, p := range m.Params.Entries() {
		after := e.reals(t, m.Params.Ptr(Weights, p.Name), p.Len)
		for i, w := range before[p.Name] {
			g := grads[p.Name][i]
			if math.Abs(g) < 1e-6 {
				continue
			}
			want := w - 0.01*math.Copysign(1, g)
			if len(p.Shape) == 2 {
				want -= 0.01 * 0.5 * w
			}
			if math.Abs(after[i]-want) > 1e-6 {
				t.Fatalf("%s[%d]: %v, want %v", p.Name, i, after[i], want)
			}
		}
	}
	if err := e.Step(Hyper{GradNorm: math.NaN()}); err == nil {
		t.Error("a NaN norm was accepted")
	}
}

func TestForwardRefuses(t *testing.T) {
	m := randomModel(t, execDevice(t, 0), execConfig(LinearAttention), kernels.F32)
	e := newExec(t, m, ExecOptions{MaxRows: 16, MaxTargets: 8})
	ok := func() *Batch {
		return &Batch{IDs: []int32{1, 2, 3}, Segments: []Segment{{Len: 3, Parent: -1}}, Rows: []int32{0, 1}, Targets: []int32{2, 3}}
	}
	must[*Output](t)(e.Forward(ok()))
	for _, c := range []struct {
		name  string
		spoil func(b *Batch)
		want  string
	}{
		{"rows", func(b *Batch) { *b = *tree(1, 61, [2]int32{17, -1}); b.Rows, b.Targets = b.Rows[:2], b.Targets[:2] }, "17 rows, at most 16 fit"},
		{"targets", func(b *Batch) { *b = *tree(1, 61, [2]int32{12, -1}) }, "11 targets, at most 8 fit"},
		{"id", func(b *Batch) { b.IDs[1] = 61 }, "token id 61 at row 1, vocabulary has 61"},
		{"target", func(b *Batch) { b.Targets[0] = -1 }, "target id -1 of target 0"},
		{"row", func(b *Batch) { b.Rows[1] = 3 }, "row 3 of target 1, batch has 3 rows"},
		{"order", func(b *Batch) { b.Rows = []int32{1, 0} }, "row 0 of target 1 after row 1: rows must ascend"},
		{"none", func(b *Batch) { b.Rows, b.Targets = nil, nil }, "no targets"},
		{"pairs", func(b *Batch) { b.Targets = b.Targets[:1] }, "2 target rows, 1 target ids"},
		{"cover", func(b *Batch) { b.IDs = append(b.IDs, 5) }, "segments cover 3 rows, batch has 4"},
		{"empty segment", func(b *Batch) { b.Segments = append(b.Segments, Segment{Len: 0, Parent: 0, Pos: 3}) }, "segment 1"},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := ok()
			c.spoil(b)
			if _, err := e.Forward(b); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v, want %q in it", err, c.want)
			}
			if err := e.Backward([]float32{1, 1}, nil); err == nil {
				t.Error("backward ran after a refused forward")
			}
		})
	}
	must[*Output](t)(e.Forward(ok()))
	if err := e.Backward([]float32{1}, nil); err == nil || !strings.Contains(err.Error(), "1 log-prob gradients for 2 targets") {
		t.Errorf("wrong length: %v", err)
	}
	if err := e.Backward([]float32{1, 1}, []float32{1, 1}); err == nil {
		t.Error("entropy gradients accepted by an exec without Entropy")
	}
	check(t, e.Backward([]float32{1, 1}, nil))
	if err := e.Backward([]float32{1, 1}, nil); err == nil {
		t.Error("backward ran twice")
	}
}
