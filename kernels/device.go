// Package kernels owns device memory and runs fused numeric ops on it.
//
// A Device pairs a driver (memory and copies) with a table of native functions (abi.h); "cpu" is linked in, "null" accepts every op
// and computes nothing, so that plans can be tested without memory. Ops are plain argument structs (ops.go) run on a Stream, whose
// first failure sticks and comes back from Sync. "emu" is the CUDA kernels compiled for the CPU, for tests. A packed batch of sequences that share prefixes is a Forest.
//
// The package must never know what a model, a token or a reward is: it sees addresses, sizes and flags. Every op's result for a row
// has the same bits whatever the batch, the row's place in it and the number of threads.
//
// A Graph is a recorded list of launches; HostBuffer and Event are what a program needs to stay ahead of a device.
//
// Start from Open, Stream and abi.h.
package kernels

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"unsafe"
)

// ErrNoDevice is wrapped by Open's error when this build or machine cannot serve the device asked for.
var ErrNoDevice = errors.New("no such device")

// ErrUnsupported is wrapped by the failure of an op that the device's table has no kernel for.
var ErrUnsupported = errors.New("no kernel for this op")

type unsupportedError struct{ error }

func (e *unsupportedError) Is(target error) bool { return target == ErrUnsupported }

// Error is a failure that the user can fix; Hint says how.
type Error struct {
	Op   string
	Err  error
	Hint string
}

func (e *Error) Error() string { return e.Op + ": " + e.Err.Error() }

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// Options configure Open. The settings of the cpu table hold for the process: the last Open wins. They never change results,
// except SIMD and Gemm, which choose between differently rounded arithmetics.
type Options struct {
	Threads int    // 0 = all CPUs, at most 64
	SIMD    string // "" or "auto", "avx512", "avx2", "scalar"
	Gemm    string // "" or "own"; cpu: "openblas"; cuda and emu: "mma" (no wgmma), "cublaslt"
	LibDir  string // where libhs_emu.so and libhs_cuda.so are looked for first; then beside the executable, then in build/
	// ArenaBytes is the one allocation that buffers are cut from, on cuda and emu. 0 is on cuda all free memory but 4 GiB, or but an eighth
	// of it where that is less, for cuBLASLt, graphs and the driver's own needs, and elsewhere none: each buffer is an allocation.
	ArenaBytes int64
	Table      string // of "null": whose workspaces it tells, "" or "cpu", "emu", "cuda"
	Poison     bool   // memory starts as NaN in each phase of an Overlay; for tests
	Emu        EmuOptions
}

// EmuOptions are the emulator's ways of finding faults in kernels. The settings hold for the process: the last Open wins.
type EmuOptions struct {
	FiberOrder string // order in which threads run: "" or "forward", "reverse", "random:SEED"; results must not depend on it
	Poison     bool   // shared memory starts as signalling NaNs
	Guard      bool   // each allocation lies against an unmapped page; writes around it are reported by Close. There is no arena then
	TestLib    bool   // libhs_emu_test.so, which also has kernels that are wrong on purpose
}

// Ptr is a device address; 0 means absent.
type Ptr uint64

// Info describes an open device.
type Info struct {
	Name     string // as given to Open
	Backend  string // "cpu", "emu", "cuda" or "null"
	Table    string // whose table answers Workspace: "cpu", "emu" or "cuda"
	Build    string // compiler, SIMD level, matrix product in use
	Threads  int
	MemTotal int64 // bytes; 0 when unknown
	Arena    int64 // bytes that buffers are cut from; 0 when each is an allocation
}

// LedgerLine is the live memory under one label and the most it has been.
type LedgerLine struct {
	Label             string
	Bytes, PeakBytes  int64
	Buffers, NumAlloc int
}

