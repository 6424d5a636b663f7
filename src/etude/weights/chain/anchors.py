"""When a whole snapshot is worth its bytes. No knob: both costs are counted in bytes, and the worse ratio is least.

Say a snapshot weighs S, and what lies between two of them weighs D for a reader who comes late. A reader fetches
S + D where S would do: (S + D) / S of the least possible. A store holds S + D where D would do: (S + D) / D. The larger
of the two ratios is smallest where D = S, and it is 2 there: an anchor is due once D exceeds S. How many readers come
late need not be known: the point is right for the worst mix of them (ski rental).

A late reader pays for a delta in three ways: its object; the manifest that names it; and one pass over the whole
model, since decoding compares and writes at memory speed. A core applies at 6 GB/s and more, links between regions
bring .1 GB/s and less, so a pass is counted as 1/64 of the model's bytes. That alone keeps two anchors within 64
versions, however small the deltas are. `docs/decisions/0011-when-an-anchor-is-due.md`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from etude.errors import WeightsError
from etude.seams import BlobStore
from etude.weights.chain import history, plans
from etude.weights.chain.manifest import Manifest

PASSES_PER_FETCH = 64
"""Passes over a model at memory speed that take as long as fetching it once over a link between regions."""


@dataclass(frozen=True)
class Debt:
    """What a reader who comes late pays beyond a snapshot. All in bytes."""

    anchor_bytes: int = 0  # of the last anchor
    since: int = 0  # cost of the versions after it

    def after(self, delta_bytes: int, table_bytes: int, snapshot_bytes: int) -> Debt:
        """One delta more."""
        return replace(self, since=self.since + delta_bytes + table_bytes + snapshot_bytes // PASSES_PER_FETCH)

    def grown(self, manifest: Manifest) -> Debt:
        """The same for a version that was published."""
        delta_bytes = manifest.delta.num_bytes if manifest.delta else 0
        return self.after(delta_bytes, table_bytes(manifest), manifest.snapshot_bytes)

    @property
    def is_due(self) -> bool:
        return self.since > self.anchor_bytes


def debt_at(store: BlobStore, at: Manifest) -> Debt:
    """What a late reader of this version pays beyond the last anchor; where none is found, the next is due."""
    behind: list[Manifest] = []
    while (anchor := plans.snapshot(store, at)) is None and at.base is not None:
        behind.append(at)
        try:
            at = history.load(store, at.base)
        except WeightsError:
            break
    debt = Debt(anchor.num_bytes if anchor else 0)
    for manifest in reversed(behind):
        debt = debt.grown(manifest)
    return debt


def table_bytes(manifest: Manifest) -> int:
    """What a manifest weighs, but for the few bytes that do not grow with the model."""
    return len(msgspec.json.encode(manifest.tensors))
