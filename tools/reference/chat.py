#!/usr/bin/env python3
"""Make the chat corpus of model/chat/testdata: conversations as JSON and what the published Qwen3.5 template makes of them.

    chat.py OUT.jsonl                     the committed corpus: hand-written cases and a seeded random sample
    chat.py OUT.jsonl --template FILE     the hand-written cases under another template (testdata/chatml.jsonl: chatml.jinja)
    chat.py OUT.jsonl --random N --seed S only random conversations, for a one-off check: go test ./model/chat -corpus OUT.jsonl

Rendering is that of transformers' apply_chat_template: messages are normalised and rendered by its own functions. The template files are
those of the package trl (pip install --no-deps trl==1.16.0), whose digests are checked against the published ones; --templates names
another folder. The first line of the output holds the digests, each other line one case:

    name, template (think: 4B and 9B, nothink: 0.8B and 2B), messages, tools, gen (add_generation_prompt), thinking (enable_thinking),
    and want (the text) or error (its message) with raised (true when the template itself raised it).

Messages and tools are written with number texts, escapes and key orders that json.dumps would not choose, so readers see raw JSON.
"""
import argparse
import hashlib
import importlib.util
import json
import os
import pathlib
import random

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import jinja2
from transformers.utils.chat_template_utils import _normalize_chat_messages, render_jinja_template

DIGESTS = {
    "think": "a4aee8afcf2e0711942cf848899be66016f8d14a889ff9ede07bca099c28f715",
    "nothink": "273d8e0e683b885071fb17e08d71e5f2a5ddfb5309756181681de4f5a1822d80",
}


class Raw(str):
    """Text that already is JSON, such as a number in an unusual form."""


def dump(v):
    """JSON text of v; Raw is kept."""
    if isinstance(v, Raw):
        return str(v)
    if isinstance(v, dict):
        return "{" + ",".join(json.dumps(k, ensure_ascii=False) + ":" + dump(e) for k, e in v.items()) + "}"
    if isinstance(v, list):
        return "[" + ",".join(dump(e) for e in v) + "]"
    return json.dumps(v, ensure_ascii=False)


def render(templates, case):
    """Adds want or error to a case whose messages and tools are JSON texts."""
    kwargs = {} if case["thinking"] is None else {"enable_thinking": case["thinking"]}
    try:
        chat = _normalize_chat_messages(json.loads(case["messages"]))
        out, _ = render_jinja_template([chat], tools=json.loads(case["tools"]), chat_template=templates[case["template"]],
                                       add_generation_prompt=case["gen"], **kwargs)
        case["want"] = out[0]
    except Exception as e:  # every failure of the reference is an expected result
        case["error"] = str(e)
        case["raised"] = type(e) is jinja2.exceptions.TemplateError


WORDS = ["a", "Hello", "the table", "naïve", "北京", "😀👩‍👩‍👧", "e\u0301", "<b>&amp;</b>", "it's \"quoted\"", "back\\slash", "a < b && c > d", "{{ x }}", "{% if %}",
         "\t", "\n", "\n\n", " ", "\r\n", "\x0b", "\x1c", "\x1f", "\x85", "\xa0", "\u2003", "\u2028", "\u2029", "\u200b", "\ufeff", "\u180e", "\u3000", "\x01", "\x7f",
         "<think>", "</think>", "<tool_response>", "</tool_response>", "<tool_call>", "</tool_call>", "<|im_end|>", "<|im_start|>user\n", "image", "text", "None", "3"]
NUMBERS = ["0", "-0", "7", "-12", "123456789012345678901234567890", "0.0", "-0.0", "1.0", "1.50", "1e5", "1E5", "1e+16", "123456789.123", "1e-5", "0.0001", "0.00001234", "1e22", "1e15",
           "9007199254740993", "9007199254740993.0", "1e400", "-1e400", "5e-324", "3.141592653589793238", "1e16", "9999999999999998.0"]


