package model

import (
	"errors"
	"fmt"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"harness-s/kernels"
)

// interpreter runs single ops on host tensors: upload, kernel calls, download. It shares the ops' argument structs with the planner and
// nothing else: no schedule, no fusion, no aliasing, no arena.
type interpreter struct {
	dev    *kernels.Device
	stream *kernels.Stream
	em     emitter
	shapes Shapes
	forest kernels.ForestArgs
}

// do computes one op. Handles are flat vectors of their parts; a pick copies its part out, so no two tensors share memory.
func (t *interpreter) do(o *op, vs []G.Value) (G.Value, error) {
	if o.kind == kPick || o.kind == kSeed {
		return t.view(o, vs)
	}
	type piece struct {
		off, bytes int64
		src        []byte
	}
	var pieces []piece
	total := int64(0)
	add := func(bytes int64, src []byte) valueID {
		pieces = append(pieces, piece{total, bytes, src})
		total += alignUp(bytes)
		return valueID(len(pieces) - 1)
	}
	elem := int64(t.em.dtype.Size())
	ins := make([][]valueID, len(vs))
	for i, s := range o.ins() {
		raw, err := hostBytes(vs[i])
		if err != nil {
			return nil, fmt.Errorf("run %s %s: input %s: %w", o.kind, o.label, s.name, err)
		}
		for _, p := range s.values() {
			n := p.elems(t.shapes) * elem
			if p.index {
				n = p.elems(t.shapes) * 4
			}
			if int64(len(raw)) < n {
				return nil, fmt.Errorf("run %s %s: input %s has %d bytes, want %d", o.kind, o.label, s.name, len(raw), n)
			}
			ins[i] = append(ins[i], add(n, raw[:n]))
			raw = raw[n:]
		}
	}
	outs := o.outs()
	outIDs := make([]valueID, len(outs))
	for i, s := range outs {
		outIDs[i] = add(s.elems(t.shapes)*elem, nil)
	}
	buf, err := t.dev.Alloc(max(total, align), "tape "+o.kind.String())
	if err != nil {
		return nil, fmt.Errorf("run %s %s: %w", o.kind, o.label, err)
	}
	defer buf.Free()
	for _, p := range pieces {
		if len(p.src) > 0 {
			t.stream.Upload(buf.At(p.off), p.src)
		}
	}
	for _, r := range t.em.emit(o, ins, outIDs, make([]bool, len(outs))) {
		r.bind(t.shapes, &t.forest)
		for _, f := range r.ptrs {
			*f.at = buf.At(pieces[f.v].off)
		}
		if err := t.run(r); err != nil {
			return nil, fmt.Errorf("run %s %s: %w", o.kind, o.label, err)
		}
	}
	val, raw := t.dense(o.out())
	for _, id := range outIDs {
		p := pieces[id]
		t.stream.Download(raw[:p.bytes], buf.At(p.off))
		raw = raw[p.bytes:]
	}
	if err := t.stream.Sync(); err != nil {
		return nil, fmt.Errorf("run %s %s: %w", o.kind, o.label, err)
	}
	return val, nil
}

func (t *interpreter) run(r *record) error {
	if r.op == opFill {
		a := (*fillArgs)(r.args)
		t.stream.Fill(a.dst, a.bytes, 0)
		return nil
	}
	if r.ws != nil {
		n := max(t.dev.Workspace(r.op, r.args), align)
		ws, err := t.dev.Alloc(n, "tape workspace")
		if err != nil {
			return err
		}
		defer ws.Free()
		*r.ws, *r.wsBytes = ws.Ptr(), n
	}
	t.stream.Run(r.op, r.args)
	return t.stream.Sync()
}

// view computes picks and seeds: pieces of vectors laid end to end.
func (t *interpreter) view(o *op, vs []G.Value) (G.Value, error) {
	val, dst := t.dense(o.out())
	elem := int64(t.em.dtype.Size())
	if o.kind == kSeed {
		for _, v := range vs {
			raw, err := hostBytes(v)
			if err != nil {
				return nil, fmt.Errorf("run %s: %w", o.kind, err)
			}
			dst = dst[copy(dst, raw):]
		}
		return val, nil
	}
	raw, err := hostBytes(vs[0])
	if err != nil {
		return nil, fmt.Errorf("run %s: %w", o.kind, err)
	}
	for i, s := range o.from.outs() {
		n := s.elems(t.shapes) * elem
		if i >= o.lo && i < o.hi {
			dst = dst[copy(dst, raw[:n]):]
		}
		raw = raw[n:]
	}
	return val, nil
}

// dense is a new tensor for a spec, with its bytes.
func (t *interpreter) dense(s spec) (*tensor.Dense, []byte) {
	n := s.elems(t.shapes)
	if t.em.dtype == kernels.F64 {
		v := make([]float64, n)
		return tensor.New(tensor.WithShape(s.shape(t.shapes)...), tensor.WithBacking(v)), bytesOf(v)
	}
	v := make([]float32, n)
	return tensor.New(tensor.WithShape(s.shape(t.shapes)...), tensor.WithBacking(v)), bytesOf(v)
}

