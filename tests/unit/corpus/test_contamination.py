"""Held-out texts are found in documents under other names, other formatting, and after FIM splits."""

from __future__ import annotations

import ast
import io
import json
import keyword
import random
import re
import tokenize

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tiers import first_few

from etude.corpus import HeldOutIndex, HeldOutText
from etude.corpus.contamination import embedded
from etude.corpus.fim import SENTINELS
from etude.corpus.tokens import Tokens

ANSWER = '''
def merge_intervals(intervals, gap=0):
    """Merge intervals that overlap or are at most `gap` apart."""
    merged = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1] + gap:
            merged[-1][1] = max(merged[-1][1], stop)
        else:
            merged.append([start, stop])
    return [tuple(one) for one in merged]


def count_inside(intervals, points):
    inside = 0
    for point in points:
        if any(low <= point < high for low, high in intervals):
            inside += 1
    return inside / len(points) if points else None
'''
TRIPLE = '"' * 3
PROSE = (
    "The committee met in the old harbour building and decided, after a long debate about tides and timber, that the "
    "northern pier would be rebuilt in stone while the southern one should keep its wooden planks for another decade."
)
CLEAN = [
    "def merge(one, other):\n    return {**one, **other}\n\n\ndef invert(table):\n"
    "    return {value: key for key, value in table.items()}\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"
    "        self.items.append(item)\n\n    def pop(self):\n        return self.items.pop()\n",
    "The committee of the school met on Monday and talked about the new library, its books and its opening hours.",
    "for i in range(10):\n    for j in range(10):\n        if i < j:\n            print(i, j)\n",
]


def renamed(rng: random.Random, source: str) -> str:
    """All names that are not keywords or built in are replaced, consistently."""
    spared = {*keyword.kwlist, "sorted", "max", "tuple", "any", "len", "append", "None"}
    names = sorted(set(re.findall(r"\b[a-z_]+\b", re.sub(r'""".*?"""', "", source))) - spared)
    others = {name: f"{rng.choice('abcdefgh')}{rng.randrange(10**6)}" for name in names}
    return re.sub(r"\b[a-z_]+\b", lambda m: others.get(m[0], m[0]), source)


