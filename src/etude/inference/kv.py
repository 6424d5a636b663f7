"""The KV cache of a CPU, by slot, and attention whose bits depend on a single request only.

Per layer there is one tensor of keys and one of values, ``[S, G, C, A]``: the keys of one head of a slot are
contiguous. When values are the first numbers of their keys (a compressed cache) both are one tensor, and outputs are
cut. Decoding rows that need the same window attend together; a chunk of a prompt attends by itself.

The operators (`numerics.exact.attention`) decide the sizes of rows and key windows, so that the bits of a row do not
depend on its neighbours, on chunking, or on prefix hits. A row sees a window of keys with a mask.

A gated delta layer has no keys, but one state for each slot: that after the slot's latest computed token. So that a
sequence can begin with a part of another one's tokens, a copy of the state is kept at each multiple of `state_every`
tokens (docs/decisions/0107-states-are-kept-at-chunks.md).

Shapes: N tokens of a step, S slots, G key/value heads, R query heads a key/value head, H = G·R, C positions a slot, A
key width, B value width, W window."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from etude.models import ModelConfig
from etude.models.attention import Scan, States
from etude.numerics.delta_rule import Segments
from etude.numerics.exact import KERNEL_BLOCK, causal_mask
from etude.numerics.exact.options import AttentionOptions, Index
from etude.numerics.operators import Operators

FEW = 4  # fewer decoding rows are not worth a separate kernel call
SHORT = 8  # most rows of a chunk whose attention is computed row by row, where the operators have a kernel for that
I64 = npt.NDArray[np.int64]


class KVCache:
    """The keys and values of all slots in the memory of the host.

    A slot is the memory of one sequence of `context_tokens` positions. All are allocated at once; pages that were never
    written use no memory. `state_every`: how often states of gated delta layers are kept, in tokens; 0: never."""

    def __init__(
        self,
        sizes: ModelConfig,
        operators: Operators,
        *,
        num_slots: int,
        context_tokens: int,
        heads: int = 0,
        state_every: int = 0,
    ) -> None:
        self.num_slots, self.length = num_slots, -(-context_tokens // KERNEL_BLOCK) * KERNEL_BLOCK
        kept, dtype = sizes.cache_layout, operators.storage_dtype
        self.heads, self.group, self.value_width = kept.heads, sizes.num_heads // kept.heads, kept.value_width
        num_layers, without = sizes.num_layers + heads, set(sizes.linear_layers)
        places = [(num_slots, self.heads, 0 if i in without else self.length) for i in range(num_layers)]
        self.keys = [lazy_zeros((*place, kept.key_width), dtype) for place in places]
        self.values = self.keys
        if not kept.shared:
            self.values = [lazy_zeros((*place, kept.value_width), dtype) for place in places]
        self.states = None
        if sizes.linear is not None:
            self.states = SlotStates(sizes, num_slots, every=state_every, context_tokens=context_tokens)
        self.operators = operators
        self.windows = operators.key_windows(self.heads, kept.key_width)
        indexer = None if sizes.latent is None else sizes.latent.indexer
        self.index: list[torch.Tensor] = []  # the indexer's keys by layer, [S, C, I]; [] if no context needs a choice
        if indexer is not None and context_tokens > indexer.top_k:
            place = (num_slots, self.length, indexer.width)
            self.index = [lazy_zeros(place, torch.float32) for _ in range(num_layers)]
        rows = self.windows.padded(self.group)
        self.queries = torch.zeros(num_slots, self.heads, rows, kept.key_width, dtype=dtype)  # scratch of decoding

    def step(self, decode_slots: I64, decode_positions: I64, chunks: list[Span]) -> StepCache:
        """Return the cache of one forward pass.

        The rows of the pass are one token of each decoding sequence, then the tokens of the prompt chunks, in order.
        `decode_slots` and `decode_positions` say where the decoding rows are, [sequences] int64."""
        return StepCache(self, decode_slots, decode_positions, chunks)

    def copy(self, source: int, target: int, stop: int) -> None:
        """Copy the keys and values of positions [0, stop) of slot `source` to slot `target`."""
        for memory in {id(t): t for t in (*self.keys, *self.values)}.values():
            memory[target, :, :stop] = memory[source, :, :stop]
        for memory in self.index:
            memory[target, :stop] = memory[source, :stop]
        if self.states is not None:
            self.states.copy(source, target, stop)

    @property
    def num_bytes(self) -> int:
        """The address space of all keys, values and states in bytes. Only used pages are resident."""
        states = 0 if self.states is None else self.states.num_bytes
        return states + sum(t.nbytes for t in {id(t): t for t in (*self.keys, *self.values, *self.index)}.values())


class SlotStates:
    """The states of the gated delta layers of all slots: the current ones, and copies at multiples of `every` tokens.

    `positions`: how many tokens each slot's current states have seen, [slots] int64."""

    def __init__(self, sizes: ModelConfig, num_slots: int, *, every: int, context_tokens: int) -> None:
        assert sizes.linear is not None
        self.every, self.positions = every, np.zeros(num_slots, np.int64)
        copies = context_tokens // every if every else 0
        shapes = sizes.linear.state_shapes()

        def memory(*places: int) -> dict[int, States]:
            made = {i: [lazy_zeros((*places, *shape), torch.float32) for shape in shapes] for i in sizes.linear_layers}
            return {layer: tuple(tensors) for layer, tensors in made.items()}

        self.current, self.kept = memory(num_slots), memory(num_slots, copies)

    def copy(self, source: int, target: int, stop: int) -> None:
        """Copy to slot `target` the states that slot `source` had after `stop` tokens, and the kept copies up to there.

        `stop` must be the current position of `source`, or a smaller multiple of `every`."""
        number = stop // self.every if self.every else 0
        for memory in (one for layer in self.kept.values() for one in layer):
            memory[target, :number] = memory[source, :number]
        if self.positions[source] == stop:
            for memory in (one for layer in self.current.values() for one in layer):
                memory[target] = memory[source]
            self.positions[target] = stop
        else:
            self.go_back(target, stop)

    def go_back(self, slot: int, position: int) -> None:
        """Restore the states of a slot after `position` tokens. There must be a kept copy, unless `position` is 0."""
        assert not position or (self.every and position % self.every == 0), f"no states after {position} tokens"
        for layer, memories in self.current.items():
            for memory, kept in zip(memories, self.kept[layer], strict=True):
                memory[slot] = kept[slot, position // self.every - 1] if position else 0.0
        self.positions[slot] = position

    def begin(self, slots: I64, starts: I64, stops: I64) -> None:
        """Prepare a forward pass over positions [start, stop) of some slots: their states are those before `start`."""
        for slot, start in zip(slots.tolist(), starts.tolist(), strict=True):
            if self.positions[slot] != start or not start:
                self.go_back(slot, start)
        self.positions[slots] = stops

    @property
    def num_bytes(self) -> int:
        """The address space of all states in bytes."""
        return sum(one.nbytes for kind in (self.current, self.kept) for layer in kind.values() for one in layer)


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return zeros whose pages are allocated when they are first written (torch.zeros writes all of them)."""
    if 0 in shape:
        return torch.zeros(shape, dtype=dtype)
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

    @property
    def chooses_keys(self) -> bool:
        return bool(self.kv.index)

    def __init__(self, kv: KVCache, decode_slots: I64, decode_positions: I64, chunks: list[Span]) -> None:
        self.kv, self.num_decode = kv, len(decode_slots)
        firsts = accumulate([self.num_decode, *(c.stop - c.start for c in chunks)])
        self.chunks = [_ChunkView(kv, c, first) for c, first in zip(chunks, firsts, strict=False)]
        slots = np.concatenate([decode_slots, *(np.full(c.stop - c.start, c.slot) for c in chunks)])
        self.row_slots: I64 = slots.astype(np.int64)  # [N]
        self.row_positions: I64 = np.concatenate(
            [decode_positions, *(np.arange(c.start, c.stop) for c in chunks)]
        ).astype(np.int64)  # [N]
        self.positions = torch.from_numpy(self.row_positions)
        if kv.states is not None:
            self._begin_states(kv.states, decode_slots, decode_positions, chunks)
        self._index_places = torch.from_numpy(self.row_slots * kv.length + self.row_positions)
        heads = self.row_slots[:, None] * kv.heads + np.arange(kv.heads)
        self._places = torch.from_numpy((heads * kv.length + self.row_positions[:, None]).ravel())

    @cached_property
    def _decode(self) -> list[_DecodeView]:
        slots, positions = self.row_slots[: self.num_decode], self.row_positions[: self.num_decode]
        windows = np.array([self.kv.windows.covering(p + 1) for p in positions.tolist()], np.int64)
        return [
            _DecodeView(self.kv, rows, slots[rows], positions[rows], window) for window, rows in _by_window(windows)
        ]

    def _begin_states(self, states: SlotStates, decode_slots: I64, decode_positions: I64, chunks: list[Span]) -> None:
        slots = np.concatenate([decode_slots, np.array([c.slot for c in chunks], np.int64)])
        starts = np.concatenate([decode_positions, np.array([c.start for c in chunks], np.int64)])
        lengths = [1] * len(decode_slots) + [c.stop - c.start for c in chunks]
        stops = starts + np.array(lengths, np.int64)
        states.begin(slots, starts, stops)
        self._segments, self._segment_slots = Segments(lengths), torch.from_numpy(slots)
        kept = np.flatnonzero(stops % states.every == 0) if states.every else np.zeros(0, np.int64)
        self._kept = torch.from_numpy(kept)
        self._kept_at = torch.from_numpy(slots[kept]), torch.from_numpy(stops[kept] // max(1, states.every) - 1)

    def recur(self, layer: int, inputs: Many[torch.Tensor], scan: Scan) -> torch.Tensor:
        """Compute a recurrent layer from the states of the slots, and store the new states."""
        assert self.kv.states is not None
        current, kept = self.kv.states.current[layer], self.kv.states.kept[layer]
        before = tuple(memory.index_select(0, self._segment_slots) for memory in current)
        out, after = scan(inputs, before, self._segments)
        for memory, copies, new in zip(current, kept, after, strict=True):
            memory.index_copy_(0, self._segment_slots, new.to(memory.dtype))
            if len(self._kept):
                copies[self._kept_at] = new.index_select(0, self._kept).to(memory.dtype)
        return out

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
        None means 1/√(key width). `options`: a sliding window, sinks and an index, in layers that have them."""
        kv, (n, h, a), dtype = self.kv, q_NHA.shape, q_NHA.dtype
        keys, values = kv.keys[layer], kv.values[layer]
        q_NHA, k_NGA, v_NGB = (t.to(keys.dtype) for t in (q_NHA, k_NGA, v_NGB))
        keys.view(-1, a).index_copy_(0, self._places, k_NGA.reshape(-1, a))
        if values is not keys:
            values.view(-1, kv.value_width).index_copy_(0, self._places, v_NGB.reshape(-1, kv.value_width))
        if options is not None and options.index is not None:
            options = self._with_kept_keys(options, options.index, layer)
        q_NGRA = q_NHA.view(n, kv.heads, kv.group, a)
        o_NGRB = q_NGRA.new_empty(*q_NGRA.shape[:3], values.shape[-1])
        num = self._attend_alone(keys, values, q_NGRA, o_NGRB, scale) if options is None else 0
        if self.num_decode and not num:
            for group in self._decode:
                group.attend(keys, values, q_NGRA, o_NGRB, scale, options)
        if self.chunks and num < n:
            self._attend_chunks(keys, values, q_NGRA[self.num_decode :], o_NGRB[self.num_decode :], scale, options)
        return o_NGRB.view(n, h, values.shape[-1])[..., : kv.value_width].to(dtype)

    def _attend_alone(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        q_NGRA: torch.Tensor,
        o_NGRB: torch.Tensor,
        scale: float | None,
    ) -> int:
        """Compute attention row by row with one kernel, where the operators have it. Returns the number of rows done.

        These are the decoding rows, and the rows of all chunks if each has at most `SHORT`; 0 without the kernel."""
        num = self.num_decode
        if all(chunk.num_rows <= SHORT for chunk in self.chunks):
            num = len(self.row_slots)
        if not num:
            return 0
        places = (self.row_slots[:num], self.row_positions[:num] + 1)
        done = self.kv.operators.attend_slots(q_NGRA[:num], keys, values, *places, scale)
        if done is None:
            return 0
        o_NGRB[:num] = done
        return num

    def _with_kept_keys(self, options: AttentionOptions, index: Index, layer: int) -> AttentionOptions:
        """Store the step's keys of the indexer. Returns options whose index has the keys of all slots, [S, C, I]."""
        memory = self.kv.index[layer]
        memory.view(-1, memory.shape[-1]).index_copy_(0, self._index_places, index.k_TI)
        return replace(options, index=replace(index, k_TI=memory))

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
        mask, sinks = self.masks(options), () if options is None else options.rows(kv.heads, queries)
        if options is not None and options.index is not None:
            kept = self._slots_of(options.index.k_TI[:, : self.window])
            mask = options.index.part(self.rows, kept).hide(mask)
        mask = mask[:, None, None]
        o = kv.windows.attend(queries, k, v, mask, scale, *sinks)[:, :, : kv.group]
        o_NGRB.index_copy_(0, self.rows, o)

    def _slots_of(self, memory: torch.Tensor) -> torch.Tensor:
        return memory.index_select(0, self.slots) if self.run is None else memory[self.run]


class _ChunkView:
    """A chunk: consecutive positions of one slot. The query heads of a key/value head are rows of one product.

    `first`: the row of its first token in the forward pass."""

    def __init__(self, kv: KVCache, chunk: Span, first: int) -> None:
        self.rows = slice(first, first + chunk.stop - chunk.start)
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
        mask = self.masks(options)
        if options is not None and options.index is not None:
            own = mask[: self.num_rows * self.kv.group : self.kv.group]
            own = options.index.part(self.rows, options.index.k_TI[self.slot, : self.window]).hide(own)
            mask = torch.cat([own.repeat_interleave(self.kv.group, 0), mask[len(mask) - self.padding :]])
        o = self.kv.windows.attend(q[None], k, v, mask, scale, *sinks)[0]
        o_GnRB.copy_(o[:, : o.shape[1] - self.padding].view(o_GnRB.shape))
