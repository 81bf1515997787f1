package model

import (
	"fmt"
	"math"
	"testing"

	"harness-s/kernels"
)

// TestExecMatchesTape: planner and executor against Gorgonia's TapeMachine, which shares graph and kernels and nothing else.
func TestExecMatchesTape(t *testing.T) {
	for _, c := range []struct {
		dt        kernels.DType
		tied      bool
		recompute bool
		tol       float64
	}{{kernels.F64, true, false, 1e-7}, {kernels.F64, false, true, 1e-7}, {kernels.F32, true, false, 2e-5}, {kernels.F32, true, true, 2e-5}} {
		t.Run(fmt.Sprintf("%v/tied=%t/recompute=%t", c.dt, c.tied, c.recompute), func(t *testing.T) {
			cfg := execConfig(LinearAttention, FullAttention)
			cfg.TieEmbeddings = c.tied
			m := randomModel(t, execDevice(t, 0), cfg, c.dt)
			e := newExec(t, m, ExecOptions{MaxRows: 128, Recompute: c.recompute})
			b := tree(3, 61, [2]int32{7, -1}, [2]int32{4, 0}, [2]int32{66, 0}, [2]int32{5, -1})
			coef := coefficients(1, len(b.Rows))
			gotLP, got := e.train(t, b, coef, nil)
			lp, grads, err := TapeRun(m, b, coef)
			check(t, err)
			for i := range lp {
				if math.Abs(gotLP[i]-float64(lp[i])) > 1e-6 {
					t.Errorf("logp %d is %v, tape %v", i, gotLP[i], lp[i])
				}
			}
			if len(grads) != len(got) {
				t.Errorf("%d gradients, tape has %d", len(got), len(grads))
			}
			want := map[string][]float64{}
			for name, g := range grads {
				for _, x := range g {
					want[name] = append(want[name], float64(x))
				}
			}
			compareGrads(t, "exec", got, want, c.tol)
		})
	}
}

func TestTapeRefuses(t *testing.T) {
	m := randomModel(t, execDevice(t, 0), execConfig(LinearAttention), kernels.F32)
	b := tree(3, 61, [2]int32{4, -1})
	if _, _, err := TapeRun(m, b, []float32{1}); err == nil {
		t.Error("one coefficient for three targets was accepted")
	}
	gr := must[*Graph](t)(Build(execConfig(), Train))
	if _, err := opOf(gr.handle).Do(); err == nil {
		t.Error("an op of a planning graph ran")
	}
}
