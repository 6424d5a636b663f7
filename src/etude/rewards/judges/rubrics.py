"""Rubrics: what a judge is asked about a rollout, in aspects that are judged one by one. Read from TOML files.

about = "An agent that answers customers of a bank."

[[aspects]]
name = "clear"
question = "Can a customer without technical knowledge follow the answer?"
lowest = 1
highest = 5
weight = 2.0
levels = {1 = "unreadable", 3 = "understandable with effort", 5 = "clear at the first reading"}

[[aspects.examples]]
text = "Your card is blocked. Call 0800 1234 to unblock it."
score = 5
reason = "it names the state and the next step"
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from etude import config
from etude.config import ranged, to_plain
from etude.errors import ConfigError

MAX_CHARS = 20_000
"""The most characters of one aspect with its examples. It is sent with every call."""


@dataclass(frozen=True)
class Example:
    """An example of an aspect: a text, its score, and the reason."""

    text: str
    score: int
    reason: str = ""


@dataclass(frozen=True)
class Aspect:
    """One question of a rubric, with integer scores from `lowest` to `highest`, of which the highest is the best.

    `levels` describes scores, by the score as text. `weight` is the aspect's share of the rubric's value. Raises
    `ValueError` for an aspect that cannot be judged, such as one with a level outside of the scale."""

    name: str
    question: str
    lowest: int = ranged(1, low=-100, high=100)
    highest: int = ranged(5, low=-100, high=100)
    weight: float = ranged(1.0, low=0.0)
    levels: Mapping[str, str] = field(default_factory=dict)
    examples: tuple[Example, ...] = ()

    def __post_init__(self) -> None:
        at = f"aspect {self.name!r}"
        if not self.name.strip() or not self.question.strip():
            raise ValueError(f"{at} has no {'question' if self.name.strip() else 'name'}")
        if self.lowest >= self.highest:
            raise ValueError(f"{at}: lowest = {self.lowest} is not below highest = {self.highest}")
        if self.weight == 0.0:
            raise ValueError(f"{at} has weight 0: remove the aspect, or set its weight above 0")
        scores = [str(score) for score in range(self.lowest, self.highest + 1)]
        for level in self.levels:
            if level not in scores:
                raise ValueError(f"{at} has level {level!r}, outside of its scale from {scores[0]} to {scores[-1]}")
        for example in self.examples:
            if str(example.score) not in scores:
                raise ValueError(
                    f"{at} has an example of score {example.score}, outside of its scale from {scores[0]} to "
                    f"{scores[-1]}"
                )
        if len(msgspec.json.encode(to_plain(self))) > MAX_CHARS:
            raise ValueError(f"{at} has more than {MAX_CHARS} characters with its examples: shorten it")

    def normalised(self, score: float) -> float:
        """Map a score to [0, 1]: 0 for `lowest`, 1 for `highest`."""
        return (score - self.lowest) / (self.highest - self.lowest)


@dataclass(frozen=True)
class Rubric:
    """What a judge is asked about a rollout: aspects, and in `about` a description of the product.

    Raises `ValueError` if there is no aspect, or two have one name."""

    aspects: tuple[Aspect, ...] = ()
    about: str = ""

    def __post_init__(self) -> None:
        if not self.aspects:
            raise ValueError("the rubric has no aspects: write [[aspects]] with a name and a question")
        for name, count in Counter(aspect.name for aspect in self.aspects).items():
            if count > 1:
                raise ValueError(f"{count} aspects have the name {name!r}: names must be unique")
        if len(self.about) > MAX_CHARS:
            raise ValueError(f"`about` has more than {MAX_CHARS} characters: shorten it")

    def digest(self, aspect: Aspect) -> str:
        """Return the SHA-256 (64 hex characters) of everything that a judge is told about an aspect."""
        return hashlib.sha256(msgspec.json.encode((self.about, to_plain(aspect)), order="sorted")).hexdigest()

    def value(self, scores: Mapping[str, float]) -> float:
        """Return the mean of the aspects' scores, each mapped to [0, 1], by weight. `scores` has one per aspect.

        >>> rubric = Rubric((Aspect("clear", "Clear?"), Aspect("kind", "Kind?", lowest=0, highest=1, weight=3.0)))
        >>> rubric.value({"clear": 3, "kind": 1})
        0.875
        """
        total = sum(aspect.weight for aspect in self.aspects)
        return sum(aspect.weight * aspect.normalised(scores[aspect.name]) for aspect in self.aspects) / total


def read_rubric(path: Path | str) -> Rubric:
    """Read a rubric from a TOML file. Raises `ConfigError` for a file that is missing, malformed or has no aspects."""
    raw = config.read(path, noun="rubric", example="docs/guides/judges.md")
    try:
        return config.build(Rubric, raw)
    except ConfigError as error:
        error.what = f"{Path(path).name}: {error.what}"
        raise
