package main

import (
	"context"
	"errors"
	"fmt"
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

// Run prints the transcript as it happens.
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
	if c.Task == "" {
		ts, err := s.env.Tasks(ctx, env.Val)
		if err != nil {
			return err
		}
		if len(ts) == 0 {
			return errors.New("play: the validation split is empty")
		}
		c.Task = ts[0].ID
	}
	g.say("%s", s.describe())
	color := g.Color == "always" || g.Color == "auto" && isTerminal(g.people())
	rep, err := trainer.Play(ctx, s.cfg, s.deps, trainer.PlayOptions{Task: c.Task, Harness: c.Harness, Seed: c.Seed, Temperature: c.Temperature, Span: func(p trainer.PlaySpan) {
		if color {
			fmt.Fprintf(g.people(), "%s%s\x1b[0m", colors[p.Kind], p.Text)
		} else {
			fmt.Fprintf(g.people(), "[%s] %s\n", p.Kind, p.Text)
		}
	}})
	if err != nil {
		return err
	}
	g.say("\n%s under %s: %s after %d turns", rep.Task.ID, rep.Harness, rep.Outcome, rep.Turns)
	if g.JSON {
		return g.emit(rep)
	}
	return nil
}
