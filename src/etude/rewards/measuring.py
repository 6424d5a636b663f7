"""Measures the reward terms of finished rollouts, with a deadline. Errors name the term."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from etude import progress
from etude.errors import PluginError
from etude.records.reward import Measured, Score, Term
from etude.records.rollout import Graded, Rollout
from etude.rewards.composition import Composition
from etude.seams import GroupRewardTerm, RewardTerm

T = TypeVar("T")
DEADLINE_S = 600.0
"""Seconds without progress of this process (`etude.progress`) after which a term of a rollout or group has failed."""
EVIDENCE_CHARS = 2_000  # of an evidence or a hint; more are cut off
HINT = "fix the term, or remove it (etude rewards set RUN --remove NAME), then resume: graded rollouts are not lost"


@dataclass(frozen=True)
class NamedTerm:
    """A reward term of a run, with the name under which its values are stored.

    `code` is a digest of the term's code and settings, which becomes part of `version`; "" if unknown. `when` is the
    name of the term's gate; "" if it has none."""

    name: str
    term: RewardTerm | GroupRewardTerm
    code: str = ""  # digest of its code and settings, added to its version; "": unknown
    when: str = ""  # name of its gate: it is measured only where this term is above 0; "": always

    @property
    def version(self) -> str:
        """The version that is stored with the values: the term's own version and the first characters of `code`."""
        return f"{self.term.version}+{self.code[:12]}" if self.code else self.term.version

    def __str__(self) -> str:
        kind = type(self.term)
        return f"reward term {self.name!r} ({kind.__module__}:{kind.__qualname__}, version {self.version})"


async def measure(
    terms: Sequence[NamedTerm], rollout: Rollout, graded: Graded, *, deadline_s: float = DEADLINE_S
) -> Graded:
    """Measure all terms of one graded rollout, as a group of one, and return `graded` with their values added.

    Raises `PluginError` for a term that raises, makes no progress for `deadline_s` seconds, or returns an invalid
    value."""
    [found] = await measure_group(terms, [rollout], [graded], deadline_s=deadline_s)
    return graded.with_terms(*(one.term for one in found))


async def measure_group(
    terms: Sequence[NamedTerm],
    rollouts: Sequence[Rollout],
    graded: Sequence[Graded],
    *,
    deadline_s: float = DEADLINE_S,
) -> list[list[Measured]]:
    """Measure those terms that the rollouts of a group do not have yet, and return the new values of each rollout.

    A term is measured for a rollout if the term's gate is open (or it has none) and `graded` has no known value of the
    same version. All terms of all rollouts are measured at the same time, except that a term is measured after its
    gate. A term that compares the rollouts of a group is measured for all rollouts with an open gate as soon as one of
    them lacks its value.

    Raises `PluginError` for a term that raises, makes no progress for `deadline_s` seconds, or returns anything but a
    `Score` whose value is a finite number or None for each rollout."""
    gates = Composition(when={one.name: one.when for one in terms if one.when})
    tables = [{term.name: term for term in one.terms} for one in graded]
    found: list[list[Measured]] = [[] for _ in rollouts]
    for level in _levels(terms):
        lacking = [(one, rows) for one in level if (rows := _lacking(one, gates, tables))]
        for (one, rows), scores in zip(
            lacking,
            await _all(_scored(one, [(rollouts[i], graded[i]) for i in rows], deadline_s) for one, rows in lacking),
            strict=True,
        ):
            for i, score in zip(rows, scores, strict=True):
                found[i].append(score)
                tables[i][one.name] = score.term
    return found


def _levels(terms: Sequence[NamedTerm]) -> list[list[NamedTerm]]:
    """Return the terms in levels: the gate of a term, if it is one of the terms, is in an earlier level."""
    levels, left = list[list[NamedTerm]](), list(terms)
    while left:
        names = {one.name for one in left}
        levels.append([one for one in left if one.when not in names] or left)  # a config has no circle
        left = [one for one in left if one not in levels[-1]]
    return levels


def _lacking(one: NamedTerm, gates: Composition, tables: Sequence[Mapping[str, Term]]) -> list[int]:
    """Return the indices of the rollouts for which a term is to be measured."""
    rows = [i for i, table in enumerate(tables) if gates.counts(one.name, table)]
    lacks = [
        i for i in rows if (had := tables[i].get(one.name)) is None or had.value is None or had.version != one.version
    ]
    return rows if lacks and isinstance(one.term, GroupRewardTerm) else lacks


