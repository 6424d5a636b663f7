"""The settings of `etude corpus build`: sources, filters, deduplication, held-out texts, FIM, phases."""

from __future__ import annotations

import enum
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

from etude.config import BuiltIn, Plugin, build, ranged, read
from etude.errors import nearest

SOURCES: Mapping[str, str] = MappingProxyType(
    {
        "chats": "etude.corpus.chats:Chats",
        "folder": "etude.corpus.sources:Folder",
        "git": "etude.corpus.git:Git",
        "jsonl": "etude.corpus.sources:Jsonl",
        "parquet": "etude.corpus.sources:Parquet",
        "rollouts": "etude.corpus.rollouts:Rollouts",
    }
)
"""The import paths of the built-in document sources, by name."""
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Secrets(enum.StrEnum):
    """What to do with a document that contains a secret, such as a password. REDACT replaces the secret by
    "<REDACTED>"."""

    DROP = "drop"
    REDACT = "redact"


@dataclass(frozen=True)
class SourceConfig:
    """A `[[sources]]` table: where documents come from.

    - `name`: the source's name in `mix`, in the manifest and in the ids of documents.
    - `kind`: a built-in source (`SOURCES`) or "my_package.module:Name", as a table with `kind` and its settings.
    - `weight`: the source's share of the tokens, relative to the other sources, in phases without `mix`.
    - `max_epochs`: how often the source may be used, over all phases (1: each token once).
    - `licence`: the SPDX expression for documents whose own licence is not known ("": not known either)."""

    name: str  # its name in `mix`, in the manifest and in the ids of documents
    kind: Annotated[Plugin, BuiltIn(tuple(SOURCES))]  # a table with `kind` and its settings
    weight: float = ranged(1.0, low=0.0)  # share of the tokens of a phase without `mix`
    max_epochs: float = ranged(1.0, low=0.0, high=1000.0)  # how often its tokens may be repeated, over all phases
    licence: str = ""  # SPDX expression of documents without a licence of their own

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"a source is called {self.name!r}: use at most 64 letters, digits, '_' and '-'")


@dataclass(frozen=True)
class TokenizerConfig:
    """The `[tokenizer]` table. `path`: a tokenizer.json, or a folder with one. `end`: the token that is put after each
    document."""

    path: Path  # a tokenizer.json, or a folder with one
    end: str = "<|endoftext|>"  # name of the token after each document


@dataclass(frozen=True)
class QualityConfig:
    """The `[quality]` table: documents outside these limits are dropped. The names in parentheses are the reasons that
    the manifest counts.

    - `min_chars` ("too-short"), `max_chars` ("too-large"), `max_line_chars` ("long-lines").
    - `min_alphanumeric`: the smallest share of letters and digits among all characters except spaces
      ("not-alphanumeric").
    - `max_repeated`: the largest share of the text that may repeat earlier parts of it ("repetitive")."""

    min_chars: int = ranged(32, low=1)
    max_chars: int = ranged(1_000_000, low=1, high=8_000_000)
    max_line_chars: int = ranged(5_000, low=1)
    min_alphanumeric: float = ranged(0.4, low=0.0, high=1.0)
    max_repeated: float = ranged(0.7, low=0.0, high=1.0)


@dataclass(frozen=True)
class NearConfig:
    """The `[near]` table. `threshold`: documents with at least this Jaccard similarity of token 5-grams are near
    duplicates, of which the first is kept; 1.0 drops only those with the same 5-grams."""

    threshold: float = ranged(0.8, low=0.3, high=1.0)


@dataclass(frozen=True)
class HeldOutConfig:
    """The `[heldout]` table: texts that must not be in the corpus.

    - `files`: patterns of files with such texts, such as "evals/**/*.py".
    - `tasks`: task sources, each as in `tasks.source` of a run, such as "repair", "humaneval:PATH" or a directory, an
      import path, or a table with `kind` and settings. Held out are the answers and hidden tests of all splits, and the
      instructions of all splits except training.
    - `num_tasks`: how many tasks of each split are requested from the source.
    - `tasks_seed`: the seed of generated tasks, as `tasks.seed` of a run."""

    files: tuple[str, ...] = ()
    tasks: tuple[str | Plugin, ...] = ()
    num_tasks: int = ranged(1_000, low=1)
    tasks_seed: int = ranged(0, low=0)


