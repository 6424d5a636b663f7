"""Finds and runs the cheapest plan to fetch a version, from the version that the caller holds or from a full snapshot.

Versions are the nodes of a graph. Each way (a delta, a delta over several versions, or a snapshot) is an edge whose
length is its bytes. Dijkstra's algorithm searches backwards from the target and reads only the manifests that it needs:
a follower that is one version behind reads only the target's. A composed delta is never larger than the deltas it was
composed of. So if a way starts at the held version, no other way from there is searched. A way that is lost or damaged
is excluded, and the search continues without it.

Every object is verified by its SHA-256 in the manifest, or in the list of later ways, that names it. If manifests name
all objects of a plan, this verifies the target too, and each tensor is only compared with its checksum, to detect
accidents. Anybody with write access can add later ways: after one of them, every tensor is verified by the SHA-256 in
the target's manifest.
"""

from __future__ import annotations

import enum
import hashlib
import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from etude.errors import EtudeError, WeightsError
from etude.records.completion import Version
from etude.seams import BlobStore
from etude.weights.chain import history
from etude.weights.chain.manifest import (
    MAX_LATER_BYTES,
    Manifest,
    Ref,
    StoredObject,
    TensorEntry,
    Way,
    later_key,
    read_later,
)
from etude.weights.delta import codec
from etude.weights.delta.changes import Changes, apply_changes
from etude.weights.delta.checksums import checksum
from etude.weights.tensors import Tensor, tensor_digest

AHEAD = 2  # number of objects that are fetched while another is decoded
Tensors = Mapping[str, Tensor]
Made = TypeVar("Made")
_HINT_OBJECT = "restore that file; without a copy, the next publish writes a new full snapshot"


class ObjectLost(WeightsError):
    """Raised if an object is missing, or its bytes are not the published ones. `facts` is its store key."""


@dataclass(frozen=True)
class Hop:
    """One step of a plan: the delta or snapshot to fetch (`way`), and the manifest of the version that it leads to."""

    manifest: Manifest
    way: Way


@dataclass(frozen=True)
class Plan:
    """The deltas to fetch one after another, from version `start` to the version of the last hop.

    `start` is None if the first hop is a full snapshot.
    """

    start: Version | None
    hops: tuple[Hop, ...]

    @property
    def num_bytes(self) -> int:
        """Total size of all objects, in bytes."""
        return sum(hop.way.num_bytes for hop in self.hops)

    @property
    def objects_in_manifests(self) -> bool:
        """Whether manifests name all objects of the plan; False if `LaterWays` name some, which are less trusted."""
        return all(hop.way in hop.manifest.ways for hop in self.hops)


@dataclass(frozen=True)
class Decoded:
    """The tensors of a version by name, decoded from a delta or snapshot.

    `lists`: if requested, the changed elements of each tensor that changed, relative to the tensors before.
    """

    tensors: dict[str, Tensor]
    lists: dict[str, Changes] = field(default_factory=dict)


@dataclass(frozen=True)
class Rebuilt:
    """The verified tensors of a version, and how they were fetched.

    The lists of changes in `decoded` are relative to the tensors that the caller had. `fetched_bytes`: the fetched
    bytes, without failed attempts. `failures`: the errors of the failed attempts.
    """

    decoded: Decoded
    fetched_bytes: int
    failures: tuple[str, ...]

    @property
    def tensors(self) -> dict[str, Tensor]:
        return self.decoded.tensors


