"""The two `models.Cache`s for exact mode on a GPU: packed sequences in training, and pages in an engine.

Shapes: N tokens, H query heads, G key heads, A key width, B value width."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from etude.numerics.gpu.attention import PagedKeys, Queries, attend, attend_packed
from etude.numerics.gpu.matmul import Groups


class PackedTokens:
    """A `Cache` for several full sequences, packed one after another: each attends only within itself."""

    compressed = True  # latents, as in an engine's cache: the same sums
    chooses_keys = False

    def __init__(self, lengths: Sequence[int], device: torch.device | str) -> None:
        self.positions = torch.cat([torch.arange(n, device=device) for n in lengths])
        starts = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(torch.int32)
        self.tokens = Groups(starts.to(device), sum(lengths))

    def attend(
        self, layer: int, q_NHA: torch.Tensor, k_NGA: torch.Tensor, v_NGB: torch.Tensor, scale: float | None = None
    ) -> torch.Tensor:
        return attend_packed(q_NHA, k_NGA, v_NGB, self.tokens, scale)


class Pages:
    """The memory of an engine's KV cache: keys and values of every layer, in pages for any sequence."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        page: int,
        heads: int,
        key_width: int,
        value_width: int,
        shared: bool,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """Allocate `num_pages` pages of `page` positions for each layer, filled with zeros.

        `shared`: values are the first `value_width` numbers of the keys, and only keys are stored."""
        self.page = page

        def made(width: int) -> torch.Tensor:
            return torch.zeros(num_layers, num_pages, heads, page, width, dtype=dtype, device=device)

        self.keys = made(key_width)
        self.values = self.keys[..., :value_width] if shared else made(value_width)
        self.shared = shared


@dataclass(frozen=True)
class SequenceRows:
    """One sequence in an engine step: `count` tokens from position `start`, and its pages from position 0 on."""

    start: int
    count: int
    pages: Sequence[int]


class PagedTokens:
    """A `Cache` for one engine step over `Pages`: decoding rows and chunks of prompts, in any mix."""

    compressed = True
    chooses_keys = False

    def __init__(self, memory: Pages, rows: Sequence[SequenceRows]) -> None:
        device = memory.keys.device
        width = max(len(row.pages) for row in rows)
        table = torch.tensor([[*row.pages, *[0] * (width - len(row.pages))] for row in rows], dtype=torch.int32)
        positions = torch.cat([torch.arange(row.start, row.start + row.count) for row in rows])
        sequence = torch.arange(len(rows)).repeat_interleave(torch.tensor([row.count for row in rows]))
        self.memory = memory
        self.positions = positions.to(device)
        self.pages = table.to(device)
        self.page_of = table[sequence, positions // memory.page].long().to(device)
        self.place = (positions % memory.page).to(device)
        self.queries = Queries.of(
            torch.tensor([row.count for row in rows], device=device),
            torch.tensor([row.start for row in rows], device=device),
            len(positions),
        )

    def attend(
        self, layer: int, q_NHA: torch.Tensor, k_NGA: torch.Tensor, v_NGB: torch.Tensor, scale: float | None = None
    ) -> torch.Tensor:
        keys, values = self.memory.keys[layer], self.memory.values[layer]
        keys[self.page_of, :, self.place] = k_NGA
        if not self.memory.shared:
            values[self.page_of, :, self.place] = v_NGB
        return attend(q_NHA, PagedKeys(keys, values, self.pages, self.memory.page), self.queries, scale)
