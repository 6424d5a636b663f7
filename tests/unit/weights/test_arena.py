"""Short-lived buffers: disjoint, aligned, and freed when they are released."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest

from etude.weights.delta.arena import BLOCK_BYTES, MAPPED_BYTES, Arena, allocate

STATM = Path("/proc/self/statm")
PAGE = 4096


def resident_bytes() -> int:
    gc.collect()
    return int(STATM.read_text().split()[1]) * PAGE


def test_many_arrays_of_any_dtype_are_apart_and_aligned() -> None:
    arena, rng = Arena(), np.random.default_rng(0)
    kinds = [np.dtype(kind) for kind in (np.uint8, np.uint16, np.uint32, np.uint64)]
    sizes = [0, 1, 7, 1000, BLOCK_BYTES // 4, BLOCK_BYTES // 4 + 1, BLOCK_BYTES, *rng.integers(1, 90_000, 60).tolist()]
    made = [arena.take(size, kinds[i % 4]) for i, size in enumerate(sizes)]
    for i, one in enumerate(made):
        one.fill(i)
    for i, (one, size) in enumerate(zip(made, sizes, strict=True)):
        assert one.shape == (size,)
        assert one.dtype == kinds[i % 4]
        assert one.flags.aligned
        assert one.flags.writeable
        assert (one == i).all()


@pytest.mark.skipif(not STATM.exists(), reason="the kernel does not tell what is resident")
def test_the_system_has_the_memory_back_though_others_were_allocated_since() -> None:
    before = resident_bytes()
    arena, keep, gone = Arena(), [], []
    for _ in range(20_000):
        gone.append(arena.take(1000, np.dtype(np.uint16)))
        gone[-1].fill(1)
        keep.append(bytearray(600))  # from the allocator, between them
    one = allocate(MAPPED_BYTES, np.dtype(np.uint64))
    one.fill(1)
    held = resident_bytes()
    assert held - before > 20_000 * 2000 + one.nbytes
    kept_bytes = sum(map(len, keep))
    del arena, one
    gone.clear()
    assert resident_bytes() - before < 2 * kept_bytes + (4 << 20)