// driver is what differs between kinds of memory and tables. h is a stream of newStream. Copies and ops may be called from one goroutine
// per stream at a time; copies are complete when they return.
type driver interface {
	info() Info
	arenaBytes(asked int64) (int64, error) // what to allocate for Options.ArenaBytes, 0 = no arena
	alloc(bytes int64) (Ptr, error)        // 64-byte aligned, zeroed
	free(p Ptr, bytes int64)
	set(p Ptr, n int64, v byte) error // done when it returns
	wait() error                      // for everything issued on any stream
	newStream() (uintptr, error)
	freeStream(h uintptr)
	sync(h uintptr) error
	run(h uintptr, op Op, args unsafe.Pointer) error
	workspace(op Op, args unsafe.Pointer) int64
	copyIn(h uintptr, dst Ptr, src unsafe.Pointer, n int64) error
	copyOut(h uintptr, dst unsafe.Pointer, src Ptr, n int64) error
	fill(h uintptr, dst Ptr, n int64, v byte) error
	configure(key, value string) error
	close() error

	graphBegin(h uintptr) error
	graphEnd(h uintptr) (g uintptr, nodes int64, err error)
	graphLaunch(h, g uintptr) error
	graphFree(g uintptr)

	// Host memory for copies that go on after the call has returned.
	allocHost(bytes int64) (unsafe.Pointer, error)
	freeHost(p unsafe.Pointer)
	copyInAsync(h uintptr, dst Ptr, src unsafe.Pointer, n int64) error
	copyOutAsync(h uintptr, dst unsafe.Pointer, src Ptr, n int64) error

	newEvent() (uintptr, error)
	recordEvent(h, e uintptr) error
	waitEvent(e uintptr) error
	queryEvent(e uintptr) (bool, error)
	elapsed(start, end uintptr) (float64, error) // milliseconds
	freeEvent(e uintptr)
}

// Device is an open device. Its methods are safe for concurrent use.
type Device struct {
	drv    driver
	poison bool
	ops    atomic.Int64 // that streams ran

	mu       sync.Mutex
	live     map[*Buffer]struct{}
	hosts    map[*HostBuffer]struct{}
	ledger   map[string]*LedgerLine
	total    LedgerLine
	numAlloc int
	arena    *arena // nil: each buffer is an allocation of the driver
	whole    block  // the driver's allocation that arena cuts
}

// Open opens "cpu", "null", "emu" or "cuda:N". What this build or machine cannot serve is an *Error that wraps ErrNoDevice.
func Open(name string, o Options) (*Device, error) {
	var drv driver
	var err error
	switch {
	case name == "cpu":
		drv, err = openHost(o)
	case name == "null":
		drv, err = openNull(o)
	case name == "emu":
		drv, err = openEmu(o)
	case strings.HasPrefix(name, "cuda"):
		drv, err = openCUDA(name, o)
	default:
		err = &Error{Op: "open device", Err: fmt.Errorf("%q: %w", name, ErrNoDevice), Hint: `devices are "cpu", "null", "emu" and "cuda:N"`}
	}
	if err != nil {
		return nil, err
	}
	d := newDevice(drv)
	d.poison = o.Poison
	if err := d.reserve(name, o.ArenaBytes); err != nil {
		return nil, errors.Join(err, drv.close())
	}
	return d, nil
}

func newDevice(drv driver) *Device {
	return &Device{drv: drv, live: map[*Buffer]struct{}{}, hosts: map[*HostBuffer]struct{}{}, ledger: map[string]*LedgerLine{}, total: LedgerLine{Label: "total"}}
}

// reserve allocates the arena, when there is to be one.
func (d *Device) reserve(name string, asked int64) error {
	n, err := d.drv.arenaBytes(asked)
	if err != nil || n == 0 {
		return err
	}
	p, err := d.drv.alloc(n)
	if err != nil {
		return &Error{Op: fmt.Sprintf("reserve memory of device %q", name), Err: err, Hint: "another process may hold the memory: see nvidia-smi; or ask for less"}
	}
	d.numAlloc, d.whole, d.arena = 1, block{p, n}, newArena(p, n)
	return nil
}

