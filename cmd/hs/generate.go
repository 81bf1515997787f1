package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"unicode/utf8"

	"harness-s/model"
	"harness-s/model/chat"
	"harness-s/trainer"
)

// generateCmd samples one continuation: hs generate.
type generateCmd struct {
	storageFlag
	Ckpt        string   `type:"path" help:"Hugging Face directory; default the shipped tiny checkpoint."`
	Adapter     string   `type:"path" help:"LoRA adapter, a PEFT directory; its base is --ckpt, or what the adapter names." placeholder:"DIR"`
	Prompt      string   `xor:"input" required:"" help:"Prompt, the text of a user turn." placeholder:"TEXT"`
	PromptFile  string   `xor:"input" required:"" type:"path" help:"File with the prompt." placeholder:"FILE"`
	IDs         string   `name:"ids" xor:"input" required:"" type:"path" help:"JSON file with an array of token ids, fed as they are." placeholder:"FILE"`
	Raw         bool     `help:"Feed the prompt as it is, without the chat template."`
	MaxNew      int      `default:"256" help:"Most tokens to sample."`
	Thinking    string   `default:"auto" enum:"auto,on,off" help:"enable_thinking of the chat template: auto (its default), on or off."`
	Temperature *float64 `help:"Sampling temperature, 0 = most likely token; this and the next three default to what the checkpoint says, see hs doctor."`
	TopK        *int     `help:"Draw from the K most likely tokens, 0 = off."`
	TopP        *float64 `help:"Draw from the most likely tokens that hold this probability together, 1 = off."`
	MinP        *float64 `help:"Drop tokens less likely than this share of the most likely one, 0 = off."`
	Seed        uint64   `default:"1" help:"Seed of the sampled tokens; the same seed gives the same tokens."`
}

// generateResult is the JSON contract of hs generate. IDs are the sampled tokens, the one that stopped included; Text leaves it out.
// LogProbs are those of IDs at the sampling temperature over the whole vocabulary, before top-k, top-p and min-p, in nats.
type generateResult struct {
	PromptTokens int       `json:"prompt_tokens"`
	IDs          []int32   `json:"ids"`
	Text         string    `json:"text"`
	LogProbs     []float32 `json:"logprobs"`
	Stop         string    `json:"stop"`       // stop: a token of the stop set; length: --max-new tokens were sampled
	StopToken    *int32    `json:"stop_token"` // null for length
	Seed         uint64    `json:"seed"`
	// Sampling is what was used; From names the source of what no flag set.
	Sampling trainer.SamplingDefaults `json:"sampling"`
}

// Run streams the text while it is sampled.
func (c *generateCmd) Run(ctx context.Context, g *globals) error {
	if err := c.check(); err != nil {
		return err
	}
	prompt, fixed, err := c.input()
	if err != nil {
		return err
	}
	dev, m, err := g.openAdapted(c.Ckpt, c.Adapter, c.options(g, false))
	if err != nil {
		return err
	}
	defer dev.Close()
	defer m.Close()
	ids := fixed
	if ids == nil {
		if ids, err = c.encode(m, prompt); err != nil {
			return err
		}
	}
	if err := checkIDs(c.origin(), ids, m); err != nil {
		return err
	}
	if n := m.Config.MaxPositions; len(ids)+c.MaxNew > n {
		return usage(fmt.Sprintf("shorten the prompt, or --max-new %d", max(n-len(ids), 1)),
			"the prompt has %d tokens and --max-new is %d; the model takes %d in all (max_position_embeddings)", len(ids), c.MaxNew, n)
	}
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
	defer stop()
	out := &streamer{w: g.people(), tok: m.Tok}
	r, err := c.sample(ctx, m, ids, out.push)
	out.end()
	if errors.Is(err, context.Canceled) {
		return exitError{code: exitInterrupted, err: &trainer.Error{Op: "generate", Err: errors.New("interrupted"), Hint: "--max-new N bounds the length"}}
	}
	if err != nil {
		return err
	}
	if !g.Quiet {
		why := "--max-new reached"
		if r.StopToken != nil {
			why = "stopped by " + tokenName(m.Tok, *r.StopToken)
		}
		s := r.Sampling
		fmt.Fprintf(g.errOut, "%d prompt tokens, %d sampled, %s; %s\n", r.PromptTokens, len(r.IDs), why, samplingText(s))
	}
	if g.JSON {
		return g.emit(r)
	}
	return nil
}

