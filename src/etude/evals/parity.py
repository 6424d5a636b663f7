"""How far two programs are apart that compute the same policy: numbers of log-probabilities and of routes. Pure.

The sampler is the engine, the trainer is the learner; r is the trainer's probability of a sampled token over the
sampler's, on the same weights, so that it should be 1.

Shapes: T sampled tokens, N positions, L layers of experts, K experts a token.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]

DECADES = (-8, 1)
"""The histogram's range: powers of ten of |difference|, in steps of half a decade."""

LEGEND = (
    "r: the learner's probability of a token over the engine's; Δ = log r; k1, k3: KL divergence a token, in nats; "
    "flipped: choices of experts that differ; k3 replayed: the learner given the engine's experts"
)
"""What the columns of a table of `Parity` mean, in a line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """What was measured. Ratios are |r - 1|; differences are of log-probabilities, in nats."""

    num_tokens: int
    num_differing: int  # tokens whose two log-probabilities are not the same number
    mean: float  # mean |difference|
    largest: float
    k1: float  # mean of -log r: unbiased for KL(sampler || trainer), may be negative
    k3: float  # mean of r - 1 - log r: unbiased, never negative
    ratio_max: float
    ratio_p99: float
    flipped_tokens: float | None  # share of positions with another set of experts in some layer; None without routes
    flipped: float | None  # share of token-layers
    histogram: tuple[int, ...]  # tokens by |difference|: equal, below 1e-8, then by half decades, then above 10

    @property
    def equal(self) -> bool:
        """Whether every log-probability is the same number, and every expert the same."""
        return self.num_differing == 0 and not self.flipped_tokens

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Budget:
    """How far apart is near enough: the most that k3 (nats a token) and the 99th percentile of |r - 1| may be."""

    k3: float
    ratio_p99: float

    def holds(self, found: Parity) -> bool:
        """Whether the numbers keep to it."""
        return found.k3 <= self.k3 and found.ratio_p99 <= self.ratio_p99


_BUDGETS = {"float32": Budget(1e-9, 1e-3), "float16": Budget(5e-4, 0.2), "bfloat16": Budget(5e-3, 0.5)}


def budget_of(dtype: str) -> Budget:
    """The budget of native arithmetic: twice the KL that was measured on random weights (32 experts, top-4, 6 layers:
    bf16 2.5e-3, fp16 1.7e-4; on a trained model it is ten times less)."""
    return _BUDGETS[dtype]


def compare(
    sampler_T: npt.ArrayLike,
    trainer_T: npt.ArrayLike,
    routes_NLK: tuple[npt.NDArray[Any], npt.NDArray[Any]] | None = None,
) -> Parity:
    """The numbers of two lists of log-probabilities (and of the two sides' routes).

    A log-probability that is not finite on one side counts as an infinite difference. Raises `ValueError` for other
    lengths, or no tokens at all.

    >>> compare([-1.0, -2.0], [-1.0, -2.0]).equal
    True
    >>> round(compare([-1.0, -2.0], [-1.0, -1.9]).ratio_max, 4)
    0.1052
    """
    sampler, trainer = np.asarray(sampler_T, np.float64), np.asarray(trainer_T, np.float64)
    if sampler.shape != trainer.shape or sampler.ndim != 1 or not len(sampler):
        raise ValueError(f"log-probabilities of shapes {sampler.shape} and {trainer.shape} cannot be compared")
    with np.errstate(invalid="ignore", over="ignore"):
        log_ratio = np.where(sampler == trainer, 0.0, trainer - sampler)
        log_ratio = np.where(np.isfinite(log_ratio), log_ratio, np.inf)
        off = np.abs(np.expm1(log_ratio))
        k3 = np.expm1(log_ratio) - log_ratio
    away = np.abs(log_ratio)
    flips = None if routes_NLK is None else flipped(*routes_NLK)
    return Parity(
        num_tokens=len(away),
        num_differing=int((log_ratio != 0).sum()),
        mean=float(away.mean()),
        largest=float(away.max()),
        k1=float(-log_ratio.mean()),
        k3=float(np.where(np.isnan(k3), np.inf, k3).mean()),
        ratio_max=float(off.max()),
        ratio_p99=float(np.quantile(off, 0.99, method="higher")),
        flipped_tokens=None if flips is None else float(flips.any(1).mean()),
        flipped=None if flips is None else float(flips.mean()),
        histogram=histogram(away),
    )


def flipped(one_NLK: npt.NDArray[Any], other_NLK: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """[N, L]: where the sets of experts differ; their order does not count."""
    if one_NLK.shape != other_NLK.shape or one_NLK.ndim != 3:
        raise ValueError(f"routes of shapes {one_NLK.shape} and {other_NLK.shape} cannot be compared")
    differs: npt.NDArray[np.bool_] = (np.sort(one_NLK, -1) != np.sort(other_NLK, -1)).any(-1)
    return differs


def edges() -> F64:
    """The histogram's bounds, ascending."""
    low, high = DECADES
    return np.power(10.0, np.arange(2 * low, 2 * high + 1) / 2)


def histogram(away_T: F64) -> tuple[int, ...]:
    """How many differences are zero, under the first bound, between two, over the last."""
    above = away_T[away_T > 0]
    counts = np.bincount(np.searchsorted(edges(), above, side="right"), minlength=len(edges()) + 1)
    return (len(away_T) - len(above), *counts.tolist())
