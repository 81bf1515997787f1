package trainer

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"harness-s/env"
	"harness-s/env/harness"
	"harness-s/model"
	"harness-s/model/chat"
)

// SFTOptions are what RunSFT needs beyond the configuration.
type SFTOptions struct {
	Out      string            // directory of the trained model, Hugging Face layout; empty = not saved
	Save     model.SaveOptions // how Out is written
	HeldOut  int               // demonstrations kept aside for the held-out loss, 0 = 64
	Step     func(SFTStep)
	Progress func(Progress)
}

// SFTStep is one optimiser step of the warm start.
type SFTStep struct {
	Step     int     `json:"step"`
	Steps    int     `json:"steps"`
	Loss     float64 `json:"loss"`               // mean negative log-likelihood of the batch's policy tokens, nats
	HeldOut  float64 `json:"held_out,omitempty"` // same on the held-out demonstrations; 0 = not measured in this step
	LR       float64 `json:"lr"`
	GradNorm float64 `json:"grad_norm"`
	Tokens   int     `json:"tokens"` // policy tokens
	Rows     int     `json:"rows"`   // rows computed, prompts included
	Seconds  float64 `json:"seconds"`
}

// SFTReport is the result of a warm start; the JSON keys are stable.
type SFTReport struct {
	Steps         int            `json:"steps"`
	Demos         int            `json:"demos"`
	DemosBy       map[string]int `json:"demos_by"`     // original, matched or other auxiliary / style
	DemosFailed   int            `json:"demos_failed"` // scripts that did not end as meant; left out
	Loss          float64        `json:"loss"`         // of the last step
	HeldOutBefore float64        `json:"held_out_before"`
	HeldOut       float64        `json:"held_out"`
	Tokens        int            `json:"tokens"` // policy tokens trained on, repeats included
	Seconds       float64        `json:"seconds"`
	WeightsSHA256 string         `json:"weights_sha256"`
	Out           string         `json:"out,omitempty"`
}

// heldOutEvery is the number of steps between held-out losses.
const heldOutEvery = 100

// Styles of a demonstration (env.Demonstrator).
const (
	styleGood    = "good"
	styleSloppy  = "sloppy"
	styleRecover = "recover"
)

// demo is one planned demonstration.
type demo struct {
	task  env.TaskRef
	spec  *harness.Spec
	style string
	kind  string // original, matched, other
}

// planDemos decides harness and style of every demonstration; a pure function of
// its arguments. Easy tasks, which have no cause, are always shown well. Hard
// ones are shown well often under an auxiliary that addresses their cause and
// seldom otherwise: that is what makes auxiliaries worth asking.
func planDemos(c SFTConfig, tasks []env.TaskRef, pool *harness.Pool) []demo {
	plan := make([]demo, c.Tasks)
	aux := pool.Specs[1:]
	for i := range plan {
		t := tasks[i%len(tasks)]
		draw := func(what string) float64 { return uniform(c.Seed, "demo/"+what, i, t.ID) }
		causes := causesOf(t)
		d := demo{task: t, spec: pool.Original(), kind: "original"}
		good := c.GoodOriginal
		if draw("original") >= c.Original && len(aux) > 0 {
			d.kind, good = "other", c.GoodUnmatched
			matched := slices.DeleteFunc(slices.Clone(aux), func(s *harness.Spec) bool { return !meets(s.Causes, causes) })
			other := slices.DeleteFunc(slices.Clone(aux), func(s *harness.Spec) bool { return meets(s.Causes, causes) })
			from := other
			if len(matched) > 0 && (draw("matched") < c.Matched || len(other) == 0) {
				d.kind, good, from = "matched", c.GoodMatched, matched
			}
			d.spec = from[int(draw("harness")*float64(len(from)))]
		}
		switch {
		case len(causes) == 0:
			d.style = styleGood
		case draw("good") >= good:
			d.style = styleSloppy
		case d.kind == "matched" && (remindsOnly(d.spec) || draw("recover") < c.Recover):
			d.style = styleRecover
		default:
			d.style = styleGood
		}
		plan[i] = d
	}
	return plan
}

