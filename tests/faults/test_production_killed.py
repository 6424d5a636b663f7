"""kill -9 of the endless loop, its learner, its gate's evaluation and the gateway, at random moments over cycles."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.production_users import ServedLoop

from etude.errors import Exit

pytestmark = pytest.mark.timeout(3600)


@pytest.fixture
def loop(tmp_path: Path, game: Any, cli_in: Callable[[Path], Any]) -> Iterator[ServedLoop]:
    made = ServedLoop(tmp_path, game.config, game.start, cli_in(tmp_path))
    yield made
    made.close()


@pytest.fixture
def served(tmp_path: Path, game: Any, cli_in: Callable[[Path], Any]) -> Iterator[ServedLoop]:
    made = ServedLoop(tmp_path, game.config, game.start, cli_in(tmp_path), gateway=True)
    yield made
    made.close()


def test_a_loop_that_is_killed_at_random_goes_on_and_trains_on_no_episode_twice(served: ServedLoop) -> None:
    _killed(served, ["loop", "gateway", "learner"], longest_s=12.0, cycles=1)


@pytest.mark.slow
def test_a_loop_that_is_killed_over_two_windows_also_in_its_gate_goes_on(served: ServedLoop) -> None:
    _killed(served, ["loop", "gateway", "learner", "gateway", "gate"], longest_s=30.0, cycles=2)


def _killed(served: ServedLoop, targets: list[str], *, longest_s: float, cycles: int) -> None:
    draw, following = random.Random(1), iter(targets)
    delays = [draw.uniform(2.0, longest_s) for _ in targets]
    assert len(served.killed_at(delays, lambda: next(following), cycles=cycles)) == len(targets)
    facts = served.facts()
    assert min(facts["answers"], facts["signals_of_the_gateway"]) > 0, facts
    assert facts["windows_ended"] >= cycles
    bad = {name: facts[name] for name in facts if name.startswith("bad_") and facts[name]}
    assert not bad, facts


def test_a_second_loop_is_refused_and_ctrl_c_ends_the_first(loop: ServedLoop) -> None:
    first = loop.start(cycles=1)
    end = time.monotonic() + 600
    while "window 1: 0 of 8 episodes settled" not in loop.log.read_text():
        assert first.poll() is None, loop.log.read_text()
        assert time.monotonic() < end, loop.log.read_text()
        time.sleep(0.05)
    second = loop.cli("learn", *loop.arguments(cycles=1))
    assert second.returncode == Exit.OTHER_RUN, second.stderr
    assert "is in use" in second.stderr
    assert f"process {first.pid} runs it" in second.stderr
    first.send_signal(signal.SIGINT)
    assert first.wait(600) == Exit.INTERRUPTED, loop.log.read_text()
    assert loop.log.read_text().endswith("stopped; the same command goes on\n")