func hostBytes(v G.Value) ([]byte, error) {
	switch x := v.Data().(type) {
	case []float32:
		return bytesOf(x), nil
	case []float64:
		return bytesOf(x), nil
	case []int32:
		return bytesOf(x), nil
	case float32:
		return bytesOf([]float32{x}), nil
	case float64:
		return bytesOf([]float64{x}), nil
	case int32:
		return bytesOf([]int32{x}), nil
	}
	return nil, fmt.Errorf("value of type %T", v.Data())
}

// TapeRun runs a batch through Gorgonia's TapeMachine: log-probs of the targets at temperature 1 and, for dLogP, the gradient of every
// parameter by name. It is the oracle of planner and executor, meant for tiny configurations.
func TapeRun(m *Model, b *Batch, dLogP []float32) (logp []float32, grads map[string][]float32, err error) {
	if m.Params.DType == kernels.BF16 {
		return nil, nil, errors.New("run tape: bfloat16 values have no host tensors; load the model in float32")
	}
	if len(dLogP) != len(b.Rows) {
		return nil, nil, fmt.Errorf("run tape: %d log-prob gradients for %d targets", len(dLogP), len(b.Rows))
	}
	f, err := kernels.NewForest(b.Segments, nil)
	if err != nil {
		return nil, nil, fmt.Errorf("run tape: %w", err)
	}
	t := &interpreter{dev: m.Dev, stream: m.Dev.NewStream(), shapes: shapesOf(f, b)}
	defer t.stream.Close()
	fb, err := m.Dev.Alloc(f.DeviceBytes(), "tape forest")
	if err != nil {
		return nil, nil, fmt.Errorf("run tape: %w", err)
	}
	defer fb.Free()
	t.forest = f.Upload(t.stream, fb.Ptr())
	opt := graphOptions{temperature: 1, shapes: t.shapes, tape: t, dtype: tensor.Float32}
	if m.Params.DType == kernels.F64 {
		opt.dtype = tensor.Float64
	}
	gr, err := build(m.Config, Train, opt)
	if err != nil {
		return nil, nil, fmt.Errorf("run tape: %w", err)
	}
	t.em = newEmitter(gr, m.Params.DType, m.ValidVocab())
	if err := t.bindLeaves(gr, m, b, f, dLogP); err != nil {
		return nil, nil, fmt.Errorf("run tape: %w", err)
	}
	vm := G.NewTapeMachine(gr.expr)
	err = errors.Join(vm.RunAll(), vm.Close())
	if err != nil {
		return nil, nil, fmt.Errorf("run tape: %w", err)
	}
	if logp, err = hostF32(gr.Ports.LogP.Value()); err != nil {
		return nil, nil, fmt.Errorf("run tape: log-probs: %w", err)
	}
	grads = map[string][]float32{}
	for i, n := range gr.grads {
		name := gr.Params[i].Name
		if grads[name], err = hostF32(n.Value()); err != nil {
			return nil, nil, fmt.Errorf("run tape: gradient of %s: %w", name, err)
		}
	}
	return logp, grads, nil
}

func (t *interpreter) bindLeaves(gr *Graph, m *Model, b *Batch, f *kernels.Forest, dLogP []float32) error {
	p := gr.Ports
	var bad []error
	let := func(n *G.Node, backing any) {
		v := tensor.New(tensor.WithShape(n.Shape()...), tensor.WithBacking(backing))
		if err := G.Let(n, v); err != nil {
			bad = append(bad, fmt.Errorf("bind %s: %w", n.Name(), err))
		}
	}
	real := func(n *G.Node, v []float32) {
		if t.em.dtype == kernels.F32 {
			let(n, append([]float32(nil), v...))
			return
		}
		wide := make([]float64, len(v))
		for i, x := range v {
			wide[i] = float64(x)
		}
		let(n, wide)
	}
	let(p.IDs, append([]int32(nil), b.IDs...))
	let(p.Pos, positions(nil, f))
	let(p.Forest, []int32{int32(f.NumSeg)})
	let(p.Rows, append([]int32(nil), b.Rows...))
	let(p.Targets, append([]int32(nil), b.Targets...))
	real(p.DLogP, dLogP)
	real(p.DEnt, make([]float32, len(dLogP)))
	for i, n := range gr.params {
		raw, err := m.Params.read(Weights, gr.Params[i].Name)
		if err != nil {
			bad = append(bad, err)
			continue
		}
		val, dst := t.dense(spec{dims: dims64(gr.Params[i].Shape)})
		copy(dst, raw)
		if err := G.Let(n, val); err != nil {
			bad = append(bad, fmt.Errorf("bind %s: %w", n.Name(), err))
		}
	}
	return errors.Join(bad...)
}

func hostF32(v G.Value) ([]float32, error) {
	if v == nil {
		return nil, errors.New("not computed")
	}
	switch x := v.Data().(type) {
	case []float32:
		return x, nil
	case []float64:
		out := make([]float32, len(x))
		for i, y := range x {
			out[i] = float32(y)
		}
		return out, nil
	case float32:
		return []float32{x}, nil
	case float64:
		return []float32{float32(x)}, nil
	}
	return nil, fmt.Errorf("value of type %T", v.Data())
}
