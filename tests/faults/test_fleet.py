"""Engines from elsewhere in a run: real processes that join, are killed, drained, and have wrong clocks."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import unused_port

from etude.inference.membership import State
from etude.telemetry import read_events

TOKEN = "a-token"
A_YEAR_AGO = "import time\nnow = time.time\ntime.time = lambda: now() - 365 * 86_400\n"


class Home:
    """A run whose engines all come from elsewhere, and those engines."""

    def __init__(self, cli: Any, config: Path, tmp_path: Path) -> None:
        self.cli, self.tmp_path, self.port = cli, tmp_path, unused_port()
        self.path = cli.cwd / "runs" / "r"
        self.log = cli.cwd / "out.log"
        self.config = config
        self.started: list[subprocess.Popen[bytes]] = []
        self.run: subprocess.Popen[str] | None = None

    def begin(self, *sets: str, engines: str = "[]") -> None:
        """`engines`: the run's own."""
        given = [f"fleet.listen=127.0.0.1:{self.port}", f"fleet.engines={engines}", *sets]
        flags = [part for one in given for part in ("--set", one)]
        self.run = self.cli.start("run", self.config, "--name", "r", *flags, log=self.log)

    def engine(self, name: str, *options: str, clock: str = "") -> subprocess.Popen[bytes]:
        """Start one; `clock`: what its interpreter does to its clock before anything else."""
        argv = [sys.executable, "-m", "etude.inference.server", "--name", name, "--poll-s", "0.05", *options]
        argv += ["--register", f"http://127.0.0.1:{self.port}", "--store", str(self.path / "weights")]
        env = {**os.environ, "ETUDE_TOKEN": TOKEN}
        if clock:
            folder = self.tmp_path / f"clock-{name}"
            folder.mkdir()
            (folder / "sitecustomize.py").write_text(clock)
            env["PYTHONPATH"] = f"{folder}:{env.get('PYTHONPATH', '')}"
        with (self.tmp_path / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(argv, env=env, stdout=log, stderr=log)
        self.started.append(process)
        return process

    def states(self, name: str) -> list[State]:
        return [State(e["state"]) for e in self.events("fleet.state") if e["engine"] == name]

    def events(self, kind: str) -> list[dict[str, Any]]:
        with contextlib.suppress(FileNotFoundError):
            return [e for e in read_events(self.path / "events") if e["kind"] == kind]
        return []

    @property
    def step(self) -> int:
        return max((e["step"] for e in self.events("rl.step")), default=0)

    def until(self, condition: Callable[[], object], what: str, deadline_s: float = 120.0) -> None:
        end = time.monotonic() + deadline_s
        while not condition():
            assert self.run is not None
            assert self.run.poll() is None, f"ended before {what}:\n{self.said}"
            assert time.monotonic() < end, f"waited {deadline_s:g} s for {what}:\n{self.said}"
            time.sleep(0.05)

    @property
    def said(self) -> str:
        logs = {path.name: path.read_text()[-1500:] for path in self.tmp_path.glob("*.log")}
        return f"{self.log.read_text()[-4000:]}\n{logs}"

    def drain(self, name: str) -> None:
        done = self.cli("fleet", "drain", f"http://127.0.0.1:{self.port}", name)
        assert done.returncode == 0, done.stderr

    def talk(self) -> str:
        """Who answers a production request through a gateway that shares the run's engines."""
        argv = ("serve", self.path, "--port", "0", "--fleet", f"http://127.0.0.1:{self.port}")
        gateway = self.cli.start(*argv)
        try:
            url = re.search(r"http://[\d.:]+", gateway.stdout.readline())
            assert url is not None
            asked = {"model": "r", "messages": [{"role": "user", "content": "m0 1"}], "max_tokens": 4}
            with urllib.request.urlopen(
                urllib.request.Request(
                    f"{url[0]}/v1/chat/completions",
                    data=json.dumps(asked).encode(),
                    headers={"content-type": "application/json"},
                ),
                timeout=60,
            ) as answer:
                return str(json.load(answer)["choices"][0]["message"]["role"])
        finally:
            gateway.terminate()
            gateway.communicate(timeout=30)

    def production_requests(self) -> int:
        """How many the engines have counted."""
        urls = {e["url"] for e in self.events("fleet.state") if e["state"] == "serving"}
        pages = []
        for url in urls:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/metrics", timeout=10) as page:
                pages.append(page.read().decode())
        return sum(int(n) for page in pages for n in re.findall(r"production_requests_total\{.*\} (\d+)", page))

    def assert_sound(self, *, stop: bool = False) -> None:
        """Ended well, or stopped well: the audit is clean."""
        assert self.run is not None
        if stop:
            self.run.send_signal(signal.SIGINT)
        assert self.run.wait(200) == (130 if stop else 0), self.said
        audit = self.cli("ledger", "audit", self.path)
        assert audit.returncode == 0, audit.stderr
        assert audit.stdout.startswith("0 lost, 0 trained twice, 0 slots leaked;"), audit.stdout

    def close(self) -> None:
        for process in (self.run, *self.started):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()


@pytest.fixture
def home(game: Any, tmp_path: Path, cli_in: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    monkeypatch.setenv("ETUDE_TOKEN", TOKEN)
    made = Home(cli_in(tmp_path), game.config, tmp_path)
    yield made
    made.close()


@pytest.mark.timeout(300)
def test_a_run_on_an_engine_from_elsewhere_whose_clock_is_a_year_off(home: Home) -> None:
    home.begin("rl.steps=2")
    home.engine("far", clock=A_YEAR_AGO)
    home.assert_sound()
    assert home.states("far")[:2] == [State.CATCHING_UP, State.SERVING]
    assert State.LOST not in home.states("far")
    served = {name for e in home.events("rollout") for name in e["engines"]}
    assert served == {"far"}


@pytest.mark.slow
@pytest.mark.timeout(400)
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
    ("given", "said"), [(("--register", "localhost:1"), "is no registry"), ((), "an engine without weights")]
)
def test_an_engine_that_could_have_no_weights_says_so(given: tuple[str, ...], said: str) -> None:
    argv = [sys.executable, "-m", "etude.inference.server", *given]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert said in done.stderr
    assert "hint:" in done.stderr
