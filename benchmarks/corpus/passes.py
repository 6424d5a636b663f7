"""Near duplicates, secrets and leaks that pass a corpus build; clean text that is dropped; MB/s a core; memory.

Clean text is the standard library's own sources. Everything that is planted is drawn with a fixed seed:

- near duplicates: modules with some lines removed, swapped or changed; near is what is so by exact Jaccard similarity.
- secrets: random ones of every kind that the tests plant, in clean modules.
- leaks: functions of held-out modules, renamed, formatted again by `ast`, cut for FIM with and without sentinels, in
  comments, docstrings, diffs, prompts, JSON and notebooks, inside of clean text; over three seeds. Functions that the
  index names as too short are counted apart. False drops: clean modules, against whole held-out modules and against
  the functions; some are real copies.
- steps: CPU milliseconds for a MB of text, of the steps of the pass that reads.
- builds: MB for a CPU second of each pass, and the peak memory of the process before and after, with one copy of the
  library and with several. The tokenizer is a byte-level BPE of 4,096 tokens that is trained on the library.
- calibration: CPU seconds of a loop of 3 million additions before and after, about 0.15 on a core of 3 GHz. They tell
  the times of a machine that was slowed from outside.

    python -m benchmarks.corpus.passes [--modules N] [--copies N]
"""

from __future__ import annotations

import argparse
import ast
import builtins
import json
import keyword
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from tests.unit.corpus import make
from tests.unit.corpus.test_filters import planted
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.report import report
from etude.corpus import CorpusConfig, HeldOutIndex, HeldOutText, build_corpus
from etude.corpus.config import QualityConfig
from etude.corpus.documents import Document
from etude.corpus.filters import filtered, generated_problem, quality_problem
from etude.corpus.fim import SENTINELS
from etude.corpus.near import candidate_pairs, jaccard, near_duplicates, shingles, shingles_of, signature
from etude.corpus.pieces import normalised
from etude.corpus.tokens import Tokens
from etude.secrets import find_secrets

THRESHOLD = 0.8
VARIANTS = 240
SEEDS = (3, 4, 5)
TRIPLE, SINGLE = '"' * 3, "'" * 3
SECRETS_OF_A_KIND = 40


def library(most: int) -> dict[str, str]:
    """Modules of the standard library, by name; a fixed choice of at most `most`."""
    paths = sorted(Path(os.__file__).parent.glob("*.py"))
    random.Random(0).shuffle(paths)
    texts = {path.name: path.read_text(errors="replace") for path in paths}
    return dict([(name, text) for name, text in texts.items() if 2_000 < len(text) < 120_000][:most])


