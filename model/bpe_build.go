package model

import (
	"bytes"
	"slices"
)

// newBPE builds the tables from the vocabulary, by id and nil where there is none, and the merges as the file has them. Ids for which
// spelled is false stand for no bytes. Problems are added to p, in which case the result is not usable.
func newBPE(tokens [][]byte, spelled []bool, merges []byte, p *problems) *bpe {
	b := &bpe{tokens: make([]bpeToken, len(tokens)), sizes: make([]int32, len(tokens))}
	var ids []int32
	size := 0
	for id := range tokens {
		size += len(tokens[id])
		b.tokens[id], b.sizes[id] = bpeToken{rank: -1, left: -1, right: -1, shorter: -1}, int32(len(tokens[id]))
		if spelled[id] && len(tokens[id]) > 0 {
			ids = append(ids, int32(id))
		}
	}
	sortTokens(tokens, ids)
	for i, id := range ids[min(1, len(ids)):] {
		if bytes.Equal(tokens[id], tokens[ids[i]]) {
			p.addf("token %q has ids %d and %d", tokens[id], ids[i], id)
		}
	}
	if size > maxBytes {
		p.addf("the tokens of vocab have %d bytes together, want at most %d", size, maxBytes)
	}
	if len(*p) > 0 {
		return nil
	}
	b.trie = newTrie(tokens, ids)
	for c := range 256 {
		id, ok := b.trie.find(string([]byte{byte(c)}))
		if !ok {
			p.addf("vocab has no token for byte 0x%02x", c)
		}
		b.byteID[c] = id
	}
	made := b.readMerges(merges, p)
	if len(*p) > 0 {
		return nil
	}
	if !b.ordered {
		b.bytes = slices.Clone(tokens)
	}
	whole := b.reached(tokens, ids, made)
	for _, id := range ids { // a token comes after those that it starts with
		if whole[id] {
			b.tokens[id].shorter = b.trie.match(string(tokens[id]))
		}
	}
	return b
}

// readMerges fills the merge table and the makings of tokens, and finds out whether they are ordered. Of equal pairs the last counts. It
// returns what the merges make.
func (b *bpe) readMerges(merges []byte, p *problems) (made []int32) {
	type pair struct{ left, right, id int32 }
	var pairs []pair
	var text []byte // of both tokens
	back := charToByte()
	readMerges(merges, p, func(l, r []byte) {
		text, lok := appendByteChars(text[:0], l, back)
		cut := len(text)
		text, rok := appendByteChars(text, r, back)
		left, lin := b.trie.find(string(text[:cut]))
		right, rin := b.trie.find(string(text[cut:]))
		id, in := b.trie.find(string(text))
		if !lok || !rok || !lin || !rin || !in {
			p.addf("merge %d (%q, %q): a part or the result is not in vocab", len(pairs), l, r)
		}
		pairs = append(pairs, pair{left, right, id})
	})
	if len(*p) > 0 {
		return nil
	}
	b.merges, b.ordered = newMergeTable(len(pairs)), true
	for rank, m := range pairs {
		b.merges.set(m.left, m.right, newMerge(int32(rank), m.id))
		made = append(made, m.id)
		k := &b.tokens[m.id]
		b.ordered = b.ordered && k.rank < 0
		k.rank, k.left, k.right = int32(rank), m.left, m.right
	}
	for _, k := range b.tokens {
		b.ordered = b.ordered && (k.rank < 0 || k.rank > b.tokens[k.left].rank && k.rank > b.tokens[k.right].rank)
	}
	return made
}

// reached tells which tokens merging their own bytes gives; no text has others. The merges make the tokens of made, in this order.
func (b *bpe) reached(tokens [][]byte, ids, made []int32) []bool {
	whole := make([]bool, len(tokens))
	for _, id := range b.byteID {
		whole[id] = true
	}
	if !b.ordered {
		for _, id := range ids {
			whole[id] = slices.Equal(b.merge(tokens[id]), []int32{id})
		}
		return whole
	}
	for _, id := range made {
		m := &b.tokens[id]
		whole[id] = whole[m.left] && whole[m.right] && b.apartBefore(m.left, m.right, m.rank)
	}
	return whole
}
