"""Keys and values of every slot, and attention over them whose bits depend on one request alone.

Per layer one tensor for keys and one for values, ``[S, G, C, A]``: a slot's keys of one head are one run of memory.
Where values are the first numbers of their keys (a compressed cache) both are one tensor, and outputs are cut.
Decoding rows that need the same window attend together, a chunk of a prompt by itself.

Three things keep a row's bits free of its neighbours, of chunking and of prefix hits: no product has fewer than
`MIN_ROWS` rows; a row sees a *window* of whole blocks of `BLOCK` positions, masked, and never a ragged end; and only
windows are used in which a row has the same bits as in all others. The vendor's GEMM splits some sums in two (here
with windows of 256 and 320), so `invariant_windows` finds out which, once, when the cache is made.

Shapes: N tokens of a step, S slots, G key/value heads, R query heads a key/value head, H = G·R, C positions a slot,
A key width, B value width, W window.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from etude.models import ModelConfig
from etude.numerics import MIN_ROWS

BLOCK = 64
FEW = 4  # decoding rows that are not worth a kernel call of their own
KERNEL_BLOCK = 512  # positions that the CPU attention kernel takes at once; slots are whole ones, pages are lazy
I64 = npt.NDArray[np.int64]


class KVCache:
    """The memory: allocated once, untouched pages cost nothing."""

    def __init__(
        self, sizes: ModelConfig, *, num_slots: int, context_tokens: int, dtype: torch.dtype = torch.float32
    ) -> None:
        self.num_slots, self.length = num_slots, -(-context_tokens // KERNEL_BLOCK) * KERNEL_BLOCK
        kept = sizes.kept
        self.heads, self.group, self.value_width = kept.heads, sizes.num_heads // kept.heads, kept.value_width
        shape = (num_slots, self.heads, self.length)
        self.keys = [_lazy_zeros((*shape, kept.key_width), dtype) for _ in range(sizes.num_layers)]
        self.values = self.keys
        if not kept.shared:
            self.values = [_lazy_zeros((*shape, kept.value_width), dtype) for _ in range(sizes.num_layers)]
        self.windows = invariant_windows(self.heads, self.group, kept.key_width, self.length)
        rows = max(self.group, MIN_ROWS)
        self.queries = torch.zeros(num_slots, self.heads, rows, kept.key_width, dtype=dtype)  # scratch of decoding

    @property
    def num_bytes(self) -> int:
        """Address space of all keys and values; resident only as far as used."""
        return sum(t.nbytes for t in {id(t): t for t in (*self.keys, *self.values)}.values())

    def window(self, stop: int) -> int:
        """The smallest usable window that covers positions [0, stop)."""
        return next((w for w in self.windows if w >= stop), self.length)


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros whose pages the system hands out when they are first written (torch.zeros touches them all)."""
    return torch.from_numpy(np.zeros((*shape, dtype.itemsize), np.uint8)).view(dtype).view(shape)


@dataclass(frozen=True, slots=True)
class Span:
    """A chunk's place: rows [first, first + stop - start) of the step are positions [start, stop) of the slot."""

    slot: int
    start: int
    stop: int


