"""``etude fsck``: prove that what a run folder holds is what was written."""

from __future__ import annotations

import argparse

from etude.cli.places import RUNS
from etude.cli.task_progress import Steps
from etude.cli.weights_store import is_store
from etude.dashboard.formatting import number, size
from etude.errors import Exit, NoRun


def check(args: argparse.Namespace) -> int:
    """Read and prove every file of a run; only reads, also beside the run. Exit code 1 with a problem."""
    from etude.cli.places import newest_run
    from etude.loop.fsck import FsckReport, checks_of

    if args.run is None:
        path = newest_run().path
    else:
        path = args.run if args.run.exists() or not (RUNS / args.run).exists() else RUNS / args.run
    if not (path / "run.json").is_file() and is_store(str(path)):
        raise NoRun(f"{path} is not a run", "it is a store of weights", hint=f"etude weights fsck {path}")
    proof, parts = FsckReport(), checks_of(path)
    with Steps("parts of the run", len(parts)) as steps:
        for part in parts:
            part(proof)
            steps.done()
    for found in proof.problems:
        print(found)
    for found in proof.notices:
        print(f"notice: {found}")
    print(
        f"{path}: {number(proof.num_files, 'file')}, {size(proof.num_bytes)} read:"
        f" {number(len(proof.problems), 'problem')}, {number(len(proof.notices), 'notice')}"
        + (f"; not proven, as nothing reads them back: {', '.join(proof.plain)}" if proof.plain else "")
    )
    return Exit.FAILED if proof.problems else Exit.DONE
