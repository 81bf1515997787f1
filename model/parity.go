package model

import (
	"context"
	"fmt"
	"math"
	"path/filepath"

	"harness-s/kernels"
)

// ParityReport compares this program with the reference implementation on one fixture (testbeds.md 1). Bounds are 3 times the
// reference's own float32 noise, with a floor of 2e-5: float32 arithmetic in another order can do no better. The JSON keys are stable.
type ParityReport struct {
	Dir            string   `json:"dir"`
	Params         int64    `json:"params"`
	LogitsMaxAbs   float64  `json:"logits_max_abs"`
	LogitsBound    float64  `json:"logits_bound"`
	LossAbs        float64  `json:"loss_abs"`     // bound: logits_bound
	GradMaxRel     float64  `json:"grad_max_rel"` // worst parameter: |ours - reference| / |reference|, Euclidean norms
	GradWorst      string   `json:"grad_worst"`
	GradBound      float64  `json:"grad_bound"`
	RaggedMaxAbs   float64  `json:"ragged_max_abs"` // log-probs of sequences packed into one batch
	RaggedBound    float64  `json:"ragged_bound"`
	DecodeMaxAbs   float64  `json:"decode_max_abs"` // sampler's prefill and decode against the executor's full forward, logits; bound: logits_bound
	GreedyEqual    bool     `json:"greedy_equal"`
	GreedyDiffAt   int      `json:"greedy_diff_at"`    // index of the first other token, -1 = none
	TapeGradMaxRel float64  `json:"tape_grad_max_rel"` // TapeMachine against the executor; bound: grad_bound
	TapeWorst      string   `json:"tape_worst"`
	OK             bool     `json:"ok"`
	Failures       []string `json:"failures"`
}

const (
	parityFactor = 3
	parityFloor  = 2e-5
)

// RunParity loads the fixture in dir on dev and runs it through loader, planner, executor, runner and TapeMachine. An error means that
// the fixture could not be run; a missed bound is in the report.
func RunParity(dir string, dev *kernels.Device) (*ParityReport, error) {
	m, err := Load(dir, dev, LoadOptions{Train: true})
	if err != nil {
		return nil, fmt.Errorf("parity: %w", err)
	}
	defer m.Close()
	path := filepath.Join(dir, "expect.safetensors")
	file, err := ReadSafetensors(path)
	if err != nil {
		return nil, fmt.Errorf("parity: %w", err)
	}
	defer file.Close()
	p := &parity{m: m, file: file, rep: &ParityReport{Dir: dir, Params: m.Config.NumParams(), GreedyDiffAt: -1}}
	for _, check := range []func() error{p.noise, p.full, p.ragged, p.greedy, p.tape} {
		if err := check(); err != nil {
			return nil, fmt.Errorf("parity %s: %w", dir, err)
		}
	}
	p.judge()
	return p.rep, nil
}

type parity struct {
	m    *Model
	file *Safetensors
	rep  *ParityReport
	full2D
}

// full2D is the batch of full rows: ids [B, T] and its executor results.
type full2D struct {
	b, t   int
	ids    []int32
	batch  *Batch
	logits []float32            // ours, [B*T, V]
	grads  map[string][]float32 // ours
	coef   []float32
}

func (p *parity) floats(name string, n int) ([]float32, error) {
	v, err := p.file.Float32s(name)
	if err != nil {
		return nil, err
	}
	if n >= 0 && len(v) != n {
		return nil, fmt.Errorf("tensor %s has %d values, expected %d", name, len(v), n)
	}
	return v, nil
}

func (p *parity) tokens(name string) ([]int32, error) {
	v, err := p.file.Int64s(name)
	if err != nil {
		return nil, err
	}
	ids := make([]int32, len(v))
	for i, x := range v {
		if x < 0 || x >= int64(p.m.Config.VocabSize) {
			return nil, fmt.Errorf("tensor %s: token %d at %d is outside the vocabulary of %d", name, x, i, p.m.Config.VocabSize)
		}
		ids[i] = int32(x)
	}
	return ids, nil
}

func (p *parity) noise() error {
	for _, n := range []struct {
		name string
		dst  *float64
	}{{"noise.logits", &p.rep.LogitsBound}, {"noise.ragged", &p.rep.RaggedBound}, {"noise.grad", &p.rep.GradBound}} {
		v, err := p.floats(n.name, 1)
		if err != nil {
			return err
		}
		*n.dst = max(parityFactor*float64(v[0]), parityFloor)
	}
	return nil
}

