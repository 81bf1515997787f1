package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"golang.org/x/sys/unix"

	"harness-s/trainer"
)

// lsCmd lists the runs under the root: hs ls.
type lsCmd struct{}

// runLine is one run in hs ls --json.
type runLine struct {
	Name      string    `json:"name"`
	Created   time.Time `json:"created"`
	Steps     int       `json:"steps"`
	Completed bool      `json:"completed"`
	Running   bool      `json:"running"`
	Seed      uint64    `json:"seed"`
	Pass1     *float64  `json:"pass1_after,omitempty"`
	Pass3     *float64  `json:"pass3_after,omitempty"`
	Dir       string    `json:"dir"`
	Damaged   string    `json:"damaged,omitempty"` // what cannot be read
}

// Run prints a table, newest first.
func (lsCmd) Run(g *globals) error {
	runs, err := listRuns(g.Root)
	if err != nil {
		return err
	}
	if g.JSON {
		return g.emit(map[string]any{"root": g.Root, "runs": runs})
	}
	if len(runs) == 0 {
		g.say("no runs in %s; start one with: hs train --preset demo", g.Root)
		return nil
	}
	w := tabwriter.NewWriter(g.out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "RUN\tSTARTED\tSTEPS\tSTATE\tPASS@1\tPASS@3")
	for _, r := range runs {
		state := "stopped"
		switch {
		case r.Damaged != "":
			state = "damaged"
		case r.Completed:
			state = "done"
		case r.Running:
			state = "running"
		}
		cell := func(v *float64) string {
			if v == nil {
				return "-"
			}
			return fmt.Sprintf("%.1f %%", 100**v)
		}
		started := "-"
		if !r.Created.IsZero() {
			started = r.Created.Local().Format("2006-01-02 15:04")
		}
		fmt.Fprintf(w, "%s\t%s\t%d\t%s\t%s\t%s\n", r.Name, started, r.Steps, state, cell(r.Pass1), cell(r.Pass3))
	}
	return w.Flush()
}

func listRuns(root string) ([]runLine, error) {
	names, err := os.ReadDir(root)
	if errors.Is(err, fs.ErrNotExist) {
		return []runLine{}, nil
	}
	if err != nil {
		return nil, err
	}
	out := []runLine{}
	for _, n := range names {
		dir := filepath.Join(root, n.Name())
		if _, err := os.Stat(filepath.Join(dir, "manifest.json")); err != nil {
			continue // not a run
		}
		man, err := trainer.ReadManifest(dir)
		if err != nil {
			out = append(out, runLine{Name: n.Name(), Dir: dir, Damaged: err.Error()})
			continue
		}
		r := runLine{Name: n.Name(), Created: man.Created, Completed: man.Completed, Seed: man.Seed, Dir: dir}
		ms, merr := readMetrics(dir)
		if len(ms.steps) > 0 {
			r.Steps = ms.steps[len(ms.steps)-1]
		}
		r.Running = locked(dir)
		evals, eerr := readEvals(dir)
		if err := errors.Join(merr, eerr); err != nil {
			r.Damaged = err.Error()
		}
		if len(evals) > 0 {
			last := evals[len(evals)-1]
			r.Pass1, r.Pass3 = &last.Pass1.Strict.Mean, &last.PassK.Strict.Mean
		}
		out = append(out, r)
	}
	slices.SortFunc(out, func(a, b runLine) int { return b.Created.Compare(a.Created) })
	return out, nil
}

// locked reports whether a live process holds the lock of a run. A process of another host is taken to be alive.
func locked(dir string) bool {
	b, err := os.ReadFile(filepath.Join(dir, "hs.lock"))
	if err != nil {
		return false
	}
	var owner struct {
		PID  int    `json:"pid"`
		Host string `json:"host"`
	}
	if json.Unmarshal(b, &owner) != nil {
		return false
	}
	if host, err := os.Hostname(); err != nil || host != owner.Host {
		return true
	}
	err = unix.Kill(owner.PID, 0)
	return err == nil || errors.Is(err, unix.EPERM)
}

// newestRun is the name of the run that was started last.
func newestRun(root string) (string, error) {
	runs, err := listRuns(root)
	if err != nil {
		return "", err
	}
	if len(runs) == 0 {
		return "", usage("start one with: hs train --preset demo", "no runs in %s", root)
	}
	return runs[0].Name, nil
}

