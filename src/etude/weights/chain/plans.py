"""The way to a version: over deltas, over skips, from what is held or from an anchor, whichever is the fewest bytes.

Versions are places, ways are roads with their bytes as length; the search goes backwards from the target by Dijkstra's
algorithm and reads only what it must: a follower that is one version behind reads no other manifest than the target's.
A delta over several versions never weighs more than those it was composed of, so where a way starts at what is held,
no other way from there is looked for. A way that turns out lost or damaged is closed and the search goes on without
it.

Every object is proven by the SHA-256 of whoever named it. Where all of them are named by manifests, what they lead to
is proven with them, and a tensor's checksum is compared against accidents. Later ways are anybody's: after one of them
every tensor is proven by the SHA-256 in the target's manifest.
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
    """An object that is gone or is not what was published."""


@dataclass(frozen=True)
class Hop:
    """One way to one version."""

    manifest: Manifest
    way: Way


@dataclass(frozen=True)
class Plan:
    """Hops to take one after another, from `start` (None: from nothing) to the last one's version."""

    start: Version | None
    hops: tuple[Hop, ...]

    @property
    def num_bytes(self) -> int:
        return sum(hop.way.num_bytes for hop in self.hops)

    @property
    def vouched(self) -> bool:
        """Whether manifests name all of its objects."""
        return all(hop.way in hop.manifest.ways for hop in self.hops)


@dataclass(frozen=True)
class Taken:
    """Tensors that a way led to; and what changed in some, by name, where the way told it as lists."""

    tensors: dict[str, Tensor]
    lists: dict[str, Changes] = field(default_factory=dict)


@dataclass(frozen=True)
class Reached:
    """A version's proven tensors, and how they were come by."""

    taken: Taken  # lists are from the tensors that were held
    fetched_bytes: int  # of the plan that worked
    failures: tuple[str, ...]  # why plans before it did not

    @property
    def tensors(self) -> dict[str, Tensor]:
        return self.taken.tensors


class Search:
    """Plans to one target, the cheapest that is left first. What was read is remembered."""

    def __init__(self, store: BlobStore, target: Manifest) -> None:
        self._store, self._target = store, target
        self._manifests: dict[str, Manifest | None] = {"": target}  # by key; None: it cannot be read
        self._closed: set[Way] = set()

    def close(self, way: Way) -> None:
        """Plan without it from now on."""
        self._closed.add(way)

    def cheapest(self, held: Version | None) -> Plan | None:
        """The plan of the fewest bytes from `held` or from nothing; None when there is none.

        From nothing, an anchor that is nearer is taken for no heavier than those behind it, which are not looked for.
        """
        order = itertools.count()  # so that equal lengths need no further comparison
        waiting: list[tuple[int, int, Ref | None, tuple[Hop, ...]]] = [(0, next(order), None, ())]
        done: set[str] = set()
        far = math.inf  # where an anchor was found that all others lie behind
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
        """The open ways into a version (None: the target): those that start at `held`, where there are such, and the
        snapshot; else all."""
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
    """Further ways to a version; none where nobody wrote any, or wrote them wrong."""
    try:
        return read_later(store.get(later_key(manifest), 0, MAX_LATER_BYTES + 1), manifest).ways
    except (KeyError, EtudeError):
        return ()


def snapshot(store: BlobStore, manifest: Manifest) -> Way | None:
    """The way to a version over nothing: its manifest's, or one that was added later."""
    return manifest.anchor or next((way for way in later_ways(store, manifest) if way.base is None), None)


def reach(
    store: BlobStore,
    target: Manifest,
    held: Version | None = None,
    tensors: Tensors | None = None,
    check: Callable[[Manifest], None] | None = None,
) -> Reached:
    """The target's tensors by the cheapest plan that works, from `held` with its `tensors` or from nothing.

    `check` may refuse a manifest on the way before anything of it is fetched, by raising. Raises `WeightsError` that
    names why each plan failed.
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
    """What the steps along the cheapest plan that works make; its bytes, and why plans before it failed.

    `step` fetches a hop's objects (`fetched`) and raises `Unproven` where the target, whose hop is the last, is not
    what was published. Raises `WeightsError` that names why each plan failed.
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
            if later:  # nobody vouched for them
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
    """A version's tensors from the best plan that works. Raises `WeightsError` naming why each plan failed."""
    return reach(store, target).tensors


class Unproven(WeightsError):
    """Tensors with another digest or checksum than was published."""


class Proof(enum.Enum):
    """What a tensor is compared with before it is believed."""

    CHECKSUM = "checksum"  # against accidents, where the bytes that led to it are proven: SHA-256 where there is none
    DIGEST = "digest"  # SHA-256, and the checksum too where there is one


def proof_of(plan: Plan) -> Proof:
    """What the tensors that a plan leads to need."""
    return Proof.CHECKSUM if plan.vouched else Proof.DIGEST


def prove(manifest: Manifest, tensors: Tensors, proof: Proof = Proof.DIGEST) -> dict[str, Tensor]:
    """The tensors, once each is what the manifest states. Raises `Unproven`."""
    for entry in manifest.tensors:
        check_tensor(manifest, entry, tensors[entry.name], proof)
    return dict(tensors)


def check_tensor(manifest: Manifest, entry: TensorEntry, tensor: Tensor, proof: Proof) -> None:
    """Raises `Unproven` where a tensor is not what its manifest states."""
    check(manifest, entry, proof, lambda: tensor_digest(tensor), lambda: checksum(tensor.codes))


def check(
    manifest: Manifest, entry: TensorEntry, proof: Proof, digest: Callable[[], str], sums: Callable[[], str]
) -> None:
    """The same of a tensor whose digest and checksum are computed where they are needed."""
    wrong = "checksum" if entry.checksum and sums() != entry.checksum else ""
    if not wrong and (proof is Proof.DIGEST or not entry.checksum) and digest() != entry.sha256:
        wrong = "digest"
    if wrong:
        raise Unproven(
            f"tensor {entry.name!r} of {manifest.version} has another {wrong} than published",
            hint="its objects fit their own digests, so the base was another one: rebuild from an anchor",
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
    """The target of one way; its tensors are proven where a `proof` is named. Raises `WeightsError`, `StoreError`.

    `listing`: with lists of what changed, which take memory in proportion to the changes beside the tensors' own."""
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
    """Each object of a way, proven, and the tensors that it covers. What is next is fetched while its taker is busy
    with one. Raises `WeightsError`, `StoreError`."""
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
    """The header of one object, proven, for who reads only a part of it: one request. Raises `WeightsError`,
    `StoreError`."""
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
    """Each object and what waits for its bytes, and one byte more; `AHEAD` further ones are on their way meanwhile."""

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
