// Package model holds Qwen3.5 dense text models: configuration, checkpoints, tokenizer, parameters, the program that runs them and the
// runner that samples from them (model.md).
//
// Config reads a Hugging Face config and lists the tensors that follow from it; Checkpoint reads safetensors files; Params keeps weights,
// gradients and moments in one device arena each; Tokenizer is a byte-level BPE; Exec computes log-probabilities and gradients of packed
// token trees; Runner samples sequences that share prefixes. Arithmetic is done by package kernels alone, through its table of
// operations.
//
// The package must never know what the tokens are for: no chat format, no environment, no reward, no loss. Coefficients of log-probs
// come in, gradients stay inside.
//
// Start with Load, which gives a Model, then NewExec to train or NewRunner to sample.
package model
