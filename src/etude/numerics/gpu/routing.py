"""Router choice and gates, and rows sorted by expert, without synchronising with the host.

Shapes: N tokens, E experts, K experts per token, S = N · K rows after dispatch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from etude.numerics.gpu.kernels import routing as kernels
from etude.numerics.gpu.matmul import Groups, next_power_of_two
from etude.numerics.gpu.row_ops import NO_FUSION

_TILE = 1024  # scores of a program


@dataclass(frozen=True)
class Router:
    """The rules by which gates are computed from scores. The defaults are those of Qwen3-MoE; DeepSeek-V3 uses sigmoid,
    groups and a scale.

    `groups`: the number of groups of experts. `groups_kept`: the number of groups from which experts are chosen: those
    with the highest sum of their two best scores. `normalised`: gates of a token sum to `scale`."""

    top_k: int
    sigmoid: bool = False
    groups: int = 1
    groups_kept: int = 1
    normalised: bool = True
    scale: float = 1.0


@dataclass(frozen=True, eq=False)
class Chosen:
    """The choice of one layer's router.

    `gates_NK`: float32, differentiable. `experts_NK`: int32, the experts used, replayed ones included. `live_NK`:
    int32, the router's own choice."""

    gates_NK: torch.Tensor
    experts_NK: torch.Tensor
    live_NK: torch.Tensor


def choose(
    logits_NE: torch.Tensor,
    router: Router,
    *,
    bias_E: torch.Tensor | None = None,
    routes_NK: torch.Tensor | None = None,
) -> Chosen:
    """Choose the top-k experts by probability (plus `bias_E`), ties to the lowest index.

    `routes_NK` (uint8 or uint16): recorded experts to use in place of this choice; gates are always computed from the
    logits. A row whose first route is the largest value of the dtype has no recorded routes, and keeps the router's
    choice."""
    return Chosen(*_Choose.apply(logits_NE, bias_E, routes_NK, router))  # type: ignore[no-untyped-call]


def scores(logits_NE: torch.Tensor, *, sigmoid: bool) -> torch.Tensor:
    """Compute a router's probabilities by softmax or sigmoid, float32 [N, E], differentiable."""
    y: torch.Tensor = _Scores.apply(logits_NE, sigmoid)  # type: ignore[no-untyped-call]
    return y


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, sigmoid: bool) -> torch.Tensor:
        rows, experts = logits.shape
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        y = logits.new_empty(rows, experts, dtype=torch.float32)
        if rows:
            tile = _tile(experts)
            kernels.scores[(-(-rows // tile["ROWS"]),)](
                logits, y, rows, logits.stride(0), EXPERTS=experts, SIGMOID=sigmoid, **tile, **NO_FUSION
            )
        ctx.save_for_backward(y)
        ctx.sigmoid, ctx.dtype = sigmoid, logits.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        (y,) = ctx.saved_tensors
        rows, experts = y.shape
        dlogits = torch.empty_like(y, dtype=ctx.dtype)
        if rows:
            tile = _tile(experts)
            kernels.scores_gradient[(-(-rows // tile["ROWS"]),)](
                dy.contiguous(), y, dlogits, rows, EXPERTS=experts, SIGMOID=ctx.sigmoid, **tile, **NO_FUSION
            )
        return dlogits, None


def _tile(experts: int) -> dict[str, int]:
    lanes = next_power_of_two(experts)
    return {"ROWS": max(1, _TILE // lanes), "LANES": lanes}


class _Choose(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, bias: torch.Tensor | None, routes: torch.Tensor | None, router: Router
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows, experts = logits.shape
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        gates = logits.new_empty(rows, router.top_k, dtype=torch.float32)
        used, live = (torch.empty_like(gates, dtype=torch.int32) for _ in range(2))
        if rows:
            tile = _tile(experts)
            kernels.choose[(-(-rows // tile["ROWS"]),)](
                logits, bias, None if routes is None else routes.contiguous(), gates, used, live,
                rows, logits.stride(0), router.scale,
                EXPERTS=experts, TOP=router.top_k, SIGMOID=router.sigmoid, BIASED=bias is not None,
                GROUPS=router.groups, KEPT=router.groups_kept, REPLAYED=routes is not None,
                MISSING=0 if routes is None else torch.iinfo(routes.dtype).max,
                NORMALISED=router.normalised, SLOTS=next_power_of_two(router.top_k), **tile, **NO_FUSION,
            )  # fmt: skip
        ctx.save_for_backward(logits, used)
        ctx.router = router
        ctx.mark_non_differentiable(used, live)
        return gates, used, live

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dgates: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, used = ctx.saved_tensors
        router: Router = ctx.router
        rows, experts = logits.shape
        dlogits = torch.empty(rows, experts, dtype=logits.dtype, device=logits.device)
        if rows:
            tile = _tile(experts)
            kernels.choose_gradient[(-(-rows // tile["ROWS"]),)](
                dgates.contiguous(), logits, used, dlogits, rows, logits.stride(0), router.scale,
                EXPERTS=experts, TOP=router.top_k, SIGMOID=router.sigmoid, NORMALISED=router.normalised,
                **tile, **NO_FUSION,
            )  # fmt: skip
        return dlogits, None, None, None


@dataclass(frozen=True, eq=False)
class Dispatch:
    """The permutation that sorts (token, choice) pairs by expert, ties by token.

    `token_S`: int32, the token of each row. `slot_NK`: int32, the row of each (token, choice)."""

    groups: Groups
    token_S: torch.Tensor
    slot_NK: torch.Tensor

    @classmethod
    def of(cls, experts_NK: torch.Tensor, num_experts: int) -> Dispatch:
        """Sort (token, choice) pairs of `experts_NK` by expert."""
        n, k = experts_NK.shape
        device = experts_NK.device
        by_expert, order = experts_NK.reshape(-1).sort(stable=True)
        starts = torch.searchsorted(by_expert, torch.arange(num_experts + 1, device=device, dtype=by_expert.dtype))
        slot = torch.empty(n * k, dtype=torch.int32, device=device)
        slot[order] = torch.arange(n * k, dtype=torch.int32, device=device)
        return cls(Groups(starts.to(torch.int32), n * k), (order // k).to(torch.int32), slot.view(n, k))
