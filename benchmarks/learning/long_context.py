"""Three phases of mid-training: 256 tokens, 1,024 tokens with YaRN, chats. What does each do to retrieval and loss?

A new model of the laptop example's sizes, with a context of 256 tokens, trains on one corpus of `etude corpus build`:

- *short*: texts of up to 256 tokens: the product's own (generated functions, files of the standard library), and texts
  in which functions are shown, and later shown again;
- *long*: up to 1,024 tokens with `rope_factor` 4: such texts with lines of files between, and a share of short texts;
- *chats*: supervised fine-tuning: the user shows a text with functions and asks for two of them.

A function has a random name and a body that the name does not tell: `def tax_step(a, b):`, `return load_area(a, b)`.
Names are pairs of 40 words, of which a fifth is in no text that was trained on; no word is twice in the names of a
text.

`retrieval` is the share of questions of which the model generates the body greedily. The text of a question begins with
four functions that have the same arguments, goes on with lines of held-out files, and ends with the first line of one
of the functions; all their names are held out. Questions are counted by tokens between the definition and the end.
`without the definition` are the same texts without the function that is asked for. `loss` is that of short held-out
texts of the product, in bits per byte. `yarn alone` is the model after the first phase with the config of the second.

`python -m benchmarks.learning.long_context [--seeds 0 1 2] [--questions 25]`
Some six CPU minutes a seed; seeds are kept as they end (`benchmarks.journal`).
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
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
from etude.evals.bases import Candidate, Question, compare_bases
from etude.evals.bases.comparison import plain
from etude.evals.bases.scorer import TorchScorer
from etude.harness import chat_template
from etude.harness.chat import SPECIAL_TOKENS
from etude.harness.template import stop_ids
from etude.harness.tokenizer import SafeTokenizer
from etude.loop.config import RunConfig
from etude.models import ModelConfig, Transformer, load_model, save_model
from etude.models.checkpoint import copy_assets
from etude.tasks.corpus import code_documents
from etude.training import train_tokenizer
from etude.training.config import LossTokens, MidTrainingPhase
from etude.training.mid_training import Job, TextTraining, begin
from etude.training.process_group import SINGLE_PROCESS

SHORT, FACTOR = 256, 4
LONG = SHORT * FACTOR
END = "<|doc|>"
HELDOUT_SEED = 10**6
BETWEEN = (100, 350, 600, 870)
"""Tokens of lines of files in the text of a question."""
WITHOUT = "without the definition"
FUNCTIONS = 4
"""Functions that the text of a question defines."""
TOKENS = {"short": 800_000, "long": 200_000, "chats": 30_000}
MIXES = {
    "short": {"code": 1, "library": 1, "near": 6},
    "long": {"code": 1, "library": 1, "near": 2, "far": 5},
    "chats": {"chats": 1},
}
COUNTS = {"code": 4_000, "near": 2_800, "far": 130, "chats": 80}
"""Texts that are made; a phase repeats them where it has more tokens."""
LRS = {"short": 3e-3, "long": 1e-3, "chats": 2e-4}
FILES = 25
"""Files of the standard library to train on."""
NEVER = 10**9
ARGUMENTS = ("a, b", "x, y", "m, n", "p, q", "u, v", "n", "xs", "s")
WORDS = (
    "apply", "area", "bonus", "check", "code", "cost", "count", "data", "delta", "fill", "find", "gap", "grade",
    "items", "join", "left", "level", "limit", "load", "mark", "name", "pick", "points", "price", "rank", "rate",
    "right", "rows", "scale", "shift", "size", "split", "step", "tax", "text", "total", "trim", "value", "weigh",
    "word",
)  # fmt: skip


@dataclass(frozen=True)
class Function:
    """A function of two lines: its first line, and its body."""

    head: str
    body: str

    @property
    def text(self) -> str:
        return self.head + self.body


def _names() -> tuple[list[str], list[str]]:
    names = ["_".join(pair) for pair in itertools.permutations(WORDS, 2)]
    random.Random("names").shuffle(names)
    return names[len(names) // 5 :], names[: len(names) // 5]


TRAINED_NAMES, HELDOUT_NAMES = _names()


def functions(draw: random.Random, count: int, names: Sequence[str] = TRAINED_NAMES) -> list[Function]:
    """Make functions with equal arguments. Each returns a call of another name; no word is in two of the names."""
    drawn, used, arguments = list[str](), set[str](), draw.choice(ARGUMENTS)
    while len(drawn) < 2 * count:
        name = draw.choice(names)
        if used.isdisjoint(name.split("_")):
            used |= set(name.split("_"))
            drawn.append(name)
    return [
        Function(f"def {name}({arguments}):\n", f"    return {called}({arguments})\n")
        for name, called in zip(drawn[:count], drawn[count:], strict=True)
    ]


def filler(lines: Sequence[str], draw: random.Random, chars: int) -> list[str]:
    """Draw lines in order from a random place, of about `chars` characters, line ends included."""
    at, found = draw.randrange(len(lines)), list[str]()
    while chars > 0:
        found.append(lines[at % len(lines)] + "\n")
        at, chars = at + 1, chars - len(found[-1])
    return found


def scattered(draw: random.Random, parts: Iterable[str], lines: list[str]) -> str:
    """Return the text of `lines` with `parts` inserted at random places, in any order."""
    for part in parts:
        lines.insert(draw.randint(0, len(lines)), part)
    return "".join(lines)


class Texts:
    """Makes texts to train on, from functions and `lines` of files."""

    def __init__(self, lines: Sequence[str]) -> None:
        self.lines = lines

    def near(self, draw: random.Random) -> str:
        """Make a text of the first phase: functions, repeated in other orders until it has 560 characters.

        A fifth of the texts have each function twice in a row; half of the others have lines of files between them."""
        shown = [one.text for one in functions(draw, draw.randint(2, 5))]
        if draw.random() < 0.2:
            return "".join(text for text in shown for _ in range(2)) * 2
        between: Callable[[], str] = (
            (lambda: "".join(filler(self.lines, draw, draw.choice((60, 150, 300))))) if draw.random() < 0.5 else str
        )
        found = [*shown, between()]
        while sum(map(len, found)) < 560:
            found += draw.sample(shown, len(shown))
            if draw.random() < 0.3:
                found.append(between())
        return "".join(found)

    def far(self, draw: random.Random) -> str:
        """Make a text of the second phase: functions between lines of files, repeated until it has 2,200 characters."""
        shown = [one.text for one in functions(draw, draw.randint(3, 6))]
        found = scattered(draw, shown, filler(self.lines, draw, draw.choice((200, 600, 1000, 1500))))
        while len(found) < 2200:
            found += "".join(draw.sample(shown, len(shown)))
            if draw.random() < 0.5:
                found += "".join(filler(self.lines, draw, draw.choice((60, 200, 400))))
        return found

    def chat(self, draw: random.Random) -> dict[str, Any]:
        """Make a chat in which the user asks for two functions of a text."""
        made = functions(draw, FUNCTIONS)
        text = scattered(draw, [one.text for one in made], filler(self.lines, draw, draw.choice((100, 400, 800, 1400))))
        messages = list[dict[str, str]]()
        for before, one in zip((text, ""), draw.sample(made, 2), strict=True):
            name = one.head.split()[1].split("(")[0]
            messages.append({"role": "user", "content": f"{before}What is {name}?"})
            messages.append({"role": "assistant", "content": one.text})
        return {"messages": messages}


def questions_of(lines: Sequence[str], tokenizer: SafeTokenizer, count: int, seed: int) -> list[Question]:
    """Make `count` questions for each of `BETWEEN`, and each again without the definition that is asked for.

    The four functions are at the start of the text. A question's kind is the range in which the number of
    tokens after that definition lies.
    """
    found = []
    for between, i in itertools.product(BETWEEN, range(count)):
        draw = random.Random(f"question {HELDOUT_SEED + seed} {between} {i}")
        made = functions(draw, FUNCTIONS, HELDOUT_NAMES)
        asked = draw.randrange(FUNCTIONS)
        head, body = made[asked].head, made[asked].body
        last = f"{_lines_of(draw, lines, tokenizer, between)}{head}"
        texts = [one.text for one in made]
        distance = len(tokenizer.encode("".join(texts[asked + 1 :]) + last))
        kind = next(f"{end - SHORT + 1} to {end} tokens" for end in range(SHORT, LONG + 1, SHORT) if distance <= end)
        found.append(Question(kind, "".join(texts) + last, (body,), 0, head))
        del texts[asked]
        found.append(Question(f"{WITHOUT}, {kind}", "".join(texts) + last, (body,), 0, head))
    return found


def _lines_of(draw: random.Random, lines: Sequence[str], tokenizer: SafeTokenizer, tokens: int) -> str:
    found, read = "", iter(filler(lines, draw, 20 * tokens))
    while len(tokenizer.encode(found)) < tokens:
        found += next(read)[:60].rstrip() + "\n"
    return found


def write_tokenizer(folder: Path, made: Texts, seed: int) -> Path:
    """Train a tokenizer as the example does, on texts of the kinds that are trained on."""
    files = [path.read_text() for path in library()[0][:FILES]]
    texts = itertools.chain(code_documents(count=1500, seed=seed), files, _texts("near", seed, 400, made.near))
    train_tokenizer(texts, folder, vocab_size=768, special_tokens=SPECIAL_TOKENS, chat_template=chat_template())
    return folder


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


def write_corpus(folder: Path, base: Path, made: Texts, seed: int) -> Corpus:
    """Write the sources, and build the corpus with its three phases."""
    (folder / "library").mkdir(parents=True)
    for path in library()[0][:FILES]:
        shutil.copy(path, folder / "library" / path.name)
    rows: dict[str, Iterator[dict[str, Any]]] = {
        "code": ({"text": text} for text in _joined(code_documents(count=COUNTS["code"], seed=seed), 4)),
        "near": ({"text": text} for text in _texts("near", seed, COUNTS["near"], made.near)),
        "far": ({"text": text} for text in _texts("far", seed, COUNTS["far"], made.far)),
        "chats": _texts("chats", seed, COUNTS["chats"], made.chat),
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


def _texts(kind: str, seed: int, count: int, make: Callable[[random.Random], Any]) -> Iterator[Any]:
    return (make(random.Random(f"{kind} {seed} {i}")) for i in range(count))


def _joined(texts: Iterator[str], count: int) -> Iterator[str]:
    while part := list(itertools.islice(texts, count)):
        yield "".join(part)


def short_texts(tokenizer: SafeTokenizer, seed: int) -> list[Document]:
    """Return held-out texts of less than `SHORT` tokens: generated functions, and pieces of held-out files."""
    found = list(_joined(code_documents(count=400, seed=HELDOUT_SEED + seed), 4))
    for path in library()[1]:
        found += itertools.islice(pieces(path.read_text(), 300), 6)
    return [Document(str(i), text) for i, text in enumerate(found) if len(tokenizer.encode(text)) < SHORT]


def measure(seed: int, questions: int) -> Row:
    """Train in three phases, and measure after each."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines, heldout = ([line for path in paths for line in path.read_text().splitlines()] for paths in library())
        made = Texts(lines)
        base = write_tokenizer(folder / "base", made, seed)
        tokenizer = read_tokenizer(TokenizerConfig(base, END))[0]
        found, texts = questions_of(heldout, tokenizer, questions, seed), short_texts(tokenizer, seed)
        corpus = write_corpus(folder / "corpus", base, made, seed)
        trained = train(folder, corpus, base, seed)
        results, apart = compare_bases([candidate(*one, base) for one in trained.items()], texts, found)
    after = resource.getrusage(resource.RUSAGE_SELF)
    kinds = sorted({one.kind for one in found}, key=lambda kind: (kind.startswith(WITHOUT), len(kind), kind))
    return {
        "tokens": {phase.name: phase.tokens for phase in corpus.manifest.phases},
        "num_questions": {kind: sum(one.kind == kind for one in found) for kind in kinds},
        "short_texts": len(texts),
        **rounded(plain(results, apart)),
        "cpu_s": round(after.ru_utime - before.ru_utime),
    }


