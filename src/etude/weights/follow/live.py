"""Live memory: a tensor that an engine computes with, as a writable view of integers.

A `Window` is a strided view of existing storage, in host memory (numpy, torch, a mapped file) or on a device (torch).
Its address identifies the storage, so two names of the same storage are recognised. Slow work (computing indices,
copying to a device) happens in `Window.writer`; the function that it returns only scatters. torch is used only for
torch tensors, and never imported here.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

from etude.errors import WeightsError
from etude.weights.delta import native
from etude.weights.delta.arena import Arena
from etude.weights.delta.arrays import bits_of, is_torch, name_of
from etude.weights.tensors import Codes

Places = npt.NDArray[Any]
"""1-D ascending indices of elements: uint32 or int64."""

Shape = tuple[int, ...]
Call = Callable[[], None]

_SIGNED = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}  # torch dtypes by width


@dataclass(frozen=True, eq=False, slots=True)
class Scatter:
    """A call that writes codes (elements as unsigned integers) to the indices `places` of flat host memory.

    `places`: uint32 for the native kernels, else int64.
    """

    flat: Codes
    places: npt.NDArray[Any]
    codes: Codes

    @property
    def num_bytes(self) -> int:
        """Size of the indices and codes, in bytes."""
        return self.places.nbytes + self.codes.nbytes

    def __call__(self) -> None:
        self.flat[self.places] = self.codes


@dataclass(eq=False)
class DeviceScatter:
    """A call that writes codes (elements as integers) to indices of a device's storage. All is on the device already.

    `storage`: the complete storage as a 1-D torch tensor of signed integers. `places`: int64 torch tensor of indices
    into it. `codes`: torch tensor.
    """

    storage: Any
    places: Any
    codes: Any

    def __call__(self) -> None:
        self.storage.index_copy_(0, self.places, self.codes)


def batch_calls(calls: Sequence[Call]) -> Call:
    """Combine several calls into one call that makes the same writes.

    Scatters into host memory become one call of the native kernels, if available. Scatters into the same device storage
    become one, since thousands of kernel launches would take longer than the writes.
    """
    kernels = native.load()
    calls = _by_storage(calls)
    rows = [(c.flat, c.places, c.codes) for c in calls if _is_native(c)]
    if kernels is not None and rows:
        calls = [kernels.scatter(rows), *(c for c in calls if not _is_native(c))]

    def make() -> None:
        for call in calls:
            call()

    return make


def _by_storage(calls: Sequence[Call]) -> list[Call]:
    """Merge the scatters into each device storage; the single ones become views, so no memory is used twice."""
    groups: dict[tuple[int, object], list[DeviceScatter]] = {}
    for call in calls:
        if isinstance(call, DeviceScatter):
            groups.setdefault((call.storage.data_ptr(), call.storage.dtype), []).append(call)
    found = [call for call in calls if not isinstance(call, DeviceScatter)]
    for group in groups.values():
        sizes = [len(one.places) for one in group]
        places, codes = _torch().cat([one.places for one in group]), _torch().cat([one.codes for one in group])
        whole = DeviceScatter(group[0].storage, places, codes)
        for one, places, codes in zip(group, whole.places.split(sizes), whole.codes.split(sizes), strict=True):
            one.places, one.codes = places, codes
        found.append(whole)
    return found


def _is_native(call: Call) -> TypeGuard[Scatter]:
    return isinstance(call, Scatter) and call.places.dtype == np.uint32


@dataclass(frozen=True)
class Window:
    """A writable view of live memory, from the function `window`. Elements are integers of the same width: the bits.

    `device`: such as "cpu", "cuda:0". `address`: of the first element. `strides`: in elements. `dtype`: a key of
    `tensors.DTYPES`; "" if not known. `view`: the elements in `shape`; a numpy array of unsigned integers, or a torch
    tensor of signed ones. `flat`: the same memory as one dimension, from the first element to the last, including
    elements between them that are not part of the tensor. The methods' indices refer to `flat`.
    """

    device: str
    address: int
    shape: Shape
    strides: Shape
    itemsize: int
    dtype: str
    view: Any
    flat: Any

    @property
    def key(self) -> tuple[object, ...]:
        """A value that is equal for windows with the same elements in the same order."""
        return self.device, self.address, self.shape, self.strides, self.itemsize

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of all elements, without gaps between them."""
        return self.size * self.itemsize

    @property
    def contiguous(self) -> bool:
        """Whether an element's index in `flat` equals its number in C order."""
        return self.size < 2 or all(
            stride == expected
            for n, stride, expected in zip(self.shape, self.strides, c_strides(self.shape), strict=True)
            if n > 1
        )

    def narrowed(self, axis: int, length: int) -> Window:
        """Return a window of the first `length` elements along an axis."""
        view = self.view[(*(slice(None),) * axis, slice(length))]
        shape = tuple(view.shape)
        return replace(self, shape=shape, view=view, flat=self.flat[: _span(shape, self.strides)])

    def places(self, positions: Places) -> Places:
        """Convert element numbers (in C order of `shape`) to indices into `flat`."""
        if self.contiguous:
            return positions
        found = np.zeros(positions.shape, np.int64)
        for index, stride in zip(np.unravel_index(positions, self.shape), self.strides, strict=True):
            found += index * stride
        return found

    def read(self, places: Places | None = None, arena: Arena | None = None) -> Codes:
        """Return a copy, in host memory, of the elements at the indices `places` of `flat`, as unsigned integers.

        `places` None: all elements, in C order of `shape`. The copy is allocated from `arena` if that is given and the
        memory is the host's.
        """
        flat = self.flat
        if isinstance(flat, np.ndarray):
            if places is not None and arena is not None and flat.flags.aligned:
                taken: Codes = arena.take(len(places), flat.dtype)
                return np.take(flat, places, out=taken, mode="clip")  # all are in range; mode="raise" would copy
            taken = self.view.flatten() if places is None else flat[places]
            return taken
        if places is None:
            return _host(self.view.contiguous().view(-1)).copy()
        return _host(self.flat[_to_device(places.astype(np.int64, copy=False), self.flat.device)])

    def equals(self, codes: Codes) -> bool:
        """Return whether the memory equals these codes (elements as unsigned integers), which must have its shape."""
        if isinstance(self.view, np.ndarray):
            return np.array_equal(self.view, codes)
        return bool(_torch().equal(self.view, _to_device(codes.view(_SIGNED[self.itemsize]), self.view.device)))

    def writer(self, places: Places, codes: Codes) -> Call:
        """Return a function that writes `codes` (elements as unsigned integers) to the indices `places` of `flat`.

        For a device, indices and codes are copied there now, so that calling the function only scatters them.
        """
        flat = self.flat
        if isinstance(flat, np.ndarray):
            small = native.load() is not None and flat.size <= 1 << 32 and flat.flags.aligned
            return Scatter(flat, places.astype(np.uint32 if small else np.int64, copy=False), codes)
        storage = flat.as_strided((flat.untyped_storage().nbytes() // self.itemsize,), (1,), 0)
        from_start = _to_device(places.astype(np.int64, copy=False), flat.device) + flat.storage_offset()
        return DeviceScatter(storage, from_start, _to_device(codes.view(_SIGNED[self.itemsize]), flat.device))

    def fill(self, codes: Codes) -> None:
        """Write all elements. `codes`: their bits as unsigned integers, in the same shape.

        For host memory this needs no temporary copy.
        """
        if isinstance(self.view, np.ndarray):
            np.copyto(self.view, codes)
        else:
            self.view.copy_(_to_device(codes.view(_SIGNED[self.itemsize]), self.view.device))


def window(name: str, value: Any) -> Window:
    """Create a window of a numpy array or torch tensor of any strides. `name` is for errors.

    Raises `WeightsError` if it is read-only or its elements overlap.
    """
    if is_torch(value) and not in_host_memory(value):
        return _device_window(name, value)
    bits, dtype = bits_of(name, value)
    strides = tuple(stride // bits.itemsize for stride in bits.strides)
    _check(name, bits.shape, strides, bits.flags.writeable and getattr(getattr(value, "dtype", None), "isnative", True))
    flat = np.lib.stride_tricks.as_strided(bits, (_span(bits.shape, strides),), (bits.itemsize,))
    return Window("cpu", bits.ctypes.data, bits.shape, strides, bits.itemsize, dtype, bits, flat)


def in_host_memory(value: Any) -> bool:
    """Return whether numpy can access the memory of a torch tensor."""
    return bool(value.device.type == "cpu")


def c_strides(shape: Shape) -> Shape:
    """Return the strides, in elements, of an array in C order.

    >>> c_strides((2, 3, 4))
    (12, 4, 1)
    """
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def _device_window(name: str, value: Any) -> Window:
    torch = _torch()
    itemsize = value.element_size()
    if itemsize not in _SIGNED or value.layout != torch.strided:
        raise WeightsError(
            f"{name!r} is of dtype {value.dtype}",
            "its element size is not supported",
            hint="view it as elements of 1, 2, 4 or 8 bytes",
        )
    bits = value.detach().view(getattr(torch, _SIGNED[itemsize]))
    shape, strides = tuple(bits.shape), tuple(bits.stride())
    _check(name, shape, strides, True)
    flat = bits.as_strided((_span(shape, strides),), (1,))
    return Window(str(value.device), bits.data_ptr(), shape, strides, itemsize, name_of(str(value.dtype)), bits, flat)


def _check(name: str, shape: Shape, strides: Shape, writable: bool) -> None:
    if not writable:
        raise WeightsError(
            f"{name!r} cannot be written", "its memory is read-only", hint="give the engine's own memory"
        )
    if math.prod(shape) and any(stride <= 0 for n, stride in zip(shape, strides, strict=True) if n > 1):
        raise WeightsError(
            f"{name!r} has strides {list(strides)}",
            "its elements share memory or are in reverse order",
            hint="give the tensor that was expanded or flipped, not its view",
        )


def _span(shape: Shape, strides: Shape) -> int:
    """Return the number of elements of the storage from the first to the last element of a view."""
    if not math.prod(shape):
        return 0
    return 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))


def _host(flat: Any) -> Codes:
    if isinstance(flat, np.ndarray):
        return flat
    array: Codes = flat.cpu().numpy()
    return array.view(f"u{array.itemsize}")


def _to_device(array: npt.NDArray[Any], device: Any) -> Any:
    """Copy an array to a device. (torch only accepts writable arrays.)"""
    return _torch().from_numpy(np.require(array, requirements=["C", "W"])).to(device)


def _torch() -> Any:
    return sys.modules["torch"]
