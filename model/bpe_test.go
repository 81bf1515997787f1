package model

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

// testBPE builds tables of the bytes of alphabet and of tokens that merges make; other bytes are there and merge with nothing.
func testBPE(t *testing.T, merges [][2]string) *bpe {
	t.Helper()
	var tokens [][]byte
	ids := map[string]bool{}
	add := func(s string) {
		if !ids[s] {
			ids[s] = true
			tokens = append(tokens, []byte(s))
		}
	}
	for c := range 256 {
		add(string([]byte{byte(c)}))
	}
	var list []string
	for _, m := range merges {
		add(m[0] + m[1])
		list = append(list, fmt.Sprintf("[%q, %q]", m[0], m[1]))
	}
	spelled := slices.Repeat([]bool{true}, len(tokens))
	var p problems
	b := newBPE(tokens, spelled, []byte("["+strings.Join(list, ",")+"]"), &p)
	if len(p) > 0 {
		t.Fatal(p)
	}
	return b
}

// randomMerges makes a list of merges of a small alphabet. An ordered one makes each token once and after its parts; any other is
// shuffled and may make tokens twice, before their parts, or not at all.
func randomMerges(rng *rand.Rand, ordered bool) [][2]string {
	known := strings.Split("abcd"[:1+rng.IntN(4)], "")
	made := map[string]bool{}
	var merges [][2]string
	for range 1 + rng.IntN(60) {
		m := [2]string{known[rng.IntN(len(known))], known[rng.IntN(len(known))]}
		joined := m[0] + m[1]
		if len(joined) > 24 || ordered && made[joined] {
			continue
		}
		if !made[joined] {
			known = append(known, joined)
		}
		made[joined] = true
		merges = append(merges, m)
	}
	if !ordered {
		rng.Shuffle(len(merges), func(i, j int) { merges[i], merges[j] = merges[j], merges[i] })
	}
	return merges
}

// TestMatchingIsMerging compares encode with the definition on random vocabularies and strings.
func TestMatchingIsMerging(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 8))
	vocabularies, unordered := 600, 0
	if testing.Short() {
		vocabularies = 100
	}
	for i := range vocabularies {
		b := testBPE(t, randomMerges(rng, i%3 > 0))
		if !b.ordered {
			unordered++
		}
		for range 60 {
			s := make([]byte, 1+rng.IntN(1<<rng.IntN(9)))
			run := 1 + rng.IntN(8)
			for j := range s {
				if s[j] = "abcd"[rng.IntN(4)]; j > 0 && rng.IntN(run) > 0 {
					s[j] = s[j-1]
				}
			}
			for range 2 { // the second time from the cache
				if got, want := b.encode([]int32{-5}, string(s))[1:], b.merge(s); !slices.Equal(got, want) {
					t.Fatalf("vocabulary %d: %s gave %v, want %v", i, s, got, want)
				}
			}
		}
	}
	if unordered < vocabularies/6 || unordered > vocabularies/3 {
		t.Errorf("%d of %d vocabularies are not ordered", unordered, vocabularies)
	}
}

// TestMatchingTrained does the same with the merges of a trained vocabulary on text.
func TestMatchingTrained(t *testing.T) {
	tok := testTokenizer(t)
	rng := rand.New(rand.NewPCG(9, 10))
	words := []string{"a", "aa", "quick", "the", "ox", "jumps", "中文", "é", "\xe4", "e", "r", "\u0301", " "}
	for range 2000 {
		s := ""
		for range 1 + rng.IntN(60) {
			s += words[rng.IntN(len(words))]
		}
		if got, want := tok.bpe.encode(nil, s), tok.bpe.merge([]byte(s)); !slices.Equal(got, want) {
			t.Fatalf("%q gave %v, want %v", s, got, want)
		}
	}
}
