"""Measures reward terms of finished rollouts, with a deadline, and names the term that fails."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Sequence

from etude.errors import ConfigError, EtudeError
from etude.records.reward import BUILT_IN, Score, Term
from etude.records.rollout import Graded, Rollout
from etude.seams import RewardTerm

DEADLINE_S = 600.0  # of one term of one rollout
EVIDENCE_CHARS = 2_000


def check_names(terms: Sequence[RewardTerm]) -> None:
    """Raises `ConfigError` where two terms have one name, or one has the name of a term of etude's own."""
    for name, count in Counter(term.name for term in terms).items():
        if name in BUILT_IN:
            facts = f"etude itself measures {', '.join(sorted(BUILT_IN))}"
            raise ConfigError(f"a reward term is called {name!r}", facts, hint="give it another name")
        if count > 1:
            raise ConfigError(f"{count} reward terms are called {name!r}", hint="give each a name of its own")


async def measure(
    terms: Sequence[RewardTerm], rollout: Rollout, graded: Graded, *, deadline_s: float = DEADLINE_S
) -> Graded:
    """Measure all terms of a judged rollout at once; returns the verdict with them. Raises `EtudeError` for a term that
    raises, does not end, or gives anything but a `Score` of a finite number or None."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_measured(term, rollout, graded, deadline_s)) for term in terms]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return graded.with_terms(*(task.result() for task in tasks))


async def _measured(term: RewardTerm, rollout: Rollout, graded: Graded, deadline_s: float) -> Term:
    what = f"reward term {term.name!r} ({type(term).__module__}:{type(term).__qualname__}, version {term.version})"
    at = f"rollout {rollout.rollout_id}"
    hint = "mend the term, then resume the run: nothing that was judged is lost"
    try:
        async with asyncio.timeout(deadline_s) as timeout:
            score: object = await term.score(rollout, graded)
    except Exception as error:
        if timeout.expired():
            raise EtudeError(f"{what} did not end", f"{at}: no value in {deadline_s:g} s", hint=hint) from None
        raise EtudeError(f"{what} failed", f"{at}: {type(error).__name__}: {error}", hint=hint) from error
    if not isinstance(score, Score) or not isinstance(score.value, int | float | None):
        raise EtudeError(f"{what} gave no Score of a number", f"{at}: {score!r:.200}", hint=hint)
    if score.value is not None and not math.isfinite(score.value):
        unknown = "where a value cannot be known, return Score(value=None, evidence=...)"
        raise EtudeError(f"{what} gave {score.value}", at, hint=unknown)
    value = None if score.value is None else float(score.value)
    evidence = " ".join(str(score.evidence).split())[:EVIDENCE_CHARS]
    return Term(name=term.name, value=value, version=term.version, evidence=evidence)
