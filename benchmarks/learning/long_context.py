"""Three phases of mid-training: short texts, longer ones with YaRN, chats. What does each do to retrieval and loss?

The laptop example's model after its own mid-training (its context is 512 tokens) trains on one corpus of
`etude corpus build` with three phases:

- *short*: pieces of 512 tokens: generated functions, files of the standard library, texts that set names to values and
  set them again;
- *long*: pieces of 2,048 tokens with `rope_factor` 4, of which a part is short texts again, so that they are not
  forgotten;
- *chats*: supervised fine-tuning: short and long texts with a question about a value in them.

Measured as `etude base compare` does, after each phase. `retrieval`: a text sets four names (`set shop bonus rate gap`:
a name of two words, a value of two words), and ends with one of the names; it is the share of texts whose value the
model generates greedily, by tokens between the line that sets the name and the end. Names and values are random pairs
of words, of which a fifth is in no text that was trained on; the text between is of held-out files. These questions are
easier than those of `etude base compare` (`etude.evals.bases.retrieval`): the end is written as the line that set the
name was, and a word is one token. `loss` is that of short held-out texts, in bits per byte. `yarn alone` is the model
after the first phase with the config of the second: what YaRN gives without training.

`python -m benchmarks.learning.long_context [--seeds 0 1 2] [--starts RUN …] [--questions 50]`
Some five CPU minutes a seed, and five for the example's mid-training, if `--starts` does not name a run of the example
for each seed. Seeds are kept as they end (`benchmarks.journal`).
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.journal import Journal, Row
from benchmarks.learning import seeds as over_seeds
from benchmarks.report import report
from benchmarks.runs import ETUDE, LAPTOP, overrides
from etude.config import build, load
from etude.corpus import Corpus, CorpusConfig, build_corpus
from etude.corpus.config import TokenizerConfig
from etude.corpus.documents import Document
from etude.corpus.encoding import read_tokenizer
from etude.evals.bases import Candidate, Question, compare_bases
from etude.evals.bases.comparison import plain
from etude.evals.bases.scorer import TorchScorer
from etude.harness.template import stop_ids
from etude.harness.tokenizer import SafeTokenizer
from etude.loop.config import RunConfig
from etude.models import Transformer, load_model, save_model
from etude.models.checkpoint import copy_assets
from etude.tasks.corpus import code_documents
from etude.training.config import LossTokens, MidTrainingPhase, OptimizerKind
from etude.training.mid_training import Job, TextTraining, begin
from etude.training.process_group import SINGLE_PROCESS

SHORT, FACTOR = 512, 4
LONG = SHORT * FACTOR
END = "<|doc|>"
HELDOUT_SEED = 10**6
DISTANCES = (600, 1500, 2500, 3500)
"""Bytes between a name that is set and the end: about 280, 750, 1,250 and 1,700 tokens of this tokenizer."""
BUCKETS = (SHORT, 2 * SHORT, 3 * SHORT, LONG)
"""Ends of the ranges of distances in tokens."""
NAMES = 4
"""Names that a text of a question sets."""
TOKENS = {"short": 450_000, "long": 200_000, "chats": 30_000}
MIXES = {
    "short": {"code": 1, "library": 1, "near": 8},
    "long": {"code": 1, "library": 1, "near": 3, "far": 5},
    "chats": {"chats": 1},
}
LRS = {"short": 6e-3, "long": 2e-3, "chats": 5e-4}
NEVER = 10**9
ASKED = "What is {} set to?"


class Settings:
    """Writes texts that set names to values, between lines of files.

    `words`: those of names and values. A fifth of their pairs is `heldout`."""

    def __init__(self, words: Sequence[str], lines: Sequence[str], heldout_lines: Sequence[str]) -> None:
        pairs = [" ".join(pair) for pair in itertools.permutations(words, 2)]
        random.Random("pairs").shuffle(pairs)
        self.heldout, self.trained = pairs[: len(pairs) // 5], pairs[len(pairs) // 5 :]
        self.lines, self.heldout_lines = lines, heldout_lines

    def drawn(self, draw: random.Random, count: int, *, heldout: bool = False) -> list[tuple[str, str]]:
        """Draw names and values. No word is in two of them."""
        found, used = list[str](), set[str]()
        while len(found) < 2 * count:
            pair = draw.choice(self.heldout if heldout else self.trained)
            if used.isdisjoint(pair.split()):
                used |= set(pair.split())
                found.append(pair)
        return list(zip(found[:count], found[count:], strict=True))

    def text(self, draw: random.Random, *, names: int, again: int, chars: int) -> str:
        """Make a text that sets `names` names, and some of them `again` times in all, between lines of `chars`."""
        pairs, lines = self.drawn(draw, names), filler(self.lines, draw, chars)
        kinds = ["new"] * (names - 1) + ["again"] * again + ["line"] * len(lines)
        draw.shuffle(kinds)
        known, unread = 0, iter(lines)
        found = list[str]()
        for kind in ["new", *kinds]:
            if kind == "line":
                found.append(next(unread))
                continue
            known += kind == "new"
            found.append(line_of(*(pairs[known - 1] if kind == "new" else draw.choice(pairs[:known]))))
        return "\n".join(found) + "\n"

    def near(self, draw: random.Random) -> str:
        """Make a text of the first phase: about `SHORT` tokens, half of them without other lines."""
        names, chars = draw.randint(3, 8), draw.choice((0, 0, 0, 200, 400, 600))
        return self.text(draw, names=names, again=(1900 - chars * 2) // 24 - names, chars=chars)

    def far(self, draw: random.Random) -> str:
        """Make a text of the second phase: about `LONG` tokens, many of them between a name and its next use."""
        return self.text(draw, names=draw.randint(4, 8), again=draw.choice((10, 20, 40)), chars=3600)

    def chat(self, draw: random.Random) -> dict[str, Any]:
        """Make a chat about two settings of a text."""
        pairs = self.drawn(draw, NAMES)
        lines = filler(self.lines, draw, draw.choice((100, 600, 1600, 3000)))
        for pair in pairs:
            lines.insert(draw.randint(0, len(lines)), line_of(*pair))
        first, second = draw.sample(pairs, 2)
        asked = ["\n".join([*lines, "", ASKED.format(first[0])]), ASKED.format(second[0])]
        messages = list[dict[str, str]]()
        for question, pair in zip(asked, (first, second), strict=True):
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": line_of(*pair)})
        return {"messages": messages}

    def question(self, draw: random.Random, distance: int) -> Question:
        """Make a question whose name is set about `distance` bytes before the end, after another one."""
        (name, value), before, *others = self.drawn(draw, NAMES, heldout=True)
        lines = filler(self.heldout_lines, draw, distance)
        for other in others:
            lines.insert(draw.randint(0, len(lines)), line_of(*other))
        context = "\n".join([line_of(*before), line_of(name, value), *lines, line_of(name)])
        return Question("", context, (" " + value,), 0, name)


def line_of(*pair: str) -> str:
    """Return the line that sets a name to a value."""
    return " ".join(["set", *pair])


def filler(lines: Sequence[str], draw: random.Random, chars: int) -> list[str]:
    """Draw lines in order from a random place, of about `chars` characters."""
    at, found = draw.randrange(len(lines)), list[str]()
    while chars > 0:
        found.append(lines[at % len(lines)])
        at, chars = at + 1, chars - len(found[-1]) - 1
    return found


def words_of(tokenizer: SafeTokenizer, lines: Sequence[str]) -> list[str]:
    """Return words of generated functions that are one token after a space, and that few lines of files have."""
    texts = itertools.chain.from_iterable(re.findall("[a-z]{3,}", text) for text in code_documents(count=2000, seed=0))
    common = collections.Counter(itertools.chain.from_iterable(re.findall("[a-z]+", line) for line in lines))
    return [one for one in sorted(set(texts)) if common[one] < 400 and len(tokenizer.encode(" " + one)) == 1]


def library() -> tuple[list[Path], list[Path]]:
    """Return the standard library's top-level files: (trained on, held out, a tenth)."""
    paths = sorted(path for path in Path(os.__file__).parent.glob("*.py") if path.read_bytes().isascii())
    random.Random("library").shuffle(paths)
    return paths[len(paths) // 10 :], paths[: len(paths) // 10]


def pieces(text: str, chars: int) -> Iterator[str]:
    """Yield parts of complete lines of at least `chars` characters."""
    part = ""
    for line in text.splitlines(keepends=True):
        part += line
        if len(part) >= chars:
            yield part
            part = ""


def write_corpus(folder: Path, base: Path, made: Settings, seed: int) -> Corpus:
    """Write the sources, and build the corpus with its three phases."""
    (folder / "library").mkdir(parents=True)
    for path in library()[0]:
        shutil.copy(path, folder / "library" / path.name)

    def texts(kind: str, count: int, make: Callable[[random.Random], str]) -> Iterator[dict[str, Any]]:
        return ({"text": make(random.Random(f"{kind} {seed} {i}"))} for i in range(count))

    rows = {
        "code": ({"text": text} for text in _joined(code_documents(count=4_000, seed=seed), 6)),
        "near": texts("near", 1_400, made.near),
        "far": texts("far", 130, made.far),
        "chats": (made.chat(random.Random(f"chats {seed} {i}")) for i in range(120)),
    }
    for name, lines in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    kinds: dict[str, dict[str, Any]] = {
        name: {"kind": "jsonl", "files": [str(folder / f"{name}.jsonl")]} for name in rows if name != "chats"
    }
    kinds["library"] = {"kind": "folder", "path": str(folder / "library")}
    kinds["chats"] = {"kind": "chats", "files": [str(folder / "chats.jsonl")], "checkpoint": str(base)}
    config = {
        "tokenizer": {"path": str(base), "end": END},
        "sources": [{"name": name, "kind": kind, "max_epochs": 20.0} for name, kind in kinds.items()],
        "phases": [{"name": name, "tokens": size, "mix": MIXES[name]} for name, size in TOKENS.items()],
        "near": {"threshold": 1.0},  # generated functions are alike
        "quality": {"max_repeated": 1.0},
    }
    return build_corpus(build(CorpusConfig, config), folder / "out")


def _joined(texts: Iterator[str], count: int) -> Iterator[str]:
    while part := list(itertools.islice(texts, count)):
        yield "".join(part)


def questions_of(made: Settings, tokenizer: SafeTokenizer, count: int, seed: int) -> list[Question]:
    """Make `count` questions for each of `DISTANCES`, named by their distance in tokens.

    A text that does not fit into the long context is left out."""
    found = []
    for distance, i in itertools.product(DISTANCES, range(count)):
        one = made.question(random.Random(f"question {HELDOUT_SEED + seed} {distance} {i}"), distance)
        after = len(tokenizer.encode(one.context.split("\n", 2)[2]))
        if len(tokenizer.encode(one.context + one.options[0])) < LONG:
            low, high = next((a + 1, b) for a, b in itertools.pairwise((0, *BUCKETS)) if after <= b)
            found.append(replace(one, kind=f"{low} to {high} tokens"))
    return found


def short_texts(tokenizer: SafeTokenizer, seed: int) -> list[Document]:
    """Return held-out texts of less than `SHORT` tokens: generated functions, and pieces of held-out files."""
    found = list(_joined(code_documents(count=600, seed=HELDOUT_SEED + seed), 6))
    for path in library()[1]:
        found += itertools.islice(pieces(path.read_text(), 700), 6)
    return [Document(str(i), text) for i, text in enumerate(found) if len(tokenizer.encode(text)) < SHORT]


def mid_trained(seed: int) -> Path:
    """Run the example's mid-training from a seed; gone on with where that was broken off. Returns the run's folder."""
    run = Path("runs") / f"long-context-{seed}"
    settings = [f"seed={seed}", f"tasks.seed={seed}", "rl.steps=0", "evals.heldout_tasks=8", "evals.transfer_tasks=0"]
    argv = [*ETUDE, "run", str(LAPTOP), *overrides([*settings, "evals.baseline_tasks=1"])]
    argv += ["--resume", str(run)] if (run / "run.json").is_file() else ["--name", run.name]
    if subprocess.run(argv, stdout=sys.stderr).returncode:
        raise SystemExit(f"{' '.join(argv)} failed; see {run}/logs")
    return run


def measure(seed: int, questions: int, start: Path | None) -> Row:
    """Train in three phases, and measure after each."""
    base = (start or mid_trained(seed)) / "checkpoints" / "mid"
    before = resource.getrusage(resource.RUSAGE_SELF)
    with tempfile.TemporaryDirectory() as name:
        folder, tokenizer = Path(name), read_tokenizer(TokenizerConfig(base, END))[0]
        lines, heldout = ([line for path in paths for line in path.read_text().splitlines()] for paths in library())
        made = Settings(words_of(tokenizer, lines), lines, heldout)
        found, texts = questions_of(made, tokenizer, questions, seed), short_texts(tokenizer, seed)
        corpus = write_corpus(folder / "corpus", base, made, seed)
        trained = {"start": base, **train(folder, corpus, base, seed)}
        results, apart = compare_bases([candidate(*one, base) for one in trained.items()], texts, found)
    after = resource.getrusage(resource.RUSAGE_SELF)
    kinds = sorted({one.kind for one in found}, key=lambda kind: int(kind.split()[0]))
    return {
        "tokens": {phase.name: phase.tokens for phase in corpus.manifest.phases},
        "num_questions": {kind: sum(one.kind == kind for one in found) for kind in kinds},
        "short_texts": len(texts),
        **rounded(plain(results, apart)),
        "cpu_s": round(after.ru_utime - before.ru_utime),
    }


def train(folder: Path, corpus: Corpus, base: Path, seed: int) -> dict[str, Path]:
    """Train the three phases as `mid_train` does, and keep the checkpoint at the end of each, by name."""
    example = load(LAPTOP, RunConfig)
    phases = [
        MidTrainingPhase("short", num_tokens=TOKENS["short"], batch_tokens=SHORT),
        MidTrainingPhase("long", num_tokens=TOKENS["long"], document_tokens=LONG, rope_factor=float(FACTOR)),
        MidTrainingPhase("chats", num_tokens=TOKENS["chats"], document_tokens=LONG, loss=LossTokens.SAID),
    ]
    config = replace(
        example.mid_training, corpus=corpus.folder, document_tokens=SHORT, batch_tokens=LONG, heldout_documents=0,
        eval_every=NEVER, checkpoint_every=NEVER, optimizer=OptimizerKind.MUON,
        phases=tuple(replace(one, lr=LRS[one.name]) for one in phases),
    )  # fmt: skip
    job = Job(config, example.model, folder / "done", seed=seed, start=base, assets=base)
    begin(job)
    run = TextTraining(job, SINGLE_PROCESS)
    ends = dict(zip([*run.first_steps[1:], len(run.batches)], LRS, strict=True))
    found = dict[str, Path]()
    for _ in run.batches:
        run.train_step()
        if run.step % 20 == 0:
            print(
                f"seed {seed}: step {run.step} of {len(run.batches)}, loss {run.loss:.3f}", file=sys.stderr, flush=True
            )
        if run.step in ends:
            found[ends[run.step]] = out = folder / ends[run.step]
            out.mkdir()
            run.core.trainable.write_model(out)
            copy_assets(base, out)
    stretched = Transformer(example.model.extended(FACTOR))
    stretched.load_state_dict(load_model(found["short"]).state_dict(), strict=False)
    save_model(stretched, folder / "yarn", dtype="f32", assets=base)
    return {"short": found["short"], "yarn alone": folder / "yarn", "long": found["long"], "chats": found["chats"]}


def candidate(name: str, path: Path, base: Path) -> Candidate:
    tokenizer = read_tokenizer(TokenizerConfig(base, END))[0]
    return Candidate(name, tokenizer, stop_ids(path)[0], partial(TorchScorer, path, context_tokens=LONG))


def rounded(found: Any) -> Any:
    if isinstance(found, float):
        return round(found, 4)
    if isinstance(found, dict):
        return {name: rounded(value) for name, value in found.items()}
    return [rounded(one) for one in found] if isinstance(found, list) else found


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Return means over seeds: retrieval by phase and distance, and each phase's loss of short texts as a share of that
    after the first."""
    results = [{one["name"]: one for one in row["results"]} for row in rows]
    names, kinds = list(results[0]), list(rows[0]["num_questions"])
    return {
        "retrieval": {
            name: {kind: over_seeds.mean([one[name]["accuracy"][kind][0] for one in results]) for kind in kinds}
            for name in names
        },
        "loss_share": {
            name: over_seeds.mean([one[name]["bits_per_byte"][0] / one["short"]["bits_per_byte"][0] for one in results])
            for name in names
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--questions", type=int, default=50, help="for each distance")
    parser.add_argument("--starts", type=Path, nargs="*", default=[], help="runs of the example, one for each seed")
    parser.add_argument("--fresh", action="store_true", help="measure again what was measured")
    args = parser.parse_args()
    torch.set_num_threads(1)
    journal, rows = Journal("long_context", fresh=args.fresh), []
    for seed, start in itertools.zip_longest(args.seeds, args.starts[: len(args.seeds)]):
        key = {"seed": seed, "questions": args.questions}
        rows.append({"seed": seed, **journal.once(key, partial(measure, **key, start=start))})
    facts = {"short": SHORT, "factor": FACTOR, "mixes": MIXES, "tokens": TOKENS, "lrs": LRS, "optimizer": "muon"}
    report("long_context", {**facts, "over_seeds": summary(rows), "rows": rows})


if __name__ == "__main__":
    main()
