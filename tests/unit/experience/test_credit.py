from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import EtudeError, PluginError
from etude.experience import SCHEMES, Credit
from etude.experience.credit import (
    AllPairs,
    BestWorst,
    DrGrpo,
    Fork,
    Grpo,
    Rloo,
    advantages,
    better_than,
    turn_advantages,
)
from etude.experience.group_credit import staged_credit
from etude.records.reward import Reward, Term
from etude.records.rollout import Graded, TurnKind
from etude.records.summary import TurnPlace
from etude.records.task import Trust
from etude.rewards import Composition
from etude.seams import PairCreditScheme

values_of_a_group = st.lists(st.floats(-10, 10), min_size=2, max_size=16)


def rewards(values: Sequence[float], raw: Sequence[float] | None = None) -> list[Reward]:
    pairs = zip(values, values if raw is None else raw, strict=True)
    return [Reward(value=value, raw=before, reason="") for value, before in pairs]


@given(values_of_a_group)
def test_every_scheme_sums_to_zero_over_the_siblings(values):
    for scheme in SCHEMES.values():
        assert math.fsum(scheme.advantages(rewards(values))) == pytest.approx(0, abs=1e-6)


@given(values_of_a_group)
def test_every_scheme_keeps_the_order_of_the_rewards(values):
    order = np.argsort(values, kind="stable")
    for scheme in SCHEMES.values():
        assert (np.diff(np.array(scheme.advantages(rewards(values)))[order]) >= -1e-12).all()


@given(values_of_a_group)
def test_rloo_is_dr_grpo_scaled_by_the_number_of_siblings(values):
    n = len(values)
    scaled = [a * n / (n - 1) for a in DrGrpo().advantages(rewards(values))]
    assert Rloo().advantages(rewards(values)) == pytest.approx(scaled, abs=1e-9)


def test_grpo_divides_by_the_deviation_of_the_population():
    assert Grpo().advantages(rewards([2.0, 0.0])) == pytest.approx([1.0, -1.0], abs=1e-5)
    assert Grpo().advantages(rewards([20.0, 0.0])) == pytest.approx([1.0, -1.0], abs=1e-5)


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("values", [[], [1.0], [0.0, 0.0], [0.1] * 7])
def test_a_group_without_variance_or_siblings_has_no_signal(scheme, values):
    assert advantages(rewards(values), scheme) == [0.0] * len(values)


@given(values_of_a_group)
def test_all_pairs_are_those_with_different_rewards_and_best_worst_pairs_are_among_them(values):
    ids = [f"{i:02d}" for i in range(len(values))]
    found = better_than(rewards(values), ids, AllPairs())
    assert found == [tuple(j for j, other in zip(ids, values, strict=True) if own > other) for own in values]
    extremes = better_than(rewards(values), ids, BestWorst())
    for own, all_worse, worst in zip(values, found, extremes, strict=True):
        wanted = all_worse if own == max(values) else ()
        assert worst == tuple(j for j in wanted if values[int(j)] == min(values))


def test_schemes_without_pairs_prefer_nobody():
    assert better_than(rewards([1.0, 0.0]), ["a", "b"], DrGrpo()) == [(), ()]


@pytest.mark.parametrize("pairs", [[(1, 0)], [(0, 2)], [(0, 0)], [(0, -1)], [(0, 5)], [0], None])
def test_a_pair_that_is_not_of_a_higher_and_a_lower_reward_is_an_error_of_its_scheme(pairs):
    class Wrong(AllPairs):
        def pairs(self, rewards):
            return pairs

    with pytest.raises(PluginError, match="credit scheme 'all-pairs'"):
        better_than(rewards([1.0, 0.0, 1.0]), ["a", "b", "c"], Wrong())


def test_every_named_scheme_exists():
    assert {name: scheme.name for name, scheme in SCHEMES.items()} == {name: str(name) for name in Credit}


@given(values_of_a_group, st.floats(1e-6, 1e-2), st.integers(0, 2**32))
def test_a_penalty_is_never_divided_by_its_own_deviation(values, beta, seed):
    """GRPO's scale is that of the graded rewards: what a penalty changes of an advantage is the penalty over it."""
    k1 = np.random.default_rng(seed).normal(size=len(values))
    penalised = [r - beta * k for r, k in zip(values, k1, strict=True)]
    found = advantages(rewards(penalised, raw=values), Grpo())
    if min(values) == max(values):
        assert found == [0.0] * len(values), "noise of the divergence alone is no signal"
        return
    scale = float(np.std(values)) + 1e-6
    centred = np.array(penalised) - math.fsum(penalised) / len(penalised)
    assert np.array(found) * scale == pytest.approx(centred, abs=1e-9)


