package model

import (
	"errors"
	"fmt"
	"unsafe"

	"harness-s/kernels"
)

// Segment is a run of rows of a packed forest (gpu.md 7.5).
type Segment = kernels.Segment

// Batch is a packed forest of token rows with the targets to score. Segments lie one after the other in IDs; a segment continues its parent's
// last row. Target i asks for the log-prob of Targets[i] after row Rows[i]; Rows ascend and may repeat (the last row of a shared prompt has
// one target per continuation).
type Batch struct {
	IDs           []int32
	Segments      []Segment
	Rows, Targets []int32
}

// Output has one entry per target: natural log-prob of the target at the exec's temperature, and the entropy of the row in nats.
type Output struct{ LogProb, Entropy []float32 }

// ExecOptions size an Exec. MaxTargets 0 means MaxRows. Temperature 0 means 1. Recompute keeps layer inputs only and runs each layer forward
// again before its backward. Entropy says that Backward may get entropy gradients. MaxStates is the most states of the delta rule (NumStates)
// that a batch may have; all memory is then allocated at once, for the largest batch. With 0, and no Region, it grows with the batches.
type ExecOptions struct {
	Temperature         float64
	MaxRows, MaxTargets int
	MaxStates           int
	Recompute           bool
	Entropy             bool
}

// Exec runs the compiled program of a model. It is not safe for concurrent use. A model without gradients can only run Forward and Logits.
type Exec struct {
	m      *Model
	opt    ExecOptions
	prog   *Program
	stream *kernels.Stream
	mem    kernels.Allocator // the device, or a phase of the model's Region
	held   heldBuffers
	ports  [numPorts]kernels.Ptr

	headBwd *kernels.LMHeadBwdArgs
	forest  kernels.ForestArgs
	pos     []int32
	targets int  // of the last Forward
	ready   bool // Backward may run
}

type heldBuffers struct{ arena, io, forest, ws, norms *kernels.Buffer }

// NewExec compiles the graph of m's configuration for batches of up to o.MaxRows rows and allocates its memory.
func NewExec(m *Model, o ExecOptions) (*Exec, error) {
	if o.MaxRows < 1 {
		return nil, fmt.Errorf("make exec: max rows %d, want at least 1", o.MaxRows)
	}
	if o.MaxTargets == 0 {
		o.MaxTargets = o.MaxRows
	}
	if o.Temperature == 0 {
		o.Temperature = 1
	}
	if o.MaxTargets < 0 || o.Temperature < 0 {
		return nil, fmt.Errorf("make exec: max targets %d, temperature %g, want positive values", o.MaxTargets, o.Temperature)
	}
	mem, err := m.memory(Training)
	if err != nil {
		return nil, fmt.Errorf("make exec: %w", err)
	}
	mode := Score
	switch p := m.Trainable(); {
	case p.Has(Grads):
		mode = Train
	case p.shared:
		return nil, errors.New("make exec: the gradients have no memory: it comes from Model.Share")
	}
	gr, err := build(m.Config, mode, graphOptions{temperature: o.Temperature, adapt: m.adapting()})
	if err != nil {
		return nil, err
	}
	prog, err := Compile(gr, PlanOptions{DType: m.Params.DType, Recompute: o.Recompute && mode == Train, ValidVocab: m.ValidVocab()})
	if err != nil {
		return nil, err
	}
	e := &Exec{m: m, opt: o, prog: prog, stream: m.Dev.NewStream(), mem: mem}
	for _, r := range prog.records {
		if r.op == kernels.OpLMHeadBwd {
			e.headBwd = (*kernels.LMHeadBwdArgs)(r.args)
		}
	}
	if err := e.allocate(); err != nil {
		e.Close()
		return nil, err
	}
	m.region.join(nil, e)
	return e, nil
}

