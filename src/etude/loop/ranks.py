"""The ranks of a run's learner: rank 0 is the conductor's child and starts the others, which die with it. Those of
other machines come to its door (`loop.rank_hosts`).

Rank 0 tells the others every call that is theirs, too (`Leader.tell`); each makes it on a `Learning` of its own. Calls
go through rank 0's store, since ranks may wait for minutes between batches, and no collective may. They are sealed with
a secret that ranks are given as they start: a stranger who reaches the store has nothing done.

A rank that ends takes rank 0 with it, at once and by name. For one that hangs, every rank reports its progress to the
store (`Progress`): when no rank has made any for long enough, all end, and the silent one is named. Collectives
themselves wait for a day: another rank's share of a batch, or a publish, may take many minutes. Either way the
conductor sees a learner that died: its successor starts ranks anew from the last checkpoint. Rank 0 takes no call after
that, so no half of a group trains on.
"""

from __future__ import annotations

import argparse
import contextlib
import hmac
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec
import torch
from torch._C._distributed_c10d import TCPStore

from etude import progress
from etude.errors import EtudeError
from etude.loop.config import RunConfig, read_config
from etude.loop.processes import AGAIN
from etude.loop.rank_hosts import Door, described, joined, new_secret, seal, split, start_rank
from etude.numerics.parallel import RankLost
from etude.run import RunFolder
from etude.telemetry import Telemetry
from etude.training.sharded import ShardedProcessGroup, join
from etude.training.sharded.mesh import LOOPBACK, connect_store, host_store

if TYPE_CHECKING:
    from etude.loop.learning import Learning

PATIENCE = 10
"""All ranks together may be without progress for so many times what a silent process may."""
COLLECTIVE_S = 86_400.0
REPORT_S = 1.0
TAKEN = 8
"""So many calls ago every rank has taken its own: all but `settle` and `defend` end with every rank, and of those at
most two come together."""
POLL = timedelta(seconds=30)
MET = "met"  # all have come
_SEAL_BYTES = len(seal(b"", b""))


class Progress:
    """One rank's view of the progress of all ranks, by reports in the store. Keeps a connection of its own.

    A report says how much this rank has done (`etude.progress`), how often it has reported, and which call it is in. On
    rank 0 the progress of others counts as its own, so that the conductor, which sees rank 0 alone, does not take it
    for hung while it waits for them.
    """

    def __init__(self, store: TCPStore, rank: int, ranks: int, limit_s: float) -> None:
        self._store, self._rank, self._ranks, self._limit_s = store, rank, ranks, limit_s
        self.call = ""
        """The call that this rank is in; empty between calls."""
        self._num_reports = self._num_echoed = self._num_looks = 0
        self._seen: dict[int, tuple[int, int, str]] = {}
        self._moved = self._began = time.monotonic()
        self._heard: dict[int, float] = {}  # when a rank's last report was new

    def look(self) -> EtudeError | None:
        """Report, read the others' reports, and return the error of a group that hangs. Raises `RuntimeError` when the
        store is gone."""
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
                self._heard[rank] = now
            if before is None or (found[0], found[2]) != (before[0], before[2]):
                moved = True
                if self._rank == 0 and rank != 0:
                    self._num_echoed += 1
                    progress.made()
        if moved:
            self._moved = now
        self._num_looks += 1
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
        silent = [rank for rank in range(self._ranks) if now - self._heard.get(rank, self._began) > quiet_s]
        calls = sorted({call for _, _, call in self._seen.values() if call})
        named = f"learner rank {', '.join(map(str, silent))} reports nothing" if silent else "every rank still reports"
        return EtudeError(
            f"the learner's ranks made no progress for {now - self._moved:.0f} s in {', '.join(calls)}",
            f"{named}; the limit is {PATIENCE} x fleet.hung_s",
            hint="they start again from the last checkpoint; raise fleet.hung_s if one row or tensor takes this long",
        )

    def watch(self, lost: Callable[[EtudeError], NoReturn]) -> None:
        """Look once a second, in a thread of its own. A second thread sees to it that the store answers: torch's
        `TCPStore.check` has no deadline."""

        def work() -> None:
            while True:
                try:
                    error = self.look()
                except torch.distributed.DistNetworkError:
                    os._exit(AGAIN)  # rank 0 has gone
                except RuntimeError as failure:
                    error = _no_answer(str(failure).split("\n")[0])
                if error is not None:
                    lost(error)
                time.sleep(REPORT_S)

        def guard() -> None:
            looks, waited_s = -1, 0.0  # by naps: a process that was stopped has not waited
            while waited_s < self._limit_s:
                waited_s = 0.0 if self._num_looks != looks else waited_s + REPORT_S
                looks = self._num_looks
                time.sleep(REPORT_S)
            lost(_no_answer(f"it has been asked for {waited_s:.0f} s; the limit is {PATIENCE} x fleet.hung_s"))

        threading.Thread(target=work, name="progress", daemon=True).start()
        threading.Thread(target=guard, name="progress-guard", daemon=True).start()


def _no_answer(facts: str) -> EtudeError:
    hint = "they start again from the last checkpoint; see whether the machines of the ranks can reach rank 0's"
    return EtudeError("the store of the learner's ranks does not answer", facts, hint=hint)