@dataclass(frozen=True)
class FimConfig:
    """The `[fim]` table: fill-in-the-middle. A document is cut at two random characters into prefix, middle and suffix,
    and rearranged so that the middle comes last (Bavarian et al. 2022, arXiv:2207.14255).

    - `rate`: share of documents that are rearranged.
    - `spm`: share of these with the suffix first (SPM), the others have the prefix first (PSM).
    - `tokens`: names of the sentinel tokens for prefix, suffix and middle (empty: those known of public tokenizers)."""

    rate: float = ranged(0.0, low=0.0, high=1.0)
    spm: float = ranged(0.5, low=0.0, high=1.0)
    tokens: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.tokens) not in (0, 3):
            raise ValueError(f"fim.tokens has {len(self.tokens)} names: give those for prefix, suffix and middle")


@dataclass(frozen=True)
class PhaseConfig:
    """A `[[phases]]` table: a part of mid-training with its own mixture.

    - `tokens`: the planned number of tokens. Documents are taken whole, so the phase has at least so many, and at most
      one document of each source more. It has fewer if all sources reach `max_epochs`.
    - `mix`: the share of each source in them, relative to each other (empty: the sources' `weight`)."""

    name: str
    tokens: int = ranged(0, low=1)
    mix: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"a phase is called {self.name!r}: use at most 64 letters, digits, '_' and '-'")
        if bad := [name for name, share in self.mix.items() if share < 0.0]:
            raise ValueError(f"phase {self.name!r}: the share of {bad[0]!r} is below 0")


@dataclass(frozen=True)
class CorpusConfig:
    """A config of `etude corpus build`.

    - `seed`: the seed for the order of documents and for fill-in-the-middle.
    - `licences`: the SPDX ids that documents may have; "unknown" allows documents without a known licence. None: all
      are allowed.
    - `secrets`: what happens to a document with a secret.
    - `shard_tokens`: the number of tokens of a shard.
    - `phases`: the phases of mid-training; empty: one phase that has every document once.

    Raises `ValueError` for names that are not unique or not known, for a phase in which no source has a share above 0,
    and for an empty list of licences, which would allow no document."""

    tokenizer: TokenizerConfig
    sources: tuple[SourceConfig, ...]
    phases: tuple[PhaseConfig, ...] = ()
    seed: int = 0
    licences: tuple[str, ...] | None = None
    secrets: Secrets = Secrets.DROP
    shard_tokens: int = ranged(64_000_000, low=1, high=1_000_000_000)
    quality: QualityConfig = field(default_factory=QualityConfig)
    near: NearConfig = field(default_factory=NearConfig)
    heldout: HeldOutConfig = field(default_factory=HeldOutConfig)
    fim: FimConfig = field(default_factory=FimConfig)

    def __post_init__(self) -> None:
        if not self.sources:
            raise ValueError("there is no source: write a [[sources]] table")
        if self.licences is not None and not self.licences:
            raise ValueError("licences is empty, and no document would be kept: name licences, or leave it out for all")
        names = [source.name for source in self.sources]
        for noun, all_names in (("sources", names), ("phases", [phase.name for phase in self.phases])):
            for name, count in Counter(all_names).items():
                if count > 1:
                    raise ValueError(f"{count} {noun} are called {name!r}: names must be unique")
        for phase in self.phases:
            for name in phase.mix:
                if name not in names:
                    raise ValueError(f"the mix of phase {phase.name!r} has no source {name!r}: {nearest(name, names)}")
            if not any(self.shares(phase).values()):
                raise ValueError(f"phase {phase.name!r} has no source with a share above 0")

    def shares(self, phase: PhaseConfig) -> dict[str, float]:
        """Return the share of each source in a phase. The shares are relative: their sum need not be 1."""
        if phase.mix:
            return {source.name: phase.mix.get(source.name, 0.0) for source in self.sources}
        return {source.name: source.weight for source in self.sources}


def read_corpus_config(path: Path | str, overrides: Sequence[str] = ()) -> CorpusConfig:
    """Read a config of `etude corpus build` from a TOML file. Raises `ConfigError`."""
    raw = read(path, overrides, noun="corpus config", example="docs/guides/your-text.md")
    return build(CorpusConfig, raw)
