package model

import (
	"context"
	"fmt"
	"math"

	"harness-s/kernels"
)

// Sampling are the transforms of one sampled token, applied in the order temperature, min-p, top-k, top-p (abi.h, sample).
// Temperature 0 is argmax; TopK 0, TopP 0 or 1 and MinP 0 are off.
type Sampling struct {
	Temperature, TopP, MinP float32
	TopK                    int
}

// Key is the Philox key of one turn of one attempt; the index of the token within the turn is the counter.
type Key struct{ Lo, Hi uint64 }

// RunnerOptions size a Runner. Zero values take the defaults given.
type RunnerOptions struct {
	MaxSeqs   int // live sequences; 96
	MaxTokens int // KV tokens over all sequences; 96 * 1024
	PageSize  int // tokens of a KV page; 16
	MaxRows   int // rows of one pass through the layers; longer appends are split at multiples of it; 1024
}

func (o *RunnerOptions) setDefaults() {
	set := func(p *int, d int) {
		if *p == 0 {
			*p = d
		}
	}
	set(&o.MaxSeqs, 96)
	set(&o.MaxTokens, 96*1024)
	set(&o.PageSize, 16)
	set(&o.MaxRows, 1024)
}

func (o *RunnerOptions) numPages() int { return (o.MaxTokens + o.PageSize - 1) / o.PageSize }

// Work asks a Runner to feed Append to a sequence and, with Sample, to draw the token that follows.
type Work struct {
	Seq      SeqID
	Append   []int32
	Sample   bool
	Sampling Sampling
	Key      Key
	Ctr      uint64
}

// Sampled is the token drawn for one Work. LogProb is its natural-log probability at the sampling temperature over the whole
// vocabulary, before truncation by top-k, top-p and min-p; Entropy is that distribution's, in nats.
type Sampled struct {
	Token            int32
	LogProb, Entropy float32
}

// Runner samples from a Model: batched prefill and decode over paged KV and recurrent state. Each row's arithmetic is a function of
// its own sequence alone, so results do not depend on what else is in a step. A Runner belongs to one goroutine.
type Runner struct {
	m     *Model
	st    *kernels.Stream
	cache *pageCache
	opt   RunnerOptions
	dt    kernels.DType
	valid int64 // vocabulary entries that may be sampled: the tokenizer's, or all without one
	w     runnerWeights
	mem   kernels.Allocator // of caches and activations: the device, or a phase of the model's Region

	act  *kernels.Buffer // activations of MaxRows rows
	a    activations
	ws   *kernels.Buffer
	ibuf *kernels.Buffer // index upload of one pass
	ints []int32
	rows []kernels.SampleRow
	rbuf *kernels.Buffer // sample rows, then token, logp, entropy
}

type layerWeights struct {
	norm1, norm2, gate, up, down            kernels.Ptr
	qkv, z, b, a, conv, aLog, dtBias, gnorm kernels.Ptr // linear
	q, k, v, qNorm, kNorm                   kernels.Ptr // full
	out                                     kernels.Ptr
}

type runnerWeights struct {
	embed, norm, head kernels.Ptr
	layers            []layerWeights
}

// activations are the device addresses of one pass; names follow model.md 3. Shapes: MaxRows rows each.
type activations struct {
	x, n, xs, ns                    kernels.Ptr // [T, D]; xs, ns hold the selected rows of the last layer
	p, z, b, a, q, k, v, beta, g, o kernels.Ptr
	y                               kernels.Ptr
	qg, kin, aq, ak, av, ao         kernels.Ptr
	gate, up                        kernels.Ptr
}

// piece is a run of rows of one sequence within one pass.
type piece struct {
	work   int // index into the step's works
	seq    SeqID
	ids    []int32
	pos    int
	decode bool // the whole append is one token: recurrent step kernels
	sample bool
}

