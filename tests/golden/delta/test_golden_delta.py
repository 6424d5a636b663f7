"""A store written once must stay readable: the formats of deltas, manifests and pointers do not drift.

Writers may choose other bytes (another zstd, a better choice of forms), readers must take these. When a format gets a
new number, its files join these in a folder of their own: `python tests/golden/delta/test_golden_delta.py` writes one.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from etude.stores import DirectoryStore, MemoryStore
from etude.weights import Channel, Follower, Tensor, chain
from etude.weights.inspect import verify
from etude.weights.streams import Reader, Writer
from etude.weights.tensors import same_bits

FORMAT_1 = Path(__file__).parent / "format-1"
SIZE = 2400


def scrambled(seed: int) -> npt.NDArray[np.uint32]:
    """Integers that no library draws: the same on every machine for ever."""
    mixed = (np.arange(SIZE, dtype=np.uint64) + np.uint64(seed * SIZE)) * np.uint64(0x9E3779B97F4A7C15)
    return ((mixed ^ mixed >> np.uint64(29)) * np.uint64(0xBF58476D1CE4E5B9) >> np.uint64(32)).astype(np.uint32)


def weights_at(step: int) -> dict[str, Tensor]:
    """Tensors whose changes are rare, common, nearly everywhere, wide, none; NaNs and signed zeros among them."""
    tensors = {}
    for i, every in enumerate((97, 7, 3, 2)):
        codes = 0x3B00 + scrambled(i) % 0x500
        for s in range(1, step + 1):
            moves = scrambled(10 * s + i)
            codes = codes + (moves % every == 0) * (1 + (moves >> 20) % every)
        codes[::800] = (0x7FC1, 0xFFFF, 0x8000 if step % 2 else 0x0000)
        tensors[f"layer.{i}"] = Tensor("bf16", (SIZE // 8, 8), codes.astype(np.uint16))
    wide = scrambled(50) % 0x100000 + 0x3F000000 + (scrambled(51 + step) % 0x8000 if step else 0)
    tensors["norm"] = Tensor("f32", (SIZE,), wide.astype(np.uint32))
    tensors["scale"] = Tensor("f8_e4m3", (SIZE,), (scrambled(60) % 200 + (step > 0)).astype(np.uint8))
    tensors["frozen"] = Tensor("u8", (3,), np.array([1, 2, 3], np.uint8))
    if step:
        tensors["added"] = Tensor("f16", (), np.array([step], np.uint16))
    return tensors


def golden_store() -> MemoryStore:
    store = MemoryStore()
    for path in sorted(FORMAT_1.rglob("*")):
        if path.is_file():
            store.put(path.relative_to(FORMAT_1).as_posix(), path.read_bytes())
    return store


def test_a_store_of_format_1_is_read_to_the_same_bits() -> None:
    store = golden_store()
    assert verify(store).problems == ()
    for manifest in chain(store, "policy"):
        expected = weights_at(manifest.version.step)
        assert [entry.name for entry in manifest.tensors] == sorted(expected)
    follower = Follower(store)
    follower.advance()
    assert str(follower.version) == "v000002-60160160-057d30b13546"
    assert all(same_bits(follower.tensors[name], tensor) for name, tensor in weights_at(2).items())


def test_every_version_of_a_store_of_format_1_is_what_it_was() -> None:
    names = [(str(m.version), m.kind.value, m.rollout_ids) for m in chain(golden_store(), "policy")]
    assert names == [
        ("v000000-60160160-f6dc041834a8", "anchor", ()),
        ("v000001-60160160-3c0434df85bd", "delta", ("g000001.0", "g000001.1")),
        ("v000002-60160160-057d30b13546", "delta", ("g000002.0", "g000002.1")),
    ]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0, 0, 0], "00"),  # zeros
        ([1, 2, 3], "01 01 01 15 05"),  # Rice: one low bit; one byte of quotients 1, 01, 01; low bits 1, 0, 1
        ([0, 0, 9], "03 02 00 04 01 02 01 04 00 00"),  # zeros out first: a bitmap; then 8: quotient 001, two low bits
    ],
)
def test_the_small_codes_are_these_bytes(values: list[int], expected: str) -> None:
    writer = Writer()
    writer.numbers(np.array(values, np.uint32))
    assert writer.data.hex(" ") == expected
    assert Reader(bytes(writer.data)).numbers(len(values)).tolist() == values


def write(folder: Path) -> None:
    """Write the golden store of the current format."""
    writer, parent = Channel(DirectoryStore(folder), incarnation="60160160"), None
    for step in range(3):
        rollout_ids = [f"g{step:06d}.{i}" for i in range(2)] if step else []
        parent = writer.publish(weights_at(step), step=step, parent=parent, rollout_ids=rollout_ids).version
        sys.stdout.write(f"{parent}\n")


if __name__ == "__main__":
    write(FORMAT_1)