def model() -> ModelConfig:
    """Return the example's model with a context of `SHORT` tokens."""
    return replace(load(LAPTOP, RunConfig).model, context_tokens=SHORT)


def train(folder: Path, corpus: Corpus, base: Path, seed: int) -> dict[str, Path]:
    """Train the three phases as `mid_train` does, and keep the checkpoint at the end of each, by name."""
    phases = [
        MidTrainingPhase("short", num_tokens=TOKENS["short"], batch_tokens=512),
        MidTrainingPhase("long", num_tokens=TOKENS["long"], document_tokens=LONG, rope_factor=float(FACTOR)),
        MidTrainingPhase("chats", num_tokens=TOKENS["chats"], document_tokens=LONG, loss=LossTokens.SAID),
    ]
    config = replace(
        load(LAPTOP, RunConfig).mid_training, corpus=corpus.folder, document_tokens=SHORT, batch_tokens=LONG,
        heldout_documents=0, eval_every=NEVER, checkpoint_every=NEVER,
        phases=tuple(replace(one, lr=LRS[one.name]) for one in phases),
    )  # fmt: skip
    job = Job(config, model(), folder / "done", seed=seed, assets=base)
    begin(job)
    run = TextTraining(job, SINGLE_PROCESS)
    ends = dict(zip([*run.first_steps[1:], len(run.batches)], LRS, strict=True))
    found, losses = dict[str, Path](), list[float]()
    for _ in run.batches:
        run.train_step()
        losses.append(run.loss)
        if run.step % 50 == 0 or run.step in ends:
            mean = sum(losses) / len(losses)
            print(f"seed {seed}: step {run.step} of {len(run.batches)}, loss {mean:.3f}", file=sys.stderr, flush=True)
            losses.clear()
        if run.step in ends:
            found[ends[run.step]] = out = folder / ends[run.step]
            out.mkdir()
            run.core.trainable.write_model(out)
            copy_assets(base, out)
    stretched = Transformer(job.model.extended(FACTOR))
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
    parser.add_argument("--questions", type=int, default=25, help="for each distance")
    parser.add_argument("--fresh", action="store_true", help="measure again what was measured")
    args = parser.parse_args()
    torch.set_num_threads(1)
    journal, rows = Journal("long_context", fresh=args.fresh), []
    for seed in args.seeds:
        key = {"seed": seed, "questions": args.questions}
        rows.append({"seed": seed, **journal.once(key, partial(measure, **key))})
    facts = {"short": SHORT, "factor": FACTOR, "mixes": MIXES, "tokens": TOKENS, "lrs": LRS}
    report("long_context", {**facts, "over_seeds": summary(rows), "rows": rows})


if __name__ == "__main__":
    main()
