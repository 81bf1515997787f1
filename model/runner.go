package model

import (
	"fmt"

	"harness-s/kernels"
)

// Sampling are the transforms of one sampled token, applied in the order temperature, min-p, top-k, top-p (abi.h, sample).
// Temperature 0 is argmax; TopK 0, TopP 0 or 1 and MinP 0 are off.
type Sampling struct {
	Temperature, TopP, MinP float32
	TopK                    int
}

// truncates reports whether some tokens cannot be drawn.
func (s *Sampling) truncates() bool { return s.TopK > 0 || s.MinP > 0 || s.TopP > 0 && s.TopP < 1 }

// Key is the Philox key of one turn of one attempt; the index of the token within the turn is the counter.
type Key struct{ Lo, Hi uint64 }

// RunnerOptions size a Runner. Zero values take the defaults given.
type RunnerOptions struct {
	MaxSeqs    int // live sequences; 96
	MaxTokens  int // KV tokens over all sequences; 96 * 1024
	MaxContext int // tokens of one sequence; MaxTokens
	PageSize   int // tokens of a KV page; 16
	MaxRows    int // rows of one pass through the layers; longer appends are split at multiples of it; 1024
}

func (o *RunnerOptions) setDefaults() {
	set := func(p *int, d int) {
		if *p == 0 {
			*p = d
		}
	}
	set(&o.MaxSeqs, 96)
	set(&o.MaxTokens, 96*1024)
	set(&o.MaxContext, o.MaxTokens)
	set(&o.PageSize, 16)
	set(&o.MaxRows, 1024)
}

func (o *RunnerOptions) numPages() int { return (o.MaxTokens + o.PageSize - 1) / o.PageSize }

// Work asks a Runner to feed Append to a sequence and, with Sample, to draw the token that follows. FromLast feeds, instead of Append, the one
// token that the step submitted just before has drawn or will draw for the sequence; the device reads it by itself.
type Work struct {
	Seq      SeqID
	Append   []int32
	FromLast bool
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

// Rows is the number of tokens that w feeds.
func (w *Work) Rows() int {
	if w.FromLast {
		return 1
	}
	return len(w.Append)
}

// pure says that w is a row of decode: one token in, one token out.
func (w *Work) pure() bool { return w.Sample && w.Rows() == 1 }

// Runner samples from a Model: batched prefill and decode over paged KV and recurrent state. Each row's arithmetic is a function of
// its own sequence alone, so results do not depend on what else is in a step. All memory is allocated by NewRunner. Where the device has graphs,
// the decode rows of a step are a pass of their own, which is recorded once per number of rows. A Runner belongs to one goroutine.
type Runner struct {
	m     *Model
	st    *kernels.Stream
	cache *pageCache
	opt   RunnerOptions
	dt    kernels.DType
	valid int64 // vocabulary entries that may be sampled: the tokenizer's, or all without one
	w     runnerWeights
	mem   kernels.Allocator // of caches and activations: the device, or a phase of the model's Region

	act    *kernels.Buffer // activations of MaxRows rows
	a      activations
	ws     *kernels.Buffer
	ix     indexBuffer
	ring   *ring
	graphs decodeGraphs // nil where the device has none

	steps  int         // submitted
	issued [2]*Pending // the last one with each half of the ring
	checks int         // of works
	ids    []SeqID     // scratch of Submit
	extra  []int
	pieces [4][]piece
	unread [1]int32
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
	mlp                             kernels.Ptr
}

// piece is a run of rows of one sequence within one pass.
type piece struct {
	work   int // index into the step's works
	seq    SeqID
	ids    []int32 // with Work.FromLast a place for the token
	pos    int
	decode bool // the whole append is one token: recurrent step kernels
	sample bool
}

// NewRunner allocates caches and activations for m on its device.
func NewRunner(m *Model, o RunnerOptions) (*Runner, error) {
	o.setDefaults()
	if o.MaxSeqs < 1 || o.MaxTokens < o.PageSize || o.MaxContext < 1 || o.PageSize < 1 || o.MaxRows < o.MaxSeqs {
		return nil, fmt.Errorf("runner options: need max_seqs >= 1, page_size >= 1, max_tokens >= page_size, max_context >= 1, max_rows >= max_seqs; got %+v", o)
	}
	cfg := m.Config
	mem, err := m.memory(Rollout)
	if err != nil {
		return nil, fmt.Errorf("make runner: %w", err)
	}
	r := &Runner{m: m, st: m.Dev.NewStream(), opt: o, dt: m.Params.DType, valid: m.ValidVocab(), mem: mem}
	if r.cache, err = newPageCache(cfg, m.Dev, mem, r.st, r.dt, o.MaxSeqs, o.numPages(), o.PageSize); err != nil {
		r.Close()
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
	_ = r.st.Sync() // nothing that still runs may lose its memory; a failure has been reported
	r.graphs.free()
	for _, b := range []*kernels.Buffer{r.act, r.ws, r.ix.buf} {
		b.Free()
	}
	if r.ring != nil {
		r.ring.close()
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
		{&a.x, d}, {&a.n, d}, {&a.xs, d}, {&a.ns, d}, {&a.mlp, i},
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
	if err := r.allocateIndex(); err != nil {
		return err
	}
	ws, err := samplerWorkspace(r.m.Dev, r.m.Config, r.dt, r.opt)
	if err != nil {
		return err
	}
	if ws > 0 {
		if r.ws, err = r.m.Dev.Alloc(ws, "sampler workspace"); err != nil {
			return fmt.Errorf("allocate sampler workspace for %d rows: %w", r.opt.MaxRows, err)
		}
	}
	if r.m.Dev.CanCapture() {
		r.graphs = decodeGraphs{}
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

// Reset waits for the steps under way and drops every sequence. Weights may change then: nothing computed before is kept.
func (r *Runner) Reset() error {
	if err := r.st.Sync(); err != nil {
		return fmt.Errorf("reset sampler: %w", err)
	}
	for id := range r.cache.seqs {
		if r.cache.seqs[id].live {
			if err := r.cache.release(SeqID(id)); err != nil {
				return err
			}
		}
	}
	return nil
}

// ValidVocab is the number of vocabulary columns that take part in the softmax: the tokenizer's ids, or all without a tokenizer.
// Sampler and executor both use it, so padded rows of the head are masked in both or in neither (model.md 5.1).
func (m *Model) ValidVocab() int64 {
	if m.Tok == nil || m.Tok.VocabSize() > m.Config.VocabSize {
		return int64(m.Config.VocabSize)
	}
	return int64(m.Tok.VocabSize())
}
