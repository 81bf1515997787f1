package trainer

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// faultyFiles fails operation number at. With dead set everything after it fails
// too, the way a killed process does nothing more; a failing write leaves half of
// its bytes behind.
type faultyFiles struct {
	osFiles
	n, at int
	dead  bool
	err   error
}

func (f *faultyFiles) step() error {
	f.n++
	if f.n == f.at || f.dead && f.n > f.at {
		return f.err
	}
	return nil
}

func (f *faultyFiles) Mkdir(p string) error {
	if err := f.step(); err != nil {
		return err
	}
	return f.osFiles.Mkdir(p)
}

func (f *faultyFiles) Create(p string) (file, error) {
	if err := f.step(); err != nil {
		return nil, err
	}
	w, err := os.Create(p)
	return &faultyFile{w, f}, err
}

func (f *faultyFiles) Rename(a, b string) error {
	if err := f.step(); err != nil {
		return err
	}
	return f.osFiles.Rename(a, b)
}

func (f *faultyFiles) RemoveAll(p string) error {
	if err := f.step(); err != nil {
		// A kill in the middle of a removal leaves part of the tree.
		if entries, e := os.ReadDir(p); e == nil && len(entries) > 1 {
			return errors.Join(err, os.RemoveAll(filepath.Join(p, entries[0].Name())))
		}
		return err
	}
	return f.osFiles.RemoveAll(p)
}

// The syncs of these file systems are steps without effect: a kill of the process
// does not lose what the system has, and hundreds of real ones take seconds.
func (f *faultyFiles) SyncDir(string) error { return f.step() }

type faultyFile struct {
	*os.File
	fs *faultyFiles
}

func (w *faultyFile) Write(b []byte) (int, error) {
	if err := w.fs.step(); err != nil {
		n, werr := w.File.Write(b[:len(b)/2])
		return n, errors.Join(err, werr)
	}
	return w.File.Write(b)
}

func (w *faultyFile) Sync() error { return w.fs.step() }

// unsynced is a Checkpoints whose file system never fails.
func unsynced(dir string, keep int) *Checkpoints {
	c := NewCheckpoints(dir, keep, 0, nil)
	c.fs = &faultyFiles{}
	return c
}

type testState struct {
	Step int
	Note string
}

// snapshot makes a snapshot whose every part depends on step and tag.
func snapshot(fs files, step int, tag string) Snapshot {
	return Snapshot{
		Step: step,
		Model: func(dir string) error {
			for _, name := range []string{"config.json", "model.safetensors"} {
				if err := writeFile(fs, filepath.Join(dir, name), func(w io.Writer) error {
					_, err := io.WriteString(w, strings.Repeat(name+tag, 100))
					return err
				}); err != nil {
					return err
				}
			}
			return nil
		},
		Optim: []Arena{{"m", bytes.Repeat([]byte(tag), 5000)}, {"v", bytes.Repeat([]byte{byte(step)}, 5000)}},
		State: testState{step, tag},
	}
}

func verifyLoaded(t *testing.T, c *Checkpoints, step int) string {
	t.Helper()
	l, err := c.Load(step)
	if err != nil {
		t.Fatal(err)
	}
	var s testState
	if err := l.State(&s); err != nil {
		t.Fatal(err)
	}
	m, err := l.Arena("m")
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(l.ModelDir, "model.safetensors"))
	if err != nil {
		t.Fatal(err)
	}
	if s.Step != step || !bytes.Equal(m, bytes.Repeat([]byte(s.Note), 5000)) || string(text) != strings.Repeat("model.safetensors"+s.Note, 100) {
		t.Fatalf("step %d: parts of different saves", step)
	}
	return s.Note
}

func save(t *testing.T, c *Checkpoints, step int, tag string) {
	t.Helper()
	if _, err := c.Save(snapshot(c.fs, step, tag)); err != nil {
		t.Fatal(err)
	}
}

func TestCheckpointRoundTripAndRetention(t *testing.T) {
	c := NewCheckpoints(filepath.Join(t.TempDir(), "checkpoints"), 2, 10, func(err error) { t.Error(err) })
	if _, err := c.Latest(); !errors.Is(err, ErrNoCheckpoint) {
		t.Errorf("empty: %v", err)
	}
	for _, step := range []int{5, 10, 15, 20, 25, 30, 35} {
		save(t, c, step, fmt.Sprint("s", step))
	}
	steps, err := c.List()
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]int{10, 20, 30, 35}, steps); diff != "" {
		t.Error(diff)
	}
	if s, err := c.Latest(); err != nil || s != 35 {
		t.Errorf("latest %d %v", s, err)
	}
	if note := verifyLoaded(t, c, 20); note != "s20" {
		t.Errorf("note %q", note)
	}
	save(t, c, 35, "again") // the same step, as after a resume
	if note := verifyLoaded(t, c, 35); note != "again" {
		t.Errorf("note %q", note)
	}
	left, err := filepath.Glob(filepath.Join(c.dir, ".*"))
	if err != nil || len(left) > 0 {
		t.Errorf("left over: %v %v", left, err)
	}
	l, err := c.Load(35)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := l.Arena("master"); err == nil {
		t.Error("a missing block is not an error")
	}
	var other struct{ Unknown int }
	if err := l.State(&other); err == nil {
		t.Error("unknown state fields accepted")
	}
}

