package main

import (
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// generate runs hs generate on the shipped checkpoint and decodes its JSON.
func generate(t *testing.T, args ...string) generateResult {
	t.Helper()
	code, out, e := hs(t, append([]string{"generate", "--json", "-q"}, args...)...)
	if code != 0 || e != "" {
		t.Fatalf("%q: exit code %d: %s", args, code, e)
	}
	var r generateResult
	must(t, json.Unmarshal([]byte(out), &r))
	if len(r.IDs) == 0 || len(r.LogProbs) != len(r.IDs) || (r.Stop == "stop") != (r.StopToken != nil) {
		t.Fatalf("%q: %+v", args, r)
	}
	return r
}

func TestGenerateSeeds(t *testing.T) {
	a := generate(t, "--prompt", "How many rows?", "--seed", "5", "--max-new", "40")
	b := generate(t, "--prompt", "How many rows?", "--seed", "5", "--max-new", "40")
	c := generate(t, "--prompt", "How many rows?", "--seed", "6", "--max-new", "40")
	if !slices.Equal(a.IDs, b.IDs) || !slices.Equal(a.LogProbs, b.LogProbs) {
		t.Errorf("the same seed gave %v and %v", a.IDs, b.IDs)
	}
	if slices.Equal(a.IDs, c.IDs) {
		t.Errorf("seeds 5 and 6 gave the same tokens %v", a.IDs)
	}
	short := generate(t, "--prompt", "How many rows?", "--seed", "5", "--max-new", "3")
	if !slices.Equal(short.IDs, a.IDs[:3]) || short.Stop != "length" {
		t.Errorf("--max-new 3 gave %v (%s), want the start of %v", short.IDs, short.Stop, a.IDs)
	}
	cold := generate(t, "--prompt", "How many rows?", "--temperature", "0", "--max-new", "20")
	top := generate(t, "--prompt", "How many rows?", "--top-k", "1", "--seed", "9", "--max-new", "20")
	if !slices.Equal(cold.IDs, top.IDs) {
		t.Errorf("temperature 0 gave %v, top-k 1 %v", cold.IDs, top.IDs)
	}
}

// TestGeneratePrompts checks that the prompt is a user turn unless --raw, that --ids feeds the same tokens, and that hs score agrees
// with the log-probs.
func TestGeneratePrompts(t *testing.T) {
	const turn = "<|im_start|>user\nHow many rows?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
	chat := generate(t, "--prompt", "How many rows?", "--max-new", "30")
	raw := generate(t, "--raw", "--prompt-file", write(t, "p.txt", turn), "--max-new", "30")
	ids := tiny(t).Tok.Encode(turn)
	text, err := json.Marshal(ids)
	must(t, err)
	fixed := generate(t, "--ids", write(t, "p.json", string(text)), "--max-new", "30")
	if !slices.Equal(chat.IDs, raw.IDs) || !slices.Equal(chat.IDs, fixed.IDs) || chat.PromptTokens != len(ids) {
		t.Errorf("turn %v, raw %v, ids %v; %d prompt tokens, want %d", chat.IDs, raw.IDs, fixed.IDs, chat.PromptTokens, len(ids))
	}
	if bare := generate(t, "--raw", "--prompt", "How many rows?", "--max-new", "1"); bare.PromptTokens >= len(ids) {
		t.Errorf("--raw has %d prompt tokens, the turn %d", bare.PromptTokens, len(ids))
	}
	text, err = json.Marshal(append(ids, chat.IDs...))
	must(t, err)
	_, out, _ := hs(t, "score", "--sampler", "--json", "--ids", write(t, "all.json", string(text)))
	var s scoreResult
	must(t, json.Unmarshal([]byte(out), &s))
	for i, lp := range chat.LogProbs {
		if got := *s.LogProbs[len(ids)+i]; math.Abs(got-float64(lp)) > 1e-4 {
			t.Errorf("token %d: sampled with %.6f, scored %.6f", i, lp, got)
		}
	}
}

// TestGenerateSampling: what no flag sets comes from the checkpoint, and the result says from where; --thinking changes the prompt.
func TestGenerateSampling(t *testing.T) {
	r := generate(t, "--prompt", "a", "--max-new", "1")
	if s := r.Sampling; s.Temperature != 1 || s.TopP != 1 || s.TopK != 0 || s.From != "generation_config.json" {
		t.Errorf("%+v", s)
	}
	dir := filepath.Join(t.TempDir(), "tiny")
	if code, _, e := hs(t, "sft", "--unpack", dir, "-q"); code != 0 {
		t.Fatal(e)
	}
	must(t, os.WriteFile(filepath.Join(dir, "generation_config.json"), []byte(`{"do_sample": true, "temperature": 0.5, "top_k": 3}`), 0o644))
	r = generate(t, "--ckpt", dir, "--prompt", "a", "--max-new", "1")
	if s := r.Sampling; s.Temperature != 0.5 || s.TopK != 3 || s.TopP != 1 {
		t.Errorf("%+v", s)
	}
	r = generate(t, "--ckpt", dir, "--prompt", "a", "--max-new", "1", "--top-k", "0", "--top-p", "0.9")
	if s := r.Sampling; s.Temperature != 0.5 || s.TopK != 0 || s.TopP != 0.9 || s.From != "flags, the rest from generation_config.json" {
		t.Errorf("%+v", s)
	}
	r = generate(t, "--ckpt", dir, "--prompt", "a", "--max-new", "1", "--top-k", "2", "--top-p", "0.9", "--min-p", "0.1", "--temperature", "0")
	if s := r.Sampling; s.Temperature != 0 || s.TopK != 2 || s.MinP != 0.1 || s.From != "flags" {
		t.Errorf("%+v", s)
	}
	off, on := generate(t, "--prompt", "a", "--max-new", "1", "--thinking", "off"), generate(t, "--prompt", "a", "--max-new", "1", "--thinking", "on")
	tok := tiny(t).Tok
	if d := len(tok.Encode("\n\n</think>\n\n")) - len(tok.Encode("\n")); off.PromptTokens-on.PromptTokens != d || d < 1 {
		t.Errorf("%d prompt tokens without thinking, %d with; the closed block has %d more", off.PromptTokens, on.PromptTokens, d)
	}
	must(t, os.WriteFile(filepath.Join(dir, "generation_config.json"), []byte(`{"top_p": 7}`), 0o644))
	if code, _, e := hs(t, "generate", "--ckpt", dir, "--prompt", "a"); code != exitFailure || !strings.Contains(e, "top_p = 7") || !strings.Contains(e, "hint:") {
		t.Errorf("exit code %d, %s", code, e)
	}
}

// TestGenerateStops looks for a seed whose answer ends by itself: the last token is <|im_end|> and no part of the text.
func TestGenerateStops(t *testing.T) {
	end, _ := tiny(t).Tok.ID("<|im_end|>")
	for seed := range 20 {
		r := generate(t, "--prompt", "How many rows?", "--max-new", "200", "--seed", fmt.Sprint(seed))
		if r.Stop != "stop" {
			continue
		}
		if *r.StopToken != end || r.IDs[len(r.IDs)-1] != end || slices.Contains(r.IDs[:len(r.IDs)-1], end) || strings.Contains(r.Text, "<|im_end|>") {
			t.Errorf("stopped by %d: %v %q", *r.StopToken, r.IDs, r.Text)
		}
		code, out, e := hs(t, "generate", "--prompt", "How many rows?", "--max-new", "200", "--seed", fmt.Sprint(seed))
		if code != 0 || strings.TrimSuffix(out, "\n") != strings.TrimSuffix(r.Text, "\n") || !strings.Contains(e, "stopped by <|im_end|>") {
			t.Errorf("exit code %d, streamed %q, JSON has %q; stderr %q", code, out, r.Text, e)
		}
		return
	}
	t.Error("no answer of 20 ended by itself")
}

// TestGenerateWithoutTokenizer checks that a checkpoint without a tokenizer prints ids.
func TestGenerateWithoutTokenizer(t *testing.T) {
	bare := filepath.Join(root, "model", "testdata", "reference", "edges")
	code, out, e := hs(t, "generate", "--ckpt", bare, "--ids", write(t, "p.json", "[1, 2, 3]"), "--max-new", "4")
	if code != 0 || len(strings.Fields(out)) < 1 {
		t.Errorf("exit code %d, %q %q", code, out, e)
	}
}

// TestStreamer checks that text comes in whole characters and in the end equals decoding at once.
func TestStreamer(t *testing.T) {
	tok := tiny(t).Tok
	for _, ids := range [][]int32{
		tok.Encode("plain, žluťoučký, 日本語, 🙂🙃 end"),
		append(tok.Encode("cut 🙂")[:len(tok.Encode("cut 🙂"))-1], tok.Encode("x日")...),
		tok.Encode("日")[:1],
	} {
		var out strings.Builder
		s := &streamer{w: &out, tok: tok}
		for _, id := range ids {
			s.push(id)
			if part := out.String(); strings.ToValidUTF8(part, "") != part {
				t.Errorf("half a character in %q", part)
			}
		}
		s.end()
		if want := tok.Decode(ids) + "\n"; out.String() != want {
			t.Errorf("streamed %q, decoded %q", out.String(), want)
		}
	}
}

func TestGenerateRefuses(t *testing.T) {
	bare := filepath.Join(root, "model", "testdata", "reference", "edges")
	for _, c := range []struct {
		name string
		args []string
		want []string
	}{
		{"no prompt", nil, []string{"--prompt", "--prompt-file", "--ids"}},
		{"two prompts", []string{"--prompt", "a", "--ids", "b"}, []string{"--prompt", "--ids"}},
		{"empty prompt", []string{"--prompt", ""}, []string{"--prompt is empty", "hint:"}},
		{"missing file", []string{"--prompt-file", filepath.Join(t.TempDir(), "none.txt")}, []string{"none.txt", "hint:"}},
		{"broken ids", []string{"--ids", write(t, "p.json", "[1,]")}, []string{"p.json: line 1 column 4"}},
		{"id outside", []string{"--ids", write(t, "p.json", "[99999]")}, []string{"element 0 is 99999", "hint:"}},
		{"nothing to sample", []string{"--prompt", "a", "--max-new", "0"}, []string{"--max-new is 0"}},
		{"too long", []string{"--prompt", "a", "--max-new", "9000"}, []string{"--max-new is 9000", "8192", "hint: shorten the prompt, or --max-new 81"}},
		{"temperature", []string{"--prompt", "a", "--temperature=-0.5"}, []string{"--temperature is -0.5"}},
		{"top-p", []string{"--prompt", "a", "--top-p", "1.5"}, []string{"--top-p is 1.5", "from 0 to 1"}},
		{"min-p", []string{"--prompt", "a", "--min-p", "NaN"}, []string{"--min-p is NaN"}},
		{"top-k", []string{"--prompt", "a", "--top-k=-1"}, []string{"--top-k is -1"}},
		{"no tokenizer", []string{"--ckpt", bare, "--prompt", "a"}, []string{"no tokenizer.json", "hint:", "--ids FILE"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			code, out, errOut := hs(t, append([]string{"generate", "--json"}, c.args...)...)
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