class Search:
    """Finds the cheapest plan (the deltas to fetch) that leads to the version of `target`.

    Manifests that were read are cached.
    """

    def __init__(self, store: BlobStore, target: Manifest) -> None:
        self._store, self._target = store, target
        self._manifests: dict[str, Manifest | None] = {"": target}  # by key; None: it cannot be read
        self._excluded: set[Way] = set()

    def exclude(self, way: Way) -> None:
        """Exclude a delta or snapshot (`way`) from all later plans."""
        self._excluded.add(way)

    def cheapest(self, held: Version | None) -> Plan | None:
        """Return the plan with the fewest bytes, from version `held` or from a full snapshot; None if there is none.

        If `held` is None, the search ends at the nearest snapshots: older ones are assumed to be no smaller.
        """
        order = itertools.count()  # breaks ties between equal lengths
        waiting: list[tuple[int, int, Ref | None, tuple[Hop, ...]]] = [(0, next(order), None, ())]
        done: set[str] = set()
        far = math.inf  # bytes to the nearest anchor: the search stops there
        while waiting:
            num_bytes, _, at, after = heapq.heappop(waiting)
            if after and (at is None or at.version == held):
                return Plan(at.version if at else None, after)
            if (key := at.key if at else "") not in done and num_bytes < far:
                done.add(key)
                for hop in self._into(at, held):
                    if held is None and hop.way.base is None:
                        far = num_bytes
                    length = num_bytes + hop.way.num_bytes
                    heapq.heappush(waiting, (length, next(order), hop.way.base, (hop, *after)))
        return None

    def _into(self, at: Ref | None, held: Version | None) -> list[Hop]:
        """Return the usable ways to a version (`at` None: the target).

        If some start at `held`, only these and the anchor are returned.
        """
        key = at.key if at else ""
        if at is not None and key not in self._manifests:
            self._manifests[key] = None
            with suppress(EtudeError):
                self._manifests[key] = history.load(self._store, at)
        manifest = self._manifests[key]
        if manifest is None:
            return []
        hops = self._open(manifest, manifest.ways)
        if not any(_starts_at(hop, held) for hop in hops):
            hops += self._open(manifest, later_ways(self._store, manifest))
        if any(_starts_at(hop, held) for hop in hops):
            return [hop for hop in hops if hop.way.base is None or _starts_at(hop, held)]
        return hops

    def _open(self, manifest: Manifest, ways: tuple[Way, ...]) -> list[Hop]:
        return [Hop(manifest, way) for way in ways if way not in self._excluded]


def later_ways(store: BlobStore, manifest: Manifest) -> tuple[Way, ...]:
    """Return the deltas and snapshots of a version that were added after its publish.

    Empty if there is no readable list of them.
    """
    try:
        return read_later(store.get(later_key(manifest), 0, MAX_LATER_BYTES + 1), manifest).ways
    except (KeyError, EtudeError):
        return ()


def snapshot(store: BlobStore, manifest: Manifest) -> Way | None:
    """Return the full snapshot of a version, written at its publish or later; None if it has only deltas."""
    return manifest.anchor or next((way for way in later_ways(store, manifest) if way.base is None), None)


def fetch_version(
    store: BlobStore,
    target: Manifest,
    held: Version | None = None,
    tensors: Tensors | None = None,
    check: Callable[[Manifest], None] | None = None,
) -> Rebuilt:
    """Fetch and verify the tensors of version `target` with the fewest bytes.

    After a failure, the next cheapest way is tried. A way (a sequence of deltas) starts from version `held` with its
    `tensors`, or from a full snapshot. `check` is called with each manifest on the way before its objects are fetched;
    it can raise to refuse it. If no way works, raises `WeightsError` with the reasons.
    """

    def start(plan: Plan) -> Decoded:
        return Decoded(dict(tensors or {}) if plan.start else {})

    def step(plan: Plan, hop: Hop, made: Decoded) -> Decoded:
        if check is not None:
            check(hop.manifest)
        proof = required_proof(plan) if hop.manifest is target else None
        return fetch_way(store, hop.manifest, hop.way, made.tensors, proof=proof, listing=len(plan.hops) == 1)

    return Rebuilt(*try_plans(store, target, held, start, step))


