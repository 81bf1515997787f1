package chat

import (
	"bufio"
	"encoding/json"
	"errors"
	"flag"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var corpusFile = flag.String("corpus", "testdata/corpus.jsonl", "corpus of tools/reference/chat.py to compare with")

// corpusCase is one line of a corpus: a conversation and what the published template makes of it.
type corpusCase struct {
	Name, Template, Want, Error string
	Messages                    json.RawMessage
	Tools                       []json.RawMessage
	Gen                         bool
	Thinking                    *bool
	Raised                      bool // Error is the template's own
}

// readCorpus returns the digests of the templates that a corpus was made with, and its cases.
func readCorpus(t testing.TB, name string) (digests map[string]string, cases []corpusCase) {
	t.Helper()
	f, err := os.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	s := bufio.NewScanner(f)
	s.Buffer(nil, 1<<24)
	for s.Scan() {
		if digests == nil {
			var head struct{ Digests map[string]string }
			if err := json.Unmarshal(s.Bytes(), &head); err != nil {
				t.Fatal(err)
			}
			digests = head.Digests
			continue
		}
		var c corpusCase
		if err := json.Unmarshal(s.Bytes(), &c); err != nil {
			t.Fatalf("case %d: %v", len(cases), err)
		}
		cases = append(cases, c)
	}
	if err := s.Err(); err != nil {
		t.Fatal(err)
	}
	return digests, cases
}

func (c corpusCase) render(r Renderer) (string, error) {
	msgs, err := ParseMessages(c.Messages)
	if err != nil {
		return "", err
	}
	var tools []Tool
	for _, raw := range c.Tools {
		tools = append(tools, Tool{JSON: raw})
	}
	segs, err := r.Open(msgs, tools, Options{AddGenerationPrompt: c.Gen, Thinking: c.Thinking})
	return Text(segs), err
}

// Every conversation of the corpus renders to the bytes of the published template, or fails where it fails: with the template's own text
// where it raises one. Images and videos are refused, because the model reads text only.
func TestCorpus(t *testing.T) {
	digests, cases := readCorpus(t, *corpusFile)
	for name, digest := range digests {
		if r, ok := published[digest]; !ok || r.ThinkDefault != (name == "think") || r.Family() != map[string]Family{"think": Large, "nothink": Small}[name] {
			t.Errorf("%s: digest %s is not that of the published template", name, digest)
		}
	}
	if len(cases) < 100 {
		t.Fatalf("%d cases", len(cases))
	}
	failed, bad := 0, 0
	for _, c := range cases {
		got, err := c.render(NewRenderer(c.Template == "think"))
		switch {
		case c.Error != "":
			failed++
			if err == nil {
				t.Errorf("%s: rendered\n%q\nthe template fails: %s\n%s", c.Name, got, c.Error, c.Messages)
			} else if (c.Raised || c.Error == ErrArguments.Error()) && !strings.Contains(err.Error(), c.Error) {
				t.Errorf("%s: error %q, the template raises %q\n%s", c.Name, err, c.Error, c.Messages)
			} else {
				continue
			}
		case errors.Is(err, ErrVision) && strings.Contains(c.Want, "<|vision_start|>"):
			continue
		case err != nil:
			t.Errorf("%s: %v\n%s", c.Name, err, c.Messages)
		case got != c.Want:
			t.Errorf("%s (-template +ours):\n%s\n%s", c.Name, cmp.Diff(c.Want, got), c.Messages)
		default:
			continue
		}
		if bad++; bad > 10 {
			t.Fatal("too many differences")
		}
	}
	t.Logf("%d conversations, %d of them errors", len(cases), failed)
}
