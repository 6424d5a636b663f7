"""Three phases of mid-training: short texts, longer texts with YaRN, chats. What does each do to retrieval and loss?

The laptop example's model (its context 256 tokens) trains on one corpus of `etude corpus build` with three phases:

- *short*: pieces of 256 tokens: generated functions, files of the standard library, texts that state and use numbers;
- *long*: pieces of 1,024 tokens with `rope_factor` 4, of which a part is short texts again, so that they are not
  forgotten;
- *chats*: supervised fine-tuning: short and long texts with a question about a number in them.

Measured as `etude base compare` does, after each phase: `retrieval` is the share of questions whose number the model
generates greedily, by tokens between statement and question (`etude.evals.bases.retrieval`); names and numbers of the
questions are in no text that was trained on, and the text between is of files that were not. `loss` is that of short
held-out texts, at most 256 tokens each, in bits per byte. `yarn alone` is the model after the first phase with the
config of the second: what YaRN gives without training.

`python -m benchmarks.learning.long_context [--seeds 0 1 2] [--questions 100]`
Some ten CPU minutes a seed; seeds are kept as they end (`benchmarks.journal`).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import resource
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.journal import Journal, Row
from benchmarks.learning import seeds as over_seeds
from benchmarks.report import report
from benchmarks.runs import LAPTOP
from etude.config import build, load
from etude.corpus import Corpus, CorpusConfig, build_corpus
from etude.corpus.config import TokenizerConfig
from etude.corpus.documents import Document
from etude.corpus.encoding import read_tokenizer
from etude.evals.bases import Candidate, Question, compare_bases, retrieval_questions
from etude.evals.bases.comparison import plain
from etude.evals.bases.retrieval import asked, named_numbers, statement
from etude.evals.bases.scorer import TorchScorer
from etude.harness import chat_template
from etude.harness.chat import SPECIAL_TOKENS
from etude.harness.template import stop_ids
from etude.loop.config import RunConfig
from etude.models import Transformer, load_model, save_model
from etude.models.checkpoint import copy_assets
from etude.tasks.corpus import code_documents
from etude.training import train_tokenizer
from etude.training.config import LossTokens, MidTrainingPhase, OptimizerKind
from etude.training.mid_training import Job, TextTraining, begin
from etude.training.process_group import SINGLE_PROCESS

SHORT, FACTOR = 256, 4
LONG = SHORT * FACTOR
END = "<|doc|>"
HELDOUT_SEED = 10**6
DISTANCES = (200, 450, 900, 1800)
"""Bytes between a statement and its question: about 90, 200, 400 and 800 tokens of this tokenizer."""
BUCKETS = (128, 256, 512, LONG)
"""Ends of the ranges of distances in tokens."""
TOKENS = {"short": 1_000_000, "long": 400_000, "chats": 100_000}
MIXES = {
    "short": {"code": 1, "library": 1, "numbers": 8},
    "long": {"code": 1, "library": 2, "numbers": 2, "far": 5},
    "chats": {"chats": 1},
}
NEVER = 10**9
LRS = {"adamw": 3e-3, "muon": 6e-3}
"""Learning rates of the first phase, as in examples/laptop and examples/long."""
TEXT_OF = {"number": "What is the number of {}?", "answer": "{} is {}."}


class Numbers:
    """Writes texts that state numbers and use them again, between lines of files.

    `names` and `numbers`: those that no text may have."""

    def __init__(self, lines: Sequence[str], names: set[str], numbers: set[str]) -> None:
        self.lines, self.names, self.numbers = lines, names, numbers

    def drawn(self, draw: random.Random, count: int) -> dict[str, str]:
        """Draw named numbers that may be trained on."""
        found: dict[str, str] = {}
        while len(found) < count:
            more = named_numbers(draw, count)
            found |= {a: b for a, b in more.items() if a not in self.names and b not in self.numbers}
        return dict(itertools.islice(found.items(), count))

    def filler(self, draw: random.Random, size: int) -> list[str]:
        """Draw lines in order from a random place, of about `size` characters."""
        at, found = draw.randrange(len(self.lines)), list[str]()
        while size > 0:
            line = self.lines[at % len(self.lines)]
            found.append(line)
            at, size = at + 1, size - len(line) - 1
        return found

    def text(self, draw: random.Random, *, chars: int, stated: int, used: int) -> str:
        """Make a text of about `chars` characters that states `stated` numbers, and uses some `used` times."""
        numbers = list(self.drawn(draw, stated).items())
        lines = self.filler(draw, chars - 22 * stated - 24 * used)
        places = sorted(draw.randint(0, len(lines)) for _ in range(stated + used))
        kinds = [True] * stated + [False] * used
        draw.shuffle(kinds)
        kinds = [True, *kinds[: kinds.index(True)], *kinds[kinds.index(True) + 1 :]]  # one is stated first
        found, known, done = list[str](), list[tuple[str, str]](), 0
        for place, states in zip(places, kinds, strict=True):
            found += lines[done:place]
            done = place
            if states:
                known.append(numbers[len(known)])
                found.append(statement(*known[-1]))
            else:
                name, number = draw.choice(known)
                found.append(asked(name) + number if draw.random() < 0.5 else statement(name, number))
        return "\n".join([*found, *lines[done:]]) + "\n"

    def chat(self, draw: random.Random) -> dict[str, Any]:
        """Make a chat about two numbers of a text."""
        numbers = list(self.drawn(draw, 4).items())
        lines = self.filler(draw, draw.choice((100, 300, 800, 1600)))
        for one in numbers:
            lines.insert(draw.randint(0, len(lines)), statement(*one))
        (first, second), text = draw.sample(numbers, 2), "\n".join(lines)
        messages = [{"role": "user", "content": f"{text}\n\n{TEXT_OF['number'].format(first[0])}"}]
        messages.append({"role": "assistant", "content": TEXT_OF["answer"].format(*first)})
        messages.append({"role": "user", "content": TEXT_OF["number"].format(second[0])})
        messages.append({"role": "assistant", "content": TEXT_OF["answer"].format(*second)})
        return {"messages": messages}


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


def write_tokenizer(folder: Path, seed: int) -> Path:
    """Train a tokenizer as the example does, on texts of the kinds that are trained on."""
    lines = [path.read_text() for path in library()[0][:30]]
    texts = itertools.chain(code_documents(count=2000, seed=seed), lines)
    train_tokenizer(texts, folder, vocab_size=768, special_tokens=SPECIAL_TOKENS, chat_template=chat_template())
    return folder


def write_corpus(folder: Path, base: Path, made: Numbers, seed: int) -> Corpus:
    """Write the sources, and build the corpus with its three phases."""
    (folder / "library").mkdir(parents=True)
    for path in library()[0]:
        shutil.copy(path, folder / "library" / path.name)

    def draws(kind: str, count: int) -> Iterator[random.Random]:
        return (random.Random(f"{kind} {seed} {i}") for i in range(count))

    texts = {
        "code": ({"text": text} for text in _joined(code_documents(count=12_000, seed=seed), 4)),
        "numbers": (
            {"text": made.text(draw, chars=400, stated=draw.randint(1, 4), used=12)} for draw in draws("numbers", 5_000)
        ),
        "far": ({"text": made.text(draw, chars=2100, stated=6, used=16)} for draw in draws("far", 800)),
        "chats": (made.chat(draw) for draw in draws("chats", 500)),
    }
    for name, rows in texts.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    kinds: dict[str, dict[str, Any]] = {
        name: {"kind": "jsonl", "files": [str(folder / f"{name}.jsonl")]} for name in texts if name != "chats"
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


def questions_of(base: Path, count: int, seed: int) -> list[Question]:
    """Make questions between lines of held-out files, named by their distance in tokens.

    A text that does not fit into the long context is left out."""
    documents = [Document(path.name, path.read_text()) for path in library()[1]]
    tokenizer, found = read_tokenizer(TokenizerConfig(base, END))[0], []
    for one in retrieval_questions(documents, distances=DISTANCES, count=count, seed=HELDOUT_SEED + seed):
        after = one.context.split("\n", 2)[2]
        distance, whole = len(tokenizer.encode(after)), len(tokenizer.encode(one.context + one.options[0]))
        if whole < LONG:
            low, high = next((a + 1, b) for a, b in itertools.pairwise((0, *BUCKETS)) if distance <= b)
            found.append(replace(one, kind=f"{low} to {high} tokens"))
    return found


def short_texts(base: Path, seed: int) -> list[Document]:
    """Return held-out texts of at most `SHORT` tokens: generated functions, and pieces of held-out files."""
    found = list(_joined(code_documents(count=400, seed=HELDOUT_SEED + seed), 4))
    for path in library()[1]:
        found += itertools.islice(pieces(path.read_text(), 350), 6)
    tokenizer = read_tokenizer(TokenizerConfig(base, END))[0]
    return [Document(str(i), text) for i, text in enumerate(found) if len(tokenizer.encode(text)) < SHORT]


def measure(seed: int, questions: int, optimizer: str) -> Row:
    """Train in three phases, and measure after each."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base = write_tokenizer(folder / "base", seed)
        found = questions_of(base, questions, seed)
        told = [line.split(" = ") for one in found for line in one.context.split("\n") if " = " in line]
        lines = [line for path in library()[0] for line in path.read_text().splitlines() if len(line) < 200]
        made = Numbers(lines, {pair[0] for pair in told}, {pair[1] for pair in told})
        corpus = write_corpus(folder / "corpus", base, made, seed)
        trained = train(folder, corpus, base, seed, optimizer)
        candidates = [candidate(name, path, base) for name, path in trained.items()]
        texts = short_texts(base, seed)
        results, apart = compare_bases(candidates, texts, found)
    after = resource.getrusage(resource.RUSAGE_SELF)
    kinds = sorted({one.kind for one in found}, key=lambda kind: int(kind.split()[0]))
    return {
        "tokens": {phase.name: phase.tokens for phase in corpus.manifest.phases},
        "num_questions": {kind: sum(one.kind == kind for one in found) for kind in kinds},
        "short_texts": len(texts),
        **rounded(plain(results, apart)),
        "cpu_s": round(after.ru_utime - before.ru_utime),
    }


