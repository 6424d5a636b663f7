"""Parts of tensors: rows that one rank of a sharded trainer holds, published as tensors of their own.

A part is a tensor whose name says which rows of which tensor it has: `w[512:1024]`. Encoding, verification, composition
and garbage collection treat it like any other tensor. So its digest needs no rows of other ranks, and the version's
digest covers which rows they are. Only readers that need complete tensors, or whose memory is sharded, use the
functions here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from etude.errors import WeightsError
from etude.weights.follow.live import Window, window
from etude.weights.follow.runtime_map import Piece, Pieces
from etude.weights.tensors import Spec, Tensor

_PART = re.compile(r"(.+)\[(0|[1-9][0-9]{0,12}):([1-9][0-9]{0,12})\]", re.DOTALL)


@dataclass(frozen=True, order=True)
class Part:
    """Rows [start, stop) of a tensor, along its first dimension, that are published as a tensor of their own.

    `tensor`: the name of the complete tensor.
    """

    tensor: str
    start: int
    stop: int

    @property
    def name(self) -> str:
        """The name under which the part is published."""
        return f"{self.tensor}[{self.start}:{self.stop}]"


def part_of(name: str) -> Part | None:
    """Parse the name of a part of a tensor; return None for the name of a complete tensor.

    >>> part_of("w[512:1024]"), part_of("w")
    (Part(tensor='w', start=512, stop=1024), None)
    """
    found = _PART.fullmatch(name)
    part = Part(found[1], int(found[2]), int(found[3])) if found else None
    return part if part and part.start < part.stop else None


def full_specs(specs: Mapping[str, Spec]) -> dict[str, Spec]:
    """Return the dtype and shape of each complete tensor, from those of published tensors and parts (`w[0:512]`).

    Raises `WeightsError` unless the parts of a tensor follow each other from row 0 without a gap, with equal dtype and
    row shape. A missing last part is not detected.
    """
    parts = {name: part_of(name) for name in specs}
    found = {name: specs[name] for name, part in parts.items() if part is None}
    rows: dict[str, int] = {}
    for part in sorted(part for part in parts.values() if part is not None):
        spec, before = specs[part.name], found.get(part.tensor)
        follows = part.start == rows.get(part.tensor, 0) and (part.start == 0) == (before is None)
        alike = before is None or (before.dtype, before.shape[1:]) == (spec.dtype, spec.shape[1:])
        if not (follows and alike and spec.shape[:1] == (part.stop - part.start,)):
            raise WeightsError(
                f"part {part.name!r} does not fit the parts before it",
                f"it is {spec.dtype} {list(spec.shape)}; they have {rows.get(part.tensor, 0)} rows"
                + (f" of {before.dtype}" if before else ""),
                hint="publish the parts of a tensor from row 0 on, without a gap and with equal dtype and width",
            )
        rows[part.tensor] = part.stop
        found[part.tensor] = Spec(spec.dtype, (part.stop, *spec.shape[1:]))
    return found


def assemble(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Concatenate parts (`w[0:512]`, `w[512:1024]`) to complete tensors, and return all complete tensors by name.

    Tensors that are complete already are the same objects. Raises the errors of `full_specs`.

    >>> rows = [Tensor("u8", (1, 2), np.array(codes, np.uint8)) for codes in ([1, 2], [3, 4])]
    >>> assemble({"w[0:1]": rows[0], "w[1:2]": rows[1]})["w"].codes.tolist()
    [1, 2, 3, 4]
    """
    specs = full_specs({name: tensor.spec for name, tensor in tensors.items()})
    found = {name: tensors[name] for name in specs if name in tensors}
    cut: dict[str, list[Part]] = {}
    for part in sorted(part for part in map(part_of, tensors) if part is not None):
        cut.setdefault(part.tensor, []).append(part)
    for name, parts in cut.items():
        codes = np.concatenate([tensors[part.name].codes for part in parts])
        found[name] = Tensor(specs[name].dtype, specs[name].shape, codes)
    return found


def split(tensors: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    """Return the tensors and parts with these names, such as `w` and `w[0:512]`: the inverse of `assemble`.

    Parts are views of complete tensors. Names whose tensor is missing or has fewer rows are left out.
    """
    found = {}
    for name in names:
        part = part_of(name)
        if name in tensors:
            found[name] = tensors[name]
        elif part is not None and part.tensor in tensors and tensors[part.tensor].shape[:1] >= (part.stop,):
            whole = tensors[part.tensor]
            width = whole.codes.size // whole.shape[0]
            shape = (part.stop - part.start, *whole.shape[1:])
            found[name] = Tensor(whole.dtype, shape, whole.codes[part.start * width : part.stop * width])
    return found


def split_pieces(pieces: Pieces, specs: Mapping[str, Spec]) -> dict[str, list[Piece]]:
    """Convert an engine's map of complete tensors to a map of published parts.

    Each part is mapped to its rows in each place of the complete tensor. `specs`: the published tensors and parts. If a
    place holds only a box of the tensor (that of a tensor-parallel rank), rows outside of it are not in the map. Raises
    `WeightsError` for memory with a `reorder`.
    """
    found = {name: list(pieces[name]) for name in specs if name in pieces}
    for part in (part for part in map(part_of, specs) if part is not None):
        cut = [_cut(one, part, specs[part.name]) for one in pieces.get(part.tensor, ())]
        if any(cut):
            found[part.name] = [one for one in cut if one is not None]
    return found


def _cut(one: Piece, part: Part, spec: Spec) -> Piece | None:
    """Return the rows of a part in one place; None if there are none."""
    if one.reorder is not None:
        raise WeightsError(
            f"{part.tensor!r} is published in parts", "the engine's memory for it has a `reorder`",
            hint="pass complete tensors: `parts.assemble`",
        )  # fmt: skip
    first, last = one.box[0] if one.box else (0, one.window.shape[0])
    start, stop = max(first, part.start), min(last, part.stop)
    if start >= stop:
        return None
    inside = _rows(one.window, start - first, stop - first)
    if one.box is None and (start, stop) == (part.start, part.stop):
        return replace(one, window=inside)
    others = one.box[1:] if one.box else tuple((0, n) for n in spec.shape[1:])
    return replace(one, window=inside, box=((start - part.start, stop - part.start), *others))


def _rows(of: Window, start: int, stop: int) -> Window:
    cut = window("a part", of.view[start:stop])
    return replace(cut, dtype=of.dtype)
