"""Objects are fetched while others are decoded."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from etude.errors import StoreError, WeightsError
from etude.stores import MemoryStore
from etude.weights import Channel, Follower, Manifest, Tensor, chain
from etude.weights.delta import codec


def weights(step: int) -> dict[str, Tensor]:
    return {f"w{i}": Tensor("u16", (50,), np.full(50, step, np.uint16)) for i in range(6)}


class Waiting(MemoryStore):
    """A store that returns an object only after the next one was requested, too."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[str] = []
        self.refused: set[str] = set()
        self._asked: dict[str, threading.Event] = {}

    def expect(self, order: list[str]) -> None:
        self.order = order
        self._asked = {key: threading.Event() for key in order}

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        if key in self.order:
            self._asked[key].set()
            after = self.order[self.order.index(key) + 1 :]
            if after and not self._asked[after[0]].wait(30):
                raise StoreError("nobody asks for the next object", hint="fetch ahead")
        if key in self.refused:
            raise StoreError("not today", hint="tomorrow")
        return super().get(key, start, stop)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Waiting:
    """Two versions, each of three objects of two tensors."""
    monkeypatch.setattr(codec, "OBJECT_ELEMENTS", 100)
    store = Waiting()
    channel = Channel(store)
    first = channel.publish(weights(1), step=0, parent=None, rollout_ids=[])
    channel.publish(weights(2), step=1, parent=first.version, rollout_ids=[])
    return store


def fetch_head(store: Waiting) -> Manifest:
    return chain(store, "policy")[-1]


def test_the_next_object_is_fetched_while_one_is_decoded(store: Waiting) -> None:
    keys = [item.key for item in fetch_head(store).ways[-1].objects]
    assert len(keys) == 3
    again = Follower(store)
    store.expect(keys)
    assert again.advance() is not None
    assert {name: tensor.codes.tolist() for name, tensor in again.tensors.items()} == {
        name: tensor.codes.tolist() for name, tensor in weights(2).items()
    }


def test_an_object_that_cannot_be_had_ends_the_fetching(store: Waiting) -> None:
    manifest = fetch_head(store)
    store.refused = {way.objects[1].key for way in manifest.ways}
    with pytest.raises(WeightsError, match="not today"):
        Follower(store).advance()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("fetch")]
