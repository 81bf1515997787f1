package harness

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"harness-s/env"
	"harness-s/model/chat"
)

// byteCoder is a tokenizer of single bytes plus the template's literals.
type byteCoder struct{}

var literals = []string{chat.IMStart, chat.IMEnd, chat.EndOfText, chat.ThinkOpen, chat.ThinkClose, chat.ToolCallOpen, chat.ToolCallClose, chat.ToolResponseOpen, chat.ToolResponseClose}

const imEnd, endOfText = int32(257), int32(258)

func (byteCoder) Encode(text string) []int32 {
	var out []int32
next:
	for text != "" {
		for i, l := range literals {
			if strings.HasPrefix(text, l) {
				out = append(out, int32(256+i))
				text = text[len(l):]
				continue next
			}
		}
		out = append(out, int32(text[0]))
		text = text[1:]
	}
	return out
}

func (byteCoder) EncodeOrdinary(text string) []int32 {
	out := make([]int32, len(text))
	for i := range len(text) {
		out[i] = int32(text[i])
	}
	return out
}

func decodeBytes(ids []int32) string {
	var b strings.Builder
	for _, id := range ids {
		switch {
		case id >= 0 && id < 256:
			b.WriteByte(byte(id))
		case int(id-256) < len(literals):
			b.WriteString(literals[id-256])
		}
	}
	return b.String()
}

// fakeEnv is an attempt whose replies a test supplies.
type fakeEnv struct {
	text    string
	reply   func(n int, a env.Action) (env.Step, error)
	verdict env.Verdict
	gradeE  error
	actions []env.Action
	graded  int
	closed  int
}

func (f *fakeEnv) Initial() env.Observation {
	return env.Observation{Text: f.text, Facts: map[string]any{"init_digest": "d0"}}
}
func (f *fakeEnv) System() string { return "" }
func (f *fakeEnv) Tools() []env.ToolSpec {
	return []env.ToolSpec{
		{Name: "execute_sql", Description: "Runs SQL.", Parameters: json.RawMessage(`{"type":"object","properties":{"query":{"type":"string"}}}`)},
		{Name: "commit_final_answer", Description: "Ends.", Parameters: json.RawMessage(`{"type":"object","properties":{"answers":{"type":"array"}}}`)},
	}
}
func (f *fakeEnv) Step(_ context.Context, a env.Action) (env.Step, error) {
	f.actions = append(f.actions, a)
	if f.reply != nil {
		return f.reply(len(f.actions), a)
	}
	switch a.Tool {
	case "commit_final_answer":
		return env.Step{Done: true}, nil
	case "execute_sql":
		return env.Step{Obs: "[('Otter',)]"}, nil
	}
	return env.Step{Obs: "Invalid function call: " + a.Tool, Kind: env.KindFormatError}, nil
}
func (f *fakeEnv) Grade(context.Context) (env.Verdict, error) { f.graded++; return f.verdict, f.gradeE }
func (f *fakeEnv) Close(context.Context) error                { f.closed++; return nil }

func sqlTurn(q string) string {
	return "<tool_call>\n<function=execute_sql>\n<parameter=query>\n" + q + "\n</parameter>\n</function>\n</tool_call>"
}

func commitTurn(answers string) string {
	return "<tool_call>\n<function=commit_final_answer>\n<parameter=answers>\n" + answers + "\n</parameter>\n</function>\n</tool_call>"
}

func starterPool(t tester) *Pool {
	t.Helper()
	p, err := StarterPool("dbbench")
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// specWith is the original plus operations given as TOML.
func specWith(t tester, ops string) *Spec {
	t.Helper()
	d, err := ParseDoc([]byte("name = \"x\"\nenv = \"dbbench\"\nv = 1\nparent = \"original\"\ncauses = [\"D-SET\"]\n[[edits]]\nid = \"e\"\n" + ops))
	if err != nil {
		t.Fatal(err)
	}
	s, err := Resolve(d, starterPool(t).Original())
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func newEpisode(t tester, s *Spec, f *fakeEnv, change ...func(*Config)) *Episode {
	t.Helper()
	c := Config{
		Spec: s, Attempt: f, Task: env.TaskRef{ID: "t1"}, Encoder: byteCoder{}, Decode: decodeBytes, Renderer: chat.NewRenderer(false),
		Stop: []int32{imEnd, endOfText}, MaxTurns: 6, MaxNew: 400, MaxContext: 8000, Key: RNGKey{Seed: 1, Task: "t1", Phase: "base"},
	}
	for _, ch := range change {
		ch(&c)
	}
	e, err := NewEpisode(c)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

func play(t tester, e *Episode, turns ...string) Trajectory {
	t.Helper()
	tr, err := RunScripted(context.Background(), e, turns, byteCoder{})
	if err != nil && !errors.Is(err, ErrScriptEnded) {
		t.Fatal(err)
	}
	if err := tr.Check(); err != nil {
		t.Fatal(err)
	}
	return tr
}

// text is the decoded ledger of one segment.
func ledgerText(s LedgerSegment) string { return decodeBytes(s.IDs) }

// kindText is the text of one producer, pieces joined by |.
func kindText(s LedgerSegment, k chat.Kind) string {
	var parts []string
	from := -1
	for i := 0; i <= len(s.IDs); i++ {
		in := i < len(s.IDs) && s.Kind[i] == k
		if in && from < 0 {
			from = i
		}
		if !in && from >= 0 {
			parts = append(parts, decodeBytes(s.IDs[from:i]))
			from = -1
		}
	}
	return strings.Join(parts, "|")
}

var errBoom = fmt.Errorf("boom")

// tester is what *testing.T and *rapid.T share.
type tester interface {
	Helper()
	Fatal(args ...any)
}
