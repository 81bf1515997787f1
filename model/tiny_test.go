package model

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestTinyRoundTrip(t *testing.T) {
	src, dst := t.TempDir(), filepath.Join(t.TempDir(), "tiny")
	for name, text := range map[string]string{"config.json": "{}", "b.txt": strings.Repeat("x", 1000), ".hidden": "no"} {
		if err := os.WriteFile(filepath.Join(src, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := unpackTiny(os.DirFS(src)); !errors.Is(err, ErrNoTiny) {
		t.Errorf("no checkpoint: %v", err)
	}
	for range 2 {
		if err := WriteTiny(src, dst); err != nil {
			t.Fatal(err)
		}
	}
	fsys, err := unpackTiny(os.DirFS(dst))
	if err != nil {
		t.Fatal(err)
	}
	if b, err := fs.ReadFile(fsys, "b.txt"); err != nil || len(b) != 1000 {
		t.Errorf("%d bytes, %v", len(b), err)
	}
	if _, err := fs.ReadFile(fsys, ".hidden"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("hidden file: %v", err)
	}
	sums, err := os.ReadFile(filepath.Join(dst, sumsFile))
	if err != nil {
		t.Fatal(err)
	}
	sums[0] ^= 1
	if err := os.WriteFile(filepath.Join(dst, sumsFile), sums, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := unpackTiny(os.DirFS(dst)); err == nil || !strings.Contains(err.Error(), "SHA-256") {
		t.Errorf("wrong digest: %v", err)
	}
	if err := WriteTiny(t.TempDir(), dst); err == nil {
		t.Error("an empty directory was packed")
	}
}

// The embedded checkpoint, when this build has one, is what TinyConfig says.
func TestEmbeddedTiny(t *testing.T) {
	fsys, err := TinyFS()
	if errors.Is(err, ErrNoTiny) {
		t.Skip("no embedded checkpoint in this build; run: make tiny")
	}
	if err != nil {
		t.Fatal(err)
	}
	b, err := fs.ReadFile(fsys, configFile)
	if err != nil {
		t.Fatal(err)
	}
	cfg, err := ParseConfig(b)
	if err != nil {
		t.Fatal(err)
	}
	if cfg.NumParams() != TinyConfig().NumParams() {
		t.Errorf("%d parameters, TinyConfig has %d", cfg.NumParams(), TinyConfig().NumParams())
	}
	c, err := OpenCheckpointFS(fsys)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Check(cfg); err != nil {
		t.Error(err)
	}
	dir := filepath.Join(t.TempDir(), "new")
	if err := UnpackTiny(dir); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(filepath.Join(dir, configFile)); err != nil || !bytes.Equal(got, b) {
		t.Errorf("unpacked %s: %d bytes, %v", configFile, len(got), err)
	}
	if _, err := LoadTokenizer(fsys); err != nil {
		t.Error(err)
	}
}