// Info describes the device.
func (d *Device) Info() Info {
	i := d.drv.info()
	if d.arena != nil {
		i.Arena = d.arena.size
	}
	return i
}

// NumAlloc is the number of allocations made of the driver so far, an arena's one included.
func (d *Device) NumAlloc() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.numAlloc
}

// configure sets one of the table's own options (for tests).
func (d *Device) configure(key, value string) error { return d.drv.configure(key, value) }

// Stores reports whether the device's ops take activations and weights of type t (abi.h, dtype): F32 everywhere, F64 on the cpu, BF16 on
// cuda and emu; "null" takes them all.
func (d *Device) Stores(t DType) bool {
	switch backend := d.Info().Backend; t {
	case F32:
		return true
	case F64:
		return backend == "cpu" || backend == "null"
	case BF16:
		return backend != "cpu"
	}
	return false
}

// Buffer is a block of device memory. It is never visible to the Go collector: Free it.
type Buffer struct {
	dev   *Device
	phase *Phase // of an overlay, or nil
	ptr   Ptr
	bytes int64
	label string
}

// Alloc returns bytes of zeroed memory, 64-byte aligned or in an arena 256-byte aligned, entered under label in the ledger. What does not
// fit into the arena is an error that wraps ErrNoMemory and has the numbers.
func (d *Device) Alloc(bytes int64, label string) (*Buffer, error) {
	if bytes <= 0 {
		return nil, fmt.Errorf("allocate %q: %d bytes, need at least 1", label, bytes)
	}
	p, err := d.take(bytes)
	if err != nil {
		return nil, fmt.Errorf("allocate %q: %w", label, err)
	}
	b := &Buffer{dev: d, ptr: p, bytes: bytes, label: label}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.live[b] = struct{}{}
	line := d.ledger[label]
	if line == nil {
		line = &LedgerLine{Label: label}
		d.ledger[label] = line
	}
	for _, l := range []*LedgerLine{line, &d.total} {
		l.Bytes += bytes
		l.PeakBytes = max(l.PeakBytes, l.Bytes)
		l.Buffers++
		l.NumAlloc++
	}
	return b, nil
}

// take gets memory from the arena or the driver.
func (d *Device) take(bytes int64) (Ptr, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.arena == nil {
		p, err := d.drv.alloc(bytes)
		if err == nil {
			d.numAlloc++
		}
		return p, err
	}
	p, stale, err := d.arena.alloc(bytes)
	if err == nil && stale > 0 {
		if err = d.drv.set(p, stale, 0); err != nil {
			d.arena.release(p)
		}
	}
	return p, err
}

// giveBack returns memory; in an arena the next owner may write it at once, so nothing that uses it may still be on its way.
func (d *Device) giveBack(p Ptr, bytes int64) {
	if d.arena == nil {
		d.drv.free(p, bytes)
		return
	}
	_ = d.drv.wait() // a failed stream reports through its Sync
	d.mu.Lock()
	defer d.mu.Unlock()
	d.arena.release(p)
}

// Ptr is the address of the first byte. Of a phase of an overlay that is not the current one it panics.
func (b *Buffer) Ptr() Ptr {
	b.need()
	return b.ptr
}

// At is the address off bytes into the buffer; an offset outside it panics, and what makes Ptr panic.
func (b *Buffer) At(off int64) Ptr {
	b.need()
	if off < 0 || off > b.bytes {
		panic(fmt.Sprintf("kernels: offset %d outside the %d bytes of %q", off, b.bytes, b.label))
	}
	return b.ptr + Ptr(off)
}

// Bytes is the size asked for.
func (b *Buffer) Bytes() int64 { return b.bytes }

