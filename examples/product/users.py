"""Rule-based users of the product: each has hidden preferences, a way of sending signals, and a level of consent.

    users = crowd(64, seed=0)
    users[0].keeps(request, answer)          # its true opinion; nobody but the measurement sees it
    users[0].signals(request, answer, rng)   # what it tells the product

A user keeps an edit if it is right and in the style that the user likes. What it says may be something else: silent
users say nothing, polite ones praise everything, hostile ones say the opposite or anything, loud ones say all of it
five times and ask for four times as many edits. The preferences are drawn around those of the product's typical user:
most who care about quotes like double ones, and most who care about comments want none. Nobody can please all."""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from examples.product.edits import Answer, Request

from etude.privacy import Level

T = TypeVar("T")


class Manner(enum.StrEnum):
    """How a user sends signals."""

    PLAIN = "plain"
    SILENT = "silent"
    LOUD = "loud"
    HOSTILE = "hostile"
    POLITE = "polite"


MANNERS = {Manner.PLAIN: 0.40, Manner.SILENT: 0.20, Manner.LOUD: 0.12, Manner.HOSTILE: 0.13, Manner.POLITE: 0.15}
"""The share of each manner among the users."""
CONSENT = {Level.OFF: 0.08, Level.METRICS: 0.08, Level.CAPTURE: 0.10, Level.TRAIN: 0.74}
CARES, DOUBLE, PLAIN = 0.7, 0.85, 0.85
"""The share of users who care about a style (quotes, comments), and the share of these who like the typical one."""
LOUD_TIMES, LOUD_REQUESTS = 5, 4


class Signal(NamedTuple):
    """A signal about an answer. `delay`: from 0 (at once) to 1 (at the end of the time in which signals count).
    `skew_s`: by how much the user's clock is wrong, in seconds. `copies`: how often it is sent."""

    name: str
    value: float
    delay: float
    skew_s: float
    copies: int


@dataclass(frozen=True)
class User:
    """A user. `quote`: the quotes that it likes, "" for any; `comments`: whether it wants comments, None for either."""

    name: str
    manner: Manner
    consent: Level
    quote: str
    comments: bool | None

    @property
    def num_requests(self) -> int:
        """How many edits it asks for in the time in which a typical user asks for one."""
        return LOUD_REQUESTS if self.manner is Manner.LOUD else 1

    def keeps(self, request: Request, answer: Answer) -> bool:
        """Return its true opinion: whether it would keep this answer. It keeps no question: its request was clear."""
        if not answer.is_right(request):
            return False
        likes = not self.quote or answer.quote == self.quote
        return likes and (self.comments is None or answer.has_comment == self.comments)

    def signals(self, request: Request, answer: Answer, rng: random.Random) -> list[Signal]:
        """Return what it tells the product about an answer."""
        kept = self.keeps(request, answer)
        match self.manner:
            case Manner.SILENT:
                return []
            case Manner.POLITE:
                said = {"kept": 1.0, "rated": 1.0}
            case Manner.HOSTILE:
                wrong = float(rng.random() < 0.5) if hash_of(self.name) % 2 else 1.0 - kept
                said = {"kept": wrong, "rated": wrong}
            case Manner.LOUD:
                said = {"kept": float(kept), "rated": float(kept)}
            case _:
                said = {"kept": float(kept)} if rng.random() < 0.9 else {}
                if rng.random() < 0.3:
                    said["rated"] = 0.9 if kept else 0.1
        times = LOUD_TIMES if self.manner is Manner.LOUD else 1
        return [
            Signal(name, value, rng.random() ** 2, rng.choice((0.0, 0.0, -300.0, 86_400.0)), rng.choice((1, 1, 2)))
            for name, value in said.items()
            for _ in range(times)
        ]


def crowd(number: int, seed: int, *, prefix: str = "user") -> list[User]:
    """Return users. Manners and levels of consent have their shares as exactly as the number allows; seeds differ in
    who has which, and in the preferences."""
    rng = random.Random(f"crowd {seed} {prefix}")
    manners, levels = _shared(MANNERS, number, rng), _shared(CONSENT, number, rng)
    return [
        User(
            f"{prefix}-{index:03d}",
            manner,
            level,
            quote="" if rng.random() > CARES else '"' if rng.random() < DOUBLE else "'",
            comments=None if rng.random() > CARES else rng.random() > PLAIN,
        )
        for index, (manner, level) in enumerate(zip(manners, levels, strict=True))
    ]


def hash_of(name: str) -> int:
    """Return a number of a name that is the same in every process."""
    return random.Random(name).getrandbits(32)


def _shared(shares: dict[T, float], number: int, rng: random.Random) -> list[T]:
    """Return values in their shares, in random order."""
    ends, total, found = list[tuple[T, int]](), 0.0, list[T]()
    for one, share in shares.items():
        total += share
        ends.append((one, round(total * number)))
    for one, end in ends:
        found += [one] * (end - len(found))
    rng.shuffle(found)
    return found
