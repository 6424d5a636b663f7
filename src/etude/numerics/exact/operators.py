"""`Exact`: operators with one order of summation each, on CPUs. The shapes are those of `numerics.operators`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from etude.errors import ConfigError
from etude.numerics import delta_rule, exact
from etude.numerics.exact.attention import KeyWindows
from etude.numerics.exact.matmul import Product
from etude.numerics.exact.options import AttentionOptions
from etude.numerics.operators import Causal, Operators, at_least_float32


class Exact(Operators):
    """Operators with one order of summation each: a row's bits depend only on that row.

    With `degree` above 1 they do not depend on the number of tensor-parallel ranks either, up to `degree`. Each product
    into the residual stream is then computed as the sum of `degree` partial sums, also on a single rank."""

    absorbs_latents = True

    def __init__(self, dtype: torch.dtype = torch.float32, *, degree: int = 1) -> None:
        super().__init__(dtype)
        if degree < 1 or degree & (degree - 1):
            raise ConfigError(f"degree = {degree} is invalid", "it must be a power of two", hint="use 1, 2, 4, ...")
        self.degree = degree

    @property
    def name(self) -> str:
        return super().name + (f" degree {self.degree}" if self.degree > 1 else "")

    @property
    def exact(self) -> bool:
        return True

    @property
    def storage_dtype(self) -> torch.dtype:
        """The dtype of an engine's weights, keys and values: float32 or wider.

        Narrow dtypes are subsets of float32, and converting them for each product would cost more than the product of a
        decoded token."""
        return torch.promote_types(self.dtype, torch.float32)

    def linear(self, x_NI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
        return exact.linear(at_least_float32(x_NI), at_least_float32(weight_OI)).to(self.dtype)

    def linear_columns(self, x_NI: torch.Tensor, weight_OI: torch.Tensor, ranks: int) -> torch.Tensor:
        if self.degree == 1:
            return super().linear_columns(x_NI, weight_OI, ranks)
        return self._columns(weight_OI, ranks)(at_least_float32(x_NI), at_least_float32(weight_OI)).to(self.dtype)

    def linear_partial(self, x_NI: torch.Tensor, weight_OI: torch.Tensor, ranks: int) -> torch.Tensor:
        if self.degree == 1:
            return super().linear_partial(x_NI, weight_OI, ranks)
        part = exact.partial_products(at_least_float32(x_NI), at_least_float32(weight_OI), self.degree // ranks)
        return part if ranks > 1 else part.to(self.dtype)

    def _columns(self, weight: torch.Tensor, ranks: int) -> Product:
        """Return how to compute a rank's part of the outputs: in the same way on any number of ranks."""
        out_size, in_size = weight.shape[-2:]
        return exact.column_product(out_size * ranks // self.degree, in_size, self.degree)

    def padded_rows(self, num_rows: int) -> int:
        return exact.padded_rows(num_rows)

    def grouped(self, x_SI: torch.Tensor, weight_EOI: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        return self._grouped(at_least_float32(x_SI), at_least_float32(weight_EOI), rows).to(self.dtype)

    def grouped_columns(
        self, x_SI: torch.Tensor, weight_EOI: torch.Tensor, rows: Sequence[int], ranks: int
    ) -> torch.Tensor:
        if self.degree == 1:
            return super().grouped_columns(x_SI, weight_EOI, rows, ranks)
        product = self._columns(weight_EOI, ranks)
        return self._grouped(at_least_float32(x_SI), at_least_float32(weight_EOI), rows, product).to(self.dtype)

    def grouped_partial(
        self, x_SI: torch.Tensor, weight_EOI: torch.Tensor, rows: Sequence[int], ranks: int
    ) -> torch.Tensor:
        if self.degree == 1:
            return super().grouped_partial(x_SI, weight_EOI, rows, ranks)
        number = self.degree // ranks
        xs = torch.split(at_least_float32(x_SI), x_SI.shape[-1] // number, -1)
        pairs = zip(xs, exact.split_inner(at_least_float32(weight_EOI), number), strict=True)
        part = exact.tree_sum([self._grouped(x.contiguous(), weight, rows) for x, weight in pairs])
        return part if ranks > 1 else part.to(self.dtype)

    def _grouped(
        self, x_SI: torch.Tensor, weight_EOI: torch.Tensor, rows: Sequence[int], product: Product | None = None
    ) -> torch.Tensor:
        if product is None and len(x_SI) and (block := exact.block_for(x_SI, weight_EOI, rows)):
            done = exact.few_rows.products(x_SI, weight_EOI, rows, block)
            assert done is not None, "it was measured"
            return done
        whole_lines = not weight_EOI.shape[2] % (exact.LINE_BYTES // 4)  # wherever an expert's rows begin
        product = product or exact.linear
        vendor = product is exact.linear and exact.product_for(*weight_EOI.shape[1:]) is exact.vendor_product
        if (whole_lines and vendor) or not len(x_SI):
            return super().grouped(x_SI, weight_EOI, rows)
        parts = zip(torch.split(x_SI, list(rows)), weight_EOI.unbind(), strict=True)
        return torch.cat([product(x, w) for x, w in parts if len(x)])

    def fused_experts(
        self,
        x_ND: torch.Tensor,
        gates_NK: torch.Tensor,
        experts_NK: torch.Tensor,
        gate_up_E2FD: torch.Tensor,
        down_EDF: torch.Tensor,
    ) -> torch.Tensor | None:
        """Compute the experts of few tokens by a kernel, where it has the bits of the operators one by one."""
        first, second = (exact.block_for(x_ND, weight, [len(x_ND)]) for weight in (gate_up_E2FD, down_EDF))
        blocks = (first, second)
        if self.degree > 1 or not all(blocks) or not _fused_experts_agree(*down_EDF.shape[1:], blocks):
            return None
        return exact.few_rows.experts(x_ND, gates_NK, experts_NK, gate_up_E2FD, down_EDF, blocks)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
        return super().rms_norm(at_least_float32(x), weight, eps).to(self.dtype)

    def elementwise(self, function: Callable[[torch.Tensor], torch.Tensor], x_NF: torch.Tensor) -> torch.Tensor:
        return exact.in_lanes(function, at_least_float32(x_NF))

    def delta_rule(
        self, inputs: Sequence[torch.Tensor], state_SHAB: torch.Tensor | None, segments: delta_rule.Segments
    ) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = [at_least_float32(x) for x in inputs]
        o, states = delta_rule.recurrent_with_gradient(inputs, state_SHAB, segments, self.elementwise)
        return o.to(self.dtype), states

    def rotate(self, x_NHA: torch.Tensor, cos_N1A: torch.Tensor, sin_N1A: torch.Tensor) -> torch.Tensor:
        return super().rotate(at_least_float32(x_NHA), cos_N1A, sin_N1A).to(self.dtype)

    def router_scores(self, x_ND: torch.Tensor, weight_ED: torch.Tensor) -> torch.Tensor:
        return exact.linear(at_least_float32(x_ND), at_least_float32(weight_ED))

    def combine(self, out_SD: torch.Tensor, slot_NK: torch.Tensor, gates_NK: torch.Tensor) -> torch.Tensor:
        return super().combine(at_least_float32(out_SD), slot_NK, gates_NK).to(self.dtype)

    def gated(self, h_SF: torch.Tensor) -> torch.Tensor:
        a, b = at_least_float32(h_SF).chunk(2, -1)
        return (exact.in_lanes(F.silu, a) * b).to(self.dtype)

    def clamped_gated(self, h_SF: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
        gate, up = at_least_float32(h_SF).chunk(2, -1)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (gate * exact.in_lanes(torch.sigmoid, alpha * gate) * (up + 1)).to(self.dtype)

    def sigmoid(self, scores_NE: torch.Tensor) -> torch.Tensor:
        return exact.in_lanes(torch.sigmoid, at_least_float32(scores_NE))

    def top_k(self, values_NE: torch.Tensor, k: int) -> torch.Tensor:
        """Return the indices of the k largest values, largest first, ties to the lowest index; int64 [N, k]."""
        return exact.top_k(values_NE, k)

    def causal_attention(self) -> Causal:
        inner = exact.Causal()

        def causal(
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            scale: float | None = None,
            start: int = 0,
            options: AttentionOptions | None = None,
        ) -> torch.Tensor:
            q, k, v = map(at_least_float32, (q, k, v))
            return inner(q, k, v, scale, start, options).to(self.dtype)

        return causal

    def key_windows(self, heads: int, key_width: int) -> KeyWindows:
        return exact.key_windows(heads, key_width)

    def index_scores(self, q_MJI: torch.Tensor, weights_MJ: torch.Tensor, k_MTI: torch.Tensor) -> torch.Tensor:
        """Compute the scores of keys for an indexer's choice, float32 [M, T], number by number in one order.

        So a score has the same bits beside any other queries and keys."""
        keys = k_MTI.movedim(-1, 0).contiguous()  # [I, M, T] or [I, T]
        total = None
        for q_MI, weight_M in zip(q_MJI.unbind(1), weights_MJ.unbind(1), strict=True):
            dot_MT = q_MI[:, :1] * keys[0]
            for one_M, key in zip(q_MI.unbind(1)[1:], keys[1:], strict=True):
                dot_MT += one_M[:, None] * key
            share_MT = dot_MT.relu_() * weight_M[:, None]
            total = share_MT if total is None else total + share_MT
        assert total is not None, "an indexer has heads"
        return total

    def logits(self, x_RD: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
        """Compute the logits of the output head, float32 [R, V].

        Logits are not rounded to the dtype of activations, since that would add noise to the log-probabilities of
        engine and learner."""
        return self.router_scores(x_RD, weight_VD)


@functools.cache
def _fused_experts_agree(width: int, inner: int, blocks: tuple[int, int]) -> bool:
    """Return whether `few_rows.experts` has the bits of the operators one by one, for experts with these widths."""
    operators, generator = Exact(), torch.Generator().manual_seed(0)
    sizes = ((16, width), (2, 2 * inner, width), (2, width, inner), (16, 2))
    x, gate_up, down, gates = (torch.randn(*size, generator=generator) for size in sizes)
    gate_up *= 8 * width**-0.5  # for silu of numbers of all sizes
    chosen = (torch.arange(32).view(16, 2) + torch.arange(16)[:, None] % 2) % 2
    done = exact.few_rows.experts(x, gates, chosen, gate_up, down, blocks)
    h = operators.grouped(torch.cat([x, x]), gate_up, [16, 16])
    out = operators.grouped(operators.gated(h), down, [16, 16])
    reference = operators.combine(out, chosen * 16 + torch.arange(16)[:, None], gates)
    return done is not None and torch.equal(done, reference)
