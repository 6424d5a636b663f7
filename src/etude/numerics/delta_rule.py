"""The gated delta rule (arXiv 2412.06464), and the short convolution before it: linear attention with a state.

A head's state is a matrix S [A, B]. Each token decays it, and writes its value v under its key k: S ← e^g S, then
S ← S + k (β (v − Sᵀk))ᵀ. The token's output is Sᵀq.

`recurrent` computes token after token. It consists of products and sums of single numbers, and sums over a width by
halving, which are rounded the same wherever a number is in memory. So a token has the same bits however its sequence is
cut into calls, and beside whichever others: an engine that decodes, and a learner that has the whole text, get equal
bits. `chunked` computes up to `CHUNK` tokens at once, as matrix products and a triangular system (§3.3): faster for
many tokens, with other bits.

Shapes: N tokens, S segments, T tokens of a segment, H heads, A key width, B value width, C channels, K taps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

CHUNK = 64
Elementwise = Callable[[Callable[[torch.Tensor], torch.Tensor], torch.Tensor], torch.Tensor]
"""(function, x [N, F]) -> function(x), float32: `Operators.elementwise`."""


class Segments:
    """The sequences to which N rows belong: the first `lengths[0]` rows are consecutive tokens of one, and so on."""

    def __init__(self, lengths: Sequence[int], device: torch.device | str = "cpu") -> None:
        self.lengths, self.device = list(lengths), torch.device(device)
        self._taps: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @cached_property
    def by_length(self) -> tuple[torch.Tensor, list[int], torch.Tensor]:
        """The segments, longest first, int64 [S]; how many have more than t tokens, for each t; and the first row of
        each segment in this order, int64 [S]."""
        lengths = torch.tensor(self.lengths)
        order = lengths.argsort(descending=True, stable=True)
        more = [int((lengths > t).sum()) for t in range(max(self.lengths, default=0))]
        starts = torch.tensor([*accumulate(self.lengths, initial=0)][:-1])
        return order.to(self.device), more, starts[order].to(self.device)

    def taps(self, num: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return where the inputs of a convolution with `num` taps are, among the `num` - 1 rows before each segment,
        all of them first, and then the N rows: int64 [num, N], the oldest input of each row first. And the rows before
        whatever follows each segment, int64 [S, num - 1]."""
        if num not in self._taps:
            before, starts = num - 1, [*accumulate(self.lengths, initial=0)][:-1]

            def place(segment: int, at: torch.Tensor) -> torch.Tensor:  # `at` counts from the segment's first row
                old = segment * before + before + at
                return torch.where(at < 0, old, len(self.lengths) * before + starts[segment] + at)

            back = torch.arange(before, -1, -1)[:, None]
            own = [place(i, torch.arange(n)[None] - back) for i, n in enumerate(self.lengths)]
            last = [place(i, torch.arange(n - before, n)) for i, n in enumerate(self.lengths)]
            self._taps[num] = torch.cat(own, 1).to(self.device), torch.stack(last).to(self.device)
        return self._taps[num]


