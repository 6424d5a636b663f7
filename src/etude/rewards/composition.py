"""Compose rewards from terms. The same terms and settings always give the same bits."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from etude.errors import EtudeError
from etude.records.reward import GRADE, K1, SIGNS, SIGNS_IF_REWARDED, SUBMITTED, Hint, Reward, Term
from etude.records.rollout import Graded

MOST_CHARGED = 0.9
"""The largest sum that `Composition.charges` take from a rollout, as a share of its grade."""


@dataclass(frozen=True)
class Composition:
    """The settings by which rewards are computed from stored terms.

    The reward is the grade plus the sum of weight · value over the terms in `weights`. `when` maps a term to its gate:
    the term counts only for rollouts in which another term, the gate, is above 0. Two further gates can remove a
    reward: whether the agent submitted (used if `require_submit`), and whether it cheated (used if `quarantine`). If
    such a gate is not passed, a positive reward becomes 0 and a negative one stays, so that neither stopping early nor
    cheating pays. A gate that was not measured removes nothing.

    Terms in `charges`, such as `effort`, charge for work: their values are at most 0. Together they take at most 0.9 of
    a grade above 0, so that a solved rollout keeps more than one that gave up early. From another grade they take at
    most 0.9. If they would take more, all charges of the rollout are reduced by the same factor, which does not depend
    on its siblings.

    Then the penalty kl · k1 is subtracted, where k1 = Σ log π − log π_ref over the sampled tokens estimates KL(policy ‖
    reference). It is part of the reward because k1 as a loss would have an expected gradient of 0. If k1 was not
    measured, there is no penalty.

    Schulman 2020, "Approximating KL Divergence" (joschu.net/blog/kl-approx.html); Ouyang et al. 2022 (arXiv 2203.02155,
    eq. 2)."""

    require_submit: bool = True  # whether the gate `SUBMITTED` counts
    quarantine: bool = True  # whether the gates `SIGNS` and `SIGNS_IF_REWARDED` count
    kl: float = 0.0
    weights: Mapping[str, float] = field(default_factory=dict)  # of the terms other than the grade, by name
    when: Mapping[str, str] = field(default_factory=dict)  # name of a term → name of its gate
    hints: Mapping[str, float] = field(default_factory=dict)  # name of a term → weight of the credit of its hints
    charges: Collection[str] = ()  # names of the terms that charge for work, with or without a weight

    def of(self, graded: Graded) -> Reward:
        """Return the reward of one graded rollout, as if it were alone in its group. For a group use `rewards`."""
        return self.rewards([graded.terms])[0]

    @property
    def without_weights(self) -> Composition:
        """A copy without weighted terms and KL penalty, for evaluations: the reward is the grade, or 0 if a gate is not
        passed."""
        return replace(self, weights={}, when={}, hints={}, charges=(), kl=0.0)

    def rewards(self, siblings: Sequence[Sequence[Term]]) -> list[Reward]:
        """Return the rewards of the rollouts of one group, given the terms of each rollout.

        A weighted term counts only under two conditions: it is known for every rollout whether the term's gate is open,
        and the term's value is known for every rollout with an open gate, in the same version. Otherwise the term
        counts for no rollout, and `Reward.missing` names it. Raises `EtudeError` if a reward is not finite.

        >>> first = [Term(name="grade", value=1.0), Term(name="brief", value=0.5, version="1")]
        >>> second = [Term(name="grade", value=0.0), Term(name="brief", value=None, evidence="no answer")]
        >>> composition = Composition(weights={"brief": 0.5})
        >>> composition.rewards([first])[0].value
        1.25
        >>> [(one.value, one.missing) for one in composition.rewards([first, second])]
        [(1.0, ('brief',)), (0.0, ('brief',))]
        """
        tables = [{term.name: term for term in terms} for terms in siblings]
        missing = tuple(name for name in self.weights if not self._comparable(name, tables))
        return [self._reward(table, missing) for table in tables]

    def hints_of(self, graded: Graded) -> tuple[Hint, ...]:
        """Return the hints for the turns of one rollout. They are from the terms in `self.hints` whose gates are open.

        >>> from etude.records.task import Trust
        >>> reads = Term(name="reads", value=-1.0, hints=((2, "You have read a.py."),))
        >>> graded = Graded(terms=(Term(name="grade", value=0.0), reads), trust=Trust.DATA)
        >>> Composition(hints={"reads": 0.5}).hints_of(graded)
        (Hint(turn=2, text='You have read a.py.', weight=0.5),)
        """
        terms = {term.name: term for term in graded.terms}
        return tuple(
            Hint(turn, text, weight)
            for name, weight in self.hints.items()
            if name in terms and self.counts(name, terms)
            for turn, text in terms[name].hints
        )

    def counts(self, name: str, terms: Mapping[str, Term]) -> bool | None:
        """Return whether the gate of the term `name` is open for a rollout with these terms; None if it is unknown.

        A gate counts as closed if its own gate is closed. For a term without a gate the result is True."""
        gate = self.when.get(name)
        if gate is None:
            return True
        if (before := self.counts(gate, terms)) is not True:
            return before
        found = terms.get(gate)
        return None if found is None or found.value is None else found.value > 0

    def why_unknown(self, graded: Graded, name: str) -> str:
        """Return why the contribution of a term to a reward is unknown; "" if it is known, or the gate is closed."""
        terms = {term.name: term for term in graded.terms}
        is_open, found = self.counts(name, terms), terms.get(name)
        if is_open is None:
            return f"its gate {self.when[name]!r} is unknown"
        return (found.evidence or "no reason") if is_open and found is not None and found.value is None else ""

    def counted(self, terms: Mapping[str, Term], missing: Collection[str]) -> dict[str, float]:
        """Return the weights with which terms count for a rollout that has `terms`, by name of the term.

        Terms whose gate is closed or unknown are left out, and so are those in `missing`, which count for no sibling
        (`Reward.missing`). If all charges together would exceed their bound (see the class), their weights are reduced
        by the same factor."""
        counted = {name: one for name, one in self.weights.items() if name not in missing and self.counts(name, terms)}
        charged = -math.fsum(weight * _value(terms[name]) for name, weight in counted.items() if name in self.charges)
        grade = _value(terms[GRADE])
        most = MOST_CHARGED * (grade if grade > 0.0 else 1.0)
        factor = most / charged if charged > most else 1.0
        return {name: weight * factor if name in self.charges else weight for name, weight in counted.items()}

    def _comparable(self, name: str, tables: Sequence[Mapping[str, Term]]) -> bool:
        open_to = [self.counts(name, table) for table in tables]
        if None in open_to:
            return False
        found = [table.get(name) for table, is_open in zip(tables, open_to, strict=True) if is_open]
        known = [term for term in found if term is not None and term.value is not None]
        gate = self.when.get(name, GRADE)
        gates = [table[gate] for table in tables if gate != GRADE and gate in table]
        return len(known) == len(found) and all(len({term.version for term in some}) <= 1 for some in (known, gates))

    def _reward(self, terms: Mapping[str, Term], missing: tuple[str, ...]) -> Reward:
        raw, reason, gates, turns = _value(terms[GRADE]), terms[GRADE].evidence, list[str](), dict[int, float]()
        for name, weight in self.counted(terms, missing).items():
            raw += weight * _value(terms[name])
            for turn, part in terms[name].turns:
                turns[turn] = turns.get(turn, 0.0) + weight * part
        earned = raw
        submitted = terms.get(SUBMITTED)
        if self.require_submit and submitted is not None and not submitted.value:
            raw, reason = min(0.0, raw), f"not submitted ({submitted.evidence}); {reason}"
            gates.append(SUBMITTED)
        if self.quarantine and (sign := _sign(terms, rewarded=raw > 0)) is not None:
            raw, reason = min(0.0, raw), f"quarantined: {sign}; the grader said: {reason}"
            gates.append(SIGNS)
        k1 = terms.get(K1)
        value = raw - self.kl * _value(k1) if self.kl and k1 is not None else raw
        if not all(map(math.isfinite, (value, *turns.values()))):
            facts = ", ".join(f"{term.name} = {term.value}" for term in terms.values())
            raise EtudeError(f"a reward is {value}", facts, hint="fix the reward term that is not finite")
        parts = tuple(sorted(turns.items())) if raw == earned else ()  # a removed reward has no parts
        return Reward(value=value, raw=raw, reason=reason, gates=tuple(gates), missing=missing, turns=parts)


DEFAULT_COMPOSITION = Composition()
"""The reward is the grade, or 0 if the agent did not submit or cheated. No term has a weight; no KL penalty."""


def _sign(terms: Mapping[str, Term], *, rewarded: bool) -> str | None:
    for name in (SIGNS_IF_REWARDED, SIGNS) if rewarded else (SIGNS,):
        if (found := terms.get(name)) is not None and found.value:
            return found.evidence
    return None


def _value(term: Term) -> float:
    return math.nan if term.value is None else term.value
