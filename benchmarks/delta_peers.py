"""What others do with two versions of weights, for `benchmarks.delta`: lossless, each as its users run it.

XOR and zstd; the same with each byte of a code in a plane of its own; ZipNN's delta (arXiv 2411.05239, where the
package is installed); `zstd --patch-from` (where the program is); and what open trainers send: gaps between the places
that change, the new codes there, zstd over both.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from etude.weights import Tensor

Codes = npt.NDArray[Any]
Side = list[Codes]
"""One version: for each width of codes, all of them one after another."""


@dataclass(frozen=True)
class Peer:
    """`encode(old, new)`, and `decode(coded, old)` that gives `new`. Bytes are those of all parts together.

    `write(coded, live)`: the same in place, where live memory holds the old version. `why_not`: why it is not here,
    empty where it is.
    """

    name: str
    encode: Callable[[Side, Side], list[bytes]]
    decode: Callable[[list[bytes], Side], Side]
    why_not: str = ""
    write: Callable[[list[bytes], Side], None] | None = None


def side(tensors: Sequence[Tensor]) -> Side:
    """Tensors as peers take them."""
    widths = sorted({tensor.codes.itemsize for tensor in tensors})
    return [np.concatenate([t.codes for t in tensors if t.codes.itemsize == width]) for width in widths]


def _zip(data: bytes | memoryview) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(data)


def _unzip(data: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(data)


def _xor(old: Side, new: Side) -> list[bytes]:
    return [_zip((a ^ b).data.cast("B")) for a, b in zip(old, new, strict=True)]


def _undo_xor(coded: list[bytes], old: Side) -> Side:
    return [np.frombuffer(_unzip(data), a.dtype) ^ a for data, a in zip(coded, old, strict=True)]


def _write_xor(coded: list[bytes], live: Side) -> None:
    for data, a in zip(coded, live, strict=True):
        a ^= np.frombuffer(_unzip(data), a.dtype)


def _planes(old: Side, new: Side) -> list[bytes]:
    differ = [(a ^ b).view(np.uint8).reshape(-1, a.itemsize) for a, b in zip(old, new, strict=True)]
    return [_zip(np.ascontiguousarray(part.T).data.cast("B")) for part in differ]


def _undo_planes(coded: list[bytes], old: Side) -> Side:
    made = []
    for data, a in zip(coded, old, strict=True):
        planes = np.frombuffer(_unzip(data), np.uint8).reshape(a.itemsize, -1)
        made.append(np.ascontiguousarray(planes.T).view(a.dtype).reshape(-1) ^ a)
    return made


def _gaps(old: Side, new: Side) -> list[bytes]:
    coded = []
    for a, b in zip(old, new, strict=True):
        where = np.flatnonzero(a != b)
        gaps = np.diff(where, prepend=0)
        narrow = gaps.astype(np.uint16 if gaps.max(initial=0) < 1 << 16 else np.uint32)
        coded.append(
            bytes((narrow.itemsize,)) + where.size.to_bytes(8, "little") + _zip(narrow.tobytes() + b[where].tobytes())
        )
    return coded


def _undo_gaps(coded: list[bytes], old: Side) -> Side:
    made = [a.copy() for a in old]
    _write_gaps(coded, made)
    return made


def _write_gaps(coded: list[bytes], live: Side) -> None:
    for data, a in zip(coded, live, strict=True):
        count, raw = int.from_bytes(data[1:9], "little"), _unzip(data[9:])
        gaps = np.frombuffer(raw, f"u{data[0]}", count)
        a[np.cumsum(gaps, dtype=np.int64)] = np.frombuffer(raw, a.dtype, count, gaps.nbytes)


def _zipnn(width: int) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from zipnn import ZipNN  # type: ignore[import-not-found]
    kinds = {1: "float8_e4m3fn", 2: "bfloat16", 4: "float32"}
    return ZipNN(input_format="byte", bytearray_dtype=kinds[width], delta_compressed_type="byte", threads=1)


def _zipnn_delta(old: Side, new: Side) -> list[bytes]:
    pairs = zip(old, new, strict=True)
    return [bytes(_zipnn(a.itemsize).compress(b.tobytes(), delta_second_data=a.tobytes())) for a, b in pairs]


def _undo_zipnn(coded: list[bytes], old: Side) -> Side:
    pairs = zip(coded, old, strict=True)
    return [
        np.frombuffer(_zipnn(a.itemsize).decompress(data, delta_second_data=a.tobytes()), a.dtype) for data, a in pairs
    ]


def _in_memory() -> str | None:
    """Where files cost no disk."""
    return "/dev/shm" if os.path.isdir("/dev/shm") else None


def _zstd(*arguments: str) -> None:
    subprocess.run(["zstd", "-q", "-f", "--single-thread", "--long=31", *arguments], check=True)


def _patch(old: Side, new: Side) -> list[bytes]:
    coded = []
    with tempfile.TemporaryDirectory(dir=_in_memory()) as scratch:
        before, after, made = (Path(scratch) / name for name in ("old", "new", "patch"))
        for a, b in zip(old, new, strict=True):
            a.tofile(before)
            b.tofile(after)
            _zstd(f"--patch-from={before}", str(after), "-o", str(made))
            coded.append(made.read_bytes())
    return coded


def _undo_patch(coded: list[bytes], old: Side) -> Side:
    found = []
    with tempfile.TemporaryDirectory(dir=_in_memory()) as scratch:
        before, patch, made = (Path(scratch) / name for name in ("old", "patch", "new"))
        for data, a in zip(coded, old, strict=True):
            a.tofile(before)
            patch.write_bytes(data)
            _zstd("-d", f"--patch-from={before}", str(patch), "-o", str(made))
            found.append(np.fromfile(made, a.dtype))
    return found


def peers() -> list[Peer]:
    """All of them, those that are not here among them."""
    no_zipnn = "" if importlib.util.find_spec("zipnn") else "the package `zipnn` is not installed"
    no_zstd = "" if shutil.which("zstd") else "there is no program `zstd`"
    return [
        Peer("XOR + zstd-1", _xor, _undo_xor, write=_write_xor),
        Peer("XOR + planes + zstd-1", _planes, _undo_planes),
        Peer("gaps + codes + zstd-1", _gaps, _undo_gaps, write=_write_gaps),
        Peer("ZipNN delta", _zipnn_delta, _undo_zipnn, no_zipnn),
        Peer("zstd --patch-from", _patch, _undo_patch, no_zstd),
    ]
