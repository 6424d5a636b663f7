"""The commands ``etude corpus build``, ``look`` and ``check``."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from rich.table import Table

from etude.cli.locations import console
from etude.cli.progress import ProgressBar
from etude.corpus import Corpus, build_corpus, check_corpus, read_corpus_config
from etude.corpus.config import TokenizerConfig
from etude.corpus.encoding import read_tokenizer, tokenizer_file
from etude.corpus.sources import LineNumbers
from etude.errors import Exit
from etude.harness.tokenizer import SafeTokenizer

_SHOWN_CHARS = 400


def build(args: argparse.Namespace) -> int:
    """Build a corpus from a config, or continue a build that was stopped. Returns 0."""
    config = read_corpus_config(args.config, args.set)
    bars: dict[str, ProgressBar] = {}

    def on_part(title: str, done: int, total: int) -> None:
        if title not in bars:
            for bar in bars.values():
                bar.__exit__(None, None, None)
            bars[title] = ProgressBar(f"parts, {title}", total)
            bars[title].__enter__()
        if done:
            bars[title].advance()

    try:
        cores = len(os.sched_getaffinity(0))
        corpus = build_corpus(config, args.folder, jobs=args.jobs or cores, on_part=on_part)
    finally:
        for bar in bars.values():
            bar.__exit__(None, None, None)
    _print_counts(corpus)
    return Exit.DONE


def look(args: argparse.Namespace) -> int:
    """Print the counts of a corpus, the numbers of dropped documents by reason, and its first documents. Returns 0."""
    corpus = Corpus.open(args.folder)
    _print_counts(corpus)
    screen = console()
    lines = LineNumbers(corpus.manifest.config)
    for name, source in corpus.manifest.sources.items():
        for reason, examples in source.examples.items():
            screen.print(f"{name}, {reason} ({source.dropped[reason]:,}):", markup=False)
            for example in examples:
                screen.print(f"  {lines.told(name, example)}", markup=False)
    tokenizer = _tokenizer(corpus, args.tokenizer)
    for phase in corpus.manifest.phases:
        left = args.documents
        for facts, shard in zip(phase.shards, corpus.shards(phase.name), strict=True):
            for index, origin in zip(range(min(left, len(shard))), corpus.provenance(facts), strict=False):
                ids = shard.document(index)
                part = slice(int(shard.starts_D[index]), int(shard.starts_D[index + 1]))
                num_said = int(corpus.said(facts)[part].sum())
                said = f", of which the assistant said {num_said:,}" if num_said else ""
                told = lines.told(origin["source"], origin["id"])
                screen.print(
                    f"{phase.name}, document {index} of {facts.file}: {origin['source']} {told}, "
                    f"{origin['licence']}, {len(ids):,} tokens{said}",
                    markup=False,
                )
                text = str(ids[:20].tolist())
                if tokenizer is not None:
                    text = tokenizer.decode(ids[:_SHOWN_CHARS].tolist(), special=True)[:_SHOWN_CHARS]
                screen.print(text, markup=False)
                left -= 1
    return Exit.DONE


def check(args: argparse.Namespace) -> int:
    """Verify every shard of a corpus, and optionally that a tokenizer is the one of the corpus. Returns 0."""
    corpus = Corpus.open(args.folder)
    if args.tokenizer is not None:
        _load(corpus, args.tokenizer)
    total = sum(len(phase.shards) for phase in corpus.manifest.phases)
    with ProgressBar("shards", total) as bar:
        for _ in check_corpus(corpus):
            bar.advance()
    tokens = sum(phase.tokens for phase in corpus.manifest.phases)
    print(f"{args.folder}: {total} shards with {tokens:,} tokens are correct")
    return Exit.DONE


def _tokenizer(corpus: Corpus, path: Path | None) -> SafeTokenizer | None:
    """The tokenizer to show texts with: the given one, or that of the config if it is still there and the same."""
    if path is not None:
        return _load(corpus, path)
    own = corpus.manifest.tokenizer
    if not tokenizer_file(Path(own.path)).is_file():
        return None
    tokenizer, sha256 = read_tokenizer(TokenizerConfig(Path(own.path), own.end))
    return tokenizer if sha256 == own.sha256 else None


def _load(corpus: Corpus, path: Path) -> SafeTokenizer:
    tokenizer, sha256 = read_tokenizer(TokenizerConfig(path, corpus.manifest.tokenizer.end))
    corpus.check_tokenizer(sha256, path)
    return tokenizer


def _print_counts(corpus: Corpus) -> None:
    screen, manifest = console(), corpus.manifest
    table = Table("source", "documents", "kept", "MB", "tokens", "dropped", "licences")
    for name, source in manifest.sources.items():
        table.add_row(
            name,
            f"{source.documents:,}",
            f"{source.kept:,}",
            f"{source.bytes / 1e6:,.1f}",
            f"{source.tokens:,}",
            ", ".join(f"{reason} {count:,}" for reason, count in source.dropped.items()),
            ", ".join(f"{licence} {count:,}" for licence, count in source.licences.items()),
        )
    screen.print(table)
    table = Table("phase", "documents", "tokens", "said", "shards", "sources")
    for phase in manifest.phases:
        drawn = phase.sources.items()
        shares = ", ".join(f"{name} {one.tokens:,} (epoch {one.epochs:.2f})" for name, one in drawn if one.documents)
        said = f"{sum(shard.said_tokens for shard in phase.shards):,}"
        table.add_row(phase.name, f"{phase.documents:,}", f"{phase.tokens:,}", said, str(len(phase.shards)), shares)
    screen.print(table)
    for phase in manifest.phases:
        if phase.missing_tokens:
            screen.print(
                f"phase {phase.name} is {phase.missing_tokens:,} tokens short: all its sources reached max_epochs"
            )
    if too_short := manifest.heldout.too_short:
        named = ", ".join(too_short[:5])
        count = f"{len(too_short):,} of {len(too_short) + manifest.heldout.texts:,}"
        screen.print(f"{count} held-out texts are too short to be found, among them {named}", markup=False)
    own = manifest.tokenizer
    screen.print(f"tokenizer {own.sha256[:12]}, {own.vocab_size:,} tokens, end token {own.end}", markup=False)
