"""The model definition: views, replay, packing, exactness."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from etude.models import ModelConfig, Packed, Transformer, hf_views
from etude.models.experts import Choice, choose, mix
from etude.models.replay import RecordedRoutes
from etude.numerics.exact.operators import Exact

SIZES = ModelConfig(
    vocab_size=61,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    expert_size=24,
    num_experts=6,
    top_k=2,
    context_tokens=128,
)


@pytest.fixture(scope="module")
def model() -> Transformer:
    return Transformer(SIZES, seed=1).eval()


def tokens(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, SIZES.vocab_size, (n,), generator=torch.Generator().manual_seed(seed))


def test_the_number_of_parameters_is_what_the_config_says(model: Transformer) -> None:
    assert sum(p.numel() for p in model.parameters()) == SIZES.num_parameters
    assert sum(v.numel() for v in hf_views(model).values()) == SIZES.num_parameters


def test_hugging_face_names_are_contiguous_views_into_live_parameters(model: Transformer) -> None:
    views = hf_views(model)
    before, _ = model(tokens(5))
    for view in views.values():
        assert view.is_contiguous()
        view.mul_(1.01)
    after, _ = model(tokens(5))
    for view in views.values():
        view.div_(1.01)
    assert not torch.equal(before, after)
    assert views["model.layers.1.mlp.experts.5.up_proj.weight"].shape == (24, 32)
    assert "lm_head.weight" in views
    assert "lm_head.weight" not in hf_views(Transformer(replace(SIZES, tie_embeddings=True)))


@torch.no_grad()
def test_packed_sequences_do_not_see_each_other(model: Transformer) -> None:
    lengths = [1, 7, 30, 2]
    packed, routes = model(torch.cat([tokens(n, n) for n in lengths]), Packed(lengths, model.operators))
    alone = [model(tokens(n, n)) for n in lengths]
    assert torch.equal(packed, torch.cat([logits for logits, _ in alone]))
    assert torch.equal(routes, torch.cat([r for _, r in alone]))


@torch.no_grad()
def test_a_later_token_does_not_change_an_earlier_one(model: Transformer) -> None:
    ids = tokens(40)
    changed = ids.clone()
    changed[30:] = 0
    assert torch.equal(model(ids)[0][:30], model(changed)[0][:30])


@torch.no_grad()
def test_rows_pick_the_tokens_that_get_logits(model: Transformer) -> None:
    rows = torch.tensor([9, 2, 2])
    whole, _ = model(tokens(12))
    assert torch.equal(model(tokens(12), rows=rows)[0], whole[rows])


@torch.no_grad()
def test_replaying_the_live_routes_changes_nothing(model: Transformer) -> None:
    live = model.run(tokens(20))
    replayed = model.run(tokens(20), routes=live.routes)
    assert torch.equal(live.logits, replayed.logits)
    assert torch.equal(replayed.live, live.routes)


@torch.no_grad()
def test_replayed_routes_pick_the_experts_and_the_live_choice_is_still_told(model: Transformer) -> None:
    live = model.run(tokens(20))
    other = (live.routes + 1) % SIZES.num_experts
    replayed = model.run(tokens(20), routes=other)
    assert torch.equal(replayed.routes, other)
    assert torch.equal(replayed.live[:, 0], live.routes[:, 0])
    assert not torch.equal(replayed.logits, live.logits)


@torch.no_grad()
def test_a_missing_route_is_chosen_live(model: Transformer) -> None:
    live = model.run(tokens(20))
    routes = live.routes.clone()
    routes[5:9] = 255
    again = model.run(tokens(20), routes=routes)
    assert torch.equal(again.routes, live.routes)
    assert torch.equal(again.logits, live.logits)


@torch.no_grad()
def test_experts_give_a_token_the_same_bits_whatever_else_is_in_the_batch(model: Transformer) -> None:
    x = torch.randn(50, SIZES.hidden_size, generator=torch.Generator().manual_seed(3))
    experts = model.blocks[0].experts
    whole, _ = experts(x, None)
    for n in (1, 2, 3, 4, 9, 31):
        assert torch.equal(experts(x[:n], None)[0], whole[:n])


def test_the_written_out_backward_of_the_experts_is_the_gradient() -> None:
    generator = torch.Generator().manual_seed(0)

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    used = torch.randint(0, 4, (9, 2), generator=generator)  # expert 4 gets no token, others get fewer than four

    def f(x: torch.Tensor, gates: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        return mix(
            x, Choice(gates_NK=gates, experts_NK=used, live_NK=used, balance=None), gate_up, down, Exact(torch.float64)
        )

    assert torch.autograd.gradcheck(f, (leaf(9, 6), leaf(9, 2), leaf(5, 10, 6), leaf(5, 6, 5)))


def test_gates_of_replayed_experts_carry_gradient_to_the_router() -> None:
    scores = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
    routes = torch.tensor([[4, 1]] * 8, dtype=torch.uint8)
    choice = choose(scores, 2, RecordedRoutes(routes))
    assert torch.allclose(choice.gates_NK.sum(1), torch.ones(8))
    choice.gates_NK[:, 0].sum().backward()
    assert scores.grad is not None
    assert (scores.grad[:, [4, 1]] != 0).all()


def test_balance_loss_is_one_for_even_routing_and_num_experts_for_a_single_expert() -> None:
    even = choose(torch.eye(4) * 50, 1, balance=True).balance
    single = choose(torch.tensor([[50.0, 0, 0, 0]] * 4), 1, balance=True).balance
    assert even is not None
    assert single is not None
    assert even.item() == pytest.approx(1.0)
    assert single.item() == pytest.approx(4.0)


def test_balance_is_computed_in_training_only(model: Transformer) -> None:
    assert model.run(tokens(4)).balance is None
    assert Transformer(SIZES, seed=1).train().run(tokens(4)).balance is not None


@torch.no_grad()
def test_a_bf16_model_computes_nearly_the_same(model: Transformer) -> None:
    low = Transformer(SIZES, seed=1, dtype=torch.bfloat16).eval()
    logits, _ = low(tokens(30), routes=model(tokens(30))[1])
    assert logits.dtype == torch.float32  # of bf16 activations: rounding logits would save nothing
    assert torch.allclose(logits.float(), model(tokens(30))[0], atol=0.1)


def test_the_same_seed_gives_the_same_weights_and_another_seed_others() -> None:
    first, again, other = (Transformer(SIZES, seed=s).embedding for s in (5, 5, 6))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
