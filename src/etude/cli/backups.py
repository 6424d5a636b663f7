"""The commands ``etude backup`` and ``restore``."""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Sequence
from pathlib import Path

from etude.backups import BackupWriter, check_backup, kind_of, read_manifest
from etude.backups import restore as write_back
from etude.backups.manifest import MANIFEST, BackupSource
from etude.backups.sources import files_below, keys_of_signals
from etude.backups.writer import backups_in, delete_oldest_backups
from etude.cli.locations import RUNS
from etude.cli.progress import ProgressBar
from etude.dashboard.formatting import size
from etude.errors import Exit, InputError


def backup(args: argparse.Namespace) -> int:
    """Make a backup, and print where it is, what it leaves out, and which originals are damaged.

    Returns 0, or 1 when an original differs from its own checksum; the backup is made in any case."""
    from etude.loop.backup import back_up

    sources = _named(args.sources, with_keys=args.with_keys)
    for path in sources.values():
        if args.destination.absolute().resolve().is_relative_to(path.resolve()):
            hint = "give a folder elsewhere, best on another disk"
            raise InputError(f"{args.destination} is inside of {path}", "a backup would contain itself", hint=hint)
    total = sum(sum(1 for _ in files_below(path)) if path.is_dir() else 1 for path in sources.values())
    with (
        ProgressBar("files", total) as progress,
        BackupWriter(args.destination, on_file=lambda path: progress.advance()) as writer,
    ):
        left_out, damaged = back_up(writer, sources, with_keys=args.with_keys)
        place = writer.finish(
            tuple(
                BackupSource(name=name, kind=str(kind_of(path)), origin=str(path.absolute()))
                for name, path in sources.items()
            ),
            left_out=left_out,
            damaged=damaged,
        )
        deleted = delete_oldest_backups(args.destination, args.keep) if args.keep else []
    files = read_manifest(place).files
    print(f"{place}: {len(files)} files, {size(sum(one.size for one in files))}, {size(writer.copied_bytes)} copied")
    for line in left_out:
        print(f"not in it: {line}")
    for line in damaged:
        print(f"damaged before: {line}", file=sys.stderr)
    if deleted:
        print(f"deleted: {', '.join(deleted)}")
    return Exit.FAILED if damaged else Exit.DONE


def restore(args: argparse.Namespace) -> int:
    """Verify a backup, or restore it to a new folder. Returns 0, or 1 when `--check` finds a damaged file."""
    if args.check is (args.destination is not None):
        hint = "etude restore BACKUP FOLDER, or etude restore BACKUP --check"
        raise InputError("give either a new folder or --check", hint=hint)
    place = args.backup
    if not (place / MANIFEST).exists() and (found := backups_in(place)):
        place = found[-1]
    manifest = read_manifest(place)
    age = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(manifest.created)
    print(f"{place}: of {manifest.created}, {age.total_seconds() / 3600:.1f} hours ago")
    with ProgressBar("files", len(manifest.files)) as progress:
        if args.check:
            damaged = check_backup(place, on_file=lambda path: progress.advance())
        else:
            write_back(place, args.destination, on_file=lambda path: progress.advance())
    if args.check:
        for line in damaged:
            print(line, file=sys.stderr)
        print(f"{len(manifest.files) - len(damaged)} of {len(manifest.files)} files are what was backed up")
        return Exit.FAILED if damaged else Exit.DONE
    for source in manifest.sources:
        print(f"{args.destination / source.name}: {source.kind}, from {source.origin}")
    for line in manifest.left_out:
        print(f"not in it: {line}")
    for line in manifest.damaged:
        print(f"damaged before the backup: {line}", file=sys.stderr)
    return Exit.DONE


def _named(texts: Sequence[str], *, with_keys: bool) -> dict[str, Path]:
    """The sources by their names in the backup; with the folders of keys of files of signals, if `with_keys`. Raises
    `InputError`."""
    found = dict[str, Path]()
    for text in texts:
        if "://" in text:
            raise InputError(
                f"{text} is not backed up by etude",
                "a bucket has versions, replication and object locks of its own",
                hint="turn on the bucket's versioning; docs/guides/operations.md says how to restore it",
            )
        path = Path(text)
        if not path.exists() and (RUNS / path).exists():
            path = RUNS / path
        kind_of(path)
        _add(found, path.resolve().name, path)
    for name, path in [*found.items()] if with_keys else []:
        keys, name_of_keys = keys_of_signals(path) if path.is_file() else None, f"{name}.keys"
        if keys is not None and not (name_of_keys in found and found[name_of_keys].samefile(keys)):
            _add(found, name_of_keys, keys)
    return found


def _add(found: dict[str, Path], name: str, path: Path) -> None:
    if name in found or name == MANIFEST or name.startswith("."):
        hint = "give each its own name, for example by a symbolic link"
        raise InputError(f"{path} cannot be called {name!r} in the backup", "the name is taken", hint=hint)
    found[name] = path