// Free gives the memory back; further calls, and calls on a nil buffer, do nothing.
func (b *Buffer) Free() {
	if b == nil {
		return
	}
	if b.phase != nil {
		b.phase.release(b)
		return
	}
	d := b.dev
	d.mu.Lock()
	_, ok := d.live[b]
	if ok {
		delete(d.live, b)
		for _, l := range []*LedgerLine{d.ledger[b.label], &d.total} {
			l.Bytes -= b.bytes
			l.Buffers--
		}
	}
	d.mu.Unlock()
	if ok {
		d.giveBack(b.ptr, b.bytes)
	}
}

// Ledger lists memory by label, most live bytes first, and a last line "total" whose PeakBytes is the peak of the sum.
func (d *Device) Ledger() []LedgerLine {
	d.mu.Lock()
	defer d.mu.Unlock()
	var out []LedgerLine
	for _, l := range d.ledger {
		out = append(out, *l)
	}
	slices.SortFunc(out, func(a, b LedgerLine) int {
		if a.Bytes != b.Bytes {
			return int(math.Copysign(1, float64(b.Bytes-a.Bytes)))
		}
		return strings.Compare(a.Label, b.Label)
	})
	return append(out, d.total)
}

// Close reports buffers that were not freed, by label; the device must not be used afterwards.
func (d *Device) Close() error {
	var leaks []string
	for _, l := range d.Ledger() {
		if l.Buffers > 0 && l.Label != "total" {
			leaks = append(leaks, fmt.Sprintf("%d x %q (%d bytes)", l.Buffers, l.Label, l.Bytes))
		}
	}
	d.mu.Lock()
	for b := range d.hosts {
		leaks = append(leaks, fmt.Sprintf("host memory %q (%d bytes)", b.label, b.bytes))
	}
	d.mu.Unlock()
	if leaks != nil {
		return fmt.Errorf("close device: not freed: %s", strings.Join(leaks, ", "))
	}
	if d.arena != nil {
		d.drv.free(d.whole.at, d.whole.bytes)
	}
	if err := d.drv.close(); err != nil {
		return fmt.Errorf("close device: %w", err)
	}
	return nil
}

// Workspace is the number of bytes of WS that running op with these args needs; pointers in args may be 0. Args that the op would
// refuse may answer 0: Run then reports what is wrong.
func (d *Device) Workspace(op Op, args unsafe.Pointer) int64 { return d.drv.workspace(op, args) }

// Stream runs ops in order. The first failure sticks: later calls do nothing, Err and Sync return it. One goroutine at a time.
// On the cpu every call is complete when it returns.
type Stream struct {
	drv       driver
	ops       *atomic.Int64 // the device's
	h         uintptr
	err       error
	capturing bool // a graph
}

// NewStream returns an idle stream; one that could not be made has failed already.
func (d *Device) NewStream() *Stream {
	h, err := d.drv.newStream()
	return &Stream{drv: d.drv, ops: &d.ops, h: h, err: err}
}

// NumOps is the number of launches on the device's streams so far: ops issued one by one, of one kernel or a few, and the nodes of graphs.
func (d *Device) NumOps() int64 { return d.ops.Load() }

// Close releases the stream.
func (s *Stream) Close() {
	if s != nil && s.h != 0 {
		s.drv.freeStream(s.h)
		s.h = 0
	}
}

// Err is the first failure so far.
func (s *Stream) Err() error { return s.err }

// Sync waits for everything issued so far and returns the first failure; the stream stays failed.
func (s *Stream) Sync() error {
	if s.open("wait for the stream") {
		s.err = s.drv.sync(s.h)
	}
	return s.err
}

// Fail makes err the stream's failure unless it already has one or err is nil.
func (s *Stream) Fail(err error) {
	if s.err == nil {
		s.err = err
	}
}

// Run runs one op; args points at the op's argument struct. The typed methods in ops.go are the usual way in.
func (s *Stream) Run(op Op, args unsafe.Pointer) {
	if s.err == nil {
		if !s.capturing {
			s.ops.Add(1)
		}
		s.err = s.drv.run(s.h, op, args)
	}
}

