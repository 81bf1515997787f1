package main

import (
	"bufio"
	"bytes"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"html/template"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"harness-s/trainer"
)

//go:embed web/report.html
var reportHTML string

// reportCmd writes the report of a run: hs report.
type reportCmd struct {
	Run_ string `arg:"" name:"run" optional:"" help:"Run name or directory; default the newest run." placeholder:"RUN"`
	Out  string `short:"o" type:"path" help:"File to write; default report.html in the run." placeholder:"FILE"`
}

// Run writes one self-contained HTML file.
func (c *reportCmd) Run(g *globals) error {
	dir, err := g.runDir(c.Run_)
	if err != nil {
		return err
	}
	out := c.Out
	if out == "" {
		out = filepath.Join(dir, "report.html")
	}
	if !isDir(filepath.Dir(out)) {
		return usage("mkdir -p "+filepath.Dir(out), "no directory %s", filepath.Dir(out))
	}
	if err := writeReport(dir, out, nil); err != nil {
		return damaged(dir, err)
	}
	if g.JSON {
		return g.emit(map[string]any{"run": filepath.Base(dir), "path": out})
	}
	g.say("%s", out)
	return nil
}

type reportCard struct{ Name, Value, Note string }

type reportSection struct {
	Title, Text string
	Plots       []*plot
}

type reportFamily struct {
	Group                            string
	Tasks                            int
	Before1, After1, BeforeK, AfterK float64
}

type reportHarness struct {
	Name, Causes    string
	Picked, Success float64
	Rate            float64
}

type reportSpan struct{ Kind, Text string }

type reportTranscript struct {
	Title string
	Open  bool
	Spans []reportSpan
}

// reportTerm explains a word that the page uses.
type reportTerm struct{ Name, Meaning string }

// reportEvent is an event with its data as text.
type reportEvent struct {
	Step        int
	Event, Text string
}

type reportPage struct {
	Title, Subtitle, Reproduce, Config, Version string
	Interval                                    string // how the intervals are made
	K                                           int
	Cards                                       []reportCard
	Evals                                       []*trainer.EvalReport
	Families                                    []reportFamily
	Sections                                    []reportSection
	Harnesses                                   []reportHarness
	Causes                                      []reportTerm
	Transcripts                                 []reportTranscript
	Events                                      []reportEvent
}

// causeMeaning explains the failure causes that harnesses address (envs.md 5.3).
var causeMeaning = [...]reportTerm{
	{"D-SCHEMA", "wrong or unquoted names"}, {"D-TYPE", "numbers compared as text"}, {"D-SET", "a condition that is missing or matches nothing"},
	{"D-AGG", "counting, duplicates, ties"}, {"D-DML", "a change of the wrong rows"}, {"D-PROTO", "malformed calls, results cut short"},
	{"D-DONE", "no answer, or another one than found"},
}

