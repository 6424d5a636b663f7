"""Finds the store that a RUN|STORE argument names, and reports when it does not answer."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TextIO
from urllib.parse import unquote

from etude.cli.locations import RUNS, open_run
from etude.errors import InputError
from etude.loop.locations import weights_location, weights_store
from etude.run import RunFolder
from etude.seams import BlobStore
from etude.stores import BucketStore, open_store
from etude.stores.http import HttpStore

_STORE_FOLDERS = ("pointers", "branches", "manifests")
_EMPTY_STORE = (".tmp", ".lock", "objects", "later")
"""What the directory of a store may contain before its first publish has finished."""
_POINTERS = ("pointers/", "branches/")
_REPORT_AFTER_S = 2.5


def named_store(text: str | None, *, readonly: bool = True) -> BlobStore:
    """Open the store that a RUN|STORE argument names. Raises `NoRun`.

    It is a URL, the directory of a store, or a run, which stands for the store of its weights. None means the newest
    run."""
    if text is not None and is_store(text):
        return reporting_store(text, sys.stderr, readonly=readonly)
    return weights_store(open_run(None if text is None else Path(text)), readonly=readonly)


def is_store(text: str | None) -> bool:
    """Return whether a RUN|STORE argument names a store: a URL, or a directory with pointers or manifests."""
    return text is not None and ("://" in text or any((Path(text) / folder).is_dir() for folder in _STORE_FOLDERS))


def existing_store(location: str, *, cache: Path | None = None, readonly: bool = False) -> BlobStore:
    """Open the store at a URL, in a directory, or of a run, which may have no version yet. Raises `InputError`.

    Never creates a store in a mistyped path, or in a directory with other files. `cache` is a folder for fetched
    objects."""
    if "://" not in location:
        if (run := _run_at(Path(location))) is not None and cache is None:
            return weights_store(run, readonly=readonly)
        location = store_directory(Path(location))
    return open_store(location, cache=cache, readonly=readonly)


def store_directory(path: Path) -> str:
    """Return the location of the store that a path names: the path itself, or the weights of the run there.

    Raises `InputError`."""
    hint = "give a run, its weights (RUN/weights), a store's directory, s3://bucket/prefix, gs:// or az://"
    if (run := _run_at(path)) is not None:
        return str(weights_location(run))
    if not path.is_dir():
        raise InputError(f"no store at {path}", "the folder does not exist", hint=hint)
    if not is_store(str(path)) and any(found.name not in _EMPTY_STORE for found in path.iterdir()):
        folders = ", ".join(f"{name}/" for name in _STORE_FOLDERS)
        raise InputError(f"{path} is not a store", f"it has files, but none of {folders}", hint=hint)
    return str(path)


def is_same_store(location: str, other: str) -> bool | None:
    """Return whether two locations (a URL, the directory of a store, or a run) are of one store; None if the first is
    a path where no store is any more."""
    try:
        first, second = _resolved(location), _resolved(other)
    except InputError:
        return None
    return first == second


def _resolved(location: str) -> str:
    if "://" not in location:
        location = store_directory(Path(location))
    if location.startswith("file://"):
        location = unquote(location.removeprefix("file://"))
    return location.rstrip("/") if "://" in location else str(Path(location).resolve())


def _run_at(path: Path) -> RunFolder | None:
    """The run that a path names: its folder, its name in runs/, or its weights folder."""
    for folder in (path, RUNS / path, *([path.parent] if path.name == "weights" else [])):
        if (folder / "run.json").is_file():
            return RunFolder(folder) if folder == path.parent else RunFolder.open(folder)
    return None


def reporting_store(location: str, out: TextIO, *, cache: Path | None = None, readonly: bool = False) -> BlobStore:
    """Open an existing store. If it is remote, a line is printed to `out` while it does not answer.

    `cache` is a folder for fetched objects."""
    remote = existing_store(location, readonly=readonly)
    store = remote if cache is None else existing_store(location, cache=cache, readonly=readonly)
    if not isinstance(remote, HttpStore | BucketStore):
        return store
    return ReportingStore(store, location, remote.deadline_s, partial(print, file=out, flush=True))


class ReportingStore:
    """A `BlobStore` that reports when the store behind it does not answer.

    That store retries requests by itself, for up to `deadline_s` seconds. Only reads of pointers are timed. They are
    small, so a slow answer means that the store is unreachable; a large object may take long for other reasons.
    `location` is the name in the messages. `report` is called from another thread with a line when a pointer takes
    longer than `after_s` seconds, and with another line when the store answers again. Use it in one thread."""

    def __init__(
        self,
        store: BlobStore,
        location: str,
        deadline_s: float,
        report: Callable[[str], None],
        *,
        after_s: float = _REPORT_AFTER_S,
    ) -> None:
        self._store, self._location, self._deadline_s = store, location, deadline_s
        self._report, self._after_s = report, after_s
        self._unreachable = threading.Event()

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        if not key.startswith(_POINTERS):
            return self._store.get(key, start, stop)
        timer = threading.Timer(self._after_s, self._report_waiting, (key, time.time()))
        timer.daemon = True
        timer.start()
        answered = False
        try:
            data = self._store.get(key, start, stop)
            answered = True
            return data
        except KeyError:
            answered = True
            raise
        finally:
            timer.cancel()
            timer.join()
            if answered and self._unreachable.is_set():
                self._unreachable.clear()
                self._report(f"{self._location} answers again")

    def put(self, key: str, data: bytes) -> None:
        self._store.put(key, data)

    def list(self, prefix: str) -> list[str]:
        return self._store.list(prefix)

    def delete(self, key: str) -> None:
        self._store.delete(key)

    def compare_and_swap(self, key: str, expected: bytes | None, data: bytes) -> bool:
        return self._store.compare_and_swap(key, expected, data)

    def _report_waiting(self, key: str, since: float) -> None:
        if not self._unreachable.is_set():
            self._unreachable.set()
            until = _clock(since + self._deadline_s)
            self._report(
                f"waiting: {self._location} has not answered since {_clock(since)} ({key}); retrying until {until}"
            )


def _clock(time_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(time_s))
