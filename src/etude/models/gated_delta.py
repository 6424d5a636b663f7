"""Gated delta layers (arXiv 2412.06464) as in Qwen3-Next and transformers: linear attention with a state of fixed size.

Queries, keys and values of a token pass a short convolution over time, and then the gated delta rule
(`numerics.delta_rule`), which reads and writes a matrix for each head. What a sequence keeps is the latest inputs of
the convolution and these matrices, whatever its length: a `Cache` stores them (`Cache.recur`).

Shapes: N tokens, S segments, D width, G key heads, H value heads, A key width, B value width, C channels, K taps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from etude.errors import ConfigError
from etude.models.attention import Cache, States
from etude.models.config import ModelConfig
from etude.models.hooks import ForwardHook
from etude.models.rope import Rope
from etude.numerics.delta_rule import Segments, causal_convolution, unit
from etude.numerics.operators import Operators, at_least_float32
from etude.numerics.parallel import SINGLE_RANK, Parallel


class GatedDeltaLayer(nn.Module):
    """Linear attention by the gated delta rule. It has no positions: RoPE is not applied."""

    def __init__(self, c: ModelConfig, operators: Operators, parallel: Parallel = SINGLE_RANK) -> None:
        super().__init__()
        assert c.linear is not None
        if not operators.has_delta_rule:
            raise ConfigError(
                f"a model of family {c.family} cannot be computed with {operators.name}",
                "these operators have no gated delta rule",
                hint="use a CPU",
            )
        at = self.sizes = c.linear
        self.operators, self.eps = operators, c.rms_eps
        self.inward = nn.Parameter(torch.empty(sum(at.inward.values()), c.hidden_size))
        self.taps = nn.Parameter(torch.empty(at.channels, at.kernel))
        self.decay = nn.Parameter(torch.linspace(0.01, 16.0, at.value_heads).log())  # logarithm of the rate
        self.step = nn.Parameter(torch.ones(at.value_heads))  # bias of the time step
        self.norm = nn.Parameter(torch.ones(at.value_dim))
        self.out = nn.Parameter(torch.empty(c.hidden_size, at.value_heads * at.value_dim))

    def forward(self, x_ND: torch.Tensor, rope: Rope, cache: Cache, layer: int, hook: ForwardHook) -> torch.Tensor:
        """Return the outputs of N tokens, [N, D] like `x_ND`. `cache` stores the states after these tokens; `rope` is
        not used."""
        ops, at, n = self.operators, self.sizes, len(x_ND)
        mixed_NC, z_NF, beta_NH, step_NH = self._split(hook("attention.inward", ops.linear(x_ND, self.inward)))
        beta_NH = ops.elementwise(torch.sigmoid, beta_NH)
        rate_H = at_least_float32(self.decay).exp()
        step_NH = ops.elementwise(F.softplus, at_least_float32(step_NH) + at_least_float32(self.step))
        o_NHB = cache.recur(layer, (mixed_NC, -rate_H * step_NH, beta_NH), self._scan)
        o_NHB = hook("attention.attended", ops.rms_norm(o_NHB, self.norm, self.eps))
        o_NF = o_NHB.reshape(n, at.value_heads * at.value_dim)
        o_NF = hook("attention.gated", (o_NF * ops.elementwise(F.silu, z_NF)).to(o_NF.dtype))
        return hook("attention.out", ops.linear(o_NF, self.out))

    def _split(self, y_NO: torch.Tensor) -> list[torch.Tensor]:
        """Return the input of the convolution [N, C], the output's gate [N, H·B], and beta and time step [N, H]."""
        at, rows = self.sizes, list(self.sizes.inward.values())
        if not at.by_head:
            return list(torch.split(y_NO, rows, -1))
        each = at.value_heads // at.key_heads
        qkvz, ba = (part.reshape(len(part), at.key_heads, -1) for part in torch.split(y_NO, rows, -1))
        widths = [at.key_dim, at.key_dim, each * at.value_dim, each * at.value_dim]
        *qkv, z = (part.flatten(1) for part in torch.split(qkvz, widths, -1))
        return [torch.cat(qkv, -1), z, *(part.flatten(1) for part in torch.split(ba, each, -1))]

    def _scan(
        self, inputs: Sequence[torch.Tensor], states: States | None, segments: Segments
    ) -> tuple[torch.Tensor, States]:
        """Compute convolution and delta rule for segments of tokens, from the states before them."""
        mixed_NC, g_NH, beta_NH = inputs
        ops, at = self.operators, self.sizes
        before, state = (None, None) if states is None else states
        taps_CK = self.taps.to(torch.promote_types(self.taps.dtype, mixed_NC.dtype))
        y_NC, last = causal_convolution(mixed_NC, taps_CK, before, segments)
        y_NC = ops.elementwise(F.silu, y_NC)
        keys = at.key_heads * at.key_dim
        q, k, v = torch.split(y_NC, [keys, keys, at.value_heads * at.value_dim], -1)
        each = at.value_heads // at.key_heads
        q, k = (unit(x.reshape(len(x), at.key_heads, -1)).repeat_interleave(each, 1) for x in (q, k))
        v_NHB = v.reshape(len(v), at.value_heads, -1)
        o, state = ops.delta_rule((q * at.key_dim**-0.5, k, v_NHB, g_NH, beta_NH), state, segments)
        return o, (last, state)

    def views(self) -> dict[str, torch.Tensor]:
        rows = self.sizes.inward
        parts = zip(rows, torch.split(self.inward, list(rows.values())), strict=True)
        found: dict[str, torch.Tensor] = {f"{name}.weight": view for name, view in parts}
        found |= {"conv1d.weight": self.taps[:, None], "dt_bias": self.step, "A_log": self.decay}
        found |= {"norm.weight": self.norm, "out_proj.weight": self.out}
        return {f"linear.{name}": view for name, view in found.items()}

    def matrices(self) -> dict[str, list[int]]:
        return {"inward": list(self.sizes.inward.values()), "out": [self.out.shape[0]]}
