"""Backups of runs, stores, privacy folders and other files that are in use: incremental, resumable, verified.

`BackupWriter` copies files into a backup, `restore` writes a backup back. What is copied in which order, so that a
running run is consistent, is in `etude.loop.backup`. The format is docs/formats/backup.md."""

from etude.backups.manifest import BackupManifest, read_manifest
from etude.backups.restore import check_backup, restore
from etude.backups.sources import Kind, kind_of
from etude.backups.writer import BackupWriter

__all__ = ["BackupManifest", "BackupWriter", "Kind", "check_backup", "kind_of", "read_manifest", "restore"]
