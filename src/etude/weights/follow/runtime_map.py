"""Maps each tensor of a checkpoint to the places in an engine's memory that hold it.

Engines fuse tensors (q, k and v in one matrix, gate and up in w13), stack them (all experts of a layer in one tensor),
transpose or widen them, hold a shard of one, tie two names to one storage, and keep values computed from several
(absorbed attention matrices, prepacked copies). All but the last are views: a `Piece` says which part of a checkpoint
tensor a view of live memory holds. Computed values are `Derived`. Each engine declares its own map, in a few lines:

>>> w13, experts = np.zeros((2, 6, 4), np.uint16), {}
>>> for e in range(2):
...     experts |= fused(w13[e], {f"experts.{e}.gate": 3, f"experts.{e}.up": 3})
>>> Map(experts).pieces["experts.1.up"][0].window.shape
(3, 4)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from etude.errors import WeightsError
from etude.weights.follow.live import Places, Shape, Window, c_strides, window
from etude.weights.tensors import DTYPES, Codes, Spec

Pieces = Mapping[str, Sequence["Piece"]]
"""Checkpoint name -> the pieces that hold the tensor."""

CHECKED = 1 << 18
"""Number of elements that `Piece.holds` compares at a time."""


def _widen(codes: Codes, live: Codes) -> None:
    np.copyto(live, codes)
    np.left_shift(live, np.uint32(16), out=live)


def _f16_to_f32(codes: Codes, live: Codes) -> None:
    np.copyto(live.view(np.float32), codes.view(np.float16))


_EXACT: dict[tuple[str, str], Callable[[Codes, Codes], None]] = {("bf16", "f32"): _widen, ("f16", "f32"): _f16_to_f32}
"""(published dtype, live dtype), if widening is exact -> function that writes codes of the first as codes of the
second."""


@dataclass(frozen=True)
class Piece:
    """A part of a checkpoint tensor, and the live memory that holds it. Created by `piece`, `named`, `fused`.

    `window`: the live memory. `box`: [start, stop) in each dimension of the checkpoint tensor; None: all of it.
    `reorder`: for memory in an order that strides cannot describe (prepacked, swizzled): a function that converts
    element indices in the box to element indices in the window, both in C order.

    In the methods, `spec` is the dtype and shape of the complete tensor as published, and `codes` are its elements as
    unsigned integers (their bits).
    """

    window: Window
    box: tuple[tuple[int, int], ...] | None = None
    reorder: Callable[[Places], Places] | None = None

    @property
    def box_shape(self) -> Shape | None:
        """The shape of the box; None if the piece holds the complete tensor."""
        return None if self.box is None else tuple(stop - start for start, stop in self.box)

    def check(self, name: str, spec: Spec) -> None:
        """Raise `WeightsError` unless this memory can hold its part of a tensor exactly. `name`: for the error."""
        inside = self.box is None or (
            len(self.box) == len(spec.shape)
            and all(0 <= a <= b <= n for (a, b), n in zip(self.box, spec.shape, strict=True))
        )
        shape = self.box_shape or spec.shape
        fits = shape == self.window.shape if self.reorder is None else np.prod(shape) == self.window.size
        live = self.window.dtype or spec.dtype
        same = live == spec.dtype or live[0] == "u" or (spec.dtype, live) in _EXACT
        width = DTYPES[live].codes.itemsize if (spec.dtype, live) in _EXACT else DTYPES[spec.dtype].codes.itemsize
        if not (inside and fits and same and width == self.window.itemsize):
            raise WeightsError(
                f"{name!r} is published as {spec.dtype} {list(spec.shape)}",
                f"the engine's place for it is {live} {list(self.window.shape)}"
                + (f", for {list(self.box)} of it" if self.box else ""),
                hint="map the tensors of this model; if the engine uses another format, publish that format",
            )

    def take(self, spec: Spec, positions: Places, codes: Codes) -> tuple[Places, Codes]:
        """Select the changes of a tensor that lie in this piece, and convert them for writing.

        `positions`: ascending indices into the complete tensor in C order; `codes`: the new code (bits) at each. Return
        the indices into the window's `flat`, and the codes in the memory's dtype.
        """
        if self.box is not None or self.reorder is not None or not self.window.contiguous:
            positions = positions.astype(np.int64, copy=False)  # indices into the window can exceed 32 bits
        if self.box is not None:
            positions, keep = _inside(positions, spec.shape, self.box)
            codes = codes[keep]
        if self.reorder is not None:
            positions = self.reorder(positions)
        return self.window.places(positions), self._converted(spec.dtype, codes)

    def part(self, spec: Spec, codes: Codes) -> Codes:
        """Return the part of `codes`, those of the complete tensor, that belongs in the window, in the window's shape.

        It is a view of `codes`, unless `reorder` is set.
        """
        shaped: Codes = codes.reshape(spec.shape)
        if self.box is not None:
            shaped = shaped[tuple(slice(a, b) for a, b in self.box)]
        if self.reorder is None:
            return shaped
        flat = shaped.reshape(-1)
        moved = np.empty_like(flat)
        moved[self.reorder(np.arange(flat.size, dtype=np.int64))] = flat
        return moved.reshape(self.window.shape)

    def fill(self, spec: Spec, codes: Codes) -> None:
        """Write this piece's part of the tensor to the live memory. `codes`: the elements of the complete tensor.

        Allocates at most one copy of the piece; if the piece is in host memory, it allocates nothing unless `reorder`
        is set.
        """
        part, convert = self.part(spec, codes), _EXACT.get((spec.dtype, self.window.dtype))
        if convert is not None and isinstance(self.window.view, np.ndarray):
            convert(part, self.window.view)
        else:
            self.window.fill(self._converted(spec.dtype, part))

    def holds(self, spec: Spec, codes: Codes) -> bool:
        """Return whether the live memory equals its part of the tensor, bit for bit. `codes`: the elements of the
        complete tensor.

        In host memory, compares `CHECKED` elements at a time: a block fits in a core's cache, and other threads can run
        between two blocks.
        """
        part, window = self.part(spec, codes), self.window
        if not (isinstance(window.flat, np.ndarray) and window.contiguous and part.flags.c_contiguous):
            return window.equals(self._converted(spec.dtype, part))
        flat = part.reshape(-1)
        pieces = (slice(at, at + CHECKED) for at in range(0, flat.size, CHECKED))
        return all(np.array_equal(window.flat[one], self._converted(spec.dtype, flat[one])) for one in pieces)

    def _converted(self, dtype: str, codes: Codes) -> Codes:
        convert = _EXACT.get((dtype, self.window.dtype))
        if convert is None:
            return codes
        converted = np.empty(codes.shape, DTYPES[self.window.dtype].codes)
        convert(codes, converted)
        return converted


@dataclass(frozen=True)
class Derived:
    """Live memory that is computed from tensors: `compute` is called after any of the tensors `sources` was written.

    It runs while the engine is paused, and reads live memory. It may do what the engine did when it loaded the weights:
    transpose, multiply, prepack. If the update is undone, `compute` is called again on the old weights. If equal inputs
    do not give equal bits, the memory that it writes must be listed in `outputs`: it is then saved before the update
    and written back by an undo.
    """

    sources: frozenset[str]
    compute: Callable[[], None]
    outputs: tuple[Window, ...] = ()


class Map:
    """The places of all tensors in an engine's memory. Raises `WeightsError` if two places overlap without being equal.

    `pieces`: checkpoint name -> the pieces that hold the tensor. `derived`: memory that is computed from tensors.
    `ignored`: names of published tensors that this engine does not use.
    """

    def __init__(self, pieces: Pieces, *, derived: Iterable[Derived] = (), ignored: Iterable[str] = ()) -> None:
        self.pieces = {name: tuple(found) for name, found in pieces.items()}
        self.derived, self.ignored = tuple(derived), frozenset(ignored)
        self.tied = _tied(self.pieces)
        """For each name: the names that share its memory (tied weights)."""
        _refuse_overlaps(self.pieces)


def piece(name: str, value: Any, box: Sequence[tuple[int, int]] | None = None) -> Piece:
    """Create the piece of tensor `name` in a numpy array or torch tensor of any strides.

    `box`: the part of the tensor that the array holds, [start, stop) in each dimension; None: all of it.
    """
    return Piece(window(name, value), None if box is None else tuple((int(a), int(b)) for a, b in box))


def named(live: Mapping[str, Any]) -> dict[str, list[Piece]]:
    """Map complete tensors that have the names of the checkpoint, for instance `named(model.state_dict())`."""
    return {name: [piece(name, value)] for name, value in live.items()}


def fused(live: Any, parts: Mapping[str, int], axis: int = 0) -> dict[str, list[Piece]]:
    """Map tensors that follow one another in one array `live`, along an axis. Return name -> pieces.

    `parts`: tensor name -> length along that axis, in order. Raises `WeightsError` if the lengths do not add up.
    """
    if sum(parts.values()) != live.shape[axis]:
        raise WeightsError(
            f"{', '.join(parts)} have a total length of {sum(parts.values())}",
            f"the fused tensor has {live.shape[axis]} along axis {axis}",
            hint="give the lengths that this model's tensors have on one tensor-parallel rank",
        )
    ends = [*itertools.accumulate(parts.values())]
    before = (slice(None),) * axis
    return {
        name: [piece(name, live[(*before, slice(end - length, end))])]
        for (name, length), end in zip(parts.items(), ends, strict=True)
    }


def merge_pieces(*maps: Pieces) -> dict[str, list[Piece]]:
    """Merge several maps of pieces. A name that is in more than one of them gets the pieces of all."""
    found: dict[str, list[Piece]] = {}
    for one in maps:
        for name, pieces in one.items():
            found.setdefault(name, []).extend(pieces)
    return found


def _inside(positions: Places, shape: Shape, box: Sequence[tuple[int, int]]) -> tuple[Places, Any]:
    """Select the positions that lie in a box. Return their indices in the box, and the selection."""
    if all((a, b) == (0, n) for (a, b), n in zip(box[1:], shape[1:], strict=True)):  # complete rows: one range
        row = int(np.prod(shape[1:], dtype=np.int64))
        first, last = np.searchsorted(positions, [box[0][0] * row, box[0][1] * row])
        return positions[first:last] - box[0][0] * row, slice(first, last)
    index = np.unravel_index(positions, shape)
    keep = np.ones(positions.shape, np.bool_)
    for i, (a, b) in zip(index, box, strict=True):
        keep &= (i >= a) & (i < b)
    found = np.zeros(int(keep.sum()), np.int64)
    for i, (a, _), stride in zip(index, box, c_strides(tuple(b - a for a, b in box)), strict=True):
        found += (i[keep] - a) * stride
    return found, keep


def _tied(pieces: Mapping[str, Sequence[Piece]]) -> dict[str, frozenset[str]]:
    names: dict[object, set[str]] = {}
    for name, found in pieces.items():
        for one in found:
            if one.window.size:
                names.setdefault((one.window.key, one.box), set()).add(name)
    shared = [group for group in names.values() if len(group) > 1]
    return {name: frozenset().union(*(g for g in shared if name in g)) - {name} for group in shared for name in group}


def _refuse_overlaps(pieces: Mapping[str, Sequence[Piece]]) -> None:
    """Raise `WeightsError` for overlapping windows.

    Only windows without gaps are compared, since columns of one matrix interleave.
    """
    spans = sorted(
        {
            (one.window.device, one.window.address, one.window.num_bytes, one.window.key): name
            for name, found in pieces.items()
            for one in found
            if one.window.size and one.window.contiguous
        }.items()
    )
    for ((device, start, size, _), name), ((other, after, *_), second) in itertools.pairwise(spans):
        if device == other and after < start + size:
            raise WeightsError(
                f"the engine's places for {name!r} and {second!r} overlap",
                f"by {start + size - after} bytes",
                hint="map each to its own slice; map tied tensors to the same view under two names",
            )
