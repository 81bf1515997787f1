package trainer

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

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
		return diskError("write "+filepath.Base(path), path, errors.Join(err, ignoreMissing(fs.RemoveAll(tmp))))
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

// diskError names path and free bytes of a failed write; a full disk gets a hint
// and wraps ErrNoSpace.
func diskError(op, path string, err error) error {
	dir := filepath.Dir(path)
	for {
		if _, e := os.Stat(dir); e == nil || dir == filepath.Dir(dir) {
			break
		}
		dir = filepath.Dir(dir)
	}
	free, ferr := FreeBytes(dir)
	if ferr != nil {
		free = -1
	}
	out := &Error{Op: op, Err: fmt.Errorf("%s (%d bytes free): %w", path, free, err)}
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		out.Err = fmt.Errorf("%s (%d bytes free): %w: %w", path, free, ErrNoSpace, err)
		out.Hint = "free space on that file system; the run keeps its state in memory and the next save tries again"
	}
	return out
}
