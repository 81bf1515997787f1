package model

import (
	"errors"
	"fmt"
	"math"
	"unsafe"

	"harness-s/kernels"
)

// Hyper are the settings of one AdamW step. GradNorm is the norm that GradNorm returned for these gradients; with ClipNorm > 0 gradients are
// scaled by ClipNorm/GradNorm when the norm is larger.
type Hyper struct {
	LR, Beta1, Beta2, Eps, Decay float64
	ClipNorm, GradNorm           float64
}

var errNoGradients = &Error{Op: "use gradients", Err: errors.New("model has no gradients"), Hint: "load the model with LoadOptions.Train, or give it an adapter with AdaptOptions.Train"}

// ZeroGrad clears the gradients.
func (e *Exec) ZeroGrad() error {
	p := e.m.Trainable()
	if !p.Has(Grads) {
		return errNoGradients
	}
	if err := e.usable(); err != nil {
		return err
	}
	e.stream.Fill(p.Base(Grads), p.arenaBytes(Grads), 0)
	if err := e.stream.Sync(); err != nil {
		return fmt.Errorf("clear gradients: %w", err)
	}
	return nil
}

// GradNorm is the Euclidean norm of all gradients: squares summed in float64 per parameter, parameters added in table order.
func (e *Exec) GradNorm() (float64, error) {
	p := e.m.Trainable()
	if !p.Has(Grads) {
		return 0, errNoGradients
	}
	if err := e.usable(); err != nil {
		return 0, err
	}
	entries := p.Entries()
	a := &kernels.SumSqArgs{DType: p.DType.Wide()}
	for i, t := range entries {
		a.N, a.X, a.Out = t.Len, p.Ptr(Grads, t.Name), e.held.norms.At(8*int64(i))
		if err := e.grow(&e.held.ws, sumSqWorkspace(e.m.Dev, a.DType, t.Len), "workspace"); err != nil {
			return 0, err
		}
		a.WS, a.WSBytes = e.held.ws.Ptr(), e.held.ws.Bytes()
		e.stream.Run(kernels.OpSumSq, unsafe.Pointer(a))
	}
	sums := make([]float64, len(entries))
	e.stream.Download(bytesOf(sums), e.held.norms.Ptr())
	if err := e.stream.Sync(); err != nil {
		return 0, fmt.Errorf("compute gradient norm: %w", err)
	}
	var total float64
	for _, s := range sums {
		total += s
	}
	return math.Sqrt(total), nil
}

// Step applies AdamW with decoupled decay to every parameter, in the storage of its recipe. Only matrices (embedding, projections) decay: norms, gates and conv taps do not.
// With an adapter its matrices are stepped and W' is made anew. It counts the step in OptStep and Version of Model.Trainable.
func (e *Exec) Step(h Hyper) error {
	p := e.m.Trainable()
	if !p.Has(MomentM) || !p.Has(MomentV) {
		return errNoGradients
	}
	if err := e.usable(); err != nil {
		return err
	}
	if math.IsNaN(h.GradNorm) || math.IsInf(h.GradNorm, 0) {
		return fmt.Errorf("step optimiser: gradient norm %g is not finite", h.GradNorm)
	}
	scale := 1.0
	if h.ClipNorm > 0 && h.GradNorm > h.ClipNorm {
		scale = h.ClipNorm / h.GradNorm
	}
	entries := p.Entries()
	for i := 0; i < len(entries); {
		j := i + 1
		for j < len(entries) && decays(entries[j]) == decays(entries[i]) && p.split(entries[j]) == p.split(entries[i]) {
			j++
		}
		first, end := entries[i], p.Elems()
		if j < len(entries) {
			end = entries[j].Offset
		}
		at := func(kind StateKind) kernels.Ptr { return p.at(kind, first, 0) }
		a := kernels.AdamWArgs{
			DType: p.storage(Weights, first), States: p.recipe.States, N: end - first.Offset, First: first.Offset, Step: p.OptStep + 1, Seed: p.recipe.Seed,
			LR: h.LR, Beta1: h.Beta1, Beta2: h.Beta2, Eps: h.Eps, GradScale: scale,
			W: at(Weights), M: at(MomentM), V: at(MomentV), MS: at(ScaleM), VS: at(ScaleV), Grad: at(Grads),
		}
		if p.split(first) {
			a.Lo = at(WeightsLo)
		}
		if decays(first) {
			a.Decay = h.Decay
		}
		e.stream.AdamW(&a)
		i = j
	}
	if err := e.stream.Sync(); err != nil {
		return fmt.Errorf("step optimiser: %w", err)
	}
	p.OptStep++
	p.Version++
	if e.m.Adapter != nil {
		return e.m.Adapter.merge()
	}
	return nil
}

// sumSqWorkspace is what the sum of squares of n elements needs.
func sumSqWorkspace(dev *kernels.Device, dt kernels.DType, n int64) int64 {
	return dev.Workspace(kernels.OpSumSq, unsafe.Pointer(&kernels.SumSqArgs{DType: dt, N: n}))
}

func decays(t Entry) bool { return len(t.Shape) == 2 }
