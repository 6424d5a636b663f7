"""Reads the file of an offline W&B run: a LevelDB log, whose records are W&B's own protocol buffers."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK, HEADER = 32_768, 7
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def records(path: Path) -> list[Any]:
    """All records of a `.wandb` file, as `wandb.proto.wandb_internal_pb2.Record`."""
    from wandb.proto.wandb_internal_pb2 import Record

    return [Record.FromString(data) for data in _payloads(path.read_bytes())]


def _payloads(data: bytes) -> Iterator[bytes]:
    assert data.startswith(b":W&B"), "no W&B file"
    at, parts = HEADER, b""
    while at < len(data):
        left = BLOCK - at % BLOCK
        if left < HEADER:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        piece = data[at + HEADER : at + HEADER + length]
        assert len(piece) == length, "torn"
        assert kind in (FULL, FIRST, MIDDLE, LAST)
        parts += piece
        if kind in (FULL, LAST):
            yield parts
            parts = b""
        at += HEADER + length
