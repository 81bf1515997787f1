#!/usr/bin/env python3
"""Make tokenizer test data from Hugging Face tokenizers and tiktoken, for the tests of package model.

    tokenizer.py derive RANKS OUT_DIR                    tokenizer.json of Qwen3.5 from its tiktoken ranks
    tokenizer.py cases DIR [--count N] [--ranks RANKS]   DIR/cases.bin, from DIR/tokenizer.json: strings and ids, ids and strings
    tokenizer.py golden TOKENIZER_JSON OUT.json          the committed golden file: pieces, classes, NFC, ids of a small tokenizer

The Go tests read every folder of build/tokenizer (go test ./model -run Tokenizer); a folder holds tokenizer.json and cases.bin. With --ranks (the tiktoken file of the same vocabulary) tiktoken encodes every string too and the
strings on which it disagrees with tokenizers are counted and sorted into reasons; expected ids are always those of tokenizers.
cases.bin is a sequence of records: kind (0 encode, 1 decode), text, ids, and in encode records the decoded text, where lengths, ids and
kind are unsigned LEB128, strings are UTF-8 after their length, and a decoded length of 0 stands for "the text itself", else length + 1.
Needs tokenizers and, for --ranks, tiktoken. Written against tokenizers 0.23.3, tiktoken 0.14.0.
"""
import argparse
import base64
import collections
import hashlib
import itertools
import json
import os
import pathlib
import random
import re
import sys
import sysconfig
import unicodedata

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["RAYON_NUM_THREADS"] = "1"
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
PATTERN_QWEN3 = PATTERN.replace(r"[\p{L}\p{M}]+", r"\p{L}+").replace(r"\p{M}", "")
FIRST_ADDED = 248044
ADDED = """<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|> <|quad_start|> <|quad_end|>
    <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|> <tool_call> </tool_call> <|fim_prefix|> <|fim_middle|>
    <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|> <tool_response> </tool_response> <think> </think> <|audio_start|> <|audio_end|>
    <tts_pad> <tts_text_bos> <tts_text_eod> <tts_text_bos_single> <|audio_pad|>""".split()
LONG = ["a", " ", "\n", "7", "=", "\u0301", "\u094d", "\u4e2d", "\U0001f600", "e\u0301", "\u1100\u1161\u11a8", "<", "'", "<|im_end|>", "ab ", "\u0301\u0323"]  # repeated
KEPT = range(14, 26)  # added tokens that are not marked special


def byte_chars():
    """The byte-level alphabet: printable Latin-1 bytes stand for themselves, the others for U+0100 onwards."""
    keep = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or b >= 174]
    rest = [b for b in range(256) if b not in keep]
    return {b: chr(b) for b in keep} | {b: chr(256 + i) for i, b in enumerate(rest)}


def read_ranks(path):
    pairs = (line.split() for line in pathlib.Path(path).read_bytes().splitlines() if line)
    return {base64.b64decode(t): int(r) for t, r in pairs}


def last_pair(token, ranks):
    """The two tokens whose merge gives token, found by merging its bytes with lower ranks only; None when more than two remain."""
    parts, limit = [token[i:i + 1] for i in range(len(token))], ranks[token]
    while len(parts) > 2:
        rank, at = min((ranks.get(parts[i] + parts[i + 1], limit), i) for i in range(len(parts) - 1))
        if rank >= limit:
            return None
        parts[at:at + 2] = [parts[at] + parts[at + 1]]
    return parts


