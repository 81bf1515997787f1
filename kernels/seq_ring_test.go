package kernels

import (
	"bytes"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

// Tests of the canonical delta rule (abi.h, hs_gdn_ring): chunks of 16 absolute positions, slots with replay rings. BF16 on the emulator.

// eachRing runs fn in BF16 under every fiber order, which must give the same bits.
func eachRing(t *testing.T, fn func(t *testing.T, r *rig)) {
	var want []uint64
	for _, order := range fiberOrders() {
		r := emuRig(t, BF16, order)
		fn(t, r)
		r.close()
		if order == "forward" {
			want = r.log
		} else if !slices.Equal(r.log, want) {
			t.Errorf("fiber order %s gives other bits than forward: a barrier is missing, or a sum has no fixed order", order)
		}
	}
}

// TestGDNSlotBytes: a head's state, and a ring of 16 rows of d, k and g where there is one.
func TestGDNSlotBytes(t *testing.T) {
	for _, c := range []struct {
		dt   DType
		l    lin
		ring bool
	}{
		{BF16, lin{16, 128, 32, 128}, true}, {BF16, lin{1, 16, 3, 16}, true}, {BF16, lin{1, 64, 1, 80}, true}, {BF16, lin{1, 32, 1, 112}, true},
		{BF16, lin{1, 48, 1, 48}, false}, {BF16, lin{1, 16, 1, 144}, false}, {BF16, lin{1, 16, 1, 8}, false}, {F32, lin{16, 128, 32, 128}, false},
		{F64, lin{1, 16, 3, 16}, false},
	} {
		if got := GDNRing(c.dt, c.l.dk, c.l.dv); got != c.ring {
			t.Errorf("%v %v: rings %v, want %v", c.dt, c.l, got, c.ring)
		}
		want := c.l.dk * c.l.dv * c.dt.Wide().Size()
		if c.ring {
			want += GDNRingRows * (4*c.l.dv + 2*c.l.dk + 4)
		}
		if got := GDNSlotBytes(c.dt, c.l.nv, c.l.dk, c.l.dv); got != int64(c.l.nv*want) {
			t.Errorf("%v %v: slots of %d bytes, want %d", c.dt, c.l, got, c.l.nv*want)
		}
	}
}

// TestRingPositions: a piece of any length from any position, with slots, has the bits of the whole sequence, and so has a child of a segment of
// that length; its chunk states are those of float64.
func TestRingPositions(t *testing.T) {
	for _, c := range []struct {
		l       lin
		at, len []int
	}{
		{lin{1, 16, 2, 16}, span(0, 18), []int{1, 15, 16, 17, 63, 64, 65}},
		{lin{1, 32, 1, 48}, []int{3, 16}, []int{1, 14, 66}},
		{lin{1, 64, 2, 32}, []int{0, 15}, []int{2, 65}},
		{lin{1, 128, 1, 128}, []int{0, 9, 16, 17}, []int{1, 7, 65}},
	} {
		t.Run(fmt.Sprint(c.l), func(t *testing.T) {
			eachRing(t, func(t *testing.T, r *rig) {
				x := randGDN(rand.New(rand.NewPCG(31, 1)), c.l, slices.Max(c.at)+slices.Max(c.len)).rounded(r)
				w := c.l.nv * c.l.dv
				whole, _, _ := r.gdn(mkForest(t, nil, [2]int{slices.Max(c.at) + slices.Max(c.len), -1}), c.l, x, nil)
				for _, at := range c.at {
					for _, n := range c.len {
						what := fmt.Sprintf("%d rows from position %d", n, at)
						rec := r.slots(c.l, 1)
						if at > 0 {
							_, _, rec = r.gdn(mkPiece(t, 0, 0, at), c.l, x.rows(c.l, span(0, at)), rec)
						}
						o, _, _ := r.gdn(mkPiece(t, 0, at, at+n), c.l, x.rows(c.l, span(at, at+n)), rec)
						same(t, what, o, whole[at*w:(at+n)*w])
						if at > 0 {
							f := mkForest(t, nil, [2]int{at, -1}, [2]int{n, 0})
							checkGDNEmu(t, r, f, c.l, x.rows(c.l, span(0, at+n)))
							o, _, _ = r.gdn(f, c.l, x.rows(c.l, span(0, at+n)), nil)
							same(t, what+" as a child", o, whole[:(at+n)*w])
						}
						r.free()
					}
				}
			})
		})
	}
}

// TestRingForest: children of parents of every length around the chunk, chains of short ones, whole paths bit for bit, and the backward from the
// states that the forward left.
func TestRingForest(t *testing.T) {
	chain := [][2]int{{3, -1}, {1, 0}, {2, 1}, {1, 2}, {4, 3}, {1, 4}, {2, 5}, {1, 6}, {5, 7}, {70, 8}, {1, 8}, {16, 10}}
	parents := [][2]int{{1, -1}, {3, -1}, {15, -1}, {16, -1}, {17, -1}}
	for i := range 5 {
		parents = append(parents, [2]int{2 + 13*i, i}, [2]int{66, i}, [2]int{1, i})
	}
	for _, c := range []struct {
		name string
		l    lin
		lp   [][2]int
	}{
		{"parents", lin{2, 16, 4, 16}, parents}, {"chain", lin{1, 16, 2, 32}, chain}, {"chain", lin{1, 64, 1, 16}, chain},
		{"wide", lin{1, 128, 2, 128}, [][2]int{{5, -1}, {3, 0}, {66, 1}, {17, 1}, {1, 0}}},
	} {
		t.Run(fmt.Sprintf("%s/%v", c.name, c.l), func(t *testing.T) {
			f := mkForest(t, nil, c.lp...)
			g := rand.New(rand.NewPCG(32, 1))
			x, do := randGDN(g, c.l, f.NumRows), randn(g, f.NumRows*c.l.nv*c.l.dv, 1)
			eachRing(t, func(t *testing.T, r *rig) {
				checkGDNEmu(t, r, f, c.l, x)
				o, _, _ := r.gdn(f, c.l, x, nil)
				w := c.l.nv * c.l.dv
				for s := range f.NumSeg {
					rows := path(f, s)
					alone, _, _ := r.gdn(mkForest(t, nil, [2]int{len(rows), -1}), c.l, x.rows(c.l, rows), nil)
					same(t, fmt.Sprintf("segment %d and alone", s), o[int(f.Start[s])*w:int(f.Start[s]+f.Len[s])*w], alone[len(alone)-int(f.Len[s])*w:])
				}
				checkGDNBwdEmu(t, r, c.name, f, c.l, x, do)
			})
		})
	}
}

// TestRingSlots: slots and segments without one stand beside each other, only their own slots are written, a copied slot goes on as the original
// in the middle of a ring, and a cleared one starts anew.
func TestRingSlots(t *testing.T) {
	l := lin{1, 32, 2, 32}
	w := l.nv * l.dv
	eachRing(t, func(t *testing.T, r *rig) {
		g := rand.New(rand.NewPCG(33, 1))
		x := randGDN(g, l, 60)
		f, err := NewForest([]Segment{{Len: 21, Parent: -1}, {Len: 5, Parent: -1}, {Len: 9, Parent: -1}}, []int32{3, -1, 1})
		if err != nil {
			t.Fatal(err)
		}
		n := r.slotBytes(l)
		o, _, rec := r.gdn(f, l, x.rows(l, span(0, 35)), bytes.Repeat([]byte{0}, 5*n))
		for _, i := range []int{0, 2, 4} {
			if !bytes.Equal(rec[i*n:(i+1)*n], make([]byte, n)) {
				t.Errorf("slot %d belongs to nobody and was written", i)
			}
		}
		alone, _, _ := r.gdn(mkForest(t, nil, [2]int{5, -1}), l, x.rows(l, span(21, 26)), nil)
		same(t, "segment without a slot", o[21*w:26*w], alone)

		p := r.putBytes(rec)
		r.st.SlotCopy(&SlotCopyArgs{N: 3, Bytes: int64(n), Src: r.ints([]int32{3, 3, -1}), Dst: r.ints([]int32{0, 4, 1}), Base: p})
		rec = r.getBytes(p, len(rec))
		var first [][]float64 // rows 21.. of the three forks, by steps, steps, and one piece
		for _, slot := range []int32{3, 0} {
			var os []float64
			for at := 21; at < 37; at++ {
				var part []float64
				part, rec = r.gdnStep(l, x.rows(l, []int{14 + at}), []int32{slot}, []int32{int32(at)}, rec)
				os = append(os, part...)
			}
			first = append(first, os)
		}
		same(t, "fork by steps", first[1], first[0])
		piece, _, rec := r.gdn(mkPiece(t, 4, 21, 37), l, x.rows(l, span(35, 51)), rec)
		same(t, "fork by a piece", piece, first[0])
		for _, i := range []int{0, 4} {
			a, ra := r.slotState(l, rec, 3, 37)
			b, rb := r.slotState(l, rec, i, 37)
			same(t, fmt.Sprintf("state of fork %d", i), b, a)
			same(t, fmt.Sprintf("ring of fork %d", i), rb, ra)
		}
		fresh, _ := r.gdnStep(l, x.rows(l, []int{0}), []int32{1}, []int32{0}, rec)
		same(t, "a cleared slot", fresh, o[:w])
	})
}

// TestRingStepBatch: a batch at all 16 places of the ring, many rows, equals each row alone and the whole sequences.
func TestRingStepBatch(t *testing.T) {
	for _, c := range []struct {
		l lin
		B int
	}{{lin{1, 16, 1, 16}, 40}, {lin{1, 128, 2, 128}, 17}} {
		t.Run(fmt.Sprint(c.l), func(t *testing.T) {
			eachRing(t, func(t *testing.T, r *rig) {
				const steps = 3
				x := randGDN(rand.New(rand.NewPCG(34, 1)), c.l, c.B+steps)
				w := c.l.nv * c.l.dv
				whole, _, _ := r.gdn(mkForest(t, nil, [2]int{c.B + steps, -1}), c.l, x, nil)
				rec, segs, slots := r.slots(c.l, c.B), make([]Segment, c.B), make([]int32, c.B)
				var rows []int
				for i := range c.B { // slot i: the first i+1 rows
					segs[i], slots[i] = Segment{Len: int32(i + 1), Parent: -1}, int32(i)
					rows = append(rows, span(0, i+1)...)
				}
				f, err := NewForest(segs, slots)
				if err != nil {
					t.Fatal(err)
				}
				_, _, rec = r.gdn(f, c.l, x.rows(c.l, rows), rec)
				for k := range steps {
					at, pos := make([]int, c.B), make([]int32, c.B)
					for i := range c.B {
						at[i], pos[i] = i+1+k, int32(i+1+k)
					}
					at, pos = at[:c.B-k], pos[:c.B-k] // sequences leave the batch
					var o []float64
					o, rec = r.gdnStep(c.l, x.rows(c.l, at), slots[:c.B-k], pos, rec)
					for i := range at {
						same(t, fmt.Sprintf("step %d of sequence %d", k, i), o[i*w:(i+1)*w], whole[at[i]*w:(at[i]+1)*w])
					}
				}
			})
		})
	}
}

// TestRingLong: the error of the states against float64 over a long sequence, beside that of the recurrent form in float32 on the same inputs.
// An element split into two bfloat16 loses at most 2^-18; gates forget, so the error settles (weak decay forgets least) and does not grow with the rows.
func TestRingLong(t *testing.T) {
	const T = 272
	for _, l := range []lin{{1, 16, 1, 16}, {1, 128, 1, 128}} {
		for _, kind := range []string{"random", "weak decay"} {
			t.Run(fmt.Sprintf("%v/%s", l, kind), func(t *testing.T) {
				r, row := emuRig(t, BF16, "forward"), emuRig(t, F32, "forward")
				x := hardGDN(kind, l, T).rounded(r)
				f := mkForest(t, nil, [2]int{T, -1})
				o, canonical, _ := r.gdn(f, l, x, nil)
				_, recurrent, _ := row.gdn(f, l, x, nil)
				ss, S := l.nv*l.dk*l.dv, make([]float64, l.nv*l.dk*l.dv)
				var want []float64
				for at := 0; at < T; at += 16 {
					if c := at / GDNChunk; at > 0 && at%GDNChunk == 0 {
						e, e32 := relErr(canonical[c*ss:(c+1)*ss], S), relErr(recurrent[c*ss:(c+1)*ss], S)
						t.Logf("after %d rows: canonical %.2g, recurrent float32 %.2g", at, e, e32)
						if e > 1e-5 {
							t.Errorf("state after %d rows: relative error %.3g > 1e-5", at, e)
						}
					}
					want = append(want, naiveGDN(l, x.rows(l, span(at, at+16)), 16, S)...)
				}
				near(t, "last state", canonical[len(canonical)-ss:], S, 1e-5)
				near(t, "o", o, want, tolOf(BF16))
			})
		}
	}
}

// TestRingGates: no decay, decays that underflow within a row and within a chunk, beta 0 and 1, keys that repeat, zero rows; and rows of NaN
// leave every row before them as it is.
func TestRingGates(t *testing.T) {
	l := lin{1, 16, 2, 32}
	const T = 83
	eachRing(t, func(t *testing.T, r *rig) {
		for _, kind := range append(slices.Clone(hardKinds), "g 0", "underflow", "vanish", "exact beta", "zero rows") {
			x := hardGDN(kind, l, T)
			for i := range x.g {
				switch row := i / l.nv; {
				case kind == "g 0":
					x.g[i] = 0
				case kind == "underflow":
					x.g[i] = -90
				case kind == "vanish" && row%5 == 2:
					x.g[i] = -1e30
				case kind == "exact beta":
					x.beta[i] = float64(row % 2)
				case kind == "zero rows" && row%3 == 0:
					x.beta[i] = 0
					clear(x.k[row*l.dk : (row+1)*l.dk])
					clear(x.v[row*l.nv*l.dv : (row+1)*l.nv*l.dv])
				}
			}
			checkGDNEmu(t, r, mkForest(t, nil, [2]int{T, -1}), l, x)
			checkGDNEmu(t, r, mkForest(t, nil, [2]int{19, -1}, [2]int{T - 19, 0}), l, x)
			r.free()
		}
		x := randGDN(rand.New(rand.NewPCG(35, 1)), l, T)
		f := mkForest(t, nil, [2]int{T, -1})
		want, _, _ := r.gdn(f, l, x, nil)
		const bad = 70
		for i := bad * l.nv * l.dv; i < len(x.v); i++ {
			x.v[i] = math.NaN()
		}
		got, _, _ := r.gdn(f, l, x, nil)
		same(t, "rows before a NaN", got[:bad*l.nv*l.dv], want[:bad*l.nv*l.dv])
		if !math.IsNaN(got[bad*l.nv*l.dv]) {
			t.Errorf("a row of NaN gives %v", got[bad*l.nv*l.dv])
		}
	})
}

// TestRingArguments: what the ring form needs beyond the other one is checked.
func TestRingArguments(t *testing.T) {
	l := lin{1, 16, 1, 16}
	r := emuRig(t, BF16, "forward")
	x := randGDN(rand.New(rand.NewPCG(36, 1)), l, 1)
	step := func() *GDNStepArgs {
		return &GDNStepArgs{B: 1, NK: 1, DK: 16, NV: 1, DV: 16, Slot: r.ints([]int32{0}), Pos: r.ints([]int32{0}), Q: r.put(x.q), K: r.put(x.k), V: r.put(x.v),
			Beta: r.put32(x.beta), G: r.put32(x.g), O: r.out(16), RecState: r.putBytes(r.slots(l, 2))}
	}
	for name, c := range map[string]struct {
		change func(a *GDNStepArgs)
		want   string
	}{
		"no positions":  {func(a *GDNStepArgs) { a.Pos = 0 }, "pos is required"},
		"unaligned row": {func(a *GDNStepArgs) { a.K += 2 }, "multiples of 16"},
	} {
		a := step()
		c.change(a)
		if err := r.try(OpGDNStep, a); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want an error with %q", name, err, c.want)
		}
	}
	if err := r.try(OpGDNStep, step()); err != nil {
		t.Error(err)
	}
}