// allocate takes the memory that is known before the first batch: with MaxStates all of it.
func (e *Exec) allocate() error {
	if e.m.region != nil && e.opt.MaxStates == 0 {
		e.opt.MaxStates = PlannedStates(e.opt.MaxRows)
	}
	if e.opt.MaxStates == 0 {
		if err := e.allocatePorts(); err != nil {
			return err
		}
		return e.place(firstStates(e.opt.MaxRows))
	}
	room := e.prog.room(e.m.Dev, e.opt)
	err := e.allocatePorts()
	if err == nil {
		err = e.place(room.shapes.States)
	}
	if err == nil {
		err = e.grow(&e.held.forest, room.forest, "forest")
	}
	if err == nil {
		err = e.grow(&e.held.ws, room.ws, "workspace")
	}
	return err
}

// Program is the compiled program, for inspection.
func (e *Exec) Program() *Program { return e.prog }

// Close frees the exec's memory; the model stays.
func (e *Exec) Close() {
	e.m.region.leave(nil, e)
	for _, b := range []**kernels.Buffer{&e.held.arena, &e.held.io, &e.held.forest, &e.held.ws, &e.held.norms} {
		if *b != nil {
			(*b).Free()
			*b = nil
		}
	}
	e.stream.Close()
	e.ready = false
}

// PeakBytes is what the exec holds on the device: activations, workspace, batch and forest.
func (e *Exec) PeakBytes() int64 {
	var n int64
	for _, b := range []*kernels.Buffer{e.held.arena, e.held.io, e.held.forest, e.held.ws, e.held.norms} {
		if b != nil {
			n += b.Bytes()
		}
	}
	return n
}

// grow makes *b at least n bytes.
func (e *Exec) grow(b **kernels.Buffer, n int64, label string) error {
	if *b != nil && (*b).Bytes() >= n {
		return nil
	}
	if *b != nil && e.opt.MaxStates > 0 {
		return fmt.Errorf("a batch needs %d bytes of %s, the largest one was planned with %d: this is a fault of the program", n, label, (*b).Bytes())
	}
	if *b != nil {
		(*b).Free()
		*b = nil
	}
	nb, err := e.mem.Alloc(max(n, align), label)
	if err != nil {
		return &Error{Op: fmt.Sprintf("allocate %s (%d MiB)", label, n>>20), Err: err, Hint: "lower the rows per micro-batch, or turn recompute on"}
	}
	*b = nb
	return nil
}

// portBytes are the sizes of what is uploaded per batch.
func portBytes(maxRows, maxTargets int, dt kernels.DType) [numPorts]int64 {
	rows, tgts := alignUp(4*int64(maxRows)), alignUp(4*int64(maxTargets))
	real := alignUp(int64(targets("").storage(dt).Size()) * int64(maxTargets))
	return [numPorts]int64{rows, rows, tgts, tgts, real, real}
}

// firstStates is how many GDN states the arena holds to begin with: the chunks of one sequence of maxRows rows and room for further segments.
func firstStates(maxRows int) int64 { return int64((maxRows+kernels.GDNChunk-1)/kernels.GDNChunk + 64) }

// PlannedStates is what memory is planned for (ExecOptions.MaxStates): a batch of maxRows rows may consist of 32 segments of any lengths, or of
// more whose lengths fill their chunks.
func PlannedStates(maxRows int) int { return int(firstStates(maxRows)) }

// NumStates is the number of states of the delta rule that a segment of so many rows has in a batch: one before each chunk and a last one.
func NumStates(rows int) int { return (rows+kernels.GDNChunk-1)/kernels.GDNChunk + 1 }

// moreStates is what the arena is laid out for when a batch needs more states than have.
func moreStates(need, have int64, maxRows int) int64 {
	return min(max(need, 2*have), 2*int64(maxRows))
}

// batchBytes is the sum of portBytes.
func batchBytes(maxRows, maxTargets int, dt kernels.DType) (total int64) {
	for _, n := range portBytes(maxRows, maxTargets, dt) {
		total += n
	}
	return total
}

