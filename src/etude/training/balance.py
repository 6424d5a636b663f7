"""Expert load balancing without a loss, by router biases that affect only the choice of experts.

After each step, experts with more load than the mean become less likely to be chosen (arXiv 2408.15664, algorithm 1;
DeepSeek-V3, arXiv 2412.19437). Gradients do not change.

Loads are counted from the live choice, whether experts are replayed or not: the bias steers what the router will
choose, and recorded routes may come from an older bias.

Shapes: N tokens, L layers with experts, K experts per token, E experts."""

from __future__ import annotations

import torch

from etude.models.transformer import Block, Transformer


def expert_loads(live_NLK: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Count the tokens that chose each expert, int64 [L, E].

    >>> expert_loads(torch.tensor([[[0, 2]], [[2, 1]]], dtype=torch.uint8), 4)
    tensor([[1, 1, 2, 0]])
    """
    num_layers = live_NLK.shape[1]
    layer_L1 = torch.arange(num_layers, device=live_NLK.device)[:, None] * num_experts
    counts = torch.bincount((live_NLK.long() + layer_L1).flatten(), minlength=num_layers * num_experts)
    return counts.view(num_layers, num_experts)


def balance_bias_update(bias_E: torch.Tensor, load_E: torch.Tensor, *, speed: float) -> torch.Tensor:
    """Return the bias after a step: increased by `speed` for experts with less than the mean load, decreased by `speed`
    for experts with more.

    >>> balance_bias_update(torch.zeros(4), torch.tensor([1, 2, 2, 3]), speed=0.5)
    tensor([ 0.5000,  0.0000,  0.0000, -0.5000])
    """
    load_E = load_E.to(bias_E.dtype)
    return bias_E + speed * (load_E.mean() - load_E).sign()


class ExpertBalancer:
    """Updates a model's router biases from the expert loads since the last update.

    `speed` is the amount by which a bias changes per step. With 0, or a model without biases, nothing is done."""

    def __init__(self, model: Transformer, *, speed: float) -> None:
        self._biases = router_biases(model) if speed else []
        self._speed, self._num_experts = speed, model.config.num_experts
        self.load_LE = torch.zeros(
            len(self._biases), self._num_experts, dtype=torch.int64, device=model.embedding.device
        )

    def count(self, live_NLK: torch.Tensor) -> None:
        """Add the routers' own choices in one forward pass to the loads. `live_NLK`: the chosen experts, integers."""
        if self._biases:
            self.load_LE += expert_loads(live_NLK, self._num_experts)

    @torch.no_grad()
    def update(self) -> None:
        """Update the router biases in place, and reset the counted loads to 0."""
        for bias_E, load_E in zip(self._biases, self.load_LE, strict=True):
            bias_E.copy_(balance_bias_update(bias_E, load_E, speed=self._speed))
        self.clear()

    def clear(self) -> None:
        """Reset the counted loads to 0, without an update."""
        self.load_LE.zero_()


def router_biases(model: Transformer) -> list[torch.Tensor]:
    """Return the bias of each layer with experts, float32 [E]; empty for families without biases."""
    found = []
    for block in model.blocks:
        assert isinstance(block, Block)
        if block.experts is not None and block.experts.bias is not None:
            found.append(block.experts.bias)
    return found
