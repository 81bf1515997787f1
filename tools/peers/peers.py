#!/usr/bin/env python3
"""What transformers, TRL and torch do on this CPU with the same checkpoint: the other side of the comparison in README.md.

    peers.py gemm|transformers|trl CKPT_DIR [--threads 2] [--repeat 5]

Prints one JSON object: medians of --repeat runs after one warm-up, float32.
  gemm          torch.mm, GFLOP/s, at the shapes of `hs bench kernels`
  transformers  generate (64 prompts of 256 random tokens, 128 new ones, sampled, caches on): new tokens/s;
                train (16 rows of 512: forward, backward, clip, AdamW): tokens/s
  trl           a GRPO step (8 prompts of 256 tokens x 8 attempts of 128 tokens, no early stop, beta 0): rollouts/s
Library versions: requirements.txt.
"""
import argparse
import json
import os
import statistics
import tempfile
import time

os.environ["HF_HUB_OFFLINE"] = "1"
import torch

BATCH, PROMPT, NEW, ROWS, LENGTH, GROUPS, ATTEMPTS = 64, 256, 128, 16, 512, 8, 8


def median_seconds(f, repeat):
    f()
    seconds = []
    for _ in range(repeat):
        start = time.perf_counter()
        f()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def load(ckpt):
    from transformers import Qwen3_5ForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return Qwen3_5ForCausalLM.from_pretrained(ckpt, dtype=torch.float32)


def gemm(a):
    out = {}
    for m, k, n in [(8192, 128, 384), (64, 128, 384), (1024, 1024, 1024)]:
        x, w = torch.rand(m, k) - 0.5, torch.rand(n, k) - 0.5
        inner = max(1, int(2e8 / (2 * m * k * n)))

        def run():
            for _ in range(inner):
                torch.mm(x, w.t())

        out[f"gemm_{m}x{k}x{n}_gflops"] = 2e-9 * m * k * n * inner / median_seconds(run, 4 * a.repeat)
    return out


def transformers(a):
    model = load(a.ckpt).eval()
    vocab = model.config.vocab_size
    prompts = torch.randint(0, vocab, (BATCH, PROMPT))

    def generate():
        with torch.inference_mode():
            ids = model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=NEW, min_new_tokens=NEW,
                                 do_sample=True, top_k=0, pad_token_id=0)
        assert ids.shape == (BATCH, PROMPT + NEW)

    new_per_s = BATCH * NEW / median_seconds(generate, a.repeat)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    rows = torch.randint(0, vocab, (ROWS, LENGTH))

    def step():
        optimizer.zero_grad(set_to_none=True)
        model(rows, labels=rows).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return {"generate_tokens_per_s": new_per_s, "train_tokens_per_s": ROWS * LENGTH / median_seconds(step, a.repeat)}


def trl(a):
    from datasets import Dataset
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    model = load(a.ckpt)
    vocab = model.config.vocab_size
    # Token n is spelled "<n>", so any prompt of ids survives the trainer's own tokenization.
    words = Tokenizer(models.WordLevel({f"<{i}>": i for i in range(vocab)}, unk_token="<0>"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex(r"<\d+>"), "isolated")
    words.decoder = decoders.Fuse()
    tok = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<0>", eos_token="<1>", padding_side="left")
    prompts = ["".join(f"<{i}>" for i in torch.randint(2, vocab, (PROMPT,)).tolist()) for _ in range(GROUPS * (a.repeat + 1))]
    seconds = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_, **__):
            self.start = time.perf_counter()

        def on_step_end(self, *_, **__):
            seconds.append(time.perf_counter() - self.start)

    with tempfile.TemporaryDirectory() as out:
        GRPOTrainer(
            model=model, processing_class=tok, callbacks=[Clock()],
            reward_funcs=lambda completions, **_: [float(i % 2) for i in range(len(completions))],
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            args=GRPOConfig(output_dir=out, use_cpu=True, bf16=False, beta=0.0, learning_rate=1e-6, temperature=1.0,
                            per_device_train_batch_size=GROUPS * ATTEMPTS, gradient_accumulation_steps=1, num_generations=ATTEMPTS,
                            max_completion_length=NEW, max_steps=a.repeat + 1, generation_kwargs={"min_new_tokens": NEW},
                            gradient_checkpointing=False, logging_strategy="no", save_strategy="no", report_to=[], disable_tqdm=True),
        ).train()
    step = statistics.median(seconds[1:])
    return {"step_seconds": step, "rollouts_per_s": GROUPS * ATTEMPTS / step}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["gemm", "transformers", "trl"])
    parser.add_argument("ckpt")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=5)
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    print(json.dumps({"peer": a.what, "threads": a.threads, "torch": torch.__version__, **{"gemm": gemm, "transformers": transformers, "trl": trl}[a.what](a)}))


if __name__ == "__main__":
    main()
