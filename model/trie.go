package model

import (
	"cmp"
	"encoding/binary"
	"math/bits"
	"slices"
	"strings"
)

// trie finds tokens by their bytes. It is a double array (Aoe 1989) with exclusive or: the child of a node by byte c is at base ^ c, which
// belongs to the node when it carries c as its label, for no two nodes have the same base. Node 0 is the root; the first block of 256
// nodes is otherwise empty, so that nodes without children have base 0.
type trie struct {
	nodes []trieNode
}

// trieNode packs base (29 bits), whether the token is matched (1), token + 1 (25), label + 1 (9). The token is 0 in a node where none ends.
type trieNode uint64

const (
	tokenShift = 9
	matched    = trieNode(1) << 34
	baseShift  = 35
	maxBytes   = 1 << (64 - baseShift - 2) // of all tokens: so many nodes have bases of 29 bits, also when placed loosely
)

func (n trieNode) base() uint32           { return uint32(n >> baseShift) }
func (n trieNode) token() int32           { return int32(n>>tokenShift&(1<<25-1)) - 1 }
func (n trieNode) isLabelled(c byte) bool { return n&(1<<tokenShift-1) == trieNode(c)+1 }

// longest returns the longest matched token that s starts with and its length; -1 and 0 when there is none.
func (t *trie) longest(s string) (token int32, size int) {
	n, last := t.nodes[0], trieNode(0)
	for i := range len(s) {
		at := n.base() ^ uint32(s[i])
		if n = t.nodes[at]; !n.isLabelled(s[i]) {
			break
		}
		if n&matched != 0 {
			last, size = n, i+1
		}
	}
	return last.token(), size
}

// match marks a token as one to be matched, and returns the longest matched token that it starts with and is not, -1 for none.
func (t *trie) match(token string) (shorter int32) {
	*t.node(token) |= matched
	shorter, _ = t.longest(token[:len(token)-1])
	return shorter
}

// node returns the node of s, nil when no token starts with s.
func (t *trie) node(s string) *trieNode {
	n := &t.nodes[0]
	for i := range len(s) {
		if n = &t.nodes[n.base()^uint32(s[i])]; !n.isLabelled(s[i]) {
			return nil
		}
	}
	return n
}

// find returns the token that is s.
func (t *trie) find(s string) (int32, bool) {
	n := t.node(s)
	if n == nil || n.token() < 0 {
		return -1, false
	}
	return n.token(), true
}

// literals finds fixed strings in a text, the leftmost first and of those the longest.
type literals struct {
	trie   trie
	starts [256]bool // their first bytes
	start  byte      // the first byte of all, when there is one
	one    bool
}

func newLiterals(all []string) literals {
	l := literals{one: true}
	tokens, ids := make([][]byte, len(all)), make([]int32, len(all))
	for i, s := range all {
		tokens[i], ids[i] = []byte(s), int32(i)
		l.one = l.one && (i == 0 || s[0] == l.start)
		l.start, l.starts[s[0]] = s[0], true
	}
	sortTokens(tokens, ids)
	l.trie = newTrie(tokens, ids)
	for _, id := range ids {
		l.trie.match(all[id])
	}
	return l
}

// find returns where the first literal of a text begins and ends; both are the length of the text when there is none.
func (l *literals) find(text string) (start, end int) {
	for at := 0; at < len(text); at++ {
		if l.one {
			i := strings.IndexByte(text[at:], l.start)
			if i < 0 {
				break
			}
			at += i
		}
		if l.starts[text[at]] {
			if _, size := l.trie.longest(text[at:]); size > 0 {
				return at, at + size
			}
		}
	}
	return len(text), len(text)
}

// trieBuilder places nodes; a block is 256 nodes from a multiple of 256 on, and all children of a node are in one block.
type trieBuilder struct {
	trie
	tokens [][]byte
	blocks []trieBlock
	open   []int // blocks with room, the latest last
}

// trieBlock tells which nodes of a block are taken, and which are the base of some node.
type trieBlock struct {
	taken, base [4]uint64
}

// maxOpen bounds how many blocks are searched for room.
const maxOpen = 8

