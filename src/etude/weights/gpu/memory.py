"""A tensor in device memory as items: a view of its own bits, never a copy.

An item is an element as an unsigned integer, or one half of it (`tensors.DType`). Two 4-bit items stay in their byte.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from etude.errors import WeightsError
from etude.weights.delta.layout import Tile
from etude.weights.tensors import DTYPES, Codes, DType, Spec, to_items

_CODES = {4: torch.uint8, 8: torch.uint8, 16: torch.int16, 32: torch.int32}  # torch dtypes by item width


@dataclass(frozen=True, eq=False)
class Items:
    """The items of one tensor in device memory: its elements as integers, or halves of them (`tensors.DType`).

    `codes`: 1-D, contiguous; uint8, int16 or int32, with two 4-bit items per byte. `size`: the number of items.
    """

    codes: torch.Tensor
    size: int

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor, spec: Spec) -> Items:
        """Create a view of a tensor as items. `name` is for the error.

        Raises `WeightsError` if its memory does not fit the spec or is not contiguous.
        """
        kind = DTYPES[spec.dtype]
        if tensor.numel() * tensor.element_size() != spec.num_bytes or not tensor.is_contiguous():
            raise WeightsError(
                f"{name!r} is {tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())}",
                f"its items cannot be read in place as {spec.dtype} {list(spec.shape)}",
                hint="give the contiguous tensor that has the checkpoint's values",
            )
        codes = tensor.detach().view(-1).view(_CODES[kind.width])
        return cls(codes, spec.size * kind.parts)

    @property
    def address(self) -> int:
        """Address of the first item, in the memory of the device."""
        return self.codes.data_ptr()

    @property
    def per_code(self) -> int:
        """Number of items per element of `codes`."""
        return self.size // self.codes.numel() if self.size else 1

    def host(self, kind: DType) -> Codes:
        """Copy the items to host memory, in the form of `tensors.to_items`."""
        codes: Codes = self.codes.cpu().numpy().view(f"u{self.codes.element_size()}")
        return to_items(codes, kind) if kind.width == 4 else codes.view(kind.items)


def fetched(tile: Tile, arrays: list[Items], kind: DType) -> Codes:
    """Copy the items of a tile to host memory, in order. `arrays`: the items of each tensor."""
    parts = []
    for piece in tile.pieces:
        if not piece.size:
            continue
        flat, start = arrays[piece.tensor], piece.start
        stop = start + (piece.rows - 1) * piece.stride + piece.cols
        first, last = start // flat.per_code, -(-stop // flat.per_code)
        span = flat.codes[first:last]
        if piece.rows > 1 and piece.cols < piece.stride and flat.per_code == 1:
            items = span.as_strided((piece.rows, piece.cols), (piece.stride, 1)).reshape(-1).cpu()
            parts.append(items.numpy().view(kind.items))
            continue
        held = Items(span, (last - first) * flat.per_code).host(kind)[start - first * flat.per_code :]
        parts += [held[row * piece.stride :][: piece.cols] for row in range(piece.rows)]
    return np.concatenate(parts)
