package model

import (
	"fmt"

	"harness-s/kernels"
)

// indexBuffer is the device memory of a Runner's integers, at addresses that never change: a graph of launches names them.
//
//	logp, entropy [S]     of the rows that a step samples; real
//	token [S]             theirs; what a later step feeds with Work.FromLast
//	table [S+1, stride]   KV pages of every slot, the spare one last; stride is the pages of the longest sequence
//	block                 arrays of the pass that runs (passIndex)
//
// S is RunnerOptions.MaxSeqs.
type indexBuffer struct {
	buf                             *kernels.Buffer
	logp, entropy, token, table, at kernels.Ptr
	stride                          int64
}

// passIndex are the sizes of one pass and the device addresses of its arrays. Decode rows come first; a sequence is named by its slot.
type passIndex struct {
	rows, decode, sampled int64
	all                   bool  // every row samples, each in its place
	last                  bool  // some decode rows read their token on the device
	base                  int64 // rows that earlier passes of the step sample
	truncated             bool  // a row that samples has top-k, top-p or min-p
	maxPages              int64 // stride of the table

	samples             kernels.Ptr // [sampled] kernels.SampleRow
	fed, from           kernels.Ptr // [decode]: token, and where it lies, counted from indexBuffer.token
	pos, seq            kernels.Ptr // [rows]
	ids                 kernels.Ptr // [rows]; of decode rows written on the device when last is set
	sel, selSeq, selPos kernels.Ptr // [sampled]: rows that sample; not when all is set
	forest              kernels.ForestArgs
}

// place lays the arrays out from at on and returns their end.
func (x *passIndex) place(at kernels.Ptr) kernels.Ptr {
	take := func(p *kernels.Ptr, n, size int64) {
		*p = at
		at += kernels.Ptr(n * size)
	}
	take(&x.samples, x.sampled, kernels.SampleRowBytes)
	for _, p := range []*kernels.Ptr{&x.fed, &x.from} {
		take(p, x.decode, 4)
	}
	for _, p := range []*kernels.Ptr{&x.pos, &x.seq, &x.ids} {
		take(p, x.rows, 4)
	}
	if !x.all {
		for _, p := range []*kernels.Ptr{&x.sel, &x.selSeq, &x.selPos} {
			take(p, x.sampled, 4)
		}
	}
	return kernels.Ptr(alignUp(int64(at)))
}

// resultBytes are those of the results of a step.
func (o *RunnerOptions) resultBytes(dt kernels.DType) int64 {
	return alignUp(int64(o.MaxSeqs) * (4 + 2*int64(dt.Wide().Size())))
}

func (o *RunnerOptions) tableBytes() int64 {
	return alignUp(4 * int64(o.MaxSeqs+1) * int64(o.stride()))
}

// stride is the number of pages of the longest sequence.
func (o *RunnerOptions) stride() int {
	return min((o.MaxContext+o.PageSize-1)/o.PageSize, o.numPages())
}

// blockBytes are the most that a pass's arrays take.
func (o *RunnerOptions) blockBytes() (int64, error) {
	x := passIndex{rows: int64(o.MaxRows), decode: int64(o.MaxSeqs), sampled: int64(o.MaxSeqs)}
	f, err := planForest(int64(o.MaxRows), o.MaxSeqs)
	if err != nil {
		return 0, err
	}
	return int64(x.place(0)) + alignUp(f.DeviceBytes()), nil
}

// indexBytes are those of an indexBuffer.
func (o *RunnerOptions) indexBytes(dt kernels.DType) (int64, error) {
	block, err := o.blockBytes()
	return o.resultBytes(dt) + o.tableBytes() + block, err
}

// allocateIndex makes the index buffer and the ring that fills it.
func (r *Runner) allocateIndex() error {
	o := &r.opt
	total, err := o.indexBytes(r.dt)
	if err != nil {
		return err
	}
	block, err := o.blockBytes()
	if err != nil {
		return err
	}
	n := &r.ix
	if n.buf, err = r.m.Dev.Alloc(total, "sampler indices"); err != nil {
		return fmt.Errorf("allocate sampler indices: %w", err)
	}
	s, wide := int64(o.MaxSeqs), int64(r.dt.Wide().Size())
	n.logp, n.entropy, n.token = n.buf.At(0), n.buf.At(s*wide), n.buf.At(2*s*wide)
	n.table, n.at = n.buf.At(o.resultBytes(r.dt)), n.buf.At(o.resultBytes(r.dt)+o.tableBytes())
	n.stride = int64(o.stride())
	// Between two steps go a pass, the slots that sequences begin in, and pages: a few each as they grow, all of those that begin.
	tables := max(4*n.stride, min(o.tableBytes(), 1<<20))
	if r.ring, err = newRing(r.m.Dev, r.st, block+tables+s*8*align, o.resultBytes(r.dt)); err != nil {
		return fmt.Errorf("allocate sampler ring: %w", err)
	}
	r.cache.ring = r.ring
	spare := make([]int32, n.stride)
	for i := range spare {
		spare[i] = r.cache.sparePage()
	}
	send(r.ring, r.pagesAt(r.cache.spareSlot(), 0), spare)
	return nil
}

