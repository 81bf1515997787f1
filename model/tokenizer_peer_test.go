package model

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// tokenizerData holds folders made by tools/reference/tokenizer.py.
var tokenizerData = flag.String("tokenizer-data", "../build/tokenizer", "directory of tokenizer folders made by tools/reference/tokenizer.py")

// peerFolders lists the tokenizer folders that have the given file, or skips the test.
func peerFolders(t testing.TB, file string) []string {
	t.Helper()
	var dirs []string
	for _, root := range []string{*tokenizerData, "../../shared/data/tokenizer"} {
		found, err := filepath.Glob(filepath.Join(root, "*", file))
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range found {
			dirs = append(dirs, filepath.Dir(f))
		}
	}
	if len(dirs) == 0 {
		t.Skipf("no %s below build/tokenizer: make tokenizer-peer makes them", file)
	}
	return dirs
}

func loadPeer(t testing.TB, dir string) *Tokenizer {
	t.Helper()
	tok, err := LoadTokenizer(os.DirFS(dir))
	if err != nil {
		t.Fatal(err)
	}
	return tok
}

// peerCase is one record of cases.bin.
type peerCase struct {
	decode bool
	text   string
	ids    []int32
	back   string // what the ids decode to
}

// caseReader reads cases.bin; the form is in tools/reference/tokenizer.py.
type caseReader struct {
	r   *bufio.Reader
	err error
}

func (c *caseReader) number() int {
	n, err := binary.ReadUvarint(c.r)
	if c.err == nil {
		c.err = err
	}
	if n > 1<<28 {
		c.err = fmt.Errorf("cases.bin has a length of %d", n)
	}
	if c.err != nil {
		return 0
	}
	return int(n)
}

func (c *caseReader) text(n int) string {
	b := make([]byte, n)
	if _, err := io.ReadFull(c.r, b); err != nil && c.err == nil {
		c.err = err
	}
	return string(b)
}

// next returns false at the end of the file and after an error.
func (c *caseReader) next(p *peerCase) bool {
	p.decode = c.number() == 1
	if errors.Is(c.err, io.EOF) {
		c.err = nil
		return false
	}
	p.text = c.text(c.number())
	p.ids = make([]int32, c.number())
	for i := range p.ids {
		p.ids[i] = int32(c.number())
	}
	p.back = p.text
	if !p.decode {
		if n := c.number(); n > 0 {
			p.back = c.text(n - 1)
		}
	}
	return c.err == nil
}

// TestTokenizerMatchesPeer compares ids and decoded text with those of Hugging Face tokenizers.
func TestTokenizerMatchesPeer(t *testing.T) {
	for _, dir := range peerFolders(t, "cases.bin") {
		t.Run(filepath.Base(dir), func(t *testing.T) {
			tok := loadPeer(t, dir)
			f, err := os.Open(filepath.Join(dir, "cases.bin"))
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			r := caseReader{r: bufio.NewReaderSize(f, 1<<20)}
			var c peerCase
			texts, decodes, bad := 0, 0, 0
			for r.next(&c) {
				if c.decode {
					decodes++
				} else {
					texts++
					if got := tok.Encode(c.text); !slices.Equal(got, c.ids) {
						if bad++; bad <= 20 {
							t.Errorf("%+q\n got %v\nwant %v", c.text, got, c.ids)
						}
					}
				}
				if got := tok.Decode(c.ids); got != c.back {
					if bad++; bad <= 20 {
						t.Errorf("ids %v decode to %+q, want %+q", c.ids, got, c.back)
					}
				}
			}
			if r.err != nil {
				t.Fatal(r.err)
			}
			t.Logf("%d strings, %d id sequences, %d differ", texts, decodes, bad)
		})
	}
}

// BenchmarkPeerSpeed is run by tools/reference/tokenizer_speed.py, which compares it with the peer on the same texts.
func BenchmarkPeerSpeed(b *testing.B) {
	for _, dir := range peerFolders(b, "speed.jsonl") {
		tok := loadPeer(b, dir)
		tok.Encode("\u00e9") // makes the tables of normalisation
		raw, err := os.ReadFile(filepath.Join(dir, "speed.jsonl"))
		if err != nil {
			b.Fatal(err)
		}
		for line := range strings.Lines(string(raw)) {
			var kind string
			var docs []string
			if err := json.Unmarshal([]byte(line), &[]any{&kind, &docs}); err != nil {
				b.Fatal(err)
			}
			b.Run(filepath.Base(dir)+"/"+kind, func(b *testing.B) { benchmarkDocs(b, tok, docs) })
		}
	}
}

func benchmarkDocs(b *testing.B, tok *Tokenizer, docs []string) {
	size, tokens := 0, 0
	for _, d := range docs {
		size += len(d)
	}
	b.SetBytes(int64(size))
	start := cpuTime(b)
	for b.Loop() {
		tokens = 0
		for _, d := range docs {
			tokens += len(tok.Encode(d))
		}
	}
	b.ReportMetric(float64(size)*float64(b.N)/(cpuTime(b)-start).Seconds()/1e6, "MB/cpu-s")
	b.ReportMetric(float64(tokens), "tokens")
}

// cpuTime is the processor time of the process, which other processes change less than the time on the clock.
func cpuTime(b *testing.B) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkPeerLoad times the reading of tokenizer.json.
func BenchmarkPeerLoad(b *testing.B) {
	for _, dir := range peerFolders(b, tokenizerFile) {
		b.Run(filepath.Base(dir), func(b *testing.B) {
			start := cpuTime(b)
			for b.Loop() {
				loadPeer(b, dir)
			}
			b.ReportMetric((cpuTime(b)-start).Seconds()/float64(b.N), "cpu-s/op")
		})
	}
}

// repeated are the characters of the worst pieces: one character, megabytes long.
var repeated = []struct{ name, text string }{
	{"letter", "a"}, {"space", " "}, {"newline", "\n"}, {"digit", "7"}, {"equals", "="}, {"mark", "\u0301"}, {"virama", "\u094d"},
	{"han", "\u4e2d"}, {"emoji", "\U0001f600"}, {"decomposed", "e\u0301"}, {"jamo", "\u1100\u1161\u11a8"}, {"angle", "<"}, {"quote", "'"},
	{"added", "<|im_end|>"}, {"invalid", "\xff"},
}

func ofSize(s string, size int) string { return strings.Repeat(s, size/len(s)) }

// BenchmarkPeerRepeated shows by its speed at two sizes that time is linear.
func BenchmarkPeerRepeated(b *testing.B) {
	for _, dir := range peerFolders(b, tokenizerFile) {
		tok := loadPeer(b, dir)
		for _, c := range repeated {
			for _, mb := range []int{1, 10} {
				s := ofSize(c.text, mb*1_000_000)
				b.Run(fmt.Sprintf("%s/%s/%dMB", filepath.Base(dir), c.name, mb), func(b *testing.B) {
					b.SetBytes(int64(len(s)))
					start := cpuTime(b)
					for b.Loop() {
						tok.Encode(s)
					}
					b.ReportMetric((cpuTime(b)-start).Seconds()/float64(b.N), "cpu-s/op")
				})
			}
		}
	}
}
