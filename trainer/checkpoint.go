package trainer

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sort"
	"strconv"
	"strings"

	"github.com/klauspost/compress/zstd"
)

// Snapshot is everything a checkpoint stores.
type Snapshot struct {
	Step  int
	Model func(dir string) error // writes a Hugging Face directory into dir, which exists and is empty
	Optim []Arena                // optimiser moments; order is kept
	State any                    // counters, evidence, cursor: anything encoding/json round-trips
	Bytes int64                  // about what it takes on disk, for the message of a full one; 0 = unknown
}

// Arena is one block of optimiser state.
type Arena struct {
	Name string
	Data []byte
}

// Checkpoints is the checkpoints/ folder of a run. A checkpoint is published by
// renaming a complete, synced temporary folder, so at every instant the folder
// holds complete checkpoints or none; one without DONE or with a hash that does
// not match does not exist for any reader.
type Checkpoints struct {
	dir         string
	keep, every int
	fs          files
	warn        func(error)
}

// NewCheckpoints opens dir (created when absent); keep newest are kept, plus
// multiples of every when that is above 0. Errors of the clean-up after a
// successful save go to warn (nil = ignored): they never fail a save.
func NewCheckpoints(dir string, keep, every int, warn func(error)) *Checkpoints {
	if warn == nil {
		warn = func(error) {}
	}
	return &Checkpoints{dir: dir, keep: max(keep, 1), every: every, fs: osFiles{}, warn: warn}
}

const (
	doneFile  = "DONE"
	optimFile = "optim.zst"
	stateFile = "state.zst"
	modelDir  = "model"
	tempMark  = ".tmp-"
)

type done struct {
	Schema int               `json:"schema"`
	Step   int               `json:"step"`
	Bytes  int64             `json:"bytes"`
	SHA256 map[string]string `json:"sha256"`
}

func stepName(step int) string { return fmt.Sprintf("step_%06d", step) }

// Path is the folder of a step, which need not exist.
func (c *Checkpoints) Path(step int) string { return filepath.Join(c.dir, stepName(step)) }

// Save publishes a checkpoint and then removes those retention no longer wants.
// After an error nothing was published, the temporary folder is gone (or will be
// removed by the next Save), and older checkpoints are untouched; the caller may
// go on and try again. A full disk gives an error that wraps ErrNoSpace and names
// path and free bytes.
func (c *Checkpoints) Save(s Snapshot) (string, error) {
	dst, tmp := c.Path(s.Step), filepath.Join(c.dir, tempMark+stepName(s.Step))
	fail := func(err error) (string, error) {
		return "", diskError(fmt.Sprintf("save checkpoint of step %d", s.Step), dst, s.Bytes, errors.Join(err, c.fs.RemoveAll(tmp)))
	}
	if err := c.sweep(); err != nil {
		return fail(err)
	}
	if err := c.fs.Mkdir(filepath.Join(tmp, modelDir)); err != nil {
		return fail(err)
	}
	if err := s.Model(filepath.Join(tmp, modelDir)); err != nil {
		return fail(err)
	}
	if err := writeFile(c.fs, filepath.Join(tmp, optimFile), func(w io.Writer) error { return writeArenas(w, s.Optim) }); err != nil {
		return fail(err)
	}
	state, err := json.Marshal(s.State)
	if err != nil {
		return fail(fmt.Errorf("encode state: %w", err))
	}
	packed, err := compress(state)
	if err != nil {
		return fail(err)
	}
	if err := writeFile(c.fs, filepath.Join(tmp, stateFile), func(w io.Writer) error { _, err := w.Write(packed); return err }); err != nil {
		return fail(err)
	}
	mark, err := hashTree(tmp)
	if err != nil {
		return fail(err)
	}
	mark.Schema, mark.Step = 1, s.Step
	text, err := json.MarshalIndent(mark, "", "  ")
	if err != nil {
		return fail(err)
	}
	if err := writeFile(c.fs, filepath.Join(tmp, doneFile), func(w io.Writer) error { _, err := w.Write(append(text, '\n')); return err }); err != nil {
		return fail(err)
	}
	for _, d := range []string{filepath.Join(tmp, modelDir), tmp} {
		if err := c.fs.SyncDir(d); err != nil {
			return fail(err)
		}
	}
	if err := c.publish(tmp, dst); err != nil {
		return fail(err)
	}
	if err := c.link(filepath.Base(dst)); err != nil {
		c.warn(err)
	}
	c.prune()
	return dst, nil
}

