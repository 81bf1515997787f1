package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"text/tabwriter"

	"harness-s/trainer"
)

// gate is one row of gpu.md 2 for one model: the cell of a benchmark that it is about, and the number that is asked for, absolute for one H200
// or in percent of the floor.
type gate struct {
	id, what    string
	model       string // "4b", "9b", "" for any
	bench, cell string // cell is the part of the row's name behind the model
	want        float64
	unit        string
	most        bool // want is a maximum
	of          func(r benchRow) float64
}

func rate(r benchRow) float64 { return r.Rate }
func peak(r benchRow) float64 { return r.Peak }
func more(key string) func(benchRow) float64 {
	return func(r benchRow) float64 { return r.More[key] }
}

// gateTable is gpu.md 2, rows that a benchmark measures.
func gateTable() (gs []gate) {
	both := func(id, what, bench, cell string, w4, w9 float64, unit string, most bool, of func(benchRow) float64) {
		for i, m := range []string{"4b", "9b"} {
			if w := []float64{w4, w9}[i]; w > 0 {
				gs = append(gs, gate{id, what, m, bench, cell, w, unit, most, of})
			}
		}
	}
	both("D1", "decode, B=256, context 4k", "decode", "batch=256/ctx=4096", 10600, 9300, "tok/s", false, rate)
	both("D2", "the same with replay", "decode", "batch=256/ctx=4096", 12500, 10700, "tok/s", false, rate)
	for _, b := range []int{64, 128, 256} {
		for _, c := range []int{1024, 4096, 16384} {
			both("D3", fmt.Sprintf("decode, B=%d, context %dk", b, c/1024), "decode", fmt.Sprintf("batch=%d/ctx=%d", b, c), 70, 70, "% of floor", false, peak)
		}
	}
	both("D4", "decode, B=1", "decode", "batch=1/ctx=1024", 300, 160, "tok/s", false, rate)
	for i, n := range []int{1024, 4096, 16384} {
		both("P1", fmt.Sprintf("prefill %dk", n/1024), "prefill", fmt.Sprintf("batch=1/prompt=%d", n), []float64{54e3, 52e3, 47e3}[i], []float64{28e3, 28e3, 26e3}[i], "tok/s", false, rate)
	}
	both("T1", "train, 4k, full recompute", "train", "rows=4/length=4096/recompute=layers", 10000, 5500, "tok/s", false, rate)
	both("T2", "train, 4k, no recompute", "train", "rows=4/length=4096/recompute=none", 13300, 7200, "tok/s", false, rate)
	both("T3", "train, 16k, no recompute", "train", "rows=1/length=16384/recompute=none", 12100, 0, "tok/s", false, rate)
	both("T3", "train, 16k, full recompute", "train", "rows=1/length=16384/recompute=layers", 9400, 5300, "tok/s", false, rate)
	both("T5", "optimiser and gradient norm", "train", "rows=4/length=4096/recompute=layers", 0.03, 0.06, "s", true, more("optim-s"))
	both("S1", "GRPO step: decode", "step", "groups=64/attempts=8/prompt=512/new=2048", 71, 0, "s", true, more("sample-s"))
	both("S2", "GRPO step: training", "step", "groups=64/attempts=8/prompt=512/new=2048", 81, 0, "s", true, more("train-s"))
	both("M2", "peak memory, 16k micro-batch", "train", "rows=1/length=16384/recompute=none", 115, 0, "GiB", true, more("peak-GiB"))
	both("M2", "peak memory, 16k, full recompute", "train", "rows=1/length=16384/recompute=layers", 0, 108, "GiB", true, more("peak-GiB"))
	kernel := func(id, cell string, pct float64) {
		both(id, strings.ReplaceAll(cell, "/", ", "), "kernels", "op="+cell, pct, pct, "% of floor", false, peak)
	}
	kernel("K1", "gdn_step/B=64", 75)
	kernel("K1", "gdn_step/B=256", 75)
	kernel("K2", "adamw/N=268435456", 85)
	for _, g := range []string{"gdn_in", "out", "attn_in", "gate_up", "down", "head"} {
		kernel("K3", "gemm_"+g+"/M=64", 85)
	}
	kernel("K4", "rmsnorm/T=16384", 90)
	kernel("K5", "gemm_square/M=8192", 90)
	kernel("K6", "lmhead/T=16384", 90)
	seconds := func(r benchRow) float64 { return r.Seconds * 1e3 }
	both("K7", "delta rule forward, 32k", "kernels", "op=gdn/T=32768", 1.9, 1.9, "ms", true, seconds)
	both("K7", "delta rule backward, 32k", "kernels", "op=gdn_bwd/T=32768", 5.7, 5.7, "ms", true, seconds)
	kernel("K8", "attn/T=16384/seq=4096", 69.6)
	kernel("K8", "attn/T=16384/seq=16384", 69.6)
	return gs
}

