#!/usr/bin/env python3
"""Check that hs and Hugging Face transformers read each other's Qwen3.5 checkpoints and compute the same from them.

    checkpoints.py HS WORK_DIR [NAME ...]      HS is the hs binary, WORK_DIR an empty folder (2 GB); NAMEs of CASES, default all

Every case is a checkpoint that one side made and the other reads: release shapes of hs init-model (full vocabulary, four layers), and
tiny models of transformers, as save_pretrained writes them and again through hs convert. Log-probabilities of 150 random tokens are
compared. Bounds, in nats:

    1e-4    hs score against transformers in float32, of the same weights (bfloat16 ones too: hs computes in float32). Of the tiny models,
            whose weights are drawn such that errors grow from layer to layer, against transformers in float64; and where transformers'
            own float32 is further than a third of 1e-4 from it, three times its distance
    spread  of a bfloat16 checkpoint, hs to transformers in float32: at most as far as two runs of transformers in bfloat16 are from
            each other that differ in the attention kernel alone (eager, sdpa); and hs to either of them: at most as far as
            transformers in float32 is, plus 1e-4

With --keep a converted checkpoint must hold every tensor of the source bit for bit. Prints a table, then one JSON object; exit code 1
when something is out of bounds.
"""
import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3_5Config, Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration, Qwen3_5TextConfig
from transformers.utils import logging

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from reference import TINY, Lift, weights

logging.set_verbosity_error()
logging.disable_progress_bar()
BOUND = 1e-4
TOKENS = 150
VISION = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4,
          "num_position_embeddings": 16}


def text_model(seed, dtype=torch.float32, **change):
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**{**TINY, **change}))
    weights(model, seed)
    return model.to(dtype)


def whole_model(seed, dtype=torch.float32, **change):
    text = {**TINY, **change}
    cfg = Qwen3_5Config(text_config=text, vision_config=VISION, tie_word_embeddings=text["tie_word_embeddings"],
                        image_token_id=90, video_token_id=91, vision_start_token_id=92, vision_end_token_id=93)
    model = Qwen3_5ForConditionalGeneration(cfg)
    weights(model, seed)
    return model.to(dtype)


