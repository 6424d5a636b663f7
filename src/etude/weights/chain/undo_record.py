"""Records of the values that a step overwrote, with which tensors are set back by one version.

A delta can only be decoded from the old version to the new one. So a follower that may have to go back keeps the values
that a step overwrote, with their positions. A tensor is kept in full if the list would be longer or its shape changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from etude.weights.tensors import Codes, Tensor

Changes = Mapping[str, tuple[npt.NDArray[Any], Codes]]
"""Tensor name -> ascending flat positions (uint32 or int64), and the codes there."""


@dataclass(frozen=True)
class UndoRecord:
    """The data with which the tensors before a step can be computed from those after it.

    `changed`: for each changed tensor, the flat positions and the old values there, as codes (the raw bits of
    elements). `replaced`: old tensors that are stored completely. `removed`: names of tensors that the step added, and
    that going back therefore removes.
    """

    changed: Mapping[str, tuple[npt.NDArray[Any], Codes]]
    replaced: Mapping[str, Tensor]
    removed: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        """Memory that the record uses, in bytes."""
        lists = sum(where.nbytes + codes.nbytes for where, codes in self.changed.values())
        return lists + sum(tensor.num_bytes for tensor in self.replaced.values())

    def apply(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors before the step, given those after it. Unchanged tensors are the same objects."""
        before = {name: tensor for name, tensor in tensors.items() if name not in self.removed}
        for name, (where, codes) in self.changed.items():
            written = before[name].codes.copy()
            written[where] = codes
            before[name] = Tensor(before[name].dtype, before[name].shape, written)
        return before | dict(self.replaced)


def make_undo_record(old: Mapping[str, Tensor], new: Mapping[str, Tensor], changed: Changes) -> UndoRecord:
    """Create the record with which the tensors `old` can be computed from `new`.

    `changed`: the first result of `compare_tensors(old, new)`.
    """
    lists: dict[str, tuple[npt.NDArray[Any], Codes]] = {}
    whole = {name: tensor for name, tensor in old.items() if name not in new or new[name].spec != tensor.spec}
    for name, (where, codes) in changed.items():
        kept = where.astype(np.uint32, copy=False) if old[name].codes.size <= 1 << 32 else where
        if kept.nbytes + codes.nbytes < old[name].num_bytes:
            lists[name] = kept, old[name].codes[where]
        else:
            whole[name] = old[name]
    return UndoRecord(lists, whole, tuple(sorted(new.keys() - old.keys())))


def compare_tensors(
    old: Mapping[str, Tensor], new: Mapping[str, Tensor]
) -> tuple[dict[str, tuple[npt.NDArray[Any], Codes]], dict[str, Tensor]]:
    """Compare two sets of tensors by name. Return the changed elements, and the tensors that are new.

    The first result has, for each changed tensor of equal dtype and shape, the flat positions (int64, ascending) and
    the new codes (raw bits) there. The second has the tensors of `new` that `old` lacks or has with another dtype or
    shape. Tensors with equal bits are in neither.
    """
    changed: dict[str, tuple[npt.NDArray[Any], Codes]] = {}
    replaced = {}
    for name, tensor in new.items():
        before = old.get(name)
        if before is None or before.spec != tensor.spec:
            replaced[name] = tensor
        elif before is not tensor:
            where: npt.NDArray[Any] = np.flatnonzero(before.codes != tensor.codes)
            if where.size:
                changed[name] = where.astype(np.int64, copy=False), tensor.codes[where]
    return changed, replaced
