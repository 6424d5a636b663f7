"""Compares an engine with the learner: samples in every way that the engine supports, scores the same tokens with
the learner, and finds wrong operators."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from etude.errors import EngineError
from etude.evals.doctor.local import Finding, findings
from etude.evals.doctor.sides import EngineSide, LearnerSide, Sampled, Scored
from etude.evals.parity import Budget, Parity, compare
from etude.models import Transformer


class Verdict(enum.StrEnum):
    """The result of comparing an engine with the learner.

    EQUAL: all numbers are equal. NEAR: the difference is within the budget, and no operator has an error above its
    rounding. OFF: neither."""

    EQUAL = "equal"  # all numbers are equal
    NEAR = "near"  # within the budget, and no operator has an error above its rounding
    OFF = "off"  # neither


@dataclass(frozen=True)
class WayResult:
    """The comparison of engine and learner for one way of sampling, such as "batched" or "alone" (`EngineSide.ways`).

    `parity` compares the engine with the learner. `replayed` compares them when the learner uses the experts that the
    engine chose; None if the engine does not return them."""

    way: str
    parity: Parity
    replayed: Parity | None


@dataclass(frozen=True)
class Diagnosis:
    """The result of comparing an engine with the learner (`examine`).

    `exact` says whether equality was required; otherwise `budget` is the largest accepted difference. `findings` are
    the wrong operators in the order of computation, and `shown` says whether the engine reports the results of its
    operators."""

    engine: str
    exact: bool
    budget: Budget
    ways: tuple[WayResult, ...]
    findings: tuple[Finding, ...]
    shown: bool

    @property
    def verdict(self) -> Verdict:
        """EQUAL: all numbers are equal in every way of sampling. NEAR: `exact` is False, and the differences are within
        the budget. OFF: neither."""
        if all(w.parity.equal for w in self.ways) and not self.findings:
            return Verdict.EQUAL
        near = not self.exact and not self.findings and all(self.budget.holds(w.parity) for w in self.ways)
        return Verdict.NEAR if near else Verdict.OFF

    def plain(self) -> dict[str, Any]:
        """Return the diagnosis as plain data for JSON."""
        return {
            "engine": self.engine,
            "verdict": str(self.verdict),
            "exact": self.exact,
            "budget": {"k3": self.budget.k3, "ratio_p99": self.budget.ratio_p99},
            "ways": {
                w.way: {"live": w.parity.plain(), "replayed": w.replayed.plain() if w.replayed else None}
                for w in self.ways
            },
            "operators_shown": self.shown,
            "findings": [
                {
                    "operator": f.name,
                    "layer": f.layer,
                    "error": f.error,
                    "allowed": f.allowed,
                    "position": f.position,
                    "rows": f.num_rows,
                    "or_one_of": list(f.unseen),
                }
                for f in self.findings
            ],
        }


def examine(
    engine: EngineSide,
    learner: LearnerSide,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    seed: int,
    exact: bool,
    budget: Budget,
    report: Callable[[str], None] = lambda line: None,
    reference: Transformer | None = None,
) -> Diagnosis:
    """Compare an engine with the learner: on the samples of every way of sampling, and operator by operator.

    For each way the engine completes every prompt by `max_tokens` tokens, and the learner scores them. Operators are
    compared for the longest sample. `exact` requires equal numbers; otherwise differences may be as large as `budget`.
    `report` is called with a line of text at the beginning of each stage. `reference` is the model that recomputes each
    operator, needed if the engine has another dtype than the learner (None: the learner's model). Raises `EngineError`.
    """
    ways, texts = [], []
    for way in engine.ways:
        report(f"{engine.name} samples {len(prompts)} x {max_tokens} tokens, {way}")
        texts = engine.sample(way, prompts, max_tokens=max_tokens, seed=seed)
        report(f"the learner scores the tokens of {engine.name}, {way}")
        ways.append(_compared(way, texts, learner))
    text = max(texts, key=lambda t: len(t.token_ids))
    report(f"{engine.name} computes the results of its operators for {len(text.token_ids)} tokens")
    results = engine.results(text.token_ids[:-1], prompt_tokens=text.num_prompt)
    found: list[Finding] = []
    if results is not None:
        report("each operator is computed alone")
        found = findings(reference or learner.model, text.token_ids[:-1], results, exact=exact)
    return Diagnosis(engine.name, exact, budget, tuple(ways), tuple(found), results is not None)


def _compared(way: str, texts: Sequence[Sampled], learner: LearnerSide) -> WayResult:
    _check_routes(texts, learner)
    live = _parity(texts, learner.score(texts))
    routed = all(text.routes is not None for text in texts)
    return WayResult(way, live, _parity(texts, learner.score(texts, replay=True)) if routed else None)


def _check_routes(texts: Sequence[Sampled], learner: LearnerSide) -> None:
    """Raise `EngineError` if the routes do not fit the learner's model."""
    of = learner.model.config
    for routes in (text.routes for text in texts if text.routes is not None):
        if routes.shape[1:] != (of.num_moe_layers, of.top_k) or routes.dtype != of.route_dtype:
            raise EngineError(
                "the engine's routes (chosen experts) do not fit the model of this command",
                f"{routes.dtype} of shape {routes.shape[1:]} per token; the learner has {of.num_moe_layers} routers of "
                f"{of.num_experts} experts and uses {of.top_k}",
                hint="use the same checkpoint for the engine and for this command",
            )


def _parity(texts: Sequence[Sampled], scored: Sequence[Scored]) -> Parity:
    routes = [(t.routes, s.routes) for t, s in zip(texts, scored, strict=True) if t.routes is not None]
    both = (np.concatenate([a for a, _ in routes]), np.concatenate([b for _, b in routes])) if routes else None
    return compare(np.concatenate([t.logprobs for t in texts]), np.concatenate([s.logprobs for s in scored]), both)
