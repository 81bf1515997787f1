package kernels

// Ops whose CUDA kernels give the bits of the cpu table: the order of every sum and every formula is shared, or the op is exact.

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

// TestAdamWDeviceBits: every storage form of weights and moments holds the bits of the cpu table after three steps, whole and in pieces,
// with gradients down to 1e-8 of the largest and a block of zeros. The odd length leaves a part of a block and unaligned addresses.
func TestAdamWDeviceBits(t *testing.T) {
	const n = 9*StateBlock + 37
	o := AdamWArgs{LR: 1e-3, Beta1: 0.9, Beta2: 0.98, Eps: 1e-8, Decay: 0.1, GradScale: 0.7, Seed: 0x123456789abcdef}
	run := func(r *rig, weights int, s State, cuts ...int) []byte {
		defer r.close()
		a := newAdam(r, weights, s, r.round(randn(rand.New(rand.NewPCG(3, 3)), n, 0.1)), o)
		g, grad := newGradients(2, n), r.raw(4*n)
		for step := 1; step <= 3; step++ {
			x := g.next()
			clear(x[3*StateBlock : 4*StateBlock])
			r.upload(grad, x)
			a.step(step, grad, cuts...)
		}
		return a.stored()
	}
	for s, name := range stateNames {
		for weights, form := range []string{"plain", "hilo", "bf16hilo"} {
			t.Run(name+"/"+form, func(t *testing.T) {
				want := run(newRig(t, F32, Options{Threads: 1}), weights, s)
				for _, order := range fiberOrders() {
					if !slices.Equal(run(emuRig(t, F32, order), weights, s), want) {
						t.Errorf("fiber order %s: other bits than the cpu table", order)
					}
				}
				if !slices.Equal(run(emuRig(t, F32, "forward"), weights, s, StateBlock, 5*StateBlock), want) {
					t.Error("in pieces: other bits")
				}
			})
		}
	}
}

// TestSumSqDeviceBits: the lanes of a block and the chain of blocks are those of the cpu table.
func TestSumSqDeviceBits(t *testing.T) {
	sum := func(r *rig, x []float64) uint64 {
		out := r.raw(8)
		r.run(OpSumSq, &SumSqArgs{N: int64(len(x)), X: r.put(x), Out: out})
		got := make([]float64, 1)
		r.st.DownloadF64(got, out)
		if err := r.st.Sync(); err != nil {
			t.Fatal(err)
		}
		r.free()
		return math.Float64bits(got[0])
	}
	cpu, emu := newRig(t, F32, Options{Threads: 2}), emuRig(t, F32, "random:3")
	for i, n := range []int{1, 7, 8, 4095, 4096, 4097, 5 * 4096, 70*4096 + 13, 1050 * 4096} { // the last one fills a stage of the chain
		x := randn(rand.New(rand.NewPCG(12, uint64(i))), n, 1)
		if want, got := sum(cpu, x), sum(emu, x); got != want {
			t.Errorf("%d elements: %v, on the cpu %v", n, math.Float64frombits(got), math.Float64frombits(want))
		}
	}
}

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

// truncations are the kinds of sampling; a test adds temperature, key and counter.
func truncations() []SampleRow {
	return []SampleRow{
		{TopP: 1}, {TopP: 1, TopK: 1}, {TopP: 1, TopK: 7}, {TopP: 1, TopK: 300}, {TopP: 0.5}, {TopP: 0.95}, {TopP: 0.9999}, {TopP: 1e-6},
		{TopP: 1, MinP: 0.02}, {TopP: 1, MinP: 1}, {TopP: 0.8, TopK: 40, MinP: 0.001}, {TopP: 0.3, TopK: 9},
	}
}

