package model

import (
	"math"
	"slices"
)

// noRank marks a pair that does not merge.
const noRank = int32(math.MaxInt32)

// smallPiece is the longest piece, in bytes, that is merged by scanning; longer ones use a heap.
const smallPiece = 48

// bpe appends the ids of one piece: the adjacent pair with the lowest rank is merged first, the leftmost on ties (model.md 5.2, step 5).
func (t *Tokenizer) bpe(ids []int32, s string) []int32 {
	if t.whole {
		if id, ok := t.ids[s]; ok {
			return append(ids, id)
		}
	}
	if len(s) > smallPiece {
		return t.bpeLong(ids, s)
	}
	// rank[i] and made[i] are the merge of the pair that starts at i.
	var symBuf, rankBuf, madeBuf [smallPiece]int32
	n := len(s)
	for i := range n {
		symBuf[i] = t.byteID[s[i]]
	}
	sym, rank, made := symBuf[:n], rankBuf[:n], madeBuf[:n]
	for i := range n - 1 {
		rank[i], made[i] = t.merges.get(sym[i], sym[i+1])
	}
	rank[n-1] = noRank
	for {
		best, at := noRank, -1
		for i, r := range rank {
			if r < best {
				best, at = r, i
			}
		}
		if at < 0 {
			return append(ids, sym...)
		}
		sym[at] = made[at]
		sym, rank, made = slices.Delete(sym, at+1, at+2), slices.Delete(rank, at+1, at+2), slices.Delete(made, at+1, at+2)
		rank[at] = noRank
		if at+1 < len(sym) {
			rank[at], made[at] = t.merges.get(sym[at], sym[at+1])
		}
		if at > 0 {
			rank[at-1], made[at-1] = t.merges.get(sym[at-1], sym[at])
		}
	}
}

// bpeLong is bpe in O(n log n): symbols in a linked list, candidate merges in a heap ordered by rank, then position. rank[i] is the
// current rank of the pair that starts at i, so a heap entry with another rank is stale.
func (t *Tokenizer) bpeLong(ids []int32, s string) []int32 {
	n := int32(len(s))
	sym, next, prev, rank := make([]int32, n), make([]int32, n), make([]int32, n), make([]int32, n)
	for i := range n {
		sym[i] = t.byteID[s[i]]
		next[i], prev[i], rank[i] = i+1, i-1, noRank
	}
	h := make(mergeHeap, 0, n)
	rankAt := func(i int32) bool {
		rank[i] = noRank
		if j := next[i]; j < n {
			rank[i], _ = t.merges.get(sym[i], sym[j])
		}
		return rank[i] != noRank
	}
	entry := func(i int32) uint64 { return uint64(uint32(rank[i]))<<32 | uint64(uint32(i)) }
	for i := range n {
		if rankAt(i) {
			h = append(h, entry(i))
		}
	}
	slices.Sort(h) // a sorted array is a heap
	for len(h) > 0 {
		top := h.pop()
		i := int32(uint32(top))
		if rank[i] != int32(top>>32) {
			continue
		}
		j := next[i]
		_, sym[i] = t.merges.get(sym[i], sym[j])
		rank[j] = noRank
		next[i] = next[j]
		if next[i] < n {
			prev[next[i]] = i
		}
		if rankAt(i) {
			h.push(entry(i))
		}
		if p := prev[i]; p >= 0 && rankAt(p) {
			h.push(entry(p))
		}
	}
	for i := int32(0); i < n; i = next[i] {
		ids = append(ids, sym[i])
	}
	return ids
}

// mergeHeap is a binary min-heap of rank << 32 | position.
type mergeHeap []uint64

func (h *mergeHeap) push(v uint64) {
	*h = append(*h, v)
	a := *h
	i := len(a) - 1
	for i > 0 && a[(i-1)/2] > v {
		a[i] = a[(i-1)/2]
		i = (i - 1) / 2
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
		c := 2*i + 1
		if c >= len(a) {
			break
		}
		if c+1 < len(a) && a[c+1] < a[c] {
			c++
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
