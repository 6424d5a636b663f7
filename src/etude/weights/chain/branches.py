"""Branches and rollbacks: pointers to versions that are moved by hand.

A pointer is a small stored object that names a version. The channel's own pointer belongs to its writer and names the
newest version. A branch ("stable", "canary") is an additional pointer: engines that follow it stay at its version.
Moving a pointer by hand raises its generation, which tells readers that a move to an older version is intended. A
writer whose pointer was moved by hand gets an error at its next publish.
"""

from __future__ import annotations

from etude.errors import WeightsError
from etude.records.completion import Version
from etude.seams import BlobStore
from etude.weights.chain import history, plans
from etude.weights.chain.commit import Outcome, commit, read_pointer_bytes
from etude.weights.chain.garbage_records import pending_keys
from etude.weights.chain.manifest import FORMAT, Manifest, Pointer, Ref, read_pointer
from etude.weights.chain.ownership import check_owner
from etude.weights.chain.signing import Signer, write_signed

_MAX_TRIES = 3


def point(store: BlobStore, name: str, version: Version, *, branch: str = "", signer: Signer | None = None) -> Pointer:
    """Point a branch at a stored version of channel `name`, and return the new pointer.

    With `branch` empty, move the channel's own pointer: a rollback. Otherwise the branch is created if it does not
    exist. `signer` signs the new pointer; None leaves it unsigned.

    Raises `WeightsError` if the version cannot be rebuilt, if the old pointer is signed with another key, or if another
    process moves the pointer at the same time. In the last case, the change of that process remains.
    """
    key = history.pointer_key(name, branch)
    ref, manifest = _stored(store, name, version)
    for _ in range(_MAX_TRIES):
        data = read_pointer_bytes(store, key)
        old = read_pointer(data) if data is not None else None
        check_owner(store, name, key, old, signer)
        pointer = Pointer(
            format=FORMAT,
            head=ref,
            nonce=manifest.nonce,
            generation=old.generation + 1 if old else manifest.generation,
            sweep=old.sweep if old else 0,
        )
        moved = write_signed(key, pointer, signer)
        outcome = commit(store, key, data, moved)
        if outcome in (Outcome.WON, Outcome.HEALED):
            _refuse_doomed(store, name, key, manifest, data, moved)
            return pointer
        if outcome is Outcome.LOST:
            break
    raise WeightsError(
        f"{key} could not be moved to {version}",
        f"another process moved it at the same time: {_named(store, key)}",
        hint="check which version it names now (etude weights log), then repeat the command if needed",
    )


def drop(store: BlobStore, name: str, branch: str) -> None:
    """Delete a branch of channel `name`. Does nothing if it does not exist. Raises `WeightsError` if `branch` is "".

    Its versions stay in the store until garbage collection.
    """
    if not branch:
        raise WeightsError("a channel's own pointer cannot be deleted", hint="give the name of a branch")
    store.delete(history.pointer_key(name, branch))


def list_branches(store: BlobStore, name: str) -> dict[str, Pointer]:
    """Return the branches of channel `name`: branch name -> the pointer, which names the version of the branch."""
    own = history.pointer_key(name)
    return {key.rpartition("/")[2]: pointer for key, pointer in history.pointers(store, name).items() if key != own}


def _stored(store: BlobStore, name: str, version: Version) -> tuple[Ref, Manifest]:
    """Return the manifest of a version, after checking that all objects needed to rebuild it exist."""
    for ref, manifest in history.stored(store, name, version):
        plan = plans.Search(store, manifest).cheapest(None)
        if plan is not None and all(_is_there(store, item) for hop in plan.hops for item in _keys(hop)):
            return ref, manifest
    raise WeightsError(
        f"no branch of channel {name!r} can point at {version}",
        "this version was never published, or its objects were garbage-collected or lost",
        hint="`etude weights log` lists the versions, `etude weights fsck` what is damaged",
    )


def _refuse_doomed(
    store: BlobStore, name: str, key: str, manifest: Manifest, before: bytes | None, moved: bytes
) -> None:
    """Undo the move of a pointer if garbage collection is about to delete what the pointer needs."""
    plan = plans.Search(store, manifest).cheapest(None)
    doomed = pending_keys(store, name)
    if plan is not None and not any(item in doomed for hop in plan.hops for item in _keys(hop)):
        return
    if before is not None:
        store.compare_and_swap(key, moved, before)
    elif read_pointer_bytes(store, key) == moved:
        store.delete(key)
    raise WeightsError(
        f"{manifest.version} is being garbage-collected",
        f"no pointer of channel {name!r} has named it for longer than versions are kept",
        hint="choose a newer version; to keep a version, point a branch at it before garbage collection starts",
    )


def _keys(hop: plans.Hop) -> list[str]:
    return [item.key for item in hop.way.objects]


def _is_there(store: BlobStore, key: str) -> bool:
    try:
        store.get(key, 0, 1)
    except KeyError:
        return False
    return True


def _named(store: BlobStore, key: str) -> str:
    data = read_pointer_bytes(store, key)
    return f"it names {read_pointer(data).head.version}" if data is not None else "it is missing"
