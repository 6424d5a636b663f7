"""The ranks of a run's learner: rank 0 is the conductor's child and starts the others, which die with it. Those of
other machines come to its door (`loop.rank_hosts`).

Rank 0 tells the others every call that is theirs, too (`Leader.tell`); each makes it on a `Learning` of its own. Calls
go through rank 0's store, since ranks may wait for minutes between batches, and no collective may. They are sealed with
a secret that ranks are given as they start: a stranger who reaches the store has nothing done.

A rank that ends takes rank 0 with it, at once and by name; one that hangs does at the deadline of a collective. Either
way the conductor sees a learner that died: its successor starts ranks anew from the last checkpoint. Rank 0 takes no
call after that, so no half of a group trains on.
"""

from __future__ import annotations

import argparse
import hmac
import os
import pickle
import signal
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import torch
from torch._C._distributed_c10d import TCPStore

from etude.errors import EtudeError
from etude.loop.config import RunConfig, read_config
from etude.loop.processes import AGAIN
from etude.loop.rank_hosts import Door, described, joined, new_secret, seal, split, start_rank
from etude.numerics.parallel import RankLost
from etude.run import RunFolder
from etude.telemetry import Telemetry
from etude.training.sharded import Sharded, join
from etude.training.sharded.mesh import LOOPBACK, listen, reach

if TYPE_CHECKING:
    from etude.loop.learning import Learning

PATIENCE = 10
"""A collective may take so many times what a silent process may: it waits for the slowest rank's share of a batch."""
TAKEN = 8
"""So many calls ago every rank has taken its own: all but `settle` and `defend` end with every rank, and of those at
most two come together."""
POLL = timedelta(seconds=30)
MET = "met"  # all have come
_SEAL_BYTES = len(seal(b"", b""))


class Leader:
    """Rank 0's control of the other ranks: it starts the local ones and sends every rank its calls.

    Make it in the main thread: the kernel kills local ranks when the thread that started them ends. `away` ranks
    connect from other machines, to the address `at`.
    """

    def __init__(self, run: RunFolder, config: RunConfig, telemetry: Telemetry, *, at: str = "", away: int = 0) -> None:
        self._config, self._telemetry, self._secret = config, telemetry, new_secret()
        self._here, self._calls = config.learner.ranks - away, 0
        self._group: Sharded | None = None
        host = at or LOOPBACK
        self._door = Door(run.path, host, away, self._secret, self.lost) if away else None
        self._store = listen(host, deadline_of(config))
        self._at = joined(host, self._store.port)
        for rank in range(1, self._here):
            started = start_rank(run.path, rank, self._at, self._secret, local=rank)
            telemetry.event("process", name=f"learner rank {rank}", state="start", pid=started.pid)
            threading.Thread(target=self._watch, args=(rank, started), daemon=True).start()

    def join(self) -> Sharded:
        """Meet the others, once. Raises `RunError` where some do not come."""
        if self._group is None:
            if self._door is not None:
                self._meet(self._door)
            self._store.set(MET, "")
            self._group = group_of(self._config, store=self._store, rank=0)
        return self._group

    def _meet(self, door: Door) -> None:
        def waits(reason: str) -> None:
            self._telemetry.event("process", name="learner ranks", state="waiting", reason=reason)

        for rank, host in door.meet(self._here, self._at, waits).items():
            self._telemetry.event("process", name=f"learner rank {rank}", state="start", host=host)
        self._telemetry.event("process", name="learner ranks", state="ready")

    def tell(self, method: str, *arguments: object) -> None:
        """Have every other rank make a call of `Learning` that this one is about to make."""
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


def deadline_of(config: RunConfig) -> float:
    """Seconds that a collective may take."""
    return PATIENCE * config.fleet.hung_s


def group_of(config: RunConfig, *, store: TCPStore, rank: int) -> Sharded:
    """A rank's place among the others."""
    return Sharded(join(config.learner, store=store, rank=rank, deadline_s=deadline_of(config)))


def end(error: EtudeError) -> NoReturn:
    """Say why, and end at once: threads may hang in a collective."""
    print(f"error: {error}", file=sys.stderr, flush=True)
    os._exit(AGAIN)


def follow(learning: Learning, store: TCPStore, secret: bytes) -> NoReturn:
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
        try:
            getattr(learning, method)(*arguments)
        except RankLost as error:
            end(error)
        except EtudeError:
            continue  # every rank raised it; rank 0 tells


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
        store = reach(*split(args.at), deadline_of(config))
        _awaited(store, MET)
        group = group_of(config, store=store, rank=args.rank)
    except EtudeError as error:
        end(error)
    follow(Learning(run, config, telemetry, group=group), store, secret)


if __name__ == "__main__":
    main()
