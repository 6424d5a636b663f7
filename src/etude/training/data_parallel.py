"""Data-parallel ranks on one machine: spawned processes with one torch thread each, connected by gloo.

For small models, two processes with one thread use two cores better than one process with two threads. A rank that
dies, fails or stalls ends all of them with an error that names it. Ranks end themselves when their parent is gone."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import distributed

from etude.errors import DeadlineExceeded, EtudeError, RunError
from etude.scratch import ScratchDirectory

START_S = 600.0
"""Deadline for all ranks to start: on a busy host `import torch` alone takes minutes."""
Job = TypeVar("Job")
Result = TypeVar("Result")


class RankDied(RunError):
    """A rank ended without a result. Checkpoints of the ranks are kept, so the same call can be repeated."""


class RankGroup(Protocol):
    """The interface of one data-parallel rank to the others. `run_ranks` makes one for each rank."""

    rank: int
    size: int

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replace the tensor by its sum over all ranks, with the same bits on each. A collective call."""

    def heartbeat(self) -> None:
        """Report progress. Call it before each forward pass, since a step may take many of them."""


class SingleProcess:
    """A `RankGroup` of one rank, in the caller's own process."""

    rank, size = 0, 1

    def all_reduce(self, tensor: torch.Tensor) -> None:
        pass

    def heartbeat(self) -> None:
        pass


class _GlooGroup:
    def __init__(self, rank: int, size: int, beats: Any) -> None:
        self.rank, self.size, self._beats = rank, size, beats

    def all_reduce(self, tensor: torch.Tensor) -> None:
        distributed.all_reduce(tensor)

    def heartbeat(self) -> None:
        parent = multiprocessing.parent_process()
        if parent is None or not parent.is_alive():
            sys.exit("the parent is gone")
        self._beats[self.rank] += 1


def run_ranks(
    work: Callable[[RankGroup, Job], Result], job: Job, *, ranks: int, stall_s: float = 120.0
) -> list[Result]:
    """Run `work(group, job)` in `ranks` processes with one torch thread each. Returns their results, by rank.

    A single rank runs in the caller's process. For more, `work`, `job` and the results are pickled. An `EtudeError` of
    a rank is raised here. Raises `RankDied` if a rank dies, and `DeadlineExceeded` if no rank has called `heartbeat`
    for `stall_s` seconds. Starting may take `START_S` seconds in addition."""
    if ranks == 1:
        return [_alone(work, job)]
    context = multiprocessing.get_context("spawn")
    beats = context.Array("q", ranks, lock=False)
    with ScratchDirectory("ranks") as meeting:
        processes: list[SpawnProcess] = []
        answers: list[Connection] = []
        try:
            for rank in range(ranks):
                receive, send = context.Pipe(duplex=False)
                where = (rank, ranks, meeting / "store", stall_s)
                process = context.Process(target=_main, args=(work, job, where, beats, send), daemon=True)
                process.start()
                send.close()
                processes.append(process)
                answers.append(receive)
            return _collect(answers, processes, beats, stall_s)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _alone(work: Callable[[RankGroup, Job], Result], job: Job) -> Result:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return work(SingleProcess(), job)
    finally:
        torch.set_num_threads(threads)


def _collect(answers: list[Connection], processes: list[SpawnProcess], beats: Any, stall_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    last, since = list(beats), time.monotonic()
    while len(results) < len(answers):
        for ready in wait([a for rank, a in enumerate(answers) if rank not in results], timeout=0.5):
            rank = answers.index(ready)  # type: ignore[arg-type]
            results[rank] = _answer(ready, processes)  # type: ignore[arg-type]
        if list(beats) != last:
            last, since = list(beats), time.monotonic()
        elif time.monotonic() - since > (patience := stall_s if all(last) else max(stall_s, START_S)):
            raise DeadlineExceeded(
                f"no rank made a step for {patience:g} s",
                f"steps by rank: {last}",
                hint="see the output of the ranks for errors, then resume the run",
            )
    return [results[rank] for rank in range(len(answers))]


def _answer(ready: Connection, processes: list[SpawnProcess]) -> Any:
    try:
        result, error = ready.recv()
    except EOFError:
        for process in processes:  # the other ranks end soon after
            process.join(timeout=1.0)
        codes = ", ".join(f"{rank}: {p.exitcode}" for rank, p in enumerate(processes) if p.exitcode is not None)
        raise RankDied(
            "a rank died",
            f"exit codes by rank {codes}",
            hint="resume the run; exit code -9 usually means that the host ran out of memory",
        ) from None
    if error is not None:
        raise error
    return result


def _main(
    work: Callable[[RankGroup, Any], Any], job: Any, where: tuple[int, int, Path, float], beats: Any, answer: Connection
) -> None:
    rank, size, store, stall_s = where
    torch.set_num_threads(1)
    # The parent detects a stall first and names it; gloo's own timeout is for a parent that cannot.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine; its name may not resolve
    distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=stall_s + 60)
    )
    try:
        ranks = _GlooGroup(rank, size, beats)
        ranks.heartbeat()  # started
        answer.send((work(ranks, job), None))
    except EtudeError as error:
        answer.send((None, error))
    finally:
        answer.close()
        distributed.destroy_process_group()
