package chat

import (
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"testing"
)

func ptr[T any](v T) *T { return &v }

func args(kv ...string) []Arg {
	var out []Arg
	for i := 0; i < len(kv); i += 2 {
		out = append(out, Arg{Key: kv[i], Value: json.RawMessage(kv[i+1])})
	}
	return out
}

// toolRound is the tool round of model.md 5.5.
func toolRound() []Message {
	return []Message{
		{Role: "user", Content: "Hi"},
		{Role: "assistant", Content: "I will look.", Reasoning: ptr("think A"), Calls: []Call{
			{Name: "sh", Args: args("cmd", `"ls\n-l"`, "n", `3`, "f", `true`, "l", `[1,"é"]`, "o", `{"a":1}`)},
			{Name: "sh"},
		}},
		{Role: "tool", Content: "out1"},
		{Role: "tool", Content: "out2"},
	}
}

const toolRoundText = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\nthink A\n</think>\n\nI will look.\n\n<tool_call>\n<function=sh>\n<parameter=cmd>\nls\n-l\n</parameter>\n<parameter=n>\n3\n</parameter>\n<parameter=f>\nTrue\n</parameter>\n<parameter=l>\n[1, \"é\"]\n</parameter>\n<parameter=o>\n{\"a\": 1}\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=sh>\n</function>\n</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\nout1\n</tool_response>\n<tool_response>\nout2\n</tool_response><|im_end|>\n"

// The first five texts are the published renderings of model.md 5.5; the others follow from its rules and were compared with the
// published template.
func TestOpenRendersTemplate(t *testing.T) {
	const hi = "<|im_start|>user\nHi<|im_end|>\n"
	history := []Message{{Role: "user", Content: "Hi"}, {Role: "assistant", Content: "<think>\nplan\n</think>\n\nAnswer"}, {Role: "user", Content: "more"}}
	const historyText = hi + "<|im_start|>assistant\nAnswer<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
	gen := Options{AddGenerationPrompt: true}
	for _, tc := range []struct {
		name  string
		think bool
		msgs  []Message
		tools []Tool
		o     Options
		want  string
	}{
		{"user", true, []Message{{Role: "user", Content: "Hi"}}, nil, gen, hi + "<|im_start|>assistant\n<think>\n"},
		{"thinking off", true, []Message{{Role: "user", Content: "Hi"}}, nil, Options{AddGenerationPrompt: true, Thinking: ptr(false)},
			hi + "<|im_start|>assistant\n<think>\n\n</think>\n\n"},
		{"small default", false, []Message{{Role: "user", Content: "Hi"}}, nil, gen, hi + "<|im_start|>assistant\n<think>\n\n</think>\n\n"},
		{"small thinking on", false, []Message{{Role: "user", Content: "Hi"}}, nil, Options{AddGenerationPrompt: true, Thinking: ptr(true)},
			hi + "<|im_start|>assistant\n<think>\n"},
		{"history", true, history, nil, gen, historyText + "<think>\n"},
		{"tool round", true, toolRound(), nil, gen, toolRoundText + "<|im_start|>assistant\n<think>\n"},
		{"no generation prompt", true, toolRound(), nil, Options{}, toolRoundText},
		{"empty reasoning after query", true, []Message{{Role: "user", Content: "Hi"}, {Role: "assistant", Content: " yes "}}, nil, Options{},
			hi + "<|im_start|>assistant\n<think>\n\n</think>\n\nyes<|im_end|>\n"},
		{"empty system", true, []Message{{Role: "system", Content: " \u00a0\x1c"}, {Role: "user", Content: "Hi"}}, nil, Options{},
			"<|im_start|>system\n<|im_end|>\n" + hi},
		{"system", true, []Message{{Role: "system", Content: " be kind\n"}, {Role: "user", Content: "Hi"}}, nil, Options{},
			"<|im_start|>system\nbe kind<|im_end|>\n" + hi},
		{"tools and system", true, []Message{{Role: "system", Content: "be kind"}, {Role: "user", Content: "Hi"}},
			[]Tool{{JSON: json.RawMessage(`{"type":"function","function":{"name":"z<&>","b":1.50,"a":[],"é":"\u2028\u0001\/"}}`)}}, Options{},
			"<|im_start|>system\n# Tools\n\nYou have access to the following functions:\n\n<tools>\n" +
				`{"type": "function", "function": {"name": "z<&>", "b": 1.5, "a": [], "é": "` + "\u2028" + `\u0001/"}}` +
				"\n</tools>" + toolInstructions + "\n\nbe kind<|im_end|>\n" + hi},
		{"tools and blank system", true, []Message{{Role: "system", Content: " "}, {Role: "user", Content: "Hi"}},
			[]Tool{{JSON: json.RawMessage(`{}`)}}, Options{},
			"<|im_start|>system\n# Tools\n\nYou have access to the following functions:\n\n<tools>\n{}\n</tools>" + toolInstructions + "<|im_end|>\n" + hi},
		{"tool result as user is no query", true, []Message{{Role: "user", Content: "Hi"}, {Role: "assistant", Reasoning: ptr(""), Content: "a"},
			{Role: "user", Content: "<tool_response>x</tool_response>"}}, nil, Options{},
			hi + "<|im_start|>assistant\n<think>\n\n</think>\n\na<|im_end|>\n<|im_start|>user\n<tool_response>x</tool_response><|im_end|>\n"},
		{"call without content", true, []Message{{Role: "user", Content: "Hi"}, {Role: "assistant", Calls: []Call{{Name: "f", Args: args("x", `null`, "y", `1e5`, "z", `-0`, "w", `1.0`, "v", `1e-7`)}}}}, nil, Options{},
			hi + "<|im_start|>assistant\n<think>\n\n</think>\n\n<tool_call>\n<function=f>\n<parameter=x>\nNone\n</parameter>\n<parameter=y>\n100000.0\n</parameter>\n<parameter=z>\n0\n</parameter>\n<parameter=w>\n1.0\n</parameter>\n<parameter=v>\n1e-07\n</parameter>\n</function>\n</tool_call><|im_end|>\n"},
		{"several think tags", true, []Message{{Role: "user", Content: "Hi"}, {Role: "assistant", Content: "x<think>\n\na\n\n</think>b</think>\n\n c"}}, nil, Options{},
			hi + "<|im_start|>assistant\n<think>\na\n</think>\n\n c<|im_end|>\n"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			segs, err := NewRenderer(tc.think).Open(tc.msgs, tc.tools, tc.o)
			if err != nil {
				t.Fatal(err)
			}
			if got := Text(segs); got != tc.want {
				t.Errorf("got\n%q\nwant\n%q", got, tc.want)
			}
			for i, s := range segs {
				if s.Text == "" || i > 0 && segs[i-1].Kind == s.Kind {
					t.Errorf("segment %d %+v is empty or not merged", i, s)
				}
			}
		})
	}
}

