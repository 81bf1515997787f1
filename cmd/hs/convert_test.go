package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"harness-s/model"
)

// The shipped checkpoint, converted with itself as the original, is the same tensors in the same dtypes.
func TestConvertKeeps(t *testing.T) {
	dir := t.TempDir()
	from, to := filepath.Join(dir, "from"), filepath.Join(dir, "to")
	if err := model.UnpackTiny(from); err != nil {
		t.Fatal(err)
	}
	code, out, errOut := hs(t, "convert", "--ckpt", from, "--keep", from, "--out", to, "--json")
	if code != exitOK || !strings.Contains(out, `"params":1849840`) {
		t.Fatalf("exit code %d\n%s%s", code, out, errOut)
	}
	open := func(d string) *model.Safetensors {
		f, err := model.ReadSafetensors(filepath.Join(d, "model.safetensors"))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.Close() })
		return f
	}
	a, b := open(from), open(to)
	if len(a.Names()) != len(b.Names()) {
		t.Errorf("%d tensors became %d", len(a.Names()), len(b.Names()))
	}
	for _, name := range a.Names() {
		x, err := a.Tensor(name)
		if err != nil {
			t.Fatal(err)
		}
		y, err := b.Tensor(name)
		if err != nil || x.DType != y.DType || !bytes.Equal(x.Data, y.Data) {
			t.Errorf("%s: %s became %s, %v", name, x.DType, y.DType, err)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "mine"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ args, want string }{
		{"--out " + filepath.Join(dir, "x"), "nothing to convert"},
		{"--ckpt " + from + " --out " + dir, "empty"},
		{"--run none --out " + filepath.Join(dir, "x") + " -C " + dir, "none"},
		{"--ckpt " + from + " --shard-gib -1 --out " + filepath.Join(dir, "x"), "--shard-gib"},
	} {
		code, _, errOut := hs(t, append([]string{"convert"}, strings.Fields(c.args)...)...)
		if code != exitUsage || !strings.Contains(errOut, c.want) {
			t.Errorf("%s: exit code %d\n%s", c.args, code, errOut)
		}
	}
}
