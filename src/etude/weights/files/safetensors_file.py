"""One safetensors file: its header, the location of each tensor, and the tensors as views of the mapped file.

Implements the specification of the format: length of the header (u64, little-endian), the header in JSON (name ->
dtype, shape, [start, stop) in the data after it), the data. A tensor is raw codes, so every dtype of the format can be
read without torch, also those that numpy and torch do not have. Every field of the header is checked.
"""

from __future__ import annotations

import json
import math
import mmap
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from etude.errors import CheckpointError
from etude.weights.tensors import DTYPES, Spec, Tensor

MAX_HEADER_BYTES = 100_000_000
"""The limit of the format."""

_ALIGNMENT = 8
_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}
_DTYPES = {name: name.lower() for name in _BITS if name.lower() in DTYPES}
_PACKED = "f4_e2m1x2"
"""Two F4 elements in one code: a file counts elements, a `Tensor` counts codes."""

_HINT = "copy the file again: it was cut off or altered, or is not a safetensors file"


@dataclass(frozen=True)
class Place:
    """The location of a tensor in a file, with the dtype and shape that the file states.

    `dtype` is the format's name, such as "BF16". `start`, `stop`: bytes from the start of the file.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def spec(self) -> Spec:
        """The dtype and shape for a `Tensor`; raw bytes (u8) if etude does not have the file's dtype."""
        if self.dtype in _DTYPES:
            return Spec(_DTYPES[self.dtype], self.shape)
        if self.dtype == "F4" and _PACKED in DTYPES and self.shape and self.shape[-1] % 2 == 0:
            return Spec(_PACKED, (*self.shape[:-1], self.shape[-1] // 2))
        return Spec("u8", (self.stop - self.start,))


def read_header(path: Path, *, hint_damaged: str = _HINT) -> tuple[str, dict[str, Place]]:
    """Read the header of a file. Return its text, padding included, and the location of each tensor by name.

    `hint_damaged`: the hint of the error for a damaged file.

    Raises `CheckpointError` if the file cannot be read or is damaged.
    """
    try:
        with path.open("rb") as file:
            num_bytes = path.stat().st_size
            head = file.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
            if not 2 <= length <= min(MAX_HEADER_BYTES, num_bytes - 8):
                raise ValueError(f"it has {num_bytes} bytes, its header would have {length}")
            text = str(file.read(length), "utf-8")
        return text, parse_header(text, num_bytes)
    except OSError as error:
        hint = "give a checkpoint directory, or a .safetensors file"
        raise CheckpointError(f"{path} cannot be read", str(error.strerror), hint=hint) from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged", str(error), hint=hint_damaged) from None


def parse_header(text: str, num_bytes: int | None = None) -> dict[str, Place]:
    """Parse the text of a header. Return the location of each tensor by name, in the order of the file.

    `num_bytes`: the size of the file, which is checked; None: not checked. Raises `ValueError` (or `RecursionError`)
    for a header that violates the format.
    """
    raw = json.loads(text, object_pairs_hook=_without_repeats)
    if not isinstance(raw, dict):
        raise ValueError("its header is no object")
    data_at = 8 + len(text.encode())
    places = {name: _place(name, entry, data_at) for name, entry in raw.items() if name != "__metadata__"}
    places = dict(sorted(places.items(), key=lambda item: (item[1].start, item[1].stop)))
    at = data_at
    for name, place in places.items():
        if place.start != at:
            raise ValueError(f"{name!r} starts at byte {place.start}, the data before it ends at {at}")
        at = place.stop
    if num_bytes is not None and at != num_bytes:
        cut = ": the file was cut off" if num_bytes < at else ""
        raise ValueError(f"it has {num_bytes} bytes, its header describes {at}{cut}")
    return places


def write_header(tensors: Mapping[str, Spec], metadata: Mapping[str, str]) -> str:
    """Create the text of a header for tensors that are stored one after another. `metadata`: written as `__metadata__`.

    Wider elements come first, so that all are aligned. The text is padded as the format requires.

    >>> write_header({"w": Spec("bf16", (2,))}, {})
    '{"w":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]}} '
    """
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name in sorted(tensors, key=lambda name: (-DTYPES[tensors[name].dtype].bits, name)):
        spec = tensors[name]
        dtype, shape = spec.dtype.upper(), list(spec.shape)
        if spec.dtype == _PACKED:
            dtype, shape = "F4", [*shape[:-1], 2 * shape[-1]] if shape else [2]
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + spec.num_bytes]}
        at += spec.num_bytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False)
    return text + " " * (-len(text.encode()) % _ALIGNMENT)


def map_file(path: Path, places: Mapping[str, Place]) -> dict[str, Tensor]:
    """Map a file into memory. Return each tensor by name, as a read-only view. Raises `CheckpointError`."""
    try:
        with path.open("rb") as file:
            memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    except OSError as error:
        hint = "check that the file can be read, and the limits ulimit -v and vm.max_map_count"
        raise CheckpointError(f"{path} cannot be mapped into memory", str(error.strerror), hint=hint) from None
    if len(memory) < max((place.stop for place in places.values()), default=0):
        raise CheckpointError(f"{path} became shorter while it was opened", hint="stop the process that writes it")
    return {name: _view(memory, place) for name, place in places.items()}


def codes_at(memory: Any, place: Place) -> np.ndarray[Any, np.dtype[Any]]:
    """Return the elements of a tensor as a flat array of unsigned integers, given a buffer of the complete file.

    The array is a view of the buffer. It is writable if the buffer is, and may be unaligned.
    """
    spec = place.spec
    return np.frombuffer(memory, DTYPES[spec.dtype].codes, spec.size, place.start if spec.size else 0)


def _view(memory: mmap.mmap, place: Place) -> Tensor:
    codes = codes_at(memory, place)
    return Tensor(place.spec.dtype, place.spec.shape, np.require(codes, requirements=["A"]))


def _place(name: str, entry: Any, data_at: int) -> Place:
    if not isinstance(entry, dict):
        raise ValueError(f"{name!r} is no tensor")
    dtype, shape, offsets = entry.get("dtype"), _counts(entry.get("shape")), _counts(entry.get("data_offsets"))
    if not isinstance(dtype, str) or shape is None or offsets is None or len(offsets) != 2:
        raise ValueError(f"{name!r} has no dtype, shape and offsets")
    if dtype not in _BITS:
        raise ValueError(f"{name!r} is of dtype {dtype[:40]!r}, which the format does not have")
    start, stop = offsets
    if (stop - start) * 8 != math.prod(shape) * _BITS[dtype]:
        raise ValueError(f"{name!r} has {stop - start} bytes, {dtype} {list(shape)[:8]} has others")
    place = Place(dtype, shape, data_at + start, data_at + stop)
    _ = place.spec  # raises for a shape above the limits
    return place


def _counts(values: Any) -> tuple[int, ...] | None:
    """Convert to a tuple of at most 64 integers from 0 to 2^62; None for anything else. (The product of larger values
    could take arbitrarily long.)"""
    good = isinstance(values, list) and len(values) <= 64 and all(type(v) is int and 0 <= v < 1 << 62 for v in values)
    return tuple(values) if good else None


def _without_repeats(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    pairs = list(pairs)
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("its header has a name twice")
    return made
