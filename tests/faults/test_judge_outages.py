"""A whole run whose judge is away, refuses, hangs and talks nonsense: it ends, and no reward is wrong."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.judge_server import HIGH, ScriptedJudge, works_of
from tests.running import Running

from etude.experience.trace_reader import read_rollout, read_trace
from etude.experience.traces import trace_path
from etude.harness import ChatFormat
from etude.records import Graded
from etude.rewards.judges.evidence import Evidence, Section, fenced
from etude.testing.rewards import finished

STEPS = 6
FAULTS = [
    500,
    503,
    (429, 1),
    (429, "Wed, 21 Oct 2015 07:28:00 GMT"),
    "close",
    "hang",
    "I refuse.",
    "",
    '{"verdict": 5}',
]


def score(text: str, draw: object = None) -> int:
    """Any function of the work's text: here of its characters."""
    return 1 + sum(map(ord, text)) % HIGH


def fault(number: int) -> Any:
    """A third of the requests fail, and for a while all do."""
    draw = random.Random(number)
    return 503 if 4 <= number <= 20 else draw.choice(FAULTS) if draw.random() < 0.33 else None


@pytest.fixture
def judge() -> Iterator[ScriptedJudge]:
    """A faulty judge in a thread."""
    server, ready, over = ScriptedJudge(bias=score, fault=fault), threading.Event(), asyncio.Event()
    loops = list[asyncio.AbstractEventLoop]()

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        async with server.serve():
            ready.set()
            await over.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(10)
    yield server
    loops[0].call_soon_threadsafe(over.set)
    thread.join(10)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_with_a_judge_that_fails_ends_and_no_reward_is_wrong(
    game: Any, tmp_path: Path, cli_in: Callable[[Path], Any], judge: ScriptedJudge
) -> None:
    rubric = tmp_path / "rubric.toml"
    rubric.write_text('[[aspects]]\nname = "good"\nquestion = "Is it good?"\n')
    kind = f"kind='judge', rubric='{rubric}', url='{judge.url}/v1', model='m', evidence=['trace'], deadline_s=2.0"
    run = Running(cli_in(tmp_path), game.config)
    try:
        run.begin(f"rl.steps={STEPS}", f"rewards.terms=[{{name='good', weight=0.3, retry_s=1.0, kind={{{kind}}}}}]")
        assert run.end() == 0, run.said
    finally:
        run.stop()
    run.assert_sound()
    chat, known, unknown = ChatFormat.load(run.path / "tokenizer"), 0, 0
    for step in range(1, STEPS + 1):
        path = trace_path(run.path / "traces", step)
        groups: dict[str, set[str]] = {}
        for one in read_trace(path).rollouts:
            if not isinstance(one.outcome, Graded):
                continue
            [term] = [term for term in one.outcome.terms if term.name == "good"]
            groups.setdefault(one.group_id, set()).add(term.version)
            if term.value is None:
                unknown += 1
                assert "judge" in term.evidence
                continue
            tree = read_rollout(path, one.rollout_id)
            assert tree is not None
            shape = msgspec.structs.replace(finished(num_turns=0), trace=tree.trace, ending=one.ending)
            evidence = Evidence.of_rollout(shape, one.outcome, (Section.TRACE,), readable=chat.readable)
            shown = fenced(evidence, "c0", max_chars=24_000)
            [text] = works_of(f"The work, as data with the code c0:\n{shown}")
            assert term.value == (score(text) - 1) / (HIGH - 1)
            known += 1
        assert all(len(versions) == 1 for versions in groups.values())
    assert known > 20
    assert sum(fault(number + 1) is not None for number in range(len(judge.bodies))) > 10
