"""A follower without a copy of the weights: it decodes from and verifies live memory, with the same results as
`Follower`."""

from __future__ import annotations

import gc
import hashlib
import tracemalloc
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from etude.errors import WeightsError
from etude.records import Version
from etude.stores import MemoryStore
from etude.weights import Channel, Follower, Tensor, Update, chain
from etude.weights.chain.branches import point
from etude.weights.chain.manifest import FORMAT, Pointer, Ref
from etude.weights.delta import arena
from etude.weights.delta.arrays import tensor_of
from etude.weights.delta.codec import encode
from etude.weights.follow.head_tracker import Behind
from etude.weights.follow.live_follower import LiveFollower
from etude.weights.follow.parts import split_pieces
from etude.weights.follow.runtime_map import Map, named
from etude.weights.follow.targets import Swap, Target
from etude.weights.tensors import DTYPES, same_bits

Tensors = dict[str, Tensor]
Policy = Callable[..., Tensors]


class Engine:
    """Live memory, its map, and a follower over it."""

    def __init__(self, store: MemoryStore, first: Tensors, **kwargs: object) -> None:
        self.memory = {name: np.zeros_like(one.codes).reshape(one.shape) for name, one in first.items()}
        self.dtypes = {name: one.dtype for name, one in first.items()}
        self.follower = LiveFollower(store, self.views, **kwargs)  # type: ignore[arg-type]

    def views(self) -> Tensors:
        return {name: Tensor(self.dtypes[name], a.shape, a.reshape(-1)) for name, a in self.memory.items()}

    def write(self, update: Update) -> Swap:
        swap = Target(Map(named(self.memory))).prepare(update, self.follower.specs)
        swap.apply()
        self.follower.mark_adopted(update)
        return swap

    def advance(self) -> Swap | None:
        update = self.follower.prepare()
        return self.write(update) if update else None

    def holds(self, tensors: Tensors) -> bool:
        return all(same_bits(one, tensors[name]) for name, one in self.views().items())


def publish(store: MemoryStore, versions: list[Tensors], **kwargs: object) -> list[Version]:
    """Publish all of them, as one chain."""
    channel, made = Channel(store, **kwargs), list[Version]()  # type: ignore[arg-type]
    for step, tensors in enumerate(versions):
        parent = made[-1] if made else None
        made.append(channel.publish(tensors, step=step, parent=parent, rollout_ids=[]).version)
    return made


def every_dtype(share: float) -> list[Tensors]:
    """Two versions of a tensor of each dtype, with any bits: NaNs, infinities, zeros of both signs, subnormals."""
    rng, versions = np.random.default_rng(5), list[Tensors]([{}, {}])
    for name, kind in DTYPES.items():
        old = rng.integers(0, 256, 3000 * kind.codes.itemsize, dtype=np.uint8).view(kind.codes)
        new = np.where(rng.random(old.size) < share, rng.permutation(old), old)
        if kind.exponent_shift and kind.parts == 1:
            nan = ((1 << (kind.bits - 1 - kind.exponent_shift)) - 1 << kind.exponent_shift) | 1
            old[:4], new[:4] = [nan, nan, 0, 1 << kind.bits - 1], [nan ^ 2, 0, 1 << kind.bits - 1, nan]
        for version, codes in zip(versions, (old, new), strict=True):
            version[name] = Tensor(name, (30, 100), codes)
    return versions


def equal(a: Update, b: Update) -> bool:
    lists = a.changed.keys() == b.changed.keys() and all(
        np.array_equal(ours, theirs)
        for name in a.changed
        for ours, theirs in zip(a.changed[name], b.changed[name], strict=True)
    )
    wholes = a.replaced.keys() == b.replaced.keys() and all(
        same_bits(one, b.replaced[name]) for name, one in a.replaced.items()
    )
    return lists and wholes and (a.version, a.removed) == (b.version, b.removed)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.9])
