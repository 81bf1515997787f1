package kernels

import (
	"fmt"
	"runtime"
	"strconv"
	"sync"
	"unsafe"
)

// hostDriver is the cpu table on memory of the C heap. Streams are immediate: an op has finished when run returns.
type hostDriver struct{ threads int }

func openHost(o Options) (driver, error) {
	threads := o.Threads
	if threads == 0 {
		threads = runtime.NumCPU()
	}
	if threads < 0 || threads > maxThreads {
		return nil, &Error{Op: "open device", Err: fmt.Errorf("%d threads", o.Threads), Hint: fmt.Sprintf("give 1 to %d threads, or 0 for all CPUs", maxThreads)}
	}
	if v, err := tableVersion(); err != nil {
		return nil, &Error{Op: "open device", Err: err, Hint: fmt.Sprintf("rebuild: the table has version %d", v)}
	}
	simd, gemm := o.SIMD, o.Gemm
	if simd == "" {
		simd = "auto"
	}
	if gemm == "" {
		gemm = "own"
	}
	for _, kv := range [][2]string{{"threads", strconv.Itoa(threads)}, {"simd", simd}, {"gemm", gemm}} {
		if err := tableConfigure(kv[0], kv[1]); err != nil {
			return nil, &Error{Op: "open device", Err: err, Hint: configureHint(kv[0])}
		}
	}
	return &hostDriver{threads: threads}, nil
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
	return Info{Name: "cpu", Backend: "cpu", Build: tableBuildInfo(), Threads: d.threads, MemTotal: hostMemory()}
}

func (d *hostDriver) alloc(bytes int64) (Ptr, error) {
	p := hostAlloc(bytes)
	if p == 0 {
		return 0, fmt.Errorf("out of host memory for %d bytes", bytes)
	}
	return p, nil
}

func (d *hostDriver) free(p Ptr, bytes int64)                         { hostFree(p, bytes) }
func (d *hostDriver) newStream() uintptr                              { return 0 }
func (d *hostDriver) freeStream(uintptr)                              {}
func (d *hostDriver) run(_ uintptr, op Op, args unsafe.Pointer) error { return tableRun(op, args) }
func (d *hostDriver) workspace(op Op, args unsafe.Pointer) int64      { return tableWorkspace(op, args) }
func (d *hostDriver) copyIn(dst Ptr, src unsafe.Pointer, n int64)     { hostCopyIn(dst, src, n) }
func (d *hostDriver) copyOut(dst unsafe.Pointer, src Ptr, n int64)    { hostCopyOut(dst, src, n) }
func (d *hostDriver) fill(dst Ptr, n int64, v byte)                   { hostFill(dst, n, v) }

// nullDriver hands out addresses without memory behind them and accepts every op: plans and schedules can be tested at any size.
// Downloads give zeros.
type nullDriver struct {
	mu   sync.Mutex
	next Ptr
}

func (d *nullDriver) info() Info {
	return Info{Name: "null", Backend: "null", Build: "accepts every op, computes nothing"}
}

func (d *nullDriver) alloc(bytes int64) (Ptr, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	p := max(d.next, 1<<20)
	d.next = p + Ptr(bytes+127)&^63
	return p, nil
}

func (d *nullDriver) free(Ptr, int64)                            {}
func (d *nullDriver) newStream() uintptr                         { return 0 }
func (d *nullDriver) freeStream(uintptr)                         {}
func (d *nullDriver) run(uintptr, Op, unsafe.Pointer) error      { return nil }
func (d *nullDriver) workspace(op Op, args unsafe.Pointer) int64 { return tableWorkspace(op, args) }
func (d *nullDriver) copyIn(Ptr, unsafe.Pointer, int64)          {}
func (d *nullDriver) fill(Ptr, int64, byte)                      {}

func (d *nullDriver) copyOut(dst unsafe.Pointer, _ Ptr, n int64) {
	clear(unsafe.Slice((*byte)(dst), n))
}