// NewRunner allocates caches and activations for m on its device.
func NewRunner(m *Model, o RunnerOptions) (*Runner, error) {
	o.setDefaults()
	if o.MaxSeqs < 1 || o.MaxTokens < o.PageSize || o.PageSize < 1 || o.MaxRows < o.MaxSeqs {
		return nil, fmt.Errorf("runner options: need max_seqs >= 1, page_size >= 1, max_tokens >= page_size, max_rows >= max_seqs; got %+v", o)
	}
	cfg := m.Config
	mem, err := m.memory(Rollout)
	if err != nil {
		return nil, fmt.Errorf("make runner: %w", err)
	}
	r := &Runner{m: m, st: m.Dev.NewStream(), opt: o, dt: m.Params.DType, valid: m.ValidVocab(), mem: mem}
	if r.cache, err = newPageCache(cfg, m.Dev, mem, r.st, r.dt, o.MaxSeqs, o.numPages(), o.PageSize); err != nil {
		return nil, err
	}
	if err = r.allocate(); err != nil {
		r.Close()
		return nil, err
	}
	r.bindWeights()
	m.region.join(r, nil)
	return r, r.st.Sync()
}

// usable says why the runner cannot be used now: its memory is the executor's.
func (r *Runner) usable() error { return r.m.region.check(Rollout, "use sampler") }

// live is the number of sequences.
func (r *Runner) live() int { return len(r.cache.seqs) - len(r.cache.freeSeq) }

// Close frees the device memory of r.
func (r *Runner) Close() {
	r.m.region.leave(r, nil)
	for _, b := range []*kernels.Buffer{r.act, r.ws, r.ibuf, r.rbuf} {
		if b != nil {
			b.Free()
		}
	}
	if r.cache != nil {
		r.cache.free()
	}
	r.st.Close()
}

// field is one of a pass's activations: where its address goes and its bytes.
type field struct {
	at    *kernels.Ptr
	bytes int64
}

// fields lists the activations of passes of up to maxRows rows. Gates are never stored below float32 (abi.h).
func (a *activations) fields(c *Config, dt kernels.DType, maxRows int) []field {
	elem, wide := int64(dt.Size()), int64(dt.Wide().Size())
	d, i := int64(c.Hidden), int64(c.Intermediate)
	qk, vd, nv, ch := int64(c.KeyDim()), int64(c.ValueDim()), int64(c.LinValueHeads), int64(c.ConvChannels())
	aq, akv := int64(c.NumHeads*c.HeadDim), int64(c.NumKVHeads*c.HeadDim)
	fs := []field{
		{&a.x, d}, {&a.n, d}, {&a.xs, d}, {&a.ns, d}, {&a.gate, i}, {&a.up, i},
		{&a.p, ch}, {&a.z, vd}, {&a.b, nv}, {&a.a, nv}, {&a.q, qk}, {&a.k, qk}, {&a.v, vd}, {&a.beta, nv}, {&a.g, nv}, {&a.o, vd},
		{&a.y, max(vd, aq)}, {&a.qg, 2 * aq}, {&a.kin, akv}, {&a.aq, aq}, {&a.ak, akv}, {&a.av, akv}, {&a.ao, aq},
	}
	for j := range fs {
		e := elem
		if fs[j].at == &a.beta || fs[j].at == &a.g {
			e = wide
		}
		fs[j].bytes = alignUp(int64(maxRows) * fs[j].bytes * e)
	}
	return fs
}

// sampleRowBytes are those of the sampling parameters and results of maxSeqs rows.
func sampleRowBytes(maxSeqs int, dt kernels.DType) int64 {
	return int64(maxSeqs) * (kernels.SampleRowBytes + 4 + 2*int64(dt.Wide().Size()))
}

