"""Kernels for few rows: the bits of the vendor's products and of the operators one by one; attention is right."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from etude.models.experts import choose, mix
from etude.numerics import Native
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


kernel = pytest.mark.skipif(not has_kernel(), reason="needs the native kernels, AVX2 or AVX-512, and OMP_NUM_THREADS=1")


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


def experts(num_tokens: int, width: int, inner: int, *, scale: float = 1.0) -> tuple[torch.Tensor, ...]:
    x, scores = random(num_tokens, width) * scale, random(num_tokens, 6, seed=1)
    return x, scores, random(6, 2 * inner, width, seed=2), random(6, width, inner, seed=3)


@kernel
@pytest.mark.parametrize(("width", "inner"), [(128, 64), (256, 128), (80, 48), (512, 256)])
@pytest.mark.parametrize("scale", [0.1, 30.0])  # silu of numbers near 0, and of -1000 to 1000
def test_experts_by_one_kernel_have_the_bits_of_the_operators_one_by_one(width: int, inner: int, scale: float) -> None:
    x, scores, gate_up, down = experts(33, width, inner, scale=scale)
    choice, operators = choose(scores, 3), Exact()
    one_by_one = mix(x, choice, gate_up, down, operators)  # a gradient may be wanted here
    with torch.inference_mode():
        fused = operators.fused_experts(x, choice.gates_NK, choice.experts_NK, gate_up, down)
        assert fused is not None
        assert same_bits(fused, one_by_one)
        few = choose(scores[:2], 3)
        assert same_bits(mix(x[:2], few, gate_up, down, operators), one_by_one[:2])


@kernel
@pytest.mark.parametrize("num_tokens", [1, 2, 5, 9, 100])
@torch.inference_mode()
def test_native_experts_of_few_tokens_are_right(num_tokens: int) -> None:
    x, scores, gate_up, down = experts(num_tokens, 208, 48)
    choice = choose(scores, 2)
    expected = mix(x.double(), choice, gate_up.double(), down.double(), Native(torch.float64))
    found = Native().fused_experts(x, choice.gates_NK, choice.experts_NK, gate_up, down)
    assert found is not None
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-3)


@kernel
@pytest.mark.parametrize(("out_size", "in_size"), [(16, 16), (48, 208), (336, 272)])
@torch.inference_mode()
def test_products_in_any_order_are_right(out_size: int, in_size: int) -> None:
    weight = random(3, out_size, in_size + 16, seed=1)[..., :in_size]
    for rows in (*([count, 0, 1] for count in range(1, 17)), [64, 65, 200]):
        x = random(sum(rows), in_size)
        parts = zip(x.double().split(rows), weight.double(), strict=True)
        found = few_rows.products(x, weight, rows, few_rows.ANY_ORDER)
        assert found is not None
        torch.testing.assert_close(found.double(), torch.cat([x @ w.T for x, w in parts]), rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(Native().linear(x, weight[0]), x @ weight[0].T, rtol=1e-4, atol=1e-3)


@kernel
@pytest.mark.parametrize(("width", "value_width"), [(32, 32), (64, 48), (208, 208)])
@torch.inference_mode()
def test_a_decoded_token_attends_to_the_first_keys_of_its_own_slot(width: int, value_width: int) -> None:
    slots, counts = np.array([4, 0, 3]), np.array([1, 37, 64])
    q, keys, values = random(3, 2, 5, width), random(5, 2, 64, width, seed=1), random(5, 2, 64, value_width, seed=2)
    found = few_rows.attention(q, keys, values, slots, counts, 0.3)
    assert found is not None
    for one, own, slot, count in zip(found, q, slots, counts, strict=True):
        k, v = keys[slot, :, :count].double(), values[slot, :, :count].double()
        expected = (0.3 * own.double() @ k.mT).softmax(-1) @ v
        torch.testing.assert_close(one.double(), expected, rtol=1e-5, atol=1e-5)
    keys[4, :, 1:], values[4, :, 1:] = torch.nan, torch.nan  # what a longer sequence left there is not read
    assert same_bits(few_rows.attention(q, keys, values, slots, counts, 0.3), found)


@kernel
@torch.inference_mode()
def test_native_norms_are_right() -> None:
    x, weight = random(7, 3, 48), random(48, seed=1)
    expected = torch.nn.functional.rms_norm(x.double(), (48,), weight.double(), 1e-6)
    assert few_rows.rms_norm(x, weight, 1e-6) is not None
    torch.testing.assert_close(Native().rms_norm(x, weight, 1e-6).double(), expected, rtol=1e-6, atol=1e-6)
    expected = torch.nn.functional.rms_norm(x.mT.double(), (3,), None, 0.5)
    torch.testing.assert_close(Native().rms_norm(x.mT, None, 0.5).double(), expected, rtol=1e-6, atol=1e-6)
    expected = torch.nn.functional.rms_norm(x[:, :, :32].double(), (32,), None, 0.5)
    torch.testing.assert_close(Native().rms_norm(x[:, :, :32], None, 0.5).double(), expected, rtol=1e-6, atol=1e-6)


@torch.no_grad()
def test_what_the_kernels_of_layers_are_not_for_is_left_to_the_operators() -> None:
    x, scores, gate_up, down = experts(4, 64, 24)
    choice = choose(scores, 2)
    assert Exact().fused_experts(x, choice.gates_NK, choice.experts_NK, gate_up, down) is None
    assert Native().fused_experts(x, choice.gates_NK, choice.experts_NK, gate_up, down) is None
    assert Native().fused_experts(x[:0], choice.gates_NK[:0], choice.experts_NK[:0], gate_up, down) is None
    keys = random(1, 1, 64, 24)
    assert few_rows.attention(random(1, 1, 2, 24), keys, keys, np.array([0]), np.array([3])) is None
    x, _, gate_up, down = experts(4, 64, 32)
    with torch.enable_grad():
        assert Exact().fused_experts(x, choice.gates_NK, choice.experts_NK, gate_up, down) is None
        assert Native().fused_experts(x, choice.gates_NK, choice.experts_NK, gate_up, down) is None
    if has_kernel():
        with pytest.raises(ValueError, match="numbered from 0 to 5"):
            few_rows.experts(x, choice.gates_NK, choice.experts_NK + 6, gate_up, down, (64, 32))
