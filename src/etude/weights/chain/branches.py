"""Branches and rollbacks: a version that others follow is a pointer, and moving it is all there is to it.

The channel's own pointer is its writer's. A branch is a further one ("stable", "canary") that moves when somebody
decides so: engines that follow it stay where it is. Moving any pointer by hand raises its generation, which tells
readers that it was meant, even where it leads back; and a writer that held the channel's pointer is told at its next
publish. Knows nothing of why a version is good.
"""

from __future__ import annotations

from etude.errors import WeightsError
from etude.records.completion import Version
from etude.seams import BlobStore
from etude.weights.chain import history, plans
from etude.weights.chain.commit import Outcome, commit, read
from etude.weights.chain.manifest import FORMAT, Manifest, Pointer, Ref, read_pointer
from etude.weights.chain.ownership import check_owner
from etude.weights.chain.signing import Signer, write_signed
from etude.weights.chain.sweeps import doomed_keys

_MAX_TRIES = 3


def point(store: BlobStore, name: str, version: Version, *, branch: str = "", signer: Signer | None = None) -> Pointer:
    """Let a branch name a version that is stored, or the channel itself where there is no branch: a rollback.

    A branch that is not there is made; it is whose the channel is. Raises `WeightsError` for a version that cannot be
    rebuilt, for a pointer that is signed by another than `signer`, or when somebody else moved it meanwhile; then it is
    where they put it.
    """
    key = history.pointer_key(name, branch)
    ref, manifest = _stored(store, name, version)
    for _ in range(_MAX_TRIES):
        data = read(store, key)
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
        f"{key} does not name {version}",
        f"somebody else moved it meanwhile: {_named(store, key)}",
        hint="look where it is, then decide again",
    )


def drop(store: BlobStore, name: str, branch: str) -> None:
    """Forget a branch; its versions stay until they are collected. No error where there is none."""
    if not branch:
        raise WeightsError("a channel's own pointer is not dropped", hint="name a branch")
    store.delete(history.pointer_key(name, branch))


def listed(store: BlobStore, name: str) -> dict[str, Pointer]:
    """Every branch of a channel and where it stands."""
    own = history.pointer_key(name)
    return {key.rpartition("/")[2]: pointer for key, pointer in history.pointers(store, name).items() if key != own}


def _stored(store: BlobStore, name: str, version: Version) -> tuple[Ref, Manifest]:
    """A version's manifest, once all that rebuilds it is seen to be there."""
    for ref, manifest in history.stored(store, name, version):
        plan = plans.Search(store, manifest).cheapest(None)
        if plan is not None and all(_is_there(store, item) for hop in plan.hops for item in _keys(hop)):
            return ref, manifest
    raise WeightsError(
        f"{version} of channel {name!r} cannot be pointed at",
        "it was never published, or what rebuilds it was collected or lost",
        hint="`etude weights log` lists what there is, `etude weights fsck` what is damaged",
    )


def _refuse_doomed(
    store: BlobStore, name: str, key: str, manifest: Manifest, before: bytes | None, moved: bytes
) -> None:
    """Put a pointer back where garbage collection is about to take what it names."""
    plan = plans.Search(store, manifest).cheapest(None)
    doomed = doomed_keys(store, name)
    if plan is not None and not any(item in doomed for hop in plan.hops for item in _keys(hop)):
        return
    if before is not None:
        store.compare_and_swap(key, moved, before)
    elif read(store, key) == moved:
        store.delete(key)
    raise WeightsError(
        f"{manifest.version} is being collected",
        f"it was no head of channel {name!r} for longer than is kept",
        hint="choose a newer version; collection that keeps it must know of a branch before it begins",
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
    data = read(store, key)
    return f"it names {read_pointer(data).head.version}" if data is not None else "it is gone"
