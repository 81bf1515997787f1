package model

import (
	"errors"
	"fmt"

	"harness-s/kernels"
)

// ErrNoSlot says that every sequence slot of a Runner is in use.
var ErrNoSlot = errors.New("no free sequence slot")

// ErrNoPages says that the KV cache has no free page for the tokens of a step; nothing of that step was done.
var ErrNoPages = errors.New("no free KV page")

// SeqID names a live sequence of a Runner.
type SeqID int32

// sequence is the state of one live sequence: its KV pages in order and the number of tokens they hold. The recurrent and conv
// state live in the slot with the number of the sequence.
type sequence struct {
	live   bool
	pages  []int32
	len    int
	tabled int // pages that the device's table has

	drawn   int32 // place among the tokens of step drawnIn
	drawnIn int   // -1 = none
	seen    int   // last check of works that named it
}

// pageCache owns the memory that sampling needs per sequence (model.md 4): paged K/V of the full-attention layers, shared between
// forks by reference count, and one recurrent and one conv state per sequence and linear layer, which cannot be shared.
//
//	kv[layer]   K and V: [pages, pageSize, nkv*hd]
//	rec[layer]  [slots] of kernels.GDNSlotBytes
//	conv[layer] [slots, 3, C], pre-activation conv inputs, oldest first
//
// The last slot and the last page belong to no sequence: rows that only fill up a batch use them.
//
// Only the Runner's goroutine touches it.
type pageCache struct {
	cfg      *Config
	dt       kernels.DType
	st       *kernels.Stream
	pageSize int
	seqs     []sequence
	freeSeq  []SeqID
	freePage []int32
	refs     []int32
	layers   []layerCache
	buf      *kernels.Buffer
	idx      *kernels.Buffer // 2*slots int32 of scratch for slot copies
	ring     *ring           // of the Runner
}

type layerCache struct {
	k, v      kernels.Ptr // full attention
	rec, conv kernels.Ptr // linear
}

// newPageCache takes the caches from mem and what must outlive a phase from dev.
func newPageCache(cfg *Config, dev *kernels.Device, mem kernels.Allocator, st *kernels.Stream, dt kernels.DType, numSeqs, numPages, pageSize int) (*pageCache, error) {
	c := &pageCache{cfg: cfg, dt: dt, st: st, pageSize: pageSize, seqs: make([]sequence, numSeqs), refs: make([]int32, numPages)}
	for i := numSeqs - 1; i >= 0; i-- {
		c.freeSeq = append(c.freeSeq, SeqID(i))
	}
	for i := numPages - 1; i >= 0; i-- {
		c.freePage = append(c.freePage, int32(i))
	}
	kv, rec, conv := cacheBytes(cfg, dt, numSeqs, numPages, pageSize)
	total := int64(cfg.NumFull())*2*kv + int64(cfg.NumLinear())*(rec+conv)
	var err error
	if c.buf, err = mem.Alloc(total, "kv cache and recurrent state"); err != nil {
		return nil, fmt.Errorf("allocate cache of %d sequences and %d pages: %w", numSeqs, numPages, err)
	}
	if c.idx, err = dev.Alloc(int64(numSeqs)*8, "slot copy indices"); err != nil {
		c.buf.Free()
		return nil, fmt.Errorf("allocate slot copy indices: %w", err)
	}
	var off int64
	for _, t := range cfg.LayerTypes {
		var l layerCache
		if t == FullAttention {
			l.k, l.v = c.buf.At(off), c.buf.At(off+kv)
			off += 2 * kv
		} else {
			l.rec, l.conv = c.buf.At(off), c.buf.At(off+rec)
			off += rec + conv
		}
		c.layers = append(c.layers, l)
	}
	return c, nil
}

func (c *pageCache) free() {
	c.idx.Free()
	c.buf.Free()
}

func (c *pageCache) pageBytes() int64 {
	return pageBytes(c.cfg, c.dt, c.pageSize)
}

func (c *pageCache) recBytes() int64 {
	return recBytes(c.cfg, c.dt)
}

func (c *pageCache) convBytes() int64 {
	return convBytes(c.cfg, c.dt)
}

// pageBytes are the keys, or the values, of one page of one layer.
func pageBytes(c *Config, dt kernels.DType, pageSize int) int64 {
	return int64(pageSize*c.NumKVHeads*c.HeadDim) * int64(dt.Size())
}

// recBytes is one recurrent state of one layer, with its replay ring if it has one; the state is never stored below float32.
func recBytes(c *Config, dt kernels.DType) int64 {
	return kernels.GDNSlotBytes(dt, c.LinValueHeads, c.LinKeyDim, c.LinValueDim)
}

// convBytes is one convolution window of one layer.
func convBytes(c *Config, dt kernels.DType) int64 {
	return int64((c.ConvKernel-1)*c.ConvChannels()) * int64(dt.Size())
}

// cacheBytes are the sizes of one layer's caches, with the spare page and slot: keys or values of a full layer, recurrent and convolution states
// of a linear one.
func cacheBytes(c *Config, dt kernels.DType, numSeqs, numPages, pageSize int) (kv, rec, conv int64) {
	slots, pages := int64(numSeqs+1), int64(numPages+1)
	return alignUp(pages * pageBytes(c, dt, pageSize)), alignUp(slots * recBytes(c, dt)), alignUp(slots * convBytes(c, dt))
}

// spareSlot and sparePage belong to no sequence.
func (c *pageCache) spareSlot() int32 { return int32(len(c.seqs)) }
func (c *pageCache) sparePage() int32 { return int32(len(c.refs)) }

