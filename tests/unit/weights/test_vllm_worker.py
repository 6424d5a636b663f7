"""The worker extension follows versions, with plain memory in place of vLLM's."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from etude.errors import WeightsError
from etude.records.completion import Version
from etude.stores import MemoryStore
from etude.weights import Channel, Follower, Tensor
from etude.weights.follow import vllm_worker
from etude.weights.follow.targets import Target
from etude.weights.follow.vllm_worker import WorkerExtension, _Memory, _Rows, _WeightSync

ROWS = _Rows(query=4, key=2, size=1)


class Worker(WorkerExtension):
    """Follows a store into a fused projection, a tied head and stacked experts, each with its own packing function."""

    def __init__(self, store: MemoryStore) -> None:
        self.qkv, self.embed = np.zeros((8, 3), np.uint16), np.zeros((5, 3), np.uint16)
        self.w13, self.w2 = np.zeros((2, 4, 3), np.uint16), np.zeros((2, 3, 2), np.uint16)
        self.packed: list[str] = []
        memory = _Memory(
            {
                "a.qkv_proj.weight": self.qkv,
                "embed.weight": self.embed,
                "head.weight": self.embed,
                "b.experts.w13_weight": self.w13,
                "b.experts.w2_weight": self.w2,
            },
            {
                ("a.qkv_proj.weight",): partial(self.packed.append, "qkv"),
                ("head.weight",): partial(self.packed.append, "head"),
                ("b.experts.w13_weight", "b.experts.w2_weight"): partial(self.packed.append, "experts"),
            },
        )
        self.etude_weight_sync = _WeightSync(partial(Follower, store, can_undo=False), memory, ROWS, 0)

    def come(self, version: Version | None = None) -> dict[str, object] | None:
        """Prepare, and wait for the result."""
        self.etude_prepare(vllm_worker._version_fields(version) if version else None)
        waiting = self.etude_weight_sync._preparing
        if waiting is not None:
            waiting.exception(10)
        return self.etude_prepared()


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def channel(store: MemoryStore) -> Channel:
    return Channel(store)


def weights(seed: int) -> dict[str, Tensor]:
    rng = np.random.default_rng(seed)
    shapes = {"a.q_proj.weight": (4, 3), "a.k_proj.weight": (2, 3), "a.v_proj.weight": (2, 3), "embed.weight": (5, 3)}
    for e in range(2):
        shapes |= {f"b.experts.{e}.{part}_proj.weight": (2, 3) for part in ("gate", "up")}
        shapes |= {f"b.experts.{e}.down_proj.weight": (3, 2)}
    return {
        name: Tensor("bf16", shape, rng.integers(0x3C00, 0x3E00, int(np.prod(shape))).astype(np.uint16))
        for name, shape in shapes.items()
    }


def publish(channel: Channel, step: int, parent: Version | None) -> Version:
    return channel.publish(weights(step), step=step, parent=parent, rollout_ids=[]).version


def holds(worker: Worker, step: int) -> bool:
    expected = weights(step)
    parts = [expected[f"a.{x}_proj.weight"].codes.reshape(-1, 3) for x in "qkv"]
    down = expected["b.experts.1.down_proj.weight"].codes.reshape(3, 2)
    return (
        np.array_equal(worker.qkv, np.concatenate(parts))
        and np.array_equal(worker.embed.ravel(), expected["embed.weight"].codes)
        and np.array_equal(worker.w2[1], down)
    )


def test_each_version_is_written_packed_once_and_proven(store: MemoryStore, channel: Channel) -> None:
    worker, version = Worker(store), None
    for step in range(3):
        version = publish(channel, step, version)
        assert worker.come() == vllm_worker._version_fields(version)
        assert worker.etude_adopt()["version"] == vllm_worker._version_fields(version)
        assert holds(worker, step)
        assert sorted(worker.packed) == ["experts", "head", "qkv"]
        assert worker.etude_check() == []
        worker.packed.clear()
    assert worker.come() is None
    assert worker.etude_check() == []


def test_a_preparation_that_fails_is_told_and_the_next_writes_everything(
    store: MemoryStore, channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker(store)
    first = publish(channel, 0, None)
    worker.come()
    worker.etude_adopt()
    second = publish(channel, 1, first)
    with monkeypatch.context() as patch:
        patch.setattr(Target, "prepare", lambda *_, **__: (_ for _ in ()).throw(MemoryError()))
        with pytest.raises(MemoryError):
            worker.come()
    publish(channel, 2, second)
    worker.come()
    worker.etude_adopt()
    assert holds(worker, 2)


def test_an_undo_brings_back_the_version_before_and_the_next_is_right(store: MemoryStore, channel: Channel) -> None:
    worker = Worker(store)
    first = publish(channel, 0, None)
    worker.come()
    worker.etude_adopt()
    publish(channel, 1, first)
    worker.come()
    worker.etude_adopt()
    worker.etude_undo()
    assert holds(worker, 0)
    with pytest.raises(WeightsError, match="cannot be checked"):
        worker.etude_check()
    worker.come()
    worker.etude_adopt()
    assert holds(worker, 1)


def test_another_version_is_prepared_in_place_of_one_that_waits(store: MemoryStore, channel: Channel) -> None:
    worker = Worker(store)
    first = publish(channel, 0, None)
    worker.come()
    second = publish(channel, 1, first)
    assert worker.come() == vllm_worker._version_fields(first), "one that waits is not passed over by itself"
    assert worker.come(second) == vllm_worker._version_fields(second)
    worker.etude_adopt()
    assert holds(worker, 1)


def test_calls_before_a_channel_is_followed_are_errors(store: MemoryStore) -> None:
    with pytest.raises(WeightsError, match="follows no channel"):
        WorkerExtension().etude_prepare()
    worker = Worker(store)
    with pytest.raises(WeightsError, match="is not a public key"):
        worker.etude_follow("memory://", public_key="zz")
    for call in (worker.etude_adopt, worker.etude_undo, worker.etude_check):
        with pytest.raises(WeightsError):
            call()
    assert worker.come() is None


def test_a_follower_that_is_made_anew_still_refuses_a_pointer_that_moved_back(
    store: MemoryStore, channel: Channel
) -> None:
    worker, key = Worker(store), "pointers/policy"
    first = channel.publish(weights(0), step=0, parent=None, rollout_ids=[])
    stale = store.get(key)
    for step in (0, 1):
        if step:
            channel.publish(weights(1), step=1, parent=first.version, rollout_ids=[])
        assert worker.come() is not None
        worker.etude_adopt()
    worker.etude_undo()
    assert store.compare_and_swap(key, store.get(key), stale)
    with pytest.raises(WeightsError, match="moved back"):
        worker.come()


def test_ranks_with_some_experts_and_experts_in_another_order_are_refused_by_name() -> None:
    laid_out = SimpleNamespace(unquantized_backend=SimpleNamespace(name="FLASHINFER"))
    some = SimpleNamespace(expert_map=[0, -1], w13_weight=None)
    with pytest.raises(WeightsError, match="each rank has only some of its experts") as refused:
        vllm_worker._refuse_rearranged("layers.1.experts", some, on_cpu=True)
    assert "leave out --enable-expert-parallel" in str(refused.value)
    whole = SimpleNamespace(expert_map=None, w13_weight=None, quant_method=laid_out)
    vllm_worker._refuse_rearranged("layers.1.experts", whole, on_cpu=True)
    with pytest.raises(WeightsError, match="its experts are laid out for FLASHINFER"):
        vllm_worker._refuse_rearranged("layers.1.experts", whole, on_cpu=False)
