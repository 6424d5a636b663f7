"""Operators on rounded numbers: what they compute, and gradients that are those of what they computed."""

from __future__ import annotations

import pytest
import torch

from etude.models.experts import choose, mix
from etude.numerics import Mode, NumericsConfig, Quantise
from etude.numerics.exact.operators import Exact
from etude.numerics.factory import operators_for
from etude.numerics.formats import FORMATS, Format
from etude.numerics.native import Native
from etude.numerics.operators import Operators
from etude.numerics.quantisation import QuantisedOperators, round_to_format

ALL = pytest.mark.parametrize("format", FORMATS.values(), ids=lambda format: str(format.name))


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


@ALL
def test_a_product_is_that_of_rounded_numbers_and_its_gradients_are_too(format: Format) -> None:
    x, w, dy = random(5, 64), random(7, 64, seed=1), random(5, 7, seed=2).detach()
    x_rounded, w_rounded = round_to_format(x.detach(), format), round_to_format(w.detach(), format, matrix=True)
    operators = QuantisedOperators(Exact(), format)
    y = operators.linear(x, w)
    assert torch.equal(y, Exact().linear(x_rounded, w_rounded))
    y.backward(dy)  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert w.grad is not None
    assert torch.allclose(x.grad, dy @ w_rounded, atol=1e-5)
    assert torch.allclose(w.grad, dy.T @ x_rounded, atol=1e-5)


@ALL
def test_experts_take_rounded_numbers_and_so_does_their_written_out_gradient(format: Format) -> None:
    x, gate_up, down = random(9, 32), random(4, 64, 32, seed=1), random(4, 32, 32, seed=2)
    choice = choose(random(9, 4, seed=3), 2)
    dy = random(9, 32, seed=4).detach()
    operators = QuantisedOperators(Exact(), format)
    mix(x, choice, gate_up, down, operators).backward(dy)  # type: ignore[no-untyped-call]
    found = [t.grad for t in (x, gate_up, down)]
    for t in (x, gate_up, down):
        t.grad = None
    dense = torch.zeros(9, 32)  # the same by autograd alone, one expert after another
    inputs, weights, outputs = (
        operators.quantise_input(x),
        operators.quantise_weight(gate_up),
        operators.quantise_weight(down),
    )
    for k in range(2):
        for e in range(4):
            a, b = (inputs @ weights[e].T).chunk(2, -1)
            y = operators.quantise_input(torch.nn.functional.silu(a) * b) @ outputs[e].T
            dense = dense + y * (choice.gates_NK[:, k].detach() * (choice.experts_NK[:, k] == e))[:, None]
    dense.backward(dy)  # type: ignore[no-untyped-call]
    for mine, t in zip(found, (x, gate_up, down), strict=True):
        assert mine is not None
        assert t.grad is not None
        assert torch.allclose(mine, t.grad, atol=1e-4, rtol=1e-4)


def test_router_head_and_norms_are_the_inner_operators_own() -> None:
    operators = QuantisedOperators(Native(), FORMATS[Quantise.MXFP4])
    x, w = random(3, 64), random(8, 64, seed=1)
    assert torch.equal(operators.router_scores(x, w), Native().router_scores(x, w))
    assert torch.equal(operators.logits(x, w), Native().logits(x, w))
    assert torch.equal(operators.rms_norm(x, None, 1e-6), Native().rms_norm(x, None, 1e-6))


def test_every_operator_but_the_rounded_ones_is_asked_of_the_inner() -> None:
    class Told(Native):
        def __getattribute__(self, name: str) -> object:
            told.append(name)
            return super().__getattribute__(name)

    told: list[str] = []
    operators = QuantisedOperators(Told(), FORMATS[Quantise.MXFP8])
    public = {name for name in vars(Operators) if not name.startswith("_")}
    rounded = {"linear", "linear_columns", "linear_partial", "quantise_input", "quantise_weight"}
    rounded |= {"absorbs_latents", "fused_experts", "syncs_with_host"}
    for name in public - rounded:
        told.clear()
        value = getattr(operators, name)
        if callable(value):
            with pytest.raises(TypeError):
                value(surely_no_argument=0)
        assert name in told


@pytest.mark.parametrize("mode", Mode)
def test_numerics_say_what_a_model_is_computed_with(mode: Mode) -> None:
    plain = operators_for(NumericsConfig(mode=mode), torch.bfloat16)
    assert isinstance(plain, Exact if mode is Mode.EXACT else Native)
    low = operators_for(NumericsConfig(mode=mode, quantise=Quantise.NVFP4), torch.bfloat16)
    assert isinstance(low, QuantisedOperators)
    assert type(low.inner) is type(plain)
    assert low.dtype is torch.bfloat16


def test_it_is_as_exact_as_what_computes() -> None:
    low = FORMATS[Quantise.MXFP8]
    assert QuantisedOperators(Exact(torch.bfloat16), low).exact is True
    assert QuantisedOperators(Native(), low).exact is False
    assert QuantisedOperators(Exact(torch.bfloat16), low).storage_dtype is torch.float32


def test_weights_that_are_rounded_already_are_taken_as_they_are() -> None:
    w = random(8, 64)
    operators = operators_for(NumericsConfig(quantise=Quantise.NVFP4), torch.float32, rounds_weights=False)
    assert operators.quantise_weight(w) is w
