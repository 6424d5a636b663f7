"""The parts that families of models differ in: latent attention, routing, longer rotary positions. Torch-free."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from etude.config import ranged


class Family(enum.StrEnum):
    """`model_type` of a Hugging Face config.json."""

    QWEN3_MOE = "qwen3_moe"
    QWEN3 = "qwen3"  # the degenerate case: no router
    DEEPSEEK_V3 = "deepseek_v3"
    KIMI_K2 = "kimi_k2"  # DeepSeek-V3 by another name

    @property
    def architecture(self) -> str:
        """The class that transformers computes it with."""
        return _ARCHITECTURES[self]

    @property
    def is_latent(self) -> bool:
        """Whether its attention compresses keys and values, and its routers take sigmoids."""
        return self in (Family.DEEPSEEK_V3, Family.KIMI_K2)


_ARCHITECTURES = {
    Family.QWEN3_MOE: "Qwen3MoeForCausalLM",
    Family.QWEN3: "Qwen3ForCausalLM",
    Family.DEEPSEEK_V3: "DeepseekV3ForCausalLM",
    Family.KIMI_K2: "DeepseekV3ForCausalLM",
}


class Scores(enum.StrEnum):
    """What makes a router's logits comparable."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"  # and a bias that only choosing sees (arXiv 2408.15664)


@dataclass(frozen=True)
class Routing:
    """How a router's logits become a choice of experts and their gates.

    With groups (arXiv 2412.19437, §2.1.2) only the experts of the `top_groups` best can be chosen, a group being as
    good as its two best experts together.
    """

    scores: Scores = Scores.SOFTMAX
    normalise: bool = True  # gates of a token sum to `scaling`
    scaling: float = ranged(1.0, low=0.0)
    num_groups: int = ranged(1, low=1)
    top_groups: int = ranged(1, low=1)

    def check(self, num_experts: int, top_k: int) -> None:
        """Raises `ValueError` for groups that these experts do not fall into."""
        if self.num_groups == 1:
            return
        size, rest = divmod(num_experts, self.num_groups)
        if rest or size < 2:
            raise ValueError(f"{num_experts} experts do not fall into {self.num_groups} groups of two or more")
        if not top_k <= self.top_groups * size <= num_experts:
            raise ValueError(f"top_groups = {self.top_groups} of {self.num_groups} groups, and top_k = {top_k}")


@dataclass(frozen=True)
class Latent:
    """Widths of multi-head latent attention (arXiv 2405.04434, §2.1): the keys and values of all heads are products of
    one latent a token, and one rotary key is shared by all heads."""

    kv_rank: int = ranged(64, low=1)
    nope_dim: int = ranged(32, low=1)  # of a head's query and key, without positions
    rope_dim: int = ranged(16, low=2)  # of a head's query, and of the shared key: turned
    value_dim: int = ranged(32, low=1)
    q_rank: int | None = None  # None: queries are one product of the residual stream
    interleaved: bool = True  # neighbours are a pair, not halves

    def __post_init__(self) -> None:
        if self.rope_dim % 2:
            raise ValueError(f"rope_dim = {self.rope_dim}, but rotary positions turn pairs")
        if self.q_rank is not None and self.q_rank < 1:
            raise ValueError(f"q_rank = {self.q_rank}, at least 1 or none is wanted")

    @property
    def head_dim(self) -> int:
        """Width of a head's query."""
        return self.nope_dim + self.rope_dim


@dataclass(frozen=True)
class Yarn:
    """Rotary positions stretched beyond those of pre-training (arXiv 2309.00071), as transformers computes them.

    The sharper softmax that goes with it is `attention_factor`, over cosine and sine. DeepSeek puts it into the
    softmax's scale instead (`mscale_all_dim`), which is what makes its `attention_factor` 1.
    """

    factor: float = ranged(4.0, low=1.0)
    original_tokens: int = ranged(4096, low=1)
    beta_fast: float = ranged(32.0, low=0.0)
    beta_slow: float = ranged(1.0, low=0.0)
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None  # None: from the other three
    truncate: bool = True

    def __post_init__(self) -> None:
        for name in ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor"):
            value = getattr(self, name)
            if value is not None and not 1e-3 <= value <= 1e6:
                raise ValueError(f"yarn's {name} = {value!r}, expected from 0.001 to 1000000")

    @property
    def table_scale(self) -> float:
        """What cosines and sines are multiplied by."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._sharper(self.mscale) / self._sharper(self.mscale_all_dim)
        return self._sharper(1.0)

    @property
    def softmax_scale(self) -> float:
        """What DeepSeek multiplies the softmax's scale by."""
        return self._sharper(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def _sharper(self, mscale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0

    def interpolated(self, rope_dim: int, theta: float) -> list[float]:
        """For each of the rope_dim / 2 frequencies: 0.0 where it stays, 1.0 where it is divided by `factor`."""

        def turns(rotations: float) -> float:
            """The dimension that turns so often within the original positions."""
            return rope_dim * math.log(self.original_tokens / (rotations * 2 * math.pi)) / (2 * math.log(theta))

        low, high = turns(self.beta_fast), turns(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rope_dim - 1)
        if low == high:
            high += 0.001
        return [min(max((i - low) / (high - low), 0.0), 1.0) for i in range(rope_dim // 2)]


@dataclass(frozen=True)
class Kept:
    """What a cache keeps of one token in one layer."""

    heads: int  # G
    key_width: int  # A
    value_width: int  # B
    shared: bool  # a value is the first B numbers of its key: kept once
