package trainer

import (
	"context"
	"errors"
	"fmt"

	"harness-s/env"
	"harness-s/env/harness"
	"harness-s/model"
	"harness-s/router"
)

// Group is one task's attempts in one step. Immutable once collected.
type Group struct {
	Step, Index   int
	Task          env.TaskRef
	Kind          GroupKind
	Base          []Attempt // under the original harness
	Rescue        []Attempt // replace Base for the update when present (R5)
	Choice        *choice   // of the router; nil in the other arms
	Substitutions []Substitution
	Drop          DropReason // why the group is not in the update, set by the step
}

// Substitution replaces a harness that could not run.
type Substitution struct {
	Index    int    `json:"index"`
	From, To string // harness ids
	Cause    string `json:"cause"`
}

// Members are the attempts the update sees.
func (g *Group) Members() []Attempt {
	if g.Rescue != nil {
		return g.Rescue
	}
	return g.Base
}

// choice is a full ranking of the auxiliaries for one task, best first.
type choice struct {
	order    []*harness.Spec
	decision *router.Decision
}

// chooser ranks auxiliaries from frozen evidence.
type chooser interface {
	choose(ctx context.Context, task env.TaskRef, text string, step int) (*choice, error)
}

// collector turns tasks into groups. Weights and evidence are frozen while it
// works (R14, R24).
type collector struct {
	r       *rollouts
	mode    string // off, retry, siblings
	chooser chooser
	step    int
	noted   func(o order, a *Attempt) // each finished attempt, from any goroutine; may be nil
	rescues func(attempts int)        // each rescue that begins, from any goroutine; may be nil
}

func (c *collector) sampling() model.Sampling {
	r := c.r.cfg.Rollout
	return model.Sampling{Temperature: float32(r.Temperature), TopP: float32(r.TopP), TopK: r.TopK}
}

// collect runs all groups side by side: a rescue starts the moment its own
// group's last base attempt is classified, whatever the others do. Groups come
// back in task order.
func (c *collector) collect(ctx context.Context, tasks []env.TaskRef) ([]*Group, error) {
	groups := make([]*Group, len(tasks))
	err := each(ctx, len(tasks), func(ctx context.Context, i int) (err error) {
		groups[i], err = c.group(ctx, i, tasks[i])
		return err
	})
	if err != nil {
		return nil, err
	}
	return groups, checkGroups(groups, c.r.cfg, c.r.d.Pool.Original(), c.mode)
}

// group is method.md 3.2 for one task: base attempts, all of them (R12), then at
// most one rescue (R13).
func (c *collector) group(ctx context.Context, index int, task env.TaskRef) (*Group, error) {
	g := &Group{Step: c.step, Index: index, Task: task}
	h0 := c.r.d.Pool.Original()
	n := c.r.cfg.Rollout.Group
	var err error
	g.Base, err = c.attempts(ctx, repeat(h0, n), c.order(task, KindAttempt, phaseBase, n))
	if err != nil {
		return nil, err
	}
	g.Kind = Classify(membersOf(g.Base), n)
	if g.Kind != AllFail || c.mode == "off" {
		return g, nil
	}
	k := c.r.cfg.Rescue.Attempts
	if c.rescues != nil {
		c.rescues(k)
	}
	if c.mode == "retry" {
		g.Rescue, err = c.attempts(ctx, repeat(h0, k), c.order(task, KindRescue, phaseRetry, k))
	} else {
		err = c.siblings(ctx, g, k)
	}
	if err != nil {
		return nil, err
	}
	g.Kind = ClassifyRescue(membersOf(g.Rescue), c.r.cfg.Rescue.MinGroup)
	return g, nil
}

func (c *collector) order(task env.TaskRef, k Kind, phase string, share int) order {
	return order{task: task, kind: k, phase: phase, step: c.step, share: share, seed: c.r.cfg.Run.Seed, sampling: c.sampling()}
}

