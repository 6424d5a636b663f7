"""Watch folders for changes by listing them again and again.

A rename is reported as a removal and a creation.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Mapping

from etude.environments.remote import messages as m
from etude.environments.remote.connect import Code, RpcError
from etude.environments.remote.files import Found

_MAX_WATCHES = 64  # of one machine

ListFolder = Callable[[], Awaitable[Mapping[str, Found]]]


def changes(before: Mapping[str, Found], after: Mapping[str, Found], *, include_entry: bool) -> list[m.Change]:
    """Return the changes from the listing `before` to the listing `after` of a folder. Both map relative paths to
    entries.

    With `include_entry`, a change contains the new entry.

    >>> changes({}, {}, include_entry=False)
    []
    """
    found: list[tuple[str, str, Found | None]] = [
        (name, "REMOVE", None) for name, old in before.items() if name not in after or after[name].inode != old.inode
    ]
    for name, new in after.items():
        old = before.get(name)
        if old is None or old.inode != new.inode:
            found.append((name, "CREATE", new))
            if new.entry.type == "FILE_TYPE_FILE" and new.entry.size != "0":
                found.append((name, "WRITE", new))
            continue
        if not new.is_folder and (old.changed, old.entry.size) != (new.changed, new.entry.size):
            found.append((name, "WRITE", new))
        if (old.entry.mode, old.entry.owner) != (new.entry.mode, new.entry.owner):
            found.append((name, "CHMOD", new))
    return [
        m.Change(name=name, type=f"EVENT_TYPE_{kind}", entry=found.entry if found and include_entry else None)
        for name, kind, found in found
    ]


class FolderWatcher:
    """A watched folder: compares its current listing with the previous one.

    `list_folder` is awaited for each listing. With `include_entry`, a change contains the new entry."""

    def __init__(self, list_folder: ListFolder, *, include_entry: bool) -> None:
        self._list_folder, self._include_entry = list_folder, include_entry
        self._before: Mapping[str, Found] = {}

    async def start(self) -> None:
        """List the folder for the first time. Raises `RpcError` if it is not a folder."""
        self._before = await self._list_folder()

    async def changes(self) -> list[m.Change]:
        """Return the changes since the last call."""
        before, self._before = self._before, await self._list_folder()
        return changes(before, self._before, include_entry=self._include_entry)


class FolderWatchers:
    """The watchers of one sandbox, by id. Clients poll them for changes."""

    def __init__(self) -> None:
        self._watchers: dict[str, FolderWatcher] = {}

    def add(self, watcher: FolderWatcher) -> str:
        """Add a watcher and return its new id. Raises `RpcError` if the sandbox has too many."""
        if len(self._watchers) >= _MAX_WATCHES:
            raise RpcError(
                Code.RESOURCE_EXHAUSTED, f"{len(self._watchers)} folders are watched already", hint="remove a watcher"
            )
        watcher_id = secrets.token_hex(8)
        self._watchers[watcher_id] = watcher
        return watcher_id

    def get(self, watcher_id: str) -> FolderWatcher:
        """Return the watcher with this id. Raises `RpcError` if there is none."""
        if watcher_id not in self._watchers:
            raise RpcError(Code.NOT_FOUND, f"no watcher {watcher_id[:40]!r}")
        return self._watchers[watcher_id]

    def remove(self, watcher_id: str) -> None:
        """Remove the watcher with this id. Raises `RpcError` if there is none."""
        self.get(watcher_id)
        del self._watchers[watcher_id]
