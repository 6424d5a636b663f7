"""A small policy and its steps, shared by these tests."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from etude.weights import Tensor

Weights = dict[str, Tensor]


def policy_at(step: int, *, share: float = 0.2, size: int = 4000) -> Weights:
    """Three tensors; at each step, a share of the elements of two of them changes a little. Deterministic."""
    rng = np.random.default_rng(1)
    embed = rng.integers(0x3C00, 0x3E00, size).astype(np.uint16)
    norm = rng.integers(0x3F800000, 0x3F900000, 50, dtype=np.uint32)
    for s in range(1, step + 1):
        rng = np.random.default_rng([7, s])
        embed = embed + (rng.random(size) < share).astype(np.uint16)
        norm = norm - rng.integers(0, 3, 50, dtype=np.uint32)
    return {
        "embed": Tensor("bf16", (size // 10, 10), embed),
        "frozen": Tensor("u8", (3,), np.array([1, 2, 3], np.uint8)),
        "norm": Tensor("f32", (50,), norm),
    }


@pytest.fixture(scope="session")
def policy() -> Callable[..., Weights]:
    return policy_at
