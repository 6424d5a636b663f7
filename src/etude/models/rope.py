"""Rotary position embedding (RoPE, arXiv 2104.09864): tables computed once, in float32, as in transformers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from etude.models.config import ModelConfig


@dataclass(frozen=True)
class Rope:
    """The RoPE factors of N tokens: cosine and sine, [N, 1, A] each, in the half-rotation layout.

    The sine is negative in the first half."""

    cos: torch.Tensor  # [N, 1, A]
    sin: torch.Tensor  # [N, 1, A], negative in the first half


def tables(c: ModelConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute cosine and signed sine, float32 [context_tokens, A], with the scaling of the config.

    They are always computed on the CPU, so that their bits do not depend on the device."""
    width = c.rope_dim
    waves = c.rope_theta ** (torch.arange(0, width, 2, dtype=torch.float32, device="cpu") / width)
    inverse, scale = 1.0 / waves, 1.0
    if c.yarn is not None:
        kept = 1 - torch.tensor(c.yarn.interpolated(width, c.rope_theta), dtype=torch.float32, device="cpu")
        inverse, scale = 1.0 / (c.yarn.factor * waves) * (1 - kept) + inverse * kept, c.yarn.table_scale
    elif c.llama3 is not None:
        at, turns = c.llama3, c.llama3.original_tokens / (2 * math.pi / inverse)
        kept = ((turns - at.low_freq_factor) / (at.high_freq_factor - at.low_freq_factor)).clamp(0.0, 1.0)
        inverse = (1 - kept) * inverse / at.factor + kept * inverse
    angle = torch.arange(c.context_tokens, dtype=torch.float32, device="cpu")[:, None] * inverse
    cos, sin = angle.cos() * scale, angle.sin() * scale
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def halves(x: torch.Tensor) -> torch.Tensor:
    """Reorder the last dimension from the interleaved layout to the half-rotation layout.

    >>> halves(torch.tensor([0, 10, 1, 11])).tolist()
    [0, 1, 10, 11]
    """
    return x.view(*x.shape[:-1], x.shape[-1] // 2, 2).transpose(-1, -2).reshape(x.shape)