def test_sparse_and_dense_updates_of_every_dtype_are_those_of_a_follower_with_an_image(share: float) -> None:
    store, versions = MemoryStore(), every_dtype(share)
    names = publish(store, versions)
    engine, other = Engine(store, versions[0]), Follower(store)
    for version, tensors in zip(names, versions, strict=True):
        update, expected = engine.follower.prepare(exactly=version), other.advance(exactly=version)
        assert update is not None
        assert expected is not None
        assert equal(update, expected)
        assert update.fetched_bytes == expected.fetched_bytes
        engine.write(update)
        assert engine.follower.version == version
        assert engine.holds(tensors)
    assert engine.follower.check() == []
    assert engine.follower.prepare() is None


def test_several_deltas_at_once_give_one_list_without_what_came_back() -> None:
    store = MemoryStore()
    codes = np.arange(1000, dtype=np.uint16) + np.uint16(0x3C00)
    steps = [codes.copy() for _ in range(4)]
    steps[1][[3, 500]] += 1
    steps[2][[3, 7, 900]] += 2  # 500 came back
    steps[3][[3, 7, 8]] += 4
    versions: list[Tensors] = [{"w": Tensor("bf16", (10, 100), each)} for each in steps]
    versions[2]["new"] = Tensor("u8", (2,), np.array([1, 2], np.uint8))
    versions[3]["new"] = Tensor("u8", (2,), np.array([1, 3], np.uint8))
    versions[1]["gone"] = Tensor("u8", (1,), np.array([9], np.uint8))
    names = publish(store, versions)
    engine, other = Engine(store, versions[0]), Follower(store)
    first = engine.follower.prepare(exactly=names[0])
    assert first is not None
    engine.write(first)
    other.advance(exactly=names[0])
    update, expected = engine.follower.prepare(), other.advance()
    assert update is not None
    assert expected is not None
    assert equal(update, expected)
    assert update.changed["w"][0].tolist() == [3, 7, 8]
    assert update.replaced["new"].codes.tolist() == [1, 3]


def test_tensors_that_come_go_and_change_their_shape(policy: Policy) -> None:
    store, changed = MemoryStore(), policy(1)
    del changed["frozen"]
    changed["norm"] = Tensor("f32", (25, 2), changed["norm"].codes)
    changed["bias"] = Tensor("f16", (), np.zeros(1, np.uint16))
    names = publish(store, [policy(0), changed])
    engine, other = Engine(store, policy(0)), Follower(store)
    first = engine.follower.prepare(exactly=names[0])
    assert first is not None
    engine.write(first)
    other.advance(exactly=names[0])
    update, expected = engine.follower.prepare(), other.advance()
    assert update is not None
    assert expected is not None
    assert equal(update, expected)
    assert (update.replaced.keys(), update.removed) == ({"norm", "bias"}, ("frozen",))
    engine.memory = {name: np.zeros_like(one.codes).reshape(one.shape) for name, one in changed.items()}
    engine.memory["embed"][:] = policy(0)["embed"].codes.reshape(-1, 10)
    engine.dtypes = {name: one.dtype for name, one in changed.items()}
    engine.write(update)
    assert engine.holds(changed)


@pytest.mark.parametrize("start", [True, False], ids=["delta", "anchor"])
def test_a_tensor_without_elements_is_nothing_to_prove(start: bool) -> None:
    store, empty = MemoryStore(), Tensor("bf16", (0, 3), np.empty(0, np.uint16))
    versions: list[Tensors] = [
        {"empty": empty, "w": Tensor("bf16", (4,), np.array([1, 2, 3, last], np.uint16))} for last in (4, 5)
    ]
    engine, names = Engine(store, versions[0]), publish(store, versions)
    engine.memory["w"][:] = versions[0]["w"].codes
    assert not start or engine.follower.start_from(names[0])
    engine.advance()
    assert engine.holds(versions[1])


