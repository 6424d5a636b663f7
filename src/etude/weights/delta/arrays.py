"""Converts arrays of users (numpy, torch, anything with the buffer protocol) to `Tensor`s and back.

Arrays become views of their own bits: without a copy where the memory layout allows it, and never with a conversion of
values. numpy has no bf16 and no fp8, so a `dtypes` argument says what its integers mean. This module does not import
torch: it uses the module of a torch tensor that it receives.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from etude.errors import WeightsError, nearest
from etude.weights.tensors import DTYPES, Tensor

Array = npt.NDArray[Any]
Arrays = Mapping[str, Any]
"""Name -> numpy array, torch tensor in CPU memory, `Tensor`, or object with the buffer protocol."""

NUMPY: dict[str, np.dtype[Any]] = {
    "f16": np.dtype(np.float16),
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
    "i8": np.dtype(np.int8),
    "i16": np.dtype(np.int16),
    "i32": np.dtype(np.int32),
    "i64": np.dtype(np.int64),
    "bool": np.dtype(np.bool_),
}
"""The dtypes that numpy has natively. Every other dtype is represented by unsigned integers."""

_NAMES = {
    **{kind.name: name for name, kind in NUMPY.items()},
    **{f"uint{bits}": f"u{bits}" for bits in (8, 16, 32, 64)},
    "bfloat16": "bf16",  # torch, and ml_dtypes in numpy
    "float8_e4m3fn": "f8_e4m3",
    "float8_e5m2": "f8_e5m2",
    "float8_e8m0fnu": "f8_e8m0",
    "float4_e2m1fn_x2": "f4_e2m1x2",
}


def tensor_of(name: str, value: Any, dtype: str | None = None) -> Tensor:
    """Convert an array to a `Tensor`, without a copy where possible.

    `name`: the tensor's name, for errors. `value`: a numpy array, CPU torch tensor, `Tensor`, or object with the buffer
    protocol. `dtype`: a key of `tensors.DTYPES`; needed if the value's own dtype does not say it (bf16 stored as
    uint16, raw bytes). Raises `WeightsError` for an unknown dtype, a size that does not fit the dtype, or a value
    without a buffer.

    >>> tensor_of("w", np.array([[1.0, -0.0]], np.float32)).spec
    Spec(dtype='f32', shape=(1, 2))
    >>> tensor_of("w", b"\\x80\\x3f", "bf16").codes.tolist()
    [16256]
    """
    if isinstance(value, Tensor):
        return value
    array, own = bits_of(name, value)
    dtype = dtype or own
    if dtype not in DTYPES:
        raise WeightsError(
            f"tensor {name!r} is of dtype {dtype or getattr(value, 'dtype', type(value).__name__)}",
            "this dtype is not supported",
            hint=f'say what its bits are, for instance dtypes={{"{name}": "bf16"}}; {nearest(dtype, DTYPES)}',
        )
    codes = DTYPES[dtype].codes
    if array.dtype != codes and not isinstance(value, np.ndarray) and array.ndim == 1 and array.itemsize == 1:
        if array.size % codes.itemsize:
            raise WeightsError(
                f"tensor {name!r} has {array.size} bytes",
                f"an element of {dtype} has {codes.itemsize} bytes",
                hint="give the complete data, or the real dtype in the argument `dtypes`",
            )
        array = array.view(codes)
    if array.dtype != codes:
        raise WeightsError(
            f"tensor {name!r} has elements of {array.itemsize} bytes",
            f"its dtype {dtype} has {codes.itemsize}",
            hint="give its real dtype in the argument `dtypes`",
        )
    flat = np.require(array.reshape(-1), requirements=["C", "A"])
    try:
        return Tensor(dtype, array.shape, flat)
    except ValueError as error:
        raise WeightsError(
            f"tensor {name!r} is not allowed", str(error), hint="see the limits in docs/formats/delta.md"
        ) from None


def check_arrays(arrays: object) -> None:
    """Raise `WeightsError` if `arrays` is not a mapping of strings to arrays."""
    if not isinstance(arrays, Mapping):
        facts = f"a {type(arrays).__name__}"
    else:
        nameless = [name for name in arrays if not isinstance(name, str)]
        if not nameless:
            return
        facts = f"a name in it is {nameless[0]!r:.40}, a {type(nameless[0]).__name__}"
    raise WeightsError("this is not a mapping of names to arrays", facts, hint='give {"w": array}')


def bits_of(name: str, value: Any) -> tuple[Array, str]:
    """View the memory of an array as unsigned integers of the same shape and strides.

    Return the view, and the array's dtype as a key of `tensors.DTYPES` ("" if it has none). The view is writable if the
    memory is. `name`: the tensor's name, for errors. Raises `WeightsError` for a value that has no buffer, is on a
    device, or has an element size other than 1, 2, 4 or 8 bytes.
    """
    if is_torch(value):
        return _torch_bits(name, value)
    if isinstance(value, np.ndarray):
        array = value
    else:
        try:
            view = memoryview(value)
        except TypeError:
            raise WeightsError(
                f"tensor {name!r} cannot be read",
                f"its type is {type(value).__name__}, which has no buffer",
                hint="give numpy arrays, torch tensors, or bytes with their dtype in the argument `dtypes`",
            ) from None
        array = np.asarray(view) if view.format else np.frombuffer(view, np.uint8)
    kind = array.dtype
    if kind.itemsize not in (1, 2, 4, 8) or kind.hasobject or kind.names:
        raise WeightsError(
            f"tensor {name!r} is of dtype {kind}",
            "its element size is not supported",
            hint="view it as elements of 1, 2, 4 or 8 bytes",
        )
    if not kind.isnative:
        array = array.astype(kind.newbyteorder("="))
    return array.view(f"u{kind.itemsize}"), name_of(kind.name)


def to_array(tensor: Tensor, array: Any = None) -> Array:
    """Return a `Tensor` as a numpy array of its shape. The memory is shared.

    The array has the numpy dtype of `array`, if that can hold the same dtype; else numpy's own dtype; else the unsigned
    dtype of the codes (raw bits).

    >>> to_array(Tensor("f32", (1,), np.array([0x3F800000], np.uint32)))
    array([1.], dtype=float32)
    """
    shaped: Array = tensor.codes.reshape(tensor.shape)
    if isinstance(array, np.ndarray) and array.dtype.isnative and array.itemsize == shaped.itemsize:
        own = name_of(array.dtype.name)
        if own == tensor.dtype or (own and own[0] == "u"):
            return shaped.view(array.dtype)
    return shaped.view(NUMPY.get(tensor.dtype, tensor.codes.dtype))


def name_of(dtype: str) -> str:
    """Return etude's name (a key of `tensors.DTYPES`) of a numpy or torch dtype; "" if it has none.

    >>> name_of("torch.bfloat16"), name_of("uint8"), name_of("complex64")
    ('bf16', 'u8', '')
    """
    return _NAMES.get(dtype.removeprefix("torch."), "")


def is_torch(value: object) -> bool:
    """Return whether a value is a torch tensor. Does not import torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _torch_bits(name: str, value: Any) -> tuple[Array, str]:
    torch = sys.modules["torch"]
    if value.device.type != "cpu":
        raise WeightsError(
            f"tensor {name!r} is on {value.device}",
            "its memory cannot be read from here",
            hint="give it .cpu(); `etude.weights.follow.targets` writes to devices",
        )
    signed = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    if value.element_size() not in signed or value.layout != torch.strided:
        raise WeightsError(
            f"tensor {name!r} is of dtype {value.dtype}",
            "its element size is not supported",
            hint="view it as elements of 1, 2, 4 or 8 bytes",
        )
    array = value.detach().view(signed[value.element_size()]).numpy()
    return array.view(f"u{array.itemsize}"), name_of(str(value.dtype))
