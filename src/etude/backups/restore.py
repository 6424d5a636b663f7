"""Checks a backup, and restores it: each file is compared with its SHA-256 while it is copied.

A backup is restored into a hidden folder beside the destination, which is renamed at the end. So the destination is
complete or does not exist, and an interrupted restore goes on where it stopped."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from etude.backups.manifest import MANIFEST, BackupFile, BackupManifest, encode_manifest, read_manifest
from etude.backups.writer import PIECE, _sync_folder
from etude.errors import BackupError, InputError
from etude.run import take_lock


def check_backup(backup: Path, *, on_file: Callable[[str], None] = lambda path: None) -> list[str]:
    """Compare every file of a backup with its manifest. Returns a sentence for each that differs or is missing.

    Raises `BackupError` if the manifest is missing or damaged. `on_file` is called after each file."""
    found = []
    for one in read_manifest(backup).files:
        try:
            _copied(backup, one, None)
        except BackupError as error:
            found.append(f"{error.what}: {error.facts}")
        on_file(one.path)
    return found


def restore(backup: Path, destination: Path, *, on_file: Callable[[str], None] = lambda path: None) -> BackupManifest:
    """Write all files of a backup to the new folder `destination`. Returns the manifest.

    `destination` must not exist, or be empty. `on_file` is called after each file. Raises `InputError` when it is not
    empty, and `BackupError` when the backup is damaged or the disk is full: then the destination is unchanged."""
    if destination.exists() and not (destination.is_dir() and not any(destination.iterdir())):
        hint = "give a new folder; a backup never overwrites anything"
        raise InputError(f"{destination} is not empty", hint=hint)
    manifest = read_manifest(backup)
    destination = destination.absolute()
    partial = destination.with_name(f".{destination.name}.restoring")
    try:
        partial.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock, holder = take_lock(partial.with_name(f"{partial.name}.lock"))
        if lock is None:
            raise BackupError(f"{destination} is being restored", f"by process {holder}", hint="wait until it ends")
        try:
            _restore(backup, partial, manifest, on_file)
            partial.replace(destination)
            _sync_folder(destination.parent)
            partial.with_name(f"{partial.name}.lock").unlink()
        finally:
            os.close(lock)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        hint = "free space" if full else "check the disk and its permissions"
        facts = f"{error.strerror or error} ({error.filename or partial})"
        again = f"{hint}, then repeat the command: it goes on where it stopped"
        raise BackupError(f"{destination} cannot be written", facts, hint=again) from error
    return manifest


def _restore(backup: Path, partial: Path, manifest: BackupManifest, on_file: Callable[[str], None]) -> None:
    token = partial / MANIFEST
    if not token.is_file() or token.read_bytes() != encode_manifest(manifest):  # a restore of another backup
        shutil.rmtree(partial)
        partial.mkdir(mode=0o700)
        token.write_bytes(encode_manifest(manifest))
    left = sum(one.size for one in manifest.files if not _is_there(partial / one.path, one))
    free = shutil.disk_usage(partial).free
    if left > free:
        raise OSError(errno.ENOSPC, f"{left:,} bytes are needed, {free:,} are free", str(partial))
    folders = set()
    for one in manifest.files:
        place = partial / one.path
        if not _is_there(place, one):
            place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _copied(backup, one, place)
        folders.add(place.parent)
        on_file(one.path)
    for folder in folders:
        _sync_folder(folder)
    token.unlink()


def _is_there(place: Path, file: BackupFile) -> bool:
    """Whether an interrupted restore has completed this file. It is renamed into place after it was proven."""
    try:
        return place.stat().st_size == file.size
    except OSError:
        return False


def _copied(backup: Path, file: BackupFile, place: Path | None) -> None:
    """Read a file of a backup, copy it to `place` if that is given, and compare it with the manifest."""
    hint = "restore another backup; etude restore --check BACKUP lists all damaged files"
    digest, size = hashlib.sha256(), 0
    target = None
    temporary = None if place is None else place.with_name(f".{place.name[:200]}.part")
    try:
        try:
            source = (backup / file.path).open("rb")
        except OSError as error:
            raise BackupError(f"{backup / file.path} cannot be read", str(error.strerror), hint=hint) from None
        with source:
            target = None if temporary is None else temporary.open("wb")
            while data := source.read(PIECE):
                digest.update(data)
                size += len(data)
                if target is not None:
                    target.write(data)
        if (size, digest.hexdigest()) != (file.size, file.sha256):
            facts = f"it has {size} bytes, SHA-256 {digest.hexdigest()[:12]}; the manifest says {file.size} bytes, "
            raise BackupError(f"{backup / file.path} is damaged", facts + file.sha256[:12], hint=hint)
        if target is not None and temporary is not None and place is not None:
            target.flush()
            os.fsync(target.fileno())
            target.close()
            temporary.chmod(file.mode)
            os.utime(temporary, ns=(file.mtime_ns, file.mtime_ns))
            temporary.replace(place)
    finally:
        if target is not None:
            target.close()
        if temporary is not None:
            temporary.unlink(missing_ok=True)
