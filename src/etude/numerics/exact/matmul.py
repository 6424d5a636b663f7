"""Matrix products on CPUs whose rows do not depend on the number of other rows, nor on the number of threads.

An engine computes a token among whatever else is in its batch; the learner computes it in a packed sequence. Both must
get the same bits. The vendor's GEMM uses other kernels for few rows, and divides rows among threads. Which numbers of
rows are safe is measured at run time, in milliseconds. A product with another number of rows is padded with zero rows
to the next safe number. Without gradients, products of few rows are computed by a kernel of etude's where it has the
vendor's bits (`few_rows`).

A weight shape whose rows still differ is computed in tiles of `TILE` rows, one call each; if tiles differ, too, sums
are computed without the vendor's library. Both are slow, and meant for machines on which this was not tested.

Products are in float32, the dtype of the weights. The caller rounds results to the compute dtype once.

For tensor-parallel models: `column_product` computes outputs whose bits do not depend on which other outputs are
computed beside them; `partial_products` cuts the inner width into equal parts and adds their sums in a binary tree, so
that any number of ranks gets the same bits.

Shapes: N rows, I and O width in and out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.nn.functional as F

from etude.numerics.exact import few_rows

MIN_ROWS = 4
LINE_BYTES = 64
MANY_ROWS = 64  # up to this number of rows, each is measured
TILE = 32
SUM_NUMBERS = 1 << 22  # size of the intermediate tensor of `summed_product`
REFERENCE_ROWS = 300
SAMPLED_ROWS = (1, 2, 3, 4, 5, 7, 8, 15, 16, 31, 33, 64, 100, 257)
SAMPLED_WIDTH = 4096  # outputs that are measured, so that a large vocabulary does not take seconds

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def linear(x_NI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    """Compute `x @ weight.T` in float32. The bits of a row do not depend on the other rows.

    >>> weight, x = torch.ones(3, 2), torch.tensor([[1.0, 2.0]])
    >>> linear(x, weight).tolist()
    [[3.0, 3.0, 3.0]]
    """
    if block := block_for(x_NI, weight_OI, [len(x_NI)]):
        done = few_rows.products(x_NI, weight_OI, [len(x_NI)], block)
        assert done is not None, "it was measured"
        return done
    turned = weight_OI.stride(-1) != 1 and not weight_OI.is_contiguous()
    return product_for(*weight_OI.shape, turned=turned)(aligned(x_NI), weight_OI)


def product_for(out_size: int, in_size: int, *, turned: bool = False) -> Product:
    """Return the function (x_NI, weight_OI) → x @ weight.T for weights of a shape, with the current number of threads.

    `turned`: whether the weights are transposed in memory."""
    return _measured_path(out_size, in_size, turned, torch.get_num_threads())


def block_for(x_SI: torch.Tensor, weight_EOI: torch.Tensor, rows: Sequence[int]) -> int:
    """Return the `block` with which `few_rows.products` equals the vendor's GEMM bit for bit; 0: use the GEMM.

    The kernel is for at most `few_rows.MOST_ROWS` rows, on one thread, where no gradient is wanted."""
    if not few_rows.are_for(x_SI, weight_EOI) or not 0 < max(rows) <= few_rows.MOST_ROWS:
        return 0
    return _measured_block(*weight_EOI.shape[-2:], torch.get_num_threads())


def tree_sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum tensors in the order of a binary tree: each round adds pairs of neighbours, and keeps an odd last one.

    If `parts` is split into sections of equal length, a power of two, the tree of each section is a subtree of this
    tree: summing the sums of the sections gives the same bits.

    >>> tree_sum([torch.tensor(float(n)) for n in (1, 2, 3, 4)]).item()
    10.0
    """
    while len(parts) > 1:
        pairs = [a + b for a, b in zip(parts[::2], parts[1::2], strict=False)]
        parts = [*pairs, *parts[2 * len(pairs) :]]
    return parts[0]


