"""The command ``etude fsck``: verify that the files of a run are the bytes that were written."""

from __future__ import annotations

import argparse

from etude.cli.locations import RUNS, newest_run
from etude.cli.progress import ProgressBar
from etude.cli.store_locations import is_store
from etude.dashboard.formatting import number, size
from etude.errors import Exit, NoRun


def check(args: argparse.Namespace) -> int:
    """Verify every file of a run against its checksum. Returns exit code 1 if there is a problem.

    It only reads, so the run may be active."""
    from etude.loop.fsck import FsckReport, checks_of

    if args.run is None:
        path = newest_run().path
    else:
        path = args.run if args.run.exists() or not (RUNS / args.run).exists() else RUNS / args.run
    if not (path / "run.json").is_file() and is_store(str(path)):
        raise NoRun(f"{path} is not a run", "it is a store of weights", hint=f"etude weights fsck {path}")
    proof, parts = FsckReport(), checks_of(path)
    with ProgressBar("parts of the run", len(parts)) as progress:
        for part in parts:
            part(proof)
            progress.advance()
    for found in proof.problems:
        print(found)
    for found in proof.notices:
        print(f"notice: {found}")
    print(
        f"{path}: {number(proof.num_files, 'file')}, {size(proof.num_bytes)} read:"
        f" {number(len(proof.problems), 'problem')}, {number(len(proof.notices), 'notice')}"
        + (f"; not verified, because no program reads them: {', '.join(proof.plain)}" if proof.plain else "")
    )
    return Exit.FAILED if proof.problems else Exit.DONE
