package kernels

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

// arenaModel is the arena as a list of 256-byte cells: who holds each, 0 = nobody.
type arenaModel []int

// place is where best fit puts n cells: the shortest run of free cells that is long enough, the first of equal ones; -1 = nowhere.
func (m arenaModel) place(n int) (at, largest, free int) {
	at, best := -1, len(m)+1
	for i := 0; i < len(m); {
		j := i
		for j < len(m) && m[j] == 0 {
			j++
		}
		largest, free = max(largest, j-i), free+j-i
		if j-i >= n && j-i < best {
			at, best = i, j-i
		}
		i = max(j, i+1)
	}
	return at, largest, free
}

func (m arenaModel) fill(at, n, id int) {
	for i := range n {
		m[at+i] = id
	}
}

// TestArenaModel: random allocations and frees against the list of cells: addresses, exhaustion with its numbers, and the bytes that were used
// before.
func TestArenaModel(t *testing.T) {
	const cells = 61
	for seed := range uint64(20) {
		rng := rand.New(rand.NewPCG(seed, 1))
		a := newArena(1000, cells*BufferAlign+BufferAlign) // the address is not aligned: one cell goes
		if a.base != 1024 || a.size != cells*BufferAlign {
			t.Fatalf("base %d, %d bytes", a.base, a.size)
		}
		m, high := make(arenaModel, cells), 0
		type held struct {
			p     Ptr
			at, n int
		}
		var live []held
		full := 0
		for step := range 3000 {
			if rng.IntN(5) < 2 && len(live) > 0 {
				i := rng.IntN(len(live))
				h := live[i]
				a.release(h.p)
				m.fill(h.at, h.n, 0)
				live = slices.Delete(live, i, i+1)
				continue
			}
			bytes := 1 + rng.Int64N(9*BufferAlign)
			n := int(alignBuffer(bytes) / BufferAlign)
			at, largest, free := m.place(n)
			p, stale, err := a.alloc(bytes)
			if at < 0 {
				full++
				want := fmt.Sprintf("%d bytes asked for, the largest free block has %d, in all %d of %d bytes are free", bytes, largest*BufferAlign, free*BufferAlign, cells*BufferAlign)
				if !errors.Is(err, ErrNoMemory) || !strings.Contains(err.Error(), want) {
					t.Fatalf("step %d: %v, want %s", step, err, want)
				}
				continue
			}
			if err != nil || p != a.base+Ptr(at*BufferAlign) {
				t.Fatalf("seed %d, step %d: %d bytes at %d (%v), the model says %d", seed, step, bytes, p-a.base, err, at*BufferAlign)
			}
			if want := min(max(int64(high-at), 0)*BufferAlign, bytes); stale != want {
				t.Fatalf("step %d: %d bytes were used before, the model says %d", step, stale, want)
			}
			m.fill(at, n, step+1)
			live, high = append(live, held{p, at, n}), max(high, at+n)
		}
		if full == 0 {
			t.Error("it never was full")
		}
		for _, h := range live {
			a.release(h.p)
		}
		if len(a.free) != 1 || a.free[0].bytes != a.size || len(a.used) != 0 {
			t.Errorf("free after all: %v", a.free)
		}
	}
}

// arenaDevice is the emulator with an arena.
func arenaDevice(t *testing.T, o Options) *Device {
	t.Helper()
	return testDevice(t, o)
}

// TestArenaDevice: buffers of a device with an arena are zero, aligned, never allocations of the driver, and counted like any others.
func TestArenaDevice(t *testing.T) {
	d := arenaDevice(t, Options{ArenaBytes: 64 << 10})
	if i := d.Info(); i.Arena <= 63<<10 || i.Arena > 64<<10 || d.NumAlloc() != 1 {
		t.Errorf("%+v, %d allocations", i, d.NumAlloc())
	}
	var bufs []*Buffer
	st := d.NewStream()
	for i, n := range []int64{1, 300, 5000, 256, 7000} {
		b, err := d.Alloc(n, fmt.Sprint("b", i))
		if err != nil {
			t.Fatal(err)
		}
		if b.Ptr()%BufferAlign != 0 {
			t.Errorf("a buffer at %#x", uint64(b.Ptr()))
		}
		st.Fill(b.Ptr(), n, 0xa5)
		bufs = append(bufs, b)
	}
	if l := d.Ledger(); l[len(l)-1].Bytes != 12557 || l[0].Label != "b4" || l[0].Bytes != 7000 {
		t.Errorf("ledger %+v", l)
	}
	bufs[2].Free()
	bufs[1].Free() // joined with it: 5632 bytes
	b, err := d.Alloc(5500, "again")
	if err != nil {
		t.Fatal(err)
	}
	got := make([]byte, 5500)
	if st.Download(got, b.Ptr()); b.Ptr() != bufs[0].Ptr()+256 || slices.Max(got) != 0 || st.Sync() != nil {
		t.Errorf("a reused block at %#x holds %d", uint64(b.Ptr()), slices.Max(got))
	}
	_, err = d.Alloc(60000, "big one")
	if !errors.Is(err, ErrNoMemory) || !strings.Contains(err.Error(), `allocate "big one": out of device memory: 60000 bytes asked for, the largest free block has `) {
		t.Errorf("more than there is: %v", err)
	}
	if d.NumAlloc() != 1 {
		t.Errorf("%d allocations of the driver", d.NumAlloc())
	}
	if err := d.Close(); err == nil || !strings.Contains(err.Error(), `1 x "again" (5500 bytes)`) {
		t.Errorf("leak report: %v", err)
	}
	for _, b := range append(bufs, b) {
		b.Free()
	}
	if err := d.Close(); err != nil {
		t.Error(err)
	}
}

// TestArenaOptions: where there is no arena, each buffer is an allocation; guard pages want that; the cpu has none.
func TestArenaOptions(t *testing.T) {
	for _, o := range []Options{{}, {ArenaBytes: 1 << 20, Emu: EmuOptions{Guard: true}}} {
		d := arenaDevice(t, o)
		a, err := d.Alloc(100, "a")
		if err != nil || d.NumAlloc() != 1 || d.Info().Arena != 0 {
			t.Errorf("%v, %d allocations, %+v", err, d.NumAlloc(), d.Info())
		}
		a.Free()
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	}
	if _, err := Open("cpu", Options{ArenaBytes: 1}); err == nil || !strings.Contains(err.Error(), "an arena of 1 bytes on the cpu") {
		t.Errorf("%v", err)
	}
	if _, err := Open("emu", Options{ArenaBytes: -1, LibDir: emuDir()}); err == nil || !strings.Contains(err.Error(), "an arena of -1 bytes") {
		t.Errorf("%v", err)
	}
}