def try_plans(
    store: BlobStore,
    target: Manifest,
    held: Version | None,
    start: Callable[[Plan], Made],
    step: Callable[[Plan, Hop, Made], Made],
) -> tuple[Made, int, tuple[str, ...]]:
    """Build version `target` by the plan (deltas to fetch) with the fewest bytes; after a failure, by the next.

    Return the result of the last step, the bytes of the plan, and the errors of the plans that failed before it.
    `start(plan)` creates the initial state. `step(plan, hop, state)` fetches the objects of one hop (`fetch_objects`)
    and returns the new state. At the last hop it raises `TensorMismatch` if the tensors are not the published ones. If
    every plan fails, raises `WeightsError` with the reasons.
    """
    search, failures = Search(store, target), list[str]()
    while (plan := search.cheapest(held)) is not None:
        at = None
        try:
            made = start(plan)
            for at in plan.hops:
                made = step(plan, at, made)
            return made, plan.num_bytes, tuple(failures)
        except TensorMismatch as error:
            failures.append(_describe(error))
            later = [hop.way for hop in plan.hops if hop.way not in hop.manifest.ways]
            if later:  # their objects are in no manifest, so one of them may be wrong
                for way in later:
                    search.exclude(way)
            elif plan.start is not None:
                held = None
            else:
                search.exclude(plan.hops[0].way)
        except EtudeError as error:
            failures.append(_describe(error))
            assert at is not None, "a plan has hops"
            search.exclude(at.way)
    raise WeightsError(
        f"cannot build {target.version}" + (f" from {held}" if held else ""),
        "; ".join(failures) or "there is neither a full snapshot (anchor) nor a delta from the held version",
        hint="list the damage: etude weights fsck STORE, or etude weights verify RUN; publishing again repairs it",
    )


def rebuild(store: BlobStore, target: Manifest) -> dict[str, Tensor]:
    """Fetch and verify the tensors of a version, and return them by name.

    A way to do so is a full snapshot, of this version or an earlier one, and the deltas from there. The way with the
    fewest bytes is tried first. If none works, raises `WeightsError` with the reasons.
    """
    return fetch_version(store, target).tensors


class TensorMismatch(WeightsError):
    """Raised if a rebuilt tensor has another digest or checksum than the published tensor."""


class Proof(enum.Enum):
    """The digest with which a rebuilt tensor is compared.

    CHECKSUM: its checksum (SHA-256 if it has none); enough if all fetched bytes are verified. DIGEST: its SHA-256, and
    its checksum if it has one.
    """

    CHECKSUM = "checksum"
    DIGEST = "digest"


def required_proof(plan: Plan) -> Proof:
    """Return how the tensors that a plan builds must be verified: by checksums, or also by SHA-256.

    Checksums are enough if manifests name all objects of the plan.
    """
    return Proof.CHECKSUM if plan.objects_in_manifests else Proof.DIGEST


def verify_tensors(manifest: Manifest, tensors: Tensors, proof: Proof = Proof.DIGEST) -> dict[str, Tensor]:
    """Compare every tensor of a version with its entry in the manifest, and return the tensors.

    Raises `TensorMismatch` if one differs.
    """
    for entry in manifest.tensors:
        verify_tensor(manifest, entry, tensors[entry.name], proof)
    return dict(tensors)


def verify_tensor(manifest: Manifest, entry: TensorEntry, tensor: Tensor, proof: Proof) -> None:
    """Compare one tensor with its entry in the manifest. Raises `TensorMismatch` if they differ.

    `proof`: compare only checksums, or SHA-256 too.
    """
    verify_lazily(manifest, entry, proof, lambda: tensor_digest(tensor), lambda: checksum(tensor.codes))


def verify_lazily(
    manifest: Manifest, entry: TensorEntry, proof: Proof, digest: Callable[[], str], sums: Callable[[], str]
) -> None:
    """Compare a tensor with its entry in the manifest, as `verify_tensor` does. Raises `TensorMismatch`.

    `digest` and `sums` compute the tensor's SHA-256 and checksum. They are called only if needed.
    """
    wrong = "checksum" if entry.checksum and sums() != entry.checksum else ""
    if not wrong and (proof is Proof.DIGEST or not entry.checksum) and digest() != entry.sha256:
        wrong = "digest"
    if wrong:
        raise TensorMismatch(
            f"tensor {entry.name!r} of {manifest.version} has another {wrong} than published",
            hint="the fetched objects are intact, so the base was wrong: rebuild from a full snapshot (anchor)",
        )


