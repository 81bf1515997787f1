package kernels

import (
	"errors"
	"fmt"
	"slices"
)

// ErrNoMemory is wrapped by the error of an allocation that does not fit.
var ErrNoMemory = errors.New("out of device memory")

// BufferAlign is the alignment in bytes of buffers in an arena and in an overlay: no two share a line of the caches or a burst of the memory.
const BufferAlign = 256

func alignBuffer(n int64) int64 { return (n + BufferAlign - 1) / BufferAlign * BufferAlign }

// arena hands out blocks of one region of device memory: the smallest free block that is large enough, of equal ones the lowest; a freed block
// joins its neighbours. Blocks begin and end at multiples of BufferAlign. Its Device's lock guards it.
type arena struct {
	base  Ptr
	size  int64
	free  []block       // by address; no two touch
	used  map[Ptr]int64 // bytes by address
	fresh Ptr           // memory from here on was never handed out
}

type block struct {
	at    Ptr
	bytes int64
}

// newArena manages the bytes at p, less what alignment costs.
func newArena(p Ptr, bytes int64) *arena {
	base := (p + BufferAlign - 1) / BufferAlign * BufferAlign
	size := (bytes - int64(base-p)) / BufferAlign * BufferAlign
	return &arena{base: base, size: size, free: []block{{base, size}}, used: map[Ptr]int64{}, fresh: base}
}

// alloc returns a block and how many of its first bytes may have been used before.
func (a *arena) alloc(bytes int64) (p Ptr, stale int64, err error) {
	need, best := alignBuffer(bytes), -1
	for i, f := range a.free {
		if f.bytes >= need && (best < 0 || f.bytes < a.free[best].bytes) {
			best = i
		}
	}
	if best < 0 {
		largest, total := a.room()
		return 0, 0, fmt.Errorf("%w: %d bytes asked for, the largest free block has %d, in all %d of %d bytes are free", ErrNoMemory, bytes, largest, total, a.size)
	}
	p = a.free[best].at
	if a.free[best].bytes == need {
		a.free = slices.Delete(a.free, best, best+1)
	} else {
		a.free[best] = block{p + Ptr(need), a.free[best].bytes - need}
	}
	a.used[p] = need
	end := p + Ptr(need)
	stale = min(int64(max(a.fresh, p)-p), bytes)
	a.fresh = max(a.fresh, end)
	return p, stale, nil
}

// release gives a block back; the address must be one that alloc returned.
func (a *arena) release(p Ptr) {
	bytes, ok := a.used[p]
	if !ok {
		panic(fmt.Sprintf("kernels: free of address %#x, which was not allocated", uint64(p)))
	}
	delete(a.used, p)
	i, _ := slices.BinarySearchFunc(a.free, p, func(f block, p Ptr) int {
		if f.at < p {
			return -1
		}
		return 1
	})
	s, from, to := block{p, bytes}, i, i
	if i > 0 && a.free[i-1].at+Ptr(a.free[i-1].bytes) == p {
		from, s = i-1, block{a.free[i-1].at, a.free[i-1].bytes + bytes}
	}
	if i < len(a.free) && p+Ptr(bytes) == a.free[i].at {
		to, s.bytes = i+1, s.bytes+a.free[i].bytes
	}
	a.free = slices.Replace(a.free, from, to, s)
}

// room is the largest free block and the sum of all.
func (a *arena) room() (largest, total int64) {
	for _, f := range a.free {
		largest, total = max(largest, f.bytes), total+f.bytes
	}
	return largest, total
}
