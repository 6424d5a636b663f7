"""Find NaN and infinities: in a tensor, in named weights, and the first operator of a forward pass that produced one.

Checking costs one sum. Finding the origin costs a forward pass, and is done only after a failed check."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from etude.models.hooks import ForwardHook


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether all numbers are finite. It takes one pass over the tensor; a second pass is needed only if the sum
    is not finite.

    >>> is_finite(torch.tensor([3e38, 3e38])), is_finite(torch.tensor([1.0, float("nan")]))
    (True, False)
    """
    return math.isfinite(float(tensor.detach().sum(dtype=torch.float32))) or bool(torch.isfinite(tensor).all())


def describe_non_finite(tensor: torch.Tensor) -> str:
    """Return how many numbers of a tensor are NaN or infinite, as a phrase.

    >>> describe_non_finite(torch.tensor([1.0, float("nan"), float("-inf"), float("nan")]))
    '2 NaN and 1 infinite of 4'
    """
    nan, infinite = int(tensor.isnan().sum()), int(tensor.isinf().sum())
    parts = [f"{number} {word}" for number, word in ((nan, "NaN"), (infinite, "infinite")) if number]
    return f"{' and '.join(parts) or 'none'} of {tensor.numel()}"


def find_non_finite(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Find the tensors with NaN or infinities. Returns name → `describe_non_finite` of the tensor, in the order of
    `tensors`."""
    return {name: describe_non_finite(tensor) for name, tensor in tensors.items() if not is_finite(tensor)}


@dataclass(frozen=True)
class NonFiniteOrigin:
    """The first operator of a forward pass whose result is not finite.

    `name`: the name of the operator, such as "layers.3.attention.qkv". `row`: the index of the first row with a
    non-finite number: a token of the forward pass; for the last norm and the logits, a row of logits. `facts`: the
    result of `describe_non_finite`."""

    name: str
    row: int
    facts: str


@torch.no_grad()
def first_non_finite(forward: Callable[[ForwardHook], object]) -> NonFiniteOrigin | None:
    """Repeat a forward pass and find the operator that produced the first NaN or infinity.

    `forward` calls `Transformer.run` with all its arguments and the given hook. Returns None where all results are
    finite."""
    found: list[NonFiniteOrigin] = []

    def look(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if not found and not is_finite(tensor):
            bad_N = ~torch.isfinite(tensor).flatten(1).all(1)
            found.append(NonFiniteOrigin(name, int(bad_N.int().argmax()), describe_non_finite(tensor)))
        return tensor

    forward(look)
    return found[0] if found else None
