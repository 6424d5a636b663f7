"""Storage of quantised matrices in Hugging Face directories: names, dtypes, shapes. Needs torch only to compute values.

Formats of compressed-tensors, which engines read (`quant_method: "compressed-tensors"`):

| format | for each matrix `X.weight` [O, I] |
| --- | --- |
| mxfp8 | `X.weight` F8_E4M3 [O, I], `X.weight_scale` U8 [O, I/32] |
| mxfp4 | `X.weight_packed` U8 [O, I/2], `X.weight_scale` U8 [O, I/32] |
| nvfp4 | `X.weight_packed` U8 [O, I/2], `X.weight_scale` F8_E4M3 [O, I/16], `X.weight_global_scale` F32 [1] |

The global scale is a divisor. All other tensors are stored as usual. The names of the tensors tell the format of each
matrix, so directories in which only some matrices are quantised can be read.

DeepSeek's fp8 format is read, too: a weight [O, I] in float8 e4m3 has a float32 for each block of 128 × 128 under its
name with `_scale_inv`; a value is its 8 bits times its block's number (arXiv 2412.19437, §3.3; DeepSeek-V3's
`weight_dequant`). So is int4 of compressed-tensors (`pack-quantized`, Kimi K2.5): `X.weight_packed` I32 [O, I/8] has
eight numbers a word, the lowest bits first, each plus 8; `X.weight_scale` [O, I/G] a factor for each G of them;
`X.weight_shape` I64 [2]. Other schemes are refused."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from typing import TYPE_CHECKING, Any

from etude.errors import CheckpointError
from etude.numerics.config import Quantise
from etude.numerics.formats import FORMATS

if TYPE_CHECKING:
    import torch

Part = tuple[str, tuple[int, ...]]
"""(dtype as named in a safetensors header, shape)."""

FP8_BLOCK = 128
FP8_DTYPE = "F8_E4M3"
"""The name of float8 e4m3 in a safetensors header."""
FP8_SCALE = "_scale_inv"
"""Suffix of the name of a weight's block scales."""
INT4_SCALE = ".weight_scale"
METHOD = "compressed-tensors"
_MATRIX = re.compile(r"_proj(_with_mqa|_qkvz?|_z|_ba?|_a)?\.weight$")
_FORMAT_NAMES = {
    Quantise.MXFP8: "mxfp8-quantized",
    Quantise.MXFP4: "mxfp4-pack-quantized",
    Quantise.NVFP4: "nvfp4-pack-quantized",
}


def is_quantised(name: str) -> bool:
    """Return whether a tensor with this name is stored in low precision when the model is quantised.

    These are the large matrices, which `numerics.quantisation.QuantisedOperators` rounds.

    >>> [is_quantised(f"model.layers.0.{n}.weight") for n in ("self_attn.q_proj", "mlp.gate", "input_layernorm")]
    [True, False, False]
    """
    return _MATRIX.search(name) is not None


