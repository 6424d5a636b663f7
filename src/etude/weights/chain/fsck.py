"""Finds the damage in a channel, what it costs, and what to do about it. Reads everything and changes nothing.

A version is sound when any way leads to its digests. So a lost delta beside a whole anchor is a notice, not a problem.
Where a version cannot be rebuilt, the cause is reported once, with the file to put back, and each version that builds
on it in one line. Objects that garbage collection took are neither.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from etude.errors import EtudeError, WeightsError
from etude.records.completion import Version
from etude.seams import BlobStore
from etude.weights.chain import history, plans, sweeps
from etude.weights.chain.manifest import Manifest, Ref, Way
from etude.weights.chain.objects import objects_prefix
from etude.weights.chain.undo import Undo, compare, retain
from etude.weights.tensors import Tensor

_TRAIL = 16  # how many versions back a way's base can be reached by undoing steps, without rebuilding it

_NAMED = 4  # versions that a message names

HINT_POINTER = "`etude weights repair RUN|STORE` sets it to the newest version that was surely published"


@dataclass(frozen=True)
class Finding:
    """One damaged version, manifest or pointer. `version` is None for the pointer of the channel or of a branch."""

    version: Version | None
    what: str
    facts: str
    hint: str

    def __str__(self) -> str:
        return f"{self.version or 'pointer'}: {self.what}" + (f" ({self.facts})" if self.facts else "")


@dataclass(frozen=True)
class Check:
    """Result of `verify`. Without problems, every version that was not garbage-collected can be rebuilt exactly."""

    num_versions: int
    num_objects: int
    object_bytes: int
    found: tuple[Finding, ...]  # versions, manifests or pointers that are lost
    notices: tuple[Finding, ...]  # lost or damaged ways to versions that another way proves
    num_collected: int  # versions whose objects garbage collection deleted; their manifests are kept
    orphans: tuple[str, ...]  # keys that no version refers to, left by publishes that were killed; harmless
    newest: Version | None  # what the channel's pointer names; None where it names nothing

    @property
    def problems(self) -> tuple[str, ...]:
        """`found` as sentences."""
        return tuple(map(str, self.found))

    @property
    def affected(self) -> str:
        """Which versions have problems, and whether the newest is one of them; "" where only a pointer has."""
        versions = list(dict.fromkeys(str(one.version) for one in self.found if one.version is not None))
        if not versions:
            return ""
        more = f" and {len(versions) - _NAMED} more" if len(versions) > _NAMED else ""
        newest = ""
        if self.newest is not None:
            is_whole = str(self.newest) not in versions
            newest = f"; the newest, {self.newest}, is {'whole' if is_whole else 'one of them'}"
        return f"affected: {', '.join(versions[:_NAMED])}{more}{newest}"


@dataclass
class _Trail:
    """A version, its tensors, and the undos that lead to the versions before it."""

    ref: Ref | None = None
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    steps: deque[tuple[Ref, Undo]] = field(default_factory=lambda: deque(maxlen=_TRAIL))  # what was before each

    def go(self, ref: Ref, tensors: Mapping[str, Tensor], base: Ref | None) -> None:
        if base is not None and base == self.ref:
            changed, _ = compare(self.tensors, tensors)
            self.steps.append((base, retain(self.tensors, tensors, changed)))
        else:
            self.steps.clear()
        self.ref, self.tensors = ref, tensors

    def at(self, ref: Ref) -> Mapping[str, Tensor] | None:
        """The tensors of a version of the trail; None for another version."""
        tensors = self.tensors
        if ref == self.ref:
            return tensors
        for before, undo in reversed(self.steps):
            tensors = undo.apply(tensors)
            if before == ref:
                return tensors
        return None


def verify(store: BlobStore, name: str = "policy") -> Check:
    """Read every manifest and object of a channel and rebuild every version by every way. Raises `StoreError`."""
    found: list[Finding] = []
    notices: list[Finding] = []
    newest = _newest(store, name)
    known, keys = _reachable(store, name, found)
    taken = sweeps.taken_keys(store, name)
    objects: dict[str, int] = {}
    lost: set[str] = set()  # keys of manifests
    collected: set[str] = set()
    trail = _Trail()
    for ref, manifest in known:
        later = plans.later_ways(store, manifest)
        objects.update((item.key, item.num_bytes) for way in (*manifest.ways, *later) for item in way.objects)
        tensors, failed = _prove(store, manifest, (*manifest.ways, *later), lost | collected, trail)
        expected = [one for one in failed if _was_collected(*one, taken, collected)]
        if tensors is not None:
            trail.go(ref, tensors, manifest.base)
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
    """What the channel's pointer names; None where it is gone or damaged, which is a finding elsewhere."""
    with suppress(WeightsError):
        pointer = history.head(store, name)
        return pointer.head.version if pointer else None
    return None


