package trainer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// files is what checkpoints and run directories do to a file system; tests put
// failures between the calls. Every method is one step that a kill can separate
// from the next.
type files interface {
	Mkdir(path string) error
	Create(path string) (file, error)
	Rename(from, to string) error
	RemoveAll(path string) error
	SyncDir(path string) error
}

// file is an open file being written.
type file interface {
	io.Writer
	Sync() error
	Close() error
}

// osFiles is the real file system.
type osFiles struct{}

func (osFiles) Mkdir(p string) error          { return os.MkdirAll(p, 0o755) }
func (osFiles) Create(p string) (file, error) { return os.Create(p) }
func (osFiles) Rename(a, b string) error      { return os.Rename(a, b) }
func (osFiles) RemoveAll(p string) error      { return os.RemoveAll(p) }
func (osFiles) SyncDir(p string) error        { return syncDir(p) }

func syncDir(p string) error {
	d, err := os.Open(p)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}

// WriteAtomic writes a file so that a reader sees the old content or the new,
// never a part: temp file, fsync, rename, fsync of the directory.
func WriteAtomic(path string, data []byte) error { return writeAtomic(osFiles{}, path, data) }

func writeAtomic(fs files, path string, data []byte) error {
	tmp := path + ".tmp"
	err := writeFile(fs, tmp, func(w io.Writer) error { _, err := w.Write(data); return err })
	if err == nil {
		err = fs.Rename(tmp, path)
	}
	if err == nil {
		err = fs.SyncDir(filepath.Dir(path))
	}
	if err != nil {
		return diskError("write "+filepath.Base(path), path, int64(len(data)), errors.Join(err, ignoreMissing(fs.RemoveAll(tmp))))
	}
	return nil
}

// writeFile creates path, lets fill write it, and syncs it.
func writeFile(fs files, path string, fill func(io.Writer) error) error {
	f, err := fs.Create(path)
	if err != nil {
		return err
	}
	err = fill(f)
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

// appended is a file that grows by whole blocks: what a failed write left of a block is cut off again.
type appended struct {
	*os.File
	size int64
	torn bool // bytes past size may exist
}

// openAppended opens path at its end, creating it when absent; flags are added to those of os.OpenFile.
func openAppended(path string, flags int) (*appended, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND|flags, 0o644)
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return &appended{File: f, size: info.Size()}, nil
}

// append adds b as a whole or not at all.
func (a *appended) append(b []byte) error {
	if a.torn {
		if err := a.Truncate(a.size); err != nil {
			return err
		}
		a.torn = false
	}
	if _, err := a.Write(b); err != nil {
		a.torn = a.Truncate(a.size) != nil
		return err
	}
	a.size += int64(len(b))
	return nil
}

func ignoreMissing(err error) error {
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}

// FreeBytes is what an unprivileged process can still write below path.
func FreeBytes(path string) (int64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(path, &st); err != nil {
		return 0, fmt.Errorf("read free space of %s: %w", path, err)
	}
	return int64(st.Bavail) * st.Bsize, nil
}

// CheckOutput finds out before the work that its result of about need bytes can be written to path later.
func CheckOutput(path string, need int64) error {
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return diskError("check output", path, 0, err)
	}
	f, err := os.CreateTemp(dir, ".probe-*")
	if err != nil {
		return diskError("check output", path, need, err)
	}
	if err := errors.Join(f.Close(), os.Remove(f.Name())); err != nil {
		return diskError("check output", path, 0, err)
	}
	if free, err := FreeBytes(dir); err == nil && free < need {
		return diskError("check output", path, need, unix.ENOSPC)
	}
	return nil
}

// diskProbeFirst and diskProbeMost are how long a full disk is given before the next try: the first time, and at most.
const diskProbeFirst, diskProbeMost = 500 * time.Millisecond, 30 * time.Second

// persist calls write until the disk has space for it: a full disk pauses the caller with its state in memory. The pause ends with write's
// error after limit (0 = never), or at once when stop closes. note says that it begins and ends.
func persist(ctx context.Context, limit Duration, stop <-chan struct{}, note func(string), write func() error) error {
	began := time.Now()
	for pause := diskProbeFirst; ; pause = min(2*pause, diskProbeMost) {
		err := write()
		if err == nil && pause > diskProbeFirst {
			note(fmt.Sprintf("resumed after %.0f s: the disk has space again", since(began)))
		}
		if !errors.Is(err, ErrNoSpace) {
			return err
		}
		wait := pause
		if limit > 0 {
			wait = min(wait, limit.D()-time.Since(began))
		}
		if pause == diskProbeFirst && wait > 0 {
			text := "paused: " + err.Error() + "; it goes on by itself when there is space"
			if limit > 0 {
				text += fmt.Sprintf(" and stops after %s (run.pause_limit)", limit)
			}
			note(text)
		}
		timer := time.NewTimer(max(wait, 0))
		select {
		case <-stop:
			timer.Stop()
			return err
		case <-ctx.Done():
			timer.Stop()
			return context.Cause(ctx)
		case <-timer.C:
		}
		if wait <= 0 {
			return err
		}
	}
}

// diskError says what to do about a failed write to path. A full disk gives an error that wraps ErrNoSpace and names the space that is
// needed (0 = unknown) and free.
func diskError(op, path string, need int64, err error) error {
	if err == nil {
		return nil
	}
	out := &Error{Op: op, Err: fmt.Errorf("%s: %w", path, err)}
	switch {
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		dir := filepath.Dir(path)
		for {
			if _, e := os.Stat(dir); e == nil || dir == filepath.Dir(dir) {
				break
			}
			dir = filepath.Dir(dir)
		}
		space := ""
		if need > 0 {
			space = sizeText(need) + " needed"
		}
		if free, ferr := FreeBytes(dir); ferr == nil {
			space = strings.TrimPrefix(space+", "+sizeText(free)+" free", ", ")
		}
		out.Err = fmt.Errorf("%s: %w (%s): %w", path, ErrNoSpace, space, err)
		out.Hint = "free space on that file system or raise its quota; see with: df -h " + dir
	case errors.Is(err, os.ErrPermission), errors.Is(err, unix.EROFS):
		out.Hint = "make the folder writable for this user, or choose another runs root with -C DIR"
	case errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.EISDIR), errors.Is(err, os.ErrExist):
		out.Hint = "a file is where a folder is expected, or the reverse: move it away, or choose another runs root with -C DIR"
	case errors.Is(err, os.ErrNotExist):
		out.Hint = "the folder was removed or renamed while it was in use: put it back, or start again"
	}
	return out
}

// sizeText shows bytes with a binary unit: 512 B, 42.3 MiB.
func sizeText(n int64) string {
	if n < 1<<10 {
		return fmt.Sprintf("%d B", n)
	}
	v := float64(n)
	for _, unit := range []string{"KiB", "MiB", "GiB"} {
		if v /= 1 << 10; v < 1<<10 {
			return fmt.Sprintf("%.1f %s", v, unit)
		}
	}
	return fmt.Sprintf("%.1f TiB", v/(1<<10))
}
