package model

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"harness-s/kernels"
)

// killModel is the model that the kill test saves; seed chooses the weights.
func killModel(dev *kernels.Device, seed uint64) (*Model, error) {
	cfg := TinyConfig()
	cfg.NumLayers, cfg.LayerTypes, cfg.Hidden, cfg.Intermediate = 4, layerPattern(4, 4), 64, 128
	return NewRandom(cfg, dev, seed, LoadOptions{})
}

var killOptions = SaveOptions{MaxShardBytes: 300 << 10}

// TestMain saves a checkpoint when it is the process that a kill test started: to HS_TEST_SAVE_TO, with the weights of HS_TEST_SAVE_SEED,
// and it kills itself before change HS_TEST_SAVE_KILL of the file system (-1 = never). The number of changes goes to stdout.
func TestMain(m *testing.M) {
	dir := os.Getenv("HS_TEST_SAVE_TO")
	if dir == "" {
		os.Exit(m.Run())
	}
	if err := savedAndKilled(dir); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func savedAndKilled(dir string) error {
	seed, err := strconv.ParseUint(os.Getenv("HS_TEST_SAVE_SEED"), 10, 64)
	if err != nil {
		return err
	}
	last, err := strconv.Atoi(os.Getenv("HS_TEST_SAVE_KILL"))
	if err != nil {
		return err
	}
	dev, err := kernels.Open("cpu", kernels.Options{Threads: 1})
	if err != nil {
		return err
	}
	m, err := killModel(dev, seed)
	if err != nil {
		return err
	}
	fmt.Println("ready")
	steps := 0
	err = m.saveAs(dir, killOptions, func(string) {
		if steps == last {
			syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {}
		}
		steps++
	})
	fmt.Println(steps)
	return err
}

// saveIn starts a process that saves to dir and is killed before change number kill, or, with kill < 0, after the given time.
func saveIn(t *testing.T, dir string, seed uint64, kill int, after time.Duration) (steps int, killed bool) {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "HS_TEST_SAVE_TO="+dir, fmt.Sprint("HS_TEST_SAVE_SEED=", seed), fmt.Sprint("HS_TEST_SAVE_KILL=", kill))
	var out, errOut bytes.Buffer
	cmd.Stderr = &errOut
	pipe, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := io.CopyN(&out, pipe, int64(len("ready\n"))); err != nil {
		t.Fatalf("%v: %s", err, &errOut)
	}
	if after > 0 {
		time.Sleep(after)
		if err := cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
			t.Fatal(err)
		}
	}
	rest, err := io.ReadAll(pipe)
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		if ws, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); ok && ws.Signaled() && ws.Signal() == syscall.SIGKILL {
			return 0, true
		}
		t.Fatalf("%v: %s", err, &errOut)
	}
	steps, err = strconv.Atoi(strings.TrimSpace(string(rest)))
	if err != nil {
		t.Fatal(err)
	}
	return steps, false
}

// dirFiles returns the content of every file of a directory, nil when it does not exist.
func dirFiles(t *testing.T, dir string) map[string]string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	for _, e := range entries {
		b, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			t.Fatal(err)
		}
		out[e.Name()] = string(b)
	}
	return out
}

func equalFiles(a, b map[string]string) bool {
	if len(a) != len(b) {
		return false
	}
	for name, x := range a {
		if y, ok := b[name]; !ok || x != y {
			return false
		}
	}
	return true
}

