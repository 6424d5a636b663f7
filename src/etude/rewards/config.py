"""The settings of rewards: the user's own terms and their weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from etude.config import Plugin
from etude.records.reward import BUILT_IN


@dataclass(frozen=True)
class TermConfig:
    """A `[[rewards.terms]]` table of the config file: a reward term from the user's own code.

    `name` is that of the stored term. `kind` is "my_package.module:Name", or a table with `kind` and the plug-in's
    settings. `weight` multiplies the term's value in the reward; with 0.0 the term is only measured and stored."""

    name: str  # name of the stored term
    kind: Plugin  # "my_package.module:Name", or a table with `kind` and the plug-in's settings
    weight: float = 1.0  # of its value in the reward; 0.0: only measured and stored


@dataclass(frozen=True)
class RewardsConfig:
    """The `[rewards]` section of the config file. Raises `ValueError` if two terms have the same name."""

    terms: tuple[TermConfig, ...] = ()

    def __post_init__(self) -> None:
        for name, count in Counter(term.name for term in self.terms).items():
            if name in BUILT_IN:
                raise ValueError(f"a term is called {name!r}, which is the name of a built-in term")
            if count > 1:
                raise ValueError(f"{count} terms are called {name!r}: names must be unique")

    @property
    def weights(self) -> Mapping[str, float]:
        """Weights that are not 0, by name of the term."""
        return {term.name: term.weight for term in self.terms if term.weight}
