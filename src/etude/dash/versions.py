"""Published versions of a run's weights, page by page, the newest first, from their manifests."""

from __future__ import annotations

import hashlib
import re
import threading
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from etude.errors import WeightsError
from etude.records.completion import Version
from etude.seams import BlobStore
from etude.weights.chain import history
from etude.weights.chain.manifest import MAX_MANIFEST_BYTES, Damaged, Manifest, Ref, read_manifest

CHANNEL = "policy"
NAME = re.compile("v[0-9]{6,12}-[0-9a-f]{8}-[0-9a-f]{12}")
"""What a version's name looks like."""
MAX_CACHED = 2000
MAX_BRANCHES, MAX_OF_STEP = 50, 20


class VersionFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One published version, without its list of tensors.

    - `parent`: the version that it was trained from; `base`: the one that its delta applies to; None: none.
    - `object_bytes`: what an engine with the version before fetches. `anchor_bytes`: size of the full snapshot beside
      it, 0 if there is none. `snapshot_bytes`: all tensors, uncompressed. `bound_bytes`, `changed_share`: as in the
      manifest.
    - `before`: the reference of the version that was published before it, to go on from."""

    version: Version
    parent: str | None
    base: str | None
    is_anchor: bool
    object_bytes: int
    anchor_bytes: int
    snapshot_bytes: int
    bound_bytes: float
    changed_share: float
    num_rollouts: int
    num_tensors: int
    is_signed: bool
    before: Ref | None

    @property
    def name(self) -> str:
        """The version as text."""
        return str(self.version)


class VersionPage(msgspec.Struct, frozen=True, kw_only=True):
    """Versions in the order of publishing, the newest first.

    `abandoned`: names of those from which the newest was not trained. `after`: (name of the next version, next name of
    the lineage), with which the next page begins; None at the end. `problem`: why the page ends early; "" if it does
    not."""

    versions: tuple[VersionFacts, ...]
    abandoned: frozenset[str]
    after: tuple[str, str] | None
    problem: str = ""


class Versions:
    """The versions in a store of weights, which `open_store` opens. Safe for many threads.

    Manifests never change, so what was read of them is kept."""

    def __init__(self, open_store: Callable[[], BlobStore]) -> None:
        self._open_store = open_store
        self._known: OrderedDict[str, VersionFacts] = OrderedDict()
        self._lock = threading.Lock()

    def page(self, limit: int, after: tuple[str, str] | None = None) -> VersionPage:
        """Return at most `limit` versions from the newest on, or from where another page ended (`after`).

        Raises `EtudeError` if the store cannot be opened or has no version."""
        store = self._open_store()
        if after is None:
            pointer = history.head(store, CHANNEL)
            if pointer is None:
                raise WeightsError("no version is published yet", hint="RL publishes the first one when it begins")
            ref: Ref | None = pointer.head
            trained = str(pointer.head.version)
        else:
            found = self._find(store, after[0])
            if found is None:
                raise WeightsError(f"there is no version {after[0]}", hint="go back to the newest versions")
            ref, trained = found, after[1]
        shown, abandoned, problem = list[VersionFacts](), set[str](), ""
        while ref is not None and len(shown) < limit:
            try:
                facts = self._load(store, ref)
            except WeightsError as error:
                problem = f"{error.what}: {error.facts}"
                ref = None
                break
            shown.append(facts)
            if facts.name == trained:
                trained = facts.parent or ""
            else:
                abandoned.add(facts.name)
            ref = facts.before
        return VersionPage(
            versions=tuple(shown),
            abandoned=frozenset(abandoned),
            after=None if ref is None else (str(ref.version), trained),
            problem=problem,
        )

    def of_step(self, step: int) -> list[VersionFacts]:
        """Return all stored versions of a step, at most `MAX_OF_STEP`: more than one if a restart repeated it.

        Raises `EtudeError` if the store cannot be read."""
        store, found = self._open_store(), dict[str, VersionFacts]()
        for key in store.list(f"manifests/{CHANNEL}/v{step:06d}-")[:MAX_OF_STEP]:
            try:
                data = store.get(key, 0, MAX_MANIFEST_BYTES + 1)
                manifest = read_manifest(data)
            except (Damaged, KeyError):
                continue
            if manifest.version.step == step:
                facts = self._keep(Ref(manifest.version, key, hashlib.sha256(data).hexdigest()), manifest)
                found[facts.name] = facts
        return list(found.values())

    def pointers(self) -> dict[str, str]:
        """Return the names of the versions that the channel and its branches point to, by "newest" or branch name."""
        store, found = self._open_store(), dict[str, str]()
        keys = [("newest", ""), *((key.rpartition("/")[2],) * 2 for key in store.list(f"branches/{CHANNEL}/"))]
        for name, branch in keys[:MAX_BRANCHES]:
            try:
                pointer = history.head(store, CHANNEL, branch)
            except WeightsError:
                continue
            if pointer is not None:
                found[name] = str(pointer.head.version)
        return found

    def _find(self, store: BlobStore, name: str) -> Ref | None:
        if not NAME.fullmatch(name):
            return None
        for key in store.list(f"manifests/{CHANNEL}/{name}-"):
            try:
                data = store.get(key, 0, MAX_MANIFEST_BYTES + 1)
                manifest = read_manifest(data)
            except (Damaged, KeyError):
                continue
            if str(manifest.version) == name:
                ref = Ref(manifest.version, key, hashlib.sha256(data).hexdigest())
                self._keep(ref, manifest)
                return ref
        return None

    def _load(self, store: BlobStore, ref: Ref) -> VersionFacts:
        with self._lock:
            if known := self._known.get(ref.sha256):
                return known
        return self._keep(ref, history.load(store, ref))

    def _keep(self, ref: Ref, manifest: Manifest) -> VersionFacts:
        anchor = manifest.anchor
        facts = VersionFacts(
            version=manifest.version,
            parent=str(manifest.parent.version) if manifest.parent else None,
            base=str(manifest.base.version) if manifest.base else None,
            is_anchor=anchor is not None,
            object_bytes=manifest.ways[0].num_bytes,
            anchor_bytes=anchor.num_bytes if anchor else 0,
            snapshot_bytes=manifest.snapshot_bytes,
            bound_bytes=manifest.facts.bound_bytes,
            changed_share=manifest.facts.changed_share,
            num_rollouts=len(manifest.rollout_ids),
            num_tensors=len(manifest.tensors),
            is_signed=bool(manifest.signature),
            before=manifest.base or manifest.parent,
        )
        with self._lock:
            self._known[ref.sha256] = facts
            while len(self._known) > MAX_CACHED:
                self._known.popitem(last=False)
        return facts
