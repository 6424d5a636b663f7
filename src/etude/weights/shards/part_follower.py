"""Follows some of a channel's tensors by range reads: those that one rank of an engine needs.

For a rank that holds some experts, or some rows of tensors that are published in parts (`follow.parts`). Of each object
it reads the header, which the manifest verifies, then the pages with the needed tiles, which the header verifies. Each
tensor or part has its own digest in the manifest, so it can be verified without the others. Small tensors share tiles,
and decoding a tile needs the old codes of all tensors in it: these are fetched and verified as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from etude.errors import EtudeError, WeightsError
from etude.records.completion import Version
from etude.seams import BlobStore
from etude.weights.chain import plans
from etude.weights.chain.manifest import Manifest, StoredObject, TensorEntry
from etude.weights.delta.ranges import Parts
from etude.weights.follow.follower import Follower, HeldVersion, Update, make_update
from etude.weights.follow.head_tracker import LIMIT_BYTES, FollowedPointer
from etude.weights.tensors import Tensor

Wants = Callable[[str], bool]
"""Whether the tensor (or part) of this name is wanted."""


class PartFollower(Follower):
    """A `Follower` that fetches and holds only some tensors of a channel. Not thread-safe.

    `wants` is called with each tensor name of the manifest, and returns whether to hold that tensor. A name such as
    `w[512:1024]` is a part of a tensor (`parts.part_of`). Updates cannot be undone. The other arguments are those of
    `Follower`.
    """

    def __init__(
        self,
        store: BlobStore,
        wants: Wants,
        name: str = "policy",
        *,
        branch: str = "",
        limit_bytes: int = LIMIT_BYTES,
        public_key: bytes | None = None,
        followed: FollowedPointer | None = None,
    ) -> None:
        super().__init__(
            store,
            name,
            branch=branch,
            limit_bytes=limit_bytes,
            public_key=public_key,
            can_undo=False,
            followed=followed,
        )
        self._wants = wants

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The wanted tensors of the held version by name."""
        held = self._held.tensors if self._held else {}
        return MappingProxyType({name: tensor for name, tensor in held.items() if self._wants(name)})

    def _move(self, target: Manifest, started: float) -> Update | None:
        if target.version == self.version:
            return None
        before, held = self.tensors, self._held.tensors if self._held else {}
        fetched = fetch_some(self._store, target, self._wants, self.version, held, self._check_size)
        self._held = HeldVersion(target, fetched.tensors)
        return make_update(target.version, before, self.tensors, started, fetched)

    def _check_size(self, manifest: Manifest) -> None:
        _check_size(manifest, self._wants, self._limit_bytes)


def fetch_some(
    store: BlobStore,
    target: Manifest,
    wants: Wants,
    held: Version | None = None,
    tensors: Mapping[str, Tensor] | None = None,
    check: Callable[[Manifest], None] | None = None,
) -> plans.Rebuilt:
    """Fetch and verify the wanted tensors of version `target`, with the fewest bytes.

    `wants(name)` returns whether a tensor is wanted. The result also has the tensors that are coded together with
    wanted ones, which the next version may need. The other arguments and the errors are those of `plans.fetch_version`.
    """
    search, failures = plans.Search(store, target), list[str]()
    while (plan := search.cheapest(held)) is not None:
        walk = _Walk(store, wants)
        try:
            if check is not None:
                check(target)
            made = walk.take(plan, tensors or {} if plan.start else {})
            made = _verify(target, made, plans.required_proof(plan))
            return plans.Rebuilt(plans.Decoded(made), walk.fetched_bytes, tuple(failures))
        except _NotHeld:  # a wanted tensor now shares a tile with a tensor that is not held
            if plan.start is None:
                search.exclude((walk.at or plan.hops[0]).way)
            held = None
        except plans.TensorMismatch as error:
            failures.append(error.what)
            later = [hop.way for hop in plan.hops if hop.way not in hop.manifest.ways]
            for way in later or ([plan.hops[0].way] if plan.start is None else []):
                search.exclude(way)
            held = held if later else None
        except EtudeError as error:
            failures.append(f"{error.what} ({error.facts})" if error.facts else error.what)
            search.exclude(walk.at.way if walk.at else plan.hops[-1].way)
    raise WeightsError(
        f"cannot build the wanted part of {target.version}" + (f" from {held}" if held else ""),
        "; ".join(failures) or "there is neither a full snapshot (anchor) nor a delta from the held version",
        hint="list the damage: etude weights fsck STORE, or etude weights verify RUN; publishing again repairs it",
    )