// writeReport renders the run in dir to path. sum may be nil: the stored summary is used when there is one.
func writeReport(dir, path string, sum *trainer.Summary) error {
	p := reportPage{Version: fullVersion(), K: 3}
	man, err := trainer.ReadManifest(dir)
	if err != nil {
		return fmt.Errorf("write report: %w", err)
	}
	if sum == nil {
		if b, err := os.ReadFile(filepath.Join(dir, "summary.json")); err == nil {
			sum = &trainer.Summary{}
			if err := json.Unmarshal(b, sum); err != nil {
				return fmt.Errorf("write report: read summary.json: %w", err)
			}
		}
	}
	cfg, err := os.ReadFile(filepath.Join(dir, "run.toml"))
	if err != nil {
		return fmt.Errorf("write report: %w", err)
	}
	p.Config = string(cfg)
	ms, err := readMetrics(dir)
	if err != nil {
		return fmt.Errorf("write report: %w", err)
	}
	if p.Evals, err = readEvals(dir); err != nil {
		return fmt.Errorf("write report: %w", err)
	}
	if p.Events, err = readEvents(dir); err != nil {
		return fmt.Errorf("write report: %w", err)
	}
	p.Title = "Run " + man.Name
	label := ""
	if man.Env != nil {
		label = fmt.Sprintf("%s, %s back-end · ", man.Env.Label, man.Env.Backend)
	}
	state := "not finished"
	if man.Completed {
		state = "finished"
	}
	p.Subtitle = fmt.Sprintf("%sseed %d · %d steps, %s · started %s · hs %s", label, man.Seed, len(ms.steps), state, man.Created.UTC().Format("2006-01-02 15:04 UTC"), man.Version)
	p.cards(sum, ms)
	p.families()
	p.sections(ms)
	if p.Harnesses, err = harnessTable(dir, ms); err != nil {
		return fmt.Errorf("write report: %w", err)
	}
	for _, c := range causeMeaning {
		if slices.ContainsFunc(p.Harnesses, func(h reportHarness) bool { return strings.Contains(h.Causes, c.Name) }) {
			p.Causes = append(p.Causes, c)
		}
	}
	if p.Transcripts, err = transcripts(dir, ms); err != nil {
		return fmt.Errorf("write report: %w", err)
	}
	p.Reproduce = fmt.Sprintf("hs train -c run.toml --run NAME\n\nconfig  %s\npool    %s\ndata    %s\ndevice  %s\ncommit  %s\ngo      %s", man.Config, man.Pool, man.Data, man.Device, man.Commit, man.Go)
	if sum != nil {
		p.Reproduce += "\nweights " + sum.WeightsSHA256
	}
	t, err := template.New("report").Funcs(template.FuncMap{"pct": func(v float64) string { return fmt.Sprintf("%.1f %%", 100*v) }}).Parse(reportHTML)
	if err != nil {
		return fmt.Errorf("write report: %w", err)
	}
	var b bytes.Buffer
	if err := t.Execute(&b, p); err != nil {
		return fmt.Errorf("write report: %w", err)
	}
	return trainer.WriteAtomic(path, b.Bytes())
}

func (p *reportPage) cards(sum *trainer.Summary, ms metrics) {
	add := func(name, value, note string, args ...any) {
		p.Cards = append(p.Cards, reportCard{name, value, fmt.Sprintf(note, args...)})
	}
	if n := len(p.Evals); n > 0 {
		a, b := p.Evals[0], p.Evals[n-1]
		p.K = b.K
		p.Interval = "over tasks"
		if len(b.ByGroup) > 1 {
			p.Interval = fmt.Sprintf("over the %d task groups: whole groups are drawn, because tasks of a group resemble each other", len(b.ByGroup))
		}
		pass := func(name string, a, b trainer.Interval) {
			span := func(i trainer.Interval) string { return fmt.Sprintf("[%.1f, %.1f]", 100*i.Low, 100*i.High) }
			if n == 1 {
				add(name, fmt.Sprintf("%.1f %%", 100*a.Mean), "95 %% interval %s; no second evaluation yet", span(a))
				return
			}
			add(name, fmt.Sprintf("%.1f → %.1f %%", 100*a.Mean, 100*b.Mean), "95 %% intervals %s → %s", span(a), span(b))
		}
		pass("Pass@1, original harness", a.Pass1.Strict, b.Pass1.Strict)
		pass(fmt.Sprintf("Pass@%d, original harness", p.K), a.PassK.Strict, b.PassK.Strict)
	}
	if sum != nil {
		add("All-fail groups", fmt.Sprintf("%d of %d", sum.AllFailGroups, sum.Groups), "no attempt succeeded under the original harness")
		add("Rescued groups", fmt.Sprint(sum.RescuedGroups), "%d with a success among the rescue attempts", sum.RescueSuccesses)
	}
	if v, ok := ms.last("rescue/extra_rollouts_run_pct"); ok {
		add("Extra rollouts", fmt.Sprintf("%.1f %%", v), "rescue attempts per 100 attempts under the original harness")
	}
	if v, ok := ms.max("gap/max"); ok {
		add("Largest gap", short(v)+" nats", "log-prob of a token: sampler against trainer, all steps")
	}
	if sum != nil {
		each := ""
		if sum.Steps > 0 {
			each = fmt.Sprintf("%.1f s a step; ", sum.TrainSeconds/float64(sum.Steps))
		}
		add("Time in training steps", fmt.Sprintf("%.0f s", sum.TrainSeconds), "%s%.0f s in all since the program was last started", each, sum.TotalSeconds)
		add("Peak memory", fmt.Sprintf("%.0f MiB", sum.PeakRSSMiB), "resident size of the process")
	}
}

