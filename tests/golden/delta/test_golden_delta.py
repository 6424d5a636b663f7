"""A store written once must stay readable: the formats of deltas, manifests and pointers do not drift.

Writers may choose other bytes (another zstd, a better choice of tiles), readers must take these. When a format gets a
new number, its files join these in a folder of their own: `python tests/golden/delta/test_golden_delta.py` writes one.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from etude.stores import DirectoryStore, MemoryStore
from etude.weights import Channel, Follower, Tensor, chain
from etude.weights.chain.inspect import verify
from etude.weights.delta.choices import Mode
from etude.weights.delta.codec import KERNELS, decode, encode
from etude.weights.delta.tiles import NumpyKernels
from etude.weights.shards.part_follower import PartFollower
from etude.weights.tensors import DTYPES, same_bits

FORMAT_2 = Path(__file__).parent / "format-2"
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
    for path in sorted(FORMAT_2.rglob("*")):
        if path.is_file() and path.suffix != ".etd":
            store.put(path.relative_to(FORMAT_2).as_posix(), path.read_bytes())
    return store


def test_a_store_of_format_2_is_read_to_the_same_bits() -> None:
    store = golden_store()
    assert verify(store).problems == ()
    for manifest in chain(store, "policy"):
        expected = weights_at(manifest.version.step)
        assert [entry.name for entry in manifest.tensors] == sorted(expected)
    follower = Follower(store)
    follower.advance()
    assert str(follower.version) == "v000002-60160160-057d30b13546"
    assert all(same_bits(follower.tensors[name], tensor) for name, tensor in weights_at(2).items())
    part = PartFollower(store, {"layer.1"}.__contains__)
    part.advance()
    assert same_bits(part.tensors["layer.1"], weights_at(2)["layer.1"])


def test_every_version_of_a_store_of_format_2_is_what_it_was() -> None:
    names = [(str(m.version), m.kind.value, m.rollout_ids) for m in chain(golden_store(), "policy")]
    assert names == [
        ("v000000-60160160-f6dc041834a8", "anchor", ()),
        ("v000001-60160160-3c0434df85bd", "delta", ("g000001.0", "g000001.1")),
        ("v000002-60160160-057d30b13546", "delta", ("g000002.0", "g000002.1")),
    ]


def every_dtype() -> tuple[list[Tensor], list[Tensor]]:
    """Old and new tensors of every dtype; some share a tile, one changes in every way, one not at all."""
    old, new = [], []
    for i, kind in enumerate(DTYPES.values()):
        codes = (scrambled(70 + i) >> np.uint32(max(0, 32 - kind.bits))).astype(kind.codes)
        moved = codes + (scrambled(100 + i) % 5 == 0).astype(kind.codes)
        moved[::50] ^= kind.codes.type((1 << kind.bits) - 1)
        for side, part in ((old, codes), (new, moved)):
            side += [Tensor(kind.name, (60, 40), part), Tensor(kind.name, (7,), part[:7].copy())]
    old.append(Tensor("bf16", (2400,), scrambled(200).astype(np.uint16)))
    new.append(Tensor("bf16", (2400,), scrambled(201).astype(np.uint16)))
    return [*old, old[0]], [*new, old[0]]


def test_an_object_of_every_dtype_is_read_to_the_same_bits() -> None:
    old, new = every_dtype()
    data = (FORMAT_2 / "every-dtype.etd").read_bytes()
    assert all(map(same_bits, decode(data, [t.spec for t in new], old), new))


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("best", "0266edf564a378f3"), ("fast", "1e089fea85f53f8e")],
)
def test_the_writer_makes_these_bytes_of_an_object(mode: Mode, expected: str) -> None:
    """Not of one with planes: those are zstd's."""
    old, new = weights_at(0), weights_at(1)
    names = [name for name in sorted(old) if name in new]
    for kernels in (NumpyKernels(), KERNELS):
        data = encode([new[name] for name in names], [old[name] for name in names], mode, kernels=kernels)
        assert hashlib.sha256(data).hexdigest()[:16] == expected


def write(folder: Path) -> None:
    """Write the golden store of the current format, anew."""
    shutil.rmtree(folder, ignore_errors=True)
    writer, parent = Channel(DirectoryStore(folder), incarnation="60160160"), None
    for step in range(3):
        rollout_ids = [f"g{step:06d}.{i}" for i in range(2)] if step else []
        parent = writer.publish(weights_at(step), step=step, parent=parent, rollout_ids=rollout_ids).version
        sys.stdout.write(f"{parent}\n")
    old, new = every_dtype()
    (folder / "every-dtype.etd").write_bytes(encode(new, old))
    (folder / ".lock").unlink()


if __name__ == "__main__":
    write(FORMAT_2)
