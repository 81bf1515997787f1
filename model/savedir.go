package model

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// sumsFile lists the SHA-256 of every other file of a directory that writeDir wrote, as sha256sum prints and checks it.
const sumsFile = "SHA256SUMS"

// savingSuffix ends the name of the hidden folder, beside its final place, in which a directory is written.
const savingSuffix = ".saving"

// AdapterDir is the folder below a merged checkpoint for the adapter that went into it. It goes when the checkpoint is replaced.
const AdapterDir = "adapter"

// output is a file to write; fill gives the same bytes whenever it is called.
type output struct {
	name string
	fill func(io.Writer) error
}

func content(name string, b []byte) output {
	return output{name, func(w io.Writer) error {
		_, err := w.Write(b)
		return err
	}}
}

// writeDir writes a checkpoint directory of plain files. At every instant dir is absent, or holds its old content, or the new one complete:
// files are written and synced in the hidden folder .NAME.saving beside it, which then takes its place in one rename. Files of an existing
// dir that belong to no checkpoint are kept, as hard links. After an error the hidden folder is removed; a killed process leaves it, and
// the next writeDir to the same place goes on there: what already has the right bytes, compared byte by byte, is not written again.
// step, when not nil, is told of each change of the file system before it is made.
func writeDir(dir string, outs []output, step func(string)) (err error) {
	s, err := openSaver(dir, outs, step)
	if err != nil {
		return fmt.Errorf("write checkpoint: %w", err)
	}
	defer s.lock.Close()
	if err := s.fill(outs); err != nil {
		return errors.Join(fmt.Errorf("write checkpoint: %w", err), os.RemoveAll(s.tmp))
	}
	return s.publish()
}

// saver is a directory that is being written.
type saver struct {
	dir, tmp string
	exists   bool     // dir is there and not empty
	lock     *os.File // the open tmp, locked against other processes
	keep     []string // names in dir that are not part of a checkpoint
	step     func(string)
}

func openSaver(dir string, outs []output, step func(string)) (*saver, error) {
	if step == nil {
		step = func(string) {}
	}
	s := &saver{dir: filepath.Clean(dir), step: step}
	if err := s.inspect(outs); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(filepath.Dir(s.dir), 0o755); err != nil {
		return nil, err
	}
	s.tmp = filepath.Join(filepath.Dir(s.dir), "."+filepath.Base(s.dir)+savingSuffix)
	for {
		s.step("make " + s.tmp)
		if err := os.Mkdir(s.tmp, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			return nil, err
		}
		f, err := os.Open(s.tmp)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
			f.Close()
			return nil, &Error{Op: "lock " + s.tmp, Err: err, Hint: "another process is writing to " + s.dir + ": wait for it, or give another directory"}
		}
		mine, err := f.Stat()
		if err != nil {
			f.Close()
			return nil, err
		}
		if now, err := os.Lstat(s.tmp); err == nil && os.SameFile(mine, now) {
			s.lock = f
			return s, nil
		}
		f.Close() // another process published it between open and lock
	}
}

// inspect finds out what is at the final place, and refuses what cannot be replaced in one step.
func (s *saver) inspect(outs []output) error {
	if _, err := os.Lstat(s.dir); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	real, err := filepath.EvalSymlinks(s.dir)
	if err != nil {
		return err
	}
	s.dir = real
	entries, err := os.ReadDir(s.dir)
	if err != nil {
		return err
	}
	mount, merr := mountID(s.dir)
	parent, perr := mountID(filepath.Dir(s.dir))
	if err := errors.Join(merr, perr); err != nil {
		return err
	}
	if mount != parent {
		return &Error{Op: "replace " + s.dir, Err: errors.New("it is a mount point"), Hint: "give a directory inside it, which need not exist"}
	}
	s.exists = len(entries) > 0
	for _, e := range entries {
		switch {
		case slices.ContainsFunc(outs, func(o output) bool { return o.name == e.Name() }), ofCheckpoint(e.Name()), e.Name() == AdapterDir && e.IsDir():
		case e.IsDir():
			return &Error{Op: "replace " + s.dir, Err: fmt.Errorf("it holds the folder %s, which is no part of a checkpoint", e.Name()),
				Hint: "give another directory, or move that folder away"}
		default:
			s.keep = append(s.keep, e.Name())
		}
	}
	return nil
}

// mountID tells file systems, and binds of the same one, apart.
func mountID(path string) (uint64, error) {
	var st unix.Statx_t
	if err := unix.Statx(unix.AT_FDCWD, path, 0, unix.STATX_MNT_ID, &st); err != nil {
		return 0, fmt.Errorf("stat %s: %w", path, err)
	}
	return st.Mnt_id, nil
}

