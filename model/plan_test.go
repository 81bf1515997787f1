package model

import (
	"fmt"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"harness-s/kernels"
)

// TestGraphBuilds fails at start when go.mod loses the raised go4.org/unsafe/assume-no-moving-gc: Gorgonia then panics in its init.
func TestGraphBuilds(t *testing.T) { must[*Graph](t)(Build(execConfig(), Train)) }

func compile(t testing.TB, cfg *Config, mode Mode, o PlanOptions) *Program {
	t.Helper()
	return must[*Program](t)(Compile(must[*Graph](t)(Build(cfg, mode)), o))
}

func TestProgramText(t *testing.T) {
	for _, c := range []struct {
		name string
		mode Mode
		opt  PlanOptions
	}{
		{"train", Train, PlanOptions{}},
		{"train_recompute", Train, PlanOptions{Recompute: true}},
		{"score", Score, PlanOptions{DType: kernels.F64}},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := compile(t, execConfig(), c.mode, c.opt)
			p.Place(Shapes{Rows: 128, Targets: 32, States: 6})
			text := p.String()
			golden(t, "testdata/program_"+c.name+".txt", text, *updateProgram)
			again := compile(t, execConfig(), c.mode, c.opt)
			again.Place(Shapes{Rows: 128, Targets: 32, States: 6})
			if again.String() != text {
				t.Error("a second compilation gives another text")
			}
		})
	}
}

// TestProgramHasNoLooseAdds: every join of gradients is fused into its producer, and the residual gradient stays in one buffer.
func TestProgramHasNoLooseAdds(t *testing.T) {
	for _, recompute := range []bool{false, true} {
		p := compile(t, execConfig(), Train, PlanOptions{Recompute: recompute})
		for i, r := range p.records {
			if r.op == kernels.OpAdd || i >= p.numForward && r.op == kernels.OpCopy && !r.again {
				t.Errorf("record %d is %v %s", i, r.op, r.label)
			}
		}
	}
}

// checkMemory runs a program symbolically on an arena: a write takes the buffer's bytes from every other buffer, a read needs all of them.
func checkMemory(p *Program) error {
	type span struct{ from, to int64 }
	at := func(b int) span {
		buf := p.buffers[b]
		return span{buf.offset, buf.offset + buf.spec.elems(p.bucket)*int64(buf.spec.storage(p.opt.DType).Size())}
	}
	intact := map[int]bool{}
	touch := func(i int, r *record) error {
		for _, v := range r.reads {
			if b := p.values[v].buf; b >= 0 && !intact[b] {
				return fmt.Errorf("record %d (%v %s) reads %s after its bytes were overwritten", i, r.op, r.label, p.operand(v))
			}
		}
		for _, v := range r.writes {
			b := p.values[v].buf
			if b < 0 {
				continue
			}
			if slices.Contains(r.adds, v) && !intact[b] {
				return fmt.Errorf("record %d (%v %s) adds to %s, which was overwritten", i, r.op, r.label, p.operand(v))
			}
			w := at(b)
			if w.to > p.arenaBytes {
				return fmt.Errorf("%s ends at %d, arena has %d bytes", p.operand(v), w.to, p.arenaBytes)
			}
			for o := range intact {
				if s := at(o); o != b && s.from < w.to && w.from < s.to {
					if slices.ContainsFunc(r.reads, func(v valueID) bool { return p.values[v].buf == o }) {
						return fmt.Errorf("record %d (%v %s) writes over its own input", i, r.op, r.label)
					}
					delete(intact, o)
				}
			}
			intact[b] = true
		}
		return nil
	}
	for i, r := range p.records {
		if err := touch(i, r); err != nil {
			return err
		}
		if i == p.numForward-1 {
			for _, v := range []valueID{p.logp, p.ent, p.finalNorm} {
				if !intact[p.values[v].buf] {
					return fmt.Errorf("%s does not survive the forward pass", p.operand(v))
				}
			}
		}
	}
	return nil
}

