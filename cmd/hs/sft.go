package main

import (
	"context"
	"fmt"

	"harness-s/model"
	"harness-s/trainer"
)

// sftCmd is the warm start: hs sft.
type sftCmd struct {
	configFlags
	New  string `help:"tiny = fresh tokenizer and weights; default trains model.path."`
	Ckpt string `type:"path" help:"Start from this checkpoint instead of model.path."`
	Out  string `type:"path" help:"Directory of the result, Hugging Face layout; a LoRA adapter is merged, and lies in its folder adapter."`

	Keep  string `type:"path" help:"Checkpoint whose vision tower, MTP head, tensor names and config.json --out keeps; default the one that training starts from." placeholder:"DIR"`
	DType string `name:"dtype" default:"f32" enum:"stored,f32" help:"f32 = exact, to train on; stored = the dtypes of --keep, or bf16 as published."`

	Pack string `type:"path" help:"Pack this checkpoint directory for embedding instead of training." placeholder:"DIR"`
	Into string `type:"path" help:"Where --pack writes." placeholder:"DIR"`

	Unpack string `type:"path" help:"Write the shipped checkpoint to this directory instead of training." placeholder:"DIR"`
}

// Run trains on demonstrations.
func (c *sftCmd) Run(ctx context.Context, g *globals) error {
	if c.Pack != "" {
		if c.Into == "" {
			return usage("hs sft --pack DIR --into DIR", "--pack needs --into")
		}
		if err := model.WriteTiny(c.Pack, c.Into); err != nil {
			return err
		}
		g.confirm("packed %s into %s", c.Pack, c.Into)
		if g.JSON {
			return g.emit(map[string]any{"packed": c.Pack, "into": c.Into})
		}
		return nil
	}
	if c.Unpack != "" {
		if err := model.UnpackTiny(c.Unpack); err != nil {
			return err
		}
		g.confirm("the shipped checkpoint is in %s", c.Unpack)
		if g.JSON {
			return g.emit(map[string]any{"unpacked": c.Unpack})
		}
		return nil
	}
	if c.Out == "" {
		return usage("hs sft --preset tiny --new tiny --out DIR", "--out is missing")
	}
	if c.New != "" && c.New != "tiny" {
		return usage("--new tiny", "--new %q: only tiny can be made fresh", c.New)
	}
	if c.Ckpt != "" {
		c.Set = append(c.Set, fmt.Sprintf("model.path=%q", c.Ckpt))
	}
	res, err := c.load(g)
	if err != nil {
		return err
	}
	cfg := res.Config
	if c.New != "" && cfg.LoRA.Rank > 0 {
		return usage("leave out --new, or --set lora.rank=0", "--new makes fresh weights, lora.rank = %d trains an adapter beside frozen ones", cfg.LoRA.Rank)
	}
	var load func(*session) (*model.Model, error)
	if c.New == "tiny" {
		load = func(s *session) (*model.Model, error) {
			return trainer.NewTiny(ctx, cfg, s.env, s.pool, s.dev, g.progress.report)
		}
	}
	s, err := g.open(cfg, true, g.logger(), load)
	if err != nil {
		return err
	}
	defer s.close()
	g.say("%s", s.describe())
	if text := cfg.LoRA.Caution(cfg.SFT.LR); text != "" {
		g.logger().Warn(text)
	}
	o := model.SaveOptions{Keep: c.Keep}
	if o.Keep == "" && c.New == "" {
		o.Keep = cfg.Model.Path // empty: the shipped checkpoint, which has nothing else
	}
	if c.DType == "stored" {
		o.DType = model.SaveStored
	}
	if _, err := s.model.CheckSave(c.Out, o); err != nil {
		return err
	}
	rep, err := trainer.RunSFT(ctx, cfg, s.deps, trainer.SFTOptions{Out: c.Out, Save: o, Progress: g.progress.report, Step: func(st trainer.SFTStep) {
		if st.HeldOut > 0 || st.Step%20 == 0 || st.Step == st.Steps {
			g.progress.clear()
			line := fmt.Sprintf("sft %5d/%d  loss %.4f  |g| %.3f  lr %.2e  %d tokens  %.2fs", st.Step, st.Steps, st.Loss, st.GradNorm, st.LR, st.Tokens, st.Seconds)
			if st.HeldOut > 0 {
				line += fmt.Sprintf("  held-out %.4f", st.HeldOut)
			}
			g.say("%s", line)
		}
	}})
	g.progress.clear()
	if err != nil {
		return err
	}
	g.say("%d demonstrations, held-out loss %.4f -> %.4f, weights %s", rep.Demos, rep.HeldOutBefore, rep.HeldOut, rep.WeightsSHA256)
	g.say("checkpoint: %s", c.Out)
	if g.JSON {
		return g.emit(rep)
	}
	return nil
}