// newTrie makes a trie of the tokens with the given ids, none of them matched yet. The tokens are not empty and no two the same; ids
// are in their order.
func newTrie(tokens [][]byte, ids []int32) trie {
	b := trieBuilder{tokens: tokens}
	b.grow()
	b.open = nil
	if len(ids) > 0 {
		b.fill(0, ids, 0)
	}
	return b.trie
}

// sortTokens sorts ids by the bytes of their tokens, by the first eight as a number and only then by the rest.
func sortTokens(tokens [][]byte, ids []int32) {
	type item struct {
		key uint64
		id  int32
	}
	items := make([]item, len(ids))
	for i, id := range ids {
		var head [8]byte
		copy(head[:], tokens[id])
		items[i] = item{binary.BigEndian.Uint64(head[:]), id}
	}
	slices.SortFunc(items, func(a, b item) int {
		if a.key != b.key {
			return cmp.Compare(a.key, b.key)
		}
		return slices.Compare(tokens[a.id], tokens[b.id])
	})
	for i, it := range items {
		ids[i] = it.id
	}
}

// fill makes what is below a node, whose tokens are ids and share their first depth bytes.
func (b *trieBuilder) fill(at uint32, ids []int32, depth int) {
	for {
		if len(b.tokens[ids[0]]) == depth {
			b.nodes[at] |= trieNode(ids[0]+1) << tokenShift
			if ids = ids[1:]; len(ids) == 0 {
				return
			}
		}
		c := b.tokens[ids[0]][depth]
		if b.tokens[ids[len(ids)-1]][depth] != c {
			break
		}
		at = b.place(at, []byte{c}) ^ uint32(c)
		depth++
	}
	labels := make([]byte, 0, 256)
	for _, id := range ids {
		if c := b.tokens[id][depth]; len(labels) == 0 || labels[len(labels)-1] != c {
			labels = append(labels, c)
		}
	}
	base := b.place(at, labels)
	for _, c := range labels {
		n := 0
		for n < len(ids) && b.tokens[ids[n]][depth] == c {
			n++
		}
		b.fill(base^uint32(c), ids[:n], depth+1)
		ids = ids[n:]
	}
}

// place makes the children of a node and returns its base.
func (b *trieBuilder) place(at uint32, labels []byte) uint32 {
	base := b.room(labels)
	b.nodes[at] |= trieNode(base) << baseShift
	for _, c := range labels {
		b.nodes[base^uint32(c)] = trieNode(c) + 1
	}
	return base
}

// room takes a base and the nodes of children.
func (b *trieBuilder) room(labels []byte) uint32 {
	for i := len(b.open) - 1; i >= 0; i-- {
		if base, ok := b.roomIn(b.open[i], labels); ok {
			return base
		}
	}
	if len(b.open) == maxOpen {
		b.open = slices.Delete(b.open, 0, 1)
	}
	b.grow()
	base, _ := b.roomIn(len(b.blocks)-1, labels)
	return base
}

// roomIn tries the bases of one block that put the first child on a free node.
func (b *trieBuilder) roomIn(block int, labels []byte) (uint32, bool) {
	k := &b.blocks[block]
	for w, taken := range k.taken {
		for free := ^taken; free != 0; free &= free - 1 {
			base := byte(w<<6+bits.TrailingZeros64(free)) ^ labels[0]
			if has(&k.base, base) || slices.ContainsFunc(labels, func(c byte) bool { return has(&k.taken, base^c) }) {
				continue
			}
			set(&k.base, base)
			for _, c := range labels {
				set(&k.taken, base^c)
			}
			return uint32(block)<<8 | uint32(base), true
		}
	}
	return 0, false
}

func (b *trieBuilder) grow() {
	b.open = append(b.open, len(b.blocks))
	b.blocks = append(b.blocks, trieBlock{})
	b.nodes = append(b.nodes, make([]trieNode, 256)...)
}

func has(s *[4]uint64, i byte) bool { return s[i>>6]>>(i&63)&1 != 0 }
func set(s *[4]uint64, i byte)      { s[i>>6] |= 1 << (i & 63) }
