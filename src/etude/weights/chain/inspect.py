"""The data of `etude weights log`, `diff` and `verify`, and the repair of a lost pointer. Prints nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from etude.errors import InputError, WeightsError, nearest
from etude.records.completion import Version
from etude.seams import BlobStore
from etude.weights.chain import history, plans
from etude.weights.chain.fsck import HINT_POINTER, Check, Finding, verify
from etude.weights.chain.manifest import FORMAT, Damaged, Kind, Manifest, Pointer, read_pointer
from etude.weights.chain.ownership import owned_manifests
from etude.weights.chain.signing import Signer, write_signed
from etude.weights.delta.ulp_steps import steps_between
from etude.weights.tensors import DTYPES, Tensor, to_items

__all__ = [
    "Check",
    "Finding",
    "broken_at",
    "diff",
    "find",
    "log",
    "names_version",
    "repair",
    "require_channel",
    "require_pointer",
    "verify",
]


class NoVersion(WeightsError, InputError):
    """Raised for a text that matches no version of a channel, or several with different weights."""


@dataclass(frozen=True)
class LogRow:
    """One published version, as `etude weights log` lists it.

    `kind`: ANCHOR only if there is no delta. `in_lineage`: False if the newest weights do not descend from this
    version. `object_bytes`: what an engine with the previous version fetches. `anchor_bytes`: size of the full
    snapshot; 0 if there is none. `later_bytes`: sizes of the deltas over several versions that lead here.
    `snapshot_bytes`: size of all tensors, uncompressed. `num_whole`: tensors that the delta stores in full, since they
    are new or have another dtype or shape. `bound_bytes`, `changed_share`: measured at the publish, as in
    `PublishMetrics`.
    """

    version: Version
    parent: Version | None
    kind: Kind
    in_lineage: bool
    object_bytes: int
    anchor_bytes: int
    later_bytes: tuple[int, ...]
    manifest_bytes: int
    snapshot_bytes: int
    num_whole: int
    bound_bytes: float
    changed_share: float
    rollout_ids: tuple[str, ...]

    @property
    def ratio(self) -> float:
        """Compression ratio: `snapshot_bytes` over `object_bytes`."""
        return self.snapshot_bytes / max(1, self.object_bytes)

    @property
    def share_of_bound(self) -> float | None:
        """`bound_bytes` over `object_bytes`. At 1.0 the delta has the estimated smallest size (`delta.bound`).

        0.0 if nothing changed. None if the delta stores a tensor in full, since the bound does not apply to it.
        """
        if self.kind is Kind.ANCHOR or self.num_whole:
            return None
        return self.bound_bytes / max(1, self.object_bytes)


@dataclass(frozen=True)
class DiffRow:
    """How one tensor differs between two versions.

    `max_step`: the largest change of an element, in ULP (steps between neighbouring floats). None if one of the
    versions has no such tensor, or it has another dtype or shape.
    """

    name: str
    dtype: str
    num_elements: int
    num_changed: int
    max_step: int | None


def require_channel(store: BlobStore, name: str) -> None:
    """Raise `InputError` if channel `name` has no version: its name is misspelt, or nothing was published yet."""
    if history.head(store, name) is None and not history.committed(store, name):
        others = sorted(key.removeprefix("pointers/") for key in store.list("pointers/"))
        if others:
            hint = f"give --name; {nearest(name, others)}"
            raise InputError(f"there is no channel {name!r}", f"existing channels: {', '.join(others)}", hint=hint)
        hint = "a run publishes its first version when RL starts; without a run use `etude weights publish`"
        raise InputError(f"there is no version of channel {name!r}", "the store is empty", hint=hint)


def log(store: BlobStore, name: str = "policy") -> list[LogRow]:
    """Return one row for each version of channel `name`, in order of publishing.

    Versions before a damaged manifest are missing; `broken_at` reports it. Raises `WeightsError` if there is no usable
    pointer.
    """
    trained = {manifest.version for manifest in history.readable(store, name)[0]}
    require_pointer(store, name)
    chain, _ = history.readable(store, name, trained=False)
    before = {manifest.version: manifest for manifest in chain}
    return [
        _log_row(store, one, before.get(one.base.version) if one.base else None, one.version in trained)
        for one in chain
    ]


def broken_at(store: BlobStore, name: str = "policy") -> WeightsError | None:
    """Return the error at which reading the history of training backwards ends; None if all is readable."""
    _, ref = history.readable(store, name)
    if ref is None:
        return None
    try:
        history.load(store, ref)
    except WeightsError as error:
        return error
    return None


def require_pointer(store: BlobStore, name: str = "policy", signer: Signer | None = None) -> None:
    """Raise `WeightsError` if versions of channel `name` were published but the pointer to the newest is missing.

    If the versions are signed, the hint asks for the key. Also raises `WeightsError` if `signer` has another key than
    the one that signed the versions.
    """
    if history.head(store, name) is not None:
        return
    published = history.committed(store, name)
    if not published:
        return
    if signer is not None:
        owned_manifests(store, name, signer)
    hint = HINT_POINTER
    if any(manifest.signature for _, manifest in published):
        hint = hint.replace("RUN|STORE", "RUN|STORE --key FILE") + "; FILE has the key that signs the channel"
    raise WeightsError(f"the pointer of {name!r} is missing", "although versions were published", hint=hint)


def repair(
    store: BlobStore, name: str = "policy", published: Sequence[str] = (), *, signer: Signer | None = None
) -> Version | None:
    """Set a lost or damaged pointer to the newest version that was certainly published, and return that version.

    Return None if the pointer was intact. Only for a channel whose writer has ended: a running writer repairs it by
    itself.

    `published`: names of versions that the events of a run report as published, the newest last. Without them, the
    newest version that another manifest builds on is taken: a manifest alone could be of a publish that was killed
    before its commit. `signer`: for a channel whose versions are signed; only versions signed by its key are taken.
    Raises `WeightsError` without that key, and if no version is suitable.
    """
    key = history.pointer_key(name)
    try:
        torn = store.get(key)
        read_pointer(torn)
    except KeyError:
        torn = None
    except Damaged:
        pass
    else:
        return None
    mine = owned_manifests(store, name, signer)
    stored = mine.versions
    if torn is None and not store.list(f"manifests/{name}/"):
        require_channel(store, name)
    sure = {ref.key for ref, _ in history.built_on(stored)}
    if torn is not None and len(stored) == 1:  # a damaged pointer can only have named this version
        sure.add(stored[0][0].key)
    order = {version: at for at, version in enumerate(published)}
    known = [one for one in stored if one[0].key in sure or str(one[0].version) in order]
    bases = {manifest.base.key for _, manifest in known if manifest.base}
    known.sort(key=lambda one: (order.get(str(one[0].version), -1), one[0].key not in bases, one[0].version.step))
    for ref, manifest in reversed(known):
        try:
            plans.rebuild(store, manifest)
        except WeightsError:
            continue
        generation = 1 + max(one.generation for _, one in known)
        pointer = Pointer(format=FORMAT, head=ref, nonce=manifest.nonce, generation=generation)
        if store.compare_and_swap(key, torn, write_signed(key, pointer, signer)):
            return ref.version
        raise WeightsError(
            f"the pointer of {name!r} was moved during the repair",
            hint="a writer is running, which repairs the pointer by itself: try again later",
        )
    raise WeightsError(
        f"no version of channel {name!r} can be pointed at",
        f"{len(known)} were certainly published, none can be rebuilt" + (f"; {mine.mixed}" if mine.mixed else ""),
        hint="`etude run CONFIG --resume RUN` publishes again from the run's checkpoint; without a run,"
        " publish under another --name",
    )


def later_than(store: BlobStore, version: Version, name: str = "policy") -> list[Version]:
    """Return the stored versions whose delta applies to `version`.

    After a `repair` that chose `version`, these versions may have been published too.
    """
    stored = [manifest for _, manifest in history.stored(store, name)]
    return [manifest.version for manifest in stored if manifest.base is not None and manifest.base.version == version]


def find(store: BlobStore, version: str, name: str = "policy") -> Manifest:
    """Find a version of a channel by its step ("3", "v000003") or by a longer prefix of its name.

    The search is in three stages: the training history of the newest version; then all versions that were published
    before it; then all stored manifests, some of which are newer after a rollback. Of several versions with the same
    weights it returns the newest. Raises `NoVersion` if no version matches, or several with different weights do; its
    hint has the nearest names. Raises `WeightsError` if older versions cannot be read because of damage.
    """
    trained, _ = history.readable(store, name)
    require_pointer(store, name)
    chain, _ = history.readable(store, name, trained=False)
    prefix = f"v{int(version):06d}-" if re.fullmatch("[0-9]{1,9}", version) else version
    for manifests in (trained, chain):
        if found := _named(manifests, version, prefix, name):
            return found
    stored = [manifest for _, manifest in history.stored(store, name)]
    if found := _named(stored, version, prefix, name):
        return found
    if damage := broken_at(store, name):
        facts = f"older versions cannot be reached: {damage.what} ({damage.facts})"
        raise WeightsError(f"no version {version!r} in channel {name!r}", facts, hint=damage.hint)
    if not store.list(f"manifests/{name}/"):
        require_channel(store, name)
    known = sorted(stored, key=lambda manifest: (manifest.generation, manifest.serial))
    names = list(dict.fromkeys(str(manifest.version) for manifest in known))
    hint = nearest(version, names)
    if len(names) > 8 and not hint.startswith("did you mean"):
        hint = f"known: {', '.join(names[-8:])} (the newest 8 of {len(names)}; `etude weights log` lists all)"
    raise NoVersion(f"no version {version!r} in channel {name!r}", hint=hint)


def names_version(text: str) -> bool:
    """Return whether a text has the form of a version's name that `find` accepts.

    >>> [names_version(text) for text in ("3", "v000003", "v000003-0a1b", "step-3", "out/3")]
    [True, True, True, False, False]
    """
    return re.fullmatch("[0-9]{1,9}|v[0-9]{1,9}(-[0-9a-f-]*)?", text) is not None


def _named(manifests: Iterable[Manifest], version: str, prefix: str, name: str) -> Manifest | None:
    """Return the version whose name begins with `prefix`; None if there is none.

    Of several with the same weights, which a restarted learner published again, it is the newest. Raises `NoVersion`
    for several with different weights."""
    ordered = sorted(manifests, key=lambda m: (m.generation, m.serial))
    fitting = {str(m.version): m for m in ordered if str(m.version).startswith(prefix)}
    if len({m.version.digest for m in fitting.values()}) > 1:
        raise NoVersion(
            f"{version!r} matches {len(fitting)} versions of channel {name!r}",
            ", ".join([*fitting][-8:]) + (f" (the newest 8 of {len(fitting)})" if len(fitting) > 8 else ""),
            hint="give the full name of one of them",
        )
    return next(reversed(fitting.values()), None)


def diff(store: BlobStore, a: str, b: str, name: str = "policy") -> list[DiffRow]:
    """Compare two versions of channel `name` and return one row per tensor, sorted by tensor name.

    `a`, `b`: the older and the newer version, as texts for `find`. A tensor that only one of them has is listed with
    all its elements changed.
    """
    old, new = (plans.rebuild(store, find(store, version, name)) for version in (a, b))
    return [_diff_row(key, old.get(key), new.get(key)) for key in sorted(old.keys() | new.keys())]


def _log_row(store: BlobStore, manifest: Manifest, base: Manifest | None, in_lineage: bool) -> LogRow:
    had = {entry.name: entry.spec for entry in base.tensors} if base else {}
    later = plans.later_ways(store, manifest)
    anchor = plans.snapshot(store, manifest)
    return LogRow(
        version=manifest.version,
        parent=manifest.parent.version if manifest.parent else None,
        kind=Kind.DELTA if manifest.ways[0].base else Kind.ANCHOR,
        in_lineage=in_lineage,
        object_bytes=manifest.ways[0].num_bytes,
        anchor_bytes=anchor.num_bytes if anchor else 0,
        later_bytes=tuple(way.num_bytes for way in later if way.base),
        manifest_bytes=len(msgspec.json.encode(manifest)),
        snapshot_bytes=manifest.snapshot_bytes,
        num_whole=sum(had.get(entry.name) != entry.spec for entry in manifest.tensors) if base else 0,
        bound_bytes=manifest.facts.bound_bytes,
        changed_share=manifest.facts.changed_share,
        rollout_ids=manifest.rollout_ids,
    )


def _diff_row(name: str, old: Tensor | None, new: Tensor | None) -> DiffRow:
    shown = new or old
    assert shown is not None
    size = shown.codes.size
    if old is None or new is None or old.spec != new.spec:
        return DiffRow(name, shown.dtype, size, size, None)
    where = np.flatnonzero(old.codes != new.codes)
    kind = DTYPES[new.dtype]
    steps = steps_between(to_items(old.codes[where], kind), to_items(new.codes[where], kind), kind)[1]
    return DiffRow(name, new.dtype, size, int(where.size), int(steps.max(initial=0)))
