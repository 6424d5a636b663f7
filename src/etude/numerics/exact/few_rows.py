"""Rust kernels for few rows: matrix products, all experts of a layer, attention of decoded tokens, RMSNorm.

The vendor's GEMM packs all weights into another layout first, which costs several times as much as a product of four
rows. With the block that `matmul.block_for` measures, `products` transposes 32 outputs at a time in registers, sums in
the GEMM's order and has its bits. With `ANY_ORDER` and at most 64 rows per group it reads weights once, as they lie in
memory, and sums along their rows: faster, with other bits. `attention` and `rms_norm` have an order of their own, too;
only native mode uses these.
All kernels need Linux and AVX2 or AVX-512, use one thread, release the GIL, and have no gradient.

Shapes: S rows sorted by group, E groups, I and O width in and out, N tokens, K experts per token, D width, F expert
width. In `attention`: S slots, G key/value heads, R query heads per key/value head, C positions per slot, A key width,
B value width."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

LIBRARY = Path(__file__).parents[2] / "weights" / "delta" / "libetude_native.so"  # one library of all kernels
LANES = 16
MAX_BLOCK = 192
ANY_ORDER = 0  # in place of a block: sums in the fastest order
MOST_ROWS = 256  # up to this number, the kernels are faster than the vendor's


_PRODUCT, _EXPERTS = struct.Struct("10Q"), struct.Struct("13Q")
_ATTENTION, _NORM = struct.Struct("12Qf4x"), struct.Struct("5Qf4x")


@functools.cache
def _kernel(name: str) -> Callable[[bytes], int] | None:
    try:
        function = getattr(ctypes.CDLL(str(LIBRARY)), name)
    except (OSError, AttributeError):  # not built, or before this kernel
        return None
    function.argtypes, function.restype = [ctypes.c_void_p], ctypes.c_uint32
    kernel: Callable[[bytes], int] = function
    return kernel


def are_for(x: torch.Tensor, *weights: torch.Tensor) -> bool:
    """Return whether the kernels may compute with these tensors: float32 on the CPU, on one thread, without a gradient.

    Widths are checked by the kernels."""
    if torch.is_grad_enabled() or type(x) is not torch.Tensor or x.device.type != "cpu":
        return False
    alike = all(weight.dtype == torch.float32 and weight.stride(-1) == 1 for weight in weights)
    return alike and x.dtype == torch.float32 and torch.get_num_threads() == 1


def products(x_SI: torch.Tensor, weight_EOI: torch.Tensor, rows: Sequence[int], block: int) -> torch.Tensor | None:
    """Return x @ weight.T of each group of rows with its matrix, float32 [S, O].

    None if the library or both AVX2 and AVX-512 are missing, if I, O or `block` is no multiple of `LANES`, or if
    `block` is greater than `MAX_BLOCK`. `rows`: the number of rows of each group, S in all. `block`: the number of
    inputs in one chain of sums, or `ANY_ORDER`."""
    kernel, (out_size, in_size) = _kernel("etude_products"), weight_EOI.shape[-2:]
    if kernel is None or in_size % LANES or out_size % LANES or block % LANES or not 0 <= block <= MAX_BLOCK:
        return None
    x_SI = x_SI.contiguous()
    out = torch.empty(len(x_SI), out_size)
    counts = np.array(rows, np.uint64)
    of_group = weight_EOI.stride(0) if weight_EOI.dim() == 3 else 0
    request = _PRODUCT.pack(
        *(x_SI.data_ptr(), weight_EOI.data_ptr(), out.data_ptr(), counts.ctypes.data, len(rows)),
        *(in_size, out_size, weight_EOI.stride(-2), of_group, block),
    )
    return None if kernel(request) else out


def experts(
    x_ND: torch.Tensor,
    gates_NK: torch.Tensor,
    experts_NK: torch.Tensor,
    gate_up_E2FD: torch.Tensor,
    down_EDF: torch.Tensor,
    blocks: tuple[int, int],
) -> torch.Tensor | None:
    """Return for each token Σ over its K experts of gate · down(silu(gate_proj x) · up_proj x), float32 [N, D].

    `experts_NK`: int64. `blocks`: the number of inputs in one chain of sums, of either product, or `ANY_ORDER`. None
    where `products` returns None, or if the weights are not contiguous. Raises `ValueError` for an expert that does not
    exist."""
    kernel = _kernel("etude_experts")
    (num_experts, width, inner), (n, k) = down_EDF.shape, experts_NK.shape
    whole = not any(size % LANES for size in (width, inner, *blocks)) and all(0 <= b <= MAX_BLOCK for b in blocks)
    if kernel is None or not whole or not (gate_up_E2FD.is_contiguous() and down_EDF.is_contiguous()):
        return None
    x_ND, gates_NK, experts_NK = x_ND.contiguous(), gates_NK.contiguous(), experts_NK.contiguous()
    out = torch.empty(n, width)
    tensors = (x_ND, gates_NK, experts_NK, gate_up_E2FD, down_EDF, out)
    request = _EXPERTS.pack(*(t.data_ptr() for t in tensors), n, k, num_experts, width, inner, *blocks)
    if not kernel(request):
        return out
    if experts_NK.min() < 0 or experts_NK.max() >= num_experts:
        found = sorted({one for one in experts_NK.flatten().tolist() if not 0 <= one < num_experts})
        raise ValueError(f"experts are numbered from 0 to {num_experts - 1}, not {found}")
    return None


def attention(
    q_NGRA: torch.Tensor,
    keys_SGCA: torch.Tensor,
    values_SGCB: torch.Tensor,
    slots: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
    scale: float | None = None,
) -> torch.Tensor | None:
    """Return the attention of N tokens, each to the first keys of its slot, float32 [N, G, R, B].

    `q_NGRA`, `keys_SGCA`, `values_SGCB`: float32 on the CPU. `slots`, `counts`: int64 [N], the slot of each token,
    which several may share, and how many keys it sees, from 1 to C. `scale`: the factor of the scores before softmax;
    None: 1/√A. Returns None if A, B or C is not a multiple of `LANES`, keys or values are not contiguous, or the
    library or both AVX2 and AVX-512 are missing."""
    kernel, (n, heads, group, width) = _kernel("etude_attention"), q_NGRA.shape
    length, value_width = values_SGCB.shape[-2:]
    kept = keys_SGCA.is_contiguous() and values_SGCB.is_contiguous()
    if kernel is None or not kept or any(size % LANES for size in (width, value_width, length)):
        return None
    q_NGRA, slots, counts = q_NGRA.contiguous(), np.ascontiguousarray(slots), np.ascontiguousarray(counts)
    assert counts.min() > 0
    assert counts.max() <= length
    out = torch.empty(n, heads, group, value_width)
    addresses = (q_NGRA.data_ptr(), keys_SGCA.data_ptr(), values_SGCB.data_ptr(), out.data_ptr())
    sizes = (n, heads, group, width, value_width, length, width**-0.5 if scale is None else scale)
    request = _ATTENTION.pack(*addresses, slots.ctypes.data, counts.ctypes.data, *sizes)
    return None if kernel(request) else out


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor | None:
    """Return RMSNorm over the last dimension, x / √(mean x² + eps) · weight, float32 in the shape of x.

    `x`: float32 [..., D] on the CPU; `weight`: float32 [D] or None (1). Returns None if D is not a multiple of `LANES`,
    or the library or both AVX2 and AVX-512 are missing."""
    kernel, width = _kernel("etude_norm"), x.shape[-1]
    if kernel is None or width % LANES:
        return None
    x = x.contiguous()
    out = torch.empty_like(x)
    address = 0 if weight is None else weight.data_ptr()
    request = _NORM.pack(x.data_ptr(), address, out.data_ptr(), x.numel() // width, width, eps)
    return None if kernel(request) else out