func TestOpenErrors(t *testing.T) {
	user := Message{Role: "user", Content: "Hi"}
	for _, tc := range []struct {
		name  string
		msgs  []Message
		tools []Tool
		want  error
	}{
		{"no messages", nil, nil, ErrNoMessages},
		{"no query", []Message{{Role: "system", Content: "x"}}, nil, ErrNoUserQuery},
		{"only a tool result", []Message{{Role: "user", Content: " <tool_response>x</tool_response> "}}, nil, ErrNoUserQuery},
		{"late system", []Message{user, {Role: "system"}}, nil, ErrSystemNotFirst},
		{"developer", []Message{user, {Role: "developer"}}, nil, ErrUnexpectedRole},
		{"bad argument", []Message{user, {Role: "assistant", Calls: []Call{{Name: "f", Args: args("x", `{`)}}}}, nil, nil},
		{"bad tool", []Message{user}, []Tool{{JSON: json.RawMessage(`{} x`)}}, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := NewRenderer(true).Open(tc.msgs, tc.tools, Options{})
			if err == nil || tc.want != nil && !errors.Is(err, tc.want) {
				t.Errorf("got %v, want %v", err, tc.want)
			}
		})
	}
}

func TestOpenKinds(t *testing.T) {
	segs, err := NewRenderer(true).Open([]Message{
		{Role: "system", Parts: []Segment{{" base\n\n", KindSystem}, {"", KindUser}, {"rule \n", KindHarness}}},
		{Role: "user", Content: "Hi <|im_end|>"},
		{Role: "assistant", Content: "ok"},
		{Role: "tool", Content: "42"},
		{Role: "user", Content: "note", Kind: KindHarness},
	}, nil, Options{AddGenerationPrompt: true})
	if err != nil {
		t.Fatal(err)
	}
	want := []Segment{
		{"<|im_start|>system\n", KindTemplate}, {"base\n\n", KindSystem}, {"rule", KindHarness}, {"<|im_end|>\n<|im_start|>user\n", KindTemplate},
		{"Hi <|im_end|>", KindUser}, {"<|im_end|>\n<|im_start|>assistant\n", KindTemplate}, {"ok", KindHarness},
		{"<|im_end|>\n<|im_start|>user\n<tool_response>\n", KindTemplate}, {"42", KindTool},
		{"\n</tool_response><|im_end|>\n<|im_start|>user\n", KindTemplate}, {"note", KindHarness},
		{"<|im_end|>\n<|im_start|>assistant\n<think>\n", KindTemplate},
	}
	if !slices.Equal(segs, want) {
		t.Errorf("got %q", segs)
	}
}

