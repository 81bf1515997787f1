package model

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"harness-s/kernels"
)

// align of arena offsets in bytes.
const align = 64

func alignUp(n int64) int64 { return (n + align - 1) / align * align }

// coalesce removes a copy whose source is not read afterwards: the destination takes over the source's buffer (residual additions in place).
func (p *Program) coalesce() {
	last := make([]int, len(p.buffers))
	p.eachTouch(func(i int, v valueID) {
		if b := p.values[v].buf; b >= 0 {
			last[b] = i
		}
	})
	keep := p.records[:0]
	forward := 0
	for i, r := range p.records {
		if r.op == kernels.OpCopy {
			src, dst := p.values[r.reads[0]].buf, p.values[r.writes[0]].buf
			if src >= 0 && dst >= 0 && last[src] == i {
				for j := range p.values {
					if p.values[j].buf == dst {
						p.values[j].buf = src
					}
				}
				last[src] = last[dst]
				continue
			}
		}
		if i < p.numForward {
			forward++
		}
		keep = append(keep, r)
	}
	clear(p.records[len(keep):])
	p.records, p.numForward = keep, forward
}

// eachTouch visits every read and write of a value in record order. Outputs of the forward pass are touched at its end.
func (p *Program) eachTouch(f func(i int, v valueID)) {
	for i, r := range p.records {
		for _, v := range r.reads {
			f(i, v)
		}
		for _, v := range r.writes {
			f(i, v)
		}
		if i == p.numForward-1 {
			f(i, p.logp)
			f(i, p.ent)
			f(i, p.finalNorm)
		}
	}
}

func (p *Program) liveness() {
	for i := range p.buffers {
		p.buffers[i].first, p.buffers[i].last = -1, -1
	}
	p.eachTouch(func(i int, v valueID) {
		if b := p.values[v].buf; b >= 0 {
			if p.buffers[b].first < 0 {
				p.buffers[b].first = i
			}
			p.buffers[b].last = i
		}
	})
}

// bytes is the aligned size of the buffer in a plan of type dt.
func (b *buffer) bytes(sh Shapes, dt kernels.DType) int64 {
	return alignUp(b.spec.elems(sh) * int64(b.spec.storage(dt).Size()))
}

// Place assigns arena offsets for batches of up to sh.
func (p *Program) Place(sh Shapes) {
	p.arenaBytes = assign(p.buffers, sh, p.opt.DType)
	p.liveBytes = 0
	for i := range p.records {
		var live int64
		for b := range p.buffers {
			if o := &p.buffers[b]; o.first >= 0 && o.first <= i && i <= o.last {
				live += o.bytes(sh, p.opt.DType)
			}
		}
		p.liveBytes = max(p.liveBytes, live)
	}
	p.bucket = sh
}

// ArenaBytes is the arena that the program needs for batches of up to sh when floats are stored as dt; with BF16 the values that abi.h names
// stay float32. The program stays placed as it is.
func (p *Program) ArenaBytes(sh Shapes, dt kernels.DType) int64 {
	return assign(slices.Clone(p.buffers), sh, dt)
}

// assign gives every live buffer its offset and returns the bytes of all: buffers from large to small, each into the smallest gap between
// the buffers that are live at the same time.
func assign(buffers []buffer, sh Shapes, dt kernels.DType) (arena int64) {
	sizes := make([]int64, len(buffers))
	var order []int
	for b := range buffers {
		if buffers[b].first >= 0 {
			sizes[b] = buffers[b].bytes(sh, dt)
			order = append(order, b)
		}
	}
	slices.SortStableFunc(order, func(a, b int) int {
		return cmp.Or(cmp.Compare(sizes[b], sizes[a]), cmp.Compare(buffers[a].first, buffers[b].first))
	})
	var placed []int // by offset
	for _, b := range order {
		buf, need := &buffers[b], sizes[b]
		at, gap, best, bestGap := int64(0), int64(0), int64(-1), int64(0)
		for _, q := range placed {
			o := &buffers[q]
			if o.last < buf.first || buf.last < o.first {
				continue
			}
			if gap = o.offset - at; gap >= need && (best < 0 || gap < bestGap) {
				best, bestGap = at, gap
			}
			at = max(at, o.offset+sizes[q])
		}
		if best < 0 {
			best = at
		}
		buf.offset = best
		arena = max(arena, best+need)
		i, _ := slices.BinarySearchFunc(placed, best, func(q int, off int64) int { return cmp.Compare(buffers[q].offset, off) })
		placed = slices.Insert(placed, i, b)
	}
	return arena
}

// PeakBytes is the activation arena of the placed bucket.
func (p *Program) PeakBytes() int64 { return p.arenaBytes }

// FLOPs of one pass over a batch of the given shapes, multiply and add counted apart. Attention counts every row pair of one long segment.
func (p *Program) FLOPs(sh Shapes) (forward, backward float64) {
	for i, r := range p.records {
		if r.flops == nil {
			continue
		}
		if i < p.numForward {
			forward += r.flops(sh)
		} else {
			backward += r.flops(sh)
		}
	}
	return forward, backward
}

// String prints the program as stable text: a header, then a line per record with its operands. %n@off is an arena buffer at a byte offset,
// += marks an output that is added to, * a recomputed record.
func (p *Program) String() string {
	var sb strings.Builder
	f, b := p.FLOPs(p.bucket)
	fmt.Fprintf(&sb, "program %s dtype=%v recompute=%t records=%d\n", p.gr.Mode, p.opt.DType, p.opt.Recompute, len(p.records))
	fmt.Fprintf(&sb, "bucket rows=%d targets=%d states=%d arena=%d live=%d flops=%.0f+%.0f\n",
		p.bucket.Rows, p.bucket.Targets, p.bucket.States, p.arenaBytes, p.liveBytes, f, b)
	for i, r := range p.records {
		if i == 0 {
			sb.WriteString("forward\n")
		}
		if i == p.numForward {
			sb.WriteString("backward\n")
		}
		mark := ' '
		if r.again {
			mark = '*'
		}
		name := "fill"
		if r.op != opFill {
			name = r.op.String()
		}
		fmt.Fprintf(&sb, "%4d%c %-14s %-42s", i, mark, name, r.label)
		for _, v := range r.reads {
			sb.WriteString(" " + p.operand(v))
		}
		sb.WriteString(" ->")
		for _, v := range r.writes {
			sep := " "
			if slices.Contains(r.adds, v) {
				sep = " +="
			}
			sb.WriteString(sep + p.operand(v))
		}
		sb.WriteByte('\n')
	}
	return sb.String()
}

func (p *Program) operand(v valueID) string {
	x := p.values[v]
	switch {
	case x.region != inArena:
		return x.name
	default:
		return fmt.Sprintf("%s%%%d@%d", x.name, x.buf, p.buffers[x.buf].offset)
	}
}
