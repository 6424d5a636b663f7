"""Tensors without an old one: byte planes, each through zstd. Signs and exponents compress, mantissas do not."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from etude.weights.delta import streams
from etude.weights.delta.streams import Reader
from etude.weights.tensors import Codes


def write(codes: Codes) -> bytes:
    """One block for each byte of the codes' width, the lowest first."""
    octets = np.ascontiguousarray(codes, dtype=codes.dtype.newbyteorder("<")).view(np.uint8)
    width = codes.dtype.itemsize
    return b"".join(streams.block(np.ascontiguousarray(octets[plane::width])) for plane in range(width))


def read(tile: memoryview, out: npt.NDArray[Any]) -> None:
    """Inverse of `write`, into `out`, which has as many codes. Raises `WeightsError`."""
    reader = Reader(tile)
    octets = out.view(np.uint8).reshape(out.size, -1)
    for plane in range(octets.shape[1]) if sys.byteorder == "little" else reversed(range(octets.shape[1])):
        octets[:, plane] = reader.block(out.size)
    reader.end()
