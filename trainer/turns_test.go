package trainer

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"harness-s/kernels"
	"harness-s/model"
	"harness-s/model/chat"
)

// tinyWith is the shipped checkpoint with some of its files replaced; nil removes one.
func tinyWith(t *testing.T, files map[string]string) *model.Model {
	t.Helper()
	dev, err := kernels.Open("cpu", kernels.Options{})
	if err != nil {
		t.Fatal(err)
	}
	fsys, err := model.TinyFS()
	if err != nil {
		t.Fatal(err)
	}
	m, err := model.LoadFS(fsys, dev, model.LoadOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close(); dev.Close() })
	m.Files = maps.Clone(m.Files)
	for name, text := range files {
		m.Files[name] = []byte(text)
		if text == "" {
			delete(m.Files, name)
		}
	}
	return m
}

func TestStopSet(t *testing.T) {
	const gen = "generation_config.json"
	for _, c := range []struct {
		name  string
		files map[string]string
		stop  []string
		want  string // token id from, one after the other
		err   []string
	}{
		{"checkpoint", nil, nil, "<|im_end|> 980 chat template, <|endoftext|> 982 config.json eos_token_id", nil},
		{"generation config", map[string]string{gen: `{"eos_token_id": [981, 982]}`}, nil,
			"<|im_end|> 980 chat template, <|endoftext|> 982 config.json eos_token_id, <|im_start|> 981 generation_config.json eos_token_id", nil},
		{"one id", map[string]string{gen: `{"eos_token_id": 981}`}, nil,
			"<|im_end|> 980 chat template, <|endoftext|> 982 config.json eos_token_id, <|im_start|> 981 generation_config.json eos_token_id", nil},
		{"no generation config", map[string]string{gen: ""}, nil, "<|im_end|> 980 chat template, <|endoftext|> 982 config.json eos_token_id", nil},
		{"template's token is first", nil, []string{"<|endoftext|>", "980"}, "<|im_end|> 980 model.stop, <|endoftext|> 982 model.stop", nil},
		{"ordinary token", nil, []string{"<|im_end|>", ";"}, "<|im_end|> 980 model.stop, ; 59 model.stop", nil},
		{"twice", nil, []string{"<|im_end|>", "980"}, "<|im_end|> 980 model.stop", nil},
		{"unknown token", nil, []string{"<|im_end|>", "<|imend|>"}, "", []string{`model.stop[1] = "<|imend|>": allowed a token`, "<|im_end|>"}},
		{"id outside", nil, []string{"<|im_end|>", "989", "-1"}, "", []string{`model.stop[1] = "989": allowed an id from 0 to 988`, `model.stop[2] = "-1"`}},
		{"without the template's end", nil, []string{"<|endoftext|>"}, "", []string{"model.stop = [<|endoftext|>]: allowed lists with <|im_end|>"}},
		{"broken file", map[string]string{gen: `{"eos_token_id": "x"}`}, nil, "", []string{gen, `eos_token_id = "x"`}},
		{"id outside in file", map[string]string{gen: `{"eos_token_id": 5000000}`}, nil, "", []string{gen, "eos_token_id = 5000000, want an id from 0 to"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := tinyWith(t, c.files)
			set, err := StopSet(m, c.stop)
			for _, w := range c.err {
				if err == nil || !strings.Contains(err.Error(), w) || Hint(err) == "" {
					t.Errorf("no %q in %v, hint %q", w, err, Hint(err))
				}
			}
			if len(c.err) > 0 {
				if len(c.stop) > 0 && !errors.Is(err, ErrConfig) {
					t.Errorf("not a mistake of the configuration: %v", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, s := range set {
				got = append(got, fmt.Sprintf("%s %d %s", s.Token, s.ID, s.From))
			}
			if strings.Join(got, ", ") != c.want {
				t.Errorf("got  %s\nwant %s", strings.Join(got, ", "), c.want)
			}
		})
	}
	m := tinyWith(t, nil)
	m.Tok = nil // without a tokenizer ids work and text does not
	if set, err := StopSet(m, nil); err != nil || !slices.Equal(StopIDs(set), m.Config.EOS) {
		t.Errorf("%v, %v", set, err)
	}
	if _, err := StopSet(m, []string{"<|im_end|>"}); !errors.Is(err, ErrConfig) || !strings.Contains(err.Error(), "no tokenizer") {
		t.Errorf("%v", err)
	}
	if set, err := StopSet(m, []string{"7"}); err != nil || !slices.Equal(StopIDs(set), []int32{7}) {
		t.Errorf("%v, %v", set, err)
	}
}

func TestThinkingSwitch(t *testing.T) {
	const plain = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
	for _, c := range []struct {
		template, mode string
		want           bool
		err            string
	}{
		{"", "auto", false, ""}, {"", "", false, ""}, {"", "on", true, ""}, {"", "off", false, ""},
		{plain, "auto", false, ""}, {plain, "off", false, ""}, {plain, "on", false, `model.thinking = "on"`},
		{"{{ nothing", "auto", false, "open chat template"},
	} {
		m := tinyWith(t, map[string]string{"chat_template.jinja": c.template})
		r, err := RendererOf(m, c.mode)
		if c.err != "" {
			if err == nil || !strings.Contains(err.Error(), c.err) || Hint(err) == "" || c.mode == "on" && !errors.Is(err, ErrConfig) {
				t.Errorf("%q %s: %v", c.template, c.mode, err)
			}
			continue
		}
		if err != nil || r.Thinks(chat.Options{}) != c.want {
			t.Errorf("%q %s: thinks %t, %v", c.template, c.mode, r.Thinks(chat.Options{}), err)
		}
	}
}

// Values: model.md 6.1, the general rows.
func TestSamplingDefaults(t *testing.T) {
	for _, c := range []struct {
		family chat.Family
		think  bool
		want   SamplingDefaults
	}{
		{chat.Large, true, SamplingDefaults{1, 0.95, 20, 0, "model card of Qwen3.5 4B and 9B, thinking on", []string{"presence_penalty 1.5"}}},
		{chat.Large, false, SamplingDefaults{0.7, 0.8, 20, 0, "model card of Qwen3.5 4B and 9B, thinking off", []string{"presence_penalty 1.5"}}},
		{chat.Small, true, SamplingDefaults{1, 0.95, 20, 0, "model card of Qwen3.5 0.8B and 2B, thinking on", []string{"presence_penalty 1.5"}}},
		{chat.Small, false, SamplingDefaults{1, 1, 20, 0, "model card of Qwen3.5 0.8B and 2B, thinking off", []string{"presence_penalty 2"}}},
		{chat.BuiltIn, false, SamplingDefaults{1, 1, 0, 0, "no generation_config.json and no published template: the whole distribution", nil}},
	} {
		if got := cardSampling(c.family, c.think); digestJSON(t, got) != digestJSON(t, c.want) {
			t.Errorf("%s, thinking %t: %+v", c.family, c.think, got)
		}
	}
	const gen = "generation_config.json"
	for _, c := range []struct {
		file, err string
		want      SamplingDefaults
	}{
		{`{"do_sample": true, "temperature": 0.6, "top_p": 0.9, "top_k": 40, "min_p": 0.05}`, "", SamplingDefaults{0.6, 0.9, 40, 0.05, gen, nil}},
		{`{"do_sample": false, "temperature": 0.6}`, "", SamplingDefaults{0, 1, 0, 0, gen, nil}},
		{`{"top_k": -1, "repetition_penalty": 1.05, "presence_penalty": 0}`, "", SamplingDefaults{1, 1, 0, 0, gen, []string{"repetition_penalty 1.05"}}},
		{`{}`, "", SamplingDefaults{1, 1, 0, 0, gen, nil}},
		{`{"top_p": 1.5}`, "top_p = 1.5, want a number from 0 to 1", SamplingDefaults{}},
		{`{"temperature": -1}`, "temperature = -1, want a number from 0", SamplingDefaults{}},
		{`{"temperature": "hot"}`, gen, SamplingDefaults{}},
		{`{`, gen, SamplingDefaults{}},
	} {
		got, err := SamplingOf(tinyWith(t, map[string]string{gen: c.file}), chat.NewRenderer(true))
		switch {
		case c.err != "":
			if err == nil || !strings.Contains(err.Error(), c.err) || Hint(err) == "" {
				t.Errorf("%s: %v", c.file, err)
			}
		case err != nil || digestJSON(t, got) != digestJSON(t, c.want):
			t.Errorf("%s: %+v, %v", c.file, got, err)
		}
	}
}

// TestAssembleUsesTheConfiguredTurns: stop set and thinking of the configuration reach the parts that sample and render.
func TestAssembleUsesTheConfiguredTurns(t *testing.T) {
	m := tinyWith(t, nil)
	w := newWorld(t, rates(0), byRate)
	load := func(sets ...string) (*Deps, error) {
		res, err := Load(nil, append([]string{"model.max_len=128", "rollout.max_new=64", "rollout.slots=2"}, sets...))
		if err != nil {
			t.Fatal(err)
		}
		return Assemble(res.Config, m, w.deps.Env, w.deps.Pool, AssembleOptions{})
	}
	d, err := load(`model.stop=["26", "<|im_end|>"]`, "model.thinking=on")
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	if !slices.Equal(d.Stop, []int32{980, 26}) || !d.Renderer.Thinks(chat.Options{}) {
		t.Errorf("stop %v, thinks %t", d.Stop, d.Renderer.Thinks(chat.Options{}))
	}
	if _, err := load(`model.stop=["<|nothing|>"]`); !errors.Is(err, ErrConfig) {
		t.Errorf("%v", err)
	}
	for _, set := range []string{`model.stop=[""]`, `model.stop=["a", "a"]`, "model.thinking=maybe"} {
		if _, err := Load(nil, []string{set}); !errors.Is(err, ErrConfig) || !strings.Contains(err.Error(), "allowed") {
			t.Errorf("%s: %v", set, err)
		}
	}
}
