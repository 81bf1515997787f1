package trainer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"harness-s/env"
	"harness-s/env/harness"
	"harness-s/kernels"
	"harness-s/model"
	"harness-s/model/chat"
)

// corpusDemos is the number of scripted episodes the tokenizer is trained on.
const corpusDemos = 1000

// specials are the literals of the chat template that are single tokens, end of
// turn first.
func specials() []string {
	return []string{chat.IMEnd, chat.IMStart, chat.EndOfText, chat.ThinkOpen, chat.ThinkClose,
		chat.ToolCallOpen, chat.ToolCallClose, chat.ToolResponseOpen, chat.ToolResponseClose}
}

// NewTiny makes the fresh tiny policy: a tokenizer trained on the text of
// scripted episodes under the whole pool, and random weights. Its device memory
// includes gradients and moments.
func NewTiny(ctx context.Context, cfg Config, e env.Env, pool *harness.Pool, dev *kernels.Device, progress func(Progress)) (*model.Model, error) {
	texts, err := corpus(ctx, cfg, e, pool, progress)
	if err != nil {
		return nil, fmt.Errorf("collect corpus: %w", err)
	}
	mc := model.TinyConfig()
	file, err := model.TrainBPE(texts, mc.VocabSize, specials())
	if err != nil {
		return nil, err
	}
	tok, err := model.ParseTokenizer(file)
	if err != nil {
		return nil, fmt.Errorf("read the trained tokenizer: %w", err)
	}
	for _, name := range []string{chat.IMEnd, chat.EndOfText} {
		id, ok := tok.ID(name)
		if !ok {
			return nil, fmt.Errorf("the trained tokenizer lacks %s", name)
		}
		mc.EOS = append(mc.EOS, id)
	}
	m, err := model.NewRandom(mc, dev, cfg.SFT.Seed, cfg.training())
	if err != nil {
		return nil, err
	}
	m.Tok = tok
	m.Files["tokenizer.json"] = file
	side := map[string]any{
		"tokenizer_config.json": map[string]any{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": chat.IMEnd,
			"pad_token": chat.EndOfText, "model_max_length": mc.MaxPositions, "clean_up_tokenization_spaces": false},
		"generation_config.json": map[string]any{"eos_token_id": mc.EOS, "do_sample": true, "temperature": 1.0, "top_p": 1.0, "top_k": 0},
	}
	for name, v := range side {
		b, err := json.MarshalIndent(v, "", "  ")
		if err != nil {
			return nil, fmt.Errorf("encode %s: %w", name, err)
		}
		m.Files[name] = append(b, '\n')
	}
	return m, nil
}

// corpus is the whole text of scripted episodes, prompts and tool results
// included, spread over all harnesses and styles.
func corpus(ctx context.Context, cfg Config, e env.Env, pool *harness.Pool, progress func(Progress)) ([]string, error) {
	c := cfg
	c.SFT.Tasks = min(cfg.SFT.Tasks, corpusDemos)
	// Bytes stand for tokens here, so token budgets are multiplied.
	c.Model.MaxLen, c.Rollout.MaxNew = 16*cfg.Model.MaxLen, 16*cfg.Rollout.MaxNew
	st, err := newStage(c, e, byteTokens{}, chat.NewRenderer(false), []int32{byteStop})
	if err != nil {
		return nil, err
	}
	tasks, err := demoTasks(ctx, c, e)
	if err != nil {
		return nil, err
	}
	shown, err := st.perform(ctx, planDemos(c.SFT, tasks, pool), serial(progress))
	if err != nil {
		return nil, err
	}
	var texts []string
	for _, t := range shown {
		if t == nil {
			continue
		}
		for i := range t.Segments {
			texts = append(texts, byteTokens{}.Decode(t.Segments[i].IDs))
		}
	}
	if len(texts) == 0 {
		return nil, errors.New("no demonstration ended as meant")
	}
	return texts, nil
}

// byteTokens is a tokenizer of single bytes, for reading text out of episodes.
type byteTokens struct{}

const byteStop = 256

func (byteTokens) Encode(text string) []int32 {
	ids := make([]int32, len(text))
	for i := range len(text) {
		ids[i] = int32(text[i])
	}
	return ids
}

func (t byteTokens) EncodeOrdinary(text string) []int32 { return t.Encode(text) }

func (byteTokens) Decode(ids []int32) string {
	b := make([]byte, 0, len(ids))
	for _, id := range ids {
		if id == byteStop {
			b = append(b, specials()[0]...)
		} else {
			b = append(b, byte(id))
		}
	}
	return string(b)
}