def fetch_way(
    store: BlobStore,
    manifest: Manifest,
    way: Way,
    base: Tensors,
    *,
    proof: Proof | None = None,
    listing: bool = False,
) -> Decoded:
    """Fetch and decode a delta or snapshot (`way`) of the version of `manifest`. Return all tensors of that version.

    `base`: the tensors of the way's base version by name; unused for a snapshot. If `proof` is given, each tensor is
    compared with the manifest. `listing`: also return lists of the changed elements; they need memory in proportion to
    the changes. Raises `WeightsError`, `StoreError`.
    """
    made = Decoded({})
    for data, covered in fetch_objects(store, manifest, way):
        old = [base.get(entry.name) if way.base else None for entry in covered]
        specs = [entry.spec for entry in covered]
        if listing and way.base:
            for i, one in enumerate(codec.changes(data, specs, old)):
                if isinstance(one, Changes) and one.positions.size:
                    made.lists[covered[i].name] = one
                made.tensors[covered[i].name] = apply_changes(old[i], one)
        else:
            decoded = codec.decode(data, specs, old)
            made.tensors.update((entry.name, tensor) for entry, tensor in zip(covered, decoded, strict=True))
        for entry in covered if proof else ():
            assert proof is not None
            verify_tensor(manifest, entry, made.tensors[entry.name], proof)
    return made


def fetch_objects(store: BlobStore, manifest: Manifest, way: Way) -> Iterator[tuple[bytes, list[TensorEntry]]]:
    """Yield each stored object of a delta or snapshot (`way`), with the manifest's entries of the tensors in it.

    Each is verified by its SHA-256. The next objects are fetched while the caller works on one. Raises `ObjectLost`,
    `StoreError`.
    """
    entries = iter(manifest.tensors)
    for item, fetch in _prefetch(store, way.objects):
        try:
            data = fetch()
        except KeyError:
            raise ObjectLost(f"an object of {manifest.version} is missing", item.key, hint=_HINT_OBJECT) from None
        if len(data) != item.num_bytes or hashlib.sha256(data).hexdigest() != item.sha256:
            raise ObjectLost(f"an object of {manifest.version} is not what was published", item.key, hint=_HINT_OBJECT)
        yield data, [next(entries) for _ in range(item.num_tensors)]


def fetch_header(store: BlobStore, manifest: Manifest, item: StoredObject) -> bytes:
    """Fetch the header of one stored object in one request, verify it by its SHA-256, and return it.

    For readers that then fetch only a part of the object. Raises `ObjectLost`, `StoreError`.
    """
    try:
        data = store.get(item.key, 0, item.header_bytes)
    except KeyError:
        raise ObjectLost(f"an object of {manifest.version} is missing", item.key, hint=_HINT_OBJECT) from None
    if hashlib.sha256(data).hexdigest() != item.header_sha256:
        raise ObjectLost(
            f"the header of an object of {manifest.version} is not what was published", item.key, hint=_HINT_OBJECT
        )
    return data


def _prefetch(store: BlobStore, items: Sequence[StoredObject]) -> Iterator[tuple[StoredObject, Callable[[], bytes]]]:
    """Yield each object with a function that waits for its bytes, one more than expected, to detect longer objects."""

    def get(item: StoredObject) -> bytes:
        return store.get(item.key, 0, item.num_bytes + 1)

    if len(items) == 1:
        yield items[0], partial(get, items[0])
        return
    with ThreadPoolExecutor(AHEAD, thread_name_prefix="fetch") as threads:
        coming: deque[tuple[StoredObject, Future[bytes]]] = deque()
        try:
            for item in items:
                coming.append((item, threads.submit(get, item)))
                if len(coming) > AHEAD:
                    first, future = coming.popleft()
                    yield first, future.result
            while coming:
                first, future = coming.popleft()
                yield first, future.result
        finally:
            threads.shutdown(wait=False, cancel_futures=True)


def _starts_at(hop: Hop, held: Version | None) -> bool:
    return (hop.way.base.version if hop.way.base else None) == held


def _describe(error: EtudeError) -> str:
    return f"{error.what} ({error.facts})" if error.facts else error.what
