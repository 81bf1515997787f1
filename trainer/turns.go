package trainer

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"harness-s/model"
	"harness-s/model/chat"
)

// StopToken is a token that ends a turn. Token is its text, empty without a tokenizer; From says what put it into the set.
type StopToken struct {
	ID    int32  `json:"id"`
	Token string `json:"token"`
	From  string `json:"from"`
}

// StopSet lists the tokens that end a turn: those of model.stop, else the template's <|im_end|>, when the tokenizer has it, and the
// end-of-sequence ids of config.json and generation_config.json (model.md 5.3, pitfalls.md row 77). <|im_end|> is first. A model.stop that
// names an unknown token or lacks <|im_end|> is an ErrConfig.
func StopSet(m *model.Model, stop []string) ([]StopToken, error) {
	s := stopSet{m: m, end: -1}
	if m.Tok != nil {
		if id, ok := m.Tok.ID(chat.IMEnd); ok {
			s.end = id
		}
	}
	if len(stop) > 0 {
		return s.configured(stop)
	}
	if s.end >= 0 {
		s.add(s.end, "chat template")
	}
	for _, id := range m.Config.EOS {
		s.add(id, "config.json eos_token_id")
	}
	g, err := readGeneration(m)
	if err != nil {
		return nil, err
	}
	for _, id := range g.eos {
		if id < 0 || int(id) >= m.Config.VocabSize {
			return nil, hinted("read generation_config.json", "correct the file, or name the stop tokens in model.stop", "eos_token_id = %d, want an id from 0 to %d", id, m.Config.VocabSize-1)
		}
		s.add(id, "generation_config.json eos_token_id")
	}
	return s.set, nil
}

// StopIDs are the ids of a set, in its order.
func StopIDs(set []StopToken) []int32 {
	ids := make([]int32, len(set))
	for i, t := range set {
		ids[i] = t.ID
	}
	return ids
}

type stopSet struct {
	m   *model.Model
	end int32 // <|im_end|>, -1 without one
	set []StopToken
}

func (s *stopSet) add(id int32, from string) {
	if slices.ContainsFunc(s.set, func(t StopToken) bool { return t.ID == id }) {
		return
	}
	t := StopToken{ID: id, From: from}
	if s.m.Tok != nil {
		t.Token = strings.ToValidUTF8(string(s.m.Tok.TokenBytes(id)), "\uFFFD")
	}
	if id == s.end {
		s.set = slices.Insert(s.set, 0, t)
		return
	}
	s.set = append(s.set, t)
}

// configured resolves model.stop; every problem is in the error.
func (s *stopSet) configured(stop []string) ([]StopToken, error) {
	var bad []error
	valid := s.m.ValidVocab()
	for i, text := range stop {
		id, isID := int64(-1), false
		if n, err := strconv.ParseInt(text, 10, 64); err == nil {
			id, isID = n, true
		} else if s.m.Tok != nil {
			if n, ok := s.m.Tok.ID(text); ok {
				id = int64(n)
			}
		}
		switch {
		case id >= 0 && id < valid:
			s.add(int32(id), "model.stop")
		case isID:
			bad = append(bad, fmt.Errorf("model.stop[%d] = %q: allowed an id from 0 to %d", i, text, valid-1))
		case s.m.Tok == nil:
			bad = append(bad, fmt.Errorf("model.stop[%d] = %q: allowed an id from 0 to %d, for the model has no tokenizer", i, text, valid-1))
		default:
			bad = append(bad, fmt.Errorf("model.stop[%d] = %q: allowed a token of the model's vocabulary, such as %s", i, text, s.specials()))
		}
	}
	if bad == nil && s.end >= 0 && s.set[0].ID != s.end {
		bad = append(bad, fmt.Errorf("model.stop = [%s]: allowed lists with %s, with which the chat template ends every turn", strings.Join(stop, ", "), chat.IMEnd))
	}
	if bad != nil {
		return nil, &Error{Op: "resolve stop tokens", Err: fmt.Errorf("%w\n%w", ErrConfig, errors.Join(bad...)),
			Hint: fmt.Sprintf("model.stop = [%q], or [] for the set that the checkpoint names", chat.IMEnd)}
	}
	return s.set, nil
}

// specials are the first special tokens of the vocabulary, for an error.
func (s *stopSet) specials() string {
	var out []string
	for id := range int32(s.m.Tok.VocabSize()) {
		if s.m.Tok.IsSpecial(id) && len(out) < 6 {
			out = append(out, string(s.m.Tok.TokenBytes(id)))
		}
	}
	return strings.Join(out, ", ")
}

// RendererOf is the renderer of the chat template that came with m; without one it is the published format without thinking, as for the
// shipped checkpoint. thinking is model.thinking: "auto" (also "") leaves the template's default, "on" and "off" set it; a template that
// does not follow is an ErrConfig.
func RendererOf(m *model.Model, thinking string) (chat.Renderer, error) {
	r, err := chat.FromCheckpoint(m.FS())
	if errors.Is(err, chat.ErrNoTemplate) {
		r, err = chat.NewRenderer(false), nil
	}
	if err != nil {
		return r, &Error{Op: "open chat template", Err: err, Hint: "put a Qwen3.5 chat_template.jinja into the model directory"}
	}
	if thinking == "" || thinking == "auto" {
		return r, nil
	}
	if r, err = r.WithThinking(thinking == "on"); err != nil {
		return r, &Error{Op: "open chat template", Err: fmt.Errorf("%w\nmodel.thinking = %q: %w", ErrConfig, thinking, err), Hint: `model.thinking = "auto" takes the template as it is`}
	}
	return r, nil
}

