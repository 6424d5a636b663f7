"""Contract suites for reward terms and credit schemes: tests of what etude relies on, for your own class.

With pytest, subclass the suite::

    class TestMyScheme(CreditSchemeContract):
        def make(self):
            return MyScheme()
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from etude.experience.credit import advantages, better_than, turn_advantages
from etude.records.completion import Completion, Sampling, StopReason, Version, VersionSpan
from etude.records.reward import Reward, Term
from etude.records.rollout import Ending, Graded, Rollout, ToolCall, Trace, Turn, TurnKind
from etude.records.summary import TurnPlace
from etude.records.task import Split, Task, Trust
from etude.records.wire import pack
from etude.rewards import NamedTerm, measure_group
from etude.seams import CreditScheme, GroupRewardTerm, PairCreditScheme, RewardTerm
from etude.testing.contracts import Contract

GROUPS: tuple[tuple[float, ...], ...] = (
    (1.0, 0.0),
    (1.0, 0.0, 0.0, 0.0),
    (0.0, 0.25, 1.0, 0.25),
    (-1.0, 0.5, 0.5, 2.0, 0.1),
    (1.0, 1.0, 1.0),
    (0.0,) * 8,
)
"""Rewards of groups, including groups without a signal (all rewards equal)."""
CALLS: tuple[tuple[ToolCall, ...], ...] = (
    (ToolCall(name="cat", arguments={"path": "own.py"}, output="1 def double(n):\n2  return None"),),
    (
        ToolCall(name="cat", arguments={"path": "own.py"}, output="1 def double(n):\n2  return None"),
        ToolCall(name="", arguments={}, output="no such tool: eidt", malformed=True),
    ),
    (
        ToolCall(name="edit", arguments={"path": "own.py", "line": 2, "text": "    return 2 * n"}, output="ok"),
        ToolCall(name="edit", arguments={"path": "own.py", "line": 2, "text": "    return None"}, output="ok"),
    ),
)
"""Tool calls of three turns, with a repeated read, a malformed call and a reverted edit, and without a run of tests."""


class CreditSchemeContract(Contract):
    """Contract suite for credit schemes: tests what training needs of an `etude.seams.CreditScheme`."""

    def make(self) -> CreditScheme:
        """Return a new scheme to test."""
        raise NotImplementedError("override make() to return your scheme")

    def given(self, values: Sequence[float]) -> list[float]:
        """Compute the scheme's advantages for a group with these rewards."""
        return advantages([Reward(value=value, raw=value, reason="") for value in values], self.make())

    def test_every_reward_has_one_finite_advantage(self) -> None:
        for values in GROUPS:
            self.given(values)

    def test_a_group_without_siblings_or_with_one_has_as_many_advantages(self) -> None:
        assert [len(self.given(values)) for values in ((), (1.0,))] == [0, 1]

    def test_equal_rewards_have_equal_advantages_and_a_higher_one_has_no_lower_one(self) -> None:
        for values in GROUPS:
            pairs = sorted(zip(values, self.given(values), strict=True))
            for (low, first), (high, second) in pairwise(pairs):
                assert first <= second + 1e-9, f"reward {low:g} has {first:g}, and {high:g} has {second:g}: {values}"
                assert low != high or abs(first - second) < 1e-9, f"reward {low:g} has {first:g} and {second:g}"

    def test_the_order_of_the_siblings_does_not_matter(self) -> None:
        for values in GROUPS:
            forth, back = self.given(values), self.given(values[::-1])[::-1]
            assert np.allclose(forth, back, atol=1e-9), f"{values}: {forth}; in the other order {back}"

    def test_the_same_rewards_give_the_same_bits(self) -> None:
        for values in GROUPS:
            scheme = self.make()
            rewards = [Reward(value=value, raw=value, reason="") for value in values]
            first, again = advantages(rewards, scheme), advantages(rewards, scheme)
            assert first == again, f"{values}: first {first}, then {again}"

    def test_a_scheme_by_turn_gives_the_same_bits_again_whatever_the_order_of_the_siblings(self) -> None:
        for values in GROUPS:
            rewards = [Reward(value=value, raw=value, reason="") for value in values]
            turns = [_places(i) for i in range(len(values))]
            found, again = turn_advantages(rewards, turns, self.make()), turn_advantages(rewards, turns, self.make())
            back = turn_advantages(rewards[::-1], turns[::-1], self.make())[::-1]
            assert found == again, f"{values}: first {found}, then {again}"
            assert all(np.allclose(own, other, atol=1e-9) for own, other in zip(found, back, strict=True)), f"{values}"

    def test_pairs_are_of_a_higher_and_a_lower_reward_whatever_the_order_of_the_siblings(self) -> None:
        if not isinstance(self.make(), PairCreditScheme):
            return
        for values in GROUPS:
            rewards = [Reward(value=value, raw=value, reason="") for value in values]
            ids = [str(i) for i in range(len(values))]
            found = better_than(rewards, ids, self.make())
            back = better_than(rewards[::-1], ids[::-1], self.make())[::-1]
            assert list(map(set, found)) == list(map(set, back)), f"{values}: {found}; in the other order {back}"

    def test_it_has_a_name_and_a_version(self) -> None:
        scheme = self.make()
        for what in ("name", "version"):
            assert isinstance(getattr(scheme, what), str), f"its {what} is not a string"
            assert getattr(scheme, what), f"its {what} is empty"


