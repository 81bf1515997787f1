package model

import (
	"bytes"
	"container/heap"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
)

// QwenSpecials lists the added tokens of Qwen3.5 in id order (model.md 5.3).
func QwenSpecials() []string {
	return strings.Fields(`<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|>
		<|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|> <tool_call> </tool_call>
		<|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|> <tool_response> </tool_response> <think>
		</think> <|audio_start|> <|audio_end|> <tts_pad> <tts_text_bos> <tts_text_eod> <tts_text_bos_single> <|audio_pad|>`)
}

// keptInText reports whether an added token is not marked special, so that decoders which skip special tokens keep it (model.md 5.3).
func keptInText(tok string) bool {
	switch tok {
	case "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>",
		"<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>":
		return true
	}
	return false
}

// trainWord is a distinct piece of the corpus as symbols, with its number of occurrences.
type trainWord struct {
	sym   []int32
	count int64
}

// symPair is two adjacent symbols.
type symPair struct{ l, r int32 }

// trainer is the state of BPE training: pair counts, and for each pair the words it may occur in.
type bpeTrainer struct {
	words  []trainWord
	tokens [][]byte // id -> bytes
	counts map[symPair]int64
	where  map[symPair]map[int32]struct{}
	queue  pairQueue
}

// pairItem is a queue entry; it is stale when its count is not the pair's current count.
type pairItem struct {
	pair  symPair
	count int64
}

// pairQueue orders by count, largest first, then by the bytes of the left and of the right symbol.
type pairQueue struct {
	items  []pairItem
	tokens *[][]byte
}

func (q *pairQueue) Len() int      { return len(q.items) }
func (q *pairQueue) Swap(i, j int) { q.items[i], q.items[j] = q.items[j], q.items[i] }
func (q *pairQueue) Push(x any)    { q.items = append(q.items, x.(pairItem)) }
func (q *pairQueue) Pop() any {
	n := len(q.items) - 1
	it := q.items[n]
	q.items = q.items[:n]
	return it
}
func (q *pairQueue) Less(i, j int) bool {
	a, b := q.items[i], q.items[j]
	if a.count != b.count {
		return a.count > b.count
	}
	t := *q.tokens
	if c := bytes.Compare(t[a.pair.l], t[b.pair.l]); c != 0 {
		return c < 0
	}
	return bytes.Compare(t[a.pair.r], t[b.pair.r]) < 0
}

// TrainBPE trains a byte-level BPE of vocabSize tokens with the pre-tokenizer of Qwen3.5 and returns a tokenizer.json that
// ParseTokenizer and the reference library read. Ids: 256 bytes, then merges, then special. Literals of special in the corpus are not
// trained on. The result depends on the multiset of pieces alone: the most frequent pair is merged, ties go to the smaller bytes.
// The vocabulary is smaller than asked for when no pair occurs twice any more.
func TrainBPE(corpus []string, vocabSize int, special []string) ([]byte, error) {
	numMerges := vocabSize - 256 - len(special)
	if numMerges < 0 {
		return nil, fmt.Errorf("train bpe: vocabulary of %d is smaller than 256 bytes + %d special tokens", vocabSize, len(special))
	}
	seen := map[string]bool{}
	for _, s := range special {
		if s == "" || seen[s] {
			return nil, fmt.Errorf("train bpe: special token %q is empty or given twice", s)
		}
		seen[s] = true
	}
	t := newBPETrainer(corpus, special)
	known := map[string]bool{}
	for _, b := range t.tokens {
		known[string(b)] = true
	}
	var merges []symPair
	for len(merges) < numMerges {
		p, ok := t.best()
		if !ok {
			break
		}
		joined := slices.Concat(t.tokens[p.l], t.tokens[p.r])
		if known[string(joined)] { // another pair already spells this token; a second merge to it would need a second id
			delete(t.counts, p)
			continue
		}
		known[string(joined)] = true
		merges = append(merges, p)
		t.tokens = append(t.tokens, joined)
		t.apply(p, int32(len(t.tokens)-1))
	}
	return encodeTokenizer(t.tokens, merges, special)
}

func newBPETrainer(corpus, special []string) *bpeTrainer {
	t := &bpeTrainer{counts: map[symPair]int64{}, where: map[symPair]map[int32]struct{}{}}
	t.queue.tokens = &t.tokens
	for b := range 256 {
		t.tokens = append(t.tokens, []byte{byte(b)})
	}
	added := newLiterals(special)
	split, pieces := splitterOf(splitPattern), map[string]int64{}
	for _, text := range corpus {
		for text != "" {
			at, end := added.find(text)
			for plain := nfc(text[:at]); plain != ""; {
				n := split.scan(plain)
				pieces[plain[:n]]++
				plain = plain[n:]
			}
			text = text[end:]
		}
	}
	keys := make([]string, 0, len(pieces))
	for s := range pieces {
		keys = append(keys, s)
	}
	slices.Sort(keys)
	for _, s := range keys {
		sym := make([]int32, len(s))
		for i := range len(s) {
			sym[i] = int32(s[i])
		}
		w := int32(len(t.words))
		t.words = append(t.words, trainWord{sym, pieces[s]})
		t.addPairs(w, 1, nil)
	}
	for p := range t.counts {
		t.push(p)
	}
	return t
}

