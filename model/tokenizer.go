package model

import (
	"strings"
	"unicode/utf8"
)

// Tokenizer is the byte-level BPE of Qwen3.5 (model.md 5.1, 5.2), and of Qwen2 and Qwen3, whose split pattern differs. It is safe for
// concurrent use.
type Tokenizer struct {
	raw     []byte
	split   *splitter
	bpe     *bpe
	whole   bool     // ignore_merges: a piece that is a token is not split
	tokens  [][]byte // id -> bytes; nil for an id without token
	special []bool
	added   literals // added tokens
	addedID map[string]int32
	pieces  pieceCache
}

// Encode turns text into ids. Literals of added tokens in the text become those tokens: use it for text the program wrote itself. Bytes
// that are not UTF-8 become the tokens of those bytes.
func (t *Tokenizer) Encode(text string) []int32 {
	ids := make([]int32, 0, expectedTokens(text))
	for {
		at, end := t.added.find(text)
		ids = t.ordinary(ids, text[:at])
		if end == at {
			return ids
		}
		ids = append(ids, t.addedID[text[at:end]])
		text = text[end:]
	}
}

// expectedTokens is how many tokens to make room for.
func expectedTokens(text string) int { return len(text)/4 + 4 }

// EncodeOrdinary turns untrusted text into ids: literals of added tokens stay ordinary text. Decoding the ids gives NFC(text), by the
// tables of Unicode 9.0 as the reference has it.
func (t *Tokenizer) EncodeOrdinary(text string) []int32 {
	return t.ordinary(make([]int32, 0, expectedTokens(text)), text)
}

func (t *Tokenizer) ordinary(ids []int32, text string) []int32 {
	for text = nfc(text); text != ""; {
		n := t.split.scan(text)
		ids = t.piece(ids, text[:n])
		text = text[n:]
	}
	return ids
}

// piece appends the ids of one piece.
func (t *Tokenizer) piece(ids []int32, s string) []int32 {
	if len(s) > maxCachedBytes {
		return t.encodePiece(ids, s)
	}
	slot := t.pieces.slot(s)
	if e := slot.Load(); e != nil && e.is(s) {
		return append(ids, e.ids[:e.count]...)
	}
	start := len(ids)
	ids = t.encodePiece(ids, s)
	if len(ids)-start <= maxCachedIDs {
		slot.Store(newCachedPiece(s, ids[start:]))
	}
	return ids
}

func (t *Tokenizer) encodePiece(ids []int32, s string) []int32 {
	if t.whole {
		if id, ok := t.bpe.trie.find(s); ok {
			return append(ids, id)
		}
	}
	return t.bpe.encode(ids, s)
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
	return t.bpe.trie.find(token)
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
