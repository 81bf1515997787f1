package kernels

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"unsafe"
)

func TestForestArrays(t *testing.T) {
	f, err := NewForest([]Segment{{Len: 1, Parent: -1}, {Len: 1, Parent: 0, Pos: 1}, {Len: 65, Parent: 1, Pos: 2}, {Len: 2, Parent: 0, Pos: 1}, {Len: 64, Parent: -1}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if f.NumSeg != 5 || f.NumRows != 133 || f.NumChunks != 6 {
		t.Errorf("%d segments, %d rows, %d chunks; want 5, 133, 6", f.NumSeg, f.NumRows, f.NumChunks)
	}
	for _, c := range []struct {
		name      string
		got, want []int32
	}{
		{"start", f.Start, []int32{0, 1, 2, 67, 69}},
		{"len", f.Len, []int32{1, 1, 65, 2, 64}},
		{"parent", f.Parent, []int32{-1, 0, 1, 0, -1}},
		{"pos", f.Pos, []int32{0, 1, 2, 1, 0}},
		{"chunk_off", f.ChunkOff, []int32{0, 1, 2, 4, 5, 6}},
		{"child_off", f.ChildOff, []int32{0, 2, 3, 3, 3, 3}},
		{"child", f.Child, []int32{1, 3, 2}},
		{"root", f.Root, []int32{0, 0, 0, 0, 4}},
		{"slot", f.Slot, []int32{-1, -1, -1, -1, -1}},
		{"row_seg ends", []int32{f.RowSeg[0], f.RowSeg[1], f.RowSeg[2], f.RowSeg[66], f.RowSeg[67], f.RowSeg[132]}, []int32{0, 1, 2, 2, 3, 4}},
		{"prev of the root", f.Prev[0:3], []int32{-1, -1, -1}},
		{"prev through one parent", f.Prev[3:6], []int32{0, -1, -1}},
		{"prev through two parents of one row", f.Prev[6:15], []int32{1, 0, -1, 2, 1, 0, 3, 2, 1}},
		{"prev of a sibling", f.Prev[67*3 : 69*3], []int32{0, -1, -1, 67, 0, -1}},
		{"prev of the second root", f.Prev[69*3 : 72*3], []int32{-1, -1, -1, 69, -1, -1, 70, 69, -1}},
	} {
		if !slices.Equal(c.got, c.want) {
			t.Errorf("%s: %v, want %v", c.name, c.got, c.want)
		}
	}
}

func TestForestSlots(t *testing.T) {
	f, err := NewForest([]Segment{{Len: 4, Parent: -1, Pos: 9}, {Len: 2, Parent: -1}}, []int32{7, -1})
	if err != nil {
		t.Fatal(err)
	}
	want := []int32{-4, -3, -2, 0, -4, -3, 1, 0, -4, 2, 1, 0, -1, -1, -1, 4, -1, -1}
	if !slices.Equal(f.Prev, want) || !slices.Equal(f.Slot, []int32{7, -1}) {
		t.Errorf("prev %v, want %v (slot %v)", f.Prev, want, f.Slot)
	}
}

func TestForestRefusals(t *testing.T) {
	for _, c := range []struct {
		name  string
		segs  []Segment
		slots []int32
		want  []string
	}{
		{"empty", nil, nil, []string{"no segments"}},
		{"everything", []Segment{{Len: 0, Parent: -1, Pos: 3}, {Len: 2, Parent: 1}, {Len: 2, Parent: 0, Pos: 1}, {Len: 1, Parent: -2}}, nil, []string{
			"segment 0: length 0", "segment 0: root at position 3, need 0", "segment 1: parent 1", "segment 2: position 1, but parent 0 ends at 3", "segment 3: parent -2"}},
		{"negative position", []Segment{{Len: 1, Parent: -1, Pos: -1}}, []int32{0}, []string{"position -1 out of range"}},
		{"slot count", []Segment{{Len: 1, Parent: -1}}, []int32{1, 2}, []string{"2 slots for 1 segments"}},
		{"slot twice", []Segment{{Len: 1, Parent: -1}, {Len: 1, Parent: -1}}, []int32{3, 3}, []string{"slot 3 already belongs to segment 0"}},
		{"slot with child", []Segment{{Len: 1, Parent: -1}, {Len: 1, Parent: 0, Pos: 1}}, []int32{3, -1}, []string{"segments with a state slot stand alone"}},
		{"slot number", []Segment{{Len: 1, Parent: -1}}, []int32{-2}, []string{"slot -2"}},
		{"too long", []Segment{{Len: 1 << 30, Parent: -1}}, nil, []string{"rows in all"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := NewForest(c.segs, c.slots)
			for _, w := range c.want {
				if !strings.Contains(fmt.Sprint(err), w) {
					t.Errorf("%v lacks %q", err, w)
				}
			}
		})
	}
}

func TestForestUpload(t *testing.T) {
	r := newRig(t, F32, Options{})
	f := mkForest(t, nil, [2]int{3, -1}, [2]int{70, 0}, [2]int{2, 0})
	a := r.forest(f)
	if int(a.NumSeg) != 3 || int(a.NumRows) != 75 || int(a.NumChunks) != 4 || a.MaxLen != 70 {
		t.Errorf("counts %+v", a)
	}
	for _, c := range []struct {
		p    Ptr
		want []int32
	}{{a.Start, f.Start}, {a.Len, f.Len}, {a.Parent, f.Parent}, {a.Pos, f.Pos}, {a.RowSeg, f.RowSeg}, {a.Prev, f.Prev}, {a.ChunkOff, f.ChunkOff},
		{a.ChildOff, f.ChildOff}, {a.Child, f.Child}, {a.Root, f.Root}, {a.Slot, f.Slot}} {
		got := make([]int32, len(c.want))
		r.st.DownloadI32(got, c.p)
		if !slices.Equal(got, c.want) {
			t.Errorf("uploaded %v, want %v", got, c.want)
		}
	}
}

// TestForestBytes: a chain, in which every segment but one is a child, has the most index bytes of its size.
func TestForestBytes(t *testing.T) {
	for _, n := range []int{1, 2, 7} {
		segs := make([]Segment, n)
		for i := range segs {
			segs[i] = Segment{Len: 3, Parent: int32(i - 1), Pos: int32(3 * i)}
		}
		f, err := NewForest(segs, nil)
		if err != nil || f.DeviceBytes() != ForestBytes(3*n, n) {
			t.Errorf("%d segments: %d bytes, at most %d (%v)", n, f.DeviceBytes(), ForestBytes(3*n, n), err)
		}
	}
}

// TestNullTables: "null" tells the workspaces of the table asked for.
func TestNullTables(t *testing.T) {
	needEmu(t, "libhs_emu.so")
	ws := map[string]int64{}
	for _, table := range []string{"", "cpu", "emu"} {
		d, err := Open("null", Options{Table: table, LibDir: emuDir()})
		if err != nil {
			t.Fatal(err)
		}
		if want := map[string]string{"": "cpu"}[table] + table; d.Info().Table != want || d.Info().Backend != "null" {
			t.Errorf("%+v", d.Info())
		}
		ws[table] = d.Workspace(OpAttnBwd, unsafe.Pointer(&AttnBwdArgs{DType: BF16, T: 100, NH: 4, NKV: 2, HD: 64, F: ForestArgs{NumSeg: 1, NumRows: 100, NumChunks: 2, MaxLen: 100}}))
	}
	if ws[""] != ws["cpu"] || ws["cpu"] == ws["emu"] || ws["emu"] == 0 {
		t.Errorf("workspaces %v", ws)
	}
	for _, o := range []Options{{Table: "tpu"}, {Table: "emu", LibDir: t.TempDir()}} {
		if o.LibDir != "" {
			t.Chdir(o.LibDir)
		}
		if _, err := Open("null", o); err == nil || !strings.Contains(err.Error(), o.Table) {
			t.Errorf("table %q: %v", o.Table, err)
		}
	}
}
