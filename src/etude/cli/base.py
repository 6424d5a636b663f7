"""The command ``etude base compare``: which base model to start from, on your own text."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

from etude.cli.locations import console, existing_path
from etude.cli.progress import ProgressBar
from etude.corpus.config import TokenizerConfig
from etude.corpus.documents import Document, Dropped
from etude.corpus.encoding import read_tokenizer
from etude.corpus.sources import Folder
from etude.errors import CheckpointError, ConfigError, Exit
from etude.evals.bases import (
    BaseResult,
    Candidate,
    Comparison,
    Question,
    compare_bases,
    look_ups,
    retrieval_questions,
    state_questions,
)
from etude.evals.bases.comparison import plain
from etude.evals.bases.measures import Scorer
from etude.evals.bases.retrieval import RETRIEVED
from etude.evals.intervals import Interval
from etude.harness.template import stop_ids
from etude.models.adapter_config import base_of
from etude.models.config import ModelConfig
from etude.models.headers import read_json
from etude.plan import device
from etude.plan.serving import Serving, serving_cost

MINED = 2000
"""The most documents in which questions are looked for."""
DOCUMENT_CHARS = 1 << 17
"""The most characters of a document that are measured."""
DISTANCES = (1 / 8, 1 / 2, 2)
"""Bytes per token of `--context` between a stated number and the question for it. Tokens of usual tokenizers have more
than two bytes, so that the longest distance also fits."""


def compare(args: argparse.Namespace) -> int:
    """Measure base models on a folder of text, and print the table. Returns 0.

    The first one is compared with each of the others. Raises `EtudeError`."""
    if args.context < 2:
        raise ConfigError(
            f"--context {args.context} is too small",
            "it must be at least 2",
            hint="give a number of tokens, for example --context 2048",
        )
    named = _named(args.models)
    costs = {name: _cost(path, args.hardware) for name, path in named.items()} if args.hardware else {}
    noted: list[ProgressBar] = []
    candidates = [_candidate(name, path, args.context, noted) for name, path in named.items()]
    documents, mined = _documents(Folder(args.text, tuple(args.files or ["*"])), args.documents, args.seed)
    questions = [*look_ups(mined, count=args.questions, seed=args.seed)]
    questions += state_questions(count=args.questions, seed=args.seed)
    distances = [int(share * args.context) for share in DISTANCES]
    questions += retrieval_questions(mined, distances=distances, count=args.questions, seed=args.seed)
    with ProgressBar("measurements", len(candidates) * (len(documents) + len(questions))) as bar:
        noted.append(bar)
        results, comparisons = compare_bases(candidates, documents, questions, on_done=bar.advance)
    facts = _facts(documents, questions, args)
    if args.json:
        print(json.dumps({"facts": facts, **plain(results, comparisons), "serving": _plain_costs(costs)}))
    else:
        screen = console()
        screen.print(_table(results, costs, args.hardware))
        screen.print(_retrieval(results))
        for one in comparisons:
            screen.print(_difference(results[0].name, one), markup=False, highlight=False)
        screen.print(facts, markup=False, highlight=False)
    if args.html is not None:
        from etude.dashboard.bases import bases_page
        from etude.dashboard.pages import write_page

        write_page(args.html, bases_page(results, facts), hint="free disk space, or choose another file with --html")
    return Exit.DONE


def _named(given: Iterable[str]) -> dict[str, Path]:
    """Return the checkpoint directories by name, from ``DIR`` or ``NAME=DIR``."""
    found: dict[str, Path] = {}
    for one in given:
        name, equals, path = one.partition("=")
        where = existing_path(Path(path if equals else one))
        name = name if equals else where.resolve().name
        if name in found:
            raise ConfigError(
                f"two models are named {name}", f"{found[name]} and {where}", hint=f"name one of them: NAME={where}"
            )
        found[name] = where
    return found


def _candidate(name: str, path: Path, context_tokens: int, noted: Sequence[ProgressBar]) -> Candidate:
    ModelConfig.from_hf(read_json(base_of(path) / "config.json"))  # before anything is measured
    tokenizer, _ = read_tokenizer(TokenizerConfig(path))
    start = read_json(path / "config.json").get("bos_token_id")
    ids = [start] if type(start) is int else stop_ids(path)
    if not ids:
        raise CheckpointError(
            f"{path} names no token that begins a text",
            "neither config.json nor generation_config.json has bos_token_id or eos_token_id",
            hint="add the id of its end-of-text token to config.json as eos_token_id",
        )
    return Candidate(name, tokenizer, ids[0], partial(_load, name, path, context_tokens, noted))


def _load(name: str, path: Path, context_tokens: int, noted: Sequence[ProgressBar]) -> Scorer:
    for bar in noted:
        bar.note(f"loading {name} from {path}")
    from etude.evals.bases.scorer import TorchScorer

    return TorchScorer(path, context_tokens=context_tokens)


def _documents(source: Folder, count: int, seed: int) -> tuple[list[Document], list[Document]]:
    """Draw documents of a folder: (`count` to measure, at most `MINED` to look for questions in).

    One pass over the files, of which at most `MINED` are in memory (reservoir sampling)."""
    draw, kept, seen = random.Random(seed), list[Document](), 0
    for one in source.documents():
        if isinstance(one, Dropped) or not one.text.strip():
            continue
        seen += 1
        at = draw.randrange(seen)
        one = Document(one.id, one.text[:DOCUMENT_CHARS], one.path)
        if len(kept) < MINED:
            kept.append(one)
        elif at < MINED:
            kept[at] = one
    draw.shuffle(kept)
    return kept[:count], kept


def _cost(path: Path, hardware: str) -> Serving:
    return serving_cost(ModelConfig.from_hf(read_json(base_of(path) / "config.json")), device(hardware))


def _plain_costs(costs: dict[str, Serving]) -> dict[str, Any]:
    return {name: one._asdict() for name, one in costs.items()}


def _facts(documents: Sequence[Document], questions: Sequence[Question], args: argparse.Namespace) -> str:
    size = sum(len(one.text.encode("utf-8", "replace")) for one in documents)
    return (
        f"{len(documents):,} documents with {size / 1e6:.1f} MB, {len(questions):,} questions, contexts of "
        f"{args.context:,} tokens; 95 % intervals over documents; chance is .25 for questions with options"
    )


def _table(results: Sequence[BaseResult], costs: dict[str, Serving], hardware: str | None) -> Table:
    kinds = [kind for kind in results[0].accuracy if not kind.startswith(RETRIEVED)]
    table = Table("model", "bits per byte", *kinds, "bytes per token", *([f"on {hardware}"] if costs else []))
    for one in results:
        serving = []
        if cost := costs.get(one.name):
            serving = [f"{cost.devices} × {hardware}, ${cost.million_tokens_dollars:.2f} per million tokens"]
        accuracy = [_shown(one.accuracy[kind], 2) for kind in kinds]
        table.add_row(one.name, _shown(one.loss, 3), *accuracy, f"{one.bytes_per_token:.2f}", *serving)
    return table


def _retrieval(results: Sequence[BaseResult]) -> Table:
    kinds = [kind for kind in results[0].accuracy if kind.startswith(RETRIEVED)]
    table = Table("model", *kinds)
    for one in results:
        table.add_row(one.name, *[_shown(one.accuracy[kind], 2) for kind in kinds])
    return table


def _shown(one: Interval, digits: int) -> str:
    return f"{one.value:.{digits}f} [{one.low:.{digits}f}, {one.high:.{digits}f}]"


def _difference(first: str, one: Comparison) -> str:
    apart = one.loss
    better = one.name if apart.high < 0 else first if apart.low > 0 else "neither"
    words = f"{one.name} minus {first}: {apart.value:+.3f} bits per byte [{apart.low:+.3f}, {apart.high:+.3f}]"
    return f"{words}, so {better} is better on this text" + ("" if better != "neither" else " beyond chance")