// TestKilledSaves kills saves at 100 random points: 80 before a change of the file system, 20 at a time. The destination does not exist
// (half of the cases) or holds an older checkpoint with more shards and a file of the user's. Whatever the point, it is then what it was or
// complete; the same save again, going on with what is left, gives exactly the files of one that was never interrupted, and nothing else.
func TestKilledSaves(t *testing.T) {
	dev := openCPU(t)
	root := t.TempDir()
	saved := func(name string, seed uint64, o SaveOptions) map[string]string {
		m, err := killModel(dev, seed)
		if err != nil {
			t.Fatal(err)
		}
		defer m.Close()
		dir := filepath.Join(root, name)
		if err := m.SaveAs(dir, o); err != nil {
			t.Fatal(err)
		}
		return dirFiles(t, dir)
	}
	want := saved("new", 1, killOptions)
	old := saved("old", 2, SaveOptions{MaxShardBytes: 150 << 10})
	old["notes.txt"] = "mine"
	if len(want) < 6 || len(old) < 9 {
		t.Fatalf("%d and %d files: too few shards", len(want), len(old))
	}
	over := map[string]string{"notes.txt": "mine"}
	for name, x := range want {
		over[name] = x
	}
	begin := time.Now()
	steps, killed := saveIn(t, filepath.Join(root, "count"), 1, -1, 0)
	took := time.Since(begin)
	if killed || steps < 20 {
		t.Fatalf("%d changes, killed %v", steps, killed)
	}
	rng := rand.New(rand.NewPCG(1, 2))
	var mu sync.Mutex
	count := map[string]int{}
	t.Run("kills", func(t *testing.T) {
		for i := range 100 {
			dir := filepath.Join(root, fmt.Sprint("at", i), "out")
			before, after := map[string]string(nil), want
			if i%2 == 1 {
				before, after = old, over
			}
			at, wait := rng.IntN(steps+3), time.Duration(0) // an existing directory takes a few changes more
			if i%5 == 4 {
				at, wait = -1, 1+time.Duration(rng.Int64N(int64(took)))
			}
			t.Run(fmt.Sprintf("%d/%d/%v", i, at, wait), func(t *testing.T) {
				t.Parallel()
				result := killOnce(t, dir, before, after, at, wait)
				mu.Lock()
				defer mu.Unlock()
				count[result]++
			})
		}
	})
	t.Logf("%d changes of the file system in a save; after the kill: %v", steps, count)
	if count["as before"] < 20 || count["complete"] < 1 {
		t.Errorf("kills hit one side only: %v", count)
	}
}

// killOnce kills a save, looks at the destination, and saves again.
func killOnce(t *testing.T, dir string, before, after map[string]string, at int, wait time.Duration) (result string) {
	place := filepath.Dir(dir)
	if err := os.Mkdir(place, 0o755); err != nil {
		t.Fatal(err)
	}
	if before != nil {
		writeFiles(t, dir, before)
	}
	_, killed := saveIn(t, dir, 1, at, wait)
	switch now := dirFiles(t, dir); {
	case equalFiles(now, after):
		result = "complete"
	case !killed:
		t.Fatal("not killed, and not complete")
	case (now == nil) == (before == nil) && equalFiles(now, before):
		result = "as before"
	default:
		t.Fatalf("neither old nor new: %q", names(now))
	}
	if killed {
		if _, killed := saveIn(t, dir, 1, -1, 0); killed {
			t.Fatal("killed")
		}
	}
	if now := dirFiles(t, dir); !equalFiles(now, after) {
		t.Fatalf("the next save gives %q", names(now))
	}
	if left, err := os.ReadDir(place); err != nil || len(left) != 1 {
		t.Fatalf("left behind %v (%v)", left, err)
	}
	return result
}

func names(files map[string]string) (out []string) {
	for name := range files {
		out = append(out, name)
	}
	slices.Sort(out)
	return out
}

func writeFiles(t *testing.T, dir string, files map[string]string) {
	t.Helper()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for name, x := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(x), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// TestSaveGoesOn checks what a save does with the hidden folder of a killed one: right bytes are not written again, a wrong one in the
// middle is repaired, what does not belong goes, and links to other people's data are cut, not followed.
func TestSaveGoesOn(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "out")
	tmp := filepath.Join(filepath.Dir(dir), ".out"+savingSuffix)
	big := bytes.Repeat([]byte("0123456789abcdef"), 3<<16) // three writes
	damaged := bytes.Clone(big)
	damaged[2<<20] = '!'
	precious := filepath.Join(t.TempDir(), "blob")
	if err := os.WriteFile(precious, []byte("precious"), 0o644); err != nil {
		t.Fatal(err)
	}
	writeFiles(t, tmp, map[string]string{"a": string(big), "b": string(damaged), "c": string(big[:100]), "d": string(big) + "more", "stray": "x"})
	for name, link := range map[string]func(string, string) error{"e": os.Symlink, "f": os.Link} {
		if err := link(precious, filepath.Join(tmp, name)); err != nil {
			t.Fatal(err)
		}
	}
	var outs []output
	for _, name := range []string{"a", "b", "c", "d", "e", "f"} {
		outs = append(outs, content(name, big))
	}
	outs = append(outs, content("empty", nil))
	writes, file := map[string]int{}, ""
	if err := writeDir(dir, outs, func(step string) {
		if name, ok := strings.CutPrefix(step, "create "); ok {
			file = name
		}
		if step == "write" {
			writes[file]++
		}
	}); err != nil {
		t.Fatal(err)
	}
	got := dirFiles(t, dir)
	for _, o := range outs[:6] {
		if got[o.name] != string(big) {
			t.Errorf("%s is wrong", o.name)
		}
	}
	if x, ok := got["empty"]; len(got) != 8 || !ok || x != "" {
		t.Errorf("files %q", names(got))
	}
	if writes["a"] != 0 || writes["d"] != 0 || writes["b"] == 0 || writes["c"] == 0 {
		t.Errorf("writes %v", writes)
	}
	if b, err := os.ReadFile(precious); err != nil || string(b) != "precious" {
		t.Errorf("a linked file is %.20q (%v)", b, err)
	}
	if _, err := os.Stat(tmp); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%s is left (%v)", tmp, err)
	}
	if n, total, err := VerifySums(dir); err != nil || n != 7 || total != 6*int64(len(big)) {
		t.Errorf("sums: %d files, %d bytes, %v", n, total, err)
	}
}