def _places(number: int) -> list[TurnPlace]:
    """The turns of one of several siblings, every other one of which takes the same first turn."""
    contexts = (b"task", b"task, %d" % (number % 2), b"task, %d, %d" % (number % 2, number))
    return [TurnPlace(context, i - 1 if i else None, TurnKind.ACT) for i, context in enumerate(contexts)]


class RewardTermContract(Contract):
    """Contract suite for reward terms: tests what a run needs of an `etude.seams.RewardTerm` or `GroupRewardTerm`."""

    def make(self) -> RewardTerm | GroupRewardTerm:
        """Return a new term to test."""
        raise NotImplementedError("override make() to return your term")

    def rollouts(self) -> Sequence[tuple[Rollout, Graded]]:
        """Return graded rollouts of one group to test with. Override it for a term that supports only certain tasks."""
        solved = Graded.of(1.0, {"tests": 1.0}, trust=Trust.DATA, reason="all 3 hidden tests pass")
        failed = Graded.of(0.0, {"tests": 0.0}, trust=Trust.DATA, reason="0 of 3 hidden tests pass")
        return (
            (finished(num_turns=3, calls=CALLS), solved),
            (finished(num_turns=1, exports={}, number=1), failed),
            (finished(num_turns=0, ending=Ending.CONTEXT, number=2), failed),
        )

    def measured(
        self, term: RewardTerm | GroupRewardTerm, siblings: Sequence[tuple[Rollout, Graded]] | None = None
    ) -> list[Term]:
        """Compute the values of the term for the rollouts of a group, in the form in which a run stores them.

        `siblings`: graded rollouts; None: `rollouts()`."""
        rollouts, graded = zip(*(siblings or self.rollouts()), strict=True)
        found = asyncio.run(measure_group([NamedTerm("yours", term)], rollouts, graded, deadline_s=30.0))
        return [one.term for [one] in found]

    def test_every_rollout_has_a_finite_value_or_an_unknown_one_with_the_reason(self) -> None:
        for found in self.measured(self.make()):
            assert found.value is not None or found.evidence, "an unknown value needs evidence with the reason"

    def test_the_same_rollout_has_the_same_value(self) -> None:
        term = self.make()
        first, again = ([(one.value, one.hints) for one in self.measured(term)] for _ in range(2))
        assert first == again, f"first {first}, then {again}"

    def test_a_term_whose_scores_have_hints_says_that_it_gives_hints(self) -> None:
        term = self.make()
        says = getattr(term, "gives_hints", False)
        assert says or not any(one.hints for one in self.measured(term)), "set its attribute gives_hints = True"

    def test_the_order_of_the_siblings_does_not_matter(self) -> None:
        term, siblings = self.make(), self.rollouts()
        forth, back = self.measured(term, siblings), self.measured(term, siblings[::-1])[::-1]
        values = [[one.value for one in some] for some in (forth, back)]
        assert values[0] == values[1], f"{values[0]}; in the other order {values[1]}"

    def test_a_rollout_without_siblings_has_a_value_or_an_unknown_one(self) -> None:
        for one in self.rollouts():
            self.measured(self.make(), [one])

    def test_it_changes_nothing_of_the_rollout(self) -> None:
        siblings = self.rollouts()
        before = [pack(rollout) for rollout, _ in siblings]
        self.measured(self.make(), siblings)
        assert [pack(rollout) for rollout, _ in siblings] == before, "a rollout was changed in place"

    def test_it_has_a_version(self) -> None:
        version = self.make().version
        assert isinstance(version, str), "its version is not a string"
        assert version, "its version is empty"
        assert self.make().version == version, "another object with the same settings has another version"


def finished(
    *,
    num_turns: int,
    ending: Ending = Ending.SUBMITTED,
    exports: dict[str, bytes] | None = None,
    number: int = 0,
    calls: Sequence[Sequence[ToolCall]] = (),
) -> Rollout:
    """Make a finished rollout of `num_turns` turns in one context, with four sampled tokens each.

    `exports` are its exported files (path → content); None: one file. `number`: its index in its group, from which its
    id is made. `calls`: the tool calls of the first turns; the others have none."""
    turns = [
        Turn(
            parent=i - 1 if i else None,
            prompt_ids=np.arange(3, dtype=np.int32),
            sampling=Sampling(max_tokens=4, stop_token_ids=(), seed=i),
            completion=Completion(
                request_id=f"r{i}",
                token_ids=np.arange(4, dtype=np.int32),
                logprobs=np.full(4, -0.5, np.float32),
                routes=np.zeros((0, 1, 1), np.uint8),
                routes_start=7 * i + 6,
                spans=(VersionSpan(Version(0, "0" * 8, "0" * 64), 4),),
                stop_reason=StopReason.STOP,
                engine="engine-0",
            ),
            calls=tuple(calls[i]) if i < len(calls) else (),
        )
        for i in range(num_turns)
    ]
    task = Task(
        source="contract",
        split=Split.TRAIN,
        index=0,
        family="double",
        instruction="write double",
        files={"own.py": "def double(n):\n    return None\n"},
        exports=("own.py",),
    )
    return Rollout(
        rollout_id=f"g000000.{number}",
        group_id="g000000",
        attempt=0,
        task=task,
        trace=Trace(tuple(turns)),
        ending=ending,
        exports={"own.py": b"def double(n):\n    return 2 * n\n"} if exports is None else exports,
        wall_s=1.0,
        tool_s=0.25,
    )
