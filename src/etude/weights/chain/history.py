"""Reads a channel: its pointers, its chain, its lineage.

There are two orders of versions. The *chain* is the order of publishing: each delta applies to the version published
before, its *base*. The *lineage* is the order of training: each version was trained from its *parent*. They differ
after a restart from an older checkpoint. Reads only; every manifest is verified by the SHA-256 in the reference that
led to it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from etude.errors import WeightsError
from etude.records.completion import Version
from etude.seams import BlobStore
from etude.weights.chain.manifest import (
    MAX_MANIFEST_BYTES,
    MAX_POINTER_BYTES,
    Manifest,
    Pointer,
    Ref,
    read_manifest,
    read_pointer,
    signed_text,
)
from etude.weights.chain.signing import verify_signature

_HINT_MANIFEST = (
    "restore that file; without a copy, publishing again writes a new full snapshot:"
    " `etude weights publish CHECKPOINT STORE`, or a run's `etude run --resume RUN`"
)


def pointer_key(name: str, branch: str = "") -> str:
    """Return the store key of the pointer (the record of the newest version) of channel `name`, or of a branch.

    Raises `WeightsError` for a branch name that is not allowed.
    """
    if branch and not re.fullmatch("[a-z0-9][a-z0-9_-]{0,63}", branch):
        raise WeightsError(f"branch name {branch!r} is not allowed", hint="use a-z, 0-9, _ and -")
    return f"branches/{name}/{branch}" if branch else f"pointers/{name}"


def head(store: BlobStore, name: str, branch: str = "", *, public_key: bytes | None = None) -> Pointer | None:
    """Read the pointer of channel `name`, or of one of its branches: the small record that names the newest version.

    Return None before the first publish. `public_key`: accept only a pointer signed by this key (32 bytes). Raises
    `WeightsError` for a damaged pointer or a wrong signature, and `StoreError`.
    """
    key = pointer_key(name, branch)
    try:
        pointer = read_pointer(store.get(key, 0, MAX_POINTER_BYTES + 1))
    except KeyError:
        return None
    if public_key is not None and not verify_signature(public_key, signed_text(key, pointer), pointer.signature):
        raise WeightsError(
            f"{key} names {pointer.head.version} but is not signed with the key that this reader trusts",
            "it is signed with another key" if pointer.signature else "it has no signature",
            hint="give the writer the private key that belongs to the public one, or find out who wrote this",
        )
    return pointer


def pointers(store: BlobStore, name: str) -> dict[str, Pointer]:
    """Read all pointers of channel `name`, by store key: its own, to the newest version, and those of its branches.

    Raises `WeightsError` if one is damaged.
    """
    own = head(store, name)
    found = {pointer_key(name): own} if own else {}
    for key in store.list(f"branches/{name}/"):
        pointer = head(store, name, key.rpartition("/")[2])
        if pointer is not None:
            found[key] = pointer
    return found


def load(store: BlobStore, ref: Ref) -> Manifest:
    """Read the manifest (the description of a version) that a reference names.

    Raises `WeightsError` if it is missing or its SHA-256 differs.
    """
    try:
        data = store.get(ref.key, 0, MAX_MANIFEST_BYTES + 1)
    except KeyError:
        raise WeightsError(f"manifest of {ref.version} is missing", ref.key, hint=_HINT_MANIFEST) from None
    if hashlib.sha256(data).hexdigest() != ref.sha256:
        raise WeightsError(f"manifest of {ref.version} is not what was published", ref.key, hint=_HINT_MANIFEST)
    manifest = read_manifest(data)
    if manifest.version != ref.version:
        raise WeightsError(f"manifest of {ref.version} describes {manifest.version}", hint=_HINT_MANIFEST)
    return manifest


def find(store: BlobStore, name: str, version: Version) -> Manifest | None:
    """Find the manifest (the description) of a version of channel `name` among all stored ones; None if there is none.

    A version that no pointer leads to is found, too. Only the manifest's list of tensors is verified, by the digest in
    `version`.
    """
    return next((manifest for _, manifest in stored(store, name, version)), None)


def lineage(store: BlobStore, name: str) -> list[Manifest]:
    """Return the manifests of channel `name` from the first version to the newest, each trained from the one before.

    Versions that the newest was not trained from are not in the list. Raises `WeightsError` if a manifest cannot be
    read.
    """
    return _walk(store, name, lambda manifest: manifest.parent)


def chain(store: BlobStore, name: str) -> list[Manifest]:
    """Return the manifests of channel `name` up to the newest version, each published after the one before.

    The delta of each version applies to the one before it. After a restart from an older checkpoint, this order differs
    from the order of training (`lineage`). Raises `WeightsError` if a manifest cannot be read.
    """
    return _walk(store, name, lambda manifest: manifest.base)


def readable(store: BlobStore, name: str, *, trained: bool = True) -> tuple[list[Manifest], Ref | None]:
    """Return the readable end of `lineage` (with `trained` False, of `chain`), the oldest first.

    The list goes back from the newest version until a manifest is lost or damaged. The second result is the reference
    to that manifest; None if every manifest was readable.
    """
    found = [*backward(store, name, trained=trained)]
    ref = found.pop() if found and isinstance(found[-1], Ref) else None
    return [one for one in reversed(found) if isinstance(one, Manifest)], ref if isinstance(ref, Ref) else None


def backward(store: BlobStore, name: str, *, trained: bool = True) -> Iterator[Manifest | Ref]:
    """Yield the manifests of `lineage` (with `trained` False, of `chain`) one at a time, the newest first.

    At a lost or damaged manifest, yield the reference to it instead, and end.
    """
    pointer = head(store, name)
    ref = pointer.head if pointer else None
    while ref is not None:
        try:
            manifest = load(store, ref)
        except WeightsError:
            yield ref
            return
        yield manifest
        ref = manifest.parent if trained else manifest.base


def stored(store: BlobStore, name: str, version: Version | None = None) -> Iterator[tuple[Ref, Manifest]]:
    """Yield every readable manifest of channel `name`, or of one version, with its reference, sorted by key.

    Manifests of publishes that were never committed are among them. Damaged ones and those of other channels are
    skipped.
    """
    for key in store.list(f"manifests/{name}/" + (f"{version}-" if version else "")):
        with suppress(WeightsError, KeyError):
            data = store.get(key, 0, MAX_MANIFEST_BYTES + 1)
            manifest = read_manifest(data)
            if manifest.channel == name and (version is None or manifest.version == version):
                yield Ref(manifest.version, key, hashlib.sha256(data).hexdigest()), manifest


def committed(store: BlobStore, name: str) -> list[tuple[Ref, Manifest]]:
    """Return the stored manifests that were certainly published, with their references, sorted by key.

    These are the manifests on which another one builds, or from which it was trained. The newest version is not among
    them: only the pointer shows that it was published.
    """
    return built_on([*stored(store, name)])


def built_on(manifests: Sequence[tuple[Ref, Manifest]]) -> list[tuple[Ref, Manifest]]:
    """Return those of the manifests on which another of them builds, or from which it was trained."""
    named = {ref.key for _, manifest in manifests for ref in (manifest.parent, manifest.base) if ref}
    return [(ref, manifest) for ref, manifest in manifests if ref.key in named]


def _walk(store: BlobStore, name: str, before: Callable[[Manifest], Ref | None]) -> list[Manifest]:
    pointer = head(store, name)
    ref = pointer.head if pointer else None
    manifests = []
    while ref is not None:
        manifests.append(load(store, ref))
        ref = before(manifests[-1])
    return manifests[::-1]


class LineageSteps:
    """Iterates over the training history of the newest version, from the newest to the first: (step, rollout ids) of
    each.

    Each loop reads the store again, one manifest at a time. `down_to`: the step before which it ends (exclusive). If a
    manifest is lost or damaged, the loop ends there and `damaged` is set to its reference. The caller must then get the
    rollouts of earlier steps from another source.
    """

    def __init__(self, store: BlobStore, name: str = "policy", *, down_to: int = -1) -> None:
        self._store, self._name, self._down_to = store, name, down_to
        self.damaged: Ref | None = None

    def unread_up_to(self) -> int:
        """Return the step of the damaged manifest at which the last loop ended; 0 if it read everything."""
        return 0 if self.damaged is None else self.damaged.version.step

    def __iter__(self) -> Iterator[tuple[int, tuple[str, ...]]]:
        self.damaged = None
        for found in backward(self._store, self._name):
            if isinstance(found, Ref):
                self.damaged = found
                return
            if found.version.step <= self._down_to:
                return
            yield found.version.step, found.rollout_ids
