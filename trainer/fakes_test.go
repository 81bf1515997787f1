package trainer

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"harness-s/env"
	"harness-s/env/harness"
	"harness-s/model"
	"harness-s/model/chat"
)

// fakeRunner is a runner without a model: pages and slots are counted as the real
// one does, and pick draws the tokens.
type fakeRunner struct {
	pick     func(ctx []int32, w model.Work) int32
	fail     func(step int) error
	delay    time.Duration // of one step
	pageSize int
	seqs     map[model.SeqID]*fakeSeq
	maxSeqs  int
	free     []int
	refs     []int
	steps    int
	rows     int
	busy     atomic.Bool
}

type fakeSeq struct {
	ids    []int32
	pieces []int // lengths of the pieces fed
	pages  []int
}

func newFakeRunner(maxSeqs, tokens int, pick func([]int32, model.Work) int32) *fakeRunner {
	r := &fakeRunner{pick: pick, pageSize: 16, maxSeqs: maxSeqs, seqs: map[model.SeqID]*fakeSeq{}}
	for i := range tokens / 16 {
		r.free = append(r.free, i)
	}
	r.refs = make([]int, tokens/16)
	return r
}

func (r *fakeRunner) Acquire() (model.SeqID, error) {
	for id := model.SeqID(0); int(id) < r.maxSeqs; id++ {
		if r.seqs[id] == nil {
			r.seqs[id] = &fakeSeq{}
			return id, nil
		}
	}
	return 0, model.ErrNoSlot
}

func (r *fakeRunner) page() int {
	p := r.free[len(r.free)-1]
	r.free = r.free[:len(r.free)-1]
	r.refs[p] = 1
	return p
}

func (r *fakeRunner) Fork(src model.SeqID) (model.SeqID, error) {
	s := r.seqs[src]
	partial := len(s.ids)%r.pageSize != 0
	if partial && len(r.free) == 0 {
		return 0, model.ErrNoPages
	}
	id, err := r.Acquire()
	if err != nil {
		return 0, err
	}
	d := r.seqs[id]
	d.ids, d.pieces, d.pages = append(d.ids, s.ids...), append(d.pieces, s.pieces...), append(d.pages, s.pages...)
	for _, p := range d.pages {
		r.refs[p]++
	}
	if partial {
		r.refs[d.pages[len(d.pages)-1]]--
		d.pages[len(d.pages)-1] = r.page()
	}
	return id, nil
}

func (r *fakeRunner) Release(id model.SeqID) error {
	s := r.seqs[id]
	if s == nil {
		return fmt.Errorf("release %d: not live", id)
	}
	for _, p := range s.pages {
		if r.refs[p]--; r.refs[p] == 0 {
			r.free = append(r.free, p)
		}
	}
	delete(r.seqs, id)
	return nil
}

func (r *fakeRunner) Len(id model.SeqID) int { return len(r.seqs[id].ids) }
func (r *fakeRunner) FreePages() int         { return len(r.free) }
func (r *fakeRunner) PagesFor(n int) int     { return (n + r.pageSize - 1) / r.pageSize }

func (r *fakeRunner) Reset() error {
	for id := range r.seqs {
		if err := r.Release(id); err != nil {
			return err
		}
	}
	return nil
}

func (r *fakeRunner) Step(_ context.Context, work []model.Work) ([]model.Sampled, error) {
	runtime.Gosched() // a real step takes time in which others submit work
	if !r.busy.CompareAndSwap(false, true) {
		return nil, errors.New("two goroutines use the runner")
	}
	defer r.busy.Store(false)
	r.steps++
	if r.fail != nil {
		if err := r.fail(r.steps); err != nil {
			return nil, err
		}
	}
	if r.delay > 0 {
		time.Sleep(r.delay) // virtual: only inside synctest
	}
	out := make([]model.Sampled, len(work))
	for i, w := range work {
		s := r.seqs[w.Seq]
		if s == nil || len(w.Append) == 0 {
			return nil, fmt.Errorf("work %d: sequence %d, %d tokens", i, w.Seq, len(w.Append))
		}
		s.ids, s.pieces = append(s.ids, w.Append...), append(s.pieces, len(w.Append))
		r.rows += len(w.Append)
		for len(s.pages) < r.PagesFor(len(s.ids)) {
			if len(r.free) == 0 {
				return nil, model.ErrNoPages
			}
			s.pages = append(s.pages, r.page())
		}
		if w.Sample {
			out[i].Token = r.pick(s.ids, w)
			out[i].LogProb = fakeLogProb(out[i].Token)
		}
	}
	return out, nil
}

