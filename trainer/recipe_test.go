package trainer

import (
	"slices"
	"strings"
	"testing"

	"harness-s/kernels"
	"harness-s/model"
)

// A checkpoint stores each arena that the storage of the moments has, and a resumed run wants all of them back.
func TestCheckpointArenas(t *testing.T) {
	for states, want := range map[string][]string{"fp32": {"m", "v"}, "bf16": {"m", "v"}, "8bit": {"m", "v", "m_scale", "v_scale"}} {
		w, d := newWorld(t, mixedRates, byRate), newRunDir(t)
		w.cfg.Optim.States = states
		if _, err := startRun(t, w, RunOptions{Dir: d}); err != nil {
			t.Fatal(err)
		}
		ck := d.Checkpoints(w.cfg.Save, nil)
		step, err := ck.Latest()
		if err != nil {
			t.Fatal(err)
		}
		l, err := ck.Load(step)
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, a := range l.Optim {
			names = append(names, a.Name)
		}
		if !slices.Equal(names, want) {
			t.Errorf("%s: a checkpoint has %q, want %q", states, names, want)
		}
	}
}

func TestRecipe(t *testing.T) {
	c := Defaults()
	if r := c.Recipe(); r.States != kernels.StateF32 || r.HiLo {
		t.Errorf("default recipe %+v", r)
	}
	seen := map[model.Recipe]bool{}
	for _, seed := range []uint64{1, 2} {
		for _, states := range []string{"fp32", "bf16", "8bit"} {
			for _, master := range []string{"fp32", "hilo"} {
				c.Run.Seed, c.Optim.States, c.Optim.Master = seed, states, master
				r := c.Recipe()
				if seen[r] || r != c.Recipe() {
					t.Errorf("seed %d, %s, %s: recipe %+v is one of another configuration", seed, states, master, r)
				}
				seen[r] = true
			}
		}
	}
	for states, want := range map[string]int64{"fp32": 12, "bf16": 8, "8bit": 6} {
		if got := (OptimConfig{States: states}).checkpointBytes(4); got != want {
			t.Errorf("%s: a checkpoint takes %d bytes a parameter, want %d", states, got, want)
		}
	}
}

// An update under every recipe samples what it trains on, and changes the weights the same way on 1 and 2 threads.
func TestRealModelRecipes(t *testing.T) {
	sums := map[string]string{}
	for _, states := range []string{"fp32", "bf16", "8bit"} {
		for _, master := range []string{"fp32", "hilo"} {
			cfg := testConfig()
			cfg.Optim.LR, cfg.Optim.States, cfg.Optim.Master = 1e-3, states, master
			var sum [2]string
			for i := range sum {
				m := realModelWith(t, i+1, cfg.Recipe())
				rep, err := BenchStep(t.Context(), cfg, realDeps(t, m, 24, 4096), BenchStepOptions{Groups: 2, Attempts: 4, Prompt: 40, New: 12, Vocab: 160, Steps: 2})
				if err != nil {
					t.Fatal(err)
				}
				if rep.GapMax > 1e-4 {
					t.Errorf("%s, %s: gap %g", states, master, rep.GapMax)
				}
				if sum[i], err = m.WeightsSHA256(); err != nil {
					t.Fatal(err)
				}
			}
			if sum[0] != sum[1] {
				t.Errorf("%s, %s: weights depend on the number of threads: %s", states, master, sum)
			}
			if old := sums[sum[0]]; old != "" {
				t.Errorf("%s, %s gives the weights of %s", states, master, old)
			}
			sums[sum[0]] = states + ", " + master
		}
	}
}

// TestStorage: what "auto" stands for on each device, and that a fixed configuration keeps it on another one.
func TestStorage(t *testing.T) {
	for _, c := range []struct {
		device, dtype, master string
		want                  kernels.DType
		split                 bool
	}{
		{"auto", "auto", "auto", kernels.F32, false}, {"cpu", "auto", "auto", kernels.F32, false}, {"cpu", "auto", "hilo", kernels.F32, true},
		{"emu", "auto", "auto", kernels.BF16, true}, {"cuda:1", "auto", "auto", kernels.BF16, true}, {"emu", "float32", "auto", kernels.F32, false},
		{"auto", "bfloat16", "auto", kernels.BF16, true}, {"emu", "auto", "hilo", kernels.BF16, true},
	} {
		cfg := Defaults()
		cfg.Model.Device, cfg.Model.DType, cfg.Optim.Master = c.device, c.dtype, c.master
		fixed := cfg.Fixed()
		moved := fixed
		moved.Model.Device = map[bool]string{true: "cpu", false: "emu"}[c.device == "emu"]
		for _, x := range []Config{cfg, fixed, moved} {
			if x.DType() != c.want || x.Recipe().HiLo != c.split {
				t.Errorf("%+v: %s %s %s gives %v, split %t", c, x.Model.Device, x.Model.DType, x.Optim.Master, x.DType(), x.Recipe().HiLo)
			}
		}
	}
	for _, sets := range [][]string{{`model.device="emu"`, `optim.master="fp32"`}, {`model.dtype="bfloat16"`, `optim.master="fp32"`}} {
		if _, err := Load(nil, sets); err == nil || !strings.Contains(err.Error(), "optim.master = \"fp32\"") || !strings.Contains(err.Error(), "hilo or auto") {
			t.Errorf("%v: %v", sets, err)
		}
	}
	if _, err := Load(nil, []string{`model.device="emu"`, `model.dtype="float32"`, `optim.master="fp32"`}); err != nil {
		t.Error(err)
	}
}
