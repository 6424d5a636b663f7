"""Compression ratios of the codec, and the boundaries of batches and forms."""

from __future__ import annotations

import math

import numpy as np
import pytest

from etude.errors import WeightsError
from etude.weights import Spec, Tensor
from etude.weights.delta import codec, layout
from etude.weights.delta.bound import bound_bytes
from etude.weights.delta.codec import changes, decode, encode
from etude.weights.tensors import DTYPES, same_bits


def bf16(values: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def optimiser_step(size: int, lr: float, tensors: int = 1) -> tuple[list[Tensor], list[Tensor]]:
    rng = np.random.default_rng(0)
    weights = rng.standard_normal(size) * 0.02
    parts = [np.split(bf16(w), tensors) for w in (weights, weights + lr * rng.standard_normal(size))]
    old, new = ([Tensor("bf16", part.shape, part) for part in group] for group in parts)
    return old, new


@pytest.mark.parametrize(
    ("lr", "share"), [(1e-7, 0.9), (3e-6, 0.97), (1e-5, 0.96), (3e-5, 0.95), (1e-4, 0.95), (1e-2, 0.89)]
)
def test_a_delta_is_near_its_bound_at_every_density_and_never_below(lr: float, share: float) -> None:
    old, new = optimiser_step(400_000, lr, tensors=100)
    data = encode(new, old)
    assert all(map(same_bits, decode(data, [t.spec for t in new], old), new))
    assert share <= bound_bytes(new, old) / len(data) <= 1.0


@pytest.mark.parametrize("scale", [1e-7, 1e-4, 1e-3])
def test_a_delta_of_floats_that_all_change_is_near_its_bound(scale: float) -> None:
    rng = np.random.default_rng(0)
    weights = (rng.standard_normal((256, 512)) * 0.02).astype(np.float32)
    moved = (weights + scale * rng.standard_normal(weights.shape)).astype(np.float32)
    old, new = (Tensor("f32", side.shape, side.view(np.uint32).reshape(-1)) for side in (weights, moved))
    assert 0.97 <= bound_bytes([new], [old]) / len(encode([new], [old])) <= 1.0


def test_one_class_for_all_is_longer_and_comes_back_too() -> None:
    old, new = optimiser_step(300_000, 1e-6)
    fast, best = encode(new, old, "fast"), encode(new, old, "best")
    assert 1.2 * len(best) < len(fast) < 2 * len(best)
    assert same_bits(decode(fast, [new[0].spec], old)[0], new[0])


def test_a_hundred_small_tensors_cost_hardly_more_than_one_large() -> None:
    parts, whole = optimiser_step(200_000, 1e-5, tensors=100), optimiser_step(200_000, 1e-5)
    many, one = len(encode(parts[1], parts[0])), len(encode(whole[1], whole[0]))
    assert many < one + 100


def test_unchanged_tensors_cost_a_quarter_of_a_byte_and_stay_the_same_objects() -> None:
    old, _ = optimiser_step(100_000, 0.0, tensors=1000)
    data = encode(old, old)
    assert len(data) < 1000 / 4 + 20
    assert all(a is b for a, b in zip(decode(data, [t.spec for t in old], old), old, strict=True))


def test_a_snapshot_of_bf16_weights_is_a_third_smaller_than_its_bytes() -> None:
    _, new = optimiser_step(400_000, 0.0)
    assert len(encode(new, [None])) < 0.7 * new[0].num_bytes


@pytest.mark.parametrize("shape", [(9, 70_001), (700_001,), (70_001, 9), (3, 5, 45_001), (700_001, 1)])
def test_tensors_of_many_tiles_come_back(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "BATCH_ITEMS", 100_000)
    monkeypatch.setattr(layout, "WHOLE_TILE", 10_000)
    rng = np.random.default_rng(0)
    codes = rng.integers(0x3C00, 0x3E00, np.prod(shape), np.uint16)
    old = Tensor("bf16", shape, codes)
    new = Tensor("bf16", shape, codes + rng.integers(0, 5, codes.size, np.uint16))
    data = encode([new], [old])
    assert layout.read_header(data, [new.spec]).layout.num_tiles > 1
    assert same_bits(decode(data, [new.spec], [old])[0], new)
    assert same_bits(decode(encode([new], [None]), [new.spec], [None])[0], new)


def test_changes_are_those_that_make_the_new_tensors() -> None:
    rng = np.random.default_rng(0)
    old, new = [], []
    for dtype, shape in (("bf16", (40, 9001)), ("f4_e2m1x2", (300, 7)), ("i64", (20,)), ("f32", ()), ("bf16", (50,))):
        kind = DTYPES[dtype]
        size = math.prod(shape)
        codes = rng.integers(0, 1 << kind.bits, size, np.uint64).astype(kind.codes)
        other = codes ^ (rng.random(size) < 0.3).astype(kind.codes) << kind.codes.type(rng.integers(0, kind.bits))
        old.append(Tensor(dtype, shape, codes))
        new.append(Tensor(dtype, shape, other))
    new[-1] = old[-1]
    found = changes(encode(new, old), [t.spec for t in new], old)
    for before, after, change in zip(old, new, found, strict=True):
        assert isinstance(change, codec.Changes)
        where = np.flatnonzero(before.codes != after.codes)
        assert np.array_equal(change.positions, where)
        assert np.array_equal(change.codes, after.codes[where])
        assert change.codes.dtype == after.codes.dtype


def test_changes_of_a_tensor_without_an_old_one_are_the_tensor() -> None:
    old, _ = optimiser_step(100, 0.0)
    (found,) = changes(encode(old, [None]), [old[0].spec], [None])
    assert isinstance(found, Tensor)
    assert same_bits(found, old[0])


def test_a_zero_crossing_is_one_step() -> None:
    crossed = np.random.default_rng(0).random(1000) < 0.5
    old = Tensor("bf16", (1000,), np.zeros(1000, np.uint16))
    new = Tensor("bf16", (1000,), crossed * np.uint16(0x8000))
    near = Tensor("bf16", (1000,), crossed * np.uint16(0x0001))
    assert len(encode([new], [old])) == len(encode([near], [old]))
    assert same_bits(decode(encode([new], [old]), [new.spec], [old])[0], new)


def test_changing_every_code_to_every_distance_comes_back() -> None:
    every = np.arange(1 << 16, dtype=np.uint16)
    for shift in (1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        old, new = Tensor("bf16", (1 << 16,), every), Tensor("bf16", (1 << 16,), every + np.uint16(shift))
        assert same_bits(decode(encode([new], [old]), [new.spec], [old])[0], new)


def test_one_wild_jump_does_not_spoil_the_small_steps_of_the_others() -> None:
    old, new = optimiser_step(100_000, 3e-5)
    wild = new[0].codes.copy()
    wild[::10_000] = 0x7FC1
    spoiled = Tensor("bf16", new[0].shape, wild)
    data = encode([spoiled], old)
    assert len(data) < 1.01 * len(encode(new, old)) + 200
    assert same_bits(decode(data, [spoiled.spec], old)[0], spoiled)


def test_a_delta_for_other_tensors_is_refused() -> None:
    old, new = optimiser_step(100, 1e-3)
    data = encode(new, old)
    for specs, held in (([], []), ([Spec("f16", (100,))], old), ([new[0].spec], [None]), ([new[0].spec] * 2, old * 2)):
        with pytest.raises(WeightsError):
            decode(data, specs, held)


def test_bytes_after_the_end_and_a_cut_end_are_refused() -> None:
    old, new = optimiser_step(100, 1e-3)
    data = encode(new, old)
    for bad in (data + b"\0", data[:-1], b"", b"etd\x01" + data[4:]):
        with pytest.raises(WeightsError):
            decode(bad, [new[0].spec], old)
