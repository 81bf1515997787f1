package model

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"unicode/utf8"
)

const (
	tokenizerFile       = "tokenizer.json"
	tokenizerConfigFile = "tokenizer_config.json"
)

type addedJSON struct {
	ID         *int32 `json:"id"`
	Content    string `json:"content"`
	SingleWord bool   `json:"single_word"`
	LStrip     bool   `json:"lstrip"`
	RStrip     bool   `json:"rstrip"`
	Normalized bool   `json:"normalized"`
	Special    bool   `json:"special"`
}

type preTokenizerJSON struct {
	Type    string `json:"type"`
	Pattern struct {
		Regex  *string `json:"Regex"`
		String *string `json:"String"`
	} `json:"pattern"`
	Behavior       string             `json:"behavior"`
	Invert         bool               `json:"invert"`
	AddPrefixSpace bool               `json:"add_prefix_space"`
	UseRegex       *bool              `json:"use_regex"`
	Items          []preTokenizerJSON `json:"pretokenizers"`
}

type tokenizerJSON struct {
	Added         []addedJSON       `json:"added_tokens"`
	Normalizer    json.RawMessage   `json:"normalizer"`
	PreTokenizer  *preTokenizerJSON `json:"pre_tokenizer"`
	PostProcessor *struct {
		Type string `json:"type"`
	} `json:"post_processor"`
	Decoder *struct {
		Type string `json:"type"`
	} `json:"decoder"`
	Model struct {
		Type         string          `json:"type"`
		Dropout      *float64        `json:"dropout"`
		Unk          *string         `json:"unk_token"`
		Prefix       *string         `json:"continuing_subword_prefix"`
		Suffix       *string         `json:"end_of_word_suffix"`
		ByteFallback bool            `json:"byte_fallback"`
		IgnoreMerges bool            `json:"ignore_merges"`
		Vocab        json.RawMessage `json:"vocab"`
		Merges       json.RawMessage `json:"merges"`
	} `json:"model"`
}

// LoadTokenizer reads tokenizer.json and, when there is one, the further added tokens of tokenizer_config.json. Without tokenizer.json
// it returns an error wrapping ErrNoTokenizer.
func LoadTokenizer(fsys fs.FS) (*Tokenizer, error) {
	b, err := fs.ReadFile(fsys, tokenizerFile)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, &Error{Op: "load tokenizer", Err: ErrNoTokenizer, Hint: "copy tokenizer.json of the model into the directory"}
	}
	if err != nil {
		return nil, fmt.Errorf("load tokenizer: %w", err)
	}
	cfg, err := fs.ReadFile(fsys, tokenizerConfigFile)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("load tokenizer: %w", err)
	}
	return parseTokenizer(b, cfg)
}

// ParseTokenizer parses the content of tokenizer.json. It refuses, naming every value found, whatever it would not compute exactly:
// other models, normalisers, pre-tokenizers and patterns. Truncation and padding are ignored, as transformers does.
func ParseTokenizer(tokenizerJSON []byte) (*Tokenizer, error) {
	return parseTokenizer(slices.Clone(tokenizerJSON), nil)
}

// parseTokenizer keeps b.
func parseTokenizer(b, config []byte) (*Tokenizer, error) {
	var j tokenizerJSON
	if err := json.Unmarshal(b, &j); err != nil {
		return nil, fmt.Errorf("parse tokenizer.json: %w", err)
	}
	if len(config) > 0 {
		more, err := configTokens(config)
		if err != nil {
			return nil, err
		}
		for _, a := range more {
			if !slices.ContainsFunc(j.Added, func(o addedJSON) bool { return o.ID != nil && *o.ID == *a.ID }) {
				j.Added = append(j.Added, a)
			}
		}
	}
	if err := errors.Join(j.refuse()...); err != nil {
		return nil, &Error{Op: "read tokenizer.json", Err: err, Hint: "only byte-level BPE with the split pattern of Qwen3.5 or of Qwen3 is supported"}
	}
	t := &Tokenizer{raw: b, split: splitterOf(*j.PreTokenizer.Items[0].Pattern.Regex), whole: j.Model.IgnoreMerges}
	if err := errors.Join(t.fill(&j)...); err != nil {
		return nil, fmt.Errorf("read tokenizer.json: %w", err)
	}
	return t, nil
}