def stored_parts(name: str, shape: tuple[int, ...], kind: Quantise) -> dict[str, Part]:
    """Return the tensors that store a matrix in a quantised format: name → (dtype, shape).

    They are its elements, its block scales, and for NVFP4 the global scale. `shape`: [O, I] of the matrix."""
    stem, format, rows, width = name.removesuffix(".weight"), FORMATS[kind], shape[0], shape[1]
    if format.element.bits == 8:
        codes: dict[str, Part] = {name: ("F8_E4M3", shape)}
    else:
        codes = {f"{stem}.weight_packed": ("U8", (rows, width // 2))}
    codes[f"{stem}.weight_scale"] = ("F8_E4M3" if format.has_global_scale else "U8", (rows, width // format.block))
    return codes | ({f"{stem}.weight_global_scale": ("F32", (1,))} if format.has_global_scale else {})


def ignored_parts(name: str, kind: Quantise) -> set[str]:
    """Return the names of tensors that other tools store for a matrix, and that etude ignores.

    The only such tensor is the scale of static activation quantisation."""
    return {f"{name.removesuffix('.weight')}.input_global_scale"} if FORMATS[kind].has_global_scale else set()


def stored_format(name: str, names: Container[str]) -> Quantise:
    """Return the format in which the matrix `name` is stored, from the `names` of all tensors of the directory."""
    stem = name.removesuffix(".weight")
    if f"{stem}.weight_packed" in names:
        return Quantise.NVFP4 if f"{stem}.weight_global_scale" in names else Quantise.MXFP4
    return Quantise.MXFP8 if name in names and f"{stem}.weight_scale" in names else Quantise.NONE


def is_readable(scheme: Mapping[str, Any]) -> bool:
    """Return whether a `quantization_config` has a supported format of compressed-tensors."""
    if scheme.get("quant_method") != METHOD:
        return False
    if scheme.get("format") in _FORMAT_NAMES.values():
        return True
    groups = scheme.get("config_groups")
    if scheme.get("format") != "pack-quantized" or not isinstance(groups, Mapping):
        return False
    weights = [group.get("weights") if isinstance(group, Mapping) else None for group in groups.values()]
    wanted = {"num_bits": 4, "type": "int", "symmetric": True}
    return all(isinstance(one, Mapping) and all(one.get(k) == v for k, v in wanted.items()) for one in weights)


def is_int4(name: str, names: Container[str]) -> bool:
    """Return whether the matrix `name` is stored in int4, from the `names` of all tensors of the directory."""
    return name.removesuffix(".weight") + ".weight_shape" in names


def int4_parts(name: str, shape: tuple[int, ...], groups: int) -> dict[str, Part]:
    """Return the tensors that store a matrix in int4: name → (dtype, shape). The scales may have another float dtype.

    `shape`: [O, I] of the matrix. `groups`: the numbers of a row have as many scales. Empty where the width cannot be
    divided so."""
    stem, (rows, width) = name.removesuffix(".weight"), shape
    if not groups or width % groups or width % 8:
        return {}
    return {
        f"{stem}.weight_packed": ("I32", (rows, width // 8)),
        f"{stem}.weight_scale": ("BF16", (rows, groups)),
        f"{stem}.weight_shape": ("I64", (2,)),
    }


def quantization_config(kind: Quantise, *, router: str = "mlp.gate") -> dict[str, Any]:
    """Return the `quantization_config` of config.json for a format.

    `router`: name of a router in the family's checkpoints. For NVFP4 it describes only weights, since it cannot express
    the global scale per token that activations have in etude. An engine that rounds activations in another way gets
    other results."""
    format = FORMATS[kind]
    weights: dict[str, Any] = {
        "num_bits": format.element.bits,
        "type": "float",
        "strategy": "tensor_group" if format.has_global_scale else "group",
        "group_size": format.block,
        "symmetric": True,
        "dynamic": False,
        "scale_dtype": "torch.float8_e4m3fn" if format.has_global_scale else "torch.uint8",
    }
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None if format.has_global_scale else {**weights, "dynamic": True},
        "output_activations": None,
        "format": _FORMAT_NAMES[kind],
    }
    return {
        "quant_method": METHOD,
        "format": _FORMAT_NAMES[kind],
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", f"re:.*{re.escape(router)}$"],
    }


def check_scheme(raw: Mapping[str, Any], *, stacked: bool = False) -> None:
    """Raise `CheckpointError` when a config.json has an unsupported weight format.

    `stacked`: the family stacks its experts, so these may be in gpt-oss's mxfp4 (`models.stacked_experts`)."""
    found = raw.get("quantization_config", raw.get("compression_config"))
    if found is None:
        return
    if not isinstance(found, Mapping):
        raise CheckpointError(
            "config.json is damaged",
            f"quantization_config = {found!r:.80} is not an object",
            hint="copy or download the checkpoint again, or remove this key if the weights are not quantised",
        )
    method, blocks = found.get("quant_method"), found.get("weight_block_size")
    e4m3 = found.get("fmt", "e4m3") in ("e4m3", "float8_e4m3fn")
    if stacked and method == "mxfp4":
        return
    deepseek = method == "fp8" and e4m3 and blocks == [FP8_BLOCK, FP8_BLOCK]
    if deepseek or is_readable(found):
        return
    how = {key: found[key] for key in ("fmt", "format", "weight_block_size", "bits") if key in found}
    raise CheckpointError(
        f"etude cannot read a checkpoint quantised by {method!r}{f' with {how}' if how else ''}",
        f"it reads bf16, float16, float32, fp8 (e4m3) in blocks of {FP8_BLOCK} × {FP8_BLOCK}, and mxfp8, mxfp4 and "
        "nvfp4 of compressed-tensors, and its symmetric int4 (pack-quantized)",
        hint="convert it to bf16 with the tool that quantised it, or take the unquantised checkpoint",
    )


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the block scales of an fp8 weight.

    >>> scale_shape((129, 64))
    (2, 1)
    """
    return tuple(-(-size // FP8_BLOCK) for size in shape)


def dequantise(weight_OI: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the values of an fp8 weight, float32 [O, I]. `scale`: one number for each block of 128 × 128."""
    out_size, in_size = weight_OI.shape
    each = scale.float().repeat_interleave(FP8_BLOCK, 0)[:out_size].repeat_interleave(FP8_BLOCK, 1)[:, :in_size]
    return weight_OI.float() * each


def dequantise_int4(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the values of an int4 matrix, float32 [O, I]: packed int32 [O, I/8], and scales [O, I/G]."""
    import torch

    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    values = ((packed[..., None] >> shifts) & 15).flatten(1) - 8
    each = scale.float().repeat_interleave(values.shape[1] // scale.shape[1], 1)
    return values.float() * each
