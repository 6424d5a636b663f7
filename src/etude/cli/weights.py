"""The commands ``etude weights log``, ``diff``, ``verify``, ``repair`` and ``key``.

Commands for files, and for stores without a run, are in `weights_files` and `weights_store`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from etude.cli import weights_files, weights_store
from etude.cli.locations import console, open_run
from etude.cli.store_locations import is_store, named_store
from etude.dashboard import RunView
from etude.dashboard.formatting import number
from etude.dashboard.glossary import legend
from etude.errors import CheckpointError, InputError, NoRun, WeightsError
from etude.file_checksums import verify_files
from etude.loop import locations
from etude.run import RunFolder
from etude.seams import BlobStore
from etude.weights.chain import fsck, inspect, signing


def log(args: argparse.Namespace) -> int:
    """List every published version, the newest last: bytes, compression ratio, size relative to the lower bound,
    rollouts.

    Returns 0."""
    store = _store(args.run)
    inspect.require_channel(store, args.name)
    table = Table("version", "kind", "bytes", "ratio", "share of bound", "changed", "rollouts")
    rows = inspect.log(store, args.name)
    for row in rows:
        table.add_row(
            f"{row.version}{'' if row.in_lineage else ' (abandoned)'}",
            row.kind,
            f"{row.object_bytes:,}",
            f"{row.ratio:.2f}" if row.changed_share else "unchanged",
            _share(row),
            f"{row.changed_share:.3f}",
            str(len(row.rollout_ids)),
        )
    console().print(table)
    console().print(f"({legend(['delta', 'bound'])}; ratio: bytes of all weights divided by bytes of the delta)")
    if any(row.num_whole for row in rows):
        console().print(
            "(whole: tensors without a bound; they are stored complete, as they are new or have another dtype or shape)"
        )
    damage = inspect.broken_at(store, args.name)
    if damage is not None:
        raise damage
    return 0


def _share(row: inspect.LogRow) -> str:
    """Share of the bound as text. The bound is for deltas: tensors that are stored complete have none."""
    if row.share_of_bound is None:
        return f"{row.num_whole} whole" if row.num_whole else "–"
    return f"{row.share_of_bound:.3f}" if row.changed_share else "unchanged"


def _store(text: str | None) -> BlobStore:
    try:
        return named_store(text)
    except NoRun as error:
        if text is None:
            raise
        hint = "give a run in runs/, or a store: its directory, s3://bucket/prefix, http://relay:8800"
        raise InputError(f"{text} is not a run or a store", "it has no run.json and no pointers/", hint=hint) from error


def diff(args: argparse.Namespace) -> int:
    """Print the differences between two checkpoints, or between two versions of a run or a store, by tensor. Returns
    0."""
    if weights_files.are_checkpoints(args.a, args.b):
        return weights_files.diff(args)
    if args.plot:
        raise InputError("--plot needs checkpoints", f"{args.a} is not one", hint="to write one: etude export RUN@STEP")
    try:
        store = _store(args.run)
    except NoRun as error:
        neither = [text for text in (args.a, args.b) if not inspect.names_version(text)]
        if args.run is not None or not neither:
            raise
        hint = "give two directories with *.safetensors, or two such files; or two versions, and their RUN|STORE"
        raise InputError(f"no checkpoint at {neither[0]}", hint=hint) from error
    table = Table("tensor", "dtype", "elements", "changed", "largest change (ULP)")
    for row in inspect.diff(store, args.a, args.b, args.name):
        share = row.num_changed / max(1, row.num_elements)
        longest = "" if row.max_step is None else str(row.max_step)
        table.add_row(row.name, row.dtype, str(row.num_elements), f"{share:.3f}", longest)
    console().print(table)
    return 0


def verify(args: argparse.Namespace) -> int:
    """Verify the weights of a run: rebuild every version in every possible way, and compare all digests.

    The checksums of its checkpoints are verified, too. With `--base`, instead verify a delta file by applying it to
    that checkpoint, without writing anything. Returns exit code 1 if something is damaged."""
    if args.base is not None:
        if args.run is None:
            raise InputError("--base needs a delta file", hint="write: etude weights verify FILE --base CHECKPOINT")
        return weights_files.verify(args.run, args.base)
    if args.run is not None and args.run.is_file():
        raise InputError(
            f"{args.run} is a file",
            hint=f"for a delta file, give its base: etude weights verify {args.run} --base CHECKPOINT",
        )
    run = open_run(args.run)
    check = fsck.verify(locations.weights_store(run, readonly=True))
    weights_store.print_check(check)
    if check.problems:
        raise WeightsError(
            f"{number(len(check.problems), 'problem')} in {locations.weights_location(run)}",
            weights_store.first_problem(check),
            hint=_repair_hint(run, check.problems),
        )
    for checkpoint in sorted((run / "checkpoints").glob("[!.]*")):
        verify_files(checkpoint, kind=CheckpointError)
    return 0


def _repair_hint(run: RunFolder, problems: Sequence[str]) -> str:
    if problems[0].startswith("pointer"):
        return f"etude weights repair {run.path}"
    if run.ended("rl"):
        return f"restore the files from a copy; the final result in {run / 'checkpoints' / 'final'} does not need them"
    return (
        f"restore the files from a copy, or publish a new anchor: etude run {run / 'config.toml'} --resume {run.path}"
    )


def repair(args: argparse.Namespace) -> int:
    """Set a lost or damaged pointer of a run or a store to the newest version that is known to be published. Returns
    0."""
    signer = signing.read_signer(args.key)
    if is_store(args.run):
        version = inspect.repair(named_store(args.run, readonly=False), args.name, signer=signer)
    else:
        run = open_run(None if args.run is None else Path(args.run))
        run.lock()
        published = [str(event.get("version")) for event in RunView(run.path).events("weights.publish")]
        try:
            version = inspect.repair(locations.weights_store(run), args.name, published, signer=signer)
        finally:
            run.unlock()
    print(f"the pointer is set to {version}" if version else "the pointer is not damaged: nothing to repair")
    if version is not None:
        later = inspect.later_than(named_store(args.run), version, args.name)
        for one in later:
            print(f"{one} is also stored, but may not have been published; to use it: etude weights point")
    return 0


def key(args: argparse.Namespace) -> int:
    """Check that the library for signatures is installed, and write a new private key to a file. Returns 0."""
    signing.require_library()
    return weights_store.key(args)