def derive(ranks_file, out):
    ranks, chars = read_ranks(ranks_file), byte_chars()
    text = lambda b: "".join(chars[x] for x in b)
    merges, lost = [], 0
    for token in sorted(ranks, key=ranks.get):
        if len(token) > 1:
            pair = last_pair(token, ranks)
            lost += pair is None
            merges += [[text(p) for p in pair]] if pair else []
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    added = [{"id": FIRST_ADDED + i, "content": t, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
              "special": i not in KEPT} for i, t in enumerate(ADDED)]
    split = {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": False}
    doc = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": {"type": "NFC"},
           "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]}, "post_processor": level, "decoder": level,
           "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "", "end_of_word_suffix": "",
                     "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                     "vocab": {text(t): r for t, r in ranks.items()}, "merges": merges}}
    out.mkdir(parents=True, exist_ok=True)
    (out / "tokenizer.json").write_text(json.dumps(doc, ensure_ascii=False), encoding="utf-8")
    print(f"{len(ranks)} tokens, {len(merges)} merges, {lost} tokens without a pair")


class Strings:
    """Random strings, each of one kind; the same seed gives the same strings."""

    FRAGMENTS = [" ", "  ", "   ", "\n", "\n\n", "\r\n", "\r", "\t", "'s", "'S", "'LL", "'re", "'vE", "'t", "'\u017f", "\u2019s", "'", "a", "Z", "é", "e\u0301",
                 "\u0301", "\u0323", "9", "٣", "Ⅷ", "²", ".", "!?", "—", "中", "\u3000", "\u00a0", "\u2028", "\u0085", "\u0915\u094d", "\u200b", "\u200d", "😀",
                 "\x00", "\x1c", "\x0b", "ab", "_", "\u0344", "\u1e9b\u0323", "\u1100", "\u1161", "\u11a8", "\u0345", "\U00011938", "\u1abf", "\ufb01", "\u212b"]
    EMOJI = ["😀", "👩", "👩🏽", "\u200d", "💻", "🏳️", "🌈", "❤️", "\ufe0f", "🇩🇪", "🇯", "1️⃣", "🏴\U000e0067\U000e0062\U000e007f", "✨", "🤷🏾‍♂️", "☺"]

    def __init__(self, tok, seed, lines):
        self.r, self.lines = random.Random(seed), lines
        every = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]
        self.any = every
        self.assigned = [c for c in every if unicodedata.category(c) not in ("Cn", "Co")]
        self.marks = [c for c in every if unicodedata.category(c)[0] == "M"]
        self.joining = [c for c in every if unicodedata.combining(c) or unicodedata.normalize("NFD", c) != c and not 0xAC00 <= ord(c) < 0xD7A4]
        blocks = collections.defaultdict(list)
        for c in self.assigned:
            if unicodedata.category(c)[0] in "LMN":
                blocks[ord(c) >> 7].append(c)
        self.blocks = list(blocks.values())
        self.special = [t.content for t in tok.get_added_tokens_decoder().values()]
        vocab = tok.get_vocab_size(with_added_tokens=False)
        self.words = [w for w in (tok.decode([i]) for i in range(vocab)) if "\ufffd" not in w]
        self.kinds = [self.fragments, self.unicode, self.combining, self.script, self.code, self.code, self.emoji, self.control,
                      self.specials, self.vocab, self.vocab, self.space, self.runs]

    def some(self, pool, low, high):
        return [self.r.choice(pool) for _ in range(self.r.randint(low, high))]

    def fragments(self):
        return "".join(self.some(self.FRAGMENTS, 1, 16))

    def unicode(self):
        return "".join(self.some(self.any if self.r.random() < 0.3 else self.assigned, 1, 16))

    def combining(self):
        return "".join(c for x in self.some(self.blocks, 1, 6) for c in [self.r.choice(x), *self.some(self.joining if self.r.random() < 0.7 else self.marks, 0, 6)])

    def script(self):
        block = self.r.choice(self.blocks)
        return self.r.choice([" ", "", ", ", "\n", "'"]).join("".join(self.some(block, 1, 9)) for _ in range(self.r.randint(1, 6)))

    def code(self):
        at = self.r.randrange(len(self.lines))
        return "".join(self.lines[at:at + self.r.randint(1, 3)])[:400]

    def emoji(self):
        return "".join(self.some(self.EMOJI + [" ", "a", "!"], 1, 12))

    def control(self):
        return "".join(self.some([chr(c) for c in [*range(32), *range(0x7f, 0xa1), 0xad, 0x200e, 0x202e, 0x2066, 0xfeff, 0xfffe, 0xffff]] + ["a", "7", " ", "."], 1, 16))

    def specials(self):
        cut = lambda t: t[:self.r.randint(1, len(t))] if self.r.random() < 0.3 else t
        return "".join(cut(self.r.choice(self.special)) if self.r.random() < 0.5 else self.r.choice(self.FRAGMENTS) for _ in range(self.r.randint(1, 10)))

    def vocab(self):
        return "".join(self.some(self.words, 1, 12))

    def space(self):
        return "".join(self.some([" ", "\t", "\n", "\r", "\u3000", "\u2003", "\u0085", "\x0b", "\x0c", "a", "1", ".", "\u0301"], 1, 20))

    def runs(self):
        pool = [" ", "\n", "0", "a", "A", "=", "-", "\t", "\u0301", "😀", "中", "/", "\u094d", "é"]
        return "".join(self.r.choice(pool) * self.r.randint(1, 90) for _ in range(self.r.randint(1, 3)))

    def __iter__(self):
        while True:
            for kind in self.kinds:
                yield kind.__name__, kind()


