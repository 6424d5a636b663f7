"""Finds and takes the path of fewest bytes to a version: over deltas and skips, from the held version or from an
anchor.

Versions are the nodes of a graph, and each way (a delta, a skip or an anchor) is an edge with its bytes as length.
Dijkstra's algorithm searches backwards from the target and reads only what it must: a follower that is one version
behind reads no manifest but the target's. A skip is never larger than the deltas it was composed of, so where a way
starts at the held version, no other way from there is looked for. A way that is lost or damaged is closed, and the
search goes on without it.

Every object is proven by the SHA-256 in the manifest, or in the list of later ways, that names it. Where manifests name
all objects of a plan, this proves the target too, and a tensor is only compared with its checksum, against accidents.
Later ways may be written by anybody: after one of them every tensor is proven by the SHA-256 in the target's manifest.
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
from etude.weights.delta.changes import Changes, written
from etude.weights.delta.checksums import checksum
from etude.weights.tensors import Tensor, tensor_digest

AHEAD = 2  # objects that are fetched while another is decoded
Tensors = Mapping[str, Tensor]
Made = TypeVar("Made")
_HINT_OBJECT = "copy that file back; without a copy, the next publish writes a fresh anchor"


class Lost(WeightsError):
    """An object was deleted, or its bytes are not the published ones."""


@dataclass(frozen=True)
class Hop:
    """One step of a plan: a way (the objects of a delta, skip or anchor) and the manifest of the version it leads
    to."""

    manifest: Manifest
    way: Way


@dataclass(frozen=True)
class Plan:
    """Hops to take one after another, from version `start` (None: from an anchor) to the last hop's version."""

    start: Version | None
    hops: tuple[Hop, ...]

    @property
    def num_bytes(self) -> int:
        return sum(hop.way.num_bytes for hop in self.hops)

    @property
    def vouched(self) -> bool:
        """Whether manifests name all objects of the plan, none a list of later ways."""
        return all(hop.way in hop.manifest.ways for hop in self.hops)


@dataclass(frozen=True)
class Taken:
    """The tensors that a way led to, by name, and lists of the changes in those tensors where they were asked for."""

    tensors: dict[str, Tensor]
    lists: dict[str, Changes] = field(default_factory=dict)


@dataclass(frozen=True)
class Reached:
    """A version's proven tensors, and how they were fetched."""

    taken: Taken  # its lists are changes from the tensors that were held
    fetched_bytes: int  # of the plan that worked
    failures: tuple[str, ...]  # why the plans tried before it failed

    @property
    def tensors(self) -> dict[str, Tensor]:
        return self.taken.tensors


class Search:
    """Searches plans to one target. Manifests that were read are remembered."""

    def __init__(self, store: BlobStore, target: Manifest) -> None:
        self._store, self._target = store, target
        self._manifests: dict[str, Manifest | None] = {"": target}  # by key; None: it cannot be read
        self._closed: set[Way] = set()

    def close(self, way: Way) -> None:
        """Leave a way out of all later plans."""
        self._closed.add(way)

    def cheapest(self, held: Version | None) -> Plan | None:
        """The plan of the fewest bytes from `held` or from an anchor; None when there is no plan.

        Without a held version the search ends at the nearest anchors: older ones are assumed to be no smaller.
        """
        order = itertools.count()  # breaks ties between equal lengths
        waiting: list[tuple[int, int, Ref | None, tuple[Hop, ...]]] = [(0, next(order), None, ())]
        done: set[str] = set()
        far = math.inf  # bytes to the nearest anchor: nothing farther is looked for
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
        """The open ways into a version (None: the target). Where some start at `held`, only these and the snapshot."""
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
        return [Hop(manifest, way) for way in ways if way not in self._closed]


def later_ways(store: BlobStore, manifest: Manifest) -> tuple[Way, ...]:
    """The ways to a version that were added after it was published; none where there is no readable list of them."""
    try:
        return read_later(store.get(later_key(manifest), 0, MAX_LATER_BYTES + 1), manifest).ways
    except (KeyError, EtudeError):
        return ()


