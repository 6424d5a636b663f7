"""A delta file turns one set of arrays into another, or is refused with a reason and changes nothing."""

from __future__ import annotations

import tracemalloc
from array import array

import numpy as np
import pytest
import torch

from etude.errors import WeightsError
from etude.weights import Tensor, apply, bound, encode
from etude.weights.delta import arena, codec, native
from etude.weights.delta.arrays import NUMPY
from etude.weights.tensors import DTYPES

Weights = dict[str, np.ndarray]  # type: ignore[type-arg]
BF16 = {"w": "bf16", "new": "bf16"}
TIED = {"w": "bf16", "tied": "bf16"}


def base() -> Weights:
    rng = np.random.default_rng(3)
    return {
        "w": rng.integers(0x3C00, 0x3E00, (40, 25)).astype(np.uint16),
        "norm": rng.standard_normal(50).astype(np.float32),
        "frozen": np.arange(6, dtype=np.uint8).reshape(2, 3),
        "gone": np.zeros(3, np.float16),
        "cast": np.ones((4, 2), np.float32),
    }


def target() -> Weights:
    made = base()
    made["w"][::7, 3] += np.uint16(1)
    made["norm"] *= np.float32(1.0001)
    del made["gone"]
    made["cast"] = np.ones((2, 4), np.float32)
    made["new"] = np.array([0x7FC1, 0x8000, 0xFF80], np.uint16)
    return made


def assert_equal(a: Weights, b: Weights) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype
        assert a[name].shape == b[name].shape
        assert a[name].tobytes() == b[name].tobytes()


def test_tensors_that_change_come_go_and_are_cast_arrive_bit_for_bit() -> None:
    assert_equal(apply(base(), encode(base(), target(), BF16)), target())


@pytest.mark.parametrize("mode", ["best", "fast"])
def test_both_modes_lead_to_the_same_bits(mode) -> None:
    assert_equal(apply(base(), encode(base(), target(), BF16, mode)), target())


def test_a_delta_from_new_to_old_is_applied() -> None:
    assert_equal(apply(target(), encode(target(), base(), BF16)), base())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_delta_of_every_dtype_gives_the_new_bytes(dtype: str) -> None:
    rng = np.random.default_rng(5)
    codes = DTYPES[dtype].codes
    old = {"w": rng.integers(0, 256, (33, codes.itemsize), dtype=np.uint8).view(codes)}
    new = {"w": old["w"] + (rng.random((33, 1)) < 0.3).astype(codes)}
    made = apply(old, encode(old, new, {"w": dtype}))["w"]
    assert made.tobytes() == new["w"].tobytes()


@pytest.mark.parametrize("dtype", [name for name in NUMPY if name in DTYPES])
def test_numpys_own_dtypes_need_no_name(dtype: str) -> None:
    old = {"w": np.arange(7).astype(NUMPY[dtype])}
    new = {"w": np.arange(7)[::-1].astype(NUMPY[dtype])}
    assert_equal(apply(old, encode(old, new)), new)


def test_in_place_only_the_buffers_change_and_they_are_what_comes_back() -> None:
    old, new = base(), target()
    for name in ("gone", "cast", "new"):
        old.pop(name, None)
        new.pop(name, None)
    delta = encode(old, new, {"w": "bf16"})
    views = dict(old)
    made = apply(old, delta, out=old)
    assert_equal(made, new)
    assert all(made[name] is views[name] for name in views)


def test_other_buffers_are_filled_whole_and_the_base_stays() -> None:
    old, out = base(), {name: np.zeros_like(value) for name, value in target().items()}
    apply(old, encode(old, target(), BF16), out=out)
    assert_equal(out, target())
    assert_equal(old, base())


def test_bytes_arrays_and_bytearrays_are_accepted_as_tensors() -> None:
    old = {"a": array("f", [1.0, 2.0]), "b": b"\x80\x3f\x81\x3f"}
    new = {"a": array("f", [1.0, 2.5]), "b": b"\x80\x3f\x82\x3f"}
    delta = encode(old, new, {"b": "bf16"})
    out = {"a": bytearray(8), "b": bytearray(4)}
    apply(old, delta, out=out)
    assert out == {"a": new["a"].tobytes(), "b": new["b"]}
    assert apply(old, delta)["a"].tolist() == [1.0, 2.5]


def test_torch_tensors_in_cpu_memory_need_no_dtypes() -> None:
    old = {"w": torch.linspace(-1, 1, 30).bfloat16().view(5, 6), "s": torch.ones(3).to(torch.float8_e4m3fn)}
    new = {"w": old["w"] * 1.01, "s": old["s"]}
    delta = encode(old, new)
    live = {name: value.clone() for name, value in old.items()}
    apply(live, delta, out=live)
    assert torch.equal(live["w"].view(torch.int16), new["w"].view(torch.int16))