// A bridge after a sampled turn gives the same text as rendering the whole round.
func TestBridge(t *testing.T) {
	msgs := toolRound()
	for _, think := range []bool{true, false} {
		r := NewRenderer(think)
		gen := Options{AddGenerationPrompt: true, Closed: true}
		whole, err := r.Open(msgs, nil, gen)
		if err != nil {
			t.Fatal(err)
		}
		bridge, err := r.Bridge(msgs[2:], gen)
		if err != nil {
			t.Fatal(err)
		}
		if !strings.HasSuffix(Text(whole), IMEnd+Text(bridge)) {
			t.Errorf("thinking %v: %q does not end %q", think, Text(bridge), Text(whole))
		}
		gen.Closed = false
		open, err := r.Bridge(msgs[2:], gen)
		if err != nil {
			t.Fatal(err)
		}
		if Text(open) != IMEnd+Text(bridge) {
			t.Errorf("unclosed bridge %q", Text(open))
		}
	}
	r := NewRenderer(true)
	if _, err := r.Bridge(nil, Options{}); !errors.Is(err, ErrNoMessages) {
		t.Errorf("empty bridge: %v", err)
	}
	if _, err := r.Bridge([]Message{{Role: "assistant"}}, Options{}); !errors.Is(err, ErrUnexpectedRole) {
		t.Errorf("assistant in a bridge: %v", err)
	}
	user, err := r.Bridge([]Message{{Role: "user", Content: "go on"}}, Options{Closed: true})
	if err != nil || Text(user) != "\n<|im_start|>user\ngo on<|im_end|>\n" {
		t.Errorf("user bridge %q, %v", Text(user), err)
	}
}

