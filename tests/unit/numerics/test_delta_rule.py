"""The gated delta rule: its formula, its gradient, and bits that do not depend on how a sequence is cut."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.numerics import Native, Operators
from etude.numerics.delta_rule import Segments, causal_convolution
from etude.numerics.exact.operators import Exact

HEADS, KEY, VALUE = 3, 7, 5
Inputs = tuple[torch.Tensor, ...]


def drawn(num: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(num, HEADS, width, generator=generator, dtype=dtype) for width in (KEY, KEY, VALUE))
    g, beta = (torch.randn(num, HEADS, generator=generator, dtype=dtype) for _ in range(2))
    return q, torch.nn.functional.normalize(k, dim=-1), v, -g.abs() / 4, beta.sigmoid()


def formula(inputs: Inputs, state: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, token by token, as autograd differentiates it."""
    q, k, v, g, beta = inputs
    state = v.new_zeros(HEADS, KEY, VALUE) if state is None else state
    outs = []
    for t in range(len(q)):
        state = state * g[t].exp()[:, None, None]
        wrong = (v[t] - torch.einsum("hab,ha->hb", state, k[t])) * beta[t][:, None]
        state = state + torch.einsum("ha,hb->hab", k[t], wrong)
        outs.append(torch.einsum("hab,ha->hb", state, q[t]))
    return torch.stack(outs), state


def rule(operators: Operators, inputs: Inputs, lengths: list[int], states: torch.Tensor | None) -> Inputs:
    return operators.delta_rule(inputs, states, Segments(lengths))


def test_outputs_states_and_gradients_are_those_of_the_formula() -> None:
    lengths, states = [1, 70, 5], torch.randn(3, HEADS, KEY, VALUE, dtype=torch.float64)
    for operators in (Exact(torch.float64), Native(torch.float64)):
        inputs = tuple(x.requires_grad_() for x in drawn(sum(lengths), torch.float64))
        begin = states.clone().requires_grad_()
        parts = zip(*(torch.split(x, lengths) for x in inputs), begin.unbind(), strict=True)
        wanted = [formula(part[:-1], part[-1]) for part in parts]
        expected = torch.cat([o for o, _ in wanted]), torch.stack([state for _, state in wanted])
        found = rule(operators, inputs, lengths, begin)
        weights = [torch.randn(one.shape, dtype=torch.float64) for one in expected]
        gradients = [torch.autograd.grad(both, (*inputs, begin), weights) for both in (expected, found)]
        for one, other in zip((*expected, *gradients[0]), (*found, *gradients[1]), strict=True):
            assert torch.allclose(one, other, rtol=1e-10, atol=1e-10)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 3))
@torch.no_grad()
def test_in_exact_mode_a_token_has_the_same_bits_however_its_sequence_is_cut(pieces: list[int], others: int) -> None:
    operators, total = Exact(), sum(pieces)
    inputs, neighbour = drawn(total), drawn(4 * others, seed=1)
    whole, last = rule(operators, inputs, [total], None)
    outs, state = [], None
    for piece, part in zip(pieces, zip(*(torch.split(x, pieces) for x in inputs), strict=True), strict=True):
        beside = tuple(torch.cat([one, two]) for one, two in zip(part, neighbour, strict=True))
        zeros = torch.zeros(others, HEADS, KEY, VALUE)
        before = None if state is None else torch.cat([state, zeros])
        out, states = rule(operators, beside, [piece] + [4] * others, before)
        outs.append(out[:piece])
        state = states[:1]
    assert torch.equal(torch.cat(outs), whole)
    assert state is not None
    assert torch.equal(state, last)


def test_a_convolution_sees_the_tokens_before_its_segment() -> None:
    x, weight = torch.randn(9, 4), torch.randn(4, 3)
    padded = torch.nn.functional.pad(x.T, (2, 0))[None]
    expected = torch.nn.functional.conv1d(padded, weight[:, None], groups=4)[0].T
    whole, last = causal_convolution(x, weight, None, Segments([9]))
    assert torch.allclose(whole, expected, atol=1e-6)
    assert torch.equal(last, x[None, -2:])
    first, before = causal_convolution(x[:1], weight, None, Segments([1]))
    both = torch.cat([before, before])
    rest, after = causal_convolution(torch.cat([x[1:], x[1:4]]), weight, both, Segments([8, 3]))
    assert torch.equal(torch.cat([first, rest[:8]]), whole)
    assert torch.equal(rest[8:], whole[1:4])
    assert torch.equal(after, torch.stack([x[-2:], x[2:4]]))
