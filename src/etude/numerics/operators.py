"""The operators that compute a model: the interface between the model definition and the arithmetic.

A model is built with `Operators`. Engine and learner with equal operators compute alike. `Native` uses torch's fastest
kernels. `Exact` has one order of summation for each operator, whatever else is in the batch. Operators have no state,
and nothing is switched globally.

Activations are tensors of `dtype`. Weights may have a wider dtype, as the learner's float32 weights do. `Exact` needs
float32 weights on both sides: it multiplies and adds in float32 and rounds to `dtype` once, so narrow dtypes cost about
as much as float32.

Shapes: N tokens, H heads, I and O width in and out, E experts, S rows sorted by expert, K experts per token, R rows of
logits, V vocabulary size, T tokens of one sequence, G key/value heads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from etude.errors import ConfigError
from etude.numerics import delta_rule, grouped_experts
from etude.numerics.exact.attention import ANY, KeyWindows, MasksByWindow, masked_attention
from etude.numerics.exact.options import AttentionOptions

if TYPE_CHECKING:
    from etude.numerics.lora import LoraPairs  # which imports this module

Causal = Callable[..., torch.Tensor]
"""(q_HTA, k_GTA, v_GTC, scale or None, start=0, options=None) -> o_HTC. Causal attention in one sequence. The queries
are at positions `start` to the last key's. `options`: `AttentionOptions`."""

PackedCausal = Callable[..., torch.Tensor]
"""(q_NHA, k_NGA, v_NGC, scale or None, options=None) -> o_NHC. Causal attention in several sequences, packed one after
another."""

_MASKED_ROWS = 512  # queries with one mask


