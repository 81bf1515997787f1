package model

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"unicode/utf8"
)

const (
	tokenizerFile       = "tokenizer.json"
	tokenizerConfigFile = "tokenizer_config.json"
)

// Tokenizer is the byte-level BPE of Qwen3.5 (model.md 5.1, 5.2), and of Qwen2 and Qwen3, whose split pattern differs. It is safe for
// concurrent use.
type Tokenizer struct {
	raw     []byte
	split   *splitter
	tokens  [][]byte // id -> bytes; nil for an id without token
	ids     map[string]int32
	special []bool
	added   [256][]addedToken // by first byte, longest first
	starts  string            // the first bytes of added tokens
	addedID map[string]int32
	byteID  [256]int32
	merges  mergeTable
	whole   bool // ignore_merges: a piece that is a token is not split
	cache   pieceCache
}

type addedToken struct {
	text string
	id   int32
}

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
		Type         string           `json:"type"`
		Dropout      *float64         `json:"dropout"`
		Unk          *string          `json:"unk_token"`
		Prefix       *string          `json:"continuing_subword_prefix"`
		Suffix       *string          `json:"end_of_word_suffix"`
		ByteFallback bool             `json:"byte_fallback"`
		IgnoreMerges bool             `json:"ignore_merges"`
		Vocab        map[string]int32 `json:"vocab"`
		Merges       []mergeJSON      `json:"merges"`
	} `json:"model"`
}

// mergeJSON accepts both forms of a merge: "a b" and ["a", "b"].
type mergeJSON [2]string

func (m *mergeJSON) UnmarshalJSON(b []byte) error {
	if len(b) > 0 && b[0] == '"' {
		var s string
		if err := json.Unmarshal(b, &s); err != nil {
			return err
		}
		l, r, ok := strings.Cut(s, " ")
		if !ok || l == "" || r == "" || strings.Contains(r, " ") {
			return fmt.Errorf("merge %q, want two tokens separated by one space", s)
		}
		m[0], m[1] = l, r
		return nil
	}
	var pair []string
	if err := json.Unmarshal(b, &pair); err != nil {
		return err
	}
	if len(pair) != 2 {
		return fmt.Errorf("merge %s, want two tokens", b)
	}
	m[0], m[1] = pair[0], pair[1]
	return nil
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
	return parseTokenizer(tokenizerJSON, nil)
}

