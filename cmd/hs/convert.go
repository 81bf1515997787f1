package main

import (
	"context"
	"fmt"
	"path/filepath"

	"harness-s/model"
)

// convertCmd writes a checkpoint for other programs: hs convert.
type convertCmd struct {
	Ckpt    string  `type:"path" help:"Checkpoint to write; default the newest of --run." placeholder:"DIR"`
	Adapter string  `type:"path" help:"LoRA adapter, a PEFT directory; its base is --ckpt, or what the adapter names." placeholder:"DIR"`
	As      string  `default:"model" enum:"model,adapter,adapter-vl" help:"model = a whole checkpoint, an adapter merged; adapter = the LoRA adapter for PEFT, in float32; adapter-vl = the same named for the class with the vision tower."`
	RunName string  `name:"run" help:"Take the newest checkpoint of this run, and --keep from its model.path." placeholder:"NAME"`
	Keep    string  `type:"path" help:"Original checkpoint: its vision tower, MTP head, tensor names, dtypes and config.json are kept." placeholder:"DIR"`
	DType   string  `name:"dtype" default:"stored" enum:"stored,f32" help:"stored = the dtypes of --keep, or bf16 as published; f32 = exact."`
	Shard   float64 `name:"shard-gib" default:"5" help:"Largest weight file in GiB, 0 = one file."`
	Out     string  `required:"" type:"path" help:"Directory to write; empty or not there yet." placeholder:"DIR"`
}

// convertResult is the JSON contract of hs convert.
type convertResult struct {
	Path   string `json:"path"`
	From   string `json:"from"`
	Keep   string `json:"keep"`
	DType  string `json:"dtype"`
	As     string `json:"as"`
	Params int64  `json:"params"`
}

// Run loads the weights and writes them again; --out appears complete or not at all.
func (c *convertCmd) Run(_ context.Context, g *globals) error {
	if c.Shard < 0 {
		return usage("--shard-gib 5, or 0 for one file", "--shard-gib %g", c.Shard)
	}
	if err := c.fromRun(g); err != nil {
		return err
	}
	if err := model.CheckEmptyDir(c.Out); err != nil {
		return exitError{code: exitUsage, err: err}
	}
	dev, m, err := g.openAdapted(c.Ckpt, c.Adapter, model.LoadOptions{}) // in float32, which holds every bit
	if err != nil {
		return err
	}
	defer dev.Close()
	defer m.Close()
	params := m.Config.NumParams()
	if c.As == "model" {
		err = c.write(m)
	} else {
		params = m.NumTrainable()
		err = m.SaveAdapter(c.Out, model.SaveAdapterOptions{Multimodal: c.As == "adapter-vl"})
	}
	if err != nil {
		return err
	}
	from := c.Ckpt
	if c.Adapter != "" {
		from = c.Adapter
	}
	g.say("wrote %s: %d parameters from %s", c.Out, params, from)
	if g.JSON {
		return g.emit(convertResult{Path: c.Out, From: from, Keep: c.Keep, DType: c.DType, As: c.As, Params: params})
	}
	return nil
}

// write is the whole checkpoint.
func (c *convertCmd) write(m *model.Model) error {
	o := model.SaveOptions{Keep: c.Keep, MaxShardBytes: int64(c.Shard * (1 << 30))}
	if c.DType == "stored" {
		o.DType = model.SaveStored
	}
	return m.SaveAs(c.Out, o)
}

// fromRun fills --ckpt and --keep from --run.
func (c *convertCmd) fromRun(g *globals) error {
	if c.RunName == "" {
		if c.Ckpt == "" && c.Adapter == "" {
			return usage("hs convert --run NAME --out DIR, or hs convert --ckpt DIR --out DIR", "nothing to convert")
		}
		return nil
	}
	dir, err := g.runDir(c.RunName)
	if err != nil {
		return err
	}
	if c.Ckpt == "" && c.Adapter == "" {
		if c.Ckpt = newestCheckpoint(dir); c.Ckpt == "" {
			return usage("let the run write its first checkpoint, or give --ckpt DIR", "run %s has no checkpoint yet", c.RunName)
		}
	}
	if c.Keep == "" {
		res, err := configFlags{Config: []string{filepath.Join(dir, "run.toml")}}.load(g)
		if err != nil {
			return fmt.Errorf("read the configuration of run %s: %w", c.RunName, err)
		}
		c.Keep = res.Config.Model.Path // empty: the run began with the shipped checkpoint
	}
	return nil
}
