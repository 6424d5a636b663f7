"""The delta codec and the formats around it, over every bit pattern and against damaged bytes."""

from __future__ import annotations

import math
import random
import struct
import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from etude.errors import WeightsError
from etude.weights import Spec, Tensor
from etude.weights.chain.manifest import read_manifest, read_pointer
from etude.weights.delta.bound import bound_bytes
from etude.weights.delta.choices import Mode
from etude.weights.delta.codec import Changes, changes, decode, encode
from etude.weights.delta.layout import read_header
from etude.weights.delta.streams import Reader, gaps, low_bits, runs, unary, varint
from etude.weights.delta.ulp_steps import from_order, step_from, steps_between, to_order
from etude.weights.tensors import DTYPES, from_items, same_bits, to_items

NAMES = st.sampled_from(sorted(DTYPES))
SPECIALS = {  # NaNs with payloads, infinities, both zeros, the smallest and the largest
    16: [0x7FC1, 0xFFFF, 0x7F80, 0xFF80, 0x0000, 0x8000, 0x0001, 0x8001, 0x7F7F],
    64: [0x7FF8000000000001, 0xFFFFFFFFFFFFFFFF, 0x7FF0000000000000, 0, 1 << 63, 0x00000001FFFFFFFF, 1 << 32],
    32: [0x7FC00001, 0xFFFFFFFF, 0x7F800000, 0xFF800000, 0, 0x80000000, 1, 0x80000001, 0x7F7FFFFF],
    8: [0x7F, 0xFF, 0x7E, 0xFE, 0, 0x80, 1, 0x81, 0x7B],
}


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, ...]:
    """No dimension, one of any length, a few short ones, or rows that are longer than a tile is wide."""
    return draw(
        st.one_of(
            st.just(()),
            st.tuples(st.integers(0, 300)),
            st.lists(st.integers(0, 7), min_size=2, max_size=4).map(tuple),
            st.tuples(st.integers(1, 3), st.just(4097)),
        )
    )


@st.composite
def tensors(draw: st.DrawFn) -> tuple[Tensor, Tensor | None]:
    """A tensor and its old one: alike, unlike, of another spec, or none."""
    dtype, shape = draw(NAMES), draw(shapes())
    kind, size = DTYPES[dtype], math.prod(shape)
    elements = st.one_of(st.sampled_from(SPECIALS[kind.bits]), st.integers(0, (1 << kind.bits) - 1))
    new = draw(hnp.arrays(kind.codes, size, elements=elements))
    relation = draw(st.sampled_from(["none", "same", "few", "all", "near", "other"]))
    if relation == "none":
        return Tensor(dtype, shape, new), None
    old = new.copy()
    if relation == "few" and size:
        old[draw(st.integers(0, size - 1)) :: draw(st.integers(1, 50))] = draw(elements)
    elif relation == "all":
        old = draw(hnp.arrays(kind.codes, size, elements=elements))
    elif relation == "near":
        old = old + draw(hnp.arrays(kind.codes, size, elements=st.integers(0, 3)))
    elif relation == "other":
        return Tensor(dtype, shape, new), Tensor(dtype, (*shape, 1), old)
    return Tensor(dtype, shape, new), Tensor(dtype, shape, old)


@given(st.lists(tensors(), max_size=6), st.sampled_from(["best", "fast"]))
def test_every_bit_pattern_is_decoded_as_it_was_encoded(pairs: list[tuple[Tensor, Tensor | None]], mode: Mode) -> None:
    new, old = [n for n, _ in pairs], [o for _, o in pairs]
    specs, data = [n.spec for n in new], encode([n for n, _ in pairs], old, mode)
    assert all(map(same_bits, decode(data, specs, old), new))
    for after, before, change in zip(new, old, changes(data, specs, old), strict=True):
        if isinstance(change, Changes):
            assert before is not None
            codes = before.codes.copy()
            codes[change.positions] = change.codes
            change = Tensor(after.dtype, after.shape, codes)
        assert same_bits(change, after)


@given(st.lists(tensors(), max_size=4), st.data())
def test_mutated_bytes_are_an_error_or_tensors_of_the_asked_specs(
    pairs: list[tuple[Tensor, Tensor | None]], data: st.DataObject
) -> None:
    new, old = [n for n, _ in pairs], [o for _, o in pairs]
    good = bytearray(encode(new, old))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(good) - 1))
        match data.draw(st.sampled_from(["set", "cut", "insert"])):
            case "set":
                good[at] = data.draw(st.integers(0, 255))
            case "cut":
                del good[at : at + data.draw(st.integers(1, 8))]
            case "insert":
                good[at:at] = data.draw(st.binary(max_size=8))
        if not good:
            break
    _decode_or_refuse(bytes(good), [n.spec for n in new], old)


@given(st.binary(max_size=200))
def test_any_bytes_are_an_error_or_tensors_of_the_asked_specs(data: bytes) -> None:
    old = Tensor("bf16", (50,), np.arange(50, dtype=np.uint16))
    _decode_or_refuse(data, [old.spec], [old])
    _decode_or_refuse(b"etd\x02" + struct.pack("<I", len(data) + 8) + data, [old.spec], [old])


