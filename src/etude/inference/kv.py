"""The KV cache of a CPU, by slot, and attention whose bits depend on a single request only.

Per layer there is one tensor of keys and one of values, ``[S, G, C, A]``: the keys of one head of a slot are
contiguous. When values are the first numbers of their keys (a compressed cache) both are one tensor, and outputs are
cut. Decoding rows that need the same window attend together; a chunk of a prompt attends by itself.

The operators (`numerics.exact.attention`) decide the sizes of rows and key windows, so that the bits of a row do not
depend on its neighbours, on chunking, or on prefix hits. A row sees a window of keys with a mask.

Shapes: N tokens of a step, S slots, G key/value heads, R query heads a key/value head, H = G·R, C positions a slot, A
key width, B value width, W window."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from etude.models import ModelConfig
from etude.numerics.exact import KERNEL_BLOCK, causal_mask
from etude.numerics.exact.options import AttentionOptions
from etude.numerics.operators import Operators

FEW = 4  # fewer decoding rows are not worth a separate kernel call
I64 = npt.NDArray[np.int64]


class KVCache:
    """The keys and values of all slots in the memory of the host.

    A slot is the memory of one sequence of `context_tokens` positions. All are allocated at once; pages that were never
    written use no memory."""

    def __init__(
        self, sizes: ModelConfig, operators: Operators, *, num_slots: int, context_tokens: int, heads: int = 0
    ) -> None:
        self.num_slots, self.length = num_slots, -(-context_tokens // KERNEL_BLOCK) * KERNEL_BLOCK
        kept, dtype = sizes.cache_layout, operators.storage_dtype
        self.heads, self.group, self.value_width = kept.heads, sizes.num_heads // kept.heads, kept.value_width
        shape = (num_slots, self.heads, self.length)
        num_layers = sizes.num_layers + heads
        self.keys = [lazy_zeros((*shape, kept.key_width), dtype) for _ in range(num_layers)]
        self.values = self.keys
        if not kept.shared:
            self.values = [lazy_zeros((*shape, kept.value_width), dtype) for _ in range(num_layers)]
        self.windows = operators.key_windows(self.heads, kept.key_width)
        rows = self.windows.padded(self.group)
        self.queries = torch.zeros(num_slots, self.heads, rows, kept.key_width, dtype=dtype)  # scratch of decoding

    def step(self, decode_slots: I64, decode_positions: I64, chunks: list[Span]) -> StepCache:
        """Return the cache as one forward pass uses it.

        The rows of the pass are one token of each decoding sequence, then the tokens of the prompt chunks, in order.
        `decode_slots` and `decode_positions` say where the decoding rows are, [sequences] int64."""
        return StepCache(self, decode_slots, decode_positions, chunks)

    def copy(self, source: int, target: int, stop: int) -> None:
        """Copy the keys and values of positions [0, stop) of slot `source` to slot `target`."""
        for memory in {id(t): t for t in (*self.keys, *self.values)}.values():
            memory[target, :, :stop] = memory[source, :, :stop]

    @property
    def num_bytes(self) -> int:
        """The address space of all keys and values in bytes. Only used pages are resident."""
        return sum(t.nbytes for t in {id(t): t for t in (*self.keys, *self.values)}.values())


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return zeros whose pages are allocated when they are first written (torch.zeros writes all of them)."""
    return torch.from_numpy(np.zeros((*shape, dtype.itemsize), np.uint8)).view(dtype).view(shape)


@dataclass(frozen=True, slots=True)
class Span:
    """The positions [start, stop) of a slot that a chunk of a prompt fills in one forward pass."""

    slot: int
    start: int
    stop: int


class StepCache:
    """The cache of one forward pass on a CPU (`models.Cache`). `KVCache.step` makes one.

    The rows of the pass are one per decoding slot, then those of the chunks, in order."""

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
            for window, rows in _by_window(
                np.array([kv.windows.covering(p + 1) for p in decode_positions.tolist()], np.int64)
            )
        ]

    def attend(
        self,
        layer: int,
        q_NHA: torch.Tensor,
        k_NGA: torch.Tensor,
        v_NGB: torch.Tensor,
        scale: float | None = None,
        options: AttentionOptions | None = None,
    ) -> torch.Tensor:
        """Store the step's keys and values of one layer, and compute causal attention of its queries within each slot.

        Returns [N, H, B]: tokens of the step, query heads, value width. `scale` multiplies the scores before softmax;
        None means 1/√(key width). `options`: a sliding window and sinks, in layers that have them."""
        kv, (n, h, a), dtype = self.kv, q_NHA.shape, q_NHA.dtype
        keys, values = kv.keys[layer], kv.values[layer]
        q_NHA, k_NGA, v_NGB = (t.to(keys.dtype) for t in (q_NHA, k_NGA, v_NGB))
        keys.view(-1, a).index_copy_(0, self._places, k_NGA.reshape(-1, a))
        if values is not keys:
            values.view(-1, kv.value_width).index_copy_(0, self._places, v_NGB.reshape(-1, kv.value_width))
        q_NGRA = q_NHA.view(n, kv.heads, kv.group, a)
        o_NGRB = q_NGRA.new_empty(*q_NGRA.shape[:3], values.shape[-1])
        for group in self._decode:
            group.attend(keys, values, q_NGRA, o_NGRB, scale, options)
        if self.chunks:
            self._attend_chunks(keys, values, q_NGRA[self.num_decode :], o_NGRB[self.num_decode :], scale, options)
        return o_NGRB.view(n, h, values.shape[-1])[..., : kv.value_width].to(dtype)

    def _attend_chunks(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        q_NGRA: torch.Tensor,
        o_NGRB: torch.Tensor,
        scale: float | None,
        options: AttentionOptions | None,
    ) -> None:
        """Attend for all chunks. The kernel needs head-major layout, so there is one copy to it and one back."""
        sizes = [chunk.num_rows for chunk in self.chunks]
        q_GNRA = q_NGRA.transpose(0, 1).contiguous()
        o_GNRB = q_GNRA.new_empty(*q_GNRA.shape[:3], values.shape[-1])
        for chunk, q, o in zip(self.chunks, torch.split(q_GNRA, sizes, 1), torch.split(o_GNRB, sizes, 1), strict=True):
            chunk.attend(keys, values, q, o, scale, options)
        o_NGRB.copy_(o_GNRB.transpose(0, 1))


