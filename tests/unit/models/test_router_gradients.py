"""Gradients through router and experts: the backward that is written out, replayed experts, balance."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from etude.models.components import Routing, Scores
from etude.models.experts import Choice, choose, mix
from etude.models.replay import RecordedRoutes
from etude.numerics.exact.operators import Exact
from etude.numerics.native import Native
from etude.numerics.operators import Operators

N, D, E, K, W = 7, 5, 6, 2, 3  # tokens, width, experts, experts a token, expert width
NATIVE = Native(torch.float64)
OPERATORS = pytest.mark.parametrize("operators", [NATIVE, Exact(torch.float64)], ids=["native", "exact"])


def keyed(seed: int, *shape: int) -> torch.Tensor:
    drawn = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return drawn.requires_grad_()


X, ROUTER, GATE_UP, DOWN = keyed(0, N, D), keyed(1, E, D), keyed(2, E, 2 * W, D), keyed(3, E, D, W)
WEIGHTS = (X, ROUTER, GATE_UP, DOWN)
BIAS = keyed(9, E).detach()
RECORDED = torch.stack([torch.randperm(E, generator=torch.Generator().manual_seed(n))[:K] for n in range(N)]).byte()
SOME = torch.where(torch.arange(N)[:, None] % 3 == 0, 255, RECORDED).to(torch.uint8)
ROUTES = pytest.mark.parametrize("routes", [None, RECORDED, SOME], ids=["live", "replayed", "some-missing"])
SIGMOID = Routing(scores=Scores.SIGMOID, scaling=2.5, num_groups=3, top_groups=2)
ROUTINGS = pytest.mark.parametrize("routing", [Routing(), Routing(normalise=False), SIGMOID], ids=["q", "raw", "ds"])
Weights = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def chosen(scores: torch.Tensor, routes: torch.Tensor | None, routing: Routing, *, balance: bool = False) -> Choice:
    bias = BIAS if routing.scores is Scores.SIGMOID else None
    recorded = None if routes is None else RecordedRoutes(routes)
    return choose(scores, K, recorded, NATIVE, routing=routing, bias_E=bias, balance=balance)


def mixed(
    weights: Weights, routes: torch.Tensor | None, routing: Routing, operators: Operators = NATIVE
) -> torch.Tensor:
    x, router, gate_up, down = weights
    return mix(x, chosen(x @ router.T, routes, routing), gate_up, down, operators)


def dense(weights: Weights, routes: torch.Tensor | None, routing: Routing) -> torch.Tensor:
    """Every expert of every token, and a gate of zero for those not chosen: nothing but autograd."""
    x, router, gate_up, down = weights
    logits = x @ router.T
    likely = logits.softmax(-1) if routing.scores is Scores.SOFTMAX else logits.sigmoid()
    used = chosen(logits, routes, routing).experts_NK
    gates = likely * torch.zeros_like(likely).scatter(1, used, 1.0)
    if routing.normalise:
        gates = gates / gates.sum(-1, keepdim=True)
    a, b = torch.einsum("nd,efd->nef", x, gate_up).chunk(2, -1)
    return routing.scaling * torch.einsum("ne,nef,edf->nd", gates, F.silu(a) * b, down)


@ROUTES
@ROUTINGS
@OPERATORS
def test_the_written_out_backward_is_that_of_the_dense_mixture(
    routes: torch.Tensor | None, routing: Routing, operators: Operators
) -> None:
    ours, theirs = mixed(WEIGHTS, routes, routing, operators), dense(WEIGHTS, routes, routing)
    assert torch.allclose(ours, theirs, atol=1e-12)
    up = keyed(4, N, D).detach()
    for mine, other in zip(
        torch.autograd.grad(ours, WEIGHTS, up), torch.autograd.grad(theirs, WEIGHTS, up), strict=True
    ):
        assert other.abs().max() > 0
        assert torch.allclose(mine, other, atol=1e-12)


@ROUTES
@ROUTINGS
def test_gradients_match_finite_differences_through_router_gates_and_experts(
    routes: torch.Tensor | None, routing: Routing
) -> None:
    assert torch.autograd.gradcheck(lambda *weights: mixed(weights, routes, routing), WEIGHTS, fast_mode=True)


def test_a_replayed_experts_gate_is_the_live_routers_softmax_over_the_replayed_ones() -> None:
    scores = keyed(5, N, E)
    choice = choose(scores, K, RecordedRoutes(RECORDED), NATIVE)
    assert torch.equal(choice.experts_NK, RECORDED.long())
    assert not torch.equal(choice.experts_NK.sort(-1).values, choice.live_NK.sort(-1).values)
    expected = scores.gather(1, RECORDED.long()).softmax(-1)
    assert torch.allclose(choice.gates_NK, expected, atol=1e-12)
    up = keyed(6, N, K).detach()
    (found,) = torch.autograd.grad(choice.gates_NK, scores, up)
    within = expected * (up - (expected * up).sum(-1, keepdim=True))  # softmax's, among the replayed experts alone
    assert torch.allclose(found, torch.zeros(N, E, dtype=torch.float64).scatter(1, RECORDED.long(), within), atol=1e-12)


def test_with_one_expert_a_token_the_router_learns_nothing_since_its_gate_is_one() -> None:
    scores = keyed(5, N, E)
    choice = choose(scores, 1, RecordedRoutes(RECORDED[:, :1]), NATIVE)
    assert torch.equal(choice.gates_NK, torch.ones(N, 1, dtype=torch.float64))
    assert not torch.autograd.grad(choice.gates_NK.sum(), scores)[0].any()


@ROUTES
def test_the_balancing_gradient_is_its_closed_form_and_counts_the_live_choice(routes: torch.Tensor | None) -> None:
    scores = keyed(7, N, E)
    choice = chosen(scores, routes, Routing(), balance=True)
    assert choice.balance is not None
    probs = scores.detach().softmax(-1)
    share = F.one_hot(probs.topk(K, -1).indices, E).sum((0, 1)) / (N * K)
    assert torch.allclose(choice.balance, E * (share * probs.mean(0)).sum())
    (found,) = torch.autograd.grad(choice.balance, scores)
    assert torch.allclose(found, E / N * probs * (share - (probs @ share.double())[:, None]), atol=1e-12)


@ROUTINGS
def test_the_balancing_loss_matches_finite_differences(routing: Routing) -> None:
    def balance(scores: torch.Tensor) -> torch.Tensor:
        found = chosen(scores, RECORDED, routing, balance=True).balance
        assert found is not None
        return found

    assert torch.autograd.gradcheck(balance, (keyed(7, N, E),))


def test_no_gradient_reaches_the_bias_of_choosing() -> None:
    bias = BIAS.clone().requires_grad_()
    choice = choose(keyed(7, N, E), K, None, NATIVE, routing=SIGMOID, bias_E=bias, balance=True)
    assert choice.balance is not None
    assert torch.autograd.grad(choice.gates_NK.sum() + choice.balance, bias, allow_unused=True) == (None,)


def test_the_balancing_loss_falls_along_its_gradient_to_one() -> None:
    scores = keyed(8, 400, E).detach() + torch.linspace(0, 3, E, dtype=torch.float64)
    shift = torch.zeros(E, dtype=torch.float64, requires_grad=True)
    losses = []
    for _ in range(60):
        balance = choose(scores + shift, K, None, NATIVE, balance=True).balance
        assert balance is not None
        losses.append(float(balance.detach()))
        (step,) = torch.autograd.grad(balance, shift)
        shift = (shift - 2.0 * step).detach().requires_grad_()
    assert losses[0] > 1.5
    assert losses[-1] < 1.05
