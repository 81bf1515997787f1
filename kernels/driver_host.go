package kernels

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"unsafe"
)

// hostDriver is a table on memory of the C heap. Streams are immediate: an op has finished when run returns.
type hostDriver struct {
	tab     table
	threads int
	guard   bool

	mu     sync.Mutex
	damage []error // writes around guarded allocations, found when they were freed

	hostClock
}

func openHost(o Options) (driver, error) {
	if o.ArenaBytes != 0 {
		return nil, &Error{Op: "open device", Err: fmt.Errorf("an arena of %d bytes on the cpu", o.ArenaBytes), Hint: "arenas are for emu and cuda"}
	}
	threads := o.Threads
	if threads == 0 {
		threads = runtime.NumCPU()
	}
	if threads < 0 || threads > maxThreads {
		return nil, &Error{Op: "open device", Err: fmt.Errorf("%d threads", o.Threads), Hint: fmt.Sprintf("give 1 to %d threads, or 0 for all CPUs", maxThreads)}
	}
	tab, err := linkedTable()
	if err != nil {
		return nil, &Error{Op: "open device", Err: err, Hint: "rebuild: make build"}
	}
	simd, gemm := o.SIMD, o.Gemm
	if simd == "" {
		simd = "auto"
	}
	if gemm == "" {
		gemm = "own"
	}
	for _, kv := range [][2]string{{"threads", strconv.Itoa(threads)}, {"simd", simd}, {"gemm", gemm}} {
		if err := tab.configure(kv[0], kv[1]); err != nil {
			return nil, &Error{Op: "open device", Err: err, Hint: configureHint(kv[0])}
		}
	}
	return &hostDriver{tab: tab, threads: threads}, nil
}

// openEmu loads the emulated CUDA kernels.
func openEmu(o Options) (driver, error) {
	lib := "libhs_emu.so"
	if o.Emu.TestLib {
		lib = "libhs_emu_test.so"
	}
	path, err := findLibrary(lib, o.LibDir)
	if err != nil {
		return nil, &Error{Op: `open device "emu"`, Err: err, Hint: "type: make emu"}
	}
	tab, err := loadTable(path)
	if err != nil {
		return nil, &Error{Op: `open device "emu"`, Err: fmt.Errorf("%w: %w", err, ErrNoDevice), Hint: "rebuild it: make emu"}
	}
	order, poison, gemm := o.Emu.FiberOrder, "off", o.Gemm
	if gemm == "" {
		gemm = "own"
	}
	if order == "" {
		order = "forward"
	}
	if o.Emu.Poison {
		poison = "on"
	}
	for _, kv := range [][2]string{{"fiber_order", order}, {"poison", poison}, {"gemm", gemm}} {
		if err := tab.configure(kv[0], kv[1]); err != nil {
			return nil, &Error{Op: `open device "emu"`, Err: err, Hint: `fiber orders are "forward", "reverse" and "random:SEED"; products are "own" and "cublaslt"`}
		}
	}
	return &hostDriver{tab: tab, threads: 1, guard: o.Emu.Guard}, nil
}

// findLibrary looks for a library of kernels in dir (unless ""), beside the executable and in build/.
func findLibrary(name, dir string) (string, error) {
	var places []string
	if dir != "" {
		places = append(places, dir)
	}
	if exe, err := os.Executable(); err == nil {
		places = append(places, filepath.Dir(exe))
	}
	places = append(places, "build")
	for i, p := range places {
		path := filepath.Join(p, name)
		if _, err := os.Stat(path); err == nil {
			return filepath.Abs(path)
		}
		places[i] = path
	}
	return "", fmt.Errorf("no %s: %w", strings.Join(places, ", no "), ErrNoDevice)
}

func configureHint(key string) string {
	switch key {
	case "simd":
		return `SIMD levels are "auto", "avx512", "avx2" and "scalar"; this CPU may lack the one asked for`
	case "gemm":
		return `use gemm "own", or install OpenBLAS so that libopenblas.so.0 is found (Debian: apt-get install libopenblas0)`
	}
	return ""
}

func (d *hostDriver) info() Info {
	name := d.tab.name()
	return Info{Name: name, Backend: name, Table: name, Build: d.tab.buildInfo(), Threads: d.threads, MemTotal: hostMemory()}
}