// aheadFake is a fakeRunner that takes steps ahead: what a step drew is shown only
// by Wait, and steps are waited for in their order.
type aheadFake struct {
	*fakeRunner
	drawn    map[model.SeqID]int32 // tokens of the step submitted last
	pending  []*fakePending
	most     int                  // steps under way at once
	fromLast int                  // works
	late     func(step int) error // failures that Wait shows
}

type fakePending struct {
	r    *aheadFake
	out  []model.Sampled
	step int
}

func (r *aheadFake) Step(context.Context, []model.Work) ([]model.Sampled, error) {
	return nil, errors.New("a step one by one")
}

func (r *aheadFake) Submit(work []model.Work) (Pending, error) {
	if len(r.pending) == 2 {
		return nil, errors.New("three steps under way")
	}
	own := make([]model.Work, len(work))
	for i, w := range work {
		if w.FromLast {
			id, ok := r.drawn[w.Seq]
			if !ok || len(w.Append) > 0 {
				return nil, fmt.Errorf("work %d: sequence %d drew nothing in the step before, or %d tokens beside it", i, w.Seq, len(w.Append))
			}
			w.Append, w.FromLast = []int32{id}, false
			r.fromLast++
		}
		own[i] = w
	}
	out, err := r.fakeRunner.Step(context.Background(), own)
	if err != nil {
		return nil, err
	}
	r.drawn = map[model.SeqID]int32{}
	for i, w := range own {
		if w.Sample {
			r.drawn[w.Seq] = out[i].Token
		}
	}
	p := &fakePending{r, out, r.steps}
	r.pending = append(r.pending, p)
	r.most = max(r.most, len(r.pending))
	return p, nil
}

func (p *fakePending) Wait() ([]model.Sampled, error) {
	if p.r.pending[0] != p {
		return nil, errors.New("waited for a step before the one before it")
	}
	p.r.pending = p.r.pending[1:]
	if p.r.late != nil {
		if err := p.r.late(p.step); err != nil {
			return nil, err
		}
	}
	return p.out, nil
}

func (r *aheadFake) Release(id model.SeqID) error {
	delete(r.drawn, id)
	return r.fakeRunner.Release(id)
}

// Reset changes the weights in effect: nothing may be under way.
func (r *aheadFake) Reset() error {
	if len(r.pending) > 0 {
		return fmt.Errorf("reset with %d steps under way", len(r.pending))
	}
	return r.fakeRunner.Reset()
}

// fakeLogProb is the log-prob of a token in sampler and learner alike.
func fakeLogProb(id int32) float32 { return -1 - 0.001*float32(id) }

// fakeModel is learner and policy over a single weight.
type fakeModel struct {
	w, m, g  float64
	version  uint64
	optStep  int64
	shift    func(version uint64) float32 // added to the trainer's log-probs
	last     []int32
	backward int
	rows     int
	nan      bool
}

