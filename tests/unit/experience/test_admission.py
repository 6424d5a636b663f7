from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.experience import Straggler, Window


@dataclass
class World:
    """A run without wall clock: engines adopt when they like, groups sample a token when they like, the learner takes
    a step when the window gives it one. `steps` is what each group's tokens were sampled by."""

    window: Window
    rng: random.Random
    published: int = 0
    engine: int = 0
    trained: list[list[str]] = field(default_factory=list)
    steps: dict[str, list[int]] = field(default_factory=dict)
    running: dict[str, int] = field(default_factory=dict)  # group -> tokens left to sample
    lags: list[int] = field(default_factory=list)

    def untrained(self) -> list[str]:
        taken = {g for step in self.trained for g in step}
        return [g for g in self.steps if g not in taken]

    def moves(self):
        num = len(self.steps)
        if self.window.room(num, self.published):
            yield self.admit
        if self.engine < self.published:
            yield self.adopt
        if any(self.window.min_step(int(g)) <= self.engine for g in self.running):
            yield self.sample
        if self.window.take(self.untrained(), self.ready()):
            yield self.train

    def ready(self) -> set[str]:
        return {g for g in self.steps if g not in self.running}

    def admit(self):
        group = str(len(self.steps))
        self.steps[group], self.running[group] = [], self.rng.choice([1, 1, 2, 8, 30])

    def adopt(self):
        self.engine = self.rng.randint(self.engine + 1, self.published)

    def sample(self):
        able = [g for g in self.running if self.window.min_step(int(g)) <= self.engine]
        group = self.rng.choice(able)
        self.steps[group].append(self.engine)
        self.running[group] -= 1
        if not self.running[group]:
            del self.running[group]

    def train(self):
        order = self.untrained()
        taken = self.window.take(order, self.ready())
        lags = [self.published - step for g in taken for step in self.steps[g]]
        if self.window.straggler is Straggler.MASK:
            lags = [lag for lag in lags if lag <= self.window.max_lag]  # what `bounded` masks
        self.lags += lags
        assert len(self.window.late(order, taken)) <= self.window.late_groups
        self.trained.append(taken)
        self.published += 1

    def run(self, num_steps: int) -> None:
        while len(self.trained) < num_steps:
            choices = list(self.moves())
            assert choices, "nobody can move: a deadlock"
            self.rng.choice(choices)()
            assert len(self.untrained()) <= self.window.num_groups


worlds = st.builds(
    World,
    st.builds(Window, st.integers(0, 4), st.integers(1, 9), st.sampled_from(Straggler)),
    st.integers(0, 2**32).map(random.Random),
)


@given(worlds)
def test_no_token_is_staler_than_the_bound_and_nobody_waits_for_ever(world):
    world.run(num_steps=8)
    assert all(0 <= lag <= world.window.max_lag for lag in world.lags)


@given(worlds)
def test_waiting_trains_groups_strictly_in_order_of_admission(world):
    if world.window.straggler is Straggler.MASK:
        return
    world.run(num_steps=5)
    order = [g for step in world.trained for g in step]
    assert order == [str(i) for i in range(len(order))]


@given(st.integers(1, 9), st.sampled_from(Straggler), st.integers(0, 2**32))
def test_a_lag_of_zero_is_synchronous_whatever_the_policy(groups_per_step, straggler, seed):
    world = World(Window(0, groups_per_step, straggler), random.Random(seed))
    world.run(num_steps=4)
    assert set(world.lags) == {0}
    expected = [str(i) for i in range(4 * groups_per_step)]
    assert [g for step in world.trained for g in step] == expected


def test_masking_goes_on_without_a_straggler_and_takes_it_first_next_time():
    window = Window(max_lag=2, groups_per_step=4, straggler=Straggler.MASK)
    order = [f"g{i}" for i in range(8)]
    taken = window.take(order, ready=set(order) - {"g1"})
    assert taken == ["g0", "g2", "g3", "g4"]
    assert window.late(order, taken) == ["g1"]
    rest = [g for g in order if g not in taken]
    assert window.take(rest, ready=set(rest) | {"g8"}) == ["g1", "g5", "g6", "g7"]


def test_masking_waits_when_too_many_are_late():
    window = Window(max_lag=2, groups_per_step=4, straggler=Straggler.MASK)
    order = [f"g{i}" for i in range(8)]
    assert window.take(order, ready=set(order) - {"g1", "g2"}) is None


@pytest.mark.parametrize(("published", "room"), [(0, 48), (1, 64), (7, 160)])
def test_the_window_opens_with_each_published_version(published, room):
    assert Window(max_lag=2, groups_per_step=16).room(0, published) == room