// SamplingDefaults are the settings that a checkpoint is meant to be sampled with outside of training. Skipped lists settings of the source
// that this sampler does not have.
type SamplingDefaults struct {
	Temperature float64  `json:"temperature"`
	TopP        float64  `json:"top_p"`
	TopK        int      `json:"top_k"`
	MinP        float64  `json:"min_p"`
	From        string   `json:"from"`
	Skipped     []string `json:"skipped,omitempty"`
}

// SamplingOf reads the defaults of hs generate: generation_config.json when the checkpoint has one, else the model card's values for the
// template's family and thinking mode (model.md 6.1, the general rows), else the whole distribution at temperature 1. Rollouts do not use
// them: they sample what is trained.
func SamplingOf(m *model.Model, r chat.Renderer) (SamplingDefaults, error) {
	g, err := readGeneration(m)
	if err != nil || g.found {
		return g.sampling, err
	}
	return cardSampling(r.Family(), r.Thinks(chat.Options{})), nil
}

// cardSampling are the model card's values.
func cardSampling(family chat.Family, think bool) SamplingDefaults {
	card := map[chat.Family]map[bool]SamplingDefaults{
		chat.Large: {true: {Temperature: 1, TopP: 0.95, TopK: 20, Skipped: []string{"presence_penalty 1.5"}}, false: {Temperature: 0.7, TopP: 0.8, TopK: 20, Skipped: []string{"presence_penalty 1.5"}}},
		chat.Small: {true: {Temperature: 1, TopP: 0.95, TopK: 20, Skipped: []string{"presence_penalty 1.5"}}, false: {Temperature: 1, TopP: 1, TopK: 20, Skipped: []string{"presence_penalty 2"}}},
	}
	s, ok := card[family][think]
	if !ok {
		return SamplingDefaults{Temperature: 1, TopP: 1, From: "no generation_config.json and no published template: the whole distribution"}
	}
	s.From = fmt.Sprintf("model card of %s, thinking %s", family, map[bool]string{true: "on", false: "off"}[think])
	return s
}

// generation is what generation_config.json says.
type generation struct {
	found    bool
	eos      []int32
	sampling SamplingDefaults
}

// readGeneration parses generation_config.json. Absent settings are off, and do_sample = false is temperature 0.
func readGeneration(m *model.Model) (g generation, err error) {
	const name = "generation_config.json"
	raw, ok := m.Files[name]
	if !ok {
		return g, nil
	}
	var f struct {
		EOS         json.RawMessage `json:"eos_token_id"`
		DoSample    *bool           `json:"do_sample"`
		Temperature *float64        `json:"temperature"`
		TopP        *float64        `json:"top_p"`
		TopK        *int            `json:"top_k"`
		MinP        *float64        `json:"min_p"`
		Repetition  *float64        `json:"repetition_penalty"`
		Presence    *float64        `json:"presence_penalty"`
		Frequency   *float64        `json:"frequency_penalty"`
	}
	if err := json.Unmarshal(raw, &f); err != nil {
		return g, hinted("read "+name, "correct the file in the model directory, or remove it", "%w", err)
	}
	g = generation{found: true, sampling: SamplingDefaults{Temperature: 1, TopP: 1, From: name}}
	if len(f.EOS) > 0 && string(f.EOS) != "null" && json.Unmarshal(f.EOS, &g.eos) != nil {
		var one int32
		if err := json.Unmarshal(f.EOS, &one); err != nil {
			return g, hinted("read "+name, "correct the file in the model directory, or remove it", "eos_token_id = %s, want an id or a list of ids", f.EOS)
		}
		g.eos = []int32{one}
	}
	s := &g.sampling
	for _, v := range []struct {
		key     string
		from    *float64
		to      *float64
		most    float64
		allowed string
	}{{"temperature", f.Temperature, &s.Temperature, math.MaxFloat32, "from 0"}, {"top_p", f.TopP, &s.TopP, 1, "from 0 to 1"}, {"min_p", f.MinP, &s.MinP, 1, "from 0 to 1"}} {
		if v.from == nil {
			continue
		}
		if !(*v.from >= 0 && *v.from <= v.most) {
			return g, hinted("read "+name, "correct the file in the model directory, or remove it", "%s = %g, want a number %s", v.key, *v.from, v.allowed)
		}
		*v.to = *v.from
	}
	if f.TopK != nil {
		s.TopK = max(*f.TopK, 0) // -1 is another way to say off
	}
	if f.DoSample != nil && !*f.DoSample {
		s.Temperature = 0
	}
	for _, v := range []struct {
		key string
		x   *float64
		off float64
	}{{"repetition_penalty", f.Repetition, 1}, {"presence_penalty", f.Presence, 0}, {"frequency_penalty", f.Frequency, 0}} {
		if v.x != nil && *v.x != v.off {
			s.Skipped = append(s.Skipped, fmt.Sprintf("%s %g", v.key, *v.x))
		}
	}
	return g, nil
}
