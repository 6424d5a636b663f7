"""Writes deltas over several versions at once, so that a late reader fetches fewer bytes than version by version.

A weight that changed in several steps is stored once in such a *composed* delta. Sixteen single deltas take 1.31 bits
per weight; one composed delta over the same sixteen versions takes 0.55 (AdamW, 1e-6). A compactor runs beside the
writer, preferably near the store. It keeps one full version in memory and, for each of the last steps, the values that
the step overwrote (`undo_record`): never a second snapshot. It stores a list of its deltas beside the version
(`manifest.later_key`). Readers need not trust it: the digests in the target's manifest verify the result.

A tensor that a step replaced in full, or changed so densely that a list would be longer, is stored in full in every
composed delta over that step.

Library only: no process of a run starts a compactor. To use one, call `Compactor.step` in a loop in a separate process.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from etude.errors import StoreError, WeightsError
from etude.seams import BlobStore
from etude.weights.chain import history, plans
from etude.weights.chain.anchors import catch_up_cost
from etude.weights.chain.manifest import FORMAT, LaterWays, Manifest, Ref, Way, later_key
from etude.weights.chain.objects import put_objects
from etude.weights.chain.undo_record import UndoRecord, compare_tensors, make_undo_record
from etude.weights.tensors import Tensor

SPANS = (4, 16)
"""Numbers of steps that composed deltas cover. Together with the single-step deltas, any distance is a few hops."""


class Compactor:
    """Follows a channel of weights, and stores additional deltas over several steps for its newest version. Not
    thread-safe.

    With these deltas a late reader fetches fewer bytes. One compactor per channel is enough; several would repeat the
    same work. `spans`: how many steps each added delta covers, all at least 2. `anchors`: also add a full snapshot when
    one is due, for a writer that writes none (`Channel(anchors=False)`). Raises `WeightsError` for invalid spans.
    """

    def __init__(
        self, store: BlobStore, name: str = "policy", *, spans: Sequence[int] = SPANS, anchors: bool = False
    ) -> None:
        if not spans or min(spans) < 2:
            raise WeightsError(
                f"spans {tuple(spans)} are invalid", hint="a span is a number of versions: each must be at least 2"
            )
        self._store, self._name = store, name
        self._spans, self._anchors = sorted(spans), anchors
        self._at: Ref | None = None
        self._tensors: dict[str, Tensor] = {}
        self._steps: deque[tuple[Manifest, UndoRecord]] = deque(maxlen=self._spans[-1])  # oldest first

    @property
    def undo_bytes(self) -> int:
        """Bytes of memory that the saved old values use, with which an update can be undone."""
        return sum(undo.num_bytes for _, undo in self._steps)

    def step(self) -> tuple[Way, ...] | None:
        """Fetch the newest version, and store deltas over several steps that lead to it. Return what was stored.

        Return None if there is no newer version than at the last call. The result is empty if no added delta would be
        smaller than the existing ones. After a `WeightsError` or `StoreError` the next call continues where this one
        stopped.
        """
        pointer = history.head(self._store, self._name)
        if pointer is None or pointer.head == self._at:
            return None
        manifests = self._after_held(pointer.head)
        for left, (ref, manifest) in zip(range(len(manifests))[::-1], manifests, strict=True):
            try:
                self._take(ref, manifest)
            except WeightsError:  # lost or garbage-collected: later versions may be intact
                if not left:
                    raise
                self._forget()
        return self._add(manifests[-1][1])

    def _after_held(self, head: Ref) -> list[tuple[Ref, Manifest]]:
        """Return the versions after the held one, up to the head. At the start: as many as the longest span needs."""
        found: list[tuple[Ref, Manifest]] = []
        ref: Ref | None = head
        while ref is not None and ref != self._at and len(found) <= self._spans[-1]:
            found.append((ref, history.load(self._store, ref)))
            ref = found[-1][1].base
        if ref is None or ref != self._at:  # start again at the oldest of them
            self._forget()
        return found[::-1]

    def _forget(self) -> None:
        self._steps.clear()
        self._at, self._tensors = None, {}

    def _take(self, ref: Ref, manifest: Manifest) -> None:
        held = self._at.version if self._at else None
        tensors = plans.fetch_version(self._store, manifest, held, self._tensors).tensors
        if self._at is not None:
            changed, _ = compare_tensors(self._tensors, tensors)
            undo = make_undo_record(self._tensors, tensors, changed)
            self._steps.append((manifest, UndoRecord(undo.changed, {}, (*undo.removed, *undo.replaced))))
        self._at, self._tensors = ref, tensors

    def _add(self, manifest: Manifest) -> tuple[Way, ...]:
        if plans.later_ways(self._store, manifest):
            return ()
        nonce = secrets.token_hex(4)
        composed = (self._compose(manifest, span, nonce) for span in self._spans if span <= len(self._steps))
        ways = [way for way in composed if way is not None]
        if self._anchors and catch_up_cost(self._store, manifest).is_due:
            new = [self._tensors[entry.name] for entry in manifest.tensors]
            objects, _ = put_objects(self._store, self._name, nonce, new, lambda a, b: [None] * (b - a))
            ways.append(Way(None, objects))
        if not ways:
            return ()
        later = LaterWays(format=FORMAT, channel=self._name, version=manifest.version, ways=tuple(ways))
        with suppress(StoreError):
            self._store.put(later_key(manifest), msgspec.json.encode(later))
            return later.ways
        if not plans.later_ways(self._store, manifest):  # unless another compactor was faster
            raise StoreError(f"further deltas to {manifest.version} could not be written", hint="check the store")
        return ()

    def _compose(self, manifest: Manifest, span: int, nonce: str) -> Way | None:
        """Return the composed delta over `span` steps; None if the single steps together are smaller."""
        steps = list(self._steps)[-span:]
        base = steps[0][0].base
        chained = sum(step.delta.num_bytes if step.delta else step.ways[0].num_bytes for step, _ in steps)
        names = [entry.name for entry in manifest.tensors]
        new = [self._tensors[name] for name in names]

        def before(start: int, stop: int) -> list[Tensor | None]:
            return [_undone(name, self._tensors[name], [undo for _, undo in steps]) for name in names[start:stop]]

        objects, _ = put_objects(self._store, self._name, nonce, new, before)
        way = Way(base, objects)
        return way if base is not None and way.num_bytes < chained else None


def _undone(name: str, tensor: Tensor, undos: Sequence[UndoRecord]) -> Tensor | None:
    """Return a tensor as it was before these steps; None if one of them replaced it in full."""
    if any(name in undo.removed for undo in undos):
        return None
    if not any(name in undo.changed for undo in undos):
        return tensor
    codes = tensor.codes.copy()
    for undo in reversed(undos):
        if name in undo.changed:
            where, were = undo.changed[name]
            codes[where] = were
    return Tensor(tensor.dtype, tensor.shape, codes)