func TestDamagedCheckpointDoesNotExist(t *testing.T) {
	for name, damage := range map[string]func(dir string) error{
		"flipped byte": func(d string) error {
			p := filepath.Join(d, "model", "model.safetensors")
			b, err := os.ReadFile(p)
			if err != nil {
				return err
			}
			b[7] ^= 1
			return os.WriteFile(p, b, 0o644)
		},
		"missing file": func(d string) error { return os.Remove(filepath.Join(d, "model", "config.json")) },
		"cut moments":  func(d string) error { return os.Truncate(filepath.Join(d, "optim.zst"), 20) },
		"no DONE":      func(d string) error { return os.Remove(filepath.Join(d, "DONE")) },
		"cut DONE":     func(d string) error { return os.Truncate(filepath.Join(d, "DONE"), 9) },
		"DONE of another step": func(d string) error {
			b, err := os.ReadFile(filepath.Join(d, "DONE"))
			if err != nil {
				return err
			}
			return os.WriteFile(filepath.Join(d, "DONE"), bytes.Replace(b, []byte(`"step": 2`), []byte(`"step": 1`), 1), 0o644)
		},
		"empty DONE list": func(d string) error {
			return os.WriteFile(filepath.Join(d, "DONE"), []byte(`{"step":2,"sha256":{}}`), 0o644)
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := NewCheckpoints(t.TempDir(), 5, 0, nil)
			save(t, c, 1, "one")
			save(t, c, 2, "two")
			if err := damage(c.Path(2)); err != nil {
				t.Fatal(err)
			}
			if s, err := c.Latest(); err != nil || s != 1 {
				t.Errorf("latest %d %v", s, err)
			}
			if _, err := c.Load(2); !errors.Is(err, ErrNoCheckpoint) {
				t.Errorf("load: %v", err)
			}
			save(t, c, 2, "repaired")
			if verifyLoaded(t, c, 2) != "repaired" {
				t.Error("a damaged step cannot be saved again")
			}
		})
	}
}

// Pitfalls row 75: a kill at any operation leaves a complete checkpoint that the
// loader finds, and the next process can save.
func TestKillAtEveryOperation(t *testing.T) {
	killed := errors.New("killed")
	for _, step := range []int{2, 1} { // a new step, and the newest one again
		for at := 1; ; at++ {
			dir := t.TempDir()
			save(t, unsynced(dir, 1), 1, "old")
			fs := &faultyFiles{at: at, dead: true, err: killed}
			c := NewCheckpoints(dir, 1, 0, nil)
			c.fs = fs
			_, err := c.Save(snapshot(fs, step, "new"))
			if fs.n < at {
				if err != nil {
					t.Fatal(err)
				}
				if at < 25 {
					t.Fatalf("only %d operations: the test does not see the writes", at)
				}
				break
			}
			next := unsynced(dir, 1)
			if err := next.Recover(); err != nil {
				t.Fatalf("killed at %d: %v", at, err)
			}
			latest, lerr := next.Latest()
			if lerr != nil {
				t.Fatalf("killed at %d: %v", at, lerr)
			}
			note := verifyLoaded(t, next, latest)
			if err == nil && note != "new" {
				t.Fatalf("killed at %d: saved, but the loader sees %q", at, note)
			}
			save(t, next, 3, "after")
			if verifyLoaded(t, next, 3) != "after" {
				t.Fatalf("killed at %d: the next save is wrong", at)
			}
		}
	}
}

func TestWriteFailureKeepsTheRunAlive(t *testing.T) {
	for at := 1; ; at++ {
		dir := t.TempDir()
		save(t, unsynced(dir, 2), 1, "old")
		fs := &faultyFiles{at: at, err: unix.ENOSPC}
		var warned error
		c := NewCheckpoints(dir, 2, 0, func(err error) { warned = err })
		c.fs = fs
		_, err := c.Save(snapshot(fs, 2, "new"))
		if fs.n < at {
			break
		}
		if err == nil {
			if warned == nil {
				t.Fatalf("failure at %d was swallowed", at)
			}
			verifyLoaded(t, c, 2)
			continue
		}
		if !errors.Is(err, ErrNoSpace) || !strings.Contains(err.Error(), dir) || !strings.Contains(err.Error(), " free)") || Hint(err) == "" {
			t.Fatalf("failure at %d: %v", at, err)
		}
		if left, gerr := filepath.Glob(filepath.Join(dir, ".*")); gerr != nil || len(left) > 0 {
			t.Fatalf("failure at %d left %v %v", at, left, gerr)
		}
		if verifyLoaded(t, c, 1) != "old" {
			t.Fatal("old checkpoint changed")
		}
		save(t, c, 2, "retry")
		if verifyLoaded(t, c, 2) != "retry" {
			t.Fatal("retry is wrong")
		}
	}
}

