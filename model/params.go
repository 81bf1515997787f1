package model

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"math"

	"gorgonia.org/tensor"

	"harness-s/kernels"
)

// StateKind names one of the arenas of Params.
type StateKind uint8

// Arenas. Grads, MomentM and MomentV exist only in a model loaded with LoadOptions.Train.
const (
	Weights StateKind = iota
	Grads
	MomentM
	MomentV
	numKinds
)

// String returns the label used in ledgers and files.
func (k StateKind) String() string {
	return [...]string{"weights", "grads", "moment_m", "moment_v", "?"}[min(k, numKinds)]
}

// alignElems is the alignment of each tensor in an arena, in elements: 64 bytes in float32, and whole vectors for the optimiser.
const alignElems = 16

// Entry is one tensor of the arenas: Offset and Len are in elements and the same in every arena.
type Entry struct {
	Name        string
	Shape       []int
	Offset, Len int64
}

// Params holds the parameters on a device: one arena each for weights, gradients and the two Adam moments, all with the same layout
// and dtype. Padding between tensors is zero in every arena. Version counts weight updates, OptStep optimiser steps.
type Params struct {
	DType   kernels.DType
	Version uint64
	OptStep int64

	entries []Entry
	byName  map[string]int
	elems   int64
	dev     *kernels.Device
	stream  *kernels.Stream
	arena   [numKinds]*kernels.Buffer
}

