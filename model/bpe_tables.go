package model

import (
	"hash/maphash"
	"math/bits"
	"sync/atomic"
)

func pairKey(l, r int32) uint64 { return uint64(uint32(l))<<32 | uint64(uint32(r)) }

// mergeTable maps pairs to merges: open addressing with linear probing, at most half full. Pairs of single bytes have a table of their own.
type mergeTable struct {
	slots []mergeSlot
	shift uint            // 64 - log2(len(slots))
	pairs *[1 << 16]merge // left byte << 8 | right byte
}

// mergeSlot is free when its key is 0; keys are pair keys plus one.
type mergeSlot struct {
	key   uint64
	merge merge
}

func newMergeTable(n int) mergeTable {
	log := bits.Len(uint(2*n + 1))
	return mergeTable{slots: make([]mergeSlot, 1<<log), shift: uint(64 - log)}
}

// find returns the slot of a pair, or the free one where it belongs.
func (t *mergeTable) find(pair uint64) *mergeSlot {
	const golden = 0x9e3779b97f4a7c15
	key := pair + 1
	for i := int(key * golden >> t.shift); ; i = (i + 1) & (len(t.slots) - 1) {
		if s := &t.slots[i]; s.key == key || s.key == 0 {
			return s
		}
	}
}

func (t *mergeTable) set(pair uint64, m merge) { *t.find(pair) = mergeSlot{pair + 1, m} }

// get returns the merge of a pair, noMerge when there is none.
func (t *mergeTable) get(l, r int32) merge {
	if s := t.find(pairKey(l, r)); s.key != 0 {
		return s.merge
	}
	return noMerge
}

// fillBytes makes the table of byte pairs; ids are those of single bytes.
func (t *mergeTable) fillBytes(ids *[256]int32) {
	t.pairs = new([1 << 16]merge)
	for i := range t.pairs {
		t.pairs[i] = t.get(ids[i>>8], ids[i&0xff])
	}
}

// bytes is get of the tokens of two bytes.
func (t *mergeTable) bytes(l, r byte) merge { return t.pairs[int(l)<<8|int(r)] }

// pieceCache remembers the ids of short pieces. Each piece has one slot, which the latest piece takes; readers and writers do not lock.
type pieceCache struct {
	slots [1 << 16]atomic.Pointer[cachedPiece]
}

// Bounds of what is cached, so that an entry fills one cache line.
const (
	maxCachedBytes = 30
	maxCachedIDs   = 8
)

type cachedPiece struct {
	size, count uint8
	bytes       [maxCachedBytes]byte
	ids         [maxCachedIDs]int32
}

var pieceSeed = maphash.MakeSeed()

func (c *pieceCache) slot(s string) *atomic.Pointer[cachedPiece] {
	return &c.slots[maphash.String(pieceSeed, s)%uint64(len(c.slots))]
}

// newCachedPiece copies a piece of at most maxCachedBytes and maxCachedIDs.
func newCachedPiece(s string, ids []int32) *cachedPiece {
	e := &cachedPiece{size: uint8(len(s)), count: uint8(len(ids))}
	copy(e.bytes[:], s)
	copy(e.ids[:], ids)
	return e
}

// is reports whether the entry belongs to s.
func (e *cachedPiece) is(s string) bool { return string(e.bytes[:e.size]) == s }
