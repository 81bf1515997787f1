package model

import (
	"math"
	"slices"
	"sync"
)

// merge is the rank of a pair in the upper half and the id of what it becomes in the lower one, so that merges order by rank.
type merge uint64

// noMerge marks a pair that does not merge.
const noMerge = merge(math.MaxUint64)

func newMerge(rank, id int32) merge { return merge(uint32(rank))<<32 | merge(uint32(id)) }

func (m merge) rank() uint32 { return uint32(m >> 32) }
func (m merge) id() int32    { return int32(uint32(m)) }

// smallPiece is the longest piece, in bytes, that is merged by scanning; longer ones use a heap.
const smallPiece = 48

// merger holds the working memory of merging one piece.
type merger struct {
	sym   [smallPiece]int32
	pair  [smallPiece]merge
	links []link
	first []uint64
	queue mergeHeap
}

// link is a symbol of a long piece in a linked list of positions; pair is the merge of it and the next one.
type link struct {
	sym, next, prev int32
	pair            merge
}

// maxKept is the longest piece, in bytes, whose working memory is kept for the next one.
const maxKept = 1 << 16

var mergers = sync.Pool{New: func() any { return new(merger) }}

func (m *merger) release() {
	if cap(m.links) > maxKept {
		m.links, m.first, m.queue = nil, nil, nil
	}
	mergers.Put(m)
}

// bpe appends the ids of one piece: the adjacent pair with the lowest rank is merged first, the leftmost on ties (model.md 5.2, step 5).
func (t *Tokenizer) bpe(m *merger, ids []int32, s string) []int32 {
	if t.whole {
		if id, ok := t.ids[s]; ok {
			return append(ids, id)
		}
	}
	if len(s) > smallPiece {
		return t.bpeLong(m, ids, s)
	}
	// pair[i] is the merge of the pair that starts at i, its rank in the upper half.
	n := len(s)
	sym, pair := m.sym[:n], m.pair[:n]
	for i := range n - 1 {
		sym[i] = t.byteID[s[i]]
		pair[i] = t.merges.bytes(s[i], s[i+1])
	}
	sym[n-1], pair[n-1] = t.byteID[s[n-1]], noMerge
	for {
		best, at := noMerge, -1
		for i, p := range pair {
			if p < best {
				best, at = p, i
			}
		}
		if at < 0 {
			return append(ids, sym...)
		}
		sym[at] = best.id()
		copy(sym[at+1:], sym[at+2:])
		copy(pair[at+1:], pair[at+2:])
		n--
		sym, pair = sym[:n], pair[:n]
		pair[at] = noMerge
		if at+1 < n {
			pair[at] = t.merges.get(sym[at], sym[at+1])
		}
		if at > 0 {
			pair[at-1] = t.merges.get(sym[at-1], sym[at])
		}
	}
}

// bpeLong is bpe in O(n log n): symbols in a linked list, candidate merges ordered by rank, then position: those of the start in a sorted
// list, those that merging makes in a heap. A candidate whose rank is not the current one at its position is stale.
func (t *Tokenizer) bpeLong(m *merger, ids []int32, s string) []int32 {
	n := int32(len(s))
	m.links = slices.Grow(m.links[:0], len(s))[:n]
	links, first, queue := m.links, m.first[:0], m.queue[:0]
	for i := range n {
		l := link{t.byteID[s[i]], i + 1, i - 1, noMerge}
		if i+1 < n {
			l.pair = t.merges.bytes(s[i], s[i+1])
		}
		if links[i] = l; l.pair != noMerge {
			first = append(first, candidate(l.pair, i))
		}
	}
	slices.Sort(first)
	m.first = first
	for len(first) > 0 || len(queue) > 0 {
		var top uint64
		if len(queue) == 0 || len(first) > 0 && first[0] < queue[0] {
			top, first = first[0], first[1:]
		} else {
			top = queue.pop()
		}
		i := int32(uint32(top))
		at := &links[i]
		if at.pair.rank() != uint32(top>>32) {
			continue
		}
		gone := &links[at.next]
		at.sym, at.next, at.pair, gone.pair = at.pair.id(), gone.next, noMerge, noMerge
		if at.next < n {
			next := &links[at.next]
			next.prev = i
			if at.pair = t.merges.get(at.sym, next.sym); at.pair != noMerge {
				queue.push(candidate(at.pair, i))
			}
		}
		if at.prev >= 0 {
			prev := &links[at.prev]
			if prev.pair = t.merges.get(prev.sym, at.sym); prev.pair != noMerge {
				queue.push(candidate(prev.pair, at.prev))
			}
		}
	}
	m.queue = queue
	for i := int32(0); i < n; i = links[i].next {
		ids = append(ids, links[i].sym)
	}
	return ids
}

// candidate orders by rank, then by position.
func candidate(m merge, at int32) uint64 { return uint64(m.rank())<<32 | uint64(uint32(at)) }

// mergeHeap is a min-heap of candidates in which every node has four children.
type mergeHeap []uint64

func (h *mergeHeap) push(v uint64) {
	*h = append(*h, v)
	a := *h
	i := len(a) - 1
	for i > 0 && a[(i-1)/4] > v {
		a[i] = a[(i-1)/4]
		i = (i - 1) / 4
	}
	a[i] = v
}

func (h *mergeHeap) pop() uint64 {
	a := *h
	top, last := a[0], a[len(a)-1]
	a = a[:len(a)-1]
	*h = a
	if len(a) == 0 {
		return top
	}
	i := 0
	for {
		c := 4*i + 1
		if c >= len(a) {
			break
		}
		for k, end := c+1, min(c+4, len(a)); k < end; k++ {
			if a[k] < a[c] {
				c = k
			}
		}
		if a[c] >= last {
			break
		}
		a[i] = a[c]
		i = c
	}
	a[i] = last
	return top
}
