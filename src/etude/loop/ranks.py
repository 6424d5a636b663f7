"""Rank 0's control of a learner's other ranks. Rank 0 is the conductor's child; it starts the local ranks, which die
with it. Ranks on other machines connect to its listener (`loop.rank_hosts`).

Rank 0 broadcasts the calls that concern all ranks (`Leader.broadcast`), and each rank makes them on its own
`LearnerProcess`. Calls go through the TCP store of rank 0, since ranks may wait for minutes between batches, which a
collective must not. They are signed with a secret that ranks get when they start, so that a stranger who reaches the
store can do nothing.

A rank that ends takes rank 0 with it, with an error that names the rank. To find ranks that hang, every rank reports
its progress to the store (`RankProgress`). When no rank has made progress for too long, all end with an error that
names the silent one. Collectives themselves time out after a day, since another rank's share of a batch or a publish
may take many minutes. In both cases the conductor sees a learner that died; its successor starts new ranks from the
last checkpoint. Rank 0 takes no call after a loss, so no part of a group continues to train."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

import msgspec
import torch
from torch._C._distributed_c10d import TCPStore

from etude import progress
from etude.errors import EtudeError
from etude.loop.config import RunConfig
from etude.loop.processes import EXIT_RESTART
from etude.loop.rank_hosts import RankListener, describe_exit, format_address, new_secret, sign, start_rank
from etude.run import RunFolder
from etude.telemetry import Telemetry
from etude.training.sharded import ShardedProcessGroup, join
from etude.training.sharded.mesh import LOOPBACK, connect_store, host_store

PATIENCE = 10
"""All ranks together may make no progress for this multiple of `fleet.hung_s`."""
COLLECTIVE_S = 86_400.0
REPORT_S = 1.0
NUM_KEPT_CALLS = 8
"""Keys of calls are deleted after so many further calls. By then every rank has read them: all calls except
`finish_publish` and `defend` end with every rank, and at most two of these come in a row."""
MET = "met"
"""Key that is set when all ranks have connected, to what they are: "learner" or "mid-training"."""


class RankProgress:
    """One rank's view of the progress of all `ranks`, from reports in the TCP store. It has its own connection to the
    store.

    A report has the rank's progress count (`etude.progress`), the number of its reports, and the call that it makes.
    Rank 0 counts the progress of other ranks as its own. So the conductor, which sees only rank 0, does not consider
    rank 0 hung while it waits for the others. The group hangs if no rank makes progress for `limit_s` seconds during a
    call."""

    def __init__(self, store: TCPStore, rank: int, ranks: int, limit_s: float) -> None:
        self._store, self._rank, self._ranks, self._limit_s = store, rank, ranks, limit_s
        self.call = ""
        """The call that this rank is in; empty between calls."""
        self._num_reports = self._num_echoed = self._num_checks = 0
        self._seen: dict[int, tuple[int, int, str]] = {}
        self._moved = self._began = time.monotonic()
        self._reported_at: dict[int, float] = {}  # time of each rank's last new report

    def check(self) -> EtudeError | None:
        """Write this rank's report, read those of the others, and return an error if the group hangs.

        Raises `RuntimeError` when the store is gone."""
        now, moved = time.monotonic(), False
        self._num_reports += 1
        mine = (progress.count() - self._num_echoed, self._num_reports, self.call)
        self._store.set(f"progress/{self._rank}", msgspec.json.encode(mine).decode())
        for rank in range(self._ranks):
            found = mine if rank == self._rank else self._report_of(rank)
            if found is None:
                continue
            before = self._seen.get(rank)
            self._seen[rank] = found
            if before is None or found[1] != before[1]:
                self._reported_at[rank] = now
            if before is None or (found[0], found[2]) != (before[0], before[2]):
                moved = True
                if self._rank == 0 and rank != 0:
                    self._num_echoed += 1
                    progress.tick()
        if moved:
            self._moved = now
        self._num_checks += 1
        if now - self._moved < self._limit_s or not any(call for _, _, call in self._seen.values()):
            return None
        return self._hung(now)

    def _report_of(self, rank: int) -> tuple[int, int, str] | None:
        if not self._store.check([f"progress/{rank}"]):
            return None
        try:
            return msgspec.json.decode(self._store.get(f"progress/{rank}"), type=tuple[int, int, str])
        except msgspec.DecodeError:
            return None

    def _hung(self, now: float) -> EtudeError:
        quiet_s = max(5 * REPORT_S, self._limit_s / 2)
        silent = [rank for rank in range(self._ranks) if now - self._reported_at.get(rank, self._began) > quiet_s]
        calls = sorted({call for _, _, call in self._seen.values() if call})
        named = f"learner rank {', '.join(map(str, silent))} is silent" if silent else "every rank still reports"
        return EtudeError(
            f"the learner's ranks made no progress for {now - self._moved:.0f} s in {', '.join(calls)}",
            f"{named}; the limit is {PATIENCE} x fleet.hung_s",
            hint="they restart from the last checkpoint; raise fleet.hung_s if one row or tensor takes this long",
        )

    def watch(self, lost: Callable[[EtudeError], NoReturn]) -> None:
        """Call `check` once a second in a background thread, and `lost` with the error that it returns.

        A second thread calls `lost` when the store does not answer, since torch's `TCPStore.check` has no timeout."""

        def work() -> None:
            while True:
                try:
                    error = self.check()
                except torch.distributed.DistNetworkError:
                    os._exit(EXIT_RESTART)  # rank 0 has gone
                except RuntimeError as failure:
                    error = _no_answer(str(failure).split("\n")[0])
                if error is not None:
                    lost(error)
                time.sleep(REPORT_S)

        def guard() -> None:
            looks, waited_s = -1, 0.0  # counted in sleeps: time in which this process was stopped does not count
            while waited_s < self._limit_s:
                waited_s = 0.0 if self._num_checks != looks else waited_s + REPORT_S
                looks = self._num_checks
                time.sleep(REPORT_S)
            lost(_no_answer(f"no answer for {waited_s:.0f} s; the limit is {PATIENCE} x fleet.hung_s"))

        threading.Thread(target=work, name="progress", daemon=True).start()
        threading.Thread(target=guard, name="progress-guard", daemon=True).start()


