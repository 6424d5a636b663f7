"""Credit where machines were forked: a small tree of all that can happen, enumerated."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import pytest

from etude.experience.credit import DrGrpo, Fork, Rloo
from etude.experience.group_credit import num_context_turns, staged_credit
from etude.records.reward import GRADE, Term
from etude.records.rollout import Fork as Forked
from etude.records.rollout import Graded, TurnKind
from etude.records.summary import TurnPlace
from etude.records.task import Trust
from etude.rewards import Composition
from etude.seams import CreditScheme

PROMPT, LONG, SHORT = "", "a", "b"
POLICY = {PROMPT: 0.4, LONG: 0.7, SHORT: 0.45}  # the probability of action "a" in each context
OUTCOME = {"aa": 1.0, "ab": 0.25, "ba": 0.0, "bb": 0.125}
PARTS = {"a": -0.25, "b": 0.125, "aa": -0.5, "ab": 0.0, "ba": 0.75, "bb": -0.125}  # of the last action's turn
NONE: Mapping[str, float] = {}
NUM, FORKS = 3, 2

Entry = tuple[str, ...]
"""What one rollout of a group did: (first action, last action of each continuation). Action "a" ends in a summary."""


def chance(context: str, action: str) -> float:
    return POLICY[context] if action == "a" else 1.0 - POLICY[context]


def entries(forks: int) -> list[tuple[Entry, float]]:
    """All entries with their probabilities."""
    return [
        ((first, *last), chance(PROMPT, first) * math.prod(chance(first, one) for one in last))
        for first in "ab"
        for last in itertools.product("ab", repeat=forks if first == "a" else 1)
    ]


def chain(first: str) -> list[TurnPlace]:
    """Two turns; after a summary the second one begins a new conversation."""
    parent = None if first == "a" else 0
    return [TurnPlace(b"p", None, TurnKind.ACT), TurnPlace(first.encode(), parent, TurnKind.ACT)]


def rollouts_of(
    group: Sequence[Entry], parts: Mapping[str, float]
) -> tuple[list[Graded], list[list[TurnPlace]], list[Forked | None], list[str]]:
    graded, places, forks, actions = list[Graded](), list[list[TurnPlace]](), list[Forked | None](), list[str]()
    for number, (first, *last) in enumerate(group):
        for action in last:
            by_turn = tuple((turn, parts.get(one, 0.0)) for turn, one in enumerate((first, first + action)))
            work = Term(name="work", value=sum(part for _, part in by_turn), turns=by_turn)
            terms = (Term(name=GRADE, value=OUTCOME[first + action]), work)
            graded.append(Graded(terms=terms, trust=Trust.DATA))
            places.append(chain(first))
            forks.append(Forked(origin=f"g.{number}", num_turns=1, num_sampled=1) if len(last) > 1 else None)
            actions.append(first + action)
    return graded, places, forks, actions


def gradient(
    scheme: CreditScheme,
    *,
    forks: int = FORKS,
    change: Callable[[int, float], float] = lambda _, one: one,
    knows: bool = True,
    parts: Mapping[str, float] = NONE,
) -> tuple[dict[str, float], dict[str, float]]:
    """The mean over all groups of the summed gradient by the logit of each context, and its variance.

    `change`: a function of (turn, advantage) that returns another advantage. `knows`: whether credit gets the forks.
    `parts`: the part of the reward that each turn caused."""
    composition = Composition(weights={"work": 1.0})
    mean, square = dict.fromkeys(POLICY, 0.0), dict.fromkeys(POLICY, 0.0)
    for some in itertools.product(entries(forks), repeat=NUM):
        graded, places, forked, actions = rollouts_of([entry for entry, _ in some], parts)
        found = staged_credit(graded, places, [True] * len(graded), composition, scheme, forked if knows else ())
        context = num_context_turns(forked)
        here = dict.fromkeys(POLICY, 0.0)
        for one, first, credited in zip(actions, context, found, strict=True):
            for turn, (at, action) in enumerate(zip((PROMPT, one[0]), one, strict=True)):
                if turn >= first:
                    own = (credited.by_turn or (credited.advantage,) * 2)[turn]
                    here[at] += change(turn, own) * ((action == "a") - POLICY[at])
        probability = math.prod(p for _, p in some)
        for at, value in here.items():
            mean[at] += probability * value
            square[at] += probability * value**2
    return mean, {at: square[at] - mean[at] ** 2 for at in POLICY}


def true_gradient(parts: Mapping[str, float] = NONE, *, alone: bool = False) -> dict[str, float]:
    """`alone`: each part counts for the turn that caused it, and for no earlier one."""
    whole = {one: outcome + parts.get(one, 0.0) for one, outcome in OUTCOME.items()}
    later = OUTCOME if alone else whole
    value = {c: parts.get(c, 0.0) + POLICY[c] * later[c + "a"] + (1 - POLICY[c]) * later[c + "b"] for c in "ab"}
    slope = {c: p * (1 - p) for c, p in POLICY.items()}
    return {
        PROMPT: NUM * slope[PROMPT] * (value["a"] - value["b"]),
        LONG: NUM * POLICY[PROMPT] * slope[LONG] * (whole["aa"] - whole["ab"]),
        SHORT: NUM * (1 - POLICY[PROMPT]) * slope[SHORT] * (whole["ba"] - whole["bb"]),
    }


@pytest.mark.parametrize("scheme", [Fork(), Rloo()], ids=["fork", "rloo"])
def test_the_credit_of_forked_rollouts_is_the_true_gradient_over_all_groups_of_a_small_tree(
    scheme: CreditScheme,
) -> None:
    true = pytest.approx(true_gradient(), abs=1e-12)
    found, variance = gradient(scheme)
    assert found == true
    alone, of_one = gradient(scheme, forks=1)
    assert alone == true
    assert variance[PROMPT] < 0.9 * of_one[PROMPT], "the mean of two continuations says more about what came before"


@pytest.mark.parametrize(("scheme", "alone"), [(Fork(), True), (Rloo(), False)], ids=["fork", "rloo"])
def test_forks_do_not_change_the_expected_gradient_of_parts_of_rewards_that_single_turns_caused(
    scheme: CreditScheme, alone: bool
) -> None:
    true = pytest.approx(true_gradient(PARTS, alone=alone), abs=1e-12)
    assert gradient(scheme, forks=1, parts=PARTS)[0] == true
    assert gradient(scheme, parts=PARTS)[0] == true
    assert true_gradient(PARTS) != pytest.approx(true_gradient(PARTS, alone=True), abs=1e-3)


def test_later_turns_count_for_one_of_the_continuations_and_shared_turns_for_all() -> None:
    true = pytest.approx(true_gradient(), abs=1e-3)
    assert gradient(Fork(), change=lambda turn, own: own * (FORKS if turn else 1))[0] != true, "undivided"
    assert gradient(Fork(), knows=False)[0] != true, "continuations in the baseline of what they share"
    assert gradient(DrGrpo())[0] != true, "a baseline with the rollout's own reward"


def graded(*values: float) -> list[Graded]:
    return [Graded.of(value, trust=Trust.DATA, reason="") for value in values]


def test_shared_turns_get_the_mean_and_later_turns_what_differs_from_the_other_continuations() -> None:
    fork = Forked(origin="g.0", num_turns=1, num_sampled=1)
    found = staged_credit(
        graded(1.0, 0.0, 0.5, 0.2),
        [chain("a")] * 3 + [chain("b")],
        [True] * 4,
        Composition(),
        Fork(),
        [fork] * 3 + [None],
    )
    assert [one.by_turn for one in found] == [
        pytest.approx((0.5 - 0.2, (1.0 - 0.25) / 3)),
        pytest.approx((0.0, (0.0 - 0.75) / 3)),
        pytest.approx((0.0, (0.5 - 0.5) / 3)),
        pytest.approx((0.2 - (0.5 + 4 * 0.5) / 5, 0.2 - (0.5 + 4 * 0.5) / 5)),
    ]
    assert [one.reward.value for one in found] == [1.0, 0.0, 0.5, 0.2]


def test_a_continuation_whose_others_are_invalid_is_credited_as_one_that_was_not_forked() -> None:
    """The rollout that sampled the shared turns may be the invalid one: the first valid one is trained on them."""
    fork = Forked(origin="g.0", num_turns=1, num_sampled=1)
    given = graded(1.0, 0.0), [chain("a"), chain("b")], [True] * 2, Composition(), Fork()
    assert staged_credit(*given, [fork, None]) == staged_credit(*given)
    assert num_context_turns([fork, None, fork, fork]) == [0, 0, 1, 1]


def test_a_part_of_a_turn_stays_with_its_turn() -> None:
    """A charge for a shared turn is in the reward of each continuation, and is credited to the shared turn once."""
    composition = Composition(weights={"work": 1.0}, charges=("work",))
    fork = Forked(origin="g.0", num_turns=1, num_sampled=1)

    def one(grade: float, *parts: tuple[int, float]) -> Graded:
        work = Term(name="work", value=sum(part for _, part in parts), turns=parts)
        return Graded(terms=(Term(name=GRADE, value=grade), work), trust=Trust.DATA)

    outcomes = [one(1.0, (0, -0.5)), one(1.0, (0, -0.5), (1, -0.25)), one(1.0)]
    found = staged_credit(
        outcomes, [chain("a"), chain("a"), chain("b")], [True] * 3, composition, Fork(), [fork, fork, None]
    )
    assert [one.reward.value for one in found] == [0.5, 0.25, 1.0]
    assert found[0].by_turn[0] == pytest.approx(-0.5), "grades are equal: nothing but the charge"
    assert found[1].by_turn == pytest.approx((0.0, (-0.25 - 0.0) / 2))
    assert found[0].by_turn[1] == pytest.approx(0.25 / 2)
    assert found[2].by_turn == pytest.approx((0.5, 0.5)), "the baseline has the part of the shared turn, no later one"
