package trainer

import (
	"context"
	"errors"

	"harness-s/env"
	"harness-s/env/harness"
	"harness-s/kernels"
	"harness-s/model"
)

// SFTOptions are what RunSFT needs beyond the configuration.
type SFTOptions struct {
	Out      string // directory of the trained model, Hugging Face layout; empty = not saved
	HeldOut  int    // demonstrations kept aside for the held-out loss, 0 = 64
	Step     func(SFTStep)
	Progress func(Progress)
}

// SFTStep is one optimiser step of the warm start.
type SFTStep struct {
	Step     int     `json:"step"`
	Steps    int     `json:"steps"`
	Loss     float64 `json:"loss"`               // mean negative log-likelihood of the batch's policy tokens, nats
	HeldOut  float64 `json:"held_out,omitempty"` // same on the held-out demonstrations; 0 = not measured in this step
	LR       float64 `json:"lr"`
	GradNorm float64 `json:"grad_norm"`
	Tokens   int     `json:"tokens"` // policy tokens
	Rows     int     `json:"rows"`   // rows computed, prompts included
	Seconds  float64 `json:"seconds"`
}

// SFTReport is the result of a warm start; the JSON keys are stable.
type SFTReport struct {
	Steps         int            `json:"steps"`
	Demos         int            `json:"demos"`
	DemosBy       map[string]int `json:"demos_by"`     // harness kind / style
	DemosFailed   int            `json:"demos_failed"` // careful demonstrations that were not graded as solved
	Loss          float64        `json:"loss"`
	HeldOutBefore float64        `json:"held_out_before"`
	HeldOut       float64        `json:"held_out"`
	Tokens        int            `json:"tokens"`
	Seconds       float64        `json:"seconds"`
	WeightsSHA256 string         `json:"weights_sha256"`
	Out           string         `json:"out,omitempty"`
}

// RunSFT trains the policy on scripted episodes of train tasks.
func RunSFT(ctx context.Context, cfg Config, d *Deps, o SFTOptions) (*SFTReport, error) {
	return nil, errors.New("sft")
}

// NewTiny makes the fresh tiny policy: tokenizer trained on the text of scripted
// episodes, random weights. The result has no optimiser steps.
func NewTiny(ctx context.Context, cfg Config, e env.Env, pool *harness.Pool, dev *kernels.Device, progress func(Progress)) (*model.Model, error) {
	return nil, errors.New("new tiny")
}
