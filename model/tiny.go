package model

import (
	"bytes"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/klauspost/compress/zstd"

	"harness-s/kernels"
)

//go:embed tiny
var tinyFiles embed.FS

// tinySuffix ends the names of the embedded files; sumsFile lists the sums of their contents under the names without it.
const tinySuffix = ".zst"

// TinyConfig returns the configuration of the embedded checkpoint: about 1.9 million parameters, two key heads and four value heads,
// three linear layers to one full layer.
func TinyConfig() *Config {
	return &Config{
		VocabSize: 1024, Hidden: 128, Intermediate: 384, NumLayers: 8,
		NumHeads: 4, NumKVHeads: 2, HeadDim: 32, RotaryDim: 8,
		RopeTheta: 1e7, RMSEps: 1e-6,
		LinKeyHeads: 2, LinValueHeads: 4, LinKeyDim: 32, LinValueDim: 32, ConvKernel: 4,
		LayerTypes: layerPattern(8, 4), TieEmbeddings: true, MaxPositions: 8192, InitRange: 0.09, // about 1/sqrt(hidden); 0.02 is that of hidden 2560
	}
}

// TinyFS returns the embedded checkpoint as a file system in memory, every file checked against its digest. It returns an error
// wrapping ErrNoTiny when the build has none.
func TinyFS() (fs.FS, error) { return openTiny() }

func openTiny() (memFS, error) {
	sub, err := fs.Sub(tinyFiles, "tiny")
	if err != nil {
		return nil, fmt.Errorf("open tiny checkpoint: %w", err)
	}
	return unpackTiny(sub)
}

func unpackTiny(packed fs.FS) (memFS, error) {
	sums, err := fs.ReadFile(packed, sumsFile)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, &Error{Op: "open tiny checkpoint", Err: ErrNoTiny, Hint: "run: make tiny, then build again; or give the directory of a checkpoint"}
	}
	if err != nil {
		return nil, fmt.Errorf("open tiny checkpoint: %w", err)
	}
	dec, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1))
	if err != nil {
		return nil, fmt.Errorf("open tiny checkpoint: %w", err)
	}
	defer dec.Close()
	out := memFS{}
	for line := range strings.Lines(string(sums)) {
		sum, name, ok := strings.Cut(strings.TrimSpace(line), "  ")
		if !ok {
			return nil, fmt.Errorf("open tiny checkpoint: %s: line %q", sumsFile, line)
		}
		z, err := fs.ReadFile(packed, name+tinySuffix)
		if err != nil {
			return nil, fmt.Errorf("open tiny checkpoint: %w", err)
		}
		b, err := dec.DecodeAll(z, nil)
		if err != nil {
			return nil, fmt.Errorf("decompress %s: %w", name, err)
		}
		if got := digest(b); got != sum {
			return nil, fmt.Errorf("open tiny checkpoint: %s has SHA-256 %s, %s says %s", name, got, sumsFile, sum)
		}
		out[name] = b
	}
	return out, nil
}

// UnpackTiny writes the files of the embedded checkpoint to dir, as SaveAs does: a plain Hugging Face directory for other programs.
func UnpackTiny(dir string) error {
	files, err := openTiny()
	if err != nil {
		return err
	}
	var outs []output
	for _, name := range slices.Sorted(maps.Keys(files)) {
		outs = append(outs, content(name, files[name]))
	}
	return writeDir(dir, outs, nil)
}

func digest(b []byte) string {
	s := sha256.Sum256(b)
	return hex.EncodeToString(s[:])
}

