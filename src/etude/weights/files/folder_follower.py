"""A checkpoint directory that follows a channel: `etude weights follow STORE --apply DIR`.

For engines that load from disk, a mirror in another region, a standby. At its start, the content of the directory is
verified and used as the starting point, so a restart fetches only what it missed. A pointer that moved back while it
was not running is refused. Tensors that were published in parts are complete tensors in the directory.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from etude.errors import InputError
from etude.records.completion import Version
from etude.seams import BlobStore
from etude.weights.chain import history
from etude.weights.files.folder import STATE, CheckpointFolder
from etude.weights.follow.follower import Follower, Update
from etude.weights.follow.head_tracker import LIMIT_BYTES, MovedBack
from etude.weights.follow.parts import assemble, full_specs, part_of, split
from etude.weights.tensors import Spec, tensor_digest


@dataclass(frozen=True)
class AdoptedVersion:
    """A version that `FolderFollower.advance` wrote to the directory, and the work it took.

    `list_bytes`: memory of the decoded lists of changes. `fetch_s`: seconds of fetching, decoding and verifying.
    `healed`: the errors of failed attempts, after which another delta or snapshot worked.
    """

    version: Version
    fetched_bytes: int
    written_bytes: int
    list_bytes: int
    fetch_s: float
    write_s: float
    healed: tuple[str, ...]


class FolderFollower:
    """Moves a checkpoint directory (`folder`) to the newest version of channel `name`. Not thread-safe.

    The other arguments are those of `Follower`. Raises `StoreError`.
    """

    def __init__(
        self,
        store: BlobStore,
        folder: CheckpointFolder,
        name: str = "policy",
        *,
        branch: str = "",
        limit_bytes: int = LIMIT_BYTES,
        public_key: bytes | None = None,
    ) -> None:
        self._folder = folder
        self._store, self._name, self._branch, self._public_key = store, name, branch, public_key
        self._follower = Follower(
            store, name, branch=branch, limit_bytes=limit_bytes, public_key=public_key, followed=folder.followed
        )
        self.resumed = folder.version is not None and self._follower.start_from(folder.version, folder.tensors)
        """Whether the directory had an intact version of the channel, which was used as the starting point."""
        self.damaged = () if folder.version is None or self.resumed else self._damaged(folder.version)
        """Names of files whose content differs from the version that was written there. The first `advance` repairs
        them."""
        self._pending: Update | None = None  # verified, and not yet written to disk

    def advance(self) -> AdoptedVersion | None:
        """Write the newest version to the directory. Return what was done; None if there is no newer version.

        Raises the errors of `Follower.advance`. Raises `StoreError` if the disk refuses a write; then the directory is
        unchanged, or the update is completed when the directory is opened again or this is called again. Raises
        `InputError`, before anything is fetched, if the directory never followed a channel and has a checkpoint of
        another model.
        """
        self._refuse_others()
        update = self._pending = self._advance() or self._pending
        followed = self._follower.followed
        if update is None:
            if followed is not None:
                self._folder.remember(followed)
            return None
        started = time.perf_counter()
        published = self._follower.tensors
        written = self._folder.adopt(update.version, assemble(published), followed=followed)
        self._follower.rebind(split(self._folder.tensors, published))
        self._pending = None
        return AdoptedVersion(
            version=update.version,
            fetched_bytes=update.fetched_bytes,
            written_bytes=written,
            list_bytes=list_bytes(update),
            fetch_s=update.fetch_s,
            write_s=time.perf_counter() - started,
            healed=update.healed,
        )

    def _damaged(self, version: Version) -> tuple[str, ...]:
        """Return the files that lack tensors of a version; none for a version that the channel does not have."""
        manifest = history.find(self._store, self._name, version)
        if manifest is None:
            return ()
        held = split(self._folder.tensors, (entry.name for entry in manifest.tensors))
        whole = {
            entry.name
            for entry in manifest.tensors
            if entry.name in held and tensor_digest(held[entry.name]) == entry.sha256
        }
        wrong = {entry.name for entry in manifest.tensors} - whole
        wrong = {part.tensor if (part := part_of(name)) else name for name in wrong}
        known = full_specs({entry.name: entry.spec for entry in manifest.tensors})
        return self._folder.files(wrong | (self._folder.tensors.keys() - known.keys()))

    def _advance(self) -> Update | None:
        try:
            return self._follower.advance()
        except MovedBack as error:
            if self.resumed:
                raise
            there = self._folder.path / STATE
            raise MovedBack(
                error.what, error.facts, hint=f"{error.hint}; if you changed the store on purpose, remove {there}"
            ) from None

    def _refuse_others(self) -> None:
        """Raise `InputError` if a checkpoint that was not written by a follower has other tensors than the channel."""
        held = {name: tensor.spec for name, tensor in self._folder.tensors.items()}
        if not held or self._folder.version is not None:
            return
        pointer = history.head(self._store, self._name, self._branch, public_key=self._public_key)
        if pointer is None:
            return
        manifest = history.load(self._store, pointer.head)
        published = full_specs({entry.name: entry.spec for entry in manifest.tensors})
        if facts := differences(held, published):
            raise InputError(
                f"{self._folder.path} has another checkpoint than channel {self._name!r}",
                facts,
                hint="name a new directory, or one with a copy of the channel's model; nothing was changed",
            )


def differences(held: Mapping[str, Spec], published: Mapping[str, Spec]) -> str:
    """Describe how the tensors of a checkpoint differ from a channel's in name, dtype or shape; "" if they do not."""
    different = [name for name in sorted({*held, *published}) if held.get(name) != published.get(name)]
    if not different:
        return ""
    missing, new = len(published.keys() - held.keys()), len(held.keys() - published.keys())
    kinds = ((missing, "missing"), (new, "new"), (len(different) - missing - new, "of another dtype or shape"))
    name = different[0]
    return (
        f"tensors that differ: {len(different)} ({', '.join(f'{num} {kind}' for num, kind in kinds if num)}),"
        f" {name!r} first: {_spec_text(held.get(name))} there, {_spec_text(published.get(name))} in the channel"
    )


def _spec_text(spec: Spec | None) -> str:
    return f"{spec.dtype} {list(spec.shape)}" if spec else "none"


def list_bytes(update: Update) -> int:
    """Return the memory of the lists of changed elements in an update, in bytes."""
    return sum(places.nbytes + codes.nbytes for places, codes in update.changed.values())
