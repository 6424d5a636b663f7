"""Reading a channel: its pointers, its lineage, its chain.

Two orders are kept apart. The *chain* is the order of publishing: each delta applies to the version before. The
*lineage* is the order of training: each version was trained from its parent. They differ after a restart from an
older checkpoint. Reads only; every byte is checked against the SHA-256 of the reference that led to it.
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
from etude.weights.chain.signing import verified

_HINT_MANIFEST = (
    "copy that file back; without a copy, publishing again writes a fresh anchor:"
    " `etude weights publish CHECKPOINT STORE`, or a run's `etude run --resume RUN`"
)


def pointer_key(name: str, branch: str = "") -> str:
    """Where a channel's pointer is, or that of a branch of it. Raises `WeightsError` for a name no branch may have."""
    if branch and not re.fullmatch("[a-z0-9][a-z0-9_-]{0,63}", branch):
        raise WeightsError(f"branch name {branch!r} is not allowed", hint="use a-z, 0-9, _ and -")
    return f"branches/{name}/{branch}" if branch else f"pointers/{name}"


def head(store: BlobStore, name: str, branch: str = "", *, public_key: bytes | None = None) -> Pointer | None:
    """Where the channel, or a branch of it, stands; None before its first publish. One small read.

    `public_key`: only a pointer that its owner signed is believed. Raises `WeightsError`, `StoreError`.
    """
    key = pointer_key(name, branch)
    try:
        pointer = read_pointer(store.get(key, 0, MAX_POINTER_BYTES + 1))
    except KeyError:
        return None
    if public_key is not None and not verified(public_key, signed_text(key, pointer), pointer.signature):
        raise WeightsError(
            f"{key} names {pointer.head.version} and is not signed with the key that this reader trusts",
            "its signature is another's" if pointer.signature else "it has no signature",
            hint="give the writer the private key that belongs to the public one, or find out who wrote this",
        )
    return pointer


def pointers(store: BlobStore, name: str) -> dict[str, Pointer]:
    """Every pointer into a channel's versions, its own and its branches', by key. Raises `WeightsError`."""
    own = head(store, name)
    found = {pointer_key(name): own} if own else {}
    for key in store.list(f"branches/{name}/"):
        pointer = head(store, name, key.rpartition("/")[2])
        if pointer is not None:
            found[key] = pointer
    return found


def load(store: BlobStore, ref: Ref) -> Manifest:
    """The manifest that a reference names. Raises `WeightsError` when it is gone or is not what was referred to."""
    try:
        data = store.get(ref.key, 0, MAX_MANIFEST_BYTES + 1)
    except KeyError:
        raise WeightsError(f"manifest of {ref.version} is gone", ref.key, hint=_HINT_MANIFEST) from None
    if hashlib.sha256(data).hexdigest() != ref.sha256:
        raise WeightsError(f"manifest of {ref.version} is not what was published", ref.key, hint=_HINT_MANIFEST)
    manifest = read_manifest(data)
    if manifest.version != ref.version:
        raise WeightsError(f"manifest of {ref.version} describes {manifest.version}", hint=_HINT_MANIFEST)
    return manifest


def find(store: BlobStore, name: str, version: Version) -> Manifest | None:
    """The manifest of a version, whether the head leads to it or not. The version's digest proves what it says of the
    tensors, and that alone."""
    return next((manifest for _, manifest in stored(store, name, version)), None)


def lineage(store: BlobStore, name: str) -> list[Manifest]:
    """The versions the head was trained through, the root first: what "trained" means. Raises `WeightsError`."""
    return _walk(store, name, lambda manifest: manifest.parent)


def chain(store: BlobStore, name: str) -> list[Manifest]:
    """Every version up to the head in order of publishing, the first anchor first. Raises `WeightsError`."""
    return _walk(store, name, lambda manifest: manifest.base)


def readable(store: BlobStore, name: str, *, trained: bool = True) -> tuple[list[Manifest], Ref | None]:
    """`lineage` (or `chain`, with `trained` False) as far back from the head as manifests are whole, the oldest first;
    and the reference to the lost or damaged one at which it ends, None at the root."""
    found = [*backward(store, name, trained=trained)]
    ref = found.pop() if found and isinstance(found[-1], Ref) else None
    return [one for one in reversed(found) if isinstance(one, Manifest)], ref if isinstance(ref, Ref) else None


def backward(store: BlobStore, name: str, *, trained: bool = True) -> Iterator[Manifest | Ref]:
    """The manifests of `lineage` (or of `chain`) from the head back, one at a time; at last the reference to a lost or
    damaged one, if it ends at one."""
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
    """Every whole manifest of a channel, or of one version, committed or not, by key. Damaged ones are passed over, and
    those of another channel that somebody put there, whoever signed them."""
    for key in store.list(f"manifests/{name}/" + (f"{version}-" if version else "")):
        with suppress(WeightsError, KeyError):
            data = store.get(key, 0, MAX_MANIFEST_BYTES + 1)
            manifest = read_manifest(data)
            if manifest.channel == name and (version is None or manifest.version == version):
                yield Ref(manifest.version, key, hashlib.sha256(data).hexdigest()), manifest


def committed(store: BlobStore, name: str) -> list[tuple[Ref, Manifest]]:
    """The whole manifests that another one builds on or was trained from, by key: those that surely were published,
    whatever became of the pointer. The head is not among them: only the pointer says that it was committed."""
    return built_on([*stored(store, name)])


def built_on(manifests: Sequence[tuple[Ref, Manifest]]) -> list[tuple[Ref, Manifest]]:
    """Those of some manifests that another of them builds on or was trained from."""
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
