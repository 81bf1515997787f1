package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	"harness-s/model"
	"harness-s/trainer"
)

// initModelCmd writes a randomly initialised checkpoint of a released shape: hs init-model.
type initModelCmd struct {
	Like   string `required:"" help:"Size whose shape to take: 0.8b, 2b, 4b or 9b." placeholder:"SIZE"`
	Layers int    `default:"0" help:"Keep the first N layers, a multiple of 4; 0 = all."`
	Seed   uint64 `default:"1" help:"Seed of the weights."`
	DType  string `name:"dtype" default:"bf16" enum:"f32,bf16" help:"Storage type: f32 or bf16."`
	Out    string `required:"" type:"path" help:"Directory to write; empty or not there yet." placeholder:"DIR"`
}

// initModelResult is the JSON contract of hs init-model.
type initModelResult struct {
	Path    string `json:"path"`
	Like    string `json:"like"`
	Layers  int    `json:"layers"`
	DType   string `json:"dtype"`
	Seed    uint64 `json:"seed"`
	Params  int64  `json:"params"`
	Tensors int    `json:"tensors"`
	Bytes   int64  `json:"bytes"`
}

// Run says what will be written before anything is.
func (c *initModelCmd) Run(ctx context.Context, g *globals) error {
	dtype := strings.ToUpper(c.DType)
	text, cfg, err := model.Like(strings.ToLower(c.Like), c.Layers, dtype)
	if err != nil {
		return exitError{code: exitUsage, err: err}
	}
	size, err := model.RandomSize(cfg, text, dtype)
	if err != nil {
		return err
	}
	if err := model.CheckEmptyDir(c.Out); err != nil {
		return exitError{code: exitUsage, err: err}
	}
	free, err := trainer.FreeBytes(existing(c.Out))
	if err != nil {
		return err
	}
	r := initModelResult{Path: c.Out, Like: strings.ToLower(c.Like), Layers: cfg.NumLayers, DType: c.DType, Seed: c.Seed,
		Params: cfg.NumParams(), Tensors: len(cfg.Tensors()), Bytes: size}
	if err := checkSpace(r, free); err != nil {
		return err
	}
	g.confirm("writing %s, %d layers (%d linear, %d full), %d parameters, %d tensors: %s of %s free in %s",
		r.Like, r.Layers, cfg.NumLinear(), cfg.NumFull(), r.Params, r.Tensors, gib(size), gib(free), c.Out)
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
	defer stop()
	err = model.WriteRandom(ctx, c.Out, cfg, text, model.RandomOptions{Seed: c.Seed, DType: dtype, Progress: func(done, total int64) {
		g.progress.report(trainer.Progress{Phase: "write MiB", Done: int(done >> 20), Total: int(total >> 20)})
	}})
	g.progress.clear()
	if errors.Is(err, context.Canceled) {
		return exitError{code: exitInterrupted, err: &trainer.Error{Op: "write checkpoint", Err: errors.New("interrupted, nothing was kept"), Hint: "type the same command again to start over"}}
	}
	if err != nil {
		return err
	}
	g.confirm("wrote %s; it has no tokenizer: give token ids to the commands that read it", c.Out)
	if g.JSON {
		return g.emit(r)
	}
	return nil
}

// existing is path or its nearest parent that is there.
func existing(path string) string {
	for {
		if _, err := os.Stat(path); err == nil {
			return path
		}
		parent := filepath.Dir(path)
		if parent == path {
			return path
		}
		path = parent
	}
}

// checkSpace refuses a checkpoint that does not fit on the disk, with some room for the file system.
func checkSpace(r initModelResult, free int64) error {
	const margin = 64 << 20
	if r.Bytes+margin <= free {
		return nil
	}
	return exitError{code: exitUsage, err: &trainer.Error{
		Op:   "check disk",
		Err:  fmt.Errorf("%s with %d layers in %s needs %s, the disk of %s has %s free", r.Like, r.Layers, r.DType, gib(r.Bytes), r.Path, gib(free)),
		Hint: "free some space, choose another disk with --out, or write less: --layers 4, --dtype bf16"}}
}

func gib(n int64) string { return fmt.Sprintf("%.2f GiB", float64(n)/(1<<30)) }
