"""Settings of the task source and of the corpus that goes with it."""

from __future__ import annotations

from dataclasses import dataclass

from etude.config import Plugin, named, ranged

SOURCES = ("repair", "humaneval", "swe", "harbor", "verifiers")
"""The names of built-in task sources: before the colon, where a path or a name follows."""


@dataclass(frozen=True)
class TasksConfig:
    """Which tasks. `files` and `functions_per_file` are the size of a generated repository."""

    source: str | Plugin = "repair"  # "repair", "humaneval:PATH", a directory of task folders, a plug-in
    seed: int = ranged(0, low=0)
    files: int = ranged(3, low=1, high=12)
    functions_per_file: int = ranged(1, low=1, high=30)
    canaries: float = ranged(0.0, low=0.0, high=0.5)  # share of training tasks that cannot be solved honestly

    def __post_init__(self) -> None:
        object.__setattr__(self, "source", named(self.source, SOURCES))


@dataclass(frozen=True)
class CorpusConfig:
    """What mid-training reads: about 1.8 M tokens at a vocabulary of 768."""

    num_demonstrations: int = ranged(13_000, low=0)
    right_body: float = ranged(0.6, low=0.0, high=1.0)  # how often the demonstrator's edit is right
    num_code_documents: int = ranged(9_000, low=0)
    library_chars: int = ranged(240_000, low=0)  # of standard-library text
    sources: tuple[Plugin, ...] = ()  # further texts: `tasks.corpus.CorpusSource`