// WriteTiny compresses the regular files, but for SHA256SUMS, of a checkpoint directory into dstDir as TinyFS reads them, and removes compressed files of an
// earlier one. Matrices are stored in bfloat16, as in published checkpoints; vectors stay float32.
func WriteTiny(srcDir, dstDir string) error {
	entries, err := os.ReadDir(srcDir)
	if err != nil {
		return fmt.Errorf("write tiny checkpoint: %w", err)
	}
	if err := os.MkdirAll(dstDir, 0o755); err != nil {
		return fmt.Errorf("write tiny checkpoint: %w", err)
	}
	enc, err := zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedBestCompression), zstd.WithEncoderConcurrency(1))
	if err != nil {
		return fmt.Errorf("write tiny checkpoint: %w", err)
	}
	defer enc.Close()
	var sums strings.Builder
	written := map[string]bool{}
	put := func(name string, b []byte) error {
		written[name] = true
		return writeAtomic(filepath.Join(dstDir, name), func(w io.Writer) error {
			_, err := w.Write(b)
			return err
		})
	}
	for _, e := range entries {
		if !e.Type().IsRegular() || strings.HasPrefix(e.Name(), ".") || e.Name() == sumsFile {
			continue
		}
		b, err := os.ReadFile(filepath.Join(srcDir, e.Name()))
		if err != nil {
			return fmt.Errorf("write tiny checkpoint: %w", err)
		}
		if filepath.Ext(e.Name()) == ".safetensors" {
			if b, err = halveMatrices(b); err != nil {
				return fmt.Errorf("write tiny checkpoint: %s: %w", e.Name(), err)
			}
		}
		if err := put(e.Name()+tinySuffix, enc.EncodeAll(b, nil)); err != nil {
			return err
		}
		fmt.Fprintf(&sums, "%s  %s\n", digest(b), e.Name())
	}
	if len(written) == 0 {
		return fmt.Errorf("write tiny checkpoint: no files in %s", srcDir)
	}
	old, err := filepath.Glob(filepath.Join(dstDir, "*"+tinySuffix))
	if err != nil {
		return fmt.Errorf("write tiny checkpoint: %w", err)
	}
	for _, path := range old {
		if !written[filepath.Base(path)] {
			if err := os.Remove(path); err != nil {
				return fmt.Errorf("write tiny checkpoint: %w", err)
			}
		}
	}
	return put(sumsFile, []byte(sums.String()))
}

// halveMatrices rewrites a safetensors file with every float32 tensor of two or more dimensions rounded to bfloat16.
func halveMatrices(file []byte) ([]byte, error) {
	in, err := ParseSafetensors(file)
	if err != nil {
		return nil, err
	}
	var out []NamedTensor
	for _, name := range in.Names() {
		t, err := in.Tensor(name)
		if err != nil {
			return nil, err
		}
		if t.DType == "F32" && len(t.Shape) >= 2 {
			v, err := t.Float32s()
			if err != nil {
				return nil, err
			}
			t.DType, t.Data = "BF16", make([]byte, 2*len(v))
			kernels.ToBF16s(t.Data, v)
		}
		out = append(out, t)
	}
	dir, err := os.MkdirTemp("", "tiny")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "model.safetensors")
	if err := WriteSafetensors(path, out, in.Metadata); err != nil {
		return nil, err
	}
	return os.ReadFile(path)
}

// memFS is a flat read-only file system in memory.
type memFS map[string][]byte

// Open opens one file.
func (m memFS) Open(name string) (fs.File, error) {
	b, ok := m[name]
	if !ok {
		err := fs.ErrNotExist
		if !fs.ValidPath(name) {
			err = fs.ErrInvalid
		}
		return nil, &fs.PathError{Op: "open", Path: name, Err: err}
	}
	return &memFile{Reader: bytes.NewReader(b), name: name}, nil
}

// memFile is an open file of memFS and its own FileInfo.
type memFile struct {
	*bytes.Reader
	name string
}

func (f *memFile) Stat() (fs.FileInfo, error) { return f, nil }
func (f *memFile) Close() error               { return nil }
func (f *memFile) Name() string               { return f.name }
func (f *memFile) Mode() fs.FileMode          { return 0o444 }
func (f *memFile) ModTime() time.Time         { return time.Time{} }
func (f *memFile) IsDir() bool                { return false }
func (f *memFile) Sys() any                   { return nil }
