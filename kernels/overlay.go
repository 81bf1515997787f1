package kernels

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
)

// Allocator is where buffers come from: a Device, or a Phase of an Overlay.
type Allocator interface {
	Alloc(bytes int64, label string) (*Buffer, error)
}

// Overlay is one block of device memory that phases use in turn: each lays its buffers out from the beginning of the block, and only those
// of the phase that was entered last may be used. Addresses never change, so launches recorded in a phase stay valid over its returns;
// contents are lost when another phase is entered.
type Overlay struct {
	buf    *Buffer
	phases []*Phase
	now    atomic.Pointer[Phase]
}

// Phase is one of an Overlay's layouts.
type Phase struct {
	o    *Overlay
	name string

	mu   sync.Mutex
	end  int64 // of the buffers laid out so far
	live map[*Buffer]struct{}
}

// NewOverlay allocates bytes under label for the phases of the given names; none is entered.
func (d *Device) NewOverlay(bytes int64, label string, phases ...string) (*Overlay, error) {
	buf, err := d.Alloc(bytes, label)
	if err != nil {
		return nil, err
	}
	o := &Overlay{buf: buf}
	for _, name := range phases {
		o.phases = append(o.phases, &Phase{o: o, name: name, live: map[*Buffer]struct{}{}})
	}
	return o, nil
}

// Phase is the phase with the number i in the order of NewOverlay.
func (o *Overlay) Phase(i int) *Phase { return o.phases[i] }

// Bytes is the size of the block.
func (o *Overlay) Bytes() int64 { return o.buf.Bytes() }

// Free gives the block back; buffers of its phases must not be used afterwards.
func (o *Overlay) Free() {
	o.now.Store(nil)
	o.buf.Free()
}

// Enter makes p the phase whose buffers may be used, after everything that the device was asked to do. What they hold is undefined, or NaN
// with Options.Poison. To enter the current phase again does nothing.
func (o *Overlay) Enter(p *Phase) error {
	if !slices.Contains(o.phases, p) {
		return fmt.Errorf("enter phase: it belongs to another overlay than %q", o.buf.label)
	}
	if o.now.Load() == p {
		return nil
	}
	d := o.buf.dev
	if err := d.drv.wait(); err != nil {
		return fmt.Errorf("enter phase %s: %w", p.name, err)
	}
	if d.poison {
		if err := d.drv.set(o.buf.ptr, o.buf.bytes, 0xff); err != nil {
			return fmt.Errorf("enter phase %s: %w", p.name, err)
		}
	}
	o.now.Store(p)
	return nil
}

// Current is the phase entered last, nil before the first.
func (o *Overlay) Current() *Phase { return o.now.Load() }

// Name is the phase's name.
func (p *Phase) Name() string { return p.name }

// Entered reports whether the phase's buffers may be used.
func (p *Phase) Entered() bool { return p.o.now.Load() == p }

// Alloc lays out one more buffer, 256-byte aligned, whatever the phase that is current. Its contents are undefined. The space of a freed
// buffer comes back when those behind it are free too.
func (p *Phase) Alloc(bytes int64, label string) (*Buffer, error) {
	if bytes <= 0 {
		return nil, fmt.Errorf("allocate %q in phase %s: %d bytes, need at least 1", label, p.name, bytes)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	size := p.o.buf.bytes
	if p.end+bytes > size {
		return nil, fmt.Errorf("allocate %q in phase %s: %w: %d bytes asked for, %d of the %d that the phases share are free", label, p.name, ErrNoMemory, bytes, max(size-p.end, 0), size)
	}
	b := &Buffer{dev: p.o.buf.dev, phase: p, ptr: p.o.buf.ptr + Ptr(p.end), bytes: bytes, label: label}
	p.live[b] = struct{}{}
	p.end += alignBuffer(bytes)
	return b, nil
}

// Buffers lists the phase's live buffers by address: label and bytes.
func (p *Phase) Buffers() []LedgerLine {
	p.mu.Lock()
	defer p.mu.Unlock()
	var bs []*Buffer
	for b := range p.live {
		bs = append(bs, b)
	}
	slices.SortFunc(bs, func(a, b *Buffer) int { return int(a.ptr) - int(b.ptr) })
	out := make([]LedgerLine, len(bs))
	for i, b := range bs {
		out[i] = LedgerLine{Label: b.label, Bytes: b.bytes, PeakBytes: b.bytes, Buffers: 1, NumAlloc: 1}
	}
	return out
}

func (p *Phase) release(b *Buffer) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.live, b)
	p.end = 0
	for b := range p.live {
		p.end = max(p.end, alignBuffer(int64(b.ptr-p.o.buf.ptr)+b.bytes))
	}
}

// Usable reports whether Ptr and At may be called: false for a buffer of a phase that is not the current one.
func (b *Buffer) Usable() bool { return b.phase == nil || b.phase.Entered() }

// need panics when b is a buffer of a phase that is not the current one: its memory holds another's data.
func (b *Buffer) need() {
	if b.Usable() {
		return
	}
	now := "none"
	if c := b.phase.o.Current(); c != nil {
		now = c.name
	}
	panic(fmt.Sprintf("kernels: buffer %q of phase %s used in phase %s", b.label, b.phase.name, now))
}
