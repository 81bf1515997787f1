//go:build gpu

package kernels

import (
	"errors"
	"fmt"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"unsafe"

	"gorgonia.org/cu"
)

// GPUBuild reports whether this build has the driver layer for NVIDIA GPUs (tag gpu).
const GPUBuild = true

// cudaDriver is a GPU through the driver API: memory, copies and streams on the device's primary context, which the table's library
// shares. Every call makes that context current on its thread, so any goroutine may call.
type cudaDriver struct {
	name string
	tab  table
	dev  cu.Device
	ctx  cu.CUContext
	desc Info

	mu      sync.Mutex
	streams map[uintptr]cu.Stream // by the table's handle
	events  map[uintptr]cu.Event
	last    uintptr // handle of the last event made
}

// openCUDA opens "cuda:N" ("cuda" is "cuda:0") with the kernels of libhs_cuda.so.
func openCUDA(name string, o Options) (driver, error) {
	fail := func(err error, hint string) (driver, error) {
		return nil, &Error{Op: fmt.Sprintf("open device %q", name), Err: err, Hint: hint}
	}
	ordinal := 0
	if rest, ok := strings.CutPrefix(name, "cuda:"); ok {
		n, err := strconv.Atoi(rest)
		if err != nil || n < 0 {
			return fail(fmt.Errorf("%q is no device number: %w", rest, ErrNoDevice), `type "cuda:0" for the first GPU`)
		}
		ordinal = n
	} else if name != "cuda" {
		return fail(ErrNoDevice, `devices are "cpu", "null", "emu" and "cuda:N"`)
	}
	if n, why := numDevices(); ordinal >= n {
		return fail(fmt.Errorf("%s: %w", why, ErrNoDevice), "run with --device cpu")
	}
	path, err := findLibrary("libhs_cuda.so", o.LibDir)
	if err != nil {
		return fail(err, "type: make cuda")
	}
	tab, err := loadTable(path)
	if err != nil {
		return fail(fmt.Errorf("%w: %w", err, ErrNoDevice), "rebuild it: make cuda")
	}
	if o.Gemm != "" {
		if err := tab.configure("gemm", o.Gemm); err != nil {
			return fail(err, `GPU products are "own" and "cublaslt"`)
		}
	}
	drv, err := newCUDADriver(name, ordinal, tab)
	if err != nil {
		return fail(err, "is another process using the GPU exclusively? See nvidia-smi")
	}
	return drv, nil
}

// numDevices counts the GPUs, and says what stands for a small number.
func numDevices() (n int, why string) {
	n, err := cu.NumDevices()
	if err != nil {
		n = 0
	}
	if w := driverWhy(); w != "" {
		return n, "no NVIDIA driver: " + w
	}
	return n, fmt.Sprintf("the driver shows %d devices", n)
}

// noCUDA says why there is no cuda device, "" when there is one.
func noCUDA(o Options) string {
	if n, why := numDevices(); n == 0 {
		return why
	}
	if _, err := findLibrary("libhs_cuda.so", o.LibDir); err != nil {
		return fmt.Sprintf("%v (make cuda)", err)
	}
	return ""
}

// newCUDADriver retains the primary context of a device and runs the given table on it.
func newCUDADriver(name string, ordinal int, tab table) (*cudaDriver, error) {
	dev, err := cu.GetDevice(ordinal)
	if err != nil {
		return nil, fmt.Errorf("device %d: %w", ordinal, err)
	}
	ctx, err := dev.RetainPrimaryCtx()
	if err != nil {
		return nil, fmt.Errorf("primary context of device %d: %w", ordinal, err)
	}
	d := &cudaDriver{name: name, tab: tab, dev: dev, ctx: ctx, streams: map[uintptr]cu.Stream{}, events: map[uintptr]cu.Event{}}
	total, err := dev.TotalMem()
	if err != nil {
		return nil, fmt.Errorf("memory of device %d: %w", ordinal, err)
	}
	model, err := dev.Name()
	if err != nil {
		return nil, fmt.Errorf("name of device %d: %w", ordinal, err)
	}
	d.desc = Info{Name: name, Backend: tab.name(), Table: tab.name(), Build: fmt.Sprintf("%s, driver %d, %s", model, cu.Version(), tab.buildInfo()), Threads: 1, MemTotal: total}
	return d, nil
}

