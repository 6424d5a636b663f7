"""Regions behind a relay and local caches, with faults: engines only serve verified weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from tests.unit.stores.test_relay import relayed
from tests.unit.weights.test_live_follower import Engine, Tensors

from etude.errors import EtudeError, StoreError
from etude.records import Version
from etude.stores import CachedStore, MemoryStore
from etude.stores.http import HttpStore
from etude.weights import Channel

Policy = Callable[..., Tensors]


class Failing(MemoryStore):
    """A store in which the next `troubles` reads of objects fail."""

    troubles = 0

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        if self.troubles and key.startswith("objects/"):
            self.troubles -= 1
            raise StoreError(f"{key!r} cannot be read", hint="try again")
        return super().get(key, start, stop)


class Home:
    """A channel that publishes the policy's steps, and the expected tensors of each version."""

    def __init__(self, policy: Policy) -> None:
        self.store, self.policy = Failing(), policy
        self.channel, self.published = Channel(self.store), dict[Version, Tensors]()

    def publish(self) -> Version:
        parent, step = next(reversed(self.published), None), len(self.published)
        version = self.channel.publish(self.policy(step), step=step, parent=parent, rollout_ids=[]).version
        self.published[version] = self.policy(step)
        return version


class Region:
    """An engine whose store is the relay behind a cache of this region; each start has new, empty memory."""

    def __init__(self, home: Home, cache: Path) -> None:
        self.home, self.cache = home, cache

    def start(self, url: str) -> None:
        far = HttpStore(url, silence_s=5.0, deadline_s=2.0)
        store = CachedStore(far, self.cache, source_id="home")
        self.engine = Engine(store, self.home.policy(0))  # type: ignore[arg-type]

    def look(self) -> Version | None:
        """Try to move to the newest version, ignoring errors. Then check that the served weights are those published
        under their name."""
        with contextlib.suppress(EtudeError):
            self.engine.advance()
        served = self.engine.follower.version
        assert served is None or self.engine.holds(self.home.published[served])
        return served


def spoilt(data: bytes) -> bytes:
    """The same bytes with another last byte."""
    return data[:-1] + bytes([data[-1] ^ 1])


def test_regions_that_are_cut_off_killed_late_or_sent_wrong_bytes_converge_and_serve_only_verified_weights(
    policy: Policy, tmp_path: Path
) -> None:
    home = Home(policy)
    dies, apart, late = (Region(home, tmp_path / name) for name in ("dies", "apart", "late"))
    with relayed(home.store) as url:
        first = home.publish()
        for region in (dies, apart):
            region.start(url)
            assert region.look() == first

        before = {*home.store.list("objects/")}
        second = home.publish()
        right = {key: home.store.get(key) for key in home.store.list("objects/") if key not in before}
        for key, data in right.items():  # a relay, or a store behind it, that sends other bytes
            home.store.delete(key)
            home.store.put(key, spoilt(data))
        assert (dies.look(), apart.look()) == (first, first)
        for key, data in right.items():
            home.store.delete(key)
            home.store.put(key, data)
        assert dies.look() == second

        copies = [path for path in dies.cache.rglob("*") if path.is_file() and path.stat().st_size > 100]
        for path in copies:  # as a machine that loses power leaves them
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        assert copies
        dies.start(url)
        assert dies.look() == second
    newest = [home.publish() for _ in range(3)][-1]
    assert (dies.look(), apart.look()) == (second, first), "nobody answers"
    with relayed(home.store) as url:
        for region in (dies, apart, late):
            region.start(url)
            home.store.troubles = 2
            assert region.look() == newest
            assert home.store.troubles == 0
