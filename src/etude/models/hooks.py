"""Looking into a forward: every operator's result passes a `Watch` under a stable name."""

from __future__ import annotations

from collections.abc import Callable

import torch

ForwardHook = Callable[[str, torch.Tensor], torch.Tensor]
"""Sees every operator's result under its name, such as ``layers.3.attention.qkv``, in the order of computing; what it
returns is used instead. Rows of tokens come first.

``experts.used`` (int64) is only shown: what is returned for it is not used. Results inside the experts are
[N, K, ...].
"""


def no_hook(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The `Watch` of a forward that nobody looks into."""
    return tensor


def layer_hook(hook: ForwardHook, layer: int) -> ForwardHook:
    """`watch` for what is computed in one layer."""
    return hook if hook is no_hook else lambda name, tensor: hook(f"layers.{layer}.{name}", tensor)
