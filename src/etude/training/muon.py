"""Muon: the momentum of a matrix is replaced by the nearest matrix with orthonormal rows or columns, so that a step has
the same size in every direction (Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024).

| part of a model | moved by | source |
| --- | --- | --- |
| queries, keys, values, also those of latents | Muon, each head by itself | "Muon split": GLM-5, arXiv 2602.15763 |
| attention's output, layers without a router, shared experts | Muon, gate and up by themselves | Jordan et al. |
| experts | Muon, each expert by itself | Moonlight, arXiv 2502.16982 |
| embedding, head, norms, routers | AdamW | both |

Updates are scaled by .2 √(larger side), AdamW's usual size (arXiv 2502.16982, §2.2), so that one learning rate serves
both. The orthogonal matrix comes of five Newton-Schulz steps with Jordan's coefficients, whose singular values end in
[.7, 1.2]: in float32 on CPUs, in bfloat16 on a GPU.

Ranks that have rows of a matrix send them to one of them, which orthogonalises it whole (`Together`): each matrix is
computed once, by somebody. Experts are whole where they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from etude.training.optimizer import AdamW

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NUM_STEPS = 5
MOMENTUM = 0.95
SIZE = 0.2


@runtime_checkable
class HasMatrices(Protocol):
    """A layer with matrices (`models.attention.AttentionLayer`)."""

    def matrices(self) -> dict[str, list[int]]: ...


class Together(Protocol):
    """How rows become whole matrices and come back. Collective."""

    def together(self, rows: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Exchange rows: from this rank's rows of each parameter to the whole parameters that this rank gets."""
        ...

    def apart(self, wholes: Mapping[str, torch.Tensor], like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The reverse: from whole parameters to this rank's rows of each parameter, shaped as `like`."""
        ...


class Muon(AdamW):
    """As `AdamW`, with matrices moved by Muon."""

    def __init__(self, model: nn.Module, *, between: Together, momentum: float = MOMENTUM, **settings: Any) -> None:
        self._between, self._momentum = between, momentum
        self._blocks = matrices(model)
        super().__init__(model, **settings)

    def _turned_names(self, model: nn.Module) -> Sequence[str]:
        return tuple(self._blocks)

    def _turn(self, lr: float, divisor: float | None) -> None:
        size = self._turned
        grad, momentum, master = self._grad[:size], self._first[:size], self._master[:size]
        if divisor is not None:
            grad.div_(divisor)
        momentum.mul_(self._momentum).add_(grad)
        ahead = grad.add_(momentum, alpha=self._momentum)  # Nesterov's; the gradient is needed no more
        rows = {name: ahead[self.places[name]].view(self.shapes[name]) for name in self._blocks}
        wholes = {
            name: orthogonalised(whole, self._blocks[name]) for name, whole in self._between.together(rows).items()
        }
        for name, turned in self._between.apart(wholes, rows).items():
            rows[name].copy_(turned)
        master.mul_(1 - lr * self.weight_decay).sub_(ahead, alpha=lr)


def matrices(model: nn.Module) -> dict[str, list[int]]:
    """The parameters that are moved so, each with the numbers of rows of the matrices that lie in it one below the
    other; of stacked experts, in each."""
    layers = ((name, module) for name, module in model.named_modules() if isinstance(module, HasMatrices))
    return {f"{name}.{part}": rows for name, module in layers for part, rows in module.matrices().items()}


def orthogonalised(whole: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Each of the matrices in a parameter, [O, I] or [E, O, I], orthogonalised and scaled."""
    out = torch.empty_like(whole)
    at = 0
    for number in rows:
        part = slice(at, at := at + number)
        matrices = whole[..., part, :]
        size = SIZE * max(matrices.shape[-2:]) ** 0.5
        if matrices.ndim == 2:
            out[part] = newton_schulz(matrices) * size
        else:
            for turned, matrix in zip(out[:, part], matrices, strict=True):
                turned.copy_(newton_schulz(matrix) * size)
    return out


def newton_schulz(matrix: torch.Tensor) -> torch.Tensor:
    """Nearly the nearest matrix with orthonormal rows, or columns where those are fewer; of the same shape.

    >>> turned = newton_schulz(torch.tensor([[3.0, 0.0, 0.0], [0.0, 0.5, 0.0]]))
    >>> [0.6 < x < 1.3 for x in torch.linalg.svdvals(turned).tolist()]
    [True, True]
    """
    a, b, c = COEFFICIENTS
    x = matrix.to(torch.float32 if matrix.device.type == "cpu" else torch.bfloat16)
    turned = x.shape[0] > x.shape[1]
    x = x.t() if turned else x
    x = x / (x.norm() + 1e-7)
    for _ in range(NUM_STEPS):
        square = x @ x.t()
        x = a * x + (b * square + c * square @ square) @ x
    found: torch.Tensor = (x.t() if turned else x).to(matrix.dtype)
    return found
