"""The settings of rewards: terms beside the grade, and what each weighs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from etude.config import Plugin
from etude.records.reward import BUILT_IN


@dataclass(frozen=True)
class TermConfig:
    """A `[[rewards.terms]]` table: a reward term of the user's own."""

    name: str  # its values are stored by it
    kind: Plugin  # "my_package.module:Name", or a table of `kind` and the settings of its own
    weight: float = 1.0  # of its value in the reward; 0.0: it is measured and stored only


@dataclass(frozen=True)
class RewardsConfig:
    """The `[rewards]` section."""

    terms: tuple[TermConfig, ...] = ()

    def __post_init__(self) -> None:
        for name, count in Counter(term.name for term in self.terms).items():
            if name in BUILT_IN:
                raise ValueError(f"a term is called {name!r}, as one that etude measures itself")
            if count > 1:
                raise ValueError(f"{count} terms are called {name!r}: each needs a name of its own")

    @property
    def weights(self) -> Mapping[str, float]:
        """Weights of the terms that count, by name."""
        return {term.name: term.weight for term in self.terms if term.weight}
