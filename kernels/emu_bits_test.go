package kernels

// Ops whose CUDA kernels give the bits of the cpu table: the order of every sum and every formula is shared, or the op is exact.

import (
	"fmt"
	"math/rand/v2"
	"testing"
)

// TestScatterDeviceBits: embed_bwd and gather_bwd add in the order of the cpu table, however the equal rows lie.
func TestScatterDeviceBits(t *testing.T) {
	const n, D, rows = 130, 36, 11
	g := rand.New(rand.NewPCG(13, 1))
	src, dst := randn(g, n*D, 1), randn(g, rows*D, 1)
	ids := map[string][]int32{"one": make([]int32, n)}
	for i := range n {
		ids["random"] = append(ids["random"], g.Int32N(rows))
		ids["adjacent"] = append(ids["adjacent"], int32(i/20))
	}
	for name, row := range ids {
		run := func(r *rig) [][]float64 {
			p, q := r.put(dst), r.put(dst)
			r.run(OpEmbedBwd, &EmbedBwdArgs{T: n, D: D, V: rows, IDs: r.ints(row), DY: r.put(src), DW: p})
			r.run(OpGatherBwd, &GatherArgs{N: n, D: D, T: rows, Row: r.ints(row), Src: r.put(src), Dst: q})
			return [][]float64{r.get(p, rows*D), r.get(q, rows*D)}
		}
		want, got := run(newRig(t, F32, Options{Threads: 1})), run(emuRig(t, F32, "reverse"))
		for i, op := range []string{"embed_bwd", "gather_bwd"} {
			same(t, fmt.Sprint(op, ", ", name), got[i], want[i])
		}
	}
}