// full checks logits, loss and every gradient of the rows of input_ids, and prefill + decode of the first row.
func (p *parity) full() error {
	in, err := p.file.Tensor("input_ids")
	if err != nil {
		return err
	}
	if len(in.Shape) != 2 || in.Shape[0] < 1 || in.Shape[1] < 2 {
		return fmt.Errorf("input_ids has shape %v, expected [rows, length >= 2]", in.Shape)
	}
	p.b, p.t = in.Shape[0], in.Shape[1]
	if p.ids, err = p.tokens("input_ids"); err != nil {
		return err
	}
	p.batch = &Batch{IDs: p.ids}
	for r := range p.b {
		p.batch.Segments = append(p.batch.Segments, Segment{Len: int32(p.t), Parent: -1})
		for i := range p.t - 1 {
			p.batch.Rows = append(p.batch.Rows, int32(r*p.t+i))
			p.batch.Targets = append(p.batch.Targets, p.ids[r*p.t+i+1])
		}
	}
	x, err := NewExec(p.m, ExecOptions{Temperature: 1, MaxRows: len(p.ids), MaxTargets: len(p.batch.Rows)})
	if err != nil {
		return err
	}
	defer x.Close()
	want, err := p.floats("logits", len(p.ids)*p.m.Config.VocabSize)
	if err != nil {
		return err
	}
	if p.logits, err = x.Logits(p.batch); err != nil {
		return err
	}
	p.rep.LogitsMaxAbs = MaxAbsDiff(p.logits, want)
	out, err := x.Forward(p.batch)
	if err != nil {
		return err
	}
	n := len(p.batch.Rows)
	var loss float64
	p.coef = make([]float32, n)
	for i, lp := range out.LogProb {
		loss -= float64(lp) / float64(n)
		p.coef[i] = float32(-1 / float64(n))
	}
	wantLoss, err := p.floats("loss", 1)
	if err != nil {
		return err
	}
	p.rep.LossAbs = math.Abs(loss - float64(wantLoss[0]))
	if err := x.Backward(p.coef, nil); err != nil {
		return err
	}
	p.grads = map[string][]float32{}
	for _, e := range p.m.Params.Entries() {
		got, err := p.m.Params.ReadF32(Grads, e.Name)
		if err != nil {
			return err
		}
		ref, err := p.floats("grad."+e.Name, len(got))
		if err != nil {
			return err
		}
		p.grads[e.Name] = got
		p.rep.GradMaxRel, p.rep.GradWorst = worst(p.rep.GradMaxRel, p.rep.GradWorst, RelNorm(got, ref), e.Name)
	}
	return p.decode()
}

// decode feeds the first row to a runner in appends of many lengths and compares the logits it samples from.
func (p *parity) decode() error {
	r, err := NewRunner(p.m, RunnerOptions{MaxSeqs: 2, MaxTokens: 2*p.t + 64, PageSize: 16, MaxRows: max(16, p.t)})
	if err != nil {
		return err
	}
	defer r.Close()
	id, err := r.Acquire()
	if err != nil {
		return err
	}
	v := p.m.Config.VocabSize
	for at, k := 0, 0; at < p.t; k++ {
		n := min([]int{3, 1, 1, 14, 1, 2, 17, 1}[k%8], p.t-at)
		if _, err := r.Step(context.Background(), []Work{{Seq: id, Append: p.ids[at : at+n], Sample: true}}); err != nil {
			return err
		}
		at += n
		got := make([]float32, v)
		if err := r.logits(got); err != nil {
			return err
		}
		p.rep.DecodeMaxAbs = worse(p.rep.DecodeMaxAbs, MaxAbsDiff(got, p.logits[(at-1)*v:at*v]))
	}
	return nil
}

// logits makes again and downloads the logits of the last pass's first sampled rows, which the head stores for no longer than it needs them.
func (r *Runner) logits(dst []float32) error {
	v := r.m.Config.VocabSize
	buf, err := r.m.Dev.Alloc(int64(len(dst))*int64(r.dt.Wide().Size()), "logits")
	if err != nil {
		return err
	}
	defer buf.Free()
	r.linear(buf.Ptr(), r.a.ns, r.w.head, int64(len(dst)/v), r.m.Config.Hidden, v, wideC(r.dt))
	r.st.DownloadReal(dst, buf.Ptr(), r.dt.Wide())
	return r.st.Sync()
}

// ragged packs sequences of many lengths into one batch.
func (p *parity) ragged() error {
	ids, err := p.tokens("ragged.ids")
	if err != nil {
		return err
	}
	lens, err := p.file.Int64s("ragged.lens")
	if err != nil {
		return err
	}
	want, err := p.floats("ragged.logprob", len(ids))
	if err != nil {
		return err
	}
	b := &Batch{IDs: ids}
	base := 0
	for i, n := range lens {
		if n < 1 || base+int(n) > len(ids) {
			return fmt.Errorf("ragged.lens[%d] = %d does not fit %d tokens", i, n, len(ids))
		}
		b.Segments = append(b.Segments, Segment{Len: int32(n), Parent: -1})
		for t := range int(n) - 1 {
			b.Rows, b.Targets = append(b.Rows, int32(base+t)), append(b.Targets, ids[base+t+1])
		}
		base += int(n)
	}
	if base != len(ids) {
		return fmt.Errorf("ragged.lens add up to %d, ragged.ids has %d tokens", base, len(ids))
	}
	x, err := NewExec(p.m, ExecOptions{Temperature: 1, MaxRows: len(ids), MaxTargets: len(b.Rows)})
	if err != nil {
		return err
	}
	defer x.Close()
	out, err := x.Forward(b)
	if err != nil {
		return err
	}
	got := make([]float32, len(ids))
	for i, row := range b.Rows {
		got[row+1] = out.LogProb[i]
	}
	p.rep.RaggedMaxAbs = MaxAbsDiff(got, want)
	return nil
}

