"""Causal attention of many sequences in one GPU kernel: torch's flash attention for ragged lengths.

For packed sequences in training, with gradients; and for a KV cache in slots, in decoding and chunked prefill, where a
sequence's keys may start anywhere in memory. Needs no mask, no padding and no synchronisation with the host; query
heads may share keys (GQA).

Calls the operator behind `torch.nn.attention.varlen` (FlashAttention-2, arXiv 2307.08691), whose arguments are the same
in torch 2.11 and 2.13; those of the public function differ.

Shapes: N tokens, H query heads, G key heads, T cached keys of all sequences, A key width, B value width, S sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F

WIDEST = 256
"""Largest key width of this kernel; a latent's key (576) is wider."""


def is_supported(device: torch.device, dtype: torch.dtype, key_width: int) -> bool:
    """Return whether there is a kernel for this device, dtype and key width."""
    half = dtype in (torch.bfloat16, torch.float16)
    return device.type != "cpu" and half and key_width <= WIDEST and key_width % 8 == 0


def starts(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return cumulative sequence lengths, int32 [S + 1]."""
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
    """Compute causal attention of packed sequences, and return the output [N, H, B].

    Each sequence's last query attends up to its last key, the query before up to the key before, and so on. `starts_q`,
    `starts_k`: int32 [S + 1]. With `used_k` (int32 [S]), sequence i uses only `used_k[i]` keys from its start, and
    starts may be in any order. `longest_q` and `longest_k` are upper bounds, known on the host."""
    narrow = q_NHA.shape[-1] - v_TGB.shape[-1]
    value = F.pad(v_TGB, (0, narrow)) if narrow else v_TGB
    o: torch.Tensor = torch.ops.aten._flash_attention_forward(
        q_NHA, k_TGA, value, starts_q, starts_k, longest_q, longest_k, 0.0, True, False, scale=scale, seqused_k=used_k
    )[0]
    return o[..., : v_TGB.shape[-1]] if narrow else o
