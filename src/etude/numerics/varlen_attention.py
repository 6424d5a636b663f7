"""Causal attention of many sequences in one kernel, on a device: torch's own flash attention for ragged lengths.

Of packed sequences, for training, with its gradient; and over slots of kept keys, for decoding and chunks of prompts,
where a sequence's keys begin anywhere in memory and are as many as are said. Needs no mask and no padding, groups of
query heads share keys, and nothing is asked of the device.

By the operator under `torch.nn.attention.varlen` (FlashAttention-2, arXiv 2307.08691), whose arguments are the same in
torch 2.11 and 2.13; those of the function above it are not.

Shapes: N tokens, H query heads, G key heads, T kept keys of all sequences, A key width, B value width, S sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F

WIDEST = 256
"""Of a key, for this kernel; a latent's (576) is wider."""


def is_supported(device: torch.device, dtype: torch.dtype, key_width: int) -> bool:
    """Whether there is a kernel for them."""
    half = dtype in (torch.bfloat16, torch.float16)
    return device.type != "cpu" and half and key_width <= WIDEST and key_width % 8 == 0


def starts(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    """int32 [S + 1]: where each sequence begins, and where the last ends."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device)


def attend(
    q_NHA: torch.Tensor,
    k_TGA: torch.Tensor,
    v_TGB: torch.Tensor,
    starts_q: torch.Tensor,
    starts_k: torch.Tensor,
    longest_q: int,
    longest_k: int,
    *,
    scale: float | None = None,
    used_k: torch.Tensor | None = None,
) -> torch.Tensor:
    """o_NHB: each sequence's last query sees its last key, the one before it the key before, and so on.

    `starts_q`, `starts_k`: int32 [S + 1]. With `used_k` (int32 [S]) a sequence has that many keys from its start on,
    and starts may be in any order. The longest are bounds, known to the host.
    """
    narrow = q_NHA.shape[-1] - v_TGB.shape[-1]
    value = F.pad(v_TGB, (0, narrow)) if narrow else v_TGB
    o: torch.Tensor = torch.ops.aten._flash_attention_forward(
        q_NHA, k_TGA, value, starts_q, starts_k, longest_q, longest_k, 0.0, True, False, scale=scale, seqused_k=used_k
    )[0]
    return o[..., : v_TGB.shape[-1]] if narrow else o