// link points latest at a step, for people and scripts; the loader never reads it.
func (c *Checkpoints) link(name string) error {
	tmp := filepath.Join(c.dir, tempMark+"latest")
	err := errors.Join(ignoreMissing(os.Remove(tmp)), os.Symlink(name, tmp), os.Rename(tmp, filepath.Join(c.dir, "latest")))
	if err != nil {
		return fmt.Errorf("link latest checkpoint: %w", err)
	}
	return nil
}

// publish renames tmp to dst. A folder already there (a step saved twice after a
// resume, or one that does not verify) is moved aside first and removed last.
func (c *Checkpoints) publish(tmp, dst string) error {
	old := filepath.Join(c.dir, tempMark+"old-"+filepath.Base(dst))
	if _, err := os.Stat(dst); err == nil {
		if err := c.fs.Rename(dst, old); err != nil {
			return err
		}
	}
	if err := c.fs.Rename(tmp, dst); err != nil {
		if _, e := os.Stat(old); e == nil {
			err = errors.Join(err, c.fs.Rename(old, dst))
		}
		return err
	}
	if err := c.fs.SyncDir(c.dir); err != nil {
		c.warn(fmt.Errorf("sync %s: %w", c.dir, err))
	}
	if err := c.fs.RemoveAll(old); err != nil {
		c.warn(fmt.Errorf("remove %s: %w", old, err))
	}
	return nil
}

// sweep removes temporary folders of saves that did not finish. A replaced
// checkpoint that a kill left aside is put back.
func (c *Checkpoints) sweep() error {
	if err := c.fs.Mkdir(c.dir); err != nil {
		return err
	}
	entries, err := os.ReadDir(c.dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		name := e.Name()
		if !strings.HasPrefix(name, tempMark) {
			continue
		}
		path := filepath.Join(c.dir, name)
		if back, ok := strings.CutPrefix(name, tempMark+"old-"); ok {
			if _, err := os.Stat(filepath.Join(c.dir, back)); errors.Is(err, fs.ErrNotExist) {
				if err := c.fs.Rename(path, filepath.Join(c.dir, back)); err != nil {
					return err
				}
				continue
			}
		}
		if err := c.fs.RemoveAll(path); err != nil {
			return err
		}
	}
	return nil
}

// Recover finishes what an interrupted process left: unfinished saves are removed
// and a replaced checkpoint is put back. Call it once before reading.
func (c *Checkpoints) Recover() error {
	if err := c.sweep(); err != nil {
		return diskError("recover checkpoints", c.dir, 0, err)
	}
	return nil
}

// DropAfter removes every checkpoint past step, complete or not: a run that goes
// on from an earlier step makes them again, and must not find them meanwhile.
func (c *Checkpoints) DropAfter(step int) error {
	entries, err := os.ReadDir(c.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("drop checkpoints after step %d: %w", step, err)
	}
	for _, e := range entries {
		if n, ok := stepOf(e.Name()); ok && n > step {
			gone := filepath.Join(c.dir, tempMark+"prune-"+e.Name())
			if err := errors.Join(c.fs.Rename(filepath.Join(c.dir, e.Name()), gone), c.fs.RemoveAll(gone)); err != nil {
				return fmt.Errorf("drop checkpoints after step %d: %w", step, err)
			}
		}
	}
	if steps, err := c.List(); err == nil && len(steps) > 0 {
		if err := c.link(stepName(steps[len(steps)-1])); err != nil {
			c.warn(err)
		}
	}
	return nil
}

// prune applies retention: the newest keep, multiples of every, never the newest
// valid one. Failures are warnings.
func (c *Checkpoints) prune() {
	steps, err := c.List()
	if err != nil {
		c.warn(fmt.Errorf("list checkpoints for clean-up: %w", err))
		return
	}
	for i, s := range steps {
		if i >= len(steps)-c.keep || c.every > 0 && s%c.every == 0 {
			continue
		}
		gone := filepath.Join(c.dir, tempMark+"prune-"+stepName(s))
		if err := c.fs.Rename(c.Path(s), gone); err != nil {
			c.warn(fmt.Errorf("retire checkpoint: %w", err))
			continue
		}
		if err := c.fs.RemoveAll(gone); err != nil {
			c.warn(fmt.Errorf("remove old checkpoint: %w", err))
		}
	}
}