// TestSampleDeviceBits: the tokens of the cpu table, for every kind of truncation, on logits of three kinds: spread (weights far below 2^-28 of
// the mass), close together, and with many ties and minus infinities. Log-probs and entropies are summed in another order.
func TestSampleDeviceBits(t *testing.T) {
	if !slices.Contains(levels(), "avx512") {
		t.Skip("the kernels round as AVX-512 does, which this CPU lacks; on one that has it: go test ./kernels -run TestSampleDeviceBits")
	}
	g := rand.New(rand.NewPCG(14, 1))
	draws, ids := 0, map[int32]bool{}
	for _, c := range []struct{ V, valid, rows int }{{1, 1, 24}, {19, 17, 2400}, {700, 700, 3600}, {5003, 5000, 720}, {33100, 33001, 108}} {
		cpu, emu := newRig(t, F32, Options{Threads: 2, SIMD: "avx512"}), emuRig(t, F32, "random:5")
		z, rows := []float64{}, []SampleRow{}
		for i := range c.rows {
			row := truncations()[i/3%len(truncations())]
			row.KeyLo, row.KeyHi, row.Ctr, row.Temperature = g.Uint64(), g.Uint64(), uint64(g.Uint32()), []float32{1, 0.7, 1.3, 0}[g.IntN(4)]
			one := randn(g, c.V, []float64{12, 1, 2}[i%3])
			for j := range one {
				if i%3 == 2 {
					one[j] = math.Round(one[j]*2) / 2
				}
				if i%3 == 2 && j%5 == 1 {
					one[j] = math.Inf(-1)
				}
			}
			z, rows = append(z, one...), append(rows, row)
		}
		wt, wl, we := cpu.sample(c.V, c.valid, z, rows)
		gt, gl, ge := emu.sample(c.V, c.valid, z, rows)
		for i := range rows {
			draws++
			ids[wt[i]] = true
			if gt[i] != wt[i] {
				t.Errorf("%d of %d ids, row %d %+v: token %d, on the cpu %d", c.valid, c.V, i, rows[i], gt[i], wt[i])
			}
		}
		near(t, fmt.Sprint(c.valid, " ids: log-prob"), gl, wl, 1e-6)
		near(t, fmt.Sprint(c.valid, " ids: entropy"), ge, we, 1e-6)
		cpu.close()
		emu.close()
	}
	t.Logf("%d draws, %d different tokens", draws, len(ids))
}

// TestSampleNotFinite: a row with a NaN or plus infinity, or with nothing but minus infinity, has no token; its neighbours do.
func TestSampleNotFinite(t *testing.T) {
	nan, inf := math.NaN(), math.Inf(1)
	z := []float64{0, 1, 2, 0, nan, 1, inf, 0, 0, -inf, -inf, -inf, 3, -inf, 1}
	eachEmu(t, func(t *testing.T, r *rig) {
		for _, row := range []SampleRow{{TopP: 1, Temperature: 1}, {TopP: 0.5, TopK: 2, Temperature: 1}, {TopP: 1}} {
			tok, logp, _ := r.sample(3, 3, z, slices.Repeat([]SampleRow{row}, 5))
			for i, k := range tok {
				if bad := i >= 1 && i <= 3; bad != (k == -1) || bad != math.IsNaN(logp[i]) {
					t.Errorf("%+v, row %d: token %d with log-prob %v", row, i, k, logp[i])
				}
			}
		}
	})
}