def test_strided_and_big_endian_arrays_are_read_as_their_values() -> None:
    old = {"t": np.arange(12, dtype=np.float32).reshape(3, 4).T, "b": np.arange(4, dtype=">f4")}
    new = {"t": old["t"] + 1, "b": np.arange(4, dtype=np.float32) + 1}
    assert_equal(apply(old, encode(old, new)), {name: np.ascontiguousarray(v) for name, v in new.items()})


def test_nothing_to_nothing_and_empty_tensors_are_deltas_too() -> None:
    assert apply({}, encode({}, {})) == {}
    empty = {"e": np.empty((0, 3), np.float32), "s": np.float32(2).reshape(())}
    assert_equal(apply({}, encode({}, empty)), empty)
    assert_equal(apply(empty, encode(empty, empty)), empty)


def test_a_delta_of_many_objects_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "OBJECT_ELEMENTS", 60)
    assert_equal(apply(base(), encode(base(), target(), BF16)), target())


def test_a_set_that_did_not_change_costs_its_table() -> None:
    size = 100_000
    old = {"w": np.arange(size, dtype=np.uint16)}
    assert len(encode(old, old, {"w": "bf16"})) < 150


def test_the_bound_is_below_the_delta_and_above_nothing() -> None:
    assert 0 < bound(base(), target(), BF16) < len(encode(base(), target(), BF16))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda b: b["w"].__setitem__((0, 0), 1), "'w' has checksum"),
        (lambda b: b.pop("norm"), "it has no tensor 'norm'"),
        (lambda b: b.update(other=np.zeros(1, np.uint8)), "a tensor 'other' that is not in the delta"),
        (lambda b: b.update(cast=np.ones((8, 1), np.float32)), "'cast' is f32 [8, 1], the delta is for f32 [4, 2]"),
    ],
)
def test_another_base_is_refused_by_name_and_checksum_and_stays_as_it_was(spoil, says) -> None:
    delta = encode(base(), target(), BF16)
    wrong = base()
    spoil(wrong)
    held = {name: value.copy() for name, value in wrong.items()}
    for out in (None, wrong):
        with pytest.raises(WeightsError) as refused:
            apply(wrong, delta, out=out)
        assert refused.value.what == "this delta is for another base"
        assert says in refused.value.facts
        assert "nothing was changed" in refused.value.hint
    assert_equal(wrong, held)


def test_the_same_delta_twice_is_refused_by_checksum() -> None:
    old, new = {"w": np.zeros(9, np.float32)}, {"w": np.ones(9, np.float32)}
    delta = encode(old, new)
    apply(old, delta, out=old)
    with pytest.raises(WeightsError, match="another base"):
        apply(old, delta, out=old)
    assert_equal(old, new)


@pytest.mark.parametrize(
    ("out", "says"),
    [
        ({}, "out has no tensor 'w'"),
        ({"w": np.zeros(4, np.float32)}, r"out\['w'\] cannot take"),
        ({"w": np.zeros(3, np.uint16)}, r"out\['w'\] cannot take"),
        ({"w": np.zeros((3, 3), np.float32).T[1]}, r"out\['w'\] cannot take"),
        ({"w": bytes(12)}, r"out\['w'\] cannot take"),
    ],
)
def test_a_buffer_that_does_not_fit_is_refused(out, says) -> None:
    old = {"w": np.zeros(3, np.float32)}
    with pytest.raises(WeightsError, match=says):
        apply(old, encode(old, {"w": np.ones(3, np.float32)}), out=out)


def test_one_buffer_under_two_names_is_written_once_or_refused() -> None:
    shared = np.arange(20, dtype=np.uint16)
    old = {"w": shared, "tied": shared}
    step = shared + (shared % 3 == 0).astype(np.uint16)
    delta = encode(old, {"w": step, "tied": step}, TIED)
    untied = encode(old, {"w": step, "tied": shared.copy()}, TIED)
    with pytest.raises(WeightsError, match="are the same memory"):
        apply(old, untied, out=old)
    assert shared.tolist() == list(range(20))
    apply(old, delta, out=old)
    assert shared.tolist() == step.tolist()


def test_buffers_that_overlap_what_is_still_to_be_read_are_refused() -> None:
    memory = np.arange(40, dtype=np.uint16)
    old = {"w": memory[:20], "tied": memory[20:]}
    delta = encode(old, {name: value + np.uint16(1) for name, value in old.items()}, TIED)
    for out in (
        {"w": memory[20:], "tied": memory[:20]},
        {"w": memory[10:30], "tied": np.zeros(20, np.uint16)},
        {"w": memory[:20], "tied": memory[5:25]},
    ):
        with pytest.raises(WeightsError, match="memory"):
            apply(old, delta, out=out)
        assert memory.tolist() == list(range(40))
    apply(old, delta, out={"w": memory[:20], "tied": np.zeros(20, np.uint16)})
    assert memory.tolist() == [*range(1, 21), *range(20, 40)]


