package model

import (
	"math"
	"slices"
)

// bpe encodes pieces of text (model.md 5.2, step 5): of all adjacent pairs that merge, the one of the lowest rank is merged, the leftmost
// on ties, until none is left.
//
// It does not merge, it matches. Which merges happen inside a stretch of text that ends up as whole tokens depends on that stretch alone,
// so tokens are the result for a text if and only if they join to it and merging any two neighbours alone gives the same two. For each
// prefix of a text there is one such sequence. encode looks for it from the left, the longest token first, and takes tokens back when
// none goes on; a position that failed is never tried again. The time is linear in the length of the text.
type bpe struct {
	trie   trie
	bytes  [][]byte   // by id, nil for an id without token
	tokens []bpeToken // by id
	sizes  []int32    // by id, in bytes
	byteID [256]int32
	merges mergeTable
	apart  pairCache
	// ordered: every token is made by one merge at most, and by one of higher rank than those that make its parts.
	ordered bool
}

// bpeToken is how a token is made and matched.
type bpeToken struct {
	rank        int32 // of the merge that makes it, -1 for none
	left, right int32 // what merges into it
	shorter     int32 // the longest token that it starts with and is not, -1 for none
}

// encode appends the ids of one piece, which is not empty.
func (b *bpe) encode(ids []int32, s string) []int32 {
	id, size := b.trie.longest(s)
	if size == len(s) {
		return append(ids, id)
	}
	start, at := len(ids), 0
	var dead places
	for {
		for id >= 0 {
			end := at + size
			if !dead.has(end) && (len(ids) == start || b.stayApart(ids[len(ids)-1], id)) {
				if ids, at = append(ids, id), end; at == len(s) {
					return ids
				}
				id, size = b.trie.longest(s[at:])
				continue
			}
			if id = b.tokens[id].shorter; id >= 0 {
				size = int(b.sizes[id])
			}
		}
		dead.add(at, len(s))
		last := ids[len(ids)-1]
		ids, at = ids[:len(ids)-1], at-int(b.sizes[last])
		if id = b.tokens[last].shorter; id >= 0 {
			size = int(b.sizes[id])
		}
	}
}

// places is a set of positions in a text.
type places []uint64

func (p places) has(i int) bool { return len(p) > 0 && p[i>>6]>>(i&63)&1 != 0 }

func (p *places) add(i, size int) {
	if *p == nil {
		*p = make(places, size>>6+1)
	}
	(*p)[i>>6] |= 1 << (i & 63)
}

// stayApart reports whether merging the bytes of two tokens gives these tokens.
func (b *bpe) stayApart(l, r int32) bool {
	slot, key := b.apart.slot(l, r)
	switch slot.Load() {
	case key:
		return false
	case key + 1:
		return true
	}
	ok := false
	if b.ordered {
		ok = b.apartBefore(l, r, math.MaxInt32)
	} else {
		ok = slices.Equal(b.merge(slices.Concat(b.bytes[l], b.bytes[r])), []int32{l, r})
	}
	if ok {
		key++
	}
	slot.Store(key)
	return ok
}

// apartBefore reports whether no merge of a rank below limit crosses from token l to token r. When ranks are ordered, merges happen in
// the order of their ranks, so that the symbols which touch are known at each rank: from the whole tokens backwards, undoing the later
// merge of the two each time. A pair of touching symbols merges if its rank comes before those at which they become parts of larger ones;
// when all three are merges of one pair, the leftmost is first.
func (b *bpe) apartBefore(l, r, limit int32) bool {
	for {
		if m := b.merges.get(l, r); m != noMerge && m.rank() < limit {
			return false
		}
		switch a, c := &b.tokens[l], &b.tokens[r]; {
		case a.rank > c.rank:
			l, limit = a.right, a.rank
		case c.rank >= 0:
			r, limit = c.left, c.rank+1
		default:
			return true
		}
	}
}

// merge is the definition: it merges bytes pair by pair.
func (b *bpe) merge(s []byte) []int32 {
	sym := make([]int32, len(s))
	for i, c := range s {
		sym[i] = b.byteID[c]
	}
	for {
		best, at := noMerge, -1
		for i := range len(sym) - 1 {
			if m := b.merges.get(sym[i], sym[i+1]); m < best {
				best, at = m, i
			}
		}
		if at < 0 {
			return sym
		}
		sym = slices.Replace(sym, at, at+2, best.id())
	}
}
