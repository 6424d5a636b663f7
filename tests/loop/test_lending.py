"""A run lends engines to evaluations: they play one version, training goes on and computes the same, and whatever
becomes of an evaluation, the engines come back."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from etude.stores import DirectoryStore
from etude.weights import lineage

pytestmark = pytest.mark.timeout(1800)
SETS = (
    "--set",
    "experience.max_lag=0",
    "--set",
    "rl.steps=400",
    "--set",
    "evals.every=400",
    "--set",
    "rl.checkpoint_every=400",
    "--set",
    "fleet.hung_s=300",  # no process is lost
)


def events(run: Path, kind: str, **fields: object) -> list[dict[str, Any]]:
    path = run / "events" / "conductor.jsonl"
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [e for e in found if e["kind"] == kind and all(e.get(k) == v for k, v in fields.items())]


def wait_for(run: Path, process: subprocess.Popen[str], kind: str, count: int = 1, **fields: object) -> dict[str, Any]:
    """The event number `count` of this kind."""
    end = time.monotonic() + 900
    while len(found := events(run, kind, **fields)) < count:
        assert process.poll() is None, "the run has ended"
        assert time.monotonic() < end, f"no {kind} {fields}"
        time.sleep(0.1)
    return found[count - 1]


@pytest.fixture
def started(
    game: Any, tmp_path: Path, cli_in: Callable[[Path], Any]
) -> Iterator[Callable[[str], tuple[Any, Path, Any]]]:
    """Starts a run of the game: the command line in its folder, the run, its process."""
    processes = list[Any]()

    def start(name: str) -> tuple[Any, Path, Any]:
        (tmp_path / name).mkdir()
        cli = cli_in(tmp_path / name)
        processes.append(cli.start("run", game.config, "--name", "r", *SETS, log=tmp_path / name / "log"))
        return cli, tmp_path / name / "runs" / "r", processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()


def stopped(run: Path, process: Any) -> list[str]:
    """Stop a run. Digests of its versions."""
    process.send_signal(signal.SIGINT)
    process.wait(600)
    return [m.version.digest for m in lineage(DirectoryStore(run / "weights"), "policy")]


def test_evaluations_on_a_runs_engines_change_no_bit_of_its_training_and_always_give_them_back(started: Any) -> None:
    cli, run, process = started("lent")
    wait_for(run, process, "rl.step")
    play = ("eval", "own", "--run", "r", "--tasks", "12", "--tries", "4", "--out", "out")

    told = cli(*play)
    assert told.returncode == 0, told.stderr
    result = json.loads(told.stdout)
    lent, back = (
        wait_for(run, process, "fleet.lease", state="lent"),
        wait_for(run, process, "fleet.lease", state="returned"),
    )
    assert (lent["engines"], back["reason"]) == (["engine-1"], "the evaluation has ended")
    assert result["version"] == lent["version"], "one version, that of the lease"
    assert result["result"]["invalid"] == {}
    assert result["label"] == f"r@running-{result['result']['step']:06d}"
    assert any(lent["t"] < e["t"] < back["t"] for e in events(run, "rl.step")), "training went on meanwhile"
    adopted = [json.loads(line) for line in (run / "events" / "engine-1.jsonl").read_text().splitlines()]
    assert not any(e["kind"] == "engine.adopt" and lent["t"] < e["t"] < back["t"] for e in adopted), "and held it"

    late = cli(*play, "--seconds", "1", "--tries", "64")
    assert late.returncode != 0
    assert "the run took its engines back before the evaluation ended: the time of the lease is over" in late.stderr

    killed = cli.start(*play, "--tries", "64")
    wait_for(run, process, "fleet.lease", count=3, state="lent")
    killed.kill()
    assert wait_for(run, process, "fleet.lease", count=3, state="returned")["reason"] == "the evaluation has ended"
    killed.communicate()

    num_steps = len(events(run, "rl.step"))
    wait_for(run, process, "rl.step", count=num_steps + 2)
    assert not events(run, "process", state="restart")
    versions = stopped(run, process)

    _, alone, other = started("alone")
    wait_for(alone, other, "rl.step", count=num_steps)
    assert stopped(alone, other)[:num_steps] == versions[:num_steps]
    assert len({*versions[:num_steps]}) > num_steps // 2, "a step whose groups have equal rewards changes nothing"