func (d *hostDriver) arenaBytes(asked int64) (int64, error) {
	if asked < 0 {
		return 0, fmt.Errorf("open device: an arena of %d bytes, want 0 or more", asked)
	}
	if d.guard {
		return 0, nil
	}
	return asked, nil
}

func (d *hostDriver) alloc(bytes int64) (Ptr, error) {
	p := Ptr(0)
	if d.guard {
		p = guardAlloc(bytes)
	} else {
		p = hostAlloc(bytes)
	}
	if p == 0 {
		return 0, fmt.Errorf("out of host memory for %d bytes", bytes)
	}
	return p, nil
}

func (d *hostDriver) free(p Ptr, bytes int64) {
	if !d.guard {
		hostFree(p, bytes)
	} else if at := guardFree(p, bytes); at != 0 {
		d.mu.Lock()
		d.damage = append(d.damage, fmt.Errorf("byte %d was written of a buffer of %d bytes", at, bytes))
		d.mu.Unlock()
	}
}

func (d *hostDriver) close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return errors.Join(d.damage...)
}

func (d *hostDriver) configure(key, value string) error { return d.tab.configure(key, value) }

func (d *hostDriver) set(p Ptr, n int64, v byte) error {
	hostFill(p, n, v)
	return nil
}

func (d *hostDriver) wait() error                 { return nil }
func (d *hostDriver) newStream() (uintptr, error) { return d.tab.newStream(0), nil }
func (d *hostDriver) freeStream(h uintptr)        { d.tab.freeStream(h) }
func (d *hostDriver) sync(h uintptr) error        { return d.tab.sync(h) }

func (d *hostDriver) run(h uintptr, op Op, args unsafe.Pointer) error { return d.tab.run(h, op, args) }

func (d *hostDriver) workspace(op Op, args unsafe.Pointer) int64 { return d.tab.workspace(op, args) }

func (d *hostDriver) copyIn(_ uintptr, dst Ptr, src unsafe.Pointer, n int64) error {
	hostCopyIn(dst, src, n)
	return nil
}

func (d *hostDriver) copyOut(_ uintptr, dst unsafe.Pointer, src Ptr, n int64) error {
	hostCopyOut(dst, src, n)
	return nil
}

func (d *hostDriver) graphBegin(h uintptr) error                    { return d.tab.graphBegin(h) }
func (d *hostDriver) graphEnd(h uintptr) (uintptr, int64, error)    { return d.tab.graphEnd(h) }
func (d *hostDriver) graphLaunch(h, g uintptr) error                { return d.tab.graphLaunch(h, g) }
func (d *hostDriver) graphFree(g uintptr)                           { d.tab.graphFree(g) }
func (d *hostDriver) allocHost(bytes int64) (unsafe.Pointer, error) { return d.tab.allocHost(bytes) }
func (d *hostDriver) freeHost(p unsafe.Pointer)                     { d.tab.freeHost(p) }

func (d *hostDriver) copyInAsync(h uintptr, dst Ptr, src unsafe.Pointer, n int64) error {
	return d.copyIn(h, dst, src, n)
}

func (d *hostDriver) copyOutAsync(h uintptr, dst unsafe.Pointer, src Ptr, n int64) error {
	return d.copyOut(h, dst, src, n)
}

// hostClock are events of immediate streams: a recorded event has been reached, at the time it was recorded.
type hostClock struct {
	mu    sync.Mutex
	times map[uintptr]float64 // milliseconds, 0 = not recorded
	last  uintptr
}

func (c *hostClock) newEvent() (uintptr, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.times == nil {
		c.times = map[uintptr]float64{}
	}
	c.last++
	c.times[c.last] = 0
	return c.last, nil
}

func (c *hostClock) recordEvent(_, e uintptr) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.times[e] = nowMS()
	return nil
}

func (c *hostClock) waitEvent(uintptr) error          { return nil }
func (c *hostClock) queryEvent(uintptr) (bool, error) { return true, nil }

func (c *hostClock) elapsed(start, end uintptr) (float64, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	from, to := c.times[start], c.times[end]
	if from == 0 || to == 0 {
		return 0, errors.New("time between events: one was not recorded")
	}
	return to - from, nil
}

