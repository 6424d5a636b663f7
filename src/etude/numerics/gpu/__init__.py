"""Exact mode on a GPU, in Triton: one order of summation for each operator, forward and backward.

Needs Triton (`pip install 'etude[gpu]'`); imported only where it is used.

    operators = ExactGpu(torch.bfloat16)
    learner = Transformer(config, operators=operators).cuda()
    learner.run(tokens, PackedTokens([812, 4096], "cuda"))                # training
    engine.run(tokens, PagedTokens(pages, [SequenceRows(17, 1, (4,))]))   # decoding, chunks, or both: the same bits

Tile sizes follow from widths and dtype, never from the number of rows. Decoding and training use the same kernels with
the same tiles. Bits are equal within a parity class: chip, versions, dtype."""

from importlib.util import find_spec

if find_spec("triton") is None:
    raise ModuleNotFoundError("etude.numerics.gpu needs Triton: pip install 'etude[gpu]'", name="triton")

from etude.numerics.gpu.attention import attend, attend_packed
from etude.numerics.gpu.caches import PackedTokens, PagedTokens, Pages, SequenceRows
from etude.numerics.gpu.experts import mix
from etude.numerics.gpu.matmul import Groups, join_partial_sums, linear
from etude.numerics.gpu.operators import ExactGpu
from etude.numerics.gpu.routing import Router, choose

__all__ = [
    "ExactGpu", "Groups", "PackedTokens", "PagedTokens", "Pages", "Router", "SequenceRows",
    "attend", "attend_packed", "choose", "join_partial_sums", "linear", "mix",
]  # fmt: skip
