"""Reading a part of an object: the right changes, from few of its bytes, verified."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from etude.errors import WeightsError
from etude.weights import Spec, Tensor
from etude.weights.delta import layout
from etude.weights.delta.codec import encode
from etude.weights.delta.layout import header_bytes
from etude.weights.delta.ranges import Parts
from etude.weights.tensors import DTYPES


class Object:
    """Bytes that are read by ranges; counts the reads."""

    def __init__(self, data: bytes) -> None:
        self.data, self.num_read = data, 0

    def read(self, offset: int, count: int) -> bytes:
        self.num_read += count
        return self.data[offset : offset + count]

    def parts(self, specs: Sequence[Spec], num_bytes: int | None = None) -> Parts:
        """The parts of an object, with its own header or with another number of header bytes."""
        return Parts(self.read, self.read(0, header_bytes(self.data) if num_bytes is None else num_bytes), specs)


def pair(shape: tuple[int, ...], dtype: str = "bf16", share: float = 0.3) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(5)
    kind, size = DTYPES[dtype], math.prod(shape)
    codes = rng.integers(0, 1 << kind.bits, size, np.uint64).astype(kind.codes)
    if kind.bits == 16:
        codes = (rng.standard_normal(size) * 0.02).astype(np.float32).view(np.uint32) >> np.uint32(16)
        codes = codes.astype(np.uint16)
    return Tensor(dtype, shape, codes), Tensor(dtype, shape, codes ^ (rng.random(size) < share).astype(kind.codes))


def expected(old: Tensor | None, new: Tensor, rows: range, cols: range) -> tuple[list[int], list[int]]:
    width = new.shape[-1] if new.shape else 1
    inside = np.zeros((new.spec.size // max(1, width), width), np.bool_)
    inside[rows.start : rows.stop, cols.start : cols.stop] = True
    changed = np.ones(new.spec.size, np.bool_) if old is None else old.codes != new.codes
    where = np.flatnonzero(inside.reshape(-1) & changed)
    return where.tolist(), new.codes[where].tolist()


@pytest.mark.parametrize("dtype", ["bf16", "f4_e2m1x2", "i64"])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(
    ("shape", "rows", "cols"),
    [
        ((600, 700), range(0, 600), range(0, 700)),
        ((600, 700), range(17, 331), range(3, 699)),
        ((30, 9000), range(29, 30), range(5000, 5001)),
        ((4, 9, 4100), range(7, 20), range(0, 4100)),
        ((6, 7), range(2, 5), range(1, 6)),
        ((), range(0, 1), range(0, 1)),
        ((5, 0), range(0, 5), range(0, 0)),
        ((8, 8), range(3, 3), range(0, 8)),
    ],
)
def test_a_part_has_the_changes_of_its_rows_and_columns(
    shape: tuple[int, ...], rows: range, cols: range, dtype: str, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "WHOLE_TILE", 10_000)
    monkeypatch.setattr(layout, "PAGE_BYTES", 2000)
    small, joined = pair((50,), dtype), pair((9,), dtype)
    old, new = pair(shape, dtype)
    olds = [small[0], None if whole else old, joined[0], joined[0]]
    news = [small[1], new, joined[1], joined[0]]
    parts = Object(encode(news, olds)).parts([t.spec for t in news])
    found = parts.changes(1, olds, rows=rows, cols=cols)
    assert (found.positions.tolist(), found.codes.tolist()) == expected(olds[1], new, rows, cols)
    found = parts.changes(2, olds)
    assert (found.positions.tolist(), found.codes.tolist()) == expected(*joined, range(1), range(9))
    assert parts.changes(3, olds).positions.size == 0


def test_a_rank_reads_about_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "PAGE_BYTES", 1 << 15)
    old, new = pair((2048, 2048))
    stored = Object(encode([new], [old]))
    stored.parts([new.spec]).changes(0, [old], rows=range(0, 256))
    assert stored.num_read < len(stored.data) / 4


def test_altered_bytes_of_a_page_and_a_header_of_another_length_are_refused() -> None:
    old, new = pair((300, 300))
    data = encode([new], [old])
    head = header_bytes(data)
    for at in (len(data) - 1, head):
        bad = bytearray(data)
        bad[at] ^= 4
        with pytest.raises(WeightsError, match="damaged"):
            Object(bytes(bad)).parts([new.spec]).changes(0, [old])
    for num_bytes in (0, 5, head - 1, head + 1):
        with pytest.raises(WeightsError, match="damaged"):
            Object(data).parts([new.spec], num_bytes)
    for cut in (head, len(data) - 1):
        with pytest.raises(WeightsError, match="damaged"):
            Object(data[:cut]).parts([new.spec]).changes(0, [old])
    with pytest.raises(WeightsError, match="no rows"):
        Object(data).parts([new.spec]).changes(0, [old], rows=range(299, 301))