func (c *hostClock) freeEvent(e uintptr) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.times, e)
}

func (d *hostDriver) fill(_ uintptr, dst Ptr, n int64, v byte) error {
	hostFill(dst, n, v)
	return nil
}

// nullDriver hands out addresses without memory behind them and accepts every op: plans and schedules can be tested at any size.
// Downloads give zeros.
type nullDriver struct {
	tab    table // tells the sizes of workspaces
	mu     sync.Mutex
	next   Ptr
	stream uintptr           // the last one made
	graphs map[uintptr]int64 // ops recorded so far, by stream

	hostClock
}

func openNull(o Options) (driver, error) {
	tab, err := linkedTable()
	hint := "rebuild: make build"
	switch o.Table {
	case "", "cpu":
	case "emu", "cuda":
		var path string
		hint = "type: make " + o.Table
		if path, err = findLibrary("libhs_"+o.Table+".so", o.LibDir); err == nil {
			tab, err = loadTable(path)
		}
	default:
		err, hint = fmt.Errorf("no table %q", o.Table), `tables are "cpu", "emu" and "cuda"`
	}
	if err != nil {
		return nil, &Error{Op: `open device "null"`, Err: err, Hint: hint}
	}
	return &nullDriver{tab: tab, graphs: map[uintptr]int64{}}, nil
}

func (d *nullDriver) info() Info {
	return Info{Name: "null", Backend: "null", Table: d.tab.name(), Build: "accepts every op, computes nothing"}
}

func (d *nullDriver) alloc(bytes int64) (Ptr, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	p := max(d.next, 1<<20)
	d.next = p + Ptr(bytes+127)&^63
	return p, nil
}

func (d *nullDriver) newStream() (uintptr, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.stream++
	return d.stream, nil
}

func (d *nullDriver) run(h uintptr, _ Op, _ unsafe.Pointer) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if n, ok := d.graphs[h]; ok {
		d.graphs[h] = n + 1
	}
	return nil
}

func (d *nullDriver) graphBegin(h uintptr) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.graphs[h] = 0
	return nil
}

// graphEnd counts ops, since there are no launches.
func (d *nullDriver) graphEnd(h uintptr) (uintptr, int64, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	n := d.graphs[h]
	delete(d.graphs, h)
	return 1, n, nil
}

func (d *nullDriver) arenaBytes(int64) (int64, error)                       { return 0, nil }
func (d *nullDriver) set(Ptr, int64, byte) error                            { return nil }
func (d *nullDriver) wait() error                                           { return nil }
func (d *nullDriver) free(Ptr, int64)                                       {}
func (d *nullDriver) freeStream(uintptr)                                    {}
func (d *nullDriver) sync(uintptr) error                                    { return nil }
func (d *nullDriver) workspace(op Op, args unsafe.Pointer) int64            { return d.tab.workspace(op, args) }
func (d *nullDriver) copyIn(uintptr, Ptr, unsafe.Pointer, int64) error      { return nil }
func (d *nullDriver) fill(uintptr, Ptr, int64, byte) error                  { return nil }
func (d *nullDriver) configure(string, string) error                        { return nil }
func (d *nullDriver) close() error                                          { return nil }
func (d *nullDriver) graphLaunch(uintptr, uintptr) error                    { return nil }
func (d *nullDriver) graphFree(uintptr)                                     {}
func (d *nullDriver) allocHost(bytes int64) (unsafe.Pointer, error)         { return d.tab.allocHost(bytes) }
func (d *nullDriver) freeHost(p unsafe.Pointer)                             { d.tab.freeHost(p) }
func (d *nullDriver) copyInAsync(uintptr, Ptr, unsafe.Pointer, int64) error { return nil }

func (d *nullDriver) copyOutAsync(h uintptr, dst unsafe.Pointer, src Ptr, n int64) error {
	return d.copyOut(h, dst, src, n)
}

func (d *nullDriver) copyOut(_ uintptr, dst unsafe.Pointer, _ Ptr, n int64) error {
	clear(unsafe.Slice((*byte)(dst), n))
	return nil
}
