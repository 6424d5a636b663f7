"""Reading a channel: its head, its lineage, its chain, and the plans by which a reader gets to a version.

Two orders are kept apart. The *chain* is the order of publishing: each delta applies to the version before. The
*lineage* is the order of training: each version was trained from its parent. They differ after a restart from an
older checkpoint. Reads only; every byte is checked against the SHA-256 of the reference that led to it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from etude.errors import EtudeError, WeightsError
from etude.records.completion import Version
from etude.seams import BlobStore
from etude.weights import codec
from etude.weights.manifest import (
    MAX_MANIFEST_BYTES,
    MAX_POINTER_BYTES,
    Manifest,
    Pointer,
    Ref,
    Way,
    read_manifest,
    read_pointer,
)
from etude.weights.tensors import Tensor, tensor_digest

Tensors = Mapping[str, Tensor]
_HINT_OBJECT = "copy that file back; without a copy, the next publish writes a fresh anchor"
_HINT_MANIFEST = (
    "copy that file back; without a copy, `etude run --resume` publishes a fresh anchor from its checkpoint"
)


def pointer_key(name: str) -> str:
    """Where a channel's pointer is."""
    return f"pointers/{name}"


def head(store: BlobStore, name: str) -> Pointer | None:
    """Where the channel stands; None before its first publish. One small read. Raises `WeightsError`, `StoreError`."""
    try:
        return read_pointer(store.get(pointer_key(name), 0, MAX_POINTER_BYTES + 1))
    except KeyError:
        return None


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


def lineage(store: BlobStore, name: str) -> list[Manifest]:
    """The versions the head was trained through, the root first: what "trained" means. Raises `WeightsError`."""
    return _walk(store, name, lambda manifest: manifest.parent)


def chain(store: BlobStore, name: str) -> list[Manifest]:
    """Every version up to the head in order of publishing, the first anchor first. Raises `WeightsError`."""
    return _walk(store, name, lambda manifest: manifest.base)


def readable(store: BlobStore, name: str, *, trained: bool = True) -> tuple[list[Manifest], Ref | None]:
    """`lineage` (or `chain`, with `trained` False) as far back from the head as manifests are whole, the oldest first;
    and the reference to the lost or damaged one at which it ends, None at the root."""
    pointer = head(store, name)
    ref = pointer.head if pointer else None
    manifests: list[Manifest] = []
    while ref is not None:
        try:
            manifests.append(load(store, ref))
        except WeightsError:
            break
        ref = manifests[-1].parent if trained else manifests[-1].base
    return manifests[::-1], ref


def stored(store: BlobStore, name: str) -> Iterator[tuple[Ref, Manifest]]:
    """Every whole manifest of a channel, committed or not, by key. Damaged ones are passed over."""
    for key in store.list(f"manifests/{name}/"):
        data = store.get(key, 0, MAX_MANIFEST_BYTES + 1)
        with suppress(WeightsError):
            manifest = read_manifest(data)
            yield Ref(manifest.version, key, hashlib.sha256(data).hexdigest()), manifest


def committed(store: BlobStore, name: str) -> list[tuple[Ref, Manifest]]:
    """The whole manifests that another one builds on or was trained from, by key: those that surely were published,
    whatever became of the pointer. The head is not among them: only the pointer says that it was committed."""
    whole = list(stored(store, name))
    named = {ref.key for _, manifest in whole for ref in (manifest.parent, manifest.base) if ref}
    return [(ref, manifest) for ref, manifest in whole if ref.key in named]


@dataclass(frozen=True)
class Plan:
    """Ways to take one after another, from `start` (None: from nothing) to the last manifest's version."""

    start: Version | None
    steps: tuple[tuple[Manifest, Way], ...]

    @property
    def num_bytes(self) -> int:
        return sum(way.num_bytes for _, way in self.steps)


