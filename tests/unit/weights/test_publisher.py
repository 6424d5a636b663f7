"""Publishing in the background: what the trainer waits for, and where errors are raised."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from etude.errors import DeadlineExceeded, StoreError, WeightsError
from etude.stores import MemoryStore
from etude.weights import Channel, Follower, Tensor, chain, lineage
from etude.weights.chain.inspect import verify
from etude.weights.chain.publisher import Publisher
from etude.weights.tensors import same_bits

Policy = Callable[..., dict[str, Tensor]]


class Gate(MemoryStore):
    """A store that passes writes while it is open, and can refuse them."""

    def __init__(self) -> None:
        super().__init__()
        self.open = threading.Event()
        self.open.set()
        self.refuses = False

    def put(self, key: str, data: bytes) -> None:
        assert self.open.wait(60)
        if self.refuses:
            raise StoreError("the store went away", hint="wait")
        super().put(key, data)


def test_an_offer_returns_before_anything_is_written_and_the_weights_may_change_at_once(policy: Policy) -> None:
    store = Gate()
    with Publisher(Channel(store)) as publisher:
        store.open.clear()
        live = policy(0)["embed"].codes.copy()
        publisher.offer({"embed": Tensor("bf16", (4000,), live)}, step=0, rollout_ids=["r0"])
        assert store.list("") == []
        expected = live.copy()
        live[:] = 0
        store.open.set()
        published = publisher.wait()
    assert published is not None
    follower = Follower(store)
    follower.advance()
    assert follower.version == published.version
    assert np.array_equal(follower.tensors["embed"].codes, expected)


def test_versions_are_published_in_order_each_with_the_one_before_as_its_parent(policy: Policy) -> None:
    store = MemoryStore()
    first = Channel(store).publish(policy(0), step=0, parent=None, rollout_ids=[])
    follower = Follower(store)
    with Publisher(Channel(store), parent=first.version) as publisher:
        for step in range(1, 9):
            publisher.offer(policy(step), step=step, rollout_ids=[f"r{step}"])
            if step % 3 == 0:
                publisher.wait()
                follower.advance()
                assert all(same_bits(follower.tensors[name], tensor) for name, tensor in policy(step).items())
    manifests = lineage(store, "policy")
    assert [m.version.step for m in manifests] == list(range(9))
    assert [m.rollout_ids for m in manifests[1:]] == [(f"r{step}",) for step in range(1, 9)]
    assert verify(store).problems == ()


def test_tensors_that_change_their_shape_between_offers_are_published_exactly(policy: Policy) -> None:
    store = MemoryStore()
    with Publisher(Channel(store)) as publisher:
        for step in range(6):
            weights = policy(step)
            if step % 2:
                weights["norm"] = Tensor("f32", (25, 2), weights["norm"].codes)
                del weights["frozen"]
            publisher.offer(weights, step=step, rollout_ids=[])
            publisher.wait()
            follower = Follower(store)
            follower.advance()
            assert follower.tensors.keys() == weights.keys()
            assert all(same_bits(follower.tensors[name], tensor) for name, tensor in weights.items())


def test_an_error_rises_at_the_next_call_and_the_offer_after_it_is_a_delta_from_what_was_published(
    policy: Policy,
) -> None:
    store = Gate()
    with Publisher(Channel(store)) as publisher:
        publisher.offer(policy(0), step=0, rollout_ids=[])
        publisher.wait()
        store.refuses = True
        publisher.offer(policy(1), step=1, rollout_ids=[])
        with pytest.raises(StoreError, match="went away"):
            publisher.offer(policy(2), step=2, rollout_ids=[])
        store.refuses = False
        for step in (2, 3, 4):
            publisher.offer(policy(step), step=step, rollout_ids=[])
        publisher.wait()
    assert [m.version.step for m in chain(store, "policy")] == [0, 2, 3, 4]
    assert verify(store).problems == ()


def test_a_publish_that_does_not_end_is_named_and_goes_on(policy: Policy) -> None:
    store = Gate()
    with Publisher(Channel(store), deadline_s=0.01) as publisher:
        store.open.clear()
        publisher.offer(policy(0), step=0, rollout_ids=[])
        with pytest.raises(DeadlineExceeded, match="step 0 did not end") as caught:
            publisher.offer(policy(1), step=1, rollout_ids=[])
        assert "store" in caught.value.hint
        store.open.set()
        patient = publisher
        patient._deadline_s = 60.0
        assert patient.wait() is not None
        patient.offer(policy(1), step=1, rollout_ids=[])
    assert [m.version.step for m in chain(store, "policy")] == [0, 1]


def test_another_writer_is_told_of_at_the_next_call(policy: Policy) -> None:
    store = MemoryStore()
    with Publisher(Channel(store)) as publisher:
        publisher.offer(policy(0), step=0, rollout_ids=[])
        publisher.wait()
        Channel(store).publish(policy(5), step=5, parent=None, rollout_ids=[])
        publisher.offer(policy(1), step=1, rollout_ids=[])
        with pytest.raises(WeightsError, match="another writer moved"):
            publisher.wait()
        assert publisher.wait() is not None


def test_a_closed_publisher_takes_no_offers(policy: Policy) -> None:
    publisher = Publisher(Channel(MemoryStore()))
    publisher.close()
    publisher.close()
    with pytest.raises(WeightsError, match="closed"):
        publisher.offer(policy(0), step=0, rollout_ids=[])
