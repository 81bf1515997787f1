package trainer

import (
	"fmt"
	"math"
	"math/rand/v2"
	"sort"
)

// Interval is a mean with a 95 % interval.
type Interval struct {
	Mean float64 `json:"mean"`
	Low  float64 `json:"low"`
	High float64 `json:"high"`
}

// Sample is one task's value and the cluster it is drawn with.
type Sample struct {
	Cluster string
	V       float64
}

// Bootstrap returns the mean of xs and its 95 % percentile interval over
// resamples draws of whole clusters with replacement (method.md 7.3). With a
// single cluster, tasks are drawn instead, because one cluster has no spread.
// Equal inputs and seed give equal bits. No samples give zeros.
func Bootstrap(xs []Sample, resamples int, seed uint64) Interval {
	if len(xs) == 0 {
		return Interval{}
	}
	sum, n := clusters(xs)
	draws := make([]float64, resamples)
	r := rand.New(rand.NewPCG(seed, bootstrapStream))
	for i := range draws {
		s, k := 0.0, 0.0
		for range sum {
			j := r.IntN(len(sum))
			s += sum[j]
			k += n[j]
		}
		draws[i] = s / k
	}
	out := percentile(draws)
	total, count := 0.0, 0.0
	for j := range sum {
		total += sum[j]
		count += n[j]
	}
	out.Mean = total / count
	return out
}

// bootstrapStream separates these draws from other users of a seed.
const bootstrapStream = 0x626f6f74

// clusters returns sum and size per cluster in first-seen order.
func clusters(xs []Sample) (sum, n []float64) {
	at := map[string]int{}
	for _, x := range xs {
		if _, ok := at[x.Cluster]; !ok {
			at[x.Cluster] = len(sum)
			sum, n = append(sum, 0), append(n, 0)
		}
		sum[at[x.Cluster]] += x.V
		n[at[x.Cluster]]++
	}
	if len(sum) > 1 {
		return sum, n
	}
	sum, n = make([]float64, len(xs)), make([]float64, len(xs))
	for i, x := range xs {
		sum[i], n[i] = x.V, 1
	}
	return sum, n
}

// percentile sorts draws and returns their 2.5 and 97.5 percent quantiles.
func percentile(draws []float64) Interval {
	sort.Float64s(draws)
	at := func(q float64) float64 {
		x := q * float64(len(draws)-1)
		i := int(x)
		if i+1 >= len(draws) {
			return draws[len(draws)-1]
		}
		return draws[i] + (x-float64(i))*(draws[i+1]-draws[i])
	}
	return Interval{Low: at(0.025), High: at(0.975)}
}

// Difference is b - a on the same tasks.
type Difference struct {
	Interval
	Tasks int `json:"tasks"`
}

// Resolved reports whether the interval excludes 0.
func (d Difference) Resolved() bool { return d.Low > 0 || d.High < 0 }

// String renders percentage points; an interval that contains 0 is "not resolved".
func (d Difference) String() string {
	s := fmt.Sprintf("%+.1f points [%+.1f, %+.1f]", 100*d.Mean, 100*d.Low, 100*d.High)
	if !d.Resolved() {
		s += ", not resolved"
	}
	return s
}

// PairedDifference compares two evaluations at one k by a paired bootstrap over
// the tasks both have, drawn in clusters.
func PairedDifference(a, b []TaskResult, k, resamples int, seed uint64) (Difference, error) {
	at := make(map[string]TaskResult, len(a))
	for _, t := range a {
		at[t.Task] = t
	}
	var xs []Sample
	for _, t := range b {
		base, ok := at[t.Task]
		if !ok {
			continue
		}
		pa, err := PassAt(base.Asked, base.Success, k)
		if err != nil {
			return Difference{}, err
		}
		pb, err := PassAt(t.Asked, t.Success, k)
		if err != nil {
			return Difference{}, err
		}
		xs = append(xs, Sample{t.Group, pb - pa})
	}
	if len(xs) == 0 {
		return Difference{}, fmt.Errorf("compare evaluations: no common task among %d and %d", len(a), len(b))
	}
	return Difference{Bootstrap(xs, resamples, seed), len(xs)}, nil
}

// RunInterval is the mean over independent runs with its two-sided 95 % t
// interval: for three runs mean +- 4.303 s / sqrt(3) (method.md 7.3). One run has
// no interval; its bounds are NaN.
func RunInterval(values []float64) Interval {
	n := float64(len(values))
	if n == 0 {
		return Interval{}
	}
	m, sq := mean(values), 0.0
	for _, v := range values {
		sq += (v - m) * (v - m)
	}
	if n == 1 {
		return Interval{m, math.NaN(), math.NaN()}
	}
	h := tQuantile(len(values)-1) * math.Sqrt(sq/(n-1)) / math.Sqrt(n)
	return Interval{m, m - h, m + h}
}

// tQuantile is the 0.975 quantile of Student's t with df degrees of freedom.
func tQuantile(df int) float64 {
	table := [...]float64{12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
		2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042}
	if df <= len(table) {
		return table[df-1]
	}
	// Cornish-Fisher expansion around the normal quantile; error < 1e-4 for df > 30.
	z, d := 1.959964, float64(df)
	return z + (z*z*z+z)/(4*d) + (5*math.Pow(z, 5)+16*z*z*z+3*z)/(96*d*d)
}