// TestArenaProperty: no two live buffers overlap, for any layer pattern, option and bucket.
func TestArenaProperty(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		kinds := rapid.SliceOfN(rapid.SampledFrom([]LayerType{LinearAttention, FullAttention}), 1, 5).Draw(rt, "layers")
		cfg := execConfig(kinds...)
		cfg.TieEmbeddings = rapid.Bool().Draw(rt, "tied")
		mode := rapid.SampledFrom([]Mode{Train, Score}).Draw(rt, "mode")
		opt := PlanOptions{Recompute: rapid.Bool().Draw(rt, "recompute"), DType: rapid.SampledFrom([]kernels.DType{kernels.F32, kernels.F64, kernels.BF16}).Draw(rt, "dtype")}
		gr, err := Build(cfg, mode)
		if err != nil {
			rt.Fatal(err)
		}
		p, err := Compile(gr, opt)
		if err != nil {
			rt.Fatal(err)
		}
		rows := rapid.Int64Range(1, 700).Draw(rt, "rows")
		p.Place(Shapes{Rows: rows, Targets: rapid.Int64Range(1, 700).Draw(rt, "targets"), States: rapid.Int64Range(2, 2*rows+1).Draw(rt, "states")})
		if err := checkMemory(p); err != nil {
			rt.Fatal(err)
		}
		if p.arenaBytes < p.liveBytes || p.arenaBytes > 2*p.liveBytes {
			rt.Fatalf("arena %d bytes, most live at once %d", p.arenaBytes, p.liveBytes)
		}
	})
}

func TestRecomputeSavesMemory(t *testing.T) {
	var kinds []LayerType
	for range 12 {
		kinds = append(kinds, LinearAttention)
	}
	sh := Shapes{Rows: 1024, Targets: 256, States: 32}
	keep := compile(t, execConfig(kinds...), Train, PlanOptions{})
	again := compile(t, execConfig(kinds...), Train, PlanOptions{Recompute: true})
	keep.Place(sh)
	again.Place(sh)
	if again.PeakBytes() > keep.PeakBytes()/3 {
		t.Errorf("recompute needs %d bytes, keeping everything %d", again.PeakBytes(), keep.PeakBytes())
	}
	kf, kb := keep.FLOPs(sh)
	rf, rb := again.FLOPs(sh)
	if kf != rf || rb <= kb || rb > kb+kf {
		t.Errorf("flops %g + %g, with recompute %g + %g", kf, kb, rf, rb)
	}
	if want := 2 * float64(sh.Rows) * 40 * 24; kf < want {
		t.Errorf("forward flops %g, one projection alone takes %g", kf, want)
	}
}

func TestBuildRefuses(t *testing.T) {
	bad := execConfig()
	bad.ConvKernel = 3
	if _, err := Build(bad, Train); err == nil {
		t.Error("conv kernel 3 was accepted")
	}
	if _, err := Build(execConfig(), Mode(9)); err == nil {
		t.Error("mode 9 was accepted")
	}
	if _, err := Compile(must[*Graph](t)(Build(execConfig(), Train)), PlanOptions{DType: kernels.I32}); err == nil {
		t.Error("int32 plan was accepted")
	}
}

// TestBF16Plan: the plan in bfloat16 is the one in float32, but for the products into gradients of weights, which are float32 (and need a
// flag), and the arena, which is the one that the memory planner works out from a float32 plan.
func TestBF16Plan(t *testing.T) {
	lora := must[*Graph](t)(BuildLoRA(execConfig(), LoRA{Rank: 3, Alpha: 6, Targets: []string{AllLinear}}))
	for _, gr := range []*Graph{must[*Graph](t)(Build(execConfig(), Train)), lora} {
		for _, recompute := range []bool{false, true} {
			f := must[*Program](t)(Compile(gr, PlanOptions{Recompute: recompute}))
			b := must[*Program](t)(Compile(gr, PlanOptions{DType: kernels.BF16, Recompute: recompute}))
			sh := Shapes{Rows: 200, Targets: 77, States: 9}
			f.Place(sh)
			b.Place(sh)
			if b.arenaBytes != f.ArenaBytes(sh, kernels.BF16) || b.arenaBytes >= f.arenaBytes {
				t.Errorf("arena %d in bfloat16, planned %d, %d in float32", b.arenaBytes, f.ArenaBytes(sh, kernels.BF16), f.arenaBytes)
			}
			if ff, fb := f.FLOPs(sh); len(b.records) != len(f.records) {
				t.Errorf("%d records, %d in float32", len(b.records), len(f.records))
			} else if bf, bb := b.FLOPs(sh); ff != bf || fb != bb {
				t.Errorf("flops %g + %g, %g + %g in float32", bf, bb, ff, fb)
			}
			gradients := 0
			for i, r := range b.records {
				if r.op != kernels.OpGemm {
					continue
				}
				a, into := (*kernels.GemmArgs)(r.args), b.values[r.writes[0]].region == inGrad
				if wide := a.Flags&kernels.CF32 != 0; a.DType != kernels.BF16 || wide != into || into && a.Flags&kernels.Beta1 == 0 {
					t.Errorf("%s: dtype %v, flags %#x, gradient of a weight: %t", r.label, a.DType, a.Flags, into)
				}
				if g := (*kernels.GemmArgs)(f.records[i].args); g.Flags != a.Flags&^kernels.CF32 {
					t.Errorf("%s: flags %#x in float32, %#x in bfloat16", r.label, g.Flags, a.Flags)
				}
				if into {
					gradients++
				}
			}
			if gradients == 0 {
				t.Error("no product makes a gradient")
			}
		}
	}
}

