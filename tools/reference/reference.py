#!/usr/bin/env python3
"""Make the parity fixtures of model/testdata/reference from Hugging Face transformers' Qwen3.5.

    reference.py OUT_DIR [NAME ...]        all fixtures of CASES, or the named ones
    reference.py OUT_DIR --config FILE.json --seed N [--bf16] [--lens 1,2,63] [--rows 2] [--length 70]

A fixture is a directory with config.json and model.safetensors (what save_pretrained writes) and expect.safetensors:
input_ids [B,T], logits [B,T,V], loss [1] (mean next-token NLL), grad.<parameter>, ragged.ids / ragged.lens / ragged.logprob
(each sequence alone; 0 at its first token), greedy.prompt / greedy.tokens / greedy.margin (argmax continuation by full forwards),
noise.logits / noise.ragged (max abs) and noise.grad (worst parameter, relative norm): how far the reference's own float32 run is
from its float64 run. Values are float64 results stored as float32. Library versions: requirements.txt.
"""
import argparse
import json
import os
import pathlib

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
from safetensors.torch import save_file
from torch.overrides import TorchFunctionMode
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.utils import logging

logging.set_verbosity_error()
logging.disable_progress_bar()

TINY = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 4,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4, "tie_word_embeddings": True, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
                        "mrope_section": [1, 1, 0], "mrope_interleaved": True},
}
EDGES = "1,2,3,4,5,15,16,17,31,32,33,63,64,65,127,128,129"  # conv window, KV page and GDN chunk edges
F, L = "full_attention", "linear_attention"

# name: (seed, changes to TINY, stored as bf16, ragged lengths)
CASES = {
    "edges": (11, {}, False, EDGES),
    "oddheads": (12, {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 24, "linear_num_key_heads": 3,
                      "linear_num_value_heads": 3, "linear_key_head_dim": 12, "linear_value_head_dim": 20, "hidden_size": 40,
                      "intermediate_size": 52, "vocab_size": 101}, False, "1,7,64,66"),
    "threeper": (13, {"linear_num_key_heads": 1, "linear_num_value_heads": 3, "num_attention_heads": 3}, False, "1,17,63,64,65"),
    "untied": (14, {"tie_word_embeddings": False, "hidden_size": 24}, False, "2,16,64,70"),
    "deep12": (15, {"num_hidden_layers": 12, "hidden_size": 24, "intermediate_size": 40, "vocab_size": 67}, False, "1,33,65,129"),
    "bf16": (16, {}, True, "1,16,17,64,65"),
    "linearlast": (17, {"num_hidden_layers": 5, "layer_types": [L, F, L, F, L]}, False, "1,3,64,65,130"),
    "bigrot": (18, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
                                         "mrope_section": [2, 1, 1], "mrope_interleaved": True}}, False, "1,15,16,128"),
    "delta16": (19, {"linear_key_head_dim": 16, "linear_value_head_dim": 16}, False, "1,15,16,17,31,65"),  # widths of the tensor-core delta rule
}


