"""The `[rewards]` settings: the reward terms of a run, their weights and gates, and what happens if one is unknown."""

from __future__ import annotations

import enum
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated
from urllib.parse import urlsplit

from etude.config import BuiltIn, Plugin, ranged
from etude.errors import nearest
from etude.records.reward import BUILT_IN, GRADE, K1, MEASURES, VERIFIERS
from etude.rewards.drift import AuditConfig

TERMS: Mapping[str, str] = MappingProxyType(
    {
        "effort": "etude.rewards.effort:Effort",
        "judge": "etude.rewards.judges.terms:judge",
        "malformed-calls": "etude.rewards.process:MalformedCalls",
        "repeated-reads": "etude.rewards.process:RepeatedReads",
        "reverted-edits": "etude.rewards.process:RevertedEdits",
        "tests-never-run": "etude.rewards.process:NoTestsRun",
    }
)
"""The import paths of the built-in terms, by name."""
CHARGES = frozenset(name for kind in TERMS if kind != "judge" for name in (kind, TERMS[kind]))
"""The names and import paths of the terms that charge for work: all built-in terms but the judge."""


_NAME = re.compile(r"[A-Za-z0-9_-]+")


class Missing(enum.StrEnum):
    """What to do with a group while a reward term is unknown for one of its rollouts.

    WITHOUT: it is trained on without this term. WAIT: the group waits until the term is known, whatever the reason is,
    or until the settings of the term change; a day at most."""

    WITHOUT = "without"
    WAIT = "wait"


def _path(kind: Plugin) -> str:
    return TERMS.get(kind.path, kind.path)


def _model(kind: Plugin) -> tuple[object, ...]:
    """Return which model a judge asks. Two spellings of the same URL give the same result."""
    url, model = (str(kind.settings.get(key, "")) for key in ("url", "model"))
    try:
        parts = urlsplit(url)
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError:  # `judge` refuses it
        return url, model
    path = parts.path.rstrip("/").removesuffix("/v1")  # the dialects differ in it
    return parts.scheme, (parts.hostname or "").rstrip("."), port, path, model


@dataclass(frozen=True)
class TermConfig:
    """A `[[rewards.terms]]` table of the config file: a reward term.

    - `name`: the name under which its values are stored.
    - `kind`: a built-in term (`TERMS`) or "my_package.module:Name", or a table with `kind` and its settings.
    - `weight`: multiplies the term's value in the reward; with 0.0 the term is only measured and stored.
    - `target`: if above 0, the weight is adjusted each step, from 0 to `weight`, so that solved rollouts take `target`
      sampled tokens on average. A target below 1 is relative: a share of the mean in the first step.
    - `from_step`: the first step in which the term is part of the reward; before that, it is only measured and stored.
    - `when`: the name of another term, its gate: the term counts, and is measured, only where the gate is above 0. It
      may be "grade", a measure of the grader such as "tests", "submitted", or another of the `terms`. "": always.
    - `missing`: what to do with a group if the term is unknown for one of its rollouts.
    - `retry_s`: for how many seconds after the first failure an unknown value is measured again, if the term says that
      it may be known later; at least once, or never with 0. With `missing = "wait"` it is a day instead.
    - `hints`: weight of the term's hints, independent of `weight`. The learner adds `hints` times (log p with the hint
      - log p without it) to the advantage of each sampled token of a turn with a hint (`training.hints`). 0.0: no
      hints.

    Raises `ValueError` for an invalid name, for a `target` if `weight` is not above 0, and for a weight of `effort`
    above 1, with which a solved rollout could get less than one that gave up."""

    name: str  # name of the stored term
    kind: Annotated[Plugin, BuiltIn(tuple(TERMS))]  # a built-in term or an import path, or a table with `kind`
    weight: float = 1.0  # of its value in the reward; 0.0: only measured and stored
    target: float = ranged(0.0, low=0.0)  # sampled tokens of solved rollouts to which the weight tunes itself; 0: fixed
    from_step: int = ranged(0, low=0)  # the first step whose rewards have it
    when: str = ""  # name of its gate: it counts only where this term is above 0; "": always
    missing: Missing = Missing.WITHOUT
    retry_s: float = ranged(60.0, low=0.0, high=86_400.0)  # seconds in which an unknown value is measured again
    hints: float = ranged(0.0, low=0.0)  # weight of the credit of its hints for faulty turns; 0.0: none

    @property
    def is_judge(self) -> bool:
        """Whether the term is the built-in judge, by its name or its import path."""
        return _path(self.kind) == TERMS["judge"]

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"the name of term {self.name!r} is not valid: use letters, digits, '_' and '-'")
        if self.target and self.weight <= 0.0:
            raise ValueError(f"{self.name!r} has a target, but its weight is {self.weight:g}: set the weight above 0")
        if _path(self.kind) == TERMS["effort"] and self.weight > 1.0:
            raise ValueError(
                f"the weight of {self.name!r} is {self.weight:g}: set at most 1, because otherwise "
                "a rollout that gives up may get more than a solved one"
            )


