"""The layout of a delta: header, grid of tiles, pages, and the encoder's choices."""

from __future__ import annotations

import hashlib
import itertools
import math

import numpy as np
import pytest

from etude.errors import WeightsError
from etude.weights import Spec, Tensor
from etude.weights.delta import layout
from etude.weights.delta.choices import choose
from etude.weights.delta.codec import encode
from etude.weights.delta.layout import (
    DELTA,
    JOINED,
    SAME,
    WHOLE,
    Grid,
    Layout,
    Piece,
    header_bytes,
    page_bounds,
    read_header,
)
from etude.weights.delta.tiles import NumpyKernels
from etude.weights.tensors import DTYPES

BF16 = DTYPES["bf16"]


def moved(shape: tuple[int, ...], share: float, *, dtype: str = "bf16", seed: int = 0) -> tuple[Tensor, Tensor]:
    """An old tensor of normal weights, and a new one in which a share of the elements is one step higher."""
    rng = np.random.default_rng(seed)
    kind, size = DTYPES[dtype], math.prod(shape)
    bits = (rng.standard_normal(size) * 0.02).astype(np.float32).view(np.uint32) >> np.uint32(32 - kind.bits)
    codes = bits.astype(kind.codes)
    return Tensor(dtype, shape, codes), Tensor(dtype, shape, codes + (rng.random(size) < share).astype(kind.codes))


def header_of(pairs: list[tuple[Tensor, Tensor]]) -> layout.Header:
    data = encode([new for _, new in pairs], [old for old, _ in pairs])
    return read_header(data, [new.spec for _, new in pairs])


