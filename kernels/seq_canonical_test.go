package kernels

import (
	"fmt"
	"math/rand/v2"
	"testing"
)

// TestCanonicalDelta: conv and delta rule give a row the same bits in a training forest, in a prefill that is cut anywhere, row by row in
// decode, and after a fork of the state, in BF16 and F32 (gpu.md 7.2). Widths: state in registers or in shared memory, several value heads
// per key head, more columns than one block has, the real width; in BF16 with canonical chunks and rings, and without.
func TestCanonicalDelta(t *testing.T) {
	for _, c := range []struct {
		l lin
		T int
	}{{lin{2, 16, 4, 16}, 150}, {lin{1, 5, 3, 7}, 70}, {lin{1, 32, 1, 32}, 67}, {lin{1, 40, 2, 70}, 40}, {lin{1, 64, 2, 64}, 40}, {lin{1, 16, 1, 48}, 70},
		{lin{1, 64, 1, 80}, 36}, {lin{1, 128, 2, 128}, 37}} {
		t.Run(fmt.Sprint(c.l), func(t *testing.T) {
			eachEmu(t, func(t *testing.T, r *rig) { canonicalDelta(t, r, c.l, c.T) })
		})
	}
}

// delta is a sequence's outputs: o [T, nv*dv], and the slot and window after its last row.
type delta struct {
	o, conv []float64
	rec     []byte
}

func canonicalDelta(t *testing.T, r *rig, l lin, T int) {
	t.Helper()
	g := rand.New(rand.NewPCG(uint64(T), 17))
	x := randConv(g, l, T).rounded(r)
	ss, cs := l.nv*l.dk*l.dv, 3*l.conv()
	var ring []float64                              // what the first run leaves in its ring
	whole := func(rows []int) (o, last []float64) { // as training sees it: no slots
		f := mkForest(t, nil, [2]int{len(rows), -1})
		o, states, _ := r.gdn(f, l, r.convgate(f, l, x.rows(l, rows), nil).gdnIn, nil)
		return o, states[len(states)-ss:]
	}
	want, last := whole(span(0, T))

	// run continues d, in slot 1 of two, through rows up to each cut as a prefill and then row by row up to end.
	run := func(d delta, at int, cuts []int, end int) delta {
		rec, conv := append(r.slots(l, 1), d.rec...), append(make([]float64, cs), d.conv...)
		o := append([]float64{}, d.o...)
		for _, c := range cuts {
			f := mkPiece(t, 1, at, c)
			y := r.convgate(f, l, x.rows(l, span(at, c)), conv)
			part, _, out := r.gdn(f, l, y.gdnIn, rec)
			o, rec, conv, at = append(o, part...), out, y.state, c
		}
		for ; at < end; at++ {
			y := r.convgateStep(l, x.rows(l, span(at, at+1)), []int32{1}, conv)
			part, out := r.gdnStep(l, y.gdnIn, []int32{1}, []int32{int32(at)}, rec)
			o, rec, conv = append(o, part...), out, y.state
		}
		r.free()
		return delta{o, conv[cs:], rec[r.slotBytes(l):]}
	}
	start := delta{nil, make([]float64, cs), r.slots(l, 1)}
	cuts := [][]int{{T}, {1, T}, {16, T - 3}, {T / 2}}
	for range 2 {
		a := 1 + g.IntN(T-2)
		cuts = append(cuts, []int{a, a + 1 + g.IntN(T-a-1), T}[:1+g.IntN(2)])
	}
	for _, c := range cuts {
		d := run(start, 0, c, T)
		same(t, fmt.Sprintf("%v cuts %v: o", r.dt, c), d.o, want)
		state, rows := r.slotState(l, d.rec, 0, T)
		if ring == nil {
			ring = rows
		}
		same(t, fmt.Sprintf("%v cuts %v: state", r.dt, c), state, last)
		same(t, fmt.Sprintf("%v cuts %v: ring", r.dt, c), rows, ring)
	}

	// A fork: two continuations of one prefix, from copies of its states, as a forest and as whole sequences.
	p, n := T/3, T/2-T/3
	prefix := run(start, 0, []int{p}, p)
	f := mkForest(t, nil, [2]int{p, -1}, [2]int{n, 0}, [2]int{T - p - n, 0}, [2]int{1, 1})
	rows := span(0, T+1)
	rows[T] = 0 // the grandchild repeats row 0
	xf := x.rows(l, rows)
	of, _, _ := r.gdn(f, l, r.convgate(f, l, xf, nil).gdnIn, nil)
	w := l.nv * l.dv
	for s := range 4 {
		at := path(f, s)
		for i := range at {
			at[i] = rows[at[i]]
		}
		o, _ := whole(at)
		same(t, fmt.Sprintf("%v segment %d of the forest and alone", r.dt, s), of[int(f.Start[s])*w:int(f.Start[s]+f.Len[s])*w], o[len(o)-int(f.Len[s])*w:])
	}
	same(t, "first continuation", run(prefix, p, nil, p+n).o, of[:(p+n)*w])
}
