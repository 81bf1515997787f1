package trainer

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"harness-s/env"
	"harness-s/env/harness"
	"harness-s/router"
)

// Test-time modes (method.md 4.2).
const (
	ModeOriginal = "original" // the original harness for every task
	ModeRouted   = "routed"   // per task the router's first choice out of the whole pool
)

// EvalOptions select what Evaluate runs.
type EvalOptions struct {
	Split       env.Split
	Mode        string // ModeOriginal or ModeRouted
	K           int
	Attempts    int // per task, at least K
	Tasks       int // first n tasks of the split, 0 = all
	Step        int // part of every random key: the training step, 0 for a bare checkpoint
	Temperature float64
	Resamples   int
	Seed        uint64
	Recorder    env.Recorder // needed for the test split: the run manifest
	Reason      string       // why the test split is opened
	Progress    func(Progress)
	Evidence    *router.View // what routed mode routes by: evidence/vNNN.json of a run
}

// EvalReport is one evaluation. Each score holds the strict value, in which a
// missing attempt is a failure, and the one over complete tasks.
type EvalReport struct {
	Step          int          `json:"step"`
	Split         env.Split    `json:"split"`
	Mode          string       `json:"mode"`
	K             int          `json:"k"`
	Attempts      int          `json:"attempts"` // per task
	Tasks         int          `json:"tasks"`
	Pass1         Score        `json:"pass1"`
	PassK         Score        `json:"passk"`
	ByGroup       []GroupScore `json:"by_group"`
	PolicyVersion uint64       `json:"policy_version"`
	TaskDigest    string       `json:"task_digest"` // sha256 over the task ids in order
	Unseal        string       `json:"unseal,omitempty"`
	Turns         float64      `json:"turns"`  // mean per attempt
	Tokens        float64      `json:"tokens"` // sampled, mean per attempt
	Seconds       float64      `json:"seconds"`
	Results       []TaskResult `json:"results,omitempty"`
}

// GroupScore is the part of a report on one task group.
type GroupScore struct {
	Group string  `json:"group"`
	Tasks int     `json:"tasks"`
	Pass1 float64 `json:"pass1"`
	PassK float64 `json:"passk"`
}

// brief is the report without the results of single tasks.
func (r *EvalReport) brief() *EvalReport {
	b := *r
	b.Results = nil
	return &b
}

// Evaluate runs a split under the frozen policy and scores it. Routed mode needs
// the evidence of a run.
func Evaluate(ctx context.Context, cfg Config, d *Deps, o EvalOptions) (*EvalReport, error) {
	o.Progress = serial(o.Progress)
	var rep *EvalReport
	err := withEngine(ctx, cfg, d, func(ctx context.Context, r *rollouts) (err error) {
		rep, err = evaluate(ctx, r, o)
		return err
	})
	return rep, err
}

// evaluate is Evaluate on a running engine.
func evaluate(ctx context.Context, r *rollouts, o EvalOptions) (*EvalReport, error) {
	start := time.Now()
	if o.K < 1 || o.Attempts < o.K {
		return nil, hinted("evaluate", "raise eval.attempts or lower eval.k", "pass@%d of %d attempts", o.K, o.Attempts)
	}
	tasks, seal, err := evalTasks(ctx, r.d.Env, o)
	if err != nil {
		return nil, err
	}
	tasks = spread(tasks, o.Tasks, 0)
	if len(tasks) == 0 {
		return nil, hinted("evaluate", "raise task.val or task.test", "the %s split has no tasks", o.Split)
	}
	rep := &EvalReport{
		Step: o.Step, Split: o.Split, Mode: o.Mode, K: o.K, Attempts: o.Attempts, Tasks: len(tasks),
		PolicyVersion: r.d.Policy.Version(), TaskDigest: digestTasks(tasks), Unseal: seal.ID(), Results: make([]TaskResult, len(tasks)),
	}
	c := &collector{r: r, step: o.Step}
	attempts := make([][]Attempt, len(tasks))
	var done atomic.Int64
	err = each(ctx, len(tasks), func(ctx context.Context, i int) error {
		ord := c.order(tasks[i], KindEval, phaseEval, o.Attempts)
		ord.seed, ord.sampling, ord.unsealed = o.Seed, evalSampling(o.Temperature), seal
		spec, err := evalHarness(ctx, r, o, ord)
		if err != nil {
			return err
		}
		if attempts[i], err = c.attempts(ctx, repeat(spec, o.Attempts), ord); err != nil {
			return err
		}
		rep.Results[i] = taskResult(tasks[i], o, spec, attempts[i])
		report(o.Progress, Progress{Phase: "eval", Done: int(done.Add(1)), Total: len(tasks)})
		return nil
	})
	if err != nil {
		return nil, err
	}
	if rep.Pass1, err = ScoreTasks(rep.Results, 1, o.Resamples, o.Seed); err != nil {
		return nil, err
	}
	if rep.PassK, err = ScoreTasks(rep.Results, o.K, o.Resamples, o.Seed); err != nil {
		return nil, err
	}
	rep.ByGroup = byGroup(rep.Results, o.K)
	n := 0.0
	for _, as := range attempts {
		for i := range as {
			n++
			rep.Turns += float64(as[i].Traj.Turns)
			for j := range as[i].Traj.Segments {
				rep.Tokens += float64(as[i].Traj.Segments[j].PolicyTokens())
			}
		}
	}
	rep.Turns, rep.Tokens = rep.Turns/n, rep.Tokens/n
	rep.Seconds = since(start)
	return rep, nil
}