func (r *Runner) allocate() error {
	fields := r.a.fields(r.m.Config, r.dt, r.opt.MaxRows)
	var total int64
	for _, f := range fields {
		total += f.bytes
	}
	var err error
	if r.act, err = r.mem.Alloc(total, "sampler activations"); err != nil {
		return fmt.Errorf("allocate sampler activations for %d rows: %w", r.opt.MaxRows, err)
	}
	off := int64(0)
	for _, f := range fields {
		*f.at = r.act.At(off)
		off += f.bytes
	}
	if r.rbuf, err = r.m.Dev.Alloc(sampleRowBytes(r.opt.MaxSeqs, r.dt), "sample rows"); err != nil {
		return fmt.Errorf("allocate sample rows: %w", err)
	}
	return nil
}

func (r *Runner) bindWeights() {
	p := r.m.Params
	w := func(name string) kernels.Ptr { return p.Ptr(Weights, name) }
	r.w = runnerWeights{embed: w("model.embed_tokens.weight"), norm: w("model.norm.weight"), head: w(r.m.Config.HeadName())}
	for i, t := range r.m.Config.LayerTypes {
		n := func(suffix string) kernels.Ptr { return w(LayerName(i, suffix)) }
		l := layerWeights{
			norm1: n("input_layernorm.weight"), norm2: n("post_attention_layernorm.weight"),
			gate: n("mlp.gate_proj.weight"), up: n("mlp.up_proj.weight"), down: n("mlp.down_proj.weight"),
		}
		if t == FullAttention {
			l.q, l.k, l.v, l.out = n("self_attn.q_proj.weight"), n("self_attn.k_proj.weight"), n("self_attn.v_proj.weight"), n("self_attn.o_proj.weight")
			l.qNorm, l.kNorm = n("self_attn.q_norm.weight"), n("self_attn.k_norm.weight")
		} else {
			l.qkv, l.z, l.b, l.a = n("linear_attn.in_proj_qkv.weight"), n("linear_attn.in_proj_z.weight"), n("linear_attn.in_proj_b.weight"), n("linear_attn.in_proj_a.weight")
			l.conv, l.aLog, l.dtBias = n("linear_attn.conv1d.weight"), n("linear_attn.A_log"), n("linear_attn.dt_bias")
			l.gnorm, l.out = n("linear_attn.norm.weight"), n("linear_attn.out_proj.weight")
		}
		r.w.layers = append(r.w.layers, l)
	}
}

// Acquire starts an empty sequence. Errors: ErrNoSlot.
func (r *Runner) Acquire() (SeqID, error) {
	if err := r.usable(); err != nil {
		return 0, err
	}
	return r.cache.acquire()
}

// Fork starts a sequence that continues src after its last fed token. Errors: ErrNoSlot, ErrNoPages.
func (r *Runner) Fork(src SeqID) (SeqID, error) {
	ids, err := r.ForkN(src, 1)
	if err != nil {
		return 0, err
	}
	return ids[0], nil
}

// ForkN forks src n times in one copy per layer.
func (r *Runner) ForkN(src SeqID, n int) ([]SeqID, error) {
	if err := r.usable(); err != nil {
		return nil, err
	}
	return r.cache.fork(src, n)
}

// Release ends a sequence and gives its pages back. Releasing a sequence that is not live is an error.
func (r *Runner) Release(id SeqID) error { return r.cache.release(id) }

// Len is the number of tokens fed to a live sequence, 0 for others.
func (r *Runner) Len(id SeqID) int {
	s, err := r.cache.seq(id)
	if err != nil {
		return 0
	}
	return s.len
}

// FreePages is the number of KV pages in no sequence.
func (r *Runner) FreePages() int { return len(r.cache.freePage) }

// FreeSeqs is the number of sequences that Acquire or Fork can still start.
func (r *Runner) FreeSeqs() int { return len(r.cache.freeSeq) }

// PagesFor is the number of KV pages that hold n tokens.
func (r *Runner) PagesFor(n int) int { return r.cache.pagesFor(n) }

// Reset drops every sequence. Weights may have changed: nothing computed before is kept.
func (r *Runner) Reset() error {
	for id := range r.cache.seqs {
		if r.cache.seqs[id].live {
			if err := r.cache.release(SeqID(id)); err != nil {
				return err
			}
		}
	}
	return nil
}

