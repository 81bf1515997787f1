package kernels

import (
	"fmt"
	"math/rand/v2"
	"testing"
)

// paged is a small paged cache on the test's side: pages in a shuffled order, one table row per sequence.
type paged struct {
	att
	size, maxPages int
	table          []int32
	kc, vc         []float64
}

func newPaged(g *rand.Rand, h att, size, maxPages, seqs int) *paged {
	p := &paged{att: h, size: size, maxPages: maxPages, table: make([]int32, seqs*maxPages)}
	for i, x := range g.Perm(len(p.table)) {
		p.table[i] = int32(x)
	}
	n := len(p.table) * size * h.nkv * h.hd
	p.kc, p.vc = randn(g, n, 5), randn(g, n, 5) // rows never written must never be read
	return p
}

func (p *paged) write(r *rig, seq, pos []int32, k, v []float64) {
	a := &KVWriteArgs{T: int64(len(seq)), NKV: int64(p.nkv), HD: int64(p.hd), PageSize: int64(p.size), MaxPages: int64(p.maxPages),
		Seq: r.ints(seq), Pos: r.ints(pos), BlockTable: r.ints(p.table), K: r.put(k), V: r.put(v), KCache: r.put(p.kc), VCache: r.put(p.vc)}
	r.run(OpKVWrite, a)
	p.kc, p.vc = r.get(a.KCache, len(p.kc)), r.get(a.VCache, len(p.vc))
}

func (p *paged) attend(r *rig, seq, pos []int32, q []float64) []float64 {
	n := len(seq) * p.nh * p.hd
	a := &AttnPagedArgs{T: int64(len(seq)), NH: int64(p.nh), NKV: int64(p.nkv), HD: int64(p.hd), PageSize: int64(p.size), MaxPages: int64(p.maxPages),
		Seq: r.ints(seq), Pos: r.ints(pos), BlockTable: r.ints(p.table), Q: r.put(q), KCache: r.put(p.kc), VCache: r.put(p.vc), O: r.out(n)}
	r.run(OpAttnPaged, a)
	return r.get(a.O, n)
}

// TestAttnPaged: prefill in parts and one-row steps over shuffled pages equal the forest op on the whole sequences.
func TestAttnPaged(t *testing.T) {
	for _, h := range []att{{4, 2, 32}, {3, 1, 10}, {8, 1, 16}} {
		for _, size := range []int{16, 5} {
			for _, dt := range []DType{F64, F32} {
				t.Run(fmt.Sprintf("%v/page %d/%v", h, size, dt), func(t *testing.T) {
					tol := map[DType]float64{F64: 1e-12, F32: 2e-6}[dt]
					g := rand.New(rand.NewPCG(7, 3))
					lens := []int{1, 70, 129, 40}
					f := mkForest(t, nil, [2]int{1, -1}, [2]int{70, -1}, [2]int{129, -1}, [2]int{40, -1})
					T := f.NumRows
					q, k, v := randn(g, T*h.nh*h.hd, 1.5), randn(g, T*h.nkv*h.hd, 1.5), randn(g, T*h.nkv*h.hd, 1)
					r := newRig(t, dt, Options{Threads: 2})
					want, _ := r.attn(f, h, q, k, v)
					p := newPaged(g, h, size, 140/size+1, len(lens))
					got := make([]float64, len(want))
					done := make([]int, len(lens))
					for _, steps := range [][]int{{1, 33, 64, 1}, {0, 1, 1, 38}, {0, 36, 63, 1}, {0, 0, 1, 0}} {
						var rows []int
						var seq, pos []int32
						for s, n := range steps {
							for range n {
								rows, seq, pos = append(rows, int(f.Start[s])+done[s]), append(seq, int32(s)), append(pos, int32(done[s]))
								done[s]++
							}
						}
						p.write(r, seq, pos, split(k, h.nkv*h.hd, rows), split(v, h.nkv*h.hd, rows))
						scatterAdd(got, h.nh*h.hd, rows, p.attend(r, seq, pos, split(q, h.nh*h.hd, rows)))
						r.free()
					}
					near(t, "o", got, want, tol)
				})
			}
		}
	}
}

// TestAttnPagedBits: a sequence's rows have the same bits alone, among others, on other pages and with any thread count.
func TestAttnPagedBits(t *testing.T) {
	h := att{4, 2, 32}
	g := rand.New(rand.NewPCG(17, 3))
	const n, others = 150, 3
	k, v, q := randn(g, n*h.nkv*h.hd, 1), randn(g, n*h.nkv*h.hd, 1), randn(g, n*h.nh*h.hd, 1)
	var wantBlock, wantStep []float64
	for i, threads := range []int{1, 1, 2, 3} {
		r := newRig(t, F32, Options{Threads: threads})
		c := newPaged(g, h, 16, 12, others+1)
		s, p := seqSpan(others, 0, n)
		c.write(r, s, p, k, v)
		var seq, pos []int32
		var qs []float64
		if i > 0 { // other sequences around it
			for o := range others {
				os, op := seqSpan(o, 0, n-40*o)
				c.write(r, os, op, randn(g, len(os)*h.nkv*h.hd, 1), randn(g, len(os)*h.nkv*h.hd, 1))
				seq, pos, qs = append(seq, os...), append(pos, op...), append(qs, randn(g, len(os)*h.nh*h.hd, 1)...)
			}
		}
		lead := len(qs)
		block := c.attend(r, append(append([]int32{}, seq...), s[20:]...), append(append([]int32{}, pos...), p[20:]...), append(append([]float64{}, qs...), q[20*h.nh*h.hd:]...))[lead:]
		step := c.attend(r, append(append([]int32{}, seq...), s[n-1]), append(append([]int32{}, pos...), p[n-1]), append(append([]float64{}, qs...), q[(n-1)*h.nh*h.hd:]...))[lead:]
		if i == 0 {
			wantBlock, wantStep = block, step
			continue
		}
		same(t, "block", block, wantBlock)
		same(t, "step", step, wantStep)
	}
}
