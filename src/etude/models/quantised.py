"""Checkpoints whose weights are stored in 8 bits: DeepSeek's own blocks are read, others are refused by name.

A weight [O, I] in float8 e4m3 has beside it, under its name and `_scale_inv`, a float32 for each block of 128 × 128:
the value of an element is its 8 bits times its block's number (arXiv 2412.19437, §3.3; DeepSeek-V3's
`weight_dequant`). Torch is needed for the values only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from etude.errors import CheckpointError
from etude.models.low import is_known

if TYPE_CHECKING:
    import torch

BLOCK = 128
DTYPE = "F8_E4M3"
"""What a safetensors header calls it."""
SCALE = "_scale_inv"
"""Ends the name of a weight's block scales."""


def check_scheme(raw: Mapping[str, Any]) -> None:
    """Raises `CheckpointError` for a config.json whose weights are in a format that is not read."""
    found = raw.get("quantization_config", raw.get("compression_config"))
    if found is None:
        return
    if not isinstance(found, Mapping):
        raise CheckpointError(
            "config.json is damaged", f"quantization_config = {found!r:.80}", hint="expected a section, or none"
        )
    method, blocks = found.get("quant_method"), found.get("weight_block_size")
    deepseek = method == "fp8" and found.get("fmt", "e4m3") == "e4m3" and blocks == [BLOCK, BLOCK]
    if deepseek or is_known(found):
        return
    how = {key: found[key] for key in ("fmt", "format", "weight_block_size", "bits") if key in found}
    raise CheckpointError(
        f"a checkpoint quantised by {method!r}{f' with {how}' if how else ''}",
        f"readable are bf16, float16, float32, fp8 (e4m3) in blocks of {BLOCK} × {BLOCK}, and mxfp8, mxfp4 and nvfp4 of"
        " compressed-tensors",
        hint="convert it to bf16 with the tool that quantised it, or take the unquantised checkpoint",
    )


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of the block scales of a weight.

    >>> scale_shape((129, 64))
    (2, 1)
    """
    return tuple(-(-size // BLOCK) for size in shape)


def dequantised(weight_OI: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The values of an 8-bit weight, float32 [O, I]."""
    out_size, in_size = weight_OI.shape
    each = scale.float().repeat_interleave(BLOCK, 0)[:out_size].repeat_interleave(BLOCK, 1)[:, :in_size]
    return weight_OI.float() * each