func TestNullDevice(t *testing.T) {
	t.Run("f32", func(t *testing.T) { onNullDevice(t, LoadOptions{Train: true}, 1<<30) })
	t.Run("bf16", func(t *testing.T) {
		onNullDevice(t, LoadOptions{DType: kernels.BF16, Train: true, Optim: Recipe{HiLo: true}}, 1<<29)
	})
}

// onNullDevice runs an update of a million rows that no memory is behind.
func onNullDevice(t *testing.T, o LoadOptions, atLeast int64) {
	d := must[*kernels.Device](t)(kernels.Open("null", kernels.Options{}))
	m := must[*Model](t)(NewRandom(execConfig(), d, 1, o))
	e := must[*Exec](t)(NewExec(m, ExecOptions{MaxRows: 1 << 20, MaxTargets: 64}))
	b := tree(1, 61, [2]int32{70, -1}, [2]int32{5, 0})
	b.Rows, b.Targets = b.Rows[:60], b.Targets[:60]
	must[*Output](t)(e.Forward(b))
	check(t, e.Backward(make([]float32, 60), nil))
	check(t, e.Step(Hyper{LR: 1}))
	if e.PeakBytes() < atLeast {
		t.Errorf("peak %d bytes for a million rows", e.PeakBytes())
	}
	e.Close()
	m.Close()
	check(t, d.Close())
}

// TestMemoryCheckCatches: the arena check itself fails when two live buffers are moved onto each other, or one dies too early.
func TestMemoryCheckCatches(t *testing.T) {
	fresh := func() *Program {
		p := compile(t, execConfig(), Train, PlanOptions{})
		p.Place(Shapes{Rows: 100, Targets: 20, States: 6})
		check(t, checkMemory(p))
		return p
	}
	p := fresh()
	embed := p.values[p.records[0].writes[0]].buf
	p.buffers[p.values[p.records[1].writes[0]].buf].offset = p.buffers[embed].offset
	if checkMemory(p) == nil {
		t.Error("a norm written over its input passed")
	}
	p = fresh()
	p.buffers[embed].last = 1
	p.Place(p.bucket)
	if checkMemory(p) == nil {
		t.Error("a residual freed after its first reader passed")
	}
}

// TestHashes: ops that differ in any attribute hash apart, equal ones alike; Gorgonia merges nodes by hash.
func TestHashes(t *testing.T) {
	env := &environment{geo: geometryOf(execConfig()), shapes: Shapes{Rows: 4, Targets: 2, States: 3}, temp: 1}
	base := op{env: env, kind: kLinear, seq: 3, layer: 1, label: "a", n: 8, k: 4}
	same := base
	if base.Hashcode() != same.Hashcode() {
		t.Error("equal ops hash apart")
	}
	other := *env
	other.geo.Eps = 1e-5
	for name, change := range map[string]func(o *op){
		"kind": func(o *op) { o.kind = kLinearAdd }, "seq": func(o *op) { o.seq++ }, "layer": func(o *op) { o.layer++ },
		"label": func(o *op) { o.label = "b" }, "features": func(o *op) { o.n, o.k = o.k, o.n }, "geometry": func(o *op) { o.env = &other },
		"pick": func(o *op) { *o = *base.pick(0, 1) },
	} {
		c := base
		change(&c)
		if c.Hashcode() == base.Hashcode() {
			t.Errorf("another %s gives the same hash", name)
		}
	}
	if base.pick(0, 1).Hashcode() == base.pick(1, 2).Hashcode() {
		t.Error("two picks of one handle hash alike")
	}
}
