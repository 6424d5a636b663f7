"""Experts with biases and the clamped SwiGLU: the numbers and gradients of the formula, expert by expert."""

from __future__ import annotations

import pytest
import torch

from etude.models.components import ClampedSwiglu
from etude.models.experts import Choice, mix
from etude.numerics.exact.operators import Exact
from etude.numerics.native import Native
from etude.numerics.operators import Operators

EXPERTS, WIDTH, INNER, NUM = 5, 8, 6, 30
SWIGLU = ClampedSwiglu(alpha=1.702, limit=0.9)


def leaves() -> list[torch.Tensor]:
    """Inputs, gates, matrices and biases; the last expert gets no token."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(NUM, WIDTH), (NUM, 2), (EXPERTS, 2 * INNER, WIDTH), (EXPERTS, WIDTH, INNER)]
    shapes += [(EXPERTS, 2 * INNER), (EXPERTS, WIDTH)]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def by_formula(*given: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    x, gates, gate_up, down, gate_up_bias, down_bias = (one.double() for one in given)
    h = torch.einsum("nd,nkfd->nkf", x, gate_up[chosen]) + gate_up_bias[chosen]
    gate, up = h.chunk(2, -1)
    gate, up = gate.clamp(max=SWIGLU.limit), up.clamp(-SWIGLU.limit, SWIGLU.limit)
    act = gate * torch.sigmoid(SWIGLU.alpha * gate) * (up + 1)
    y = torch.einsum("nkf,nkdf->nkd", act, down[chosen]) + down_bias[chosen]
    return (y * gates[..., None]).sum(1)


@pytest.mark.parametrize("operators", [Exact(), Native()], ids=["exact", "native"])
def test_outputs_and_gradients_are_those_of_the_formula(operators: Operators) -> None:
    given = leaves()
    chosen = torch.stack([torch.arange(NUM) % 4, (torch.arange(NUM) // 4 + 1) % 4], 1)
    chosen[:, 1] = torch.where(chosen[:, 0] == chosen[:, 1], (chosen[:, 1] + 1) % 4, chosen[:, 1])
    choice = Choice(gates_NK=given[1], experts_NK=chosen, live_NK=chosen, balance=None)
    x, _, gate_up, down, *biases = given
    y = mix(x, choice, gate_up, down, operators, biases=(biases[0], biases[1]), swiglu=SWIGLU)
    expected = by_formula(*given, chosen=chosen)
    assert torch.allclose(y.double(), expected, atol=1e-5)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad((y * weights).sum(), given)
    for one, other in zip(found, torch.autograd.grad((expected * weights).sum(), given), strict=True):
        assert torch.allclose(one, other, atol=1e-4)
        assert one.abs().max() > 0
    assert all(not one[-1].any() for one in found[2:])


def test_in_exact_mode_a_tokens_gradient_does_not_depend_on_where_its_row_is() -> None:
    """The same experts with the same four tokens each, in another order."""
    _, _, *stacks = leaves()
    found = []
    for order in (torch.arange(3), torch.tensor([2, 0, 1])):
        x = torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(2)).requires_grad_()
        experts = order.repeat_interleave(4)[:, None]
        choice = Choice(torch.ones(12, 1), experts, experts, balance=None)
        gate_up, down, *biases = (torch.empty_like(one[:3]).index_copy_(0, order, one.detach()[:3]) for one in stacks)
        y = mix(x, choice, gate_up, down, Exact(), biases=(biases[0], biases[1]), swiglu=SWIGLU)
        found.append(torch.autograd.grad((y * x.detach()).sum(), x)[0])
    assert torch.equal(*found)
