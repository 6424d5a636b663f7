"""Multi-head latent attention (MLA; arXiv 2405.04434, §2.1) as in DeepSeek-V3 and transformers.

Keys and values of all heads are projections of one latent per token; all heads share one RoPE key. Two forms give the
same results up to rounding (docs/decisions/0016-latents-are-absorbed.md):

- *absorbed*: the key projection is applied to the queries instead, and the value projection to the attention output. A
  cache then stores the latent and the RoPE key, as one head for all queries.
- *expanded*: keys and values are computed. Cheaper where nothing is cached and every token is computed once.

Shapes: N tokens, D width, H heads, Q width of the queries' latent, R of the keys' and values', P RoPE width, M width of
a head's query without RoPE, A = M + P, B width of a head's value."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from etude.errors import ConfigError
from etude.models.attention import Cache
from etude.models.components import LATENT_EPS
from etude.models.config import ModelConfig
from etude.models.hooks import ForwardHook
from etude.models.rope import Rope, halves
from etude.numerics.exact.options import AttentionOptions, Index
from etude.numerics.lora import with_lora_gradient
from etude.numerics.operators import Operators
from etude.numerics.parallel import SINGLE_RANK, Parallel


class LatentAttention(nn.Module):
    """Multi-head latent attention (MLA): the keys and values of all heads are projections of one vector per token, the
    latent.

    The first projection of a token, one matrix product, has as its output the queries (or their latent), the latent of
    the keys and values, and the RoPE key."""

    def __init__(self, c: ModelConfig, operators: Operators, parallel: Parallel = SINGLE_RANK) -> None:
        super().__init__()
        assert c.latent is not None
        self.parallel = parallel
        self.operators, self.latent, self.heads, self.scale = operators, c.latent, c.num_heads, c.softmax_scale
        at, queries = c.latent, c.num_heads * c.latent.head_dim
        first = at.q_rank or queries
        self.widths = [first, at.kv_rank, at.rope_dim]
        self.inward = nn.Parameter(torch.empty(sum(self.widths), c.hidden_size))  # [Q + R + P, D]
        self.q_norm = nn.Parameter(torch.ones(first)) if at.q_rank else None
        self.q_up = nn.Parameter(torch.empty(queries, first)) if at.q_rank else None  # [H·A, Q]
        self.kv_norm = nn.Parameter(torch.ones(at.kv_rank))
        self.kv_up = nn.Parameter(torch.empty(c.num_heads * (at.nope_dim + at.value_dim), at.kv_rank))  # [H·(M+B), R]
        self.out = nn.Parameter(torch.empty(c.hidden_size, c.num_heads * at.value_dim))
        self.of_indexer = [] if at.indexer is None else [*at.indexer.shapes(c.hidden_size, first).items()]
        for name, shape in self.of_indexer:  # buffers, since they have no gradient
            self.register_buffer(_buffer(name), torch.zeros(shape))
        if at.indexer is not None and c.context_tokens > at.indexer.top_k and not operators.has_attention_options:
            raise ConfigError(
                f"a model of family {c.family} cannot be computed with {operators.name}",
                "these operators cannot attend to some keys only, as its indexer demands",
                hint="use a CPU, or native operators",
            )

    def forward(self, x_ND: torch.Tensor, rope: Rope, cache: Cache, layer: int, hook: ForwardHook) -> torch.Tensor:
        """Return the outputs of N tokens, [N, D] like the inputs; keys and values, or latents, go into the cache."""
        ops, at, n = self.operators, self.latent, len(x_ND)
        options = None
        q, latent, key = torch.split(hook("attention.inward", self._inward(x_ND)), self.widths, -1)
        if self.q_up is not None:
            q = hook("attention.q_norm", ops.rms_norm(q, self.q_norm, LATENT_EPS))
            options = self._options(x_ND, q, rope, cache)
            q = hook("attention.q", self.parallel.column_parallel(ops, q, self.q_up))
        plain, turning = torch.split(q.view(n, self.heads, at.head_dim), [at.nope_dim, at.rope_dim], -1)
        turning = torch.cat([turning, key[:, None]], 1)
        turned = ops.rotate(halves(turning) if at.interleaved else turning, rope.cos, rope.sin)
        q_rope, k_rope = torch.split(hook("attention.rotated", turned), [self.heads, 1], 1)
        latent = hook("attention.kv_norm", ops.rms_norm(latent, self.kv_norm, LATENT_EPS))
        latent, k_rope = self.parallel.copy_to_ranks(ops, latent), self.parallel.copy_to_ranks(ops, k_rope)
        attend = self._absorbed if cache.compressed or ops.absorbs_latents else self._expanded
        o_NHB = attend(plain, q_rope, latent, k_rope, cache, layer, options, hook)
        o_NO = hook("attention.attended", o_NHB.reshape(n, self.heads * at.value_dim))
        o_ND = self.parallel.row_parallel(ops, o_NO, self.out, "attention.out")
        return hook("attention.out", o_ND)

    def views(self) -> dict[str, torch.Tensor]:
        q, kv = torch.split(self.inward, [self.widths[0], sum(self.widths[1:])])
        found = {"q_proj": q}
        if self.q_up is not None and self.q_norm is not None:
            found = {"q_a_proj": q, "q_a_layernorm": self.q_norm, "q_b_proj": self.q_up}
        found |= {"kv_a_proj_with_mqa": kv, "kv_a_layernorm": self.kv_norm, "kv_b_proj": self.kv_up}
        views = {f"{name}.weight": view for name, view in (found | {"o_proj": self.out}).items()}
        return views | self.indexer_views()

    def indexer_views(self) -> dict[str, torch.Tensor]:
        """Return the weights of the indexer, which are no parameters, by name; {} without one."""
        return {f"indexer.{name}": self.get_buffer(_buffer(name)) for name, _ in self.of_indexer}

    @torch.no_grad()
    def _options(self, x_ND: torch.Tensor, q_NQ: torch.Tensor, rope: Rope, cache: Cache) -> AttentionOptions | None:
        """Return what the indexer chooses keys by, where there is one and it may leave out keys.

        `q_NQ`: the latents of the queries. Of the choice there is no gradient."""
        of, ops, n = self.latent.indexer, self.operators, len(x_ND)
        stores_or_unknown = cache.compressed or cache.positions.device.type != "cpu"
        if of is None or not ops.has_attention_options or not cache.chooses_keys:
            return None
        if not stores_or_unknown and int(cache.positions.max()) < of.top_k:
            return None
        wq_b, wk, weights, norm, bias = (self.get_buffer(_buffer(name)) for name, _ in self.of_indexer)
        q = ops.router_scores(q_NQ, wq_b).view(n, of.heads, of.width)
        k = F.layer_norm(ops.router_scores(x_ND, wk), (of.width,), norm, bias, LATENT_EPS)
        both, width = torch.cat([q, k[:, None]], 1), rope.cos.shape[-1]
        turned = Operators.rotate(ops, both[..., :width], rope.cos, rope.sin)  # in float32, also where `ops` round
        turned = torch.cat([turned, both[..., width:]], -1)
        w = ops.router_scores(x_ND, weights) * (of.heads * of.width) ** -0.5
        return AttentionOptions(None, None, Index(turned[:, :-1], w, turned[:, -1], of.top_k, ops.index_scores))

    def matrices(self) -> dict[str, list[int]]:
        first, latent, rope = self.widths
        heads, at = self.heads, self.latent
        by_head = {"kv_up": [at.nope_dim, at.value_dim] * heads, "out": [self.out.shape[0]]}
        if self.q_up is None:
            return {"inward": [first // heads] * heads + [latent, rope], **by_head}
        return {"inward": [first, latent, rope], "q_up": [at.head_dim] * heads, **by_head}

    def _inward(self, x_ND: torch.Tensor) -> torch.Tensor:
        """Compute the first product, [N, Q + R + P].

        Without a query latent, a rank computes its own heads' queries only."""
        ops = self.operators
        if self.q_up is not None or max(self.parallel.degree, ops.degree) == 1:
            return ops.linear(x_ND, self.inward)
        queries, rest = torch.split(self.inward, [self.widths[0], sum(self.widths[1:])])
        return torch.cat([self.parallel.column_parallel(ops, x_ND, queries), ops.linear(x_ND, rest)], -1)

    def _absorbed(
        self,
        plain_NHM: torch.Tensor,
        q_NHP: torch.Tensor,
        latent_NR: torch.Tensor,
        k_N1P: torch.Tensor,
        cache: Cache,
        layer: int,
        options: AttentionOptions | None,
        hook: ForwardHook,
    ) -> torch.Tensor:
        keys_HMR, values_HBR = self._up()
        q_NHR = self.operators.per_head(plain_NHM, keys_HMR.transpose(1, 2))
        q_NHR = hook("attention.absorbed", self._with_lora_gradient(q_NHR, plain_NHM, keys=True))
        q, k = torch.cat([q_NHR, q_NHP], -1), torch.cat([latent_NR[:, None], k_N1P], -1)
        o_NHR = cache.attend(layer, q, k, k[..., : self.latent.kv_rank], self.scale, options)
        o_NHR = hook("attention.attended_latent", o_NHR)
        return self._with_lora_gradient(self.operators.per_head(o_NHR, values_HBR), o_NHR, keys=False)

    def _expanded(
        self,
        plain_NHM: torch.Tensor,
        q_NHP: torch.Tensor,
        latent_NR: torch.Tensor,
        k_N1P: torch.Tensor,
        cache: Cache,
        layer: int,
        options: AttentionOptions | None,
        hook: ForwardHook,
    ) -> torch.Tensor:
        widths = [self.latent.nope_dim, self.latent.value_dim]
        kv = self.operators.linear_columns(latent_NR, self.kv_up, self.parallel.degree)
        kv = hook("attention.expanded", kv)
        k, v = torch.split(kv.view(len(kv), self.heads, sum(widths)), widths, -1)
        q, k = torch.cat([plain_NHM, q_NHP], -1), torch.cat([k, k_N1P.expand(-1, self.heads, -1)], -1)
        return cache.attend(layer, q, k, v, self.scale, options)

    def _up(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the projections from a latent to keys [H, M, R] and values [H, B, R]."""
        up = self.operators.quantise_weight(self.kv_up).view(self.heads, -1, self.latent.kv_rank)
        return up[:, : self.latent.nope_dim], up[:, self.latent.nope_dim :]

    def _with_lora_gradient(self, y_NHO: torch.Tensor, x_NHI: torch.Tensor, *, keys: bool) -> torch.Tensor:
        """Return `y_NHO`, the product of `x_NHI` with a part of the absorbed projection, with LoRA's gradients.

        For keys the projection is transposed, and so are A and B."""
        pairs = self.operators.lora_pairs(self.kv_up)
        if pairs is None:
            return y_NHO
        of = slice(None, self.latent.nope_dim) if keys else slice(self.latent.nope_dim, None)
        a_HrR = pairs.a.expand(self.heads, -1, -1)
        b_HOr = pairs.b.view(self.heads, -1, pairs.b.shape[-1])[:, of]
        a, b = (b_HOr.mT, a_HrR.mT) if keys else (a_HrR, b_HOr)
        one = (y_NHO.shape[-1],)
        y_HNO = with_lora_gradient(y_NHO.transpose(0, 1), x_NHI.transpose(0, 1), a[:, None], b, one, pairs.scale)
        return y_HNO.transpose(0, 1)


def _buffer(name: str) -> str:
    return f"indexer_{name.replace('.', '_')}"
