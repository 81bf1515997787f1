package trainer

import (
	"math"
	"math/big"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func TestPassAt(t *testing.T) {
	if p, err := PassAt(5, 2, 3); err != nil || math.Abs(p-0.9) > 1e-12 { // method.md 7.1
		t.Errorf("golden: %v %v", p, err)
	}
	for _, c := range [][3]int{{3, 1, 0}, {3, 1, 4}, {3, 4, 2}, {3, -1, 2}, {0, 0, 1}} {
		if _, err := PassAt(c[0], c[1], c[2]); err == nil {
			t.Errorf("%v accepted", c)
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, 40).Draw(t, "n")
		c, k := rapid.IntRange(0, n).Draw(t, "c"), rapid.IntRange(1, n).Draw(t, "k")
		got, err := PassAt(n, c, k)
		if err != nil {
			t.Fatal(err)
		}
		miss := new(big.Rat).SetFrac(new(big.Int).Binomial(int64(n-c), int64(k)), new(big.Int).Binomial(int64(n), int64(k)))
		want, _ := new(big.Rat).Sub(big.NewRat(1, 1), miss).Float64()
		if math.Abs(got-want) > 1e-12 {
			t.Fatalf("n %d c %d k %d: %v, want %v", n, c, k, got, want)
		}
	})
}

func TestScoreTasks(t *testing.T) {
	ts := []TaskResult{{Task: "1", Group: "a", Asked: 3, Valid: 3, Success: 3}, {Task: "2", Group: "b", Asked: 3, Valid: 3},
		{Task: "3", Group: "b", Asked: 3, Valid: 2}}
	s, err := ScoreTasks(ts, 3, 1000, 1)
	if err != nil {
		t.Fatal(err)
	}
	if math.Abs(s.Strict.Mean-1.0/3) > 1e-12 || s.Missing != 1 || s.Kept != 2 || s.Complete.Mean != 0.5 || s.Strict.Low > s.Strict.Mean || s.Strict.High < s.Strict.Mean {
		t.Errorf("%+v", s)
	}
	if _, err := ScoreTasks(ts, 4, 10, 1); err == nil {
		t.Error("k above the attempts accepted")
	}
}

func TestBootstrap(t *testing.T) {
	var xs []Sample
	for i := range 200 {
		xs = append(xs, Sample{string(rune('a' + i%20)), float64(i % 2)})
	}
	a, b := Bootstrap(xs, 10000, 7), Bootstrap(xs, 10000, 7)
	if a != b {
		t.Error("not repeatable")
	}
	var odd []Sample
	for i := range 40 {
		odd = append(odd, Sample{string(rune('a' + i)), math.Abs(math.Sin(float64(i)))})
	}
	if Bootstrap(odd, 1000, 7) == Bootstrap(odd, 1000, 8) {
		t.Error("the seed does not matter")
	}
	// Odd clusters hold only ones, even ones only zeros: 20 draws of p = 0.5, whose
	// 2.5 and 97.5 percentiles are 6/20 and 14/20.
	if a.Mean != 0.5 || math.Abs(a.Low-0.3) > 1e-9 || math.Abs(a.High-0.7) > 1e-9 {
		t.Errorf("%+v", a)
	}
	if got := Bootstrap(nil, 100, 1); got != (Interval{}) {
		t.Errorf("no samples: %+v", got)
	}
	one := Bootstrap([]Sample{{"a", 0}, {"a", 1}, {"a", 1}, {"a", 0}}, 1000, 1)
	if one.Low >= one.High {
		t.Errorf("a single cluster falls back to tasks: %+v", one)
	}
}

func TestRunInterval(t *testing.T) {
	got := RunInterval([]float64{0.60, 0.62, 0.64})
	h := 4.303 * 0.02 / math.Sqrt(3)
	if math.Abs(got.Mean-0.62) > 1e-12 || math.Abs(got.High-0.62-h) > 1e-12 || math.Abs(got.Low-0.62+h) > 1e-12 {
		t.Errorf("%+v", got)
	}
	if one := RunInterval([]float64{0.5}); one.Mean != 0.5 || !math.IsNaN(one.Low) {
		t.Errorf("one run: %+v", one)
	}
	for df, want := range map[int]float64{1: 12.706, 2: 4.303, 30: 2.042, 40: 2.021, 120: 1.980} { // standard tables
		if got := tQuantile(df); math.Abs(got-want) > 6e-4 {
			t.Errorf("df %d: %v, want %v", df, got, want)
		}
	}
}

func TestPairedDifference(t *testing.T) {
	var a, b, c []TaskResult
	for i := range 60 {
		r := TaskResult{Task: string(rune('A' + i)), Group: string(rune('a' + i%15)), Asked: 3, Valid: 3, Success: i % 2 * 3}
		a = append(a, r)
		r.Success = 3
		b = append(b, r)
		r.Success = (i / 2 % 2) * 3
		c = append(c, r)
	}
	up, err := PairedDifference(a, b, 3, 2000, 1)
	if err != nil || up.Mean != 0.5 || !up.Resolved() || up.Tasks != 60 || strings.Contains(up.String(), "not resolved") {
		t.Errorf("%v %v", up, err)
	}
	flat, err := PairedDifference(a, c, 3, 2000, 1)
	if err != nil || flat.Resolved() || !strings.Contains(flat.String(), "not resolved") {
		t.Errorf("%v %v", flat, err)
	}
	if _, err := PairedDifference(a[:1], b[1:], 3, 100, 1); err == nil {
		t.Error("disjoint tasks accepted")
	}
}