@pytest.mark.parametrize(
    ("value", "dtypes", "says"),
    [
        (np.zeros(2, np.complex64), {}, "is not supported"),
        (np.zeros(2, np.uint16), {"w": "bf61"}, "did you mean 'bf16'"),
        (np.zeros(2, np.uint8), {"w": "bf16"}, "elements of 1 bytes"),
        (b"\0\0\0", {"w": "bf16"}, "has 3 bytes"),
        ([1, 2], {}, "which has no buffer"),
        (np.array([object()]), {}, "its element size is not supported"),
        (np.zeros(2, np.complex128), {}, "its element size is not supported"),
    ],
)
def test_an_array_that_cannot_be_a_tensor_is_refused_by_name(value, dtypes, says) -> None:
    with pytest.raises(WeightsError) as refused:
        encode({}, {"w": value}, dtypes)
    assert "'w'" in refused.value.what
    assert says in str(refused.value)


def test_an_unknown_mode_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(WeightsError, match="no mode 'fasst'") as refused:
        encode(base(), target(), BF16, "fasst")  # type: ignore[arg-type]
    assert refused.value.hint == "did you mean 'fast'?"
    with pytest.raises(WeightsError, match="no mode 'quick'") as refused:
        encode({}, {}, mode="quick")  # type: ignore[arg-type]
    assert refused.value.hint == "known: best, fast"


def test_a_dtype_for_a_tensor_that_neither_side_has_is_refused_with_the_nearest() -> None:
    old, new = {"weight": np.zeros(2, np.uint16)}, {"weight": np.ones(2, np.uint16)}
    for call in (encode, bound):
        with pytest.raises(WeightsError, match="dtypes names 'weigth'") as refused:
            call(old, new, {"weigth": "bf16"})
        assert refused.value.hint == "did you mean 'weight'?"
    assert apply(old, encode(old, new, {"weight": "bf16"}))["weight"].tolist() == [1, 1]
    assert encode(old, {}, {"weight": "bf16"}), "one side is enough"


@pytest.mark.parametrize("wrong", ["step.etdf", None, 3])
def test_an_argument_that_is_no_delta_is_refused(wrong) -> None:
    with pytest.raises(WeightsError, match=f"this delta is a {type(wrong).__name__}") as refused:
        apply(base(), wrong)
    assert "read_bytes" in refused.value.hint


def test_a_target_over_the_limit_is_refused_before_anything_is_decoded() -> None:
    delta = encode({}, {"w": np.zeros(1 << 20, np.uint8)})
    with pytest.raises(WeightsError, match="needs 1048576 bytes"):
        apply({}, delta, limit_bytes=1 << 19)


def test_tensor_objects_are_accepted() -> None:
    old, new = (Tensor("bf16", (2,), np.array(codes, np.uint16)) for codes in ([1, 2], [1, 3]))
    assert apply({"w": old}, encode({"w": old}, {"w": new}))["w"].tolist() == [1, 3]


@pytest.mark.parametrize("wrong", [[1], np.zeros(3), {1: np.zeros(3)}, None])
def test_an_argument_that_is_no_mapping_of_names_to_arrays_is_refused(wrong) -> None:
    good = {"w": np.zeros(3)}
    delta = encode(good, good)
    for call in (lambda: encode(wrong, good), lambda: encode(good, wrong), lambda: bound(wrong, good)):
        with pytest.raises(WeightsError, match="not a mapping of names to arrays"):
            call()
    with pytest.raises(WeightsError, match="not a mapping of names to arrays"):
        apply(wrong, delta)


@pytest.mark.skipif(bool(native.why_not()), reason=native.why_not() or "there")
def test_in_place_takes_the_list_of_changes_once_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measures numpy's allocations with `tracemalloc`, including lists in the heap."""
    monkeypatch.setattr(arena, "MAPPED_BYTES", 1 << 62)
    rng = np.random.default_rng(0)
    old = {f"w{i}": rng.integers(0x3C00, 0x3E00, (1000, 5000)).astype(np.uint16) for i in range(3)}
    new = {name: codes + (rng.random(codes.shape) < 0.02).astype(np.uint16) for name, codes in old.items()}
    delta = encode(old, new, dict.fromkeys(old, "bf16"))
    lists = 6 * sum(int((new[name] != old[name]).sum()) for name in old)
    tracemalloc.start()
    apply(old, delta, old)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert lists < peak < 1.2 * lists
    assert all(np.array_equal(old[name], new[name]) for name in old)