// on runs f with the device's context current on the thread.
func (d *cudaDriver) on(what string, f func() error) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	err := cu.SetCurrentContext(d.ctx)
	if err == nil {
		err = f()
	}
	if err != nil {
		return fmt.Errorf("%s: %s: %w", d.name, what, err)
	}
	return nil
}

func (d *cudaDriver) stream(h uintptr) cu.Stream {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.streams[h]
}

func (d *cudaDriver) info() Info { return d.desc }

// arenaReserve is the free memory that the arena leaves for cuBLASLt, graphs, and what the driver takes later (gpu.md 3.7: 3-5 GiB, of
// which the context is taken by now); of a device with little memory no more than an eighth.
const arenaReserve = 4 << 30

func (d *cudaDriver) arenaBytes(asked int64) (int64, error) {
	if asked < 0 {
		return 0, fmt.Errorf("open device %q: an arena of %d bytes, want 0 or more", d.name, asked)
	}
	if asked > 0 {
		return asked, nil
	}
	var free int64
	err := d.on("read free memory", func() (err error) {
		free, _, err = cu.MemInfo()
		return err
	})
	return free - min(arenaReserve, free/8), err
}

func (d *cudaDriver) alloc(bytes int64) (Ptr, error) {
	var p cu.DevicePtr
	err := d.on("allocate", func() (err error) {
		if p, err = cu.MemAlloc(bytes); err != nil {
			free, total, _ := cu.MemInfo()
			return fmt.Errorf("%d bytes with %d of %d free: %w", bytes, free, total, err)
		}
		return setAndWait(p, 0, bytes)
	})
	return Ptr(p), err
}

// setAndWait returns when the bytes are set: a fill does not wait for itself, and streams do not wait for it.
func setAndWait(p cu.DevicePtr, v byte, n int64) error {
	if err := cu.MemsetD8(p, v, n); err != nil {
		return err
	}
	return cu.Synchronize()
}

func (d *cudaDriver) set(p Ptr, n int64, v byte) error {
	return d.on("fill", func() error { return setAndWait(cu.DevicePtr(p), v, n) })
}

func (d *cudaDriver) wait() error { return d.on("wait for the device", cu.Synchronize) }

// free waits for the device: no op that still uses the memory is running afterwards. A failed stream reports through Sync.
func (d *cudaDriver) free(p Ptr, _ int64) {
	_ = d.on("free", func() error { return cu.MemFree(cu.DevicePtr(p)) })
}

func (d *cudaDriver) newStream() (h uintptr, err error) {
	err = d.on("create stream", func() error {
		s, err := cu.MakeStream(cu.NonBlocking)
		if err != nil {
			return err
		}
		h = d.tab.newStream(uintptr(unsafe.Pointer(s.C())))
		d.mu.Lock()
		d.streams[h] = s
		d.mu.Unlock()
		return nil
	})
	return h, err
}

func (d *cudaDriver) freeStream(h uintptr) {
	s := d.stream(h)
	d.mu.Lock()
	delete(d.streams, h)
	d.mu.Unlock()
	d.tab.freeStream(h)
	_ = d.on("destroy stream", s.Destroy)
}

func (d *cudaDriver) sync(h uintptr) error {
	return d.on("wait for stream", func() error { return d.tab.sync(h) })
}

func (d *cudaDriver) run(h uintptr, op Op, args unsafe.Pointer) error {
	return d.on("run", func() error { return d.tab.run(h, op, args) })
}

func (d *cudaDriver) workspace(op Op, args unsafe.Pointer) int64 { return d.tab.workspace(op, args) }

// Copies wait for the stream: the host memory is the Go program's and may move or change afterwards.
func (d *cudaDriver) copyIn(h uintptr, dst Ptr, src unsafe.Pointer, n int64) error {
	s := d.stream(h)
	return d.on("copy to the device", func() error {
		if err := cu.MemcpyHtoDAsync(cu.DevicePtr(dst), src, n, s); err != nil {
			return err
		}
		return s.Synchronize()
	})
}