class StepCache:
    """The cache as one forward sees it (`models.Cache`): `decode` rows first, then the chunks, in order."""

    compressed = True

    def __init__(self, kv: KVCache, decode_slots: I64, decode_positions: I64, chunks: list[Span]) -> None:
        self.kv, self.num_decode = kv, len(decode_slots)
        self.chunks = [_ChunkView(kv, c) for c in chunks]
        slots = np.concatenate([decode_slots, *(np.full(c.stop - c.start, c.slot) for c in chunks)])
        self.row_slots: I64 = slots.astype(np.int64)  # [N]
        self.row_positions: I64 = np.concatenate(
            [decode_positions, *(np.arange(c.start, c.stop) for c in chunks)]
        ).astype(np.int64)  # [N]
        self.positions = torch.from_numpy(self.row_positions)
        heads = self.row_slots[:, None] * kv.heads + np.arange(kv.heads)
        self._places = torch.from_numpy((heads * kv.length + self.row_positions[:, None]).ravel())
        self._decode = [
            _DecodeView(kv, rows, decode_slots[rows], decode_positions[rows], window)
            for window, rows in _by_window(np.array([kv.window(p + 1) for p in decode_positions.tolist()], np.int64))
        ]

    def attend(
        self, layer: int, q_NHA: torch.Tensor, k_NGA: torch.Tensor, v_NGB: torch.Tensor, scale: float | None = None
    ) -> torch.Tensor:
        """Keep the step's keys and values, attend causally within each slot; o_NHB."""
        kv, (n, h, a) = self.kv, q_NHA.shape
        keys, values = kv.keys[layer], kv.values[layer]
        keys.view(-1, a).index_copy_(0, self._places, k_NGA.reshape(-1, a))
        if values is not keys:
            values.view(-1, kv.value_width).index_copy_(0, self._places, v_NGB.reshape(-1, kv.value_width))
        q_NGRA = q_NHA.view(n, kv.heads, kv.group, a)
        o_NGRB = q_NGRA.new_empty(*q_NGRA.shape[:3], values.shape[-1])
        for group in self._decode:
            group.attend(keys, values, q_NGRA, o_NGRB, scale)
        if self.chunks:
            self._attend_chunks(keys, values, q_NGRA[self.num_decode :], o_NGRB[self.num_decode :], scale)
        return o_NGRB.view(n, h, -1)[..., : kv.value_width]

    def _attend_chunks(
        self, keys: torch.Tensor, values: torch.Tensor, q_NGRA: torch.Tensor, o_NGRB: torch.Tensor, scale: float | None
    ) -> None:
        """Head by head, as the kernel wants it: one copy there and one back for all chunks."""
        sizes = [chunk.num_rows for chunk in self.chunks]
        q_GNRA = q_NGRA.transpose(0, 1).contiguous()
        o_GNRB = q_GNRA.new_empty(*q_GNRA.shape[:3], values.shape[-1])
        for chunk, q, o in zip(self.chunks, torch.split(q_GNRA, sizes, 1), torch.split(o_GNRB, sizes, 1), strict=True):
            chunk.attend(keys, values, q, o, scale)
        o_NGRB.copy_(o_GNRB.transpose(0, 1))


def _by_window(windows: I64) -> list[tuple[int, I64]]:
    """Decoding rows grouped by the window that they need; few go with those of the next larger one, since a call of
    the kernel costs about what `FEW` rows do."""
    groups: list[tuple[int, I64]] = []
    taken = 0
    order, sizes = windows.argsort(kind="stable"), sorted(set(windows.tolist()))
    for window in sizes:
        upto = int((windows <= window).sum())
        if upto - taken >= FEW or window == sizes[-1]:
            groups.append((window, np.sort(order[taken:upto])))
            taken = upto
    return groups


class _DecodeView:
    """One row a slot, for rows that need the same window. Slots in one run are used in place, others copied out:
    attention over the idle ones between them costs more than that."""

    def __init__(self, kv: KVCache, rows: I64, slots: I64, positions: I64, window: int) -> None:
        self.kv, self.window, self.num = kv, window, len(rows)
        low, high = int(slots[0]), int(slots[-1]) + 1
        self.run = slice(low, high) if high - low == len(slots) else None
        self.slots = torch.from_numpy(slots)
        self.rows = torch.from_numpy(rows)
        hidden = np.where(np.arange(window) > positions[:, None], np.float32(-np.inf), np.float32(0.0))
        self.mask = torch.from_numpy(hidden)[:, None, None]  # [n, 1, 1, W]

    def attend(
        self, keys: torch.Tensor, values: torch.Tensor, q_NGRA: torch.Tensor, o_NGRB: torch.Tensor, scale: float | None
    ) -> None:
        kv = self.kv
        queries = kv.queries[: self.num]
        queries[:, :, : kv.group] = q_NGRA.index_select(0, self.rows)
        k, v = (self._slots_of(t[:, :, : self.window]) for t in (keys, values))
        o = F.scaled_dot_product_attention(queries, k, v, attn_mask=self.mask, scale=scale)[:, :, : kv.group]
        o_NGRB.index_copy_(0, self.rows, o)

    def _slots_of(self, memory: torch.Tensor) -> torch.Tensor:
        return memory.index_select(0, self.slots) if self.run is None else memory[self.run]


