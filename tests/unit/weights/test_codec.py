"""What the codec is good at, and where its parts meet."""

from __future__ import annotations

import numpy as np
import pytest

from etude.errors import WeightsError
from etude.weights import Spec, Tensor, codec
from etude.weights.bound import bound_bytes
from etude.weights.codec import decode, encode
from etude.weights.tensors import same_bits


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
    ("lr", "share"), [(1e-7, 0.85), (3e-6, 0.96), (1e-5, 0.97), (3e-5, 0.97), (1e-4, 0.97), (1e-2, 0.96)]
)
def test_a_delta_is_near_its_bound_at_every_density_and_never_below(lr: float, share: float) -> None:
    old, new = optimiser_step(400_000, lr, tensors=100)
    data = encode(new, old)
    assert all(map(same_bits, decode(data, [t.spec for t in new], old), new))
    assert share <= bound_bytes(new, old) / len(data) <= 1.0


def test_a_hundred_small_tensors_cost_hardly_more_than_one_large() -> None:
    parts, whole = optimiser_step(200_000, 1e-5, tensors=100), optimiser_step(200_000, 1e-5)
    many, one = len(encode(parts[1], parts[0])), len(encode(whole[1], whole[0]))
    assert many < one + 100


def test_unchanged_tensors_cost_a_fraction_of_a_byte_and_stay_the_same_objects() -> None:
    old, _ = optimiser_step(100_000, 0.0, tensors=1000)
    data = encode(old, old)
    assert len(data) < 100
    assert all(a is b for a, b in zip(decode(data, [t.spec for t in old], old), old, strict=True))


def test_a_snapshot_of_bf16_weights_is_a_third_smaller_than_its_bytes() -> None:
    _, new = optimiser_step(400_000, 0.0)
    assert len(encode(new, [None])) < 0.7 * new[0].num_bytes


def test_tensors_longer_than_a_tile_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "TILE_ELEMENTS", 1000)
    old, new = optimiser_step(10_500, 3e-5, tensors=7)
    specs = [t.spec for t in new]
    assert all(map(same_bits, decode(encode(new, old), specs, old), new))
    nothing = [None] * len(new)
    assert all(map(same_bits, decode(encode(new, nothing), specs, nothing), new))


def test_a_zero_crossing_is_one_step() -> None:
    old = Tensor("bf16", (1000,), np.full(1000, 0x0000, np.uint16))
    new = Tensor("bf16", (1000,), np.full(1000, 0x8000, np.uint16))
    far = Tensor("bf16", (1000,), np.full(1000, 0xBF80, np.uint16))
    assert len(encode([new], [old])) <= len(encode([far], [old]))
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
    for bad in (data + b"\0", data[:-1], b"", b"etd\x02" + data[4:]):
        with pytest.raises(WeightsError):
            decode(bad, [new[0].spec], old)