def _no_answer(facts: str) -> EtudeError:
    hint = "they restart from the last checkpoint; check that the machines of the ranks can reach that of rank 0"
    return EtudeError("the store of the learner's ranks does not answer", facts, hint=hint)


class Leader:
    """Rank 0's control of the other ranks: starts the local ones and sends all ranks their calls.

    Create it in the main thread: the kernel kills local ranks when the thread that started them ends. `away` of the
    ranks connect from other machines, to the address `at` of this one. The ranks make the calls of `program`: the
    methods of `LearnerProcess` ("learner"), or of `loop.mid_training.MidTraining` ("mid-training")."""

    def __init__(
        self,
        run: RunFolder,
        config: RunConfig,
        telemetry: Telemetry,
        *,
        program: str = "learner",
        at: str = "",
        away: int = 0,
    ) -> None:
        self._program = program
        self._config, self._telemetry, self._secret = config, telemetry, new_secret()
        self._here, self._calls = config.learner.ranks - away, 0
        self._group: ShardedProcessGroup | None = None
        self._progress: RankProgress | None = None
        host = at or LOOPBACK
        self._listener = RankListener(run.path, host, away, self._secret, self.lost) if away else None
        self._store = host_store(host)
        self._at = format_address(host, self._store.port)
        for rank in range(1, self._here):
            started = start_rank(run.path, rank, self._at, self._secret, local=rank)
            telemetry.event("process", name=f"learner rank {rank}", state="start", pid=started.pid)
            threading.Thread(target=self._watch, args=(rank, started), daemon=True).start()

    def join(self) -> ShardedProcessGroup:
        """Wait for all ranks and form the process group; later calls return the same group.

        Raises `RunError` when ranks do not connect in time."""
        if self._group is None:
            if self._listener is not None:
                self._wait_for_ranks(self._listener)
            self._store.set(MET, self._program)
            ranks, limit_s = self._config.learner.ranks, progress_limit_s(self._config)
            self._progress = RankProgress(connect_store(self._store.host, self._store.port), 0, ranks, limit_s)
            self._progress.watch(self.lost)
            self._group = join_group(self._config, store=self._store, rank=0)
        return self._group

    def _wait_for_ranks(self, listener: RankListener) -> None:
        def waits(reason: str) -> None:
            self._telemetry.event("process", name="learner ranks", state="waiting", reason=reason)

        for rank, host in listener.wait_for_ranks(self._here, self._at, waits).items():
            self._telemetry.event("process", name=f"learner rank {rank}", state="start", host=host)
        self._telemetry.event("process", name="learner ranks", state="ready")

    @contextlib.contextmanager
    def call(self, method: str, *arguments: object) -> Iterator[None]:
        """Have all other ranks call a method of `LearnerProcess`, while this rank calls it in the block."""
        self.broadcast(method, *arguments)
        assert self._progress is not None, "join has been called"
        self._progress.call = method
        try:
            yield
        finally:
            self._progress.call = ""

    def broadcast(self, method: str, *arguments: object) -> None:
        """Have all other ranks call a method of `LearnerProcess`. Does not wait for them."""
        self.join()
        key = f"call/{self._calls}"
        call = pickle.dumps((method, arguments))
        self._store.set(key, sign(self._secret, key.encode() + call) + call)  # type: ignore[arg-type]  # bytes do
        self._calls += 1
        self._store.delete_key(f"call/{self._calls - NUM_KEPT_CALLS}")

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        facts = describe_exit(process.wait())
        self.lost(
            EtudeError(f"rank {rank} of the learner ended", facts, hint="see the end of this log for its output"), rank
        )

    def lost(self, error: EtudeError, rank: int | None = None) -> NoReturn:
        """Exit this process with an error, because the rest of the group cannot continue.

        `rank` is the rank that was lost; None if it is not known."""
        name = "learner" if rank is None else f"learner rank {rank}"
        self._telemetry.event("process", name=name, state="lost", reason=f"{error.what}: {error.facts}")
        exit_with_error(error)


def progress_limit_s(config: RunConfig) -> float:
    """Return the hang timeout of the learner's ranks, in seconds.

    The group counts as hung if, during a call of `LearnerProcess` or the start, no rank makes progress for this time.
    """
    return PATIENCE * config.fleet.hung_s


def join_group(config: RunConfig, *, store: TCPStore, rank: int) -> ShardedProcessGroup:
    """Join the learner's process group as rank `rank`, through the TCP store."""
    return ShardedProcessGroup(join(config.learner, store=store, rank=rank, deadline_s=COLLECTIVE_S))


def exit_with_error(error: EtudeError) -> NoReturn:
    """Print the error and exit at once, since threads may hang in a collective."""
    print(f"error: {error}", file=sys.stderr, flush=True)
    os._exit(EXIT_RESTART)