// List returns the steps that have a DONE mark, ascending. Hashes are not checked.
func (c *Checkpoints) List() ([]int, error) {
	entries, err := os.ReadDir(c.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list checkpoints: %w", err)
	}
	var steps []int
	for _, e := range entries {
		num, ok := strings.CutPrefix(e.Name(), "step_")
		step, err := strconv.Atoi(num)
		if !ok || err != nil || e.Name() != stepName(step) {
			continue
		}
		if _, err := os.Stat(filepath.Join(c.dir, e.Name(), doneFile)); err == nil {
			steps = append(steps, step)
		}
	}
	sort.Ints(steps)
	return steps, nil
}

// Verify checks every file of a step against its DONE mark.
func (c *Checkpoints) Verify(step int) error {
	dir := c.Path(step)
	text, err := os.ReadFile(filepath.Join(dir, doneFile))
	if err != nil {
		return fmt.Errorf("verify checkpoint of step %d: %w: %w", step, ErrNoCheckpoint, err)
	}
	var want done
	if err := json.Unmarshal(text, &want); err != nil {
		return fmt.Errorf("verify checkpoint of step %d: %w: %s: %w", step, ErrNoCheckpoint, doneFile, err)
	}
	got, err := hashTree(dir)
	if err != nil {
		return fmt.Errorf("verify checkpoint of step %d: %w: %w", step, ErrNoCheckpoint, err)
	}
	var bad []string
	for name, sum := range want.SHA256 {
		if got.SHA256[name] == "" {
			bad = append(bad, name+" is missing")
		} else if got.SHA256[name] != sum {
			bad = append(bad, name+" has another SHA-256")
		}
	}
	if want.Step != step {
		bad = append(bad, fmt.Sprintf("DONE names step %d", want.Step))
	}
	for _, name := range []string{optimFile, stateFile} {
		if want.SHA256[name] == "" {
			bad = append(bad, name+" is not listed in DONE")
		}
	}
	if len(bad) > 0 {
		sort.Strings(bad)
		return &Error{Op: fmt.Sprintf("verify checkpoint of step %d", step),
			Err:  fmt.Errorf("%w: %s", ErrNoCheckpoint, strings.Join(bad, "; ")),
			Hint: "resume from an older step; this one is damaged"}
	}
	return nil
}

// Latest returns the newest step that verifies. Damaged ones are skipped and
// reported through warn; ErrNoCheckpoint means that none was ever saved, ErrDamaged
// that there are some and none is whole.
func (c *Checkpoints) Latest() (int, error) {
	entries, err := os.ReadDir(c.dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return 0, diskError("find checkpoint", c.dir, 0, err)
	}
	var steps []int
	for _, e := range entries {
		if n, ok := stepOf(e.Name()); ok && e.Name() == stepName(n) {
			steps = append(steps, n)
		}
	}
	sort.Ints(steps)
	for i := len(steps) - 1; i >= 0; i-- {
		err := c.Verify(steps[i])
		if errors.Is(err, fs.ErrPermission) { // says nothing about its content
			return 0, diskError("find checkpoint", c.dir, 0, err)
		}
		if err == nil {
			return steps[i], nil
		}
		c.warn(err)
	}
	if len(steps) > 0 {
		return 0, &Error{Op: "find checkpoint", Err: fmt.Errorf("%s: %w: none of steps %v is whole", c.dir, ErrDamaged, steps),
			Hint: "put back a copy of one of these folders; to give the run up and start it again from step 0: --clean in place of --resume"}
	}
	return 0, fmt.Errorf("find checkpoint in %s: %w", c.dir, ErrNoCheckpoint)
}

// Loaded is a verified checkpoint.
type Loaded struct {
	Step     int
	ModelDir string
	Optim    []Arena
	state    []byte
}

// Load verifies and reads a step. The model stays on disk, in ModelDir.
func (c *Checkpoints) Load(step int) (*Loaded, error) {
	if err := c.Verify(step); err != nil {
		return nil, err
	}
	l := &Loaded{Step: step, ModelDir: filepath.Join(c.Path(step), modelDir)}
	f, err := os.Open(filepath.Join(c.Path(step), optimFile))
	if err != nil {
		return nil, fmt.Errorf("load checkpoint of step %d: %w", step, err)
	}
	defer f.Close()
	if l.Optim, err = readArenas(f); err != nil {
		return nil, fmt.Errorf("load checkpoint of step %d: %s: %w", step, optimFile, err)
	}
	packed, err := os.ReadFile(filepath.Join(c.Path(step), stateFile))
	if err == nil {
		l.state, err = decompress(packed)
	}
	if err != nil {
		return nil, fmt.Errorf("load checkpoint of step %d: %s: %w", step, stateFile, err)
	}
	return l, nil
}

