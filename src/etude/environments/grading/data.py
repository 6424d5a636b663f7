"""Grade function calls: a machine calls the agent's functions and returns plain data, and the host compares it.

Expected values never enter a machine, so there is nothing to read there. Each call counts as if no other call had been
made (see `runners/data.py`). The order of calls is random.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

from etude.environments.grading.machines import GradingMachines, Submission, new_nonce, runner_source
from etude.environments.grading.verdicts import Rejected, graded, one_line
from etude.records.rollout import Graded
from etude.records.task import Case, Trust

_NOT_THERE = object()


def same(got: Any, expected: Any) -> bool:
    """Return whether two values are equal in value and type, recursively: True is not 1, and 1 is not 1.0.

    >>> same([1, {"a": None}], [1, {"a": None}]), same(1.0, 1), same(True, 1)
    (True, False, False)
    """
    if type(got) is not type(expected):
        return False
    if type(got) is list:
        return len(got) == len(expected) and all(map(same, got, expected))
    if type(got) is dict:
        return got.keys() == expected.keys() and all(same(got[k], expected[k]) for k in got)
    if type(got) is float and math.isnan(got):
        return math.isnan(expected)
    return bool(got == expected)


async def grade_cases(
    machines: GradingMachines, cases: Sequence[Case], submission: Submission, *, deadline_s: float
) -> Graded:
    """Grade a submission by the results of function calls: reward 1 if all are as expected, else 0.

    The share of right results is recorded as a measure. `cases`: the calls with their expected results. `deadline_s`:
    the most seconds for all calls together. Raises `Rejected` if a call was not answered, `GradingFault` if the task or
    the host is to blame.
    """
    nonce = new_nonce()
    order = random.Random(nonce).sample(range(len(cases)), len(cases))
    calls = [[cases[i].module, cases[i].function, cases[i].args] for i in order]
    argv = [await machines.python(), "-c", runner_source("data")]
    results = await machines.run_runner(submission, {}, argv, {"calls": calls}, deadline_s=deadline_s, nonce=nonce)
    if type(results) is not list or len(results) != len(cases):
        raise Rejected("the calls were not all answered")
    verdicts: list[tuple[Any, str]] = [(_NOT_THERE, "")] * len(cases)
    for i, result in zip(order, results, strict=True):
        verdicts[i] = _value(result)
    passed = [same(got, case.expected) for (got, _), case in zip(verdicts, cases, strict=True)]
    share, solved = sum(passed) / len(passed), float(all(passed))
    reason = f"all {len(passed)} hidden tests pass" if len(passed) > 1 else "the hidden test passes"
    if not solved:
        first = passed.index(False)
        why = f": {verdicts[first][1]}" if verdicts[first][1] else ""
        location = f"{cases[first].module}.{cases[first].function}"
        reason = f"{sum(passed)} of {len(passed)} hidden tests pass; {location} is wrong{why}"
    return graded(solved, share, Trust.DATA, reason)


def _value(result: Any) -> tuple[Any, str]:
    """(returned value, "") or (a value that equals nothing, why there is no value)."""
    if type(result) is list and len(result) == 2 and result[0] == "value":
        return result[1], ""
    if type(result) is list and len(result) == 2 and type(result[1]) is str:
        return _NOT_THERE, one_line(result[1])
    return _NOT_THERE, "no result"
