package model

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"math"
	"strings"
	"sync/atomic"

	"gorgonia.org/tensor"

	"harness-s/kernels"
)

// StateKind names one of the arenas of Params.
type StateKind uint8

// Arenas. All but Weights exist only in a model loaded with LoadOptions.Train: WeightsLo when weights are split, ScaleM and ScaleV with
// 8-bit moments (Recipe).
const (
	Weights StateKind = iota
	Grads
	MomentM
	MomentV
	WeightsLo
	ScaleM
	ScaleV
	numKinds
)

// String returns the label used in ledgers and files.
func (k StateKind) String() string {
	return [...]string{"weights", "grads", "moment_m", "moment_v", "weights_lo", "moment_m_scale", "moment_v_scale", "?"}[min(k, numKinds)]
}

// alignElems is the alignment of each tensor in an arena, in elements: a block of moments belongs to one tensor, whatever its storage, and
// an optimiser step may begin at any tensor.
const alignElems = kernels.StateBlock

// Entry is one tensor of the arenas: Offset and Len are in elements and the same in every arena. KeepF32 is that of its TensorSpec.
type Entry struct {
	Name        string
	Shape       []int
	Offset, Len int64
	KeepF32     bool

	kept int64 // elements of KeepF32 tensors before it, padding included
}

// Params holds the parameters on a device: one arena each for weights, gradients and the two Adam moments, all with the same layout in
// elements, and the arenas that the recipe adds. Weights are of type DType, gradients and moments of DType.Wide or as the recipe says. In
// BF16 the weights are those of Recipe.HiLo, upper halves of float32 masters, and KeepF32 tensors stay float32. Padding between tensors is
// zero in every arena. Version counts weight updates, OptStep optimiser steps.
type Params struct {
	DType   kernels.DType
	Version uint64
	OptStep int64

	entries []Entry
	byName  map[string]int
	elems   int64 // of an arena
	kept    int64 // of them in KeepF32 tensors
	dev     *kernels.Device
	stream  *kernels.Stream
	recipe  Recipe
	arena   [numKinds]*kernels.Buffer
	shared  bool        // gradients lie in a Region
	rounded atomic.Bool // an upload of weights lost bits: there are no lower halves to keep them
}

// newParams lays out the tensors of specs in their order and allocates the arenas that o asks for, zeroed. The recipe counts with Train;
// without, only its HiLo does.
func newParams(specs []TensorSpec, dev *kernels.Device, o LoadOptions) (*Params, error) {
	dtype, r := o.DType, o.Optim
	if err := r.check(dtype, o.Train); err != nil {
		return nil, err
	}
	if !dev.Stores(dtype) {
		return nil, &Error{Op: "allocate parameters", Err: fmt.Errorf("device %s does not compute in %v", dev.Info().Name, dtype), Hint: storageHint(dtype)}
	}
	p := &Params{DType: dtype, byName: map[string]int{}, dev: dev, stream: dev.NewStream(), recipe: r}
	for _, t := range specs {
		p.byName[t.Name] = len(p.entries)
		p.entries = append(p.entries, Entry{Name: t.Name, Shape: t.Shape, Offset: p.elems, Len: t.Elems(), KeepF32: t.KeepF32, kept: p.kept})
		n := padElems(t)
		p.elems += n
		if t.KeepF32 {
			p.kept += n
		}
	}
	p.shared = o.Train && o.Shared
	for _, k := range r.kinds(o.Train) {
		if k == Grads && p.shared {
			continue
		}
		bytes := p.arenaBytes(k)
		b, err := dev.Alloc(bytes, k.String())
		if err != nil {
			p.free()
			return nil, fmt.Errorf("allocate %s (%d bytes): %w", k, bytes, err)
		}
		p.arena[k] = b
	}
	return p, nil
}

func (p *Params) free() {
	for k, b := range p.arena {
		if b != nil {
			b.Free()
			p.arena[k] = nil
		}
	}
}

// Entries lists the tensors in arena order. The slice must not be changed.
func (p *Params) Entries() []Entry { return p.entries }

// Lookup finds a tensor by text-only name.
func (p *Params) Lookup(name string) (Entry, bool) {
	i, ok := p.byName[name]
	if !ok {
		return Entry{}, false
	}
	return p.entries[i], true
}

// Has reports whether an arena is allocated.
func (p *Params) Has(kind StateKind) bool { return kind < numKinds && p.arena[kind] != nil }

// Elems returns the length of an arena in elements, padding included.
func (p *Params) Elems() int64 { return p.elems }

// Base returns the address of an arena, 0 when it is not allocated.
func (p *Params) Base(kind StateKind) kernels.Ptr {
	if !p.Has(kind) {
		return 0
	}
	return p.arena[kind].Ptr()
}

// Ptr returns the address of a tensor in an arena, 0 when the arena is not allocated. It panics on an unknown name, which only a wrong
// program can ask for.
func (p *Params) Ptr(kind StateKind, name string) kernels.Ptr {
	e, ok := p.Lookup(name)
	if !ok {
		panic(fmt.Sprintf("model: no parameter %q", name))
	}
	return p.at(kind, e, 0)
}

func (p *Params) entry(kind StateKind, name string) (Entry, kernels.Ptr, error) {
	e, ok := p.Lookup(name)
	if !ok {
		return e, 0, fmt.Errorf("no parameter %q", name)
	}
	if err := p.usable(kind); err != nil {
		return e, 0, err
	}
	return e, p.at(kind, e, 0), nil
}

