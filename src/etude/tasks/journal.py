"""A file with the results of a long search, so that an interrupted search can resume.

One JSON line per attempt, appended when its result is durable. An incomplete last line is ignored and tried again.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import msgspec

from etude.errors import StoreError


class Keyed(Protocol):
    """A dataclass whose `key` identifies an attempt of a search and its settings."""

    @property
    def key(self) -> str: ...


K = TypeVar("K", bound=Keyed)


class Journal(Generic[K]):
    """The results of a search, kept in a file: `entries` has them by key.

    `kind` is the dataclass of an entry. Raises `StoreError` if the file's folder cannot be used."""

    def __init__(self, path: Path, kind: type[K]) -> None:
        self.path = path
        self.entries: dict[str, K] = {}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            text = path.read_bytes() if path.exists() else b""
        except OSError as error:
            hint = "give a writable folder"
            raise StoreError(f"{path.parent} cannot be used", str(error), hint=hint) from None
        self._torn = bool(text) and not text.endswith(b"\n")
        for line in text.splitlines():
            try:
                entry = msgspec.json.decode(line, type=kind)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                continue
            self.entries[entry.key] = entry

    def add(self, entry: K) -> None:
        """Append an entry and sync the file to disk. Raises `StoreError` if this fails."""
        self.entries[entry.key] = entry
        try:
            with self.path.open("ab") as file:
                file.write(b"\n" * self._torn + msgspec.json.encode(entry) + b"\n")
                file.flush()
                os.fsync(file.fileno())
            self._torn = False
        except OSError as error:
            hint = "free disk space and repeat the command: finished attempts are not repeated"
            raise StoreError(f"{self.path} cannot be written", str(error), hint=hint) from None
