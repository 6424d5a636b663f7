"""Log-probabilities in parts of rows, on the CPU: the plain way's, with its gradient."""

from __future__ import annotations

import pytest
import torch

from etude.numerics.native import chunked_log_softmax


@pytest.mark.parametrize("tempered", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_parts_of_rows_are_the_whole_and_so_is_the_gradient(dtype: torch.dtype, tempered: bool) -> None:
    drawn = torch.Generator().manual_seed(0)
    logits, slope = (torch.randn(7, 50, generator=drawn).to(dtype) for _ in range(2))
    divisor = torch.rand(7, 1, generator=drawn) + 0.5 if tempered else None
    plain, parts = (logits.clone().requires_grad_() for _ in range(2))
    expected = (plain.float() if divisor is None else plain.float() / divisor).log_softmax(-1)
    found = chunked_log_softmax(parts, divisor, part=3 * 50)
    assert found.dtype == torch.float32
    assert torch.allclose(found, expected, atol=1e-6)
    for each in (found, expected):
        each.backward(slope.float())
    assert parts.grad.dtype == dtype
    assert torch.allclose(parts.grad, plain.grad, atol=1e-6 if dtype == torch.float32 else 1e-2)
