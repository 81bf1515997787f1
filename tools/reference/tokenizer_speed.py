#!/usr/bin/env python3
"""Compare the speed of package model's tokenizer with that of Hugging Face tokenizers, script by script, on one thread, in processor time.

    tokenizer_speed.py texts DIR [--source PATH ...] [--locale PATH]   DIR/speed.jsonl, from DIR/tokenizer.json: the texts, by kind
    tokenizer_speed.py run DIR --go TEST_BINARY [--rounds N]           a table of both speeds, medians of alternating rounds

TEST_BINARY is package model's: go test -c -o TEST_BINARY ./model. The kinds of text, about --size bytes each in documents of 16 KiB:

    code, markup, ...  text files below --source: real
    text.LANG          translated messages of the programs below --locale (gettext .mo files), each of them once: real sentences
    short.LANG         the same messages as strings of their own, for a few languages
    words.SCRIPT       words drawn by Zipf's law from 30,000 of one to four vocabulary tokens of the script, with punctuation: made up,
                       but its pieces merge and repeat as those of a language do
    chars.SCRIPT       characters of the script drawn by Zipf's law in runs of 5 to 30: few pieces repeat, few of their pairs merge
Needs tokenizers; written against 0.23.3.
"""
import argparse
import collections
import gettext
import json
import os
import pathlib
import random
import re
import statistics
import subprocess
import sysconfig
import time
import unicodedata

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["RAYON_NUM_THREADS"] = "1"
from tokenizers import Tokenizer

FILES = {"code": {".py", ".go", ".c", ".h", ".js", ".ts"}, "prose": {".md", ".rst", ".txt"}, "markup": {".json", ".html", ".po", ".xml"}}
LANGUAGES = "ar de el es fr he hi ja ka ko ru ta th vi zh_CN zh_TW".split()
SHORT = {"de", "ja", "ru", "zh_CN"}
SCRIPTS = {  # name: the words with which its letters' Unicode names begin, the separator of words, the punctuation
    "latin": (("LATIN",), " ", ",."), "cyrillic": (("CYRILLIC",), " ", ",."), "greek": (("GREEK",), " ", ",."),
    "arabic": (("ARABIC",), " ", "،."), "hebrew": (("HEBREW",), " ", ",."), "devanagari": (("DEVANAGARI",), " ", ",।"),
    "bengali": (("BENGALI",), " ", ",।"), "tamil": (("TAMIL",), " ", ",."), "thai": (("THAI",), "", " "), "han": (("CJK",), "", "，。"),
    "japanese": (("CJK", "HIRAGANA", "KATAKANA"), "", "、。"), "hangul": (("HANGUL",), " ", ",."), "armenian": (("ARMENIAN",), " ", ",։"),
    "georgian": (("GEORGIAN",), " ", ",."),
}
DOCUMENT = 16 << 10


def documents(text):
    return [text[i:i + DOCUMENT] for i in range(0, len(text), DOCUMENT)]


def file_texts(sources, suffixes, size, r):
    files = [p for s in sources for p in sorted(pathlib.Path(s).rglob("*")) if p.suffix in suffixes and p.is_file() and 200 < p.stat().st_size < 1 << 20]
    r.shuffle(files)
    out, total = [], 0
    for p in files:
        text = p.read_bytes().decode("utf-8", "replace")[:64 << 10]
        if "\ufffd" not in text:
            out += documents(text)
            total += len(text.encode())
        if total > size:
            break
    return out


def messages(locale, language):
    """The translated messages of a language, each once, in the order of the files."""
    seen = {}
    for path in sorted(pathlib.Path(locale).glob(f"{language}/LC_MESSAGES/*.mo")):
        try:
            with open(path, "rb") as f:
                catalog = gettext.GNUTranslations(f)._catalog
        except (OSError, UnicodeDecodeError, LookupError, ValueError):
            continue  # a catalog in a form that this Python does not read
        seen.update((text, None) for key, text in catalog.items() if key and text and text != key and len(text) > 8)
    return list(seen)


def zipf(r, items, n):
    return r.choices(items, cum_weights=CUMULATIVE[:len(items)], k=n)


CUMULATIVE = []
for i in range(60_000):
    CUMULATIVE.append((CUMULATIVE[-1] if CUMULATIVE else 0) + 1 / (i + 3))


def of_script(text, names):
    return all(unicodedata.category(c)[0] in "LM" and unicodedata.name(c, "").startswith(names) for c in text)