@pytest.mark.parametrize("beta", [1e-6, 1e-3])
def test_in_a_solved_group_the_penalty_stays_as_small_as_it_is(beta):
    penalised = rewards([1.0 - beta * k for k in (0.0, 1.0, 2.0, 3.0)], raw=[1.0] * 4)
    by_size = [scheme for scheme in SCHEMES.values() if not isinstance(scheme, PairCreditScheme)]  # pairs count signs
    for scheme in by_size:
        assert max(map(abs, advantages(penalised, scheme))) <= 2.0 * beta * (1 + 1e-6)


class Broken:
    name, version = "broken", "1"

    def __init__(self, found: Any) -> None:
        self.found = found

    def advantages(self, rewards: Sequence[Reward]) -> Any:
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


@pytest.mark.parametrize("found", [[0.5], [0.5, math.nan], [0.5, "much"], None, ZeroDivisionError("no deviation")])
def test_a_scheme_that_fails_or_gives_no_finite_number_per_reward_is_named_with_the_rewards(found):
    with pytest.raises(EtudeError, match="credit scheme 'broken'") as caught:
        advantages(rewards([1.0, 0.0]), Broken(found))
    assert "[1.0, 0.0]" in caught.value.facts


def chain(*contexts: str) -> list[TurnPlace]:
    """The turns of a rollout without branches, with these contexts."""
    return [TurnPlace(c.encode(), i - 1 if i else None, TurnKind.ACT) for i, c in enumerate(contexts)]


def forked(values: Sequence[float], *turns: list[TurnPlace]) -> list[tuple[float, ...]]:
    return turn_advantages(rewards(values), turns, Fork())


PROMPT, FIRST, LAST = "", "a", "b"
POLICY = {PROMPT: 0.4, FIRST: 0.7, LAST: 0.45}  # the probability of action "a" in each context
OUTCOME = {"aa": 1.0, "ab": 0.75, "ba": 0.0, "bb": 0.125}
NUM = 4


def gradients(scheme: Any) -> tuple[dict[str, float], float]:
    """The mean over all groups of four rollouts of two turns of the gradient by the logit of each context, and the
    summed variance of its parts."""
    first, second = dict.fromkeys(POLICY, 0.0), dict.fromkeys(POLICY, 0.0)
    for group in itertools.product(OUTCOME, repeat=NUM):
        chances = [(POLICY[PROMPT] if one[0] == "a" else 1 - POLICY[PROMPT]) for one in group]
        chances += [(POLICY[one[0]] if one[1] == "a" else 1 - POLICY[one[0]]) for one in group]
        values = [OUTCOME[one] for one in group]
        turns = [chain(PROMPT, one[0]) for one in group]
        given = turn_advantages(rewards(values), turns, scheme)
        if not given[0]:
            given = [(one, one) for one in advantages(rewards(values), scheme)]
        gradient = dict.fromkeys(POLICY, 0.0)
        for one, own in zip(group, given, strict=True):
            for context, action, advantage in zip((PROMPT, one[0]), one, own, strict=True):
                gradient[context] += advantage * ((action == "a") - POLICY[context]) / NUM
        for context, value in gradient.items():
            first[context] += math.prod(chances) * value
            second[context] += math.prod(chances) * value**2
    return first, sum(second.values()) - sum(value**2 for value in first.values())


def test_fork_credit_is_unbiased_over_all_groups_of_a_small_tree_and_varies_less_than_rloo():
    value = {c: POLICY[c] * OUTCOME[c + "a"] + (1 - POLICY[c]) * OUTCOME[c + "b"] for c in "ab"}
    slope = {c: p * (1 - p) for c, p in POLICY.items()}
    true = {
        PROMPT: slope[PROMPT] * (value["a"] - value["b"]),
        FIRST: POLICY[PROMPT] * slope[FIRST] * (OUTCOME["aa"] - OUTCOME["ab"]),
        LAST: (1 - POLICY[PROMPT]) * slope[LAST] * (OUTCOME["ba"] - OUTCOME["bb"]),
    }
    found, variance = gradients(Fork())
    assert found == pytest.approx(true, abs=1e-12)
    plain, of_rloo = gradients(Rloo())
    assert plain == pytest.approx(true, abs=1e-12)
    assert variance < 0.97 * of_rloo
    with_itself, _ = gradients(DrGrpo())
    assert with_itself != pytest.approx(true, abs=1e-3), "a baseline with the rollout's own reward is biased"


