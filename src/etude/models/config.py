"""Model sizes (`ModelConfig`) and model families (`ModelFamily`). Torch-free.

One `ModelConfig` serves all families; the parts in which they differ are in `components`. A `ModelFamily` converts
between a `ModelConfig` and Hugging Face's config.json, and defines the layers and the names of the tensors.
`family_lookup` finds one by its name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, ClassVar

from etude.config import ranged
from etude.errors import CheckpointError, ConfigError
from etude.models.components import (
    AttentionKind,
    CacheLayout,
    ClampedSwiglu,
    GatedDelta,
    GroupedQueries,
    Latent,
    Llama3,
    QkNorm,
    Routing,
    Scores,
    Shape,
    Yarn,
)
from etude.models.config_json import (
    MAX_CONTEXT_TOKENS,
    MAX_EXPERTS,
    MAX_LAYERS,
    MAX_MTP_HEADS,
    MTP_KEY,
    boolean,
    check_rope,
    head_dim,
    mtp_heads,
    partial_rotary,
    positive_float,
    positive_ints,
    read_rope,
    rotary_share,
    write_rope,
)
from etude.models.family_lookup import FAMILIES, FAMILY_NAMES, family_for, family_of, text_config
from etude.models.quantised_storage import check_scheme
from etude.records.completion import route_dtype

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
"""The key of config.json with the width of dense layers."""
FIXED: dict[str, tuple[Any, Any]] = {"hidden_act": ("silu", "silu"), "attention_bias": (False, False)}
OPTIONS: dict[str, Any] = {
    "attention_bias": False,
    "qk_norm": True,
    "rotary_dim": 0,
    "sliding_window": 0,
    "sliding_layers": (),
    "swiglu": None,
    "linear": None,
    "linear_layers": (),
    "mtp_heads": 0,
}
"""The fields of `ModelConfig` that only some families have (`ModelFamily.options`), with the value in all others."""


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a decoder model. The defaults are those of the laptop example, a Qwen3-MoE.

    - `num_kv_heads`, `head_dim`: with latent attention, these must equal `num_heads`, and `latent.nope_dim +
      latent.rope_dim`.
    - `expert_size`: the intermediate width of an expert. `num_experts`: 0 in a family without routers; then `top_k` is
      0.
    - `family`: one of `FAMILY_NAMES`, or the import path of a user's family.
    - `dense_layers`: indices of layers without a router. `dense_size`: their intermediate width; 0: `expert_size`.
    - `num_shared`: shared experts, which every token uses.
    - `latent`: sizes of latent attention; None: grouped-query attention.
    - `yarn`, `llama3`: RoPE's extension to longer contexts; None: plain RoPE.
    - `attention_bias`, `qk_norm`: biases of the projections to queries, keys and values, and norms of queries and keys,
      in families where they are optional.
    - `rotary_dim`: how many numbers of a head RoPE rotates, in families where it is not all of them; 0: all.
    - `sliding_layers`: indices of layers in which a token attends only to the last `sliding_window` tokens, itself
      included.
    - `swiglu`: the experts' activation; None: SwiGLU.
    - `linear`: sizes of gated delta layers, a kind of linear attention. `linear_layers`: their indices; the other
      layers have attention.
    - `mtp_heads`: multi-token prediction heads (arXiv 2412.19437, §2.2), in families that have them. Each is one more
      layer, which predicts one token further. Logits, routes and `num_parameters` do not depend on them.

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
    num_kv_heads: int = ranged(2, low=1)
    head_dim: int = ranged(32, low=2)
    expert_size: int = ranged(128, low=1)
    num_experts: int = ranged(8, low=0, high=MAX_EXPERTS)
    top_k: int = ranged(2, low=0)
    rope_theta: float = ranged(10_000.0, low=1.0)
    rms_eps: float = ranged(1e-6, low=0.0)
    tie_embeddings: bool = False
    context_tokens: int = ranged(1024, low=1, high=MAX_CONTEXT_TOKENS)
    family: str = field(default="qwen3_moe", metadata={"plugin": True})
    dense_layers: tuple[int, ...] = ()
    dense_size: int = ranged(0, low=0)
    num_shared: int = ranged(0, low=0)
    routing: Routing = field(default_factory=Routing)
    latent: Latent | None = None
    yarn: Yarn | None = None
    llama3: Llama3 | None = None
    attention_bias: bool = False
    qk_norm: bool = True
    rotary_dim: int = ranged(0, low=0)
    sliding_window: int = ranged(0, low=0)
    sliding_layers: tuple[int, ...] = ()
    swiglu: ClampedSwiglu | None = None
    linear: GatedDelta | None = None
    linear_layers: tuple[int, ...] = ()
    mtp_heads: int = ranged(0, low=0, high=MAX_MTP_HEADS)

    def __post_init__(self) -> None:
        family = self.architecture  # checks the name
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads = {self.num_heads} is not a multiple of num_kv_heads = {self.num_kv_heads}")
        if self.head_dim < 2 or self.rope_dim % 2:
            raise ValueError(
                f"head_dim = {self.head_dim}, of which RoPE rotates {self.rope_dim}: that must be even and at least 2"
            )
        if self.rotary_dim >= self.head_dim:
            raise ValueError(f"rotary_dim = {self.rotary_dim}: expected less than head_dim = {self.head_dim}; 0: all")
        if self.llama3 is not None and self.yarn is not None:
            raise ValueError("`llama3` and `yarn` are both set, and RoPE has one scaling: leave one of them out")
        for name, usual in OPTIONS.items():
            if getattr(self, name) != usual and name not in family.options:
                raise ValueError(f"{name} = {getattr(self, name)}, but in family {family.name!r} it is always {usual}")
        if self.latent is not None and (self.num_kv_heads, self.head_dim) != (self.num_heads, self.latent.head_dim):
            raise ValueError(
                f"num_kv_heads = {self.num_kv_heads}, head_dim = {self.head_dim}:"
                f" `latent` needs {self.num_heads} (num_heads) and {self.latent.head_dim} (nope_dim + rope_dim)"
            )
        if self.top_k > self.num_experts or (self.num_experts and not self.top_k):
            raise ValueError(
                f"top_k = {self.top_k}, num_experts = {self.num_experts}:"
                " top_k must be from 1 to num_experts, or 0 if there are no experts"
            )
        for name in ("dense_layers", "sliding_layers", "linear_layers"):
            listed = getattr(self, name)
            if list(listed) != sorted(set(listed) & set(range(self.num_layers))):
                raise ValueError(
                    f"{name} = {list(listed)[:8]}: list indices from 0 to {self.num_layers - 1}, ascending"
                )
        if bool(self.sliding_layers) != bool(self.sliding_window):
            raise ValueError(
                f"sliding_window = {self.sliding_window}, sliding_layers = {list(self.sliding_layers)[:8]}:"
                " set both, or none of them"
            )
        if bool(self.linear_layers) != (self.linear is not None):
            raise ValueError(
                f"linear_layers = {list(self.linear_layers)[:8]}, but `linear` is"
                f" {'set' if self.linear else 'not set'}: set both, or none of them"
            )
        self.routing.check(self.num_experts, self.top_k)
        family.check(self)

    @property
    def architecture(self) -> ModelFamily:
        """The model's family. Raises `ConfigError` for an unknown family, and `PluginRefused` for a plug-in that cannot
        be used."""
        return family_of(self.family)

    @property
    def attention(self) -> AttentionKind:
        """The kind of attention: its weight shapes and its layer class. In a model with gated delta layers, that of the
        other layers."""
        return self.architecture.attention(self)

    def attention_of(self, layer: int) -> AttentionKind:
        """Return the kind of attention of a layer, which may be a gated delta layer."""
        return self.linear if self.linear is not None and layer in self.linear_layers else self.attention

    @property
    def undivided(self) -> str:
        """The reason why tensor-parallel ranks cannot divide the layers, for an error message; "" where they can."""
        return self.attention.undivided or (self.linear.undivided if self.linear is not None else "")

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers with a router."""
        dense = set(self.dense_layers)
        return tuple(i for i in range(self.num_layers) if i not in dense) if self.num_experts else ()

    def has_router(self, layer: int) -> bool:
        """Return whether a layer has a router. MTP heads, the layers from `num_layers` on, have one if the model has
        experts."""
        return bool(self.num_experts) and layer not in self.dense_layers

    @property
    def num_moe_layers(self) -> int:
        """The number of layers with a router: the second dimension of routes, [T, MoE layers, top_k]."""
        return len(self.moe_layers)

    @property
    def route_dtype(self) -> str:
        """numpy's name of the dtype of routes (expert indices). The dtype's largest value marks a missing route."""
        return route_dtype(self.num_experts).__name__

    @property
    def dense_width(self) -> int:
        """The intermediate width of layers without a router."""
        return self.dense_size or self.expert_size

    def extended(self, factor: float) -> ModelConfig:
        """Return this config with a context that is `factor` times as long, by YaRN; with factor 1 this config itself.

        Raises `ConfigError` if RoPE is scaled already, or the context becomes too long."""
        if factor == 1.0:
            return self
        if self.yarn is not None or self.llama3 is not None:
            facts = f"it has {'YaRN' if self.yarn is not None else 'llama3 scaling'}, and RoPE has one scaling"
            hint = "leave out rope_factor, or start from a checkpoint without RoPE scaling"
            raise ConfigError(f"the model's context cannot be extended by rope_factor = {factor:g}", facts, hint=hint)
        context_tokens = int(self.context_tokens * factor)
        if context_tokens > MAX_CONTEXT_TOKENS:
            facts = f"{context_tokens:,} tokens, the limit is {MAX_CONTEXT_TOKENS:,}"
            raise ConfigError(f"rope_factor = {factor:g} makes too long a context", facts, hint="give a smaller one")
        yarn = Yarn(factor=factor, original_tokens=self.context_tokens)
        return replace(self, context_tokens=context_tokens, yarn=yarn)

    def with_mtp_heads(self, number: int) -> ModelConfig:
        """Return this config with `number` MTP heads. Raises `ConfigError` in a family without such heads."""
        if number and "mtp_heads" not in self.architecture.options:
            families = ", ".join(name for name in FAMILY_NAMES if "mtp_heads" in family_of(name).options)
            raise ConfigError(
                f"a model of family {self.family} cannot have MTP heads",
                f"families with such heads: {families}",
                hint="set mtp_heads = 0",
            )
        return replace(self, mtp_heads=number)

    @property
    def rope_dim(self) -> int:
        """The width of the part of a head to which rotary positions apply."""
        return (self.rotary_dim or self.head_dim) if self.latent is None else self.latent.rope_dim

    @property
    def softmax_scale(self) -> float:
        """The factor of the attention logits before the softmax."""
        sharper = self.yarn.softmax_scale if self.yarn is not None and self.latent is not None else 1.0
        return float(self.head_dim**-0.5 * sharper)

    @property
    def cache_layout(self) -> CacheLayout:
        """The layout of an engine's KV cache for each token and layer."""
        return self.attention.cache_layout(self)

    @property
    def value_dim(self) -> int:
        """The width of a head's value."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def num_parameters(self) -> int:
        """The number of parameters, without router biases and MTP heads."""
        d, dense = self.hidden_size, self.num_layers - self.num_moe_layers
        embeddings = self.vocab_size * d * (1 if self.tie_embeddings else 2)
        layers = self.num_moe_layers * self._mlp_parameters(router=True) + dense * self._mlp_parameters(router=False)
        number = len(self.linear_layers)
        layers += (self.num_layers - number) * _numbers(self.attention.shapes(self))
        layers += number * _numbers(self.linear.shapes(self)) if self.linear is not None else 0
        return layers + embeddings + d

    @property
    def mtp_parameters(self) -> int:
        """The number of parameters of the MTP heads, without router biases."""
        d = self.hidden_size
        layer = self._mlp_parameters(router=bool(self.num_experts)) + _numbers(self.attention.shapes(self))
        return self.mtp_heads * (layer + 2 * d * d + 3 * d)

    def _mlp_parameters(self, *, router: bool) -> int:
        """Return the parameters of a layer without its attention: MLP or experts, and norms."""
        d = self.hidden_size
        common = 2 * d
        if not router:
            return common + 3 * d * self.dense_width
        experts = d * (self.num_experts * (3 * self.expert_size + 1) + 3 * self.num_shared * self.expert_size)
        if self.architecture.expert_bias:
            experts += self.num_experts * (2 * self.expert_size + d + 1)
        return common + experts + (d if self.architecture.shared_gate else 0)

    @property
    def product_shapes(self) -> set[tuple[int, int]]:
        """The shapes (out, in) of all matrix products of the model.

        Whether two machines compute equal bits (`numerics.parity`) depends on them."""
        d = self.hidden_size
        found = {(self.vocab_size, d)} | self.attention.products(self)
        found |= self.linear.products(self) if self.linear is not None else set()
        found |= {(1, d)} if self.architecture.shared_gate else set()
        if self.num_moe_layers:
            found |= {(self.num_experts, d), (2 * self.expert_size, d), (d, self.expert_size)}
        widths = {self.num_shared * self.expert_size}
        if self.num_moe_layers < self.num_layers:
            widths.add(self.dense_width)
        return found | {pair for width in widths if width for pair in ((2 * width, d), (d, width))}

    def per_rank(self, degree: int) -> ModelConfig:
        """Return the sizes of the part of the model that one of `degree` tensor-parallel ranks has.

        Heads and intermediate widths are divided. Raises `ConfigError` where that is not possible."""
        if degree > 1 and (why := self.undivided):
            raise ConfigError(
                f"a model of family {self.family} cannot run on {degree} tensor-parallel ranks",
                why,
                hint="set numerics.degree = 1 and engine.tensor_parallel = 1; the learner can use data or expert "
                "parallelism",
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
                f"the model cannot run on {degree} tensor-parallel ranks",
                f"{', '.join(odd)} cannot be divided by {degree}",
                hint="set engine.tensor_parallel (and numerics.degree) to a divisor of each size",
            )
        return replace(self, **{name: size // degree for name, size in cut.items()})

    def to_hf(self) -> dict[str, Any]:
        """Return the content of a Hugging Face config.json."""
        return self.architecture.to_hf(self)

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Read the content of a Hugging Face config.json.

        Of a model for images and text it is the text model (`ModelFamily.wrappers`). Raises `CheckpointError`, which
        names an unsupported key or architecture."""
        raw = text_config(raw)
        family = family_for(raw)
        check_scheme(raw, stacked=family.stacks_experts)
        return family.from_hf(raw)