class _NotHeld(WeightsError):
    """An old tensor that is needed for decoding is not held."""


@dataclass(frozen=True)
class _Opened:
    entries: Sequence[TensorEntry]
    parts: Parts


class _Walk:
    def __init__(self, store: BlobStore, wants: Wants) -> None:
        self._store, self._wants = store, wants
        self.fetched_bytes = 0
        self.at: plans.Hop | None = None  # the current hop, for error messages

    def take(self, plan: plans.Plan, base: Mapping[str, Tensor]) -> dict[str, Tensor]:
        last = {entry.name for entry in plan.hops[-1].manifest.tensors}
        needed = {name for name in last if name in base or self._wants(name)}
        opened: list[tuple[plans.Hop, list[_Opened], frozenset[str]]] = []
        for self.at in reversed(plan.hops):  # the hop before must create the old tensors that a hop needs
            objects = [self._open(self.at.manifest, *pair) for pair in _objects_with(self.at, needed)]
            for one in objects:
                names = [entry.name for entry in one.entries]
                needed |= {names[k] for i, name in enumerate(names) if name in needed for k in one.parts.needs_old(i)}
            opened.append((self.at, objects, frozenset(needed)))
        made = dict(base)
        for self.at, objects, names_there in reversed(opened):
            made = _decode_hop(self.at, objects, names_there, made)
        return made

    def _open(self, manifest: Manifest, item: StoredObject, entries: Sequence[TensorEntry]) -> _Opened:
        def read(offset: int, count: int) -> bytes:
            try:
                data = self._store.get(item.key, offset, offset + count)
            except KeyError:
                raise plans.ObjectLost(
                    "an object is missing", item.key, hint="restore that file, or publish again"
                ) from None
            self.fetched_bytes += len(data)
            return data

        header = plans.fetch_header(self._store, manifest, item)
        self.fetched_bytes += len(header)
        return _Opened(entries, Parts(read, header, [entry.spec for entry in entries]))


def _objects_with(hop: plans.Hop, names: set[str]) -> list[tuple[StoredObject, Sequence[TensorEntry]]]:
    """Return the objects of a hop that contain some of these tensors, each with all entries that it covers."""
    found: list[tuple[StoredObject, Sequence[TensorEntry]]] = []
    start = 0
    for item in hop.way.objects:
        entries = hop.manifest.tensors[start : start + item.num_tensors]
        start += item.num_tensors
        if any(entry.name in names for entry in entries):
            found.append((item, entries))
    return found


def _decode_hop(
    hop: plans.Hop, objects: Sequence[_Opened], names: frozenset[str], base: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    made: dict[str, Tensor] = {}
    for one in objects:
        old = [base.get(entry.name) if hop.way.base else None for entry in one.entries]
        wanted = [i for i, entry in enumerate(one.entries) if entry.name in names]
        for i in {needed for k in wanted for needed in one.parts.needs_old(k)}:
            if old[i] is None:
                raise _NotHeld(f"{one.entries[i].name!r} is not in memory", hint="fetch it again")
        made.update((one.entries[i].name, tensor) for i, tensor in one.parts.tensors(wanted, old).items())
    return made


def _verify(target: Manifest, made: Mapping[str, Tensor], proof: plans.Proof) -> dict[str, Tensor]:
    for entry in target.tensors:
        if entry.name in made:
            plans.verify_tensor(target, entry, made[entry.name], proof)
    return dict(made)


def _check_size(manifest: Manifest, wants: Wants, limit_bytes: int) -> None:
    num_bytes = sum(entry.spec.num_bytes for entry in manifest.tensors if wants(entry.name))
    if num_bytes > limit_bytes:
        raise WeightsError(
            f"the wanted tensors of {manifest.version} need {num_bytes} bytes",
            f"the limit is {limit_bytes}",
            hint="raise limit_bytes if this is the model you expect",
        )