func parseTokenizer(b, config []byte) (*Tokenizer, error) {
	var j tokenizerJSON
	if err := json.Unmarshal(b, &j); err != nil {
		return nil, fmt.Errorf("parse tokenizer.json: %w", err)
	}
	if err := errors.Join(j.refuse()...); err != nil {
		return nil, &Error{Op: "read tokenizer.json", Err: err, Hint: "only byte-level BPE with the split pattern of Qwen3.5 or of Qwen3 is supported"}
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
	t := &Tokenizer{raw: slices.Clone(b), split: splitterOf(*j.PreTokenizer.Items[0].Pattern.Regex), whole: j.Model.IgnoreMerges}
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
	size := int32(0)
	for tok, id := range j.Model.Vocab {
		if id < 0 || id >= maxTokenID {
			p.addf("token %q has id %d, want 0..%d", tok, id, maxTokenID-1)
		}
		size = max(size, id+1)
	}
	for _, a := range j.Added {
		if *a.ID < 0 || *a.ID >= maxTokenID {
			p.addf("added token %q has id %d, want 0..%d", a.Content, *a.ID, maxTokenID-1)
		}
		size = max(size, *a.ID+1)
	}
	if len(p) > 0 {
		return p
	}
	t.tokens, t.special = make([][]byte, size), make([]bool, size)
	t.ids = make(map[string]int32, len(j.Model.Vocab))
	back := charToByte()
	for tok, id := range j.Model.Vocab {
		if t.tokens[id] != nil {
			p.addf("id %d belongs to %q and to another token", id, tok)
			continue
		}
		b, ok := fromByteChars(tok, &back)
		t.tokens[id] = b
		if ok {
			t.ids[string(b)] = id
		}
	}
	for b := range 256 {
		id, ok := t.ids[string([]byte{byte(b)})]
		if !ok {
			p.addf("vocab has no token for byte 0x%02x", b)
		}
		t.byteID[b] = id
	}
	t.addTokens(j.Added, &p)
	t.merges = newMergeTable(len(j.Model.Merges))
	for rank, m := range j.Model.Merges {
		l, lok := fromByteChars(m[0], &back)
		r, rok := fromByteChars(m[1], &back)
		li, lin := t.ids[string(l)]
		ri, rin := t.ids[string(r)]
		id, ok := t.ids[string(l)+string(r)]
		if !lok || !rok || !lin || !rin || !ok {
			p.addf("merge %d (%q, %q): a part or the result is not in vocab", rank, m[0], m[1])
			if len(p) >= maxReported {
				break
			}
			continue
		}
		t.merges.set(pairKey(li, ri), newMerge(int32(rank), id))
	}
	t.merges.fillBytes(&t.byteID)
	return p
}

func (t *Tokenizer) addTokens(added []addedJSON, p *problems) {
	t.addedID = map[string]int32{}
	for _, a := range added {
		if old, dup := t.addedID[a.Content]; dup && old != *a.ID {
			p.addf("added token %q has ids %d and %d", a.Content, old, *a.ID)
			continue
		}
		t.addedID[a.Content] = *a.ID
		t.tokens[*a.ID], t.special[*a.ID] = []byte(a.Content), a.Special
		c := a.Content[0]
		if t.added[c] == nil {
			t.starts += a.Content[:1]
		}
		t.added[c] = append(t.added[c], addedToken{a.Content, *a.ID})
	}
	for c := range t.added {
		slices.SortStableFunc(t.added[c], func(a, b addedToken) int { return len(b.text) - len(a.text) })
	}
}

// Encode turns text into ids. Literals of added tokens in the text become those tokens: use it for text the program wrote itself. Bytes
// that are not UTF-8 become the tokens of those bytes.
func (t *Tokenizer) Encode(text string) []int32 {
	ids := make([]int32, 0, expectedTokens(text))
	start, at := 0, 0
	for {
		i := t.nextStart(text[at:])
		if i < 0 {
			return t.ordinary(ids, text[start:])
		}
		at += i
		a, ok := t.addedAt(text[at:])
		if !ok {
			at++
			continue
		}
		ids = append(t.ordinary(ids, text[start:at]), a.id)
		at += len(a.text)
		start = at
	}
}

// expectedTokens is how many tokens to make room for.
func expectedTokens(text string) int { return len(text)/4 + 4 }

// nextStart finds the first byte at which an added token may start, -1 when there is none.
func (t *Tokenizer) nextStart(s string) int {
	if len(t.starts) == 1 {
		return strings.IndexByte(s, t.starts[0])
	}
	for i := range len(s) {
		if t.added[s[i]] != nil {
			return i
		}
	}
	return -1
}

// addedAt finds the longest added token that s starts with.
func (t *Tokenizer) addedAt(s string) (addedToken, bool) {
	for _, a := range t.added[s[0]] {
		if strings.HasPrefix(s, a.text) {
			return a, true
		}
	}
	return addedToken{}, false
}

// EncodeOrdinary turns untrusted text into ids: literals of added tokens stay ordinary text. Decoding the ids gives NFC(text), by the
// tables of Unicode 9.0 as the reference has it.
func (t *Tokenizer) EncodeOrdinary(text string) []int32 {
	return t.ordinary(make([]int32, 0, expectedTokens(text)), text)
}

func (t *Tokenizer) ordinary(ids []int32, text string) []int32 {
	m := mergers.Get().(*merger)
	for text = nfc(text); text != ""; {
		n := t.split.scan(text)
		ids = t.piece(m, ids, text[:n])
		text = text[n:]
	}
	m.release()
	return ids
}

// piece appends the ids of one piece.
func (t *Tokenizer) piece(m *merger, ids []int32, s string) []int32 {
	if len(s) > maxCachedBytes {
		return t.bpe(m, ids, s)
	}
	slot := t.cache.slot(s)
	if e := slot.Load(); e != nil && e.is(s) {
		return append(ids, e.ids[:e.count]...)
	}
	start := len(ids)
	ids = t.bpe(m, ids, s)
	if n := len(ids) - start; n <= maxCachedIDs {
		slot.Store(newCachedPiece(s, ids[start:]))
	}
	return ids
}

// TokenBytes returns the bytes of a token, nil for an id without one. The slice must not be changed.
func (t *Tokenizer) TokenBytes(id int32) []byte {
	if id < 0 || int(id) >= len(t.tokens) {
		return nil
	}
	return t.tokens[id]
}

// ID returns the id of a token: an added token by its literal, any other by its bytes.
func (t *Tokenizer) ID(token string) (int32, bool) {
	if id, ok := t.addedID[token]; ok {
		return id, true
	}
	id, ok := t.ids[token]
	return id, ok
}

// IsSpecial reports whether a token is marked special in the file.
func (t *Tokenizer) IsSpecial(id int32) bool {
	return id >= 0 && int(id) < len(t.special) && t.special[id]
}

// VocabSize returns the largest id plus one. A model's vocabulary may be larger; its further rows are padding (model.md 5.1).
func (t *Tokenizer) VocabSize() int { return len(t.tokens) }

// JSON returns the tokenizer.json that was parsed.
func (t *Tokenizer) JSON() []byte { return t.raw }

// Decode concatenates the bytes of tokens. Bytes that are not UTF-8 become U+FFFD, one for each maximal part of a broken sequence.
func (t *Tokenizer) Decode(ids []int32) string {
	b := make([]byte, 0, 4*len(ids))
	for _, id := range ids {
		b = append(b, t.TokenBytes(id)...)
	}
	return decodeBytes(b)
}

func decodeBytes(b []byte) string {
	if utf8.Valid(b) {
		return string(b)
	}
	var out strings.Builder
	for len(b) > 0 {
		r, n := utf8.DecodeRune(b)
		if r == utf8.RuneError && n == 1 {
			n = brokenLen(b)
		}
		out.WriteRune(r)
		b = b[n:]
	}
	return out.String()
}

// brokenLen returns the length of the maximal part of an invalid sequence at the start of b: the longest prefix that could still have
// become a character (Unicode 15, section 3.9, substitution of maximal subparts).
func brokenLen(b []byte) int {
	need, lo, hi := 0, byte(0x80), byte(0xbf)
	switch c := b[0]; {
	case c >= 0xc2 && c <= 0xdf:
		need = 1
	case c >= 0xe0 && c <= 0xef:
		need = 2
		if c == 0xe0 {
			lo = 0xa0
		} else if c == 0xed {
			hi = 0x9f
		}
	case c >= 0xf0 && c <= 0xf4:
		need = 3
		if c == 0xf0 {
			lo = 0x90
		} else if c == 0xf4 {
			hi = 0x8f
		}
	}
	n := 1
	for n <= need && n < len(b) && b[n] >= lo && b[n] <= hi {
		n, lo, hi = n+1, 0x80, 0xbf
	}
	return n
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
func charToByte() [324]int16 {
	var m [324]int16
	for i := range m {
		m[i] = -1
	}
	for b, r := range byteToChar() {
		m[r] = int16(b)
	}
	return m
}

// fromByteChars maps a vocabulary string to bytes. A string with a character outside the alphabet stands for itself and is never the
// result of encoding; the second result is then false.
func fromByteChars(s string, back *[324]int16) ([]byte, bool) {
	b := make([]byte, 0, len(s))
	for _, r := range s {
		if int(r) >= len(back) || back[r] < 0 {
			return []byte(s), false
		}
		b = append(b, byte(back[r]))
	}
	return b, true
}
