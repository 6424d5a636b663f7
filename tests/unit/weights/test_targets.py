"""Updates of live memory in every layout: written, undone to the bit, refused before anything is written."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from etude.errors import WeightsError
from etude.records.completion import Version
from etude.weights import Tensor
from etude.weights.chain.undo_record import compare_tensors
from etude.weights.follow import live, runtime_map, targets
from etude.weights.follow.follower import Update
from etude.weights.follow.live import window
from etude.weights.follow.runtime_map import Derived, Map, Piece, Pieces, fused, merge_pieces, named, piece
from etude.weights.follow.targets import Swap, Target

Tensors = dict[str, Tensor]
VERSION = Version(step=3, incarnation="0a1b2c3d", digest="ab" * 32)


def tensor(*shape: int, seed: int = 0, dtype: str = "bf16") -> Tensor:
    codes = np.random.default_rng(seed).integers(0x3C00, 0x3E00, int(np.prod(shape))).astype(np.uint16)
    return Tensor(dtype, shape, codes)


def stepped(old: Tensor, seed: int = 1, share: float = 0.3) -> Tensor:
    change = np.random.default_rng(seed).random(old.codes.size) < share
    return Tensor(old.dtype, old.shape, old.codes + change.astype(np.uint16))


def update(old: Tensors, new: Tensors) -> Update:
    changed, replaced = compare_tensors(old, new)
    removed = tuple(sorted(old.keys() - new.keys()))
    return Update(VERSION, changed, replaced, removed, fetch_s=0.0, fetched_bytes=0)


def shaped(one: Tensor) -> np.ndarray:  # type: ignore[type-arg]
    return one.codes.reshape(one.shape).copy()


def swap_there_and_back(pieces: Pieces, old: Tensors, new: Tensors, **kwargs: object) -> Swap:
    """Load `old`, adopt `new`, undo, adopt again; after each step the live memory is compared."""
    target = Target(Map(pieces, **kwargs))  # type: ignore[arg-type]
    target.prepare(update({}, old), old, undoable=False).apply()
    assert target.differing(old) == []
    swap = target.prepare(update(old, new), new)
    swap.apply()
    assert target.differing(new) == []
    swap.undo()
    assert target.differing(old) == []
    swap = target.prepare(update(old, new), new)
    swap.apply(probe=lambda: target.differing(new) == [])
    return swap


@pytest.fixture(autouse=True, params=[0, 1 << 40], ids=["scattered", "copied whole"])
def dense(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to write changes: scattering, and copying the complete piece."""
    monkeypatch.setattr(targets, "DENSE", request.param)


