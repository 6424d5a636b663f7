"""What a long search has found so far, kept in a file: one that was interrupted goes on where it stopped.

One JSON line for each thing that was tried, appended once its outcome is durable; a torn last line is tried again.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import msgspec

from etude.errors import StoreError


class Keyed(Protocol):
    """A dataclass whose `key` says what was tried, with what it was tried with."""

    @property
    def key(self) -> str: ...


K = TypeVar("K", bound=Keyed)


class Journal(Generic[K]):
    """The entries of a file, by key. Raises `StoreError`."""

    def __init__(self, path: Path, kind: type[K]) -> None:
        self.path = path
        self.entries: dict[str, K] = {}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            text = path.read_bytes() if path.exists() else b""
        except OSError as error:
            hint = "give a folder that may be written"
            raise StoreError(f"{path.parent} cannot be used", str(error), hint=hint) from None
        self._torn = bool(text) and not text.endswith(b"\n")
        for line in text.splitlines():
            try:
                entry = msgspec.json.decode(line, type=kind)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                continue
            self.entries[entry.key] = entry

    def add(self, entry: K) -> None:
        """Keep an entry, durably."""
        self.entries[entry.key] = entry
        try:
            with self.path.open("ab") as file:
                file.write(b"\n" * self._torn + msgspec.json.encode(entry) + b"\n")
                file.flush()
                os.fsync(file.fileno())
            self._torn = False
        except OSError as error:
            hint = "make room, and begin again: what is there is not tried twice"
            raise StoreError(f"{self.path} cannot be written", str(error), hint=hint) from None
