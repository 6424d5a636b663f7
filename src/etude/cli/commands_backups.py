"""Defines the arguments of ``etude backup`` and ``restore``. Imports no library, so that `etude --help` is fast."""

from __future__ import annotations

from pathlib import Path

from etude.cli.arguments import Commands, Parser, add, positive


def add_backup_commands(commands: Commands[Parser]) -> None:
    """Add ``etude backup`` and ``etude restore``."""
    what = "copy runs, stores, privacy folders and files that are in use into a folder of backups"
    backup = add(commands, "backup", "backups:backup", what)
    backup.add_argument(
        "sources", nargs="+", metavar="RUN|FOLDER|FILE", help="runs, stores of weights, privacy folders, SQLite files"
    )
    backup.add_argument("destination", type=Path, metavar="BACKUPS", help="the folder of backups")
    backup.add_argument("--keep", type=positive, metavar="N", help="then delete all backups but the newest N")
    backup.add_argument(
        "--with-keys",
        action="store_true",
        help="also copy the keys of privacy folders and files of signals; erasures then do not hold in this backup",
    )
    restore = add(commands, "restore", "backups:restore", "verify a backup and write it to a new folder")
    restore.add_argument("backup", type=Path, metavar="BACKUP", help="a backup, or a folder of backups: its newest")
    restore.add_argument(
        "destination", type=Path, nargs="?", metavar="FOLDER", help="the new folder (not needed with --check)"
    )
    restore.add_argument("--check", action="store_true", help="only verify; exit code 1 if a file is damaged")