class _ChunkView:
    """Consecutive positions of one slot; query heads of a key/value head are rows of one product."""

    def __init__(self, kv: KVCache, chunk: Span) -> None:
        self.slot, self.num_rows = chunk.slot, chunk.stop - chunk.start
        self.window = kv.window(chunk.stop)
        self.padding = max(0, -(-MIN_ROWS // kv.group) - self.num_rows)  # positions added to reach MIN_ROWS rows
        positions = torch.arange(chunk.start, chunk.stop + self.padding)
        self.mask = _causal_mask(positions, kv.group, self.window)

    def attend(
        self, keys: torch.Tensor, values: torch.Tensor, q_GnRA: torch.Tensor, o_GnRB: torch.Tensor, scale: float | None
    ) -> None:
        q = F.pad(q_GnRA, (0, 0, 0, 0, 0, self.padding)) if self.padding else q_GnRA
        k, v = (t[self.slot].narrow(1, 0, self.window)[None] for t in (keys, values))
        o = F.scaled_dot_product_attention(q.flatten(1, 2)[None], k, v, attn_mask=self.mask, scale=scale)
        o_GnRB.copy_(o.view(*q.shape[:3], -1).narrow(1, 0, self.num_rows))


def _causal_mask(positions: torch.Tensor, group: int, window: int) -> torch.Tensor:
    """Additive float32 [1, 1, N·R, W]: each position's rows see the positions up to it."""
    hidden = torch.arange(window) > positions.repeat_interleave(group)[:, None]
    return torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)[None, None]


def invariant_windows(heads: int, group: int, head_dim: int, length: int) -> list[int]:
    """Windows (multiples of `BLOCK`, ascending) in which a row has the bits that it has in the whole slot.

    Measured here and now with random numbers, in milliseconds, rather than assumed: it depends on the machine's
    vector width and on the vendor's library. `length`, whole kernel blocks, is always among them. Past two kernel
    blocks the pattern repeats: earlier blocks are whole, and only the last one's size matters.
    """
    total, length = length, min(length, 2 * KERNEL_BLOCK)
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 1, heads, length, head_dim, generator=generator).unbind()
    q = torch.randn(1, heads, length, group, head_dim, generator=generator)
    few = -(-MIN_ROWS // group)

    def last_rows(num: int, stop: int, window: int) -> torch.Tensor:
        """Attention of the `few` positions before `stop`, computed among `num`."""
        rows = q[:, :, stop - num : stop].reshape(1, heads, -1, head_dim)
        mask = _causal_mask(torch.arange(stop - num, stop), group, window)
        o = F.scaled_dot_product_attention(rows, k[:, :, :window], v[:, :, :window], attn_mask=mask)
        return o.view(heads, num, group, head_dim)[:, -few:]

    def invariant(window: int) -> bool:
        whole = last_rows(few, window, length)
        nums = [n for n in (few, 16, 32, 96, 256, 1024) if n <= window]  # each takes another tiling of the rows
        return all(torch.equal(last_rows(n, window, window), whole) for n in nums)

    tested = [w for w in range(BLOCK, length, BLOCK) if invariant(w)] + [length]
    second = [w for w in tested if w > KERNEL_BLOCK]
    return tested + [w + k for k in range(KERNEL_BLOCK, total - length + 1, KERNEL_BLOCK) for w in second]