// Step feeds each Work's tokens to its sequence and samples where asked; result i belongs to work[i] and is zero without Sample.
// Sequences must be distinct. Errors before any work is done: ErrNoPages, invalid works (all of them listed). After a device error
// the Runner must not be used any more.
func (r *Runner) Step(ctx context.Context, work []Work) ([]Sampled, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if len(work) == 0 {
		return nil, nil
	}
	if err := r.usable(); err != nil {
		return nil, err
	}
	if err := r.checkWork(work); err != nil {
		return nil, err
	}
	ids, extra := make([]SeqID, len(work)), make([]int, len(work))
	for i, w := range work {
		ids[i], extra[i] = w.Seq, len(w.Append)
	}
	if err := r.cache.grow(ids, extra); err != nil {
		return nil, err
	}
	out := make([]Sampled, len(work))
	for _, batch := range r.split(work) {
		if err := r.pass(work, batch, out); err != nil {
			return nil, err
		}
	}
	return out, nil
}

func (r *Runner) checkWork(work []Work) error {
	seen := make(map[SeqID]bool, len(work))
	var p problems
	for i, w := range work {
		if _, err := r.cache.seq(w.Seq); err != nil {
			p.addf("work %d: %v", i, err)
		} else if seen[w.Seq] {
			p.addf("work %d: sequence %d appears twice in one step", i, w.Seq)
		}
		seen[w.Seq] = true
		if len(w.Append) == 0 {
			p.addf("work %d: no token to feed; a sequence needs at least one per step", i)
		}
		for j, id := range w.Append {
			if id < 0 || int(id) >= r.m.Config.VocabSize {
				p.addf("work %d: token %d at %d is outside the vocabulary of %d", i, id, j, r.m.Config.VocabSize)
				break
			}
		}
		s := w.Sampling
		if w.Sample && (!(s.Temperature >= 0) || math.IsInf(float64(s.Temperature), 0) || s.TopP < 0 || s.TopP > 1 || s.MinP < 0 || s.MinP > 1 || s.TopK < 0) {
			p.addf("work %d: sampling %+v: want temperature >= 0, top_p and min_p in [0, 1], top_k >= 0", i, s)
		}
	}
	if len(p) > 0 {
		return fmt.Errorf("sampler step: %w", p.err())
	}
	return nil
}

// split cuts works into passes of at most MaxRows rows. Where a long append is cut, and which kernels a row goes through, depends on
// its own append only, so that a row's bits do not depend on its company.
func (r *Runner) split(work []Work) [][]piece {
	var one, many []piece
	for i, w := range work {
		pos := r.cache.seqs[w.Seq].len
		for at := 0; at < len(w.Append); at += r.opt.MaxRows {
			end := min(at+r.opt.MaxRows, len(w.Append))
			p := piece{work: i, seq: w.Seq, ids: w.Append[at:end], pos: pos + at, decode: len(w.Append) == 1, sample: w.Sample && end == len(w.Append)}
			if p.decode {
				one = append(one, p)
			} else {
				many = append(many, p)
			}
		}
	}
	var out [][]piece
	var cur []piece
	rows := 0
	flush := func() {
		if len(cur) > 0 {
			out, cur, rows = append(out, cur), nil, 0
		}
	}
	for _, p := range append(one, many...) {
		if rows+len(p.ids) > r.opt.MaxRows || len(cur) > 0 && cur[len(cur)-1].seq == p.seq {
			flush()
		}
		cur, rows = append(cur, p), rows+len(p.ids)
	}
	flush()
	return out
}

// ValidVocab is the number of vocabulary columns that take part in the softmax: the tokenizer's ids, or all without a tokenizer.
// Sampler and executor both use it, so padded rows of the head are masked in both or in neither (model.md 5.1).
func (m *Model) ValidVocab() int64 {
	if m.Tok == nil || m.Tok.VocabSize() > m.Config.VocabSize {
		return int64(m.Config.VocabSize)
	}
	return int64(m.Tok.VocabSize())
}
