package model

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
)

// ErrNoSums is wrapped by VerifySums when a directory has no SHA256SUMS, as published checkpoints have none.
var ErrNoSums = errors.New("no " + sumsFile)

// sum is a line of SHA256SUMS.
type sum struct{ hex, name string }

// readSums reads SHA256SUMS of a directory; every line must name a plain file in it.
func readSums(dir string) ([]sum, error) {
	text, err := os.ReadFile(filepath.Join(dir, sumsFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%s: %w", dir, ErrNoSums)
	}
	if err != nil {
		return nil, err
	}
	var out []sum
	for line := range strings.Lines(string(text)) {
		h, name, ok := strings.Cut(strings.TrimRight(line, "\r\n"), "  ")
		if !ok || len(h) != 2*sha256.Size || name == "" || name != filepath.Base(name) || strings.HasPrefix(name, ".") {
			return nil, fmt.Errorf("%s: line %d is %.100q, want a SHA-256, two spaces and a file name", filepath.Join(dir, sumsFile), len(out)+1, line)
		}
		out = append(out, sum{h, name})
	}
	return out, nil
}

// VerifySums hashes every file that SHA256SUMS of dir lists, which SaveAs writes, several files at a time. It returns the number of files
// and bytes that are right. All files that are missing or have another sum are reported, and weight files that are not listed.
func VerifySums(dir string) (files int, bytes int64, err error) {
	sums, err := readSums(dir)
	if err != nil {
		return 0, 0, fmt.Errorf("verify checkpoint: %w", err)
	}
	bad := make([]error, len(sums))
	var total atomic.Int64
	err = parallel(len(sums), func() (func(int) error, func()) {
		return func(i int) error {
			got, n, err := hashFile(filepath.Join(dir, sums[i].name))
			total.Add(n)
			switch {
			case err != nil:
				bad[i] = err
			case !strings.EqualFold(got, sums[i].hex):
				bad[i] = fmt.Errorf("%s has SHA-256 %.12s, %s says %.12s", sums[i].name, got, sumsFile, sums[i].hex)
			}
			return nil
		}, func() {}
	})
	if err != nil {
		return 0, 0, err
	}
	var p problems
	listed := map[string]bool{}
	for i, s := range sums {
		listed[s.name] = true
		if bad[i] != nil {
			p = append(p, bad[i])
		}
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return 0, 0, fmt.Errorf("verify checkpoint: %w", err)
	}
	for _, e := range entries {
		if strings.HasSuffix(e.Name(), ".safetensors") && !listed[e.Name()] {
			p.addf("%s is not listed in %s", e.Name(), sumsFile)
		}
	}
	if len(p) > 0 {
		return 0, 0, &Error{Op: "verify " + dir, Err: p.err(), Hint: "the checkpoint is damaged or was changed after it was written: write or copy it again"}
	}
	return len(sums), total.Load(), nil
}

func hashFile(path string) (sum string, n int64, err error) {
	f, err := os.Open(path)
	if err != nil {
		return "", 0, err
	}
	defer f.Close()
	h := sha256.New()
	n, err = io.Copy(h, f)
	return hex.EncodeToString(h.Sum(nil)), n, err
}
