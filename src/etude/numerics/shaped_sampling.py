"""Sampling from changed logits: biases, penalties, forbidden tokens, and truncation of the distribution.

The order of the steps and the meaning of each are those of vLLM (`vllm/v1/sample/sampler.py`), except for one thing: a
tie at the edge of `top_p` is decided by token id. Probabilities are rounded to whole multiples of 2^-38 before they are
summed. Sums of integers do not depend on the order, so a row gives the same token in any batch and on any device whose
softmax gives the same multiples.

Shapes: R rows, V vocabulary size, N changes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

_BITS = 38  # probabilities as multiples of 2^-38: times a random number of 24 bits they still fit into an int64
_ROWS = 16  # computed at once, which bounds the memory


@dataclass(frozen=True, eq=False)
class Shape:
    """The changes of the logits of R rows, and the truncation of their distributions. All tensors are on one device.

    Per row: `uniform_R` are float32 random numbers in [0, 1); `temperature_R` is 1 where `greedy_R`; `min_p_R` 0,
    `top_k_R` V and `top_p_R` 1 keep all tokens; `forbidden_RV` masks forbidden tokens (None: none). `sorts`: some row
    has top_k or top_p. V is the size of the vocabulary. N changes of single logits, in this order: `bias_N` is added to
    the logit of token `tokens_N` in row `rows_N`, then positive logits are divided and others multiplied by
    `repetition_N`, then `penalty_N` is subtracted. `most_k`: the largest top_k if every row has one and none has top_p
    (`topk` then replaces the sort), else 0."""

    uniform_R: torch.Tensor
    temperature_R: torch.Tensor
    greedy_R: torch.Tensor
    min_p_R: torch.Tensor
    top_k_R: torch.Tensor
    top_p_R: torch.Tensor
    sorts: bool
    forbidden_RV: torch.Tensor | None
    rows_N: torch.Tensor
    tokens_N: torch.Tensor
    bias_N: torch.Tensor
    repetition_N: torch.Tensor
    penalty_N: torch.Tensor
    most_k: int = 0

    def part(self, start: int, stop: int) -> Shape:
        """Return the shape of rows [start, stop)."""
        row_values: dict[str, Any] = {name: getattr(self, name)[start:stop] for name in _PER_ROW}
        if self.forbidden_RV is not None:
            row_values["forbidden_RV"] = self.forbidden_RV[start:stop]
        here = (self.rows_N >= start) & (self.rows_N < stop)
        changes: dict[str, Any] = {name: getattr(self, name)[here] for name in _PER_CHANGE}
        return replace(self, **row_values, **changes, rows_N=self.rows_N[here] - start)


_PER_ROW = ("uniform_R", "temperature_R", "greedy_R", "min_p_R", "top_k_R", "top_p_R")
_PER_CHANGE = ("tokens_N", "bias_N", "repetition_N", "penalty_N")


def sample_shaped(logits_RV: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Sample a token for each row, int64 [R]. Every row must allow a token."""
    if len(logits_RV) > _ROWS:
        parts = [(at, at + _ROWS) for at in range(0, len(logits_RV), _ROWS)]
        return torch.cat([sample_shaped(logits_RV[start:stop], shape.part(start, stop)) for start, stop in parts])
    changed_RV = change_logits(logits_RV, shape)
    weights_RV = truncate(changed_RV / shape.temperature_R[:, None], shape)
    cumulative = weights_RV.cumsum(-1)
    total = cumulative[:, -1:]
    thresholds = ((shape.uniform_R.double() * 2**24).long()[:, None] * total) >> 24
    tokens = torch.searchsorted(cumulative, thresholds, right=True)[:, 0].clamp_(max=logits_RV.shape[-1] - 1)
    return torch.where(shape.greedy_R | (total[:, 0] == 0), changed_RV.argmax(-1), tokens)


def change_logits(logits_RV: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Return the changed logits, float32 [R, V]: with biases and penalties, and -inf for forbidden tokens."""
    logits_RV = logits_RV.float().clone()
    if len(shape.rows_N):
        found = logits_RV[shape.rows_N, shape.tokens_N] + shape.bias_N
        found = torch.where(found > 0, found / shape.repetition_N, found * shape.repetition_N) - shape.penalty_N
        logits_RV[shape.rows_N, shape.tokens_N] = found
    if shape.forbidden_RV is not None:
        logits_RV.masked_fill_(shape.forbidden_RV, -torch.inf)
    return logits_RV


def truncate(logits_RV: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Return the weight of each token after truncation, int64 [R, V]: its probability in units of 2^-38; 0 if dropped.

    The weights of a row are not normalised again."""
    weights_RV: torch.Tensor = (logits_RV.double().softmax(-1).nan_to_num_(0.0) * 2**_BITS).round_().long()
    most_R1 = weights_RV.max(-1, keepdim=True).values
    weights_RV.masked_fill_(weights_RV < shape.min_p_R[:, None] * most_R1, 0)
    if not shape.sorts:
        return weights_RV
    if shape.most_k:
        kth = logits_RV.topk(shape.most_k).values.gather(1, shape.top_k_R[:, None] - 1)
        return weights_RV.masked_fill_(logits_RV < kth, 0)
    in_order, order = logits_RV.sort(stable=True, dim=-1, descending=True)
    kth = in_order.gather(1, shape.top_k_R.clamp(max=logits_RV.shape[-1])[:, None] - 1)  # ties with it are kept
    sorted_weights = weights_RV.gather(1, order).masked_fill_(in_order < kth, 0)
    cumulative = sorted_weights.cumsum(-1)
    before = cumulative - sorted_weights
    sorted_weights.masked_fill_(before >= shape.top_p_R[:, None] * cumulative[:, -1:], 0)
    return torch.zeros_like(weights_RV).scatter_(1, order, sorted_weights)
