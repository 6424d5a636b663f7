"""All implementations of the checksum agree; it follows changes and detects accidental damage."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from etude.errors import WeightsError
from etude.weights import apply, encode
from etude.weights.delta import checksums as module
from etude.weights.delta import native
from etude.weights.delta.changes import Changes
from etude.weights.delta.checksums import BLOCK_BYTES, checksum, checksums, checksums_before_after, sums_by_numpy
from etude.weights.delta.native import LEVELS, NativeKernels
from etude.weights.tensors import Codes

WIDTHS = (np.uint8, np.uint16, np.uint32, np.uint64)
SIZES = (0, 1, 5, 4095, 4096, 4097, 3 * BLOCK_BYTES + 7, 300_000)
needs_library = pytest.mark.skipif(bool(native.why_not()), reason=native.why_not() or "there")


def sample(width: type, size: int, share: float = 0.05) -> tuple[Codes, Codes, Changes]:
    rng = np.random.default_rng(size)
    most = np.iinfo(width).max
    old = rng.integers(0, most, size, dtype=width, endpoint=True)
    places = np.flatnonzero(rng.random(size) < share).astype(np.uint32)
    changes = Changes(places, rng.integers(0, most, places.size, dtype=width, endpoint=True))
    new = old.copy()
    new[places] = changes.codes
    return old, new, changes


@needs_library
@pytest.mark.parametrize("width", WIDTHS)
def test_native_and_numpy_on_every_level_and_thread_give_the_same_sums(width: type) -> None:
    best = LEVELS.index(NativeKernels().level)
    for size in SIZES:
        old, new, changes = sample(width, size)
        expected = sums_by_numpy(old, new)
        assert sums_by_numpy(old, changes=changes) == expected
        for level in LEVELS[: best + 1]:
            for threads in (1, 3):
                kernels = NativeKernels(threads, level)
                assert kernels.sums(old, new) == expected
                assert kernels.sums(old, None, (changes.positions, changes.codes)) == expected


@needs_library
def test_memory_that_starts_anywhere_has_the_sums_of_its_bytes() -> None:
    octets = np.random.default_rng(1).integers(0, 255, 5 * BLOCK_BYTES, np.uint8)
    for start in range(9):
        part = octets[start:]
        assert NativeKernels().sums(part)[:2] == sums_by_numpy(part.copy())[:2]


def splitmix64(seed: int, i: int) -> int:
    z = (seed + (i + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


def by_hand(data: bytes) -> str:
    """The definition in `docs/formats/checksum.md`, implemented directly."""
    keys = [splitmix64(0x6574756465207731, i) for i in range(2048 + 16)]
    words = struct.unpack(f"<{-(-len(data) // 4)}I", data + bytes(-len(data) % 4))
    sums = [0, 0]
    for j in range(0, len(words), 2048):
        for which in (0, 1):
            of_block = sum(word * keys[i + 16 * which] for i, word in enumerate(words[j : j + 2048]))
            sums[which] += (splitmix64(0x6574756465206232, 2 * (j // 2048) + which) | 1) * of_block
    return struct.pack("<2Q", *(one % 2**64 for one in sums)).hex()


def test_the_numbers_are_those_of_the_format() -> None:
    assert checksum(np.array([1, 2], np.uint16)) == by_hand(b"\1\0\2\0") == "525e21bf92390720298cd3c4bbd37ac7"
    assert checksum(np.empty(0, np.uint8)) == by_hand(b"") == "0" * 32
    for width in WIDTHS:
        codes = sample(width, 3 * BLOCK_BYTES // codes_bytes(width) + 3)[0]
        assert checksum(codes) == by_hand(codes.tobytes())


def codes_bytes(width: type) -> int:
    return np.dtype(width).itemsize


@pytest.mark.parametrize("width", WIDTHS)
def test_what_a_list_adds_is_the_checksum_of_what_it_makes(width: type) -> None:
    old, new, changes = sample(width, 30_000)
    assert checksums_before_after(old, changes) == (checksum(old), checksum(new)) == checksums(old, new)
    wide = Changes(changes.positions.astype(np.int64), changes.codes)
    assert checksums_before_after(old, wide) == (checksum(old), checksum(new))


@needs_library
def test_a_tensor_of_more_elements_than_32_bits_count_is_summed_in_parts() -> None:
    old, new, changes = sample(np.uint16, 60_000)
    wide = Changes(changes.positions.astype(np.int64), changes.codes)
    kernels = native.load()
    assert kernels is not None
    parts = list(module._parts(old, wide, BLOCK_BYTES))
    assert len(parts) == 8
    assert module._added(kernels.sums(part, None, lists, first) for part, lists, first in parts) == sums_by_numpy(
        old, new
    )


def test_every_flipped_bit_every_swap_and_every_page_that_is_lost_or_moved_is_seen() -> None:
    codes = sample(np.uint16, 3 * BLOCK_BYTES)[0]
    seen = {checksum(codes)}
    wrong = []
    for at in range(0, codes.size, 7):
        flipped = codes.copy()
        flipped[at] ^= np.uint16(1 << at % 16)
        wrong.append(flipped)
    for a, b in ((0, 1), (5, 4101), (0, 16), (4096, 8192), (100, 12_388)):
        swapped = codes.copy()
        swapped[[a, b]] = swapped[[b, a]]
        wrong.append(swapped)
    for page in range(0, codes.size, 2048):
        lost, moved = codes.copy(), codes.copy()
        lost[page : page + 2048] = 0
        moved[page : page + 2048] = np.roll(codes, 2048)[page : page + 2048]
        wrong += [lost, moved]
    wrong += [np.roll(codes, 1), np.roll(codes, 4096), codes[::-1].copy(), codes + np.uint16(1)]
    for one in wrong:
        seen.add(checksum(one))
    assert len(seen) == len(wrong) + 1


def test_flipped_top_bits_do_not_cancel() -> None:
    """Plain sums of 64-bit words modulo 2^64 would miss them."""
    zeros = np.zeros(9000, np.uint64)
    seen = set()
    for a in range(0, 9000, 37):
        for b in (a + 1, (a + 1024) % 9000):
            pair = zeros.copy()
            pair[[a, b % 9000]] = np.uint64(1) << np.uint64(63)
            seen.add(checksum(pair))
    assert len(seen) == 2 * len(range(0, 9000, 37))


@pytest.mark.parametrize("positions", [[3, 3], [5, 2], [9], [2, 10]])
def test_places_that_do_not_rise_or_lie_outside_are_refused(positions: list[int]) -> None:
    changes = Changes(np.array(positions, np.uint32), np.zeros(len(positions), np.uint16))
    with pytest.raises(ValueError, match="outside of 9"):
        checksums_before_after(np.zeros(9, np.uint16), changes)
    with pytest.raises(ValueError, match="outside of 9"):
        sums_by_numpy(np.zeros(9, np.uint16), changes=changes)


def test_a_base_with_any_bit_flipped_is_refused_whether_it_is_changed_there_or_not() -> None:
    rng = np.random.default_rng(2)
    old = {"w": rng.integers(0x3C00, 0x3E00, 600).astype(np.uint16), "kept": np.arange(40, dtype=np.uint16)}
    new = {"w": old["w"] + (rng.random(600) < 0.1).astype(np.uint16), "kept": old["kept"]}
    delta = encode(old, new, {"w": "bf16"})
    for name in old:
        for bit in range(0, 8 * old[name].nbytes, 5):
            wrong = {key: value.copy() for key, value in old.items()}
            wrong[name].view(np.uint8)[bit // 8] ^= np.uint8(1 << bit % 8)
            held = {key: value.copy() for key, value in wrong.items()}
            for out in (None, wrong):
                with pytest.raises(WeightsError, match="another base"):
                    apply(wrong, delta, out=out)
            assert all(np.array_equal(wrong[key], held[key]) for key in held)


def test_a_file_of_the_format_before_is_refused_by_name() -> None:
    delta = bytearray(encode({}, {"w": np.zeros(3, np.uint8)}))
    delta[4:6] = struct.pack("<H", 1)
    with pytest.raises(WeightsError, match=r"format 1\.0") as refused:
        apply({}, bytes(delta))
    assert "this version of etude supports format 2.0" in refused.value.facts
    assert "encode it again" in refused.value.hint
