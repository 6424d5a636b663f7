"""``etude fsck``: prove that what a run folder holds is what was written."""

from __future__ import annotations

import argparse

from etude.cli.places import RUNS
from etude.cli.task_progress import Steps
from etude.dashboard.words import size
from etude.errors import Exit


def check(args: argparse.Namespace) -> int:
    """Read and prove every file of a run; only reads, also beside the run. Exit code 1 with a problem."""
    from etude.cli.places import newest_run
    from etude.loop.proving import Proof, steps_of

    if args.run is None:
        path = newest_run().path
    else:
        path = args.run if args.run.exists() or not (RUNS / args.run).exists() else RUNS / args.run
    proof, parts = Proof(), steps_of(path)
    with Steps("parts of the run", len(parts)) as steps:
        for part in parts:
            part(proof)
            steps.done()
    for found in proof.problems:
        print(found)
    for found in proof.notices:
        print(f"notice: {found}")
    print(
        f"{path}: {proof.num_files} files, {size(proof.num_bytes)} read: {len(proof.problems)} problems,"
        f" {len(proof.notices)} notices"
        + (f"; not proven, as nothing reads them back: {', '.join(proof.plain)}" if proof.plain else "")
    )
    return Exit.FAILED if proof.problems else Exit.DONE
