package kernels

import (
	"errors"
	"fmt"
	"math"
)

// GDNChunk is the chunk length of the gated delta rule in rows, counted from the start of a segment.
const GDNChunk = 64

// GDNRingRows is the length of the canonical chunk of the delta rule in absolute positions, and of a slot's replay ring.
const GDNRingRows = 16

// ConvTaps is the width of the causal convolution; its window reaches ConvTaps-1 rows back.
const ConvTaps = 4

// Segment is one run of consecutive tokens in a packed batch. Parent is the index of an earlier segment that this one continues
// after its last row, or -1; Pos is the absolute position of its first row.
type Segment struct{ Len, Parent, Pos int32 }

// Forest is a validated packed batch (gpu.md 7.5) with the index arrays that the sequence ops need. Rows are laid out in segment
// order. All slices are in the layout of hs_forest: see abi.h for Prev, ChunkOff, ChildOff, Child, Root and Slot.
type Forest struct {
	NumSeg, NumRows, NumChunks int

	Start, Len, Parent, Pos, RowSeg, Prev, ChunkOff, ChildOff, Child, Root, Slot []int32
}

// NewForest checks segs and derives the index arrays. slots is nil for training; otherwise slots[i] >= 0 names the state slot that
// segment i, a root without children, starts from and leaves its state in (its Pos is then free), and -1 means none.
// All problems are reported at once.
func NewForest(segs []Segment, slots []int32) (*Forest, error) {
	if err := checkSegments(segs, slots); err != nil {
		return nil, fmt.Errorf("build forest: %w", err)
	}
	n := len(segs)
	f := &Forest{
		NumSeg: n, Start: make([]int32, n), Len: make([]int32, n), Parent: make([]int32, n), Pos: make([]int32, n), Root: make([]int32, n),
		Slot: make([]int32, n), ChunkOff: make([]int32, n+1), ChildOff: make([]int32, n+1),
	}
	for i, s := range segs {
		f.Start[i], f.Len[i], f.Parent[i], f.Pos[i] = int32(f.NumRows), s.Len, s.Parent, s.Pos
		f.NumRows += int(s.Len)
		f.ChunkOff[i+1] = f.ChunkOff[i] + (s.Len+GDNChunk-1)/GDNChunk
		f.Root[i], f.Slot[i] = int32(i), -1
		if s.Parent >= 0 {
			f.Root[i] = f.Root[s.Parent]
			f.ChildOff[s.Parent+1]++
		}
		if slots != nil {
			f.Slot[i] = slots[i]
		}
	}
	f.NumChunks = int(f.ChunkOff[n])
	for i := range n {
		f.ChildOff[i+1] += f.ChildOff[i]
	}
	f.Child = make([]int32, f.ChildOff[n])
	next := append([]int32(nil), f.ChildOff[:n]...)
	for i, s := range segs {
		if s.Parent >= 0 {
			f.Child[next[s.Parent]] = int32(i)
			next[s.Parent]++
		}
	}
	f.RowSeg = make([]int32, f.NumRows)
	f.Prev = make([]int32, f.NumRows*(ConvTaps-1))
	for i := range segs {
		for o := range f.Len[i] {
			row := f.Start[i] + o
			f.RowSeg[row] = int32(i)
			for back := int32(1); back < ConvTaps; back++ {
				f.Prev[row*(ConvTaps-1)+back-1] = f.before(int32(i), o, back)
			}
		}
	}
	return f, nil
}

// before is the Prev entry for the row at offset o of segment s, back positions earlier: a row, -1 before the sequence, or
// -2-column of the conv state that a slotted root starts from (column ConvTaps-2 is the newest).
func (f *Forest) before(s, o, back int32) int32 {
	for o < back {
		back -= o
		if f.Parent[s] < 0 {
			if f.Slot[s] >= 0 {
				return -2 - (ConvTaps - 1 - back)
			}
			return -1
		}
		s = f.Parent[s]
		o = f.Len[s]
	}
	return f.Start[s] + o - back
}

