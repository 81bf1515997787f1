package main

import (
	"bufio"
	"bytes"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"html/template"
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
	if err := writeReport(dir, out, nil); err != nil {
		return err
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

type reportPage struct {
	Title, Subtitle, Reproduce, Config, Version string
	K                                           int
	Cards                                       []reportCard
	Evals                                       []*trainer.EvalReport
	Families                                    []reportFamily
	Sections                                    []reportSection
	Harnesses                                   []reportHarness
	Transcripts                                 []reportTranscript
	Events                                      []trainer.Event
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
	p.Subtitle = fmt.Sprintf("%sseed %d · %d steps · started %s · hs %s", label, man.Seed, len(ms.steps), man.Created.UTC().Format("2006-01-02 15:04 UTC"), man.Version)
	p.cards(sum, ms)
	p.families()
	p.sections(ms)
	if p.Harnesses, err = harnessTable(dir, ms); err != nil {
		return fmt.Errorf("write report: %w", err)
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
	pct := func(v float64) string { return fmt.Sprintf("%.1f %%", 100*v) }
	if n := len(p.Evals); n > 0 {
		a, b := p.Evals[0], p.Evals[n-1]
		p.K = b.K
		p.Cards = append(p.Cards,
			reportCard{fmt.Sprintf("Pass@%d, original harness", b.K), pct(b.PassK.Strict.Mean), fmt.Sprintf("%s before, interval %s to %s", pct(a.PassK.Strict.Mean), pct(b.PassK.Strict.Low), pct(b.PassK.Strict.High))},
			reportCard{"Pass@1, original harness", pct(b.Pass1.Strict.Mean), fmt.Sprintf("%s before", pct(a.Pass1.Strict.Mean))})
	}
	if sum != nil {
		p.Cards = append(p.Cards,
			reportCard{"Groups", fmt.Sprint(sum.Groups), fmt.Sprintf("%d all-fail", sum.AllFailGroups)},
			reportCard{"Rescued groups", fmt.Sprint(sum.RescuedGroups), fmt.Sprintf("%d with a success", sum.RescueSuccesses)},
			reportCard{"Time", fmt.Sprintf("%.0f s", sum.TotalSeconds), fmt.Sprintf("%.0f s of training steps", sum.TrainSeconds)},
			reportCard{"Peak memory", fmt.Sprintf("%.0f MiB", sum.PeakRSSMiB), ""})
	}
	if v := ms.last("rescue/extra_rollouts_run_pct"); v != "" {
		p.Cards = append(p.Cards, reportCard{"Extra rollouts", v + " %", "rescue attempts per 100 base attempts"})
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
		{"Learning", "", []*plot{
			line("train reward", "mean=reward/mean", "20-step mean=reward/ma20"),
			line("validation, original harness", "Pass@1=eval/pass1", fmt.Sprintf("Pass@%d=eval/passk", p.K)),
		}},
		{"Groups and rescue", "A group without contrast gives no signal and is dropped. An all-fail group is replaced by attempts under sibling harnesses.", []*plot{
			ms.plot("groups of a step", true, "mixed=group/mixed", "rescued=group/rescued", "still all-fail=group/still_allfail", "all-pass=group/allpass", "incomplete=group/incomplete"),
			line("rescue", "success share=rescue/success", "rate=rescue/rate"),
		}},
		{"Router", "Which sibling was tried first, and how often it succeeded.", []*plot{
			line("first choice succeeded", "share=router/top1_success"),
			line("evidence", "version=router/evidence_version", "age=router/evidence_age"),
		}},
		{"Health", "The policy loss is near zero by construction, because advantages of a group add up to zero; look at reward, live groups and the gap instead.", []*plot{
			line("|sampler - trainer| log-prob, nats", "max=gap/max", "p99=gap/p99", "mean=gap/mean"),
			line("gradient norm", "norm=grad/norm"),
			line("entropy of trained tokens, nats", "mean=entropy/mean"),
			line("episode length", "turns=turns/mean"),
			line("void attempts", "infra=outcome/infra", "harness fault=outcome/harness_fault", "re-runs=outcome/retries"),
			line("exploration", "distinct first actions=explore/first_actions", "distinct sequences=explore/sequences"),
		}},
		{"Speed", "Seconds of a step and tokens per second.", []*plot{
			line("seconds", "step=time/total", "sampling=time/gen", "environments alone=time/env", "update=time/update"),
			line("tokens per second", "decode=perf/tok_s_decode", "train=perf/tok_s_train"),
		}},
	}
	for i := range p.Sections {
		p.Sections[i].Plots = slices.DeleteFunc(p.Sections[i].Plots, func(q *plot) bool { return q == nil })
	}
	p.Sections = slices.DeleteFunc(p.Sections, func(s reportSection) bool { return len(s.Plots) == 0 })
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

// last is the newest value of a metric as text, "" without one.
func (m metrics) last(name string) string {
	for i := len(m.values) - 1; i >= 0; i-- {
		if v, ok := m.values[i][name]; ok {
			return fmt.Sprintf("%.1f", v)
		}
	}
	return ""
}

// plot makes a figure of "label=metric" pairs; nil when none has a value.
func (m metrics) plot(caption string, stacked bool, pairs ...string) *plot {
	p := &plot{Caption: caption, Stacked: stacked}
	for _, pair := range pairs {
		label, name, _ := strings.Cut(pair, "=")
		s := series{Name: label, Color: plotColors[len(p.Series)%len(plotColors)]}
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

// eachLine calls f with every complete line; a missing file has none.
func eachLine(path string, f func([]byte) error) error {
	file, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer file.Close()
	sc := bufio.NewScanner(file)
	sc.Buffer(make([]byte, 1<<16), 1<<28)
	for n := 1; sc.Scan(); n++ {
		if len(bytes.TrimSpace(sc.Bytes())) == 0 {
			continue
		}
		if err := f(sc.Bytes()); err != nil {
			return fmt.Errorf("%s line %d: %w", path, n, err)
		}
	}
	return sc.Err()
}

func readEvents(dir string) ([]trainer.Event, error) {
	var out []trainer.Event
	err := eachLine(filepath.Join(dir, "events.jsonl"), func(b []byte) error {
		var e trainer.Event
		if err := json.Unmarshal(b, &e); err != nil {
			return err
		}
		out = append(out, e)
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
