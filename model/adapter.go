package model

import (
	"errors"
	"fmt"
	"hash/fnv"
	"math"
	"math/rand/v2"
	"strings"
	"unsafe"

	"harness-s/kernels"
)

// Adapter is the low-rank part of a model (gpu.md 3.8). The model's weights hold W' = W0 + s B A, which sampler and executor both run, so
// they cannot drift apart; W0 of the adapted matrices is kept aside and W' is made anew from it after every change of A or B, never
// updated, so that it does not depend on how the adapter came about.
type Adapter struct {
	LoRA   LoRA
	Params *Params // A and B
	Base   Base

	matrices []TensorSpec
	frozen   *Params         // W0
	scaled   *Params         // s A and s B: what gradients and W' are made of, the product has no factor
	diagonal *kernels.Buffer // s I, once for each part of s
	ws       *kernels.Buffer
	scales   []kernels.GemmArgs // s A and s B of every matrix
	steps    []mergeStep
	stream   *kernels.Stream
}

// Base says which weights an adapter stands beside.
type Base struct {
	Path   string // directory it was loaded from; empty = the shipped checkpoint, or not known
	SHA256 string // WeightsSHA256 of the model without adapter
}

// AdaptOptions are the parts of Adapt that are not in the adapter's files. Train allocates gradients and moments of the adapter, stored as
// Optim says.
type AdaptOptions struct {
	Train  bool
	Optim  Recipe
	Shared bool   // as in LoadOptions
	Seed   uint64 // of A's start values
	Path   string // Base.Path
}

// Adapt puts a fresh adapter beside the model's weights: A uniform in +-1/sqrt(in) as PEFT starts it, B zero, so that the model computes what
// it did before. The model must have been loaded without Train: its own weights are frozen from here on.
func (m *Model) Adapt(l LoRA, o AdaptOptions) error {
	if err := m.newAdapter(l, o); err != nil {
		return err
	}
	for _, e := range m.Adapter.Params.entries {
		if !strings.HasSuffix(e.Name, loraA) {
			continue
		}
		if err := m.Adapter.Params.WriteF32(Weights, e.Name, uniformA(e, o.Seed)); err != nil {
			m.dropAdapter()
			return err
		}
	}
	if err := m.Adapter.merge(); err != nil {
		m.dropAdapter()
		return err
	}
	return nil
}

// uniformA draws the start values of an A, keyed by seed and name: kaiming_uniform with a = sqrt(5) is uniform in +-1/sqrt(in).
func uniformA(e Entry, seed uint64) []float32 {
	h := fnv.New64a()
	h.Write([]byte(e.Name))
	rng := rand.New(rand.NewPCG(seed, h.Sum64()))
	bound := 1 / math.Sqrt(float64(e.Shape[1]))
	v := make([]float32, e.Len)
	for i := range v {
		v[i] = float32(bound * (2*rng.Float64() - 1))
	}
	return v
}

// newAdapter allocates an adapter, all zero, and takes W0 from the model's weights.
func (m *Model) newAdapter(l LoRA, o AdaptOptions) (err error) {
	switch {
	case m.Adapter != nil:
		return errors.New("adapt model: it has an adapter already")
	case m.Params.Has(MomentM):
		return &Error{Op: "adapt model", Err: errors.New("its own weights have gradients"), Hint: "load the model without LoadOptions.Train"}
	}
	a := &Adapter{LoRA: l, Base: Base{Path: o.Path}, stream: m.Dev.NewStream()}
	if a.matrices, err = l.Matrices(m.Config); err != nil {
		return err
	}
	if a.Base.SHA256, err = m.WeightsSHA256(); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			m.dropAdapter()
			err = fmt.Errorf("adapt model: %w", err)
		}
	}()
	m.Adapter = a
	dt, tensors := m.Params.DType, adapterTensors(a.matrices, l.Rank)
	if a.Params, err = newParams(tensors, m.Dev, LoadOptions{DType: dt, Train: o.Train, Optim: o.Optim, Shared: o.Shared}); err != nil {
		return err
	}
	if a.scaled, err = newParams(tensors, m.Dev, LoadOptions{DType: dt}); err != nil {
		return err
	}
	if a.frozen, err = newParams(a.matrices, m.Dev, LoadOptions{DType: dt}); err != nil {
		return err
	}
	for _, t := range a.matrices {
		a.stream.Copy(&kernels.VecArgs{DType: dt, N: t.Elems(), Src: m.Params.Ptr(Weights, t.Name), Dst: a.frozen.Ptr(Weights, t.Name)})
	}
	return a.plan(m)
}

func (m *Model) dropAdapter() {
	a := m.Adapter
	m.Adapter = nil
	for _, p := range []*Params{a.Params, a.scaled, a.frozen} {
		if p != nil {
			p.free()
		}
	}
	for _, b := range []*kernels.Buffer{a.diagonal, a.ws} {
		if b != nil {
			b.Free()
		}
	}
	a.stream.Close()
}

// mergeStep makes W' of one matrix: the copy of W0 that s B A is added to. Storage rounds W' once.
type mergeStep struct {
	copy kernels.VecArgs
	add  kernels.GemmArgs
}