// greedy continues the prompt by argmax through a fork of its prefix, as the sampler starts the attempts of a group.
func (p *parity) greedy() error {
	prompt, err := p.tokens("greedy.prompt")
	if err != nil {
		return err
	}
	want, err := p.tokens("greedy.tokens")
	if err != nil {
		return err
	}
	if len(prompt) < 2 {
		return fmt.Errorf("greedy.prompt has %d tokens, expected at least 2", len(prompt))
	}
	r, err := NewRunner(p.m, RunnerOptions{MaxSeqs: 2, MaxTokens: 2 * (len(prompt) + len(want) + 16), PageSize: 16, MaxRows: max(16, len(prompt))})
	if err != nil {
		return err
	}
	defer r.Close()
	root, err := r.Acquire()
	if err != nil {
		return err
	}
	ctx := context.Background()
	if _, err := r.Step(ctx, []Work{{Seq: root, Append: prompt[:len(prompt)-1]}}); err != nil {
		return err
	}
	id, err := r.Fork(root)
	if err != nil {
		return err
	}
	p.rep.GreedyEqual = true
	next := prompt[len(prompt)-1]
	for i, w := range want {
		got, err := r.Step(ctx, []Work{{Seq: id, Append: []int32{next}, Sample: true}})
		if err != nil {
			return err
		}
		if got[0].Token != w {
			p.rep.GreedyEqual, p.rep.GreedyDiffAt = false, i
			return nil
		}
		next = w
	}
	return nil
}

// tape runs the same batch on gorgonia's TapeMachine and compares every gradient with the executor's.
func (p *parity) tape() error {
	_, grads, err := TapeRun(p.m, p.batch, p.coef)
	if err != nil {
		return err
	}
	for _, e := range p.m.Params.Entries() {
		g, ok := grads[e.Name]
		if !ok {
			return fmt.Errorf("TapeMachine gave no gradient of %s", e.Name)
		}
		p.rep.TapeGradMaxRel, p.rep.TapeWorst = worst(p.rep.TapeGradMaxRel, p.rep.TapeWorst, RelNorm(p.grads[e.Name], g), e.Name)
	}
	return nil
}

func (p *parity) judge() {
	r := p.rep
	need := func(what string, got, bound float64) {
		if !(got <= bound) {
			r.Failures = append(r.Failures, fmt.Sprintf("%s is %.3g, bound %.3g", what, got, bound))
		}
	}
	need("logits_max_abs", r.LogitsMaxAbs, r.LogitsBound)
	need("loss_abs", r.LossAbs, r.LogitsBound)
	need("grad_max_rel ("+r.GradWorst+")", r.GradMaxRel, r.GradBound)
	need("ragged_max_abs", r.RaggedMaxAbs, r.RaggedBound)
	need("decode_max_abs", r.DecodeMaxAbs, r.LogitsBound)
	need("tape_grad_max_rel ("+r.TapeWorst+")", r.TapeGradMaxRel, r.GradBound)
	if !r.GreedyEqual {
		r.Failures = append(r.Failures, fmt.Sprintf("greedy token %d differs", r.GreedyDiffAt))
	}
	if r.Failures == nil {
		r.Failures = []string{}
	}
	r.OK = len(r.Failures) == 0
}

// worse is the larger of two errors; NaN is worse than anything.
func worse(a, b float64) float64 {
	if math.IsNaN(a) || b <= a {
		return a
	}
	return b
}

// worst keeps the larger error and the name it belongs to.
func worst(have float64, haveName string, got float64, name string) (float64, string) {
	if w := worse(have, got); w != have && !math.IsNaN(have) {
		return w, name
	}
	return have, haveName
}

// MaxAbsDiff is the largest |a-b|; NaN when an element is or the lengths differ.
func MaxAbsDiff(a, b []float32) float64 {
	if len(a) != len(b) {
		return math.NaN()
	}
	var m float64
	for i := range a {
		m = worse(m, math.Abs(float64(a[i])-float64(b[i])))
	}
	return m
}

// RelNorm is |a-b| / |b| in Euclidean norms; both zero give 0, different lengths NaN.
func RelNorm(a, b []float32) float64 {
	if len(a) != len(b) {
		return math.NaN()
	}
	var d, n float64
	for i := range a {
		e := float64(a[i]) - float64(b[i])
		d += e * e
		n += float64(b[i]) * float64(b[i])
	}
	if d == 0 {
		return 0
	}
	return math.Sqrt(d / n)
}