// Fill sets n bytes at dst to v.
func (s *Stream) Fill(dst Ptr, n int64, v byte) {
	if s.ready("fill", dst, n) {
		s.err = s.drv.fill(s.h, dst, n, v)
	}
}

// Upload copies src to the device.
func (s *Stream) Upload(dst Ptr, src []byte) { upload(s, dst, src) }

// UploadF32 copies float32 values to the device.
func (s *Stream) UploadF32(dst Ptr, src []float32) { upload(s, dst, src) }

// UploadF64 copies float64 values to the device.
func (s *Stream) UploadF64(dst Ptr, src []float64) { upload(s, dst, src) }

// UploadI32 copies int32 values to the device.
func (s *Stream) UploadI32(dst Ptr, src []int32) { upload(s, dst, src) }

// UploadSampleRows copies sampling parameters to the device.
func (s *Stream) UploadSampleRows(dst Ptr, src []SampleRow) { upload(s, dst, src) }

// Download copies len(dst) bytes from the device; after a failure dst is left alone.
func (s *Stream) Download(dst []byte, src Ptr) { download(s, dst, src) }

// DownloadF32 copies float32 values from the device.
func (s *Stream) DownloadF32(dst []float32, src Ptr) { download(s, dst, src) }

// DownloadF64 copies float64 values from the device.
func (s *Stream) DownloadF64(dst []float64, src Ptr) { download(s, dst, src) }

// DownloadI32 copies int32 values from the device.
func (s *Stream) DownloadI32(dst []int32, src Ptr) { download(s, dst, src) }

// UploadReal converts src to dtype (F32, F64 or BF16) and copies it to the device.
func (s *Stream) UploadReal(dst Ptr, src []float32, t DType) {
	switch t {
	case F32:
		s.UploadF32(dst, src)
	case F64:
		wide := make([]float64, len(src))
		for i, x := range src {
			wide[i] = float64(x)
		}
		s.UploadF64(dst, wide)
	case BF16:
		b := make([]byte, 2*len(src))
		ToBF16s(b, src)
		s.Upload(dst, b)
	default:
		s.Fail(fmt.Errorf("upload: dtype %v holds no reals", t))
	}
}

// DownloadReal copies len(dst) values of dtype F32, F64 or BF16 from the device, as float32.
func (s *Stream) DownloadReal(dst []float32, src Ptr, t DType) {
	switch t {
	case F32:
		s.DownloadF32(dst, src)
	case F64:
		wide := make([]float64, len(dst))
		s.DownloadF64(wide, src)
		for i, x := range wide {
			dst[i] = float32(x)
		}
	case BF16:
		b := make([]byte, 2*len(dst))
		s.Download(b, src)
		FromBF16s(dst, b)
	default:
		s.Fail(fmt.Errorf("download: dtype %v holds no reals", t))
	}
}

func upload[T any](s *Stream, dst Ptr, src []T) {
	if n := int64(len(src)) * int64(unsafe.Sizeof(*new(T))); s.ready("upload", dst, n) {
		s.err = s.drv.copyIn(s.h, dst, unsafe.Pointer(unsafe.SliceData(src)), n)
	}
}

func download[T any](s *Stream, dst []T, src Ptr) {
	if n := int64(len(dst)) * int64(unsafe.Sizeof(*new(T))); s.ready("download", src, n) {
		s.err = s.drv.copyOut(s.h, unsafe.Pointer(unsafe.SliceData(dst)), src, n)
	}
}

// ready says whether a copy of n bytes at p should go ahead, and records what is wrong with it.
func (s *Stream) ready(what string, p Ptr, n int64) bool {
	if n == 0 || !s.open(what) {
		return false
	}
	if p == 0 || n < 0 {
		s.err = fmt.Errorf("%s: %d bytes at address %#x", what, n, uint64(p))
		return false
	}
	return true
}
