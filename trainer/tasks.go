package trainer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"math"
	"slices"

	"harness-s/env"
)

// taskOrder deals train tasks to steps. It has no state: the order of an epoch is
// keyed by seed and epoch, and step s takes places (s-1)*m .. s*m-1, so a resumed
// run goes on where it was and arms that are compared see the same tasks.
type taskOrder struct {
	tasks   []env.TaskRef
	weights []float64
	seed    uint64
	epoch   int
	perm    []int
}

// newTaskOrder lists the train split and weighs families; weight 0 leaves one out.
func newTaskOrder(ctx context.Context, e env.Env, c Config) (*taskOrder, error) {
	all, err := e.Tasks(ctx, env.Train)
	if err != nil {
		return nil, fmt.Errorf("list train tasks: %w", err)
	}
	t := &taskOrder{seed: c.Run.Seed, epoch: -1}
	known := map[string]bool{}
	for _, x := range all {
		known[x.Group] = true
		w, ok := c.Task.Families[x.Group]
		if !ok {
			w = 1
		}
		if w > 0 {
			t.tasks, t.weights = append(t.tasks, x), append(t.weights, w)
		}
	}
	var errs []error
	for f := range c.Task.Families {
		if !known[f] {
			errs = append(errs, fmt.Errorf("task.families.%s: the train split has no such family", f))
		}
	}
	if len(t.tasks) < c.Task.PerStep {
		errs = append(errs, fmt.Errorf("task.per_step = %d: only %d train tasks", c.Task.PerStep, len(t.tasks)))
	}
	if len(errs) > 0 {
		return nil, &Error{Op: "order tasks", Err: fmt.Errorf("%w: %w", ErrConfig, errors.Join(errs...))}
	}
	return t, nil
}

// step returns the m distinct tasks of a step (1-based). A step never spans two
// epochs: places left over at the end of an epoch are skipped, because one step
// must not hold a task twice.
func (t *taskOrder) step(step, m int) []env.TaskRef {
	per := len(t.tasks) / m
	epoch, at := (step-1)/per, (step-1)%per
	if epoch != t.epoch {
		t.epoch, t.perm = epoch, t.shuffle(epoch)
	}
	out := make([]env.TaskRef, m)
	for i := range out {
		out[i] = t.tasks[t.perm[at*m+i]]
	}
	return out
}

// shuffle orders by -ln(u)/w with a keyed uniform u per task: a weighted draw
// without replacement (Efraimidis and Spirakis 2006).
func (t *taskOrder) shuffle(epoch int) []int {
	perm, key := make([]int, len(t.tasks)), make([]float64, len(t.tasks))
	for i, x := range t.tasks {
		perm[i] = i
		key[i] = -math.Log(uniform(t.seed, "order", epoch, x.ID)) / t.weights[i]
	}
	slices.SortStableFunc(perm, func(a, b int) int {
		return cmp.Or(cmp.Compare(key[a], key[b]), cmp.Compare(t.tasks[a].ID, t.tasks[b].ID))
	})
	return perm
}

// uniform is a number in (0, 1) keyed by its arguments.
func uniform(seed uint64, use string, n int, id string) float64 {
	h := fnv.New64a()
	fmt.Fprintf(h, "%d|%s|%d|%q", seed, use, n, id)
	return (float64(mix64(h.Sum64())>>11) + 0.5) / (1 << 53)
}

// spread picks n tasks, taking turns over groups in order of first appearance, so
// that a few tasks still cover every family; 0 takes all, in the given order.
func spread(tasks []env.TaskRef, n, skip int) []env.TaskRef {
	if n == 0 || n >= len(tasks) {
		return tasks
	}
	var names []string
	by := map[string][]env.TaskRef{}
	for _, t := range tasks {
		if by[t.Group] == nil {
			names = append(names, t.Group)
		}
		by[t.Group] = append(by[t.Group], t)
	}
	var all []env.TaskRef
	for i := 0; len(all) < len(tasks); i++ {
		for _, g := range names {
			if i < len(by[g]) {
				all = append(all, by[g][i])
			}
		}
	}
	out := make([]env.TaskRef, n)
	for i := range out {
		out[i] = all[(skip+i)%len(all)]
	}
	return out
}