// check refuses values that the sampler would refuse, before the model is loaded.
func (c *generateCmd) check() error {
	zero, k := 0.0, 0.0
	if c.TopK != nil {
		k = float64(*c.TopK)
	}
	for _, f := range []struct {
		flag     string
		v, least float64
		most     float64
		want     string
	}{
		{"--max-new", float64(c.MaxNew), 1, math.MaxInt32, "at least 1"},
		{"--temperature", *cmp.Or(c.Temperature, &zero), 0, math.MaxFloat32, "a number from 0"},
		{"--top-k", k, 0, math.MaxInt32, "at least 0 (0 = off)"},
		{"--top-p", *cmp.Or(c.TopP, &zero), 0, 1, "from 0 to 1 (1 = off)"},
		{"--min-p", *cmp.Or(c.MinP, &zero), 0, 1, "from 0 to 1 (0 = off)"},
	} {
		if !(f.v >= f.least && f.v <= f.most) {
			return usage("e.g. --max-new 256 --temperature 0.7 --top-k 20 --top-p 0.8", "%s is %g, want %s", f.flag, f.v, f.want)
		}
	}
	return nil
}

func (c *generateCmd) origin() string {
	switch {
	case c.IDs != "":
		return c.IDs
	case c.PromptFile != "":
		return c.PromptFile
	}
	return "--prompt"
}

// input is the prompt, or the ids when they were given.
func (c *generateCmd) input() (text string, ids []int32, err error) {
	switch {
	case c.IDs != "":
		ids, err = readIDs(c.IDs)
	case c.PromptFile != "":
		text, err = readText(c.PromptFile)
	case c.Prompt == "":
		err = usage("e.g. --prompt 'How many rows has the table?'", "--prompt is empty")
	default:
		text = c.Prompt
	}
	return text, ids, err
}

// encode renders the prompt as a user turn with the opening of the answer, or takes it as it is with --raw.
func (c *generateCmd) encode(m *model.Model, prompt string) ([]int32, error) {
	if m.Tok == nil {
		return nil, noTokenizer(c.Ckpt, "--ids FILE takes token ids")
	}
	if c.Raw {
		return m.Tok.Encode(prompt), nil
	}
	renderer, err := trainer.RendererOf(m, c.Thinking)
	if err != nil {
		return nil, &trainer.Error{Op: "render prompt", Err: err, Hint: "put a Qwen3.5 chat_template.jinja into the checkpoint directory, or --raw feeds the prompt as it is"}
	}
	segs, err := renderer.Open([]chat.Message{{Role: "user", Content: prompt}}, nil, chat.Options{AddGenerationPrompt: true})
	if err != nil {
		return nil, &trainer.Error{Op: "render prompt", Err: err, Hint: "--raw feeds the prompt without the chat template"}
	}
	ids, _ := chat.Encode(m.Tok, segs)
	return ids, nil
}

// sample draws up to MaxNew tokens after ids; each is a function of weights, ids, options, seed and its position alone.
func (c *generateCmd) sample(ctx context.Context, m *model.Model, ids []int32, each func(int32)) (*generateResult, error) {
	r, err := model.NewRunner(m, model.RunnerOptions{MaxSeqs: 1, MaxTokens: len(ids) + c.MaxNew + 16, PageSize: 16})
	if err != nil {
		return nil, err
	}
	defer r.Close()
	seq, err := r.Acquire()
	if err != nil {
		return nil, err
	}
	set, err := trainer.StopSet(m, nil)
	if err != nil {
		return nil, err
	}
	s, err := c.sampling(m)
	if err != nil {
		return nil, err
	}
	stop := trainer.StopIDs(set)
	res := &generateResult{PromptTokens: len(ids), IDs: []int32{}, LogProbs: []float32{}, Stop: "length", Seed: c.Seed, Sampling: s}
	work := []model.Work{{Seq: seq, Append: ids, Sample: true, Key: model.Key{Lo: c.Seed},
		Sampling: model.Sampling{Temperature: float32(s.Temperature), TopK: s.TopK, TopP: float32(s.TopP), MinP: float32(s.MinP)}}}
	for n := range c.MaxNew {
		work[0].Ctr = uint64(n)
		got, err := r.Step(ctx, work)
		if err != nil {
			return nil, err
		}
		id := got[0].Token
		if lp := float64(got[0].LogProb); math.IsNaN(lp) || math.IsInf(lp, 0) {
			return nil, &trainer.Error{Op: "generate", Err: fmt.Errorf("log-probability of token %d is %v", n, lp), Hint: "the weights overflow; hs doctor --ckpt DIR checks them"}
		}
		res.IDs, res.LogProbs = append(res.IDs, id), append(res.LogProbs, got[0].LogProb)
		if slices.Contains(stop, id) {
			res.Stop, res.StopToken = "stop", &id
			break
		}
		each(id)
		work[0].Append = []int32{id}
	}
	if m.Tok != nil {
		text := res.IDs
		if res.StopToken != nil {
			text = text[:len(text)-1]
		}
		res.Text = m.Tok.Decode(text)
	}
	return res, nil
}

