"""Where a checkpoint's tensors live in an engine: one name, any number of places in its memory.

Engines fuse (q, k and v in one matrix, gate and up in w13), stack (all experts of a layer in one tensor), transpose,
widen, hold a shard of a tensor, tie two names to one storage, and keep things that are computed from several (absorbed
attention matrices, prepacked copies). All but the last are views: a `Piece` says which part of a checkpoint's tensor a
view of live memory holds. The last are hooks: `Derived`. Each engine declares its own map, in a few lines:

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

CHECKED = 1 << 18
"""Elements that are compared at a time."""


def _widen(codes: Codes, live: Codes) -> None:
    np.copyto(live, codes)
    np.left_shift(live, np.uint32(16), out=live)


def _f16_to_f32(codes: Codes, live: Codes) -> None:
    np.copyto(live.view(np.float32), codes.view(np.float16))


_EXACT: dict[tuple[str, str], Callable[[Codes, Codes], None]] = {("bf16", "f32"): _widen, ("f16", "f32"): _f16_to_f32}
"""(published, live): every value of the first is one of the second. A call writes the second's bits in place."""


@dataclass(frozen=True)
class Piece:
    """A part of a checkpoint's tensor, and the live memory that holds it. Made by `piece`, `named`, `fused`.

    `box`: for each dimension of the checkpoint's tensor, [start, stop); None: all of it. `reorder`: for memory whose
    elements lie in no view's order (prepacked, swizzled): from numbers of elements in the box to places in it, which
    are numbers in C order of the window's shape; a bijection.
    """

    window: Window
    box: tuple[tuple[int, int], ...] | None = None
    reorder: Callable[[Places], Places] | None = None

    @property
    def box_shape(self) -> Shape | None:
        return None if self.box is None else tuple(stop - start for start, stop in self.box)

    def check(self, name: str, spec: Spec) -> None:
        """Raises `WeightsError` unless a tensor of `spec` can be held here exactly."""
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
                hint="the map is of another model, or the engine holds a format that is not published: follow that one",
            )

    def take(self, spec: Spec, positions: Places, codes: Codes) -> tuple[Places, Codes]:
        """Of a tensor's changes, those inside the box: places in the window's `flat`, and codes as the memory has them.

        `positions`: sorted numbers in C order of the tensor.
        """
        if self.box is not None or self.reorder is not None or not self.window.contiguous:
            positions = positions.astype(np.int64, copy=False)  # what is computed of them may be larger
        if self.box is not None:
            positions, keep = _inside(positions, spec.shape, self.box)
            codes = codes[keep]
        if self.reorder is not None:
            positions = self.reorder(positions)
        return self.window.places(positions), self._converted(spec.dtype, codes)

    def part(self, spec: Spec, codes: Codes) -> Codes:
        """Of a whole tensor's codes, what the window holds, in its shape: a view, but for memory of its own order."""
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
        """Write all that the window holds of a tensor. Needs memory for this piece at most, on a host none."""
        part, convert = self.part(spec, codes), _EXACT.get((spec.dtype, self.window.dtype))
        if convert is not None and isinstance(self.window.view, np.ndarray):
            convert(part, self.window.view)
        else:
            self.window.fill(self._converted(spec.dtype, part))

    def holds(self, spec: Spec, codes: Codes) -> bool:
        """Whether the memory is, bit for bit, what it should be for a tensor. On a host it is read in pieces that stay
        in a core's cache, without memory for more than one, and the interpreter is free for others in between."""
        part, window = self.part(spec, codes), self.window
        if not (isinstance(window.flat, np.ndarray) and window.contiguous and part.flags.c_contiguous):
            return window.equals(self._converted(spec.dtype, part))
        flat = part.reshape(-1)
        pieces = (slice(at, at + CHECKED) for at in range(0, flat.size, CHECKED))
        return all(np.array_equal(window.flat[one], self._converted(spec.dtype, flat[one])) for one in pieces)

    def _converted(self, dtype: str, codes: Codes) -> Codes:
        """Published codes as the memory holds them."""
        convert = _EXACT.get((dtype, self.window.dtype))
        if convert is None:
            return codes
        converted = np.empty(codes.shape, DTYPES[self.window.dtype].codes)
        convert(codes, converted)
        return converted


@dataclass(frozen=True)
class Derived:
    """Live memory that is computed from tensors: after any of `sources` was written, `compute` is called.

    It runs in the pause, reads live memory, and may do whatever the engine did when it loaded: transpose, multiply,
    prepack. An undo calls it again over the old weights; what it does not give back bit for bit from equal inputs,
    `outputs` names, and those are kept and written back instead.
    """

    sources: frozenset[str]
    compute: Callable[[], None]
    outputs: tuple[Window, ...] = ()


class Map:
    """Every place of every tensor. Raises `WeightsError` where two places overlap without being the same.

    `ignored`: names that are published and that this engine has no use for.
    """

    def __init__(self, pieces: Pieces, *, derived: Iterable[Derived] = (), ignored: Iterable[str] = ()) -> None:
        self.pieces = {name: tuple(found) for name, found in pieces.items()}
        self.derived, self.ignored = tuple(derived), frozenset(ignored)
        self.tied = _tied(self.pieces)
        """Names that share all of a storage's elements, by each of them: the alias table."""
        _refuse_overlaps(self.pieces)


def piece(name: str, value: Any, box: Sequence[tuple[int, int]] | None = None) -> Piece:
    """The piece of tensor `name` in a numpy array or torch tensor of any strides."""
    return Piece(window(name, value), None if box is None else tuple((int(a), int(b)) for a, b in box))


def named(live: Mapping[str, Any]) -> dict[str, list[Piece]]:
    """Every live tensor under the name that the checkpoint has for it: `named(model.state_dict())`."""
    return {name: [piece(name, value)] for name, value in live.items()}


def fused(live: Any, parts: Mapping[str, int], axis: int = 0) -> dict[str, list[Piece]]:
    """Tensors one after another along an axis: their names, and how long each is. Raises `WeightsError`."""
    if sum(parts.values()) != live.shape[axis]:
        raise WeightsError(
            f"{', '.join(parts)} are {sum(parts.values())} long together",
            f"what they are fused in has {live.shape[axis]} along axis {axis}",
            hint="the sizes are of another model, or of another tensor-parallel degree",
        )
    ends = [*itertools.accumulate(parts.values())]
    before = (slice(None),) * axis
    return {
        name: [piece(name, live[(*before, slice(end - length, end))])]
        for (name, length), end in zip(parts.items(), ends, strict=True)
    }


def joined(*maps: Pieces) -> dict[str, list[Piece]]:
    """All the places of several: a name may be in more than one of them."""
    found: dict[str, list[Piece]] = {}
    for one in maps:
        for name, pieces in one.items():
            found.setdefault(name, []).extend(pieces)
    return found


def _inside(positions: Places, shape: Shape, box: Sequence[tuple[int, int]]) -> tuple[Places, Any]:
    """Numbers in the box of the positions in it, and which those are."""
    if all((a, b) == (0, n) for (a, b), n in zip(box[1:], shape[1:], strict=True)):  # whole rows: one run
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
    """Of windows without gaps: with them (columns of a matrix) sharing a range means nothing."""
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
                hint="give each its own slice; tied tensors are the same view under two names",
            )
