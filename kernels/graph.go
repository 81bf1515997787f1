package kernels

import (
	"fmt"
	"runtime"
)

// Graph is a list of launches with their arguments, recorded once by Stream.Capture and run by Stream.Launch with one call. What changes from
// one launch to the next lies in device memory: addresses, sizes and flags are those of the recording.
type Graph struct {
	drv   driver
	h     uintptr
	nodes int
}

// CanCapture reports whether the device has graphs: cuda and emu do, and "null" as far as it does anything.
func (d *Device) CanCapture() bool { return d.Info().Backend != "cpu" }

// Capture records the ops that record issues on s without running them. Copies, fills, events and Sync on s fail in the meantime. An op's
// failure is the stream's, as ever; a device without graphs answers with ErrUnsupported. Free the graph.
func (s *Stream) Capture(record func()) (*Graph, error) {
	if !s.open("capture a graph") {
		return nil, s.err
	}
	runtime.LockOSThread() // a recording ends on the thread that began it
	defer runtime.UnlockOSThread()
	if err := s.drv.graphBegin(s.h); err != nil {
		return nil, fmt.Errorf("capture graph: %w", err)
	}
	s.capturing = true
	record()
	s.capturing = false
	h, nodes, err := s.drv.graphEnd(s.h)
	if err == nil {
		err = s.err
	}
	if err != nil {
		if h != 0 {
			s.drv.graphFree(h)
		}
		return nil, fmt.Errorf("capture graph: %w", err)
	}
	return &Graph{drv: s.drv, h: h, nodes: int(nodes)}, nil
}

// Nodes is the number of kernels and memsets of one launch.
func (g *Graph) Nodes() int { return g.nodes }

// Launch runs a recorded graph after what was issued on s before.
func (s *Stream) Launch(g *Graph) {
	if s.open("launch a graph") {
		s.ops.Add(int64(g.nodes))
		s.err = s.drv.graphLaunch(s.h, g.h)
	}
}

// Free releases the graph, which must not be running; calls on a nil graph do nothing.
func (g *Graph) Free() {
	if g != nil && g.h != 0 {
		g.drv.graphFree(g.h)
		g.h = 0
	}
}

// open says whether s takes calls that a graph cannot hold, and records what is wrong.
func (s *Stream) open(what string) bool {
	if s.err == nil && s.capturing {
		s.err = fmt.Errorf("%s: not possible while the stream records a graph", what)
	}
	return s.err == nil
}