def causal_convolution(
    x_NC: torch.Tensor, weight_CK: torch.Tensor, before_SKC: torch.Tensor | None, segments: Segments
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convolve each channel over the tokens of each segment: y_t = Σ_j w_j x_{t − K + 1 + j}, summed in this order.

    `before_SKC`: the K - 1 tokens before each segment, [S, K - 1, C]; None: zeros. Returns y [N, C], and the last K - 1
    tokens, in the same form as `before_SKC`."""
    num = weight_CK.shape[1]
    if before_SKC is None:
        before_SKC = x_NC.new_zeros(len(segments.lengths), num - 1, x_NC.shape[1])
    all_MC = torch.cat([before_SKC.flatten(0, 1).to(x_NC.dtype), x_NC])
    taps, last = segments.taps(num)
    y_NC = all_MC.index_select(0, taps[0]) * weight_CK[:, 0]
    for tap, weight_C in zip(taps[1:], weight_CK.unbind(1)[1:], strict=True):
        y_NC = y_NC + all_MC.index_select(0, tap) * weight_C
    return y_NC, all_MC[last]


def halving_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum over the dimension before the last one: second half to first half, until one is left.

    >>> halving_sum(torch.arange(10.0).view(5, 2)).tolist()
    [20.0, 25.0]
    """
    while (num := x.shape[-2]) > 1:
        half = num // 2
        y = x[..., :half, :] + x[..., half : 2 * half, :]
        if num % 2:
            y[..., :1, :] += x[..., 2 * half :, :]
        x = y
    return x[..., 0, :]


def unit(x_NHA: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Divide each head's vector by its length, √(Σ x² + eps)."""
    return x_NHA / (halving_sum((x_NHA * x_NHA)[..., None]) + eps).sqrt()


def recurrent(
    inputs: Sequence[torch.Tensor],
    state_SHAB: torch.Tensor | None,
    segments: Segments,
    elementwise: Elementwise,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the gated delta rule token after token, all float32. Not differentiable.

    `inputs`: q and k [N, H, A], v [N, H, B], and g, the logarithm of the decay, and beta [N, H]. `state_SHAB`: before
    the first token of each segment; None: zeros. Segments are computed side by side. Returns the outputs [N, H, B] and
    the states after the last tokens."""
    q_NHA, k_NHA, v_NHB, g_NH, beta_NH = inputs
    widths = [q_NHA.shape[-1], k_NHA.shape[-1], v_NHB.shape[-1], 1, 1]
    decay_NH = elementwise(torch.exp, g_NH)
    all_NH = torch.cat([q_NHA, k_NHA, v_NHB, decay_NH[..., None], beta_NH[..., None]], -1)
    order, more, starts = segments.by_length
    if state_SHAB is None:
        states = v_NHB.new_zeros(len(order), v_NHB.shape[1], widths[0], widths[2])
    else:
        states = state_SHAB.index_select(0, order)
    o_NHB = torch.empty_like(v_NHB)
    for t, num in enumerate(more):
        rows, state = starts[:num] + t, states[:num]
        q, k, v, decay, beta = torch.split(all_NH.index_select(0, rows), widths, -1)
        state.mul_(decay[..., None])
        wrong = (v - halving_sum(state * k[..., None])) * beta
        state.add_(k[..., None] * wrong[..., None, :])
        o_NHB.index_copy_(0, rows, halving_sum(state * q[..., None]))
    return o_NHB, torch.empty_like(states).index_copy_(0, order, states)


def chunked(inputs: Sequence[torch.Tensor], state_HAB: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the gated delta rule in one sequence, chunk by chunk, all float32. Differentiable.

    With the states written out, what the tokens of a chunk write solves a triangular system. Returns the outputs [T, H,
    B] and the last state."""
    q_THA, k_THA, v_THB, g_TH, beta_TH = inputs
    num, size = len(q_THA), min(CHUNK, len(q_THA))
    rest = -num % size

    def by_chunk(x: torch.Tensor) -> torch.Tensor:  # [H, chunks, size, width]
        padded = F.pad(x, (0, 0, 0, 0, 0, rest)).transpose(0, 1)
        return padded.reshape(len(padded), -1, size, x.shape[-1])

    q, k, v, g, beta = map(by_chunk, (q_THA, k_THA, v_THB, g_TH[..., None], beta_TH[..., None]))
    total = g.cumsum(2)
    later = torch.ones(size, size, dtype=torch.bool, device=g.device).triu(1)
    between = (total - total.mT).masked_fill(later, -torch.inf).exp()  # decay from a token to a later one
    written = k * beta
    system = (written @ k.mT) * between
    both = torch.cat([v * beta, written * total.exp()], -1)
    solved = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True)
    new, seen = solved.split([v.shape[-1], k.shape[-1]], -1)
    scores = (q @ k.mT) * between
    q, k = q * total.exp(), k * (total[:, :, -1:] - total).exp()
    left = total[:, :, -1:].exp()
    state = v.new_zeros(v.shape[0], k.shape[-1], v.shape[-1]) if state_HAB is None else state_HAB
    outs = []
    for i in range(q.shape[1]):
        value = new[:, i] - seen[:, i] @ state
        outs.append(q[:, i] @ state + scores[:, i] @ value)
        state = state * left[:, i] + k[:, i].mT @ value
    return torch.cat(outs, 1)[:, :num].transpose(0, 1), state


def chunked_segments(
    inputs: Sequence[torch.Tensor], state_SHAB: torch.Tensor | None, segments: Segments
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `chunked` for each segment. `inputs`: q, k, v, g and beta, as for `recurrent`."""
    parts = zip(*(torch.split(x, segments.lengths) for x in inputs), strict=True)
    states = [None] * len(segments.lengths) if state_SHAB is None else state_SHAB.unbind()
    done = [chunked(part, state) for part, state in zip(parts, states, strict=True)]
    return torch.cat([o for o, _ in done]), torch.stack([state for _, state in done])


def recurrent_with_gradient(
    inputs: Sequence[torch.Tensor], state_SHAB: torch.Tensor | None, segments: Segments, elementwise: Elementwise
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `recurrent`, with the gradient of `chunked`: that of one token after another would store each token's
    state. `inputs`: q, k, v, g and beta."""
    o, states = _Recurrent.apply(segments, elementwise, state_SHAB, *inputs)  # type: ignore[no-untyped-call]
    return o, states


class _Recurrent(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, segments: Segments, elementwise: Elementwise, state: torch.Tensor | None, *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.segments = segments
        ctx.save_for_backward(state, *inputs)
        return recurrent(inputs, state, segments, elementwise)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        first, *rest = ctx.saved_tensors
        state = None if first is None else first.detach().requires_grad_()
        inputs = [x.detach().requires_grad_() for x in rest]
        with torch.enable_grad():
            done = chunked_segments(inputs, state, ctx.segments)
        found = torch.autograd.grad(done, [*([] if state is None else [state]), *inputs], gradients)
        return None, None, *([None] if state is None else []), *found
