"""Hugging Face's config.json for each family, read and written with the keys that transformers has.

Torch-free. A variant that is not computed is refused by the key that says so; a key that says nothing about what is
computed is not looked at. Knows nothing of weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from etude.errors import CheckpointError
from etude.models.parts import Family, Latent, Routing, Scores, Yarn
from etude.models.quantised import check_scheme

if TYPE_CHECKING:
    from etude.models.config import ModelConfig

MAX_CONTEXT_TOKENS = 1 << 20
"""Bounds the rotary tables that a config can make us allocate."""
MAX_LAYERS = 4096
MAX_EXPERTS = 65_535
"""A route is at most two bytes, and one value of them says that it is missing."""

_SIZES = {  # our name -> Hugging Face's
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "context_tokens": "max_position_embeddings",
}
_MOE = {**_SIZES, "expert_size": "moe_intermediate_size", "num_experts": "num_experts", "top_k": "num_experts_per_tok"}
_DEEPSEEK = {**_MOE, "num_experts": "n_routed_experts", "num_shared": "n_shared_experts"}
_LATENT = {
    "kv_rank": "kv_lora_rank",
    "nope_dim": "qk_nope_head_dim",
    "rope_dim": "qk_rope_head_dim",
    "value_dim": "v_head_dim",
}
_WIDTH = "intermediate_size"  # of layers without a router
_YARN = {"mscale": "mscale", "mscale_all_dim": "mscale_all_dim", "attention_factor": "attention_factor"}

_FIXED: dict[str, tuple[Any, Any]] = {  # key -> (the only value we compute, Hugging Face's default)
    "hidden_act": ("silu", "silu"),
    "attention_bias": (False, False),
}
_FIXED_QWEN = {**_FIXED, "use_sliding_window": (False, False)}
_FIXED_DEEPSEEK = {
    **_FIXED,
    "scoring_func": ("sigmoid", "sigmoid"),
    "topk_method": ("noaux_tc", "noaux_tc"),
    "moe_layer_freq": (1, 1),
}


def read(raw: Mapping[str, Any], make: Callable[..., ModelConfig]) -> ModelConfig:
    """A model's sizes from the content of a config.json. Raises `CheckpointError`."""
    family = _family(raw)
    check_scheme(raw)
    fixed = _FIXED_DEEPSEEK if family.is_latent else _FIXED_QWEN
    for key, (ours, default) in fixed.items():
        found = default if raw.get(key) is None else raw[key]
        if found != ours:
            raise CheckpointError(
                f"a {family} variant with {key} = {found!r}",
                f"this build computes {key} = {ours!r} only",
                hint=_may_vary(family),
            )
    readers = {Family.QWEN3_MOE: _read_qwen_moe, Family.QWEN3: _read_qwen}
    try:
        rope_theta, yarn = _rope(raw)
        return make(
            family=family,
            rope_theta=rope_theta,
            yarn=yarn,
            rms_eps=_positive(raw.get("rms_norm_eps", 1e-6), "rms_norm_eps"),
            tie_embeddings=_flag(raw, "tie_word_embeddings", default=False),
            **readers.get(family, _read_deepseek)(raw),
        )
    except (TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
        raise CheckpointError(
            f"config.json does not describe a {family} that is computed here", str(error), hint=_may_vary(family)
        ) from None


def _may_vary(family: Family) -> str:
    """What a checkpoint of a family may be, as a hint."""
    moe = "norm_topk_prob, decoder_sparse_step, mlp_only_layers, " if family is Family.QWEN3_MOE else ""
    varies = f"{moe}tie_word_embeddings"
    if family.is_latent:
        varies = "q_lora_rank, groups, routed_scaling_factor, shared experts, first_k_dense_replace, rope_interleave"
    return f"take a {family} that differs in nothing but sizes, {varies} and plain or YaRN positions"


def write(c: ModelConfig) -> dict[str, Any]:
    """The content of a config.json."""
    writers = {Family.QWEN3_MOE: _write_qwen_moe, Family.QWEN3: _write_qwen}
    return {
        "architectures": [c.family.architecture],
        "model_type": str(c.family),
        **writers.get(c.family, _write_deepseek)(c),
        _WIDTH: c.dense_width,
        **_written_rope(c),
        "rms_norm_eps": c.rms_eps,
        "tie_word_embeddings": c.tie_embeddings,
        **{key: ours for key, (ours, _) in (_FIXED_DEEPSEEK if c.family.is_latent else _FIXED_QWEN).items()},
        "attention_dropout": 0.0,
        "use_cache": True,
    }


def _family(raw: Mapping[str, Any]) -> Family:
    """Raises `CheckpointError` that names another architecture."""
    names = raw.get("architectures")
    listed = names[0] if isinstance(names, list) and names else None
    kind = raw.get("model_type")
    family = Family(kind) if isinstance(kind, str) and kind in list(Family) else None
    if family is None or (listed is not None and listed != family.architecture):
        known = dict.fromkeys(f.architecture for f in Family)
        raise CheckpointError(
            f"a checkpoint of architecture {listed or kind or 'unnamed'} (model_type {kind})",
            f"this build computes {', '.join(known)} (model_type {', '.join(Family)}) only",
            hint="start from a checkpoint of one of these families, or from nothing with mid-training",
        )
    return family


# Qwen3


def _read_qwen(raw: Mapping[str, Any]) -> dict[str, Any]:
    kinds = raw.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise ValueError(f"layer_types = {kinds!r:.80}, only full_attention is computed")
    sizes = _wholes(raw, _SIZES)
    dense = _whole(raw, _WIDTH)
    return {**sizes, "head_dim": _head_dim(raw, sizes), "num_experts": 0, "top_k": 0, "dense_size": dense}


def _write_qwen(c: ModelConfig) -> dict[str, Any]:
    return {theirs: getattr(c, ours) for ours, theirs in _SIZES.items()} | {"head_dim": c.head_dim}


def _read_qwen_moe(raw: Mapping[str, Any]) -> dict[str, Any]:
    sizes = _wholes({**raw, "num_experts": raw.get("num_experts", raw.get("num_local_experts"))}, _MOE)
    every = _whole(raw, "decoder_sparse_step", default=1)
    named = raw.get("mlp_only_layers") or []
    if not isinstance(named, list) or not all(type(i) is int for i in named):
        raise ValueError(f"mlp_only_layers = {named!r:.80}, expected layers' numbers")
    without = set(named)
    dense = tuple(i for i in range(sizes["num_layers"]) if i in without or (i + 1) % every)
    width = sizes["expert_size"] if raw.get("intermediate_size") is None and not dense else _whole(raw, _WIDTH)
    return {
        **sizes,
        "head_dim": _head_dim(raw, sizes),
        "dense_layers": dense,
        "dense_size": 0 if width == sizes["expert_size"] else width,
        "routing": Routing(normalise=_flag(raw, "norm_topk_prob", default=False)),
    }


def _write_qwen_moe(c: ModelConfig) -> dict[str, Any]:
    return {
        **{theirs: getattr(c, ours) for ours, theirs in _MOE.items()},
        "head_dim": c.head_dim,
        "norm_topk_prob": c.routing.normalise,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(c.dense_layers),
    }


def _head_dim(raw: Mapping[str, Any], sizes: Mapping[str, int]) -> int:
    if raw.get("head_dim") is None:
        return sizes["hidden_size"] // sizes["num_heads"]
    return _whole(raw, "head_dim")


# DeepSeek-V3, which Kimi K2 is


def _read_deepseek(raw: Mapping[str, Any]) -> dict[str, Any]:
    raw = {**raw, "n_routed_experts": raw.get("n_routed_experts", raw.get("num_local_experts"))}
    raw.setdefault("num_key_value_heads", raw.get("num_attention_heads"))
    sizes = _wholes(raw, _DEEPSEEK)
    latent = Latent(
        **_wholes(raw, _LATENT),
        q_rank=None if raw.get("q_lora_rank") is None else _whole(raw, "q_lora_rank"),
        interleaved=_flag(raw, "rope_interleave", default=True),
    )
    first = raw.get("first_k_dense_replace", 0)
    if type(first) is not int or not 0 <= first <= sizes["num_layers"]:
        raise ValueError(f"first_k_dense_replace = {first!r}, of {sizes['num_layers']} layers")
    return {
        **sizes,
        "head_dim": latent.head_dim,
        "dense_layers": tuple(range(first)),
        "dense_size": _whole(raw, _WIDTH),
        "latent": latent,
        "routing": Routing(
            scores=Scores.SIGMOID,
            normalise=_flag(raw, "norm_topk_prob", default=True),
            scaling=_positive(raw.get("routed_scaling_factor", 1.0), "routed_scaling_factor"),
            num_groups=_whole(raw, "n_group", default=1),
            top_groups=_whole(raw, "topk_group", default=1),
        ),
    }


def _write_deepseek(c: ModelConfig) -> dict[str, Any]:
    assert c.latent is not None
    return {
        **{theirs: getattr(c, ours) for ours, theirs in _DEEPSEEK.items()},
        **{theirs: getattr(c.latent, ours) for ours, theirs in _LATENT.items()},
        "q_lora_rank": c.latent.q_rank,
        "rope_interleave": c.latent.interleaved,
        "first_k_dense_replace": len(c.dense_layers),
        "norm_topk_prob": c.routing.normalise,
        "routed_scaling_factor": c.routing.scaling,
        "n_group": c.routing.num_groups,
        "topk_group": c.routing.top_groups,
        "num_nextn_predict_layers": 0,
    }


# rotary positions


def _rope(raw: Mapping[str, Any]) -> tuple[float, Yarn | None]:
    """`rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (4)."""
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise ValueError(f"rope_parameters = {rope!r:.80}, expected a section")
    theta = _positive(rope.get("rope_theta", raw.get("rope_theta", 10_000.0)), "rope_theta")
    if any(section.get("partial_rotary_factor", 1.0) != 1.0 for section in (rope, raw)):
        raise ValueError("partial_rotary_factor is not 1, only whole heads are turned")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "yarn":
        raise ValueError(f"rope_type = {kind!r}, only 'default' and 'yarn' are computed")
    if theta <= 1:
        raise ValueError(f"rope_theta = {theta}, and 'yarn' asks for more than 1")
    context = _whole(raw, "max_position_embeddings")
    whole = {"original": raw.get("original_max_position_embeddings", rope.get("original_max_position_embeddings"))}
    original = _whole(whole, "original", default=context)
    factor = rope.get("factor")
    return theta, Yarn(
        factor=context / original if factor is None else _positive(factor, "factor"),
        original_tokens=original,
        beta_fast=_positive(rope.get("beta_fast") or 32, "beta_fast"),
        beta_slow=_positive(rope.get("beta_slow") or 1, "beta_slow"),
        truncate=_flag(rope, "truncate", default=True),
        **{ours: None if not rope.get(theirs) else _positive(rope[theirs], theirs) for ours, theirs in _YARN.items()},
    )


def _written_rope(c: ModelConfig) -> dict[str, Any]:
    if c.yarn is None:
        return {"rope_theta": c.rope_theta, "rope_parameters": {"rope_theta": c.rope_theta, "rope_type": "default"}}
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": c.yarn.factor,
        "original_max_position_embeddings": c.yarn.original_tokens,
        "beta_fast": c.yarn.beta_fast,
        "beta_slow": c.yarn.beta_slow,
        **{theirs: getattr(c.yarn, ours) for ours, theirs in _YARN.items() if getattr(c.yarn, ours) is not None},
    }
    if not c.yarn.truncate:
        scaling["truncate"] = False
    both = {"rope_parameters": {"rope_theta": c.rope_theta, **scaling}, "rope_scaling": {"type": "yarn", **scaling}}
    return {"rope_theta": c.rope_theta, **both}


# values


def _wholes(raw: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, int]:
    found = {ours: _whole(raw, theirs) for ours, theirs in keys.items()}
    limits = {"context_tokens": MAX_CONTEXT_TOKENS, "num_layers": MAX_LAYERS, "num_experts": MAX_EXPERTS}
    for ours, limit in limits.items():
        if found.get(ours, 0) > limit:
            raise ValueError(f"{keys[ours]} = {found[ours]} is past {limit}")
    return found


def _whole(raw: Mapping[str, Any], key: str, *, default: int | None = None) -> int:
    value = default if raw.get(key) is None else raw[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{key} = {value!r}, expected a whole number of at least 1")
    return value


def _flag(raw: Mapping[str, Any], key: str, *, default: bool) -> bool:
    value = default if raw.get(key) is None else raw[key]
    if not isinstance(value, bool):
        raise ValueError(f"{key} = {value!r}, expected true or false")
    return value


def _positive(value: Any, key: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError(f"{key} = {value!r}, expected a positive number")
    return float(value)