class Operators(ABC):
    """The arithmetic of a model: its matrix products, norms, attention, routing functions and log-probabilities.

    Results have dtype `dtype`; router scores and log-probabilities are float32."""

    absorbs_latents = False
    """Whether latent attention is always computed in the absorbed form, so that packed forward passes sum in the same
    order as those over a cache."""

    has_attention_options = True
    """Whether attention takes `AttentionOptions`: sliding windows and sinks."""

    has_delta_rule = True
    """Whether the gated delta rule is computed in the mode of these operators."""

    degree = 1
    """Largest number of tensor-parallel ranks, a power of two, for which results keep their bits."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype

    @property
    def name(self) -> str:
        """A name such as "exact bfloat16". Operators with the same name compute the same results, and are equal
        (==)."""
        return f"{type(self).__name__.lower()} {str(self.dtype).removeprefix('torch.')}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Operators) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def exact(self) -> bool:
        """Whether the bits of a row depend only on that row."""
        return False

    @property
    def syncs_with_host(self) -> bool:
        """Whether a forward pass synchronises with the host, so that it cannot be captured in a CUDA graph."""
        return False

    @property
    def kernels(self) -> str:
        """Versions and digest of etude's own kernels; "" where the kernels are torch's."""
        return ""

    @property
    def storage_dtype(self) -> torch.dtype:
        """The dtype of an engine's weights, keys and values. A learner's weights are always float32."""
        return self.dtype

    @abstractmethod
    def linear(self, x_NI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
        """Compute x · weightᵀ, [N, O]."""

    def linear_columns(self, x_NI: torch.Tensor, weight_OI: torch.Tensor, ranks: int) -> torch.Tensor:
        """Compute `linear` with this rank's part of the output columns of a larger matrix.

        `ranks`: the number of ranks that have a part each."""
        return self.linear(x_NI, weight_OI)

    def linear_partial(self, x_NI: torch.Tensor, weight_OI: torch.Tensor, ranks: int) -> torch.Tensor:
        """Compute `linear` with this rank's part of the inputs. The result is a partial sum, [N, O].

        The caller adds the partial sums of all `ranks`."""
        if self.exact and ranks > 1:
            facts = "exact sums over tensor-parallel ranks need CPUs and numerics.degree > 1"
            hint = f"use CPUs and numerics.degree = {ranks}, or one rank"
            raise ConfigError(f"cannot compute {self.name} over {ranks} ranks", facts, hint=hint)
        return self.linear(x_NI, weight_OI)

    def quantise_input(self, x: torch.Tensor) -> torch.Tensor:
        """Round the input of a large matrix product to the low-precision format, if there is one. `linear` calls it."""
        return x

    def quantise_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """Round a matrix, or a stack of them, to the low-precision format, if there is one. `linear` calls it."""
        return weight

    def lora_pairs(self, weight: torch.Tensor) -> LoraPairs | None:
        """Return the LoRA adapters of a merged matrix, or of a stack of them; None where it has none."""
        return None

    def padded_rows(self, num_rows: int) -> int:
        """Return the number of rows that an expert computes for `num_rows` rows. The others are padding."""
        return num_rows

    def grouped(self, x_SI: torch.Tensor, weight_EOI: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Multiply each expert's rows by its matrix, [S, O].

        `rows` [E] are the numbers of rows, S in all. Not differentiable: `models.experts` computes the gradient. Inputs
        and weights come from `quantise_input` and `quantise_weight`."""
        if grouped_experts.is_supported(x_SI, weight_EOI):
            ends = grouped_experts.offsets_on([*accumulate(rows)], x_SI.device)
            return grouped_experts.grouped_mm(x_SI, weight_EOI.to(x_SI.dtype).mT, ends)
        out = x_SI.new_empty(x_SI.shape[0], weight_EOI.shape[1])
        for x, w, o in zip(
            torch.split(x_SI, list(rows)), weight_EOI.unbind(), torch.split(out, list(rows)), strict=True
        ):
            if len(x):
                torch.mm(x, w.t().to(x.dtype), out=o)
        return out

    def grouped_columns(
        self, x_SI: torch.Tensor, weight_EOI: torch.Tensor, rows: Sequence[int], ranks: int
    ) -> torch.Tensor:
        """Compute `grouped` with this rank's part of the output columns. `ranks`: the number of such parts."""
        return self.grouped(x_SI, weight_EOI, rows)

    def grouped_partial(
        self, x_SI: torch.Tensor, weight_EOI: torch.Tensor, rows: Sequence[int], ranks: int
    ) -> torch.Tensor:
        """Compute `grouped` with this rank's part of the inputs. The result is one of `ranks` partial sums."""
        return self.grouped(x_SI, weight_EOI, rows)

    def per_head(self, x_NHI: torch.Tensor, weight_HOI: torch.Tensor) -> torch.Tensor:
        """Multiply each head's row by that head's matrix, [N, H, O].

        Absorbed latent attention uses it. Weights come from `quantise_weight`."""
        return torch.stack([self.linear(x, w) for x, w in zip(x_NHI.unbind(1), weight_HOI.unbind(0), strict=True)], 1)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
        """Compute x / √(mean x² + eps) · weight over the last dimension (RMSNorm, arXiv 1910.07467)."""
        weight = None if weight is None else weight.to(x.dtype)
        return F.rms_norm(x, x.shape[-1:], weight, eps)

    def centred_rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Compute `rms_norm` with a weight that is stored as its distance from 1. The sum is float32."""
        weight = 1 + at_least_float32(weight)
        return F.rms_norm(at_least_float32(x), x.shape[-1:], weight, eps).to(x.dtype)

    def elementwise(self, function: Callable[[torch.Tensor], torch.Tensor], x_NF: torch.Tensor) -> torch.Tensor:
        """Apply a function of single numbers to each number of a matrix, float32 [N, F]."""
        return function(at_least_float32(x_NF))

    def delta_rule(
        self, inputs: Sequence[torch.Tensor], state_SHAB: torch.Tensor | None, segments: delta_rule.Segments
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the gated delta rule (`numerics.delta_rule`) in several segments of tokens.

        `inputs`: q and k [N, H, A], v [N, H, B], the logarithm of the decay and beta [N, H]. `state_SHAB`: float32, the
        states before the segments; None: zeros. Returns the outputs [N, H, B], and the states after the segments."""
        inputs = [at_least_float32(x) for x in inputs]
        if torch.is_grad_enabled() or max(segments.lengths) > 1:
            o, states = delta_rule.chunked_segments(inputs, state_SHAB, segments)
        else:
            o, states = delta_rule.recurrent(inputs, state_SHAB, segments, self.elementwise)
        return o.to(self.dtype), states

    def rotate(self, x_NHA: torch.Tensor, cos_N1A: torch.Tensor, sin_N1A: torch.Tensor) -> torch.Tensor:
        """Apply rotary position embedding (arXiv 2104.09864) in the half-rotation layout.

        The sine is negative in the first half."""
        half, cos_N1A, sin_N1A = x_NHA.shape[-1] // 2, cos_N1A.to(x_NHA.dtype), sin_N1A.to(x_NHA.dtype)
        return torch.addcmul(x_NHA * cos_N1A, x_NHA.roll(half, -1), sin_N1A)

    def router_scores(self, x_ND: torch.Tensor, weight_ED: torch.Tensor) -> torch.Tensor:
        """Compute a router's logits, float32 [N, E]. They are not rounded, since rounded logits would often be
        equal."""
        return F.linear(x_ND.float(), weight_ED.float())

    def combine(self, out_SD: torch.Tensor, slot_NK: torch.Tensor, gates_NK: torch.Tensor) -> torch.Tensor:
        """Sum each token's K rows of expert outputs, weighted by gates; [N, D].

        `slot_NK`: the row of each (token, choice). The order of summation is that of the choices. Not differentiable:
        `models.experts` computes the gradient."""
        first, *rest = zip(slot_NK.unbind(1), gates_NK.to(out_SD.dtype).unbind(1), strict=True)
        y = out_SD.index_select(0, first[0]) * first[1][:, None]
        for slot, gate in rest:
            y.addcmul_(out_SD.index_select(0, slot), gate[:, None])
        return y

    def gated(self, h_SF: torch.Tensor) -> torch.Tensor:
        """Compute the SwiGLU activation: silu(first half) · second half, [S, F/2]."""
        a, b = h_SF.chunk(2, -1)
        return F.silu(a) * b

    def clamped_gated(self, h_SF: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
        """Compute gpt-oss's activation: g · sigmoid(alpha · g) · (u + 1), [S, F/2].

        g is the first half, at most `limit`; u is the second half, from -`limit` to `limit`."""
        gate, up = h_SF.chunk(2, -1)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * torch.sigmoid(alpha * gate) * (up + 1)

    def softmax(self, scores_NE: torch.Tensor) -> torch.Tensor:
        """Compute a router's probabilities by softmax, float32 [N, E]."""
        return at_least_float32(scores_NE).softmax(-1)

    def sigmoid(self, scores_NE: torch.Tensor) -> torch.Tensor:
        """Compute a router's sigmoid scores, float32 [N, E]."""
        return at_least_float32(scores_NE).sigmoid()

    def top_k(self, values_NE: torch.Tensor, k: int) -> torch.Tensor:
        """Return the indices of the k largest values, largest first, int64 [N, k]."""
        return values_NE.topk(k, -1).indices

    def causal_attention(self) -> Causal:
        """Return attention in single sequences, for one forward pass."""
        return _TorchCausal()

    def packed_attention(self, lengths: Sequence[int], device: torch.device) -> PackedCausal:
        """Return attention in packed sequences of these lengths, for one forward pass."""
        causal, lengths = self.causal_attention(), list(lengths)

        def attend(
            q_NHA: torch.Tensor,
            k_NGA: torch.Tensor,
            v_NGC: torch.Tensor,
            scale: float | None = None,
            options: AttentionOptions | None = None,
        ) -> torch.Tensor:
            q, k, v = (torch.split(t.transpose(0, 1), lengths, 1) for t in (q_NHA, k_NGA, v_NGC))
            each = [None] * len(lengths) if options is None else options.split(lengths)
            o = [causal(*qkv, scale, options=own) for *qkv, own in zip(q, k, v, each, strict=True)]
            return torch.cat(o, 1).transpose(0, 1)

        return attend

    def fused_experts(
        self,
        x_ND: torch.Tensor,
        gates_NK: torch.Tensor,
        experts_NK: torch.Tensor,
        gate_up_E2FD: torch.Tensor,
        down_EDF: torch.Tensor,
    ) -> torch.Tensor | None:
        """Compute all experts of a layer in one operation, [N, D], differentiable if a gradient is wanted.

        `gates_NK`: float; `experts_NK`: int64. Returns None where it is not available; then `models.experts` computes
        them. On a GPU it does not synchronise with the host (CUDA graphs need that)."""
        return None

    def attend_slots(
        self,
        q_NGRA: torch.Tensor,
        keys_SGCA: torch.Tensor,
        values_SGCB: torch.Tensor,
        slots: npt.NDArray[np.int64],
        counts: npt.NDArray[np.int64],
        scale: float | None = None,
    ) -> torch.Tensor | None:
        """Compute attention of N tokens, each to the first keys of its slot, [N, G, R, B].

        `slots`, `counts`: [N], the slot of each token (tokens may share one), and the number of keys that it sees.
        Returns None where there is no such kernel; then `inference.kv` calls attention with windows and masks."""
        return None

    def key_windows(self, heads: int, key_width: int) -> KeyWindows:
        """Return the numbers of cached keys, padding included, for which an engine can compute attention with equal
        results."""
        return ANY

    def index_scores(self, q_MJI: torch.Tensor, weights_MJ: torch.Tensor, k_MTI: torch.Tensor) -> torch.Tensor:
        """Compute the scores of keys for an indexer's choice (`exact.options.Index`), float32 [M, T].

        `k_MTI`: the keys, or [T, I] if all queries have the same."""
        total_MT: torch.Tensor | None = None
        for q_MI, w_M in zip(q_MJI.unbind(1), weights_MJ.unbind(1), strict=True):  # [M, J, T] would not fit
            dots_MT = q_MI @ k_MTI.mT if k_MTI.dim() == 2 else (k_MTI @ q_MI[..., None])[..., 0]
            share_MT = dots_MT.relu_() * w_M[:, None]
            total_MT = share_MT if total_MT is None else total_MT.add_(share_MT)
        assert total_MT is not None, "an indexer has heads"
        return total_MT

    def logits(self, x_RD: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
        """Compute the logits of the output head, [R, V]. This product is never quantised."""
        return self.linear(x_RD, weight_VD)

    def log_softmax(self, logits_RV: torch.Tensor, temperature: torch.Tensor | float = 1.0) -> torch.Tensor:
        """Compute log-probabilities, float32 [R, V], at one temperature, or at each row's own [R, 1].

        Sampler and learner both use this function."""
        logits_RV = logits_RV.float()
        if isinstance(temperature, torch.Tensor) or temperature != 1.0:
            if not isinstance(temperature, torch.Tensor):
                temperature = torch.full((), temperature, dtype=torch.float32, device=logits_RV.device)
            logits_RV = logits_RV / temperature.to(logits_RV)
        return logits_RV.log_softmax(-1)


def delegate_to_inner(kind: type[Operators]) -> None:
    """Add to a class that wraps operators all methods and properties of `Operators` that it does not define, as calls
    of its attribute `inner`.

    Call it after the class is defined."""
    for name in vars(Operators).keys() - vars(kind).keys():
        if not name.startswith("_"):
            setattr(kind, name, _forwarded(name))


def _forwarded(name: str) -> Any:
    if callable(vars(Operators)[name]):
        return lambda self, *args, **kwargs: getattr(self.inner, name)(*args, **kwargs)
    return property(lambda self: getattr(self.inner, name))


def at_least_float32(x: torch.Tensor) -> torch.Tensor:
    """Convert to float32, unless the dtype is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class _TorchCausal:
    """Causal attention with torch's kernels. Masks are shared by layers and sequences of one forward pass."""

    def __init__(self) -> None:
        self._masks = MasksByWindow(_MASKED_ROWS)

    def __call__(
        self,
        q_HTA: torch.Tensor,
        k_GTA: torch.Tensor,
        v_GTC: torch.Tensor,
        scale: float | None = None,
        start: int = 0,
        options: AttentionOptions | None = None,
    ) -> torch.Tensor:
        rows, gqa = q_HTA.shape[1], q_HTA.shape[0] != k_GTA.shape[0]
        if start < rows and options is None:  # half of a square is less than a masked rectangle
            q = F.pad(q_HTA, (0, 0, start, 0)) if start else q_HTA
            both = k_GTA[None], v_GTC[None]
            o = F.scaled_dot_product_attention(q[None], *both, is_causal=True, enable_gqa=gqa, scale=scale)
            return o[0, :, start:]
        outs, masks = [], self._masks(options)
        sinks = () if options is None else options.rows()
        for first, q in zip(range(start, start + rows, _MASKED_ROWS), torch.split(q_HTA, _MASKED_ROWS, 1), strict=True):
            stop = first + q.shape[1]
            mask = masks(first, stop, q)[: q.shape[1]]
            if options is not None and options.index is not None:
                own = slice(first - start, stop - start)
                mask = options.index.part(own, options.index.k_TI[:stop]).hide(mask)
            k, v = k_GTA[None, :, :stop], v_GTC[None, :, :stop]
            outs.append(masked_attention(q[None], k, v, mask, scale, *sinks)[0])
        return torch.cat(outs, 1)
