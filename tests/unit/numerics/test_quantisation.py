"""The block-scaled formats against tables made from their definitions, and what holds for any numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from etude.errors import ConfigError
from etude.numerics.config import Quantise
from etude.numerics.formats import E2M1, E4M3, Element
from etude.numerics.quantisation import FORMATS, Format, pack, round_to_format, unpack
from etude.numerics.quantisation.packing import _codes, _values
from etude.numerics.quantisation.rounding import power_of_two, to_element_, to_scaled

ALL = pytest.mark.parametrize("format", FORMATS.values(), ids=str)
FEW = settings(max_examples=12)  # each has a thousand numbers
BOTH = pytest.mark.parametrize("element", [E4M3, E2M1], ids=["E4M3", "E2M1"])


def value(code: int, element: Element) -> float:
    """A code's value, from the OCP Microscaling specification's section 5.3."""
    exponent_bits = element.bits - 1 - element.mantissa
    bias = 1 - element.min_exponent
    sign = -1.0 if code >> (element.bits - 1) else 1.0
    exponent, mantissa = code >> element.mantissa & (1 << exponent_bits) - 1, code & (1 << element.mantissa) - 1
    if element is E4M3 and exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0 ** (element.min_exponent - element.mantissa)
    return sign * (1 + mantissa / (1 << element.mantissa)) * 2.0 ** (exponent - bias)


def table(element: Element) -> list[float]:
    return [value(code, element) for code in range(1 << element.bits)]


def nearest(x: float, element: Element) -> float:
    """By search: the closest value, of two the one with the even code; past the largest, the largest."""
    positive = [(v, code) for code, v in enumerate(table(element)) if code < 1 << (element.bits - 1) and v == v]
    return math.copysign(min(positive, key=lambda vc: (abs(vc[0] - abs(x)), vc[1] % 2))[0], x)


@BOTH
def test_every_code_of_an_element_has_the_value_that_the_specification_gives_it(element: Element) -> None:
    values = table(element)
    assert max(v for v in values if v == v) == element.largest
    codes = torch.arange(1 << element.bits, dtype=torch.uint8)
    found = _values(codes, element)
    found = found if element is E4M3 else found[:, 0]
    assert np.array_equal(found.numpy(), values, equal_nan=True)
    real = found[~found.isnan()]
    assert torch.equal(_codes(real, element), codes[~found.isnan()]), "and goes back to the code, zero's sign kept"


@BOTH
def test_rounding_takes_the_nearest_value_and_of_two_the_even_one(element: Element) -> None:
    known = sorted({v for v in table(element) if v >= 0})
    middles = [(a + b) / 2 for a, b in itertools.pairwise(known)]
    beside = [float(np.nextafter(np.float32(m), np.float32(to))) for m in middles for to in (-math.inf, math.inf)]
    numbers = [*known, *middles, *beside, element.largest * 1.1, 1e6, 1e-30]
    numbers += [-x for x in numbers]
    found = to_element_(torch.tensor(numbers), element)
    assert found.tolist() == [nearest(x, element) for x in numbers]
    assert torch.equal(found.signbit(), torch.tensor(numbers).signbit()), "zeros keep their signs"
    assert to_element_(torch.tensor([math.nan]), element).isnan().all()


def test_rounding_to_e4m3_is_that_of_torch_for_every_bfloat16() -> None:
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    numbers = numbers[~numbers.isnan()].clamp(-448, 448)  # releases of torch differ in what is past the largest
    assert torch.equal(to_element_(numbers.clone(), E4M3), numbers.to(torch.float8_e4m3fn).float())


def test_every_power_of_two_of_e8m0_is_found_and_none_saturates() -> None:
    powers = [2.0**k for k in range(-126, 116)]
    for most in (448.0, 6.0, 2688.0):
        largest = torch.tensor([p * f for p in powers for f in (1.0, 1.3, 1.32, 1.5, 1.76, 1.99)])
        scale = power_of_two(largest, most)
        assert ((scale.double() * most) >= largest.double()).all()
        smaller = scale.double() / 2 * most >= largest.double()
        assert not (smaller & (scale > 2.0**-127)).any(), "it is the smallest"
        assert torch.equal(scale.to(torch.float8_e8m0fnu).float(), scale)


@ALL
def test_zeros_stay_zeros_with_their_signs(format: Format) -> None:
    x = torch.zeros(2, 64)
    x[0, ::2] = -0.0
    assert torch.equal(round_to_format(x, format).view(torch.int32), x.view(torch.int32))
    assert torch.equal(unpack(pack(x, format), format).view(torch.int32), x.view(torch.int32))


@ALL
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_only_numbers_that_share_a_scale_with_a_non_finite_one_become_nan(format: Format, bad: float) -> None:
    x = torch.ones(16, 64)
    x[1, 5] = bad
    wanted = torch.zeros(16, 64, dtype=torch.bool)
    wanted[1, : 64 if format.has_global_scale else format.block] = True
    assert torch.equal(round_to_format(x, format).isnan(), wanted)
    assert torch.equal(unpack(pack(x, format), format).isnan(), wanted)
    assert round_to_format(x, format, matrix=True)[1].isnan().any()


@ALL
def test_the_tiniest_and_the_largest_numbers_have_a_place(format: Format) -> None:
    x = torch.tensor([[1e-45] * 64, [2.0**-126] * 64, [3e38] * 64, [1e-38, *[0.0] * 63]])
    found = round_to_format(x, format)
    assert found.isfinite().all()
    assert (found[2] > 2.2e38).all()
    assert torch.equal(unpack(pack(x, format), format).view(torch.int32), found.view(torch.int32))


@ALL
def test_blocks_that_are_not_whole_are_refused(format: Format) -> None:
    with pytest.raises(ConfigError, match=f"not a multiple of the block size {format.block}"):
        round_to_format(torch.ones(2, format.block + 8), format)


def numbers(low: int = -30, high: int = 30) -> st.SearchStrategy[torch.Tensor]:
    """Sixteen tokens of 64 numbers whose magnitudes span many powers of two."""
    one = st.builds(
        lambda seed, spread, power: torch.from_numpy(_numbers(seed, spread, power)),
        st.integers(0, 2**32 - 1),
        st.sampled_from([0.0, 1.0, 8.0]),
        st.integers(low, high),
    )
    return one


def _numbers(seed: int, spread: float, power: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    draw = np.random.default_rng(seed)
    return (draw.standard_normal((16, 64)) * 2.0 ** (power + spread * draw.standard_normal((16, 64)))).astype(
        np.float32
    )


@ALL
@FEW
@given(x=numbers())
def test_packed_bytes_contain_exactly_the_rounded_numbers(format: Format, x: torch.Tensor) -> None:
    for matrix in (False, True):
        packed = pack(x, format, matrix=matrix)
        found = unpack(packed, format)
        assert torch.equal(found.view(torch.int32), round_to_format(x, format, matrix=matrix).view(torch.int32))
        num_bytes = packed.codes.numel() + packed.scales.numel()
        assert num_bytes * 8 == format.bits_per_number * x.numel()


@ALL
@FEW
@given(x=numbers())
def test_a_number_moves_by_half_a_step_of_its_element_at_most(format: Format, x: torch.Tensor) -> None:
    done = to_scaled(x, format)
    scale, y = done.scale.double(), x.double().view(16, -1, format.block)
    power = torch.frexp((y / scale.masked_fill(scale == 0, torch.inf)).abs())[1] - 1
    step = 2.0 ** (power.clamp(min=format.element.min_exponent) - format.element.mantissa) * scale
    over = (y.abs() - format.element.largest * scale).clamp(min=0)  # a block scale of NVFP4 may be rounded down
    least = 6 * 2.0**-10 * done.global_scale.double() if done.global_scale is not None else torch.zeros(())
    error = (done.elements.double() * scale - y).abs()
    assert (error <= torch.maximum(torch.maximum(step / 2, over), least)).all()
    if format.has_global_scale:
        assert (over <= torch.maximum(y.abs() / 16, least)).all()
    else:
        assert (over == 0).all()


@ALL
@FEW
@given(x=numbers())
def test_rounding_twice_is_rounding_once(format: Format, x: torch.Tensor) -> None:
    once = round_to_format(x, format)
    again = round_to_format(once, format)
    if format.has_global_scale:  # block scales that are subnormal are rounded by more than the elements make up for
        normal = (to_scaled(x, format).block_scale >= 2.0**-6).expand(16, -1, format.block).reshape(16, 64)
        once, again = once[normal], again[normal]
    assert torch.equal(again, once)


@ALL
@FEW
@given(x=numbers(), power=st.integers(-20, 20))
def test_a_power_of_two_passes_through(format: Format, x: torch.Tensor, power: int) -> None:
    assert torch.equal(round_to_format(x * 2.0**power, format), round_to_format(x, format) * 2.0**power)


@ALL
@FEW
@given(x=numbers())
def test_rounding_keeps_order_within_what_shares_a_scale(format: Format, x: torch.Tensor) -> None:
    before = x.view(-1, format.block)
    after = round_to_format(x, format).view(-1, format.block)
    order = before.argsort(-1)
    assert (after.gather(1, order).diff(dim=-1) >= 0).all()
    assert torch.equal(round_to_format(-x, format), -round_to_format(x, format))


@ALL
@FEW
@given(x=numbers(), rows=st.lists(st.integers(0, 15), min_size=1, max_size=5))
def test_a_token_is_rounded_alike_in_any_batch(format: Format, x: torch.Tensor, rows: Sequence[int]) -> None:
    assert torch.equal(round_to_format(x[list(rows)], format), round_to_format(x, format)[list(rows)])


@ALL
@FEW
@given(x=numbers(low=-10, high=4))
def test_bfloat16_holds_every_rounded_number(format: Format, x: torch.Tensor) -> None:
    found = round_to_format(x, format)
    assert torch.equal(found.bfloat16().float(), found)
    assert torch.equal(round_to_format(x.bfloat16(), format).float(), round_to_format(x.bfloat16().float(), format))


def test_a_matrix_shares_one_outer_scale_and_stacked_ones_have_their_own() -> None:
    x = torch.from_numpy(_numbers(0, 2.0, 0)).repeat(2, 1).view(2, 16, 64)
    x[1] *= 64
    format = FORMATS[Quantise.NVFP4]
    packed = pack(x, format, matrix=True)
    assert packed.global_scale is not None
    assert packed.global_scale.shape == (2,)
    assert torch.equal(packed.global_scale[0], packed.global_scale[1] * 64)
    assert torch.equal(unpack(packed, format)[1], round_to_format(x[1], format, matrix=True))
