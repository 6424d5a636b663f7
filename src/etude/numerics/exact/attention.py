"""Attention on CPUs whose rows do not depend on the number of rows, on chunking, or on the memory behind the keys.

The vendor's attention takes queries in blocks of 32, 64 or 256 rows and keys in blocks of 512, and sums each block with
GEMMs, whose order of summation depends on the block's size. So queries see a masked *window*: a multiple of `BLOCK`
keys. Queries come in full blocks of rows, too. Only windows are used in which a row has the same bits as in full blocks
of 512 keys (here not 256 and 320, whose sums the GEMM splits in two). This is measured on first use, in milliseconds.
Where even full blocks depend on the number of rows, sums are computed without the vendor's kernel: slow, and meant for
machines on which this was not tested.

Decoding, chunked prefill and packed training all use it, so they get the same bits.

Shapes: B slots, H query heads, G key/value heads, M rows of queries, W window, T tokens of a sequence, A key width, C
value width."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from etude.numerics.exact.matmul import MIN_ROWS
from etude.numerics.exact.options import AttentionOptions, attention_with_sinks

BLOCK = 64
KERNEL_BLOCK = 512  # block of keys of the CPU's attention kernel
SEVERAL = 2 * KERNEL_BLOCK  # beyond it the pattern repeats: only the size of the last block matters
TILES = ((32, MIN_ROWS), (192, 32), (768, 64), (1 << 62, 256))  # (below this number of rows, the kernel's row block)
CHUNK = 128  # queries of a full sequence that share a window

Attend = Callable[..., torch.Tensor]
"""(q_BHMA, k_BGWA, v_BGWC, mask that broadcasts to BHMW, 0 or -inf, scale or None, sinks that broadcast to BHM or None)
-> o_BHMC"""


@dataclass(frozen=True)
class KeyWindows:
    """The sizes of key windows and query blocks for which attention gives equal bits, and the function that computes
    attention.

    A window is the number of keys, padding included, that queries see. `usable`: windows up to `SEVERAL`, ascending.
    `tiles`: whether queries come in full blocks of rows."""

    usable: tuple[int, ...]
    attend: Attend
    tiles: bool = True

    def covering(self, stop: int) -> int:
        """Return the smallest window that covers keys [0, stop); at most the next multiple of `KERNEL_BLOCK`."""
        whole = max(0, -(-(stop - SEVERAL) // KERNEL_BLOCK)) * KERNEL_BLOCK
        return whole + next(w for w in self.usable if w >= stop - whole)

    def padded(self, num_rows: int) -> int:
        """Return the number of query rows to compute, padding included, for `num_rows` rows."""
        if not self.tiles:
            return num_rows
        tile = next(tile for below, tile in TILES if num_rows < below)
        return -(-num_rows // tile) * tile


def masked_attention(
    q_BHMA: torch.Tensor,
    k_BGWA: torch.Tensor,
    v_BGWC: torch.Tensor,
    mask: torch.Tensor,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attention with the vendor's kernel and an additive mask (0 or -inf) that broadcasts to [B, H, M, W].

    `sinks`: logits that broadcast to [B, H, M], in the denominator of each row's softmax."""
    if sinks is not None:
        return attention_with_sinks(q_BHMA, k_BGWA, v_BGWC, mask, scale, sinks)
    gqa = q_BHMA.shape[1] != k_BGWA.shape[1]
    return F.scaled_dot_product_attention(q_BHMA, k_BGWA, v_BGWC, attn_mask=mask, scale=scale, enable_gqa=gqa)


