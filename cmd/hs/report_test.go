package main

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"harness-s/trainer"
)

func TestPlotAxes(t *testing.T) {
	zero := &plot{Series: []series{{Name: "a", X: []float64{1, 2}, Y: []float64{0, 0}}}}
	zero.draw()
	if svg := string(zero.SVG); !strings.Contains(svg, ">1<") || strings.Contains(svg, "e-") || strings.Contains(svg, "NaN") {
		t.Errorf("axis of a series of zeros: %s", svg)
	}
	one := &plot{Stacked: true, Series: []series{{Name: "a", X: []float64{3}, Y: []float64{2}}}}
	one.draw()
	if m := regexp.MustCompile(`points="([0-9.]+),[^"]* ([0-9.]+),[0-9.]+"`).FindStringSubmatch(string(one.SVG)); m == nil || m[1] == m[2] {
		t.Errorf("area of one step has no width: %s", one.SVG)
	}
	spread := &plot{Series: []series{{Name: "a", X: []float64{0, 5}, Y: []float64{0.3, 0.5}, Low: []float64{0.1, 0.4}, High: []float64{0.45, 0.9}}}}
	spread.draw()
	if svg := string(spread.SVG); strings.Count(svg, `class="interval"`) != 2 || !strings.Contains(svg, ">0.8<") {
		t.Errorf("intervals are not drawn or outside the axis: %s", svg)
	}
}

// writeRun makes a run folder with the given steps and evaluations.
func writeRun(t *testing.T, metrics string, evals ...string) string {
	t.Helper()
	dir := t.TempDir()
	must(t, os.MkdirAll(filepath.Join(dir, "evals"), 0o755))
	files := map[string]string{"run.toml": "[run]\n", "metrics.jsonl": metrics, "manifest.json": `{"schema":1,"name":"a","created":"2026-01-02T03:04:05Z","seed":7}`}
	for i, e := range evals {
		files[filepath.Join("evals", string(rune('a'+i))+".json")] = e
	}
	for name, text := range files {
		must(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644))
	}
	return dir
}

// TestReportPage checks what the report promises: before and after with intervals, rescue counts, gap and time, self-contained, for light
// and dark screens; and that a run without a finished step still gets a page.
func TestReportPage(t *testing.T) {
	const steps = `{"schema":1,"step":1,"reward/mean":0.5,"gap/max":0.00001,"group/mixed":3,"rescue/success":1,"time/total":2,"outcome/infra":0,"harness/abc/picked":4,"harness/abc/success":1}
{"schema":1,"step":2,"reward/mean":0.6,"gap/max":0.000002,"group/mixed":4,"rescue/success":0.5,"time/total":3,"outcome/infra":0}
`
	eval := func(step, mean string) string {
		score := `{"strict":{"mean":` + mean + `,"low":0.1,"high":0.9}}`
		return `{"step":` + step + `,"k":3,"tasks":9,"pass1":` + score + `,"passk":` + score + `,"by_group":[{"group":"g"},{"group":"h"}]}`
	}
	dir := writeRun(t, steps, eval("0", "0.25"), eval("2", "0.5"))
	sum := &trainer.Summary{Groups: 8, AllFailGroups: 5, RescuedGroups: 4, RescueSuccesses: 3, Steps: 2, TrainSeconds: 5, TotalSeconds: (11 * time.Second).Seconds()}
	html := renderReport(t, dir, sum)
	for _, want := range []string{"25.0 → 50.0 %", "[10.0, 90.0] → [10.0, 90.0]", "5 of 8", "3 with a success", "1e-05 nats", "11 s in all", "2.5 s a step", "repeat(auto-fill,minmax(min(480px,100%)", "not finished",
		"train reward", `class="interval"`, "over the 2 task groups", "prefers-color-scheme:dark"} {
		if !strings.Contains(html, want) {
			t.Errorf("report lacks %q", want)
		}
	}
	if bad := regexp.MustCompile(`ZgotmplZ|NaN|<script|https?://|src=|@import|url\(`).FindString(html); bad != "" {
		t.Errorf("report contains %q", bad)
	}
	if html = renderReport(t, writeRun(t, ""), nil); !strings.Contains(html, "No evaluation yet") || !strings.Contains(html, "No rescue was made") {
		t.Error("report of a run without a step")
	}
	if html = renderReport(t, writeRun(t, steps, eval("0", "0.25")), nil); !strings.Contains(html, "no second evaluation yet") || strings.Contains(html, "→") {
		t.Error("report of a run with one evaluation shows a change")
	}
}

func renderReport(t *testing.T, dir string, sum *trainer.Summary) string {
	t.Helper()
	path := filepath.Join(dir, "report.html")
	must(t, writeReport(dir, path, sum))
	b, err := os.ReadFile(path)
	must(t, err)
	return string(b)
}
