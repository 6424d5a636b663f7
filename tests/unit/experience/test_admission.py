from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.experience import ExperienceConfig, Straggler, Window


@dataclass
class World:
    """A run without wall clock: engines adopt when they like, groups sample a token when they like, the learner takes
    a step when the window gives it one. `steps` is what each group's tokens were sampled by; a `share` of them
    has a signal. Up to two batches are formed and not published, none in a synchronous run."""

    window: Window
    rng: random.Random
    share: float = 1.0
    published: int = 0
    engine: int = 0
    trained: list[list[str]] = field(default_factory=list)
    steps: dict[str, list[int]] = field(default_factory=dict)
    running: dict[str, int] = field(default_factory=dict)  # group -> tokens left to sample
    min_step: dict[str, int] = field(default_factory=dict)
    signal: set[str] = field(default_factory=set)
    lags: list[int] = field(default_factory=list)

    def untrained(self) -> list[str]:
        taken = {g for step in self.trained for g in step}
        return [g for g in self.steps if g not in taken]

    def moves(self):
        size = self.size()
        if self.window.free_groups(len(self.untrained()), len(self.trained), self.published, size):
            yield self.admit
        if self.engine < self.published:
            yield self.adopt
        if self.able():
            yield self.sample
        if self.published < len(self.trained):
            yield self.publish
        if size and self.window.take(self.untrained(), self.ready(), self.signal):
            yield self.train

    def size(self) -> int:
        """What the step takes that is being formed, where the learner waits for a batch."""
        forms = len(self.trained) <= self.published + (1 if self.window.max_lag else 0)
        return self.window.size(self.untrained(), self.ready(), self.signal) if forms else 0

    def able(self) -> list[str]:
        return [g for g in self.running if self.min_step[g] <= self.engine]

    def ready(self) -> set[str]:
        return {g for g in self.steps if g not in self.running}

    def admit(self):
        group = str(len(self.steps))
        self.min_step[group] = self.window.min_step(len(self.untrained()), len(self.trained), self.published)
        self.signal |= {group} if self.rng.random() < self.share else set()
        self.steps[group], self.running[group] = [], self.rng.choice([1, 1, 2, 8, 30])

    def adopt(self):
        self.engine = self.rng.randint(self.engine + 1, self.published)

    def sample(self):
        group = self.rng.choice(self.able())
        self.steps[group].append(self.engine)
        self.running[group] -= 1
        if not self.running[group]:
            del self.running[group]

    def train(self):
        order = self.untrained()
        taken = self.window.take(order, self.ready(), self.signal)
        lags = [len(self.trained) - step for g in taken for step in self.steps[g]]
        if self.window.straggler is Straggler.MASK:
            lags = [lag for lag in lags if lag <= self.window.max_lag]  # what `bounded` masks
        self.lags += lags
        assert len(self.window.late(order, taken)) <= self.window.max_late_groups
        self.trained.append(taken)

    def publish(self):
        self.published += 1

    def run(self, num_steps: int) -> None:
        while len(self.trained) < num_steps:
            choices = list(self.moves())
            assert choices, "nobody can move: a deadlock"
            self.rng.choice(choices)()
            self.check()
            assert all(len(taken) <= self.window.max_groups for taken in self.trained)

    def check(self) -> None:
        unpublished = sum(map(len, self.trained[self.published :]))
        assert len(self.untrained()) + unpublished <= self.window.max_open_groups


@dataclass
class Mortal(World):
    """A world whose learner is lost now and then: it goes on from an earlier step, what runs begins again, and which
    groups have a signal is another matter (stored rollouts may be gone). `losses` are left."""

    losses: int = 3

    def moves(self):
        yield from super().moves()
        if self.losses and self.published:
            yield self.lose

    def lose(self):
        self.losses -= 1
        self.published = self.engine = self.rng.randint(0, self.published - 1)
        del self.trained[self.published :]
        self.signal = {g for g in self.steps if self.rng.random() < self.share}
        for group in self.running:
            self.steps[group].clear()

    def check(self) -> None:
        """What a lost lineage frees comes beside what was admitted since."""

    def able(self) -> list[str]:
        """As `Ledger.start` has it: in order of admission, and what the next steps wait for whatever it demanded."""
        order = self.untrained()
        size = self.size()
        waiting = [g for g in order if g in self.running and not self.steps[g]]
        begun = list(itertools.takewhile(lambda g: self.min_step[g] <= self.published, waiting))
        if not begun:
            places, now = {g: place for place, g in enumerate(order)}, len(self.trained)
            due = lambda g: self.window.required_step(places[g], now, size) <= self.published  # noqa: E731
            begun = list(itertools.takewhile(due, waiting))
            self.min_step |= {g: min(self.min_step[g], self.published) for g in begun}
        begun += [g for g in self.running if self.steps[g]]
        return [g for g in begun if self.min_step[g] <= self.engine]