// causesOf lists the failure causes a task is made for.
func causesOf(t env.TaskRef) []string {
	return strings.FieldsFunc(t.Tags["causes"], func(r rune) bool { return r == ',' || r == ' ' })
}

func meets(a, b []string) bool {
	return slices.ContainsFunc(a, func(s string) bool { return slices.Contains(b, s) })
}

// remindsOnly reports whether a harness speaks up only after something was done,
// so that following it means to recover.
func remindsOnly(s *harness.Spec) bool {
	late := false
	for _, e := range s.Edits {
		for _, op := range e.Ops {
			switch op.Slot {
			case "system", "tool_doc", "demo":
				return false
			case "reminder":
				if op.Place == "initial" {
					return false
				}
				late = true
			case "guard", "observation":
				late = true
			}
		}
	}
	return late
}

// stage is what scripted episodes need.
type stage struct {
	cfg      Config
	env      env.Env
	demos    env.Demonstrator
	tokens   Tokens
	renderer chat.Renderer
	stop     []int32
}

func newStage(cfg Config, e env.Env, t Tokens, r chat.Renderer, stop []int32) (*stage, error) {
	ds, ok := e.(env.Demonstrator)
	if !ok {
		return nil, hinted("make demonstrations", "use the embedded world of an environment", "environment %s offers no demonstrations", e.Info().Name)
	}
	return &stage{cfg: cfg, env: e, demos: ds, tokens: t, renderer: r, stop: stop}, nil
}

// perform plays the plan through ordinary episodes, so that ledger and mask are
// those of reinforcement learning. Results are in the order of the plan; a script
// that did not end as meant gives nil.
func (s *stage) perform(ctx context.Context, plan []demo, progress func(Progress)) ([]*harness.Trajectory, error) {
	out := make([]*harness.Trajectory, len(plan))
	var next, done atomic.Int64
	err := each(ctx, runtime.GOMAXPROCS(0), func(ctx context.Context, _ int) error {
		for {
			i := int(next.Add(1)) - 1
			if i >= len(plan) {
				return nil
			}
			t, err := s.play(ctx, plan[i], i)
			if err != nil {
				return fmt.Errorf("demonstration %d (%s under %s, %s): %w", i, plan[i].task.ID, plan[i].spec.Name, plan[i].style, err)
			}
			out[i] = t
			report(progress, Progress{Phase: "demos", Done: int(done.Add(1)), Total: len(plan)})
		}
	})
	return out, err
}

// play runs one demonstration. An episode that ends other than its script means
// is no error: it gives nil.
func (s *stage) play(ctx context.Context, d demo, index int) (_ *harness.Trajectory, err error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	scripts, err := s.demos.Demos(d.task, d.style)
	if err != nil {
		return nil, err
	}
	if len(scripts) == 0 {
		return nil, nil
	}
	c := s.cfg.Rollout
	att, err := s.env.Open(ctx, d.task, env.OpenOptions{
		AttemptID: fmt.Sprintf("hsdemo%dx%d", os.Getpid(), index), MaxSteps: c.MaxTurns,
		StepTimeout: c.StepTimeout.D(), EpisodeTimeout: c.EpisodeDeadline.D(), Seed: s.cfg.SFT.Seed,
	})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, att.Close(context.WithoutCancel(ctx))) }()
	ep, err := harness.NewEpisode(harness.Config{
		Spec: d.spec, Attempt: att, Task: d.task, Encoder: s.tokens, Decode: s.tokens.Decode, Renderer: s.renderer, Stop: s.stop,
		MaxTurns: c.MaxTurns, MaxNew: max(c.MaxNew, 1), MaxContext: s.cfg.Model.MaxLen, StepTimeout: c.StepTimeout.D(),
	})
	if err != nil {
		return nil, err
	}
	turns := make([]string, len(scripts[0].Turns))
	for i, t := range scripts[0].Turns {
		turns[i] = t.Text
	}
	t, err := harness.RunScripted(ctx, ep, turns, s.tokens)
	switch {
	case ctx.Err() != nil:
		return nil, context.Cause(ctx)
	case err != nil: // the script does not fit this harness
		return nil, nil
	case t.Outcome == env.InfraVoid:
		return nil, &env.InfraError{Phase: "step", Err: errors.New(t.FaultReason)}
	case !t.Outcome.Valid(), scripts[0].Good && !t.Outcome.Success():
		return nil, nil
	}
	return &t, nil
}

