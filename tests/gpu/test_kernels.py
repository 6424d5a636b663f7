"""The device's kernels and numpy's make the same bytes, read the same bytes, and refuse the same bytes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed (pip install 'etude[gpu]')")

from etude.errors import WeightsError
from etude.weights.delta.layout import Piece, Tile
from etude.weights.delta.tiles import NumpyKernels, gather
from etude.weights.gpu.kernels import DeviceKernels
from etude.weights.gpu.memory import Items
from etude.weights.tensors import DTYPES, Codes, DType, Spec, from_items

NUMPY = NumpyKernels()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK = 128  # so that a small tile has many
SIZES = (6, 128, 600)


def codes(rng: np.random.Generator, kind: DType, size: int) -> Codes:
    """Any bits, most of them of numbers near zero."""
    near = rng.standard_normal(size).astype(np.float32) * np.float32(0.02)
    bits = near.view(np.uint32) >> np.uint32(32 - kind.width)
    wild = rng.integers(0, 1 << kind.width, size, np.uint64)
    return np.where(rng.random(size) < 0.9, bits, wild).astype(kind.items)


def moved(rng: np.random.Generator, kind: DType, old: Codes, share: float) -> Codes:
    """A share of the codes changed: most by a step or two, some to anything."""
    steps = rng.choice(np.array([1, -1, 2, -3, 40], np.int64), old.size)
    new = (old.astype(np.int64) + steps) % (1 << kind.width)
    wild = rng.integers(0, 1 << kind.width, old.size, np.uint64).astype(np.int64)
    new = np.where(rng.random(old.size) < 0.02, wild, new)
    return np.where(rng.random(old.size) < share, new, old.astype(np.int64)).astype(kind.items)


def on_device(kind: DType, items: Codes) -> Items:
    held = from_items(items, kind)
    spec = Spec(kind.name, (held.size,))
    return Items.of("w", torch.from_numpy(held.view(f"i{held.itemsize}").copy()).to(DEVICE), spec)


def tiles_of(rng: np.random.Generator, kind: DType) -> list[Tile]:
    """One range, rectangles of short and of long rows, several tensors, in one class and in many."""
    high = 122 if kind.bits > 8 else 10
    shapes = [
        (Piece(0, 0, 1, 6, 6),),
        (Piece(2, 0, 1, 600, 600),),
        (Piece(2, 7, 6, 31, 100),),
        (Piece(2, 33, 2, 140, 300),),
        (Piece(1, 0, 2, 64, 64), Piece(0, 0, 1, 6, 6), Piece(2, 0, 1, 77, 600)),
    ]
    return [Tile(high, classes, pieces) for pieces in shapes for classes in (1, int(rng.integers(2, 17)))]


def pair(name: str, share: float) -> tuple[DType, list[Codes], list[Codes], list[Tile]]:
    rng = np.random.default_rng(list(f"{name}{share}".encode()))
    kind = DTYPES[name]
    old = [codes(rng, kind, size) for size in SIZES]
    return kind, old, [moved(rng, kind, part, share) for part in old], tiles_of(rng, kind)


def raw(kind: DType, tile: Tile, new: Sequence[Codes]) -> bytes:
    return bytes((2,)) + gather(tile, new).tobytes()


@pytest.mark.parametrize(
    ("name", "share"), [*((name, 0.1) for name in DTYPES), ("bf16", 0.0), ("bf16", 0.6), ("f4_e2m1x2", 0.6)]
)
def test_the_device_makes_the_bytes_of_numpy_and_reads_them_to_the_same_codes(name: str, share: float) -> None:
    kind, old, new, tiles = pair(name, share)
    kernels = DeviceKernels(BLOCK)
    before, after = ([on_device(kind, part) for part in side] for side in (old, new))
    made = kernels.encode(kind, tiles, before, after)
    assert made == NUMPY.encode(kind, tiles, old, new)
    payloads = [memoryview(p or raw(kind, tile, new)) for p, tile in zip(made, tiles, strict=True)]
    expected = NUMPY.changes(kind, tiles, old, payloads)
    for (places, items), (a, b) in zip(kernels.changes(kind, tiles, before, payloads), expected, strict=True):
        np.testing.assert_array_equal(places, a)
        np.testing.assert_array_equal(items, b)


@pytest.mark.parametrize("name", ["bf16", "f4_e2m1x2", "f64"])
def test_live_memory_is_written_where_it_is_and_nowhere_else_and_taken_back(name: str) -> None:
    kind, old, new, tiles = pair(name, 0.2)
    kernels = DeviceKernels(BLOCK)
    for i, tile in enumerate(tiles):
        (payload,) = NUMPY.encode(kind, [tile], old, new)
        payload = raw(kind, tile, new) if i == 4 or not payload else payload
        expected = [part.copy() for part in old]
        NUMPY.apply(kind, [tile], old, expected, [memoryview(payload)])
        live = [on_device(kind, part) for part in old]
        addresses = [items.address for items in live]
        lists = kernels.lists(kind, [tile], live, [memoryview(payload)])
        undo = [kernels.read(each, live) for each in lists]
        assert [held.host(kind).tolist() for held in live] == [part.tolist() for part in old]
        for each in lists:
            kernels.writer(each, live)()
        assert [held.host(kind).tolist() for held in live] == [part.tolist() for part in expected]
        for each in undo:
            kernels.writer(each, live)()
        assert [held.host(kind).tolist() for held in live] == [part.tolist() for part in old]
        kernels.apply(kind, [tile], live, live, [memoryview(payload)])
        assert [held.host(kind).tolist() for held in live] == [part.tolist() for part in expected]
        assert [items.address for items in live] == addresses


@pytest.mark.parametrize("name", ["bf16", "f4_e2m1x2", "f32"])
@pytest.mark.parametrize("stride", [1, 32])
def test_the_device_samples_the_same_items(name: str, stride: int) -> None:
    kind, rng = DTYPES[name], np.random.default_rng(1)
    for size in (2, 64, 100, 6402):
        old = codes(rng, kind, size)
        new = moved(rng, kind, old, 0.1)
        ours = DeviceKernels().sample(on_device(kind, old), on_device(kind, new), kind, stride)
        for a, b in zip(ours, NUMPY.sample(old, new, kind, stride), strict=True):
            np.testing.assert_array_equal(a, b)


def test_more_changes_than_there_was_room_for_are_found_by_a_second_scan() -> None:
    kind, size = DTYPES["u8"], 1000
    old = np.zeros(size, np.uint8)
    new = old + np.uint8(1)
    tile = Tile(0, 1, (Piece(0, 0, 1, size, size),))
    made = DeviceKernels(BLOCK).encode(kind, [tile], [on_device(kind, old)], [on_device(kind, new)])
    assert made == NUMPY.encode(kind, [tile], [old], [new])


def outcome(kernels: DeviceKernels | NumpyKernels, kind: DType, tile: Tile, old: object, payload: bytes) -> object:
    """What came of it: a list, or nothing but that it was refused."""
    try:
        ((places, items),) = kernels.changes(kind, [tile], [old], [memoryview(payload)])  # type: ignore[list-item]
    except WeightsError:
        return "refused"
    return places.tolist(), items.tolist()


def test_mutated_tiles_are_refused_or_read_the_same_and_live_memory_stays_when_they_are_refused() -> None:
    rng = np.random.default_rng(7)
    kind, size = DTYPES["bf16"], 100
    old = codes(rng, kind, size)
    tile, kernels = Tile(122, 4, (Piece(0, 0, 1, size, size),)), DeviceKernels(BLOCK)
    (payload,) = NUMPY.encode(kind, [tile], [old], [moved(rng, kind, old, 0.2)])
    live, refused = on_device(kind, old), 0
    for _ in range(60):
        bad = bytearray(payload)
        for at in rng.integers(0, len(bad), 2):
            bad[at] ^= 1 << int(rng.integers(0, 8))
        told = outcome(kernels, kind, tile, live, bytes(bad))
        assert told == outcome(NUMPY, kind, tile, old, bytes(bad))
        if told == "refused":
            refused += 1
            with pytest.raises(WeightsError):
                kernels.apply(kind, [tile], [live], [live], [memoryview(bad)])
            assert live.host(kind).tolist() == old.tolist()
    assert 0 < refused < 60


COMPILED = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from etude.weights.gpu import programs

WIDE = {"blocks": "*i64", "chunks": "*i64", "pieces": "*i64", "capacity": "i32", "size": "i32"}
KIND = dict(WIDTH=16, SHIFT=7, EXPONENTS=255, FULL=True, BLOCK=2048)
for program, constants in (
    (programs.scan, dict(KIND, GROUPS=4)),
    (programs.count, KIND),
    (programs.place, dict(KIND, GROUPS=4, LISTED=False)),
    (programs.sort_out, dict(CHUNK=128)),
    (programs.mark, dict(CHUNK=1024)),
    (programs.scatter, dict(WIDTH=16, HALF=0, READ=False, CHUNK=1024)),
):
    names = program.arg_names
    kinds = {n: "constexpr" if n in constants else "*i16" if n == "codes" else WIDE.get(n, "*i32") for n in names}
    source = ASTSource(program, kinds, {(names.index(n),): value for n, value in constants.items()})
    ptx = compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    print(program.fn.__name__, "v4" if "ld.global.v4" in ptx else "-")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler is for Linux")
def test_the_programs_compile_for_hopper_without_one_and_read_full_blocks_in_wide_loads(tmp_path: Path) -> None:
    there = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", COMPILED], env=there, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == ["scan v4", "count v4", "place v4", "sort_out -", "mark -", "scatter -"]