def split_inner(weight_OI: torch.Tensor, number: int) -> tuple[torch.Tensor, ...]:
    """Split the inner width (the last dimension) into `number` equal parts."""
    cut = torch.split(weight_OI, weight_OI.shape[-1] // number, -1)
    out_size, in_size = cut[0].shape[-2:]
    if number == 1 or _gaps_alike(out_size, in_size, torch.get_num_threads()):
        return cut
    return tuple(one.contiguous() for one in cut)


def partial_products(x_NI: torch.Tensor, weight_OI: torch.Tensor, number: int) -> torch.Tensor:
    """Compute `x @ weight.T` as the tree sum of `number` products over parts of the inner width.

    >>> partial_products(torch.ones(1, 4), torch.ones(2, 4), 2).tolist()
    [[4.0, 4.0]]
    """
    width = x_NI.shape[-1] // number
    pairs = zip(torch.split(x_NI, width, -1), split_inner(weight_OI, number), strict=True)
    return tree_sum([linear(x, weight) for x, weight in pairs])


def column_product(size: int, in_size: int, number: int) -> Product:
    """Return the function (x, weight) → x @ weight.T for weights with some or all of `number` parts.

    A part is `size` rows of the full weight, such as the outputs of one rank at the highest tensor-parallel degree. The
    bits of a part's outputs do not depend on which other parts are in `weight`, nor on their order."""
    return _measured_columns(size, in_size, number, torch.get_num_threads())


def aligned(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor in contiguous memory that begins at a cache line. It is copied if necessary.

    At other addresses, the vendor's GEMM computes products with few outputs in another order of summation."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % LINE_BYTES else x


def padded_rows(num_rows: int) -> int:
    """Return the number of rows to compute, padding included, in a product of `num_rows` rows."""
    if num_rows > MANY_ROWS:
        return num_rows
    return safe_counts(torch.get_num_threads())[num_rows]


def vendor_product(x_NI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    """Compute `x @ weight.T` in one call of the vendor's GEMM, padded to a safe number of rows."""
    n = x_NI.shape[0]
    rows = padded_rows(n)
    if rows == n:
        return F.linear(x_NI, weight_OI)
    return F.linear(F.pad(x_NI, (0, 0, 0, rows - n)), weight_OI)[:n]


def tiled_product(x_NI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    """Compute `x @ weight.T` with one call of the vendor's GEMM for each tile of `TILE` rows."""
    n = x_NI.shape[0]
    tiles = torch.split(F.pad(x_NI, (0, 0, 0, -n % TILE)), TILE)
    return torch.cat([F.linear(tile, weight_OI) for tile in tiles])[:n]


def summed_product(x_NI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    """Compute `x @ weight.T` without the vendor's GEMM."""
    rows = max(1, SUM_NUMBERS // weight_OI.numel())
    return torch.cat([(x[:, None] * weight_OI).sum(-1) for x in torch.split(x_NI, rows)])


@functools.cache
def safe_counts(threads: int) -> tuple[int, ...]:
    """Return for each n from 0 to `MANY_ROWS` the smallest safe number of rows that is at least n.

    A number is safe if all rows have the bits that they have among `REFERENCE_ROWS`. This is measured with `threads`,
    which must be the current number."""
    counts = range(MIN_ROWS, MANY_ROWS)
    unsafe = set[int]().union(*(_other_counts(F.linear, *shape, counts) for shape in ((48, 64), (64, 256))))
    safe = [n for n in counts if n not in unsafe]
    return (0, *(next((count for count in safe if count >= n), MANY_ROWS) for n in range(1, MANY_ROWS + 1)))


@functools.cache
def _measured_path(out_size: int, in_size: int, turned: bool, threads: int) -> Product:
    for product in (vendor_product, tiled_product):
        if not _other_counts(product, min(out_size, SAMPLED_WIDTH), in_size, SAMPLED_ROWS, turned=turned):
            return product
    return summed_product


@functools.cache
def _measured_block(out_size: int, in_size: int, threads: int) -> int:
    if threads > 1 or product_for(out_size, in_size) is not vendor_product:
        return 0
    x, weight = _random(REFERENCE_ROWS, in_size), _random(min(out_size, SAMPLED_WIDTH), in_size)
    reference = vendor_product(x, weight)
    for block in (few_rows.MAX_BLOCK, in_size // 2):  # the vendor's on the machines where this was tested
        done = few_rows.products(x, weight, [REFERENCE_ROWS], block)
        if done is not None and torch.equal(done, reference):
            return block
    return 0


@functools.cache
def _measured_columns(size: int, in_size: int, number: int, threads: int) -> Product:
    def share_by_share(x_NI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
        return torch.cat([linear(x_NI, weight) for weight in torch.split(weight_OI, size)], -1)

    seen = min(size, max(1, SAMPLED_WIDTH // number))
    x, weight = _random(REFERENCE_ROWS, in_size), _random(seen * number, in_size)
    mixed = torch.randperm(len(weight), generator=torch.Generator().manual_seed(0))
    for product in (linear, share_by_share):
        reference = product(x, weight)[:, mixed]
        shares = [weight[mixed].chunk(1 << n) for n in range(number.bit_length())]
        if all(torch.equal(torch.cat([product(x, w) for w in share], -1), reference) for share in shares):
            return product
    return summed_product


@functools.cache
def _gaps_alike(out_size: int, in_size: int, threads: int) -> bool:
    x, weight = _random(REFERENCE_ROWS, in_size), _random(min(out_size, SAMPLED_WIDTH), 2 * in_size)
    return all(torch.equal(linear(x, one), linear(x, one.contiguous())) for one in weight.chunk(2, -1))


def _other_counts(
    product: Product, out_size: int, in_size: int, counts: Iterable[int], *, turned: bool = False
) -> list[int]:
    """Return the numbers of rows for which the last rows have other bits than among many rows."""
    weight = _random(in_size, out_size).T if turned else _random(out_size, in_size)
    x = _random(REFERENCE_ROWS, in_size)
    reference = product(x, weight)
    return [n for n in counts if not torch.equal(product(x[-n:], weight), reference[-n:])]


@functools.lru_cache(maxsize=8)
def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))
