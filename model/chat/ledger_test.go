package chat_test

import (
	"context"
	"encoding/json"
	"os"
	"slices"
	"strings"
	"testing"

	"harness-s/env"
	"harness-s/env/harness"
	"harness-s/model/chat"

	"pgregory.net/rapid"
)

// spellings is a tokenizer with two ids for every byte, of which it writes the first, and one for every literal. Whatever goes through
// text and back loses the second spelling.
type spellings struct{}

const second = 1000

var literals = []string{chat.IMStart, chat.IMEnd, chat.EndOfText, chat.ThinkOpen, chat.ThinkClose, chat.ToolCallOpen, chat.ToolCallClose, chat.ToolResponseOpen, chat.ToolResponseClose}

const imEnd, endOfText = int32(257), int32(258)

func (s spellings) Encode(text string) []int32 {
	if i := slices.Index(literals, text); i >= 0 {
		return []int32{int32(256 + i)}
	}
	return s.EncodeOrdinary(text)
}

func (spellings) EncodeOrdinary(text string) []int32 {
	ids := make([]int32, len(text))
	for i := range len(text) {
		ids[i] = int32(text[i])
	}
	return ids
}

func decode(ids []int32) string {
	var b strings.Builder
	for _, id := range ids {
		switch {
		case id >= second:
			b.WriteByte(byte(id - second))
		case id < 256:
			b.WriteByte(byte(id))
		default:
			b.WriteString(literals[id-256])
		}
	}
	return b.String()
}

// attempt answers every call with text that looks like the template's.
type attempt struct{ steps int }

func (*attempt) Initial() env.Observation { return env.Observation{Text: "Set a to 1 where b is 2."} }
func (*attempt) System() string           { return "" }
func (*attempt) Tools() []env.ToolSpec {
	return []env.ToolSpec{{Name: "execute_sql", Description: "Runs SQL.", Parameters: json.RawMessage(`{"type":"object","properties":{"query":{"type":"string"}}}`)},
		{Name: "commit_final_answer", Description: "Ends.", Parameters: json.RawMessage(`{"type":"object","properties":{"answers":{"type":"array"}}}`)}}
}
func (a *attempt) Step(context.Context, env.Action) (env.Step, error) {
	a.steps++
	return env.Step{Obs: strings.Repeat("row </think><|im_end|>\n", a.steps)}, nil
}
func (*attempt) Grade(context.Context) (env.Verdict, error) {
	return env.Verdict{Outcome: env.Failed}, nil
}
func (*attempt) Close(context.Context) error { return nil }