func (p *reportPage) families() {
	if len(p.Evals) < 2 {
		return
	}
	after := map[string]trainer.GroupScore{}
	for _, q := range p.Evals[len(p.Evals)-1].ByGroup {
		after[q.Group] = q
	}
	for _, q := range p.Evals[0].ByGroup {
		a := after[q.Group]
		p.Families = append(p.Families, reportFamily{q.Group, q.Tasks, q.Pass1, a.Pass1, q.PassK, a.PassK})
	}
}

func (p *reportPage) sections(ms metrics) {
	line := func(caption string, names ...string) *plot { return ms.plot(caption, false, names...) }
	p.Sections = []reportSection{
		{"Learning", "Reward is the share of attempts under the original harness that succeed on the step's training tasks; it moves with the tasks drawn. Validation is always on the same tasks.", []*plot{
			line("train reward", "step=reward/mean", "mean of 20 steps=reward/ma20"),
			p.validation(),
		}},
		{"Groups and rescue", "A group is one task with all its attempts. Mixed and rescued groups have successes and failures and are trained on; all-pass and still all-fail groups carry no signal and are dropped. The rescue rate is the share of a step's groups that got rescue attempts, the success share those that gained a success.", []*plot{
			ms.plot("groups of a step", true, "mixed=group/mixed", "rescued=group/rescued", "still all-fail=group/still_allfail", "all-pass=group/allpass", "incomplete=group/incomplete"),
			line("rescue", "success share=rescue/success", "rate=rescue/rate"),
		}},
		{"Router", "The router ranks sibling harnesses by evidence from validation tasks: how often the first choice succeeded, and how many steps ago the evidence was collected.", []*plot{
			line("first choice succeeded, share", "share=router/top1_success"),
			line("evidence", "version=router/evidence_version", "age in steps=router/evidence_age"),
		}},
		{"Health", "The gap is the difference between the log-prob that the sampler recorded and the one that the trainer recomputes; it should stay near rounding. The policy loss is not shown: it is near zero by construction, because the advantages of a group add up to zero.", []*plot{
			line("log-prob gap, nats", "max=gap/max", "p99=gap/p99", "mean=gap/mean"),
			line("gradient norm before clipping", "norm=grad/norm"),
			line("entropy of trained tokens, nats", "mean=entropy/mean"),
			line("turns of an episode", "mean=turns/mean"),
			line("void attempts", "infrastructure=outcome/infra", "harness fault=outcome/harness_fault", "re-runs=outcome/retries"),
			line("different behaviours in a group", "first actions=explore/first_actions", "action sequences=explore/sequences"),
		}},
		{"Speed", "Sampling and environments overlap, so the parts of a step need not add up to it.", []*plot{
			line("seconds", "step=time/total", "sampling=time/gen", "environments alone=time/env", "rescue=time/rescue", "update=time/update"),
			line("tokens per second", "sampled=perf/tok_s_decode", "trained=perf/tok_s_train"),
		}},
	}
	for i := range p.Sections {
		p.Sections[i].Plots = slices.DeleteFunc(p.Sections[i].Plots, func(q *plot) bool { return q == nil })
	}
	p.Sections = slices.DeleteFunc(p.Sections, func(s reportSection) bool { return len(s.Plots) == 0 })
}

// validation plots every evaluation of the run, the one before step 1 included; nil without any.
func (p *reportPage) validation() *plot {
	if len(p.Evals) == 0 {
		return nil
	}
	one, many := series{Name: "Pass@1"}, series{Name: fmt.Sprintf("Pass@%d", p.K)}
	add := func(s *series, step int, i trainer.Interval) {
		s.X, s.Y, s.Low, s.High = append(s.X, float64(step)), append(s.Y, i.Mean), append(s.Low, i.Low), append(s.High, i.High)
	}
	for _, e := range p.Evals {
		add(&one, e.Step, e.Pass1.Strict)
		add(&many, e.Step, e.PassK.Strict)
	}
	q := &plot{Caption: "validation, original harness, 95 % intervals", Series: []series{one, many}}
	q.draw()
	return q
}

// metrics are the lines of metrics.jsonl.
type metrics struct {
	steps  []int
	values []map[string]float64
}

func readMetrics(dir string) (metrics, error) {
	var m metrics
	err := eachLine(filepath.Join(dir, "metrics.jsonl"), func(line []byte) error {
		step, v, err := trainer.ParseRecord(line)
		if err != nil {
			return err
		}
		m.steps, m.values = append(m.steps, step), append(m.values, v)
		return nil
	})
	return m, err
}

