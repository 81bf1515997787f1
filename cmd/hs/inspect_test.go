package main

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// TestShowKeepsNumbers checks that a filter does not renumber what it leaves: the numbers are what people type next.
func TestShowKeepsNumbers(t *testing.T) {
	var out bytes.Buffer
	g := &globals{out: &out}
	groups := []groupView{{Index: 0, Task: "a", Kind: "kept", Question: "Tables: x\nQuestion: which?"}, {Index: 1, Task: "b", Kind: "rescued", Question: "Tables: x\nQuestion: who?"}}
	if err := (&showCmd{Rescued: true}).step(g, 1, groups); err != nil {
		t.Fatal(err)
	}
	if lines := strings.Split(out.String(), "\n"); len(lines) != 3 || !strings.HasPrefix(lines[1], "1  ") || !strings.Contains(lines[1], "who?") || strings.Contains(lines[1], "Tables") {
		t.Errorf("step table:\n%s", out.String())
	}
	out.Reset()
	q := groupView{Task: "b", Attempts: []attemptView{{Index: 0, Harness: "original"}, {Index: 1, Harness: "other", Success: true, InUpdate: true, Advantage: 1.5}}}
	if err := (&showCmd{Best: true}).group(g, q); err != nil {
		t.Fatal(err)
	}
	if lines := strings.Split(out.String(), "\n"); len(lines) != 3 || !strings.HasPrefix(lines[1], "1  ") || !strings.Contains(lines[1], "+1.50") {
		t.Errorf("attempt table:\n%s", out.String())
	}
}

// TestRunPath checks that a run is found by name and by directory, whatever slashes that has.
func TestRunPath(t *testing.T) {
	dir := writeRun(t, "")
	t.Chdir(filepath.Dir(filepath.Dir(dir)))
	base, parent := filepath.Base(dir), filepath.Base(filepath.Dir(dir))
	g := &globals{Root: filepath.Dir(dir)}
	for path, want := range map[string][]string{
		base:                           {base},
		base + "/":                     {base},
		base + "/3/0/1":                {base, "3", "0", "1"},
		dir:                            {dir},
		dir + "/3":                     {dir, "3"},
		parent + "/" + base + "/3/a-b": {parent + "/" + base, "3", "a-b"},
		"nope/3":                       {"nope", "3"},
		"":                             {""},
	} {
		if got := g.splitPath(path); !slices.Equal(got, want) {
			t.Errorf("%q: %q, want %q", path, got, want)
		}
	}
}

// TestDamagedRun checks that files that cannot be read are named with what to do, that ls still lists the run, and that a line that is
// still being written is not damage.
func TestDamagedRun(t *testing.T) {
	const step = `{"schema":1,"step":1,"reward/mean":0.5}` + "\n"
	for name, c := range map[string]struct {
		file, text string
		damaged    bool
	}{
		"cut metrics":  {"metrics.jsonl", step + "{\"schema\":1,", false},
		"bad metrics":  {"metrics.jsonl", step + "{\n", true},
		"bad eval":     {"evals/a.json", "x", true},
		"bad manifest": {"manifest.json", "{", true},
	} {
		t.Run(name, func(t *testing.T) {
			dir := writeRun(t, step, `{"step":0,"k":3}`)
			must(t, os.WriteFile(filepath.Join(dir, c.file), []byte(c.text), 0o644))
			code, _, e := hs(t, "-C", filepath.Dir(dir), "report", dir)
			if c.damaged && (code != exitFailure || !strings.Contains(e, "hint: restore that file")) || !c.damaged && code != exitOK {
				t.Errorf("report: exit code %d, %s", code, e)
			}
			code, out, e := hs(t, "-C", filepath.Dir(dir), "ls")
			if code != exitOK || strings.Contains(out, "damaged") != c.damaged {
				t.Errorf("ls: exit code %d, %s\n%s", code, e, out)
			}
		})
	}
}