def text_files(sources, suffixes):
    found = [p for s in sources for p in sorted(pathlib.Path(s).rglob("*")) if p.suffix in suffixes and p.is_file() and p.stat().st_size < 1 << 20]
    if not found:
        sys.exit(f"no text files below {sources}")
    return found


def read_text(path):
    return path.read_bytes().decode("utf-8", "replace")


def leb(n):
    out = bytearray()
    while n >= 0x80:
        out.append(n & 0x7F | 0x80)
        n >>= 7
    out.append(n)
    return bytes(out)


def blob(b):
    return leb(len(b)) + b


class Tiktoken:
    """tiktoken on the same ranks; strings it encodes otherwise are counted by reason."""

    def __init__(self, ranks_file, tok, pattern):
        import tiktoken
        self.ranks = read_ranks(ranks_file)
        self.enc = tiktoken.Encoding("ranks", pat_str=pattern, mergeable_ranks=self.ranks, special_tokens={})
        self.special = {t.content: i for i, t in tok.get_added_tokens_decoder().items()}
        self.split = re.compile("(" + "|".join(map(re.escape, sorted(self.special, key=len, reverse=True))) + ")")
        self.nfc = normalizers.NFC().normalize_str
        self.same, self.other, self.shown = 0, collections.Counter(), 0
        doc = json.loads(tok.to_str())
        doc["model"]["ignore_merges"] = False
        self.merging, self.bytes = Tokenizer.from_str(json.dumps(doc)), {r: t for t, r in self.ranks.items()}

    def unreached(self, token):
        """Whether merges do not give the token for its own text; a rank encoder has further ways to build a token."""
        text = self.bytes.get(token, b"").decode("utf-8", "replace")
        return "\ufffd" not in text and self.merging.encode(text, add_special_tokens=False).ids != [token]

    def compare(self, text, ids):
        got = []
        for part in self.split.split(text):
            got += [self.special[part]] if part in self.special else self.enc.encode_ordinary(self.nfc(part))
        if got == ids:
            self.same += 1
            return
        reason = "a token that no chain of merges gives" if any(map(self.unreached, set(got) - set(ids))) else "other"
        self.other[reason] += 1
        if reason == "other" and self.shown < 10:
            self.shown += 1
            print(f"  tiktoken differs on {ascii(text)}: {got} and {ids}")