// RunSFT trains the policy on scripted episodes of train tasks: the same program
// as an RL update with constant coefficients.
func RunSFT(ctx context.Context, cfg Config, d *Deps, o SFTOptions) (*SFTReport, error) {
	start := time.Now()
	if d.Learner == nil {
		return nil, &Error{Op: "start warm start", Err: errors.New("no executor"), Hint: "assemble with Train"}
	}
	size := d.Policy.ExportBytes()
	if o.Out != "" {
		if err := CheckOutput(o.Out, size); err != nil {
			return nil, err
		}
	}
	st, err := newStage(cfg, d.Env, d.Tokens, d.Renderer, d.Stop)
	if err != nil {
		return nil, err
	}
	tasks, err := demoTasks(ctx, cfg, d.Env)
	if err != nil {
		return nil, err
	}
	plan := planDemos(cfg.SFT, tasks, d.Pool)
	shown, err := st.perform(ctx, plan, serial(o.Progress))
	if err != nil {
		return nil, err
	}
	rep := &SFTReport{Steps: cfg.SFT.Steps, DemosBy: map[string]int{}, Out: o.Out}
	var units [][]sequence
	for i, t := range shown {
		if t == nil {
			rep.DemosFailed++
			continue
		}
		rep.Demos++
		rep.DemosBy[plan[i].kind+"/"+plan[i].style]++
		seqs, _ := sequencesOf(t.Segments, 0)
		units = append(units, seqs)
	}
	held := o.HeldOut
	if held == 0 {
		held = 64
	}
	if len(units) <= held || len(units)-held < cfg.SFT.Batch {
		return nil, hinted("start warm start", "raise sft.tasks or lower sft.batch", "%d usable demonstrations, %d are held out and a step takes %d", len(units), held, cfg.SFT.Batch)
	}
	s := &sft{cfg: cfg, d: d, train: units[:len(units)-held], held: units[len(units)-held:]}
	if err := d.training(func() error { return s.run(ctx, rep, o.Step) }); err != nil {
		return nil, err
	}
	if o.Out != "" {
		err := persist(ctx, cfg.Run.PauseLimit, nil, func(text string) { d.logger().Warn(text) }, func() error {
			return diskError("save model", o.Out, size, d.Policy.Export(o.Out, o.Save))
		})
		if err != nil {
			return nil, err
		}
	}
	rep.WeightsSHA256, err = d.Policy.SHA256()
	rep.Seconds = since(start)
	return rep, err
}

// demoTasks lists train tasks in the order of the first epoch of a run.
func demoTasks(ctx context.Context, cfg Config, e env.Env) ([]env.TaskRef, error) {
	c := cfg
	c.Task.PerStep, c.Run.Seed = 1, cfg.SFT.Seed
	order, err := newTaskOrder(ctx, e, c)
	if err != nil {
		return nil, err
	}
	return order.step(1, len(order.tasks)), nil
}

// sft is the state of a warm start.
type sft struct {
	cfg         Config
	d           *Deps
	train, held [][]sequence
	epoch       int // whose order perm is, 1-based
	perm        []int
}

// run makes every step and fills rep.
func (s *sft) run(ctx context.Context, rep *SFTReport, report func(SFTStep)) (err error) {
	if rep.HeldOutBefore, err = s.heldOut(ctx); err != nil {
		return err
	}
	for step := 1; step <= s.cfg.SFT.Steps; step++ {
		r, err := s.step(ctx, step)
		if err != nil {
			return fmt.Errorf("step %d: %w", step, err)
		}
		if step == s.cfg.SFT.Steps || step%heldOutEvery == 0 {
			if r.HeldOut, err = s.heldOut(ctx); err != nil {
				return err
			}
			rep.HeldOut = r.HeldOut
		}
		rep.Loss, rep.Tokens = r.Loss, rep.Tokens+r.Tokens
		if report != nil {
			report(r)
		}
	}
	return nil
}