def snapshot(store: BlobStore, manifest: Manifest) -> Way | None:
    """The anchor of a version: its manifest's, or one that was added later; None where there is none."""
    return manifest.anchor or next((way for way in later_ways(store, manifest) if way.base is None), None)


def reach(
    store: BlobStore,
    target: Manifest,
    held: Version | None = None,
    tensors: Tensors | None = None,
    check: Callable[[Manifest], None] | None = None,
) -> Reached:
    """Fetch the target's tensors by the cheapest plan that works, from version `held` with its `tensors`, or from an
    anchor.

    `check` may raise to refuse a manifest of the plan before its objects are fetched. Raises `WeightsError` with the
    reason why each plan failed.
    """

    def start(plan: Plan) -> Taken:
        return Taken(dict(tensors or {}) if plan.start else {})

    def step(plan: Plan, hop: Hop, made: Taken) -> Taken:
        if check is not None:
            check(hop.manifest)
        proof = proof_of(plan) if hop.manifest is target else None
        return take(store, hop.manifest, hop.way, made.tensors, proof=proof, listing=len(plan.hops) == 1)

    return Reached(*travel(store, target, held, start, step))


def travel(
    store: BlobStore,
    target: Manifest,
    held: Version | None,
    start: Callable[[Plan], Made],
    step: Callable[[Plan, Hop, Made], Made],
) -> tuple[Made, int, tuple[str, ...]]:
    """Take the cheapest plan that works, `step` by step. Returns the result of the last step, the plan's bytes, and why
    the plans tried before it failed.

    `step` fetches the objects of one hop (`fetched`). At the last hop, the target's, it raises `Unproven` where the
    tensors are not the published ones. Raises `WeightsError` with the reason why each plan failed.
    """
    search, failures = Search(store, target), list[str]()
    while (plan := search.cheapest(held)) is not None:
        at = None
        try:
            made = start(plan)
            for at in plan.hops:
                made = step(plan, at, made)
            return made, plan.num_bytes, tuple(failures)
        except Unproven as error:
            failures.append(_said(error))
            later = [hop.way for hop in plan.hops if hop.way not in hop.manifest.ways]
            if later:  # no manifest vouches for their objects
                for way in later:
                    search.close(way)
            elif plan.start is not None:
                held = None
            else:
                search.close(plan.hops[0].way)
        except EtudeError as error:
            failures.append(_said(error))
            assert at is not None, "a plan has hops"
            search.close(at.way)
    raise WeightsError(
        f"no way leads to {target.version}" + (f" from {held}" if held else ""),
        "; ".join(failures) or "there is neither an anchor nor a delta from what is held",
        hint="`etude weights fsck STORE` (of a run: `verify RUN`) names what is damaged; a new publish heals it",
    )


def rebuild(store: BlobStore, target: Manifest) -> dict[str, Tensor]:
    """A version's tensors by the cheapest plan that works, from an anchor. Raises `WeightsError` with the reason why
    each plan failed."""
    return reach(store, target).tensors


class Unproven(WeightsError):
    """Tensors whose digest or checksum is not the published one."""


class Proof(enum.Enum):
    """What a rebuilt tensor is compared with."""

    CHECKSUM = "checksum"  # its checksum (SHA-256 where it has none): enough where all fetched bytes are proven
    DIGEST = "digest"  # its SHA-256, and its checksum where it has one


def proof_of(plan: Plan) -> Proof:
    """The proof that the tensors of a plan need."""
    return Proof.CHECKSUM if plan.vouched else Proof.DIGEST


def prove(manifest: Manifest, tensors: Tensors, proof: Proof = Proof.DIGEST) -> dict[str, Tensor]:
    """Compare every tensor of a manifest with it, and return the tensors. Raises `Unproven`."""
    for entry in manifest.tensors:
        check_tensor(manifest, entry, tensors[entry.name], proof)
    return dict(tensors)


