"""Composes rewards from terms. Pure: the same terms and settings give the same bits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from etude.errors import EtudeError
from etude.records.reward import GRADE, K1, SIGNS, SIGNS_IF_REWARDED, SUBMITTED, Reward, Term
from etude.records.rollout import Graded


@dataclass(frozen=True)
class Composition:
    """The settings by which a reward is composed.

    The grade plus the weighted terms is what a rollout earns. A closed gate takes what is above 0 and leaves what is
    below, so that neither stopping early nor cheating pays. Last comes the penalty kl · k1, the estimate of
    KL(policy ‖ reference) by the sampled tokens. As part of the reward its gradient is right in expectation; as a loss
    k1 has no gradient in expectation. A term that was not measured neither closes a gate nor is a penalty.

    Schulman 2020, "Approximating KL Divergence" (joschu.net/blog/kl-approx.html); Ouyang et al. 2022
    (arXiv 2203.02155, eq. 2).
    """

    require_submit: bool = True  # whether the gate `SUBMITTED` counts
    quarantine: bool = True  # whether the gates `SIGNS` and `SIGNS_IF_REWARDED` count
    kl: float = 0.0
    weights: Mapping[str, float] = field(default_factory=dict)  # of the terms beside the grade, by name

    def of(self, graded: Graded) -> Reward:
        """The reward of one rollout by itself."""
        return self.rewards([graded.terms])[0]

    @property
    def without_weights(self) -> Composition:
        """The grade behind the gates, without weighted terms and penalty: what evaluations count."""
        return replace(self, weights={}, kl=0.0)

    def rewards(self, siblings: Sequence[Sequence[Term]]) -> list[Reward]:
        """The rewards of a group's judged rollouts, of which each has its terms. A weighted term counts in a group
        where every sibling has a known value by the same version; else it counts for none, and `Reward.missing` names
        it. Raises `EtudeError` where a reward is not finite.

        >>> first = [Term(name="grade", value=1.0), Term(name="brief", value=0.5, version="1")]
        >>> second = [Term(name="grade", value=0.0), Term(name="brief", value=None, evidence="no answer")]
        >>> composition = Composition(weights={"brief": 0.5})
        >>> composition.rewards([first])[0].value
        1.25
        >>> [(one.value, one.missing) for one in composition.rewards([first, second])]
        [(1.0, ('brief',)), (0.0, ('brief',))]
        """
        tables = [{term.name: term for term in terms} for terms in siblings]
        missing = tuple(name for name in self.weights if not _comparable([table.get(name) for table in tables]))
        return [self._reward(table, missing) for table in tables]

    def _reward(self, terms: Mapping[str, Term], missing: tuple[str, ...]) -> Reward:
        raw, reason, gates = _value(terms[GRADE]), terms[GRADE].evidence, list[str]()
        for name, weight in self.weights.items():
            raw += 0.0 if name in missing else weight * _value(terms[name])
        submitted = terms.get(SUBMITTED)
        if self.require_submit and submitted is not None and not submitted.value:
            raw, reason = min(0.0, raw), f"not submitted ({submitted.evidence}); {reason}"
            gates.append(SUBMITTED)
        if self.quarantine and (sign := _sign(terms, rewarded=raw > 0)) is not None:
            raw, reason = min(0.0, raw), f"quarantined: {sign}; the grader said: {reason}"
            gates.append(SIGNS)
        k1 = terms.get(K1)
        value = raw - self.kl * _value(k1) if self.kl and k1 is not None else raw
        if not math.isfinite(value):
            facts = ", ".join(f"{term.name} = {term.value}" for term in terms.values())
            raise EtudeError(f"a reward is {value}", facts, hint="look for the term that is not a finite number")
        return Reward(value=value, raw=raw, reason=reason, gates=tuple(gates), missing=missing)


DEFAULT_COMPOSITION = Composition()
"""Every gate that was measured counts; nothing is weighted and there is no penalty."""


def _comparable(terms: Sequence[Term | None]) -> bool:
    known = [term for term in terms if term is not None and term.value is not None]
    return len(known) == len(terms) and len({term.version for term in known}) <= 1


def _sign(terms: Mapping[str, Term], *, rewarded: bool) -> str | None:
    """The evidence of the gravest sign of cheating; None without a sign."""
    for name in (SIGNS_IF_REWARDED, SIGNS) if rewarded else (SIGNS,):
        if (found := terms.get(name)) is not None and found.value:
            return found.evidence
    return None


def _value(term: Term) -> float:
    return math.nan if term.value is None else term.value
