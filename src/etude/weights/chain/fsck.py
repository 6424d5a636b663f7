"""Finds damage in a channel and reports what it costs and how to repair it. Reads everything and changes nothing.

A version is undamaged if any stored way to build it (delta or snapshot) gives its digests. So a lost delta beside an
intact snapshot is a notice, not a problem. If a version cannot be rebuilt, the cause is reported once, with the file to
put back, and each version that builds on it in one line. Objects that garbage collection deleted are not reported.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from etude.errors import EtudeError, WeightsError
from etude.records.completion import Version
from etude.seams import BlobStore
from etude.weights.chain import garbage_records, history, plans
from etude.weights.chain.manifest import Manifest, Ref, Way
from etude.weights.chain.objects import objects_prefix
from etude.weights.chain.undo_record import UndoRecord, compare_tensors, make_undo_record
from etude.weights.tensors import Tensor

_TRAIL = 16  # number of versions that can be restored by undo records instead of being rebuilt

_NAMED = 4  # maximum number of versions that a message names

HINT_POINTER = "`etude weights repair RUN|STORE` sets it to the newest version that was certainly published"


@dataclass(frozen=True)
class Finding:
    """One damaged version, manifest or pointer of a channel, with a text for the user.

    `version` is None for the pointer of the channel or of a branch. `what`: the damaged thing. `facts`: details; may be
    empty. `hint`: how to repair it.
    """

    version: Version | None
    what: str
    facts: str
    hint: str

    def __str__(self) -> str:
        return f"{self.version or 'pointer'}: {self.what}" + (f" ({self.facts})" if self.facts else "")


@dataclass(frozen=True)
class Check:
    """The result of `verify`. If `found` is empty, every version that was not garbage-collected can be rebuilt exactly.

    `object_bytes`: size of all stored objects. `found`: versions, manifests and pointers that are lost. `notices`: lost
    objects of versions that can still be rebuilt from others. `num_collected`: versions whose objects garbage
    collection deleted; their manifests are kept. `orphans`: keys that no version refers to, left by killed publishes;
    harmless. `newest`: the version that the channel's pointer names; None if the pointer is missing or damaged.
    """

    num_versions: int
    num_objects: int
    object_bytes: int
    found: tuple[Finding, ...]
    notices: tuple[Finding, ...]
    num_collected: int
    orphans: tuple[str, ...]
    newest: Version | None

    @property
    def problems(self) -> tuple[str, ...]:
        """The findings in `found` as sentences."""
        return tuple(map(str, self.found))

    @property
    def affected(self) -> str:
        """Text that lists the affected versions and says whether the newest is one of them.

        Empty if only a pointer is affected.
        """
        versions = list(dict.fromkeys(str(one.version) for one in self.found if one.version is not None))
        if not versions:
            return ""
        more = f" and {len(versions) - _NAMED} more" if len(versions) > _NAMED else ""
        newest = ""
        if self.newest is not None:
            is_whole = str(self.newest) not in versions
            newest = f"; the newest, {self.newest}, is {'intact' if is_whole else 'one of them'}"
        return f"affected: {', '.join(versions[:_NAMED])}{more}{newest}"


@dataclass
class _RecentVersions:
    """A version, its tensors, and the undo records that lead to the versions before it."""

    ref: Ref | None = None
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    steps: deque[tuple[Ref, UndoRecord]] = field(default_factory=lambda: deque(maxlen=_TRAIL))  # (base, undo record)

    def go(self, ref: Ref, tensors: Mapping[str, Tensor], base: Ref | None) -> None:
        if base is not None and base == self.ref:
            changed, _ = compare_tensors(self.tensors, tensors)
            self.steps.append((base, make_undo_record(self.tensors, tensors, changed)))
        else:
            self.steps.clear()
        self.ref, self.tensors = ref, tensors

    def at(self, ref: Ref) -> Mapping[str, Tensor] | None:
        tensors = self.tensors
        if ref == self.ref:
            return tensors
        for before, undo in reversed(self.steps):
            tensors = undo.apply(tensors)
            if before == ref:
                return tensors
        return None


def verify(store: BlobStore, name: str = "policy") -> Check:
    """Read every manifest and object of channel `name`, and rebuild every version in every way that is stored.

    Damage is in the result. Raises only `StoreError`, if the store fails.
    """
    found: list[Finding] = []
    notices: list[Finding] = []
    newest = _newest(store, name)
    known, keys = _reachable(store, name, found)
    taken = garbage_records.deleted_keys(store, name)
    objects: dict[str, int] = {}
    lost: set[str] = set()  # keys of manifests of lost versions
    collected: set[str] = set()
    recent = _RecentVersions()
    for ref, manifest in known:
        later = plans.later_ways(store, manifest)
        objects.update((item.key, item.num_bytes) for way in (*manifest.ways, *later) for item in way.objects)
        tensors, failed = _prove(store, manifest, (*manifest.ways, *later), lost | collected, recent)
        expected = [one for one in failed if _was_collected(*one, taken, collected)]
        if tensors is not None:
            recent.go(ref, tensors, manifest.base)
            found += _other_headers(store, manifest, failed)
            notices += [
                _notice(manifest, way, error, way in later) for way, error in failed if (way, error) not in expected
            ]
        elif len(expected) == len(failed):
            collected.add(ref.key)
        else:
            lost.add(ref.key)
            found.append(_lost(manifest, [one for one in failed if one not in expected]))
    stored = {key for folder in ("manifests", "later") for key in store.list(f"{folder}/{name}/")}
    stored |= set(store.list(objects_prefix(name)))
    return Check(
        num_versions=len(known),
        num_objects=len(objects),
        object_bytes=sum(objects.values()),
        found=tuple(found),
        notices=tuple(notices),
        num_collected=len(collected),
        orphans=tuple(sorted(stored - keys - objects.keys() - {f"later/{name}/{m.stem}.json" for _, m in known})),
        newest=newest,
    )


def _newest(store: BlobStore, name: str) -> Version | None:
    """Return the version that the channel's pointer names; None if it is missing or damaged (reported elsewhere)."""
    with suppress(WeightsError):
        pointer = history.head(store, name)
        return pointer.head.version if pointer else None
    return None