// configTokens reads added_tokens_decoder of tokenizer_config.json, in id order.
func configTokens(b []byte) ([]addedJSON, error) {
	var c struct {
		Added map[string]addedJSON `json:"added_tokens_decoder"`
	}
	if err := json.Unmarshal(b, &c); err != nil {
		return nil, fmt.Errorf("parse tokenizer_config.json: %w", err)
	}
	var out []addedJSON
	for k, a := range c.Added {
		var id int32
		if _, err := fmt.Sscanf(k, "%d", &id); err != nil {
			return nil, fmt.Errorf("parse tokenizer_config.json: added_tokens_decoder key %q is not an id", k)
		}
		a.ID = &id
		out = append(out, a)
	}
	slices.SortFunc(out, func(a, b addedJSON) int { return cmp.Compare(*a.ID, *b.ID) })
	return out, nil
}

// refuse lists everything in the file that this implementation does not compute.
func (j *tokenizerJSON) refuse() []error {
	var p problems
	m := &j.Model
	if m.Type != "BPE" {
		p.addf("model.type = %q, want BPE", m.Type)
	}
	if m.Dropout != nil && *m.Dropout != 0 {
		p.addf("model.dropout = %g, want none", *m.Dropout)
	}
	if m.Unk != nil {
		p.addf("model.unk_token = %q, want none", *m.Unk)
	}
	if m.Prefix != nil && *m.Prefix != "" {
		p.addf("model.continuing_subword_prefix = %q, want none", *m.Prefix)
	}
	if m.Suffix != nil && *m.Suffix != "" {
		p.addf("model.end_of_word_suffix = %q, want none", *m.Suffix)
	}
	if m.ByteFallback {
		p.addf("model.byte_fallback = true, want false")
	}
	var n struct {
		Type string `json:"type"`
	}
	if err := json.Unmarshal(j.Normalizer, &n); err != nil || n.Type != "NFC" {
		p.addf("normalizer = %s, want NFC", orNull(j.Normalizer))
	}
	p = append(p, j.PreTokenizer.refuse()...)
	if j.PostProcessor != nil && j.PostProcessor.Type != "ByteLevel" {
		p.addf("post_processor.type = %q, want none or ByteLevel", j.PostProcessor.Type)
	}
	if j.Decoder == nil {
		p.addf("decoder = null, want ByteLevel")
	} else if j.Decoder.Type != "ByteLevel" {
		p.addf("decoder.type = %q, want ByteLevel", j.Decoder.Type)
	}
	for i, a := range j.Added {
		if a.ID == nil || a.Content == "" {
			p.addf("added_tokens[%d] has no id or no content", i)
		}
		if a.SingleWord || a.LStrip || a.RStrip || a.Normalized {
			p.addf("added token %q: single_word %v, lstrip %v, rstrip %v, normalized %v, want all false", a.Content, a.SingleWord, a.LStrip, a.RStrip, a.Normalized)
		}
	}
	return p
}

func (t *preTokenizerJSON) refuse() []error {
	var p problems
	if t == nil || t.Type != "Sequence" || len(t.Items) != 2 || t.Items[0].Type != "Split" || t.Items[1].Type != "ByteLevel" {
		var found []string
		if t != nil {
			found = append(found, t.Type)
			for _, it := range t.Items {
				found = append(found, it.Type)
			}
		}
		p.addf("pre_tokenizer = %q, want a Sequence of Split and ByteLevel", found)
		return p
	}
	s, b := &t.Items[0], &t.Items[1]
	switch {
	case s.Pattern.Regex == nil:
		p.addf("pre_tokenizer Split has no Regex pattern")
	case splitterOf(*s.Pattern.Regex) == nil:
		p.addf("pre_tokenizer Split pattern = %q, want %q or %q", *s.Pattern.Regex, splitPattern, splitPatternNoMarks)
	}
	if s.Behavior != "Isolated" || s.Invert {
		p.addf("pre_tokenizer Split behavior = %q, invert = %v, want Isolated, false", s.Behavior, s.Invert)
	}
	if b.AddPrefixSpace || b.UseRegex == nil || *b.UseRegex {
		p.addf("pre_tokenizer ByteLevel add_prefix_space = %v, use_regex on = %v, want both false", b.AddPrefixSpace, b.UseRegex == nil || *b.UseRegex)
	}
	return p
}

