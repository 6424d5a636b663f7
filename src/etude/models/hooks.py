"""Hooks into a forward pass: each operator's result is passed to a `ForwardHook` under a stable name."""

from __future__ import annotations

from collections.abc import Callable

import torch

ForwardHook = Callable[[str, torch.Tensor], torch.Tensor]
"""Called with the name of each operator, such as ``layers.3.attention.qkv``, and its result, in the order of
computation. The tensor that it returns replaces the result. The first dimension is tokens.

The return value for ``experts.used`` (int64) is ignored. Results inside the experts are [N, K, ...].
"""


def no_hook(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor unchanged: the default `ForwardHook`."""
    return tensor


def layer_hook(hook: ForwardHook, layer: int) -> ForwardHook:
    """Return a hook for the operators of layer number `layer`. It calls `hook` with "layers.N." before the operator's
    name."""
    return hook if hook is no_hook else lambda name, tensor: hook(f"layers.{layer}.{name}", tensor)