// usable says why an arena cannot be read or written now.
func (p *Params) usable(kind StateKind) error {
	switch {
	case !p.Has(kind):
		return fmt.Errorf("arena %s is not allocated (load the model with Train)", kind)
	case !p.arena[kind].Usable():
		return fmt.Errorf("arena %s is kept while training only: its memory is the sampler's now", kind)
	}
	return nil
}

// read downloads the bytes of a tensor.
func (p *Params) read(kind StateKind, name string) ([]byte, error) {
	e, at, err := p.entry(kind, name)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", kind, err)
	}
	b := make([]byte, p.bytes(kind, e, e.Len))
	p.stream.Download(b, at)
	if err := p.stream.Sync(); err != nil {
		return nil, fmt.Errorf("read %s %q: %w", kind, name, err)
	}
	return b, nil
}

// ReadF32 downloads a tensor as float32, row-major. Weights are what sampler and executor read (Master gives both halves of split ones);
// moments must be stored as reals.
func (p *Params) ReadF32(kind StateKind, name string) ([]float32, error) {
	if !p.inReals(kind) {
		return nil, fmt.Errorf("read %s %q: not stored as reals, State gives the bytes", kind, name)
	}
	b, err := p.read(kind, name)
	if err != nil {
		return nil, err
	}
	e, _ := p.Lookup(name)
	return decode(b, p.storage(kind, e))
}

// decode is the float32 values of the bytes of reals.
func decode(b []byte, t kernels.DType) ([]float32, error) {
	v := make([]float32, len(b)/t.Size())
	return v, DecodeFloat32(v, fileDType(t), b)
}

// fileDType is the name of a type of reals in safetensors files.
func fileDType(t kernels.DType) string { return strings.ToUpper(t.String()) }

// Dense downloads a tensor as a float32 gorgonia tensor.
func (p *Params) Dense(kind StateKind, name string) (*tensor.Dense, error) {
	v, err := p.ReadF32(kind, name)
	if err != nil {
		return nil, err
	}
	e, _ := p.Lookup(name)
	return denseF32(e.Shape, v), nil
}

// WriteF32 uploads a tensor given in float32, row-major: of split weights both halves. Moments must be stored as reals.
func (p *Params) WriteF32(kind StateKind, name string, v []float32) error {
	e, _, err := p.entry(kind, name)
	if err != nil {
		return fmt.Errorf("write %s: %w", kind, err)
	}
	if !p.inReals(kind) {
		return fmt.Errorf("write %s %q: not stored as reals, SetState takes the bytes", kind, name)
	}
	if int64(len(v)) != e.Len {
		return fmt.Errorf("write %s %q: %d values for shape %v", kind, name, len(v), e.Shape)
	}
	return p.upload(p.stream, kind, e, 0, v)
}

// State returns the bytes of an arena: all tensors in table order, without padding, little-endian, in their types there.
func (p *Params) State(kind StateKind) ([]byte, error) {
	if err := p.usable(kind); err != nil {
		return nil, fmt.Errorf("read %s: %w", kind, err)
	}
	out := make([]byte, p.stateBytes(kind))
	to := int64(0)
	for _, e := range p.entries {
		n := p.bytes(kind, e, e.Len)
		p.stream.Download(out[to:to+n], p.at(kind, e, 0))
		to += n
	}
	if err := p.stream.Sync(); err != nil {
		return nil, fmt.Errorf("read %s: %w", kind, err)
	}
	return out, nil
}

func (p *Params) stateBytes(kind StateKind) (total int64) {
	for _, e := range p.entries {
		total += p.bytes(kind, e, e.Len)
	}
	return total
}

// SetState restores an arena from the bytes of State of a model with the same configuration, dtype and recipe.
func (p *Params) SetState(kind StateKind, b []byte) error {
	if err := p.usable(kind); err != nil {
		return fmt.Errorf("restore %s: %w", kind, err)
	}
	if want := p.stateBytes(kind); int64(len(b)) != want {
		return fmt.Errorf("restore %s: %d bytes, this model has %d", kind, len(b), want)
	}
	from := int64(0)
	for _, e := range p.entries {
		n := p.bytes(kind, e, e.Len)
		p.stream.Upload(p.at(kind, e, 0), b[from:from+n])
		from += n
	}
	if err := p.stream.Sync(); err != nil {
		return fmt.Errorf("restore %s: %w", kind, err)
	}
	return nil
}

// sha256 hashes the master weights in table order, in DType.Wide.
func (p *Params) sha256() (string, error) {
	h := sha256.New()
	var b []byte
	for _, at := range p.extents(loadPiece) {
		var err error
		if b, err = p.masters(b, p.entries[at.entry], at.at, at.n); err != nil {
			return "", err
		}
		h.Write(b)
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// checkFinite reports the first non-finite value of a run of a tensor's elements that begins at element first.
func checkFinite(name string, shape []int, v []float32, first int64) error {
	for i, x := range v {
		if math.Float32bits(x)&0x7f800000 == 0x7f800000 {
			at := make([]int, len(shape))
			for k, r := len(shape)-1, int(first)+i; k >= 0; k-- {
				at[k], r = r%shape[k], r/shape[k]
			}
			return fmt.Errorf("tensor %q%v = %v: %w", name, at, x, ErrNonFinite)
		}
	}
	return nil
}
