package kernels

import (
	"math"
	"testing"
)

func bitsOf(xs ...float32) []uint32 {
	out := make([]uint32, len(xs))
	for i, x := range xs {
		out[i] = math.Float32bits(x)
	}
	return out
}

// TestSplitIsExact: every upper half of a float32 (sign, exponent, seven mantissa bits: zeros, subnormals, infinities) with lower halves
// around the tie and the ends.
func TestSplitIsExact(t *testing.T) {
	var xs []uint32
	for hi := range uint32(1 << 16) {
		for _, lo := range []uint32{0, 1, 0x1234, 0x7fff, 0x8000, 0x8001, 0xabcd, 0xffff} {
			xs = append(xs, hi<<16|lo)
		}
	}
	back, halves := optimFormula(optimRoundTrip, xs, nil, 0), optimFormula(optimSplit, xs, nil, 0)
	for i, b := range xs {
		x := math.Float32frombits(b)
		hi, lo := SplitF32(x)
		if got := uint32(hi)<<16 | uint32(uint16(lo)); got != halves[i] {
			t.Fatalf("%08x: split is %08x in C, %08x in Go", b, halves[i], got)
		}
		if x != x {
			if got := math.Float32frombits(back[i]); got == got || FromBF16(hi) == FromBF16(hi) || back[i]>>31 != b>>31 {
				t.Fatalf("NaN %08x became %08x", b, back[i])
			}
			continue
		}
		if back[i] != b || math.Float32bits(JoinF32(hi, lo)) != b {
			t.Fatalf("%08x came back as %08x", b, back[i])
		}
		// Nearest: the remainder is at most half a bfloat16 step, and a tie goes away from zero.
		if low := b & 0xffff; int64(lo) != int64(low) && int64(lo) != int64(low)-1<<16 || low == 0x8000 && lo != -0x8000 {
			t.Fatalf("%08x: lo is %d", b, lo)
		}
	}
	for _, c := range []struct {
		x    float32
		want uint16
	}{{math.MaxFloat32, 0x7f80}, {-0x1.ffp127, 0xff80}, {math.Nextafter32(0x1.ffp127, 0), 0x7f7f}, {math.SmallestNonzeroFloat32, 0}} {
		if hi, lo := SplitF32(c.x); hi != c.want || JoinF32(hi, lo) != c.x {
			t.Errorf("%g: hi %04x, want %04x", c.x, hi, c.want)
		}
	}
}

// TestRoundBF16IsUnbiased: over all 2^16 random words the mean is the value itself, exactly.
func TestRoundBF16IsUnbiased(t *testing.T) {
	words := make([]uint32, 1<<16)
	for i := range words {
		words[i] = uint32(i) * 0x10001 // the upper half must not matter
	}
	for _, x := range []float32{1, 1.0001, -3.1415927, 1e-30, -0x1.234568p-120, 1 + 0x1p-23, 2 - 0x1p-23, 0x1.fcp127} {
		var sum float64
		xs := make([]uint32, len(words))
		for i := range xs {
			xs[i] = math.Float32bits(x)
		}
		for _, b := range optimFormula(optimBF16, xs, words, 0) {
			y := FromBF16(uint16(b))
			if d := math.Abs(float64(y - x)); d >= math.Abs(float64(x))*0x1p-7 {
				t.Fatalf("%g became %g", x, y)
			}
			sum += float64(y)
		}
		if mean := sum / float64(len(words)); mean != float64(x) {
			t.Errorf("%g: mean %g", x, mean)
		}
	}
	inf := float32(math.Inf(1))
	in := bitsOf(0, inf, -inf, math.MaxFloat32, -0x1.ff8p127, float32(math.NaN()))
	in = append(in, 0xffffffff)
	all := make([]uint32, len(in))
	for i := range all {
		all[i] = 0xffff
	}
	want := []uint32{0, 0x7f80, 0xff80, 0x7f7f, 0xff7f, 0x7fc0, 0xffc0}
	for i, got := range optimFormula(optimBF16, in, all, 0) {
		if got != want[i] {
			t.Errorf("%08x rounds to %04x, want %04x", in[i], got, want[i])
		}
	}
}

