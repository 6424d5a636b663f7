"""Measure the user's reward terms of finished rollouts, with a deadline. Errors name the term."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass

from etude.errors import PluginError
from etude.records.reward import Score, Term
from etude.records.rollout import Graded, Rollout
from etude.seams import RewardTerm

DEADLINE_S = 600.0  # of one term of one rollout
EVIDENCE_CHARS = 2_000


@dataclass(frozen=True)
class NamedTerm:
    """A reward term of a run, with the name under which its values are stored.

    `code` is a digest of the term's code and settings, which becomes part of `version`; "" if unknown."""

    name: str
    term: RewardTerm
    code: str = ""  # digest of its code and settings, added to its version; "": unknown

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
    """Measure all terms of a graded rollout at the same time, and return `graded` with their values added.

    Raises `PluginError` for a term that raises, takes longer than `deadline_s` seconds, or returns anything but a
    `Score` whose value is a finite number or None."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_measured(one, rollout, graded, deadline_s)) for one in terms]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return graded.with_terms(*(task.result() for task in tasks))


async def _measured(one: NamedTerm, rollout: Rollout, graded: Graded, deadline_s: float) -> Term:
    at = f"rollout {rollout.rollout_id}"
    hint = "fix the term, then resume the run: graded rollouts are not lost"
    try:
        async with asyncio.timeout(deadline_s) as timeout:
            score: object = await one.term.score(rollout, graded)
    except Exception as error:
        if timeout.expired():
            raise PluginError(
                f"{one} exceeded its deadline", f"{at}: no value in {deadline_s:g} s", hint=hint
            ) from None
        raise PluginError(f"{one} failed", f"{at}: {type(error).__name__}: {error}", hint=hint) from error
    if not isinstance(score, Score) or not isinstance(score.value, int | float | None):
        raise PluginError(f"{one} did not return a Score with a number", f"{at}: {score!r:.200}", hint=hint)
    if score.value is not None and not math.isfinite(score.value):
        unknown = "for an unknown value return Score(value=None, evidence=...)"
        raise PluginError(f"{one} returned {score.value}", at, hint=unknown)
    value = None if score.value is None else float(score.value)
    evidence = " ".join(str(score.evidence).split())[:EVIDENCE_CHARS]
    return Term(name=one.name, value=value, version=one.version, evidence=evidence)
