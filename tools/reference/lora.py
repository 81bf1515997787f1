#!/usr/bin/env python3
"""Make the LoRA fixture of model/testdata/lora from transformers and PEFT.

    lora.py OUT_DIR

OUT_DIR gets base/ (a random checkpoint), an adapter directory for each entry of ADAPTERS as PEFT saves it, and expect.safetensors: ids [B,T],
logits.base and logits.<adapter> [B,T,V] of the base with that adapter, in float32. OUT_DIR/ours is the other direction: an adapter that hs
wrote for this base (go test ./model -run TestPEFT -update-lora). When it is there, PEFT loads it, which must not leave or miss a key, and
logits.ours are added. Library versions: requirements.txt.
"""
import json
import os
import pathlib
import sys
import warnings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from reference import TINY, weights
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig

F, L = "full_attention", "linear_attention"
CONFIG = {**TINY, "vocab_size": 53, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "layer_types": [L, F, L], "head_dim": 8,
          "linear_key_head_dim": 4, "linear_value_head_dim": 4}
ADAPTERS = {
    "plain": dict(r=4, lora_alpha=6, target_modules=["q_proj", "in_proj_qkv", "down_proj", "out_proj", "in_proj_a"]),
    "every": dict(r=2, lora_alpha=4, target_modules="all-linear"),
    # one layer, a regular expression, the other scale, rank above the number of heads
    "pattern": dict(r=20, lora_alpha=9, use_rslora=True, lora_dropout=0.1, target_modules=r".*layers\.1\.(self_attn\.v_proj|mlp\.up_proj)"),
}


def base(path):
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**CONFIG)).eval()
    weights(model, 31)
    model.save_pretrained(path)
    (pathlib.Path(path) / "generation_config.json").unlink(missing_ok=True)


def adapter(out, name, settings):
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(f"{out}/base", dtype=torch.float32), LoraConfig(task_type="CAUSAL_LM", **settings))
    gen = torch.Generator().manual_seed(len(name))
    for n, p in model.named_parameters():
        if "lora_" in n:
            p.data.copy_(torch.randn(p.shape, generator=gen) * 0.3)
    model.save_pretrained(f"{out}/{name}")
    (pathlib.Path(out) / name / "README.md").unlink(missing_ok=True)
    config = pathlib.Path(out) / name / "adapter_config.json"
    text = json.loads(config.read_text())
    text["base_model_name_or_path"] = "base"
    config.write_text(json.dumps(text, indent=2, sort_keys=True) + "\n")


def logits(out, ids, name=None):
    model = AutoModelForCausalLM.from_pretrained(f"{out}/base", dtype=torch.float32)
    if name:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # PEFT warns of missing keys
            model = PeftModel.from_pretrained(model, f"{out}/{name}")
        parameters = [n.replace(".default", "") for n, _ in model.named_parameters() if "lora_" in n]
        if sorted(parameters) != sorted(load_file(f"{out}/{name}/adapter_model.safetensors")):
            raise SystemExit(f"{name}: the file's tensors are not the adapter's parameters")
    with torch.no_grad():
        return model.eval()(ids).logits.float().contiguous()


def main(out):
    torch.use_deterministic_algorithms(True)
    base(f"{out}/base")
    ids = torch.randint(0, CONFIG["vocab_size"], (2, 24), generator=torch.Generator().manual_seed(32))
    expect = {"ids": ids, "logits.base": logits(out, ids)}
    for name, settings in ADAPTERS.items():
        adapter(out, name, settings)
    for name in [*ADAPTERS, "ours"]:
        if os.path.isdir(f"{out}/{name}"):
            expect["logits." + name] = logits(out, ids, name)
            print(f"{name}: moves logits by at most {float((expect['logits.' + name] - expect['logits.base']).abs().max()):.3f}")
    save_file(expect, f"{out}/expect.safetensors")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(sys.argv[1])
