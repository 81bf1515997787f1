package main

import (
	"math"
	"testing"

	"harness-s/model"
)

// TestFloors: the floors at 4.3 TB/s and 790 TFLOP/s are the numbers of gpu.md's tables.
func TestFloors(t *testing.T) {
	x := ceilings{CopyBytesPerS: 4.3e12, GemmFLOPS: 790e12}
	shape := map[string]floorShape{}
	for _, name := range []string{"4b", "9b"} {
		_, cfg, err := model.Like(name, 0, "BF16")
		must(t, err)
		shape[name] = shapeOf(cfg, 2)
	}
	plain := decodeForm{logits: true}
	near := func(what string, got, want, rel float64) {
		t.Helper()
		if !(math.Abs(got/want-1) <= rel) {
			t.Errorf("%s: %.5g, gpu.md has %.5g", what, got, want)
		}
	}
	for name, rows := range map[string][]struct{ B, c, tok float64 }{ // 3.3, fp32 state read and written
		"4b": {{1, 1024, 503}, {1, 4096, 497}, {1, 16384, 475}, {32, 4096, 8578}, {64, 1024, 15973}, {64, 4096, 11626}, {128, 16384, 6084}, {256, 1024, 23426}, {256, 4096, 15129}, {512, 4096, 15129}},
		"9b": {{1, 1024, 269}, {32, 4096, 5854}, {64, 16384, 4836}, {128, 4096, 11864}, {256, 4096, 13237}},
	} {
		for _, r := range rows {
			near(name+" decode", r.B/shape[name].decode(x, r.B, r.c, plain), r.tok, 2e-3)
		}
	}
	for name, want := range map[string]float64{"4b": 17949, "9b": 15347} {
		near(name+" decode with replay", 256/shape[name].decode(x, 256, 4096, decodeForm{replay: true, logits: true}), want, 2e-3)
	}
	for name, want := range map[string][3]float64{"4b": {107.5e3, 104.6e3, 94.6e3}, "9b": {56.2e3, 55.4e3, 52.5e3}} { // 3.4
		for i, T := range []float64{1024, 4096, 16384} {
			near(name+" prefill", x.GemmFLOPS/shape[name].prefillFLOPs(T), want[i], 2e-3)
		}
	}
	for _, r := range []struct { // 3.5
		name      string
		T         float64
		recompute bool
		gflop     float64
	}{{"4b", 4096, false, 26.7}, {"4b", 4096, true, 34.2}, {"4b", 16384, false, 29.5}, {"4b", 16384, true, 37.8}, {"9b", 4096, false, 49.1}, {"9b", 4096, true, 63.3},
		{"9b", 16384, false, 51.9}, {"9b", 16384, true, 66.9}} {
		near(r.name+" train", shape[r.name].hardwareFLOPs(r.T, r.recompute)/1e9, r.gflop, 3e-3)
	}
	near("4b score", shape["4b"].scoreFLOPs(4096)/1e9, 8.8, 3e-3)
	near("9b score", shape["9b"].scoreFLOPs(4096)/1e9, 16.3, 3e-3)
	for name, want := range map[string][3]float64{"4b": {0.3, 49, 37}, "9b": {0.6, 59, 67}} { // 3.6
		f := shape[name].step(x, 64, 8, 512, 2048, 256, plain)
		near(name+" step: decode", f.Decode, want[1], 0.02)
		near(name+" step: train", f.Train, want[2], 0.03)
		near(name+" step: prefill", f.Prefill, want[0], 0.06)
	}
	// 6: per layer at 16k training tokens, or 256 sequences at 4k.
	for name, want := range map[string]map[string]float64{
		"4b": {"gemm_gdn_in/M=16384": 1.31e-3, "gemm_gate_up/M=16384": 1.96e-3, "gemm_down/M=16384": 0.98e-3, "gemm_gdn_in/M=64": 14.7e-6, "gemm_gate_up/M=64": 21.9e-6,
			"gemm_head/M=64": 296e-6, "swiglu/T=16384": 211e-6, "swiglu_bwd/T=16384": 351e-6, "convgate/T=16384": 125e-6, "gdn/T=16384": 240e-6, "gdn_step/B=64": 35e-6,
			"gdn_step/B=256": 139e-6, "lmhead_sample/B=64": 296e-6, "attn_paged/B=64": 250e-6, "attn_paged/B=256": 1e-3, "lmhead/T=16384": 26.4e-3},
		"9b": {"gemm_gdn_in/M=16384": 2.10e-3, "gemm_gate_up/M=16384": 4.18e-3, "gemm_down/M=64": 23.4e-6, "lmhead/T=16384": 42.2e-3, "gemm_head/M=64": 473e-6},
	} {
		_, cfg, err := model.Like(name, 0, "BF16")
		must(t, err)
		for _, k := range kernelCases(cfg, fullScale) {
			if w, ok := want[k.name]; ok {
				near(name+" "+k.name, k.floor(x), w, 0.03)
				delete(want, k.name)
			}
		}
		for k := range want {
			t.Errorf("%s: no kernel %s", name, k)
		}
	}
}
