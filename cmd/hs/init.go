package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"harness-s/model"
	"harness-s/trainer"
)

// initCmd writes a configuration file: hs init.
type initCmd struct {
	Preset string   `arg:"" optional:"" help:"Preset to start from: demo, or dbbench with --model."`
	List   bool     `help:"List the presets."`
	Model  string   `type:"path" help:"Checkpoint to train; its config.json is enough." placeholder:"DIR"`
	GPUGib string   `name:"gpu-gib" help:"Size the configuration for a GPU with N GiB of usable memory." placeholder:"N"`
	Set    []string `sep:"none" help:"Set one key, as section.key=value; repeatable. Sizing leaves it alone." placeholder:"KEY=VALUE"`
	Out    string   `short:"o" default:"hs.toml" type:"path" help:"File to write."`
	Force  bool     `help:"Replace an existing file."`
}

// Run writes the file; an existing one is never replaced without --force.
func (c *initCmd) Run(ctx context.Context, g *globals) error {
	if c.List {
		names := trainer.Presets()
		if g.JSON {
			return g.emit(map[string]any{"presets": names})
		}
		fmt.Fprintln(g.out, strings.Join(names, "\n"))
		return nil
	}
	if c.Preset == "" {
		c.Preset = "demo"
		if c.Model != "" {
			c.Preset = "dbbench"
		}
	}
	preset, err := trainer.Preset(c.Preset)
	if err != nil {
		return err
	}
	if err := c.checkOut(); err != nil {
		return err
	}
	sets := c.Set
	if c.Model != "" {
		sets = append([]string{fmt.Sprintf("model.path=%q", c.Model)}, sets...)
	}
	text, plan, err := c.text([]trainer.Layer{{Name: "preset " + c.Preset, Text: preset}}, sets)
	if err != nil {
		return err
	}
	if err := trainer.WriteAtomic(c.Out, text); err != nil {
		return err
	}
	if g.JSON {
		out := map[string]any{"path": c.Out, "preset": c.Preset}
		if plan != nil {
			out["memory"] = plan
		}
		return g.emit(out)
	}
	if plan != nil && !g.Quiet {
		printMemory(g.out, plan)
	}
	g.say("wrote %s; next: hs train -c %s", c.Out, c.Out)
	return nil
}

// checkOut refuses a file that cannot or must not be written.
func (c *initCmd) checkOut() error {
	if st, err := os.Stat(c.Out); err == nil && st.IsDir() {
		return usage("-o "+filepath.Join(c.Out, "hs.toml"), "%s is a directory", c.Out)
	} else if err == nil && !c.Force {
		return usage("--force replaces it; -o FILE writes elsewhere", "%s exists", c.Out)
	} else if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if dir := filepath.Dir(c.Out); !isDir(dir) {
		return usage("mkdir -p "+dir, "no directory %s", dir)
	}
	return nil
}

// text is the configuration with its documentation, sized for a GPU when one is given; the plan is then its head.
func (c *initCmd) text(layers []trainer.Layer, sets []string) ([]byte, *trainer.MemoryPlan, error) {
	if c.GPUGib == "" {
		res, err := trainer.Load(layers, sets)
		if err != nil {
			return nil, nil, err
		}
		if c.Model != "" {
			if _, err := modelConfig(c.Model); err != nil {
				return nil, nil, err
			}
		}
		return res.Config.Commented(), nil, nil
	}
	n, err := gpuBytes(c.GPUGib)
	if err != nil {
		return nil, nil, err
	}
	base, err := trainer.Load(layers, sets)
	if err != nil {
		return nil, nil, err
	}
	var out bytes.Buffer
	var plan *trainer.MemoryPlan
	err = withPlanner(base.Config.Model.Path, nil, model.OnGPU, func(m *model.Config, pl *model.MemoryPlanner) error {
		res, p, err := trainer.FitMemory(layers, sets, pl, m.NumParams(), trainer.GPUBudget(n))
		if errors.Is(err, trainer.ErrNoFit) {
			return exitError{code: exitNotReady, err: err}
		}
		if err != nil {
			return err
		}
		plan = p
		var head bytes.Buffer
		printMemory(&head, p)
		for line := range strings.Lines(head.String()) {
			out.WriteString("# " + line)
		}
		out.WriteByte('\n')
		out.Write(res.Config.Commented())
		return nil
	})
	return out.Bytes(), plan, err
}
