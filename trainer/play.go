package trainer

import (
	"context"
	"fmt"
	"slices"

	"harness-s/env"
	"harness-s/env/harness"
	"harness-s/model/chat"
)

// PlayOptions select one episode.
type PlayOptions struct {
	Task        string // id of a train or validation task
	Harness     string // id or name; empty = original
	Seed        uint64
	Attempt     int
	Temperature float64
	// Span, when set, is called while the episode runs: for what each turn adds to
	// the context, as kind template whatever its producers, and for what is sampled.
	Span func(PlaySpan)
}

// PlaySpan is a run of tokens of one producer.
type PlaySpan struct {
	Kind    chat.Kind `json:"kind"`
	Turn    int       `json:"turn"`
	Text    string    `json:"text"`
	Tokens  int       `json:"tokens"`
	LogProb float64   `json:"log_prob,omitempty"` // sum over a policy span, nats
}

// PlayReport is one finished episode.
type PlayReport struct {
	Task       env.TaskRef        `json:"task"`
	Harness    string             `json:"harness"`
	Spans      []PlaySpan         `json:"spans"`
	Outcome    env.Outcome        `json:"outcome"`
	Success    bool               `json:"success"`
	Turns      int                `json:"turns"`
	Trajectory harness.Trajectory `json:"-"`
}

// Play runs one episode of a train or validation task.
func Play(ctx context.Context, cfg Config, d *Deps, o PlayOptions) (*PlayReport, error) {
	task, err := findTask(ctx, d.Env, o.Task)
	if err != nil {
		return nil, err
	}
	spec := d.Pool.Original()
	if o.Harness != "" {
		if spec = d.Pool.Get(o.Harness); spec == nil {
			return nil, hinted("play task", "hs play --harness x lists the names", "the pool has no harness %q", o.Harness)
		}
	}
	var a Attempt
	err = withEngine(ctx, cfg, d, func(ctx context.Context, r *rollouts) error {
		p := &player{d: d, span: o.Span}
		var err error
		a, err = r.run(ctx, order{
			task: task, spec: spec, kind: KindEval, phase: phasePlay, index: o.Attempt, share: 1, seed: o.Seed,
			sampling: evalSampling(o.Temperature), observe: p.observe,
		})
		return err
	})
	if err != nil {
		return nil, err
	}
	rep := &PlayReport{Task: task, Harness: spec.Name, Outcome: a.Outcome, Success: a.Outcome.Success(), Turns: a.Traj.Turns, Trajectory: a.Traj}
	for i := range a.Traj.Segments {
		rep.Spans = append(rep.Spans, spans(&a.Traj.Segments[i], d.Tokens)...)
	}
	return rep, nil
}

// findTask looks a task up by its id in the open splits.
func findTask(ctx context.Context, e env.Env, id string) (env.TaskRef, error) {
	for _, s := range []env.Split{env.Train, env.Val} {
		tasks, err := e.Tasks(ctx, s)
		if err != nil {
			return env.TaskRef{}, fmt.Errorf("list %s tasks: %w", s, err)
		}
		if i := slices.IndexFunc(tasks, func(t env.TaskRef) bool { return t.ID == id }); i >= 0 {
			return tasks[i], nil
		}
	}
	return env.TaskRef{}, &Error{Op: "find task " + id, Err: env.ErrUnknownTask, Hint: "list tasks with: hs env ls"}
}

// spans cuts a ledger segment where producer or turn change.
func spans(s *harness.LedgerSegment, t Tokens) []PlaySpan {
	var out []PlaySpan
	for i := 0; i < len(s.IDs); {
		p := PlaySpan{Kind: s.Kind[i], Turn: int(s.Turn[i])}
		from := i
		for i < len(s.IDs) && s.Kind[i] == p.Kind && int(s.Turn[i]) == p.Turn {
			p.LogProb += float64(s.LogProb[i])
			i++
		}
		p.Text, p.Tokens = t.Decode(s.IDs[from:i]), i-from
		out = append(out, p)
	}
	return out
}

// player shows an episode while it runs. Producers inside the context that a
// request adds are known only at the end, so it is shown as one piece.
type player struct {
	d    *Deps
	span func(PlaySpan)
}

func (p *player) observe(req harness.Request, c harness.Completion) {
	if p.span == nil {
		return
	}
	turn := req.Key.Turn
	p.span(PlaySpan{Kind: chat.KindTemplate, Turn: turn - 1, Text: p.d.Tokens.Decode(req.Append), Tokens: len(req.Append)})
	sum := 0.0
	for _, lp := range c.LogProb {
		sum += float64(lp)
	}
	p.span(PlaySpan{Kind: chat.KindPolicy, Turn: turn, Text: p.d.Tokens.Decode(c.Tokens), Tokens: len(c.Tokens), LogProb: sum})
}