// scaleParts are numbers of type dt whose sum is s: s itself, or in bfloat16, which would be off by up to 0.4%, what one leaves for a second.
func scaleParts(s float64, dt kernels.DType) []float32 {
	if dt != kernels.BF16 {
		return []float32{float32(s)}
	}
	hi := kernels.FromBF16(kernels.ToBF16(float32(s)))
	if lo := float32(s - float64(hi)); lo != 0 {
		return []float32{hi, lo}
	}
	return []float32{hi}
}

// plan sets the merge up: a step per matrix, the diagonal matrix s I [rank, rank] that scales by a product (each sum has one term that is not
// zero, so s A is rounded once, by each part of s), and one workspace.
func (a *Adapter) plan(m *Model) error {
	dt, r := m.Params.DType, int64(a.LoRA.Rank)
	parts, bytes := scaleParts(a.LoRA.Scale(), dt), r*r*int64(dt.Size())
	var err error
	if a.diagonal, err = m.Dev.Alloc(int64(len(parts))*bytes, "adapter scale"); err != nil {
		return err
	}
	for i, s := range parts {
		diag := make([]float32, r*r)
		for j := range r {
			diag[j*r+j] = s
		}
		a.stream.UploadReal(a.diagonal.At(int64(i)*bytes), diag, dt)
	}
	if err := a.stream.Sync(); err != nil {
		return err
	}
	for _, t := range a.matrices {
		mod, n, k := moduleOf(t.Name), int64(t.Shape[0]), int64(t.Shape[1])
		from := func(p *Params, name string) kernels.Ptr { return p.Ptr(Weights, name) }
		s := mergeStep{
			copy: kernels.VecArgs{DType: dt, N: n * k, Src: from(a.frozen, t.Name), Dst: from(m.Params, t.Name)},
			add: kernels.GemmArgs{DType: dt, Flags: kernels.Beta1, M: n, N: k, K: r, A: from(a.scaled, mod+loraB), LDA: r,
				B: from(a.Params, mod+loraA), LDB: k, C: from(m.Params, t.Name), LDC: k},
		}
		for i := range parts {
			d, flags := a.diagonal.At(int64(i)*bytes), uint32(0)
			if i > 0 {
				flags = kernels.Beta1
			}
			a.scales = append(a.scales,
				kernels.GemmArgs{DType: dt, Flags: flags, M: r, N: k, K: r, A: d, LDA: r, B: from(a.Params, mod+loraA), LDB: k, C: from(a.scaled, mod+loraA), LDC: k},
				kernels.GemmArgs{DType: dt, Flags: flags, M: n, N: r, K: r, A: from(a.Params, mod+loraB), LDA: r, B: d, LDB: r, C: from(a.scaled, mod+loraB), LDC: r})
		}
		a.steps = append(a.steps, s)
	}
	if a.ws, err = m.Dev.Alloc(mergeWorkspace(m.Dev, dt, a.matrices, r), "adapter workspace"); err != nil {
		return err
	}
	for _, g := range a.products() {
		g.WS, g.WSBytes = a.ws.Ptr(), a.ws.Bytes()
	}
	return nil
}

// mergeWorkspace is what the products of a merge need.
func mergeWorkspace(dev *kernels.Device, dt kernels.DType, ms []TensorSpec, r int64) int64 {
	most := int64(align)
	need := func(m, n, k, lda, ldb int64, flags uint32) {
		g := kernels.GemmArgs{DType: dt, Flags: flags, M: m, N: n, K: k, LDA: lda, LDB: ldb, LDC: n}
		most = max(most, dev.Workspace(kernels.OpGemm, unsafe.Pointer(&g)))
	}
	for _, t := range ms {
		n, k := int64(t.Shape[0]), int64(t.Shape[1])
		for _, flags := range []uint32{0, kernels.Beta1} {
			need(r, k, r, r, k, flags)
			need(n, r, r, r, r, flags)
		}
		need(n, k, r, r, k, kernels.Beta1)
	}
	return most
}

func (a *Adapter) products() (out []*kernels.GemmArgs) {
	for i := range a.scales {
		out = append(out, &a.scales[i])
	}
	for i := range a.steps {
		out = append(out, &a.steps[i].add)
	}
	return out
}

// merge makes W' of every adapted matrix from W0, A and B.
func (a *Adapter) merge() error {
	for i := range a.scales {
		a.stream.Gemm(&a.scales[i])
	}
	for i := range a.steps {
		a.stream.Copy(&a.steps[i].copy)
		a.stream.Gemm(&a.steps[i].add)
	}
	if err := a.stream.Sync(); err != nil {
		return fmt.Errorf("merge adapter: %w", err)
	}
	return nil
}

// Trainable is what an optimiser step changes: the adapter's parameters, or the model's own without one.
func (m *Model) Trainable() *Params {
	if m.Adapter != nil {
		return m.Adapter.Params
	}
	return m.Params
}

// NumTrainable counts the parameters that training changes.
func (m *Model) NumTrainable() int64 {
	var n int64
	for _, e := range m.Trainable().entries {
		n += e.Len
	}
	return n
}