def summed_attention(
    q_BHMA: torch.Tensor,
    k_BGWA: torch.Tensor,
    v_BGWC: torch.Tensor,
    mask: torch.Tensor,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attention with explicit sums, key block by key block: one order, whatever the shapes.

    `mask`: additive, 0 or -inf, broadcasts to [B, H, M, W]. `sinks`: as in `masked_attention`."""
    repeats = q_BHMA.shape[1] // k_BGWA.shape[1]
    k_BHWA, v_BHWC = (t.repeat_interleave(repeats, 1) for t in (k_BGWA, v_BGWC))
    q_BHMA = q_BHMA * (q_BHMA.shape[-1] ** -0.5 if scale is None else scale)
    mask_BHMW = mask.expand(*q_BHMA.shape[:3], k_BHWA.shape[2])
    blocks = []
    for k, mask_block in zip(torch.split(k_BHWA, BLOCK, 2), torch.split(mask_BHMW, BLOCK, 3), strict=True):
        blocks.append((q_BHMA[:, :, :, None] * k[:, :, None]).sum(-1) + mask_block)
    highs = [block.amax(-1, keepdim=True) for block in blocks]
    last = [] if sinks is None else [sinks.expand(highs[0].shape[:-1])[..., None]]
    high = functools.reduce(torch.maximum, [*highs, *last])
    weights = [(block - high).exp() for block in blocks]
    sums_of_weights = [w.sum(-1, keepdim=True) for w in weights]
    total = functools.reduce(torch.add, [*sums_of_weights, *((sink - high).exp() for sink in last)])
    sums = [(w[..., None] * v[:, :, None]).sum(-2) for w, v in zip(weights, torch.split(v_BHWC, BLOCK, 2), strict=True)]
    o_BHMC: torch.Tensor = functools.reduce(torch.add, sums) / total
    return o_BHMC


def key_windows(heads: int, key_width: int) -> KeyWindows:
    """Return the windows for a cache whose keys have this width, for the current number of threads.

    They do not depend on the number of heads, so that a rank with some of the heads computes the same bits as one with
    all of them."""
    return _measured(key_width, torch.get_num_threads())


@functools.cache
def _measured(width: int, threads: int) -> KeyWindows:
    probe, alone = _Probe(2, width), _Probe(1, width)
    usable = tuple(
        w
        for w in range(BLOCK, SEVERAL + 1, BLOCK)
        if probe.same_rows(masked_attention, w) and alone.same_rows(masked_attention, w)
    )
    whole = KERNEL_BLOCK in usable and SEVERAL in usable and probe.same_rows(masked_attention, SEVERAL, (TILES[2][0],))
    if whole and probe.same_heads(masked_attention):
        return KeyWindows(usable, masked_attention)
    return KeyWindows(tuple(range(BLOCK, SEVERAL + 1, BLOCK)), summed_attention)


class _Probe:
    """Random queries at positions in the last block of a window, some positions more than once."""

    def __init__(self, heads: int, width: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.q = torch.randn(1, heads, TILES[2][0], width, generator=generator)
        self.k, self.v = torch.randn(2, 1, heads, SEVERAL, width, generator=generator).unbind()
        self.back = torch.arange(TILES[2][0] - 1, -1, -1) % BLOCK

    def same_rows(
        self, attend: Attend, window: int, counts: tuple[int, ...] = (*range(MIN_ROWS, 33, MIN_ROWS),)
    ) -> bool:
        """Return whether rows in a window have the same bits as among many rows and in full kernel blocks."""
        most = TILES[1][0]
        whole = self._last(attend, most, window, SEVERAL)
        return all(torch.equal(self._last(attend, n, window, window)[:, :, -most:], whole[:, :, -n:]) for n in counts)

    def same_heads(self, attend: Attend) -> bool:
        """Return whether a head alone has the same bits as beside another head."""
        mask, both = causal_mask(SEVERAL - 1 - self.back, SEVERAL), (self.q, self.k, self.v)
        each = [attend(*(t[:, head : head + 1] for t in both), mask) for head in range(self.q.shape[1])]
        return torch.equal(torch.cat(each, 1), attend(*both, mask))

    def _last(self, attend: Attend, num: int, window: int, keys: int) -> torch.Tensor:
        mask = causal_mask(window - 1 - self.back[-num:], keys)
        return attend(self.q[:, :, -num:], self.k[:, :, :keys], self.v[:, :, :keys], mask)


def causal_mask(positions_M: torch.Tensor, window: int, sliding: int | None = None) -> torch.Tensor:
    """Return an additive mask, float32 [M, W]: 0 for the keys up to each row's position, -inf after it.

    `sliding`: the number of latest keys, up to the row's position, that are not masked; None: all of them."""
    keys = torch.arange(window, device=positions_M.device)
    hidden = keys > positions_M[:, None]
    if sliding is not None:
        hidden |= keys <= positions_M[:, None] - sliding
    return torch.zeros(hidden.shape, device=positions_M.device).masked_fill_(hidden, -torch.inf)


ANY = KeyWindows(tuple(range(BLOCK, SEVERAL + 1, BLOCK)), masked_attention, tiles=False)
"""Windows for operators that do not need a fixed order."""


class CausalMasks:
    """Causal masks of blocks of `rows` consecutive queries. All are views of one tensor, which grows as needed."""

    def __init__(self, rows: int, sliding: int | None = None) -> None:
        self._rows, self._most, self._sliding = rows, 0, sliding
        self._base = torch.zeros(0)

    def __call__(self, start: int, window: int, like: torch.Tensor) -> torch.Tensor:
        """Return the mask [rows, window] of queries from position `start` on, in dtype and on the device of `like`."""
        if max(start, window) > self._most:
            self._most = 1 << max(start, window).bit_length()
            positions = torch.arange(self._most, self._most + self._rows, device=like.device)
            self._base = causal_mask(positions, 2 * self._most, self._sliding).to(like.dtype)
        return self._base[:, self._most - start : self._most - start + window]


class MasksByWindow:
    """The `CausalMasks` of each sliding window. `rows`: the number of queries of a mask."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._masks: dict[int | None, CausalMasks] = {}

    def __call__(self, options: AttentionOptions | None) -> CausalMasks:
        """Return the masks for a layer with these options."""
        sliding = None if options is None else options.window
        if sliding not in self._masks:
            self._masks[sliding] = CausalMasks(self._rows, sliding)
        return self._masks[sliding]


@dataclass(frozen=True)
class Causal:
    """Causal attention in full sequences, `CHUNK` queries at a time. Masks are shared by layers and sequences."""

    _masks: MasksByWindow = field(default_factory=lambda: MasksByWindow(CHUNK))

    def __call__(
        self,
        q_HTA: torch.Tensor,
        k_GTA: torch.Tensor,
        v_GTC: torch.Tensor,
        scale: float | None = None,
        start: int = 0,
        options: AttentionOptions | None = None,
    ) -> torch.Tensor:
        """Return the attention output o_HTC, float32.

        `start`: position of the first query. The bits are those of a call with all queries."""
        masks, sinks = self._masks(options), () if options is None else options.rows()
        (heads, num, width), narrow = k_GTA.shape, k_GTA.shape[-1] - v_GTC.shape[-1]
        w = key_windows(heads, width)
        padding = w.covering(num) - num
        k, v = F.pad(k_GTA, (0, 0, 0, padding))[None], F.pad(v_GTC, (0, narrow, 0, padding))[None]
        outs = []
        for first, q in zip(range(start, num, CHUNK), torch.split(q_HTA, CHUNK, 1), strict=True):
            rows, window = q.shape[1], w.covering(first + q.shape[1])
            q = F.pad(q, (0, 0, 0, w.padded(rows) - rows)).contiguous()
            mask = masks(first, window, q)[: q.shape[1]]
            if options is not None and options.index is not None:
                own = slice(first - start, first - start + rows)
                mask = options.index.part(own, options.index.k_TI[: first + rows]).hide(mask)
            outs.append(w.attend(q[None], k[:, :, :window], v[:, :, :window], mask, scale, *sinks)[0, :, :rows])
        return torch.cat(outs, 1)[..., : v_GTC.shape[-1]]