def _prove(
    store: BlobStore, manifest: Manifest, ways: tuple[Way, ...], lost: set[str], recent: _RecentVersions
) -> tuple[dict[str, Tensor] | None, list[tuple[Way, EtudeError]]]:
    """Rebuild a version in every way. Return its tensors (None if no way works), and the ways that fail."""
    made: dict[str, Tensor] | None = None
    failed: list[tuple[Way, EtudeError]] = []
    for way in ways:
        try:
            base: Mapping[str, Tensor] = {}
            if way.base is not None:
                if way.base.key in lost:
                    raise _BaseMissing(
                        f"it needs {way.base.version}, which cannot be rebuilt", hint="repair that version first"
                    )
                base = recent.at(way.base) or plans.rebuild(store, history.load(store, way.base))
            made = plans.verify_tensors(manifest, plans.fetch_way(store, manifest, way, base).tensors)
        except EtudeError as error:
            failed.append((way, error))
    return made, failed


class _BaseMissing(WeightsError):
    """The base of a way cannot be rebuilt."""


def _other_headers(store: BlobStore, manifest: Manifest, failed: list[tuple[Way, EtudeError]]) -> list[Finding]:
    """Return findings on damaged object headers in ways that work: only readers of a part need the header."""
    found = []
    broken = [way for way, _ in failed]
    for item in (item for way in manifest.ways if way not in broken for item in way.objects):
        try:
            plans.fetch_header(store, manifest, item)
        except WeightsError:
            what = "an object is intact, but its header is not the one that the manifest names"
            hint = "readers of complete objects and later versions are not affected; readers of a part of it refuse it"
            found.append(Finding(manifest.version, what, item.key, hint))
    return found


def _lost(manifest: Manifest, failed: list[tuple[Way, EtudeError]]) -> Finding:
    """Return the finding for a version that cannot be rebuilt, with the cause that can be repaired, if there is one."""
    error = next((e for _, e in failed if not isinstance(e, _BaseMissing)), failed[0][1])
    hint = error.hint
    if isinstance(error, _BaseMissing):
        hint = "repair that version; then this one can be rebuilt"
    elif isinstance(error, plans.ObjectLost):
        copied = f"copy {error.facts} back, from a backup or another copy of the store"
        hint = f"{copied}; versions after the next full snapshot do not need it"
    return Finding(manifest.version, error.what, error.facts, hint)


def _notice(manifest: Manifest, way: Way, error: EtudeError, is_later: bool) -> Finding:
    kind = "an added way" if is_later else "its delta" if way.base else "its anchor"
    origin = f" from {way.base.version}" if way.base else ""
    return Finding(
        manifest.version,
        f"{kind}{origin} cannot be used; the version can be rebuilt in another way",
        error.what + (f": {error.facts}" if error.facts else ""),
        "nothing needs to be done: readers use the other way, which may need more bytes",
    )


def _was_collected(way: Way, error: EtudeError, taken: set[str], collected: set[str]) -> bool:
    """Return whether a way fails because garbage collection deleted its objects or those of its base."""
    if isinstance(error, _BaseMissing):
        return way.base is not None and way.base.key in collected
    return isinstance(error, plans.ObjectLost) and error.facts in taken


def _reachable(store: BlobStore, name: str, found: list[Finding]) -> tuple[list[tuple[Ref, Manifest]], set[str]]:
    """Return the manifests that every pointer leads to, bases first, and their keys; unreadable ones go to `found`."""
    roots = _roots(store, name, found)
    known: dict[str, tuple[Ref, Manifest]] = {}
    seen: set[str] = set()
    waiting = list(roots)
    while waiting:
        ref = waiting.pop()
        if ref.key in seen:
            continue
        seen.add(ref.key)
        try:
            manifest = history.load(store, ref)
        except EtudeError as error:
            found.append(Finding(ref.version, error.what, error.facts, error.hint))
            continue
        known[ref.key] = ref, manifest
        waiting += [r for r in (manifest.parent, manifest.base) if r]
    ordered: dict[str, tuple[Ref, Manifest]] = {}
    for key in known:
        chain: list[str] = []
        at: str | None = key
        while at in known and at not in ordered and at not in chain:
            chain.append(at)
            base = known[at][1].base
            at = base.key if base else None
        ordered |= {one: known[one] for one in reversed(chain)}
    return list(ordered.values()), seen


def _roots(store: BlobStore, name: str, found: list[Finding]) -> list[Ref]:
    roots: list[Ref] = []
    for branch in ("", *(key.rpartition("/")[2] for key in store.list(f"branches/{name}/"))):
        try:
            pointer = history.head(store, name, branch)
        except WeightsError as error:
            what = f"branch {branch}: {error.what}" if branch else error.what
            hint = f"point it at a version again, or delete it: {error.hint}" if branch else HINT_POINTER
            found.append(Finding(None, what, error.facts, hint))
            continue
        if pointer is not None:
            roots.append(pointer.head)
        elif history.committed(store, name):
            found.append(Finding(None, "it is missing, although there are manifests", "", HINT_POINTER))
    return roots