// batch is the demonstrations of a step (1-based): consecutive places of keyed
// epoch orders.
func (s *sft) batch(step int) [][]sequence {
	n, per := s.cfg.SFT.Batch, len(s.train)/s.cfg.SFT.Batch
	epoch, at := (step-1)/per+1, (step-1)%per
	if epoch != s.epoch {
		s.epoch, s.perm = epoch, make([]int, len(s.train))
		key := make([]float64, len(s.train))
		for i := range s.perm {
			s.perm[i], key[i] = i, uniform(s.cfg.SFT.Seed, "sft", epoch, fmt.Sprint(i))
		}
		slices.SortFunc(s.perm, func(a, b int) int {
			if key[a] < key[b] {
				return -1
			}
			return 1
		})
	}
	out := make([][]sequence, n)
	for i := range out {
		out[i] = s.train[s.perm[at*n+i]]
	}
	return out
}

// packUnits numbers the trajectories anew and packs them.
func (s *sft) packUnits(units [][]sequence) (bs []*microbatch, tokens int, err error) {
	own := make([][]sequence, len(units))
	for i, u := range units {
		own[i] = slices.Clone(u)
		for j := range own[i] {
			own[i][j].traj = i
			tokens += len(own[i][j].pos)
		}
	}
	bs, err = pack(own, s.d.limits())
	return bs, tokens, err
}

// step makes one optimiser step on the mean negative log-likelihood.
func (s *sft) step(ctx context.Context, step int) (SFTStep, error) {
	start := time.Now()
	c, x := s.cfg.SFT, s.d.Learner
	r := SFTStep{Step: step, Steps: c.Steps, LR: learningRate(OptimConfig{LR: c.LR, Warmup: c.Warmup, Schedule: "cosine"}, step, c.Steps)}
	bs, tokens, err := s.packUnits(s.batch(step))
	if err != nil {
		return r, err
	}
	r.Tokens = tokens
	if err := x.ZeroGrad(); err != nil {
		return r, &EngineError{err}
	}
	for _, b := range bs {
		if ctx.Err() != nil {
			return r, context.Cause(ctx)
		}
		out, err := x.Forward(&b.Batch)
		if err != nil {
			return r, &EngineError{err}
		}
		coef := make([]float32, len(out.LogProb))
		for i, lp := range out.LogProb {
			r.Loss -= float64(lp) / float64(tokens)
			coef[i] = SFTCoefficient(tokens)
		}
		if err := x.Backward(coef, nil); err != nil {
			return r, &EngineError{err}
		}
		r.Rows += len(b.IDs)
	}
	if math.IsNaN(r.Loss) || math.IsInf(r.Loss, 0) {
		return r, fmt.Errorf("%w: loss is %v", ErrGate, r.Loss)
	}
	if r.GradNorm, err = x.GradNorm(); err != nil {
		return r, &EngineError{err}
	}
	if err := checkGradient(r.GradNorm, tokens); err != nil {
		return r, err
	}
	o := s.cfg.Optim
	err = x.Step(model.Hyper{LR: r.LR, Beta1: o.Betas[0], Beta2: o.Betas[1], Eps: o.Eps, Decay: o.WeightDecay, ClipNorm: o.Clip, GradNorm: r.GradNorm})
	if err != nil {
		return r, &EngineError{err}
	}
	r.Seconds = since(start)
	return r, nil
}

// heldOut is the mean negative log-likelihood of the held-out demonstrations.
func (s *sft) heldOut(ctx context.Context) (float64, error) {
	bs, tokens, err := s.packUnits(s.held)
	if err != nil {
		return 0, err
	}
	sum := 0.0
	for _, b := range bs {
		if ctx.Err() != nil {
			return 0, context.Cause(ctx)
		}
		out, err := s.d.Learner.Forward(&b.Batch)
		if err != nil {
			return 0, &EngineError{err}
		}
		for _, lp := range out.LogProb {
			sum -= float64(lp)
		}
	}
	return sum / float64(tokens), nil
}
