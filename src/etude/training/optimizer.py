"""AdamW over one flat vector, with float32 masters behind live weights that may be rounded to bf16.

Rounding the live weights makes the learner forward with exactly the bytes it publishes: an engine that reads bf16 and
computes in float32 holds the same numbers. The masters keep what rounding would lose, so small updates add up.

One vector for all weights and one for all gradients: a step is one fused pass over them however many tensors there are
(1.6 ms at the laptop's size, where separate operations took 4.1), and data-parallel ranks exchange one buffer.
Knows nothing of losses or schedules.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.optim.adamw import adamw

from etude.errors import CheckpointError, NotFinite
from etude.training.config import LiveWeights


class AdamW:
    """Decoupled weight decay (arXiv 1711.05101). Takes over the memory of the model's parameters and gradients.

    >>> layer = nn.Linear(2, 1, bias=False)
    >>> optimizer = AdamW(layer, weights=LiveWeights.F32)
    >>> before = layer.weight.sum().item()
    >>> layer(torch.ones(1, 2)).sum().backward()
    >>> norm = optimizer.step(lr=0.1)
    >>> round(norm, 3), round(layer.weight.sum().item() - before, 3), layer.weight.grad.sum().item()
    (1.414, -0.2, 0.0)
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        weights: LiveWeights,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        grad_clip: float = 1.0,
    ) -> None:
        self.betas, self.eps, self.weight_decay, self.grad_clip = betas, eps, weight_decay, grad_clip
        self.num_steps = 0
        parameters = list(model.parameters())
        self.live = torch.cat([p.detach().flatten() for p in parameters])
        self.grad = torch.zeros_like(self.live)
        sizes = [p.numel() for p in parameters]
        for p, live, grad in zip(parameters, torch.split(self.live, sizes), torch.split(self.grad, sizes), strict=True):
            p.data, p.grad = live.view_as(p), grad.view_as(p)
        self.master = self.live if weights is LiveWeights.F32 else self.live.clone()
        self.first, self.second = torch.zeros_like(self.live), torch.zeros_like(self.live)
        self._round()

    @torch.no_grad()
    def step(self, lr: float) -> float:
        """Apply the gradient and clear it; its norm before clipping. Raises `NotFinite` when that is none, and
        then changes nothing."""
        norm = float(torch.linalg.vector_norm(self.grad))
        if not norm < float("inf"):
            raise NotFinite(f"the gradient of step {self.num_steps + 1} is not finite", f"norm {norm}", hint="lower lr")
        self.num_steps += 1
        adamw(
            [self.master],
            [self.grad],
            [self.first],
            [self.second],
            [],
            [torch.tensor(self.num_steps - 1.0)],  # counted up by the kernel
            fused=True,
            grad_scale=torch.tensor(norm / self.grad_clip) if norm > self.grad_clip > 0 else None,  # a divisor
            beta1=self.betas[0],
            beta2=self.betas[1],
            lr=lr,
            weight_decay=self.weight_decay,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
        )
        self._round()
        self.grad.zero_()
        return norm

    def clear(self) -> None:
        """Forget the accumulated gradient."""
        self.grad.zero_()

    def state(self) -> dict[str, torch.Tensor]:
        """What a checkpoint needs beside the model, as views; the accumulated gradient is not part of it."""
        count = torch.tensor([self.num_steps], dtype=torch.int64)
        return {"master": self.master, "first": self.first, "second": self.second, "num_steps": count}

    @torch.no_grad()
    def restore(self, state: Mapping[str, torch.Tensor], *, live: bool = True) -> None:
        """Go on from a `state`. Raises `CheckpointError` when it is not of this model, or, with `live`, when its
        masters are not those of the live weights."""
        own = self.state()
        for name, tensor in own.items():
            found = state.get(name)
            if found is None or found.shape != tensor.shape or found.dtype != tensor.dtype:
                raise CheckpointError(
                    f"the optimiser's {name!r} does not fit the model", hint="load a whole learner checkpoint"
                )
        before = self.live.clone()
        for name in ("master", "first", "second"):
            own[name].copy_(state[name])
        self.num_steps = int(state["num_steps"])
        self._round()
        if live and not torch.equal(before, self.live):
            raise CheckpointError(
                "the optimiser's master weights are not those of the model beside them",
                f"{int((before != self.live).sum())} of {before.numel()} differ",
                hint="load a whole learner checkpoint, with the same `weights` setting",
            )

    def _round(self) -> None:
        if self.master is not self.live:
            self.live.copy_(self.master.bfloat16())