// newParams lays out the tensors of specs in their order and allocates the arenas, zeroed.
func newParams(specs []TensorSpec, dev *kernels.Device, dtype kernels.DType, train bool) (*Params, error) {
	if dtype != kernels.F32 && dtype != kernels.F64 {
		return nil, fmt.Errorf("allocate parameters: dtype %v, want F32 or F64", dtype)
	}
	p := &Params{DType: dtype, byName: map[string]int{}, dev: dev, stream: dev.NewStream()}
	for _, t := range specs {
		n := t.Elems()
		p.byName[t.Name] = len(p.entries)
		p.entries = append(p.entries, Entry{Name: t.Name, Shape: t.Shape, Offset: p.elems, Len: n})
		p.elems += (n + alignElems - 1) / alignElems * alignElems
	}
	kinds := []StateKind{Weights}
	if train {
		kinds = append(kinds, Grads, MomentM, MomentV)
	}
	for _, k := range kinds {
		b, err := dev.Alloc(p.elems*int64(dtype.Size()), k.String())
		if err != nil {
			p.free()
			return nil, fmt.Errorf("allocate %s (%d bytes): %w", k, p.elems*int64(dtype.Size()), err)
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
	if !p.Has(kind) {
		return 0
	}
	return p.arena[kind].At(e.Offset * int64(p.DType.Size()))
}

func (p *Params) entry(kind StateKind, name string) (Entry, kernels.Ptr, error) {
	e, ok := p.Lookup(name)
	if !ok {
		return e, 0, fmt.Errorf("no parameter %q", name)
	}
	if !p.Has(kind) {
		return e, 0, fmt.Errorf("arena %s is not allocated (load the model with Train)", kind)
	}
	return e, p.arena[kind].At(e.Offset * int64(p.DType.Size())), nil
}

// read downloads the bytes of a tensor.
func (p *Params) read(kind StateKind, name string) ([]byte, error) {
	e, at, err := p.entry(kind, name)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", kind, err)
	}
	b := make([]byte, e.Len*int64(p.DType.Size()))
	p.stream.Download(b, at)
	if err := p.stream.Sync(); err != nil {
		return nil, fmt.Errorf("read %s %q: %w", kind, name, err)
	}
	return b, nil
}

// ReadF32 downloads a tensor as float32, row-major.
func (p *Params) ReadF32(kind StateKind, name string) ([]float32, error) {
	b, err := p.read(kind, name)
	if err != nil {
		return nil, err
	}
	v := make([]float32, len(b)/p.DType.Size())
	dtype := "F32"
	if p.DType == kernels.F64 {
		dtype = "F64"
	}
	return v, DecodeFloat32(v, dtype, b)
}

// Dense downloads a tensor as a float32 gorgonia tensor.
func (p *Params) Dense(kind StateKind, name string) (*tensor.Dense, error) {
	v, err := p.ReadF32(kind, name)
	if err != nil {
		return nil, err
	}
	e, _ := p.Lookup(name)
	return denseF32(e.Shape, v), nil
}

// WriteF32 uploads a tensor given in float32, row-major.
func (p *Params) WriteF32(kind StateKind, name string, v []float32) error {
	e, at, err := p.entry(kind, name)
	if err != nil {
		return fmt.Errorf("write %s: %w", kind, err)
	}
	if int64(len(v)) != e.Len {
		return fmt.Errorf("write %s %q: %d values for shape %v", kind, name, len(v), e.Shape)
	}
	p.stream.Upload(at, p.encode(v))
	if err := p.stream.Sync(); err != nil {
		return fmt.Errorf("write %s %q: %w", kind, name, err)
	}
	return nil
}

func (p *Params) encode(v []float32) []byte {
	le := binary.LittleEndian
	if p.DType == kernels.F64 {
		b := make([]byte, 8*len(v))
		for i, x := range v {
			le.PutUint64(b[8*i:], math.Float64bits(float64(x)))
		}
		return b
	}
	b := make([]byte, 4*len(v))
	for i, x := range v {
		le.PutUint32(b[4*i:], math.Float32bits(x))
	}
	return b
}

// State returns the bytes of an arena: all tensors in table order, without padding, little-endian in DType.
func (p *Params) State(kind StateKind) ([]byte, error) {
	if !p.Has(kind) {
		return nil, fmt.Errorf("read %s: arena is not allocated (load the model with Train)", kind)
	}
	size := int64(p.DType.Size())
	out := make([]byte, p.stateBytes())
	at := int64(0)
	for _, e := range p.entries {
		n := e.Len * size
		p.stream.Download(out[at:at+n], p.arena[kind].At(e.Offset*size))
		at += n
	}
	if err := p.stream.Sync(); err != nil {
		return nil, fmt.Errorf("read %s: %w", kind, err)
	}
	return out, nil
}

func (p *Params) stateBytes() int64 {
	n := int64(0)
	for _, e := range p.entries {
		n += e.Len * int64(p.DType.Size())
	}
	return n
}

// SetState restores an arena from the bytes of State of a model with the same configuration and dtype.
func (p *Params) SetState(kind StateKind, b []byte) error {
	if !p.Has(kind) {
		return fmt.Errorf("restore %s: arena is not allocated (load the model with Train)", kind)
	}
	if want := p.stateBytes(); int64(len(b)) != want {
		return fmt.Errorf("restore %s: %d bytes, this model has %d", kind, len(b), want)
	}
	size := int64(p.DType.Size())
	at := int64(0)
	for _, e := range p.entries {
		n := e.Len * size
		p.stream.Upload(p.arena[kind].At(e.Offset*size), b[at:at+n])
		at += n
	}
	if err := p.stream.Sync(); err != nil {
		return fmt.Errorf("restore %s: %w", kind, err)
	}
	return nil
}

// sha256 hashes the tensors of an arena in table order, as State returns them.
func (p *Params) sha256(kind StateKind) (string, error) {
	if !p.Has(kind) {
		return "", fmt.Errorf("read %s: arena is not allocated (load the model with Train)", kind)
	}
	h := sha256.New()
	size := int64(p.DType.Size())
	buf := make([]byte, min(loadPiece, p.elems)*size)
	for _, at := range p.extents(loadPiece) {
		e, b := p.entries[at.entry], buf[:at.n*size]
		p.stream.Download(b, p.arena[kind].At((e.Offset+at.at)*size))
		if err := p.stream.Sync(); err != nil {
			return "", fmt.Errorf("read %s %q: %w", kind, e.Name, err)
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
