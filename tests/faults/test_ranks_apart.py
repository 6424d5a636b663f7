"""A learner whose ranks are on two hosts: the bytes of one host's, and what happens when one of them is lost.

Hosts are network namespaces (`tests/two_hosts.py`).
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.learner import sharded_ranks as ranked
from benchmarks.weights.regions_network import module_env
from tests.ray_nodes import ray_nodes
from tests.running import Running, event_of
from tests.two_hosts import AWAY, HOME, Hosts, two_hosts
from tests.unit.training.test_sharded import SAVED, jobs_in

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
RANK = """
import os, pickle, sys
import torch
from benchmarks.learner import sharded_ranks
from etude.training.data_parallel import RankGroup

torch.set_num_threads(1)
told = sharded_ranks.together(RankGroup(0, 1), pickle.load(open("jobs", "rb")))
pickle.dump(told, open(f"told.{os.environ['RANK']}", "wb"))
"""


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with two_hosts() as made:
        yield made


def test_ranks_on_two_hosts_publish_the_bytes_of_one_process(hosts: Hosts, tmp_path: Path) -> None:
    """As torchrun starts them, on each host by itself."""
    job = replace(jobs_in(tmp_path)[SAVED], save=None)
    alone = ranked.alone(replace(job, store=tmp_path / "one"))
    (tmp_path / "jobs").write_bytes(pickle.dumps([job]))
    (tmp_path / "rank.py").write_text(RANK)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    torchrun += [f"--master-addr={HOME}", "--master-port=29500", "rank.py"]
    started = []
    for number, host in enumerate((hosts.home, hosts.away)):
        argv = [*torchrun[:-1], f"--node-rank={number}", torchrun[-1]]
        with (tmp_path / f"log.{number}").open("w") as log:
            started.append(host.spawn(argv, module_env(), cwd=tmp_path, stdout=log, stderr=log))
    for number, process in enumerate(started):
        assert process.wait(120) == 0, (tmp_path / f"log.{number}").read_text()
        [told] = pickle.loads((tmp_path / f"told.{number}").read_bytes())
        assert told == alone


@pytest.fixture
def running(game: Any, tmp_path: Path, cli_in: Callable[[Path], Any], hosts: Hosts) -> Iterator[Running]:
    """A run whose conductor and rank 0 are at home."""
    run = Running(replace(cli_in(tmp_path), before=hosts.within(hosts.home)), game.config)
    yield run
    run.stop()


@pytest.fixture
def bringing(running: Running, hosts: Hosts, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Who brings the other rank, from the other host; started before the run is."""
    running.path.parent.mkdir()
    argv = [sys.executable, "-m", "etude.loop.rank_hosts", "--run", str(running.path), "--count", "1"]
    with (tmp_path / "away.log").open("w") as log:
        process = hosts.away.spawn(argv, module_env(), cwd=tmp_path, stdout=log, stderr=log)
    yield process
    process.kill()
    process.wait()


def told(run: Running, name: str) -> list[dict[str, Any]]:
    """What the learner said of its ranks."""
    path = run.path / "events" / "learner.jsonl"
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [event for event in map(event_of, lines) if event.get("kind") == "process" and event["name"] == name]


def test_ray_puts_ranks_on_two_hosts_where_none_has_room_for_both(
    game: Any, tmp_path: Path, cli_in: Callable[[Path], Any], hosts: Hosts
) -> None:
    home, away = hosts.within(hosts.home), hosts.within(hosts.away)
    with ray_nodes(*home, address=HOME) as nodes:
        nodes.add("home", *home, address=HOME, learner=1, engine=1, worker=1, grader=1)
        nodes.add("away", *away, address=AWAY, learner=1)
        cli = cli_in(tmp_path)
        run = Running(replace(cli, env={**cli.env, **nodes.env}, before=home), game.config)
        try:
            run.begin("rl.steps=4", "learner.ranks=2", "fleet.engines=['reference']", on=nodes.address)
            assert run.end() == 0, run.said
            run.assert_sound()
            assert any(address in told(run, "learner rank 1")[-1]["host"] for address in (HOME, AWAY))
            other = AWAY if HOME in told(run, "learner rank 1")[-1]["host"] else HOME
            assert other in (run.path / "logs" / "learner.address").read_text(), "rank 0 is met where the other is not"
            redone = run.cli("replay", run.path, "4", "--json")
            assert redone.returncode == 0, redone.stdout + redone.stderr
        finally:
            run.stop()


def test_a_run_continues_each_time_that_a_rank_of_another_host_is_lost(
    running: Running, hosts: Hosts, bringing: subprocess.Popen[str], tmp_path: Path
) -> None:
    """Killed, then cut off with its host; a stranger who knocks in between is not let in."""
    two = ("learner.ranks=2", "learner.expert_parallel=2", "fleet.ranks_away=1", f"fleet.ranks_at='{HOME}'")
    running.begin("rl.steps=8", *two).at_step(3)
    assert AWAY in told(running, "learner rank 1")[-1]["host"]
    [rank] = subprocess.check_output(["pgrep", "-P", str(bringing.pid)], text=True).split()
    os.kill(int(rank), signal.SIGKILL)
    running.until(lambda: len(told(running, "learner rank 1")) == 3, "the rank to come again")
    running.at_step(6)
    hosts.cut()
    lost = "its connection ended"
    running.until(lambda: any(lost in e.get("reason", "") for e in told(running, "learner rank 1")), "it to be missed")
    hosts.cut(whole=True)
    assert running.end() == 0, running.said
    running.assert_sound()
    first, second = [e["reason"] for e in told(running, "learner rank 1") if e["state"] == "lost"]
    assert f"({AWAY}), ended: exit code -9" in first
    assert f"({AWAY}), ended: {lost}" in second
    assert bringing.wait(30) == 0, (tmp_path / "away.log").read_text()
    redone = running.cli("replay", running.path, "8", "--json")
    assert redone.returncode == 0, redone.stdout + redone.stderr