func (f *fakeModel) Forward(b *model.Batch) (*model.Output, error) {
	total := int32(0)
	for i, s := range b.Segments {
		if s.Len < 1 || int(s.Parent) >= i {
			return nil, fmt.Errorf("segment %d: %+v", i, s)
		}
		total += s.Len
	}
	if int(total) != len(b.IDs) {
		return nil, fmt.Errorf("segments cover %d of %d rows", total, len(b.IDs))
	}
	f.rows += len(b.IDs)
	out := &model.Output{LogProb: make([]float32, len(b.Rows)), Entropy: make([]float32, len(b.Rows))}
	for i, t := range b.Targets {
		out.LogProb[i] = fakeLogProb(t)
		if f.shift != nil {
			out.LogProb[i] += f.shift(f.version)
		}
		out.Entropy[i] = 1
	}
	f.last = b.Targets
	return out, nil
}

func (f *fakeModel) Backward(d, _ []float32) error {
	f.backward++
	for i, c := range d {
		f.g += float64(c) * float64(1+f.last[i]%7)
	}
	if f.nan {
		f.g = math.NaN()
	}
	return nil
}

func (f *fakeModel) ZeroGrad() error            { f.g = 0; return nil }
func (f *fakeModel) GradNorm() (float64, error) { return math.Abs(f.g) + 1e-3, nil }
func (f *fakeModel) Step(h model.Hyper) error {
	f.m = h.Beta1*f.m + (1-h.Beta1)*f.g
	f.w -= h.LR * f.m
	f.version++
	f.optStep++
	return nil
}
func (f *fakeModel) Version() uint64                { return f.version }
func (f *fakeModel) OptStep() int64                 { return f.optStep }
func (f *fakeModel) SetVersion(v uint64, opt int64) { f.version, f.optStep = v, opt }
func (f *fakeModel) SHA256() (string, error)        { return fmt.Sprintf("%x", math.Float64bits(f.w)), nil }
func (f *fakeModel) bits(k model.StateKind) *float64 {
	return map[model.StateKind]*float64{model.Weights: &f.w, model.MomentM: &f.m}[k]
}
func (f *fakeModel) State(k model.StateKind) ([]byte, error) {
	if p := f.bits(k); p != nil {
		return binary.LittleEndian.AppendUint64(nil, math.Float64bits(*p)), nil
	}
	return make([]byte, 8), nil
}
func (f *fakeModel) SetState(k model.StateKind, b []byte) error {
	if p := f.bits(k); p != nil {
		*p = math.Float64frombits(binary.LittleEndian.Uint64(b))
	}
	return nil
}
func (f *fakeModel) Export(dir string, _ model.SaveOptions) error { return f.Save(dir) }
func (f *fakeModel) ExportBytes() int64                           { return 8 }
func (f *fakeModel) Save(dir string) error {
	b, err := f.State(model.Weights)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "w.bin"), b, 0o644)
}
func (f *fakeModel) load(t *testing.T, dir string) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(dir, "w.bin"))
	if err != nil {
		t.Fatal(err)
	}
	if err := f.SetState(model.Weights, b); err != nil {
		t.Fatal(err)
	}
}

// fakeEnv has tasks "t0".. whose text is theirs to choose. What an attempt does
// follows from the answer it submits: "good" solves, "bad" fails, "look" is no
// submission, and on meets the rest.
type fakeEnv struct {
	train, val, test []env.TaskRef
	text             func(t env.TaskRef) string
	on               func(ctx context.Context, t env.TaskRef, answer string) error // faults of a step; may sleep
	openErr          func(t env.TaskRef) error
	health           func() error
	digest           func(t env.TaskRef, open int) string
	initial          func() // called on every Initial; may panic

	mu     sync.Mutex
	opens  map[string]int
	closed int
	steps  map[string]int // by answer
}

func newFakeEnv(train, val int, text func(env.TaskRef) string) *fakeEnv {
	e := &fakeEnv{text: text, opens: map[string]int{}, steps: map[string]int{}}
	list := func(s env.Split, n int) (out []env.TaskRef) {
		for i := range n {
			out = append(out, env.TaskRef{Env: "fake", ID: fmt.Sprintf("%s-%d", s, i), Split: s, Group: fmt.Sprintf("family%d", i%3)})
		}
		return out
	}
	e.train, e.val, e.test = list(env.Train, train), list(env.Val, val), list(env.Test, 4)
	return e
}