def test_a_turn_is_compared_with_the_siblings_that_came_to_the_same_context():
    left, *others = forked(
        [1.0, 0.0, 0.0, 1.0], chain("p", "pa", "pax"), chain("p", "pa", "pay"), chain("p", "pb"), chain("p", "pb")
    )
    fork = 1.0 - (0.0 + 4 * 1 / 3) / 5
    assert left == pytest.approx((1.0 - 1 / 3, fork, fork))
    assert others[1] == pytest.approx((-2 / 3, -(1.0 + 4 * 2 / 3) / 5))


def test_without_a_common_context_fork_credit_is_rloo():
    values = [1.0, 0.5, 0.0]
    turns = [chain(f"{i}", f"{i}a") for i in range(3)]
    assert forked(values, *turns) == [(one, one) for one in advantages(rewards(values), Rloo())]
    assert advantages(rewards(values), Fork()) == advantages(rewards(values), Rloo())
    assert forked(values, [], [], []) == [(), (), ()]


def test_turns_that_one_rollout_asked_twice_have_one_baseline_without_its_own_reward():
    act = TurnKind.ACT
    twice = [TurnPlace(b"p", None, act), TurnPlace(b"pa", 0, act), TurnPlace(b"pa", 0, act), TurnPlace(b"s", None, act)]
    found = forked([1.0, 0.0, 0.5], twice, chain("p", "pa"), chain("p"))
    assert found[0] == pytest.approx((0.75, 1.0 - 4 * 0.25 / 5, 1.0 - 4 * 0.25 / 5, 0.75))
    assert found[1][1] == pytest.approx(0.0 - (1.0 + 4 * 0.75) / 5), "the sibling that asked twice counts once"


def test_turns_that_the_same_siblings_reached_have_the_same_baseline():
    [one, _, _] = forked([1.0, 0.0, 1.0], chain("p", "pa", "pab"), chain("p", "pa", "pab"), chain("p"))
    assert one[1] == one[2] == pytest.approx(1.0 - (0.0 + 4 * 0.5) / 5)


@given(values_of_a_group, st.integers(0, 2**32))
def test_fork_credit_does_not_depend_on_the_order_of_the_siblings(values, seed):
    rng = np.random.default_rng(seed)
    turns = [chain("p", *("p" + "ab"[rng.integers(2)] for _ in range(rng.integers(0, 2)))) for _ in values]
    order = rng.permutation(len(values))
    found = forked(values, *turns)
    again = forked([values[i] for i in order], *(turns[i] for i in order))
    for place, i in enumerate(order):
        assert again[place] == pytest.approx(found[i], abs=1e-9)


def test_a_scheme_by_turn_that_gives_another_number_of_advantages_is_named():
    class Short(Fork):
        def turn_advantages(self, rewards, turns):
            return [[0.0] for _ in turns]

    with pytest.raises(EtudeError, match="did not return one finite number per turn"):
        turn_advantages(rewards([1.0, 0.0]), [chain("p", "q"), chain("p")], Short())


def test_a_part_of_a_turn_is_credited_to_that_turn_alone():
    """Without the parts the siblings have equal rewards; the means are over the turns of the others."""
    parts = [((1, -0.4),), (), ((0, -0.2), (1, -0.1))]
    given = [Reward(value=1.0 + sum(p for _, p in own), raw=1.0, reason="", turns=own) for own in parts]
    turns = [chain("p", "pa"), chain("p", "pb", "pbc"), chain("p", "pc")]
    found = turn_advantages(given, turns, Fork())
    means = [-0.3 / 5, -0.7 / 4, -0.4 / 5]
    assert found[0] == pytest.approx((-means[0], -0.4 - means[0]))
    assert found[1] == pytest.approx((-means[1],) * 3)
    assert found[2] == pytest.approx((-0.2 - means[2], -0.1 - means[2]))
    assert turn_advantages(given[:1], turns[:1], Fork()) == [(0.0, 0.0)], "without siblings there is no signal"


def test_a_part_of_a_turn_is_in_the_reward_of_the_rollout_for_schemes_without_turns():
    given = [Reward(value=0.6, raw=0.6, reason="", turns=((1, -0.4),)), Reward(value=1.0, raw=1.0, reason="")]
    assert advantages(given, DrGrpo()) == pytest.approx([-0.2, 0.2])
    assert turn_advantages(given, [chain("p"), chain("p")], DrGrpo()) == [(), ()]


LEAF = {"aa": 0.4 * 0.7, "ab": 0.4 * 0.3, "ba": 0.6 * 0.45, "bb": 0.6 * 0.55}
"""The probability of each rollout under `POLICY`."""
EARLY, ALL = 2, 4
GRADES, TONES = {"aa": 1.0, "ab": 1.0, "ba": 0.0, "bb": 0.0}, {"aa": 0.0, "ab": 0.0, "ba": 0.0, "bb": 0.125}
WEIGHTS = {"tone": 1.0, "cost": 1.0}
"""Of terms: the reward of a rollout is its grade, its tone, and what is left of `OUTCOME`, its cost."""