@pytest.mark.parametrize("mutations", [2_000, pytest.param(60_000, marks=pytest.mark.slow)])
def test_a_large_delta_survives_single_mutations_everywhere(mutations: int) -> None:
    rng = np.random.default_rng(5)
    codes = rng.integers(0x3C00, 0x3E00, 20_000).astype(np.uint16)
    step = (rng.random(20_000) < 0.3) * rng.integers(1, 5, 20_000)
    old, new = Tensor("bf16", (20_000,), codes), Tensor("bf16", (20_000,), codes + step.astype(np.uint16))
    raw = Tensor("f32", (3_000,), rng.integers(0, 1 << 32, 3_000, dtype=np.uint32) >> 12)
    good = encode([new, raw], [old, None])
    chance = random.Random(7)
    for _ in range(mutations):
        bad = bytearray(good)
        at = chance.choice([chance.randrange(len(bad)), chance.randrange(min(200, len(bad)))])
        bad[at] ^= chance.randrange(1, 256)
        _decode_or_refuse(bytes(bad), [new.spec, raw.spec], [old, None])


def test_a_frame_that_claims_more_than_it_may_is_refused_before_it_is_opened() -> None:
    bomb = zstandard.ZstdCompressor(level=19).compress(bytes(256 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(WeightsError, match="damaged"):
            Reader(varint(len(bomb)) + bomb).block(1 << 20)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("tile_rows", [1, 1 << 40])
def test_a_header_that_claims_more_tiles_or_larger_ones_than_it_may_is_refused_at_once(tile_rows: int) -> None:
    spec = Spec("bf16", (1 << 20, 1 << 10))
    fields = b"".join((varint(1), b"\x01", b"\x7a\x10", varint(tile_rows), varint(1 if tile_rows == 1 else 1 << 40)))
    header = b"etd\x02" + struct.pack("<I", 8 + len(fields)) + fields
    tracemalloc.start()
    try:
        with pytest.raises(WeightsError, match="damaged"):
            read_header(header, [spec])
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("dtype", [name for name, kind in DTYPES.items() if kind.width < 32])
def test_the_order_of_items_is_one_to_one_and_the_order_of_their_values(dtype: str) -> None:
    kind = DTYPES[dtype]
    items = np.arange(1 << kind.width, dtype=kind.items)
    ordered = to_order(items, kind)
    assert np.array_equal(np.sort(ordered), items)
    assert np.array_equal(from_order(ordered, kind), items)
    if dtype == "f16":
        values = items.view(np.float16)[np.argsort(ordered)].astype(np.float64)
        finite = values[np.isfinite(values)]
        assert (np.diff(finite) >= 0).all()


@given(NAMES, st.data())
def test_a_step_has_an_inverse_and_is_at_most_half_the_scale(dtype: str, data: st.DataObject) -> None:
    kind = DTYPES[dtype]
    values = st.lists(st.tuples(*[st.integers(0, (1 << kind.width) - 1)] * 2), max_size=50)
    old, new = np.array(data.draw(values), kind.items).reshape(-1, 2).T
    down, sizes = steps_between(old, new, kind)
    assert np.array_equal(step_from(old, down, sizes, kind), new)
    assert ((sizes == 0) == (old == new)).all()
    assert (sizes <= 1 << (kind.width - 1)).all()


@given(NAMES, st.data())
def test_codes_are_split_into_items_and_joined_again(dtype: str, data: st.DataObject) -> None:
    kind = DTYPES[dtype]
    codes = data.draw(hnp.arrays(kind.codes, st.integers(0, 20)))
    items = to_items(codes, kind)
    assert items.size == codes.size * kind.parts
    assert not (items.astype(np.uint64) >> np.uint64(kind.width)).any()
    assert np.array_equal(from_items(items, kind), codes)


@given(hnp.arrays(np.uint32, st.integers(0, 80), elements=st.integers(0, 23)), st.integers(0, 31))
def test_unary_quotients_and_low_bits_are_decoded_as_encoded(quotients: np.ndarray, low: int) -> None:  # type: ignore[type-arg]
    assert np.array_equal(runs(unary(quotients), quotients.size), quotients)
    values = np.arange(quotients.size, dtype=np.uint32) * np.uint32(0x9E3779B9)
    counts, widths = np.array([values.size // 3, 0, values.size - values.size // 3]), np.array([low, 5, 31 - low])
    found, width = Reader(low_bits(values, counts, widths)).low_bits(counts, widths)
    assert np.array_equal(width, np.repeat(widths, counts))
    assert np.array_equal(found, values & ((1 << width) - 1))


@given(st.lists(st.integers(0, 5), max_size=30))
def test_gaps_are_the_distances_between_places(lengths: list[int]) -> None:
    places = np.cumsum(np.array(lengths, np.int64) + 1) - 1
    assert gaps(places).tolist() == lengths


@given(st.binary(max_size=300))
def test_any_bytes_are_no_manifest_and_no_pointer(data: bytes) -> None:
    for read in (read_manifest, read_pointer):
        with pytest.raises(WeightsError):
            read(data)


@given(st.lists(tensors(), max_size=4))
def test_the_bound_is_finite_and_at_least_one_bit_a_change(pairs: list[tuple[Tensor, Tensor | None]]) -> None:
    new, old = [n for n, _ in pairs], [o for _, o in pairs]
    changed = sum(int((a.codes != b.codes).sum()) for a, b in pairs if b is not None and a.spec == b.spec)
    assert changed / 8 <= bound_bytes(new, old) < float("inf")


def _decode_or_refuse(data: bytes, specs: list[Spec], old: list[Tensor | None]) -> None:
    try:
        decoded = decode(data, specs, old)
    except WeightsError:
        return
    assert [t.spec for t in decoded] == specs
