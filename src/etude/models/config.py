"""The sizes of a model. Torch-free: a config can be read where no model will be built.

One class for every family that is computed (`parts.Family`); what they differ in are its parts. `families` writes and
reads them as Hugging Face's config.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from etude.config import ranged
from etude.errors import ConfigError
from etude.models import families
from etude.models.families import MAX_CONTEXT_TOKENS, MAX_EXPERTS, MAX_LAYERS
from etude.models.parts import Family, Kept, Latent, Routing, Scores, Yarn
from etude.records.completion import route_dtype


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
    family: Family = Family.QWEN3_MOE
    dense_layers: tuple[int, ...] = ()  # those without a router
    dense_size: int = ranged(0, low=0)  # their width; 0: an expert's
    num_shared: int = ranged(0, low=0)  # experts that every token passes
    routing: Routing = field(default_factory=Routing)
    latent: Latent | None = None  # None: grouped queries
    yarn: Yarn | None = None  # None: plain rotary positions

    def __post_init__(self) -> None:
        self._check_attention()
        self._check_experts()

    def _check_attention(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads = {self.num_heads} is no multiple of num_kv_heads = {self.num_kv_heads}")
        if self.head_dim < 2 or self.rope_dim % 2:
            raise ValueError(f"head_dim = {self.head_dim}, but rotary positions turn pairs")
        if (self.latent is not None) != self.family.is_latent:
            raise ValueError(f"family = {str(self.family)!r} {'wants a' if self.family.is_latent else 'has no'} latent")
        if self.latent is not None and (self.num_kv_heads, self.head_dim) != (self.num_heads, self.latent.head_dim):
            raise ValueError(f"num_kv_heads = {self.num_kv_heads} and head_dim = {self.head_dim} are not the latent's")

    def _check_experts(self) -> None:
        if self.top_k > self.num_experts or (self.num_experts and not self.top_k):
            raise ValueError(f"top_k = {self.top_k} of num_experts = {self.num_experts}")
        if (self.num_experts == 0) != (self.family is Family.QWEN3):
            wants = "num_experts = 0 and top_k = 0" if self.family is Family.QWEN3 else "num_experts > 0"
            raise ValueError(f"family = {str(self.family)!r} with num_experts = {self.num_experts}: it wants {wants}")
        if list(self.dense_layers) != sorted(set(self.dense_layers) & set(range(self.num_layers))):
            raise ValueError(f"dense_layers = {list(self.dense_layers)[:8]}, not some of {self.num_layers} layers")
        if self.family.is_latent and self.dense_layers != tuple(range(len(self.dense_layers))):
            raise ValueError(f"dense_layers = {list(self.dense_layers)[:8]}, but this family's are the first ones")
        if (self.routing.scores is Scores.SIGMOID) != self.family.is_latent:
            raise ValueError(f"routing.scores = {str(self.routing.scores)!r} is not of family {str(self.family)!r}")
        if not self.family.is_latent and (self.num_shared or self.routing != Routing(normalise=self.routing.normalise)):
            raise ValueError(f"family = {str(self.family)!r} has no shared experts, scaling or groups")
        if self.family.is_latent and not self.num_shared:
            raise ValueError(f"family = {str(self.family)!r} has a shared expert or more, num_shared = 0")
        self.routing.check(self.num_experts, self.top_k)

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
    def kept(self) -> Kept:
        """What an engine's cache keeps of a token."""
        if self.latent is None:
            return Kept(heads=self.num_kv_heads, key_width=self.head_dim, value_width=self.head_dim, shared=False)
        rank = self.latent.kv_rank
        return Kept(heads=1, key_width=rank + self.latent.rope_dim, value_width=rank, shared=True)

    @property
    def num_parameters(self) -> int:
        """All parameters, without the biases that only choosing sees."""
        d, dense = self.hidden_size, self.num_layers - self.num_moe_layers
        experts = d * (self.num_experts * (3 * self.expert_size + 1) + 3 * self.num_shared * self.expert_size)
        embeddings = self.vocab_size * d * (1 if self.tie_embeddings else 2)
        blocks = self.num_layers * (self._attention_parameters + 2 * d)
        return blocks + self.num_moe_layers * experts + dense * 3 * d * self.dense_width + embeddings + d

    @property
    def _attention_parameters(self) -> int:
        at, d, heads = self.latent, self.hidden_size, self.num_heads
        if at is None:
            return self.head_dim * d * (2 * heads + 2 * self.num_kv_heads) + 2 * self.head_dim
        queries = heads * at.head_dim
        asked = queries * d if at.q_rank is None else at.q_rank * (d + 1 + queries)
        kept = (at.kv_rank + at.rope_dim) * d + at.kv_rank * (1 + heads * (at.nope_dim + at.value_dim))
        return asked + kept + d * heads * at.value_dim

    @property
    def products(self) -> set[tuple[int, int]]:
        """(out, in) of every matrix product; what a parity class is told by."""
        d = self.hidden_size
        found = {(self.vocab_size, d)} | self._attention_products
        if self.num_moe_layers:
            found |= {(self.num_experts, d), (2 * self.expert_size, d), (d, self.expert_size)}
        widths = {self.num_shared * self.expert_size}
        if self.num_moe_layers < self.num_layers:
            widths.add(self.dense_width)
        return found | {pair for width in widths if width for pair in ((2 * width, d), (d, width))}

    @property
    def _attention_products(self) -> set[tuple[int, int]]:
        at, d, heads = self.latent, self.hidden_size, self.num_heads
        if at is None:
            return {((heads + 2 * self.num_kv_heads) * self.head_dim, d), (d, heads * self.head_dim)}
        queries, kept = heads * at.head_dim, at.kv_rank + at.rope_dim
        first = {(queries + kept, d)} if at.q_rank is None else {(at.q_rank + kept, d), (queries, at.q_rank)}
        absorbed = {(at.kv_rank, at.nope_dim), (at.value_dim, at.kv_rank)}
        return first | absorbed | {(heads * (at.nope_dim + at.value_dim), at.kv_rank), (d, heads * at.value_dim)}

    def shared(self, degree: int) -> ModelConfig:
        """The sizes of one of so many tensor-parallel ranks: its heads, and its part of each width between. Raises
        `ConfigError`."""
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
        return families.write(self)

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """From a Hugging Face config.json. Raises `CheckpointError` that names what is not computed."""
        return families.read(raw, cls)