// addPairs adds sign times the word's count to each of its pairs and notes the pairs in changed.
func (t *bpeTrainer) addPairs(w int32, sign int64, changed map[symPair]struct{}) {
	word := t.words[w]
	for i := 1; i < len(word.sym); i++ {
		p := symPair{word.sym[i-1], word.sym[i]}
		t.counts[p] += sign * word.count
		if sign > 0 {
			if t.where[p] == nil {
				t.where[p] = map[int32]struct{}{}
			}
			t.where[p][w] = struct{}{}
		}
		if changed != nil {
			changed[p] = struct{}{}
		}
	}
}

func (t *bpeTrainer) push(p symPair) {
	if c := t.counts[p]; c > 1 {
		heap.Push(&t.queue, pairItem{p, c})
	}
}

// best returns the pair to merge next.
func (t *bpeTrainer) best() (symPair, bool) {
	for t.queue.Len() > 0 {
		it := heap.Pop(&t.queue).(pairItem)
		if t.counts[it.pair] == it.count {
			return it.pair, true
		}
	}
	return symPair{}, false
}

// apply replaces a pair by a new symbol in every word that holds it.
func (t *bpeTrainer) apply(p symPair, id int32) {
	changed := map[symPair]struct{}{}
	for w := range t.where[p] {
		t.addPairs(w, -1, changed)
		sym := t.words[w].sym
		out := sym[:0]
		for i := 0; i < len(sym); i++ {
			if i+1 < len(sym) && sym[i] == p.l && sym[i+1] == p.r {
				out = append(out, id)
				i++
				continue
			}
			out = append(out, sym[i])
		}
		t.words[w].sym = out
		t.addPairs(w, 1, changed)
	}
	delete(t.where, p)
	delete(t.counts, p)
	delete(changed, p)
	for q := range changed {
		t.push(q)
	}
}

// encodeTokenizer writes tokenizer.json.
func encodeTokenizer(tokens [][]byte, merges []symPair, special []string) ([]byte, error) {
	chars := byteToChar()
	spell := func(b []byte) string {
		var s strings.Builder
		for _, c := range b {
			s.WriteRune(chars[c])
		}
		return s.String()
	}
	var b bytes.Buffer
	str := func(v any) string {
		var s bytes.Buffer
		e := json.NewEncoder(&s)
		e.SetEscapeHTML(false)
		if err := e.Encode(v); err != nil {
			panic(fmt.Sprintf("encode %v: %v", v, err)) // strings only
		}
		return strings.TrimSuffix(s.String(), "\n")
	}
	b.WriteString("{\n  \"version\": \"1.0\",\n  \"truncation\": null,\n  \"padding\": null,\n  \"added_tokens\": [")
	for i, s := range special {
		if i > 0 {
			b.WriteByte(',')
		}
		fmt.Fprintf(&b, "\n    {\"id\": %d, \"content\": %s, \"single_word\": false, \"lstrip\": false, \"rstrip\": false, \"normalized\": false, \"special\": %v}",
			len(tokens)+i, str(s), !keptInText(s))
	}
	b.WriteString("\n  ],\n  \"normalizer\": {\"type\": \"NFC\"},\n")
	fmt.Fprintf(&b, "  \"pre_tokenizer\": {\"type\": \"Sequence\", \"pretokenizers\": [\n    {\"type\": \"Split\", \"pattern\": {\"Regex\": %s}, \"behavior\": \"Isolated\", \"invert\": false},\n", str(splitPattern))
	b.WriteString("    {\"type\": \"ByteLevel\", \"add_prefix_space\": false, \"trim_offsets\": false, \"use_regex\": false}\n  ]},\n")
	b.WriteString("  \"post_processor\": {\"type\": \"ByteLevel\", \"add_prefix_space\": false, \"trim_offsets\": false, \"use_regex\": false},\n")
	b.WriteString("  \"decoder\": {\"type\": \"ByteLevel\", \"add_prefix_space\": false, \"trim_offsets\": false, \"use_regex\": false},\n")
	b.WriteString("  \"model\": {\n    \"type\": \"BPE\", \"dropout\": null, \"unk_token\": null, \"continuing_subword_prefix\": \"\", \"end_of_word_suffix\": \"\",\n")
	b.WriteString("    \"fuse_unk\": false, \"byte_fallback\": false, \"ignore_merges\": false,\n    \"vocab\": {")
	for id, t := range tokens {
		if id > 0 {
			b.WriteByte(',')
		}
		fmt.Fprintf(&b, "\n      %s: %d", str(spell(t)), id)
	}
	b.WriteString("\n    },\n    \"merges\": [")
	for i, m := range merges {
		if i > 0 {
			b.WriteByte(',')
		}
		fmt.Fprintf(&b, "\n      [%s, %s]", str(spell(tokens[m.l])), str(spell(tokens[m.r])))
	}
	b.WriteString("\n    ]\n  }\n}\n")
	return b.Bytes(), nil
}
