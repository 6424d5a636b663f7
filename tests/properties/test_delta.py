"""The delta codec and the formats around it, over every bit pattern and against damaged bytes."""

from __future__ import annotations

import random
import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from etude.errors import WeightsError
from etude.weights import Spec, Tensor
from etude.weights.bound import bound_bytes
from etude.weights.codec import decode, encode, from_order, to_order
from etude.weights.manifest import read_manifest, read_pointer
from etude.weights.streams import Reader, Writer
from etude.weights.tensors import DTYPES, same_bits

NAMES = st.sampled_from(sorted(DTYPES))
SPECIALS = {  # NaNs with payloads, infinities, both zeros, the smallest and the largest
    16: [0x7FC1, 0xFFFF, 0x7F80, 0xFF80, 0x0000, 0x8000, 0x0001, 0x8001, 0x7F7F],
    32: [0x7FC00001, 0xFFFFFFFF, 0x7F800000, 0xFF800000, 0, 0x80000000, 1, 0x80000001, 0x7F7FFFFF],
    8: [0x7F, 0xFF, 0x7E, 0xFE, 0, 0x80, 1, 0x81, 0x7B],
}


@st.composite
def tensors(draw: st.DrawFn) -> tuple[Tensor, Tensor | None]:
    """A tensor and its old one: alike, unlike, of another spec, or none."""
    dtype = draw(NAMES)
    kind = DTYPES[dtype]
    size = draw(st.integers(0, 300))
    elements = st.one_of(st.sampled_from(SPECIALS[kind.bits]), st.integers(0, (1 << kind.bits) - 1))
    new = draw(hnp.arrays(kind.codes, size, elements=elements))
    relation = draw(st.sampled_from(["none", "same", "few", "all", "near", "other"]))
    if relation == "none":
        return Tensor(dtype, (size,), new), None
    old = new.copy()
    if relation == "few" and size:
        old[draw(st.integers(0, size - 1)) :: draw(st.integers(1, 50))] = draw(elements)
    elif relation == "all":
        old = draw(hnp.arrays(kind.codes, size, elements=elements))
    elif relation == "near":
        old = old + draw(hnp.arrays(kind.codes, size, elements=st.integers(0, 3)))
    elif relation == "other":
        return Tensor(dtype, (size,), new), Tensor(dtype, (size, 1), old)
    return Tensor(dtype, (size,), new), Tensor(dtype, (size,), old)


@given(st.lists(tensors(), max_size=6))
def test_every_bit_pattern_comes_back(pairs: list[tuple[Tensor, Tensor | None]]) -> None:
    new, old = [n for n, _ in pairs], [o for _, o in pairs]
    decoded = decode(encode(new, old), [n.spec for n in new], old)
    assert all(map(same_bits, decoded, new))


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
    _decode_or_refuse(b"etd\x01\x01" + data, [old.spec], [old])


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
    writer = Writer()
    writer.varint(len(bomb))
    writer.data += bomb
    tracemalloc.start()
    try:
        with pytest.raises(WeightsError, match="damaged"):
            Reader(bytes(writer.data)).block(1 << 20)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("dtype", [name for name, kind in DTYPES.items() if kind.bits < 32])
def test_the_order_of_codes_is_one_to_one_and_the_order_of_their_values(dtype: str) -> None:
    kind = DTYPES[dtype]
    codes = np.arange(1 << kind.bits, dtype=kind.codes)
    ordered = to_order(codes, kind)
    assert np.array_equal(np.sort(ordered), codes)
    assert np.array_equal(from_order(ordered, kind), codes)
    if dtype == "f16":
        values = codes.view(np.float16)[np.argsort(ordered)].astype(np.float64)
        finite = values[np.isfinite(values)]
        assert (np.diff(finite) >= 0).all()


@given(hnp.arrays(np.uint32, st.integers(0, 80)))
def test_the_order_of_32_bit_codes_has_an_inverse(codes: np.ndarray) -> None:  # type: ignore[type-arg]
    for name in ("f32", "u32"):
        assert np.array_equal(from_order(to_order(codes, DTYPES[name]), DTYPES[name]), codes)


@given(
    st.one_of(
        hnp.arrays(np.uint32, st.integers(0, 200)),
        hnp.arrays(np.uint32, st.integers(0, 200), elements=st.integers(0, 3)),
        hnp.arrays(np.uint32, st.integers(0, 200), elements=st.integers(0, 5000)),
    )
)
def test_numbers_come_back(values: np.ndarray) -> None:  # type: ignore[type-arg]
    writer = Writer()
    writer.numbers(values)
    reader = Reader(bytes(writer.data))
    assert np.array_equal(reader.numbers(values.size), values)
    reader.end()


@given(st.integers(0, 400), st.floats(0, 1), st.integers(0, 9))
def test_positions_come_back(size: int, share: float, seed: int) -> None:
    flags = np.random.default_rng(seed).random(size) < share
    writer = Writer()
    writer.positions(flags)
    reader = Reader(bytes(writer.data))
    assert np.array_equal(reader.positions(size), flags)
    reader.end()


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