facts = (
    st.builds(Window, st.integers(0, 4), st.integers(1, 9), st.sampled_from(Straggler), st.sampled_from([0, 1, 5, 9])),
    st.integers(0, 2**32).map(random.Random),
    st.floats(0.0, 1.0),
)
worlds, mortals = st.builds(World, *facts), st.builds(Mortal, *facts)


@given(worlds)
def test_no_token_is_staler_than_the_bound_and_nobody_waits_for_ever(world):
    world.run(num_steps=8)
    assert all(0 <= lag <= world.window.max_lag for lag in world.lags)


@given(mortals)
def test_no_lost_learner_makes_anybody_wait_for_ever(world):
    world.run(num_steps=8)


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
    assert Window(max_lag=2, groups_per_step=16).free_groups(0, 0, published) == room


@pytest.mark.parametrize(("max_lag", "groups_per_step"), [(0, 4), (2, 3), (4, 9)])
def test_without_a_wish_for_signal_group_n_belongs_to_step_n_over_groups_per_step(max_lag, groups_per_step):
    window = Window(max_lag, groups_per_step)
    for number in range(50):
        for batched in range(number // groups_per_step + 1):
            position = number - batched * groups_per_step
            assert window.min_step(position, batched, published_step=99) == max(0, number // groups_per_step - max_lag)
            for published in range(batched + 1):
                room = window.free_groups(position, batched, published)
                assert room == max(0, (published + max_lag + 1) * groups_per_step - number)


@given(st.integers(0, 2**32), st.integers(1, 9), st.floats(0.0, 1.0))
def test_a_synchronous_step_takes_all_that_it_admitted_and_enough_signal_where_there_is_any(seed, per_step, share):
    world = World(Window(0, per_step, signal_groups=per_step), random.Random(seed), share)
    world.run(num_steps=4)
    assert set(world.lags) == {0}
    assert [g for step in world.trained for g in step] == [str(i) for i in range(sum(map(len, world.trained)))]
    for taken in world.trained:
        having = len(world.signal.intersection(taken))
        assert having >= per_step or len(taken) == world.window.max_groups
    again = World(Window(0, per_step, signal_groups=per_step), random.Random(seed), share)
    again.signal = world.signal
    again.share = 0.0
    assert again.window.size([str(i) for i in range(99)], set(map(str, range(99))), world.signal) == len(
        world.trained[0]
    )


def test_rounds_are_as_large_as_the_share_of_signal_says():
    window = Window(max_lag=1, groups_per_step=8, signal_groups=8)
    order = [f"g{i}" for i in range(40)]
    some = {f"g{i}" for i in range(0, 40, 4)}  # one in four
    assert window.size(order, set(order), some) == 32
    assert window.size(order, set(order[:8]), some) == 32, "2 of 8: 24 more for the 6 that lack"
    assert window.size(order, set(order[:7]), some) == 8, "nothing is known before the first ones are there"
    assert window.size(order, set(order), set(order)) == 8
    assert window.size(order, set(order), set()) == window.max_groups == 32
    assert window.take(order, set(order[:31]), some) is None
    assert window.take(order, set(order), some) == order[:32]


def test_a_wish_for_more_signal_than_a_step_has_groups_is_refused():
    with pytest.raises(ValueError, match="signal_groups = 9 is over groups_per_step = 8"):
        ExperienceConfig(groups_per_step=8, signal_groups=9)


@pytest.mark.parametrize(("per_step", "wanted", "share"), [(8, 8, 0.5), (8, 4, 0.3), (4, 4, 0.9), (16, 16, 0.2)])
def test_the_mean_size_is_that_of_steps_taken_by_the_rules(per_step, wanted, share):
    window, draw = Window(max_lag=1, groups_per_step=per_step, signal_groups=wanted), random.Random(5)
    order = [f"g{i}" for i in range(window.max_groups)]
    sizes = [window.size(order, set(order), {g for g in order if draw.random() < share}) for _ in range(2000)]
    assert window.mean_size(share) == pytest.approx(sum(sizes) / len(sizes), rel=0.03)


def test_without_a_wish_for_signal_every_step_is_as_large_as_the_config_says():
    assert [Window(max_lag=1, groups_per_step=8).mean_size(share) for share in (0.0, 0.5, 1.0)] == [8.0] * 3
