"""Measures the size of a delta between two sets of tensors: per tensor and in total, beside its theoretical bound.

A tensor that is new, or has another dtype or shape, is stored in full. The bound does not apply to it, so such tensors
are counted separately.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from etude.weights.delta import codec
from etude.weights.delta.bound import bound_bytes
from etude.weights.delta.choices import Mode
from etude.weights.tensors import Codes, Tensor


@dataclass(frozen=True)
class Cost:
    """The size of the delta of one tensor, or of several together.

    A tensor that is stored in full counts as changed in every element. `delta_bytes` of one tensor: encoded alone, with
    headers. `bound_bytes`: the size from the formula in `delta/bound.py`; None if a tensor is stored in full.
    """

    name: str
    dtype: str
    num_elements: int
    num_changed: int
    snapshot_bytes: int
    delta_bytes: int
    bound_bytes: float | None

    @property
    def density(self) -> float:
        """Share of elements that change."""
        return self.num_changed / max(1, self.num_elements)

    @property
    def bits_per_weight(self) -> float:
        """Size of the delta in bits per weight."""
        return 8 * self.delta_bytes / max(1, self.num_elements)

    @property
    def bound_bits_per_weight(self) -> float | None:
        """`bound_bytes` in bits per weight."""
        return None if self.bound_bytes is None else 8 * self.bound_bytes / max(1, self.num_elements)

    @property
    def ratio(self) -> float:
        """Compression ratio: `snapshot_bytes` over `delta_bytes`."""
        return self.snapshot_bytes / max(1, self.delta_bytes)

    @property
    def share_of_bound(self) -> float | None:
        """`bound_bytes` over `delta_bytes`. At 1.0 the delta has the estimated smallest size; 0.0 if nothing changed.
        None if `bound_bytes` is None."""
        return None if self.bound_bytes is None else self.bound_bytes / max(1, self.delta_bytes)


@dataclass(frozen=True)
class Costs:
    """The size of a delta from one set of tensors to another. From `measure`.

    `tensors`: each encoded alone, sorted by name. `deltas`: all tensors that have an old tensor of the same dtype and
    shape, encoded together. `full_tensors`: all other tensors, and the bytes that they add. Both are None if there are
    no such tensors. `num_whole`: the number of tensors in `full_tensors`.
    """

    tensors: list[Cost]
    deltas: Cost | None
    full_tensors: Cost | None
    total: Cost
    num_whole: int


def measure(old: Mapping[str, Tensor], new: Mapping[str, Tensor], mode: Mode = "best") -> Costs:
    """Encode the delta from `old` to `new`, each tensor alone and all together, and measure the sizes.

    `mode`: "best", or "fast" for faster encoding to more bytes.
    """
    pairs = [(new[name], old.get(name)) for name in sorted(new)]
    rows = [_cost(name, *pair, mode) for name, pair in zip(sorted(new), pairs, strict=True)]
    kept = [pair for pair in pairs if not _is_whole(*pair)]
    num_bytes = _coded_bytes(pairs, mode)
    if len(kept) == len(pairs):
        total = _sum("all", rows, num_bytes, _bound(pairs))
        return Costs(rows, total, None, total, 0)
    kept_bytes = _coded_bytes(kept, mode) if kept else 0
    changed, whole = ([row for row in rows if (row.bound_bytes is None) == is_whole] for is_whole in (False, True))
    return Costs(
        rows,
        _sum("deltas", changed, kept_bytes, _bound(kept)) if kept else None,
        _sum("whole", whole, max(0, num_bytes - kept_bytes), None),
        _sum("all", rows, num_bytes, None),
        len(whole),
    )


def _cost(name: str, new: Tensor, old: Tensor | None, mode: Mode) -> Cost:
    weights = _weights(new)
    whole = _is_whole(new, old)
    changed = weights.size if old is None or whole else int(np.count_nonzero(_weights(old) != weights))
    num_bytes = len(codec.encode([new], [old], mode)) if changed else 0
    return Cost(
        name, new.dtype, weights.size, changed, new.num_bytes, num_bytes, None if whole else _bound([(new, old)])
    )


def _sum(name: str, rows: Sequence[Cost], delta_bytes: int, bound: float | None) -> Cost:
    return Cost(
        name,
        ", ".join(sorted({row.dtype for row in rows})),
        sum(row.num_elements for row in rows),
        sum(row.num_changed for row in rows),
        sum(row.snapshot_bytes for row in rows),
        delta_bytes,
        bound,
    )


def _is_whole(new: Tensor, old: Tensor | None) -> bool:
    return old is None or old.spec != new.spec


def _coded_bytes(pairs: Sequence[tuple[Tensor, Tensor | None]], mode: Mode) -> int:
    after, before = [new for new, _ in pairs], [old for _, old in pairs]
    return sum(len(codec.encode(after[a:b], before[a:b], mode)) for a, b in codec.object_spans(after))


def _bound(pairs: Sequence[tuple[Tensor, Tensor | None]]) -> float:
    return bound_bytes([new for new, _ in pairs], [old for _, old in pairs])


def _weights(tensor: Tensor) -> Codes:
    if tensor.dtype != "f4_e2m1x2":
        return tensor.codes
    return np.concatenate([tensor.codes & np.uint8(15), tensor.codes >> np.uint8(4)])
