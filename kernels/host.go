package kernels

import (
	"fmt"
	"unsafe"
)

// HostBuffer is host memory that the device copies from and to by itself, while the program goes on (page-locked on a GPU). It is never visible
// to the Go collector: Free it when no copy uses it any more.
type HostBuffer struct {
	dev   *Device
	ptr   unsafe.Pointer
	bytes int64
	label string
}

// AllocHost returns bytes of zeroed, 64-byte aligned host memory. It is not in the ledger, which counts the device's.
func (d *Device) AllocHost(bytes int64, label string) (*HostBuffer, error) {
	if bytes <= 0 {
		return nil, fmt.Errorf("allocate host memory %q: %d bytes, need at least 1", label, bytes)
	}
	p, err := d.drv.allocHost(bytes)
	if err != nil {
		return nil, fmt.Errorf("allocate host memory %q: %w", label, err)
	}
	b := &HostBuffer{dev: d, ptr: p, bytes: bytes, label: label}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.hosts[b] = struct{}{}
	return b, nil
}

// Bytes is the size asked for.
func (b *HostBuffer) Bytes() int64 { return b.bytes }

// Free gives the memory back; further calls, and calls on a nil buffer, do nothing.
func (b *HostBuffer) Free() {
	if b == nil {
		return
	}
	b.dev.mu.Lock()
	_, ok := b.dev.hosts[b]
	delete(b.dev.hosts, b)
	b.dev.mu.Unlock()
	if ok {
		b.dev.drv.freeHost(b.ptr)
	}
}

// HostSlice is n values of b from the given byte on; a range outside b, or an offset that T is not aligned to, panics.
func HostSlice[T any](b *HostBuffer, off int64, n int) []T {
	size := int64(unsafe.Sizeof(*new(T)))
	b.check(off, size*int64(n))
	if align := int64(unsafe.Alignof(*new(T))); off%align != 0 {
		panic(fmt.Sprintf("kernels: offset %d of %q, want a multiple of %d", off, b.label, align))
	}
	return unsafe.Slice((*T)(unsafe.Add(b.ptr, off)), n)
}

func (b *HostBuffer) check(off, n int64) {
	if off < 0 || n < 0 || off+n > b.bytes {
		panic(fmt.Sprintf("kernels: bytes %d to %d outside the %d of %q", off, off+n, b.bytes, b.label))
	}
}

// UploadAsync copies n bytes of src, from off on, to the device in the stream's order. They must not change before an Event recorded later, or
// Sync, says that the copy has been made.
func (s *Stream) UploadAsync(dst Ptr, src *HostBuffer, off, n int64) {
	src.check(off, n)
	if s.ready("upload", dst, n) {
		s.err = s.drv.copyInAsync(s.h, dst, unsafe.Add(src.ptr, off), n)
	}
}

// DownloadAsync copies n bytes from the device to dst, from off on, in the stream's order. They are there once an Event recorded later, or
// Sync, says so.
func (s *Stream) DownloadAsync(dst *HostBuffer, off int64, src Ptr, n int64) {
	dst.check(off, n)
	if s.ready("download", src, n) {
		s.err = s.drv.copyOutAsync(s.h, unsafe.Add(dst.ptr, off), src, n)
	}
}

// Event is a point in a stream's work that the host can wait for.
type Event struct {
	drv driver
	h   uintptr
}

// NewEvent returns an event that nothing has recorded yet, which counts as reached. Free it.
func (d *Device) NewEvent() (*Event, error) {
	h, err := d.drv.newEvent()
	if err != nil {
		return nil, fmt.Errorf("make event: %w", err)
	}
	return &Event{drv: d.drv, h: h}, nil
}

// Record moves e behind everything issued on s so far.
func (s *Stream) Record(e *Event) {
	if s.open("record an event") {
		s.err = s.drv.recordEvent(s.h, e.h)
	}
}

// Wait blocks until the stream has reached e. A failure of the device before it comes back here.
func (e *Event) Wait() error { return e.drv.waitEvent(e.h) }

// Done reports whether the stream has reached e.
func (e *Event) Done() (bool, error) { return e.drv.queryEvent(e.h) }

// Since is the time from start to e in milliseconds; both must have been recorded and reached.
func (e *Event) Since(start *Event) (float64, error) { return e.drv.elapsed(start.h, e.h) }

// Free releases the event; calls on a nil event do nothing.
func (e *Event) Free() {
	if e != nil && e.h != 0 {
		e.drv.freeEvent(e.h)
		e.h = 0
	}
}
