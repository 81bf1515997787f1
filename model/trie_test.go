package model

import (
	"math/rand/v2"
	"strings"
	"testing"
)

// randomWords makes distinct words of all bytes, many with a common start.
func randomWords(rng *rand.Rand, n int) []string {
	seen := map[string]bool{}
	words := []string{""}
	for len(words) <= n {
		w := words[rng.IntN(len(words))]
		for range 1 + rng.IntN(4) {
			w += string([]byte{byte(rng.IntN(1 << (1 + rng.IntN(8))))})
		}
		if !seen[w] && len(w) < 40 {
			seen[w] = true
			words = append(words, w)
		}
	}
	return words[1:]
}

func TestTrie(t *testing.T) {
	rng := rand.New(rand.NewPCG(11, 12))
	for _, n := range []int{1, 2, 300, 20000} {
		words := randomWords(rng, n)
		tokens, ids, known := make([][]byte, n), make([]int32, n), map[string]int32{}
		for i, w := range words {
			tokens[i], ids[i], known[w] = []byte(w), int32(i), int32(i)
		}
		sortTokens(tokens, ids)
		tr := newTrie(tokens, ids)
		shorter := func(w string) int32 { // the longest known word below w that has an even id
			for n := len(w) - 1; n > 0; n-- {
				if id, ok := known[w[:n]]; ok && id%2 == 0 {
					return id
				}
			}
			return -1
		}
		for _, id := range ids {
			if id%2 == 0 {
				if got, want := tr.match(words[id]), shorter(words[id]); got != want {
					t.Fatalf("%d words: below %q is %d, want %d", n, words[id], got, want)
				}
			}
		}
		for i, w := range words {
			if got, ok := tr.find(w); !ok || got != int32(i) {
				t.Fatalf("%d words: %q found as %d, %v, want %d", n, w, got, ok, i)
			}
			other := w[:len(w)-1] + string([]byte{w[len(w)-1] + 1})
			id, in := known[other]
			if got, ok := tr.find(other); ok != in || ok && got != id {
				t.Fatalf("%d words: %q found as %d, %v, want %d, %v", n, other, got, ok, id, in)
			}
			text := w + words[rng.IntN(n)]
			got, size := tr.longest(text)
			if want := shorter(text + "."); got != want || got >= 0 && words[got] != text[:size] || got < 0 && size != 0 {
				t.Fatalf("%d words: longest in %q is %d of %d bytes, want %d", n, text, got, size, want)
			}
		}
	}
}

func TestLiterals(t *testing.T) {
	for _, c := range []struct {
		literals   []string
		text, want string // the literals found, with bars between
	}{
		{nil, "a\x00b", ""}, {[]string{"<a>", "<a>b", "<"}, "x<a>b<<a>", "<a>b|<|<a>"}, {[]string{"<think>"}, "<<think<think>", "<think>"},
		{[]string{"ab", "b"}, "aab b", "ab|b"}, {[]string{"abc", "b"}, "abd", "b"},
	} {
		l := newLiterals(c.literals)
		var found []string
		for text := c.text; ; {
			start, end := l.find(text)
			if start == end {
				break
			}
			found, text = append(found, text[start:end]), text[end:]
		}
		if got := strings.Join(found, "|"); got != c.want {
			t.Errorf("%q in %q: %q, want %q", c.literals, c.text, got, c.want)
		}
	}
}