func TestFullDisk(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=256k"); err != nil {
		t.Skipf("cannot mount a tmpfs (%v); to run this test: sudo go test -run TestFullDisk ./trainer", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	c := NewCheckpoints(filepath.Join(dir, "checkpoints"), 3, 0, nil)
	save(t, c, 1, "small")
	big := snapshot(osFiles{}, 2, "big")
	big.Optim[0].Data = noise(1 << 20)
	_, err := c.Save(big)
	if !errors.Is(err, ErrNoSpace) || !strings.Contains(err.Error(), " free)") {
		t.Fatalf("error %v", err)
	}
	verifyLoaded(t, c, 1)
	save(t, c, 2, "fits")
	verifyLoaded(t, c, 2)
	r := &RunDir{dir: dir}
	if err := os.RemoveAll(c.dir); err != nil {
		t.Fatal(err)
	}
	if err := r.Preflight(1<<20, SaveConfig{Keep: 1}); !errors.Is(err, ErrNoSpace) {
		t.Errorf("preflight: %v", err)
	}
	if err := r.Preflight(1000, SaveConfig{Keep: 1}); err != nil {
		t.Errorf("preflight: %v", err)
	}

	// A line that does not fit leaves nothing, and the next one that does is whole.
	a, err := r.Appender("lines.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	line := map[string]any{"step": 1, "x": strings.Repeat("x", 5000)}
	n := 0
	for ; err == nil; n++ {
		err = a.Write(line)
	}
	if !errors.Is(err, ErrNoSpace) || Hint(err) == "" {
		t.Fatalf("line %d: %v", n, err)
	}
	if _, err := CreateRun(dir, "new", []byte(strings.Repeat("x", 1<<20)), Manifest{}, false); !errors.Is(err, ErrNoSpace) {
		t.Errorf("create: %v", err)
	}
	if _, err := os.Stat(filepath.Join(dir, "new")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a run that could not be created left: %v", err)
	}
	if err := errors.Join(unix.Mount("", dir, "", unix.MS_REMOUNT, "size=512k"), a.Write(line), a.Close()); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(filepath.Join(dir, "lines.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	whole := 0
	for l := range bytes.Lines(b) {
		if !json.Valid(l) {
			t.Fatalf("line %d is torn", whole)
		}
		whole++
	}
	if whole != n {
		t.Errorf("%d lines, %d were written", whole, n)
	}
}

// All checkpoints damaged is not the same as none: nothing may start again from step 0 by itself.
func TestAllDamagedIsRefused(t *testing.T) {
	dir := t.TempDir()
	warned := 0
	c := NewCheckpoints(dir, 5, 0, func(error) { warned++ })
	for _, step := range []int{5, 10} {
		save(t, c, step, "x")
	}
	if err := os.Remove(filepath.Join(c.Path(5), doneFile)); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(filepath.Join(c.Path(10), optimFile), 10); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Latest(); !errors.Is(err, ErrDamaged) || errors.Is(err, ErrNoCheckpoint) || Hint(err) == "" || warned != 2 {
		t.Errorf("%d warnings, error %v", warned, err)
	}
}

// noise is incompressible.
func noise(n int) []byte {
	b, x := make([]byte, n), uint64(1)
	for i := range b {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		b[i] = byte(x >> 32)
	}
	return b
}

func TestArenaFrames(t *testing.T) {
	want := []Arena{{"m", noise(1000)}, {"v", nil}, {"name with spaces", []byte("x")}}
	var b bytes.Buffer
	if err := writeArenas(&b, want); err != nil {
		t.Fatal(err)
	}
	whole := b.Bytes()
	got, err := readArenas(bytes.NewReader(whole))
	if err != nil || len(got) != 3 || !bytes.Equal(got[0].Data, want[0].Data) || len(got[1].Data) != 0 || got[2].Name != want[2].Name {
		t.Fatalf("%v %v", got, err)
	}
	plain, err := decompress(whole) // an ordinary reader skips the headers
	if err != nil || !bytes.Equal(plain, append(noise(1000), 'x')) {
		t.Errorf("as one zstd stream: %d bytes, %v", len(plain), err)
	}
	for cut := 1; cut < len(whole)-1; cut += 37 {
		if a, err := readArenas(bytes.NewReader(whole[:cut])); err == nil && len(a) == 3 {
			t.Errorf("cut at %d read as complete", cut)
		}
	}
}
