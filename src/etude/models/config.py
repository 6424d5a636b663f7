"""The sizes of a model, and what a family of models is. Torch-free: a config can be read where no model will be built.

One `ModelConfig` serves every family; what they differ in are its parts (`parts`). A `ModelFamily` reads and writes it
as Hugging Face's config.json, and says what its layers and the names of its tensors are. The families are the modules
of `models/families`, and classes of the user's own by import path.
"""

from __future__ import annotations

import functools
import importlib
import os
import pkgutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, ClassVar

from etude.config import Plugin, ranged
from etude.errors import CheckpointError, ConfigError, nearest
from etude.models.components import AttentionKind, CacheLayout, GroupedQueries, Latent, QkNorm, Routing, Yarn
from etude.models.config_json import (
    MAX_CONTEXT_TOKENS,
    MAX_EXPERTS,
    MAX_LAYERS,
    boolean,
    head_dim,
    positive_float,
    positive_ints,
    read_rope,
    write_rope,
)
from etude.models.quantised_storage import check_scheme
from etude.plugins import Kind, make
from etude.records.completion import route_dtype

FAMILIES = "etude.models.families"
"""The package with a module for each family."""
FAMILY_NAMES = tuple(sorted(m.name for m in pkgutil.iter_modules([str(Path(__file__).parent / "families")])))
"""The families that come with etude, which are the names of these modules."""
OWN_FAMILIES = "ETUDE_MODEL_FAMILIES"
"""The environment variable with the import paths of the user's own families, separated by commas. One that a config
names is added to it, so that processes which are started from here know it."""
SIZES = {  # a ModelConfig's field -> the key of config.json
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "context_tokens": "max_position_embeddings",
}
MOE = {**SIZES, "expert_size": "moe_intermediate_size", "num_experts": "num_experts", "top_k": "num_experts_per_tok"}
WIDTH = "intermediate_size"
"""The key of config.json with the width of layers without a router."""
FIXED: dict[str, tuple[Any, Any]] = {"hidden_act": ("silu", "silu"), "attention_bias": (False, False)}


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a decoder; the defaults are the laptop example's, a Qwen3-MoE.

    >>> ModelConfig().num_parameters
    1527872
    >>> ModelConfig.from_hf(ModelConfig(num_layers=5).to_hf()).num_layers
    5
    >>> ModelConfig(num_layers=5, dense_layers=(0,)).moe_layers
    (1, 2, 3, 4)
    """

    vocab_size: int = ranged(768, low=1)
    hidden_size: int = ranged(128, low=1)
    num_layers: int = ranged(3, low=1, high=MAX_LAYERS)
    num_heads: int = ranged(4, low=1)
    num_kv_heads: int = ranged(2, low=1)  # of a latent attention: as many as heads
    head_dim: int = ranged(32, low=2)  # of a latent attention: nope_dim + rope_dim
    expert_size: int = ranged(128, low=1)
    num_experts: int = ranged(8, low=0, high=MAX_EXPERTS)  # 0 in a family without routers, and so is top_k
    top_k: int = ranged(2, low=0)
    rope_theta: float = ranged(10_000.0, low=1.0)
    rms_eps: float = ranged(1e-6, low=0.0)
    tie_embeddings: bool = False
    context_tokens: int = ranged(1024, low=1, high=MAX_CONTEXT_TOKENS)
    family: str = field(default="qwen3_moe", metadata={"plugin": True})  # of FAMILY_NAMES, or an import path
    dense_layers: tuple[int, ...] = ()  # those without a router
    dense_size: int = ranged(0, low=0)  # their width; 0: an expert's
    num_shared: int = ranged(0, low=0)  # experts that every token passes
    routing: Routing = field(default_factory=Routing)
    latent: Latent | None = None  # None: grouped queries
    yarn: Yarn | None = None  # None: plain rotary positions

    def __post_init__(self) -> None:
        family = self.architecture  # an unknown one is refused first
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads = {self.num_heads} is no multiple of num_kv_heads = {self.num_kv_heads}")
        if self.head_dim < 2 or self.rope_dim % 2:
            raise ValueError(f"head_dim = {self.head_dim}, but rotary positions turn pairs")
        if self.latent is not None and (self.num_kv_heads, self.head_dim) != (self.num_heads, self.latent.head_dim):
            raise ValueError(f"num_kv_heads = {self.num_kv_heads} and head_dim = {self.head_dim} are not the latent's")
        if self.top_k > self.num_experts or (self.num_experts and not self.top_k):
            raise ValueError(f"top_k = {self.top_k} of num_experts = {self.num_experts}")
        if list(self.dense_layers) != sorted(set(self.dense_layers) & set(range(self.num_layers))):
            raise ValueError(f"dense_layers = {list(self.dense_layers)[:8]}, not some of {self.num_layers} layers")
        self.routing.check(self.num_experts, self.top_k)
        family.check(self)

    @property
    def architecture(self) -> ModelFamily:
        """The family of `family`. Raises `ConfigError` for an unknown one."""
        return family_of(self.family)

    @property
    def attention(self) -> AttentionKind:
        """The sizes of its attention, and the layer that computes it."""
        return self.architecture.attention(self)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The layers that have a router."""
        dense = set(self.dense_layers)
        return tuple(i for i in range(self.num_layers) if i not in dense) if self.num_experts else ()

    @property
    def num_moe_layers(self) -> int:
        """Layers that have a router: the second dimension of routes, [T, MoE layers, top_k]."""
        return len(self.moe_layers)

    @property
    def route_dtype(self) -> str:
        """numpy's name of a route's dtype; its largest value says that a route is missing, and is no expert's."""
        return route_dtype(self.num_experts).__name__

    @property
    def dense_width(self) -> int:
        """Width of a layer without a router."""
        return self.dense_size or self.expert_size

    @property
    def rope_dim(self) -> int:
        """Width of what positions turn in a head."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def softmax_scale(self) -> float:
        """What products of queries and keys are multiplied by."""
        sharper = self.yarn.softmax_scale if self.yarn is not None and self.latent is not None else 1.0
        return float(self.head_dim**-0.5 * sharper)

    @property
    def cache_layout(self) -> CacheLayout:
        """What an engine's cache keeps of a token."""
        return self.attention.cache_layout(self)

    @property
    def value_dim(self) -> int:
        """Width of a head's value."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def num_parameters(self) -> int:
        """All parameters, without the biases that only choosing sees."""
        d, dense = self.hidden_size, self.num_layers - self.num_moe_layers
        experts = d * (self.num_experts * (3 * self.expert_size + 1) + 3 * self.num_shared * self.expert_size)
        embeddings = self.vocab_size * d * (1 if self.tie_embeddings else 2)
        blocks = self.num_layers * (sum(map(prod, self.attention.shapes(self).values())) + 2 * d)
        return blocks + self.num_moe_layers * experts + dense * 3 * d * self.dense_width + embeddings + d

    @property
    def products(self) -> set[tuple[int, int]]:
        """(out, in) of every matrix product; what a parity class is told by."""
        d = self.hidden_size
        found = {(self.vocab_size, d)} | self.attention.products(self)
        if self.num_moe_layers:
            found |= {(self.num_experts, d), (2 * self.expert_size, d), (d, self.expert_size)}
        widths = {self.num_shared * self.expert_size}
        if self.num_moe_layers < self.num_layers:
            widths.add(self.dense_width)
        return found | {pair for width in widths if width for pair in ((2 * width, d), (d, width))}

    def per_rank(self, degree: int) -> ModelConfig:
        """The sizes of one of so many tensor-parallel ranks: its heads, and its part of each width between. Raises
        `ConfigError`."""
        if degree > 1 and (why := self.attention.undivided):
            raise ConfigError(
                f"a model of family {self.family} shared by {degree} tensor-parallel ranks",
                why,
                hint="set numerics.degree = 1; ranks that share by data or by experts are possible",
            )
        cut: dict[str, Any] = {
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            **({"expert_size": self.expert_size} if self.num_experts or not self.dense_size else {}),
            **({"dense_size": self.dense_size} if self.dense_size else {}),
        }
        odd = [f"{name} = {size}" for name, size in cut.items() if size % degree]
        if odd:
            raise ConfigError(
                f"a model shared by {degree} tensor-parallel ranks",
                f"{', '.join(odd)} cannot be cut so",
                hint="take fewer ranks, a divisor of each (numerics.degree is the most of them)",
            )
        return replace(self, **{name: size // degree for name, size in cut.items()})

    def to_hf(self) -> dict[str, Any]:
        """The content of a Hugging Face config.json."""
        return self.architecture.to_hf(self)

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """From a Hugging Face config.json. Raises `CheckpointError` that names what is not computed."""
        family = _family_for(raw)
        check_scheme(raw)
        return family.from_hf(raw)


class ModelFamily:
    """What one family of models differs in from the others.

    Derive from this class, or from a family that is near to yours, and override what differs: as it stands it is a
    family of grouped queries and softmax routers. One object serves all models of the family, so it keeps nothing of
    any. It is used where there is no torch. `etude.testing.model_family` has its contract suite.
    """

    model_type: ClassVar[str]
    """Of config.json; no two families have the same."""
    hf_class: ClassVar[str]
    """The class that transformers computes it with, the first of config.json's `architectures`."""
    sizes: ClassVar[Mapping[str, str]] = MOE
    """Whole numbers of at least 1: a `ModelConfig`'s field, and the key of config.json."""
    fixed: ClassVar[Mapping[str, tuple[Any, Any]]] = FIXED
    """Keys of config.json with the only value that is computed, and transformers' default. Another value is refused."""
    defaults: ClassVar[Mapping[str, Any]] = {}
    """What a config.json means that lacks a key, where that is not what `from_hf` takes."""
    varies: ClassVar[str] = "norm_topk_prob, tie_word_embeddings"
    """What may vary beside sizes and positions: for hints."""
    qk_norm: ClassVar[QkNorm] = QkNorm.HEAD
    """Of grouped queries."""
    renamed: ClassVar[Mapping[str, str]] = {}
    """Parts of tensors' names that differ from etude's (which are Qwen3's and DeepSeek-V3's): etude's, then this
    family's. Each is replaced wherever it occurs. A bias for the choice keeps its last part, by which it is known."""
    no_external_engines: ClassVar[str] = "was not tested with weights of this family"
    """Why vLLM and SGLang cannot follow a run's weights, as what such an engine does; empty where they can."""
    tiny_sizes: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 24,
        "hidden_size": 16,
        "num_layers": 2,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 8,
        "context_tokens": 64,
    }

    @property
    def name(self) -> str:
        """What a config calls it: a module's name in `models/families`, or an import path."""
        kind = type(self)
        return (
            self.model_type if kind.__module__.startswith(f"{FAMILIES}.") else f"{kind.__module__}:{kind.__qualname__}"
        )

    def read(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of a `ModelConfig` from a config.json, beside those that `from_hf` reads for every family. Raises
        `ValueError`."""
        key = self.sizes["num_experts"]
        sizes = positive_ints({**raw, key: raw.get(key, raw.get("num_local_experts"))}, self.sizes)
        routing = Routing(normalise=boolean(raw, "norm_topk_prob", default=False))
        return {**sizes, "head_dim": head_dim(raw, sizes), "routing": routing}

    def write(self, c: ModelConfig) -> dict[str, Any]:
        """The keys of config.json that `read` reads."""
        sizes = {theirs: getattr(c, ours) for ours, theirs in self.sizes.items()}
        return {**sizes, "head_dim": c.head_dim, "norm_topk_prob": c.routing.normalise}

    def check(self, c: ModelConfig) -> None:
        """Raises `ValueError` for sizes that no model of this family has."""
        self.check_experts(c)
        self.check_plain(c)

    def check_experts(self, c: ModelConfig) -> None:
        """Raises `ValueError` for a model without experts."""
        if not c.num_experts:
            raise ValueError(f"family = {self.name!r} with num_experts = 0: it wants num_experts > 0")

    def check_plain(self, c: ModelConfig) -> None:
        """Raises `ValueError` for latent attention, shared experts, and other routers than a plain softmax's."""
        if c.latent is not None:
            raise ValueError(f"family = {self.name!r} has no latent")
        if c.num_shared or c.routing != Routing(normalise=c.routing.normalise):
            raise ValueError(f"family = {self.name!r} has no shared experts, sigmoids, scaling or groups")

    def check_routers(self, c: ModelConfig) -> None:
        """Raises `ValueError` for layers without a router."""
        if c.dense_layers or c.dense_size:
            raise ValueError(f"family = {self.name!r} has a router in every layer, no dense_layers and dense_size")

    def attention(self, c: ModelConfig) -> AttentionKind:
        """The kind of attention that its layers have."""
        return GroupedQueries(self.qk_norm) if c.latent is None else c.latent

    def unused(self, names: Iterable[str], c: ModelConfig) -> set[str]:
        """Tensors of a checkpoint that nothing computes, by their names there: they are left out, and reported."""
        return set()

    def hf_name(self, name: str) -> str:
        """The name of a tensor in this family's checkpoints, from etude's."""
        for ours, theirs in self.renamed.items():
            name = name.replace(ours, theirs)
        return name

    def etude_name(self, name: str) -> str:
        """Etude's name of a tensor, from that in this family's checkpoints."""
        for ours, theirs in self.renamed.items():
            name = name.replace(theirs, ours)
        return name

    def tiny(self) -> ModelConfig:
        """A model of this family that is small enough for a test."""
        return ModelConfig(**self.tiny_sizes, expert_size=12, num_experts=4, top_k=2, family=self.name)

    def from_hf(self, raw: Mapping[str, Any]) -> ModelConfig:
        """A model's sizes from a config.json of this family. Raises `CheckpointError`."""
        for key, (ours, default) in self.fixed.items():
            found = default if raw.get(key) is None else raw[key]
            if found != ours:
                raise CheckpointError(
                    f"a {self.model_type} variant with {key} = {found!r}",
                    f"this build computes {key} = {ours!r} only",
                    hint=self._may_vary,
                )
        raw = {**self.defaults, **raw}
        try:
            rope_theta, yarn = read_rope(raw)
            return ModelConfig(
                family=self.name,
                rope_theta=rope_theta,
                yarn=yarn,
                rms_eps=positive_float(raw.get("rms_norm_eps", 1e-6), "rms_norm_eps"),
                tie_embeddings=boolean(raw, "tie_word_embeddings", default=False),
                **self.read(raw),
            )
        except (TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
            what = f"config.json does not describe a {self.model_type} that is computed here"
            raise CheckpointError(what, str(error), hint=self._may_vary) from None

    def to_hf(self, c: ModelConfig) -> dict[str, Any]:
        """The content of a config.json."""
        return {
            "architectures": [self.hf_class],
            "model_type": self.model_type,
            **self.write(c),
            WIDTH: c.dense_width,
            **write_rope(c.rope_theta, c.yarn),
            "rms_norm_eps": c.rms_eps,
            "tie_word_embeddings": c.tie_embeddings,
            **{key: ours for key, (ours, _) in self.fixed.items()},
            "attention_dropout": 0.0,
            "use_cache": True,
        }

    @property
    def _may_vary(self) -> str:
        """What a checkpoint of this family may be, as a hint."""
        return f"take a {self.model_type} that differs in nothing but sizes, {self.varies} and plain or YaRN positions"


@functools.cache
def family_of(name: str) -> ModelFamily:
    """The family with this name: one of `FAMILY_NAMES`, or a plug-in's import path. Raises `ConfigError`,
    `PluginRefused`."""
    if name in FAMILY_NAMES:
        classes = vars(importlib.import_module(f"{FAMILIES}.{name}")).values()
        (built_in,) = (c for c in classes if isinstance(c, type) and c.__module__ == f"{FAMILIES}.{name}")
        family: ModelFamily = built_in()
        return family
    if ":" not in name:
        hint = f'{nearest(name, FAMILY_NAMES)}; a family of your own is "my_package.module:Name"'
        raise ConfigError(f"model.family = {name!r} is unknown", hint=hint)
    family = make(Kind.MODEL_FAMILY, Plugin(name))
    types = {known: known for known in FAMILY_NAMES}
    types |= {make(Kind.MODEL_FAMILY, Plugin(known)).model_type: known for known in own_family_names()}
    if types.get(family.model_type, name) != name:
        raise ConfigError(
            f"the model family {name} has model_type = {family.model_type!r}",
            f"so has the family {types[family.model_type]}",
            hint="give it a model_type of its own, and the same to its checkpoints' config.json",
        )
    os.environ[OWN_FAMILIES] = ",".join(dict.fromkeys([*own_family_names(), name]))
    return family


def own_family_names() -> list[str]:
    """The import paths of the user's own families: those in `OWN_FAMILIES`, and those that a config has named."""
    return [name for name in os.environ.get(OWN_FAMILIES, "").split(",") if name]


def _family_for(raw: Mapping[str, Any]) -> ModelFamily:
    """The family of a config.json. Raises `CheckpointError` that names an unknown architecture."""
    names, kind = raw.get("architectures"), raw.get("model_type")
    listed = names[0] if isinstance(names, list) and names else None
    own = {family_of(name).model_type: name for name in own_family_names()}
    name = kind if kind in FAMILY_NAMES else own.get(kind) if isinstance(kind, str) else None
    family = None if name is None else family_of(name)
    if family is None or (listed is not None and listed != family.hf_class):
        known = [family_of(name) for name in (*FAMILY_NAMES, *own_family_names())]
        classes, types = ", ".join(dict.fromkeys(one.hf_class for one in known)), [one.model_type for one in known]
        raise CheckpointError(
            f"a checkpoint of architecture {listed or kind or 'unnamed'} (model_type {kind})",
            f"this build computes {classes} (model_type {', '.join(types)}) only",
            hint=f"start from a checkpoint of one of these families, or name a family of your own in {OWN_FAMILIES}",
        )
    return family
