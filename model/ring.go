package model

import (
	"fmt"

	"harness-s/kernels"
)

// ring is the page-locked host memory between a Runner and its device. It has two halves, which the steps use in turn: one holds what was sent
// since the step before was issued, and at its end receives the results of the step. A copy may be made long after it was issued, so a half is used
// again only when everything that was issued with it has run. At most two steps are under way (Runner.Submit), so that seldom blocks.
type ring struct {
	st            *kernels.Stream
	buf           *kernels.HostBuffer
	half, results int64 // bytes of a half, of the results at its end
	done          [2]*kernels.Event
	cur           int   // half in use
	used          int64 // bytes of it
	free          bool  // what used it before has run
}

// newRing makes halves that send `sends` bytes and receive `results`.
func newRing(dev *kernels.Device, st *kernels.Stream, sends, results int64) (*ring, error) {
	results = alignUp(results)
	g := &ring{st: st, half: alignUp(sends) + results, results: results}
	var err error
	if g.buf, err = dev.AllocHost(2*g.half, "sampler ring"); err != nil {
		return nil, err
	}
	for i := range g.done {
		if g.done[i], err = dev.NewEvent(); err != nil {
			g.close()
			return nil, err
		}
	}
	return g, nil
}

func (g *ring) close() {
	for _, e := range g.done {
		e.Free()
	}
	g.buf.Free()
}

// take returns the place of n bytes to send. When the half is full it waits for the device and begins again.
func (g *ring) take(n int64) int64 {
	if n > g.half-g.results {
		panic(fmt.Sprintf("model: %d bytes to send at once, the ring has %d", n, g.half-g.results))
	}
	if !g.free {
		g.st.Fail(g.done[g.cur].Wait())
		g.free = true
	}
	if g.used+n > g.half-g.results {
		_ = g.st.Sync() // the stream keeps its failure
		g.used = 0
	}
	at := int64(g.cur)*g.half + g.used
	g.used += alignUp(n)
	return at
}

// turn ends a step: what comes next goes into the other half.
func (g *ring) turn() {
	g.st.Record(g.done[g.cur])
	g.cur, g.used, g.free = 1-g.cur, 0, false
}

// resultsAt is where the results of the step that uses a half lie.
func (g *ring) resultsAt(half int) int64 { return int64(half+1)*g.half - g.results }

// reals are n values of type F32 or F64 from a byte of the ring on.
func (g *ring) reals(at int64, n int, t kernels.DType) []float32 {
	if t == kernels.F32 {
		return kernels.HostSlice[float32](g.buf, at, n)
	}
	out := make([]float32, n)
	for i, x := range kernels.HostSlice[float64](g.buf, at, n) {
		out[i] = float32(x)
	}
	return out
}

// send copies v to the device in the stream's order.
func send[T any](g *ring, dst kernels.Ptr, v []T) {
	bytes := int64(len(bytesOf(v)))
	at := g.take(bytes)
	copy(kernels.HostSlice[T](g.buf, at, len(v)), v)
	g.st.UploadAsync(dst, g.buf, at, bytes)
}
