package main

import (
	"context"
	"fmt"
	"text/tabwriter"

	"harness-s/env"
	"harness-s/env/dbbench"
	"harness-s/trainer"
)

// envCmd is about environments: hs env.
type envCmd struct {
	Ls    envLs    `cmd:"" help:"Environments, back-ends, splits."`
	Check envCheck `cmd:"" help:"Replay gold solutions and list every row that does not pass, with the reason."`
}

type envLs struct{ configFlags }

// Run lists what this build has.
func (c *envLs) Run(ctx context.Context, g *globals) error {
	if c.Preset == "" && len(c.Config) == 0 {
		c.Preset = "demo"
	}
	res, err := c.load(g)
	if err != nil {
		return err
	}
	e, err := openEnv(res.Config)
	if err != nil {
		return err
	}
	defer e.Close()
	i := e.Info()
	health := "ready"
	herr := e.Health(ctx)
	if herr != nil {
		health = herr.Error()
	}
	if g.JSON {
		err = g.emit(map[string]any{"environments": []any{map[string]any{"info": i, "ready": herr == nil, "health": health}}})
	} else {
		w := tabwriter.NewWriter(g.out, 0, 0, 2, ' ', 0)
		fmt.Fprintln(w, "NAME\tTASKS\tBACK-END\tTRAIN\tVAL\tTEST (SEALED)\tINVALID\tSTATE")
		fmt.Fprintf(w, "%s\t%s\t%s\t%d\t%d\t%d\t%d\t%s\n", i.Name, i.Label, i.Backend, i.Counts[env.Train], i.Counts[env.Val], i.Counts[env.Test], len(i.Invalid), health)
		err = w.Flush()
	}
	if err == nil && herr != nil {
		fmt.Fprintln(g.errOut, "hint:", advice(herr))
		return exitError{code: exitNotReady, silent: true}
	}
	return err
}

type envCheck struct {
	Name    string `arg:"" default:"dbbench" help:"Environment."`
	Data    string `type:"path" help:"JSONL file of rows, or a JSON list; default generated tasks." placeholder:"FILE"`
	DSN     string `help:"Database server, as user:password@tcp(host:port)/; default the embedded one."`
	Count   int    `default:"0" help:"First rows only; 0 = all rows of a file, 200 generated tasks."`
	Seed    uint64 `default:"1" help:"Seed of generated tasks."`
	Compare string `default:"fc" enum:"fc,v02,strict" help:"Answer comparison: fc, v02 or strict."`
}

// envCheckResult is the JSON contract of hs env check.
type envCheckResult struct {
	Env     string              `json:"env"`
	Data    string              `json:"data"`
	Backend string              `json:"backend"`
	Rows    int                 `json:"rows"`
	Passed  int                 `json:"passed"`
	Failed  []dbbench.FailedRow `json:"failed"`
}

// Run replays gold. Rows that fail are a finding, not an error: exit code 0 unless nothing passes.
func (c *envCheck) Run(ctx context.Context, g *globals) error {
	if c.Name != "dbbench" {
		return usage("hs env ls", "unknown environment %q, this build has: dbbench", c.Name)
	}
	var rows []dbbench.NamedRow
	var err error
	data := c.Data
	if c.Data != "" {
		rows, err = dbbench.ReadRows(c.Data)
	} else {
		n := c.Count
		if n == 0 {
			n = 200
		}
		data = fmt.Sprintf("generated, seed %d", c.Seed)
		rows, err = dbbench.TinyRows(c.Seed, env.Train, n)
	}
	if err != nil {
		return err
	}
	if c.Count > 0 && c.Count < len(rows) {
		rows = rows[:c.Count]
	}
	rep, err := dbbench.GoldReplay(ctx, rows, dbbench.Options{DSN: c.DSN, Compare: c.Compare}, func(done, total int) {
		g.progress.report(trainer.Progress{Phase: "gold", Done: done, Total: total})
	})
	g.progress.clear()
	if err != nil {
		return err
	}
	res := envCheckResult{Env: c.Name, Data: data, Backend: "embedded", Rows: rep.Rows, Passed: rep.Passed, Failed: rep.Failed}
	if c.DSN != "" {
		res.Backend = "mysql"
	}
	if res.Failed == nil {
		res.Failed = []dbbench.FailedRow{}
	}
	for _, f := range res.Failed {
		at := ""
		if f.Line > 0 {
			at = fmt.Sprintf("%s line %d, ", c.Data, f.Line)
		}
		g.say("%srow %s: %s", at, f.ID, f.Reason)
	}
	share := 0.0
	if res.Rows > 0 {
		share = 100 * float64(res.Passed) / float64(res.Rows)
	}
	g.say("%d of %d rows pass (%.1f %%) on the %s back-end", res.Passed, res.Rows, share, res.Backend)
	if g.JSON {
		if err := g.emit(res); err != nil {
			return err
		}
	}
	if res.Rows > 0 && res.Passed == 0 {
		return exitError{code: exitNotReady, silent: true}
	}
	return nil
}
