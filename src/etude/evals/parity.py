"""Metrics of sampler-trainer mismatch: how much the log-probabilities and routes of engine and learner differ.

The sampler is the engine, the trainer is the learner. r is the trainer's probability of a sampled token divided by the
sampler's, for the same weights; it should be 1.

Shapes: T sampled tokens, N positions, L layers with experts, K experts per token.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]

DECADES = (-8, 1)
"""Range of the histogram: powers of ten of |difference|, in steps of half a decade."""

LEGEND = (
    "r: the learner's probability of a token divided by the engine's; Δ = log r; k1, k3: estimates of the KL "
    "divergence per token, in nats; flipped: different choices of experts; k3 replayed: k3 with the engine's experts"
)
"""The meaning of the columns of a table of `Parity`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """How far engine and learner differ on the same sampled tokens. Log-probabilities and their differences are in
    nats.

    r is the learner's probability of a token divided by the engine's.

    - `num_differing`: tokens with two different log-probabilities; `mean`, `largest`: mean and maximum of the absolute
      difference.
    - `k1`: mean of -log r, unbiased for KL(sampler || trainer); may be negative.
    - `k3`: mean of r - 1 - log r, also unbiased; never negative.
    - `ratio_max`, `ratio_p99`: maximum and 99th percentile of |r - 1|.
    - `flipped`: share of (position, layer) pairs with other experts; `flipped_tokens`: share of positions with other
      experts in at least one layer. None if the experts are not known.
    - `histogram`: numbers of tokens by absolute difference: 0, below 1e-8, two bins per power of ten, above 10."""

    num_tokens: int
    num_differing: int
    mean: float
    largest: float
    k1: float
    k3: float
    ratio_max: float
    ratio_p99: float
    flipped_tokens: float | None
    flipped: float | None
    histogram: tuple[int, ...]

    @property
    def equal(self) -> bool:
        """Whether all log-probabilities and all experts are equal."""
        return self.num_differing == 0 and not self.flipped_tokens

    def plain(self) -> dict[str, Any]:
        """Return the metrics as plain data for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Budget:
    """The largest accepted mismatch between engine and learner.

    `k3` limits an estimate of the KL divergence (nats per token). `ratio_p99` limits the 99th percentile of |r - 1|,
    where r is the learner's probability of a token divided by the engine's."""

    k3: float
    ratio_p99: float

    def holds(self, found: Parity) -> bool:
        """Return whether the metrics are within the limits."""
        return found.k3 <= self.k3 and found.ratio_p99 <= self.ratio_p99


_BUDGETS = {"float32": Budget(1e-9, 1e-3), "float16": Budget(5e-4, 0.2), "bfloat16": Budget(5e-3, 0.5)}


def budget_of(dtype: str) -> Budget:
    """Return the default budget for engines that compute in a dtype, such as "bfloat16".

    It is twice the KL divergence measured with random weights (32 experts, top-4, 6 layers: bf16 2.5e-3, fp16 1.7e-4;
    ten times less on a trained model)."""
    return _BUDGETS[dtype]


def compare(
    sampler_T: npt.ArrayLike,
    trainer_T: npt.ArrayLike,
    routes_NLK: tuple[npt.NDArray[Any], npt.NDArray[Any]] | None = None,
) -> Parity:
    """Compare the log-probabilities of T tokens by sampler and trainer, and optionally their chosen experts (routes).

    `routes_NLK` has the experts of both, for N tokens, L layers and K experts per token. If one of two
    log-probabilities is not finite, the difference is infinite. Raises `ValueError` if the lengths differ or there are
    no tokens.

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
    distance = np.abs(log_ratio)
    flips = None if routes_NLK is None else flipped(*routes_NLK)
    return Parity(
        num_tokens=len(distance),
        num_differing=int((log_ratio != 0).sum()),
        mean=float(distance.mean()),
        largest=float(distance.max()),
        k1=float(-log_ratio.mean()),
        k3=float(np.where(np.isnan(k3), np.inf, k3).mean()),
        ratio_max=float(off.max()),
        ratio_p99=float(np.quantile(off, 0.99, method="higher")),
        flipped_tokens=None if flips is None else float(flips.any(1).mean()),
        flipped=None if flips is None else float(flips.mean()),
        histogram=histogram(distance),
    )


def flipped(one_NLK: npt.NDArray[Any], other_NLK: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return for which token and layer two choices of experts differ as sets, bool [N, L].

    Raises `ValueError` if the shapes differ."""
    if one_NLK.shape != other_NLK.shape or one_NLK.ndim != 3:
        raise ValueError(f"routes of shapes {one_NLK.shape} and {other_NLK.shape} cannot be compared")
    differs: npt.NDArray[np.bool_] = (np.sort(one_NLK, -1) != np.sort(other_NLK, -1)).any(-1)
    return differs


def edges() -> F64:
    """Return the bounds between the bins of `Parity.histogram`, ascending."""
    low, high = DECADES
    return np.power(10.0, np.arange(2 * low, 2 * high + 1) / 2)


def histogram(distance_T: F64) -> tuple[int, ...]:
    """Count differences that are zero, below the first bound, between each two bounds, and above the last bound."""
    above = distance_T[distance_T > 0]
    counts = np.bincount(np.searchsorted(edges(), above, side="right"), minlength=len(edges()) + 1)
    return (len(distance_T) - len(above), *counts.tolist())