def test_memory_at_an_odd_address_is_written_without_the_native_kernels() -> None:
    store, old = MemoryStore(), np.zeros(4000, np.uint16)
    new = old.copy()
    new[[7, 3999]] = 9
    versions: list[Tensors] = [{"w": Tensor("u16", (4000,), codes)} for codes in (old, new)]
    names, memory = publish(store, versions), np.zeros(2 * 4000 + 1, np.uint8)[1:].view(np.uint16)
    assert not memory.flags.aligned
    follower = LiveFollower(store, lambda: {"w": tensor_of("w", memory, "u16")})
    assert follower.start_from(names[0])
    update = follower.prepare()
    assert update is not None
    swap = Target(Map(named({"w": memory}))).prepare(update, follower.specs)
    swap.apply()
    assert memory.tolist() == new.tolist()
    swap.undo()
    assert memory.tolist() == old.tolist()


def test_a_list_of_a_quarter_of_a_tensors_elements_is_shorter_than_the_tensor() -> None:
    store = MemoryStore()
    old = np.arange(4000, dtype=np.uint16)
    new = old.copy()
    new[::4] += 1
    publish(store, [{"w": Tensor("bf16", (4000,), new)}])
    engine = Engine(store, {"w": Tensor("bf16", (4000,), old)})
    engine.memory["w"][:] = old
    update = engine.follower.prepare()  # from an anchor: the tensor comes whole
    assert update is not None
    assert update.changed["w"][0].tolist() == list(range(0, 4000, 4))


def test_tied_tensors_share_one_memory_and_are_written_once(policy: Policy) -> None:
    store, versions = MemoryStore(), [policy(s) | {"head": policy(s)["embed"]} for s in range(2)]
    publish(store, versions[:1])
    engine = Engine(store, versions[0])
    engine.memory["head"] = engine.memory["embed"]
    engine.advance()
    Channel(store).publish(versions[1], step=1, parent=engine.follower.version, rollout_ids=[])
    swap = engine.advance()
    assert swap is not None
    assert len(swap.writes) == 2
    assert engine.holds(versions[1])


def test_an_update_that_is_not_applied_changes_no_version_and_an_undo_restores_the_old_one(policy: Policy) -> None:
    store = MemoryStore()
    names = publish(store, [policy(0)])
    engine = Engine(store, policy(0))
    with pytest.raises(WeightsError, match="nothing to undo"):
        engine.follower.mark_undone()
    engine.advance()
    Channel(store).publish(policy(1), step=1, parent=names[0], rollout_ids=[])
    given_up, again = engine.follower.prepare(), engine.follower.prepare()
    assert given_up is not None
    assert again is not None
    assert equal(given_up, again)
    assert engine.follower.version == names[0]
    with pytest.raises(WeightsError, match="is not the update that was prepared last") as caught:
        engine.follower.mark_adopted(given_up)
    assert caught.value.facts
    assert caught.value.hint
    swap = engine.write(again)
    assert engine.follower.version == again.version
    with pytest.raises(WeightsError, match="is not the update that was prepared last"):
        engine.follower.mark_adopted(again)
    swap.undo()
    engine.follower.mark_undone()
    assert engine.follower.version == names[0]
    assert engine.holds(policy(0))
    assert engine.follower.check() == []
    engine.advance()
    assert engine.holds(policy(1))


def test_a_lost_or_damaged_delta_heals_from_an_anchor_as_a_list(policy: Policy) -> None:
    store = MemoryStore()
    names = publish(store, [policy(0)])
    channel, engine, manifest = Channel(store), Engine(store, policy(0)), chain(store, "policy")[0]
    while manifest.version in names[:1] or manifest.anchor is None:
        engine.advance()
        step = manifest.version.step + 1
        channel.publish(policy(step, share=0.1), step=step, parent=manifest.version, rollout_ids=[])
        manifest = chain(store, "policy")[-1]
    assert manifest.delta is not None
    key, data = manifest.delta.objects[0].key, b"x" * manifest.delta.objects[0].num_bytes
    for damage, said in ((None, "is missing"), (data, "is not what was published")):
        store.delete(key)
        if damage is not None:
            store.put(key, damage)
        update = engine.follower.prepare()
        assert update is not None
        assert said in update.healed[0]
        assert "embed" in update.changed
    assert update is not None
    engine.write(update)
    assert engine.holds(policy(manifest.version.step, share=0.1))


