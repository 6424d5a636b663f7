"""The built-in terms: effort, its self-tuned weight, and faults of the process."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from itertools import pairwise

import pytest
from msgspec.structs import replace

from etude.records import Graded, Rollout
from etude.records.reward import Score
from etude.records.rollout import ToolCall
from etude.records.task import Trust
from etude.rewards import Composition, NamedTerm, measure
from etude.rewards.effort import Effort, Tuned, next_weight
from etude.rewards.process import MalformedCalls, NoTestsRun, RepeatedReads, RevertedEdits
from etude.seams import RewardTerm
from etude.testing.rewards import finished


def graded(grade: float) -> Graded:
    return Graded.of(grade, trust=Trust.DATA, reason="")


def score(term: RewardTerm, rollout: Rollout, grade: float = 1.0) -> Score:
    return asyncio.run(term.score(rollout, graded(grade)))


def called(*turns: Sequence[ToolCall], files: dict[str, str] | None = None) -> Rollout:
    """A rollout whose turns made these calls."""
    rollout = finished(num_turns=len(turns), calls=turns)
    return replace(rollout, task=replace(rollout.task, files=files or {}))


def call(name: str, output: str = "ok", malformed: bool = False, **arguments: str | int) -> ToolCall:
    return ToolCall(name=name, arguments=arguments, output=output, malformed=malformed)


def test_effort_sums_thinking_answer_tool_output_calls_and_turns_at_their_prices() -> None:
    rollout = called([call("ls")], [call("cat"), call("cat")])  # 2 turns of 4 sampled tokens: 0, 1, 2, 3; 3 of a tool
    term = Effort(thinking=100.0, answer=10.0, tool_output=1.0, call=1000.0, turn=10_000.0, thinking_end=1)
    assert term.effort(rollout) == 2 * 2 * 100 + 2 * 2 * 10 + 3 + 3 * 1000 + 2 * 10_000
    assert Effort(thinking=0.0, answer=1.0, tool_output=0.0, call=0.0, turn=0.0).effort(rollout) == 8


@pytest.mark.parametrize("q", [0.0, 0.5, 1.0, 1.5])
def test_the_cost_is_its_closed_form_and_its_slope_falls(q: float) -> None:
    term = Effort(k=0.02, q=q)
    for x in (0.0, 1.0, 50.0, 4000.0):
        expected = math.log(1 + 0.02 * x) / 0.02 if q == 1 else ((1 + 0.02 * x) ** (1 - q) - 1) / (0.02 * (1 - q))
        assert term.cost(x) == pytest.approx(expected, rel=1e-12)
    slopes = [term.cost(x + 1) - term.cost(x) for x in (0.0, 100.0, 1000.0)]
    assert all(later <= earlier + 1e-9 for earlier, later in pairwise(slopes))


def test_effort_is_charged_only_after_correctness_and_giving_up_early_never_pays() -> None:
    long, short = finished(num_turns=3), finished(num_turns=1)
    term = Effort(limit=10.0)
    assert score(term, long, grade=0.0).value == score(term, short, grade=0.0).value == 0.0
    assert score(term, short).value > score(term, long).value == -1.0
    how = Composition(weights={"effort": 0.9})
    named = [NamedTerm("effort", term)]
    solved, gave_up = (how.of(asyncio.run(measure(named, one, graded(g)))) for one, g in ((long, 1.0), (short, 0.0)))
    assert solved.value == pytest.approx(0.1)
    assert solved.value > gave_up.value == 0.0
    partly = how.of(asyncio.run(measure(named, long, graded(0.25))))
    assert partly.value == pytest.approx(0.025)


def test_a_weight_tunes_itself_until_solved_rollouts_take_the_target() -> None:
    state, tokens = Tuned(), 200.0
    for _ in range(200):
        state = next_weight(state, [round(tokens)], target=100.0, limit=0.5)
        tokens += 0.2 * (200.0 * (1.0 - state.weight / 0.4) - tokens)  # a policy that follows the weight
    assert tokens == pytest.approx(100.0, abs=5)
    assert state.weight == pytest.approx(0.2, abs=0.02)


def test_a_target_below_1_is_a_share_of_the_first_step_and_the_weight_keeps_its_limits() -> None:
    state = next_weight(Tuned(), [400, 200], target=0.5, limit=0.4)
    assert state == Tuned(pytest.approx(0.08), 300.0)
    assert next_weight(state, [], target=0.5, limit=0.4) == state, "nothing was solved"
    assert next_weight(Tuned(0.4, 300.0), [900], target=0.5, limit=0.4).weight == 0.4
    assert next_weight(Tuned(0.01, 300.0), [1], target=0.5, limit=0.4).weight == 0.0


def test_malformed_calls_are_counted_at_their_turns() -> None:
    found = score(MalformedCalls(), called([call("", malformed=True)] * 2, [call("ls")], [call("", malformed=True)]))
    assert (found.value, found.turns) == (-3.0, ((0, -2.0), (2, -1.0)))


def test_a_call_that_tells_nothing_new_is_a_repeated_read() -> None:
    first, changed = call("cat", "1 a", path="a"), call("cat", "1 b", path="a")
    found = score(RepeatedReads(), called([first], [first], [changed], [call("cat", "1 a", path="c")]))
    assert (found.value, found.turns) == (-1.0, ((1, -1.0),))
    assert score(RepeatedReads(("ls",)), called([first], [first])).value == 0.0


def test_a_repeated_read_in_a_context_without_the_first_is_none() -> None:
    first = call("cat", "1 a", path="a")
    rollout = called([first], [first])
    apart = replace(rollout.trace.turns[1], parent=None)
    rollout = replace(rollout, trace=type(rollout.trace)((rollout.trace.turns[0], apart)))
    assert score(RepeatedReads(), rollout).value == 0.0


FILES = {"a.py": "def f():\n    return 0\n"}
LINE = [call("edit", path="a.py", line=2, text="return 1"), call("edit", path="a.py", line=2, text="return 0")]
WHOLE = [call("write", path="a.py", text="x"), call("write", path="a.py", text=FILES["a.py"])]
SWAP = [call("r", path="a.py", old_str="0", new_str="1"), call("r", path="a.py", old_str="1", new_str="0")]


@pytest.mark.parametrize("calls", [LINE, WHOLE, SWAP])
def test_an_edit_that_restores_what_was_there_is_a_reverted_one(calls: list[ToolCall]) -> None:
    found = score(RevertedEdits(), called(*([one] for one in calls), files=FILES))
    assert (found.value, found.turns) == (-1.0, ((1, -1.0),))
    assert score(RevertedEdits(), called([calls[0]], [calls[0]], files=FILES)).value == 0.0


def test_a_rollout_that_never_ran_tests_is_blamed_at_its_last_turn() -> None:
    found = score(NoTestsRun(), called([call("ls")], [call("submit")]))
    assert (found.value, found.turns) == (-1.0, ((1, -1.0),))
    for ran in (call("test"), call("run", command="python -m pytest -q")):
        assert score(NoTestsRun(), called([ran], [call("submit")])).value == 0.0


def test_each_faulty_turn_has_one_hint_that_says_the_fault() -> None:
    first, wrong = call("cat", "1 a", path="a"), call("", "no tool 'ct'", malformed=True)
    reads = score(RepeatedReads(hint="you know {fault}"), called([first], [first, first], [first]))
    assert reads.hints == ((1, "you know cat a"), (2, "you know cat a"))
    assert score(MalformedCalls(hint="avoid: {fault}"), called([wrong], [first])).hints == ((0, "avoid: no tool 'ct'"),)
    assert score(RevertedEdits(hint="keep {fault}"), called(*([one] for one in SWAP))).hints == ((1, "keep a.py"),)
    assert score(NoTestsRun(hint="test first"), called([first], [first])).hints == ((1, "test first"),)
    assert score(RepeatedReads(hint=""), called([first], [first])).hints == ()
    assert all(one.hints for one in (score(term, called([wrong])) for term in (MalformedCalls(), NoTestsRun())))