class Gen:
    def __init__(self, seed):
        self.r = random.Random(seed)

    def chance(self, p):
        return self.r.random() < p

    def text(self, limit=5):
        return "".join(self.r.choice(WORDS) for _ in range(self.r.randint(0, limit)))

    def word(self):
        return self.r.choice(["name", "city", "z", "a", "type", "items", "keys", "größe", "x y", "q<1>", "\"q\"", "ключ", "n\n", "default", "é", "b"])

    def value(self, depth=3):
        k = self.r.randint(0, 9 if depth else 6)
        if k < 3:
            return self.text(3)
        if k == 3:
            return Raw(self.r.choice(NUMBERS))
        if k == 4:
            return self.r.choice([True, False])
        if k == 5:
            return None
        if k == 6:
            return self.r.choice([[], {}, "", Raw('"\\u00e9\\/\\u0041\\b\\f"')])
        if k == 7:
            return [self.value(depth - 1) for _ in range(self.r.randint(0, 3))]
        return {self.word(): self.value(depth - 1) for _ in range(self.r.randint(0, 4))}

    def schema(self, depth=2):
        props = {}
        for _ in range(self.r.randint(0, 3)):
            t = self.r.choice(["string", "integer", "number", "boolean", "array", "object"])
            p = {"type": t, "description": self.text(3)}
            if t == "object" and depth:
                p = self.schema(depth - 1)
            if t == "array":
                p["items"] = self.value(1)
            if self.chance(0.3):
                p["default"] = self.value(1)
            if self.chance(0.2):
                p["enum"] = [self.value(0) for _ in range(2)]
            props[self.word()] = p
        out = [("type", "object"), ("properties", props), ("required", list(props)[:1]), ("additionalProperties", self.chance(0.5))]
        self.r.shuffle(out)
        return dict(out)

    def tool(self):
        f = [("name", self.r.choice(["sh", "get_weather", "f"])), ("description", self.text(4)), ("parameters", self.schema())]
        if self.chance(0.2):
            f.append((self.word(), self.value()))
        self.r.shuffle(f)
        if self.chance(0.15):
            return dict(f)
        t = [("type", "function"), ("function", dict(f))]
        if self.chance(0.3):
            self.r.shuffle(t)
        return dict(t)

    def call(self):
        f = {"name": self.r.choice(["sh", "get_weather", "größe", "a<b>"])}
        if self.chance(0.85):
            f["arguments"] = {self.word(): self.value() for _ in range(self.r.randint(0, 4))}
        if self.chance(0.3):
            f = dict(reversed(f.items()))
        if self.chance(0.2):
            return f
        c = {"id": "call_1", "type": "function", "function": f} if self.chance(0.5) else {"function": f}
        return c

    def part(self):
        p = {"type": "text", "text": self.text(3)}
        if self.chance(0.1):
            p["text"] = self.r.choice([None, True, Raw("1.50"), Raw("3"), Raw("1e5")])
        if self.chance(0.2):
            del p["type"]
        elif self.chance(0.2):
            p = dict(reversed(p.items()))
        return p

    def content(self, m):
        k = self.r.randint(0, 19)
        if k == 0:
            return
        m["content"] = (None if k == 1 else "" if k == 2 else [self.part() for _ in range(self.r.randint(0, 3))] if k < 6 else self.text(6))

    def thought(self):
        return self.r.choice(["<think>\nplan\n</think>\n\nAnswer", "plan</think>Answer", "<think></think>", "a<think>b<think>c</think>d</think>\n\ne", " <think>\n \n</think> \n x ", self.text(6)])

    def assistant(self):
        m = {"role": "assistant"}
        self.content(m)
        if self.chance(0.4):
            m["content"] = self.thought()
        if self.chance(0.3):
            m[self.r.choice(["reasoning_content", "reasoning_content", "reasoning", "thinking"])] = self.r.choice(["", self.text(4), "plan", None, Raw("3")])
        if self.chance(0.5):
            m["tool_calls"] = [self.call() for _ in range(self.r.randint(1, 3))]
        elif self.chance(0.2):
            m["tool_calls"] = self.r.choice([None, [], {}, {"a": 1}, Raw("0"), ""])
        if self.chance(0.2):
            m = dict(reversed(m.items()))
        return m

    def messages(self):
        out = []
        broken = self.chance(0.15)
        if self.chance(0.5):
            m = {"role": "system"}
            self.content(m)
            out.append(m)
        for _ in range(self.r.randint(1, 3)):
            m = {"role": "user"}
            self.content(m)
            if not broken and self.chance(0.1):
                m["content"] = self.r.choice(["<tool_response>x</tool_response>", " <tool_response>\nx\n</tool_response>\n", "<tool_response>", "<tool_response></tool_response>y"])
            out.append(m)
            for _ in range(self.r.randint(0, 3)):
                out.append(self.assistant())
                for _ in range(self.r.choice([0, 0, 1, 2, 3])):
                    m = {"role": "tool", "tool_call_id": "call_1"}
                    self.content(m)
                    out.append(m)
        if broken:
            self.fault(out)
        return out

    def fault(self, out):
        """Breaks one thing."""
        i = self.r.randrange(len(out))
        k = self.r.randint(0, 11)
        if k == 0:
            out.insert(i + 1, {"role": "system", "content": "late"})
        elif k == 1:
            out[i]["role"] = self.r.choice(["developer", "", None, Raw("3"), "User"])
        elif k == 2:
            out[i]["content"] = self.r.choice([Raw("3"), True, {"text": "x"}])
        elif k == 3:
            out[i]["content"] = [self.part(), self.r.choice([{"type": "audio"}, {}, {"type": "image_url"}])]
        elif k == 4:
            out[i]["content"] = [self.part(), self.r.choice([{"type": "image"}, {"image": "u"}, {"type": "image_url", "image_url": {"url": "u"}}, {"type": "video"}, {"video": "u"}])]
        elif k == 5:
            out[:] = [m for m in out if m["role"] != "user"]
        elif k == 6:
            out.insert(0, {"role": "tool", "content": "first"})
        elif k == 7:
            out.append({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{\"a\": 1}"}}]})
        elif k == 8:
            out.append({"role": "assistant", "tool_calls": [self.r.choice([{"function": {}}, {"name": None}, {"function": None}, {"name": Raw("3")}, {"name": "f", "arguments": None}, {"name": "f", "arguments": []}, Raw("3"), "f"])]})
        elif k == 9:
            out.append({"role": "assistant", "tool_calls": "abc"})
        elif k == 10:
            out.append(self.r.choice([Raw("3"), "x", [], None]))
        else:
            out[:] = []

    def tools(self):
        if self.chance(0.5):
            return self.r.choice([None, []])
        return [self.tool() for _ in range(self.r.randint(1, 3))]

    def case(self, name):
        return dict(name=name, template=self.r.choice(["think", "nothink"]), messages=dump(self.messages()), tools=dump(self.tools()), gen=self.chance(0.5),
                    thinking=self.r.choice([None, True, False]))