def plans(store: BlobStore, target: Manifest, held: Version | None) -> Iterator[Plan]:
    """Every plan to `target` from `held` or from an anchor, fewest bytes first, found as lazily as that allows.

    A follower that is one version behind reads no other manifest than the head's. Plans behind a manifest that is
    gone or damaged are not found; the walk ends there.
    """
    found: list[Plan] = []
    after: tuple[tuple[Manifest, Way], ...] = ()
    at: Manifest | None = target
    while at is not None:
        if at.anchor is not None:
            found.append(Plan(None, ((at, at.anchor), *after)))
        delta = at.delta
        if delta is None or delta.base is None:
            break
        after = ((at, delta), *after)
        if delta.base.version == held:
            found.append(Plan(held, after))
        cheapest_left = sum(way.num_bytes for _, way in after)
        found.sort(key=lambda plan: plan.num_bytes)
        while found and found[0].num_bytes <= cheapest_left:
            yield found.pop(0)
        try:
            at = load(store, delta.base)
        except EtudeError:
            break
    yield from sorted(found, key=lambda plan: plan.num_bytes)


def run(store: BlobStore, plan: Plan, held: Tensors) -> tuple[dict[str, Tensor], int]:
    """The plan's target, every tensor of it proven by its digest, and the bytes that were fetched for it.

    `held` are the tensors of `plan.start`; they are not changed. Raises `WeightsError`, `StoreError`.
    """
    tensors: Tensors = held if plan.start else {}
    fetched = 0
    for manifest, way in plan.steps:
        tensors, num_bytes = _take(store, manifest, way, tensors)
        fetched += num_bytes
    return prove(plan.steps[-1][0], tensors), fetched


def prove(manifest: Manifest, tensors: Tensors) -> dict[str, Tensor]:
    """The tensors, once each has the digest that the manifest states. Raises `WeightsError`."""
    for entry in manifest.tensors:
        if tensor_digest(tensors[entry.name]) != entry.sha256:
            raise WeightsError(
                f"tensor {entry.name!r} of {manifest.version} has another digest than published",
                hint="its objects fit their own digests, so the base was another one: rebuild from an anchor",
            )
    return dict(tensors)


def rebuild(store: BlobStore, target: Manifest) -> dict[str, Tensor]:
    """A version's tensors from the best plan that works. Raises `WeightsError` naming why each plan failed."""
    failures = []
    for plan in plans(store, target, None):
        try:
            return run(store, plan, {})[0]
        except EtudeError as error:
            failures.append(f"{error.what} ({error.facts})" if error.facts else error.what)
    raise unreachable(target, failures)


def unreachable(target: Manifest, failures: list[str]) -> WeightsError:
    """No plan leads to a version."""
    return WeightsError(
        f"no way leads to {target.version}",
        "; ".join(failures) or "there is neither an anchor nor a delta from what is held",
        hint="`etude weights verify` names what is damaged; publishing again writes a fresh anchor",
    )


def _take(store: BlobStore, manifest: Manifest, way: Way, base: Tensors) -> tuple[dict[str, Tensor], int]:
    """The target of one way. Its objects are proven, its tensors not yet."""
    made: dict[str, Tensor] = {}
    entries = iter(manifest.tensors)
    for item in way.objects:
        try:
            data = store.get(item.key, 0, item.num_bytes + 1)
        except KeyError:
            raise WeightsError(f"an object of {manifest.version} is gone", item.key, hint=_HINT_OBJECT) from None
        if len(data) != item.num_bytes or hashlib.sha256(data).hexdigest() != item.sha256:
            raise WeightsError(
                f"an object of {manifest.version} is not what was published", item.key, hint=_HINT_OBJECT
            )
        covered = [next(entries) for _ in range(item.num_tensors)]
        old = [base.get(entry.name) if way.base else None for entry in covered]
        decoded = codec.decode(data, [entry.spec for entry in covered], old)
        made.update(zip((entry.name for entry in covered), decoded, strict=True))
    return made, way.num_bytes


def _walk(store: BlobStore, name: str, before: Callable[[Manifest], Ref | None]) -> list[Manifest]:
    pointer = head(store, name)
    ref = pointer.head if pointer else None
    manifests = []
    while ref is not None:
        manifests.append(load(store, ref))
        ref = before(manifests[-1])
    return manifests[::-1]