def reformatted(rng: random.Random, source: str) -> str:
    """The same tokens with comments, other indentation and other breaks; or as `ast` writes them."""
    if rng.random() < 0.3:
        return ast.unparse(ast.parse(source))
    width = rng.choice([1, 2, 3, 8])
    lines = []
    for line in source.splitlines():
        body = line.lstrip(" ")
        lines.append(" " * (width * (len(line) - len(body)) // 4) + body.replace(", ", rng.choice([",", ",  "])))
        if rng.random() < 0.2 and not body.startswith('"""'):
            lines.append(f"  # {rng.choice(['check', 'then this', 'see below'])} {rng.random()}")
    return "\n".join(lines)


def split(rng: random.Random, source: str, *, named: bool) -> str:
    first, second = sorted(rng.sample(range(len(source)), 2))
    prefix, middle, suffix = source[:first], source[first:second], source[second:]
    pre, suf, mid = rng.choice(SENTINELS) if named else ("\n", "\n\n", "\n")
    if rng.random() < 0.5:
        return f"{pre}{prefix}{suf}{suffix}{mid}{middle}"
    return f"{pre}{suf}{suffix}{mid}{prefix}{middle}"


@pytest.fixture(scope="module")
def index() -> HeldOutIndex:
    return HeldOutIndex.build([HeldOutText.of("answer.py", ANSWER), HeldOutText.of("notes.md", PROSE)])


@pytest.mark.parametrize("seed", first_few(range(8), 2))
def test_no_variant_of_a_held_out_answer_passes_and_no_clean_text_is_dropped(index, seed):
    rng = random.Random(seed)
    passed = []
    for number in range(240):
        text = ANSWER
        if number % 2:
            text = renamed(rng, text)
        if number % 3:
            text = reformatted(rng, text)
        if number % 4:
            text = split(rng, text, named=number % 8 > 4)
        around = rng.sample(CLEAN, 2)
        if index.find("\n".join([around[0], text, around[1]])) != "answer.py":
            passed.append(number)
    assert passed == []
    assert [text for text in CLEAN if index.find(text)] == []


def prefixed(text: str, first: str, other: str) -> str:
    return "\n".join((other if line[:1] == " " else first) + line for line in text.split("\n"))


EMBEDDINGS = {
    "comment": lambda text: prefixed(text, "# ", "# "),
    "comment of C": lambda text: prefixed(text, "// ", "// "),
    "diff": lambda text: "--- /dev/null\n+++ b/a.py\n@@ -0,0 +1,20 @@\n" + prefixed(text, "+", "+"),
    "prompt": lambda text: prefixed(text, ">>> ", "... "),
    "quote": lambda text: prefixed(text, "> ", "> "),
    "docstring": lambda text: f'def f():\n    r"""Such as\n{text.replace(TRIPLE, "")}\n    """\n    return 1\n',
    "JSON": lambda text: json.dumps({"id": 7, "text": text}),
    "notebook": lambda text: json.dumps({"cells": [{"source": text.splitlines(keepends=True)}]}, indent=1),
    "notebook on a line": lambda text: json.dumps({"cells": [{"source": text.splitlines(keepends=True)}]}),
    "literal": lambda text: f"ANSWER = {text!r}\n",
    "Markdown": lambda text: f"It's like this:\n\n```python\n{text}\n```\n",
}


@pytest.mark.parametrize("kind", EMBEDDINGS)
def test_a_held_out_answer_is_found_in_comments_diffs_prompts_and_escaped_strings(index, kind):
    rng = random.Random(0)
    for text in (ANSWER, renamed(rng, ANSWER), reformatted(rng, ANSWER)):
        assert index.find(f"{CLEAN[0]}\n{EMBEDDINGS[kind](text)}\n{CLEAN[1]}") == "answer.py"
    for text in CLEAN:
        assert index.find(EMBEDDINGS[kind](text)) is None


@given(st.text(alphabet=st.sampled_from("\\n\"'#+>.*/ \nab{}"), max_size=200))
def test_any_text_can_be_searched_for_embedded_code(index, text):
    assert index.find(text) is None
    assert '"""' not in embedded(text, Tokens.of(text))


def test_one_function_of_a_long_held_out_file_is_found(index):
    rng = random.Random(1)
    inside = ANSWER[ANSWER.index("def count_inside") :]
    assert index.find(renamed(rng, inside)) == "answer.py"


def test_prose_is_found_without_its_case_and_punctuation(index):
    words = re.findall(r"\w+", PROSE.upper())
    assert index.find("Minutes. " + "\n".join(words) + " End.") == "notes.md"
    assert index.find(" ".join(reversed(words))) is None


def test_prose_is_found_with_every_tenth_word_changed(index):
    words = re.findall(r"\w+", PROSE)
    for first in range(10):
        changed = ["other" if i % 10 == first else word for i, word in enumerate(words)]
        assert index.find(" ".join(changed)) == "notes.md"


def test_another_program_of_the_same_shape_is_clean(index):
    other = (
        ANSWER.replace('    """Merge intervals that overlap or are at most `gap` apart."""\n', "")
        .replace("+ gap", "- gap")
        .replace("max", "min")
        .replace("<=", ">=")
        .replace("any", "all")
    )
    other = other.replace("for ", "while ").replace("None", "0").replace("/", "*").replace("append", "add(2).x")
    assert list(tokenize.generate_tokens(io.StringIO(other).readline))
    assert index.find(other) is None


def test_what_is_too_short_to_be_found_is_listed(tmp_path):
    index = HeldOutIndex.build([HeldOutText.of("tiny.py", "x = 1\n"), HeldOutText.of("answer.py", ANSWER)])
    assert index.too_short == ("tiny.py",)
    index.save(tmp_path / "index.npz")
    read = HeldOutIndex.load(tmp_path / "index.npz")
    assert read.find(ANSWER) == "answer.py"
    assert read.find("x = 1\n") is None
