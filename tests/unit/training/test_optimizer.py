"""AdamW against torch's own, and its rounded live weights."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from etude.errors import CheckpointError, NotFinite
from etude.training.config import LiveWeights
from etude.training.exact_sum import exact_sum, rounded_sum
from etude.training.optimizer import AdamW
from etude.training.schedule import lr_multiplier


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))


def gradient(model: nn.Module, seed: int) -> None:
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(seed))
    model(x).square().sum().backward()


def test_ten_steps_are_torch_adamw_with_clipping() -> None:
    ours, theirs = layers(), layers()
    optimizer = AdamW(ours, weights=LiveWeights.F32, weight_decay=0.1, grad_clip=0.5)
    reference = torch.optim.AdamW(theirs.parameters(), lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for seed in range(10):
        gradient(ours, seed)
        gradient(theirs, seed)
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        reference.step()
        reference.zero_grad()
        assert optimizer.step(0.01) == pytest.approx(float(norm), rel=1e-5)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_live_weights_are_the_rounded_masters_after_every_step() -> None:
    model = layers()
    optimizer = AdamW(model, weights=LiveWeights.BF16)
    for seed in range(3):
        flat = torch.cat([p.detach().flatten() for p in model.parameters()])
        assert torch.equal(flat, flat.bfloat16().float())
        assert torch.equal(flat, optimizer.state()["master"].bfloat16().float())
        gradient(model, seed)
        optimizer.step(1e-3)


def test_updates_too_small_for_bf16_add_up_in_the_masters() -> None:
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = AdamW(model, weights=LiveWeights.BF16)
    seen = []
    for _ in range(40):
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step(1e-4)
        seen.append(model.weight.item())
    assert seen[0] == 1.0
    assert seen[-1] < 1.0


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    model = layers()
    optimizer = AdamW(model, weights=LiveWeights.F32)
    before = optimizer.live.clone()
    optimizer.grad.fill_(float("nan"))
    with pytest.raises(NotFinite, match="not finite"):
        optimizer.step(0.1)
    assert torch.equal(before, optimizer.live)


@pytest.mark.parametrize("weights", list(LiveWeights))
def test_a_restored_optimizer_goes_on_to_the_bit(weights: LiveWeights) -> None:
    model, other = layers(), layers()
    optimizer, restored = AdamW(model, weights=weights), AdamW(other, weights=weights)
    gradient(model, 0)
    optimizer.step(0.01)
    restored.restore({k: v.clone() for k, v in optimizer.state().items()}, live=False)
    for net, opt in ((model, optimizer), (other, restored)):
        gradient(net, 1)
        opt.step(0.01)
    assert torch.equal(optimizer.live, restored.live)
    assert torch.equal(optimizer.state()["master"], restored.state()["master"])


def test_masters_of_another_model_are_refused() -> None:
    optimizer = AdamW(layers(), weights=LiveWeights.BF16)
    state = {k: v.clone() for k, v in optimizer.state().items()}
    with pytest.raises(CheckpointError, match="does not fit"):
        optimizer.restore(state | {"first": torch.zeros(3)})
    with pytest.raises(CheckpointError, match="do not match the model's weights"):
        optimizer.restore(state | {"master": state["master"] + 1})


def test_the_rate_warms_up_stays_and_falls_to_its_final_share() -> None:
    rates = [lr_multiplier(s, 100, warmup_steps=10, decay_from=0.6, final=0.1) for s in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9:61] == [1.0] * 52
    assert rates[99] == pytest.approx(0.1 + 0.9 / 40)
    assert all(a >= b for a, b in pairwise(rates[60:]))
    assert lr_multiplier(10**6, None, warmup_steps=0, decay_from=0.6, final=0.1) == 1.0


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False, min_value=-1e300, max_value=1e300)), st.integers(1, 4))
def test_a_sum_of_parts_is_rounded_once_whoever_has_which(values, ranks):
    parts = [exact_sum(torch.tensor(values[rank::ranks], dtype=torch.float64)) for rank in range(ranks)]
    assert rounded_sum(parts) == math.fsum(values)


@pytest.mark.parametrize("odd", [math.inf, -math.inf, math.nan])
def test_a_sum_with_nan_or_infinity_is_nan_or_infinity(odd):
    found = rounded_sum(
        [exact_sum(torch.tensor([1.0, odd], dtype=torch.float64)), exact_sum(torch.ones(3, dtype=torch.float64))]
    )
    assert found == odd or (math.isnan(found) and math.isnan(odd))
