package main

import (
	"context"
	"fmt"
	"io"
	"strings"

	"harness-s/env"
	"harness-s/model/chat"
	"harness-s/trainer"
)

// playCmd runs one episode in the terminal: hs play.
type playCmd struct {
	configFlags
	Task        string  `arg:"" optional:"" help:"Task id; default the first validation task." placeholder:"TASK"`
	Harness     string  `help:"Harness name or id; default the original." placeholder:"ID"`
	Ckpt        string  `type:"path" help:"Hugging Face directory; default model.path."`
	Seed        uint64  `default:"1" help:"Seed of the sampled tokens."`
	Temperature float64 `default:"1" help:"Sampling temperature, 0 = most likely token."`
}

// colors of token origins; policy tokens stand out because only they are trained.
var colors = map[chat.Kind]string{
	chat.KindTemplate: "\x1b[90m", chat.KindSystem: "\x1b[36m", chat.KindUser: "\x1b[34m", chat.KindTool: "\x1b[33m",
	chat.KindHarness: "\x1b[35m", chat.KindPolicy: "\x1b[1;32m",
}

// Run prints the transcript once it is complete: only then the origin of every token is known.
func (c *playCmd) Run(ctx context.Context, g *globals) error {
	if c.Preset == "" && len(c.Config) == 0 {
		c.Preset = "demo"
	}
	if c.Ckpt != "" {
		c.Set = append(c.Set, fmt.Sprintf("model.path=%q", c.Ckpt))
	}
	res, err := c.load(g)
	if err != nil {
		return err
	}
	s, err := g.open(res.Config, false, g.logger(), nil)
	if err != nil {
		return err
	}
	defer s.close()
	if c.Harness != "" && s.pool.Get(c.Harness) == nil {
		var names []string
		for _, sp := range s.pool.Specs {
			names = append(names, sp.Name)
		}
		return usage("one of: "+strings.Join(names, ", "), "unknown harness %q", c.Harness)
	}
	if c.Task, err = pickTask(ctx, s.env, c.Task); err != nil {
		return err
	}
	g.say("%s", s.describe())
	rep, err := trainer.Play(ctx, s.cfg, s.deps, trainer.PlayOptions{Task: c.Task, Harness: c.Harness, Seed: c.Seed, Temperature: c.Temperature, Span: func(p trainer.PlaySpan) {
		g.progress.report(trainer.Progress{Phase: "turn", Done: p.Turn, Total: s.cfg.Rollout.MaxTurns})
	}})
	g.progress.clear()
	if err != nil {
		return err
	}
	w := g.people()
	result := playResult{Task: rep.Task.ID, Split: string(rep.Task.Split), Group: rep.Task.Group, Harness: rep.Harness, Outcome: rep.Outcome.String(),
		Success: rep.Success, Turns: rep.Turns, Spans: []playSpan{}}
	for _, p := range rep.Spans {
		result.Spans = append(result.Spans, playSpan{p.Kind.String(), p.Turn, p.Text, p.Tokens, p.LogProb})
		printSpan(w, g.colored(w), p.Kind, p.Text)
	}
	g.say("\n%s under %s: %s after %d turns", result.Task, result.Harness, result.Outcome, result.Turns)
	if g.JSON {
		return g.emit(result)
	}
	return nil
}

// playResult is the JSON contract of hs play.
type playResult struct {
	Task    string     `json:"task"`
	Split   string     `json:"split"`
	Group   string     `json:"group"`
	Harness string     `json:"harness"`
	Outcome string     `json:"outcome"`
	Success bool       `json:"success"`
	Turns   int        `json:"turns"`
	Spans   []playSpan `json:"spans"`
}

type playSpan struct {
	Kind    string  `json:"kind"`
	Turn    int     `json:"turn"`
	Text    string  `json:"text"`
	Tokens  int     `json:"tokens"`
	LogProb float64 `json:"log_prob,omitempty"` // sum over a policy span, nats
}

// printSpan writes text of one origin: coloured, or marked with the name of the origin.
func printSpan(w io.Writer, color bool, k chat.Kind, text string) {
	if color {
		fmt.Fprintf(w, "%s%s\x1b[0m", colors[k], text)
	} else {
		fmt.Fprintf(w, "[%s] %s\n", k, text)
	}
}

// pickTask checks a task id against the open splits; "" is the first validation task.
func pickTask(ctx context.Context, e env.Env, id string) (string, error) {
	var examples []string
	for _, split := range []env.Split{env.Val, env.Train} {
		ts, err := e.Tasks(ctx, split)
		if err != nil {
			return "", err
		}
		for i, t := range ts {
			if t.ID == id || id == "" {
				return t.ID, nil
			}
			if i < 3 {
				examples = append(examples, t.ID)
			}
		}
	}
	return "", usage("tasks are for instance: "+strings.Join(examples, ", "), "no train or validation task %q", id)
}