// TestHeadDeviceBits: trainer and sampler report the same bits for the same hidden row, whatever the wave it falls into, and the gradient of
// a hidden row does not depend on the wave either. Targets share rows across the ends of waves.
func TestHeadDeviceBits(t *testing.T) {
	const T, D, V, valid = 37, 48, 333, 321
	eachForm(t, func(t *testing.T, r *rig) {
		g := rand.New(rand.NewPCG(15, 3))
		x, w := r.round(randn(g, T*D, 1)), r.round(randn(g, V*D, 0.3))
		z := r.out32(T * V)
		r.run(OpGemm, &GemmArgs{Flags: TransB | CF32, M: T, N: V, K: D, A: r.put(x), LDA: D, B: r.put(w), LDB: D, C: z, LDC: V})
		rows := make([]SampleRow, T)
		for i := range rows {
			rows[i] = SampleRow{KeyLo: 11, Ctr: uint64(i), Temperature: 0.8, TopP: 1}
			if i%2 == 1 {
				rows[i].TopK, rows[i].TopP, rows[i].MinP = 40, 0.9, 0.01
			}
		}
		tok, logp, ent := r.sample(V, valid, r.get32(z, T*V), rows)
		for _, n := range []int{1, 16, 17, T} { // the head and the draw in one, at every tile of the product
			htok, hlogp, hent := r.lmheadSample(V, valid, D, x[:n*D], w, rows[:n], Truncated)
			if !slices.Equal(htok, tok[:n]) {
				t.Errorf("lmhead_sample of %d rows: tokens %v, of stored logits %v", n, htok, tok[:n])
			}
			same(t, fmt.Sprint("log-prob of lmhead_sample, rows ", n), hlogp, logp[:n])
			same(t, fmt.Sprint("entropy of lmhead_sample, rows ", n), hent, ent[:n])
		}
		h := headIn{T: T, D: D, V: V, valid: valid, temp: float64(float32(0.8))}
		var wantLP, wantEnt []float64
		for i := range T {
			for range 1 + i%3 {
				h.row, h.target = append(h.row, int32(i)), append(h.target, tok[i])
				wantLP, wantEnt = append(wantLP, logp[i]), append(wantEnt, ent[i])
			}
		}
		n := len(h.row)
		d, e, dx := randn(g, n, 1), randn(g, n, 1), r.round(randn(g, T*D, 1))
		var want []float64
		for _, chunk := range []int{1, 5, 20, 1000} {
			h.chunk = chunk
			lp, en, lse := r.lmhead(h, x, w)
			same(t, fmt.Sprint("log-prob of trainer and sampler, chunk ", chunk), lp, wantLP)
			same(t, fmt.Sprint("entropy of trainer and sampler, chunk ", chunk), en, wantEnt)
			got, _ := r.lmheadBwd(h, x, w, lse, en, d, e, dx, make([]float64, V*D))
			if want == nil {
				want = got
			}
			same(t, fmt.Sprint("dx, chunk ", chunk), got, want)
			got, _ = r.lmheadBwd(h, x, w, lse, en, d, e, dx, nil)
			same(t, fmt.Sprint("dx with frozen weights, chunk ", chunk), got, want)
		}
	})
}

// TestHeadSampleUnstored: without truncation lmhead_sample stores no logits in bf16 and draws what sample draws from stored ones, in every tile
// shape; a row that truncates all the same has no token.
func TestHeadSampleUnstored(t *testing.T) {
	eachForm(t, func(t *testing.T, r *rig) {
		g := rand.New(rand.NewPCG(16, 3))
		for _, c := range []struct{ rows, D, V, valid int }{{1, 16, 1, 1}, {5, 40, 70, 64}, {16, 33, 65, 65}, {17, 64, 130, 129}, {130, 24, 200, 191}} {
			x, w := r.round(randn(g, c.rows*c.D, 1)), r.round(randn(g, c.V*c.D, 0.3))
			rows := make([]SampleRow, c.rows)
			for i := range rows {
				rows[i] = SampleRow{KeyLo: 5, KeyHi: uint64(i % 3), Ctr: uint64(i), Temperature: []float32{1, 0.6, 0}[i%3], TopP: 1, TopK: int32(c.valid)}
			}
			z := r.out32(c.rows * c.V)
			r.run(OpGemm, &GemmArgs{Flags: TransB | CF32, M: int64(c.rows), N: int64(c.V), K: int64(c.D), A: r.put(x), LDA: int64(c.D), B: r.put(w), LDB: int64(c.D), C: z, LDC: int64(c.V)})
			wt, wl, we := r.sample(c.V, c.valid, r.get32(z, c.rows*c.V), rows)
			gt, gl, ge := r.lmheadSample(c.V, c.valid, c.D, x, w, rows, 0)
			if !slices.Equal(gt, wt) {
				t.Errorf("%+v: tokens %v, of stored logits %v", c, gt, wt)
			}
			same(t, fmt.Sprintf("%+v: log-prob", c), gl, wl)
			same(t, fmt.Sprintf("%+v: entropy", c), ge, we)
			if r.dt == BF16 && c.valid > 1 {
				rows[0].TopK, rows[0].Temperature = 1, 1
				gt, gl, _ = r.lmheadSample(c.V, c.valid, c.D, x, w, rows, 0)
				if gt[0] != -1 || !math.IsNaN(gl[0]) || !slices.Equal(gt[1:], wt[1:]) {
					t.Errorf("%+v: a row that truncates got %d with log-prob %v", c, gt[0], gl[0])
				}
			}
			r.free()
		}
	})
}

// unstored draws from given logits, which are bfloat16 numbers, by lmhead_sample without truncation: the hidden row is the first unit vector.
func (r *rig) unstored(V, valid int, z []float64, rows []SampleRow) (tok []int32, logp, ent []float64) {
	const D = 16
	x, w := make([]float64, len(rows)*D), make([]float64, V*D)
	for i := range rows {
		x[i*D] = 1
	}
	for i := range z {
		w[i*D] = z[i]
	}
	return r.lmheadSample(V, valid, D, x, w, rows, 0)
}

