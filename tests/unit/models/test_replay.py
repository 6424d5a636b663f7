"""Recorded experts in place of a router's own choice, against the rule written as plain loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.models import ModelConfig, Transformer
from etude.models.replay import RecordedRoutes


def by_hand(recorded: list[int], live: list[int], scores: list[float], plausible: float, missing: int) -> list[int]:
    least = plausible * min(scores[e] for e in live)
    kept = [e != missing and scores[e] >= least for e in recorded]
    used = {e for e, keep in zip(recorded, kept, strict=True) if keep}
    fill = iter([e for e in live if e not in used])
    return [e if keep else next(fill) for e, keep in zip(recorded, kept, strict=True)]


@settings(max_examples=60)
@given(st.integers(0, 2**31), st.sampled_from([torch.uint8, torch.uint16]), st.sampled_from([0.0, 0.3, 0.9, 1.0]))
def test_plausible_experts_keep_their_slots_and_the_best_live_ones_fill_the_others(
    seed: int, dtype: torch.dtype, plausible: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    n, num_experts, k = 12, 9, 4
    scores = torch.rand(n, num_experts, generator=generator) + 1e-3  # as a softmax gives them, or a sigmoid
    chosen_by = scores + 0.5 * torch.randn(num_experts, generator=generator)  # a bias chooses, and weighs nothing
    live = chosen_by.topk(k, -1).indices
    missing = torch.iinfo(dtype).max
    routes = torch.rand(n, num_experts, generator=generator).argsort(-1)[:, :k]
    routes[torch.rand(n, generator=generator) < 0.2] = missing
    used = RecordedRoutes(routes.to(dtype), plausible).apply(live, scores)
    assert all(len(set(row)) == k for row in used.tolist())
    rows = zip(routes.tolist(), live.tolist(), scores.tolist(), strict=True)
    assert used.tolist() == [by_hand(*row, plausible=plausible, missing=missing) for row in rows]


def test_what_the_router_would_choose_itself_is_always_plausible() -> None:
    scores = torch.rand(50, 8, generator=torch.Generator().manual_seed(0))
    live = scores.topk(3, -1).indices
    turned = live.roll(1, -1)
    assert torch.equal(RecordedRoutes(turned.to(torch.uint8), plausible=1.0).apply(live, scores), turned)


@pytest.mark.parametrize(("num_experts", "dtype"), [(255, torch.uint8), (256, torch.uint16)])
def test_the_last_expert_of_a_model_is_no_missing_route(num_experts: int, dtype: torch.dtype) -> None:
    sizes = ModelConfig(
        vocab_size=11,
        hidden_size=8,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        expert_size=4,
        num_experts=num_experts,
        top_k=2,
        context_tokens=16,
    )
    model = Transformer(sizes, seed=0).eval()
    tokens = torch.arange(9)
    live = model.run(tokens)
    assert live.routes.dtype == dtype
    last = torch.tensor([[[num_experts - 1, 0]]] * 9).to(dtype)
    assert torch.equal(model.run(tokens, routes=last).routes, last)
    missing = torch.full_like(last, torch.iinfo(dtype).max)
    assert torch.equal(model.run(tokens, routes=missing).logits, live.logits)


def test_an_implausible_expert_is_replaced_in_a_forward_and_a_plausible_one_stays() -> None:
    model = Transformer(ModelConfig(context_tokens=32), seed=1).eval()
    tokens = torch.arange(20)
    live = model.run(tokens)
    other = (live.routes + 1) % model.config.num_experts
    assert torch.equal(model.run(tokens, routes=other).routes, other)
    filtered = model.run(tokens, routes=other, plausible=1.0)
    assert torch.equal(filtered.logits, live.logits) == torch.equal(filtered.routes, live.routes)
    assert torch.equal(filtered.routes.sort(-1).values, filtered.live.sort(-1).values)
