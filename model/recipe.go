package model

import (
	"encoding/binary"
	"fmt"
	"math"

	"harness-s/kernels"
)

// Recipe is how an optimiser stores what it trains (gpu.md 3.7). The zero value keeps everything in the parameters' dtype.
type Recipe struct {
	// States is the storage of the two Adam moments: their real type, bfloat16 (2 bytes each) or 8-bit codes with a scale per
	// kernels.StateBlock elements (1.02 bytes each), both rounded stochastically.
	States kernels.State
	// HiLo splits every float32 master weight into its nearest bfloat16, which is all that sampler and executor ever read, and the 16
	// bits that are missing (kernels.SplitF32): exact, whatever the size of an update. Tensors that stay float32 (TensorSpec.KeepF32) are
	// not split. Without Train the lower half is dropped: what is left is what training computes with.
	HiLo bool
	// Seed keys the stochastic rounding, with an element's place and the step.
	Seed uint64
}

// kinds lists the arenas of parameters with this recipe.
func (r Recipe) kinds(train bool) []StateKind {
	if !train {
		return []StateKind{Weights}
	}
	ks := []StateKind{Weights, Grads, MomentM, MomentV}
	if r.HiLo {
		ks = append(ks, WeightsLo)
	}
	if r.States == kernels.StateU8 {
		ks = append(ks, ScaleM, ScaleV)
	}
	return ks
}

func (r Recipe) check(dtype kernels.DType) error {
	switch {
	case dtype != kernels.F32 && dtype != kernels.F64:
		return fmt.Errorf("allocate parameters: dtype %v, want F32 or F64", dtype)
	case r.HiLo && dtype != kernels.F32:
		return fmt.Errorf("allocate parameters: dtype %v, but only float32 weights are split (Recipe.HiLo)", dtype)
	case r.States < kernels.StateF32 || r.States > kernels.StateU8:
		return fmt.Errorf("allocate parameters: states %d, want StateF32, StateBF16 or StateU8", r.States)
	}
	return nil
}

// span returns where n elements of an arena begin, and how long they are, in bytes. first is a multiple of kernels.StateBlock for scales.
func (p *Params) span(kind StateKind, first, n int64) (at, bytes int64) {
	size := int64(p.DType.Size())
	switch kind {
	case WeightsLo:
		size = 2
	case ScaleM, ScaleV:
		return first / kernels.StateBlock * 4, (n + kernels.StateBlock - 1) / kernels.StateBlock * 4
	case MomentM, MomentV:
		switch p.recipe.States {
		case kernels.StateBF16:
			size = 2
		case kernels.StateU8:
			size = 1
		}
	}
	return first * size, n * size
}

// at is the address of an element of an arena, 0 when the arena is not allocated.
func (p *Params) at(kind StateKind, first int64) kernels.Ptr {
	if !p.Has(kind) {
		return 0
	}
	at, _ := p.span(kind, first, 0)
	return p.arena[kind].At(at)
}

// inReals reports whether an arena holds values of DType.
func (p *Params) inReals(kind StateKind) bool {
	switch kind {
	case Weights, Grads:
		return true
	case MomentM, MomentV:
		return p.recipe.States == kernels.StateF32
	}
	return false
}

// split reports whether the weights of a tensor are stored in halves.
func (p *Params) split(e Entry) bool { return p.recipe.HiLo && !e.KeepF32 }

// splitPiece is how many elements are split or joined at a time.
const splitPiece = 1 << 16

// uploadSplit writes master weights of a tensor from element at on: upper halves, widened, and lower ones where they are kept.
func (p *Params) uploadSplit(s *kernels.Stream, e Entry, at int64, v []float32) error {
	hi, lo := make([]float32, min(len(v), splitPiece)), make([]byte, 2*min(len(v), splitPiece))
	for len(v) > 0 {
		n := min(len(v), splitPiece)
		for i, x := range v[:n] {
			h, l := kernels.SplitF32(x)
			hi[i] = kernels.FromBF16(h)
			binary.LittleEndian.PutUint16(lo[2*i:], uint16(l))
		}
		s.UploadReal(p.at(Weights, e.Offset+at), hi[:n], p.DType)
		if p.Has(WeightsLo) {
			s.Upload(p.at(WeightsLo, e.Offset+at), lo[:2*n])
		}
		if err := s.Sync(); err != nil {
			return err
		}
		v, at = v[n:], at+int64(n)
	}
	return nil
}

// join makes the float32 master of upper halves that were downloaded from a tensor, from element at on, in place. Weights that are not
// split stay as they are.
func (p *Params) join(e Entry, at int64, b []byte) error {
	if !p.split(e) || !p.Has(WeightsLo) {
		return nil
	}
	le := binary.LittleEndian
	lo := make([]byte, min(len(b)/2, 2*splitPiece))
	for len(b) > 0 {
		n := min(len(b)/4, splitPiece)
		p.stream.Download(lo[:2*n], p.at(WeightsLo, e.Offset+at))
		if err := p.stream.Sync(); err != nil {
			return err
		}
		for i := range n {
			x := kernels.JoinF32(uint16(le.Uint32(b[4*i:])>>16), int16(le.Uint16(lo[2*i:])))
			le.PutUint32(b[4*i:], math.Float32bits(x))
		}
		b, at = b[4*n:], at+int64(n)
	}
	return nil
}

// Master downloads the weights that the optimiser updates, row-major: those of ReadF32, joined with their lower halves where they are split.
func (p *Params) Master(name string) ([]float32, error) {
	b, err := p.read(Weights, name)
	if err != nil {
		return nil, err
	}
	e, _ := p.Lookup(name)
	if err := p.join(e, 0, b); err != nil {
		return nil, fmt.Errorf("read lower halves of %q: %w", name, err)
	}
	return p.decode(b)
}