def split_pattern(tok):
    return json.loads(tok.to_str())["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]


def cases(folder, count, seed, ranks, sources):
    tok = Tokenizer.from_file(str(folder / "tokenizer.json"))
    r = random.Random(seed)
    files = text_files(sources, {".py", ".c", ".h", ".js", ".md", ".txt", ".rst", ".json"})
    r.shuffle(files)
    lines = [line for p in files[:400] for line in read_text(p).splitlines(keepends=True) if len(line) < 2000]
    strings = iter(Strings(tok, seed, lines))
    peer = Tiktoken(ranks, tok, split_pattern(tok)) if ranks else None
    kinds, changed, seen = collections.Counter(), 0, set()
    with open(folder / "cases.bin", "wb") as f:
        while len(seen) < count:
            batch = []
            while len(batch) < min(2000, count - len(seen)):
                kind, text = next(strings)
                if (h := hash(text)) not in seen:
                    seen.add(h)
                    kinds[kind] += 1
                    batch.append(text)
            encoded = [e.ids for e in tok.encode_batch_fast(batch, add_special_tokens=False)]
            decoded = tok.decode_batch(encoded, skip_special_tokens=False)
            for text, ids, back in zip(batch, encoded, decoded):
                changed += back != text
                b = back.encode()
                f.write(leb(0) + blob(text.encode()) + leb(len(ids)) + b"".join(map(leb, ids)) + (b"\0" if back == text else leb(len(b) + 1) + b))
                if peer:
                    peer.compare(text, ids)
        for unit in LONG:
            text = unit * (300_000 // len(unit.encode()))
            ids = tok.encode(text, add_special_tokens=False).ids
            back = tok.decode(ids, skip_special_tokens=False).encode()
            f.write(leb(0) + blob(text.encode()) + leb(len(ids)) + b"".join(map(leb, ids)) + leb(len(back) + 1) + back)
        size = tok.get_vocab_size()
        for _ in range(count // 10):  # ids in any order: broken UTF-8 between them
            ids = [r.randrange(256 if r.random() < 0.5 else size) for _ in range(r.randint(1, 12))]
            f.write(leb(1) + blob(tok.decode(ids, skip_special_tokens=False).encode()) + leb(len(ids)) + b"".join(map(leb, ids)))
    print(f"{folder}: {count} strings ({', '.join(f'{n} {k}' for k, n in kinds.items())}), {changed} change by NFC, {len(LONG)} long ones, "
          f"{count // 10} id sequences")
    if peer:
        print(f"  tiktoken: {peer.same} the same, " + ", ".join(f"{n} other: {k}" for k, n in peer.other.items()))


def classes():
    """One letter per code point (surrogates as other): L, M, N, s (whitespace) or '.', as the pattern engine sees them."""
    every = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    out = ["."] * 0x110000
    for name, pattern in (("L", r"\p{L}"), ("M", r"\p{M}"), ("N", r"\p{N}"), ("s", r"\s")):
        only = pre_tokenizers.Split(Regex(pattern), "removed", invert=True)
        for at in range(0, len(every), 4096):
            for run, _ in only.pre_tokenize_str("".join(every[at:at + 4096])):
                for c in run:
                    out[ord(c)] = name
    return "".join(out)


def joined(nfc):
    """NFC of every character between a letter and two marks, which shows its class, what it decomposes to and what it composes with."""
    return "".join(nfc("e" + chr(c) + "\u0323\u0301") for c in itertools.chain(range(0xD800), range(0xE000, 0x30000), range(0xE0000, 0xE1000)))


def golden(tokenizer, out, seed):
    raw = pathlib.Path(tokenizer).read_bytes()
    tok = Tokenizer.from_str(raw.decode())
    nfc = normalizers.NFC().normalize_str
    split = [pre_tokenizers.Split(Regex(p), "isolated") for p in (PATTERN, PATTERN_QWEN3)]
    hand = ["", "Hello, world!", "I'm 1234, we're coding. IT'S O'CLOCK 'Tis 'LLama 'Re 'vet 'd'S't 'x '' ' 's'", "'\u017fo and \u2019s", "  one\t two\n\nthree  \n", " \t\n\r\n  ",
            " a", "  a", "   a", "\ta", "\t\ta", "a \n b", "a\n\n  b", "\u3000\u3000中", "\u00a0\u00a0x", "a\u0085\u0085b", "x  ", "x\n ", " \n", "  !", " !\n\n x", "!\r\n\r\na", "?!  \n",
            "１２３٣Ⅷ²½", "a1b22c", "1,000.50", "\u0301!I", "e\u0301\u0323", "\u0344", "\u212b\u2126", "\u1100\u1161\u11a8", "\uac00\u11a8", "Café déjà vu — naïve façade.",
            "Cafe\u0301 de\u0301ja\u0300 vu", "क् क्ष हिन्दी", "\u0915\u094d\u0937!\u094d", "مرحبا بالعالم", "שָׁלוֹם", "ไทยครับ", "中文测试：こんにちは。", "\U0002ebf0\U00010d40\u0897a", "\U00011935\U00011930 \U00011938",
            "a\u1abf\u0323\u0301", "a\u0301\u1abf\u0323", "👩🏽‍💻🇩🇪 1️⃣", "a\x00b\x01c\x1fd", "\x1c\x1d \x0b\x0c", "<|im_start|>user\nhi<|im_end|>\n", "<|im_end", "a<think>e\u0301</think>\u0301", "<<|im_end|>>",
            "def f(x):\n    return x**2  # square\n", "{\"a\": [1, 2.5e-3, null]}", "SELECT * FROM t WHERE a <> 'it''s';", "a" * 100, " " * 70 + "x", "\n" * 9, "0" * 40, "=" * 60, "é" * 50, "e\u0301" * 50, "a" + "\u0301" * 40 + "\u0323" * 3]
    texts, strings = list(hand), iter(Strings(tok, seed, ["for i in range(10):\n", "\tif err != nil {\n", "x = y // 2;  /* half */\n", "\n", "    return nil, err\r\n"]))
    texts += [text for _, text in itertools.islice(strings, 13 * 12) if len(text) < 150]
    doc = {"about": "made by tools/reference/tokenizer.py golden from tokenizers; pieces are split after NFC and without added tokens",
           "tokenizer_sha256": hashlib.sha256(raw).hexdigest(), "classes_sha256": hashlib.sha256(classes().encode()).hexdigest(),
           "joined_sha256": hashlib.sha256(joined(nfc).encode()).hexdigest(), "cases": []}
    for text in texts:
        ids = tok.encode(text, add_special_tokens=False).ids
        n = nfc(text)
        pieces = [[p for p, _ in s.pre_tokenize_str(n)] for s in split]
        case = {"text": text, "ids": ids, "pieces": pieces[0], "decoded": tok.decode(ids, skip_special_tokens=False)}
        case |= {"nfc": n} if n != text else {}
        case |= {"pieces_without_marks": pieces[1]} if pieces[1] != pieces[0] else {}
        doc["cases"].append(case)
    out.parent.mkdir(parents=True, exist_ok=True)
    head, tail = json.dumps({**doc, "cases": []}, indent=1)[:-4], " ]\n}\n"
    out.write_text(head + "[\n" + ",\n".join("  " + json.dumps(c) for c in doc["cases"]) + "\n" + tail, encoding="ascii")
    print(f"{out}: {len(doc['cases'])} cases")


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("command", choices=["derive", "cases", "golden"])
    ap.add_argument("paths", nargs="+", type=pathlib.Path)
    ap.add_argument("--count", type=int, default=1_000_000)
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--ranks")
    ap.add_argument("--source", nargs="+", default=[sysconfig.get_paths()["stdlib"]])
    a = ap.parse_args()
    if a.command == "derive":
        derive(*a.paths)
    elif a.command == "cases":
        cases(a.paths[0], a.count, a.seed, a.ranks, a.source)
    else:
        golden(*a.paths, a.seed)


if __name__ == "__main__":
    main()