def test_where_no_way_is_left_the_error_names_it_and_the_live_memory_stays_what_it_was(policy: Policy) -> None:
    store = MemoryStore()
    names = publish(store, [policy(0)])
    engine = Engine(store, policy(0))
    engine.advance()
    Channel(store).publish(policy(1), step=1, parent=names[0], rollout_ids=[])
    delta = chain(store, "policy")[-1].delta
    assert delta is not None
    store.delete(delta.objects[0].key)
    with pytest.raises(WeightsError, match="cannot build") as caught:
        engine.follower.prepare()
    assert "is missing" in caught.value.facts
    assert caught.value.hint
    assert (engine.follower.version, engine.follower.check()) == (names[0], [])


def test_forged_objects_with_matching_checksums_are_not_returned(policy: Policy) -> None:
    store = MemoryStore()
    names = publish(store, [policy(0)])
    engine = Engine(store, policy(0))
    engine.advance()
    Channel(store).publish(policy(1), step=1, parent=names[0], rollout_ids=[])
    old, wrong = policy(0), policy(1)
    wrong["embed"] = Tensor("bf16", wrong["embed"].shape, wrong["embed"].codes ^ (np.arange(4000) == 9))
    data = encode([wrong[name] for name in sorted(wrong)], [old[name] for name in sorted(old)])
    forge(store, data)
    with pytest.raises(WeightsError, match="cannot build") as caught:
        engine.follower.prepare()
    assert "tensor 'embed'" in caught.value.facts
    assert "another checksum" in caught.value.facts
    assert (engine.follower.version, engine.follower.check()) == (names[0], [])


def forge(store: MemoryStore, data: bytes) -> None:
    """Another delta for the head, with every reference and checksum adjusted; only the target's digests are the
    original ones."""
    manifest = chain(store, "policy")[-1]
    store.put("objects/policy/forged", data)
    item = msgspec.structs.replace(
        manifest.ways[0].objects[0],
        key="objects/policy/forged", num_bytes=len(data), sha256=hashlib.sha256(data).hexdigest(),
    )  # fmt: skip
    way = msgspec.structs.replace(manifest.ways[0], objects=(item,))
    body = msgspec.json.encode(msgspec.structs.replace(manifest, ways=(way,)))
    store.put("manifests/policy/forged.json", body)
    ref = Ref(manifest.version, "manifests/policy/forged.json", hashlib.sha256(body).hexdigest())
    pointer = msgspec.json.encode(Pointer(format=FORMAT, head=ref, nonce=manifest.nonce))
    assert store.compare_and_swap("pointers/policy", store.get("pointers/policy"), pointer)


def test_a_flipped_bit_in_live_memory_is_found_and_mended_and_no_update_is_proven_over_it(policy: Policy) -> None:
    store = MemoryStore()
    names = publish(store, [policy(0)])
    engine = Engine(store, policy(0))
    engine.advance()
    engine.memory["embed"][7, 7] ^= 4
    assert engine.follower.check(["norm", "frozen"]) == []
    assert engine.follower.check() == ["embed"]
    engine.follower.forget()
    update = engine.follower.prepare()
    assert update is not None
    assert update.changed["embed"][0].tolist() == [77]
    assert not update.replaced
    engine.write(update)
    assert engine.holds(policy(0))
    engine.memory["embed"][7, 7] ^= 4
    Channel(store).publish(policy(1), step=1, parent=names[0], rollout_ids=[])
    update = engine.follower.prepare()
    assert update is not None
    assert "'embed'" in update.healed[0]
    assert "another checksum" in update.healed[0]
    assert 77 in update.changed["embed"][0], "by way of an anchor, against which the live memory was compared"
    engine.write(update)
    assert engine.holds(policy(1))


def test_what_was_loaded_elsewhere_is_held_once_it_is_proven(policy: Policy) -> None:
    store = MemoryStore()
    names = publish(store, [policy(0), policy(1)])
    engine = Engine(store, policy(0))
    assert not engine.follower.start_from(names[0])
    assert engine.follower.version is None
    for name, one in policy(0).items():
        engine.memory[name][:] = one.codes.reshape(one.shape)
    assert engine.follower.start_from(names[0])
    update = engine.follower.prepare()
    assert update is not None
    assert update.changed.keys() == {"embed", "norm"}
    assert not update.replaced


