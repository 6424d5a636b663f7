"""What specialisation costs elsewhere: the loss on a package's files and on other Python, before and after it.

A new model of the laptop example's size trains on files of the standard library (*general*), and continues on the files
of one installed package, Rich: with these alone, and with a third of general text among them. The losses are those of
`etude base compare`, in bits per byte, on a tenth of the files of each kind, which no model trained on.

`python -m benchmarks.learning.specialisation [--seeds 0 1 2]`
Some three CPU minutes a seed; seeds are kept as they end (`benchmarks.journal`).
"""

from __future__ import annotations

import argparse
import itertools
import random
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.journal import Journal, Row
from benchmarks.learning import seeds as over_seeds
from benchmarks.learning.long_context import END, NEVER, candidate, library, rounded
from benchmarks.report import report
from benchmarks.runs import LAPTOP
from etude.config import build, load
from etude.corpus import Corpus, CorpusConfig, build_corpus
from etude.corpus.documents import Document
from etude.evals.bases import compare_bases
from etude.evals.bases.comparison import plain
from etude.harness import chat_template
from etude.harness.chat import SPECIAL_TOKENS
from etude.loop.config import RunConfig
from etude.tasks.corpus import code_documents
from etude.training import MidTrainingConfig, mid_train, train_tokenizer
from etude.training.config import MidTrainingPhase

PACKAGE = "rich"
GENERAL, SPECIAL = 600_000, 200_000
"""Tokens of the general model, and of each continuation."""
WAYS = {"package alone": {"package": 1}, "a third general": {"package": 2, "general": 1}}
CHARS = 2_000
"""Characters of each held-out document: parts of files."""


def write_tokenizer(folder: Path, seed: int) -> Path:
    """Train a tokenizer as the example does, on texts of the kinds that are trained on."""
    lines = [path.read_text() for path in library()[0][:30]]
    texts = itertools.chain(code_documents(count=2000, seed=seed), lines)
    train_tokenizer(texts, folder, vocab_size=768, special_tokens=SPECIAL_TOKENS, chat_template=chat_template())
    return folder


def package() -> tuple[list[Path], list[Path]]:
    """Return the package's files: (trained on, held out, a tenth)."""
    spec = find_spec(PACKAGE)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    paths = [path for path in Path(spec.submodule_search_locations[0]).glob("*.py") if not path.name.startswith("_")]
    paths.sort()
    random.Random("package").shuffle(paths)
    return paths[len(paths) // 10 :], paths[: len(paths) // 10]


def documents(paths: Sequence[Path]) -> list[Document]:
    """Return parts of these files, at most eight of each."""
    found = []
    for path in paths:
        text = path.read_text()
        found += [
            Document(f"{path.name} {at}", text[at : at + CHARS]) for at in range(0, min(len(text), 8 * CHARS), CHARS)
        ]
    return found


def corpus(folder: Path, base: Path, mix: dict[str, int], tokens: int) -> Corpus:
    """Build a corpus with one phase of this mixture."""
    sources = []
    for name, paths in {"package": package()[0], "general": library()[0]}.items():
        if name in mix:
            (folder / name).mkdir(parents=True)
            for path in paths:
                shutil.copy(path, folder / name / path.name)
            kind = {"kind": "folder", "path": str(folder / name)}
            sources.append({"name": name, "kind": kind, "max_epochs": 20.0})
    config = {
        "tokenizer": {"path": str(base), "end": END},
        "sources": sources,
        "phases": [{"name": "all", "tokens": tokens, "mix": mix}],
    }
    return build_corpus(build(CorpusConfig, config), folder / "out")


def measure(seed: int) -> Row:
    """Train the general model and its continuations, and compare their losses on both kinds of text."""
    example = load(LAPTOP, RunConfig)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base = write_tokenizer(folder / "base", seed)

        def trained(name: str, mix: dict[str, int], tokens: int, **settings: Any) -> Path:
            built = corpus(folder / f"corpus {name}", base, mix, tokens)
            phases = (MidTrainingPhase("all", num_tokens=tokens),)
            config: MidTrainingConfig = replace(
                example.mid_training, corpus=built.folder, phases=phases, eval_every=NEVER, checkpoint_every=NEVER,
                heldout_documents=0, lr=1e-3 if settings else example.mid_training.lr,
            )  # fmt: skip
            mid_train(config, None, folder / name, model=example.model, ranks=1, seed=seed, assets=base, **settings)
            return folder / name

        general = trained("general", {"general": 1}, GENERAL)
        paths = {"general": general}
        paths |= {name: trained(name, mix, SPECIAL, start=general) for name, mix in WAYS.items()}
        found: Row = {}
        for kind, held in {"package": package()[1], "other Python": library()[1]}.items():
            candidates = [candidate(name, path, base) for name, path in paths.items()]
            found[kind] = rounded(plain(*compare_bases(candidates, documents(held), [])))
    return found


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Return bits per byte over seeds, by text and model, and their share of the general model's."""
    found: dict[str, Any] = {}
    for kind in ("package", "other Python"):
        losses = [{one["name"]: one["bits_per_byte"][0] for one in row[kind]["results"]} for row in rows]
        found[kind] = {
            name: {
                "bits_per_byte": over_seeds.mean([one[name] for one in losses]),
                "share": over_seeds.mean([one[name] / one["general"] for one in losses]),
            }
            for name in ("general", *WAYS)
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--fresh", action="store_true", help="measure again what was measured")
    args = parser.parse_args()
    torch.set_num_threads(1)
    journal = Journal("specialisation", fresh=args.fresh)
    rows = [{"seed": seed, **journal.once({"seed": seed}, partial(measure, seed))} for seed in args.seeds]
    facts = {"package": PACKAGE, "general_tokens": GENERAL, "tokens": SPECIAL}
    report("specialisation", {**facts, "over_seeds": summary(rows), "rows": rows})


if __name__ == "__main__":
    main()
