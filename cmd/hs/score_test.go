package main

import (
	"context"
	"encoding/json"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"harness-s/kernels"
	"harness-s/model"
)

// tiny loads the shipped checkpoint.
func tiny(t *testing.T) *model.Model {
	t.Helper()
	dev, err := kernels.Open("cpu", kernels.Options{})
	must(t, err)
	t.Cleanup(func() { dev.Close() })
	m, err := loadStored("", dev, model.LoadOptions{})
	must(t, err)
	t.Cleanup(m.Close)
	return m
}

// write puts a file into a new directory and returns its path.
func write(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	must(t, os.WriteFile(path, []byte(text), 0o644))
	return path
}

// TestScoreEqualsSampler scores what the sampler drew on the shipped checkpoint: both must report the same log-probs.
func TestScoreEqualsSampler(t *testing.T) {
	m := tiny(t)
	r, err := model.NewRunner(m, model.RunnerOptions{MaxSeqs: 1, MaxTokens: 512})
	must(t, err)
	defer r.Close()
	seq, err := r.Acquire()
	must(t, err)
	ids := m.Tok.Encode("<|im_start|>user\nHow many rows has the table?<|im_end|>\n<|im_start|>assistant\n")
	prompt := len(ids)
	w := model.Work{Seq: seq, Append: ids, Sample: true, Sampling: model.Sampling{Temperature: 1}, Key: model.Key{Lo: 3}}
	var drawn []float64
	for n := range 80 {
		w.Ctr = uint64(n)
		got, err := r.Step(context.Background(), []model.Work{w})
		must(t, err)
		ids, drawn = append(ids, got[0].Token), append(drawn, float64(got[0].LogProb))
		w.Append = []int32{got[0].Token}
	}
	b, err := json.Marshal(ids)
	must(t, err)
	code, out, e := hs(t, "score", "--sampler", "--ids", write(t, "ids.json", string(b)), "--json")
	if code != 0 {
		t.Fatalf("exit code %d: %s", code, e)
	}
	var res scoreResult
	must(t, json.Unmarshal([]byte(out), &res))
	if len(res.Tokens) != len(ids) || len(res.LogProbs) != len(ids) || res.LogProbs[0] != nil {
		t.Fatalf("%d tokens, %d log-probs, first %v; want %d of each and null", len(res.Tokens), len(res.LogProbs), res.LogProbs[0], len(ids))
	}
	sum := 0.0
	for i, lp := range res.LogProbs[1:] {
		sum += *lp
		if k := i + 1 - prompt; k >= 0 && math.Abs(*lp-drawn[k]) > 1e-4 {
			t.Errorf("token %d: score %.6f, sampler %.6f", i+1, *lp, drawn[k])
		}
	}
	if math.Abs(res.Sum-sum) > 1e-9 || math.Abs(*res.Perplexity-math.Exp(-sum/float64(len(ids)-1))) > 1e-9*(*res.Perplexity) {
		t.Errorf("sum %v and perplexity %v do not follow from the log-probs (sum %v)", res.Sum, *res.Perplexity, sum)
	}
}

// Without --sampler the rows of the head beyond the tokenizer's ids take part: every probability is a little smaller.
func TestScoreWholeHead(t *testing.T) {
	path := write(t, "ids.json", "[5, 6, 7, 8, 9, 10]")
	score := func(args ...string) (r scoreResult) {
		code, out, e := hs(t, append([]string{"score", "--json", "--ids", path}, args...)...)
		if code != 0 {
			t.Fatalf("exit code %d: %s", code, e)
		}
		must(t, json.Unmarshal([]byte(out), &r))
		return r
	}
	whole, sampler := score(), score("--sampler")
	for i := 1; i < len(whole.LogProbs); i++ {
		if *whole.LogProbs[i] >= *sampler.LogProbs[i] {
			t.Errorf("token %d: %.6f over the whole head, %.6f over the tokenizer's ids", i, *whole.LogProbs[i], *sampler.LogProbs[i])
		}
	}
}

func TestScoreText(t *testing.T) {
	const text = "SELECT COUNT(*) FROM staff;\n"
	path := write(t, "text.txt", text)
	code, out, e := hs(t, "score", "--text", path, "--json")
	v := lastJSON(t, out)
	if want := tiny(t).Tok.Encode(text); code != 0 || len(v["tokens"].([]any)) != len(want) {
		t.Errorf("exit code %d, %v, want %d tokens: %s", code, v, len(want), e)
	}
	code, out, _ = hs(t, "score", "--text", path)
	if code != 0 || !strings.HasPrefix(out, "position") || !strings.Contains(out, "perplexity") || !strings.Contains(out, "  -  ") {
		t.Errorf("exit code %d, table:\n%s", code, out)
	}
}

func TestScoreRefuses(t *testing.T) {
	bare := filepath.Join(root, "model", "testdata", "reference", "edges")
	for _, c := range []struct {
		name string
		args []string
		want []string
	}{
		{"no input", nil, []string{"--ids", "--text"}},
		{"two inputs", []string{"--ids", "a", "--text", "b"}, []string{"--ids", "--text"}},
		{"no file", []string{"--ids", filepath.Join(t.TempDir(), "none.json")}, []string{"none.json", "hint: the file is one JSON array"}},
		{"empty list", []string{"--ids", write(t, "e.json", " [ ] ")}, []string{"e.json: the list is empty", "hint:"}},
		{"empty file", []string{"--ids", write(t, "e.json", "")}, []string{"e.json: line 1 column 1", "ends before"}},
		{"open list", []string{"--ids", write(t, "e.json", "[1,\n2")}, []string{"e.json: line 2 column 2", "ends before"}},
		{"bad syntax", []string{"--ids", write(t, "e.json", "[1,\n  oops]")}, []string{"e.json: line 2 column 3", "invalid character 'o'"}},
		{"an object", []string{"--ids", write(t, "e.json", `{"ids": [1]}`)}, []string{"line 1 column 1", "found an object"}},
		{"a text", []string{"--ids", write(t, "e.json", `[1, "two"]`)}, []string{"line 1 column 5", `element 1 is the text "two"`}},
		{"a fraction", []string{"--ids", write(t, "e.json", `[1, 2.5]`)}, []string{"line 1 column 5", "element 1 is 2.5"}},
		{"a negative id", []string{"--ids", write(t, "e.json", `[-1, 2]`)}, []string{"line 1 column 2", "element 0 is -1"}},
		{"two lists", []string{"--ids", write(t, "e.json", "[1, 2]\n[3]")}, []string{"line 2 column 1", "text after the list"}},
		{"outside the vocabulary", []string{"--ids", write(t, "e.json", "[1, 2, 1024]")}, []string{"element 2 is 1024", "outside the vocabulary of", "hint: ids of this checkpoint run from 0"}},
		{"one token", []string{"--ids", write(t, "e.json", "[1]")}, []string{"1 token, nothing to score", "at least two"}},
		{"empty text", []string{"--text", write(t, "e.txt", "")}, []string{"e.txt is empty"}},
		{"text without tokenizer", []string{"--ckpt", bare, "--text", write(t, "a.txt", "abc")}, []string{"no tokenizer.json", "--ids FILE"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			code, out, errOut := hs(t, append([]string{"score", "--json"}, c.args...)...)
			if v := lastJSON(t, out); code != exitUsage || v["ok"] != false || v["hint"] == "" {
				t.Errorf("exit code %d, %v", code, v)
			}
			for _, w := range c.want {
				if !strings.Contains(errOut, w) {
					t.Errorf("stderr lacks %q:\n%s", w, errOut)
				}
			}
		})
	}
}