// ofCheckpoint reports whether a save replaces or removes a file of this name.
func ofCheckpoint(name string) bool {
	return name == configFile || name == adapterConfigFile || name == sumsFile || strings.HasSuffix(name, ".safetensors") || strings.HasSuffix(name, ".safetensors.index.json") ||
		slices.Contains(sideFiles(), name)
}

// fill makes the hidden folder hold outs, their sums and the kept files, durably, and nothing else.
func (s *saver) fill(outs []output) error {
	entries, err := os.ReadDir(s.tmp)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if !slices.ContainsFunc(outs, func(o output) bool { return o.name == e.Name() }) {
			s.step("remove " + e.Name())
			if err := os.RemoveAll(filepath.Join(s.tmp, e.Name())); err != nil {
				return err
			}
		}
	}
	sums := map[string]string{}
	for _, o := range outs {
		if sums[o.name], err = s.file(o); err != nil {
			return fmt.Errorf("%s: %w", o.name, err)
		}
	}
	var list bytes.Buffer
	for _, name := range slices.Sorted(maps.Keys(sums)) {
		fmt.Fprintf(&list, "%s  %s\n", sums[name], name)
	}
	if _, err := s.file(content(sumsFile, list.Bytes())); err != nil {
		return fmt.Errorf("%s: %w", sumsFile, err)
	}
	for _, name := range s.keep {
		s.step("link " + name)
		if err := os.Link(filepath.Join(s.dir, name), filepath.Join(s.tmp, name)); err != nil {
			return err
		}
	}
	s.step("sync")
	return s.lock.Sync()
}

// file writes one file, or completes it, and returns its SHA-256 in hexadecimal.
func (s *saver) file(o output) (sum string, err error) {
	path := filepath.Join(s.tmp, o.name)
	// What is there may be a link to data that are not ours: of an old directory that took this place in the exchange.
	if st, err := os.Lstat(path); err == nil && (!st.Mode().IsRegular() || links(st) > 1) {
		s.step("unlink " + o.name)
		if err := os.RemoveAll(path); err != nil {
			return "", err
		}
	}
	s.step("create " + o.name)
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o644)
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	st, err := f.Stat()
	if err != nil {
		return "", err
	}
	r := &resumer{f: f, step: s.step, same: st.Size(), sum: sha256.New()}
	w := bufio.NewWriterSize(r, 1<<20)
	if err := o.fill(w); err != nil {
		return "", err
	}
	if err := w.Flush(); err != nil {
		return "", err
	}
	s.step("truncate " + o.name)
	if err := f.Truncate(r.at); err != nil {
		return "", err
	}
	if err := f.Chmod(0o644); err != nil {
		return "", err
	}
	s.step("sync " + o.name)
	return hex.EncodeToString(r.sum.Sum(nil)), f.Sync()
}

func links(st fs.FileInfo) uint64 {
	if u, ok := st.Sys().(*syscall.Stat_t); ok {
		return uint64(u.Nlink)
	}
	return 2 // unknown: not reused
}

// resumer writes a file from its beginning. As long as the bytes agree with those that an earlier process left, it only reads.
type resumer struct {
	f    *os.File
	step func(string)
	at   int64
	same int64 // where the left bytes end, 0 once they differ
	buf  []byte
	sum  hash.Hash
}

func (r *resumer) Write(b []byte) (int, error) {
	r.sum.Write(b)
	end := r.at + int64(len(b))
	if end <= r.same {
		r.buf = slices.Grow(r.buf[:0], len(b))[:len(b)]
		if _, err := r.f.ReadAt(r.buf, r.at); err != nil {
			return 0, err
		}
		if bytes.Equal(r.buf, b) {
			r.at = end
			return len(b), nil
		}
	}
	r.same = 0
	r.step("write")
	n, err := r.f.WriteAt(b, r.at)
	r.at += int64(n)
	return n, err
}

// publish puts the complete hidden folder in its place. It stays when that fails.
func (s *saver) publish() error {
	s.step("publish")
	var err error
	if s.exists {
		err = unix.Renameat2(unix.AT_FDCWD, s.tmp, unix.AT_FDCWD, s.dir, unix.RENAME_EXCHANGE)
	} else {
		err = unix.Rename(s.tmp, s.dir) // takes the place of an empty directory too
	}
	if err != nil {
		return &Error{Op: "write checkpoint", Err: fmt.Errorf("move %s to %s: %w", s.tmp, s.dir, err),
			Hint: "the checkpoint is complete in the first of these: move it to where you want it"}
	}
	s.step("sync parent")
	if err := syncDir(filepath.Dir(s.dir)); err != nil {
		return fmt.Errorf("write checkpoint: %w", err)
	}
	if !s.exists {
		return nil
	}
	s.step("remove old")
	if err := os.RemoveAll(s.tmp); err != nil {
		return fmt.Errorf("write checkpoint: remove the old one: %w", err)
	}
	return nil
}