def check_tensor(manifest: Manifest, entry: TensorEntry, tensor: Tensor, proof: Proof) -> None:
    """Compare one tensor with its manifest. Raises `Unproven` where they differ."""
    check(manifest, entry, proof, lambda: tensor_digest(tensor), lambda: checksum(tensor.codes))


def check(
    manifest: Manifest, entry: TensorEntry, proof: Proof, digest: Callable[[], str], sums: Callable[[], str]
) -> None:
    """As `check_tensor`, with functions that compute the tensor's digest and checksum; called only where needed."""
    wrong = "checksum" if entry.checksum and sums() != entry.checksum else ""
    if not wrong and (proof is Proof.DIGEST or not entry.checksum) and digest() != entry.sha256:
        wrong = "digest"
    if wrong:
        raise Unproven(
            f"tensor {entry.name!r} of {manifest.version} has another {wrong} than published",
            hint="its objects fit their digests, so the base was not the right one: rebuild from an anchor",
        )


def take(
    store: BlobStore,
    manifest: Manifest,
    way: Way,
    base: Tensors,
    *,
    proof: Proof | None = None,
    listing: bool = False,
) -> Taken:
    """Fetch and decode one way: from the tensors `base` of its base version to all tensors of the version of
    `manifest`. Each tensor is compared with the manifest where `proof` is given. Raises `WeightsError`, `StoreError`.

    `listing`: return lists of the changes too, which need memory in proportion to the changes."""
    made = Taken({})
    for data, covered in fetched(store, manifest, way):
        old = [base.get(entry.name) if way.base else None for entry in covered]
        specs = [entry.spec for entry in covered]
        if listing and way.base:
            for i, one in enumerate(codec.changes(data, specs, old)):
                if isinstance(one, Changes) and one.positions.size:
                    made.lists[covered[i].name] = one
                made.tensors[covered[i].name] = written(old[i], one)
        else:
            decoded = codec.decode(data, specs, old)
            made.tensors.update((entry.name, tensor) for entry, tensor in zip(covered, decoded, strict=True))
        for entry in covered if proof else ():
            assert proof is not None
            check_tensor(manifest, entry, made.tensors[entry.name], proof)
    return made


def fetched(store: BlobStore, manifest: Manifest, way: Way) -> Iterator[tuple[bytes, list[TensorEntry]]]:
    """Yield each object of a way, proven by its digest, with the tensors that it covers. The next objects are fetched
    while the caller works on one. Raises `WeightsError`, `StoreError`."""
    entries = iter(manifest.tensors)
    for item, fetch in _ahead(store, way.objects):
        try:
            data = fetch()
        except KeyError:
            raise Lost(f"an object of {manifest.version} is gone", item.key, hint=_HINT_OBJECT) from None
        if len(data) != item.num_bytes or hashlib.sha256(data).hexdigest() != item.sha256:
            raise Lost(f"an object of {manifest.version} is not what was published", item.key, hint=_HINT_OBJECT)
        yield data, [next(entries) for _ in range(item.num_tensors)]


def fetched_header(store: BlobStore, manifest: Manifest, item: StoredObject) -> bytes:
    """The header of one object, proven by its digest, in one request: for callers that then read a part of the object.
    Raises `WeightsError`, `StoreError`."""
    try:
        data = store.get(item.key, 0, item.header_bytes)
    except KeyError:
        raise Lost(f"an object of {manifest.version} is gone", item.key, hint=_HINT_OBJECT) from None
    if hashlib.sha256(data).hexdigest() != item.header_sha256:
        raise Lost(
            f"the header of an object of {manifest.version} is not what was published", item.key, hint=_HINT_OBJECT
        )
    return data


def _ahead(store: BlobStore, items: Sequence[StoredObject]) -> Iterator[tuple[StoredObject, Callable[[], bytes]]]:
    """Yield each object with a function that waits for its bytes (one more is asked for, to notice a longer object).
    `AHEAD` further objects are fetched meanwhile."""

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


def _said(error: EtudeError) -> str:
    return f"{error.what} ({error.facts})" if error.facts else error.what
