"""Read values of a Hugging Face config.json, with errors that name the key. Torch-free; independent of model families.

Every reader raises `ValueError` for a missing or unsupported value. `raw` is always the content of config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from etude.models.components import Llama3, Yarn

MAX_CONTEXT_TOKENS = 1 << 20
"""Bounds the memory of the RoPE tables that a config can make etude allocate."""
MAX_LAYERS = 4096
MAX_MTP_HEADS = 16
MAX_EXPERTS = 65_535
"""A route has at most two bytes, and one value marks a missing route."""
MTP_KEY = "num_nextn_predict_layers"
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor")
_PARTIAL = "partial_rotary_factor"
_SCALES = ("mscale", "mscale_all_dim", "attention_factor")  # of YaRN
_OUTSIDE = ("rope_theta", _PARTIAL, "original_max_position_embeddings")  # also beside the section of RoPE
_YARN = frozenset({"rope_type", "factor", "beta_fast", "beta_slow", "truncate", *_SCALES, *_OUTSIDE, "finetuned"})
"""The keys of YaRN. Checkpoints of its authors also have "finetuned", which has no effect."""


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


def mtp_heads(raw: Mapping[str, Any]) -> int:
    """Read `num_nextn_predict_layers`, the number of MTP heads; 0 where it is missing or null."""
    value = raw.get(MTP_KEY) or 0
    if type(value) is not int or not 0 <= value <= MAX_MTP_HEADS:
        raise ValueError(f"{MTP_KEY} = {value!r}, expected a whole number from 0 to {MAX_MTP_HEADS}")
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


def read_rope(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Read the RoPE settings: `rope_theta`, and `yarn` or `llama3`, as fields of a `ModelConfig`.

    They are in `rope_parameters` (transformers 5), or in `rope_theta` and `rope_scaling` (transformers 4)."""
    rope = _rope_section(raw)
    theta = positive_float(rope.get("rope_theta", raw.get("rope_theta", 10_000.0)), "rope_theta")
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return {"rope_theta": theta}
    if kind not in ("yarn", "llama3"):
        raise ValueError(f"rope_type = {kind!r}, only 'default', 'yarn' and 'llama3' are supported")
    if theta <= 1:
        raise ValueError(f"rope_theta = {theta}, and {kind!r} needs more than 1")
    return {"rope_theta": theta, kind: _yarn(raw, rope) if kind == "yarn" else _llama3(rope)}


def partial_rotary(raw: Mapping[str, Any], *, default: float = 1.0) -> float:
    """Read `partial_rotary_factor`, the share of a head's numbers that RoPE rotates. `default`: the value if the key is
    missing."""
    given = [one[_PARTIAL] for one in (_rope_section(raw), raw) if one.get(_PARTIAL) is not None]
    return positive_float(given[0] if given else default, _PARTIAL)


def rotary_dim(raw: Mapping[str, Any], head_width: int, *, default: float = 1.0) -> int:
    """Read how many numbers of a head RoPE rotates; 0: all.

    `head_width`: the width of a head. `default`: the `partial_rotary_factor` where the key is missing."""
    factor = partial_rotary(raw, default=default)
    width = int(head_width * min(factor, 1.0))
    if factor > 1 or width < 2:
        raise ValueError(f"{_PARTIAL} = {factor}, of a head of {head_width}: expected at most 1, and 2 numbers or more")
    return 0 if width == head_width else width


def check_rope(raw: Mapping[str, Any]) -> None:
    """Raise `ValueError` if settings of RoPE are in a config.json twice and differ, with both values.

    `raw`: as it is in the file, without defaults. Compared are `rope_parameters` with `rope_scaling` key by key, and
    both with the keys that may be outside of them."""
    rope = _rope_section(raw)
    for key in _OUTSIDE:
        if None not in (inside := rope.get(key), outside := raw.get(key)) and inside != outside:
            raise ValueError(f"{key} = {outside!r}, but {inside!r} in rope_parameters or rope_scaling")