// runDir finds a run by name or path; "" is the newest.
func (g *globals) runDir(name string) (string, error) {
	if name == "" {
		newest, err := newestRun(g.Root)
		if err != nil {
			return "", err
		}
		name = newest
	}
	for _, dir := range []string{filepath.Join(g.Root, name), name} {
		if _, err := os.Stat(filepath.Join(dir, "manifest.json")); err == nil {
			return dir, nil
		}
	}
	return "", g.noRun(name)
}

// damaged adds what to do to an error from reading the files of a run.
func damaged(dir string, err error) error {
	if err == nil || advice(err) != "" {
		return err
	}
	return &trainer.Error{Op: "read run " + filepath.Base(dir), Err: err, Hint: "restore that file, or delete the run: rm -r " + dir}
}

// noRun says that there is no such run, and which there are.
func (g *globals) noRun(name string) error {
	hint := "hs ls shows the runs"
	if runs, err := listRuns(g.Root); err == nil && len(runs) > 0 {
		var names []string
		for _, r := range runs[:min(5, len(runs))] {
			names = append(names, r.Name)
		}
		hint = "runs here: " + strings.Join(names, ", ")
	}
	return usage(hint, "no run %q under %s", name, g.Root)
}

// showCmd drills into a run: hs show [RUN[/STEP[/TASK[/ATTEMPT]]]].
type showCmd struct {
	Path    string `arg:"" optional:"" name:"run" help:"RUN, RUN/STEP, RUN/STEP/TASK or RUN/STEP/TASK/ATTEMPT; TASK is a number or an id. Default: the newest run."`
	Rescued bool   `help:"At RUN/STEP: only rescued tasks."`
	Failed  bool   `help:"At RUN/STEP/TASK: only attempts without success." xor:"which"`
	Best    bool   `help:"At RUN/STEP/TASK: only successful attempts." xor:"which"`
}

// Run prints one level of the run.
func (c *showCmd) Run(g *globals) error {
	parts := g.splitPath(c.Path)
	if len(parts) > 4 {
		return usage("hs show RUN/STEP/TASK/ATTEMPT", "%q has %d parts, at most 4 have a meaning", c.Path, len(parts))
	}
	if c.Rescued && len(parts) != 2 {
		return usage("hs show RUN/STEP --rescued", "--rescued chooses among the tasks of a step")
	}
	if (c.Failed || c.Best) && len(parts) != 3 {
		return usage("hs show RUN/STEP/TASK --failed", "--failed and --best choose among the attempts of a task")
	}
	dir, err := g.runDir(parts[0])
	if err != nil {
		return err
	}
	return damaged(dir, c.level(g, dir, parts))
}

// splitPath separates the run, which may be a directory with slashes in its name, from step, task and attempt.
func (g *globals) splitPath(path string) []string {
	path = strings.TrimRight(path, "/")
	for run := path; run != "" && run != "." && run != "/"; run = filepath.Dir(run) {
		for _, dir := range []string{filepath.Join(g.Root, run), run} {
			if _, err := os.Stat(filepath.Join(dir, "manifest.json")); err == nil {
				rest := strings.Split(strings.Trim(path[len(run):], "/"), "/")
				if rest[0] == "" {
					rest = nil
				}
				return append([]string{run}, rest...)
			}
		}
	}
	return strings.Split(strings.Trim(path, "/"), "/")
}

func (c *showCmd) level(g *globals, dir string, parts []string) error {
	name := filepath.Base(dir)
	ms, err := readMetrics(dir)
	if err != nil {
		return err
	}
	if len(parts) == 1 {
		return c.run(g, dir, ms)
	}
	step, err := strconv.Atoi(parts[1])
	if err != nil || !slices.Contains(ms.steps, step) {
		return usage(stepsOf(name, ms), "no step %q in run %s", parts[1], name)
	}
	groups, err := readGroups(dir, step)
	if err != nil {
		return err
	}
	if len(parts) == 2 {
		return c.step(g, step, groups)
	}
	gr, err := pickGroup(groups, parts[2])
	if err != nil {
		return err
	}
	if len(parts) == 3 {
		return c.group(g, gr)
	}
	n, err := strconv.Atoi(parts[3])
	if err != nil || n < 0 || n >= len(gr.Attempts) {
		return usage(fmt.Sprintf("attempts are 0 to %d; hs show %s/%d/%s lists them", len(gr.Attempts)-1, name, step, parts[2]), "no attempt %q of task %s", parts[3], gr.Task)
	}
	a := gr.Attempts[n]
	if g.JSON {
		return g.emit(a)
	}
	fmt.Fprintf(g.out, "%s attempt %d, %s under %s: %s\n\n", gr.Task, n, a.Phase, a.Harness, a.Outcome)
	for _, s := range a.spans() {
		printSpan(g.out, g.colored(g.out), s.kind, s.Text)
	}
	fmt.Fprintln(g.out)
	return nil
}