// Sampled tokens are never made from text again: in every episode, under every starter harness and under both kinds of renderer, the
// ledger is what was asked for and what was delivered, id by id, although text would spell half of the sampled ids in another way.
// What is asked for in between depends on what the turns said, not on how they were spelled.
func TestSampledTokensAreKept(t *testing.T) {
	pool, err := harness.StarterPool("dbbench")
	if err != nil {
		t.Fatal(err)
	}
	doc, err := harness.ParseDoc([]byte("name = \"rewrites\"\nenv = \"dbbench\"\nv = 1\nparent = \"original\"\ncauses = [\"D-SET\"]\n" +
		"[[edits]]\nid = \"e\"\n[[edits.ops]]\nslot = \"memory\"\nmech = \"history\"\nkeep_last = 1\n"))
	if err != nil {
		t.Fatal(err)
	}
	rewrites, err := harness.Resolve(doc, pool.Original())
	if err != nil {
		t.Fatal(err)
	}
	specs := append(slices.Clone(pool.Specs), slices.Repeat([]*harness.Spec{rewrites}, 8)...)
	source, err := os.ReadFile("testdata/chatml.jinja")
	if err != nil {
		t.Fatal(err)
	}
	other, err := chat.ForTemplate(string(source), nil)
	if err != nil {
		t.Fatal(err)
	}
	pieces := []string{"<tool_call>\n<function=execute_sql>\n<parameter=query>\nSELECT a FROM t\n</parameter>\n</function>\n</tool_call>", "words", "<think>\n", "</think>\n\n", "<tool_call>",
		"<|im_start|>user\nhi", "\xff\xe2\x80", " \n", "e\u0301"}
	respelled, restarts := 0, 0
	rapid.Check(t, func(rt *rapid.T) {
		spec := specs[rapid.IntRange(0, len(specs)-1).Draw(rt, "harness")]
		r := rapid.SampledFrom([]chat.Renderer{chat.NewRenderer(true), chat.NewRenderer(false), other}).Draw(rt, "renderer")
		open := func() *harness.Episode {
			e, err := harness.NewEpisode(harness.Config{Spec: spec, Attempt: &attempt{}, Task: env.TaskRef{ID: "t"}, Encoder: spellings{}, Decode: decode, Renderer: r,
				Stop: []int32{imEnd, endOfText}, MaxTurns: 8, MaxNew: 400, MaxContext: 20000})
			if err != nil {
				rt.Fatal(err)
			}
			return e
		}
		a, b := open(), open() // the same text, in two spellings
		var segments [][]int32
		var turns [][]int32
		for {
			ra, done, err := a.Next(context.Background())
			if err != nil {
				rt.Fatal(err)
			}
			rb, doneB, err := b.Next(context.Background())
			if err != nil || done != doneB {
				rt.Fatalf("the other spelling: done %v, %v", doneB, err)
			}
			if done {
				break
			}
			if ra.Restart || len(segments) == 0 {
				segments = append(segments, nil)
				restarts += min(1, len(turns))
				rest := ra.Append
				for i, turn := range turns {
					at := index(rest, turn)
					if at < 0 {
						rt.Fatalf("turn %d is not in the new context", i+1)
					}
					rest = rest[at+len(turn):]
				}
			} else if !slices.Equal(ra.Append, rb.Append) {
				rt.Fatalf("after turn %d: %q, with the other spelling %q", len(turns), decode(ra.Append), decode(rb.Append))
			} else if slices.ContainsFunc(ra.Append, func(id int32) bool { return id >= second }) {
				rt.Fatal("text got a second spelling")
			}
			last := &segments[len(segments)-1]
			*last = append(*last, ra.Append...)
			var text string
			for range rapid.IntRange(0, 3).Draw(rt, "pieces") {
				text += rapid.SampledFrom(pieces).Draw(rt, "piece")
			}
			plain := spellings{}.EncodeOrdinary(text)
			ids := slices.Clone(plain)
			for i := range ids {
				if rapid.Bool().Draw(rt, "second") {
					ids[i] += second
				}
			}
			finish := harness.Length
			if end := rapid.SampledFrom([]int32{0, imEnd, endOfText}).Draw(rt, "end"); end != 0 {
				ids, plain, finish = append(ids, end), append(plain, end), harness.Stop
			}
			if !slices.Equal(ids, plain) {
				respelled++
			}
			if err := a.Deliver(harness.Completion{Tokens: ids, LogProb: make([]float32, len(ids)), Finish: finish}); err != nil {
				rt.Fatal(err)
			}
			if err := b.Deliver(harness.Completion{Tokens: plain, LogProb: make([]float32, len(ids)), Finish: finish}); err != nil {
				rt.Fatal(err)
			}
			*last = append(*last, ids...)
			turns = append(turns, ids)
		}
		tr := a.Trajectory()
		if tr.Outcome == env.HarnessFault || tr.Turns != len(turns) {
			rt.Fatalf("outcome %s after %d of %d turns: %s", tr.Outcome, tr.Turns, len(turns), tr.FaultReason)
		}
		if len(tr.Segments) != len(segments) {
			rt.Fatalf("%d segments, want %d", len(tr.Segments), len(segments))
		}
		var policy []int32
		for i, s := range tr.Segments {
			if !slices.Equal(s.IDs, segments[i]) {
				rt.Fatalf("segment %d is not what was asked for and delivered", i)
			}
			for j, k := range s.Kind {
				if k == chat.KindPolicy {
					policy = append(policy, s.IDs[j])
				}
			}
		}
		if !slices.Equal(policy, slices.Concat(turns...)) {
			rt.Fatal("the policy's tokens are not those delivered")
		}
	})
	if respelled == 0 || restarts == 0 {
		t.Errorf("%d turns with a second spelling, %d contexts written again", respelled, restarts)
	}
}

// index finds a part of ids.
func index(ids, part []int32) int {
	for i := 0; i+len(part) <= len(ids); i++ {
		if slices.Equal(ids[i:i+len(part)], part) {
			return i
		}
	}
	return -1
}