func (e *Exec) allocatePorts() error {
	sizes := portBytes(e.opt.MaxRows, e.opt.MaxTargets, e.m.Params.DType)
	if err := e.grow(&e.held.io, batchBytes(e.opt.MaxRows, e.opt.MaxTargets, e.m.Params.DType), "batch"); err != nil {
		return err
	}
	at := int64(0)
	for p, n := range sizes {
		e.ports[p] = e.held.io.At(at)
		at += n
	}
	return e.grow(&e.held.norms, 8*int64(len(e.m.Trainable().Entries())), "gradient norms")
}

// place lays the arena out for at most the given number of states and binds every pointer.
func (e *Exec) place(states int64) error {
	e.prog.Place(Shapes{Rows: int64(e.opt.MaxRows), Targets: int64(e.opt.MaxTargets), States: states})
	if err := e.grow(&e.held.arena, e.prog.arenaBytes, "activations"); err != nil {
		return err
	}
	at := func(v valueID) kernels.Ptr { return e.address(v) }
	for _, r := range e.prog.records {
		for _, f := range r.ptrs {
			*f.at = at(f.v)
		}
	}
	return nil
}

func (e *Exec) address(v valueID) kernels.Ptr {
	x := &e.prog.values[v]
	switch x.region {
	case inPort:
		return e.ports[x.slot]
	case inWeight:
		return e.m.Params.Ptr(Weights, e.prog.gr.Params[x.slot].Name)
	case inGrad:
		return e.m.Trainable().Ptr(Grads, e.prog.gr.Trained[x.slot].Name)
	case inScaled:
		return e.m.Adapter.scaled.Ptr(Weights, e.prog.gr.Trained[x.slot].Name)
	}
	return e.held.arena.At(e.prog.buffers[x.buf].offset)
}

// prepare validates and uploads a batch and sets every record's sizes, forest and workspace.
func (e *Exec) prepare(b *Batch) error {
	f, err := e.check(b)
	if err != nil {
		return err
	}
	sh := shapesOf(f, b)
	if sh.States > e.prog.bucket.States {
		if err := e.place(moreStates(sh.States, e.prog.bucket.States, e.opt.MaxRows)); err != nil {
			return err
		}
	}
	if err := e.grow(&e.held.forest, f.DeviceBytes(), "forest"); err != nil {
		return err
	}
	e.forest = f.Upload(e.stream, e.held.forest.Ptr())
	e.pos = positions(e.pos[:0], f)
	e.stream.UploadI32(e.ports[portIDs], b.IDs)
	e.stream.UploadI32(e.ports[portPos], e.pos)
	e.stream.UploadI32(e.ports[portRows], b.Rows)
	e.stream.UploadI32(e.ports[portTargets], b.Targets)
	return e.bind(sh)
}

func (e *Exec) bind(sh Shapes) error {
	if err := e.grow(&e.held.ws, e.prog.bind(e.m.Dev, sh, &e.forest), "workspace"); err != nil {
		return err
	}
	for _, r := range e.prog.records {
		if r.ws != nil {
			*r.ws, *r.wsBytes = e.held.ws.Ptr(), e.held.ws.Bytes()
		}
	}
	return nil
}

// bind sets every record's sizes and forest and returns the workspace that the records share.
func (p *Program) bind(dev *kernels.Device, sh Shapes, f *kernels.ForestArgs) (ws int64) {
	for _, r := range p.records {
		r.bind(sh, f)
		if r.ws != nil {
			ws = max(ws, dev.Workspace(r.op, r.args))
		}
	}
	return ws
}

// shapesOf gives the program's sizes for a batch.
func shapesOf(f *kernels.Forest, b *Batch) Shapes {
	return Shapes{Rows: int64(len(b.IDs)), Targets: int64(len(b.Rows)), States: statesOf(f)}
}

// statesOf is the number of GDN states of a forest: one before each chunk and one after each segment.
func statesOf(f *kernels.Forest) int64 { return int64(f.NumChunks) + int64(f.NumSeg) }

