package model

import (
	"fmt"

	"harness-s/kernels"
)

// decodeGraphs are the decode passes of a Runner as graphs, by number of rows and by whether one truncates its distribution (gpu.md 6.10). They stay valid because everything they name stays
// where it is: weights, caches, activations, workspace and indices. Rows, positions, pages and sampling are read from the index buffer, and splits
// of the context follow its longest length, so that a launch depends on no number of the batch but its rows.
type decodeGraphs map[graphKey]*kernels.Graph

type graphKey struct {
	rows      int64
	truncated bool
}

func (x *passIndex) graph() graphKey { return graphKey{x.rows, x.truncated} }

// bucket is the number of rows of the graph that n rows run in, of at most `most`: 1, 2, 4, 8, 16, 24, 32, then every 16 to 256, then
// every 64. The rows left over belong to the spare slot.
func bucket(n, most int) int {
	step := 1
	switch {
	case n <= 8:
		for step < n {
			step *= 2
		}
	case n <= 32:
		step = 8
	case n <= 256:
		step = 16
	default:
		step = 64
	}
	return min((n+step-1)/step*step, most)
}

// decode runs a pass of decode rows that all sample. The first one of a bucket runs launch by launch, which also loads its kernels, and is then
// recorded.
func (r *Runner) decode(x *passIndex) error {
	if g := r.graphs[x.graph()]; g != nil {
		r.st.Launch(g)
		return nil
	}
	r.forward(x)
	return r.record(x)
}

func (r *Runner) record(x *passIndex) error {
	g, err := r.st.Capture(func() { r.forward(x) })
	if err != nil {
		return fmt.Errorf("record the decode pass of %d rows: %w", x.rows, err)
	}
	r.graphs[x.graph()] = g
	return nil
}

// DecodeLaunches is the number of kernels and memsets of a decode step of n sequences, 1 to MaxSeqs. Devices without graphs answer with
// kernels.ErrUnsupported.
func (r *Runner) DecodeLaunches(n int) (int, error) {
	if r.graphs == nil {
		return 0, fmt.Errorf("count launches: device %s: %w", r.m.Dev.Info().Name, kernels.ErrUnsupported)
	}
	rows := int64(bucket(max(n, 1), r.opt.MaxSeqs))
	x := &passIndex{rows: rows, decode: rows, sampled: rows, all: true, last: true, maxPages: r.ix.stride}
	if r.graphs[x.graph()] == nil {
		x.place(r.ix.at)
		if err := r.record(x); err != nil {
			return 0, err
		}
	}
	return r.graphs[x.graph()].Nodes(), nil
}

func (g decodeGraphs) free() {
	for _, x := range g {
		x.Free()
	}
}

// samplerWorkspace is the most workspace that a pass of a Runner needs: of any number of rows, since kernels change with it, and of pieces cut
// from few sequences and from many.
func samplerWorkspace(dev *kernels.Device, c *Config, dt kernels.DType, o RunnerOptions) (most int64, err error) {
	stride := int64(o.stride())
	try := func(x *passIndex) { most = max(most, passWorkspace(dev, c, dt, x, o.PageSize)) }
	for rows := 1; rows <= o.MaxRows; rows++ {
		if rows > 1024 && rows%1024 != 0 && rows != o.MaxRows {
			continue
		}
		n := int64(rows)
		try(&passIndex{rows: n, decode: n, sampled: min(n, int64(o.MaxSeqs)), maxPages: stride})
	}
	for roots := 1; ; roots = min(2*roots, o.MaxSeqs) {
		for _, even := range []bool{true, false} {
			segs := make([]Segment, min(roots, o.MaxRows))
			for i, left := 0, o.MaxRows; i < len(segs); i++ {
				n := left / (len(segs) - i)
				if !even && i > 0 {
					n = min(n, 2)
				} else if !even {
					n = max(left-2*(len(segs)-1), n)
				}
				segs[i] = Segment{Len: int32(n), Parent: -1}
				left -= n
			}
			f, err := kernels.NewForest(segs, nil)
			if err != nil {
				return 0, err
			}
			try(&passIndex{rows: int64(f.NumRows), sampled: int64(len(segs)), maxPages: stride, forest: argsOf(f)})
		}
		if roots >= o.MaxSeqs {
			return most, nil
		}
	}
}