func (c *pageCache) pagesFor(tokens int) int { return (tokens + c.pageSize - 1) / c.pageSize }

func (c *pageCache) seq(id SeqID) (*sequence, error) {
	if id < 0 || int(id) >= len(c.seqs) || !c.seqs[id].live {
		return nil, fmt.Errorf("sequence %d is not live", id)
	}
	return &c.seqs[id], nil
}

// acquire starts an empty sequence: zero state, no pages.
func (c *pageCache) acquire() (SeqID, error) {
	id, err := c.takeSlot()
	if err != nil {
		return 0, err
	}
	c.copyStates([]int32{-1}, []int32{int32(id)})
	return id, nil
}

func (c *pageCache) takeSlot() (SeqID, error) {
	n := len(c.freeSeq)
	if n == 0 {
		return 0, fmt.Errorf("%w: all %d are in use", ErrNoSlot, len(c.seqs))
	}
	id := c.freeSeq[n-1]
	c.freeSeq = c.freeSeq[:n-1]
	c.seqs[id] = sequence{live: true, pages: c.seqs[id].pages[:0], drawnIn: -1}
	return id, nil
}

// fork makes n sequences that continue src: full pages are shared, the last partial page and the states are copied.
func (c *pageCache) fork(src SeqID, n int) ([]SeqID, error) {
	s, err := c.seq(src)
	if err != nil {
		return nil, err
	}
	partial := s.len%c.pageSize != 0
	if len(c.freeSeq) < n {
		return nil, fmt.Errorf("%w: fork of %d needs as many slots, %d are free", ErrNoSlot, n, len(c.freeSeq))
	}
	if partial && len(c.freePage) < n {
		return nil, fmt.Errorf("%w: fork of %d copies a partial page each, %d pages are free", ErrNoPages, n, len(c.freePage))
	}
	ids := make([]SeqID, n)
	from, to := make([]int32, n), make([]int32, n)
	pageFrom, pageTo := make([]int32, 0, n), make([]int32, 0, n)
	for i := range ids {
		id, err := c.takeSlot()
		if err != nil {
			return nil, err
		}
		d := &c.seqs[id]
		s = &c.seqs[src]
		d.len = s.len
		d.pages = append(d.pages, s.pages...)
		for _, p := range d.pages {
			c.refs[p]++
		}
		if partial {
			last := len(d.pages) - 1
			c.refs[d.pages[last]]--
			pageFrom = append(pageFrom, d.pages[last])
			d.pages[last] = c.takePage()
			pageTo = append(pageTo, d.pages[last])
		}
		ids[i], from[i], to[i] = id, int32(src), int32(id)
	}
	c.copyStates(from, to)
	if partial {
		c.copyPages(pageFrom, pageTo)
	}
	return ids, nil
}

func (c *pageCache) takePage() int32 {
	n := len(c.freePage)
	p := c.freePage[n-1]
	c.freePage = c.freePage[:n-1]
	c.refs[p] = 1
	return p
}

func (c *pageCache) release(id SeqID) error {
	s, err := c.seq(id)
	if err != nil {
		return err
	}
	for i := len(s.pages) - 1; i >= 0; i-- {
		p := s.pages[i]
		if c.refs[p]--; c.refs[p] == 0 {
			c.freePage = append(c.freePage, p)
		}
	}
	s.live, s.pages, s.len = false, s.pages[:0], 0
	c.freeSeq = append(c.freeSeq, id)
	return nil
}

// grow gives every sequence pages for its extra tokens, or none of them any.
func (c *pageCache) grow(ids []SeqID, extra []int) error {
	need := 0
	for i, id := range ids {
		s, err := c.seq(id)
		if err != nil {
			return err
		}
		need += c.pagesFor(s.len+extra[i]) - len(s.pages)
	}
	if need > len(c.freePage) {
		return fmt.Errorf("%w: %d needed, %d of %d free", ErrNoPages, need, len(c.freePage), len(c.refs))
	}
	for i, id := range ids {
		s := &c.seqs[id]
		for len(s.pages) < c.pagesFor(s.len+extra[i]) {
			s.pages = append(s.pages, c.takePage())
		}
	}
	return nil
}

func (c *pageCache) copyStates(from, to []int32) {
	if len(c.seqs) == 0 {
		return
	}
	src, dst := c.uploadPairs(from, to)
	for i, t := range c.cfg.LayerTypes {
		if t == LinearAttention {
			c.copySlots(len(from), c.recBytes(), src, dst, c.layers[i].rec)
			c.copySlots(len(from), c.convBytes(), src, dst, c.layers[i].conv)
		}
	}
}

func (c *pageCache) copyPages(from, to []int32) {
	src, dst := c.uploadPairs(from, to)
	for i, t := range c.cfg.LayerTypes {
		if t == FullAttention {
			c.copySlots(len(from), c.pageBytes(), src, dst, c.layers[i].k)
			c.copySlots(len(from), c.pageBytes(), src, dst, c.layers[i].v)
		}
	}
}

func (c *pageCache) uploadPairs(from, to []int32) (src, dst kernels.Ptr) {
	src, dst = c.idx.Ptr(), c.idx.At(int64(len(c.seqs))*4)
	send(c.ring, src, from)
	send(c.ring, dst, to)
	return src, dst
}

func (c *pageCache) copySlots(n int, bytes int64, src, dst, base kernels.Ptr) {
	c.st.SlotCopy(&kernels.SlotCopyArgs{N: int64(n), Bytes: bytes, Src: src, Dst: dst, Base: base})
}