// State decodes the stored state into v, refusing unknown fields.
func (l *Loaded) State(v any) error {
	d := json.NewDecoder(bytes.NewReader(l.state))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		return fmt.Errorf("decode state of step %d: %w", l.Step, err)
	}
	return nil
}

// Arena returns the named optimiser block; a missing or empty one is an error,
// because moments that are silently zero change the run.
func (l *Loaded) Arena(name string) ([]byte, error) {
	for _, a := range l.Optim {
		if a.Name == name && len(a.Data) > 0 {
			return a.Data, nil
		}
	}
	return nil, fmt.Errorf("load optimiser of step %d: no block %q", l.Step, name)
}

// writeArenas writes one zstd frame per arena, each preceded by a skippable frame
// that holds name and sizes as JSON, so a reader can find frames without
// decompressing and the zstd command still reads the file.
func writeArenas(w io.Writer, arenas []Arena) error {
	for _, a := range arenas {
		packed, err := compress(a.Data)
		if err != nil {
			return err
		}
		head, err := json.Marshal(arenaHead{a.Name, int64(len(a.Data)), int64(len(packed))})
		if err != nil {
			return err
		}
		var pre [8]byte
		binary.LittleEndian.PutUint32(pre[:], skippableMagic)
		binary.LittleEndian.PutUint32(pre[4:], uint32(len(head)))
		for _, b := range [][]byte{pre[:], head, packed} {
			if _, err := w.Write(b); err != nil {
				return err
			}
		}
	}
	return nil
}

const skippableMagic = 0x184D2A50 // first of zstd's skippable frame numbers, RFC 8878 3.1.2

type arenaHead struct {
	Name   string `json:"name"`
	Bytes  int64  `json:"bytes"`
	Packed int64  `json:"packed"`
}

func readArenas(r io.Reader) ([]Arena, error) {
	var out []Arena
	for {
		var pre [8]byte
		if _, err := io.ReadFull(r, pre[:]); err == io.EOF {
			return out, nil
		} else if err != nil {
			return nil, err
		}
		n := binary.LittleEndian.Uint32(pre[4:])
		if binary.LittleEndian.Uint32(pre[:]) != skippableMagic || n > 1<<16 {
			return nil, fmt.Errorf("block %d has no header", len(out))
		}
		text := make([]byte, n)
		if _, err := io.ReadFull(r, text); err != nil {
			return nil, err
		}
		var h arenaHead
		if err := json.Unmarshal(text, &h); err != nil {
			return nil, err
		}
		packed, err := io.ReadAll(io.LimitReader(r, h.Packed))
		if err != nil {
			return nil, err
		}
		data, err := decompress(packed)
		if err != nil {
			return nil, fmt.Errorf("block %q: %w", h.Name, err)
		}
		if int64(len(data)) != h.Bytes {
			return nil, fmt.Errorf("block %q has %d bytes, header says %d", h.Name, len(data), h.Bytes)
		}
		out = append(out, Arena{h.Name, data})
	}
}

// hashTree returns the SHA-256 of every file below dir except DONE, by slash path.
func hashTree(dir string) (done, error) {
	d := done{SHA256: map[string]string{}}
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		rel, err := filepath.Rel(dir, path)
		if err != nil || rel == doneFile {
			return err
		}
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		defer f.Close()
		h := sha256.New()
		n, err := io.Copy(h, f)
		if err != nil {
			return err
		}
		d.Bytes += n
		d.SHA256[filepath.ToSlash(rel)] = hex.EncodeToString(h.Sum(nil))
		return nil
	})
	return d, err
}

// compress packs b as one zstd frame; the bytes depend on b alone.
func compress(b []byte) ([]byte, error) {
	e, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1), zstd.WithEncoderLevel(zstd.SpeedFastest))
	if err != nil {
		return nil, fmt.Errorf("start zstd: %w", err)
	}
	defer e.Close()
	return e.EncodeAll(b, nil), nil
}

func decompress(b []byte) ([]byte, error) {
	d, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(1<<38))
	if err != nil {
		return nil, fmt.Errorf("start zstd: %w", err)
	}
	defer d.Close()
	return d.DecodeAll(b, nil)
}