class Lift(TorchFunctionMode):
    """Turns every cast to float32 inside the block into a cast to float64, so that a double model stays double throughout."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        up = lambda v: torch.float64 if v is torch.float32 else v
        if func is torch.Tensor.float:
            return args[0].double()
        return func(*[up(a) for a in args], **{k: up(v) for k, v in (kwargs or {}).items()})


def weights(model, seed):
    """Weights under which every path carries signal: decays from near 1 to near 0, gates open and shut, norms away from their start."""
    gen = torch.Generator().manual_seed(seed)
    scale = {"A_log": lambda r: 1.5 * torch.tanh(r) - 0.5, "dt_bias": lambda r: r, "linear_attn.norm.weight": lambda r: 1 + 0.25 * r,
             "conv1d.weight": lambda r: 0.5 * r}
    for name, p in model.named_parameters():
        r = torch.randn(p.shape, generator=gen)
        rule = next((f for end, f in scale.items() if name.endswith(end)), None)
        if rule is None and p.ndim == 1:
            rule = lambda r: 0.25 * r
        if rule is None:
            gain = 1.6 if ("embed" in name or "lm_head" in name) else 1.1
            rule = lambda r: r * gain / r.shape[-1] ** 0.5
        p.data.copy_(rule(r))


def exact_rope(model, cfg):
    n = int(cfg.head_dim * cfg.rope_parameters["partial_rotary_factor"]) // 2
    inv = cfg.rope_parameters["rope_theta"] ** (-torch.arange(n, dtype=torch.float64) / n)
    for m in model.modules():
        if hasattr(m, "inv_freq"):
            m.register_buffer("inv_freq", inv, persistent=False)


def nll(logits, ids):
    return -logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).mean()


def run(model, ids, seqs):
    model.zero_grad(set_to_none=True)
    logits = model(ids).logits
    loss = nll(logits, ids)
    loss.backward()
    lps = []
    with torch.no_grad():
        for s in seqs:
            lp = model(s[None]).logits[0].log_softmax(-1)
            lps.append(torch.cat([torch.zeros(1, dtype=lp.dtype), lp[:-1].gather(-1, s[1:, None]).squeeze(-1)]))
    return logits.detach(), loss.detach(), {n: p.grad.detach().clone() for n, p in model.named_parameters()}, torch.cat(lps)


def greedy(model, prompt, steps):
    seq, margins = prompt, []
    with torch.no_grad():
        for _ in range(steps):
            best = model(seq).logits[0, -1].topk(2)
            margins.append(float(best.values[0] - best.values[1]))
            seq = torch.cat([seq, best.indices[:1][None]], dim=1)
    return seq[0, prompt.shape[1]:], torch.tensor(margins)


def fixture(out, seed, changes, bf16, lens, rows=2, length=70, steps=48):
    cfg = Qwen3_5TextConfig(**{**TINY, **changes})
    for attempt in range(64):  # a near tie between two tokens would make the greedy check a coin toss
        s = seed + 100 * attempt
        model = Qwen3_5ForCausalLM(cfg).eval()
        weights(model, s)
        model.to(torch.bfloat16 if bf16 else torch.float32).save_pretrained(out)
        single = Qwen3_5ForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
        double = Qwen3_5ForCausalLM.from_pretrained(out, dtype=torch.float32).double().eval()
        exact_rope(double, cfg)
        gen = torch.Generator().manual_seed(s + 1)
        draw = lambda *n: torch.randint(0, cfg.vocab_size, n, generator=gen)
        prompt, ids, seqs = draw(1, 9), draw(rows, length), [draw(int(n)) for n in lens.split(",")]
        with Lift():
            tokens, margins = greedy(double, prompt, steps)
        if margins.min() > 5e-3:
            break
    else:
        raise SystemExit(f"{out}: no seed gives greedy margins above 5e-3")
    with Lift():
        logits, loss, grads, ragged = run(double, ids, seqs)
    l32, _, g32, r32 = run(single, ids, seqs)
    expect = {
        "input_ids": ids, "logits": logits, "loss": loss.reshape(1), "greedy.prompt": prompt[0], "greedy.tokens": tokens, "greedy.margin": margins,
        "ragged.ids": torch.cat(seqs), "ragged.lens": torch.tensor([len(q) for q in seqs]), "ragged.logprob": ragged,
        "noise.logits": (l32 - logits).abs().max().reshape(1), "noise.ragged": (r32 - ragged).abs().max().reshape(1),
        "noise.grad": torch.stack([(g32[n] - g).norm() / g.norm() for n, g in grads.items()]).max().reshape(1),
        **{"grad." + n: g for n, g in grads.items()},
    }
    save_file({k: (v.float() if v.is_floating_point() else v).contiguous() for k, v in expect.items()}, f"{out}/expect.safetensors")
    (pathlib.Path(out) / "generation_config.json").unlink(missing_ok=True)
    print(f"{out}: seed {s}, {sum(p.numel() for p in double.parameters())} parameters, loss {float(loss):.4f}, margin {float(margins.min()):.4f}, "
          + ", ".join(f"{k} {float(v):.1e}" for k, v in expect.items() if k.startswith("noise")))


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("out")
    ap.add_argument("names", nargs="*")
    ap.add_argument("--config")
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--bf16", action="store_true")
    ap.add_argument("--lens", default="1,2,16,17,64,65")
    ap.add_argument("--rows", type=int, default=2)
    ap.add_argument("--length", type=int, default=70)
    a = ap.parse_args()
    torch.use_deterministic_algorithms(True)
    if a.config:
        fixture(a.out, a.seed, json.loads(pathlib.Path(a.config).read_text()), a.bf16, a.lens, a.rows, a.length)
        return
    for name in a.names or CASES:
        seed, changes, bf16, lens = CASES[name]
        fixture(os.path.join(a.out, name), seed, changes, bf16, lens)


if __name__ == "__main__":
    main()
