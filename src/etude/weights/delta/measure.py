"""What a delta between two sets of tensors costs, by tensor and in all, beside its bound. Reads and measures only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from etude.weights.delta import codec
from etude.weights.delta.bound import bound_bytes
from etude.weights.delta.choices import Mode
from etude.weights.delta.deltas import groups
from etude.weights.tensors import Codes, Tensor


@dataclass(frozen=True)
class Cost:
    """One tensor's delta, or all tensors' together. A tensor that is new, or has another spec, changes altogether."""

    name: str
    dtype: str
    num_elements: int
    num_changed: int
    snapshot_bytes: int
    delta_bytes: int  # of a tensor: coded alone, its share of headers included
    bound_bytes: float

    @property
    def density(self) -> float:
        """Share of elements that change."""
        return self.num_changed / max(1, self.num_elements)

    @property
    def bits_per_weight(self) -> float:
        """Of the delta."""
        return 8 * self.delta_bytes / max(1, self.num_elements)

    @property
    def bound_bits_per_weight(self) -> float:
        """Of the bound."""
        return 8 * self.bound_bytes / max(1, self.num_elements)

    @property
    def ratio(self) -> float:
        """Snapshot bytes over delta bytes."""
        return self.snapshot_bytes / max(1, self.delta_bytes)

    @property
    def share_of_bound(self) -> float:
        """The delta's ratio over the bound's: 1.0 is a coder that knows each old exponent alone; 0: nothing changed."""
        return self.bound_bytes / max(1, self.delta_bytes)


def measure(old: Mapping[str, Tensor], new: Mapping[str, Tensor], mode: Mode = "best") -> tuple[list[Cost], Cost]:
    """The cost of each tensor of `new`, by name, and of all in objects as a file or a channel has them."""
    names = sorted(new)
    rows = [_cost(name, [new[name]], [old.get(name)], mode) for name in names]
    after, before = [new[name] for name in names], [old.get(name) for name in names]
    total = Cost(
        "all",
        ", ".join(sorted({row.dtype for row in rows})),
        sum(row.num_elements for row in rows),
        sum(row.num_changed for row in rows),
        sum(row.snapshot_bytes for row in rows),
        sum(len(codec.encode(after[a:b], before[a:b], mode)) for a, b in groups(after)),
        bound_bytes(after, before),
    )
    return rows, total


def _cost(name: str, new: Sequence[Tensor], old: Sequence[Tensor | None], mode: Mode) -> Cost:
    (after,), (before,) = new, old
    weights = _weights(after)
    same_spec = before is not None and before.spec == after.spec
    changed = int(np.count_nonzero(_weights(before) != weights)) if before and same_spec else weights.size
    return Cost(
        name,
        after.dtype,
        weights.size,
        changed,
        after.num_bytes,
        len(codec.encode(new, old, mode)) if changed else 0,
        bound_bytes(new, old),
    )


def _weights(tensor: Tensor) -> Codes:
    """A code for each weight: packed ones apart."""
    if tensor.dtype != "f4_e2m1x2":
        return tensor.codes
    return np.concatenate([tensor.codes & np.uint8(15), tensor.codes >> np.uint8(4)])
