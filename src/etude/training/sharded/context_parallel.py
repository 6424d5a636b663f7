"""Context parallelism: each rank has a part of a text's tokens, and attends to keys and values of all tokens before.

A text is cut into twice as many pieces as there are ranks, and each rank takes one from the front and one from the back
(Llama 3, arXiv 2407.21783, §3.3.2). With causal attention the last piece attends to all others and the first to none,
so this balances the work. Keys and values are all-gathered layer by layer (for latent attention only the latents);
their gradients are summed on the way back. Pieces are multiples of `CHUNK` where the text is long enough: then exact
operators see the same key windows as on a single rank, and a token has the same bits.

Shapes: N tokens of this rank, H query heads, G key/value heads, A key width, B value width, T tokens of a text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed

from etude.errors import ConfigError
from etude.models.attention import Scan
from etude.numerics.exact.attention import CHUNK
from etude.numerics.exact.options import AttentionOptions
from etude.numerics.operators import Operators
from etude.training.sharded.mesh import Mesh
from etude.training.token_batch import Tokens


def token_ranges(num_tokens: int, rank: int, ranks: int) -> list[range]:
    """Return the two token ranges of a text that a rank has: one from its first half, one from its second half.

    >>> [token_ranges(1024, rank, 2) for rank in range(2)]
    [[range(0, 256), range(768, 1024)], [range(256, 512), range(512, 768)]]
    >>> [token_ranges(6, rank, 2) for rank in range(2)]
    [[range(0, 2), range(6, 6)], [range(2, 4), range(4, 6)]]
    """
    each = -(-num_tokens // (2 * ranks))
    each = -(-each // CHUNK) * CHUNK if num_tokens >= 2 * ranks * CHUNK else each
    cut = [range(min(num_tokens, i * each), min(num_tokens, (i + 1) * each)) for i in range(2 * ranks)]
    return [cut[rank], cut[2 * ranks - 1 - rank]]


def rank_tokens(lengths: Sequence[int], rank: int, ranks: int) -> torch.Tensor:
    """Return the indices of a rank's tokens in packed texts of these lengths, int64, ascending."""
    found, start = [], 0
    for length in lengths:
        found += [start + i for piece in token_ranges(length, rank, ranks) for i in piece]
        start += length
    return torch.tensor(found, dtype=torch.int64)


def rank_part(rows: Tokens, rank: int, ranks: int) -> Tokens:
    """Return a rank's part of a batch. If some rank would get no tokens, the first rank gets all of them."""
    if ranks == 1 or rows.num_tokens == 0:
        return rows
    parts = [rank_tokens(rows.lengths, one, ranks) for one in range(ranks)]
    if not all(map(len, parts)):
        return rows.empty() if rank else rows
    return rows.select(parts[rank])


class ContextParallelCache:
    """A `Cache` of packed texts of which this rank has a part. Each layer gathers keys and values of all ranks."""

    compressed = True  # latents are smaller than keys and values
    chooses_keys = True

    def __init__(self, lengths: Sequence[int], operators: Operators, mesh: Mesh) -> None:
        self._lengths, self._causal, self._mesh = list(lengths), operators.causal_attention(), mesh
        ranks = mesh.context_size
        self._kept = [rank_tokens(lengths, rank, ranks) for rank in range(ranks)]
        self._mine = [token_ranges(length, mesh.context_rank, ranks) for length in lengths]
        starts = torch.cat([torch.arange(n) for n in lengths])
        self.positions = starts[self._kept[mesh.context_rank]].to(mesh.device)

    def attend(
        self,
        layer: int,
        q_NHA: torch.Tensor,
        k_NGA: torch.Tensor,
        v_NGB: torch.Tensor,
        scale: float | None = None,
        options: AttentionOptions | None = None,
    ) -> torch.Tensor:
        shared = v_NGB.untyped_storage().data_ptr() == k_NGA.untyped_storage().data_ptr()
        width = k_NGA.shape[-1]
        both = k_NGA if shared else torch.cat([k_NGA, v_NGB], -1)
        full: torch.Tensor = _AllGather.apply(both, self._kept, self._mesh)  # type: ignore[no-untyped-call]
        k = full[..., :width]
        v = full[..., : v_NGB.shape[-1]] if shared else full[..., width:]
        keys = full.new_empty(0)
        if options is not None and options.index is not None:
            keys = _AllGather.apply(options.index.k_TI, self._kept, self._mesh)  # type: ignore[no-untyped-call]
        outs, at, start = [], 0, 0
        for length, mine in zip(self._lengths, self._mine, strict=True):
            for piece in (one for one in mine if len(one)):
                seen = slice(start, start + piece.stop)
                q = q_NHA[at : at + len(piece)].transpose(0, 1)
                own = None if options is None else options.part(slice(at, at + len(piece)), keys[seen])
                o = self._causal(q, k[seen].transpose(0, 1), v[seen].transpose(0, 1), scale, piece.start, own)
                outs.append(o.transpose(0, 1))
                at += len(piece)
            start += length
        return torch.cat(outs)

    def recur(self, layer: int, inputs: Sequence[torch.Tensor], scan: Scan) -> torch.Tensor:
        """Raise `ConfigError`: recurrent layers need the state of all earlier tokens, which other ranks have."""
        raise ConfigError(
            "context parallelism is not possible for this model",
            f"layer {layer} is recurrent: each token needs the state after the tokens before it",
            hint="set learner.context_parallel = 1; data and expert parallelism are possible",
        )


class _AllGather(torch.autograd.Function):
    """All ranks' tokens in the order of the texts. Backward: the sum of all ranks' gradients of this rank's tokens."""

    @staticmethod
    def forward(ctx: Any, mine_N: torch.Tensor, kept: list[torch.Tensor], mesh: Mesh) -> torch.Tensor:
        ctx.kept, ctx.mesh = kept, mesh
        parts = [mine_N.new_empty(len(places), *mine_N.shape[1:]) for places in kept]
        mine_N = mine_N.contiguous()
        _all_to_all(parts, [mine_N] * mesh.context_size, mesh)
        full = mine_N.new_empty(sum(map(len, kept)), *mine_N.shape[1:])
        for places, part in zip(kept, parts, strict=True):
            full[places.to(full.device)] = part
        return full

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        kept, mesh = ctx.kept, ctx.mesh
        mine = kept[mesh.context_rank]
        sent = [gradient[places.to(gradient.device)].contiguous() for places in kept]
        parts = [gradient.new_empty(len(mine), *gradient.shape[1:]) for _ in kept]
        _all_to_all(parts, sent, mesh)
        total = parts[0].to(torch.promote_types(gradient.dtype, torch.float32))
        for part in parts[1:]:
            total = total + part
        return total.to(gradient.dtype), None, None


def _all_to_all(out: list[torch.Tensor], sent: Sequence[torch.Tensor], mesh: Mesh) -> None:
    """Send one tensor to each rank and receive one from each, with shapes known to all."""
    given = torch.cat([one.flatten() for one in sent]).view(torch.uint8)
    taken = torch.cat([one.flatten() for one in out]).view(torch.uint8)
    distributed.all_to_all_single(
        taken, given, [one.nbytes for one in out], [one.nbytes for one in sent], group=mesh.context
    )
    at = 0
    for one in out:
        one.copy_(taken[at : at + one.nbytes].view(one.dtype).view(one.shape))
        at += one.nbytes