def edited(rng: random.Random, text: str) -> str:
    """A copy with up to a tenth of its lines removed, doubled, swapped or changed."""
    lines = text.splitlines()
    for _ in range(rng.randint(1, max(2, len(lines) // 10))):
        place = rng.randrange(len(lines))
        kind = rng.randrange(4)
        if kind == 0 and len(lines) > 10:
            del lines[place]
        elif kind == 1:
            lines.insert(place, lines[place])
        elif kind == 2:
            lines[place] = lines[place] + f"  # {rng.random()}"
        else:
            other = rng.randrange(len(lines))
            lines[place], lines[other] = lines[other], lines[place]
    return "\n".join(lines)


def duplicates(texts: dict[str, str]) -> dict[str, Any]:
    """Recall and precision of near duplicates, against all pairs by exact Jaccard similarity."""
    rng = random.Random(1)
    every = [*texts.values(), *(edited(rng, text) for text in texts.values() for _ in range(2))]
    hashes = [shingles(text) for text in every]
    pairs = candidate_pairs(np.stack([signature(one) for one in hashes]), THRESHOLD)
    found = near_duplicates(len(every), pairs, hashes.__getitem__, THRESHOLD)
    truth = np.full(len(every), False)
    for later in range(len(every)):
        size = len(hashes[later])
        kept = (i for i in range(later) if not truth[i] and THRESHOLD * size <= len(hashes[i]) <= size / THRESHOLD)
        truth[later] = any(jaccard(hashes[earlier], hashes[later]) >= THRESHOLD for earlier in kept)
    dropped = found >= 0
    return {
        "documents": len(every),
        "near_duplicates": int(truth.sum()),
        "dropped": int(dropped.sum()),
        "recall": round(float((dropped & truth).sum() / truth.sum()), 4),
        "precision": round(float((dropped & truth).sum() / dropped.sum()), 4),
        "candidate_pairs": len(pairs),
    }


def secrets(texts: dict[str, str], config: CorpusConfig) -> dict[str, Any]:
    """How many planted secrets pass, and how many clean modules have something that looks like one."""
    rng, clean, passed, total = random.Random(2), list(texts.values()), 0, 0
    for _ in range(SECRETS_OF_A_KIND):
        for secret in planted(rng).values():
            lines = rng.choice(clean).splitlines()[:80]
            lines.insert(rng.randrange(len(lines)), secret)
            passed += not list(find_secrets("\n".join(lines)))
            total += 1
    false = [name for name, text in texts.items() if list(find_secrets(text))]
    drops = [filtered(Document(name, text, name), config).reason for name, text in texts.items()]
    other = {reason: drops.count(reason) for reason in sorted({*drops} - {""})}
    return {"planted": total, "passed": passed, "clean": len(texts), "false": false, "clean_dropped": other}


class Renamed(ast.NodeTransformer):
    """Renames arguments, variables, functions and attributes of a tree, except for what is built in."""

    def __init__(self, rng: random.Random) -> None:
        self._rng, self._names = rng, dict[str, str]()

    def _new(self, name: str) -> str:
        if keyword.iskeyword(name) or hasattr(builtins, name) or name.startswith("__") or name in ("self", "cls"):
            return name
        return self._names.setdefault(name, f"{self._rng.choice('abcdxyz')}{self._rng.randrange(10**5)}")

    def visit_Name(self, node: ast.Name) -> ast.AST:
        node.id = self._new(node.id)
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.arg = self._new(node.arg)
        return self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        node.attr = self._new(node.attr)
        return self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        node.arg = self._new(node.arg) if node.arg else None
        return self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.name = self._new(node.name)
        return self.generic_visit(node)


def cut(rng: random.Random, text: str, *, named: bool) -> str:
    """A fill-in-the-middle split, with the sentinels of a public tokenizer or with line breaks."""
    first, second = sorted(rng.sample(range(len(text)), 2))
    prefix, middle, suffix = text[:first], text[first:second], text[second:]
    pre, suf, mid = rng.choice(SENTINELS) if named else ("\n", "\n", "\n")
    return rng.choice([f"{pre}{prefix}{suf}{suffix}{mid}{middle}", f"{pre}{suf}{suffix}{mid}{prefix}{middle}"])


def prefixed(text: str, first: str, other: str = "") -> str:
    """A text with `first` before each line; with `other` before those that are indented."""
    return "\n".join((other if other and line[:1] == " " else first) + line for line in text.split("\n"))


def in_notebook(text: str) -> str:
    """A Jupyter notebook with the text as its cell."""
    cell = {"cell_type": "code", "source": text.splitlines(keepends=True)}
    return json.dumps({"cells": [cell], "nbformat": 4}, indent=1)


def leaks(texts: dict[str, str]) -> dict[str, Any]:
    """How many variants of held-out functions pass, by kind, and how many clean modules are dropped."""
    rng = random.Random(SEEDS[0])
    names = sorted(texts)
    held, clean = names[::8], [name for name in names if name not in names[::8]]
    index = HeldOutIndex.build(HeldOutText.of(name, texts[name]) for name in held)
    every = [
        ast.get_source_segment(texts[name], node) or ""
        for name in held
        for node in ast.walk(ast.parse(texts[name]))
        if isinstance(node, ast.FunctionDef) and len(ast.unparse(node).split()) > 60
    ]
    index_of_answers = HeldOutIndex.build(HeldOutText.of(f"{i}.py", text) for i, text in enumerate(every))
    answers = [text for i, text in enumerate(every) if f"{i}.py" not in index_of_answers.too_short]
    kinds: dict[str, Callable[[str], str]] = {
        "as it is": lambda text: text,
        "renamed": lambda text: ast.unparse(Renamed(rng).visit(ast.parse(text))),
        "reformatted": lambda text: ast.unparse(ast.parse(text)),
        "cut with sentinels": lambda text: cut(rng, text, named=True),
        "cut": lambda text: cut(rng, text, named=False),
        "renamed and cut": lambda text: cut(rng, ast.unparse(Renamed(rng).visit(ast.parse(text))), named=False),
        "in comments": lambda text: prefixed(text, "# "),
        "in a docstring": lambda text: f'def f():\n    """Such as\n{text.replace(TRIPLE, SINGLE)}\n    """\n',
        "in a diff": lambda text: prefixed(text, "+"),
        "after prompts": lambda text: prefixed(text, ">>> ", "... "),
        "in JSON": lambda text: json.dumps({"id": 1, "text": text}),
        "in a notebook": in_notebook,
    }
    passed = dict.fromkeys(kinds, 0)
    for seed in SEEDS:
        rng.seed(seed)
        for number in range(VARIANTS):
            kind = [*kinds][number % len(kinds)]
            leak = kinds[kind](rng.choice(answers))
            around = texts[rng.choice(clean)][:2_000]
            passed[kind] += index_of_answers.find(f"{around}\n{leak}\n{around[:300]}") is None
    false = {name: leak for name in clean if (leak := index.find(texts[name])) is not None}
    of_answers = {name: leak for name in clean if (leak := index_of_answers.find(texts[name])) is not None}
    return {
        "variants": VARIANTS * len(SEEDS),
        "answers": len(answers),
        "too_short": len(index_of_answers.too_short),
        "passed": passed,
        "heldout_modules": len(held),
        "heldout_segments": len(index.needs_S),
        "clean_modules": len(clean),
        "clean_dropped": false,
        "clean_dropped_by_answers": of_answers,
    }


def steps(texts: dict[str, str]) -> dict[str, float]:
    """CPU milliseconds for a MB of text of each step of reading: the least of three runs over all modules."""
    held = sorted(texts)[:3]
    index = HeldOutIndex.build(HeldOutText.of(name, texts[name]) for name in held)
    clean = [text for name, text in texts.items() if name not in held]
    tokens = [Tokens.of(text) for text in clean]
    grams = [shingles_of(one) for one in tokens]
    limits = QualityConfig()
    work: dict[str, Callable[[], object]] = {
        "tokens": lambda: [Tokens.of(text).hashes_T for text in clean],
        "shingles": lambda: [shingles_of(one) for one in tokens],
        "signature": lambda: [signature(one) for one in grams],
        "leaks": lambda: [index.find(text, one) for text, one in zip(clean, tokens, strict=True)],
        "secrets": lambda: [list(find_secrets(text)) for text in clean],
        "generated": lambda: [generated_problem(Document("a", text, "a.py")) for text in clean],
        "quality": lambda: [quality_problem(text, limits) for text in clean],
        "normalised": lambda: [normalised(text) for text in clean],
    }
    size = sum(len(text.encode()) for text in clean)
    return {name: round(min(spent(one) for _ in range(3)) / size * 1e9, 1) for name, one in work.items()}


def spent(work: Callable[[], object]) -> float:
    """CPU seconds of a call."""
    started = time.process_time()
    work()
    return time.process_time() - started


def calibration() -> float:
    """CPU seconds of a fixed loop."""
    return round(spent(lambda: sum(i for i in range(3_000_000))), 3)


def trained(path: Path, texts: Iterable[str]) -> None:
    """Write a byte-level BPE tokenizer that is trained on texts."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = [make.END, *make.FIM]
    made.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=4_096, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    made.save(str(path))


def build_once(folder: Path, copies: int, most: int) -> dict[str, Any]:
    """Build a corpus of copies of the library, each with other names: MB for a CPU second by pass, peak memory."""
    texts, total = library(most), 0
    for copy in range(copies):
        place = folder / "texts" / f"copy{copy}"
        place.mkdir(parents=True)
        for name, text in texts.items():
            changed = text.replace("self", f"own{copy}").replace("return", f"return {copy} or")
            total += len(changed.encode())
            (place / name).write_text(changed)
    config = make.config(folder, fim={"rate": 0.5}, heldout={"files": [str(folder / "texts/copy0" / min(texts))]})
    passes: dict[str, float] = {}
    before = [time.process_time()]

    def on_part(title: str, *_: int) -> None:
        now = time.process_time()
        passes[title] = passes.get(title, 0.0) + now - before[0]
        before[0] = now

    peak_before = peak_mb()
    started, wall = time.process_time(), time.perf_counter()
    corpus = build_corpus(config, folder / "out", on_part=on_part)
    cpu_s = time.process_time() - started
    return {
        "megabytes": round(total / 1e6, 2),
        "tokens": sum(phase.tokens for phase in corpus.manifest.phases),
        "kept": sum(source.kept for source in corpus.manifest.sources.values()),
        "cpu_s": round(cpu_s, 2),
        "wall_s": round(time.perf_counter() - wall, 2),
        "mb_a_cpu_second": round(total / 1e6 / cpu_s, 3),
        "mb_a_cpu_second_by_pass": {title: round(total / 1e6 / max(s, 1e-3), 2) for title, s in passes.items()},
        "peak_mb_before": peak_before,
        "peak_mb": peak_mb(),
    }


def peak_mb() -> float:
    """The most memory that this process had so far. `ru_maxrss` would begin with the peak of the process that started
    it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return round(int(next(line.split()[1] for line in lines if line.startswith("VmHWM:"))) / 1024, 1)


def speed(copies: int, most: int) -> dict[str, Any]:
    """Builds in processes of their own: one copy of the library, and several; and by how much their peaks differ."""
    found = dict[str, Any]()
    for count in (1, copies):
        with tempfile.TemporaryDirectory() as folder:
            trained(Path(folder) / "tokenizer.json", list(library(20).values()))
            argv = [sys.executable, "-m", "benchmarks.corpus.passes", "--modules", str(most), "--copies", str(count)]
            done = subprocess.run([*argv, "--inside", folder], capture_output=True, text=True, check=True, timeout=3600)
            found[f"{count} copies"] = json.loads(done.stdout)
    one, several = found["1 copies"], found[f"{copies} copies"]
    found["peak_mb_for_each_further_mb"] = round(
        (several["peak_mb"] - one["peak_mb"]) / (several["megabytes"] - one["megabytes"]), 3
    )
    return found


def main() -> None:
    """Measure and write ``results/corpus.json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--modules", type=int, default=80)
    parser.add_argument("--copies", type=int, default=16)
    parser.add_argument("--inside", type=Path)
    args = parser.parse_args()
    if args.inside:
        print(json.dumps(build_once(args.inside, args.copies, args.modules)))
        return
    texts = library(args.modules)
    with tempfile.TemporaryDirectory() as folder:
        config = make.config(Path(folder))
    before = calibration()
    numbers = {
        "modules": len(texts),
        "megabytes": round(sum(map(len, texts.values())) / 1e6, 2),
        "near_duplicates": duplicates(texts),
        "secrets": secrets(texts, config),
        "leaks": leaks(texts),
        "steps_ms_for_a_mb": steps(texts),
        "builds": speed(args.copies, args.modules),
        "calibration_s": [before, calibration()],
    }
    report("corpus", numbers)


if __name__ == "__main__":
    main()
