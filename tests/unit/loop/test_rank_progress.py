"""Progress of a learner's ranks: slow ranks are waited for, hanging ranks are named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from etude import progress
from etude.loop import ranks
from etude.loop.ranks import RankProgress
from etude.training.sharded.mesh import LOOPBACK, connect_store, host_store

LIMIT_S = 300.0


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Group:
    """Two ranks of one process. The counter of progress is the process's, so each rank here has one of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock, self.counts, self.at = Clock(), [0, 0], 0
        monkeypatch.setattr(ranks, "time", self.clock)
        monkeypatch.setattr(ranks.progress, "count", lambda: self.counts[self.at])
        monkeypatch.setattr(ranks.progress, "tick", self.made)
        self.store = host_store(LOOPBACK)
        self.ranks = [RankProgress(connect_store(LOOPBACK, self.store.port), rank, 2, LIMIT_S) for rank in range(2)]

    def made(self) -> None:
        self.counts[self.at] += 1

    def pass_s(self, seconds: float, *, made_by: int | None = None, silent: int | None = None) -> list[str]:
        """Let the ranks look once a second; what they found at the end."""
        found: list[str] = []
        for _ in range(int(seconds)):
            self.clock.now += 1.0
            if made_by is not None:
                self.counts[made_by] += 1
            found = []
            for number, rank in enumerate(self.ranks):
                self.at = number
                error = None if self.at == silent else rank.check()
                found += [str(error)] if error else []
        return found


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    return Group(monkeypatch)


def test_a_rank_that_works_for_longer_than_the_limit_is_waited_for(group: Group) -> None:
    group.ranks[1].call = "forward_backward"
    before = group.counts[0]
    assert group.pass_s(10 * LIMIT_S, made_by=1) == []
    assert group.counts[0] >= before + 9 * LIMIT_S, "rank 0 shows the conductor that the group gets on"


def test_a_group_without_progress_ends_after_the_limit_and_says_in_which_call(group: Group) -> None:
    group.ranks[1].call = "forward_backward"
    assert group.pass_s(LIMIT_S - 10) == []
    found = group.pass_s(20)
    assert len(found) == 2
    assert "made no progress for" in found[0]
    assert "in forward_backward" in found[0]
    assert "every rank still reports" in found[0]


def test_a_rank_that_is_stopped_in_a_call_is_named(group: Group) -> None:
    group.ranks[1].call = "publish"
    group.pass_s(2)
    [found] = group.pass_s(LIMIT_S + 5, silent=1)
    assert "learner rank 1 is silent" in found


def test_the_echo_of_anothers_progress_is_none_of_ones_own(group: Group) -> None:
    group.ranks[1].call = "step"
    group.pass_s(5, made_by=1)
    assert group.pass_s(LIMIT_S + 5), "rank 0 counted rank 1's progress up, and rank 1 must not take that for rank 0's"


def test_between_calls_ranks_may_wait_as_long_as_it_takes(group: Group) -> None:
    assert group.pass_s(5 * LIMIT_S) == []


def test_a_report_that_is_none_is_passed_over(group: Group) -> None:
    group.pass_s(2)
    group.store.set("progress/1", "half a rep")
    group.at = 0
    assert group.ranks[0].check() is None


def test_progress_is_the_processs_own_counter() -> None:
    before = progress.count()
    progress.tick()
    assert progress.count() > before


HOST = """
import sys, time
from etude.training.sharded.mesh import LOOPBACK, host_store
store = host_store(LOOPBACK)
print(store.port, flush=True)
time.sleep(60)
"""
RANK = """
import sys, time
from etude.loop import ranks
from etude.training.sharded.mesh import LOOPBACK, connect_store
ranks.REPORT_S = 0.05
ranks.RankProgress(connect_store(LOOPBACK, int(sys.argv[1])), 1, 2, 2.0).watch(ranks.exit_with_error)
print("watching", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(("ending", "named"), [(signal.SIGSTOP, "does not answer"), (signal.SIGKILL, "")])
def test_a_rank_ends_when_the_store_is_silent_or_gone(ending: signal.Signals, named: str) -> None:
    with subprocess.Popen([sys.executable, "-c", HOST], stdout=subprocess.PIPE, text=True) as host:
        assert host.stdout is not None
        port = host.stdout.readline().strip()
        command = [sys.executable, "-c", RANK, port]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as rank:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "watching\n"
            host.send_signal(ending)
            try:
                _, error = rank.communicate(timeout=300)
            finally:
                os.kill(host.pid, signal.SIGKILL)
                rank.kill()
    assert rank.returncode == ranks.EXIT_RESTART
    assert named in error
    assert ("the store of the learner's ranks" in error) == bool(named)
