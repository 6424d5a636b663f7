"""The ranks of a run's learner: rank 0 is the conductor's child and starts the others, which die with it.

Rank 0 tells the others every call that is theirs, too (`Leader.tell`); each makes it on a `Learning` of its own. Calls
go through rank 0's store, since ranks may wait for minutes between batches, and no collective may.

A rank that ends takes rank 0 with it, at once and by name; one that hangs does at the deadline of a collective. Either
way the conductor sees a learner that died: its successor starts ranks anew from the last checkpoint. Rank 0 takes no
call after that, so no half of a group trains on.
"""

from __future__ import annotations

import argparse
import os
import pickle
import signal
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from etude.errors import EtudeError
from etude.inference.lifetime import when_parent_dies
from etude.loop.config import RunConfig, read_config
from etude.loop.processes import AGAIN
from etude.numerics.parallel import RankLost
from etude.run import RunFolder
from etude.telemetry import Telemetry
from etude.training.sharded import Sharded, join
from etude.training.sharded.mesh import free_port

if TYPE_CHECKING:
    from etude.loop.learning import Learning

PATIENCE = 10
"""A collective may take so many times what a silent process may: it waits for the slowest rank's share of a batch."""
TAKEN = 8
"""So many calls ago every rank has taken its own: all but `settle` and `defend` end with every rank, and of those at
most two come together."""
POLL = timedelta(seconds=30)


class Leader:
    """Rank 0's hold on the others. Made in the main thread: the kernel ends them with the thread that started them."""

    def __init__(self, run: RunFolder, config: RunConfig, telemetry: Telemetry) -> None:
        self._config, self._telemetry = config, telemetry
        self._at = f"tcp://127.0.0.1:{free_port()}"
        self._calls = 0
        self._group: Sharded | None = None
        argv = [sys.executable, "-m", "etude.loop.ranks", "--run", str(run.path), "--at", self._at, "--rank"]
        for rank in range(1, config.learner.ranks):
            started = subprocess.Popen([*argv, str(rank)], stdin=subprocess.DEVNULL, preexec_fn=when_parent_dies)
            telemetry.event("process", name=f"learner rank {rank}", state="start", pid=started.pid)
            threading.Thread(target=self._watch, args=(rank, started), daemon=True).start()

    def join(self) -> Sharded:
        """Meet the others, once."""
        if self._group is None:
            self._group = group_of(self._config, at=self._at, rank=0)
        return self._group

    def tell(self, method: str, *arguments: object) -> None:
        """Have every other rank make a call of `Learning` that this one is about to make."""
        store = self.join().mesh.store
        store.set(f"call/{self._calls}", pickle.dumps((method, arguments)))  # type: ignore[arg-type]  # bytes do
        self._calls += 1
        store.delete_key(f"call/{self._calls - TAKEN}")

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        facts = f"exit code {code}{'; -9 is out of memory, or somebody killed it' if code == -signal.SIGKILL else ''}"
        self.lost(EtudeError(f"rank {rank} of the learner ended", facts, hint="its last words are in this log"), rank)

    def lost(self, error: EtudeError, rank: int | None = None) -> NoReturn:
        """End this process: what is left of the group cannot go on."""
        name = "learner" if rank is None else f"learner rank {rank}"
        self._telemetry.event("process", name=name, state="lost", reason=f"{error.what}: {error.facts}")
        end(error)


def group_of(config: RunConfig, *, at: str, rank: int) -> Sharded:
    """A rank's place among the others."""
    mesh = join(config.learner, at=at, rank=rank, deadline_s=PATIENCE * config.fleet.hung_s)
    return Sharded(mesh)


def end(error: EtudeError) -> NoReturn:
    """Say why, and end at once: threads may hang in a collective."""
    print(f"error: {error}", file=sys.stderr, flush=True)
    os._exit(AGAIN)


def follow(learning: Learning, group: Sharded) -> NoReturn:
    """Make the calls that rank 0 tells, until it is gone."""
    store, number = group.mesh.store, 0
    while True:
        method, arguments = _told(store, f"call/{number}")
        number += 1
        try:
            getattr(learning, method)(*arguments)
        except RankLost as error:
            end(error)
        except EtudeError:
            continue  # every rank raised it; rank 0 tells


def _told(store: Any, key: str) -> tuple[str, tuple[Any, ...]]:
    """The next call; it is waited for as long as rank 0's store answers."""
    while True:
        try:
            store.wait([key], POLL)
        except torch.distributed.DistNetworkError:
            os._exit(AGAIN)  # rank 0 has gone
        except RuntimeError:
            continue
        told: tuple[str, tuple[Any, ...]] = pickle.loads(store.get(key))
        return told


def main() -> None:
    """One rank but the first: ``python -m etude.loop.ranks``."""
    from etude.loop.learning import NUM_THREADS, Learning  # which starts ranks

    parser = argparse.ArgumentParser()
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--at", required=True)
    parser.add_argument("--rank", type=int, required=True)
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in rank 0
    torch.set_num_threads(NUM_THREADS)
    run = RunFolder.open(args.run)
    config = read_config(run)
    name = f"learner-rank-{args.rank}"
    telemetry = Telemetry(run / "events" / f"{name}.jsonl", process=name)
    try:
        group = group_of(config, at=args.at, rank=args.rank)
    except EtudeError as error:
        end(error)
    follow(Learning(run, config, telemetry, group=group), group)


if __name__ == "__main__":
    main()
