package model

import (
	"bytes"
	"encoding/json"
	"fmt"
	"unicode/utf8"
)

// jsonCursor reads a JSON value that is known to be valid from the left. The vocabulary and the merges are most of tokenizer.json, and
// going through them in place takes a tenth of the time of decoding them into maps and slices.
type jsonCursor struct {
	text []byte
	at   int
}

// peek returns the next character that is not white space, 0 at the end.
func (c *jsonCursor) peek() byte {
	for ; c.at < len(c.text); c.at++ {
		switch b := c.text[c.at]; b {
		case ' ', '\t', '\n', '\r':
		default:
			return b
		}
	}
	return 0
}

// skip goes past b when it is the next character.
func (c *jsonCursor) skip(b byte) bool {
	if c.peek() != b {
		return false
	}
	c.at++
	return true
}

// str reads a string; ok is false when the value is something else.
func (c *jsonCursor) str() (s []byte, ok bool) {
	if c.peek() != '"' {
		return nil, false
	}
	start := c.at
	plain := true
	for c.at++; c.text[c.at] != '"'; c.at++ {
		if c.text[c.at] == '\\' {
			plain = false
			c.at++
		}
	}
	c.at++
	s = c.text[start+1 : c.at-1]
	if plain && utf8.Valid(s) {
		return s, true
	}
	var out string
	if err := json.Unmarshal(c.text[start:c.at], &out); err != nil {
		return nil, false
	}
	return []byte(out), true
}

// id reads a token id; ok is false when the value is something else, which is then still to be read.
func (c *jsonCursor) id() (id int32, ok bool) {
	c.peek()
	end := c.at
	for end < len(c.text) && c.text[end] >= '0' && c.text[end] <= '9' && id < maxTokenID {
		id = 10*id + int32(c.text[end]-'0')
		end++
	}
	if end == c.at || id >= maxTokenID || bytes.IndexByte([]byte(",} \t\r\n"), c.text[end]) < 0 {
		return 0, false
	}
	c.at = end
	return id, true
}

// value reads any value and returns its text.
func (c *jsonCursor) value() (v json.RawMessage) {
	d := json.NewDecoder(bytes.NewReader(c.text[c.at:]))
	if err := d.Decode(&v); err != nil {
		panic(fmt.Sprintf("read %.40q: %v", c.text[c.at:], err)) // the text is valid
	}
	c.at += int(d.InputOffset())
	return v
}

// readVocab calls add with every token and id of model.vocab.
func readVocab(vocab []byte, p *problems, add func(token []byte, id int32)) {
	c := jsonCursor{text: vocab}
	if !c.skip('{') {
		p.addf("model.vocab = %s, want an object of tokens and ids", orNull(vocab))
		return
	}
	for c.peek() == '"' {
		token, _ := c.str()
		c.skip(':')
		if id, ok := c.id(); ok {
			add(token, id)
		} else {
			p.addf("token %q has id %s, want 0..%d", token, c.value(), maxTokenID-1)
		}
		c.skip(',')
	}
}

// readMerges calls add with the two tokens of every merge of model.merges, which has either of the forms "a b" and ["a", "b"].
func readMerges(merges []byte, p *problems, add func(left, right []byte)) {
	c := jsonCursor{text: merges}
	if !c.skip('[') {
		if len(merges) > 0 && string(merges) != "null" {
			p.addf("model.merges = %s, want a list", merges)
		}
		return
	}
	for rank := 0; c.peek() != ']' && len(*p) < maxReported; rank++ {
		start := c.at
		left, right, ok := c.merge()
		if !ok {
			c.at = start
			p.addf("merge %d is %s, want two tokens", rank, c.value())
		} else {
			add(left, right)
		}
		c.skip(',')
	}
}

func (c *jsonCursor) merge() (left, right []byte, ok bool) {
	if c.skip('[') {
		left, lok := c.str()
		c.skip(',')
		right, rok := c.str()
		return left, right, lok && rok && len(left) > 0 && len(right) > 0 && c.skip(']')
	}
	s, ok := c.str()
	left, right, cut := bytes.Cut(s, []byte(" "))
	return left, right, ok && cut && len(left) > 0 && len(right) > 0 && !bytes.Contains(right, []byte(" "))
}