class ModelFamily:
    """A family of models, such as Qwen3-MoE: the properties in which it differs from other families.

    To add one, derive from this class, or from a similar family, and override what differs. The base class is a family
    with grouped-query attention and softmax routers. One object serves all models of the family, so it must not store
    anything about a model. It is used in processes without torch. The contract suite is
    `etude.testing.model_family.ModelFamilyContract`."""

    model_type: ClassVar[str]
    """The `model_type` of config.json. It must be unique."""
    hf_class: ClassVar[str]
    """The model class of transformers: the first of config.json's `architectures`."""
    sizes: ClassVar[Mapping[str, str]] = MOE
    """Positive integers of config.json: field of `ModelConfig` → key of config.json."""
    fixed: ClassVar[Mapping[str, tuple[Any, Any]]] = FIXED
    """Keys of config.json with the only supported value and transformers' default. Other values are refused."""
    each: ClassVar[Mapping[str, Any]] = {"layer_types": "full_attention"}
    """Keys of config.json with one value for each layer, and the only supported value."""
    defaults: ClassVar[Mapping[str, Any]] = {}
    """Values of keys that are missing in config.json, where they differ from the defaults of `from_hf`."""
    varies: ClassVar[str] = "norm_topk_prob, tie_word_embeddings"
    """What else may vary, beside sizes and positions. Shown in hints of errors."""
    qk_norm: ClassVar[QkNorm] = QkNorm.HEAD
    """Normalisation of queries and keys in grouped-query attention."""
    qkv_bias: ClassVar[bool] = False
    """Whether the projections to queries, keys and values have biases in every model of the family."""
    expert_bias: ClassVar[bool] = False
    """Whether routers and all projections of experts have biases."""
    stacks_experts: ClassVar[bool] = False
    """Whether a checkpoint has the experts of a layer in one tensor, in gpt-oss's layout with biases
    (`models.stacked_experts`)."""
    scores: ClassVar[Scores] = Scores.SOFTMAX
    """The activation of router logits."""
    shared_gate: ClassVar[bool] = False
    """Whether the output of the shared experts is multiplied by a sigmoid of the token."""
    centred_norms: ClassVar[bool] = False
    """Whether weights of norms are stored as their distance from 1, except those inside gated delta layers."""
    options: ClassVar[frozenset[str]] = frozenset()
    """Which of the fields `OPTIONS` of a `ModelConfig` may vary. `read` returns them."""
    copies_for_mtp: ClassVar[bool] = False
    """Whether a checkpoint has copies of the embedding and the output matrix in each MTP head, as DeepSeek-V3's has.
    They are written again, and not read."""
    plain_stacks: ClassVar[bool] = False
    """Whether a checkpoint may have the experts of a layer in one tensor, [E, out, in], gate before up. They are read,
    and written expert by expert."""
    wrappers: ClassVar[tuple[str, ...]] = ()
    """The `model_type` of models for images and text whose text model is of this family. Their config.json has it as
    `text_config`. Only the text model is read, and checkpoints are written as a text model."""
    wrapped: ClassVar[Mapping[str, str]] = {}
    """How the names of tensors begin in checkpoints of `wrappers` → how they begin in checkpoints of the family."""
    skipped: ClassVar[tuple[str, ...]] = ()
    """How the names of tensors begin that `unused` drops: those of a vision model around the text model, and others
    that etude does not compute."""
    renamed: ClassVar[Mapping[str, str]] = {}
    """Parts of tensor names that differ from etude's: etude's part → this family's part.

    Etude's names are those of Qwen3 and DeepSeek-V3. Each part is replaced wherever it occurs. The bias of a router
    must keep its last part.
    """
    no_external_engines: ClassVar[str] = "was not tested with weights of this family"
    """Why vLLM and SGLang cannot follow a run's weights, as the end of a sentence ("vLLM ..."). Empty where they
    can; `unserved` has reasons that depend on the engine or the model."""
    tiny_sizes: ClassVar[Mapping[str, Any]] = dict(
        vocab_size=24, hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, context_tokens=64
    )
    """Sizes of `tiny`."""

    @property
    def name(self) -> str:
        """The family's name in a config: the name of a module in `models/families`, or an import path."""
        kind = type(self)
        return (
            self.model_type if kind.__module__.startswith(f"{FAMILIES}.") else f"{kind.__module__}:{kind.__qualname__}"
        )

    def unserved(self, c: ModelConfig, engine: str) -> str:
        """Return why `engine` ("vllm" or "sglang") cannot follow the weights of the model `c`; "" if it can.

        The reason is the end of a sentence that begins with the engine's name, as `no_external_engines` is."""
        return self.no_external_engines

    def read(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Read the fields of a `ModelConfig` that `from_hf` does not read for every family.

        `raw`: the content of config.json. Returns field → value. Raises `ValueError` for an unsupported value."""
        key = self.sizes["num_experts"]
        sizes = positive_ints({**raw, key: raw.get(key, raw.get("num_local_experts"))}, self.sizes)
        routing = Routing(self.scores, normalise=boolean(raw, "norm_topk_prob", default=False))
        return {**sizes, "head_dim": head_dim(raw, sizes), "routing": routing}

    def write(self, c: ModelConfig) -> dict[str, Any]:
        """Return the keys of config.json that `read` reads, with the values of the model `c`."""
        sizes = {key: getattr(c, name) for name, key in self.sizes.items()}
        return {**sizes, "head_dim": c.head_dim, "norm_topk_prob": c.routing.normalise}

    def check(self, c: ModelConfig) -> None:
        """Raise `ValueError` for sizes that no model of this family has."""
        self.check_experts(c)
        self.check_plain(c)

    def check_experts(self, c: ModelConfig) -> None:
        """Raise `ValueError` for a model without experts."""
        if not c.num_experts:
            raise ValueError(f"family = {self.name!r} needs num_experts > 0")

    def check_plain(self, c: ModelConfig) -> None:
        """Raise `ValueError` for latent attention, shared experts, or a router with scaling or groups."""
        if c.latent is not None:
            raise ValueError(f"family = {self.name!r} has no latent attention: leave out `latent`")
        if c.num_shared or c.routing != Routing(self.scores, normalise=c.routing.normalise):
            raise ValueError(
                f"family = {self.name!r} supports only num_shared = 0, and of `routing` only the setting `normalise`"
                f" with scores = {str(self.scores)!r}"
            )

    def check_routers(self, c: ModelConfig) -> None:
        """Raise `ValueError` for layers without a router."""
        if c.dense_layers or c.dense_size:
            raise ValueError(f"family = {self.name!r} has a router in every layer: no dense_layers, no dense_size")

    def attention(self, c: ModelConfig) -> AttentionKind:
        """Return the kind of attention of the layers of the model `c`."""
        if c.latent is not None:
            return c.latent
        return GroupedQueries(self.qk_norm if c.qk_norm else QkNorm.NONE, bias=self.qkv_bias or c.attention_bias)

    def unused(self, names: Iterable[str], c: ModelConfig) -> set[str]:
        """Return the names of tensors in a checkpoint that etude does not use. They are dropped, and reported to the
        user.

        `names`: all tensors of the checkpoint."""
        return {name for name in names if name.startswith(self.skipped)} if self.skipped else set()

    def text_name(self, name: str) -> str:
        """Return the name of a tensor of the text model, from its name in a checkpoint of `wrappers`."""
        for begin, own in self.wrapped.items():
            if name.startswith(begin):
                return own + name.removeprefix(begin)
        return name

    def hf_name(self, name: str) -> str:
        """Return the name in this family's checkpoints of the tensor that etude calls `name`."""
        for etude_part, hf_part in self.renamed.items():
            name = name.replace(etude_part, hf_part)
        return name

    def etude_name(self, name: str) -> str:
        """Return etude's name of the tensor that this family's checkpoints call `name`."""
        for etude_part, hf_part in self.renamed.items():
            name = name.replace(hf_part, etude_part)
        return name

    def tiny(self) -> ModelConfig:
        """Return the sizes of a model of this family that is small enough for a test."""
        sizes = {**self.tiny_sizes, "expert_size": 12, "num_experts": 4, "top_k": 2}
        return ModelConfig(**sizes, routing=Routing(self.scores), family=self.name)

    def from_hf(self, raw: Mapping[str, Any]) -> ModelConfig:
        """Read the content of a config.json of this family. Raises `CheckpointError` for an unsupported variant."""
        for error in self.unsupported(raw):
            raise error
        given, raw = raw, {**self.defaults, **raw}
        try:
            check_rope(given)
            fields = {**read_rope(raw), **self.read(raw)}
            if "mtp_heads" in self.options:
                fields["mtp_heads"] = mtp_heads(raw)
            if "rotary_dim" not in self.options and partial_rotary(raw) != 1.0:
                raise ValueError("partial_rotary_factor must be 1")
            return ModelConfig(
                family=self.name,
                rms_eps=positive_float(raw.get("rms_norm_eps", 1e-6), "rms_norm_eps"),
                tie_embeddings=boolean(raw, "tie_word_embeddings", default=False),
                **fields,
            )
        except (TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
            what = f"config.json does not describe a supported {self.model_type}"
            raise CheckpointError(what, str(error), hint=self._may_vary) from None

    def unsupported(self, raw: Mapping[str, Any]) -> Iterator[CheckpointError]:
        """Yield an error for each key of a config.json that is in `fixed` or `each` and has another value."""
        for key, (supported, default) in self.fixed.items():
            found = default if raw.get(key) is None else raw[key]
            if found != supported:
                yield self._unsupported(key, found, repr(supported))
        for key, supported in self.each.items():
            found = raw.get(key) or []
            if not isinstance(found, list) or any(one != supported for one in found):
                yield self._unsupported(key, found, f"{supported!r} for each layer")

    def _unsupported(self, key: str, found: Any, supported: str) -> CheckpointError:
        return CheckpointError(
            f"a {self.model_type} model with {key} = {found!r:.80} is not supported",
            f"etude supports only {key} = {supported}",
            hint=self._may_vary,
        )

    def to_hf(self, c: ModelConfig) -> dict[str, Any]:
        """Return the content of a config.json for the model `c`."""
        share = rotary_share(c.rope_dim, c.head_dim) if "rotary_dim" in self.options else None
        return {
            "architectures": [self.hf_class],
            "model_type": self.model_type,
            **self.write(c),
            WIDTH: c.dense_width,
            **write_rope(c.rope_theta, c.yarn or c.llama3, share),
            "rms_norm_eps": c.rms_eps,
            "tie_word_embeddings": c.tie_embeddings,
            **{key: supported for key, (supported, _) in self.fixed.items()},
            **({MTP_KEY: c.mtp_heads} if "mtp_heads" in self.options else {}),
            "attention_dropout": 0.0,
            "use_cache": True,
        }

    @property
    def _may_vary(self) -> str:
        return f"use a {self.model_type} model; supported variations: sizes, {self.varies}, RoPE: plain, YaRN or llama3"


def _numbers(shapes: Mapping[str, Shape]) -> int:
    return sum(map(prod, shapes.values()))
