"""LoRA adapters (arXiv 2106.09685): a frozen matrix W, computed as W + scale · B A.

The sum is computed before a forward pass: `merge_lora` writes it, rounded once, into the model's matrix. It is a
function of W, A and B with one order of summation, so everyone with the same three has the same bits, no operator
changes, and a decoded token costs the same as without adapters.

Gradients never have the size of the matrix. With y = x Wᵀ: dB = scale · dyᵀ (x Aᵀ), dA = scale · (dy B)ᵀ x, and dx
comes from the merged matrix. So `LoraOperators` compute a product as usual, with a matrix that needs no gradient, and
add an autograd node that leaves y unchanged and gives A and B their gradients (`with_lora_gradient`). Gradients pass
through rounding unchanged, as with the float32 weights behind bf16 weights.

Shapes: N tokens, I and O width in and out, r rank, P parts of a fused matrix, E experts."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from etude.numerics import exact
from etude.numerics.operators import Operators, delegate_to_inner


@dataclass(frozen=True)
class LoraPairs:
    """The LoRA matrices A and B of one weight matrix [O, I], or of a stack of matrices [E, O, I].

    A fused matrix (such as q, k and v) has P parts along its rows; each part has its own A and B. `a`: [P, r, I] or [E,
    P, r, I]. `b`: [O, r] or [E, O, r]. `rows`: the number of rows of each part, O in total."""

    a: torch.Tensor
    b: torch.Tensor
    rows: tuple[int, ...]
    scale: float

    def of(self, some: slice) -> LoraPairs:
        """Return A and B for a slice of the rows of a matrix [O, I], or for a slice of the E matrices of a stack.

        For rows, the slice must have a start and a stop. Parts without a row in the slice are left out."""
        if self.b.ndim == 3:
            return replace(self, a=self.a[some], b=self.b[some])
        ends = itertools.accumulate(self.rows)
        taken = [min(some.stop, end) - max(some.start, end - size) for end, size in zip(ends, self.rows, strict=True)]
        kept = [i for i, size in enumerate(taken) if size > 0]
        return replace(self, a=self.a[kept], b=self.b[some], rows=tuple(taken[i] for i in kept))


@torch.no_grad()
def merge_lora(base: torch.Tensor, pairs: LoraPairs, out: torch.Tensor, *, dtype: torch.dtype) -> None:
    """Write W + scale · B A into `out`, summed in float32 and rounded once to `dtype`. `out` has the shape of `base`.

    The bits of a row depend only on that row, so ranks with some of the rows (`LoraPairs.of`) get the same bits as for
    the full matrix."""
    width, rank = base.shape[-1], pairs.b.shape[-1]
    a_rI = pairs.a.float().reshape(-1, rank, width).unbind()
    rows = list(pairs.rows) * (len(a_rI) // len(pairs.rows))
    b_Or = torch.split((pairs.b.float() * pairs.scale).flatten(0, -2), rows)
    places = zip(torch.split(base.flatten(0, -2), rows), torch.split(out.view(-1, width), rows), strict=True)
    for (w_OI, out_OI), a, b in zip(places, a_rI, b_Or, strict=True):
        product = exact.linear(b.cpu(), a.t().cpu().contiguous())  # always on the CPU: one order of summation
        out_OI.copy_((w_OI.float() + product.to(w_OI.device)).to(dtype))


def with_lora_gradient(
    y_NO: torch.Tensor, x_NI: torch.Tensor, a_PrI: torch.Tensor, b_Or: torch.Tensor, rows: tuple[int, ...], scale: float
) -> torch.Tensor:
    """Return `y_NO` unchanged, with an autograd node that gives A and B their gradients.

    `y_NO` is the product of `x_NI` with the merged matrix. `rows`: the number of rows of each part of a fused matrix.
    For batched products, all tensors have one more leading dimension."""
    y: torch.Tensor = _LoraGradient.apply(y_NO, x_NI, a_PrI, b_Or, rows, scale)  # type: ignore[no-untyped-call]
    return y


class _LoraGradient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        y: torch.Tensor,
        x: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        rows: tuple[int, ...],
        scale: float,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, a, b)
        ctx.rows, ctx.scale = list(rows), scale
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, a, b = ctx.saved_tensors
        wide, flat = dy.to(b.dtype), a.flatten(-3, -2)
        x = x.to(b.dtype)
        inner = torch.split(x @ flat.mT, b.shape[-1], -1)
        parts = list(zip(torch.split(wide, ctx.rows, -1), torch.split(b, ctx.rows, -2), inner, strict=True))
        db = torch.cat([one.mT @ xa for one, _, xa in parts], -2)
        da = torch.cat([one @ up for one, up, _ in parts], -1).mT @ x
        return dy, None, da.view_as(a) * ctx.scale, db * ctx.scale, None, None


@dataclass(frozen=True)
class _Part:
    """A part of a merged matrix, identified by the address of its first row."""

    weight: Callable[[], torch.Tensor]
    address: int  # of the full matrix
    pairs: LoraPairs
    index: int

    @property
    def is_there(self) -> bool:
        """Whether the matrix is still at the same address."""
        now = self.weight()
        return not hasattr(now, "to_local") and now.data_ptr() == self.address


class LoraOperators(Operators):
    """The operators `inner` for a model with LoRA adapters that are merged into its matrices.

    The backward pass of a product with such a matrix gives the gradient to the adapter, not to the matrix.

    Results and name are those of `inner`. A matrix is identified by its memory address, and each of its parts by the
    address of its first row. With `weights_move`, matrices move in memory, as when FSDP2 gathers them; then the
    addresses of all matrices are read again when an address is unknown."""

    def __init__(self, inner: Operators) -> None:
        super().__init__(inner.dtype)
        self.inner, self.weights_move = inner, False
        self._trained: list[tuple[Callable[[], torch.Tensor], LoraPairs]] = []
        self._parts: dict[int, _Part] = {}

    def add_adapter(self, weight: Callable[[], torch.Tensor], pairs: LoraPairs) -> None:
        """Register the merged matrix that `weight` returns, and its adapters."""
        self._trained.append((weight, pairs))
        self._look(weight, pairs)

    def _look(self, weight: Callable[[], torch.Tensor], pairs: LoraPairs) -> None:
        now = weight()
        if hasattr(now, "to_local"):  # a shard that is not gathered
            return
        size, address = now.shape[-1] * now.itemsize, now.data_ptr()
        for i, row in enumerate(itertools.accumulate((0, *pairs.rows[:-1]))):
            if i == 0 or now.ndim == 2:
                self._parts[address + row * size] = _Part(weight, address, pairs, i)

    def _at(self, weight: torch.Tensor) -> _Part | None:
        found = self._parts.get(address := weight.data_ptr())
        if self.weights_move and (found is None or not found.is_there):
            self._parts.clear()
            for one in self._trained:
                self._look(*one)
            found = self._parts.get(address)
        return found

    def lora_pairs(self, weight: torch.Tensor) -> LoraPairs | None:
        found = self._at(weight)
        return found.pairs if found is not None and found.index == 0 else None

    def linear(self, x_NI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
        return self._passed(self.inner.linear(x_NI, weight_OI), x_NI, weight_OI)

    def linear_columns(self, x_NI: torch.Tensor, weight_OI: torch.Tensor, ranks: int) -> torch.Tensor:
        return self._passed(self.inner.linear_columns(x_NI, weight_OI, ranks), x_NI, weight_OI)

    def linear_partial(self, x_NI: torch.Tensor, weight_OI: torch.Tensor, ranks: int) -> torch.Tensor:
        return self._passed(self.inner.linear_partial(x_NI, weight_OI, ranks), x_NI, weight_OI)

    def _passed(self, y_NO: torch.Tensor, x_NI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled() or (found := self._at(weight_OI)) is None:
            return y_NO
        pairs, first = found.pairs, found.index
        ends = [*itertools.accumulate(pairs.rows[first:])]
        last = first + ends.index(weight_OI.shape[0]) + 1
        a, b, rows = pairs.a, pairs.b, pairs.rows[first:last]
        if len(rows) < len(pairs.rows):
            start = sum(pairs.rows[:first])
            a, b = a[first:last], b[start : start + sum(rows)]
        return with_lora_gradient(y_NO, self.inner.quantise_input(x_NI), a, b, rows, pairs.scale)


delegate_to_inner(LoraOperators)