def train(folder: Path, corpus: Corpus, base: Path, seed: int, optimizer: str) -> dict[str, Path]:
    """Train the three phases as `mid_train` does, and keep the checkpoint at the end of each, by name."""
    example = load(LAPTOP, RunConfig)
    model = replace(example.model, context_tokens=SHORT)
    phases = [
        MidTrainingPhase("short", num_tokens=TOKENS["short"]),
        MidTrainingPhase("long", num_tokens=TOKENS["long"], document_tokens=LONG, rope_factor=float(FACTOR), lr=1e-3),
        MidTrainingPhase("chats", num_tokens=TOKENS["chats"], document_tokens=LONG, lr=3e-4, loss=LossTokens.SAID),
    ]
    config = replace(
        example.mid_training, corpus=corpus.folder, document_tokens=SHORT, eval_every=NEVER, checkpoint_every=NEVER,
        phases=tuple(phases), heldout_documents=0, optimizer=OptimizerKind(optimizer),
        lr=LRS[optimizer], batch_tokens=LONG,
    )  # fmt: skip
    job = Job(config, model, folder / "done", seed=seed, assets=base)
    begin(job)
    run = TextTraining(job, SINGLE_PROCESS)
    last = {
        first - 1: phase.name for first, phase in zip([*run._first_steps[1:], len(run.batches)], phases, strict=True)
    }
    found = dict[str, Path]()
    for step in range(len(run.batches)):
        run.train_step()
        if step % 20 == 0:
            print(f"seed {seed}: step {step} of {len(run.batches)}, loss {run.loss:.3f}", file=sys.stderr, flush=True)
        if step in last:
            found[last[step]] = out = folder / last[step]
            out.mkdir()
            run.core.trainable.write_model(out)
            copy_assets(base, out)
    stretched = Transformer(model.extended(FACTOR))
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
            for name in names[1:]
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--questions", type=int, default=100, help="for each distance")
    parser.add_argument("--optimizer", choices=list(OptimizerKind), default=OptimizerKind.MUON)
    parser.add_argument("--fresh", action="store_true", help="measure again what was measured")
    args = parser.parse_args()
    torch.set_num_threads(1)
    journal, rows = Journal("long_context", fresh=args.fresh), []
    for seed in args.seeds:
        key = {"seed": seed, "questions": args.questions, "optimizer": args.optimizer}
        rows.append({"seed": seed, **journal.once(key, partial(measure, **key))})
    facts = {"optimizer": str(args.optimizer), "short": SHORT, "factor": FACTOR, "mixes": MIXES, "tokens": TOKENS}
    report("long_context", {**facts, "over_seeds": summary(rows), "rows": rows})


if __name__ == "__main__":
    main()