func orNull(b json.RawMessage) string {
	if len(b) == 0 {
		return "null"
	}
	return string(b)
}

// maxTokenID bounds ids, so that a hostile file cannot ask for a huge table.
const maxTokenID = 1 << 24

// fill builds the tables.
func (t *Tokenizer) fill(j *tokenizerJSON) []error {
	var p problems
	spelled := t.readTokens(j.Model.Vocab, &p)
	if len(p) > 0 {
		return p
	}
	t.bpe = newBPE(t.tokens, spelled, j.Model.Merges, &p)
	t.addTokens(j.Added, &p)
	return p
}

// readTokens fills the bytes of the vocabulary by id and tells which ids are spelled in the byte-level alphabet.
func (t *Tokenizer) readTokens(vocab []byte, p *problems) (spelled []bool) {
	var room []byte // for the bytes of many tokens
	back := charToByte()
	readVocab(vocab, p, func(token []byte, id int32) {
		if grow := int(id) + 1 - len(t.tokens); grow > 0 {
			t.tokens, spelled = append(t.tokens, make([][]byte, grow)...), append(spelled, make([]bool, grow)...)
		}
		if t.tokens[id] != nil {
			p.addf("id %d belongs to %q and to another token", id, token)
			return
		}
		if cap(room)-len(room) < len(token) {
			room = make([]byte, 0, max(1<<16, len(token)))
		}
		start := len(room)
		room, spelled[id] = appendByteChars(room, token, back)
		t.tokens[id] = room[start:len(room):len(room)]
	})
	return spelled
}

func (t *Tokenizer) addTokens(added []addedJSON, p *problems) {
	t.addedID = map[string]int32{}
	var all []string
	for _, a := range added {
		id := *a.ID
		if id < 0 || id >= maxTokenID {
			p.addf("added token %q has id %d, want 0..%d", a.Content, id, maxTokenID-1)
			continue
		}
		old, dup := t.addedID[a.Content]
		if dup && old != id {
			p.addf("added token %q has ids %d and %d", a.Content, old, id)
			continue
		}
		if grow := int(id) + 1 - len(t.tokens); grow > 0 {
			t.tokens = append(t.tokens, make([][]byte, grow)...)
		}
		if grow := len(t.tokens) - len(t.special); grow > 0 {
			t.special = append(t.special, make([]bool, grow)...)
		}
		t.tokens[id], t.special[id], t.addedID[a.Content] = []byte(a.Content), a.Special, id
		if !dup {
			all = append(all, a.Content)
		}
	}
	t.added = newLiterals(all)
}

// byteToChar is the byte-level alphabet: printable Latin-1 bytes stand for themselves, the others for U+0100 onwards.
func byteToChar() [256]rune {
	var m [256]rune
	next := rune(256)
	for b := range 256 {
		switch {
		case b >= '!' && b <= '~', b >= 0xa1 && b <= 0xac, b >= 0xae:
			m[b] = rune(b)
		default:
			m[b] = next
			next++
		}
	}
	return m
}

// charToByte is the inverse table; -1 marks characters outside the alphabet.
func charToByte() *[324]int16 {
	m := new([324]int16)
	for i := range m {
		m[i] = -1
	}
	for b, r := range byteToChar() {
		m[r] = int16(b)
	}
	return m
}

// appendByteChars maps a vocabulary string to bytes. A string with a character outside the alphabet stands for itself and is never the
// result of encoding; the second result is then false.
func appendByteChars(dst, s []byte, back *[324]int16) ([]byte, bool) {
	start := len(dst)
	for i := 0; i < len(s); {
		r, n := rune(s[i]), 1
		if r >= utf8.RuneSelf {
			r, n = utf8.DecodeRune(s[i:])
		}
		if int(r) >= len(back) || back[r] < 0 {
			return append(dst[:start], s...), false
		}
		dst = append(dst, byte(back[r]))
		i += n
	}
	return dst, true
}
