"""Any order of publishing, dying, composing, collecting, rolling back and following: followers always converge.

A follower that read the pointer up to `KEEP_S` ago still gets to the version that it named.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.errors import WeightsError
from etude.records import Version
from etude.stores import MemoryStore
from etude.weights import Channel, Follower, Manifest, Tensor
from etude.weights.chain.branches import drop, point
from etude.weights.chain.compactor import Compactor
from etude.weights.chain.garbage import collect
from etude.weights.chain.history import head, load, pointers
from etude.weights.chain.inspect import verify
from etude.weights.chain.plans import fetch_version, rebuild
from etude.weights.tensors import same_bits

KEEP_S = 100.0
SIZE = 4000
BRANCHES = ("", "canary")

ACTIONS = st.one_of(
    st.tuples(st.just("publish"), st.integers(1, 6)),
    st.tuples(st.just("restart"), st.just(0)),
    st.tuples(st.just("die"), st.sampled_from(["objects", "manifest", "pointer"])),
    st.tuples(st.just("compact"), st.just(0)),
    st.tuples(st.just("collect"), st.sampled_from([1.0, 60.0, 101.0, 1000.0])),
    st.tuples(st.just("point"), st.tuples(st.sampled_from(BRANCHES), st.integers(0, 50))),
    st.tuples(st.just("drop"), st.just(0)),
    st.tuples(st.just("follow"), st.integers(0, 2)),
    st.tuples(st.just("undo"), st.integers(0, 2)),
    st.tuples(st.just("look"), st.just(0)),
    st.tuples(st.just("sleep"), st.integers(2, 12)),
)


class Killed(BaseException):
    """What no handler may catch."""


@dataclass
class World:
    """A store, those who use it, and what each version must be."""

    store: MemoryStore = field(default_factory=MemoryStore)
    now: float = 0.0
    codes: np.ndarray = field(default_factory=lambda: np.full(SIZE, 0x3F80, np.uint16))  # type: ignore[type-arg]
    truth: dict[Version, dict[str, Tensor]] = field(default_factory=dict)
    looked: list[tuple[float, Manifest]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.writer = Channel(self.store)
        self.compactor = Compactor(self.store, spans=(2, 4))
        self.followers = [Follower(self.store), Follower(self.store), Follower(self.store, branch="canary")]

    def publish(self, times: int, die_at: str = "") -> None:
        for _ in range(times):
            self.codes = self.codes + (self.rng.random(SIZE) < 0.01).astype(np.uint16)
            weights = {"w": Tensor("bf16", (SIZE,), self.codes), "n": Tensor("u8", (1,), np.zeros(1, np.uint8))}
            step = len(self.truth)
            at = head(self.store, "policy")
            parent = at.head.version if at else None

            def after(done: str) -> None:
                if done == die_at:
                    raise Killed

            try:
                self.writer.publish(weights, step=step, parent=parent, rollout_ids=[], after=after)
            except WeightsError as error:
                assert "another writer moved" in error.what  # noqa: PT017  after a rollback
                self.writer = Channel(self.store)
                self.writer.publish(weights, step=step, parent=parent, rollout_ids=[])
            except Killed:
                self.writer = Channel(self.store)
            now = head(self.store, "policy")
            if now is not None and now != at:
                self.truth[now.head.version] = weights

    def act(self, kind: str, how: object) -> None:
        match kind, how:
            case "publish", int(times):
                self.publish(times)
            case "restart", _:
                self.writer, self.compactor = Channel(self.store), Compactor(self.store, spans=(2, 4))
            case "die", str(place):
                self.publish(1, place)
            case "compact", _:
                self.compactor.step()
            case "collect", float(passed):
                self.now += passed
                collect(self.store, "policy", keep_s=KEEP_S, now=self.now)
            case "point", (str(branch), int(number)) if self.truth:
                version = list(self.truth)[number % len(self.truth)]
                try:
                    point(self.store, "policy", version, branch=branch)
                except WeightsError as error:
                    assert "can point at" in error.what  # noqa: PT017  it was collected
                else:
                    self.looked.clear()
            case "drop", _:
                drop(self.store, "policy", "canary")
                self.followers[2] = Follower(self.store, branch="canary")
            case "follow", int(number):
                self.follow(self.followers[number], BRANCHES[number // 2])
            case "undo", int(number):
                self.undo(self.followers[number])
            case "look", _:
                self.look()
            case "sleep", int(times):  # a reader stops between the pointer and its objects
                self.look()
                self.publish(times)
                self.act("collect", KEEP_S * 0.6)

    def look(self) -> None:
        pointer = head(self.store, "policy")
        if pointer is not None:
            self.looked.append((self.now, load(self.store, pointer.head)))

    def follow(self, follower: Follower, branch: str) -> None:
        follower.advance()
        pointer = head(self.store, "policy", branch)
        if pointer is not None:
            assert follower.version == pointer.head.version
            self.is_exact(follower)

    def undo(self, follower: Follower) -> None:
        try:
            follower.undo()
        except WeightsError as error:
            assert "nothing to undo" in error.what  # noqa: PT017
        else:
            self.is_exact(follower)

    def is_exact(self, follower: Follower) -> None:
        assert follower.version is not None
        assert all(same_bits(follower.tensors[name], t) for name, t in self.truth[follower.version].items())

    def check(self) -> None:
        for pointer in pointers(self.store, "policy").values():
            rebuild(self.store, load(self.store, pointer.head))
        self.looked = [(then, target) for then, target in self.looked if then >= self.now - KEEP_S]
        for _, target in self.looked:
            made = fetch_version(self.store, target).tensors
            assert all(same_bits(made[name], t) for name, t in self.truth[target.version].items())


@given(st.lists(ACTIONS, max_size=25))
def test_followers_always_converge(actions: list[tuple[str, object]]) -> None:
    _run(actions)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@given(st.lists(ACTIONS, min_size=20, max_size=80))
@settings(max_examples=200)
def test_followers_always_converge_at_length(actions: list[tuple[str, object]]) -> None:
    _run(actions)


def _run(actions: list[tuple[str, object]]) -> None:
    world = World()
    for kind, how in actions:
        world.act(kind, how)
        world.check()
    for number, follower in enumerate(world.followers):
        world.follow(follower, BRANCHES[number // 2])
    assert verify(world.store).problems == ()