def _by_window(windows: I64) -> list[tuple[int, I64]]:
    """Group decoding rows by the window that they need.

    A group of fewer than `FEW` rows joins the next larger window, since a kernel call costs about as much as `FEW`
    rows."""
    groups: list[tuple[int, I64]] = []
    taken = 0
    order, sizes = windows.argsort(kind="stable"), sorted(set(windows.tolist()))
    for window in sizes:
        upto = int((windows <= window).sum())
        if upto - taken >= FEW or window == sizes[-1]:
            groups.append((window, np.sort(order[taken:upto])))
            taken = upto
    return groups


class _Masks:
    """The causal masks of rows at these positions, by sliding window: all layers with one window share a mask."""

    def __init__(self, positions_M: torch.Tensor, window: int, dtype: torch.dtype) -> None:
        self._positions_M, self._window, self._dtype = positions_M, window, dtype
        self._made: dict[int | None, torch.Tensor] = {}

    def __call__(self, options: AttentionOptions | None) -> torch.Tensor:
        """Return the additive mask [M, W] for a layer with these options."""
        sliding = None if options is None else options.window
        if sliding not in self._made:
            self._made[sliding] = causal_mask(self._positions_M, self._window, sliding).to(self._dtype)
        return self._made[sliding]


class _DecodeView:
    """Decoding rows that need the same window, one per slot.

    Contiguous slots are used in place. Others are copied, which costs less than attention over the slots between them.
    """

    def __init__(self, kv: KVCache, rows: I64, slots: I64, positions: I64, window: int) -> None:
        self.kv, self.window, self.num = kv, window, len(rows)
        low, high = int(slots[0]), int(slots[-1]) + 1
        self.run = slice(low, high) if high - low == len(slots) else None
        self.slots = torch.from_numpy(slots)
        self.rows = torch.from_numpy(rows)
        self.masks = _Masks(torch.from_numpy(positions), window, kv.queries.dtype)  # [n, W]

    def attend(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        q_NGRA: torch.Tensor,
        o_NGRB: torch.Tensor,
        scale: float | None,
        options: AttentionOptions | None,
    ) -> None:
        kv = self.kv
        queries = kv.queries[: self.num]
        queries[:, :, : kv.group] = q_NGRA.index_select(0, self.rows)
        k, v = (self._slots_of(t[:, :, : self.window]) for t in (keys, values))
        mask, sinks = self.masks(options)[:, None, None], () if options is None else options.rows(kv.heads, queries)
        o = kv.windows.attend(queries, k, v, mask, scale, *sinks)[:, :, : kv.group]
        o_NGRB.index_copy_(0, self.rows, o)

    def _slots_of(self, memory: torch.Tensor) -> torch.Tensor:
        return memory.index_select(0, self.slots) if self.run is None else memory[self.run]


class _ChunkView:
    """A chunk: consecutive positions of one slot. The query heads of a key/value head are rows of one product."""

    def __init__(self, kv: KVCache, chunk: Span) -> None:
        self.kv, self.slot, self.num_rows = kv, chunk.slot, chunk.stop - chunk.start
        self.window = kv.windows.covering(chunk.stop)
        num = self.num_rows * kv.group
        self.padding = kv.windows.padded(num) - num
        positions = torch.arange(chunk.start, chunk.stop).repeat_interleave(kv.group)
        positions = F.pad(positions, (0, self.padding), value=chunk.start)
        self.masks = _Masks(positions, self.window, kv.queries.dtype)  # [rows, W]

    def attend(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        q_GnRA: torch.Tensor,
        o_GnRB: torch.Tensor,
        scale: float | None,
        options: AttentionOptions | None,
    ) -> None:
        q = F.pad(q_GnRA.flatten(1, 2), (0, 0, 0, self.padding))
        k, v = (t[self.slot].narrow(1, 0, self.window)[None] for t in (keys, values))
        sinks = () if options is None else options.rows(self.kv.heads, q[None], self.num_rows)
        o = self.kv.windows.attend(q[None], k, v, self.masks(options), scale, *sinks)[0]
        o_GnRB.copy_(o[:, : o.shape[1] - self.padding].view(o_GnRB.shape))
