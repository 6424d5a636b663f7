"""Operations on CPUs with one order of summation each: the parts of `exact.operators.Exact`.

Most are the vendor's fastest routines. They are called only with sizes at which a row's bits do not depend on the rest
of the batch. These sizes are measured on this machine, with the current number of threads.

>>> import torch
>>> linear(torch.eye(2), torch.tensor([[1.0, 2.0]])).flatten().tolist()
[1.0, 2.0]
"""

from etude.numerics.exact import few_rows
from etude.numerics.exact.attention import KERNEL_BLOCK, Causal, KeyWindows, causal_mask, key_windows
from etude.numerics.exact.elementwise import in_lanes, top_k
from etude.numerics.exact.matmul import (
    LINE_BYTES,
    block_for,
    column_product,
    linear,
    padded_rows,
    partial_products,
    product_for,
    split_inner,
    tree_sum,
    vendor_product,
)

__all__ = [
    "KERNEL_BLOCK", "LINE_BYTES", "Causal", "KeyWindows", "block_for", "causal_mask", "column_product", "few_rows",
    "in_lanes", "key_windows", "linear", "padded_rows", "partial_products", "product_for", "split_inner", "top_k",
    "tree_sum", "vendor_product",
]  # fmt: skip