// TestCodeTable: codes decode to the values of the table in optim_math.h, ascending, and encode to themselves whatever the random word.
func TestCodeTable(t *testing.T) {
	codes := make([]uint32, 256)
	for i := range codes {
		codes[i] = uint32(i)
	}
	m, v := optimFormula(optimDecodeM, codes, nil, 1), optimFormula(optimDecodeV, codes, nil, 1)
	f := math.Float32frombits
	for c := range 256 {
		e, frac := c&127>>3, float64(c&7)/8
		want := math.Ldexp(1+frac, e-15)
		if e == 0 {
			want = math.Ldexp(frac, -14)
		}
		if c >= 128 {
			want = -want
		}
		if float64(f(m[c])) != want {
			t.Errorf("m code %d is %g, want %g", c, f(m[c]), want)
		}
		if want = math.Ldexp(1+frac, c>>3-31); c == 0 {
			want = 0
		}
		if float64(f(v[c])) != want {
			t.Errorf("v code %d is %g, want %g", c, f(v[c]), want)
		}
	}
	for _, word := range []uint32{0, 0x80000000, 0xffffffff} {
		words := make([]uint32, 256)
		for i := range words {
			words[i] = word
		}
		backM, backV := optimFormula(optimCodeM, m, words, 0), optimFormula(optimCodeV, v, words, 0)
		for c := range codes {
			if c != 128 && backM[c] != codes[c] || c == 128 && backM[c] != 0 || backV[c] != codes[c] {
				t.Errorf("code %d with word %08x: m %d, v %d", c, word, backM[c], backV[c])
			}
		}
	}
}

// TestCodesAreUnbiased: over all 2^20 random words the mean is the value: exactly where codes are floats, within 2^-20 of a step where m
// is linear (one rounding of y + 2^-14). Above the smallest v, since v > 0 never becomes 0.
func TestCodesAreUnbiased(t *testing.T) {
	words := make([]uint32, 1<<20)
	for i := range words {
		words[i] = uint32(i)<<12 | 0xabc
	}
	mean := func(code, decode int, y float32) float64 {
		ys := make([]uint32, len(words))
		for i := range ys {
			ys[i] = math.Float32bits(y)
		}
		var sum float64
		for _, b := range optimFormula(decode, optimFormula(code, ys, words, 0), nil, 1) {
			sum += float64(math.Float32frombits(b))
		}
		return sum / float64(len(words))
	}
	for _, y := range []float32{1, 1.8749999, 0.3, -0.0123, 0x1.8p-14, 1e-4, 7.7e-6, -0x1p-17, 1e-6, -3e-8} {
		tol := 0.0
		if y < 0x1p-14 && y > -0x1p-14 {
			tol = 0x1p-17 * 0x1p-20
		}
		if got := mean(optimCodeM, optimDecodeM, y); math.Abs(got-float64(y)) > tol {
			t.Errorf("m %g: mean %g", y, got)
		}
	}
	for _, y := range []float32{1, 1.8749999, 0.3, 1e-5, 1.7e-9, 0x1.2p-31} {
		if got := mean(optimCodeV, optimDecodeV, y); got != float64(y) {
			t.Errorf("v %g: mean %g", y, got)
		}
	}
	for _, y := range []float32{0x1p-31, 1e-20, 0x1p-126} {
		if got := mean(optimCodeV, optimDecodeV, y); got != 0x1.2p-31 {
			t.Errorf("v %g: mean %g, want the smallest value", y, got)
		}
	}
}

func TestCodeScale(t *testing.T) {
	inf := float32(math.Inf(1))
	in := []float32{0, 1e-40, 0x1p-126, 1, 1.875, 1.8750001, 3, 0x1p126, math.MaxFloat32, inf}
	want := []float32{0, 0, 0x1p-126, 1, 1, 2, 2, 0x1p126, 0x1p126, inf}
	got := optimFormula(optimScale, append(bitsOf(in...), 0x7fc00000), nil, 0)
	for i, w := range want {
		if g := math.Float32frombits(got[i]); g != w {
			t.Errorf("largest %g: scale %g, want %g", in[i], g, w)
		}
	}
	if g := math.Float32frombits(got[len(want)]); g == g {
		t.Errorf("a block with NaN has scale %g", g)
	}
}
