"""The manifest of a backup: its files with size and SHA-256, its sources, and what it does not contain."""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath

import msgspec

from etude.errors import BackupError
from etude.file_checksums import SHA256, sealed, verify_json

FORMAT = 1
MANIFEST = "manifest.json"
_MAX_PATH = 4096


class BackupFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file of a backup.

    - `path`: relative to the backup, with slashes. Its first part is the name of its source.
    - `size`, `sha256`: of the copy.
    - `mode`: permission bits.
    - `mtime_ns`: when the original was last changed, in nanoseconds since 1970.
    - `original_size`: size of the original when it was copied, in bytes. Larger than `size` where a log was cut at the
      end of a line, and another number for a database.
    - `fixed`: the original never changes once it is written. The next backup links such a file if size and time of the
      original are the same."""

    path: str
    size: int
    sha256: str
    mode: int
    mtime_ns: int
    original_size: int
    fixed: bool


class BackupSource(msgspec.Struct, frozen=True, kw_only=True):
    """What was backed up: the `name` of its folder or file in the backup, its kind, and its absolute path `origin`."""

    name: str
    kind: str
    origin: str


class BackupManifest(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a backup.

    - `created`: ISO 8601, in UTC.
    - `etude`: the version of etude that wrote it.
    - `left_out`: what is not in the backup and must be restored from elsewhere, one sentence each.
    - `damaged`: files whose original differed from its own checksum when it was copied, one sentence each."""

    format: int
    created: str
    etude: str
    sources: tuple[BackupSource, ...]
    left_out: tuple[str, ...]
    damaged: tuple[str, ...]
    files: tuple[BackupFile, ...]


def encode_manifest(manifest: BackupManifest) -> bytes:
    """Encode a manifest as JSON with its own SHA-256."""
    return json.dumps(sealed(msgspec.to_builtins(manifest)), indent=1).encode()


def read_manifest(backup: Path) -> BackupManifest:
    """Read the manifest of a backup. Raises `BackupError` when it is missing, damaged or of another format."""
    path = backup / MANIFEST
    try:
        data = path.read_bytes()
    except OSError as error:
        facts = f"{path}: {error.strerror}; a backup without a manifest was not finished"
        hint = "give a folder of one finished backup, such as BACKUPS/20260131T020000Z"
        raise BackupError(f"{backup} is not a finished backup", facts, hint=hint) from None
    return _decode(data, path)


def _decode(data: bytes, path: Path) -> BackupManifest:
    hint = "use another backup; this one cannot be trusted"
    try:
        found = json.loads(data)
        if not isinstance(found, dict):
            raise TypeError("it is not an object")
        if found.get("format") != FORMAT:
            raise BackupError(
                f"{path} has format {str(found.get('format'))[:20]}",
                f"this version of etude reads backups of format {FORMAT}",
                hint="use the etude version that wrote it",
            )
        verify_json(found, path, must=True, kind=BackupError)
        del found[SHA256]
        manifest = msgspec.convert(found, BackupManifest)
    except (ValueError, TypeError, RecursionError) as error:
        raise BackupError(f"{path} is damaged", str(error)[:200], hint=hint) from None
    for name in (*(one.path for one in manifest.files), *(one.name for one in manifest.sources)):
        if not is_inside(name):
            raise BackupError(f"{path} names a file outside of the backup", repr(name)[:200], hint=hint)
    return manifest


def is_inside(path: str) -> bool:
    """Return whether a relative path stays inside its folder.

    >>> is_inside("run/weights/pointers/policy"), is_inside("../secret"), is_inside("/etc/passwd"), is_inside("a//b")
    (True, False, False, False)
    """
    parts = path.split("/")
    plain = all(part not in ("", ".", "..") and "\0" not in part for part in parts)
    return plain and len(path) <= _MAX_PATH and not PurePosixPath(path).is_absolute()
