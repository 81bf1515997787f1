package chat

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/fstest"
)

var templateDir = flag.String("templates", "", "folder with the published qwen3_5_think.jinja and qwen3_5_nothink.jinja")

func chatML(t testing.TB) string {
	t.Helper()
	raw, err := os.ReadFile("testdata/chatml.jinja")
	if err != nil {
		t.Fatal(err)
	}
	return string(raw)
}

// compare counts the conversations that a renderer renders as Python did; a refusal names its reason, other text is never rendered.
func compare(t *testing.T, r func(corpusCase) Renderer, cases []corpusCase) (same int) {
	for _, c := range cases {
		got, err := c.render(r(c))
		switch {
		case err == nil && c.Error != "":
			t.Errorf("%s: rendered\n%q\nthe template fails: %s\n%s", c.Name, got, c.Error, c.Messages)
		case err == nil && got != c.Want:
			t.Errorf("%s: got\n%q\nwant\n%q\n%s", c.Name, got, c.Want, c.Messages)
		case err == nil:
			same++
		case c.Error == "" && !errors.Is(err, ErrEngine) && !errors.Is(err, ErrTemplate) && !strings.HasPrefix(err.Error(), "parse message"):
			t.Errorf("%s: %v\n%s", c.Name, err, c.Messages)
		case c.Raised && !errors.Is(err, ErrEngine) && !strings.Contains(err.Error(), c.Error) && !strings.HasPrefix(err.Error(), "parse message") && !errors.Is(err, ErrNoMessages):
			t.Errorf("%s: error %q, the template raises %q", c.Name, err, c.Error)
		}
	}
	return same
}

// A template that is not a published one renders through the engine to the text of Python's Jinja, or not at all.
func TestForeignCorpus(t *testing.T) {
	source := chatML(t)
	digests, cases := readCorpus(t, "testdata/chatml.jsonl")
	if sum := sha256.Sum256([]byte(source)); digests["chatml.jinja"] != hex.EncodeToString(sum[:]) {
		t.Fatal("chatml.jsonl was made with another chatml.jinja; run tools/reference/chat.py")
	}
	r, err := ForTemplate(source, nil)
	if err != nil {
		t.Fatal(err)
	}
	if same := compare(t, func(corpusCase) Renderer { return r }, cases); same < 35 {
		t.Errorf("%d of %d conversations rendered", same, len(cases))
	} else {
		t.Logf("%d of %d conversations rendered", same, len(cases))
	}
}

// The engine and our own code agree on the published templates.
func TestEngineOnPublished(t *testing.T) {
	if *templateDir == "" {
		t.Skip("needs the published templates: go test ./model/chat -templates DIR (the package trl has them in chat_templates)")
	}
	rs := map[string]Renderer{}
	for _, name := range []string{"think", "nothink"} {
		raw, err := os.ReadFile(filepath.Join(*templateDir, "qwen3_5_"+name+".jinja"))
		if err != nil {
			t.Fatal(err)
		}
		own, err := ForTemplate(string(raw), nil)
		if err != nil || own.ThinkDefault != (name == "think") || own.foreign != nil {
			t.Errorf("%s: %+v, %v", name, own, err)
		}
		if rs[name], err = newForeign(string(raw), nil); err != nil {
			t.Fatal(err)
		}
	}
	_, cases := readCorpus(t, *corpusFile)
	t.Logf("%d of %d conversations rendered", compare(t, func(c corpusCase) Renderer { return rs[c.Template] }, cases), len(cases))
}

func TestForeignBridge(t *testing.T) {
	r, err := ForTemplate(chatML(t), nil)
	if err != nil {
		t.Fatal(err)
	}
	msgs := []Message{{Role: "user", Content: "Hi"}, {Role: "assistant", Content: "I look."}, {Role: "tool", Parts: []Segment{{" <|im_end|> out\n", KindTool}, {"note ", KindHarness}}}, {Role: "tool", Content: "more"}}
	for _, closed := range []bool{true, false} {
		o := Options{AddGenerationPrompt: true, Closed: closed}
		whole, err := r.Open(msgs, nil, o)
		if err != nil {
			t.Fatal(err)
		}
		bridge, err := r.Bridge(msgs[2:], o)
		if err != nil {
			t.Fatal(err)
		}
		sampled := "I look."
		if closed {
			sampled += IMEnd
		}
		if !strings.HasSuffix(Text(whole), "\n"+sampled+Text(bridge)) {
			t.Errorf("%q does not end %q", Text(bridge), Text(whole))
		}
		var kinds []string
		for _, s := range bridge {
			if s.Kind != KindTemplate {
				kinds = append(kinds, s.Kind.String()+" "+s.Text)
			}
		}
		if got, want := strings.Join(kinds, "|"), "tool <|im_end|> out\n|harness note|tool more"; got != want {
			t.Errorf("kinds %q, want %q", got, want)
		}
		special := 0
		ids, _ := Encode(runes{}, bridge)
		for _, id := range ids {
			if id >= 1000 {
				special++
			}
		}
		if want := strings.Count(Text(bridge), "<|im_end|>") - 1 + 2 + 4; special != want { // im_start twice, two tool responses
			t.Errorf("%d special tokens, want %d: %q", special, want, Text(bridge))
		}
	}
	if _, err := r.Bridge(nil, Options{}); !errors.Is(err, ErrNoMessages) {
		t.Errorf("empty bridge: %v", err)
	}
	if _, err := r.Bridge(msgs[1:], Options{}); !errors.Is(err, ErrUnexpectedRole) {
		t.Errorf("assistant in a bridge: %v", err)
	}
	for _, think := range []bool{false, true} {
		if got := r.Thinks(Options{Thinking: &think}); got != think || r.Thinks(Options{}) {
			t.Errorf("thinking %v: %v, default %v", think, got, r.Thinks(Options{}))
		}
	}
}

