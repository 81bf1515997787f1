package main

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestInitModelRefuses(t *testing.T) {
	full := t.TempDir()
	must(t, os.WriteFile(filepath.Join(full, "notes.txt"), []byte("mine"), 0o644))
	fresh := filepath.Join(t.TempDir(), "new")
	for _, c := range []struct {
		name string
		args []string
		want []string
	}{
		{"no size", []string{"--out", fresh}, []string{"--like"}},
		{"no directory", []string{"--like", "4b"}, []string{"--out"}},
		{"unknown size", []string{"--like", "3b", "--out", fresh}, []string{`"3b"`, "hint: one of: 0.8b, 2b, 4b, 9b"}},
		{"too many layers", []string{"--like", "0.8b", "--layers", "28", "--out", fresh}, []string{"layers = 28", "4 to 24", "hint: --layers 4"}},
		{"broken pattern", []string{"--like", "0.8b", "--layers", "6", "--out", fresh}, []string{"layers = 6", "multiple of 4"}},
		{"unknown dtype", []string{"--like", "0.8b", "--dtype", "f16", "--out", fresh}, []string{"--dtype", "f32", "bf16"}},
		{"files in the way", []string{"--like", "0.8b", "--layers", "4", "--out", full}, []string{"not empty", "notes.txt", "hint:"}},
		{"a file in the way", []string{"--like", "0.8b", "--layers", "4", "--out", filepath.Join(full, "notes.txt")}, []string{"notes.txt", "hint:"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			code, out, errOut := hs(t, append([]string{"init-model", "--json"}, c.args...)...)
			if v := lastJSON(t, out); code != exitUsage || v["ok"] != false {
				t.Errorf("exit code %d, %v", code, v)
			}
			for _, w := range c.want {
				if !strings.Contains(errOut, w) {
					t.Errorf("stderr lacks %q:\n%s", w, errOut)
				}
			}
		})
	}
	if _, err := os.Stat(fresh); err == nil {
		t.Errorf("%s was made although the command was refused", fresh)
	}
}

func TestCheckSpace(t *testing.T) {
	r := initModelResult{Path: "big", Like: "9b", Layers: 32, DType: "bf16", Bytes: 18 << 30}
	if err := checkSpace(r, 20<<30); err != nil {
		t.Errorf("enough room: %v", err)
	}
	err := checkSpace(r, 18<<30)
	var e exitError
	if !errors.As(err, &e) || e.code != exitUsage || !strings.Contains(err.Error(), "needs 18.00 GiB") || !strings.Contains(hintOf(err), "--layers") {
		t.Errorf("too little room: %v", err)
	}
}