def test_what_was_published_in_parts_is_followed_over_whole_live_tensors() -> None:
    store, codes = MemoryStore(), np.arange(12, dtype=np.uint16) + np.uint16(0x3C00)
    first = {"w[0:1]": Tensor("bf16", (1, 3), codes[:3]), "w[1:4]": Tensor("bf16", (3, 3), codes[3:])}
    names = publish(store, [first])
    memory = codes.copy().reshape(4, 3)
    follower = LiveFollower(store, {"w": Tensor("bf16", (4, 3), memory.reshape(-1))})
    assert follower.start_from(names[0])
    second = {**first, "w[1:4]": Tensor("bf16", (3, 3), codes[3:] + (np.arange(9) == 5).astype(np.uint16))}
    Channel(store).publish(second, step=1, parent=names[0], rollout_ids=[])
    update = follower.prepare()
    assert update is not None
    assert {name: where.tolist() for name, (where, _) in update.changed.items()} == {"w[1:4]": [5]}
    Target(Map(split_pieces(named({"w": memory}), follower.specs))).prepare(update, follower.specs).apply()
    follower.mark_adopted(update)
    assert follower.check() == []
    assert memory[2, 2] == codes[8] + 1


def test_pointers_are_followed_by_the_rules_of_every_follower(policy: Policy) -> None:
    store = MemoryStore()
    names = publish(store, [policy(0), policy(1)])
    old = store.get("pointers/policy")
    Channel(store).publish(policy(2), step=2, parent=names[1], rollout_ids=[])
    engine = Engine(store, policy(0), limit_bytes=10_000)
    engine.advance()
    assert engine.follower.head_version() == engine.follower.version
    assert store.compare_and_swap("pointers/policy", store.get("pointers/policy"), old)
    with pytest.raises(WeightsError, match="moved back"):
        engine.follower.prepare()
    with pytest.raises(Behind, match="is not published"):
        engine.follower.prepare(exactly=Version(step=9, incarnation="0a1b2c3d", digest="ab" * 32))
    assert engine.holds(policy(2))
    point(store, "policy", names[0])
    engine.advance()
    assert engine.holds(policy(0))
    with pytest.raises(WeightsError, match="the limit is 10"):
        LiveFollower(store, {}, limit_bytes=10).prepare()


def test_an_update_takes_its_lists_and_less_than_2_percent_of_the_model_in_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """108 MB, of which 1 % changes. Measures numpy's allocations with `tracemalloc`, including lists in the heap."""
    monkeypatch.setattr(arena, "MAPPED_BYTES", 1 << 62)
    store, shape = MemoryStore(), (1500, 1500)
    rng = np.random.default_rng(3)
    block = rng.normal(0, 0.02, 1500 * 1500).astype(np.float32).view(np.uint32)
    codes = (block >> 16).astype(np.uint16)
    old = {f"{i:02d}": Tensor("bf16", shape, np.roll(codes, i)) for i in range(24)}
    new = {}
    for name, one in old.items():
        changed = one.codes.copy()
        changed[rng.integers(0, changed.size, changed.size // 100)] += 1
        new[name] = Tensor("bf16", shape, changed)
    channel = Channel(store)
    first = channel.publish(old, step=0, parent=None, rollout_ids=[])
    engine = Engine(store, old)
    for name, one in old.items():
        engine.memory[name][:] = one.codes.reshape(shape)
    assert engine.follower.start_from(first.version)
    channel.publish(new, step=1, parent=first.version, rollout_ids=[])
    model = sum(one.num_bytes for one in old.values())
    gc.collect()
    tracemalloc.start()
    update = engine.follower.prepare()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert update is not None
    lists = sum(where.nbytes + what.nbytes for where, what in update.changed.values())
    assert model > 50e6
    assert 0 < lists < peak < lists + 0.02 * model
    engine.write(update)
    assert engine.holds(new)
