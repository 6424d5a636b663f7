"""Components of model families: attention kinds, routing, RoPE scaling. Torch-free.

A family (`config.ModelFamily`) chooses among them. The layers that compute them are in `attention`, `latent` and
`experts`."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

from etude.config import ranged

LATENT_EPS = 1e-6
"""Epsilon of the norms of latents and of an indexer's keys. It does not depend on `rms_norm_eps` in config.json: the
models were trained with it, and transformers uses it, too."""

Shape = tuple[int, ...]


class Sizes(Protocol):
    """The sizes of a model that an attention kind needs (`config.ModelConfig`)."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def num_heads(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...


@dataclass(frozen=True)
class CacheLayout:
    """What a KV cache stores for one token in one layer.

    `heads`: the number of key/value heads. `shared`: a value is the first `value_width` numbers of its key, so only
    keys are stored."""

    heads: int  # G
    key_width: int  # A
    value_width: int  # B
    shared: bool

    @property
    def numbers(self) -> int:
        """The count of numbers that the cache stores for one token in one layer."""
        return self.heads * (self.key_width + (0 if self.shared else self.value_width))


class AttentionKind(Protocol):
    """A kind of attention, such as grouped-query attention: its weight shapes and its layer class."""

    layer: ClassVar[str]
    """Import path of the layer, "package.module:Name": an `nn.Module` and an `attention.AttentionLayer`, constructed
    from a `ModelConfig`, operators and `Parallel`."""

    @property
    def undivided(self) -> str:
        """The reason why tensor-parallel ranks cannot divide its heads, for an error message; "" where they can."""

    def shapes(self, c: Sizes) -> dict[str, Shape]:
        """Return the shape of each weight, by its name under `self_attn`.

        Names of matrices end in `_proj.weight`."""

    def products(self, c: Sizes) -> set[tuple[int, int]]:
        """Return (out, in) of each matrix product of a layer, with the sizes of the model `c`."""

    def cache_layout(self, c: Sizes) -> CacheLayout:
        """Return the layout of an engine's KV cache for each token and layer."""


class QkNorm(enum.StrEnum):
    """Which numbers of queries and keys are RMS-normalised together, before RoPE.

    HEAD: each head separately, with one weight for all heads. WIDTH: all heads together."""

    NONE = "none"
    HEAD = "head"
    WIDTH = "width"


@dataclass(frozen=True)
class GroupedQueries:
    """Grouped-query attention (arXiv 2305.13245).

    `qk_norm`: how queries and keys are normalised. `bias`: whether the projections to queries, keys and values have
    biases. `out_bias`: whether the output projection has one. `sinks`: each query head has a learned logit that is part
    of the softmax's denominator, an attention sink (arXiv 2309.17453, §3.3). `gated`: the projection to queries has as
    many rows again in each head, and the head's output is multiplied by their sigmoid (arXiv 2505.06708)."""

    layer: ClassVar[str] = "etude.models.attention:Attention"
    qk_norm: QkNorm = QkNorm.HEAD
    bias: bool = False
    out_bias: bool = False
    sinks: bool = False
    gated: bool = False

    @property
    def undivided(self) -> str:
        return "queries and keys are normalised over all heads together" if self.qk_norm is QkNorm.WIDTH else ""

    def shapes(self, c: Sizes) -> dict[str, Shape]:
        d, queries, keys = c.hidden_size, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        rows = {"q_proj": queries * (1 + self.gated), "k_proj": keys, "v_proj": keys}
        found: dict[str, Shape] = {f"{name}.weight": (size, d) for name, size in rows.items()}
        if self.bias:
            found |= {f"{name}.bias": (size,) for name, size in rows.items()}
        found |= {"o_proj.weight": (d, queries)} | ({"o_proj.bias": (d,)} if self.out_bias else {})
        found |= {"sinks": (c.num_heads,)} if self.sinks else {}
        return found | {f"{name}.weight": shape for name, shape in self.norms(c).items()}

    def norms(self, c: Sizes) -> dict[str, Shape]:
        """Return the shapes of the norm weights of queries and keys; empty without such norms."""
        if self.qk_norm is QkNorm.NONE:
            return {}
        heads = (1, 1) if self.qk_norm is QkNorm.HEAD else (c.num_heads, c.num_kv_heads)
        return {"q_norm": (heads[0] * c.head_dim,), "k_norm": (heads[1] * c.head_dim,)}

    def products(self, c: Sizes) -> set[tuple[int, int]]:
        queries = c.num_heads * c.head_dim
        rows = queries * (1 + self.gated) + 2 * c.num_kv_heads * c.head_dim
        return {(rows, c.hidden_size), (c.hidden_size, queries)}

    def cache_layout(self, c: Sizes) -> CacheLayout:
        return CacheLayout(heads=c.num_kv_heads, key_width=c.head_dim, value_width=c.head_dim, shared=False)


