"""The experts' way on devices, run on the CPU: what `models.experts` computes, forward and back."""

from __future__ import annotations

import pytest
import torch

from etude.models.experts import Choice
from etude.models.experts import mix as on_the_host
from etude.numerics import grouped_experts
from etude.numerics.native import Native

TOKENS, WIDTH, EXPERTS, TOP, INNER = 37, 24, 6, 2, 16


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def both(dtype: torch.dtype) -> list[list[torch.Tensor]]:
    """Of either way the result and all gradients; expert 3 has no rows."""
    experts = torch.rand(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(1))
    experts[:, 3] = -1.0
    experts_NK = experts.topk(TOP, -1).indices
    slope = drawn(TOKENS, WIDTH, seed=2).to(dtype)
    found = []
    for device_way in (False, True):
        x = drawn(TOKENS, WIDTH, seed=3).to(dtype).requires_grad_()
        gates = drawn(TOKENS, TOP, seed=4).softmax(-1).requires_grad_()
        up = drawn(EXPERTS, 2 * INNER, WIDTH, seed=5).mul(0.2).requires_grad_()
        down = drawn(EXPERTS, WIDTH, INNER, seed=6).mul(0.2).requires_grad_()
        if device_way:
            y = grouped_experts.mix(x, gates, experts_NK, up, down)
        else:
            y = on_the_host(x, Choice(gates, experts_NK, experts_NK, None), up, down, Native(dtype))
        y.backward(slope)
        found.append([y.detach(), x.grad, gates.grad, up.grad, down.grad])
    return found


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
def test_experts_without_counts_on_the_host_are_those_with(dtype: torch.dtype, tolerance: float) -> None:
    for host, device in zip(*both(dtype), strict=True):
        assert host.dtype == device.dtype
        error = (host.double() - device.double()).norm() / host.double().norm()
        assert error < tolerance, f"{list(host.shape)}: {error:.1e}"


def test_an_expert_without_rows_has_no_gradient() -> None:
    for *_, up, down in both(torch.bfloat16):
        assert [int(one[3].count_nonzero()) for one in (up, down)] == [0, 0]
        assert all(one[2].any() for one in (up, down))


def test_rows_are_sorted_by_expert_and_ties_by_token() -> None:
    to = grouped_experts.SortedDispatch.of(torch.tensor([[2, 0], [0, 3], [2, 3]]), 4)
    assert to.ends_E.tolist() == [2, 2, 4, 6]
    assert to.token_S.tolist() == [0, 1, 0, 2, 1, 2]
    assert to.slot_NK.tolist() == [[2, 0], [1, 4], [3, 5]]


def test_only_what_the_devices_kernel_takes_goes_there() -> None:
    there = torch.empty(4, 24, dtype=torch.bfloat16, device="meta")
    assert grouped_experts.is_supported(there, torch.empty(2, 32, 24))
    assert not grouped_experts.is_supported(there, torch.empty(2, 20, 24))  # rows of 40 bytes
    assert not grouped_experts.is_supported(there.float(), torch.empty(2, 32, 24))
    assert not grouped_experts.is_supported(torch.empty(4, 24, dtype=torch.bfloat16), torch.empty(2, 32, 24))
