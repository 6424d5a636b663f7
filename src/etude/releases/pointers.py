"""Moves the branches `stable` and `canary` of a channel of weights, so that engines that follow them switch.

Every move can be repeated: a branch that is where it should be is left alone. So what a process that died, or a store
that was away, left half done is completed by doing it again."""

from __future__ import annotations

from collections.abc import Collection

from etude.errors import InputError
from etude.records.completion import Version
from etude.releases.states import Release, ReleaseRefused, State
from etude.seams import BlobStore
from etude.weights.chain import branches, history
from etude.weights.chain.signing import Signer

STABLE, CANARY = "stable", "canary"
"""The names of the two branches."""


def branch_version(store: BlobStore, channel: str, branch: str) -> Version | None:
    """Return the version that a branch names; None if there is no such branch. Raises `StoreError`, `WeightsError`."""
    pointer = history.head(store, channel, branch)
    return pointer.head.version if pointer is not None else None


def stable_version(store: BlobStore, channel: str, location: str, candidate: Version) -> Version:
    """Return the version of the branch `stable`, against which a candidate may begin a release.

    `location` is the store's name in errors. Raises `InputError` if there is no such branch, or if it names the
    candidate already. Raises `ReleaseRefused` if the branch `canary` names a third version: then another release,
    recorded in another file, serves that version."""
    stable = branch_version(store, channel, STABLE)
    if stable is None:
        raise InputError(
            f"channel {channel!r} of {location} has no branch {STABLE!r}",
            "subjects that do not get the candidate are served by this branch",
            hint=f"point it at the version that is served now: etude weights point {location} VERSION --branch stable",
        )
    if stable == candidate:
        raise InputError(f"{candidate} is the stable version already", hint="give a newer version")
    canary = branch_version(store, channel, CANARY)
    if canary not in (None, stable):
        raise ReleaseRefused(
            f"the branch {CANARY!r} of channel {channel!r} is in use",
            f"it names {canary}, and {STABLE!r} names {stable}",
            hint="end the release that serves it; or, if there is none, point the branch at the stable version:"
            f" etude weights point {location} {stable} --branch canary",
        )
    return stable


def move(store: BlobStore, release: Release, target: State, *, signer: Signer | None) -> None:
    """Move the branches of a release to the versions that the state `target` requires.

    `target` is CANARY, PROMOTED or ROLLED_BACK. `signer` signs the moved pointers; None: they are not signed. Raises
    `StoreError` if the store does not answer, and `ReleaseRefused` if another process or person moved a branch; call it
    again then.
    """
    candidate, stable = release.candidate, release.stable
    if target is State.CANARY:
        _point(store, release, CANARY, candidate, {None, stable, candidate}, signer)
    elif target is State.PROMOTED:
        _point(store, release, STABLE, candidate, {stable}, signer)
    else:
        now = branch_version(store, release.channel, STABLE)
        if now == candidate:  # promoted, or a promotion was under way
            _point(store, release, STABLE, stable, {candidate}, signer)
            now = stable
        if branch_version(store, release.channel, CANARY) == candidate:
            _point(store, release, CANARY, now or stable, {candidate}, signer)


def _point(
    store: BlobStore,
    release: Release,
    branch: str,
    version: Version,
    expected: Collection[Version | None],
    signer: Signer | None,
) -> None:
    now = branch_version(store, release.channel, branch)
    if now == version:
        return
    if now not in expected:
        raise ReleaseRefused(
            f"the branch {branch!r} of channel {release.channel!r} was moved by hand",
            f"it names {now or 'nothing'}; release {release.number} is of {release.candidate} and {release.stable}",
            hint=f"roll the release back (etude release rollback), or point the branch at {release.stable} again",
        )
    branches.point(store, release.channel, version, branch=branch, signer=signer)