// gateText is the gates of a row of a benchmark, for the line that it prints.
func gateText(model, bench, cell string) string {
	var parts []string
	for _, g := range gateTable() {
		if g.model == model && g.bench == bench && g.cell == cell {
			parts = append(parts, fmt.Sprintf("%s %g %s", g.id, g.want, g.unit))
		}
	}
	return strings.Join(parts, ", ")
}

// benchGates compares results with gpu.md 2.
type benchGates struct {
	Files []string `arg:"" type:"existingfile" help:"Files with the JSON lines of hs bench kernels, decode, prefill, train and step."`
}

// benchResult is what a JSON line of a benchmark has for the gates.
type benchResult struct {
	Bench    string     `json:"bench"`
	Model    string     `json:"model"`
	Backend  string     `json:"backend"`
	Build    string     `json:"build"`
	Ceilings ceilings   `json:"ceilings"`
	PeakGiB  float64    `json:"peak_gib"`
	Cells    []benchRow `json:"cells"`
}

// gateRow is one gate with what was measured; JSON keys are stable.
type gateRow struct {
	ID      string  `json:"id"`
	What    string  `json:"what"`
	Model   string  `json:"model"`
	Want    float64 `json:"want"`
	Unit    string  `json:"unit"`
	Got     float64 `json:"got,omitempty"`
	Verdict string  `json:"verdict"` // pass, miss, not measured, does not fit
}

// Run prints a table; exit code 1 when a gate was missed, 0 also when some were not measured.
func (c *benchGates) Run(g *globals) error {
	var all []benchResult
	for _, path := range c.Files {
		rs, err := readResults(path)
		if err != nil {
			return err
		}
		all = append(all, rs...)
	}
	if len(all) == 0 {
		return exitError{code: exitUsage, err: &trainer.Error{Op: "read results", Err: errors.New("no results of hs bench --json"), Hint: "hs bench decode --like 4b --json > decode.json"}}
	}
	rows, missed := judge(all), 0
	w := tabwriter.NewWriter(g.people(), 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "gate\tmodel\tquantity\twanted\tmeasured\t")
	for _, r := range rows {
		sign, got := ">=", "-"
		if r.Unit == "s" || r.Unit == "ms" || r.Unit == "GiB" {
			sign = "<="
		}
		if r.Verdict == "pass" || r.Verdict == "miss" {
			got = fmt.Sprintf("%.4g", r.Got)
		}
		if r.Verdict == "miss" {
			missed++
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s %g %s\t%s\t%s\n", r.ID, r.Model, r.What, sign, r.Want, r.Unit, got, r.Verdict)
	}
	w.Flush()
	for _, r := range all {
		g.say("%s %s on %s: copy %.3g TB/s, product %.4g TFLOP/s (%s), peak %.1f GiB", r.Bench, r.Model, r.Build, r.Ceilings.CopyBytesPerS/1e12, r.Ceilings.GemmFLOPS/1e12, r.Ceilings.Gemm, r.PeakGiB)
		if r.Backend != "cuda" {
			g.say("  not a GPU: these numbers say nothing about the gates")
		}
	}
	if g.JSON {
		if err := g.emit(map[string]any{"ok": missed == 0, "missed": missed, "gates": rows}); err != nil {
			return err
		}
	}
	if missed > 0 {
		return exitError{code: exitFailure, silent: true}
	}
	return nil
}

// readResults finds the JSON lines of benchmarks in a file; other lines are skipped.
func readResults(path string) (rs []benchResult, err error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	in := bufio.NewScanner(f)
	in.Buffer(nil, 16<<20)
	for in.Scan() {
		line := strings.TrimSpace(in.Text())
		if !strings.HasPrefix(line, "{") {
			continue
		}
		var r benchResult
		if err := json.Unmarshal([]byte(line), &r); err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		if r.Bench != "" {
			rs = append(rs, r)
		}
	}
	return rs, in.Err()
}

// judge compares every gate of the models that there are results of.
func judge(all []benchResult) (rows []gateRow) {
	seen := map[string]bool{}
	for _, r := range all {
		seen[r.Model] = true
	}
	for _, g := range gateTable() {
		if !seen[g.model] {
			continue
		}
		row := gateRow{ID: g.id, What: g.what, Model: g.model, Want: g.want, Unit: g.unit, Verdict: "not measured"}
		for _, r := range all {
			for _, cell := range r.Cells {
				_, name, _ := strings.Cut(cell.Name, "/model="+g.model+"/")
				if r.Bench != g.bench || name != g.cell {
					continue
				}
				if cell.NoFit != "" {
					row.Verdict = "does not fit"
					continue
				}
				row.Got, row.Verdict = g.of(cell), "miss"
				if g.most == (row.Got <= g.want) || row.Got == g.want {
					row.Verdict = "pass"
				}
			}
		}
		rows = append(rows, row)
	}
	return rows
}