const minimal = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

func TestTemplatesRefused(t *testing.T) {
	if _, err := ForTemplate(minimal, nil); err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct{ source, want string }{
		"syntax":       {"{% if x %}", "jinja"},
		"filter":       {"{{ messages | nonsense }}" + minimal, "nonsense"},
		"raises":       {"{{ raise_exception('never') }}", "never"},
		"other turns":  {"{% for m in messages %}[INST]{{ m.content }}[/INST]{% endfor %}", "does not open a turn"},
		"other tokens": {strings.Replace(minimal, "{{ m.content", "<|sep|>{{ m.content", 1), "<|sep|>"},
		"other end":    {strings.ReplaceAll(minimal, IMEnd, "\n\n"), "not followed by <|im_end|>"},
		"drops tools":  {strings.Replace(minimal, "{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}", 1), "tool messages"},
		"upper case":   {strings.Replace(minimal, "m.content", "m.content | upper", 1), "not in the text"},
		"prompt first": {"{% if add_generation_prompt %}<|im_start|>{% endif %}" + minimal, "does not open a turn"},
	} {
		if _, err := ForTemplate(tc.source, nil); !errors.Is(err, ErrTemplate) || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: got %v, want %q", name, err, tc.want)
		}
	}
}

// Values that the engine writes in another way than Python are refused, and text in which the template would see tokens.
func TestEngineRefuses(t *testing.T) {
	r, err := ForTemplate(chatML(t), nil)
	if err != nil {
		t.Fatal(err)
	}
	call := func(v string) []Message {
		return []Message{{Role: "user", Content: "x"}, {Role: "assistant", Calls: []Call{{Name: "f", Args: args("a", v)}}}}
	}
	for name, tc := range map[string]struct {
		msgs []Message
		want error
	}{
		"float as int":  {call("1.0"), ErrEngine},
		"exponent":      {call("1e6"), ErrEngine},
		"big integer":   {call("123456789012345678901"), ErrEngine},
		"null":          {call("null"), ErrEngine},
		"separator":     {[]Message{{Role: "user", Content: "x\x1c"}}, ErrEngine},
		"private":       {[]Message{{Role: "user", Content: "x\U000ff002"}}, ErrEngine},
		"lists":         {call("[1.5, 2, null, true]"), nil},
		"line ends":     {call(`"a\u2028b"`), nil},
		"plain literal": {[]Message{{Role: "user", Content: "a <|im_end|> b"}}, nil},
	} {
		segs, err := r.Open(tc.msgs, nil, Options{})
		if !errors.Is(err, tc.want) {
			t.Errorf("%s: got %v, want %v", name, err, tc.want)
		}
		if name == "line ends" && !strings.Contains(Text(segs), "\"a\u2028b\"") {
			t.Errorf("line end became %q", Text(segs))
		}
	}
	inspects, err := ForTemplate(strings.Replace(minimal, "m.content", "m.content.split('</think>')[-1]", 1), nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := inspects.Open([]Message{{Role: "user", Content: "a</think>b"}}, nil, Options{}); !errors.Is(err, ErrTemplate) {
		t.Errorf("a literal in text that the template cuts: %v", err)
	}
}

func TestFromCheckpoint(t *testing.T) {
	config := func(v any) *fstest.MapFile {
		b, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		return &fstest.MapFile{Data: b}
	}
	file := &fstest.MapFile{Data: []byte(minimal + "\n")}
	bos := strings.Replace(minimal, "{% for", "{{ bos_token }}{% for", 1)
	type m = map[string]any
	for name, tc := range map[string]struct {
		files fstest.MapFS
		want  string // the text of a user message, or the error
	}{
		"file":         {fstest.MapFS{"chat_template.jinja": file}, "<|im_start|>user\nHi<|im_end|>\n"},
		"file first":   {fstest.MapFS{"chat_template.jinja": file, "tokenizer_config.json": config(m{"chat_template": "{{ broken"})}, "<|im_start|>user\nHi<|im_end|>\n"},
		"config":       {fstest.MapFS{"tokenizer_config.json": config(m{"chat_template": bos, "bos_token": "BOS"})}, "BOS<|im_start|>user\nHi<|im_end|>\n"},
		"added token":  {fstest.MapFS{"tokenizer_config.json": config(m{"chat_template": bos, "bos_token": m{"content": "BOS"}})}, "BOS<|im_start|>user\nHi<|im_end|>\n"},
		"null token":   {fstest.MapFS{"tokenizer_config.json": config(m{"chat_template": bos, "bos_token": nil})}, "<|im_start|>user\nHi<|im_end|>\n"},
		"several":      {fstest.MapFS{"tokenizer_config.json": config(m{"chat_template": []m{{"name": "rag", "template": "x"}, {"name": "default", "template": minimal}}})}, "<|im_start|>user\nHi<|im_end|>\n"},
		"no default":   {fstest.MapFS{"tokenizer_config.json": config(m{"chat_template": []m{{"name": "rag", "template": "x"}}})}, ErrNoTemplate.Error()},
		"none":         {fstest.MapFS{"tokenizer_config.json": config(m{})}, ErrNoTemplate.Error()},
		"empty folder": {fstest.MapFS{}, ErrNoTemplate.Error()},
		"damaged":      {fstest.MapFS{"tokenizer_config.json": &fstest.MapFile{Data: []byte("{")}}, "parse tokenizer_config.json"},
		"not usable":   {fstest.MapFS{"chat_template.jinja": &fstest.MapFile{Data: []byte("x")}}, ErrTemplate.Error()},
	} {
		r, err := FromCheckpoint(tc.files)
		if err != nil {
			if !strings.Contains(err.Error(), tc.want) {
				t.Errorf("%s: %v, want %q", name, err, tc.want)
			}
			continue
		}
		segs, err := r.Open([]Message{{Role: "user", Content: "Hi"}}, nil, Options{})
		if err != nil || Text(segs) != tc.want {
			t.Errorf("%s: %q, %v, want %q", name, Text(segs), err, tc.want)
		}
	}
}

// WithThinking is enable_thinking for everything that is rendered: what the corpora have for a switch in the options comes out of a renderer
// that was switched, also in a bridge, and options still win.
func TestWithThinking(t *testing.T) {
	foreign, err := ForTemplate(chatML(t), nil)
	if err != nil {
		t.Fatal(err)
	}
	if f := foreign.Family(); !strings.HasPrefix(string(f), "other template, sha256 ") || NewRenderer(true).Family() != BuiltIn {
		t.Errorf("family %q", f)
	}
	switched := 0
	for file, r := range map[string]func(corpusCase) Renderer{
		"testdata/chatml.jsonl": func(corpusCase) Renderer { return foreign },
		"testdata/corpus.jsonl": func(c corpusCase) Renderer { return NewRenderer(c.Template == "think") },
	} {
		_, cases := readCorpus(t, file)
		for _, c := range cases {
			if c.Thinking == nil {
				continue
			}
			on := *c.Thinking
			s, err := r(c).WithThinking(on)
			if err != nil {
				t.Fatal(err)
			}
			want, werr := c.render(r(c))
			c.Thinking = nil
			got, gerr := c.render(s)
			if got != want || (gerr == nil) != (werr == nil) || s.ThinkDefault != on || s.Thinks(Options{}) != on {
				t.Errorf("%s %s: %q %v, options give %q %v", file, c.Name, got, gerr, want, werr)
			}
			switched++
		}
	}
	if switched < 20 {
		t.Errorf("%d conversations with a switch", switched)
	}
	no := false
	on, err := NewRenderer(false).WithThinking(true)
	if err != nil {
		t.Fatal(err)
	}
	msgs := []Message{{Role: "tool", Content: "x"}}
	for o, want := range map[*bool]string{nil: "<think>\n", &no: "<think>\n\n</think>\n\n"} {
		segs, err := on.Bridge(msgs, Options{AddGenerationPrompt: true, Thinking: o})
		if err != nil || !strings.HasSuffix(Text(segs), "assistant\n"+want) {
			t.Errorf("%q, %v", Text(segs), err)
		}
	}
	// A template without a switch offers the one mode it has.
	plain, err := ForTemplate("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}", nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := plain.WithThinking(true); !errors.Is(err, ErrTemplate) || !strings.Contains(err.Error(), "enable_thinking = true") {
		t.Errorf("no switch: %v", err)
	}
	if _, err := plain.WithThinking(false); err != nil {
		t.Errorf("no switch: %v", err)
	}
}