class Scores(enum.StrEnum):
    """The activation of router logits.

    SIGMOID comes with a bias that affects only the choice of experts (arXiv 2408.15664)."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


@dataclass(frozen=True)
class Routing:
    """The rules by which experts and their gates (weights) are computed from router logits.

    `scores`: the activation of the logits. `normalise`: whether the gates of a token are divided by their sum.
    `scaling`: a factor by which all gates are then multiplied. With groups (arXiv 2412.19437, §2.1.2) only experts of
    the `top_groups` best of `num_groups` groups can be chosen. A group's score is the sum of its two best experts'
    scores."""

    scores: Scores = Scores.SOFTMAX
    normalise: bool = True
    scaling: float = ranged(1.0, low=0.0)
    num_groups: int = ranged(1, low=1)
    top_groups: int = ranged(1, low=1)

    def check(self, num_experts: int, top_k: int) -> None:
        """Raise `ValueError` when the experts cannot be divided into the groups, or the groups have fewer than `top_k`
        experts."""
        if self.num_groups == 1:
            return
        size, rest = divmod(num_experts, self.num_groups)
        if rest or size < 2:
            raise ValueError(f"{num_experts} experts cannot be divided into {self.num_groups} groups of two or more")
        if not top_k <= self.top_groups * size <= num_experts:
            raise ValueError(
                f"top_groups = {self.top_groups}, top_k = {top_k}: there are {self.num_groups} groups of {size}"
                " experts, and `top_groups` of them must have at least `top_k` experts"
            )


@dataclass(frozen=True)
class ClampedSwiglu:
    """The experts' activation in gpt-oss: g · sigmoid(alpha · g) · (u + 1).

    g is the gate, at most `limit`; u is the up projection, from -`limit` to `limit`. Source: transformers'
    `GptOssExperts`."""

    alpha: float = ranged(1.702, low=0.0)
    limit: float = ranged(7.0, low=0.0)

    def __post_init__(self) -> None:
        for name in ("alpha", "limit"):
            if not 1e-3 <= getattr(self, name) <= 1e6:
                raise ValueError(f"swiglu's {name} = {getattr(self, name)!r}, expected from 0.001 to 1000000")


@dataclass(frozen=True)
class Indexer:
    """Sizes of the indexer of DeepSeek-V3.2, which chooses the `top_k` keys to which a token attends.

    Up to a context of `top_k` tokens it chooses all keys, so attention does not depend on it. Its weights are kept, and
    not trained. `heads`, `width`: of its queries. A cache keeps one key of this width for each token, in float32."""

    heads: int = ranged(64, low=1)
    width: int = ranged(128, low=1)
    top_k: int = ranged(2048, low=1)

    def shapes(self, hidden_size: int, q_rank: int) -> dict[str, Shape]:
        """Return the shape of each weight, by its name in the layer."""
        found: dict[str, Shape] = {"wq_b.weight": (self.heads * self.width, q_rank)}
        found |= {"wk.weight": (self.width, hidden_size), "weights.weight": (self.heads, hidden_size)}
        return found | {"k_norm.weight": (self.width,), "k_norm.bias": (self.width,)}


@dataclass(frozen=True)
class Latent:
    """Sizes of multi-head latent attention (MLA; arXiv 2405.04434, §2.1).

    Keys and values of all heads are projections of one latent per token; all heads share one RoPE key.

    - `kv_rank`, `q_rank`: widths of the latents of keys and values, and of queries; `q_rank` None: queries have no
      latent.
    - `nope_dim`: width of the part of a head's query and key without RoPE.
    - `rope_dim`: width of the part of a head's query with RoPE, and of the shared key.
    - `interleaved`: RoPE rotates neighbouring numbers, not the two halves.
    - `indexer`: sizes of the indexer of DeepSeek-V3.2; it needs a `q_rank`."""

    layer: ClassVar[str] = "etude.models.latent:LatentAttention"
    undivided: ClassVar[str] = ""
    kv_rank: int = ranged(64, low=1)
    nope_dim: int = ranged(32, low=1)
    rope_dim: int = ranged(16, low=2)
    value_dim: int = ranged(32, low=1)
    q_rank: int | None = None
    interleaved: bool = True
    indexer: Indexer | None = None

    def __post_init__(self) -> None:
        if self.rope_dim % 2:
            raise ValueError(f"rope_dim = {self.rope_dim}, but RoPE needs an even number")
        if self.q_rank is not None and self.q_rank < 1:
            raise ValueError(f"q_rank = {self.q_rank}, expected at least 1, or none")
        if self.indexer is not None and self.q_rank is None:
            raise ValueError("an indexer needs q_rank, the width of the queries' latent")

    @property
    def head_dim(self) -> int:
        """The width of a head's query."""
        return self.nope_dim + self.rope_dim

    def shapes(self, c: Sizes) -> dict[str, Shape]:
        d, queries = c.hidden_size, c.num_heads * self.head_dim
        found: dict[str, Shape] = {"q_proj": (queries, d)}
        if self.q_rank is not None:
            found = {"q_a_proj": (self.q_rank, d), "q_a_layernorm": (self.q_rank,), "q_b_proj": (queries, self.q_rank)}
        found |= {"kv_a_proj_with_mqa": (self.kv_rank + self.rope_dim, d), "kv_a_layernorm": (self.kv_rank,)}
        found["kv_b_proj"] = (c.num_heads * (self.nope_dim + self.value_dim), self.kv_rank)
        found["o_proj"] = (d, c.num_heads * self.value_dim)
        of_indexer = {} if self.indexer is None or self.q_rank is None else self.indexer.shapes(d, self.q_rank)
        return {f"{name}.weight": shape for name, shape in found.items()} | {
            f"indexer.{name}": shape for name, shape in of_indexer.items()
        }

    def products(self, c: Sizes) -> set[tuple[int, int]]:
        d, heads, kept = c.hidden_size, c.num_heads, self.kv_rank + self.rope_dim
        queries = heads * self.head_dim
        first = {(queries + kept, d)} if self.q_rank is None else {(self.q_rank + kept, d), (queries, self.q_rank)}
        absorbed = {(self.kv_rank, self.nope_dim), (self.value_dim, self.kv_rank)}
        expanded = {(heads * (self.nope_dim + self.value_dim), self.kv_rank), (d, heads * self.value_dim)}
        return first | absorbed | expanded

    def cache_layout(self, c: Sizes) -> CacheLayout:
        return CacheLayout(heads=1, key_width=self.kv_rank + self.rope_dim, value_width=self.kv_rank, shared=True)