class Leader:
    """Rank 0's control of the other ranks: it starts the local ones and sends every rank its calls.

    Make it in the main thread: the kernel kills local ranks when the thread that started them ends. `away` ranks
    connect from other machines, to the address `at`.
    """

    def __init__(self, run: RunFolder, config: RunConfig, telemetry: Telemetry, *, at: str = "", away: int = 0) -> None:
        self._config, self._telemetry, self._secret = config, telemetry, new_secret()
        self._here, self._calls = config.learner.ranks - away, 0
        self._group: ShardedProcessGroup | None = None
        self._progress: Progress | None = None
        host = at or LOOPBACK
        self._door = Door(run.path, host, away, self._secret, self.lost) if away else None
        self._store = host_store(host)
        self._at = joined(host, self._store.port)
        for rank in range(1, self._here):
            started = start_rank(run.path, rank, self._at, self._secret, local=rank)
            telemetry.event("process", name=f"learner rank {rank}", state="start", pid=started.pid)
            threading.Thread(target=self._watch, args=(rank, started), daemon=True).start()

    def join(self) -> ShardedProcessGroup:
        """Meet the others, once. Raises `RunError` where some do not come."""
        if self._group is None:
            if self._door is not None:
                self._meet(self._door)
            self._store.set(MET, "")
            ranks, limit_s = self._config.learner.ranks, limit_of(self._config)
            self._progress = Progress(connect_store(self._store.host, self._store.port), 0, ranks, limit_s)
            self._progress.watch(self.lost)
            self._group = group_of(self._config, store=self._store, rank=0)
        return self._group

    def _meet(self, door: Door) -> None:
        def waits(reason: str) -> None:
            self._telemetry.event("process", name="learner ranks", state="waiting", reason=reason)

        for rank, host in door.meet(self._here, self._at, waits).items():
            self._telemetry.event("process", name=f"learner rank {rank}", state="start", host=host)
        self._telemetry.event("process", name="learner ranks", state="ready")

    @contextlib.contextmanager
    def call(self, method: str, *arguments: object) -> Iterator[None]:
        """Have every other rank make a call of `Learning`, while this one makes it in the `with` block."""
        self.tell(method, *arguments)
        assert self._progress is not None, "it was made as the ranks met"
        self._progress.call = method
        try:
            yield
        finally:
            self._progress.call = ""

    def tell(self, method: str, *arguments: object) -> None:
        """Have every other rank make a call of `Learning`."""
        self.join()
        key = f"call/{self._calls}"
        said = pickle.dumps((method, arguments))
        self._store.set(key, seal(self._secret, key.encode() + said) + said)  # type: ignore[arg-type]  # bytes do
        self._calls += 1
        self._store.delete_key(f"call/{self._calls - TAKEN}")

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        facts = described(process.wait())
        self.lost(EtudeError(f"rank {rank} of the learner ended", facts, hint="its last words are in this log"), rank)

    def lost(self, error: EtudeError, rank: int | None = None) -> NoReturn:
        """End this process: what is left of the group cannot go on."""
        name = "learner" if rank is None else f"learner rank {rank}"
        self._telemetry.event("process", name=name, state="lost", reason=f"{error.what}: {error.facts}")
        end(error)


def limit_of(config: RunConfig) -> float:
    """Seconds that all ranks together may be without progress, in a call."""
    return PATIENCE * config.fleet.hung_s


def group_of(config: RunConfig, *, store: TCPStore, rank: int) -> ShardedProcessGroup:
    """A rank's place among the others."""
    return ShardedProcessGroup(join(config.learner, store=store, rank=rank, deadline_s=COLLECTIVE_S))


def end(error: EtudeError) -> NoReturn:
    """Say why, and end at once: threads may hang in a collective."""
    print(f"error: {error}", file=sys.stderr, flush=True)
    os._exit(AGAIN)


def follow(learning: Learning, store: TCPStore, secret: bytes, report: Progress) -> NoReturn:
    """Make the calls that rank 0 tells, until it is gone."""
    number = 0
    while True:
        key = f"call/{number}"
        said = _awaited(store, key)
        if not hmac.compare_digest(said[:_SEAL_BYTES], seal(secret, key.encode() + said[_SEAL_BYTES:])):
            hint = "keep the learner's ranks in a network of their own"
            end(EtudeError("a call that rank 0 did not make", f"{key}, in the store of the ranks", hint=hint))
        method, arguments = pickle.loads(said[_SEAL_BYTES:])
        number += 1
        report.call = method
        try:
            getattr(learning, method)(*arguments)
        except RankLost as error:
            end(error)
        except EtudeError:
            continue  # every rank raised it; rank 0 tells
        finally:
            report.call = ""


def _awaited(store: TCPStore, key: str) -> bytes:
    """What rank 0 sets; it is waited for as long as its store answers."""
    while True:
        try:
            store.wait([key], POLL)
        except torch.distributed.DistNetworkError:
            os._exit(AGAIN)  # rank 0 has gone
        except RuntimeError:
            continue
        return bytes(store.get(key))


def main() -> None:
    """One rank but the first: ``python -m etude.loop.ranks``."""
    from etude.loop.learning import NUM_THREADS, Learning  # which starts ranks

    parser = argparse.ArgumentParser()
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--at", required=True)
    parser.add_argument("--rank", type=int, required=True)
    args = parser.parse_args()
    secret = sys.stdin.buffer.read()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in rank 0
    torch.set_num_threads(NUM_THREADS)
    run = RunFolder.open(args.run)
    config = read_config(run)
    name = f"learner-rank-{args.rank}"
    telemetry = Telemetry(run / "events" / f"{name}.jsonl", process=name)
    try:
        store = connect_store(*split(args.at))
        _awaited(store, MET)
        report = Progress(connect_store(*split(args.at)), args.rank, config.learner.ranks, limit_of(config))
        report.call = "start"
        report.watch(end)
        group = group_of(config, store=store, rank=args.rank)
        report.call = ""
    except EtudeError as error:
        end(error)
    follow(Learning(run, config, telemetry, group=group), store, secret, report)


if __name__ == "__main__":
    main()