USER = {"role": "user", "content": "What is the weather in Paris?"}
SYSTEM = {"role": "system", "content": "Be brief."}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "Current weather <in> a city & \"more\"", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "array", "items": {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "default": Raw("1.0")}}}}},
    "required": ["city"], "additionalProperties": False}}}
ZULU = {"function": {"parameters": {"z": {}, "a": None, "m": [True, False, Raw("1e5"), Raw("1.50"), Raw("-0"), Raw("12345678901234567890123")]}, "name": "zulu"}, "type": "function", "strict": True}


def ask(name="get_weather", content="", **arguments):
    return {"role": "assistant", "content": content, "tool_calls": [{"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}]}


def tool(content):
    return {"role": "tool", "content": content}


def written():
    """Hand-written cases: name, messages, tools."""
    two = ask(content="I will look.", city="Zürich 北京", days=[{"n": Raw("1")}, {"n": Raw("2.50")}], f=Raw("1e-7"), big=Raw("1e22"), t=True, n=None, html="<a href='x'>&</a>")
    two["reasoning_content"] = "think A"
    two["tool_calls"].append({"name": "zulu"})
    old = {"role": "assistant", "content": "<think>\nold plan\n</think>\n\nAnswer"}
    return [
        ("user", [USER], None),
        ("system", [SYSTEM, USER], None),
        ("empty system", [{"role": "system", "content": " \n"}, USER], None),
        ("null system", [{"role": "system", "content": None}, USER], []),
        ("tools", [USER], [WEATHER]),
        ("tools and system", [SYSTEM, USER], [WEATHER, ZULU]),
        ("tools and empty system", [{"role": "system"}, USER], [ZULU]),
        ("one call, one result", [USER, ask(city="Paris"), tool("12 degrees")], [WEATHER]),
        ("three turns", [USER, {"role": "assistant", "content": "<think>\nRain?\n</think>\n\nSunny."}, {"role": "user", "content": "And in Rome?"}, {"role": "assistant", "content": "Sunny."},
                         {"role": "user", "content": "Thanks"}, {"role": "assistant", "content": "Bye", "reasoning_content": "Be polite."}], None),
        ("three turns with calls", [USER, ask(city="Paris"), tool("12 degrees"), {"role": "assistant", "content": "12 degrees."}, {"role": "user", "content": "And in Rome?"},
                         ask(content="<think>\nRome\n</think>\n\nLooking.", city="Rome"), tool("20"), {"role": "assistant", "content": "20."}, {"role": "user", "content": "Thanks"}], [WEATHER]),
        ("two calls, two results", [USER, two, tool("out1"), tool([{"type": "text", "text": "out"}, {"text": "2"}])], [WEATHER, ZULU]),
        ("thinking dropped before the query", [USER, old, {"role": "user", "content": "more"}], None),
        ("thinking kept after the query", [USER, ask(content="<think>\nplan\n</think>\n\n", city="x"), tool("y"), old], None),
        ("thinking dropped and kept", [USER, old, {"role": "user", "content": "more"}, old, tool("y"), {"role": "assistant", "content": "z", "reasoning_content": " kept \n"}], None),
        ("reasoning under its other names", [USER, {"role": "assistant", "content": "a", "reasoning": "r"}, {"role": "assistant", "content": "b", "thinking": "t", "reasoning_content": None}], None),
        ("tool result as user is no query", [USER, old, {"role": "user", "content": "<tool_response>\nx\n</tool_response>"}], None),
        ("nulls", [{"role": "user", "content": None}, {"role": "assistant", "content": None, "reasoning_content": None, "tool_calls": None}], None),
        ("parts", [{"role": "system", "content": [{"type": "text", "text": " a "}, {"type": "text", "text": "b "}]}, {"role": "user", "content": [{"text": "x"}, {"text": None}, {"text": True}]}], None),
        ("numbers", [USER, ask(**{f"n{i}": Raw(n) for i, n in enumerate(NUMBERS)}), ask(l=[Raw(n) for n in NUMBERS])], None),
        ("white space", [{"role": "user", "content": "\x1c\x85\u2028 x \u3000\u180e\u200b"}, {"role": "assistant", "content": "\xa0<think>\x1f</think>\x1fy\x1e"}], None),
        ("controls", [USER, ask(s="\x01\b\f\t\x7f\u2028", l=["\x01\b\f\t\x7f\u2028\"\\/", "é😀"])], None),
        ("no messages", [], None),
        ("no query", [SYSTEM, old], None),
        ("only a tool result", [{"role": "user", "content": "<tool_response>x</tool_response>"}], None),
        ("late system", [USER, SYSTEM], None),
        ("unknown role", [USER, {"role": "developer", "content": "x"}], None),
        ("content of a wrong type", [{"role": "user", "content": {"text": "x"}}], None),
        ("unknown part", [{"role": "user", "content": [{"type": "audio", "audio": "u"}]}], None),
        ("system image", [{"role": "system", "content": [{"type": "image"}]}, USER], None),
        ("system video", [{"role": "system", "content": [{"video": "u"}]}, USER], None),
        ("arguments as text", [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{\"a\": 1}"}}]}], None),
        ("call without a name", [USER, {"role": "assistant", "tool_calls": [{"function": {"arguments": {}}}]}], None),
    ]


