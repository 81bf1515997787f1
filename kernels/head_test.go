package kernels

import (
	"cmp"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

type headIn struct {
	T, D, V, valid, chunk int
	temp                  float64
	row, target           []int32
}

func (r *rig) lmhead(h headIn, x, w []float64) (logp, ent, lse []float64) {
	n := len(h.row)
	lp, en, ls := r.out32(n), r.out32(n), r.out32(n)
	r.run(OpLMHead, &LMHeadArgs{N: int64(n), T: int64(h.T), D: int64(h.D), V: int64(h.V), VocabValid: int64(h.valid), Chunk: int64(h.chunk), Temperature: h.temp,
		Row: r.ints(h.row), Target: r.ints(h.target), X: r.put(x), W: r.put(w), LogP: lp, Entropy: en, LSE: ls})
	return r.get32(lp, n), r.get32(en, n), r.get32(ls, n)
}

// lmheadBwd adds to dx and dw; dent and dw may be nil.
func (r *rig) lmheadBwd(h headIn, x, w, lse, ent, dlogp, dent, dx, dw []float64) (gx, gw []float64) {
	xp, wp, dp := r.put(dx), Ptr(0), Ptr(0)
	if dw != nil {
		wp = r.put32(dw)
	}
	if dent != nil {
		dp = r.put32(dent)
	}
	r.run(OpLMHeadBwd, &LMHeadBwdArgs{N: int64(len(h.row)), T: int64(h.T), D: int64(h.D), V: int64(h.V), VocabValid: int64(h.valid), Chunk: int64(h.chunk), Temperature: h.temp,
		Row: r.ints(h.row), Target: r.ints(h.target), X: r.put(x), W: r.put(w), LSE: r.put32(lse), Entropy: r.put32(ent), DLogP: r.put32(dlogp), DEnt: dp, DX: xp, DW: wp})
	return r.get(xp, h.T*h.D), r.get32(wp, len(dw))
}

// naiveSoftmax is log-softmax of z*(1/temp) and its entropy.
func naiveSoftmax(z []float64, temp float64) (lp []float64, ent, lse float64) {
	m, s := math.Inf(-1), 0.0
	for _, x := range z {
		m = max(m, x/temp)
	}
	for _, x := range z {
		s += math.Exp(x/temp - m)
	}
	lse = m + math.Log(s)
	for _, x := range z {
		lp = append(lp, x/temp-lse)
		ent -= math.Exp(x/temp-lse) * (x/temp - lse)
	}
	return lp, ent, lse
}

// heads are the shapes of the head tests: repeated rows, chunks that split and do not divide the rows, padded vocabulary.
func heads() []headIn {
	return []headIn{
		{T: 1, D: 1, V: 1, valid: 1, chunk: 1, temp: 1, row: []int32{0}, target: []int32{0}},
		{T: 6, D: 5, V: 23, valid: 19, chunk: 2, temp: 0.7, row: []int32{0, 2, 2, 2, 3, 5, 5}, target: []int32{1, 0, 18, 0, 7, 7, 3}},
		{T: 40, D: 33, V: 300, valid: 300, chunk: 64, temp: 1, row: []int32{3, 4, 9, 9, 39}, target: []int32{0, 299, 17, 18, 150}},
	}
}

func TestLMHead(t *testing.T) {
	f64 := newRig(t, F64, Options{})
	eachRig(t, func(t *testing.T, r *rig) {
		for i, h := range heads() {
			g := rand.New(rand.NewPCG(1, uint64(i)))
			x, w := r.round(randn(g, h.T*h.D, 1)), r.round(randn(g, h.V*h.D, 1))
			logp, ent, lse := r.lmhead(h, x, w)
			wlp, wen, wls := []float64{}, []float64{}, []float64{}
			for k, row := range h.row {
				z := naiveGemm(TransB, 1, h.valid, h.D, x[int(row)*h.D:], w, nil)
				lp, e, l := naiveSoftmax(z, h.temp)
				wlp, wen, wls = append(wlp, lp[h.target[k]]), append(wen, e), append(wls, l)
			}
			tol := 4 * r.tol32()
			if h.temp != 1 {
				tol = max(tol, 1e-7) // temperature enters as a float32
			}
			near(t, fmt.Sprint(i, " logp"), logp, wlp, tol)
			near(t, fmt.Sprint(i, " entropy"), ent, wen, tol)
			near(t, fmt.Sprint(i, " lse"), lse, wls, tol)
			d, e, dx, dw := randn(g, len(h.row), 1), randn(g, len(h.row), 1), r.round(randn(g, h.T*h.D, 1)), r.round32(randn(g, h.V*h.D, 1))
			grad := 10 * tol
			if r.dt == BF16 {
				grad = 2 * tolOf(BF16) // gradients of logits and dx are rounded
			}
			gx, gw := r.lmheadBwd(h, x, w, lse, ent, d, e, dx, dw)
			rx, rw := f64.lmheadBwd(h, x, w, wls, wen, d, e, dx, dw)
			near(t, fmt.Sprint(i, " dx"), gx, rx, grad)
			near(t, fmt.Sprint(i, " dw"), gw, rw, grad)
			r.free()
			f64.free()
		}
	})
	for i, h := range heads() {
		g := rand.New(rand.NewPCG(2, uint64(i)))
		x, w, c, ce := randn(g, h.T*h.D, 0.5), randn(g, h.V*h.D, 0.5), randn(g, len(h.row), 1), randn(g, len(h.row), 1)
		_, ent, lse := f64.lmhead(h, x, w)
		gx, gw := f64.lmheadBwd(h, x, w, lse, ent, c, ce, make([]float64, h.T*h.D), make([]float64, h.V*h.D))
		checkGrads(t, []string{"x", "w"}, [][]float64{x, w}, [][]float64{c, ce}, [][]float64{gx, gw}, func(in [][]float64) [][]float64 {
			lp, en, _ := f64.lmhead(h, in[0], in[1])
			f64.free()
			return [][]float64{lp, en}
		})
		gx0, _ := f64.lmheadBwd(h, x, w, lse, ent, c, nil, make([]float64, h.T*h.D), make([]float64, h.V*h.D))
		gx1, _ := f64.lmheadBwd(h, x, w, lse, ent, c, make([]float64, len(c)), make([]float64, h.T*h.D), make([]float64, h.V*h.D))
		near(t, "no entropy gradient", gx0, gx1, 1e-15)
	}
}

func (r *rig) sample(V, valid int, z []float64, rows []SampleRow) (tok []int32, logp, ent []float64) {
	n := len(rows)
	p, tp, lp, en := r.raw(n*int(SampleRowBytes)), r.raw(4*n), r.out32(n), r.out32(n)
	r.st.UploadSampleRows(p, rows)
	r.run(OpSample, &SampleArgs{B: int64(n), V: int64(V), VocabValid: int64(valid), Logits: r.put32(z), Rows: p, Token: tp, LogP: lp, Entropy: en})
	tok = make([]int32, n)
	r.st.DownloadI32(tok, tp)
	return tok, r.get32(lp, n), r.get32(en, n)
}

func (r *rig) lmheadSample(V, valid, D int, x, w []float64, rows []SampleRow, flags uint32) (tok []int32, logp, ent []float64) {
	n := len(rows)
	p, tp, lp, en := r.raw(n*int(SampleRowBytes)), r.raw(4*n), r.out32(n), r.out32(n)
	r.st.UploadSampleRows(p, rows)
	r.run(OpLMHeadSample, &LMHeadSampleArgs{Flags: flags, B: int64(n), D: int64(D), V: int64(V), VocabValid: int64(valid), X: r.put(x), W: r.put(w), Rows: p, Token: tp, LogP: lp, Entropy: en})
	tok = make([]int32, n)
	r.st.DownloadI32(tok, tp)
	return tok, r.get32(lp, n), r.get32(en, n)
}

// TestHeadBits: sampler and trainer report the same bits for the same hidden row, alone, in a batch and with any number of threads.
func TestHeadBits(t *testing.T) {
	const T, D, V, valid = 70, 48, 333, 321
	g := rand.New(rand.NewPCG(3, 3))
	x, w := randn(g, T*D, 1), randn(g, V*D, 1)
	eachThreads(t, func(r *rig) [][]float64 {
		z := r.gemm(TransB, T, V, D, 0, x, w, make([]float64, T*V))
		rows := make([]SampleRow, T)
		for i := range rows {
			rows[i] = SampleRow{KeyLo: 11, KeyHi: uint64(i % 3), Ctr: uint64(i), Temperature: 0.8, TopP: 1}
			if i%2 == 1 {
				rows[i].TopK, rows[i].TopP, rows[i].MinP = 40, 0.9, 0.01
			}
		}
		tok, logp, ent := r.sample(V, valid, z, rows)
		h := headIn{T: T, D: D, V: V, valid: valid, chunk: 9, temp: float64(float32(0.8))}
		h.target = tok
		for i := range T {
			h.row = append(h.row, int32(i))
		}
		tlp, ten, lse := r.lmhead(h, x, w)
		same(t, "trainer's log-prob", tlp, logp)
		same(t, "trainer's entropy", ten, ent)
		htok, hlogp, hent := r.lmheadSample(V, valid, D, x, w, rows, Truncated)
		if !slices.Equal(htok, tok) {
			t.Errorf("lmhead_sample draws %v, sample %v", htok, tok)
		}
		same(t, "log-prob of lmhead_sample", hlogp, logp)
		same(t, "entropy of lmhead_sample", hent, ent)
		for _, i := range []int{0, 7, T - 1} {
			one, olp, _ := r.sample(V, valid, z[i*V:(i+1)*V], rows[i:i+1])
			if one[0] != tok[i] {
				t.Errorf("row %d alone samples %d, in the batch %d", i, one[0], tok[i])
			}
			same(t, "log-prob alone", olp, logp[i:i+1])
		}
		dx, dw := r.lmheadBwd(h, x, w, lse, ent, logp, ent, make([]float64, T*D), make([]float64, V*D))
		f := make([]float64, T)
		for i := range f {
			f[i] = float64(tok[i])
		}
		return [][]float64{f, logp, ent, dx, dw}
	})
}

// naiveKeep lists the ids that the truncations leave, by sorting (ties: lower id first).
func naiveKeep(z []float64, s SampleRow) map[int32]bool {
	lp, _, _ := naiveSoftmax(z, float64(s.Temperature))
	var ids []int32
	top := slices.Max(lp)
	for i, x := range lp {
		if s.MinP <= 0 || x-top >= math.Log(float64(s.MinP)) {
			ids = append(ids, int32(i))
		}
	}
	slices.SortStableFunc(ids, func(a, b int32) int { return cmp.Compare(lp[b], lp[a]) })
	if s.TopK > 0 && int(s.TopK) < len(ids) {
		ids = ids[:s.TopK]
	}
	var mass, cum float64
	for _, i := range ids {
		mass += math.Exp(lp[i])
	}
	keep := map[int32]bool{}
	for _, i := range ids {
		if s.TopP < 1 && cum >= float64(s.TopP)*mass {
			break
		}
		keep[i] = true
		cum += math.Exp(lp[i])
	}
	return keep
}

// TestSampleTruncation draws many tokens per setting: exactly the kept ids appear.
func TestSampleTruncation(t *testing.T) {
	uneven := []float64{0.3, 2, -1, 1.2, 2, 0.9, -4, 2, 1.2, 0, -0.5}
	flat := make([]float64, 9)
	spread := make([]float64, 700)
	g := rand.New(rand.NewPCG(5, 5))
	for i := range spread {
		spread[i] = math.Round(g.NormFloat64()*8) / 4 // many ties
	}
	eachRig(t, func(t *testing.T, r *rig) {
		for _, c := range []struct {
			name string
			z    []float64
			row  SampleRow
		}{
			{"off", uneven, SampleRow{Temperature: 1, TopP: 1}},
			{"top_k 1 of a tie", uneven, SampleRow{Temperature: 1, TopP: 1, TopK: 1}},
			{"top_k inside a tie", uneven, SampleRow{Temperature: 1, TopP: 1, TopK: 4}},
			{"top_k beyond", uneven, SampleRow{Temperature: 1, TopP: 1, TopK: 100}},
			{"top_p tiny", uneven, SampleRow{Temperature: 1, TopP: 1e-6}},
			{"top_p", uneven, SampleRow{Temperature: 1, TopP: 0.7}},
			{"top_p almost 1", uneven, SampleRow{Temperature: 1, TopP: 0.9999999}},
			{"top_p flat", flat, SampleRow{Temperature: 1, TopP: 0.5}},
			{"min_p", uneven, SampleRow{Temperature: 1, TopP: 1, MinP: 0.3}},
			{"min_p 1", uneven, SampleRow{Temperature: 1, TopP: 1, MinP: 1}},
			{"all", uneven, SampleRow{Temperature: 1.5, TopP: 0.8, TopK: 6, MinP: 0.1}},
			{"wide", spread, SampleRow{Temperature: 0.9, TopP: 0.6, TopK: 50}},
			{"one id", []float64{-3}, SampleRow{Temperature: 1, TopP: 0.5, TopK: 1}},
		} {
			n, draws := len(c.z), 4000
			if r.dev.Info().Name == "emu" {
				draws = 250 // each is a block of fibers
			}
			rows := make([]SampleRow, draws)
			for i := range rows {
				rows[i] = c.row
				rows[i].KeyLo, rows[i].Ctr = 99, uint64(i)
			}
			seen := map[int32]int{}
			tok, logp, _ := r.sample(n, n, slices.Repeat(c.z, draws), rows)
			lp, _, _ := naiveSoftmax(c.z, float64(c.row.Temperature))
			for i, k := range tok {
				seen[k]++
				if math.Abs(logp[i]-lp[k]) > 1e-5 {
					t.Fatalf("%s: token %d reported with log-prob %v, want %v", c.name, k, logp[i], lp[k])
				}
			}
			keep := naiveKeep(c.z, c.row)
			var mass float64
			for k := range keep {
				mass += math.Exp(lp[k])
			}
			for k, times := range seen {
				if !keep[k] {
					t.Errorf("%s: drew %d (%d times), kept are %v", c.name, k, times, keep)
				}
			}
			for k := range keep {
				if math.Exp(lp[k])/mass > 40/float64(draws) && seen[k] == 0 {
					t.Errorf("%s: never drew %d", c.name, k)
				}
			}
			r.free()
		}
	})
}

// TestSampleDistribution is a chi-square test with fixed keys, and the argmax and counter contracts.
func TestSampleDistribution(t *testing.T) {
	const n, draws = 40, 60000
	r := newRig(t, F32, Options{Threads: 2})
	g := rand.New(rand.NewPCG(8, 8))
	z := r.round(randn(g, n, 1))
	rows := make([]SampleRow, draws)
	for i := range rows {
		rows[i] = SampleRow{KeyLo: 0x1234567890abcdef, KeyHi: uint64(i / 100), Ctr: uint64(i % 100), Temperature: 0.7, TopP: 1}
	}
	tok, _, _ := r.sample(n, n, slices.Repeat(z, draws), rows)
	var count [n]float64
	for _, k := range tok {
		count[k]++
	}
	lp, _, _ := naiveSoftmax(z, float64(float32(0.7)))
	var chi float64
	for k := range n {
		want := draws * math.Exp(lp[k])
		chi += (count[k] - want) * (count[k] - want) / want
	}
	if chi > 72.1 { // 99.9 % point of chi-square with 39 degrees of freedom
		t.Errorf("chi-square %.1f over %d ids", chi, n)
	}
	ties := []float64{1, 5, 2, 5, -1}
	best, logp, _ := r.sample(5, 5, ties, []SampleRow{{Temperature: 0, TopP: 1}})
	lp, _, _ = naiveSoftmax(ties, 1)
	if best[0] != 1 || math.Abs(logp[0]-lp[1]) > 1e-6 {
		t.Errorf("argmax gives %d with log-prob %v, want 1 with %v", best[0], logp[0], lp[1])
	}
	best, _, _ = r.sample(5, 3, []float64{1, 2, 3, 9, 9}, []SampleRow{{Temperature: 0, TopP: 1}})
	if best[0] != 2 {
		t.Errorf("argmax gives %d, outside the 3 valid ids", best[0])
	}
}

// TestPhilox: vectors of the Random123 distribution (kat_vectors, philox4x32 10 rounds).
func TestPhilox(t *testing.T) {
	for _, c := range []struct {
		ctr  [4]uint32
		key  [2]uint32
		want [4]uint32
	}{
		{want: [4]uint32{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
		{[4]uint32{^uint32(0), ^uint32(0), ^uint32(0), ^uint32(0)}, [2]uint32{^uint32(0), ^uint32(0)}, [4]uint32{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
		{[4]uint32{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, [2]uint32{0xa4093822, 0x299f31d0}, [4]uint32{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
	} {
		if got := philox(c.key, c.ctr); got != c.want {
			t.Errorf("philox(%x, %x) = %x, want %x", c.key, c.ctr, got, c.want)
		}
	}
}