// siblings runs one fresh attempt under each of k distinct auxiliaries. A harness
// that cannot run is replaced by the next of the ranking that was not used,
// within the budget of the group and in order of attempts, so that completion
// order cannot matter.
func (c *collector) siblings(ctx context.Context, g *Group, k int) error {
	pick, err := c.chooser.choose(ctx, g.Task, taskText(g.Base), c.step)
	if err != nil {
		return fmt.Errorf("choose harnesses for task %s: %w", g.Task.ID, err)
	}
	if len(pick.order) < k {
		return fmt.Errorf("choose harnesses for task %s: %d ranked, %d needed", g.Task.ID, len(pick.order), k)
	}
	g.Choice = pick
	o := c.order(g.Task, KindRescue, phaseRescue, 1)
	o.faultOnce = true
	if g.Rescue, err = c.attempts(ctx, pick.order[:k], o); err != nil {
		return err
	}
	next, budget := k, c.r.cfg.Rescue.Substitutions
	for budget > 0 && next < len(pick.order) {
		var at []int
		var specs []*harness.Spec
		for i := range g.Rescue {
			if g.Rescue[i].Outcome.Class() == env.ClassHarnessFault && budget > 0 && next < len(pick.order) {
				at, specs = append(at, i), append(specs, pick.order[next])
				next, budget = next+1, budget-1
			}
		}
		if len(at) == 0 {
			return nil
		}
		err := each(ctx, len(at), func(ctx context.Context, j int) error {
			o := o
			o.index, o.spec = at[j], specs[j]
			a, err := c.r.run(ctx, o)
			if err != nil {
				return err
			}
			c.note(o, &a)
			old := g.Rescue[at[j]]
			a.Voids = append(append(old.Voids[:len(old.Voids):len(old.Voids)], Void{Class: old.Outcome.Class().String(), Cause: old.Traj.FaultReason}), a.Voids...)
			g.Rescue[at[j]] = a
			return nil
		})
		if err != nil {
			return err
		}
		for j, i := range at {
			v := g.Rescue[i].Voids
			g.Substitutions = append(g.Substitutions, Substitution{Index: i, From: fromSpec(g, pick, i), To: specs[j].ID(), Cause: v[0].Cause})
		}
	}
	return nil
}

// fromSpec is the harness attempt i was last given before a substitution.
func fromSpec(g *Group, pick *choice, i int) string {
	for j := len(g.Substitutions) - 1; j >= 0; j-- {
		if g.Substitutions[j].Index == i {
			return g.Substitutions[j].To
		}
	}
	return pick.order[i].ID()
}

// attempts runs one attempt per spec from the initial state.
func (c *collector) attempts(ctx context.Context, specs []*harness.Spec, o order) ([]Attempt, error) {
	as := make([]Attempt, len(specs))
	err := each(ctx, len(specs), func(ctx context.Context, i int) error {
		o := o
		o.index, o.spec = i, specs[i]
		a, err := c.r.run(ctx, o)
		if err != nil {
			return err
		}
		c.note(o, &a)
		as[i] = a
		return nil
	})
	return as, err
}

func (c *collector) note(o order, a *Attempt) {
	if c.noted != nil {
		c.noted(o, a)
	}
}

func repeat(s *harness.Spec, n int) []*harness.Spec {
	out := make([]*harness.Spec, n)
	for i := range out {
		out[i] = s
	}
	return out
}

// taskText is the task as any attempt saw it.
func taskText(as []Attempt) string {
	for i := range as {
		if as[i].Text != "" {
			return as[i].Text
		}
	}
	return ""
}

// checkGroups asserts the invariants of method.md 3.11. A violation is our own
// mistake or an environment that leaks state, and ends the run.
func checkGroups(groups []*Group, cfg Config, h0 *harness.Spec, mode string) error {
	var errs []error
	bad := func(g *Group, format string, args ...any) {
		errs = append(errs, fmt.Errorf("check group of task %s in step %d: %s", g.Task.ID, g.Step, fmt.Sprintf(format, args...)))
	}
	for _, g := range groups {
		if len(g.Base) != cfg.Rollout.Group {
			bad(g, "%d base attempts, not %d", len(g.Base), cfg.Rollout.Group)
		}
		if (g.Kind == Kept || g.Kind == Incomplete || g.Kind == AllFail) == (g.Rescue != nil) {
			bad(g, "kind %s with %d rescue attempts", g.Kind, len(g.Rescue))
		}
		if g.Kind == AllFail && mode != "off" {
			bad(g, "all attempts failed and none was rescued")
		}
		digest, version := "", uint64(0)
		used := map[string]bool{}
		for i := range len(g.Base) + len(g.Rescue) {
			a := &g.Base[min(i, len(g.Base)-1)]
			if i >= len(g.Base) {
				a = &g.Rescue[i-len(g.Base)]
				if id := a.Spec.ID(); mode == "siblings" && (used[id] || id == h0.ID()) {
					bad(g, "rescue harness %s is the original or used twice", a.Spec.Name)
				} else {
					used[id] = true
				}
			} else if a.Spec.ID() != h0.ID() {
				bad(g, "base attempt under %s", a.Spec.Name)
			}
			if i == 0 {
				version = a.PolicyVersion
			}
			if a.PolicyVersion != version {
				bad(g, "attempts of policy versions %d and %d", version, a.PolicyVersion)
			}
			if !a.Outcome.Valid() {
				continue
			}
			if d := a.Traj.InitDigest; digest == "" {
				digest = d
			} else if d != "" && d != digest {
				bad(g, "%s attempt %d under %s started from state %.12s, others from %.12s: the environment leaks state",
					a.Phase, a.Index, a.Spec.Name, d, digest)
			}
		}
	}
	return errors.Join(errs...)
}
