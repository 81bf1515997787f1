package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"text/tabwriter"

	"harness-s/model"
	"harness-s/trainer"
)

// scoreCmd prints log-probabilities of given tokens: hs score.
type scoreCmd struct {
	storageFlag
	Ckpt    string `type:"path" help:"Hugging Face directory; default the shipped tiny checkpoint."`
	Adapter string `type:"path" help:"LoRA adapter, a PEFT directory; its base is --ckpt, or what the adapter names." placeholder:"DIR"`
	IDs     string `name:"ids" xor:"input" required:"" type:"path" help:"JSON file with an array of token ids." placeholder:"FILE"`
	Text    string `xor:"input" required:"" type:"path" help:"Text file; the checkpoint's tokenizer encodes it." placeholder:"FILE"`

	Sampler bool `help:"Softmax over the tokenizer's ids alone, as sampling and training here; default every row of the head, as other programs."`
}

// scoreResult is the JSON contract of hs score. LogProbs has one entry per token, in nats; the first is null, it has no context.
type scoreResult struct {
	Tokens     []int32    `json:"tokens"`
	LogProbs   []*float64 `json:"logprobs"`
	Sum        float64    `json:"sum"`
	Perplexity *float64   `json:"perplexity"` // exp(-sum / (tokens - 1)); null beyond the range of a float64
}

// Run scores in one forward pass.
func (c *scoreCmd) Run(ctx context.Context, g *globals) error {
	var ids []int32
	var text string
	var err error
	if c.IDs != "" {
		ids, err = readIDs(c.IDs)
	} else {
		text, err = readText(c.Text)
	}
	if err != nil {
		return err
	}
	dev, m, err := g.openAdapted(c.Ckpt, c.Adapter, c.options(g, false))
	if err != nil {
		return err
	}
	defer dev.Close()
	defer m.Close()
	origin := c.IDs
	if c.IDs == "" {
		if m.Tok == nil {
			return noTokenizer(c.Ckpt, "--ids FILE takes token ids")
		}
		origin, ids = c.Text, m.Tok.Encode(text)
	}
	scored := *m
	if !c.Sampler {
		scored.Tok = nil // without a tokenizer every row of the head takes part
	}
	if err := checkIDs(origin, ids, &scored); err != nil {
		return err
	}
	if len(ids) < 2 {
		return usage("give at least two tokens: the first has no context and is not scored", "%s has %d token, nothing to score", origin, len(ids))
	}
	if n := m.Config.MaxPositions; len(ids) > n {
		return usage("split the file", "%s has %d tokens, the model takes %d (max_position_embeddings)", origin, len(ids), n)
	}
	lp, err := logProbs(&scored, ids)
	if err != nil {
		return err
	}
	r := scoreResult{Tokens: ids, LogProbs: []*float64{nil}}
	for i, x := range lp {
		v := float64(x)
		if math.IsNaN(v) || math.IsInf(v, 0) {
			return &trainer.Error{Op: "score " + origin, Err: fmt.Errorf("log-probability of token %d is %v", i+1, v), Hint: "the weights overflow; hs doctor --ckpt DIR checks them"}
		}
		r.LogProbs, r.Sum = append(r.LogProbs, &v), r.Sum+v
	}
	mean := -r.Sum / float64(len(lp))
	ppl := math.Exp(mean)
	if !math.IsInf(ppl, 0) {
		r.Perplexity = &ppl
	}
	if g.JSON {
		return g.emit(r)
	}
	if err := r.table(g.out, m.Tok); err != nil {
		return err
	}
	g.say("%d tokens, %d scored: sum %.4f, mean %.4f nats, perplexity %.4g", len(ids), len(lp), r.Sum, -mean, ppl)
	return nil
}

// table prints one line per token; tok may be nil.
func (r *scoreResult) table(w io.Writer, tok *model.Tokenizer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "position\tid\tlogprob\ttext")
	for i, id := range r.Tokens {
		lp, text := "-", ""
		if r.LogProbs[i] != nil {
			lp = fmt.Sprintf("%.4f", *r.LogProbs[i])
		}
		if tok != nil {
			text = fmt.Sprintf("%q", tok.TokenBytes(id))
		}
		fmt.Fprintf(t, "%d\t%d\t%s\t%s\n", i, id, lp, text)
	}
	return t.Flush()
}