func checkSegments(segs []Segment, slots []int32) error {
	var errs []error
	bad := func(format string, a ...any) { errs = append(errs, fmt.Errorf(format, a...)) }
	if len(segs) == 0 {
		bad("no segments")
	}
	if slots != nil && len(slots) != len(segs) {
		bad("%d slots for %d segments", len(slots), len(segs))
		slots = nil
	}
	slot := func(i int) int32 {
		if slots == nil {
			return -1
		}
		return slots[i]
	}
	var rows int64
	owner := map[int32]int{}
	for i, s := range segs {
		if s.Len < 1 {
			bad("segment %d: length %d, need at least 1", i, s.Len)
		}
		rows += max(int64(s.Len), 0)
		if s.Pos < 0 || int64(s.Pos)+int64(s.Len) > math.MaxInt32 {
			bad("segment %d: position %d out of range", i, s.Pos)
		}
		switch {
		case s.Parent < -1 || int(s.Parent) >= i:
			bad("segment %d: parent %d, need an earlier segment or -1", i, s.Parent)
		case s.Parent >= 0:
			p := segs[s.Parent]
			if want := int64(p.Pos) + int64(p.Len); int64(s.Pos) != want {
				bad("segment %d: position %d, but parent %d ends at %d", i, s.Pos, s.Parent, want)
			}
			if slot(i) >= 0 || slot(int(s.Parent)) >= 0 {
				bad("segment %d: continues segment %d, but segments with a state slot stand alone", i, s.Parent)
			}
		case slot(i) < 0 && s.Pos != 0:
			bad("segment %d: root at position %d, need 0 (or a state slot to continue from)", i, s.Pos)
		}
		if k := slot(i); k < -1 {
			bad("segment %d: slot %d, need -1 or more", i, k)
		} else if j, dup := owner[k]; k >= 0 && dup {
			bad("segment %d: slot %d already belongs to segment %d", i, k, j)
		} else if k >= 0 {
			owner[k] = i
		}
	}
	if rows*(ConvTaps-1) > math.MaxInt32 {
		bad("%d rows in all, need at most %d", rows, math.MaxInt32/(ConvTaps-1))
	}
	return errors.Join(errs...)
}

// arrays lists the index arrays in the order of the device blob and of hs_forest.
func (f *Forest) arrays() [11][]int32 {
	return [11][]int32{f.Start, f.Len, f.Parent, f.Pos, f.RowSeg, f.Prev, f.ChunkOff, f.ChildOff, f.Child, f.Root, f.Slot}
}

// DeviceBytes is the size of the blob that Upload writes.
func (f *Forest) DeviceBytes() int64 {
	n := 0
	for _, a := range f.arrays() {
		n += len(a)
	}
	return int64(n) * 4
}

// ForestBytes is the most that DeviceBytes can be for so many rows in so many segments.
func ForestBytes(rows, segs int) int64 {
	return 4 * (int64(rows)*ConvTaps + 8*int64(segs) + 2 + int64(max(segs-1, 0))) // RowSeg and Prev; eight per segment and one more offset each in two; one child less
}

// Upload writes all index arrays as one blob at `at` and returns the struct that ops take. Child points at the end of the blob's
// child array when no segment has a parent.
func (f *Forest) Upload(s *Stream, at Ptr) ForestArgs {
	blob := make([]int32, f.DeviceBytes()/4)
	a := f.Pack(blob, at)
	s.UploadI32(at, blob)
	return a
}

// Pack writes the blob that Upload would into dst, DeviceBytes long, for the address at.
func (f *Forest) Pack(dst []int32, at Ptr) ForestArgs {
	maxLen := int32(0)
	for _, n := range f.Len {
		maxLen = max(maxLen, n)
	}
	a := ForestArgs{NumSeg: int32(f.NumSeg), NumRows: int32(f.NumRows), NumChunks: int32(f.NumChunks), MaxLen: maxLen}
	into := [11]*Ptr{&a.Start, &a.Len, &a.Parent, &a.Pos, &a.RowSeg, &a.Prev, &a.ChunkOff, &a.ChildOff, &a.Child, &a.Root, &a.Slot}
	n := 0
	for i, v := range f.arrays() {
		*into[i] = at + Ptr(n*4)
		n += copy(dst[n:], v)
	}
	return a
}