// evalTasks lists a split. This is the only place that opens the test split.
func evalTasks(ctx context.Context, e env.Env, o EvalOptions) ([]env.TaskRef, env.Unsealed, error) {
	if o.Split != env.Test {
		tasks, err := e.Tasks(ctx, o.Split)
		return tasks, env.Unsealed{}, err
	}
	if o.Recorder == nil {
		return nil, env.Unsealed{}, hinted("evaluate", "give the evaluation a run directory: its manifest records the unsealing", "the test split needs a recorder")
	}
	seal, err := env.Unseal(o.Reason, o.Recorder, e.Info())
	if err != nil {
		return nil, env.Unsealed{}, err
	}
	tasks, err := e.TestTasks(ctx, seal)
	return tasks, seal, err
}

// evalHarness is the harness of all attempts at a task, fixed before the first of
// them. Routing reads the task's text from an attempt that is opened for that and
// closed again.
func evalHarness(ctx context.Context, r *rollouts, o EvalOptions, ord order) (*harness.Spec, error) {
	if o.Mode != ModeRouted {
		return r.d.Pool.Original(), nil
	}
	if o.Evidence == nil {
		return nil, hinted("evaluate", "name the run whose evidence routes: hs eval --run NAME, or use --mode original", "routed mode without evidence")
	}
	ord.spec = r.d.Pool.Original()
	e := &episode{r: r, o: ord, live: r.watch.add(ord), left: r.cfg.Rollout.EpisodeDeadline.D()}
	defer r.watch.remove(e.live)
	if err := r.slots.acquire(ctx, KindEval); err != nil {
		return nil, err
	}
	defer r.slots.release()
	err := e.open(ctx, -1)
	if e.att != nil {
		defer e.close(ctx)
	}
	if err != nil {
		return nil, fmt.Errorf("read text of task %s: %w", ord.task.ID, err)
	}
	rt := &routing{router: newRouter(r.cfg, r.d.Pool), view: o.Evidence, pool: r.d.Pool, run: r.cfg.Run.Name, version: r.d.Policy.Version()}
	pick, err := rt.first(ctx, ord.task, e.text, o.Step)
	if err != nil {
		return nil, err
	}
	return pick.order[0], nil
}

func taskResult(t env.TaskRef, o EvalOptions, spec *harness.Spec, as []Attempt) TaskResult {
	res := TaskResult{Task: t.ID, Group: t.Group, Asked: o.Attempts, Mode: o.Mode, Harness: spec.Name}
	for i := range as {
		if !as[i].Outcome.Valid() {
			continue
		}
		res.Valid++
		res.Attempts = append(res.Attempts, as[i].Outcome.Success())
		if as[i].Outcome.Success() {
			res.Success++
		}
	}
	return res
}

// byGroup averages the strict scores per task group, in order of name.
func byGroup(ts []TaskResult, k int) []GroupScore {
	at := map[string]int{}
	var out []GroupScore
	for _, t := range ts {
		i, ok := at[t.Group]
		if !ok {
			i = len(out)
			at[t.Group] = i
			out = append(out, GroupScore{Group: t.Group})
		}
		out[i].Tasks++
		out[i].Pass1 += t.Pass(1)
		out[i].PassK += t.Pass(k)
	}
	for i := range out {
		out[i].Pass1 /= float64(out[i].Tasks)
		out[i].PassK /= float64(out[i].Tasks)
	}
	slices.SortFunc(out, func(a, b GroupScore) int { return strings.Compare(a.Group, b.Group) })
	return out
}

func digestTasks(ts []env.TaskRef) string {
	h := sha256.New()
	for _, t := range ts {
		fmt.Fprintln(h, t.ID)
	}
	return hex.EncodeToString(h.Sum(nil))
}
