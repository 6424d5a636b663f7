"""Matrix products of few rows by a Rust kernel, `native/src/product.rs`, with the bits of the vendor's GEMM.

The vendor's GEMM turns all weights into another layout before it multiplies, which costs several times as much as a
product of four rows. The kernel turns 32 outputs at a time in registers. It adds in the same order: chains of fused
multiply-adds over blocks of inputs. The caller measures which block gives the vendor's bits (`matmul.block_for`). The
kernel needs Linux and AVX-512. It uses one thread, and releases the GIL. There is no gradient.

Shapes: S rows sorted by group, E groups, I and O width in and out."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

LIBRARY = Path(__file__).parents[2] / "weights" / "delta" / "libetude_native.so"  # one library of all kernels
LANES = 16
MAX_BLOCK = 192


@functools.cache
def _kernel() -> Callable[[object], int] | None:
    try:
        function = ctypes.CDLL(str(LIBRARY)).etude_products
    except (OSError, AttributeError):  # not built, or before this kernel
        return None
    function.argtypes, function.restype = [ctypes.c_void_p], ctypes.c_uint32
    kernel: Callable[[object], int] = function
    return kernel


def products(x_SI: torch.Tensor, weight_EOI: torch.Tensor, rows: Sequence[int], block: int) -> torch.Tensor | None:
    """Return x @ weight.T of each group of rows with its matrix, float32 [S, O].

    None if the library or AVX-512 is missing, or if I, O or `block` is no multiple of `LANES`, or `block` not in
    [`LANES`, `MAX_BLOCK`]. `rows`: the number of rows of each group, S in all. `block`: the number of inputs in one
    chain of sums."""
    kernel, (out_size, in_size) = _kernel(), weight_EOI.shape[-2:]
    if kernel is None or in_size % LANES or out_size % LANES or block % LANES or not LANES <= block <= MAX_BLOCK:
        return None
    x_SI = x_SI.contiguous()
    out = torch.empty(len(x_SI), out_size)
    counts = (ctypes.c_uint64 * len(rows))(*rows)
    of_group = weight_EOI.stride(0) if weight_EOI.dim() == 3 else 0
    request = (ctypes.c_uint64 * 10)(
        *(x_SI.data_ptr(), weight_EOI.data_ptr(), out.data_ptr(), ctypes.addressof(counts), len(rows)),
        *(in_size, out_size, weight_EOI.stride(-2), of_group, block),
    )
    return None if kernel(request) else out