@pytest.fixture(autouse=True, params=[live.native.load(), None], ids=["native", "without native kernels"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to scatter into host memory; without the library both are numpy."""
    monkeypatch.setattr(live.native, "load", lambda: request.param)


@pytest.fixture(params=["numpy", "torch", "device"])
def zeros(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., object]:
    """Create live bf16 memory: in numpy, in torch on the host, and in torch accessed like a device."""
    if request.param == "numpy":
        return lambda *shape: np.zeros(shape, np.uint16)
    if request.param == "device":
        monkeypatch.setattr(live, "in_host_memory", lambda value: False)
    return lambda *shape: torch.zeros(shape, dtype=torch.bfloat16)


def place_bytes(memory: object) -> int:
    """Bytes per index: half as many with the native kernels."""
    return 4 if live.native.load() and isinstance(window("it", memory).flat, np.ndarray) else 8


def test_tensors_under_their_own_names(zeros) -> None:
    old = {"a": tensor(4, 6), "b": tensor(9, seed=2), "scalar": tensor(seed=3), "empty": tensor(0, 3)}
    memory = {name: zeros(*one.shape) for name, one in old.items()}
    new = {name: stepped(one, seed=i) for i, (name, one) in enumerate(old.items())}
    swap = swap_there_and_back(named(memory), old, new)
    changes = sum(int((old[name].codes != new[name].codes).sum()) for name in old)
    assert swap.list_bytes == changes * (place_bytes(memory["a"]) + 2)
    assert swap.undo_bytes == changes * 2


def test_fused_stacked_and_transposed_places(zeros) -> None:
    old = {"q": tensor(8, 5), "k": tensor(4, 5, seed=1), "v": tensor(4, 5, seed=2), "down": tensor(5, 6, seed=3)}
    qkv, down = zeros(16, 5), zeros(6, 5)
    for e in range(3):
        old |= {f"{e}.gate": tensor(7, 5, seed=10 + e), f"{e}.up": tensor(7, 5, seed=20 + e)}
    w13 = zeros(3, 14, 5)
    experts = merge_pieces(*(fused(w13[e], {f"{e}.gate": 7, f"{e}.up": 7}) for e in range(3)))
    pieces = merge_pieces(fused(qkv, {"q": 8, "k": 4, "v": 4}), experts, named({"down": down.T}))
    new = {name: stepped(one, seed=i) for i, (name, one) in enumerate(old.items())}
    swap_there_and_back(pieces, old, new)
    bits = qkv if isinstance(qkv, np.ndarray) else qkv.view(torch.int16).numpy().view(np.uint16)
    assert bits.tolist() == np.concatenate([shaped(new[name]) for name in "qkv"]).tolist()


def test_tensors_in_one_storage_of_a_device_are_written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            copies.extend([func] * ("index_copy" in str(func)))
            return func(*args, **(kwargs or {}))

    monkeypatch.setattr(live, "in_host_memory", lambda value: False)
    monkeypatch.setattr(targets, "DENSE", 0)
    copies: list[object] = []
    old = {f"{e}.{part}": tensor(7, 5, seed=2 * e + i) for e in range(3) for i, part in enumerate(("gate", "up"))}
    w13 = torch.zeros(4, 14, 5, dtype=torch.bfloat16)[1:]  # not at the storage's start
    pieces = merge_pieces(*(fused(w13[e], {f"{e}.gate": 7, f"{e}.up": 7}) for e in range(3)))
    with Count():
        swap_there_and_back(pieces, old, {name: stepped(one, seed=i) for i, (name, one) in enumerate(old.items())})
    assert len(copies) == 3  # there, back, and there again


def test_columns_of_a_matrix_and_two_copies_of_one_tensor(zeros) -> None:
    old, both, copy = {"a": tensor(4, 3), "b": tensor(4, 5, seed=1)}, zeros(4, 8), zeros(4, 3)
    pieces = merge_pieces(fused(both, {"a": 3, "b": 5}, axis=1), named({"a": copy}))
    swap_there_and_back(pieces, old, {name: stepped(one) for name, one in old.items()})


@given(st.data())
def test_a_rank_holds_its_box_of_a_tensor(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    box = [tuple(sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n))))) for n in shape]
    memory = np.zeros([b - a for a, b in box], np.uint16)
    old = {"w": tensor(*shape)}
    new = {"w": stepped(old["w"], seed=data.draw(st.integers(0, 9)))}
    swap_there_and_back({"w": [piece("w", memory, box)]}, old, new)
    assert memory.tolist() == shaped(new["w"])[tuple(slice(a, b) for a, b in box)].tolist()


@given(st.permutations(range(12)))
def test_prepacked_memory_is_any_bijection_of_places(order: list[int]) -> None:
    memory, moved = np.zeros((4, 3), np.uint16), np.array(order)
    old = {"w": tensor(2, 6)}
    pieces = {"w": [Piece(window("w", memory), reorder=lambda places: moved[places])]}
    new = {"w": stepped(old["w"])}
    swap_there_and_back(pieces, old, new)
    assert memory.reshape(-1)[moved].tolist() == new["w"].codes.tolist()


def test_wider_live_memory_holds_the_same_values() -> None:
    memory = {"w": np.zeros((3, 4), np.float32)}
    old = {"w": tensor(3, 4)}
    new = {"w": stepped(old["w"])}
    swap_there_and_back(named(memory), old, new)
    assert memory["w"].tolist() == torch.from_numpy(shaped(new["w"]).view(np.int16)).view(torch.bfloat16).tolist()


def test_what_is_computed_from_a_tied_name_is_computed_when_the_published_one_changes() -> None:
    shared, ran = np.zeros((6, 4), np.uint16), []
    hook = Derived(frozenset({"head"}), lambda: ran.append("head"))
    old = {"embed": tensor(6, 4)}
    target = Target(Map(named({"embed": shared, "head": shared}), derived=[hook]))
    target.prepare(update({}, old), old, undoable=False).apply()
    new = {"embed": stepped(old["embed"])}
    target.prepare(update(old, new), new).apply()
    assert ran == ["head", "head"]


def test_tied_tensors_are_written_once(zeros) -> None:
    shared = zeros(6, 4)
    old = {"embed": tensor(6, 4), "head": tensor(6, 4)}
    step = stepped(old["embed"])
    target = Map(named({"embed": shared, "head": shared}))
    assert target.tied == {"embed": {"head"}, "head": {"embed"}}
    swap = swap_there_and_back(named({"embed": shared, "head": shared}), old, {"embed": step, "head": step})
    assert swap.list_bytes == int((old["embed"].codes != step.codes).sum()) * (place_bytes(shared) + 2)


def test_a_checkpoint_may_name_one_of_a_tie_only() -> None:
    shared = np.zeros((6, 4), np.uint16)
    old = {"embed": tensor(6, 4)}
    swap_there_and_back(named({"embed": shared, "head": shared}), old, {"embed": stepped(old["embed"])})
    both = {**old, "head": old["embed"]}
    target = Target(Map(named({"embed": shared, "head": shared})))
    target.prepare(update(both, old), old)  # the tie's other name may go


def test_tied_tensors_of_which_one_comes_whole_are_refused_where_no_image_can_be_compared() -> None:
    shared, one = np.zeros((6, 4), np.uint16), tensor(6, 4)
    target = Target(Map(named({"embed": shared, "head": shared})))
    new = {"embed": stepped(one), "head": stepped(one)}
    of_both = update({"embed": one}, new)
    target.prepare(of_both, new)
    with pytest.raises(WeightsError, match="are one storage in the engine") as caught:
        target.prepare(of_both, {name: each.spec for name, each in new.items()})
    assert "no copy of the other" in caught.value.facts


@pytest.mark.parametrize("head", [0, 7])
def test_a_tensor_tied_in_the_engine_and_not_in_the_checkpoint_is_refused(head: int) -> None:
    shared = np.zeros((6, 4), np.uint16)
    old = {"embed": tensor(6, 4), "head": tensor(6, 4)}
    target = Target(Map(named({"embed": shared, "head": shared})))
    new = {"embed": stepped(old["embed"]), "head": stepped(old["head"], seed=head) if head else old["head"]}
    with pytest.raises(WeightsError, match="are one storage in the engine"):
        target.prepare(update(old, new), new)


def test_derived_memory_is_computed_again_when_its_sources_change_and_only_then() -> None:
    memory = {name: np.zeros((3, 3), np.float32) for name in ("up", "query", "norm")}
    absorbed, calls = np.zeros((3, 3), np.float32), []

    def absorb() -> None:
        calls.append(1)
        np.matmul(memory["up"].T, memory["query"], out=absorbed)

    rng = np.random.default_rng(0)
    old = {name: Tensor("f32", (3, 3), rng.random(9, np.float32).view(np.uint32)) for name in memory}
    new = {name: Tensor("f32", (3, 3), one.codes + np.uint32(9)) for name, one in old.items()}
    hook = Derived(frozenset({"up", "query"}), absorb)
    swap_there_and_back(named(memory), old, new, derived=[hook])
    assert np.array_equal(absorbed, memory["up"].T @ memory["query"])
    assert len(calls) == 4
    target = Target(Map(named(memory), derived=[hook]))
    target.prepare(update(new, {**new, "norm": old["norm"]}), {**new, "norm": old["norm"]}).apply()
    assert len(calls) == 4


def test_outputs_that_are_kept_come_back_without_computing() -> None:
    memory = {"w": np.zeros(4, np.uint16)}
    packed, seeds = np.zeros(4, np.uint16), iter(range(9))
    hook = Derived(frozenset({"w"}), lambda: packed.__setitem__(..., next(seeds)), (window("packed", packed),))
    old = {"w": tensor(4)}
    target = Target(Map(named(memory), derived=[hook]))
    target.prepare(update({}, old), old, undoable=False).apply()
    before = packed.tolist()
    swap = target.prepare(update(old, {"w": stepped(old["w"], share=1)}), {"w": stepped(old["w"], share=1)})
    swap.apply()
    assert packed.tolist() != before
    swap.undo()
    assert packed.tolist() == before


@pytest.mark.parametrize("trouble", ["probe", "probe raises", "hook"])
def test_a_probe_or_a_hook_that_fails_leaves_the_old_version_live(trouble: str) -> None:
    memory = {"w": np.zeros(40, np.uint16)}
    old = {"w": tensor(40)}
    new = {"w": stepped(old["w"])}
    fails = iter([False, trouble == "hook", False])

    def compute() -> None:
        if next(fails):
            raise RuntimeError("no workspace")

    def probe() -> bool:
        if trouble == "probe raises":
            raise WeightsError("logits differ", hint="see them")
        return trouble == "hook"

    target = Target(Map(named(memory), derived=[Derived(frozenset({"w"}), compute)]))
    target.prepare(update({}, old), old, undoable=False).apply()
    with pytest.raises(WeightsError) as refused:
        target.prepare(update(old, new), new).apply(probe)
    assert str(VERSION) in refused.value.what
    assert "old weights were restored" in refused.value.hint
    assert target.differing(old) == []


def test_a_first_load_that_fails_says_that_nothing_whole_is_live() -> None:
    memory = {"w": np.zeros(40, np.uint16)}
    old = {"w": tensor(40)}
    with pytest.raises(WeightsError) as refused:
        Target(Map(named(memory))).prepare(update({}, old), old, undoable=False).apply(lambda: False)
    assert "incomplete" in refused.value.hint


def test_undo_needs_something_to_undo() -> None:
    memory, old = {"w": np.zeros(4, np.uint16)}, {"w": tensor(4)}
    target = Target(Map(named(memory)))
    fresh = target.prepare(update({}, old), old)
    with pytest.raises(WeightsError, match="cannot be undone: it was not applied"):
        fresh.undo()
    fresh.apply()
    fresh.commit()
    assert (fresh.list_bytes, fresh.undo_bytes) == (0, 0)
    with pytest.raises(WeightsError, match="it is committed"):
        fresh.undo()


def test_nothing_is_written_before_apply() -> None:
    memory, old = {"w": np.zeros(4, np.uint16)}, {"w": tensor(4)}
    Target(Map(named(memory))).prepare(update({}, old), old)
    assert not memory["w"].any()


@pytest.mark.parametrize(
    ("memory", "says"),
    [
        ({}, "no place for 'w'"),
        ({"w": np.zeros((2, 3), np.uint16), "x": np.zeros(2, np.uint16)}, "has no 'x'"),
        ({"w": np.zeros((3, 2), np.uint16)}, r"place for it is u16 \[3, 2\]"),
        ({"w": np.zeros((2, 3), np.uint8)}, r"place for it is u8 \[2, 3\]"),
        ({"w": np.zeros((2, 3), np.float16)}, r"place for it is f16 \[2, 3\]"),
        ({"w": torch.zeros(2, 3, dtype=torch.float64)}, r"place for it is f64 \[2, 3\]"),
    ],
)
def test_a_tensor_that_the_engine_cannot_hold_is_refused(memory, says) -> None:
    new = {"w": tensor(2, 3)}
    with pytest.raises(WeightsError, match=says):
        Target(Map(named(memory))).prepare(update({}, new), new)


def test_a_box_outside_of_the_tensor_is_refused() -> None:
    new = {"w": tensor(2, 3)}
    target = Target(Map({"w": [piece("w", np.zeros((2, 3), np.uint16), [(1, 3), (0, 3)])]}))
    with pytest.raises(WeightsError, match="for \\[\\(1, 3\\), \\(0, 3\\)\\] of it"):
        target.prepare(update({}, new), new)


def test_a_tensor_that_goes_while_the_engine_needs_it_is_refused_and_ignored_names_are_not() -> None:
    memory, old = {"w": np.zeros(4, np.uint16)}, {"w": tensor(4), "mtp": tensor(3)}
    target = Target(Map(named(memory), ignored={"mtp"}))
    target.prepare(update({}, old), old, undoable=False).apply()
    assert target.differing(old) == []
    with pytest.raises(WeightsError, match="has no 'w'"):
        target.prepare(update(old, {"mtp": old["mtp"]}), {"mtp": old["mtp"]})


def test_places_that_overlap_without_being_the_same_are_refused() -> None:
    memory = np.zeros(10, np.uint16)
    for second in (memory[5:], memory[2:4], memory[:6].reshape(2, 3)):
        with pytest.raises(WeightsError, match="overlap"):
            Map(named({"a": memory[:6], "b": second}))
    Map(named({"a": memory[:6], "b": memory[6:], "c": memory[:6]}))


@pytest.mark.parametrize(
    "value",
    [
        np.broadcast_to(np.zeros(3, np.uint16), (2, 3)),
        np.zeros(4, np.uint16)[::-1],
        np.frombuffer(bytes(8), np.uint16),
        np.zeros(2, ">u2"),
        torch.zeros(3).expand(2, 3),
        np.zeros(2, np.complex128),
    ],
)
def test_memory_that_cannot_be_written_by_place_is_refused(value) -> None:
    with pytest.raises(WeightsError) as refused:
        window("w", value)
    assert "'w'" in refused.value.what


def test_parts_that_do_not_fill_what_they_are_fused_in_are_refused() -> None:
    with pytest.raises(WeightsError, match="q, k have a total length of 7"):
        fused(np.zeros((8, 2), np.uint16), {"q": 4, "k": 3})


@pytest.mark.parametrize("live", ["bf16", "f32"])
def test_a_flipped_bit_is_found_in_whichever_piece_of_a_large_tensor_it_lies(
    monkeypatch: pytest.MonkeyPatch, live: str
) -> None:
    monkeypatch.setattr(runtime_map, "CHECKED", 100)
    codes = np.random.default_rng(0).integers(0, 65535, 1037).astype(np.uint16)
    memory = codes.copy() if live == "bf16" else (codes.astype(np.uint32) << np.uint32(16)).view(np.float32)
    target, tensors = Target(Map(named({"w": memory}))), {"w": Tensor("bf16", (1037,), codes)}
    assert target.differing(tensors) == []
    bits = memory.view(np.uint8)
    for at in (0, 99, 100, 101, 999, 1000, 1036):
        place = at * memory.itemsize + memory.itemsize - 1
        bits[place] ^= np.uint8(128)
        assert target.differing(tensors) == ["w"]
        bits[place] ^= np.uint8(128)
    assert target.differing(tensors) == []