// TestSaveRefusesAndCleans checks errors: another process at work, a folder in the way, a source that fails.
func TestSaveRefusesAndCleans(t *testing.T) {
	root := t.TempDir()
	dir := filepath.Join(root, "out")
	s, err := openSaver(dir, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	var e *Error
	if err := writeDir(dir, nil, nil); !errors.As(err, &e) || !strings.Contains(e.Hint, "another process") {
		t.Errorf("a locked folder gives %v", err)
	}
	if err := s.lock.Close(); err != nil {
		t.Fatal(err)
	}
	broken := output{"x", func(w io.Writer) error {
		_, err := w.Write([]byte("y"))
		return errors.Join(err, errors.New("no more"))
	}}
	if err := writeDir(dir, []output{broken}, nil); err == nil || !strings.Contains(err.Error(), "no more") {
		t.Errorf("error %v", err)
	}
	if left, err := os.ReadDir(root); err != nil || len(left) != 0 {
		t.Errorf("left behind %v (%v)", left, err)
	}
	if err := os.MkdirAll(filepath.Join(dir, "sub"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := writeDir(dir, nil, nil); !errors.As(err, &e) || !strings.Contains(err.Error(), "folder sub") {
		t.Errorf("a folder in the way gives %v", err)
	}
	if err := writeDir(filepath.Join(dir, "sub"), []output{content("x", []byte("y"))}, nil); err != nil {
		t.Errorf("an empty directory: %v", err)
	}
	if err := os.WriteFile(filepath.Join(root, "file"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := writeDir(filepath.Join(root, "file"), nil, nil); err == nil {
		t.Error("a file was replaced by a directory")
	}
}

// TestVerifySums checks that each kind of damage is reported, all at once.
func TestVerifySums(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "out")
	if _, _, err := VerifySums(t.TempDir()); !errors.Is(err, ErrNoSums) {
		t.Errorf("no list: %v", err)
	}
	if err := writeDir(dir, []output{content("a", []byte("a")), content("b", []byte("b")), content("c", []byte("c"))}, nil); err != nil {
		t.Fatal(err)
	}
	if n, total, err := VerifySums(dir); n != 3 || total != 3 || err != nil {
		t.Errorf("%d files, %d bytes, %v", n, total, err)
	}
	if err := errors.Join(os.WriteFile(filepath.Join(dir, "a"), []byte("A"), 0o644), os.Remove(filepath.Join(dir, "b")),
		os.WriteFile(filepath.Join(dir, "x.safetensors"), nil, 0o644)); err != nil {
		t.Fatal(err)
	}
	_, _, err := VerifySums(dir)
	for _, want := range []string{"a has SHA-256 559aead08264", filepath.Join(dir, "b"), "x.safetensors is not listed"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v lacks %q", err, want)
		}
	}
	for _, line := range []string{"zz", strings.Repeat("a", 64) + "  ../x", strings.Repeat("a", 64) + "  .", strings.Repeat("a", 64) + "  "} {
		if err := os.WriteFile(filepath.Join(dir, sumsFile), []byte(line+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
		if _, _, err := VerifySums(dir); err == nil || !strings.Contains(err.Error(), "line 1") {
			t.Errorf("%q: %v", line, err)
		}
	}
}