async def _all(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Await several at once. Raises the first error, after the others were cancelled."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def _scored(one: NamedTerm, siblings: Sequence[tuple[Rollout, Graded]], deadline_s: float) -> list[Measured]:
    """Measure one term of some rollouts of a group."""
    term = one.term
    if isinstance(term, GroupRewardTerm):
        rollouts, graded = zip(*siblings, strict=True)
        at = f"group {rollouts[0].group_id}"
        scores = await _called(one, at, lambda: term.score_group(rollouts, graded), deadline_s)
        if not isinstance(scores, Sequence) or len(scores) != len(rollouts):
            raise PluginError(
                f"{one} did not return one Score for each of {len(rollouts)} rollouts",
                f"{at}: {scores!r:.200}",
                hint=HINT,
            )
        return [_checked(one, rollout, score) for rollout, score in zip(rollouts, scores, strict=True)]

    async def alone(rollout: Rollout, graded: Graded) -> Measured:
        at = f"rollout {rollout.rollout_id}"
        return _checked(one, rollout, await _called(one, at, lambda: term.score(rollout, graded), deadline_s))

    return await _all([alone(*sibling) for sibling in siblings])


async def _called(one: NamedTerm, at: str, call: Callable[[], Awaitable[object]], deadline_s: float) -> object:
    task: asyncio.Future[object] | None = None
    try:
        task, seen = asyncio.ensure_future(call()), -1
        while seen != (seen := progress.count()):
            await asyncio.wait({task}, timeout=deadline_s)
            if task.done():
                return task.result()
    except Exception as error:
        raise PluginError(f"{one} failed", f"{at}: {type(error).__name__}: {error}", hint=HINT) from error
    finally:
        if task is not None:
            task.cancel()
    raise PluginError(
        f"{one} exceeded its deadline", f"{at}: no value, and no progress for {deadline_s:g} s", hint=HINT
    )


def _checked(one: NamedTerm, rollout: Rollout, score: object) -> Measured:
    """Return a score as it is stored. Raises `PluginError` for anything but a `Score` with finite numbers or None."""
    at = f"rollout {rollout.rollout_id}"
    if not isinstance(score, Score) or not isinstance(score.value, int | float | None):
        raise PluginError(f"{one} did not return a Score with a number", f"{at}: {score!r:.200}", hint=HINT)
    if score.value is not None and not math.isfinite(score.value):
        unknown = "for an unknown value return Score(value=None, evidence=...)"
        raise PluginError(f"{one} returned {score.value}, which is not a finite number", at, hint=unknown)
    num_turns = len(rollout.trace.turns)
    try:
        turns = tuple((int(turn), float(part)) for turn, part in score.turns)
        hints = tuple((int(turn), str(text)[:EVIDENCE_CHARS]) for turn, text in score.hints)
    except (TypeError, ValueError):
        turns, hints = ((-1, 0.0),), ()
    if not all(0 <= turn < num_turns and math.isfinite(part) for turn, part in turns):
        facts = f"{at} has {num_turns} turns; turns are {score.turns!r:.200}, hints {score.hints!r:.200}"
        hint = "give turns as (index of the turn, finite part), and hints as (index of the turn, text)"
        raise PluginError(f"{one} returned parts with an invalid turn or number", facts, hint=hint)
    if len(dict(hints)) < len(hints) or not all(0 <= turn < num_turns and text for turn, text in hints):
        facts = f"{at} has {num_turns} turns, and hints are {score.hints!r:.200}"
        hint = "give (index of the turn, text that is not empty), at most one for each turn"
        raise PluginError(f"{one} returned hints with an invalid turn, no text, or two for one turn", facts, hint=hint)
    value = None if score.value is None else float(score.value)
    evidence = " ".join(str(score.evidence).split())[:EVIDENCE_CHARS]
    turns, hints = (turns, hints) if value is not None else ((), ())
    term = Term(name=one.name, value=value, version=one.version, evidence=evidence, turns=turns, hints=hints)
    return Measured(term=term, retry=value is None and bool(score.retry))
