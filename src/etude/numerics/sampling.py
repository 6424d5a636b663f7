"""Sampling whose randomness is keyed: the same request draws the same tokens on any engine, in any batch.

The uniform number of a token is a hash of (seed, position), so there is no generator whose state depends on who
else sampled before. Every row is treated alone: argmax at temperature 0, else the inverse of its cumulative
distribution. The log-probability returned is that of the distribution sampled from.

Knows nothing of models, batches or stop tokens. Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

U64 = npt.NDArray[np.uint64]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniform(seeds: npt.ArrayLike, positions: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """float32 in [0, 1), one a (seed, position): splitmix64 (Steele et al., OOPSLA 2014) over both, 24 bits kept.

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
    logits_RV: torch.Tensor, temperatures: npt.ArrayLike, seeds: npt.ArrayLike, positions: npt.ArrayLike
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens (int64 [R]) and their log-probabilities (float32 [R]).

    `temperatures` [R]: 0.0 is greedy, and then the log-probability is at temperature 1. `seeds` and `positions` [R]
    key the randomness; `positions` is the sampled token's own position in its context.
    """
    temperature = np.asarray(temperatures, np.float32)
    scores = logits_RV.float()
    if (temperature != 1.0).any():
        divisor = np.where(temperature == 0.0, np.float32(1.0), temperature)
        scores = scores / torch.from_numpy(divisor).to(scores.device)[:, None]
    logprobs = scores.log_softmax(-1)
    cumulative = logprobs.exp().cumsum(-1)
    threshold = torch.from_numpy(uniform(seeds, positions)).to(scores.device)[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, threshold, right=True).clamp_(max=scores.shape[-1] - 1)[:, 0]
    if (temperature == 0.0).any():
        tokens = torch.where(torch.from_numpy(temperature == 0.0).to(scores.device), scores.argmax(-1), tokens)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]