// sampling is what the flags say, and what the checkpoint says for the others.
func (c *generateCmd) sampling(m *model.Model) (trainer.SamplingDefaults, error) {
	renderer, err := trainer.RendererOf(m, c.Thinking)
	if err != nil {
		renderer = chat.NewRenderer(false) // raw prompts and ids need no template
	}
	s, err := trainer.SamplingOf(m, renderer)
	if err != nil {
		return s, err
	}
	given := 0
	for _, f := range []struct{ flag, at *float64 }{{c.Temperature, &s.Temperature}, {c.TopP, &s.TopP}, {c.MinP, &s.MinP}} {
		if f.flag != nil {
			*f.at = *f.flag
			given++
		}
	}
	if c.TopK != nil {
		s.TopK = *c.TopK
		given++
	}
	switch given {
	case 0:
	case 4:
		s.From, s.Skipped = "flags", nil
	default:
		s.From = "flags, the rest from " + s.From
	}
	return s, nil
}

// samplingText is a line of settings.
func samplingText(s trainer.SamplingDefaults) string {
	text := fmt.Sprintf("temperature %g, top_p %g, top_k %d, min_p %g (%s", s.Temperature, s.TopP, s.TopK, s.MinP, s.From)
	if len(s.Skipped) > 0 {
		text += "; without " + strings.Join(s.Skipped, ", ")
	}
	return text + ")"
}

// streamer prints tokens as text, whole characters at a time; without a tokenizer it prints ids.
type streamer struct {
	w       io.Writer
	tok     *model.Tokenizer
	ids     []int32 // since the last whole character
	started bool
	last    byte
}

func (s *streamer) push(id int32) {
	if s.tok == nil {
		sep := " "
		if !s.started {
			sep = ""
		}
		s.print(fmt.Sprintf("%s%d", sep, id))
		return
	}
	s.ids = append(s.ids, id)
	var b []byte
	for _, id := range s.ids {
		b = append(b, s.tok.TokenBytes(id)...)
	}
	if open(b) {
		return // the next token may complete the character
	}
	s.print(s.tok.Decode(s.ids))
	s.ids = s.ids[:0]
}

// open reports whether b ends within a character that further bytes could complete.
func open(b []byte) bool {
	for n := 1; n <= min(len(b), utf8.UTFMax-1); n++ {
		if tail := b[len(b)-n:]; utf8.RuneStart(tail[0]) {
			return !utf8.FullRune(tail)
		}
	}
	return false
}

// end prints what is left and closes the line.
func (s *streamer) end() {
	if len(s.ids) > 0 {
		s.print(s.tok.Decode(s.ids))
	}
	if s.started && s.last != '\n' {
		s.print("\n")
	}
}

func (s *streamer) print(text string) {
	if text == "" {
		return
	}
	s.started, s.last = true, text[len(text)-1]
	fmt.Fprint(s.w, text)
}

// tokenName is the text of a token, or its id.
func tokenName(tok *model.Tokenizer, id int32) string {
	if tok != nil {
		if b := tok.TokenBytes(id); len(b) > 0 {
			return strings.ToValidUTF8(string(b), "?")
		}
	}
	return fmt.Sprintf("token %d", id)
}
