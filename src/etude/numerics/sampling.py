"""Sampling with keyed randomness: the same request samples the same tokens on any engine, in any batch.

A token's uniform random number is a hash of (seed, position), so there is no generator with a state. Each row is
sampled independently: argmax at temperature 0, else by the inverse cumulative distribution. The returned
log-probability is that of the distribution sampled from.

Shapes: R rows, V vocabulary size."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from etude.numerics.exact.operators import Exact
from etude.numerics.operators import Operators

U64 = npt.NDArray[np.uint64]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniform(seeds: npt.ArrayLike, positions: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """Return uniform random numbers, float32 in [0, 1), one for each pair (seeds[i], positions[i]).

    A number is 24 bits of splitmix64 (Steele et al., OOPSLA 2014) of seed and position.

    >>> uniform([7, 7], [0, 1]).tolist() == [float(uniform([7], [0])[0]), float(uniform([7], [1])[0])]
    True
    """
    key = _splitmix(np.atleast_1d(np.asarray(seeds)).astype(np.uint64))
    counter = np.atleast_1d(np.asarray(positions)).astype(np.uint64)
    key += counter * _GOLDEN
    return (_splitmix(key) >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)


def _splitmix(x: U64) -> U64:
    x = np.add(x, _GOLDEN)
    x = np.multiply(x ^ (x >> np.uint64(30)), np.uint64(0xBF58476D1CE4E5B9))
    x = np.multiply(x ^ (x >> np.uint64(27)), np.uint64(0x94D049BB133111EB))
    return x ^ (x >> np.uint64(31))


def sample(
    logits_RV: torch.Tensor,
    temperatures: npt.ArrayLike,
    seeds: npt.ArrayLike,
    positions: npt.ArrayLike,
    operators: Operators | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample a token from each row of logits; return the tokens (int64 [R]) and their log-probabilities (float32 [R]).

    `temperatures` [R]: 0.0 is greedy; then the log-probability is at temperature 1. `seeds` and `positions` [R]
    determine the random numbers; a position is that of the sampled token in its context. `operators`: the operators of
    the model (None: exact)."""
    temperature = np.asarray(temperatures, np.float32)
    divisor: torch.Tensor | float = 1.0
    if (temperature != 1.0).any():
        divisor = torch.from_numpy(np.where(temperature == 0.0, np.float32(1.0), temperature))[:, None]
    device = logits_RV.device
    greedy = torch.from_numpy(temperature == 0.0).to(device) if (temperature == 0.0).any() else None
    uniform_R = torch.from_numpy(uniform(seeds, positions)).to(device)
    return sample_on_device(logits_RV, divisor, uniform_R, greedy, operators or Exact())


def sample_on_device(
    logits_RV: torch.Tensor,
    divisor: torch.Tensor | float,
    uniform_R: torch.Tensor,
    greedy_R: torch.Tensor | None,
    operators: Operators,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample like `sample`, with all inputs on the device and without synchronising with the host.

    `divisor`: temperatures [R, 1], with 1 for temperature 0. `uniform_R`: random numbers in [0, 1). `greedy_R`: rows
    with temperature 0 (None: no row)."""
    logprobs = operators.log_softmax(logits_RV, divisor)
    cumulative = logprobs.softmax(-1).cumsum(-1)  # softmax computes each row alone; exp of all rows does not
    threshold = uniform_R[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, threshold, right=True).clamp_(max=logprobs.shape[-1] - 1)[:, 0]
    if greedy_R is not None:
        tokens = torch.where(greedy_R, logprobs.argmax(-1), tokens)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]