func (e *fakeEnv) Info() env.Info {
	return env.Info{Name: "fake", Backend: "embedded", DataDigest: "data"}
}
func (e *fakeEnv) Tasks(_ context.Context, s env.Split) ([]env.TaskRef, error) {
	switch s {
	case env.Train:
		return e.train, nil
	case env.Val:
		return e.val, nil
	}
	return nil, env.ErrSealed
}
func (e *fakeEnv) TestTasks(_ context.Context, u env.Unsealed) ([]env.TaskRef, error) {
	return e.test, u.Check(e.Info())
}
func (e *fakeEnv) Health(context.Context) error {
	if e.health != nil {
		return e.health()
	}
	return nil
}
func (e *fakeEnv) Close() error { return nil }
func (e *fakeEnv) Open(_ context.Context, t env.TaskRef, o env.OpenOptions) (env.Attempt, error) {
	if t.Split == env.Test {
		if err := o.Unsealed.Check(e.Info()); err != nil {
			return nil, err
		}
	}
	if e.openErr != nil {
		if err := e.openErr(t); err != nil {
			return nil, err
		}
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.opens[t.ID]++
	d := "digest-" + t.ID
	if e.digest != nil {
		d = e.digest(t, e.opens[t.ID])
	}
	return &fakeAttempt{e: e, t: t, digest: d}, nil
}

type fakeAttempt struct {
	e      *fakeEnv
	t      env.TaskRef
	digest string
	solved bool
	done   bool
}

func (a *fakeAttempt) Initial() env.Observation {
	if a.e.initial != nil {
		a.e.initial()
	}
	return env.Observation{Text: a.e.text(a.t), Facts: map[string]any{"init_digest": a.digest}}
}
func (a *fakeAttempt) System() string { return "" }
func (a *fakeAttempt) Tools() []env.ToolSpec {
	return []env.ToolSpec{{Name: "submit", Description: "Submit.", Parameters: json.RawMessage(`{"type":"object","properties":{"answer":{"type":"string"}}}`)}}
}
func (a *fakeAttempt) Step(ctx context.Context, x env.Action) (env.Step, error) {
	var args struct{ Answer string }
	if err := json.Unmarshal(x.Args, &args); err != nil {
		return env.Step{Obs: "bad arguments", Kind: env.KindFormatError}, nil
	}
	a.e.mu.Lock()
	a.e.steps[args.Answer]++
	a.e.mu.Unlock()
	if a.e.on != nil {
		if err := a.e.on(ctx, a.t, args.Answer); err != nil {
			return env.Step{}, err
		}
	}
	if strings.HasPrefix(args.Answer, "look") {
		return env.Step{Obs: "nothing new", Kind: env.KindOK}, nil
	}
	a.solved, a.done = strings.HasPrefix(args.Answer, "good"), true
	return env.Step{Obs: "submitted", Done: true}, nil
}
func (a *fakeAttempt) Grade(context.Context) (env.Verdict, error) {
	v := env.Verdict{Success: a.solved, Outcome: env.Failed, Audit: map[string]any{"init_digest": a.digest}}
	if a.solved {
		v.Score, v.Outcome = 1, env.Solved
	}
	return v, nil
}
func (a *fakeAttempt) Close(context.Context) error {
	a.e.mu.Lock()
	defer a.e.mu.Unlock()
	a.e.closed++
	return nil
}

// call is the text of a turn that submits an answer.
func call(answer string) string {
	return "<tool_call>\n<function=submit>\n<parameter=answer>\n" + answer + "\n</parameter>\n</function>\n</tool_call>"
}

// scripted makes a sampler of turn texts: say decides a turn from the context's
// text and a number keyed by the request.
func scripted(say func(context string, u uint64) string) func([]int32, model.Work) int32 {
	turns := map[model.Key]string{}
	return func(ids []int32, w model.Work) int32 {
		text, ok := turns[w.Key]
		if !ok {
			text = say(byteTokens{}.Decode(ids[:len(ids)-int(w.Ctr)]), w.Key.Lo)
			turns[w.Key] = text
		}
		if int(w.Ctr) < len(text) {
			return int32(text[w.Ctr])
		}
		return byteStop
	}
}

var rateRE = regexp.MustCompile(`rate=(\d+)`)

// byRate submits a good answer with the probability, in percent, that the context
// names last; a harness that says BOOST adds 60.
func byRate(context string, u uint64) string {
	m := rateRE.FindAllStringSubmatch(context, -1)
	rate, _ := strconv.Atoi(m[len(m)-1][1])
	if strings.Contains(context, "BOOST") {
		rate += 60
	}
	if int(u%100) < rate {
		return call("good")
	}
	return call("bad")
}

// testPool is the original and n auxiliaries.
func testPool(t testing.TB, n int) *harness.Pool {
	t.Helper()
	h0, err := harness.Resolve(harness.Doc{Name: "original", Env: "fake", V: 1, Tools: "text", Sections: []harness.Section{
		{Name: "role", Text: "You work."}, {Name: "protocol", Text: "Each turn call submit."}}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	specs := []*harness.Spec{h0}
	for i := range n {
		s, err := harness.Resolve(harness.Doc{Name: fmt.Sprintf("aux%02d", i), Env: "fake", V: 1, Parent: "original", Causes: []string{causeName(i)},
			Edits: []harness.Edit{{ID: fmt.Sprintf("e%d", i), Causes: []string{causeName(i)}, Ops: []harness.Op{
				{Slot: "system", Section: "planning", Op: "append", Text: strings.Repeat("BOOST ", i+1) + "number " + strconv.Itoa(i)}}}}}, h0)
		if err != nil {
			t.Fatal(err)
		}
		specs = append(specs, s)
	}
	p, err := harness.NewPool(specs)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// testConfig is small: 8 attempts, 3 turns.
func testConfig() Config {
	c := Defaults()
	c.Task.PerStep = 4
	c.Run.Steps = 4
	c.Model.MaxLen = 2048
	c.Rollout.MaxTurns, c.Rollout.MaxNew = 3, 200
	c.Rollout.Slots = 32
	c.Router.EvidenceTasks, c.Router.EvidenceAttempts = 2, 1
	c.Eval.Tasks, c.Eval.Every, c.Eval.Resamples = 4, 0, 100
	c.Save.Every = 2
	c.Optim.LR = 0.1
	return c
}

// world is a complete set of fakes.
type world struct {
	cfg    Config
	env    *fakeEnv
	runner *fakeRunner
	model  *fakeModel
	deps   *Deps
}

func newWorld(t testing.TB, rate func(env.TaskRef) int, say func(string, uint64) string) *world {
	t.Helper()
	w := &world{cfg: testConfig(), model: &fakeModel{w: 1}}
	w.env = newFakeEnv(12, 6, func(x env.TaskRef) string { return fmt.Sprintf("task %s rate=%d", x.ID, rate(x)) })
	w.runner = newFakeRunner(48, 48*2048, scripted(say))
	w.deps = &Deps{
		Env: w.env, Pool: testPool(t, 12), Tokens: byteTokens{}, Renderer: chat.NewRenderer(false), Stop: []int32{byteStop},
		Sampler: w.runner, Learner: w.model, Policy: w.model, MaxRows: 4096, MaxTargets: 4096,
	}
	return w
}

// rates gives every task the same rate.
func rates(n int) func(env.TaskRef) int { return func(env.TaskRef) int { return n } }

func digestJSON(t testing.TB, v any) string {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	s := sha256.Sum256(b)
	return hex.EncodeToString(s[:8])
}

// causeName is one of three cause codes.
func causeName(i int) string { return []string{"D-SET", "D-AGG", "D-TYPE"}[i%3] }