// logProbs runs the executor over one sequence: the natural-log probability of each token but the first, at temperature 1.
func logProbs(m *model.Model, ids []int32) ([]float32, error) {
	n := len(ids)
	b := &model.Batch{IDs: ids, Segments: []model.Segment{{Len: int32(n), Parent: -1}}, Targets: ids[1:]}
	for i := range n - 1 {
		b.Rows = append(b.Rows, int32(i))
	}
	x, err := model.NewExec(m, model.ExecOptions{Temperature: 1, MaxRows: n, MaxTargets: n - 1})
	if err != nil {
		return nil, err
	}
	defer x.Close()
	out, err := x.Forward(b)
	if err != nil {
		return nil, err
	}
	return out.LogProb, nil
}

// readText reads a text file that must have something in it.
func readText(path string) (string, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return "", usage("give the path of a text file", "read text: %w", err)
	}
	if len(b) == 0 {
		return "", usage("give a file with text in it", "%s is empty", path)
	}
	return string(b), nil
}

const idsHint = "the file is one JSON array of token ids, e.g. [760, 6511, 314]"

// readIDs reads a JSON array of token ids and says where it is broken.
func readIDs(path string) ([]int32, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, usage(idsHint, "read token ids: %w", err)
	}
	ids, at, err := parseIDs(b)
	if err != nil {
		before := b[:min(max(at, 0), int64(len(b)))]
		line := 1 + bytes.Count(before, []byte("\n"))
		column := len(before) - bytes.LastIndexByte(before, '\n')
		return nil, usage(idsHint, "%s: line %d column %d: %w", path, line, column, err)
	}
	if len(ids) == 0 {
		return nil, usage(idsHint, "%s: the list is empty", path)
	}
	return ids, nil
}

// parseIDs decodes an array of ids; with an error comes the offset of the byte that it is about.
func parseIDs(b []byte) ([]int32, int64, error) {
	d := json.NewDecoder(bytes.NewReader(b))
	d.UseNumber()
	// next is the next token and where it starts.
	next := func() (json.Token, int64, error) {
		start := d.InputOffset()
		for start < int64(len(b)) && bytes.IndexByte([]byte(" \t\r\n,"), b[start]) >= 0 {
			start++
		}
		tok, err := d.Token()
		var syntax *json.SyntaxError
		switch {
		case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
			return nil, int64(len(b)), errors.New("the file ends before the list does")
		case errors.As(err, &syntax):
			return nil, start, err
		}
		return tok, start, err
	}
	tok, at, err := next()
	if err != nil {
		return nil, at, err
	}
	if tok != json.Delim('[') {
		return nil, at, fmt.Errorf("want an array of token ids, found %s", describe(tok))
	}
	var ids []int32
	for d.More() {
		tok, at, err := next()
		if err != nil {
			return nil, at, err
		}
		n, ok := tok.(json.Number)
		if !ok {
			return nil, at, fmt.Errorf("element %d is %s, want a token id", len(ids), describe(tok))
		}
		id, err := n.Int64()
		if err != nil || id < 0 || id > math.MaxInt32 {
			return nil, at, fmt.Errorf("element %d is %s, want a whole number from 0 to %d", len(ids), n, math.MaxInt32)
		}
		ids = append(ids, int32(id))
	}
	if _, at, err := next(); err != nil { // the closing bracket
		return nil, at, err
	}
	end := d.InputOffset()
	if rest := bytes.TrimLeft(b[end:], " \t\r\n"); len(rest) > 0 {
		return nil, int64(len(b) - len(rest)), fmt.Errorf("text after the list: %.20q", rest)
	}
	return ids, 0, nil
}

func describe(t json.Token) string {
	switch v := t.(type) {
	case json.Delim:
		if v == '{' {
			return "an object"
		}
		return "a list"
	case string:
		return fmt.Sprintf("the text %.40q", v)
	case json.Number:
		return "the number " + v.String()
	case bool:
		return fmt.Sprint(v)
	}
	return "null"
}

// checkIDs compares ids with the vocabulary; rows of padding behind the tokenizer's ids have no probability.
func checkIDs(origin string, ids []int32, m *model.Model) error {
	for i, id := range ids {
		if n := m.ValidVocab(); int64(id) >= n {
			return usage(fmt.Sprintf("ids of this checkpoint run from 0 to %d; was the text encoded with another tokenizer?", n-1),
				"%s: element %d is %d, outside the vocabulary of %d tokens", origin, i, id, n)
		}
	}
	return nil
}

func noTokenizer(ckpt, hint string) error {
	return exitError{code: exitUsage, err: &trainer.Error{Op: "encode text", Err: fmt.Errorf("%s: %w", ckpt, model.ErrNoTokenizer),
		Hint: "copy tokenizer.json next to config.json; " + hint}}
}
