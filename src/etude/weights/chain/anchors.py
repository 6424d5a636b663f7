"""Decides when to write a full snapshot (an *anchor*) beside a delta.

There is no setting: the rule minimises the worse of two ratios. Let S be the size of a snapshot, and D the size of
everything after the last snapshot, which a late reader fetches too. A reader fetches up to S + D where S would be
enough: (S + D) / S of the minimum. A store keeps S + D where D would be enough: (S + D) / D. The larger of the two
ratios is smallest at D = S, where it is 2. So an anchor is due as soon as D exceeds S. The rule does not need to know
how many readers are late: it is optimal for the worst case (ski rental).

A delta costs a late reader three things: its objects; its manifest; and one pass over the whole model, since decoding
compares and writes at memory speed. A core applies at 6 GB/s or more, and links between regions have 0.1 GB/s or less,
so a pass counts as 1/64 of the model's bytes. This alone keeps two anchors within 64 versions, however small the deltas
are. See `docs/decisions/0011-when-an-anchor-is-due.md`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from etude.errors import WeightsError
from etude.seams import BlobStore
from etude.weights.chain import history, plans
from etude.weights.chain.manifest import Manifest

PASSES_PER_FETCH = 64
"""Number of passes over a model at memory speed that take as long as fetching it once over a link between regions."""


@dataclass(frozen=True)
class CatchUpCost:
    """The number of bytes that a new reader fetches to get the newest version: those of the last full snapshot
    (*anchor*) and of the versions after it.

    `anchor_bytes`: size of that anchor. `since`: cost of the versions after it, in bytes. The time of a pass over the
    model in memory is converted to bytes too (`PASSES_PER_FETCH`).
    """

    anchor_bytes: int = 0
    since: int = 0

    def with_delta(self, delta_bytes: int, table_bytes: int, snapshot_bytes: int) -> CatchUpCost:
        """Return the cost after one more version that is stored as a delta.

        `delta_bytes`: size of its delta. `table_bytes`: size of its manifest's list of tensors. `snapshot_bytes`: size
        of the whole model, uncompressed.
        """
        return replace(self, since=self.since + delta_bytes + table_bytes + snapshot_bytes // PASSES_PER_FETCH)

    def with_version(self, manifest: Manifest) -> CatchUpCost:
        """Return the cost after one more published version, which has no full snapshot (anchor)."""
        delta_bytes = manifest.delta.num_bytes if manifest.delta else 0
        return self.with_delta(delta_bytes, table_bytes(manifest), manifest.snapshot_bytes)

    @property
    def is_due(self) -> bool:
        """Whether a full snapshot (anchor) should be written, since the versions after the last one cost more than that
        one."""
        return self.since > self.anchor_bytes


def catch_up_cost(store: BlobStore, at: Manifest) -> CatchUpCost:
    """Compute the catch-up cost of version `at`, by reading the manifests back to the last full snapshot (anchor).

    If none is found, `anchor_bytes` is 0.
    """
    behind: list[Manifest] = []
    while (anchor := plans.snapshot(store, at)) is None and at.base is not None:
        behind.append(at)
        try:
            at = history.load(store, at.base)
        except WeightsError:
            break
    cost = CatchUpCost(anchor.num_bytes if anchor else 0)
    for manifest in reversed(behind):
        cost = cost.with_version(manifest)
    return cost


def table_bytes(manifest: Manifest) -> int:
    """Return the size in bytes of a manifest's list of tensors, which is nearly all of a large model's manifest."""
    return len(msgspec.json.encode(manifest.tensors))
