"""Matrix products whose rows do not depend on how many other rows there are.

An engine computes a token among whichever others are in its batch; the learner computes it in a packed sequence.
Both must get the same bits. The vendor's GEMM takes another path for one to three rows (a dot product or a
matrix-vector kernel, another order of summation); from four rows on, each row is the same whatever the count.
So no product here ever has fewer than `MIN_ROWS` rows. `check_row_invariance` proves it on the machine at start.

Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F

from etude.errors import ParityError

MIN_ROWS = 4


def linear(x_ND: torch.Tensor, weight_OD: torch.Tensor) -> torch.Tensor:
    """``x @ weight.T`` with rows that do not depend on N.

    >>> weight, x = torch.ones(3, 2), torch.tensor([[1.0, 2.0]])
    >>> linear(x, weight).tolist()
    [[3.0, 3.0, 3.0]]
    """
    n = x_ND.shape[0]
    if n >= MIN_ROWS or n == 0:
        return F.linear(x_ND, weight_OD)
    return F.linear(F.pad(x_ND, (0, 0, 0, MIN_ROWS - n)), weight_OD)[:n]


def check_row_invariance(shapes: Iterable[tuple[int, int]], *, dtype: torch.dtype = torch.float32) -> None:
    """Compute random products of each (out, in) shape with many row counts; every row must have the same bits.

    Takes milliseconds at laptop sizes. Raises `ParityError` naming the shape and the row count that differs.
    """
    generator = torch.Generator().manual_seed(0)
    for out_size, in_size in sorted(set(shapes)):
        weight = torch.randn(out_size, in_size, generator=generator).to(dtype)
        x = torch.randn(512, in_size, generator=generator).to(dtype)
        whole = linear(x, weight)
        for n in (1, 2, 3, 4, 5, 7, 8, 15, 16, 31, 33, 64, 100, 257):
            if not torch.equal(linear(x[-n:], weight), whole[-n:]):
                raise ParityError(
                    f"a product of {n} rows differs from the same rows among 512",
                    f"weight [{out_size}, {in_size}], {dtype}, {torch.get_num_threads()} threads",
                    hint="run with one thread (OMP_NUM_THREADS=1); if it stays, max_lag = 0 will not repeat to the bit",
                )