def with_terms(leaf: str) -> Graded:
    terms = {"tone": TONES[leaf], "cost": OUTCOME[leaf] - GRADES[leaf] - TONES[leaf]}
    graded = Graded.of(GRADES[leaf], trust=Trust.DATA, reason="")
    return graded.with_terms(*(Term(name=name, value=value) for name, value in terms.items()))


def staged_gradient(scheme: Any, decides: Composition, *, staged: bool) -> dict[str, float]:
    """The mean over all groups of the summed gradient by the logit of each context: two rollouts, and two more where
    the rewards of these differ by `decides`. `staged`: credited as batches are; else as if the group had had one
    stage."""
    found = dict.fromkeys(POLICY, 0.0)
    for first in itertools.product(OUTCOME, repeat=EARLY):
        early = decides.rewards([with_terms(one).terms for one in first])
        more = ALL - EARLY if len({one.value for one in early}) > 1 else 0
        for rest in itertools.product(OUTCOME, repeat=more):
            group = [*first, *rest]
            graded = [with_terms(one) for one in group]
            turns = [chain(PROMPT, one[0]) for one in group]
            is_first = [not staged or i < EARLY for i in range(len(group))]
            given = staged_credit(graded, turns, is_first, Composition(weights=WEIGHTS), scheme)
            for one, credited in zip(group, given, strict=True):
                own = credited.by_turn or (credited.advantage,) * 2
                for context, action, advantage in zip((PROMPT, one[0]), one, own, strict=True):
                    slope = (action == "a") - POLICY[context]
                    found[context] += math.prod(LEAF[i] for i in group) * advantage * slope
    return found


@pytest.mark.parametrize(
    ("scheme", "factors"), [(Rloo(), (1, 1)), (Fork(), (1, 1)), (DrGrpo(), (1 / 2, 3 / 4))], ids=["rloo", "fork", "dr"]
)
@pytest.mark.parametrize("terms", [(), ("tone",), ("tone", "cost")], ids=["grade", "term", "reward"])
def test_groups_that_go_on_where_rewards_differ_have_the_true_gradient_times_a_known_factor(scheme, factors, terms):
    """`terms`: those that decide with the grade. Whatever part of the reward decides, credit is for the whole of it."""
    decides = Composition(weights={name: WEIGHTS[name] for name in terms})
    value = {c: POLICY[c] * OUTCOME[c + "a"] + (1 - POLICY[c]) * OUTCOME[c + "b"] for c in "ab"}
    slope = {c: p * (1 - p) for c, p in POLICY.items()}
    true = {
        PROMPT: slope[PROMPT] * (value["a"] - value["b"]),
        FIRST: POLICY[PROMPT] * slope[FIRST] * (OUTCOME["aa"] - OUTCOME["ab"]),
        LAST: (1 - POLICY[PROMPT]) * slope[LAST] * (OUTCOME["ba"] - OUTCOME["bb"]),
    }
    chances: dict[float, float] = {}
    for leaf, chance in LEAF.items():
        value = decides.of(with_terms(leaf)).value
        chances[value] = chances.get(value, 0.0) + chance
    goes_on = 1.0 - math.fsum(chance**2 for chance in chances.values())
    factor = EARLY * factors[0] + goes_on * (ALL - EARLY) * factors[1]
    expected = pytest.approx({context: factor * one for context, one in true.items()}, abs=1e-12)
    assert staged_gradient(scheme, decides, staged=True) == expected
    pooled = staged_gradient(scheme, decides, staged=False)
    ratios = [pooled[context] / true[context] for context in POLICY]
    assert max(ratios) / min(ratios) > 1.02, "with later siblings in the first ones' baseline the direction is biased"


def test_the_reward_of_a_later_sibling_changes_no_advantage_of_a_first_one():
    graded = [Graded.of(v, trust=Trust.DATA, reason="") for v in (1.0, 0.0, 1.0, 1.0)]
    other = [*graded[:3], Graded.of(0.0, trust=Trust.DATA, reason="")]
    places, first = [()] * 4, [True, True, False, False]
    for scheme in SCHEMES.values():
        one, two = (staged_credit(some, places, first, Composition(), scheme) for some in (graded, other))
        assert one[:2] == two[:2]
        assert one[2:] != two[2:]
    whole = staged_credit(graded, places, [True] * 4, Composition(), DrGrpo())
    assert [one.advantage for one in whole] == advantages(rewards([1.0, 0.0, 1.0, 1.0]), DrGrpo())
