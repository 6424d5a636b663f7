"""The operators as torch has them. Shapes as in `operators`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

import torch
import torch.nn.functional as F

from etude.numerics import mixtures, varlen, vocabulary
from etude.numerics.operators import Operators, PackedCausal


class Native(Operators):
    """Torch as it comes: the fastest path for each shape, and so bits that depend on the batch."""

    def linear(self, x_NI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
        return F.linear(x_NI, weight_OI.to(x_NI.dtype))

    def per_head(self, x_NHI: torch.Tensor, weight_HOI: torch.Tensor) -> torch.Tensor:
        return torch.einsum("nhi,hoi->nho", x_NHI, weight_HOI.to(x_NHI.dtype))

    def packed(self, lengths: Sequence[int], device: torch.device) -> PackedCausal:
        """On a device one kernel for all sequences, where it has one for the dtype and the width."""
        each = super().packed(lengths, device)
        if device.type == "cpu":
            return each
        starts, longest = varlen.starts(lengths, device), max(lengths)

        def attend(
            q_NHA: torch.Tensor, k_NGA: torch.Tensor, v_NGC: torch.Tensor, scale: float | None = None
        ) -> torch.Tensor:
            if not varlen.suits(device, q_NHA.dtype, q_NHA.shape[-1]):
                return each(q_NHA, k_NGA, v_NGC, scale)
            return varlen.attend(q_NHA, k_NGA, v_NGC, starts, starts, longest, longest, scale=scale)

        return attend

    def log_softmax(self, logits_RV: torch.Tensor, temperature: torch.Tensor | float = 1.0) -> torch.Tensor:
        """On a device without float32 copies of the logits."""
        if logits_RV.device.type == "cpu":
            return super().log_softmax(logits_RV, temperature)
        if isinstance(temperature, torch.Tensor):
            divisor = temperature.to(logits_RV.device, torch.float32).expand(len(logits_RV), 1)
        elif temperature == 1.0:
            divisor = None
        else:
            divisor = torch.full((len(logits_RV), 1), temperature, dtype=torch.float32, device=logits_RV.device)
        return vocabulary.log_softmax(logits_RV, divisor)

    def mixture(
        self,
        x_ND: torch.Tensor,
        gates_NK: torch.Tensor,
        experts_NK: torch.Tensor,
        gate_up_E2FD: torch.Tensor,
        down_EDF: torch.Tensor,
    ) -> torch.Tensor | None:
        if mixtures.suits(x_ND, gate_up_E2FD, down_EDF):
            return mixtures.mix(x_ND, gates_NK, experts_NK, gate_up_E2FD, down_EDF)
        if x_ND.device.type == "cuda" and find_spec("triton") is not None:  # other dtypes and widths
            from etude.numerics.gpu import mix

            return mix(x_ND, gates_NK, experts_NK, gate_up_E2FD, down_EDF)
        return None