// positions appends each row's absolute position.
func positions(dst []int32, f *kernels.Forest) []int32 {
	for s := range f.Start {
		for i := range f.Len[s] {
			dst = append(dst, f.Pos[s]+i)
		}
	}
	return dst
}

// maxListed bounds how many problems of one kind an error lists.
const maxListed = 8

// check reports every problem of a batch at once.
func (e *Exec) check(b *Batch) (*kernels.Forest, error) {
	var bad []error
	add := func(format string, a ...any) {
		if len(bad) < maxListed {
			bad = append(bad, fmt.Errorf(format, a...))
		}
	}
	hint := ""
	if len(b.IDs) > e.opt.MaxRows {
		add("%d rows, at most %d fit", len(b.IDs), e.opt.MaxRows)
		hint = "split the batch, or make the exec with more MaxRows"
	}
	if len(b.Rows) > e.opt.MaxTargets {
		add("%d targets, at most %d fit", len(b.Rows), e.opt.MaxTargets)
		hint = "split the batch, or make the exec with more MaxTargets"
	}
	if len(b.Rows) != len(b.Targets) {
		add("%d target rows, %d target ids", len(b.Rows), len(b.Targets))
	}
	if len(b.Rows) == 0 {
		add("no targets")
	}
	vocab := int32(e.m.Config.VocabSize)
	for i, id := range b.IDs {
		if id < 0 || id >= vocab {
			add("token id %d at row %d, vocabulary has %d", id, i, vocab)
		}
	}
	for i, r := range b.Rows {
		if r < 0 || int(r) >= len(b.IDs) {
			add("row %d of target %d, batch has %d rows", r, i, len(b.IDs))
		}
		if i > 0 && r < b.Rows[i-1] {
			add("row %d of target %d after row %d: rows must ascend", r, i, b.Rows[i-1])
		}
	}
	valid := int32(e.m.ValidVocab())
	for i, t := range b.Targets {
		if t < 0 || t >= valid {
			add("target id %d of target %d, vocabulary has %d", t, i, valid)
		}
	}
	var total int64
	for _, s := range b.Segments {
		total += int64(s.Len)
	}
	if total != int64(len(b.IDs)) {
		add("segments cover %d rows, batch has %d", total, len(b.IDs))
	}
	f, err := kernels.NewForest(b.Segments, nil)
	if err != nil {
		bad = append(bad, err)
	} else if n := statesOf(f); e.opt.MaxStates > 0 && n > int64(e.opt.MaxStates) {
		add("%d segments with %d states of the delta rule, at most %d fit", f.NumSeg, n, e.opt.MaxStates)
		hint = "split the batch, or make the exec with more MaxStates"
	}
	if len(bad) > 0 {
		return nil, &Error{Op: "check batch", Err: errors.Join(bad...), Hint: hint}
	}
	return f, nil
}

func (e *Exec) run(rs []*record) {
	for _, r := range rs {
		if r.op == opFill {
			a := (*fillArgs)(r.args)
			e.stream.Fill(a.dst, a.bytes, 0)
			continue
		}
		e.stream.Run(r.op, r.args)
	}
}

// Forward computes log-prob and entropy of every target and keeps what Backward needs.
func (e *Exec) Forward(b *Batch) (*Output, error) {
	if err := e.forward(b); err != nil {
		return nil, err
	}
	out := &Output{LogProb: make([]float32, len(b.Rows)), Entropy: make([]float32, len(b.Rows))}
	wide := e.m.Params.DType.Wide()
	e.stream.DownloadReal(out.LogProb, e.address(e.prog.logp), wide)
	e.stream.DownloadReal(out.Entropy, e.address(e.prog.ent), wide)
	if err := e.stream.Sync(); err != nil {
		return nil, fmt.Errorf("run forward: %w", err)
	}
	e.targets, e.ready = len(b.Rows), true
	return out, nil
}

// usable says why the exec cannot be used now: its memory is the sampler's.
func (e *Exec) usable() error { return e.m.region.check(Training, "use executor") }