def _rope_section(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in `rope_parameters` and `rope_scaling`, with "type" as "rope_type".

    Raises `ValueError` if both sections are there and differ, except for a key of `_OUTSIDE` that one does not have."""
    new, old = (_section(raw, name) for name in ("rope_parameters", "rope_scaling"))
    keys = sorted(new.keys() | old.keys(), key=lambda key: (key != "rope_type", key))
    for key in keys if new and old else ():
        one, other = new.get(key), old.get(key)
        if one != other and not (key in _OUTSIDE and None in (one, other)):
            raise ValueError(f"rope_parameters has {key} = {one!r}, but rope_scaling has {other!r}")
    return {**new, **old}


def _section(raw: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = raw.get(name) or {}
    if not isinstance(section, Mapping):
        raise ValueError(f"{name} = {section!r:.80}, expected a JSON object")
    found = {key: value for key, value in section.items() if key != "type" and value is not None}
    for key, value in found.items():
        if isinstance(value, Mapping):
            raise ValueError(f"{name}.{key} is a JSON object: RoPE settings by layer type are not supported")
    old = section.get("type")
    if old is not None and found.setdefault("rope_type", old) != old:
        raise ValueError(f"{name} has type = {old!r}, but rope_type = {found['rope_type']!r}")
    return found


def _llama3(rope: Mapping[str, Any]) -> Llama3:
    key = "original_max_position_embeddings"
    others = rope.keys() - {*_LLAMA3, key, "rope_type", "rope_theta", _PARTIAL}
    if others:
        raise ValueError(f"{min(others)} = {rope[min(others)]!r} is not supported with rope_type = 'llama3'")
    return Llama3(
        original_tokens=positive_int(rope, key), **{name: positive_float(rope.get(name), name) for name in _LLAMA3}
    )


def _yarn(raw: Mapping[str, Any], rope: Mapping[str, Any]) -> Yarn:
    others = rope.keys() - _YARN
    if others:
        raise ValueError(f"{min(others)} = {rope[min(others)]!r} is not supported with rope_type = 'yarn'")
    context = positive_int(raw, "max_position_embeddings")
    key = "original_max_position_embeddings"
    original = positive_int({key: raw.get(key, rope.get(key))}, key, default=context)
    factor = rope.get("factor")
    return Yarn(
        factor=context / original if factor is None else positive_float(factor, "factor"),
        original_tokens=original,
        beta_fast=positive_float(rope.get("beta_fast") or 32, "beta_fast"),
        beta_slow=positive_float(rope.get("beta_slow") or 1, "beta_slow"),
        truncate=boolean(rope, "truncate", default=True),
        **{key: positive_float(rope[key], key) if rope.get(key) else None for key in _SCALES},
    )


def write_rope(theta: float, scaling: Yarn | Llama3 | None, share: float | None = None) -> dict[str, Any]:
    """Return the keys of config.json that `read_rope` and `rotary_dim` read, for both major versions of transformers.

    `share`: the share of a head's numbers that RoPE rotates; None: all, and no key is written."""
    partial = {} if share is None else {_PARTIAL: share}
    keys = _scaling_keys(scaling)
    new = {"rope_theta": theta, "rope_type": "default", **keys, **partial}
    old = {"rope_scaling": {"type": keys["rope_type"], **keys}} if keys else {}
    return {"rope_theta": theta, "rope_parameters": new, **old, **partial}


def rotary_share(width: int, head_width: int) -> float:
    """Return the `partial_rotary_factor` with which transformers rotates `width` of the `head_width` numbers of a head.

    The result is never too small: transformers rounds the product down, and 98 · (2 / 98) is a little less than 2.

    >>> rotary_share(2, 4), int(98 * rotary_share(2, 98))
    (0.5, 2)
    """
    share = width / head_width
    return share if int(head_width * share) == width else math.nextafter(share, 1.0)


def _scaling_keys(scaling: Yarn | Llama3 | None) -> dict[str, Any]:
    if scaling is None:
        return {}
    if isinstance(scaling, Llama3):
        found: dict[str, Any] = {"rope_type": "llama3", **{name: getattr(scaling, name) for name in _LLAMA3}}
        return {**found, "original_max_position_embeddings": scaling.original_tokens}
    found = {
        "rope_type": "yarn",
        "factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_tokens,
        "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
        **{key: getattr(scaling, key) for key in _SCALES if getattr(scaling, key) is not None},
    }
    return found if scaling.truncate else {**found, "truncate": False}


def head_dim(raw: Mapping[str, Any], sizes: Mapping[str, int]) -> int:
    """Read the head width: `head_dim` of config.json, or hidden size over number of heads, which are in `sizes`."""
    if raw.get("head_dim") is None:
        return sizes["hidden_size"] // sizes["num_heads"]
    return positive_int(raw, "head_dim")
