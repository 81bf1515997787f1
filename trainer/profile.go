package trainer

import (
	"context"
	"fmt"
	"sync/atomic"

	"harness-s/env"
	"harness-s/env/harness"
	"harness-s/router"
)

// routing is the router with the evidence of one step.
type routing struct {
	router  *router.Router
	view    *router.View
	pool    *harness.Pool
	run     string
	version uint64
	k       int // harnesses of a rescue
}

func newRouter(cfg Config, pool *harness.Pool) *router.Router {
	r := &router.Router{PoolDigest: pool.Digest(), Pool: router.FromPool(pool), Base: router.RuleRanker{A: cfg.Router.A, M: cfg.Router.M}}
	if cfg.Router.Kind == "random" {
		r.Base = router.RandomRanker{Seed: cfg.Run.Seed}
	}
	return r
}

// choose ranks every auxiliary for a task that defeated the original harness.
func (r *routing) choose(ctx context.Context, task env.TaskRef, text string, step int) (*choice, error) {
	return r.ask(ctx, task, text, step, router.Rescue, r.k)
}

// first is the harness for test-time routing: rank 1 of the whole pool.
func (r *routing) first(ctx context.Context, task env.TaskRef, text string, step int) (*choice, error) {
	return r.ask(ctx, task, text, step, router.Test, 1)
}

func (r *routing) ask(ctx context.Context, task env.TaskRef, text string, step int, purpose string, k int) (*choice, error) {
	d, err := r.router.Select(ctx, router.Query{
		Run: r.run, TaskID: task.ID, TaskText: text, Group: task.Group, Purpose: purpose, Step: step, PolicyVersion: r.version,
	}, r.view, k)
	if err != nil {
		return nil, err
	}
	c := &choice{decision: &d}
	for _, id := range d.Final {
		s := r.pool.Get(id)
		if s == nil {
			return nil, fmt.Errorf("router ranked %s, which is not in the pool", id)
		}
		c.order = append(c.order, s)
	}
	return c, nil
}

// profile runs tasks under every harness of the pool and adds the outcomes to the
// evidence; nothing is published. These attempts are profiling cost and are never
// trained on (method.md 6.6). It reports the attempts made and the void ones.
func profile(ctx context.Context, r *rollouts, e *router.Evidence, tasks []env.TaskRef, attempts, step int, progress func(Progress)) (made, void int, err error) {
	c := &collector{r: r, step: step}
	specs := r.d.Pool.Specs
	results := make([][]Attempt, len(tasks)*len(specs))
	var done atomic.Int64
	err = each(ctx, len(results), func(ctx context.Context, i int) (err error) {
		t, s := tasks[i/len(specs)], specs[i%len(specs)]
		results[i], err = c.attempts(ctx, repeat(s, attempts), c.order(t, KindCalibrate, phaseCalibrate, attempts))
		report(progress, Progress{Phase: "evidence", Done: int(done.Add(1)), Total: len(results)})
		return err
	})
	if err != nil {
		return 0, 0, err
	}
	for i, as := range results {
		row := evidenceRow(tasks[i/len(specs)], specs[i%len(specs)], as)
		made += len(as)
		void += len(as) - row.Valid
		if row.Valid == 0 {
			continue
		}
		if err := e.Record(row); err != nil {
			return made, void, err
		}
	}
	return made, void, nil
}

// evidenceRow sums attempts at one task under one harness.
func evidenceRow(t env.TaskRef, s *harness.Spec, as []Attempt) router.Row {
	row := router.Row{Split: t.Split, TaskID: t.ID, TaskText: taskText(as), Group: t.Group, HarnessID: s.ID(), Causes: map[string]int{}}
	for i := range as {
		a := &as[i]
		if !a.Outcome.Valid() {
			continue
		}
		row.Valid++
		if a.Outcome.Success() {
			row.Success++
		}
		for _, cause := range a.Traj.Causes {
			row.Causes[cause]++
		}
		row.Turns += a.Traj.Turns
		for j := range a.Traj.Segments {
			row.Tokens += a.Traj.Segments[j].PolicyTokens()
		}
		row.PolicyVersion = max(row.PolicyVersion, a.PolicyVersion)
	}
	return row
}

func report(f func(Progress), p Progress) {
	if f != nil {
		f(p)
	}
}