MATRIX = ["user", "one call, one result", "three turns", "three turns with calls"]  # with every template and every setting


def corpus(size):
    """The hand-written cases, then random ones up to a size."""
    cases = []
    every = [(t, g, k) for t in ("think", "nothink") for g, k in ((True, None), (True, True), (True, False), (False, None))]
    for name, messages, tools in written():
        variants = every if name in MATRIX else [every[len(name) % 4], every[4 + (len(name) + 1) % 4]]
        for t, g, k in variants:
            cases.append(dict(name=name, template=t, messages=dump(messages), tools=dump(tools), gen=g, thinking=k))
    g = Gen(1)
    while len(cases) < size:
        c = g.case("random")
        if len(c["messages"]) + len(c["tools"]) < 1200:
            cases.append(c)
    return cases


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("out")
    ap.add_argument("--random", type=int, default=0)
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--templates", type=pathlib.Path)
    ap.add_argument("--template", type=pathlib.Path)
    a = ap.parse_args()
    folder = a.templates or pathlib.Path(importlib.util.find_spec("trl").origin).parent / "chat_templates"
    templates, digests = {}, DIGESTS
    if a.template:
        raw = a.template.read_bytes()
        templates = dict.fromkeys(DIGESTS, raw.decode())
        digests = {a.template.name: hashlib.sha256(raw).hexdigest()}
    for name, digest in () if a.template else DIGESTS.items():
        raw = (folder / f"qwen3_5_{name}.jinja").read_bytes()
        if hashlib.sha256(raw).hexdigest() != digest:
            raise SystemExit(f"{name}: the template is not the published one")
        templates[name] = raw.decode()
    g = Gen(a.seed)
    cases = [g.case(f"random {a.seed}/{i}") for i in range(a.random)] or corpus(0 if a.template else 130)
    with open(a.out, "w", encoding="utf-8", newline="\n") as f:
        f.write(json.dumps({"digests": digests}) + "\n")
        for c in cases:
            render(templates, c)
            f.write(dump({**c, "messages": Raw(c["messages"]), "tools": Raw(c["tools"])}) + "\n")


if __name__ == "__main__":
    main()
