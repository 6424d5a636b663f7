"""The bytes of a tile, field by field, and what the numpy kernels refuse."""

from __future__ import annotations

import numpy as np
import pytest

from etude.errors import WeightsError
from etude.weights.delta.layout import Piece, Tile
from etude.weights.delta.tiles import NumpyKernels, gather, rice_parameter, size_parameters
from etude.weights.tensors import DTYPES, Codes

KERNELS = NumpyKernels()
BF16, U8, U32, F4 = (DTYPES[name] for name in ("bf16", "u8", "u32", "f4_e2m1x2"))


def one_tile(size: int, high: int = 0, classes: int = 1) -> Tile:
    return Tile(high, classes, (Piece(0, 0, 1, size, size),))


def coded(old: list[int], new: list[int], kind=U8, tile: Tile | None = None) -> str:  # type: ignore[no-untyped-def]
    arrays = [[np.array(side, kind.items)] for side in (old, new)]
    (payload,) = KERNELS.encode(kind, [tile or one_tile(len(old))], *arrays)
    return payload.hex(" ")


def read(payload: str, old: Codes, kind=U8, tile: Tile | None = None) -> tuple[list[int], list[int]]:  # type: ignore[no-untyped-def]
    data = memoryview(bytes.fromhex(payload))
    ((places, items),) = KERNELS.changes(kind, [tile or one_tile(old.size)], [old], [data])
    return places.tolist(), items.tolist()


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ([7] * 8, [7] * 8, ""),  # nothing
        # k = 1, r = 2, x = 0; three lengths in bits; up; gap 4: quotient 01, low bits 00
        ([0] * 8, [0, 0, 0, 0, 1, 0, 0, 0], "01 01 02 00 02 00 00 00 02 00"),
        # k = 7, inverted, r = 2, l = 1; x = 0; all down; gap 2: quotient 1, low bits 10
        ([9] * 8, [8, 8, 9, 8, 8, 8, 8, 8], "01 07 22 01 00 01 00 00 7f 01 02"),
        # k = 1, x = 1: k - x = 0 others; m = 2; size 7: v = 5: quotient 01, low bits 01
        ([0] * 8, [0, 0, 0, 0, 7, 0, 0, 0], "01 01 02 01 02 02 00 02 00 02 00 02 01"),
    ],
)
def test_a_coded_tile_is_these_bytes(old: list[int], new: list[int], expected: str) -> None:
    assert coded(old, new) == expected
    if expected:
        places, items = read(expected, np.array(old, np.uint8))
        assert places == [i for i in range(8) if old[i] != new[i]]
        assert items == [new[i] for i in places]


def test_a_number_over_its_longest_quotient_is_escaped() -> None:
    old, new = np.zeros(2000, np.uint32), np.zeros(2000, np.uint32)
    new[:400] = 3
    new[400] = 1 << 30
    (payload,) = KERNELS.encode(U32, [one_tile(2000)], [old], [new])
    assert payload[-4:] == ((1 << 30) - 2).to_bytes(4, "little")
    assert read(payload.hex(), old, U32) == (list(range(401)), [3] * 400 + [1 << 30])


def test_classes_are_octaves_of_the_old_codes_from_the_top_down() -> None:
    old = np.array([0x3F80, 0x3F00, 0x3E80, 0x4100], np.uint16)  # exponents 127, 126, 125, 130
    new = old.copy()
    new[1] += 1
    tile = one_tile(4, high=127, classes=2)
    (payload,) = KERNELS.encode(BF16, [tile], [old], [new])
    assert payload.hex(" ") == "01 00 01 00 00 01 00 00 00 01"  # none of class 0; of class 1 the first, up
    assert read(payload.hex(), old, BF16, tile) == ([1], [0x3F01])


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        ("", "early"),
        ("00", "mode 0"),
        ("03", "mode 3"),
        ("01 09", "limit of 8"),  # more changed than there are
        ("01 01 c2 00 02 00 00 00 02 00", "limit of 63"),  # bits of g that mean nothing
        ("01 07 22 02 00 01 00 00 7f 01 02", "more or fewer"),  # 7 changed and 2 not are no 8
        ("01 01 02 02", "limit of 1"),  # more exceptions than changed
        ("01 01 02 01 20", "limit of 31"),  # low bits
        ("01 01 02 00 1a", "limit of 25"),  # a unary plane longer than any
        ("01 01 02 00 02 00 00 00 00 00", "0 numbers where 1"),
        ("01 01 02 00 02 00 00 00 03 00", "2 numbers where 1"),
        ("01 01 02 00 03 00 00 00 02 00", "numbers"),  # a zero behind the last one
        ("01 01 02 00 03 00 00 00 04 00", "past the end"),  # gap 8
        ("01 01 02 00 02 00 00 00 02 00 00", "too many"),
        ("01 01 02 00 02 00 00 00 02", "early"),
        ("01 01 02 01 07 02 00 02 00 02 00 02 7f", "longer than the scale"),  # size 129 + 128
        ("02 00 00", "early"),
        ("02 00 00 00 00 00 00 00 00 00", "too many"),
    ],
)
def test_a_tile_that_no_writer_made_is_refused(payload: str, why: str) -> None:
    with pytest.raises(WeightsError, match="damaged") as refused:
        read(payload, np.zeros(8, np.uint8))
    assert why in str(refused.value)


