"""Composes deltas over several versions, off the training path, so that who comes late fetches less than the chain.

A weight that moved in several steps costs a delta over them once; sixteen chained deltas weigh 1.31 bit a weight where
one over sixteen versions weighs .55 (AdamW, 1e-6). A compactor follows the chain by itself, wherever the store is near.
It holds one full version and, for each of the last steps, what that step overwrote (`undo`): never a second snapshot,
as it walks back to a base group by group. What it composes is written down beside the version (`manifest.later_key`):
nobody has to trust it, since the target's own digests prove the result.

A tensor that a step replaced whole, or changed so densely that a list would be longer, is whole over that step, too:
whole after anything is whole. Knows nothing of who publishes and who reads.

Library only: no process of a run starts a compactor. Whoever wants one calls `Compactor.step` in a process of its own.
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
from etude.weights.chain.anchors import debt_at
from etude.weights.chain.manifest import FORMAT, Later, Manifest, Ref, Way, later_key
from etude.weights.chain.objects import put_objects
from etude.weights.chain.undo import Undo, compare, retain
from etude.weights.tensors import Tensor

SPANS = (4, 16)
"""Steps a composed delta goes over: with 1, any number of versions behind is a few hops."""


class Compactor:
    """Follows a channel and adds ways to its head. One for a channel suffices; more do each other's work. Not safe
    between threads.

    `anchors`: add a snapshot where one is due, for a writer that leaves them out (`Channel(anchors=False)`).
    """

    def __init__(
        self, store: BlobStore, name: str = "policy", *, spans: Sequence[int] = SPANS, anchors: bool = False
    ) -> None:
        if not spans or min(spans) < 2:
            raise WeightsError(f"spans {tuple(spans)} are not allowed", hint="two steps or more, each")
        self._store, self._name = store, name
        self._spans, self._anchors = sorted(spans), anchors
        self._at: Ref | None = None
        self._tensors: dict[str, Tensor] = {}
        self._steps: deque[tuple[Manifest, Undo]] = deque(maxlen=self._spans[-1])  # the oldest first

    @property
    def undo_bytes(self) -> int:
        """What the last steps' lists weigh in memory."""
        return sum(undo.num_bytes for _, undo in self._steps)

    def step(self) -> tuple[Way, ...] | None:
        """Move to the head and add ways to it; those that were added. None where the head is held already, or there
        is none. Raises `WeightsError`, `StoreError`; the next call goes on from there."""
        pointer = history.head(self._store, self._name)
        if pointer is None or pointer.head == self._at:
            return None
        manifests = self._after_held(pointer.head)
        for left, (ref, manifest) in zip(range(len(manifests))[::-1], manifests, strict=True):
            try:
                self._take(ref, manifest)
            except WeightsError:  # lost or collected: what comes after it may be whole
                if not left:
                    raise
                self._forget()
        return self._add(manifests[-1][1])

    def _after_held(self, head: Ref) -> list[tuple[Ref, Manifest]]:
        """The chain after what is held, to the head; at a start, as far back as the longest span needs."""
        found: list[tuple[Ref, Manifest]] = []
        ref: Ref | None = head
        while ref is not None and ref != self._at and len(found) <= self._spans[-1]:
            found.append((ref, history.load(self._store, ref)))
            ref = found[-1][1].base
        if ref is None or ref != self._at:  # begin anew at the oldest of them
            self._forget()
        return found[::-1]

    def _forget(self) -> None:
        self._steps.clear()
        self._at, self._tensors = None, {}

    def _take(self, ref: Ref, manifest: Manifest) -> None:
        """Hold the next version, and what it overwrote."""
        held = self._at.version if self._at else None
        tensors = plans.reach(self._store, manifest, held, self._tensors).tensors
        if self._at is not None:
            changed, _ = compare(self._tensors, tensors)
            undo = retain(self._tensors, tensors, changed)
            self._steps.append((manifest, Undo(undo.changed, {}, (*undo.removed, *undo.replaced))))
        self._at, self._tensors = ref, tensors

    def _add(self, manifest: Manifest) -> tuple[Way, ...]:
        """Write the ways that are worth their bytes beside a version."""
        if plans.later_ways(self._store, manifest):
            return ()
        nonce = secrets.token_hex(4)
        composed = (self._compose(manifest, span, nonce) for span in self._spans if span <= len(self._steps))
        ways = [way for way in composed if way is not None]
        if self._anchors and debt_at(self._store, manifest).is_due:
            new = [self._tensors[entry.name] for entry in manifest.tensors]
            objects, _ = put_objects(self._store, self._name, nonce, new, lambda a, b: [None] * (b - a))
            ways.append(Way(None, objects))
        if not ways:
            return ()
        later = Later(format=FORMAT, channel=self._name, version=manifest.version, ways=tuple(ways))
        with suppress(StoreError):
            self._store.put(later_key(manifest), msgspec.json.encode(later))
            return later.ways
        if not plans.later_ways(self._store, manifest):  # not another compactor that was faster
            raise StoreError(f"ways to {manifest.version} could not be written", hint="see the store")
        return ()

    def _compose(self, manifest: Manifest, span: int, nonce: str) -> Way | None:
        """The way over `span` steps; None where the steps themselves weigh less."""
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


def _undone(name: str, tensor: Tensor, undos: Sequence[Undo]) -> Tensor | None:
    """A tensor as it was before these steps; None where one of them brought it whole."""
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