func TestParseMessages(t *testing.T) {
	msgs, err := ParseMessages([]byte(`[{"role":"system","content":[{"type":"text","text":"a"},{"text":"b"}]},{"role":"user","content":"Hi"},
		{"role":"assistant","content":null,"reasoning_content":"r","tool_calls":[{"type":"function","function":{"name":"f","arguments":{"z":1,"a":[true]}}},{"name":"g"}]},
		{"role":"tool","content":"x"}]`))
	if err != nil {
		t.Fatal(err)
	}
	segs, err := NewRenderer(true).Open(msgs, nil, Options{})
	if err != nil {
		t.Fatal(err)
	}
	want := "<|im_start|>system\nab<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\nr\n</think>\n\n<tool_call>\n<function=f>\n<parameter=z>\n1\n</parameter>\n<parameter=a>\n[true]\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\nx\n</tool_response><|im_end|>\n"
	if got := Text(segs); got != want {
		t.Errorf("got\n%q\nwant\n%q", got, want)
	}
	for text, want := range map[string]error{
		`[{"role":"user","content":3}]`:                                                            ErrUnexpectedContent,
		`[{"role":"user","content":[{"type":"sound"}]}]`:                                           ErrUnexpectedItem,
		`[{"role":"system","content":[{"type":"image"}]}]`:                                         ErrSystemImage,
		`[{"role":"system","content":[{"video":"u"}]}]`:                                            ErrSystemVideo,
		`[{"role":"user","content":[{"type":"image_url","image_url":{"url":"u"}}]}]`:               ErrVision,
		`[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"{\"a\": 1}"}}]}]`: ErrArguments,
	} {
		if _, err := ParseMessages([]byte(text)); !errors.Is(err, want) {
			t.Errorf("%s: got %v, want %v", text, err, want)
		}
	}
	for _, text := range []string{``, `{}`, `[1]`, `[] []`, `[{"role":"assistant","tool_calls":[{}]}]`, strings.Repeat("[", 2000)} {
		if _, err := ParseMessages([]byte(text)); err == nil {
			t.Errorf("%.20q was accepted", text)
		}
	}
}

// runes is an encoder for tests: one id per byte, or per pair "x\n" of ordinary text, and ids from 1000 for template literals.
type runes struct{}

func (e runes) Encode(text string) []int32 {
	for i, l := range templateLiterals {
		if text == l {
			return []int32{int32(1000 + i)}
		}
	}
	return e.EncodeOrdinary(text)
}

func (runes) EncodeOrdinary(text string) []int32 {
	var ids []int32
	for i := 0; i < len(text); i++ {
		id := int32(text[i])
		if i+1 < len(text) && text[i] == '.' && text[i+1] == '\n' {
			id, i = 500, i+1
		}
		ids = append(ids, id)
	}
	return ids
}

// withBytes adds what a byte-level tokenizer can tell.
type withBytes struct{ runes }

func (withBytes) TokenBytes(id int32) []byte {
	if id == 500 {
		return []byte(".\n")
	}
	return []byte{byte(id)}
}

func TestEncode(t *testing.T) {
	segs, err := NewRenderer(false).Bridge([]Message{{Role: "tool", Content: "<|im_end|> ok."}}, Options{Closed: true})
	if err != nil {
		t.Fatal(err)
	}
	ids, kinds := Encode(runes{}, segs)
	special := 0
	for i, id := range ids {
		if id >= 1000 {
			special++
			if kinds[i] != KindTemplate {
				t.Errorf("special token %d has kind %v", id, kinds[i])
			}
		}
	}
	if special != 4 { // im_start, tool_response, /tool_response, im_end
		t.Errorf("%d special tokens, want 4: %v", special, ids)
	}
	if slices.Contains(ids, 500) {
		t.Errorf("segments were joined without token bytes")
	}
	joined, kinds := Encode(withBytes{}, segs)
	at := slices.Index(joined, 500)
	if at < 0 || kinds[at] != KindTool || len(joined) != len(kinds) {
		t.Errorf("token across a border: ids %v kinds %v", joined, kinds)
	}
	if ids, kinds := Encode(withBytes{}, nil); len(ids) != 0 || len(kinds) != 0 {
		t.Errorf("no segments gave %v", ids)
	}
}
