"""Balancing without a loss: experts that get too much become a little less likely to be chosen, by a bias that only
choosing sees (arXiv 2408.15664, algorithm 1; DeepSeek-V3, arXiv 2412.19437). No gradient is bent for it.

Loads are counted from the live choice, replayed experts or not: a bias steers what the router will choose, and what an
engine chose under an older one says nothing of that.

Shapes: N tokens, L layers with experts, K experts a token, E experts.
"""

from __future__ import annotations

import torch

from etude.models.transformer import Block, Transformer


def expert_loads(live_NLK: torch.Tensor, num_experts: int) -> torch.Tensor:
    """How many tokens chose each expert, int64 [L, E].

    >>> loads(torch.tensor([[[0, 2]], [[2, 1]]], dtype=torch.uint8), 4)
    tensor([[1, 1, 2, 0]])
    """
    num_layers = live_NLK.shape[1]
    layer_L1 = torch.arange(num_layers, device=live_NLK.device)[:, None] * num_experts
    counts = torch.bincount((live_NLK.long() + layer_L1).flatten(), minlength=num_layers * num_experts)
    return counts.view(num_layers, num_experts)


def balance_bias_update(bias_E: torch.Tensor, load_E: torch.Tensor, *, speed: float) -> torch.Tensor:
    """The bias after a step: up by `speed` where an expert got less than the mean, down where it got more.

    >>> balance_bias_update(torch.zeros(4), torch.tensor([1, 2, 2, 3]), speed=0.5)
    tensor([ 0.5000,  0.0000,  0.0000, -0.5000])
    """
    load_E = load_E.to(bias_E.dtype)
    return bias_E + speed * (load_E.mean() - load_E).sign()


class ExpertBalancer:
    """Moves a model's biases by what was chosen since the last move. Does nothing for a model without biases, or at
    speed 0."""

    def __init__(self, model: Transformer, *, speed: float) -> None:
        self._biases = router_biases(model) if speed else []
        self._speed, self._num_experts = speed, model.config.num_experts
        self.load_LE = torch.zeros(
            len(self._biases), self._num_experts, dtype=torch.int64, device=model.embedding.device
        )

    def count(self, live_NLK: torch.Tensor) -> None:
        """Count one forward's choices."""
        if self._biases:
            self.load_LE += expert_loads(live_NLK, self._num_experts)

    @torch.no_grad()
    def update(self) -> None:
        """Update the biases in place, and begin to count anew."""
        for bias_E, load_E in zip(self._biases, self.load_LE, strict=True):
            bias_E.copy_(balance_bias_update(bias_E, load_E, speed=self._speed))
        self.clear()

    def clear(self) -> None:
        """Forget what was counted."""
        self.load_LE.zero_()


def router_biases(model: Transformer) -> list[torch.Tensor]:
    """The bias of each layer with experts, float32 [E]; none where the family has none."""
    found = []
    for block in model.blocks:
        assert isinstance(block, Block)
        if block.experts is not None and block.experts.bias is not None:
            found.append(block.experts.bias)
    return found
