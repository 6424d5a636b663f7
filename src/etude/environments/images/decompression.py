"""Decompress untrusted bytes as a stream: uncompressed, gzip or zstd, recognized by their first bytes.

Decompression bombs are stopped early: the size of the output and its ratio to the input are limited.
"""

from __future__ import annotations

import zlib
from typing import BinaryIO, cast

import zstandard

from etude.environments.images.limits import MIB, BadSource, ImageLimits, too_large
from etude.environments.images.tar import Read

_CHUNK_BYTES = 1 << 16
_FREE_BYTES = 16 * MIB  # output before the ratio is checked
_WINDOW_BYTES = 128 * MIB  # of zstd: enough for `--long=27`
_UNKNOWN = {b"BZh": "bzip2", b"\xfd7zXZ\0": "xz", b"PK\x03\x04": "zip"}


def decompressed(file: BinaryIO, limits: ImageLimits) -> Read:
    """Return a function that reads the decompressed content of `file`.

    The function takes the largest number of bytes to return, and returns b"" at the end. It raises `BadSource` if the
    content is damaged or exceeds the limits."""
    source = _Counted(file)
    head = source.peek()
    for magic, name in _UNKNOWN.items():
        if head.startswith(magic):
            raise BadSource(f"the archive is compressed with {name}", hint="use gzip, zstd or no compression")
    if head.startswith(b"\x1f\x8b"):
        return _bounded(_Gzip(source).read, source, limits)
    if head.startswith(b"\x28\xb5\x2f\xfd"):
        reader = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES).stream_reader(
            cast(BinaryIO, source), read_across_frames=True, read_size=_CHUNK_BYTES
        )
        return _bounded(reader.read, source, limits)
    return _bounded(source.read, source, limits)


class _Counted:
    def __init__(self, file: BinaryIO) -> None:
        self._file, self._head, self.num_bytes = file, b"", 0

    def peek(self) -> bytes:
        while len(self._head) < 8 and (more := self._file.read(8 - len(self._head))):
            self._head += more
        return self._head

    def read(self, size: int) -> bytes:
        data, self._head = self._head[:size], self._head[size:]
        if not data:
            data = self._file.read(size)
        self.num_bytes += len(data)
        return data


class _Gzip:
    """Decompresses all members of a gzip file and checks their checksums. Zeros after the last one are padding."""

    def __init__(self, source: _Counted) -> None:
        self._source, self._member, self._rest, self._begun = source, zlib.decompressobj(31), b"", False

    def read(self, size: int) -> bytes:
        while True:
            if self._member.eof:
                self._rest = self._member.unused_data.lstrip(b"\0")
                self._member, self._begun = zlib.decompressobj(31), False
            data = self._member.unconsumed_tail or self._rest or self._source.read(_CHUNK_BYTES)
            self._rest = b""
            if not data:
                if self._begun:
                    raise EOFError("it is truncated")
                return b""
            if not self._begun and not (data := data.lstrip(b"\0")):
                continue
            self._begun = True
            out = self._member.decompress(data, size)
            if out:
                return out


def _bounded(read: Read, source: _Counted, limits: ImageLimits) -> Read:
    done = 0

    def bounded(size: int) -> bytes:
        nonlocal done
        try:
            data = read(min(size, limits.total_bytes + 1))
        except (zlib.error, zstandard.ZstdError, EOFError) as error:
            raise BadSource("the archive is damaged", str(error), hint="download it again") from None
        done += len(data)
        if done > limits.total_bytes + (limits.num_files << 11):
            raise too_large(f"the archive decompresses to more than {done - len(data)} bytes", "total_bytes")
        if done > _FREE_BYTES and done > limits.ratio * source.num_bytes:
            raise too_large(f"the archive grows more than {limits.ratio}-fold", "ratio")
        return data

    return bounded
