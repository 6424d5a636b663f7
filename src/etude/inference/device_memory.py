"""The KV cache of a GPU, by slot, and attention with one kernel per layer.

Per layer there is one tensor of keys and one of values, ``[S, C, G, A]``: positions of a slot are rows, so a step
writes its rows with one copy, and a slot is a sequence of a ragged batch (`numerics.varlen`) or one long page
(`numerics.gpu`). A step with any mix of decoding rows and chunks of prompts is one kernel call per layer, which reads
only the keys that each sequence has.

The kernel is etude's Triton program, with a fixed order of summation, in exact mode and for inputs that the vendor's
kernel does not support: float32, and latents, whose keys are wide and contain their values. Otherwise it is the
vendor's.

The last slot is a spare: padding rows of a batch write there and see one key.

Shapes: N tokens of a step, S slots, B sequences of a step, H query heads, G key/value heads, C positions a slot, A key
width, Z value width."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from etude.errors import ConfigError
from etude.inference.kv import I64, Span
from etude.models import ModelConfig
from etude.models.attention import Scan
from etude.models.components import GroupedQueries
from etude.numerics import varlen_attention
from etude.numerics.exact.options import AttentionOptions
from etude.numerics.operators import Operators

Attend = Callable[..., torch.Tensor]
"""A function (q_NHA, keys_SCGA, values_SCGZ, scale or None) -> o_NHZ."""


class DeviceMemory:
    """The keys and values of all slots on one device, allocated at once.

    A slot is the memory of one sequence of `context_tokens` positions. Raises `ConfigError` when the device has too
    little memory."""

    def __init__(
        self, sizes: ModelConfig, operators: Operators, *, num_slots: int, context_tokens: int, device: torch.device
    ) -> None:
        kind = sizes.attention
        if sizes.linear_layers or sizes.sliding_layers or (isinstance(kind, GroupedQueries) and kind.sinks):
            lacks = "gated delta layers" if sizes.linear_layers else "sliding windows and no sinks"
            raise ConfigError(
                f"an engine on {device} cannot compute a model of family {sizes.family}",
                f"its attention there has no {lacks}",
                hint="use engines on CPUs",
            )
        indexer = None if sizes.latent is None else sizes.latent.indexer
        if indexer is not None and context_tokens > indexer.top_k:
            raise ConfigError(
                f"an engine on {device} cannot compute contexts of {context_tokens} tokens of this model",
                f"from {indexer.top_k} tokens on (index_topk) an indexer chooses keys; attention there cannot",
                hint=f"lower engine.context_tokens to at most {indexer.top_k}, or use engines on CPUs",
            )
        kept, dtype = sizes.cache_layout, operators.storage_dtype
        self.device, self.num_slots, self.length, self.shared = device, num_slots + 1, context_tokens, kept.shared
        self.vendor = not (operators.exact or kept.shared) and varlen_attention.is_supported(
            device, dtype, kept.key_width
        )
        widths = [kept.key_width] if kept.shared else [kept.key_width, kept.value_width]
        rows = sizes.num_layers * self.num_slots * context_tokens * kept.heads
        self.num_bytes = rows * sum(widths) * dtype.itemsize
        shape = (self.num_slots, context_tokens, kept.heads)
        try:
            made = [
                [torch.zeros(*shape, width, dtype=dtype, device=device) for _ in range(sizes.num_layers)]
                for width in widths
            ]
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"{num_slots} slots of {context_tokens} tokens take {self.num_bytes / 1e9:.1f} GB on {device}",
                str(error).partition(". ")[0],
                hint="lower engine.max_sequences or engine.context_tokens",
            ) from None
        self.keys = made[0]
        self.values = [keys[..., : kept.value_width] for keys in self.keys] if kept.shared else made[1]

    def step(self, decode_slots: I64, decode_positions: I64, chunks: list[Span]) -> DeviceStep:
        """Return the cache as one forward pass uses it. Sends a few numbers per row to the device.

        The rows of the pass are one token of each decoding sequence, then the tokens of the prompt chunks, in order.
        `decode_slots` and `decode_positions` say where the decoding rows are, [sequences] int64."""
        counts = [1] * len(decode_slots) + [c.stop - c.start for c in chunks]
        slots_B = np.concatenate([decode_slots, np.array([c.slot for c in chunks], np.int64)])
        firsts_B = np.concatenate([decode_positions, np.array([c.start for c in chunks], np.int64)])
        within_N = np.concatenate([np.arange(n) for n in counts])
        stops_B = firsts_B + np.array(counts, np.int64)
        rows = torch.from_numpy(np.stack([slots_B.repeat(counts), firsts_B.repeat(counts) + within_N]))
        bounds = torch.from_numpy(np.stack([slots_B, firsts_B, stops_B]))
        starts = torch.tensor([0, *accumulate(counts)], dtype=torch.int32).to(self.device)
        slots_N, positions_N = rows.to(self.device).unbind()
        slots, firsts, stops = bounds.to(self.device).unbind()
        sequences = Sequences(starts, slots, firsts, stops, longest=max(counts))
        return DeviceStep(self, slots_N, positions_N, sequences)

    def copy(self, source: int, target: int, stop: int) -> None:
        """Copy the keys and values of positions [0, stop) of slot `source` to slot `target`."""
        for memory in self.keys if self.shared else (*self.keys, *self.values):
            memory[target, :stop] = memory[source, :stop]

    def decoding(self, slots_B: torch.Tensor, positions_B: torch.Tensor, starts: torch.Tensor) -> DeviceStep:
        """Return the cache for a forward pass over decoding sequences only. A CUDA graph can capture this call.

        All arguments are on the device: slot and position of each sequence, [B] int64, and `starts`, 0 to B, [B + 1]
        int32."""
        sequences = Sequences(starts, slots_B, positions_B, positions_B + 1, longest=1)
        return DeviceStep(self, slots_B, positions_B, sequences)


@dataclass(frozen=True, eq=False)
class Sequences:
    """The sequences of one step, as the attention kernels take them, on the device.

    - `starts`: int32 [B + 1], the first row of each sequence.
    - `slots_B`: int64, the slot of each sequence.
    - `firsts_B`, `stops_B`: int64, the position of the first row, and that of the last row plus 1.
    - `longest`: the most rows of one sequence."""

    starts: torch.Tensor
    slots_B: torch.Tensor
    firsts_B: torch.Tensor
    stops_B: torch.Tensor
    longest: int


class DeviceStep:
    """The cache of one forward pass on a GPU (`models.Cache`). `DeviceMemory.step` and `decoding` make one."""

    compressed = True
    chooses_keys = False  # contexts are at most as long as what an indexer keeps

    def __init__(
        self, memory: DeviceMemory, slots_N: torch.Tensor, positions_N: torch.Tensor, sequences: Sequences
    ) -> None:
        self.memory, self.slots, self.positions = memory, slots_N, positions_N
        self._places = slots_N * memory.length + positions_N
        self._attend = (_vendor_attention if memory.vendor else _triton_attention)(
            sequences, len(slots_N), memory.length
        )

    def attend(
        self,
        layer: int,
        q_NHA: torch.Tensor,
        k_NGA: torch.Tensor,
        v_NGZ: torch.Tensor,
        scale: float | None = None,
        options: AttentionOptions | None = None,
    ) -> torch.Tensor:
        """Store the step's keys and values of one layer, and compute causal attention of its queries within each slot.

        Returns [N, H, Z]: tokens of the step, query heads, value width. `scale` multiplies the scores before softmax;
        None means 1/√(key width). `DeviceMemory` refuses models whose layers have `options`."""
        keys, values = self.memory.keys[layer], self.memory.values[layer]
        keys.flatten(0, 1).index_copy_(0, self._places, k_NGA)
        if not self.memory.shared:
            values.flatten(0, 1).index_copy_(0, self._places, v_NGZ)
        return self._attend(q_NHA, keys, values, scale)

    def recur(self, layer: int, inputs: Many[torch.Tensor], scan: Scan) -> torch.Tensor:
        """Raise `ConfigError`: `DeviceMemory` has refused models with recurrent layers."""
        facts = "an engine on a GPU has no memory for the states of recurrent layers"
        raise ConfigError(f"layer {layer} of the model is recurrent", facts, hint="use engines on CPUs")


def _vendor_attention(of: Sequences, num_rows: int, length: int) -> Attend:
    first_key = of.slots_B * length
    starts_k = torch.cat([first_key, first_key[-1:]]).to(torch.int32)
    used_k = of.stops_B.to(torch.int32)

    def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float | None) -> torch.Tensor:
        flat = (keys.flatten(0, 1), values.flatten(0, 1))
        return varlen_attention.attend(q, *flat, of.starts, starts_k, of.longest, length, scale=scale, used_k=used_k)

    return attend


def _triton_attention(of: Sequences, num_rows: int, length: int) -> Attend:
    from etude.numerics.gpu import Groups
    from etude.numerics.gpu.attention import PagedKeys, Queries, attend

    queries = Queries(Groups(of.starts, num_rows), of.firsts_B.to(torch.int32))
    pages = of.slots_B[:, None].to(torch.int32)

    def attended(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float | None) -> torch.Tensor:
        return attend(q, PagedKeys(keys.transpose(1, 2), values.transpose(1, 2), pages, length), queries, scale)

    return attended