def made_texts(tok, size, seed):
    """words.SCRIPT and chars.SCRIPT; a smaller token id means a more frequent token."""
    parts = collections.defaultdict(lambda: ([], []))  # by script: tokens that begin a word, all tokens
    for i in range(tok.get_vocab_size(with_added_tokens=False)):
        text = tok.decode([i])
        bare = text.removeprefix(" ")
        if not bare or "\ufffd" in bare:
            continue
        for script, (names, sep, _) in SCRIPTS.items():
            if of_script(bare, names):
                parts[script][1].append(bare)
                if sep == "" or text != bare:
                    parts[script][0].append(bare)
    for script, (names, sep, marks) in SCRIPTS.items():
        r = random.Random(f"{seed} {script}")
        first, every = parts[script]
        if not first:
            continue
        first, every = first[:60_000], every[:60_000]
        lexicon = list(dict.fromkeys("".join(zipf(r, first, 1) + zipf(r, every, r.choice((0, 0, 1, 1, 2, 3)))) for _ in range(30_000)))
        lexicon.sort(key=lambda w: len(w) + r.random() * 12)  # short words tend to be frequent
        gap = (lambda: r.choices((sep, marks[0] + " ", marks[1] + "\n"), (12, 2, 1))[0]) if sep else (lambda: r.choices(("", marks[0], marks[-1]), (12, 2, 1))[0])
        yield f"words.{script}", joined(lambda: zipf(r, lexicon, 100), gap, size)
        chars = list(dict.fromkeys(c for t in every for c in t))
        yield f"chars.{script}", joined(lambda: ["".join(zipf(r, chars, r.randint(5, 30))) for _ in range(20)], lambda: r.choice((" ", marks[-1])), size)


def joined(draw, gap, size):
    text, total = [], 0
    while total < size:
        for w in draw():
            text.append(w + gap())
            total += len(text[-1].encode())
    return documents("".join(text))


def texts(folder, sources, locale, size, seed):
    tok = Tokenizer.from_file(str(folder / "tokenizer.json"))
    r = random.Random(seed)
    kinds = {name: file_texts(sources, suffixes, size, r) for name, suffixes in FILES.items()}
    for language in LANGUAGES:
        found = messages(locale, language)
        r.shuffle(found)
        kept, total = [], 0
        for text in found:
            kept.append(text)
            total += len(text.encode())
            if total > size:
                break
        if total > size // 10:
            kinds["text." + language] = documents("\n".join(kept))
            if language in SHORT:
                kinds["short." + language] = kept
    kinds.update(made_texts(tok, size, seed))
    with open(folder / "speed.jsonl", "w", encoding="utf-8") as f:
        for name, docs in kinds.items():
            if docs:
                f.write(json.dumps([name, docs]) + "\n")
    print(f"{folder}: {len(kinds)} kinds of text, {sum(len(d.encode()) for docs in kinds.values() for d in docs)} bytes")


def ours(binary, folder, kinds):
    """MB/s and tokens by kind from one pass over the texts, which a fresh process has not seen before."""
    env = os.environ | {"GOMAXPROCS": "1"}
    args = ["-test.run", "^$", "-test.bench", f"^BenchmarkPeerSpeed$/^{re.escape(folder.name)}$/", "-test.benchtime", "1x", "-tokenizer-data", str(folder.parent.resolve())]
    out = subprocess.run([str(pathlib.Path(binary).resolve()), *args], cwd="model", env=env, capture_output=True, text=True, check=True).stdout
    found = {}
    for line in out.splitlines():
        f = line.split()
        if line.startswith("BenchmarkPeerSpeed") and "MB/cpu-s" in f:
            found[f[0].split("/")[2]] = (float(f[f.index("MB/cpu-s") - 1]), int(float(f[f.index("tokens") - 1])))
    if set(found) != set(kinds):
        raise SystemExit(f"the benchmark ran {sorted(found)}, want {sorted(kinds)}:\n{out}")
    return found


def theirs(tok, docs):
    start = time.process_time()
    out = tok.encode_batch_fast(docs, add_special_tokens=False)
    seconds = time.process_time() - start
    return sum(len(d.encode()) for d in docs) / seconds / 1e6, sum(len(e.ids) for e in out)


def run(folder, binary, rounds):
    tok = Tokenizer.from_file(str(folder / "tokenizer.json"))
    kinds = dict(json.loads(line) for line in open(folder / "speed.jsonl", encoding="utf-8"))
    speeds = {k: ([], []) for k in kinds}
    for _ in range(rounds):
        mine = ours(binary, folder, kinds)
        for kind, docs in kinds.items():
            speed, tokens = theirs(tok, docs)
            if tokens != mine[kind][1]:
                raise SystemExit(f"{kind}: {mine[kind][1]} tokens, tokenizers gives {tokens}")
            speeds[kind][0].append(mine[kind][0])
            speeds[kind][1].append(speed)
    print(f"{folder.name}: MB per second of processor time, medians of {rounds} rounds\n{'text':20} {'bytes':>9} {'tokenizers':>11} {'harness-s':>10} {'ratio':>6}")
    for kind, docs in kinds.items():
        a, b = (statistics.median(s) for s in speeds[kind])
        print(f"{kind:20} {sum(len(d.encode()) for d in docs):9} {b:11.2f} {a:10.2f} {a / b:6.1f}")


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("command", choices=["texts", "run"])
    ap.add_argument("folder", type=pathlib.Path)
    ap.add_argument("--size", type=int, default=1 << 18)
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--source", nargs="+", default=[sysconfig.get_paths()["stdlib"]])
    ap.add_argument("--locale", default="/usr/share/locale")
    ap.add_argument("--go")
    ap.add_argument("--rounds", type=int, default=5)
    a = ap.parse_args()
    if a.command == "texts":
        texts(a.folder, a.source, a.locale, a.size, a.seed)
    elif a.go is None:
        ap.error("run needs --go, the test binary of package model")
    else:
        run(a.folder, a.go, a.rounds)


if __name__ == "__main__":
    main()
