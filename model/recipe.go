package model

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"

	"harness-s/kernels"
)

// Recipe is how an optimiser stores what it trains (gpu.md 3.7). The zero value keeps everything in the parameters' dtype.
type Recipe struct {
	// States is the storage of the two Adam moments: their real type, bfloat16 (2 bytes each) or 8-bit codes with a scale per
	// kernels.StateBlock elements (1.02 bytes each), both rounded stochastically.
	States kernels.State
	// HiLo splits every float32 master weight into its nearest bfloat16, which is all that sampler and executor ever read, and the 16
	// bits that are missing (kernels.SplitF32): exact, whatever the size of an update. Tensors that stay float32 (TensorSpec.KeepF32) are
	// not split. Without Train the lower half is dropped: what is left is what training computes with. Weights in BF16 are always split;
	// to train them HiLo is required.
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

func (r Recipe) check(dtype kernels.DType, train bool) error {
	switch {
	case dtype != kernels.F32 && dtype != kernels.F64 && dtype != kernels.BF16:
		return fmt.Errorf("allocate parameters: dtype %v, want F32, F64 or BF16", dtype)
	case r.HiLo && dtype == kernels.F64:
		return fmt.Errorf("allocate parameters: dtype %v, but only float32 masters are split (Recipe.HiLo)", dtype)
	case train && dtype == kernels.BF16 && !r.HiLo:
		return &Error{Op: "allocate parameters", Err: errors.New("bfloat16 weights are trained as upper halves of float32 masters, and the lower halves are not kept"),
			Hint: `optim.master = "hilo" keeps them (Recipe.HiLo)`}
	case r.States < kernels.StateF32 || r.States > kernels.StateU8:
		return fmt.Errorf("allocate parameters: states %d, want StateF32, StateBF16 or StateU8", r.States)
	}
	return nil
}

func storageHint(dtype kernels.DType) string {
	if dtype == kernels.BF16 {
		return `use --device emu or cuda, or model.dtype = "float32"`
	}
	return "use device cpu"
}

// storage is the type of a tensor in an arena of reals.
func (p *Params) storage(kind StateKind, e Entry) kernels.DType {
	if kind == Weights {
		return weightDType(p.DType, e.KeepF32)
	}
	return p.DType.Wide()
}

// weightDType is how weights are stored in a model of type t.
func weightDType(t kernels.DType, keepF32 bool) kernels.DType {
	if keepF32 {
		return t.Wide()
	}
	return t
}

// bytes is the size of n elements of a tensor in an arena.
func (p *Params) bytes(kind StateKind, e Entry, n int64) int64 {
	switch kind {
	case WeightsLo:
		return 2 * n
	case ScaleM, ScaleV:
		return (n + kernels.StateBlock - 1) / kernels.StateBlock * 4
	case MomentM, MomentV:
		switch p.recipe.States {
		case kernels.StateBF16:
			return 2 * n
		case kernels.StateU8:
			return n
		}
	}
	return n * int64(p.storage(kind, e).Size())
}

// offset is where a tensor begins in an arena, in bytes.
func (p *Params) offset(kind StateKind, e Entry) int64 {
	kept, other := Entry{KeepF32: true}, Entry{}
	return p.bytes(kind, kept, e.kept) + p.bytes(kind, other, e.Offset-e.kept)
}

// arenaBytes is the size of an arena.
func (p *Params) arenaBytes(kind StateKind) int64 {
	return p.offset(kind, Entry{Offset: p.elems, kept: p.kept})
}

// at is the address of an element of a tensor in an arena, 0 when the arena is not allocated.
func (p *Params) at(kind StateKind, e Entry, first int64) kernels.Ptr {
	if !p.Has(kind) {
		return 0
	}
	return p.arena[kind].At(p.offset(kind, e) + p.bytes(kind, e, first))
}

// inReals reports whether an arena holds real numbers.
func (p *Params) inReals(kind StateKind) bool {
	switch kind {
	case Weights, Grads:
		return true
	case MomentM, MomentV:
		return p.recipe.States == kernels.StateF32
	}
	return false
}

// split reports whether the weights of a tensor are upper halves of masters.
func (p *Params) split(e Entry) bool {
	return (p.recipe.HiLo || p.DType == kernels.BF16) && !e.KeepF32
}

// splitPiece is how many elements are split or joined at a time.
const splitPiece = 1 << 16

// uploadSplit writes master weights of a tensor from element at on: upper halves, and lower ones where they are kept.
func (p *Params) uploadSplit(s *kernels.Stream, e Entry, at int64, v []float32) error {
	hi, lo := make([]float32, min(len(v), splitPiece)), make([]byte, 2*min(len(v), splitPiece))
	for len(v) > 0 {
		n := min(len(v), splitPiece)
		for i, x := range v[:n] {
			h, l := kernels.SplitF32(x)
			hi[i] = kernels.FromBF16(h)
			binary.LittleEndian.PutUint16(lo[2*i:], uint16(l))
		}
		s.UploadReal(p.at(Weights, e, at), hi[:n], p.storage(Weights, e))
		if p.Has(WeightsLo) {
			s.Upload(p.at(WeightsLo, e, at), lo[:2*n])
		} else if !slices.Equal(hi[:n], v[:n]) {
			p.rounded.Store(true)
		}
		if err := s.Sync(); err != nil {
			return err
		}
		v, at = v[n:], at+int64(n)
	}
	return nil
}

// masters downloads n master weights of a tensor, from element at on, as bytes of DType.Wide: split ones joined, or widened where the lower
// halves are not kept. The result lies in buf when that has room for it and for 2 bytes more per element, so that a loop over pieces hands
// the last result in again.
func (p *Params) masters(buf []byte, e Entry, at, n int64) ([]byte, error) {
	wide := n * int64(p.DType.Wide().Size())
	buf = slices.Grow(buf[:0], int(wide+2*n))[:wide+2*n]
	out, lo := buf[:wide], buf[wide:]
	b := out[wide-p.bytes(Weights, e, n):] // narrow ones at the end, so that they can be widened in place
	p.stream.Download(b, p.at(Weights, e, at))
	joined := p.split(e) && p.Has(WeightsLo)
	if joined {
		p.stream.Download(lo, p.at(WeightsLo, e, at))
	}
	if err := p.stream.Sync(); err != nil {
		return nil, fmt.Errorf("read weights %q: %w", e.Name, err)
	}
	if p.storage(Weights, e) == kernels.BF16 {
		for i := range n {
			out[4*i], out[4*i+1], out[4*i+2], out[4*i+3] = 0, 0, b[2*i], b[2*i+1]
		}
	}
	if joined {
		le := binary.LittleEndian
		for i := range n {
			x := kernels.JoinF32(uint16(le.Uint32(out[4*i:])>>16), int16(le.Uint16(lo[2*i:])))
			le.PutUint32(out[4*i:], math.Float32bits(x))
		}
	}
	return out, nil
}

// Master downloads the weights that the optimiser updates, row-major: those of ReadF32, joined with their lower halves where they are split.
func (p *Params) Master(name string) ([]float32, error) {
	e, _, err := p.entry(Weights, name)
	if err != nil {
		return nil, fmt.Errorf("read masters: %w", err)
	}
	b, err := p.masters(nil, e, 0, e.Len)
	if err != nil {
		return nil, err
	}
	return decode(b, p.DType.Wide())
}
