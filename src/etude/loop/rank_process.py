"""One rank of a learner other than rank 0: ``python -m etude.loop.rank_process``."""

from __future__ import annotations

import argparse
import hmac
import os
import pickle
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
from torch._C._distributed_c10d import TCPStore

from etude.errors import EtudeError
from etude.loop.config import read_config
from etude.loop.learner import NUM_THREADS, LearnerProcess
from etude.loop.processes import EXIT_RESTART
from etude.loop.rank_hosts import parse_address, sign
from etude.loop.ranks import MET, RankProgress, exit_with_error, join_group, progress_limit_s
from etude.numerics.parallel import RankLost
from etude.run import RunFolder
from etude.telemetry import Telemetry
from etude.training.sharded.mesh import connect_store

POLL = timedelta(seconds=30)
_SEAL_BYTES = len(sign(b"", b""))


def serve_calls(learning: object, store: TCPStore, secret: bytes, report: RankProgress) -> NoReturn:
    """Make the calls that rank 0 broadcasts through `store`, until rank 0 is gone; then exit.

    `learning` has the methods that are called. Calls are signed with `secret`. `report` is told which call is made."""
    number = 0
    while True:
        key = f"call/{number}"
        call = _wait_for_key(store, key)
        if not hmac.compare_digest(call[:_SEAL_BYTES], sign(secret, key.encode() + call[_SEAL_BYTES:])):
            hint = "keep the learner's ranks in a private network"
            exit_with_error(
                EtudeError(
                    "a rank received a call with a wrong signature", f"{key}, in the store of the ranks", hint=hint
                )
            )
        method, arguments = pickle.loads(call[_SEAL_BYTES:])
        number += 1
        report.call = method
        try:
            getattr(learning, method)(*arguments)
        except RankLost as error:
            exit_with_error(error)
        except EtudeError:
            continue  # every rank raised it; rank 0 reports it
        finally:
            report.call = ""


def _wait_for_key(store: TCPStore, key: str) -> bytes:
    """Wait for a key that rank 0 sets, as long as its store answers."""
    while True:
        try:
            store.wait([key], POLL)
        except torch.distributed.DistNetworkError:
            os._exit(EXIT_RESTART)  # rank 0 has gone
        except RuntimeError:
            continue
        return bytes(store.get(key))


def main() -> None:
    """Run one rank: join the process group, then serve the calls of rank 0."""
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
        store = connect_store(*parse_address(args.at))
        program = _wait_for_key(store, MET).decode()
        report = RankProgress(
            connect_store(*parse_address(args.at)), args.rank, config.learner.ranks, progress_limit_s(config)
        )
        report.call = "start"
        report.watch(exit_with_error)
        group = join_group(config, store=store, rank=args.rank)
        report.call = ""
    except EtudeError as error:
        exit_with_error(error)
    if program == "learner":
        serve_calls(LearnerProcess(run, config, telemetry, group=group), store, secret, report)
    from etude.loop.mid_training import MidTraining

    serve_calls(MidTraining(run, config, telemetry, group=group), store, secret, report)


if __name__ == "__main__":
    main()