// stepsOf says which steps a run has.
func stepsOf(name string, ms metrics) string {
	if len(ms.steps) == 0 {
		return "run " + name + " has no finished step yet"
	}
	return fmt.Sprintf("run %s has steps %d to %d; hs show %s lists them", name, ms.steps[0], ms.steps[len(ms.steps)-1], name)
}

func (c *showCmd) run(g *globals, dir string, ms metrics) error {
	if g.JSON {
		man, err := trainer.ReadManifest(dir)
		if err != nil {
			return err
		}
		steps := make([]map[string]any, len(ms.steps))
		for i := range ms.steps {
			steps[i] = map[string]any{"step": ms.steps[i], "metrics": ms.values[i]}
		}
		return g.emit(map[string]any{"manifest": man, "steps": steps})
	}
	if len(ms.steps) == 0 {
		g.say("%s", stepsOf(filepath.Base(dir), ms))
		return nil
	}
	w := tabwriter.NewWriter(g.out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "STEP\tREWARD\tLIVE\tALL-FAIL\tRESCUED\tGAP MAX\tSECONDS")
	for i, s := range ms.steps {
		v := ms.values[i]
		fmt.Fprintf(w, "%d\t%.2f\t%.0f/%.0f\t%.0f\t%.0f\t%.1e\t%.1f\n", s, v["reward/mean"], v["group/live"], v["group/total"], v["group/allfail"], v["group/rescued"], v["gap/max"], v["time/total"])
	}
	return w.Flush()
}

func (c *showCmd) step(g *globals, step int, groups []groupView) error {
	if c.Rescued {
		groups = slices.DeleteFunc(groups, func(q groupView) bool { return q.Kind != string(trainer.Rescued) })
	}
	if g.JSON {
		return g.emit(map[string]any{"step": step, "tasks": groups})
	}
	if len(groups) == 0 {
		g.say("no task of step %d matches", step)
		return nil
	}
	w := tabwriter.NewWriter(g.out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "TASK\tID\tGROUP\tKIND\tBASE\tRESCUE\tQUESTION")
	for _, q := range groups {
		base, resc := q.wins("base"), q.wins("rescue")
		fmt.Fprintf(w, "%d\t%s\t%s\t%s\t%s\t%s\t%s\n", q.Index, q.Task, q.Family, q.Kind, base, resc, oneLine(heading(q.Question), 70))
	}
	return w.Flush()
}

// heading is the part of a task's text that tells it from others: the line that asks, else the last one.
func heading(text string) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	for _, l := range lines {
		if q, ok := strings.CutPrefix(l, "Question:"); ok {
			return q
		}
	}
	return lines[len(lines)-1]
}

func (c *showCmd) group(g *globals, q groupView) error {
	q.Attempts = slices.DeleteFunc(q.Attempts, func(a attemptView) bool { return c.Failed && a.Success || c.Best && !a.Success })
	if g.JSON {
		return g.emit(q)
	}
	if len(q.Attempts) == 0 {
		g.say("no attempt of %s matches", q.Task)
		return nil
	}
	w := tabwriter.NewWriter(g.out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "ATTEMPT\tPHASE\tHARNESS\tOUTCOME\tTURNS\tADVANTAGE\tLAST ACTION")
	for _, a := range q.Attempts {
		adv := "-"
		if a.InUpdate {
			adv = fmt.Sprintf("%+.2f", a.Advantage)
		}
		fmt.Fprintf(w, "%d\t%s\t%s\t%s\t%d\t%s\t%s\n", a.Index, a.Phase, a.Harness, a.Outcome, a.Turns, adv, oneLine(a.LastAction, 80))
	}
	return w.Flush()
}

func oneLine(s string, n int) string {
	s = strings.Join(strings.Fields(s), " ")
	if r := []rune(s); len(r) > n {
		return string(r[:n-1]) + "…"
	}
	return s
}