@dataclass(frozen=True)
class GatedDelta:
    """Sizes of a gated delta layer: linear attention with a state of fixed size (arXiv 2412.06464), as in Qwen3-Next.

    - `key_heads`, `value_heads`: several consecutive value heads share a key head, and its queries.
    - `key_dim`, `value_dim`: widths of a head's key and query, and of its value. The state of a value head is a matrix
      of `key_dim` × `value_dim` numbers.
    - `kernel`: the tokens that the convolution of queries, keys and values sees.
    - `by_head`: whether the rows of a key head are adjacent in the first projection, as in Qwen3-Next, which has two
      matrices, `qkvz` and `ba`. Otherwise there are four, `qkv`, `z`, `b` and `a`, as in Qwen3.5."""

    layer: ClassVar[str] = "etude.models.gated_delta:GatedDeltaLayer"
    undivided: ClassVar[str] = "ranks cannot divide the heads of its gated delta layers"
    key_heads: int = ranged(2, low=1)
    value_heads: int = ranged(4, low=1)
    key_dim: int = ranged(16, low=1)
    value_dim: int = ranged(16, low=1)
    kernel: int = ranged(4, low=2, high=64)
    by_head: bool = True

    def __post_init__(self) -> None:
        if self.value_heads % self.key_heads:
            raise ValueError(f"value_heads = {self.value_heads} is not a multiple of key_heads = {self.key_heads}")

    @property
    def channels(self) -> int:
        """The width of queries, keys and values of all heads, which the convolution mixes over time."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def inward(self) -> dict[str, int]:
        """The rows of each matrix of the first projection, by its name."""
        values, gates = self.value_heads * self.value_dim, self.value_heads
        if self.by_head:
            return {"in_proj_qkvz": self.channels + values, "in_proj_ba": 2 * gates}
        return {"in_proj_qkv": self.channels, "in_proj_z": values, "in_proj_b": gates, "in_proj_a": gates}

    def shapes(self, c: Sizes) -> dict[str, Shape]:
        found: dict[str, Shape] = {f"{name}.weight": (rows, c.hidden_size) for name, rows in self.inward.items()}
        found |= {"conv1d.weight": (self.channels, 1, self.kernel)}
        found |= dict.fromkeys(("dt_bias", "A_log"), (self.value_heads,))
        found["norm.weight"] = (self.value_dim,)
        found["out_proj.weight"] = (c.hidden_size, self.value_heads * self.value_dim)
        return {f"linear.{name}": shape for name, shape in found.items()}

    def products(self, c: Sizes) -> set[tuple[int, int]]:
        values = self.value_heads * self.value_dim
        return {(sum(self.inward.values()), c.hidden_size), (c.hidden_size, values)}

    def cache_layout(self, c: Sizes) -> CacheLayout:
        """Return the layout of a cache that stores nothing for a token: the state is `state_shapes`."""
        return CacheLayout(heads=0, key_width=0, value_width=0, shared=True)

    def state_shapes(self) -> tuple[Shape, ...]:
        """Return the shapes of what a sequence keeps in a layer, float32: the latest inputs of the convolution, and the
        states of the heads."""
        return (self.kernel - 1, self.channels), (self.value_heads, self.key_dim, self.value_dim)


@dataclass(frozen=True)
class Yarn:
    """YaRN: RoPE for longer contexts than in pre-training (arXiv 2309.00071), as transformers computes it.

    The fields are those of config.json's `rope_scaling`; `original_tokens` is its `original_max_position_embeddings`.
    YaRN makes the softmax sharper by a factor of cosine and sine, `attention_factor`; None: it is computed from
    `factor`, `mscale` and `mscale_all_dim`. DeepSeek's models change the softmax scale instead (`mscale_all_dim`), so
    their `attention_factor` is 1."""

    factor: float = ranged(4.0, low=1.0)
    original_tokens: int = ranged(4096, low=1)
    beta_fast: float = ranged(32.0, low=0.0)
    beta_slow: float = ranged(1.0, low=0.0)
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        for name in ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor"):
            value = getattr(self, name)
            if value is not None and not 1e-3 <= value <= 1e6:
                raise ValueError(f"yarn's {name} = {value!r}, expected from 0.001 to 1000000")

    @property
    def table_scale(self) -> float:
        """The factor by which RoPE's cosines and sines are multiplied."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._sharper(self.mscale) / self._sharper(self.mscale_all_dim)
        return self._sharper(1.0)

    @property
    def softmax_scale(self) -> float:
        """The factor by which the softmax scale is multiplied; 1 except in DeepSeek's models."""
        return self._sharper(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def _sharper(self, mscale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0

    def interpolated(self, rope_dim: int, theta: float) -> list[float]:
        """Return a number from 0.0 to 1.0 for each of the rope_dim / 2 frequencies: 0.0 means that it is not changed,
        1.0 that it is divided by `factor`."""

        def turns(rotations: float) -> float:
            """Return the dimension with this number of rotations within the original context."""
            return rope_dim * math.log(self.original_tokens / (rotations * 2 * math.pi)) / (2 * math.log(theta))

        low, high = turns(self.beta_fast), turns(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rope_dim - 1)
        if low == high:
            high += 0.001
        return [min(max((i - low) / (high - low), 0.0), 1.0) for i in range(rope_dim // 2)]


@dataclass(frozen=True)
class Llama3:
    """RoPE of Llama 3.1 for longer contexts than in pre-training, as transformers computes it (`rope_type` "llama3").

    With n = `original_tokens`: a frequency with fewer than `low_freq_factor` rotations in n tokens is divided by
    `factor`, one with more than `high_freq_factor` is kept, and those between are interpolated. Cosines and sines are
    not scaled. The fields are those of config.json's `rope_scaling`; `original_tokens` is its
    `original_max_position_embeddings`."""

    factor: float = ranged(8.0, low=1.0)
    low_freq_factor: float = ranged(1.0, low=0.0)
    high_freq_factor: float = ranged(4.0, low=0.0)
    original_tokens: int = ranged(8192, low=1)

    def __post_init__(self) -> None:
        if not 1 <= self.factor <= 1e6 or not 1e-6 <= self.low_freq_factor < self.high_freq_factor <= 1e6:
            raise ValueError(
                f"llama3's factor = {self.factor}, low_freq_factor = {self.low_freq_factor}, high_freq_factor ="
                f" {self.high_freq_factor}: expected factor >= 1 and 0 < low_freq_factor < high_freq_factor"
            )
