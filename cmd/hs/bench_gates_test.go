package main

import (
	"strings"
	"testing"

	"harness-s/model"
)

// TestBenchGates: results are judged by gpu.md 2, minima and maxima, and what is missing or does not fit says so.
func TestBenchGates(t *testing.T) {
	file := write(t, "results.json", `text that is no result
{"bench":"decode","model":"4b","backend":"cuda","cells":[{"name":"Decode/model=4b/batch=256/ctx=4096","rate":10600,"peak_pct":70.1},{"name":"Decode/model=4b/batch=64/ctx=4096","rate":9,"peak_pct":69.9},{"name":"Decode/model=4b/batch=256/ctx=16384","no_fit":"needs more"}]}
{"bench":"train","model":"4b","backend":"cuda","cells":[{"name":"Train/model=4b/rows=4/length=4096/recompute=layers","rate":10001,"more":{"optim-s":0.031}}]}
{"bench":"kernels","model":"4b","backend":"cuda","cells":[{"name":"Kernel/model=4b/op=gdn/T=32768","seconds":0.0018}]}
`)
	code, out, e := hs(t, "bench", "gates", file, "--json")
	v := lastJSON(t, out)
	if code != exitFailure || v["missed"] != 3.0 {
		t.Fatalf("exit code %d, %v missed: %s", code, v["missed"], e)
	}
	got := map[string]string{}
	for _, x := range v["gates"].([]any) {
		r := x.(map[string]any)
		got[r["id"].(string)+" "+r["what"].(string)] = r["verdict"].(string)
	}
	for what, want := range map[string]string{"D1 decode, B=256, context 4k": "pass", "D2 the same with replay": "miss", "D3 decode, B=256, context 4k": "pass", "D3 decode, B=64, context 4k": "miss",
		"D3 decode, B=256, context 16k": "does not fit", "D4 decode, B=1": "not measured", "T1 train, 4k, full recompute": "pass", "T5 optimiser and gradient norm": "miss",
		"K7 delta rule forward, 32k": "pass"} {
		if got[what] != want {
			t.Errorf("%s: %q, want %q", what, got[what], want)
		}
	}
	if code, _, e := hs(t, "bench", "gates", write(t, "none.json", "nothing\n")); code != exitUsage || !strings.Contains(e, "hint:") {
		t.Errorf("no results: exit code %d: %s", code, e)
	}
	// Every row that a gate of a kernel is about exists at the full scale: a gate that nothing measures is a misspelt one.
	names := map[string]bool{}
	for _, m := range []string{"4b", "9b"} {
		_, cfg, err := model.Like(m, 0, "BF16")
		must(t, err)
		for _, k := range kernelCases(cfg, fullScale) {
			names["op="+k.name] = true
		}
	}
	for _, g := range gateTable() {
		if g.bench == "kernels" && !names[g.cell] {
			t.Errorf("gate %s is about %s, which is not measured", g.id, g.cell)
		}
	}
}
