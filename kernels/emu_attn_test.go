package kernels

// Attention on the emulated CUDA kernels: shapes of real models, and the same bits in training, prefill and decode (gpu.md 7.2).

import (
	"fmt"
	"math/rand/v2"
	"testing"
)

// TestAttnShapes: head widths 16 to 256 and 1 to 8 query heads per kv head, over forests with lengths around a tile.
func TestAttnShapes(t *testing.T) {
	for _, c := range []struct {
		att
		lp [][2]int
	}{
		{att{1, 1, 16}, [][2]int{{1, -1}, {63, -1}, {64, -1}, {65, -1}, {127, -1}, {130, -1}}},
		{att{8, 1, 16}, [][2]int{{63, -1}, {1, 0}, {65, 1}, {3, 0}, {64, 2}}},
		{att{4, 2, 32}, [][2]int{{65, -1}, {127, 0}, {1, 0}, {1, 2}, {30, 3}}},
		{att{3, 1, 48}, [][2]int{{5, -1}, {70, 0}, {4, 1}}},
		{att{4, 1, 64}, [][2]int{{20, -1}, {50, 0}, {64, 1}, {5, 1}}},
		{att{2, 1, 128}, [][2]int{{64, -1}, {6, 0}, {1, 0}}},
		{att{4, 1, 256}, [][2]int{{10, -1}, {57, 0}, {1, 0}, {2, 1}}},
	} {
		t.Run(fmt.Sprint(c.att), func(t *testing.T) {
			f, h := mkForest(t, nil, c.lp...), c.att
			g := rand.New(rand.NewPCG(3, 8))
			T := f.NumRows
			q, k, v, do := randn(g, T*h.nh*h.hd, 1.5), randn(g, T*h.nkv*h.hd, 1.5), randn(g, T*h.nkv*h.hd, 1), randn(g, T*h.nh*h.hd, 1)
			eachEmu(t, func(t *testing.T, r *rig) { checkAttn(t, r, f, h, q, k, v, do) })
		})
	}
}

// seqSpan is n rows of sequence seq from position `from` on.
func seqSpan(seq, from, n int) (s, p []int32) {
	for i := range n {
		s, p = append(s, int32(seq)), append(p, int32(from+i))
	}
	return s, p
}

// TestAttnCanonical: a row of a forest has the bits of the same row prefilled in any pieces and of one decode step among other sequences,
// for several page sizes. Sequences share the pages that their common ancestors fill.
func TestAttnCanonical(t *testing.T) {
	for _, c := range []struct {
		att
		size int
		lp   [][2]int
	}{
		{att{4, 1, 16}, 16, [][2]int{{128, -1}, {70, 0}, {5, 0}, {67, 1}, {1, 1}, {90, -1}}},
		{att{2, 2, 32}, 64, [][2]int{{64, -1}, {65, 0}, {127, 0}, {3, -1}}},
		{att{6, 2, 10}, 5, [][2]int{{33, -1}, {40, 0}, {64, 0}, {1, 2}}},
		{att{8, 1, 64}, 16, [][2]int{{70, -1}, {1, 0}, {20, 0}}},
		{att{4, 1, 256}, 64, [][2]int{{66, -1}, {3, 0}}},
	} {
		t.Run(fmt.Sprintf("%v/page %d", c.att, c.size), func(t *testing.T) {
			f, h := mkForest(t, nil, c.lp...), c.att
			w := h.nh * h.hd
			eachEmu(t, func(t *testing.T, r *rig) {
				g := rand.New(rand.NewPCG(31, 8))
				T := f.NumRows
				q, k, v := randn(g, T*w, 1.5), randn(g, T*h.nkv*h.hd, 1.5), randn(g, T*h.nkv*h.hd, 1)
				want, _ := r.attn(f, h, q, k, v)
				p := newPaged(g, h, c.size, 300/c.size+1, f.NumSeg)
				for s := range f.NumSeg { // full pages of the ancestors are shared
					if a := f.Parent[s]; a >= 0 {
						copy(p.table[s*p.maxPages:][:int(f.Pos[s])/c.size], p.table[int(a)*p.maxPages:])
					}
				}
				var dseq, dpos []int32 // the last row of every sequence, as a decode step
				var drows []int
				for s := range f.NumSeg {
					rows := path(f, s)
					for at := 0; at < len(rows); {
						n := min(1+g.IntN(100), len(rows)-at)
						seq, pos := seqSpan(s, at, n)
						part := rows[at : at+n]
						p.write(r, seq, pos, split(k, h.nkv*h.hd, part), split(v, h.nkv*h.hd, part))
						same(t, fmt.Sprintf("sequence %d, rows %d..%d", s, at, at+n-1), p.attend(r, seq, pos, split(q, w, part)), split(want, w, part))
						at += n
					}
					dseq, dpos, drows = append(dseq, int32(s)), append(dpos, int32(len(rows)-1)), append(drows, rows[len(rows)-1])
				}
				same(t, "decode", p.attend(r, dseq, dpos, split(q, w, drows)), split(want, w, drows))
				r.free()
			})
		})
	}
}

// TestAttnSplits: the same across a split boundary, where decode merges states of different blocks and prefill and training their own; a
// group of sequences shares its prompt's pages.
func TestAttnSplits(t *testing.T) {
	h := att{2, 1, 16}
	const prompt, size = 2040, 64
	f := mkForest(t, nil, [2]int{prompt, -1}, [2]int{80, 0}, [2]int{9, 0}, [2]int{8, 0})
	w, T := h.nh*h.hd, f.NumRows
	eachEmu(t, func(t *testing.T, r *rig) {
		g := rand.New(rand.NewPCG(13, 8))
		q, k, v := randn(g, T*w, 1.5), randn(g, T*h.hd, 1.5), randn(g, T*h.hd, 1)
		q, k, v = r.round(q), r.round(k), r.round(v)
		want, lse := r.attn(f, h, q, k, v)
		for _, s := range []int{1, 2} { // the last row of a segment
			rows := path(f, s)
			last := rows[len(rows)-1]
			o, l := naiveAttn(h, q, k, v, last, rows)
			near(t, "o", split(want, w, []int{last}), o, 2*tolOf(r.dt))
			near(t, "lse", split(lse, h.nh, []int{last}), l, r.tol32())
		}
		p := newPaged(g, h, size, 40, f.NumSeg)
		for s := 1; s < f.NumSeg; s++ {
			copy(p.table[s*p.maxPages:][:prompt/size], p.table)
		}
		var seqs, poss []int32
		var all []int
		for s := 1; s < f.NumSeg; s++ {
			rows := path(f, s)
			seq, pos := seqSpan(s, 0, len(rows))
			p.write(r, seq, pos, split(k, h.hd, rows), split(v, h.hd, rows))
			if s == 1 {
				same(t, "prefill", p.attend(r, seq, pos, split(q, w, rows)), split(want, w, rows))
			}
			for _, n := range []int{2046, 2047, 2048, 2049, len(rows) - 1} {
				if n < len(rows) {
					seqs, poss, all = append(seqs, int32(s)), append(poss, int32(n)), append(all, rows[n])
				}
			}
		}
		got := p.attend(r, seqs, poss, split(q, w, all))
		same(t, "decode of a group", got, split(want, w, all))
		for i := range all {
			same(t, fmt.Sprintf("decode of row %d alone", all[i]), p.attend(r, seqs[i:i+1], poss[i:i+1], split(q, w, all[i:i+1])), got[i*w:][:w])
		}
	})
}
