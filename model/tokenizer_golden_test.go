package model

import (
	"encoding/json"
	"io/fs"
	"os"
	"slices"
	"strings"
	"testing"
)

// tokenizerGolden is what Hugging Face tokenizers makes of the shipped tokenizer; tools/reference/tokenizer.py golden writes the file.
type tokenizerGolden struct {
	TokenizerSHA string `json:"tokenizer_sha256"`
	ClassesSHA   string `json:"classes_sha256"`
	JoinedSHA    string `json:"joined_sha256"`
	Cases        []struct {
		Text    string   `json:"text"`
		IDs     []int32  `json:"ids"`
		Decoded string   `json:"decoded"`
		NFC     *string  `json:"nfc"`                  // of the whole text, when it differs
		Pieces  []string `json:"pieces"`               // of the NFC
		Bare    []string `json:"pieces_without_marks"` // of the NFC by splitPatternNoMarks, when they differ
	} `json:"cases"`
}

func readGolden(t *testing.T) *tokenizerGolden {
	t.Helper()
	b, err := os.ReadFile("testdata/tokenizer/golden.json")
	if err != nil {
		t.Fatal(err)
	}
	g := new(tokenizerGolden)
	if err := json.Unmarshal(b, g); err != nil {
		t.Fatal(err)
	}
	return g
}

func TestTokenizerGolden(t *testing.T) {
	g := readGolden(t)
	fsys, err := TinyFS()
	if err != nil {
		t.Fatal(err)
	}
	raw, err := fs.ReadFile(fsys, tokenizerFile)
	if err != nil {
		t.Fatal(err)
	}
	if got := digest(raw); got != g.TokenizerSHA {
		t.Fatalf("the shipped tokenizer.json has SHA-256 %s, the golden file is of %s: run tools/reference/tokenizer.py golden", got, g.TokenizerSHA)
	}
	tok, err := ParseTokenizer(raw)
	if err != nil {
		t.Fatal(err)
	}
	for range 2 { // the second time from the piece cache
		for _, c := range g.Cases {
			if got := tok.Encode(c.Text); !slices.Equal(got, c.IDs) {
				t.Errorf("%+q\n got %v\nwant %v", c.Text, got, c.IDs)
			}
			if got := tok.Decode(c.IDs); got != c.Decoded {
				t.Errorf("%+q decodes to %+q, want %+q", c.Text, got, c.Decoded)
			}
		}
	}
}

func TestScanGolden(t *testing.T) {
	for _, c := range readGolden(t).Cases {
		text, bare := c.Text, c.Bare
		if c.NFC != nil {
			text = *c.NFC
		}
		if bare == nil {
			bare = c.Pieces
		}
		if got := nfc(c.Text); got != text {
			t.Errorf("NFC of %+q is %+q, want %+q", c.Text, got, text)
		}
		if got := pieces(splitterOf(splitPattern), text); !slices.Equal(got, c.Pieces) {
			t.Errorf("%+q\n got %+q\nwant %+q", text, got, c.Pieces)
		}
		if got := pieces(splitterOf(splitPatternNoMarks), text); !slices.Equal(got, bare) {
			t.Errorf("%+q without marks\n got %+q\nwant %+q", text, got, bare)
		}
	}
}

// TestUnicodeGolden compares the class of every code point, and how each combines, with the reference's: Go and the module golang.org/x/text
// may move to a later Unicode than the reference, which newLetters and its neighbours and lateMarks then have to make up for.
func TestUnicodeGolden(t *testing.T) {
	g := readGolden(t)
	letters := map[class]byte{classOther: '.', classLetter: 'L', classMark: 'M', classNumber: 'N', classSpace: 's', classBreak: 's'}
	var classes []byte
	for _, c := range splitterOf(splitPattern) {
		classes = append(classes, letters[c])
	}
	if digest(classes) != g.ClassesSHA {
		t.Error("some code point has another class than in the reference")
	}
	var joined strings.Builder
	for _, r := range [][2]rune{{0, 0xd800}, {0xe000, 0x30000}, {0xe0000, 0xe1000}} {
		for c := r[0]; c < r[1]; c++ {
			joined.WriteString(nfc("e" + string(c) + "\u0323\u0301"))
		}
	}
	if digest([]byte(joined.String())) != g.JoinedSHA {
		t.Error("some code point normalises otherwise than in the reference")
	}
}

// TestNFCLongRuns: a run of more than 30 marks stays as it is, without U+034F, and stays linear.
func TestNFCLongRuns(t *testing.T) {
	const n = 100_000
	for _, c := range []struct{ in, want string }{
		{"a" + strings.Repeat("\u0301", n), "\u00e1" + strings.Repeat("\u0301", n-1)},
		{strings.Repeat("\u0301\u0323", n), strings.Repeat("\u0323", n) + strings.Repeat("\u0301", n)},
		{strings.Repeat("e\u0301", n), strings.Repeat("\u00e9", n)},
		{strings.Repeat("\u1100\u1161\u11a8", n), strings.Repeat("\uac01", n)},
		{strings.Repeat("e\u0301\xff", n), strings.Repeat("\u00e9\xff", n)},
		{"e\xff\u0301", "e\xff\u0301"},
		{"\u0301a\u0323\u0302", "\u0301\u1ead"},
	} {
		if got := nfc(c.in); got != c.want {
			t.Errorf("NFC of %.20q: %d bytes, want %d", c.in, len(got), len(c.want))
		}
	}
}

// TestRepeatedCharacter encodes long runs, which a quadratic merge would not finish in time.
func TestRepeatedCharacter(t *testing.T) {
	tok := testTokenizer(t)
	for _, c := range repeated {
		s := ofSize(c.text, 1<<19)
		if got, want := tok.Decode(tok.EncodeOrdinary(s)), decodeBytes([]byte(nfc(s))); got != want {
			t.Errorf("%s: %d bytes came back as %d", c.name, len(want), len(got))
		}
	}
}
