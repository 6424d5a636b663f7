"""`ExactGpu`: a model's operators in exact mode on a GPU, for `Transformer(config, operators=ExactGpu(dtype))`.

Bits are equal between models of one *parity class*: the same chip architecture, versions of Triton and of these
kernels, and dtype. The class differs from a CPU's, so engine and learner must both run on GPUs, or both on CPUs."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import torch
import torch.nn.functional as F
import triton

from etude.numerics.gpu import experts, matmul, routing, row_ops
from etude.numerics.gpu.attention import attend_packed
from etude.numerics.gpu.matmul import Groups
from etude.numerics.gpu.tiles import tiles_of
from etude.numerics.operators import Causal, Operators, PackedCausal


class ExactGpu(Operators):
    """Operators with one order of summation each, in Triton.

    Weights are rounded to the rows' dtype as they are read."""

    has_attention_options = False
    has_delta_rule = False
    absorbs_latents = True  # so that packed forward passes sum in the same order as those over a cache of latents

    def __init__(self, dtype: torch.dtype = torch.bfloat16, *, degree: int = 1) -> None:
        """Create operators that compute in `dtype`.

        `degree`: the largest number of tensor-parallel ranks, a power of two, for which products keep their bits."""
        super().__init__(dtype)
        self.degree = degree

    @property
    def name(self) -> str:
        return f"{super().name} degree {self.degree}"

    @property
    def exact(self) -> bool:
        return True

    @property
    def kernels(self) -> str:
        return f"triton-{triton.__version__} {_digest_of_programs()}"

    def linear(self, x_NI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
        return matmul.linear(x_NI, weight_OI, degree=self.degree)

    def grouped(self, x_SI: torch.Tensor, weight_EOI: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        starts = torch.tensor([0, *accumulate(rows)], dtype=torch.int32).to(x_SI.device)
        _, outs, ins = weight_EOI.shape
        tiles = tiles_of(outs, ins, x_SI.element_size(), grouped=True, degree=self.degree)
        return matmul.multiply(x_SI, weight_EOI, tiles, groups=Groups(starts, len(x_SI)))

    def per_head(self, x_NHI: torch.Tensor, weight_HOI: torch.Tensor) -> torch.Tensor:
        n, heads, ins = x_NHI.shape
        starts = torch.arange(heads + 1, dtype=torch.int32, device=x_NHI.device) * n
        y = matmul.grouped(x_NHI.transpose(0, 1).reshape(heads * n, ins), weight_HOI, Groups(starts, heads * n))
        return y.view(heads, n, -1).transpose(0, 1)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
        return row_ops.rms_norm(x, weight, eps)

    def rotate(self, x_NHA: torch.Tensor, cos_N1A: torch.Tensor, sin_N1A: torch.Tensor) -> torch.Tensor:
        return row_ops.rotate(x_NHA, cos_N1A, sin_N1A)

    def router_scores(self, x_ND: torch.Tensor, weight_ED: torch.Tensor) -> torch.Tensor:
        """Compute a router's logits, float32 [N, E]. They are not rounded, since rounded logits would often be
        equal."""
        return matmul.linear(x_ND, weight_ED, dtype=torch.float32)

    def combine(self, out_SD: torch.Tensor, slot_NK: torch.Tensor, gates_NK: torch.Tensor) -> torch.Tensor:
        return row_ops.combine(out_SD, slot_NK, gates_NK)

    def gated(self, h_SF: torch.Tensor) -> torch.Tensor:
        return row_ops.gated(h_SF)

    def softmax(self, scores_NE: torch.Tensor) -> torch.Tensor:
        return routing.scores(scores_NE, sigmoid=False)

    def sigmoid(self, scores_NE: torch.Tensor) -> torch.Tensor:
        return routing.scores(scores_NE, sigmoid=True)

    def top_k(self, values_NE: torch.Tensor, k: int) -> torch.Tensor:
        """Return the indices of the k largest values, largest first, ties to the lowest index; [N, k]."""
        return values_NE.sort(dim=-1, descending=True, stable=True).indices[..., :k]

    def causal_attention(self) -> Causal:
        return _causal

    def packed_attention(self, lengths: Sequence[int], device: torch.device) -> PackedCausal:
        starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device)
        return functools.partial(_packed, Groups(starts, sum(lengths)))

    def fused_experts(
        self,
        x_ND: torch.Tensor,
        gates_NK: torch.Tensor,
        experts_NK: torch.Tensor,
        gate_up_E2FD: torch.Tensor,
        down_EDF: torch.Tensor,
    ) -> torch.Tensor:
        return experts.mix(x_ND, gates_NK, experts_NK, gate_up_E2FD, down_EDF, degree=self.degree)

    def logits(self, x_RD: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
        """Compute the logits of the output head, float32 [R, V], without rounding them."""
        return self.router_scores(x_RD, weight_VD)

    def log_softmax(self, logits_RV: torch.Tensor, temperature: torch.Tensor | float = 1.0) -> torch.Tensor:
        if isinstance(temperature, torch.Tensor) or temperature != 1.0:
            logits_RV = logits_RV.float() / temperature
        return row_ops.log_softmax(logits_RV)


@functools.cache
def _digest_of_programs() -> str:
    """Return a digest of the kernels' sources: equal sources compile to equal kernels with one Triton for one chip."""
    folder, digest = Path(__file__).parent, hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


def _packed(
    tokens: Groups,
    q_NHA: torch.Tensor,
    k_NGA: torch.Tensor,
    v_NGC: torch.Tensor,
    scale: float | None = None,
    options: None = None,
) -> torch.Tensor:
    return attend_packed(q_NHA, k_NGA, v_NGC, tokens, scale)


def _causal(
    q_HTA: torch.Tensor,
    k_GTA: torch.Tensor,
    v_GTC: torch.Tensor,
    scale: float | None = None,
    start: int = 0,
    options: None = None,
) -> torch.Tensor:
    if start:  # the kernel needs a query for each key
        return _causal(F.pad(q_HTA, (0, 0, start, 0)), k_GTA, v_GTC, scale)[:, start:]
    whole = Groups(torch.tensor([0, q_HTA.shape[1]], dtype=torch.int32).to(q_HTA.device), q_HTA.shape[1])
    q, k, v = (t.transpose(0, 1) for t in (q_HTA, k_GTA, v_GTC))
    return attend_packed(q, k, v, whole, scale).transpose(0, 1)
