package model

import (
	"hash/maphash"
	"math"
	"math/bits"
	"sync/atomic"
)

// merge is the rank of a pair in the upper half and the id of what it becomes in the lower one, so that merges order by rank.
type merge uint64

// noMerge marks a pair that does not merge.
const noMerge = merge(math.MaxUint64)

func newMerge(rank, id int32) merge { return merge(uint32(rank))<<32 | merge(uint32(id)) }

func (m merge) rank() int32 { return int32(m >> 32) }
func (m merge) id() int32   { return int32(uint32(m)) }

// goldenRatio spreads keys over a table whose size is a power of two: the upper bits of the product are the index (Knuth, volume 3, 6.4).
const goldenRatio = 0x9e3779b97f4a7c15

func pairKey(l, r int32) uint64 { return uint64(uint32(l))<<32 | uint64(uint32(r)) }

// mergeTable maps pairs to merges: open addressing with linear probing, at most half full. Most pairs that are asked for do not merge;
// a small table of bits, at most an eighth of them set, tells of most of these.
type mergeTable struct {
	slots []mergeSlot
	shift uint // 64 - log2(len(slots))
	maybe []uint64
}

// mergeSlot is free when its key is 0; keys are pair keys plus one.
type mergeSlot struct {
	key   uint64
	merge merge
}

func newMergeTable(n int) mergeTable {
	log := bits.Len(uint(2*n + 1))
	return mergeTable{slots: make([]mergeSlot, 1<<log), shift: uint(64 - log), maybe: make([]uint64, max(1, 1<<log>>3))}
}

// find returns the slot of a pair, or the free one where it belongs.
func (t *mergeTable) find(key uint64) *mergeSlot {
	for i := int(key * goldenRatio >> t.shift); ; i = (i + 1) & (len(t.slots) - 1) {
		if s := &t.slots[i]; s.key == key || s.key == 0 {
			return s
		}
	}
}

// bit returns where a key's bit is.
func (t *mergeTable) bit(key uint64) (word *uint64, bit uint64) {
	h := key * goldenRatio
	return &t.maybe[h>>(t.shift+3)], 1 << (h >> (t.shift - 3) & 63)
}

func (t *mergeTable) set(l, r int32, m merge) {
	key := pairKey(l, r) + 1
	*t.find(key) = mergeSlot{key, m}
	word, bit := t.bit(key)
	*word |= bit
}

// get returns the merge of a pair, noMerge when there is none.
func (t *mergeTable) get(l, r int32) merge {
	key := pairKey(l, r) + 1
	if word, bit := t.bit(key); *word&bit == 0 {
		return noMerge
	}
	if s := t.find(key); s.key != 0 {
		return s.merge
	}
	return noMerge
}

// pairCache remembers of pairs of tokens whether they stay apart. Each pair has one slot, which the latest pair takes; readers and
// writers do not lock.
type pairCache struct {
	slots [1 << 16]atomic.Uint64
}

// slot returns where a pair belongs, and what is there when the pair is known not to stay apart; one more says that it does.
func (c *pairCache) slot(l, r int32) (slot *atomic.Uint64, key uint64) {
	key = 2 * (uint64(l)<<24 + uint64(r) + 1)
	return &c.slots[key*goldenRatio>>48], key
}

// pieceCache remembers the ids of short pieces, in the way of pairCache. A known piece is two memory accesses, whatever its length.
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
