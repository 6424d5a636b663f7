"""Optimisers on a GPU: blocks have the bits of the CPU, and state in host memory those of state on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from etude.training.config import LiveWeights, Masters, Moments
from etude.training.optimizer import AdamW

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU here: state is moved between two memories"
)
COMPACT: dict[str, Any] = {"masters": Masters.BF16, "moments": Moments.INT8}


def stepped(device: str, **settings: Any) -> AdamW:
    """An optimiser after five steps with the same gradients."""
    model = nn.Linear(1024, 768).to(device)
    with torch.no_grad():
        for number, p in enumerate(model.parameters()):
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(number)))
    optimizer = AdamW(model, weights=LiveWeights.BF16, weight_decay=0.1, **settings)
    for seed in range(5):
        optimizer.grad.copy_(torch.randn(len(optimizer.grad), generator=torch.Generator().manual_seed(seed)))
        optimizer.step(1e-3)
    return optimizer


@pytest.mark.parametrize("settings", [{}, COMPACT, {"moments": Moments.INT8}])
def test_state_in_host_memory_takes_the_steps_of_state_on_the_device(settings: dict[str, Any]) -> None:
    here, away = stepped("cuda", **settings), stepped("cuda", offload=True, **settings)
    assert torch.equal(here.live, away.live)
    for key, stored in away.kept.tensors().items():
        assert stored.device.type == "cpu"
        assert stored.is_pinned()
        assert torch.equal(stored, here.kept.tensors()[key].cpu())


def test_a_step_of_blocks_has_the_bits_of_the_cpu() -> None:
    here, there = stepped("cpu", **COMPACT), stepped("cuda", **COMPACT)
    assert torch.equal(here.live, there.live.cpu())
    assert all(torch.equal(mine, there.kept.tensors()[key].cpu()) for key, mine in here.kept.tensors().items())