func (d *cudaDriver) copyOut(h uintptr, dst unsafe.Pointer, src Ptr, n int64) error {
	s := d.stream(h)
	return d.on("copy from the device", func() error {
		if err := cu.MemcpyDtoHAsync(dst, cu.DevicePtr(src), n, s); err != nil {
			return err
		}
		return s.Synchronize()
	})
}

func (d *cudaDriver) fill(h uintptr, dst Ptr, n int64, v byte) error {
	s := d.stream(h)
	return d.on("fill", func() error { return cu.MemsetD8Async(cu.DevicePtr(dst), v, n, s) })
}

func (d *cudaDriver) copyInAsync(h uintptr, dst Ptr, src unsafe.Pointer, n int64) error {
	s := d.stream(h)
	return d.on("copy to the device", func() error { return cu.MemcpyHtoDAsync(cu.DevicePtr(dst), src, n, s) })
}

func (d *cudaDriver) copyOutAsync(h uintptr, dst unsafe.Pointer, src Ptr, n int64) error {
	s := d.stream(h)
	return d.on("copy from the device", func() error { return cu.MemcpyDtoHAsync(dst, cu.DevicePtr(src), n, s) })
}

func (d *cudaDriver) allocHost(bytes int64) (p unsafe.Pointer, err error) {
	err = d.on("allocate host memory", func() (err error) {
		p, err = d.tab.allocHost(bytes)
		return err
	})
	return p, err
}

func (d *cudaDriver) freeHost(p unsafe.Pointer) {
	_ = d.on("free host memory", func() error { d.tab.freeHost(p); return nil })
}

func (d *cudaDriver) graphBegin(h uintptr) error {
	return d.on("record a graph", func() error { return d.tab.graphBegin(h) })
}

func (d *cudaDriver) graphEnd(h uintptr) (g uintptr, nodes int64, err error) {
	err = d.on("end a graph", func() (err error) {
		g, nodes, err = d.tab.graphEnd(h)
		return err
	})
	return g, nodes, err
}

func (d *cudaDriver) graphLaunch(h, g uintptr) error {
	return d.on("launch a graph", func() error { return d.tab.graphLaunch(h, g) })
}

func (d *cudaDriver) graphFree(g uintptr) {
	_ = d.on("free a graph", func() error { d.tab.graphFree(g); return nil })
}

func (d *cudaDriver) event(h uintptr) cu.Event {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.events[h]
}

func (d *cudaDriver) newEvent() (h uintptr, err error) {
	err = d.on("make an event", func() error {
		e, err := cu.MakeEvent(cu.DefaultEvent)
		if err != nil {
			return err
		}
		d.mu.Lock()
		defer d.mu.Unlock()
		d.last++
		h = d.last
		d.events[h] = e
		return nil
	})
	return h, err
}

func (d *cudaDriver) recordEvent(h, e uintptr) error {
	s, ev := d.stream(h), d.event(e)
	return d.on("record an event", func() error { return ev.Record(s) })
}

func (d *cudaDriver) waitEvent(e uintptr) error {
	ev := d.event(e)
	return d.on("wait for an event", ev.Synchronize)
}

func (d *cudaDriver) queryEvent(e uintptr) (done bool, err error) {
	ev := d.event(e)
	err = d.on("query an event", func() error {
		err := ev.Query()
		if done = err == nil; errors.Is(err, cu.NotReady) {
			return nil
		}
		return err
	})
	return done, err
}

func (d *cudaDriver) elapsed(start, end uintptr) (ms float64, err error) {
	from, to := d.event(start), d.event(end)
	err = d.on("time between events", func() (err error) {
		ms, err = from.Elapsed(to)
		return err
	})
	return ms, err
}

func (d *cudaDriver) freeEvent(e uintptr) {
	ev := d.event(e)
	d.mu.Lock()
	delete(d.events, e)
	d.mu.Unlock()
	_ = d.on("destroy an event", func() error { return cu.DestroyEvent(&ev) })
}

func (d *cudaDriver) configure(key, value string) error { return d.tab.configure(key, value) }

func (d *cudaDriver) close() error {
	return d.on("release the context", d.dev.ReleasePrimaryCtx)
}