// TestHeadSampleExtremes: logits that are equal, near the ends of float32's range or minus infinity, alone in a tile or beside others, and ids
// beyond the valid ones that would win: log-prob, entropy and, at temperature 0, the token are those of float64.
func TestHeadSampleExtremes(t *testing.T) {
	inf, odd := math.Inf(-1), func(i int) float64 { return float64(1 - 2*(i%2)) }
	big := func(x float32) float64 { return float64(FromBF16(ToBF16(x))) }
	r := emuRig(t, BF16, "forward")
	defer r.close()
	for name, z := range map[string]func(i int) float64{
		"equal": func(int) float64 { return 3 }, "1e30": func(i int) float64 { return big(1e30) * odd(i) }, "-1e30": func(int) float64 { return big(-1e30) },
		"3e38": func(i int) float64 { return big(3e38) * odd(i) }, "3e38 by tiles": func(i int) float64 { return big(3e38) * odd(i/64) },
		"infinities": func(i int) float64 { return []float64{float64(i % 5), inf, inf}[i%3] }, "a tile of infinities": func(i int) float64 { return []float64{inf, 1}[min(i/64, 1)] + big(0.5)*odd(i) },
	} {
		for _, valid := range []int{65, 129, 130} {
			for _, temp := range []float32{0, 1e-4, 1, 1e30} {
				if temp == 1e-4 && name[0] == '3' {
					continue // infinite after the division
				}
				row, V := make([]float64, 200), 200
				for i := range row {
					if row[i] = big(3e38); i < valid {
						row[i] = z(i)
					}
				}
				rows := make([]SampleRow, 18)
				for i := range rows {
					rows[i] = SampleRow{KeyLo: 7, Ctr: uint64(i), Temperature: temp, TopP: 1}
				}
				tok, logp, ent := r.unstored(V, valid, row, rows)
				// The maximum is taken off before the logarithm is added, which would be lost in it.
				lp, top, sum, want := slices.Clone(row[:valid]), slices.Max(row[:valid]), 0.0, 0.0
				for i := range lp {
					if lp[i] -= top; temp > 0 {
						lp[i] /= float64(temp)
					}
					sum += math.Exp(lp[i])
				}
				for i := range lp {
					if lp[i] -= math.Log(sum); math.Exp(lp[i]) > 0 {
						want -= math.Exp(lp[i]) * lp[i]
					}
				}
				for i, k := range tok {
					if k < 0 || int(k) >= valid || !(lp[k] > -40) || temp == 0 && int(k) != slices.Index(lp, slices.Max(lp)) || math.Abs(logp[i]-lp[k]) > 1e-5 || !(math.Abs(ent[i]-want) < 1e-5) {
						t.Fatalf("%s, %d valid, temperature %g: token %d, log-prob %g, entropy %g; want entropy %g", name, valid, temp, k, logp[i], ent[i], want)
					}
				}
				r.free()
			}
		}
	}
}

// TestHeadSampleDistribution is a chi-square test with fixed keys of what lmhead_sample draws without storing logits.
func TestHeadSampleDistribution(t *testing.T) {
	const V, valid, n, rounds = 100, 90, 130, 100
	r := emuRig(t, BF16, "forward")
	defer r.close()
	z := r.round(randn(rand.New(rand.NewPCG(8, 8)), V, 1))
	var count [valid]float64
	for round := range rounds {
		rows := make([]SampleRow, n)
		for i := range rows {
			rows[i] = SampleRow{KeyLo: 0x1234567890abcdef, KeyHi: uint64(round), Ctr: uint64(i), Temperature: 0.7, TopP: 1}
		}
		tok, _, _ := r.unstored(V, valid, z, rows)
		for _, k := range tok {
			count[k]++
		}
		r.free()
	}
	lp, _, _ := naiveSoftmax(z[:valid], float64(float32(0.7)))
	var chi float64
	for k := range valid {
		want := n * rounds * math.Exp(lp[k])
		chi += (count[k] - want) * (count[k] - want) / want
	}
	if chi > 136 { // 99.9 % point of chi-square with 89 degrees of freedom
		t.Errorf("chi-square %.1f over %d ids", chi, valid)
	}
}
