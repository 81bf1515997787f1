package chat

import (
	"encoding/json"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func call(name string, kv ...string) Call {
	c := Call{Name: name}
	for i := 0; i < len(kv); i += 2 {
		c.Args = append(c.Args, textArg(kv[i], kv[i+1]))
	}
	return c
}

func TestParseTurn(t *testing.T) {
	const sh = "<tool_call>\n<function=sh>\n<parameter=cmd>\nls\n</parameter>\n</function>\n</tool_call>"
	for _, tc := range []struct {
		name    string
		text    string
		inThink bool
		strict  Turn
		lenient *Turn // nil = as strict
	}{
		{"answer", "  Hello.\n", false, Turn{Content: "Hello."}, nil},
		{"thinking", "plan\n</think>\n\nHello.<|im_end|>", true, Turn{Thinking: "plan", Content: "Hello."}, nil},
		{"own thinking", "\n<think>\nplan\n</think>\n\nHello.", false, Turn{Thinking: "plan", Content: "Hello."}, nil},
		{"call", "I look.\n\n" + sh, false, Turn{Content: "I look.", Calls: []Call{call("sh", "cmd", "ls")}}, nil},
		{"two calls", sh + "\n" + sh, false, Turn{Calls: []Call{call("sh", "cmd", "ls"), call("sh", "cmd", "ls")}}, nil},
		{"no parameters", "<tool_call>\n<function=f>\n</function>\n</tool_call>", false, Turn{Calls: []Call{call("f")}}, nil},
		{"angle brackets", "<tool_call>\n<function=f>\n<parameter=q>\na < b > c\n</tool_call> <parameter=x </parameter> d\n\n</parameter>\n<parameter=e>\n\n</parameter>\n</function>\n</tool_call>", false,
			Turn{Calls: []Call{call("f", "q", "a < b > c\n</tool_call> <parameter=x </parameter> d\n", "e", "")}}, nil},
		{"one line", "<tool_call><function=f><parameter=q>a</parameter></function></tool_call>", false, Turn{Calls: []Call{call("f", "q", "a")}}, nil},
		{"mention", "Use <function=name> in it.", false, Turn{Content: "Use <function=name> in it."}, nil},
		{"unfinished thinking", "plan", true, Turn{Thinking: "plan", Malformed: []string{"thinking block is not closed"}}, nil},
		{"call in thinking", "plan\n" + sh, true, Turn{Thinking: "plan\n" + sh, Malformed: []string{"thinking block is not closed"}},
			&Turn{Thinking: "plan\n" + sh, Calls: []Call{call("sh", "cmd", "ls")}, Repairs: []string{"tool call inside the thinking block"}}},
		{"quoted call in closed thinking", sh + "</think>No.", true, Turn{Thinking: sh, Content: "No."}, nil},
		{"missing parameter closer", "<tool_call>\n<function=f>\n<parameter=a>\n1\n<parameter=b>\n2\n</function>\n</tool_call>", false,
			Turn{Malformed: []string{`</parameter> of "a" in "f" is missing`}},
			&Turn{Calls: []Call{call("f", "a", "1", "b", "2")}, Repairs: []string{`</parameter> of "a" in "f" is missing`, `</parameter> of "b" in "f" is missing`}}},
		{"missing closer before a call", "<tool_call>\n<function=f>\n<parameter=a>\n1\n</tool_call>\n" + sh, false,
			Turn{Malformed: []string{`</parameter> of "a" in "f" is missing`}, Calls: []Call{call("sh", "cmd", "ls")}},
			&Turn{Calls: []Call{call("f", "a", "1"), call("sh", "cmd", "ls")}, Repairs: []string{`</parameter> of "a" in "f" is missing`, `</function> of "f" is missing`}}},
		{"missing opener", "I look.\n<function=sh>\n<parameter=cmd>\nls\n</parameter>\n</function>\n</tool_call>", false,
			Turn{Content: "I look.\n<function=sh>\n<parameter=cmd>\nls\n</parameter>\n</function>", Malformed: []string{"<tool_call> is missing before <function=", "stray </tool_call>"}},
			&Turn{Content: "I look.", Calls: []Call{call("sh", "cmd", "ls")}, Repairs: []string{"<tool_call> is missing before <function="}}},
		{"missing block closer", strings.TrimSuffix(sh, "</tool_call>"), false, Turn{Malformed: []string{"tool call is not closed"}},
			&Turn{Calls: []Call{call("sh", "cmd", "ls")}, Repairs: []string{"</tool_call> is missing"}}},
		{"missing block closer before a call", strings.TrimSuffix(sh, "</tool_call>") + sh, false,
			Turn{Malformed: []string{"</tool_call> is missing"}, Calls: []Call{call("sh", "cmd", "ls"), call("sh", "cmd", "ls")}},
			&Turn{Calls: []Call{call("sh", "cmd", "ls"), call("sh", "cmd", "ls")}, Repairs: []string{"</tool_call> is missing"}}},
		{"truncated", "<tool_call>\n<function=sh>\n<parameter=cmd>\nls", false, Turn{Malformed: []string{"tool call is not closed"}}, nil},
		{"missing function closer", "<tool_call>\n<function=sh>\n<parameter=cmd>\nls\n</parameter>\n</tool_call>", false,
			Turn{Malformed: []string{`</function> of "sh" is missing`}},
			&Turn{Calls: []Call{call("sh", "cmd", "ls")}, Repairs: []string{`</function> of "sh" is missing`}}},
		{"json body", `<tool_call>{"name": "f", "arguments": {"a": "x"}}</tool_call>`, false, Turn{Malformed: []string{"call is JSON instead of <function=...>"}},
			&Turn{Calls: []Call{call("f", "a", "x")}, Repairs: []string{"call is JSON instead of <function=...>"}}},
		{"empty block", "<tool_call>\n</tool_call>", false, Turn{Malformed: []string{"no <function= after <tool_call>"}}, nil},
		{"duplicate parameter", "<tool_call><function=f><parameter=a>1</parameter><parameter=a>2</parameter></function></tool_call>", false,
			Turn{Malformed: []string{`parameter "a" of "f" is given twice`}},
			&Turn{Calls: []Call{call("f", "a", "2")}, Repairs: []string{`parameter "a" of "f" is given twice`}}},
		{"duplicate parameter after a value with a closer", "<tool_call><function=f><parameter=a>x</tool_call>y</parameter><parameter=a>2</parameter></function></tool_call>", false,
			Turn{Malformed: []string{`parameter "a" of "f" is given twice`}},
			&Turn{Calls: []Call{call("f", "a", "2")}, Repairs: []string{`parameter "a" of "f" is given twice`}}},
		{"text after call", sh + "\nDone.", false, Turn{Content: "Done.", Calls: []Call{call("sh", "cmd", "ls")}, Malformed: []string{"text after a tool call"}},
			&Turn{Content: "Done.", Calls: []Call{call("sh", "cmd", "ls")}, Repairs: []string{"text after a tool call"}}},
	} {
		for _, mode := range []Mode{Strict, Lenient} {
			want := tc.strict
			if mode == Lenient && tc.lenient != nil {
				want = *tc.lenient
			}
			if diff := cmp.Diff(want, ParseTurn(tc.text, mode, tc.inThink)); diff != "" {
				t.Errorf("%s, mode %d (-want +got):\n%s", tc.name, mode, diff)
			}
		}
	}
}

// coalesce joins neighbouring text events, so that event lists of differently cut texts compare equal.
func coalesce(evs []Event) []Event {
	var out []Event
	for _, ev := range evs {
		if n := len(out); n > 0 && out[n-1].Type == ev.Type && ev.Type <= Content {
			out[n-1].Text += ev.Text
			continue
		}
		out = append(out, ev)
	}
	return out
}

func seeds() []string {
	return []string{"plan</think>\n\nHi", "<think>a</think>b<tool_call>\n<function=f>\n<parameter=q>\na < b\n</tool_call>\n</parameter>\n</function>\n</tool_call> x",
		"<tool_call><function=f></tool_call><tool_call><function=g><parameter=a>1</function></tool_call>", "a\n<function=f>\n</function>", "<tool_call>{}</tool_call>",
		"text <function=x </parameter> </tool_call> </think>", " \n<thi", "<tool_call><function=f><parameter=a>\n</tool_call>\n<tool_call>\n<function=g></function></tool_call>"}
}

// FuzzParser checks that no text breaks the parser, that events do not depend on how the text is cut, and that every call renders to text
// that parses to the same call.
func FuzzParser(f *testing.F) {
	for i, s := range seeds() {
		f.Add(s, uint8(i+1), i%2 == 0, i%3 == 0)
	}
	f.Fuzz(func(t *testing.T, text string, cut uint8, lenient, inThink bool) {
		mode := Strict
		if lenient {
			mode = Lenient
		}
		whole := NewParser(mode, inThink)
		want := coalesce(append(whole.Push(text), whole.Finish()...))
		parts := NewParser(mode, inThink)
		var got []Event
		for rest := text; rest != ""; {
			n := min(len(rest), int(cut%7)+1)
			got = append(got, parts.Push(rest[:n])...)
			rest = rest[n:]
		}
		got = coalesce(append(got, parts.Finish()...))
		if !reflect.DeepEqual(got, want) {
			t.Errorf("cut into %d: %v\nwhole: %v", cut%7+1, got, want)
		}
		for _, ev := range want {
			if ev.Type == CallEvent && ev.Call.Name == "" {
				t.Errorf("call without name in %q", text)
			}
		}
	})
}

func TestCallsSurviveRendering(t *testing.T) {
	for _, c := range []Call{call("f"), call("f", "a", "x\ny", "b", ""), call("g", "q", "select '<a>' where x < 3 and y > 4;\n"),
		call("h", "code", "if a:\n\n    return '</tool_call>'", "k", "\n\n")} {
		segs, err := NewRenderer(false).Open([]Message{{Role: "user", Content: "x"}, {Role: "assistant", Calls: []Call{c, c}}}, nil, Options{})
		if err != nil {
			t.Fatal(err)
		}
		text := Text(segs)
		text = text[strings.Index(text, "<tool_call>"):]
		text = strings.TrimSuffix(text, "\n")
		got := ParseTurn(text, Strict, false)
		if diff := cmp.Diff(Turn{Calls: []Call{c, c}}, got); diff != "" {
			t.Errorf("%+v (-want +got):\n%s", c, diff)
		}
	}
}

func TestStreamingIsTimely(t *testing.T) {
	p := NewParser(Strict, true)
	if ev := p.Push("thinking about </th"); len(ev) != 1 || ev[0].Text != "thinking about " {
		t.Errorf("thinking: %+v", ev)
	}
	p.Push("ink>\n\n")
	if ev := p.Push("an answer"); len(ev) != 1 || ev[0].Type != Content || ev[0].Text != "an answer" {
		t.Errorf("content: %+v", ev)
	}
	p.Push("<tool_call>\n<function=f>\n</function>\n")
	if ev := p.Push("</tool_call>"); len(ev) != 1 || ev[0].Type != CallEvent {
		t.Errorf("call: %+v", ev)
	}
}

func TestTyped(t *testing.T) {
	tools := []Tool{{JSON: json.RawMessage(`{"type":"function","function":{"name":"f","parameters":{"type":"object","properties":{
		"s":{"type":"string"},"i":{"type":"integer"},"n":{"type":"number"},"b":{"type":"boolean"},"l":{"type":"array"},"o":{"type":["object","null"]},"any":{}},"required":["s"]}}}`)}}
	got, err := call("f", "s", "12", "i", " 3\n", "n", "1.5", "b", "True", "l", `["a"]`, "o", "None", "any", "raw").Typed(tools)
	if err != nil {
		t.Fatal(err)
	}
	var vals []string
	for _, a := range got.Args {
		vals = append(vals, string(a.Value))
	}
	if want := []string{`"12"`, `3`, `1.5`, `true`, `["a"]`, `null`, `"raw"`}; !slices.Equal(vals, want) {
		t.Errorf("got %q, want %q", vals, want)
	}
	for _, tc := range []struct{ c, want string }{
		{"g", `unknown function "g"`}, {"f x 1", `unknown parameter "x"`}, {"f i two", `parameter "i" = "two" is not of type integer`}, {"f i 1.0", "not of type integer"}, {"f i 1", `missing parameter "s"`},
	} {
		w := strings.Fields(tc.c)
		if _, err := call(w[0], w[1:]...).Typed(tools); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: got %v, want %q", tc.c, err, tc.want)
		}
	}
}
