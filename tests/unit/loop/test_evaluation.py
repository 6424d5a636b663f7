"""The progress events of an evaluation."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.small_rollouts import Kit

from etude.errors import DeadlineExceeded, EngineBehind, EtudeError
from etude.loop import evaluation
from etude.loop.adjustable_semaphore import Limit
from etude.loop.config import RunConfig
from etude.loop.evaluation import run_all
from etude.loop.rollout_result import RolloutResult
from etude.loop.rollout_scheduler import run_once
from etude.loop.rpc import ProcessLost
from etude.records import Invalid, RolloutSpec
from etude.records.reward import Term
from etude.records.rollout import Boundary, Graded, Trust
from etude.telemetry import Telemetry, read_events
from etude.testing import FakeRunProcesses


def test_an_evaluation_tells_its_begin_and_its_end_however_quick_it_is(tmp_path: Path) -> None:
    processes: Any = SimpleNamespace(max_running=Limit(2))
    running, most = 0, 0

    async def one(spec: Any) -> Any:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return spec

    telemetry = Telemetry(tmp_path / "conductor.jsonl", process="conductor")
    specs: Any = list(range(7))
    counted: list[None] = []
    each = lambda: counted.append(None)  # noqa: E731
    assert asyncio.run(run_all(processes, specs, one, name="before", telemetry=telemetry, each=each)) == specs
    assert len(counted) == 7
    assert asyncio.run(run_all(processes, [], one, name="oracle", telemetry=telemetry)) == []
    telemetry.close()
    said = [(e["name"], e["done"], e["total"]) for e in read_events(tmp_path) if e["kind"] == "eval.progress"]
    assert (said[0], said[-2], said[-1]) == (("before", 0, 7), ("before", 7, 7), ("oracle", 0, 0))
    assert most == 2


@pytest.mark.parametrize(
    ("error", "boundary"),
    [
        (ProcessLost("worker-0 is gone", hint="another comes"), Boundary.WORKER),
        (DeadlineExceeded("worker-0 did not answer", "within a day", hint="see its log"), Boundary.WORKER),
        (EngineBehind("no engine came to step 3", hint="see the engines' logs"), Boundary.PROVIDER),
    ],
)
def test_a_rollout_that_cannot_be_played_again_and_again_is_invalid_and_ends_no_evaluation(
    error: EtudeError, boundary: Boundary
) -> None:
    """A lost worker is no lost learner: raised, it would end the lineage."""
    config, tries = RunConfig(), list[int]()

    def play(spec: RolloutSpec) -> RolloutResult:
        tries.append(spec.attempt)
        raise error

    processes: Any = FakeRunProcesses(config, Limit(1), play=play, judge=lambda _: Kit.graded(1.0))
    _, outcome = asyncio.run(run_once(processes, Kit.spec("heldout000000.0")))
    assert isinstance(outcome, Invalid)
    assert (outcome.boundary, outcome.reason) == (boundary, error.what)
    assert tries == list(range(config.experience.max_attempts))


def test_a_term_that_fails_after_a_long_wait_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "AGAIN_S", 0.01)
    term: Any = SimpleNamespace(name="style", retry_s=0.05)
    calls = 0

    class Processes:
        async def measure(self, terms: Any, summaries: Any, graded: Any) -> Any:
            nonlocal calls
            calls += 1
            await asyncio.sleep(0.1 if calls == 1 else 0)  # longer than `retry_s`
            value = None if calls == 1 else 1.0
            return [[SimpleNamespace(term=Term(name="style", value=value, version="1"), retry=calls == 1)]]

    processes: Any = Processes()
    (one,) = asyncio.run(
        evaluation._measured(processes, [term], [], [Graded.of(1.0, trust=Trust.DATA, reason="all pass")])
    )
    assert (calls, one.values["style"]) == (2, 1.0)