// last is the newest value of a metric.
func (m metrics) last(name string) (float64, bool) {
	for i := len(m.values) - 1; i >= 0; i-- {
		if v, ok := m.values[i][name]; ok {
			return v, true
		}
	}
	return 0, false
}

// max is the largest value of a metric over the run.
func (m metrics) max(name string) (v float64, ok bool) {
	for _, vs := range m.values {
		if x, has := vs[name]; has && (!ok || x > v) {
			v, ok = x, true
		}
	}
	return v, ok
}

// plot makes a figure of "label=metric" pairs; nil when none has a value.
func (m metrics) plot(caption string, stacked bool, pairs ...string) *plot {
	p := &plot{Caption: caption, Stacked: stacked}
	for _, pair := range pairs {
		label, name, _ := strings.Cut(pair, "=")
		s := series{Name: label}
		for i, v := range m.values {
			y, ok := v[name]
			if !ok && !stacked {
				continue
			}
			s.X, s.Y = append(s.X, float64(m.steps[i])), append(s.Y, y)
		}
		if len(s.X) > 0 {
			p.Series = append(p.Series, s)
		}
	}
	if len(p.Series) == 0 {
		return nil
	}
	p.draw()
	return p
}

// eachLine calls f with every complete line; a missing file has none. A last line without its end is still being written.
func eachLine(path string, f func([]byte) error) error {
	file, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer file.Close()
	r := bufio.NewReader(file)
	for n := 1; ; n++ {
		line, err := r.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("%s line %d: %w", path, n, err)
		}
		if line = bytes.TrimSpace(line); len(line) == 0 {
			continue
		}
		if err := f(line); err != nil {
			return fmt.Errorf("%s line %d: %w", path, n, err)
		}
	}
}

func readEvents(dir string) ([]reportEvent, error) {
	var out []reportEvent
	err := eachLine(filepath.Join(dir, "events.jsonl"), func(b []byte) error {
		var e trainer.Event
		if err := json.Unmarshal(b, &e); err != nil {
			return err
		}
		text := e.Text
		if len(e.Data) > 0 {
			data, err := json.Marshal(e.Data)
			if err != nil {
				return err
			}
			text = strings.TrimSpace(text + " " + string(data))
		}
		out = append(out, reportEvent{e.Step, e.Event, text})
		return nil
	})
	return out, err
}

// readEvals reads evals/*.json in step order.
func readEvals(dir string) ([]*trainer.EvalReport, error) {
	names, err := filepath.Glob(filepath.Join(dir, "evals", "*.json"))
	if err != nil {
		return nil, err
	}
	var out []*trainer.EvalReport
	for _, n := range names {
		b, err := os.ReadFile(n)
		if err != nil {
			return nil, err
		}
		e := &trainer.EvalReport{}
		if err := json.Unmarshal(b, e); err != nil {
			return nil, fmt.Errorf("%s: %w", n, err)
		}
		out = append(out, e)
	}
	slices.SortStableFunc(out, func(a, b *trainer.EvalReport) int { return a.Step - b.Step })
	return out, nil
}

// harnessTable adds up harness/<id>/* over the run; names come from the frozen pool of the run.
func harnessTable(dir string, ms metrics) ([]reportHarness, error) {
	sum := map[string]*reportHarness{}
	for _, v := range ms.values {
		for name, x := range v {
			id, field, ok := strings.Cut(strings.TrimPrefix(name, "harness/"), "/")
			if !ok || !strings.HasPrefix(name, "harness/") {
				continue
			}
			h := sum[id]
			if h == nil {
				h = &reportHarness{Name: id}
				sum[id] = h
			}
			switch field {
			case "picked":
				h.Picked += x
			case "success":
				h.Success += x
			}
		}
	}
	pool, err := frozenPool(dir)
	if err != nil {
		return nil, err
	}
	for id, h := range sum {
		if s, ok := pool[id]; ok {
			h.Name, h.Causes = s.Name, strings.Join(s.Causes, " ")
		}
	}
	var out []reportHarness
	for _, h := range sum {
		if h.Picked > 0 {
			h.Rate = h.Success / h.Picked
		}
		out = append(out, *h)
	}
	slices.SortFunc(out, func(a, b reportHarness) int {
		if a.Success != b.Success {
			return int(b.Success - a.Success)
		}
		return strings.Compare(a.Name, b.Name)
	})
	return out, nil
}
