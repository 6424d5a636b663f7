"""Ranks that compute one model together: their layout, and the collectives of a forward pass.

There are two ways to share a model (`Split`). *Tensor*: every rank has all tokens, and a part of each layer's heads and
widths; a product into the residual stream is a sum over ranks. *Expert*: every rank has its own tokens and some
experts; rows travel to the rank of their expert and back. Norms, routers, embedding and head are on every rank in both.

A sum over ranks has the bits of a single rank: each rank gathers all partial sums in float32 and adds them in one
binary tree, whose lower levels each rank has computed (`exact.tree_sum`). A library's all-reduce has its own order.

Collectives run over any `torch.distributed` group, each with a deadline: a rank that died or hangs raises an error in
the others that names what they waited for."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from etude.errors import ConfigError, EtudeError
from etude.numerics.exact import tree_sum
from etude.numerics.operators import Operators


class RankLost(EtudeError):
    """Another rank did not take part in a collective: it died, or is late. The group cannot be used any more."""


class Split(enum.StrEnum):
    """How ranks share a model.

    TENSOR: every rank has all tokens, and a part of each layer's heads and widths. EXPERT: every rank has its own
    tokens and some experts."""

    TENSOR = "tensor"
    EXPERT = "expert"


@dataclass(frozen=True)
class Parallel:
    """One rank's place among the `degree` ranks that compute a model together.

    `SINGLE_RANK` has no group and never waits. `group`: None is the default process group. `deadline_s`: the most
    seconds for each collective call.

    >>> SINGLE_RANK.degree, SINGLE_RANK.tensor is SINGLE_RANK
    (1, True)
    """

    degree: int = 1
    rank: int = 0
    split: Split = Split.TENSOR
    group: distributed.ProcessGroup | None = None
    deadline_s: float = 120.0

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.degree or (self.split is Split.TENSOR and self.degree & (self.degree - 1)):
            raise ConfigError(
                f"rank {self.rank} of {self.degree} {self.split}-parallel ranks is invalid",
                "ranks count from 0, and the number of tensor-parallel ranks is a power of two",
                hint="use 1, 2, 4, ... tensor-parallel ranks",
            )

    @property
    def tensor(self) -> Parallel:
        """The ranks that share attention and dense layers: `SINGLE_RANK` with expert parallelism."""
        return self if self.split is Split.TENSOR else SINGLE_RANK

    def experts(self, number: int) -> range:
        """Return which of `number` experts this rank has, or has a part of.

        Raises `ConfigError` when they cannot be divided among the ranks."""
        if self.split is Split.TENSOR:
            return range(number)
        if number % self.degree:
            raise ConfigError(
                f"{number} experts cannot be divided among {self.degree} expert-parallel ranks",
                "each rank must have the same number of them",
                hint="use a number of ranks that divides the number of experts",
            )
        each = number // self.degree
        return range(self.rank * each, (self.rank + 1) * each)

    def column_parallel(self, ops: Operators, x_NI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
        """Compute x · weightᵀ, [N, O], with this rank's part of the outputs (column-parallel linear)."""
        return ops.linear_columns(self.copy_to_ranks(ops, x_NI), weight_OI, self.degree)

    def row_parallel(self, ops: Operators, x_NI: torch.Tensor, weight_OI: torch.Tensor, what: str) -> torch.Tensor:
        """Compute x · weightᵀ, [N, O], with this rank's part of the inputs, and sum over ranks.

        Every rank gets the sum (row-parallel linear). `what` names the sum in errors."""
        return self.sum_over_ranks(ops, ops.linear_partial(x_NI, weight_OI, self.degree), what)

    def copy_to_ranks(self, ops: Operators, x: torch.Tensor) -> torch.Tensor:
        """Return `x` with an autograd node that sums its gradient over the ranks. All ranks have the same `x`.

        It is converted to the storage dtype, so that the sum is rounded once."""
        if self.degree == 1:
            return x
        entered: torch.Tensor = _CopyToRanks.apply(x.to(ops.storage_dtype), self)  # type: ignore[no-untyped-call]
        return entered

    def sum_over_ranks(self, ops: Operators, part: torch.Tensor, what: str) -> torch.Tensor:
        """Sum every rank's part, in the operators' dtype. The gradient of each part is that of the sum.

        `what` names the sum in errors."""
        if self.degree == 1:
            return part
        total: torch.Tensor = _SumOverRanks.apply(part, self, what)  # type: ignore[no-untyped-call]
        return total.to(ops.dtype)

    def all_reduce(self, part: torch.Tensor, what: str) -> torch.Tensor:
        """Sum every rank's part, in float32 or wider, in the fixed order. A collective call.

        `what` names the sum in errors. Raises `RankLost` after the deadline."""
        wide = part.to(torch.promote_types(part.dtype, torch.float32)).contiguous()
        parts = [torch.empty_like(wide) for _ in range(self.degree)]
        self._wait(lambda: distributed.all_gather(parts, wide, group=self.group, async_op=True), what)
        return tree_sum(parts)

    def all_to_all(
        self, rows_SD: torch.Tensor, sent: Sequence[int], received: Sequence[int], what: str
    ) -> torch.Tensor:
        """Exchange rows between the ranks, and return those for this rank. A collective call.

        `sent`: how many of `rows_SD` go to each rank, in order; `received`: how many come from each. `what` names the
        rows in errors. Raises `RankLost` after the deadline."""
        out = rows_SD.new_empty(sum(received), rows_SD.shape[1])
        args = (out.view(torch.uint8), rows_SD.contiguous().view(torch.uint8), list(received), list(sent))
        self._wait(lambda: distributed.all_to_all_single(*args, group=self.group, async_op=True), what)
        return out

    def _wait(self, begin: Callable[[], Any], what: str) -> None:
        try:
            begin().wait(timedelta(seconds=self.deadline_s))
        except RuntimeError as error:
            raise RankLost(
                f"rank {self.rank} of {self.degree} timed out waiting for the other ranks: {what}",
                f"the deadline is {self.deadline_s:g} s; {error}",
                hint="see the other ranks' output: one has died, hangs, or computes something else",
            ) from None


SINGLE_RANK = Parallel()


class _CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, parallel: Parallel) -> torch.Tensor:
        ctx.parallel = parallel
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.parallel.all_reduce(gradient, "gradient of an input").to(gradient.dtype), None


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, parallel: Parallel, what: str) -> torch.Tensor:
        ctx.dtype = part.dtype
        return parallel.all_reduce(part, what)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gradient.to(ctx.dtype), None, None
