package main

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"strconv"

	"golang.org/x/sys/unix"

	"harness-s/kernels"
	"harness-s/model"
	"harness-s/trainer"
)

// gpuBytes reads --gpu-gib.
func gpuBytes(text string) (int64, error) {
	const most = 1 << 20 // a PiB
	x, err := strconv.ParseFloat(text, 64)
	if err != nil || !(x > 0 && x <= most) { // also NaN
		return 0, usage("--gpu-gib 139 for an H200, --gpu-gib 79 for an H100: its usable memory in GiB, without a unit", "--gpu-gib is %q, want a number above 0", text)
	}
	return int64(math.Round(x * (1 << 30))), nil
}

// ramBytes is the memory of this machine, 0 when unknown.
func ramBytes() int64 {
	var i unix.Sysinfo_t
	if unix.Sysinfo(&i) != nil {
		return 0
	}
	return int64(i.Totalram) * int64(i.Unit)
}

// modelConfig reads config.json of a checkpoint directory, which needs nothing else, or of the shipped checkpoint for "".
func modelConfig(dir string) (*model.Config, error) {
	var fsys fs.FS
	if dir != "" {
		fsys = os.DirFS(dir)
	} else {
		var err error
		if fsys, err = model.TinyFS(); err != nil {
			return nil, err
		}
	}
	b, err := fs.ReadFile(fsys, "config.json")
	if err != nil {
		return nil, exitError{code: exitUsage, err: &trainer.Error{Op: "read " + dir, Err: err, Hint: "give the directory of a Hugging Face Qwen3.5 checkpoint; its config.json is enough"}}
	}
	cfg, err := model.ParseConfig(b)
	if err != nil {
		return nil, exitError{code: exitUsage, err: &trainer.Error{Op: "read " + dir, Err: err, Hint: "only dense Qwen3.5 text models are supported"}}
	}
	return cfg, nil
}

// withPlanner runs f with a planner for the model of a directory. Workspaces are those of dev, or for a GPU that is not there (nil) those of
// the kernels that can be loaded: of libhs_cuda.so, else of libhs_emu.so, which are the same but for the products.
func withPlanner(dir string, dev *kernels.Device, at model.Placement, f func(cfg *model.Config, pl *model.MemoryPlanner) error) (err error) {
	cfg, err := modelConfig(dir)
	if err != nil {
		return err
	}
	if dev == nil && at == model.OnGPU {
		for _, table := range []string{"cuda", "emu", "cpu"} {
			if dev, err = kernels.Open("null", kernels.Options{Table: table, LibDir: os.Getenv("HS_LIB_DIR")}); err == nil {
				break
			}
		}
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, dev.Close()) }()
	}
	pl, err := model.NewMemoryPlanner(cfg, dev)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, pl.Close()) }()
	return f(cfg, pl)
}

// planMemory is the plan of a configuration; dev as in withPlanner.
func planMemory(cfg trainer.Config, dev *kernels.Device, b trainer.MemoryBudget) (p *trainer.MemoryPlan, err error) {
	err = withPlanner(cfg.Model.Path, dev, b.Placement, func(m *model.Config, pl *model.MemoryPlanner) error {
		p, err = trainer.PlanMemory(cfg, pl, m.NumParams(), b)
		return err
	})
	return p, err
}

// printMemory prints a plan as a table with a column per phase.
func printMemory(w io.Writer, p *trainer.MemoryPlan) {
	unit, name := float64(1<<30), "GiB"
	if p.Peak < 1<<30 {
		unit, name = 1<<20, "MiB"
	}
	where := p.DType + " on this machine's CPU, which has"
	if p.Placement == model.OnGPU.String() {
		where = p.DType + " on a GPU of"
	}
	fmt.Fprintf(w, "memory in %s, %s %.1f GiB; %s parameters, optimiser states %s, master weights %s\n", name, where, float64(p.Budget)/(1<<30),
		count(p.Params), p.States, p.Master)
	fmt.Fprintf(w, "context %d, %d slots, %d rows per micro-batch, recompute %s\n", p.Context, p.Slots, p.MicroRows, p.Recompute)
	cell := func(n int64, on bool) string {
		if !on {
			return fmt.Sprintf("%10s", "-")
		}
		return fmt.Sprintf("%10.2f", float64(n)/unit)
	}
	fmt.Fprintf(w, "%-32s%10s%10s\n", "", "rollout", "train")
	var small [2]int64 // lines that would read 0.00, together
	for _, l := range p.Lines {
		if float64(l.Bytes)/unit < 0.005 {
			for i, other := range []model.Phase{model.Training, model.Rollout} {
				if l.Phase != other {
					small[i] += l.Bytes
				}
			}
			continue
		}
		fmt.Fprintf(w, "%-32s%s%s\n", l.Name, cell(l.Bytes, l.Phase != model.Training), cell(l.Bytes, l.Phase != model.Rollout))
	}
	fmt.Fprintf(w, "%-32s%s%s\n", "small buffers", cell(small[0], true), cell(small[1], true))
	fmt.Fprintf(w, "%-32s%s%s\n", "in use", cell(p.Rollout, true), cell(p.Train, true))
	if p.Placement == model.OnCPU.String() {
		fmt.Fprintf(w, "%-32s%10s%s\n", "side by side", "", cell(p.Peak, true))
	}
	if p.Placement == model.OnGPU.String() {
		from := "of libhs_" + p.Kernels + ".so"
		if p.Kernels == "cpu" {
			from = "not counted but for an estimate of the largest: neither libhs_cuda.so (make cuda) nor libhs_emu.so (make emu) was found"
		}
		fmt.Fprintf(w, "workspaces of the kernels         %s\n", from)
	}
	fmt.Fprintf(w, "%-32s%10s%s  (%.2f kept free)\n", headroomName(p), "", cell(max(p.Headroom, -p.Headroom), true), float64(p.Reserve)/unit)
	fmt.Fprintf(w, "largest that fits               rollout.slots %d; model.micro_rows %d with recompute none, %d with layers\n", p.MaxSlots, p.MaxRows.None, p.MaxRows.Layers)
	fmt.Fprintf(w, "operations per token            %.4g GFLOP forward, %.4g training\n", p.FLOPs.Forward/1e9, p.FLOPs.Train/1e9)
}

// count is a number of parameters for people.
func count(n int64) string {
	if n >= 1e9 {
		return fmt.Sprintf("%.2f billion", float64(n)/1e9)
	}
	return fmt.Sprintf("%.2f million", float64(n)/1e6)
}

func headroomName(p *trainer.MemoryPlan) string {
	if p.Fits {
		return "headroom"
	}
	return "shortfall"
}

// plan is hs doctor --gpu-gib: the memory on a GPU of that size and nothing else; exit code 3 when it does not fit.
func (c *doctorCmd) plan(g *globals, cfg trainer.Config) error {
	n, err := gpuBytes(c.GPUGib)
	if err != nil {
		return err
	}
	p, err := planMemory(cfg, nil, trainer.GPUBudget(n))
	if err != nil {
		return err
	}
	if g.JSON {
		if err := g.emit(map[string]any{"ok": p.Fits, "memory": p}); err != nil {
			return err
		}
	} else {
		printMemory(g.out, p)
	}
	if p.Fits {
		return nil
	}
	fmt.Fprintf(g.errOut, "error: the plan does not fit, %s too much\nhint: %s\n", gib(-p.Headroom), p.Hint())
	return exitError{code: exitNotReady, silent: true}
}
