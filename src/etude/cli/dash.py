"""The command ``etude dash``."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.cli.locations import RUNS, newest_run
from etude.errors import InputError

if TYPE_CHECKING:
    from etude.dash import Readers

NICENESS = 10
"""The server gives way to the processes of a run on the same machine."""


def dash(args: argparse.Namespace) -> int:
    """Serve web pages of a run, or of all runs in a folder, until interrupted. Returns 0."""
    from etude.dash import Dash, Runs
    from etude.gateway import Keys
    from etude.loop import event_loop

    for path, option in (
        (args.releases, "--releases"),
        (args.privacy, "--privacy"),
        (args.feedback, "--feedback"),
    ):
        if path is not None and not path.exists():
            raise InputError(f"{option}: {path} does not exist", hint="give an existing one, or leave the option out")
    key = args.key or os.environ.get("ETUDE_API_KEY")
    if args.keys and key:
        hint = "add the key to the file of --keys"
        raise InputError("--keys and --key cannot be used together", "the file of --keys has all keys", hint=hint)
    keys = Keys.read(args.keys) if args.keys else Keys.of(key) if key else None
    runs = Runs(_place(args.run), readers())
    pages = Dash(runs, releases=args.releases, privacy=args.privacy, feedback=args.feedback)
    os.nice(NICENESS)
    with contextlib.suppress(asyncio.CancelledError):
        event_loop.run(_serve(pages, args, keys))
    return 0


def _place(path: Path | None) -> Path:
    """The folder of a run or of runs: as given, that name under runs/, or the newest run."""
    if path is None:
        return newest_run().path
    return path if path.exists() or not (RUNS / path).exists() else RUNS / path


async def _serve(pages: Any, args: argparse.Namespace, keys: Any) -> None:
    from etude.dash import serving

    work = asyncio.current_task()
    assert work is not None, "runs in a task"
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, work.cancel)
    async with serving(pages, host=args.host, port=args.port, keys=keys) as url:
        with_key = "with" if keys else "without"
        print(f"{pages.runs.path} at {url} ({with_key} a key); stop with Ctrl-C", flush=True)
        await asyncio.Event().wait()


def readers() -> Readers:
    """Return the functions with which the pages read a run folder."""
    from etude.dash import Readers
    from etude.experience.groups import Row
    from etude.experience.ledger import Ledger
    from etude.loop import locations
    from etude.run import RunFolder

    def rollout(run: RunFolder, ledger: Ledger, row: Row, history: Sequence[Mapping[str, Any]]) -> Any:
        from etude.loop.rollout_views import read_training  # loads pyarrow and tokenizers: only when it is needed

        return read_training(run, ledger, row, history)

    def trace_bytes(run: RunFolder, step: int) -> int | None:
        from etude.experience.traces import trace_path  # loads pyarrow

        place = trace_path(locations.traces_folder(run), step)
        return place.stat().st_size if isinstance(place, Path) and place.exists() else None

    return Readers(
        ledger=lambda run: locations.read_ledger(run, immutable=True),
        weights=lambda run: locations.weights_store(run, readonly=True),
        rollout=rollout,
        trace_bytes=trace_bytes,
    )
