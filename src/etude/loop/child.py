"""The main function of all child processes of the conductor, the main process of a run.

A child serves calls until its socket closes, because the conductor is gone or wants it to end, and then exits at once.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

from etude.loop.rpc import Handler, serve
from etude.run import RunFolder
from etude.telemetry import Telemetry

Handlers = dict[str, tuple[tuple[type, ...], Handler]]


def main(handlers: Callable[..., Awaitable[Handlers]], *more: str) -> None:
    """Run a child process: create its RPC handlers, serve calls, and exit when the socket closes.

    `handlers` is called with the run folder, the child's name and its telemetry. `more` names optional command-line
    arguments, such as "ranks-at". The arguments that were given are passed to `handlers` as keyword arguments."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--socket", type=int, required=True)
    for name in more:
        parser.add_argument(f"--{name}")
    args = parser.parse_args()
    options = {key: value for name in more if (value := getattr(args, key := name.replace("-", "_"))) is not None}
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the conductor ends its children in order
    run = RunFolder.open(args.run)
    telemetry = Telemetry(run / "events" / f"{args.name}.jsonl", process=args.name)

    async def child() -> None:
        sock = socket.socket(fileno=args.socket)
        await serve(sock, await handlers(run, args.name, telemetry, **options))

    asyncio.run(child())
    os._exit(0)  # do not wait for threads that hang in a library