@dataclass(frozen=True)
class RewardsConfig:
    """The `[rewards]` section of the config file.

    `audits`: which terms are checked for drift, and how. Raises `ValueError` if two terms have the same name, if a gate
    is neither a term nor a measure of a grader, if gates depend on each other in a circle, or if an audit has no
    independent auditor or compares values that mean different things."""

    terms: tuple[TermConfig, ...] = ()
    audits: tuple[AuditConfig, ...] = ()

    def __post_init__(self) -> None:
        self._check_audits()
        for name, count in Counter(term.name for term in self.terms).items():
            if name in BUILT_IN:
                raise ValueError(f"a term has the name {name!r} of a built-in term: give it another name")
            if count > 1:
                raise ValueError(f"{count} terms have the name {name!r}: names must be unique")
        gates = {term.name: term.when for term in self.terms if term.when}
        known = {*(term.name for term in self.terms), *BUILT_IN, *MEASURES}
        for name, gate in gates.items():
            if gate not in known and not gate.startswith(VERIFIERS):
                facts = f"{gate!r}, which is neither a term nor a measure of the graders"
                raise ValueError(f"the gate of {name!r} is {facts}: {nearest(gate, known - {K1})}")
            at, passed = name, list[str]()
            while at in gates and at not in passed:
                passed.append(at)
                at = gates[at]
            if at == K1:
                raise ValueError(
                    f"the gate of {passed[-1]!r} is {K1!r}, which is measured after all other terms: use another gate"
                )
            if at in passed:
                raise ValueError(f"the gates of terms form a circle: {' -> '.join([*passed, at])}: remove one `when`")

    def _check_audits(self) -> None:
        terms = {term.name: term for term in self.terms}
        for name, count in Counter(one.name for one in self.audits).items():
            if count > 1:
                raise ValueError(f"{count} audits have the name {name}: keep one of them")
        for one in self.audits:
            if one.term not in terms:
                known = nearest(one.term, terms) if terms else "there are none"
                raise ValueError(f"an audit names the term {one.term!r}, which does not exist: {known}")
            if one.by == GRADE:
                continue
            if one.by not in terms:
                facts = f"has by = {one.by!r}, which is neither {GRADE!r} nor one of the terms"
                raise ValueError(f"the audit of {one.term!r} {facts}: {nearest(one.by, [GRADE, *terms])}")
            auditor, judge = terms[one.by], terms[one.term].kind
            if auditor.weight or auditor.hints:
                facts = "set its weight and its hints to 0.0"
                raise ValueError(f"{one.by!r} audits {one.term!r} and must not be trained on: {facts}")
            for term in (terms[one.term], auditor):
                if _path(term.kind) in TERMS.values() and not term.is_judge:
                    facts = f"the values of {term.name!r} are counts or costs"
                    raise ValueError(f"{facts}, and an audit with a tolerance needs values from 0 to 1: audit a judge")
            if auditor.is_judge and terms[one.term].is_judge:
                if _model(auditor.kind) == _model(judge):
                    raise ValueError(f"{one.by!r} is the same model as {one.term!r}, which it audits: use another one")
                modes = [kind.settings.get("mode", "pointwise") for kind in (judge, auditor.kind)]
                if modes[0] != modes[1]:
                    facts = f"{one.term!r} has mode = {modes[0]!r}, and {one.by!r}, which audits it, {modes[1]!r}"
                    raise ValueError(f"{facts}: their values mean different things; use the same mode")

    def weights(self, step: int, tuned: Mapping[str, float]) -> Mapping[str, float]:
        """Return the weight of each term in the reward of version step `step`, by name. Weights of 0 are left out.

        `tuned`: the current weights of the terms with a `target`, by name; a term that is not in it has weight 0."""
        now = {term.name: tuned.get(term.name, 0.0) if term.target else term.weight for term in self.terms}
        return {term.name: now[term.name] for term in self.terms if now[term.name] and term.from_step <= step}

    def hints(self, step: int) -> Mapping[str, float]:
        """Return the weight of each term's hints at version step `step`, by name. Weights of 0 are left out."""
        return {term.name: term.hints for term in self.terms if term.hints and term.from_step <= step}

    @property
    def charges(self) -> tuple[str, ...]:
        """The names of the terms that charge for work: effort and the process terms (`Composition.charges`)."""
        return tuple(one.name for one in self.terms if one.kind.path in CHARGES)

    @property
    def beside_grades(self) -> tuple[str, ...]:
        """The names of the terms with a weight that can give unsolved rollouts of a group different rewards.

        They do not charge for work, and graders measure neither their gate nor a gate of that gate."""
        return tuple(
            one.name for one in self.terms if one.weight and one.name not in self.charges and not self._graded(one)
        )

    def deciding(self, step: int) -> tuple[TermConfig, ...]:
        """Return the terms that decide, together with the grade, whether the later rollouts of a group run.

        They are the terms of `beside_grades` that count at version step `step`, and their gates."""
        known = {term.name: term.from_step for term in self.terms}
        names = self._with_gates({name for name in self.beside_grades if known[name] <= step})
        return tuple(term for term in self.terms if term.name in names)

    def trained_on(self, step: int) -> set[str]:
        """Return the names of the terms that version step `step` is trained on: with a weight or hints, and gates."""
        return self._with_gates({one.name for one in self.terms if (one.weight or one.hints) and one.from_step <= step})

    def _with_gates(self, names: set[str]) -> set[str]:
        known = {term.name for term in self.terms}
        while gates := {self.gates[name] for name in names if name in self.gates} & known - names:
            names |= gates
        return names

    def _graded(self, term: TermConfig) -> bool:
        gate, gates = term.when, self.gates
        while gate in gates:
            gate = gates[gate]
        return gate in (GRADE, *MEASURES) or gate.startswith(VERIFIERS)

    @property
    def gates(self) -> Mapping[str, str]:
        """The name of the gate of each term that has one, by the name of the term."""
        return {term.name: term.when for term in self.terms if term.when}
