"""Serialisation of records: msgpack between processes, JSON on disk, both validated by msgspec.

An array is encoded as ``(dtype, shape, little-endian bytes)``, never as a list of numbers. Decoding checks the dtype
against an allow-list and the number of bytes against the shape. Untrusted bytes give a valid record or `ValueError`."""

from __future__ import annotations

import base64
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

T = TypeVar("T")
Array = np.ndarray[Any, np.dtype[Any]]
I32 = npt.NDArray[np.int32]
F32 = npt.NDArray[np.float32]
Routes = npt.NDArray[np.uint8 | np.uint16]
Bools = npt.NDArray[np.bool_]

_DTYPES = {name: np.dtype(name).newbyteorder("<") for name in ("bool", "uint8", "uint16", "int32", "int64", "float32")}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}  # faster than `dtype.name`, which is computed at each access
MAX_NDIM = 4


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        name = _NAMES.get(value.dtype)
        if name is None:  # another byte order, or a dtype that the decoder refuses
            value, name = value.astype(value.dtype.newbyteorder("<")), value.dtype.name
        return (name, value.shape, value.tobytes())
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"no wire form for {type(value).__name__}")


def _decode_array(kind: type, value: Any) -> Any:
    if kind is not np.ndarray and getattr(kind, "__origin__", None) is not np.ndarray:
        raise NotImplementedError(f"no wire form for {kind}")
    if not (isinstance(value, list) and len(value) == 3):
        raise ValueError("an array is [dtype, shape, bytes]")
    dtype, shape, data = value
    if isinstance(data, str):
        data = base64.b64decode(data, validate=True)
    if dtype not in _DTYPES or not isinstance(shape, list) or len(shape) > MAX_NDIM or not isinstance(data, bytes):
        raise ValueError(f"an array of dtype {dtype!r} and shape {shape!r} is not allowed")
    count = 1
    for n in shape:
        if not isinstance(n, int) or n < 0:
            raise ValueError(f"an array's shape holds {shape!r}")
        count *= n
    kind_of = _DTYPES[dtype]
    if count * kind_of.itemsize != len(data):
        raise ValueError(f"{len(data)} bytes do not fill {dtype} {shape}")
    flat = np.frombuffer(data, kind_of).astype(dtype, copy=False)
    return flat if len(shape) == 1 else flat.reshape(shape)


_pack = msgspec.msgpack.Encoder(enc_hook=_encode_array)
_json = msgspec.json.Encoder(enc_hook=_encode_array)
_decoders: dict[tuple[str, Any], Any] = {}


def pack(record: object) -> bytes:
    """Encode a record (a msgspec struct) as msgpack. Numpy arrays in it become (dtype, shape, bytes).

    >>> from etude.records import Version
    >>> v = Version(step=3, incarnation="0a1b2c3d", digest="ab" * 32)
    >>> unpack(pack(v), Version) == v
    True
    """
    return _pack.encode(record)


def unpack(data: bytes | memoryview, kind: type[T]) -> T:
    """Decode a record of type `kind` from msgpack. Raises `ValueError` for anything but such a record."""
    decoder = _decoders.get(("pack", kind))
    if decoder is None:
        decoder = _decoders["pack", kind] = msgspec.msgpack.Decoder(kind, dec_hook=_decode_array)
    result: T = decoder.decode(data)
    return result


def to_json(record: object) -> bytes:
    """Encode a record as one line of JSON, with base64 for the bytes of arrays."""
    return _json.encode(record)


def from_json(data: bytes | str, kind: type[T]) -> T:
    """Decode a record of type `kind` from JSON. Raises `ValueError` for anything but such a record."""
    decoder = _decoders.get(("json", kind))
    if decoder is None:
        decoder = _decoders["json", kind] = msgspec.json.Decoder(kind, dec_hook=_decode_array)
    result: T = decoder.decode(data)
    return result
