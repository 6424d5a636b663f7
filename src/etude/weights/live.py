"""Live memory: a tensor that an engine computes with, seen as integers that can be read and written by place.

A `Window` is a strided view of somebody's storage, in host memory (numpy, torch, a mapped file) or on a device (torch).
It is known by its storage's address, so that two names of one storage are found to be one. What is slow (finding
places, copying to a device) happens in `writer`; the writer it makes only scatters. torch is used where the tensor is
torch's, and imported nowhere.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from etude.errors import WeightsError
from etude.weights.arrays import bits_of, is_torch, name_of
from etude.weights.tensors import Codes

Places = npt.NDArray[np.int64]
Shape = tuple[int, ...]

_SIGNED = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}  # what torch computes with, of each width


@dataclass(frozen=True)
class Window:
    """A view of live memory. `flat` covers its span, element by element of the storage; places count in it."""

    device: str  # "cpu", "cuda:0"
    address: int  # of its first element
    shape: Shape
    strides: Shape  # in elements
    itemsize: int
    dtype: str  # its name here, "" where the memory does not say
    flat: Any  # 1-D, unsigned integers of numpy or signed ones of torch

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for windows that are the same elements in the same order."""
        return self.device, self.address, self.shape, self.strides, self.itemsize

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.size * self.itemsize

    @property
    def contiguous(self) -> bool:
        """Whether an element's place is its number in C order."""
        return self.size < 2 or all(
            stride == expected
            for n, stride, expected in zip(self.shape, self.strides, c_strides(self.shape), strict=True)
            if n > 1
        )

    def narrowed(self, axis: int, length: int) -> Window:
        """The first `length` along an axis."""
        shape = (*self.shape[:axis], length, *self.shape[axis + 1 :])
        return replace(self, shape=shape, flat=self.flat[: _span(shape, self.strides)])

    def places(self, positions: Places) -> Places:
        """Where the elements of these numbers (in C order of `shape`) are in `flat`."""
        if self.contiguous:
            return positions
        found = np.zeros(positions.shape, np.int64)
        for index, stride in zip(np.unravel_index(positions, self.shape), self.strides, strict=True):
            found += index * stride
        return found

    def read(self, places: Places | None = None) -> Codes:
        """The codes at places, or all in C order of `shape`; a copy in host memory."""
        if places is None:
            places = self.places(np.arange(self.size, dtype=np.int64))
            if self.contiguous:
                return _host(self.flat).copy()
        if isinstance(self.flat, np.ndarray):
            taken: Codes = self.flat[places]
            return taken
        return _host(self.flat[_sent(places, self.flat.device)])

    def writer(self, places: Places | None, codes: Codes) -> Callable[[], None]:
        """A call that writes codes at places (None: all, in C order); everything else is done here, before it."""
        if places is None and not self.contiguous:
            places = self.places(np.arange(self.size, dtype=np.int64))
        flat = self.flat
        if isinstance(flat, np.ndarray):
            where: Any = slice(None) if places is None else places

            def write() -> None:
                flat[where] = codes

            return write
        values = _sent(codes.view(_SIGNED[self.itemsize]), flat.device)
        index = None if places is None else _sent(places, flat.device)

        def send() -> None:
            if index is None:
                flat.copy_(values)
            else:
                flat.index_copy_(0, index, values)

        return send


def window(name: str, value: Any) -> Window:
    """A window on a numpy array or a torch tensor of any strides. Raises `WeightsError` for what cannot be written."""
    if is_torch(value) and not in_host_memory(value):
        return _device_window(name, value)
    bits, dtype = bits_of(name, value)
    strides = tuple(stride // bits.itemsize for stride in bits.strides)
    _check(name, bits.shape, strides, bits.flags.writeable and getattr(getattr(value, "dtype", None), "isnative", True))
    flat = np.lib.stride_tricks.as_strided(bits, (_span(bits.shape, strides),), (bits.itemsize,))
    return Window("cpu", bits.ctypes.data, bits.shape, strides, bits.itemsize, dtype, flat)


def in_host_memory(value: Any) -> bool:
    """Whether numpy can see a torch tensor's memory."""
    return bool(value.device.type == "cpu")


def c_strides(shape: Shape) -> Shape:
    """Strides in elements of an array in C order.

    >>> c_strides((2, 3, 4))
    (12, 4, 1)
    """
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def _device_window(name: str, value: Any) -> Window:
    torch = _torch()
    itemsize = value.element_size()
    if itemsize not in _SIGNED or value.layout != torch.strided:
        raise WeightsError(
            f"{name!r} is of dtype {value.dtype}", "no integer has its width", hint="view it as what has"
        )
    bits = value.detach().view(getattr(torch, _SIGNED[itemsize]))
    shape, strides = tuple(bits.shape), tuple(bits.stride())
    _check(name, shape, strides, True)
    flat = bits.as_strided((_span(shape, strides),), (1,))
    return Window(str(value.device), bits.data_ptr(), shape, strides, itemsize, name_of(str(value.dtype)), flat)


def _check(name: str, shape: Shape, strides: Shape, writable: bool) -> None:
    if not writable:
        raise WeightsError(
            f"{name!r} cannot be written", "its memory is read-only", hint="give the engine's own memory"
        )
    if math.prod(shape) and any(stride <= 0 for n, stride in zip(shape, strides, strict=True) if n > 1):
        raise WeightsError(
            f"{name!r} has strides {list(strides)}",
            "elements would share memory, or lie backwards",
            hint="give the tensor that was expanded or flipped, not its view",
        )


def _span(shape: Shape, strides: Shape) -> int:
    """Elements from the first to the last of a view, both included."""
    if not math.prod(shape):
        return 0
    return 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))


def _host(flat: Any) -> Codes:
    if isinstance(flat, np.ndarray):
        return flat
    array: Codes = flat.cpu().numpy()
    return array.view(f"u{array.itemsize}")


def _sent(array: npt.NDArray[Any], device: Any) -> Any:
    """A copy on a device; torch takes only arrays that it may write."""
    return _torch().from_numpy(np.require(array, requirements=["C", "W"])).to(device)


def _torch() -> Any:
    return sys.modules["torch"]