def _prove(
    store: BlobStore, manifest: Manifest, ways: tuple[Way, ...], lost: set[str], trail: _Trail
) -> tuple[dict[str, Tensor] | None, list[tuple[Way, EtudeError]]]:
    """Rebuild a version by every way. Returns its tensors, and the ways that fail with their errors."""
    made: dict[str, Tensor] | None = None
    failed: list[tuple[Way, EtudeError]] = []
    for way in ways:
        try:
            base: Mapping[str, Tensor] = {}
            if way.base is not None:
                if way.base.key in lost:
                    raise _Needs(f"it needs {way.base.version}, which cannot be rebuilt", hint="repair that one first")
                base = trail.at(way.base) or plans.rebuild(store, history.load(store, way.base))
            made = plans.prove(manifest, plans.take(store, manifest, way, base).tensors)
        except EtudeError as error:
            failed.append((way, error))
    return made, failed


class _Needs(WeightsError):
    """A way that cannot be taken because its base cannot be rebuilt."""


def _other_headers(store: BlobStore, manifest: Manifest, failed: list[tuple[Way, EtudeError]]) -> list[Finding]:
    """Findings on damaged headers of objects in ways that did not fail: only readers of a part of an object need
    them."""
    found = []
    broken = [way for way, _ in failed]
    for item in (item for way in manifest.ways if way not in broken for item in way.objects):
        try:
            plans.fetched_header(store, manifest, item)
        except WeightsError:
            what = "an object is whole, and its header is not the one that the manifest names"
            hint = "readers of whole objects are not affected, readers of a part refuse it; later versions are not"
            found.append(Finding(manifest.version, what, item.key, hint))
    return found


def _lost(manifest: Manifest, failed: list[tuple[Way, EtudeError]]) -> Finding:
    """The finding on a version that no way leads to, with the cause that can be repaired, if there is one."""
    error = next((e for _, e in failed if not isinstance(e, _Needs)), failed[0][1])
    hint = error.hint
    if isinstance(error, _Needs):
        hint = "repair that version: this one can be rebuilt then"
    elif isinstance(error, plans.Lost):
        hint = f"copy {error.facts} back, from a backup or another copy of the store; later anchors do not need it"
    return Finding(manifest.version, error.what, error.facts, hint)


def _notice(manifest: Manifest, way: Way, error: EtudeError, is_later: bool) -> Finding:
    """The notice of a way that fails while another way to the same version works."""
    kind = "an added way" if is_later else "its delta" if way.base else "its anchor"
    origin = f" from {way.base.version}" if way.base else ""
    return Finding(
        manifest.version,
        f"{kind}{origin} leads nowhere; another way proves the version",
        error.what + (f": {error.facts}" if error.facts else ""),
        "nothing needs to be done: readers take the other way, which may need more bytes",
    )


def _was_collected(way: Way, error: EtudeError, taken: set[str], collected: set[str]) -> bool:
    """Whether a way fails because garbage collection deleted its objects, or those of its base."""
    if isinstance(error, _Needs):
        return way.base is not None and way.base.key in collected
    return isinstance(error, plans.Lost) and error.facts in taken


def _reachable(store: BlobStore, name: str, found: list[Finding]) -> tuple[list[tuple[Ref, Manifest]], set[str]]:
    """The manifests that base and parent references lead to from every pointer, bases before versions that build on
    them; and all keys that they name. A manifest that cannot be read is added to `found`."""
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
            found.append(Finding(None, "it is gone, though there are manifests", "", HINT_POINTER))
    return roots
