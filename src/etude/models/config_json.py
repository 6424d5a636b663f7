"""Read values of a Hugging Face config.json, with errors that name the key. Torch-free; independent of model families.

Every reader raises `ValueError` for a missing or unsupported value. `raw` is always the content of config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from etude.models.components import Yarn

MAX_CONTEXT_TOKENS = 1 << 20
"""Bounds the memory of the RoPE tables that a config can make etude allocate."""
MAX_LAYERS = 4096
MAX_EXPERTS = 65_535
"""A route has at most two bytes, and one value marks a missing route."""
_SCALES = ("mscale", "mscale_all_dim", "attention_factor")  # of YaRN


def positive_ints(raw: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, int]:
    """Read several positive integers of a config.json.

    `keys`: field of `ModelConfig` → key of config.json. Returns field → value."""
    found = {name: positive_int(raw, key) for name, key in keys.items()}
    limits = {"context_tokens": MAX_CONTEXT_TOKENS, "num_layers": MAX_LAYERS, "num_experts": MAX_EXPERTS}
    for name, limit in limits.items():
        if found.get(name, 0) > limit:
            raise ValueError(f"{keys[name]} = {found[name]} is above {limit}")
    return found


def positive_int(raw: Mapping[str, Any], key: str, *, default: int | None = None) -> int:
    """Read a positive integer; return `default` where the key is missing or null."""
    value = default if raw.get(key) is None else raw[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{key} = {value!r}, expected a whole number of at least 1")
    return value


def boolean(raw: Mapping[str, Any], key: str, *, default: bool) -> bool:
    """Read a boolean; return `default` where the key is missing or null."""
    value = default if raw.get(key) is None else raw[key]
    if not isinstance(value, bool):
        raise ValueError(f"{key} = {value!r}, expected true or false")
    return value


def positive_float(value: Any, key: str) -> float:
    """Check that a value is a finite number above 0, and return it. `key`: its name in the error."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError(f"{key} = {value!r}, expected a positive number")
    return float(value)


def read_rope(raw: Mapping[str, Any]) -> tuple[float, Yarn | None]:
    """Read the RoPE settings (theta, YaRN or None).

    They are in `rope_parameters` (transformers 5), or in `rope_theta` and `rope_scaling` (transformers 4)."""
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise ValueError(f"rope_parameters = {rope!r:.80}, expected a section")
    theta = positive_float(rope.get("rope_theta", raw.get("rope_theta", 10_000.0)), "rope_theta")
    if any(section.get("partial_rotary_factor", 1.0) != 1.0 for section in (rope, raw)):
        raise ValueError("partial_rotary_factor must be 1")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "yarn":
        raise ValueError(f"rope_type = {kind!r}, only 'default' and 'yarn' are supported")
    if theta <= 1:
        raise ValueError(f"rope_theta = {theta}, and 'yarn' needs more than 1")
    context = positive_int(raw, "max_position_embeddings")
    key = "original_max_position_embeddings"
    original = positive_int({key: raw.get(key, rope.get(key))}, key, default=context)
    factor = rope.get("factor")
    return theta, Yarn(
        factor=context / original if factor is None else positive_float(factor, "factor"),
        original_tokens=original,
        beta_fast=positive_float(rope.get("beta_fast") or 32, "beta_fast"),
        beta_slow=positive_float(rope.get("beta_slow") or 1, "beta_slow"),
        truncate=boolean(rope, "truncate", default=True),
        **{key: positive_float(rope[key], key) if rope.get(key) else None for key in _SCALES},
    )


def write_rope(theta: float, yarn: Yarn | None) -> dict[str, Any]:
    """Return the keys of config.json that `read_rope` reads, for both major versions of transformers."""
    if yarn is None:
        return {"rope_theta": theta, "rope_parameters": {"rope_theta": theta, "rope_type": "default"}}
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_tokens,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
        **{key: getattr(yarn, key) for key in _SCALES if getattr(yarn, key) is not None},
    }
    if not yarn.truncate:
        scaling["truncate"] = False
    both = {"rope_parameters": {"rope_theta": theta, **scaling}, "rope_scaling": {"type": "yarn", **scaling}}
    return {"rope_theta": theta, **both}


def head_dim(raw: Mapping[str, Any], sizes: Mapping[str, int]) -> int:
    """Read the head width: `head_dim` of config.json, or hidden size over number of heads, which are in `sizes`."""
    if raw.get("head_dim") is None:
        return sizes["hidden_size"] // sizes["num_heads"]
    return positive_int(raw, "head_dim")
