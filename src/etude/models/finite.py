"""Numbers that are none: whether a tensor holds NaN or an infinity, where in a forward the first one arose, and which
weights hold some. Looking costs one sum; finding costs a forward, and is done when something was found.

Knows nothing of training and of checkpoints: who asks knows what step or file it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from etude.models.hooks import ForwardHook


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether every number is finite. One pass; a second one only where the sum is not.

    >>> is_finite(torch.tensor([3e38, 3e38])), is_finite(torch.tensor([1.0, float("nan")]))
    (True, False)
    """
    return math.isfinite(float(tensor.detach().sum(dtype=torch.float32))) or bool(torch.isfinite(tensor).all())


def describe_non_finite(tensor: torch.Tensor) -> str:
    """How many numbers of a tensor are none.

    >>> described(torch.tensor([1.0, float("nan"), float("-inf"), float("nan")]))
    '2 NaN and 1 infinite of 4'
    """
    nan, infinite = int(tensor.isnan().sum()), int(tensor.isinf().sum())
    parts = [f"{number} {word}" for number, word in ((nan, "NaN"), (infinite, "infinite")) if number]
    return f"{' and '.join(parts) or 'none'} of {tensor.numel()}"


def find_non_finite(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Of named tensors those that are not finite, in their order, each `described`."""
    return {name: describe_non_finite(tensor) for name, tensor in tensors.items() if not is_finite(tensor)}


@dataclass(frozen=True)
class NonFiniteOrigin:
    """The first operator of a forward whose result is not finite."""

    name: str  # as a `Watch` sees it: "layers.3.attention.qkv"
    row: int  # the first bad row: a token of the forward, or for the last norm and the logits one that gets logits
    facts: str  # `described`


@torch.no_grad()
def first_non_finite(forward: Callable[[ForwardHook], object]) -> NonFiniteOrigin | None:
    """Compute a forward again, `Transformer.run` with all it was given, and say where the first number that is none
    arose; None where all are finite."""
    found: list[NonFiniteOrigin] = []

    def look(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if not found and not is_finite(tensor):
            bad_N = ~torch.isfinite(tensor).flatten(1).all(1)
            found.append(NonFiniteOrigin(name, int(bad_N.int().argmax()), describe_non_finite(tensor)))
        return tensor

    forward(look)
    return found[0] if found else None
