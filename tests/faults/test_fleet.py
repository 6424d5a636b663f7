"""Engines from elsewhere in a run: real processes that join, are killed, drained, and have wrong clocks."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.home import TOKEN, Home

from etude.inference.registry_messages import State

A_YEAR_AGO = "import time\nnow = time.time\ntime.time = lambda: now() - 365 * 86_400\n"


@pytest.fixture
def home(game: Any, tmp_path: Path, cli_in: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    monkeypatch.setenv("ETUDE_TOKEN", TOKEN)
    made = Home(cli_in(tmp_path), game.config, tmp_path)
    yield made
    made.close()


@pytest.mark.timeout(1800)
def test_a_run_on_an_engine_from_elsewhere_whose_clock_is_a_year_off(home: Home) -> None:
    home.begin("rl.steps=2")
    home.engine("far", clock=A_YEAR_AGO)
    home.assert_sound()
    assert home.states("far")[:2] == [State.CATCHING_UP, State.SERVING]
    assert State.LOST not in home.states("far")
    served = {name for e in home.events("rollout") for name in e["engines"]}
    assert served == {"far"}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_engines_are_killed_drained_and_late_and_nothing_is_lost(home: Home) -> None:
    home.begin("rl.steps=1000", "evals.every=1000", "rl.checkpoint_every=50", engines='["reference"]')
    kept, dies, drained = (home.engine(name) for name in ("kept", "dies", "drained"))
    home.engine("spare", "--standby")
    home.until(
        lambda: all(home.states(n)[-1:] == [State.SERVING] for n in ("kept", "dies", "drained")), "three engines"
    )
    home.until(lambda: home.states("spare")[-1:] == [State.STANDBY], "a standby")
    home.until(lambda: home.step >= 1, "step 1")
    assert home.talk() == "assistant"
    assert home.production_requests() == 1
    dies.send_signal(signal.SIGKILL)
    home.until(lambda: home.states("dies")[-1] is State.LOST, "the loss to be seen")
    home.until(lambda: State.SERVING in home.states("spare"), "the standby to stand in")
    assert home.engine("kept", "--max-sequences", "2").wait(60) == 1, "an engine of that name answers"
    home.drain("drained")
    assert drained.wait(60) == 0
    assert home.states("drained")[-2:] == [State.DRAINING, State.LEFT]
    home.engine("dies")
    home.until(lambda: home.states("dies")[-1] is State.SERVING, "the killed one's successor")
    home.until(lambda: home.states("spare")[-1] is State.STANDBY, "the standby to stand by again")
    step = home.step
    home.until(lambda: home.step > step, "another step")
    assert kept.poll() is None
    home.assert_sound(stop=True)
    served = {name for e in home.events("rollout") for name in e["engines"]}
    assert served >= {"engine-0", "kept", "dies", "spare"}
    assert {e["outcome"] for e in home.events("rollout")} == {"graded"}
    assert home.cli("report", home.path).returncode == 0
    assert "<h3>Regions</h3>" in (home.path / "report.html").read_text()


@pytest.mark.parametrize(
    ("given", "said"), [(("--register", "localhost:1"), "is not a registry"), ((), "the engine has no weights")]
)
def test_an_engine_that_could_have_no_weights_says_so(given: tuple[str, ...], said: str) -> None:
    argv = [sys.executable, "-m", "etude.inference.server", *given]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    assert said in done.stderr
    assert "hint:" in done.stderr
