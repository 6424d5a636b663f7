"""Ranks on one machine: spawned processes with one torch thread each, in torch's default process group.

For small models, two processes with one thread use two cores better than one process with two threads. A rank that
dies, fails or makes no progress (`etude.progress`) ends all of them with an error that names it. Ranks end themselves
when their parent is gone."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import distributed

from etude import progress
from etude.errors import DeadlineExceeded, EtudeError, RunError
from etude.scratch import ScratchDirectory

START_S = 600.0
"""Deadline for all ranks to start: on a busy host `import torch` alone takes minutes."""
REPORT_S = 0.5
Job = TypeVar("Job")
Result = TypeVar("Result")


class RankDied(RunError):
    """A rank ended without a result. Checkpoints of the ranks are kept, so the same call can be repeated."""


@dataclass(frozen=True)
class RankGroup:
    """One rank's number, and how many there are. `run_ranks` makes one for each rank."""

    rank: int
    size: int


def run_ranks(
    work: Callable[[RankGroup, Job], Result], job: Job, *, ranks: int, stall_s: float = 120.0
) -> list[Result]:
    """Run `work(group, job)` in `ranks` processes with one torch thread each. Returns their results, by rank.

    A single rank runs in the caller's process. For more, `work`, `job` and the results are pickled. An `EtudeError` of
    a rank is raised here. Raises `RankDied` when a rank dies, and `DeadlineExceeded` when no rank has made progress
    for `stall_s` seconds after all have started, which may take `START_S`."""
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
        return work(RankGroup(0, 1), job)
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
                f"no rank made progress for {patience:g} s", f"steps by rank: {last}", hint="see the ranks' output"
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
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    distributed.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=stall_s + 60)
    )
    try:
        distributed.all_reduce(torch.zeros(1))  # or one could end while another still connects to it
        beats[rank] = 1  # started
        threading.Thread(target=_report, args=(rank, beats), name="progress", daemon=True).start()
        answer.send((work(RankGroup(rank, size), job), None))
    except EtudeError as error:
        answer.send((None, error))
    finally:
        answer.close()
        distributed.destroy_process_group()


def _report(rank: int, beats: Any) -> None:
    """Report this process's progress to the parent, and end the process when the parent is gone."""
    parent, first = multiprocessing.parent_process(), progress.count()
    while parent is not None and parent.is_alive():
        beats[rank] = 1 + progress.count() - first
        time.sleep(REPORT_S)
    os._exit(1)