def test_a_number_of_more_than_32_bits_is_refused() -> None:
    # k = 1, r = 31; a quotient of 24 zeros and a one: an escape, 2
    with pytest.raises(WeightsError, match="32 bits"):
        read("01 01 1f 00 19 00 00 00 00 00 00 01 00 00 00 00 02 00 00 00", np.zeros(8, np.uint8))


def test_a_raw_tile_names_what_differs_and_has_no_nibble_over_15() -> None:
    old = np.arange(4, dtype=np.uint8)
    assert read("02 00 01 0f 03", old, F4) == ([2], [15])
    with pytest.raises(WeightsError, match="more than 4 bits"):
        read("02 00 01 10 03", old, F4)


def test_pieces_are_coded_in_order_and_their_changes_go_back_where_they_were() -> None:
    rng = np.random.default_rng(3)
    old = [rng.integers(0x3C00, 0x3E00, size, np.uint16) for size in (60, 7)]
    new = [items + (rng.random(items.size) < 0.4).astype(np.uint16) for items in old]
    tile = Tile(124, 4, (Piece(0, 13, 3, 5, 20), Piece(1, 0, 1, 7, 7)))
    assert gather(tile, old).tolist() == [*old[0].reshape(3, 20)[:, 13:18].reshape(-1).tolist(), *old[1].tolist()]
    payloads = [memoryview(payload) for payload in KERNELS.encode(BF16, [tile], old, new)]
    made = [items.copy() for items in old]
    KERNELS.apply(BF16, [tile], old, made, payloads)
    expected = old[0].reshape(3, 20).copy()
    expected[:, 13:18] = new[0].reshape(3, 20)[:, 13:18]
    assert np.array_equal(made[0].reshape(3, 20), expected)
    assert np.array_equal(made[1], new[1])


def test_a_sample_counts_items_and_changes_by_the_old_exponent_in_every_nth_block() -> None:
    old = np.full(64 * 40 + 10, 0x3F80, np.uint16)
    old[64 * 32 : 64 * 33] = 0x4000
    new = old.copy()
    new[[0, 63, 64, 64 * 32]] ^= 1
    counts, changed = KERNELS.sample(old, new, BF16, 32)
    assert {e: (counts[e], changed[e]) for e in np.flatnonzero(counts)} == {127: (64, 2), 128: (64, 1)}
    counts, changed = KERNELS.sample(old, new, BF16, 1)
    assert (counts.sum(), changed.sum()) == (old.size, 4)


def test_the_parameters_that_writers_choose_are_these() -> None:
    assert [rice_parameter(1 << 20, 1 << n) for n in (0, 5, 10, 19, 20)] == [19, 14, 9, 0, 0]
    values = np.random.default_rng(0).geometric(1 / 100, 500).astype(np.uint32)
    best = min(range(20), key=lambda r: int((values >> np.uint32(r)).sum()) + r * values.size)
    spoiled = np.append(values, np.full(5, 1 << 31, np.uint32))
    found = size_parameters(np.concatenate([spoiled, values]), np.array([0, spoiled.size, 0, values.size])).tolist()
    assert found == [0, found[3], 0, found[3]]
    assert abs(found[3] - best) <= 1
