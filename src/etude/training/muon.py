"""Muon: the update of a matrix is its momentum, replaced by the nearest matrix with orthonormal rows or columns.

The step then has the same size in every direction (Jordan et al., "Muon: an optimizer for hidden layers in neural
networks", 2024).

| part of the model | optimiser | source |
| --- | --- | --- |
| queries, keys, values, also of latent attention | Muon, each head separately | "Muon split": GLM-5, arXiv 2602.15763 |
| attention output, dense layers, shared experts | Muon, gate and up separately | Jordan et al. |
| experts | Muon, each expert separately | Moonlight, arXiv 2502.16982 |
| embedding, head, norms, routers, short convolutions, gates of shared experts | AdamW | both |

Updates are scaled by 0.2 √(larger side), AdamW's usual size (arXiv 2502.16982, §2.2), so one learning rate serves both.
Five Newton-Schulz steps with Jordan's coefficients compute the orthogonal matrix; its singular values are in [0.7,
1.2]. They run in float32 on CPUs and in bfloat16 on GPUs.

With sharded weights, ranks send the rows of a matrix to one of them (`ShardExchange`), which orthogonalises the full
matrix. Each matrix is computed once. Experts are not cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from etude.training.optimizer import AdamW
from etude.training.optimizer_state import Update

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NUM_STEPS = 5
MOMENTUM = 0.95
SIZE = 0.2


@runtime_checkable
class HasMatrices(Protocol):
    """A layer with matrices for Muon, as `models.attention.AttentionLayer` describes them."""

    def matrices(self) -> dict[str, list[int]]: ...


class ShardExchange(Protocol):
    """Converts sharded parameters to full parameters, and back. All ranks must call its methods together."""

    def gather(self, rows: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Send this rank's rows of each parameter to the other ranks, and return the full parameters that this rank
        updates."""

    def shard(
        self, full_tensors: Mapping[str, torch.Tensor], like: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Undo `gather`: distribute full parameters, and return this rank's rows of each, with the shapes of `like`."""


class Muon(AdamW):
    """An optimiser that uses Muon for matrices (`muon_matrices`) and AdamW for all other parameters.

    `exchange`: gathers full matrices where weights are sharded. `settings`: the other arguments of `AdamW`."""

    def __init__(
        self, model: nn.Module, *, exchange: ShardExchange, momentum: float = MOMENTUM, **settings: Any
    ) -> None:
        self._exchange, self._momentum = exchange, momentum
        self._blocks = muon_matrices(model)
        super().__init__(model, **settings)

    def _excluded_names(self, model: nn.Module) -> Sequence[str]:
        return tuple(self._blocks)

    def _update_excluded(self, update: Update) -> None:
        self.kept.momentum(update, self._momentum)
        gradients = self.by_parameter(self.grad)
        rows = {name: gradients[name] for name in self._blocks}
        full_tensors = {
            name: orthogonalise(full, self._blocks[name]) for name, full in self._exchange.gather(rows).items()
        }
        for name, turned in self._exchange.shard(full_tensors, rows).items():
            rows[name].copy_(turned)
        self.kept.descend(update)


def muon_matrices(model: nn.Module) -> dict[str, list[int]]:
    """Return the parameters that Muon updates: a dict from the name to the row counts of the parameter's matrices.

    A parameter may consist of several matrices, stacked along the rows. For experts the row counts are those of one
    expert."""
    layers = ((name, module) for name, module in model.named_modules() if isinstance(module, HasMatrices))
    return {f"{name}.{part}": rows for name, module in layers for part, rows in module.matrices().items()}


def orthogonalise(parameter: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Orthogonalise and scale each of the matrices stacked in a parameter, [O, I] or [E, O, I].

    `rows`: the row count of each matrix."""
    out = torch.empty_like(parameter)
    at = 0
    for number in rows:
        part = slice(at, at := at + number)
        matrices = parameter[..., part, :]
        size = SIZE * max(matrices.shape[-2:]) ** 0.5
        if matrices.ndim == 2:
            out[part] = newton_schulz(matrices) * size
        else:
            for turned, matrix in zip(out[:, part], matrices, strict=True):
                turned.copy_(newton_schulz(matrix) * size)
    return out


def newton_schulz(matrix: torch.Tensor) -> torch.Tensor:
    """Return an approximation of the nearest matrix with orthonormal rows, or columns where there are fewer columns.

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