def test_the_header_of_a_small_delta_is_these_bytes() -> None:
    old = [Tensor("u8", (2, 4), np.zeros(8, np.uint8)), Tensor("u8", (3,), np.zeros(3, np.uint8))]
    new = [Tensor("u8", (2, 4), np.arange(8, dtype=np.uint8) // 4), old[1]]
    data = encode(new, old)
    head, tile = data[: header_bytes(data)], data[header_bytes(data) :]
    assert head[:8].hex(" ") == "65 74 64 02 2f 00 00 00"
    assert head[8:15].hex(" ") == "02 01 00 01 02 04 09"  # two tensors: delta, same; high, classes, rows, columns; size
    assert head[15:] == hashlib.sha256(tile).digest()
    assert tile.hex(" ") == "01 04 00 00 08 00 00 00 f0"


@pytest.mark.parametrize(
    "shape", [(100, 5000), (1, 300_000), (300_000,), (300_000, 1), (2, 3, 50_000), (1000, 300), (), (7,), (5, 4097)]
)
@pytest.mark.parametrize("dtype", ["bf16", "f32", "f4_e2m1x2", "i64"])
def test_the_tiles_of_a_tensor_hold_each_item_once(shape: tuple[int, ...], dtype: str) -> None:
    old, new = moved(shape, 0.5) if dtype == "bf16" else (None, None)
    kind = DTYPES[dtype]
    spec = Spec(dtype, shape)
    size = spec.size * kind.parts
    if old is not None and new is not None and spec.size > 1:
        plan = choose([new.codes], [old.codes], [spec], NumpyKernels(), "best")
    else:
        plan = Layout([spec], [DELTA], {0: Grid(0, 1, 64, 1000)})
    seen = np.zeros(size, np.int64)
    for number, tile in plan.tiles(kind):
        assert 0 <= number < plan.num_tiles
        assert 0 < tile.size <= layout.MAX_TILE
        for piece in tile.pieces:
            for row in range(piece.rows):
                seen[piece.start + row * piece.stride :][: piece.cols] += 1
    assert (seen == 1).all()


def test_a_tensor_that_fits_in_a_tile_is_one_whatever_its_shape() -> None:
    for shape in ((4, 16_000), (64_000,), (16_000, 4), (2, 2, 16_000)):
        assert header_of([moved(shape, 0.5)]).layout.num_tiles == 1


def test_a_tile_is_larger_where_less_changes() -> None:
    sizes = [header_of([moved((1024, 1024), share)]).layout.num_tiles for share in (0.9, 0.1, 0.0001)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 4
    assert sizes[-1] == 1


def test_small_tensors_share_tiles_with_others_of_their_dtype() -> None:
    pairs = [moved((500,), 0.1, seed=1), moved((100,), 0.5, dtype="f32"), moved((2048, 1024), 0.5), moved((300,), 0.1)]
    frozen = moved((10,), 0.0)[0]
    pairs = [*pairs, (frozen, frozen), moved((50,), 0.5, dtype="f32", seed=2)]
    plan = header_of(pairs).layout
    assert plan.forms == [DELTA, DELTA, DELTA, JOINED, SAME, JOINED]
    tiles = dict(plan.tiles(BF16))
    assert tiles[0].pieces == (Piece(0, 0, 1, 500, 500), Piece(3, 0, 1, 300, 300))
    assert dict(plan.tiles(DTYPES["f32"]))[1].pieces == (Piece(1, 0, 1, 100, 100), Piece(5, 0, 1, 50, 50))


def test_tensors_without_an_old_one_of_their_spec_are_whole() -> None:
    old, new = moved((50,), 0.5)
    other = Tensor("f16", (50,), old.codes)
    data = encode([new, new, other], [None, other, other])
    assert read_header(data, [new.spec, new.spec, other.spec]).layout.forms == [WHOLE, WHOLE, SAME]


def test_pages_are_whole_tiles_of_at_least_a_length_but_for_the_last() -> None:
    data = encode([new := moved((2048, 2048), 0.5)[1]], [moved((2048, 2048), 0.5, seed=1)[0]])
    header = read_header(data, [new.spec])
    bounds = page_bounds(header.offsets)
    assert bounds[0][0] == header_bytes(data)
    assert bounds[-1][1] == len(data)
    assert all(a[1] == b[0] for a, b in itertools.pairwise(bounds))
    assert all(b - a >= layout.PAGE_BYTES for a, b in bounds[:-1])
    assert len(bounds) == len(header.pages) > 2
    for start, stop in bounds:
        header.check_pages(start, data[start:stop])
    start, stop = bounds[1][0], bounds[2][1]
    header.check_pages(start, data[start:stop])
    altered = bytearray(data[start:stop])
    altered[-1] ^= 1
    with pytest.raises(WeightsError, match="do not match their digest"):
        header.check_pages(start, bytes(altered))


@pytest.mark.parametrize(
    ("grid", "why"),
    [
        (Grid(0, 0, 1, 1), "without items or classes"),
        (Grid(0, 17, 1, 1), "limit of 16"),
        (Grid(0, 1, 0, 1), "without items or classes"),
        (Grid(0, 1, 1, 0), "without items or classes"),
        (Grid(0, 1, 1 << 41, 1 << 41), "more than 8388608"),
        (Grid(0, 1, 1, 1), "tiles in a header"),
    ],
)
def test_a_grid_that_no_writer_makes_is_refused(grid: Grid, why: str) -> None:
    spec = Spec("bf16", (1 << 12, 1 << 12))
    good = layout.write(Layout([spec], [DELTA], {0: Grid(0, 1, 1 << 11, 1 << 12)}), [b"\1", b"\1"])
    head = bytes((grid.high, grid.classes)) + layout.varint(grid.tile_rows) + layout.varint(grid.tile_cols)
    fields = good[8:10] + head + good[16:]
    with pytest.raises(WeightsError, match="damaged") as refused:
        read_header(b"etd\x02" + (8 + len(fields)).to_bytes(4, "little") + fields, [spec])
    assert why in str(refused.value)


def test_a_tensor_that_joins_no_tile_or_overfills_one_is_refused() -> None:
    small, large = Spec("bf16", (10,)), Spec("bf16", (layout.MAX_TILE,))
    for specs, forms, grids in (
        ([small], [JOINED], {}),
        ([Spec("f16", (10,)), small], [DELTA, JOINED], {0: Grid(0, 1, 1, 10)}),
        ([small, small], [DELTA, JOINED], {0: Grid(0, 1, 1, 5)}),
        ([large, small], [DELTA, JOINED], {0: Grid(0, 1, 1, layout.MAX_TILE)}),
    ):
        with pytest.raises(WeightsError, match="damaged"):
            Layout(specs, forms, grids)