func (e *Exec) forward(b *Batch) error {
	e.ready = false
	if err := e.usable(); err != nil {
		return err
	}
	if err := e.prepare(b); err != nil {
		return err
	}
	e.run(e.prog.records[:e.prog.numForward])
	return nil
}

// Backward adds the gradient of sum(dLogP*logp + dEnt*entropy) of the last Forward to the parameter gradients. dEnt may be nil. It can run once
// per Forward: activations are overwritten on the way.
func (e *Exec) Backward(dLogP, dEnt []float32) error {
	switch {
	case e.prog.gr.Mode != Train:
		return &Error{Op: "run backward", Err: errors.New("model has no gradients"), Hint: "load the model with LoadOptions.Train"}
	case !e.ready:
		return errors.New("run backward: no forward pass to differentiate")
	case len(dLogP) != e.targets:
		return fmt.Errorf("run backward: %d log-prob gradients for %d targets", len(dLogP), e.targets)
	case dEnt != nil && len(dEnt) != e.targets:
		return fmt.Errorf("run backward: %d entropy gradients for %d targets", len(dEnt), e.targets)
	case dEnt != nil && !e.opt.Entropy:
		return errors.New("run backward: entropy gradients given to an exec made without Entropy")
	}
	if err := e.usable(); err != nil {
		return err
	}
	e.ready = false
	wide := e.m.Params.DType.Wide()
	e.stream.UploadReal(e.ports[portDLogP], dLogP, wide)
	e.headBwd.DEnt = 0
	if dEnt != nil {
		e.stream.UploadReal(e.ports[portDEnt], dEnt, wide)
		e.headBwd.DEnt = e.ports[portDEnt]
	}
	e.run(e.prog.records[e.prog.numForward:])
	if err := e.stream.Sync(); err != nil {
		return fmt.Errorf("run backward: %w", err)
	}
	return nil
}

// Logits are the raw logits [T, V] of every row of a batch, before the temperature. For diagnostics: nothing else stores a batch's logits. The
// batch needs no targets.
func (e *Exec) Logits(b *Batch) ([]float32, error) {
	c := *b
	if len(c.Rows) == 0 {
		c.Rows, c.Targets = []int32{0}, []int32{0}
	}
	if err := e.forward(&c); err != nil {
		return nil, err
	}
	t, v, d, dt := int64(len(c.IDs)), int64(e.m.Config.VocabSize), int64(e.m.Config.Hidden), e.m.Params.DType
	buf, err := e.m.Dev.Alloc(t*v*int64(dt.Wide().Size()), "logits")
	if err != nil {
		return nil, fmt.Errorf("allocate logits of %d rows: %w", t, err)
	}
	defer buf.Free()
	a := &kernels.GemmArgs{
		DType: dt, Flags: kernels.TransB | wideC(dt), M: t, N: v, K: d,
		A: e.address(e.prog.finalNorm), LDA: d, B: e.m.Params.Ptr(Weights, e.m.Config.HeadName()), LDB: d, C: buf.Ptr(), LDC: v,
	}
	if err := e.grow(&e.held.ws, e.m.Dev.Workspace(kernels.OpGemm, unsafe.Pointer(a)), "workspace"); err != nil {
		return nil, err
	}
	a.WS, a.WSBytes = e.held.ws.Ptr(), e.held.ws.Bytes()
	e.stream.Run(kernels.OpGemm, unsafe.Pointer(a))
	out := make([]float32, t*v)
	e.stream.DownloadReal(out, buf.Ptr(), dt.Wide())
	if err := e.stream.Sync(); err != nil {
		return nil, fmt.Errorf("run logits: %w", err)
	}
	return out, nil
}

func bytesOf[T any](v []T) []byte {
	if len(v) == 0 {
		return nil
	}
	return unsafe.Slice((*byte)(unsafe.Pointer(&v[0])), len(v)*int(unsafe.Sizeof(v[0])))
}
