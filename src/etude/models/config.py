"""The sizes of a model, and their Hugging Face form. Torch-free: a config can be read where no model will be built.

One architecture: the Qwen3-MoE decoder (grouped-query attention with per-head QK-norm, rotary positions, a
mixture of experts in every layer with normalised top-k gates). Anything else is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from etude.config import ranged
from etude.errors import CheckpointError
from etude.records.completion import MAX_EXPERTS, route_dtype

_ARCHITECTURE = "Qwen3MoeForCausalLM"

MAX_CONTEXT_TOKENS = 1 << 20
"""Bounds the rotary tables that a config can make us allocate."""

_SIZES = {  # our name -> Hugging Face's
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "expert_size": "moe_intermediate_size",
    "num_experts": "num_experts",
    "top_k": "num_experts_per_tok",
    "context_tokens": "max_position_embeddings",
}

_FIXED: dict[str, tuple[Any, Any]] = {  # key -> (the only value we compute, Hugging Face's default)
    "hidden_act": ("silu", "silu"),
    "norm_topk_prob": (True, False),
    "attention_bias": (False, False),
    "use_sliding_window": (False, False),
    "decoder_sparse_step": (1, 1),
    "mlp_only_layers": ([], []),
}


@dataclass(frozen=True)
class Kept:
    """What a cache keeps of one token in one layer."""

    heads: int  # G
    key_width: int  # A
    value_width: int  # B
    shared: bool  # a value is the first B numbers of its key: kept once


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a Qwen3-MoE decoder; the defaults are the laptop example's.

    >>> ModelConfig().num_parameters
    1527872
    >>> ModelConfig.from_hf(ModelConfig(num_layers=5).to_hf()).num_layers
    5
    """

    vocab_size: int = ranged(768, low=1)
    hidden_size: int = ranged(128, low=1)
    num_layers: int = ranged(3, low=1)
    num_heads: int = ranged(4, low=1)
    num_kv_heads: int = ranged(2, low=1)
    head_dim: int = ranged(32, low=2)
    expert_size: int = ranged(128, low=1)
    num_experts: int = ranged(8, low=1, high=MAX_EXPERTS)
    top_k: int = ranged(2, low=1)
    rope_theta: float = ranged(10_000.0, low=1.0)
    rms_eps: float = ranged(1e-6, low=0.0)
    tie_embeddings: bool = False
    context_tokens: int = ranged(1024, low=1, high=MAX_CONTEXT_TOKENS)

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads = {self.num_heads} is no multiple of num_kv_heads = {self.num_kv_heads}")
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k = {self.top_k} exceeds num_experts = {self.num_experts}")
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim = {self.head_dim}, but rotary positions turn pairs")

    @property
    def num_parameters(self) -> int:
        """All parameters."""
        attention = self.head_dim * self.hidden_size * (2 * self.num_heads + 2 * self.num_kv_heads) + 2 * self.head_dim
        experts = self.num_experts * self.hidden_size * (3 * self.expert_size + 1)
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return self.num_layers * (attention + experts + 2 * self.hidden_size) + embeddings + self.hidden_size

    @property
    def kept(self) -> Kept:
        """What an engine's cache keeps of a token."""
        return Kept(heads=self.num_kv_heads, key_width=self.head_dim, value_width=self.head_dim, shared=False)

    @property
    def num_moe_layers(self) -> int:
        """Layers that have a router: the second dimension of routes, [T, MoE layers, top_k]."""
        return self.num_layers

    @property
    def route_dtype(self) -> str:
        """numpy's name of a route's dtype; its largest value says that a route is missing, and is no expert's."""
        return route_dtype(self.num_experts).__name__

    @property
    def products(self) -> set[tuple[int, int]]:
        """(out, in) of every matrix product; what `numerics.check_row_invariance` takes."""
        d, attention = self.hidden_size, self.num_heads * self.head_dim
        return {
            (attention + 2 * self.num_kv_heads * self.head_dim, d),
            (d, attention),
            (self.num_experts, d),
            (2 * self.expert_size, d),
            (d, self.expert_size),
            (self.vocab_size, d),
        }

    def to_hf(self) -> dict[str, Any]:
        """The content of a Hugging Face config.json."""
        return {
            "architectures": [_ARCHITECTURE],
            "model_type": "qwen3_moe",
            **{theirs: getattr(self, ours) for ours, theirs in _SIZES.items()},
            "head_dim": self.head_dim,
            "intermediate_size": self.expert_size,
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
            "rms_norm_eps": self.rms_eps,
            "tie_word_embeddings": self.tie_embeddings,
            **{key: ours for key, (ours, _) in _FIXED.items()},
            "attention_dropout": 0.0,
            "use_cache": True,
        }

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """From a Hugging Face config.json. Raises `CheckpointError` for anything that is not a Qwen3-MoE."""
        _check_architecture(raw)
        raw = {**raw, "num_experts": raw.get("num_experts", raw.get("num_local_experts"))}
        try:
            sizes = {ours: _whole(raw, theirs) for ours, theirs in _SIZES.items()}
            head_dim = raw.get("head_dim") or sizes["hidden_size"] // sizes["num_heads"]
            if sizes["num_experts"] > MAX_EXPERTS:
                raise ValueError(f"num_experts = {sizes['num_experts']}, at most {MAX_EXPERTS} fit a two-byte route")
            if sizes["context_tokens"] > MAX_CONTEXT_TOKENS:
                raise ValueError(f"max_position_embeddings = {sizes['context_tokens']} is past {MAX_CONTEXT_TOKENS}")
            return cls(
                **sizes,
                head_dim=int(head_dim),
                rope_theta=_rope_theta(raw),
                rms_eps=_positive(raw.get("rms_norm_eps", 1e-6), "rms_norm_eps"),
                tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
            )
        except (TypeError, ValueError, ZeroDivisionError) as error:
            raise CheckpointError(
                "config.json does not describe a Qwen3-MoE", str(error), hint="compare it with one that etude exports"
            ) from None


def _check_architecture(raw: Mapping[str, Any]) -> None:
    if raw.get("model_type") != "qwen3_moe":
        names = raw.get("architectures")
        listed = names[0] if isinstance(names, list) and names else None
        name = listed if listed not in (None, _ARCHITECTURE) else raw.get("model_type") or "unnamed"
        raise CheckpointError(
            f"a checkpoint of architecture {name}",
            f"this build computes {_ARCHITECTURE} (model_type qwen3_moe) only",
            hint="start from a Qwen3-MoE checkpoint, or from nothing with mid-training",
        )
    for key, (ours, default) in _FIXED.items():
        found = default if raw.get(key) is None else raw[key]
        if found != ours:
            raise CheckpointError(
                f"a Qwen3-MoE variant with {key} = {found!r}",
                f"this build computes {key} = {ours!r} only",
                hint="use a checkpoint of the common layout",
            )


def _whole(raw: Mapping[str, Any], key: str) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{key} = {value!r}, expected a whole number of at least 1")
    return value


def _rope_theta(raw: Mapping[str, Any]) -> float:
    """`rope_parameters` (transformers 5) or `rope_theta` (4); scaled variants are refused."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise ValueError(f"rope_parameters = {rope!r}, expected a section")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ValueError(f"rope_type = {kind!r}, only 'default' is computed")
    return _positive(rope.get("rope_theta", raw.get("rope_theta", 10_000.0)), "rope_theta")


def _positive(value: Any, key: str) -> float:
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{key} = {value!r}, expected a positive number")
    return float(value)