def add_mtp(path):
    """Gives a one-file checkpoint the tensors of a head for speculative decoding, which no transformers class holds."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    gen = torch.Generator().manual_seed(5)
    h = TINY["hidden_size"]
    for name, shape in {"fc.weight": (h, 2 * h), "norm.weight": (h,), "layers.0.mlp.down_proj.weight": (h, 7)}.items():
        tensors["mtp." + name] = torch.randn(shape, generator=gen)
    save_file(tensors, file, metadata={"format": "pt"})


def tensors_of(path):
    index = path / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        names = ["model.safetensors"]
    out = {}
    for name in names:
        with safe_open(path / name, "pt") as f:
            out.update({k: f.get_tensor(k) for k in f.keys()})
    return out


def same_tensors(a, b):
    x, y = tensors_of(a), tensors_of(b)
    return x.keys() == y.keys() and all(x[k].dtype == y[k].dtype and torch.equal(x[k], y[k]) for k in x)


class Checker:
    def __init__(self, hs, work):
        self.hs, self.work, self.rows, self.failed = hs, work, [], []

    def run(self, *args):
        p = subprocess.run([self.hs, *map(str, args), "--json"], capture_output=True, text=True)
        if p.returncode:
            raise SystemExit(f"hs {' '.join(map(str, args))}: exit code {p.returncode}\n{p.stderr}")
        return json.loads(p.stdout.strip().splitlines()[-1])

    def score_hs(self, path, ids):
        file = self.work / "ids.json"
        file.write_text(json.dumps(ids))
        return torch.tensor(self.run("score", "--ckpt", path, "--ids", file)["logprobs"][1:], dtype=torch.float64)

    @staticmethod
    def score_hf(path, ids, dtype=torch.float32, attention="eager", cls=AutoModelForCausalLM):
        model = cls.from_pretrained(path, dtype=torch.float32 if dtype is torch.float64 else dtype, attn_implementation=attention).eval()
        lift = contextlib.nullcontext()
        if dtype is torch.float64:  # every value of the computation, not the weights alone
            model, lift = model.double(), Lift()
        with torch.no_grad(), lift:
            logits = model(torch.tensor([ids]), use_cache=False).logits[0]
        lp = torch.log_softmax(logits.double(), -1)
        return lp[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]

    def check(self, name, value, bound):
        ok = bool(value <= bound)  # false for NaN
        self.rows.append({"check": name, "value": float(value), "bound": float(bound), "ok": ok})
        print(f"{'ok  ' if ok else 'FAIL'} {name:<66} {value:.3e}  bound {bound:.3e}", flush=True)
        if not ok:
            self.failed.append(name)

    def compare(self, name, path, vocab, bf16=False, cls=AutoModelForCausalLM):
        ids = torch.randint(0, vocab, (TOKENS,), generator=torch.Generator().manual_seed(3)).tolist()
        hs = self.score_hs(path, ids)
        f32 = self.score_hf(path, ids, cls=cls)
        gap = lambda a, b: (a - b).abs().max().item()
        if vocab < 1000:
            f64 = self.score_hf(path, ids, torch.float64, cls=cls)
            self.check(f"{name}: hs to transformers float64", gap(hs, f64), max(BOUND, 3 * gap(f32, f64)))
        else:
            self.check(f"{name}: hs to transformers float32", gap(hs, f32), BOUND)
        if bf16:
            eager = self.score_hf(path, ids, torch.bfloat16, "eager", cls)
            sdpa = self.score_hf(path, ids, torch.bfloat16, "sdpa", cls)
            self.check(f"{name}: the same, to the spread eager/sdpa in bfloat16", gap(hs, f32), gap(eager, sdpa))
            for kind, b in {"eager": eager, "sdpa": sdpa}.items():
                self.check(f"{name}: hs to bfloat16 {kind}, to float32's own", gap(hs, b), gap(f32, b) + BOUND)

    def convert(self, src, name, *flags):
        out = self.work / name
        self.run("convert", "--ckpt", src, "--out", out, *flags)
        return out


def release(c, dtype):
    """Shapes of 0.8b with the real vocabulary, made by hs."""
    src = c.work / f"release-{dtype}"
    c.run("init-model", "--like", "0.8b", "--layers", "4", "--dtype", dtype, "--out", src)
    c.compare(f"hs init-model {dtype}, 4 layers of 0.8b", src, 248320, dtype == "bf16")
    out = c.convert(src, f"release-{dtype}-out", "--dtype", "f32" if dtype == "f32" else "stored", "--shard-gib", "0.3")
    shutil.rmtree(src)
    c.compare(f"hs convert of it, shards, {dtype}", out, 248320, dtype == "bf16")
    shutil.rmtree(out)


def both_ways(c, name, model, vocab, bf16=False, cls=AutoModelForCausalLM, mtp=False, **save):
    """A checkpoint of transformers, read by hs; then written by hs in each form, read by transformers."""
    src = c.work / name / "transformers"
    model.save_pretrained(src, **save)
    if mtp:
        add_mtp(src)
    c.compare(f"transformers {name}", src, vocab, bf16, cls)
    kept = c.convert(src, f"{name}/kept", "--keep", src, "--shard-gib", "0.00001")
    c.check(f"hs convert --keep of {name}: tensors that changed", 0 if same_tensors(src, kept) else 1, 0)
    c.compare(f"hs convert --keep of {name}", kept, vocab, bf16, cls)
    c.compare(f"hs convert of {name}, f32", c.convert(src, f"{name}/f32", "--dtype", "f32"), vocab)
    c.compare(f"hs convert of {name}, bf16, shards", c.convert(src, f"{name}/bf16", "--shard-gib", "0.00001"), vocab, True)
    shutil.rmtree(src.parent)


VL = Qwen3_5ForConditionalGeneration
CASES = {
    "release-f32": lambda c: release(c, "f32"),
    "release-bf16": lambda c: release(c, "bf16"),
    "flat": lambda c: both_ways(c, "flat", text_model(21), 97),
    "flat-bf16": lambda c: both_ways(c, "flat-bf16", text_model(22, torch.bfloat16), 97, True),
    "flat-sharded": lambda c: both_ways(c, "flat-sharded", text_model(23), 97, max_shard_size="20KB"),
    "deep": lambda c: both_ways(c, "deep", text_model(24, num_hidden_layers=24), 97, max_shard_size="60KB"),
    "untied": lambda c: both_ways(c, "untied", text_model(25, tie_word_embeddings=False, hidden_size=24), 97),
    "nested": lambda c: both_ways(c, "nested", whole_model(26), 89, cls=VL, mtp=True),
    "nested-bf16": lambda c: both_ways(c, "nested-bf16", whole_model(27, torch.bfloat16), 89, True, VL),
    "nested-sharded": lambda c: both_ways(c, "nested-sharded", whole_model(28, tie_word_embeddings=False), 89, cls=VL, max_shard_size="20KB"),
}


def main():
    if len(sys.argv) < 3 or any(n not in CASES for n in sys.argv[3:]):
        raise SystemExit(f"usage: checkpoints.py HS WORK_DIR [NAME ...]\nnames: {' '.join(CASES)}")
    work = pathlib.Path(sys.argv[2]).resolve()
    work.mkdir(parents=True, exist_ok=True)
    c = Checker(str(pathlib.Path(sys.argv[1]).resolve()), work)
    for name in sys.argv[3:] or CASES:
        CASES[name](c)
    print(json.dumps({"ok": not c.failed, "failed": c.failed, "checks": c.rows}))
    sys.exit(1 if c.failed else 0)


if __name__ == "__main__":
    main()