// pagesAt is the address of a slot's pages from the given one on.
func (r *Runner) pagesAt(slot int32, page int) kernels.Ptr {
	return r.ix.table + kernels.Ptr(4*(int64(slot)*r.ix.stride+int64(page)))
}

// sendPages brings the table up to date for the sequences of a step.
func (r *Runner) sendPages(work []Work) {
	for i := range work {
		s := &r.cache.seqs[work[i].Seq]
		if s.tabled < len(s.pages) {
			send(r.ring, r.pagesAt(int32(work[i].Seq), s.tabled), s.pages[s.tabled:])
			s.tabled = len(s.pages)
		}
	}
}

// index lays out and sends the arrays of a pass, padded with rows of the spare slot to `pad` rows.
func (r *Runner) index(work []Work, batch []piece, base, pad int) (*passIndex, error) {
	x := &passIndex{base: int64(base), all: true, maxPages: r.ix.stride}
	var segs []kernels.Segment
	var slots []int32
	for _, p := range batch {
		x.rows += int64(len(p.ids))
		x.all = x.all && p.decode && p.sample
		x.last = x.last || work[p.work].FromLast
		if p.decode {
			x.decode++
		} else {
			segs = append(segs, kernels.Segment{Len: int32(len(p.ids)), Parent: -1, Pos: int32(p.pos)})
			slots = append(slots, int32(p.seq))
		}
		if p.sample {
			x.sampled++
			x.truncated = x.truncated || work[p.work].Sampling.truncates()
		}
	}
	if pad > 0 {
		x.rows, x.decode, x.sampled, x.last = int64(pad), int64(pad), int64(pad), true
	}
	end := x.place(r.ix.at)
	var f *kernels.Forest
	if len(segs) > 0 {
		var err error
		if f, err = kernels.NewForest(segs, slots); err != nil {
			return nil, fmt.Errorf("sampler pass: %w", err)
		}
	}
	bytes := int64(end - r.ix.at)
	if f != nil {
		bytes += f.DeviceBytes()
	}
	at := r.ring.take(bytes)
	r.fill(x, work, batch, at)
	if f != nil {
		x.forest = f.Pack(kernels.HostSlice[int32](r.ring.buf, at+int64(end-r.ix.at), int(f.DeviceBytes()/4)), end)
	}
	r.st.UploadAsync(r.ix.at, r.ring.buf, at, bytes)
	return x, nil
}

// fill writes the arrays of a pass into the ring's bytes from at on.
func (r *Runner) fill(x *passIndex, work []Work, batch []piece, at int64) {
	host := func(p kernels.Ptr, n int64) []int32 {
		return kernels.HostSlice[int32](r.ring.buf, at+int64(p-r.ix.at), int(n))
	}
	rows := kernels.HostSlice[kernels.SampleRow](r.ring.buf, at, int(x.sampled))
	fed, from, ids, seq, pos := host(x.fed, x.decode), host(x.from, x.decode), host(x.ids, x.rows), host(x.seq, x.rows), host(x.pos, x.rows)
	var sel, selSeq, selPos []int32
	if !x.all {
		sel, selSeq, selPos = host(x.sel, x.sampled), host(x.selSeq, x.sampled), host(x.selPos, x.sampled)
	}
	own := int32((x.fed - r.ix.token) / 4) // place of fed counted from token
	row, picked := 0, 0
	for _, p := range batch {
		w := &work[p.work]
		if p.decode {
			fed[row], from[row] = p.ids[0], own+int32(row)
			if w.FromLast {
				from[row] = r.cache.seqs[p.seq].drawn
			}
		}
		for j, id := range p.ids {
			ids[row], seq[row], pos[row] = id, int32(p.seq), int32(p.pos+j)
			row++
		}
		if p.sample {
			rows[picked] = w.sampleRow()
			if !x.all {
				sel[picked], selSeq[picked], selPos[picked] = int32(row-1), int32(p.seq), pos[row-1]
			}
			picked++
		}
	}
	for ; row < int(x.rows); row++ { // spare rows: token 0 at position 0, the likeliest next one
		fed[row], from[row], ids[row], seq[row], pos[row], rows[row] = 0, own+int32(row), 0, r.cache.spareSlot(), 0, kernels.SampleRow{TopP: 1}
	}
}

// sampleRow is how the token behind w is drawn.
func (w *Work) sampleRow() kernels.SampleRow {
	s := w.Sampling
	if s.TopP == 0 {
		s.TopP = 1
	}
	return kernels.SampleRow{KeyLo: w.Key.Lo, KeyHi: w.Key.Hi, Ctr: w.Ctr, Temperature: s.Temperature, TopP: s.TopP, MinP: s.MinP, TopK: int32(s.TopK)}
}
