"""Lineages: which rollouts each step of the current weights consumed, and how old versions outside of it are.

The lineage is the sequence of versions from the starting checkpoint to the current weights. A restart continues from a
checkpoint. Versions published after that checkpoint are then a dead branch, a lost lineage, and rollouts that they
sampled may still be in the ledger. Plain data; this module knows nothing of manifests."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import msgspec

from etude.experience.groups import Finished, Group
from etude.records.completion import Version

Lineage = Iterable[tuple[int, Collection[str]]]
"""(version step, ids of the rollouts that it consumed) in order of training. A version that was published again has no
ids. It may be iterated more than once, and is read step by step, so that a long lineage need not be in memory."""

MAX_VERSIONS = 256
"""Number of versions that a ledger stores: more than the largest `max_lag`, and several checkpoints back."""


def by_step(
    lineage: Lineage, known: Iterable[int], *, believed: Callable[[], int] = lambda: 0
) -> Iterator[tuple[int, Collection[str] | None]]:
    """Yield (step, ids of consumed rollouts) for each step of the lineage, then for those steps of `known` not in it.

    The lineage is the sequence of steps that the current weights were trained by. For a step outside of the lineage,
    the ids are None up to step `believed()`, since the caller trusts its own record there, and () after it.

    >>> list(by_step([(0, []), (1, ["a"]), (2, ["b"]), (2, [])], [1, 2, 3]))
    [(1, ['a']), (2, ['b']), (3, ())]
    """
    met = set()
    for step, ids in lineage:
        if ids:
            met.add(step)
            yield step, ids
    for step in known:
        if step not in met:
            yield step, None if step <= believed() else ()


class Branches:
    """The published versions of the weights, and the distance of each one from the current weights.

    The lineage of the current weights is the sequence of versions that they were trained from. A version is in it if it
    is of the current incarnation (start of the run), or if the lineage has the same bytes at its step, since a restart
    may repeat steps bit for bit. Any other version is on a dead branch. Its distance from step n of the lineage is the
    number of steps back to the common ancestor plus the number of steps from there to n: (step - ancestor) + (n -
    ancestor). The step of the lineage with the same distance from n is 2 * ancestor - step. It is called the *apparent
    step* of the version, and may be negative.

    >>> def version(step, incarnation, bytes): return Version(step, incarnation * 8, bytes * 64)
    >>> first = [version(step, "a", "5678"[step]) for step in range(4)]
    >>> branches = Branches([*first, version(1, "b", "6"), version(2, "b", "9"), version(3, "b", "0")])
    >>> [branches.apparent_step(one) for one in first]  # step 1 is the ancestor: 3 was two steps away from it
    [0, 1, 0, -1]
    """

    def __init__(self, versions: Iterable[Version] = ()) -> None:
        """Read the published versions in order of publishing, including the first one that each restart published."""
        self._lineages: dict[str, dict[int, str]] = {}  # by incarnation, the oldest first: step → digest
        self._first: dict[str, int] = {}  # the first step of each incarnation
        self._live: dict[int, str] = {}
        for version in versions:
            if version.incarnation not in self._lineages:
                before = {step: digest for step, digest in self._live.items() if step < version.step}
                self._lineages[version.incarnation], self._first[version.incarnation] = before, version.step
            self._live = self._lineages[version.incarnation]
            self._live[version.step] = version.digest

    def apparent_step(self, version: Version) -> int:
        """Return the step of a version in the lineage, or the apparent step (see the class) of one on a dead branch.

        An unknown version counts as part of the lineage, unless its step is later than the lineage's last step."""
        if not self._live or self._live.get(version.step) == version.digest:
            return version.step
        incarnations = [*self._lineages]
        if version.incarnation == incarnations[-1]:
            return version.step
        if version.incarnation not in self._lineages:
            return version.step if version.step <= max(self._live) else 2 * min(self._live) - version.step
        later = incarnations[incarnations.index(version.incarnation) + 1 :]
        branch = self._lineages[version.incarnation]
        shared = [s for s, digest in branch.items() if s <= version.step and self._live.get(s) == digest]
        ancestor = min(version.step, max([min(self._first[i] for i in later), *shared]))
        return 2 * ancestor - version.step


def with_apparent_steps(branches: Branches, group: Group) -> Group:
    """Return the group with the step of each version replaced by its apparent step (`Branches`), and with `lost` set.

    `lost` has the ids of rollouts with tokens of a version outside the lineage of the current weights."""
    finished = tuple(_seen(branches, one) for one in group.finished)
    lost = {new.rollout_id for new, old in zip(finished, group.finished, strict=True) if new is not old}
    return Group(group.group_id, group.rollout_ids, finished, frozenset(lost)) if lost else group


def append_version(versions: Sequence[Version], version: Version) -> list[Version]:
    """Return the versions with this one appended; only the newest `MAX_VERSIONS` are kept."""
    return [*versions, version][-MAX_VERSIONS:]


def _seen(branches: Branches, finished: Finished) -> Finished:
    summary = finished.summary
    if summary is None:
        return finished
    replace = msgspec.structs.replace
    steps = [branches.apparent_step(version) for version in summary.versions]
    if steps == [version.step for version in summary.versions]:
        return finished
    apparent = tuple(replace(version, step=step) for version, step in zip(summary.versions, steps, strict=True))
    return replace(finished, summary=replace(summary, versions=apparent))
