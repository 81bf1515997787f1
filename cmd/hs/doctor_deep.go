package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"

	"harness-s/kernels"
	"harness-s/model"
	"harness-s/trainer"
)

// tapeBound is the relative difference of a parameter's gradient that D06 accepts between the executor and TapeMachine, which sum in
// another order in float32.
const tapeBound = 1e-3

// checkTape compares log-probs and every gradient of the shipped tiny model, through planner and executor, with gorgonia's TapeMachine.
func checkTape(dev *kernels.Device) (string, string, string) {
	const hint = "do not train with this build; run hs doctor --parity model/testdata/reference/edges"
	m, err := loadStored("", dev, model.LoadOptions{Train: true})
	if err != nil {
		return "FAIL", err.Error(), advice(err)
	}
	defer m.Close()
	const rows, length = 2, 24
	b := &model.Batch{IDs: randomIDs(rand.New(rand.NewPCG(1, 6)), rows*length, int(m.ValidVocab()))}
	for r := range rows {
		b.Segments = append(b.Segments, model.Segment{Len: length, Parent: -1})
		for i := range length - 1 {
			at := r*length + i
			b.Rows, b.Targets = append(b.Rows, int32(at)), append(b.Targets, b.IDs[at+1])
		}
	}
	x, err := model.NewExec(m, model.ExecOptions{Temperature: 1, MaxRows: len(b.IDs), MaxTargets: len(b.Rows)})
	if err != nil {
		return "FAIL", err.Error(), advice(err)
	}
	defer x.Close()
	out, err := x.Forward(b)
	if err != nil {
		return "FAIL", err.Error(), advice(err)
	}
	coef := make([]float32, len(b.Rows))
	for i := range coef {
		coef[i] = -1 / float32(len(coef))
	}
	logp := append([]float32(nil), out.LogProb...)
	if err := x.Backward(coef, nil); err != nil {
		return "FAIL", err.Error(), advice(err)
	}
	tapeLogp, grads, err := model.TapeRun(m, b, coef)
	if err != nil {
		return "FAIL", err.Error(), advice(err)
	}
	gap, worst, name := model.MaxAbsDiff(logp, tapeLogp), 0.0, ""
	for _, e := range m.Params.Entries() {
		got, err := m.Params.ReadF32(model.Grads, e.Name)
		if err != nil {
			return "FAIL", err.Error(), advice(err)
		}
		if d := model.RelNorm(got, grads[e.Name]); !(d <= worst) && !math.IsNaN(worst) { // NaN stays
			worst, name = d, e.Name
		}
	}
	fact := fmt.Sprintf("executor against TapeMachine: log-probs differ by %.1e at most, gradients by %.1e of their norm (%s)", gap, worst, name)
	if !(gap <= tapeBound && worst <= tapeBound) {
		return "FAIL", fact + fmt.Sprintf(", bound %.0e", tapeBound), hint
	}
	return "OK", fact, ""
}

// checkSums hashes every file of a checkpoint directory; those of the shipped checkpoint are checked at every start.
func checkSums(dir string) (string, string, string) {
	if dir == "" {
		return "OK", "the shipped checkpoint is checked at every start", ""
	}
	n, bytes, err := model.VerifySums(dir)
	switch {
	case errors.Is(err, model.ErrNoSums):
		return "SKIP", err.Error() + "; published checkpoints have none: nothing to compare with", ""
	case err != nil:
		return "FAIL", err.Error(), advice(err)
	}
	return "OK", fmt.Sprintf("%d files, %s, are what was written", n, gib(bytes)), ""
}

// checkGap samples from ten random prompts and recomputes the log-probs with the trainer's forward pass.
func checkGap(ctx context.Context, cfg trainer.Config, dev *kernels.Device) (string, string, string) {
	m, err := loadStored(cfg.Model.Path, dev, toRun(cfg))
	if err != nil {
		return "SKIP", "no sampler without a checkpoint, see D08", ""
	}
	defer m.Close()
	gap, err := samplerGap(ctx, m)
	if err != nil {
		return "FAIL", err.Error(), advice(err)
	}
	fact := fmt.Sprintf("log-probs of 10 x 16 sampled tokens differ from the trainer's by %.1e on average, %.1e at most", gap.mean, gap.max)
	switch {
	case !(gap.mean <= cfg.GRPO.GapStop):
		return "FAIL", fact + fmt.Sprintf("; training stops above grpo.gap_stop = %g", cfg.GRPO.GapStop), "run hs doctor --parity model/testdata/reference/edges: sampler or trainer computes something else"
	case gap.mean > cfg.GRPO.GapWarn:
		return "WARN", fact + fmt.Sprintf("; grpo.gap_warn = %g", cfg.GRPO.GapWarn), "run hs doctor --parity model/testdata/reference/edges"
	}
	return "OK", fact, ""
}

type logProbGap struct{ mean, max float64 }

func samplerGap(ctx context.Context, m *model.Model) (logProbGap, error) {
	const seqs, prompt, fresh = 10, 20, 16
	r, err := model.NewRunner(m, model.RunnerOptions{MaxSeqs: seqs, MaxTokens: seqs * (prompt + fresh + 16), MaxContext: prompt + fresh + 16, PageSize: 16, MaxRows: seqs * prompt})
	if err != nil {
		return logProbGap{}, err
	}
	defer r.Close()
	rng := rand.New(rand.NewPCG(1, 9))
	work := make([]model.Work, seqs)
	ids := make([][]int32, seqs)
	sampled := make([]float32, 0, seqs*fresh)
	for i := range work {
		id, err := r.Acquire()
		if err != nil {
			return logProbGap{}, err
		}
		ids[i] = randomIDs(rng, prompt, int(m.ValidVocab()))
		work[i] = model.Work{Seq: id, Append: ids[i], Sample: true, Sampling: model.Sampling{Temperature: 1}, Key: model.Key{Lo: uint64(i), Hi: 9}}
	}
	drawn := make([][]float32, seqs)
	for t := range fresh {
		got, err := r.Step(ctx, work)
		if err != nil {
			return logProbGap{}, err
		}
		for i, s := range got {
			ids[i], drawn[i] = append(ids[i], s.Token), append(drawn[i], s.LogProb)
			work[i].Append, work[i].Ctr = []int32{s.Token}, uint64(t+1)
		}
	}
	b := &model.Batch{}
	for i := range ids {
		base := len(b.IDs)
		b.IDs = append(b.IDs, ids[i]...)
		b.Segments = append(b.Segments, model.Segment{Len: prompt + fresh, Parent: -1})
		for t := range fresh {
			b.Rows, b.Targets = append(b.Rows, int32(base+prompt+t-1)), append(b.Targets, ids[i][prompt+t])
		}
		sampled = append(sampled, drawn[i]...)
	}
	x, err := model.NewExec(m, model.ExecOptions{Temperature: 1, MaxRows: len(b.IDs), MaxTargets: len(b.Rows)})
	if err != nil {
		return logProbGap{}, err
	}
	defer x.Close()
	out, err := x.Forward(b)
	if err != nil {
		return logProbGap{}, err
	}
	g := logProbGap{max: model.MaxAbsDiff(out.LogProb, sampled)}
	for i, lp := range out.LogProb {
		g.mean += math.Abs(float64(lp)-float64(sampled[i])) / float64(len(sampled))
	}
	return g, nil
}
