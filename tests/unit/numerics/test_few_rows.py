"""Products of few rows by the kernel: the vendor's bits, for each row alone and among others."""

from __future__ import annotations

import pytest
import torch

from etude.numerics.exact import block_for, few_rows, matmul
from etude.numerics.exact.operators import Exact

ROWS = 300  # more than the kernel is for


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def has_kernel() -> bool:
    x = random(16, 64)
    done = few_rows.products(x, random(16, 64), [16], 64)
    return done is not None and torch.get_num_threads() == 1


kernel = pytest.mark.skipif(not has_kernel(), reason="needs the native kernels, AVX-512 and OMP_NUM_THREADS=1")


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


@kernel
@pytest.mark.parametrize(("out_size", "in_size"), [(48, 64), (16, 192), (80, 256), (64, 384), (32, 512), (96, 768)])
def test_few_rows_have_the_bits_that_they_have_in_the_vendors_product(out_size: int, in_size: int) -> None:
    x, weight = random(ROWS, in_size), random(out_size, in_size + 32, seed=1)[:, :in_size]
    reference = matmul.linear(x, weight)
    with torch.inference_mode():
        assert block_for(x[:1], weight, [1])
        for count in (*range(1, 20), 64, 255):
            assert same_bits(matmul.linear(x[-count:], weight), reference[-count:]), count


@kernel
def test_few_rows_of_experts_have_the_bits_that_they_have_in_the_vendors_product() -> None:
    x, weight, rows = random(33, 256), random(5, 64, 256, seed=1), [4, 0, 9, 20, 0]
    reference = Exact().grouped(x, weight, rows)
    with torch.inference_mode():
        assert block_for(x, weight, rows)
        assert same_bits(Exact().grouped(x, weight, rows), reference)


@torch.no_grad()
def test_what_the_kernel_is_not_for_is_left_to_the_vendor() -> None:
    x, weight = random(4, 64), random(16, 64, seed=1)
    assert few_rows.products(random(4, 24), random(16, 24), [4], 16) is None
    assert few_rows.products(x, weight, [4], 256) is None
    assert not block_for(random(ROWS, 64), weight, [ROWS])
    assert not block_for(x, random(64, 16).T, [4])
    with torch.enable_grad():
        assert not block_for(x, weight, [4])
