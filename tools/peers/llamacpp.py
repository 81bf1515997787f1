#!/usr/bin/env python3
"""Check that llama.cpp converts a checkpoint that hs wrote, loads it, and computes the same from it.

    llamacpp.py HS CKPT_DIR LLAMA_CPP WORK_DIR [--pre qwen35] [--text FILE ...]

LLAMA_CPP is a source tree of llama.cpp with convert_hf_to_gguf.py; the module llama_cpp (package llama-cpp-python) must import, its
library may be one built from that tree (LLAMA_CPP_LIB_PATH). The converter knows a tokenizer by a hash of what it gives for one text: for a
vocabulary of one's own, such as that of the shipped checkpoint, --pre names the split rules instead. --no-mtp is always given: hs writes
no MTP head unless it keeps one.

Everything is float32 on both sides. Checked for each text: the same token ids; log-probabilities within 2e-4 nats (both sum in float32,
in another order, and llama.cpp approximates exp); the same 32 greedy tokens, up to the first place where the two best logits are closer
than 4e-4 nats. Prints one JSON object last; exit code 1 when something differs.
"""
import argparse
import json
import pathlib
import runpy
import subprocess
import sys

BOUND = 2e-4
NEW = 32
TEXTS = [
    "The capital of France is",
    "How many rows has the table? Answer with one number.",
    "SELECT name, COUNT(*) FROM orders WHERE total > 17.5 GROUP BY name;",
    "Caf\u00e9 d\u00e9j\u00e0 vu \u2014 \u4e2d\u6587\u6d4b\u8bd5\uff1a  two\n\nlines\t1234",
]


def convert(root, ckpt, out, pre):
    """Runs convert_hf_to_gguf.py in this process, so that the name of the split rules can be given."""
    sys.path[:0] = [str(root), str(root / "gguf-py")]
    if pre:
        import conversion.base
        conversion.base.TextModel.get_vocab_base_pre = lambda self, tokenizer: pre
    sys.argv = ["convert_hf_to_gguf.py", str(ckpt), "--outfile", str(out), "--outtype", "f32", "--no-mtp"]
    runpy.run_path(str(root / "convert_hf_to_gguf.py"), run_name="__main__")


def vocabulary(ckpt):
    """Ids of the tokenizer: hs samples from these alone, not from the rows that pad the head."""
    tok = json.loads((ckpt / "tokenizer.json").read_text())
    ids = [*tok["model"]["vocab"].values(), *(t["id"] for t in tok["added_tokens"])]
    config = ckpt / "tokenizer_config.json"
    if config.exists():
        ids += [int(i) for i in json.loads(config.read_text()).get("added_tokens_decoder", {})]
    return max(ids) + 1


def compare(hs, ckpt, gguf, texts, work):
    import numpy as np
    from llama_cpp import Llama

    def run(*args):
        p = subprocess.run([hs, *map(str, args), "--json"], capture_output=True, text=True)
        if p.returncode:
            raise SystemExit(f"hs {' '.join(map(str, args))}: exit code {p.returncode}\n{p.stderr}")
        return json.loads(p.stdout.strip().splitlines()[-1])

    def softmax(row):
        row = row.astype(np.float64)
        row = row - row.max()
        return row - np.log(np.exp(row).sum())

    valid = vocabulary(ckpt)
    llm = Llama(model_path=str(gguf), n_ctx=1024, logits_all=True, verbose=False, n_threads=1, type_k=0, type_v=0, flash_attn=False)
    rows, ok = [], True
    for text in texts:
        file = work / "text.txt"
        file.write_text(text)
        score = run("score", "--ckpt", ckpt, "--text", file)
        ids = score["tokens"]
        theirs = llm.tokenize(text.encode(), add_bos=False, special=True)
        llm.reset()
        llm.eval(ids)
        gap = max(abs(softmax(llm.scores[i])[ids[i + 1]] - score["logprobs"][i + 1]) for i in range(len(ids) - 1))
        greedy = run("generate", "--ckpt", ckpt, "--raw", "--prompt-file", file, "--temperature", 0, "--max-new", NEW)["ids"]
        agreed, margin = 0, None
        for id in greedy:
            row = llm.scores[llm.n_tokens - 1][:valid]
            best, second = np.argsort(row)[::-1][:2]
            if best != id:
                margin = float(row[best] - row[id])
                break
            agreed += 1
            llm.eval([int(id)])
        good = ids == theirs and gap <= BOUND and (margin is None or margin <= 2 * BOUND)
        ok = ok and bool(good)
        rows.append({"text": text, "tokens": len(ids), "same_ids": ids == theirs, "max_logprob_difference": float(gap),
                     "greedy_agreed": agreed, "greedy_sampled": len(greedy), "margin_where_they_part": margin, "ok": bool(good)})
        print(f"{'ok  ' if good else 'FAIL'} {len(ids):3d} tokens, ids {'same' if ids == theirs else 'DIFFER'}, log-probs within {gap:.2e}, "
              f"greedy {agreed} of {len(greedy)}" + ("" if margin is None else f", then a margin of {margin:.1e}") + f"  {text[:40]!r}", flush=True)
    return rows, ok


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("hs")
    a.add_argument("ckpt", type=pathlib.Path)
    a.add_argument("llama_cpp", type=pathlib.Path)
    a.add_argument("work", type=pathlib.Path)
    a.add_argument("--pre")
    a.add_argument("--text", action="append", type=pathlib.Path)
    a.add_argument("--convert-only", action="store_true", help=argparse.SUPPRESS)
    a = a.parse_args()
    gguf = a.work / "model.gguf"
    if a.convert_only:
        return convert(a.llama_cpp.resolve(), a.ckpt, gguf, a.pre)
    a.work.mkdir(parents=True, exist_ok=True)
    p = subprocess.run([sys.executable, *sys.argv, "--convert-only"], capture_output=True, text=True)
    if p.returncode:
        raise SystemExit(f"convert_hf_to_gguf.py: exit code {p.returncode}\n{p.stderr[-3000:]}")
    texts = [f.read_text() for f in a.text] if a.text else TEXTS
    rows, ok = compare(a.hs, a.ckpt, gguf, texts, a.work)
    print(json.dumps({"ok": ok, "checks": rows}))
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
