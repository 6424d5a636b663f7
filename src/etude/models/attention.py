"""Attention: the `Cache` interface, packed sequences, and the grouped-query attention layer.

A forward pass calls a `Cache` for attention. The engine has its own (keys and values in slots); training uses `Packed`.

A model may pass *compressed* keys and values (multi-head latent attention, arXiv 2405.04434, in the absorbed form): one
key head for all queries, values that are the first numbers of the keys, and a softmax scale other than 1/√width.
`ModelConfig.cache_layout` says so, so that a cache stores such values once.

Shapes: N tokens of the forward pass, D width, H query heads, G key/value heads, A key width, B value width."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from etude.errors import ConfigError
from etude.models.components import GroupedQueries, QkNorm
from etude.models.config import ModelConfig
from etude.models.hooks import ForwardHook
from etude.models.rope import Rope
from etude.numerics.delta_rule import Segments
from etude.numerics.exact.options import AttentionOptions
from etude.numerics.operators import Operators
from etude.numerics.parallel import SINGLE_RANK, Parallel

States = tuple[torch.Tensor, ...]
"""What a recurrent layer keeps of S sequences, [S, ...] each: for a gated delta layer the shapes of `state_shapes`."""
Scan = Callable[[Sequence[torch.Tensor], States | None, Segments], tuple[torch.Tensor, States]]
"""(inputs of N tokens, states before the segments or None at the beginning of a sequence, segments) -> (outputs [N,
...], states after the segments)."""


class Cache(Protocol):
    """Positions of the N tokens of one forward pass, and attention over the keys and values that they may see.

    An engine or a trainer makes one for each forward pass, and `Transformer.run` calls it."""

    @property
    def positions(self) -> torch.Tensor:
        """int64 [N]: each token's position in its sequence."""

    @property
    def compressed(self) -> bool:
        """Whether a model with latent attention should pass latents to `attend`, instead of the keys and values that
        are computed from them."""

    @property
    def chooses_keys(self) -> bool:
        """Whether `attend` may leave out keys that an indexer (`AttentionOptions.index`) does not choose."""

    def attend(
        self,
        layer: int,
        q_NHA: torch.Tensor,
        k_NGA: torch.Tensor,
        v_NGB: torch.Tensor,
        scale: float | None = None,
        options: AttentionOptions | None = None,
    ) -> torch.Tensor:
        """Store the tokens' keys and values for this layer, attend causally, and return the output o_NHB.

        Weights are softmax(scale · q·k); `scale` None means 1/√A. With `ModelConfig.cache_layout.shared` and
        `compressed`, v is a view of the first B numbers of k. H are query heads, G key/value heads, A and B the widths
        of keys and values. `options`: a sliding window and sinks, in layers that have them."""

    def recur(self, layer: int, inputs: Sequence[torch.Tensor], scan: Scan) -> torch.Tensor:
        """Compute a recurrent layer, from the states of the tokens' sequences, and store the states after the tokens.

        `inputs`: tensors with a row for each of the N tokens. Returns the outputs, [N, ...]."""


class Packed:
    """A `Cache` for several full sequences, packed one after another. Each sequence attends only to itself.

    Nothing is stored, and a sequence's results do not depend on its neighbours or on padding. `lengths`: tokens of each
    sequence. `operators`: the operators of the model. `device`: the device of the tokens.

    >>> from etude.numerics import Native
    >>> Packed([2, 3], Native()).positions.tolist()
    [0, 1, 0, 1, 2]
    """

    compressed = False  # nothing is stored, and products of narrow heads cost less
    chooses_keys = True

    def __init__(self, lengths: Sequence[int], operators: Operators, *, device: torch.device | str = "cpu") -> None:
        if not lengths or min(lengths) < 1:
            raise ValueError(f"lengths of packed sequences must be at least 1, not {list(lengths)[:8]}")
        self.lengths = list(lengths)
        self._segments = Segments(self.lengths, device)
        self._attend = operators.packed_attention(self.lengths, torch.device(device))
        self.positions = torch.cat([torch.arange(n) for n in self.lengths]).to(device)

    def attend(
        self,
        layer: int,
        q_NHA: torch.Tensor,
        k_NGA: torch.Tensor,
        v_NGB: torch.Tensor,
        scale: float | None = None,
        options: AttentionOptions | None = None,
    ) -> torch.Tensor:
        return self._attend(q_NHA, k_NGA, v_NGB, scale, options)

    def recur(self, layer: int, inputs: Sequence[torch.Tensor], scan: Scan) -> torch.Tensor:
        return scan(inputs, None, self._segments)[0]


MOST_COPIES = 8
"""Each path attends to a copy of its keys and values. Where these copies have more than this many times the tokens of a
tree, they are not stored for the backward pass but made again, with the attention, so that memory stays bounded."""


@dataclass(frozen=True)
class Branch:
    """The tokens that one path adds to a tree of token sequences.

    They are `length` tokens, after `start` tokens that the path shares with an earlier one. `seen`: the numbers of the
    pieces of the tree that form the path, in order; the last pieces are the new tokens."""

    start: int
    length: int
    seen: tuple[int, ...]


class PackedTree:
    """A `Cache` for sequences with common beginnings, which are computed only once. A token attends to its own
    sequence.

    Each sequence (a path in a tree) gets the results that it would have alone, with exact operators the same bits.
    `pieces`: the number of tokens in each piece of the tree, between two places where paths part. `branches`: how the
    pieces form paths.

    >>> from etude.numerics import Native
    >>> PackedTree([2, 1, 2], [Branch(0, 3, (0, 1)), Branch(2, 2, (0, 2))], Native()).positions.tolist()
    [0, 1, 2, 2, 3]
    """

    compressed = False  # as in `Packed`
    chooses_keys = True

    def __init__(
        self,
        pieces: Sequence[int],
        branches: Sequence[Branch],
        operators: Operators,
        *,
        device: torch.device | str = "cpu",
    ) -> None:
        self._pieces, self._branches, self._causal = list(pieces), list(branches), operators.causal_attention()
        self._own = [branch.length for branch in branches]
        copied = sum(branch.start + branch.length for branch in branches)
        self._copy_again = copied > MOST_COPIES * sum(self._own)
        ranges = [torch.arange(branch.start, branch.start + branch.length) for branch in branches]
        self.positions = torch.cat(ranges).to(device)
        self._levels: list[_Level] | None = None  # found when a recurrent layer asks for them

    def attend(
        self,
        layer: int,
        q_NHA: torch.Tensor,
        k_NGA: torch.Tensor,
        v_NGB: torch.Tensor,
        scale: float | None = None,
        options: AttentionOptions | None = None,
    ) -> torch.Tensor:
        q_parts = torch.split(q_NHA.transpose(0, 1), self._own, 1)
        k_parts, v_parts = (torch.split(t.transpose(0, 1), self._pieces, 1) for t in (k_NGA, v_NGB))
        outs = []
        for q, branch, own in zip(q_parts, self._branches, self._options(options), strict=True):
            seen = [parts[i] for parts in (k_parts, v_parts) for i in branch.seen]
            if self._copy_again and torch.is_grad_enabled():
                given = (branch, scale, own, q, *seen)
                one = checkpoint(self._one, *given, use_reentrant=False, preserve_rng_state=False)
            else:
                one = self._one(branch, scale, own, q, *seen)
            outs.append(one)
        return torch.cat(outs, 1).transpose(0, 1)

    def recur(self, layer: int, inputs: Sequence[torch.Tensor], scan: Scan) -> torch.Tensor:
        if self._levels is None:
            self._levels = _levels(self._pieces, self._branches, self.positions.device)
        outs: list[torch.Tensor] = []
        states: States | None = None
        for level in self._levels:
            before = None if states is None else tuple(one.index_select(0, level.parents) for one in states)
            out, states = scan([x.index_select(0, level.rows) for x in inputs], before, level.segments)
            outs.append(out)
        return torch.cat(outs).index_select(0, torch.cat([level.rows for level in self._levels]).argsort())

    def _options(self, options: AttentionOptions | None) -> Sequence[AttentionOptions | None]:
        """Return the options of each branch."""
        if options is None or options.index is None:
            return [options] * len(self._branches)
        keys = torch.split(options.index.k_TI, self._pieces)
        rows = [slice(stop - n, stop) for stop, n in zip(accumulate(self._own), self._own, strict=True)]
        branches = zip(rows, self._branches, strict=True)
        return [options.part(own, torch.cat([keys[i] for i in branch.seen])) for own, branch in branches]

    def _one(
        self,
        branch: Branch,
        scale: float | None,
        options: AttentionOptions | None,
        q: torch.Tensor,
        *seen: torch.Tensor,
    ) -> torch.Tensor:
        k, v = torch.cat(seen[: len(branch.seen)], 1), torch.cat(seen[len(branch.seen) :], 1)
        return self._causal(q, k, v, scale, branch.start, options)


@dataclass(frozen=True)
class _Level:
    """The pieces of a tree that have the same number of pieces before them.

    `rows`: int64, their tokens, one piece after another. `parents`: int64, for each of them the piece before it, by its
    place in the level above."""

    rows: torch.Tensor
    parents: torch.Tensor
    segments: Segments


def _levels(pieces: Sequence[int], branches: Sequence[Branch], device: torch.device) -> list[_Level]:
    parents = {piece: before for branch in branches for before, piece in pairwise((-1, *branch.seen))}
    starts, found, above = [*accumulate(pieces, initial=0)], list[_Level](), [-1]
    while own := [piece for piece in parents if parents[piece] in above]:
        rows = torch.cat([torch.arange(starts[piece], starts[piece + 1]) for piece in own])
        places = torch.tensor([above.index(parents[piece]) for piece in own])
        found.append(_Level(rows.to(device), places.to(device), Segments([pieces[piece] for piece in own], device)))
        above = own
    return found


class AttentionLayer(Protocol):
    """The interface of an attention layer of a `Transformer`; it is also an `nn.Module`."""

    def __call__(self, x_ND: torch.Tensor, rope: Rope, cache: Cache, layer: int, hook: ForwardHook) -> torch.Tensor:
        """Return the layer's contribution to the residual stream, [N, D].

        `rope`: cosine and sine of the tokens. `layer`: the layer's index, for the cache. `hook`: called with each
        operator's name and result."""

    def views(self) -> dict[str, torch.Tensor]:
        """Return each weight as a view into the parameters.

        The names are those of `components.AttentionKind.shapes`."""

    def matrices(self) -> dict[str, list[int]]:
        """Return the parameters that the Muon optimiser updates: a dict from the name to the row counts of the
        parameter's matrices.

        A parameter may consist of several matrices, stacked along the rows."""


class Attention(nn.Module):
    """Grouped-query attention with RoPE, on all of a head's query and key or on their first part.

    Queries and keys are RMS-normalised as `GroupedQueries.qk_norm` says. Layers may have a sliding window and sinks."""

    def __init__(self, c: ModelConfig, operators: Operators, parallel: Parallel = SINGLE_RANK) -> None:
        super().__init__()
        kind = c.attention
        assert isinstance(kind, GroupedQueries)
        self.operators, self.parallel, self.qk_norm = operators, parallel, kind.qk_norm
        self.heads, self.kv_heads, self.head_dim, self.eps = c.num_heads, c.num_kv_heads, c.head_dim, c.rms_eps
        self.gated, self.centred = kind.gated, c.architecture.centred_norms
        self.rows = [
            c.num_heads * (1 + kind.gated) * c.head_dim,
            c.num_kv_heads * c.head_dim,
            c.num_kv_heads * c.head_dim,
        ]
        self.qkv = nn.Parameter(torch.empty(sum(self.rows), c.hidden_size))
        self.bias = nn.Parameter(torch.zeros(self.qkv.shape[0])) if kind.bias else None  # of queries, keys, values
        self.out = nn.Parameter(torch.empty(c.hidden_size, c.num_heads * c.head_dim))
        self.out_bias = nn.Parameter(torch.zeros(c.hidden_size)) if kind.out_bias else None
        self.sinks = nn.Parameter(torch.zeros(c.num_heads)) if kind.sinks else None
        self.windows = dict.fromkeys(c.sliding_layers, c.sliding_window)
        if (self.windows or kind.sinks) and not operators.has_attention_options:
            raise ConfigError(
                f"a model of family {c.family} cannot be computed with {operators.name}",
                "these operators have no sliding windows and no attention sinks",
                hint="use a CPU",
            )
        norms = kind.norms(c)
        first = torch.zeros if self.centred else torch.ones
        self.q_norm = nn.Parameter(first(norms["q_norm"])) if norms else None
        self.k_norm = nn.Parameter(first(norms["k_norm"])) if norms else None

    def forward(self, x_ND: torch.Tensor, rope: Rope, cache: Cache, layer: int, hook: ForwardHook) -> torch.Tensor:
        """Return the outputs of N tokens, [N, D] like the inputs; their keys and values are put into the cache."""
        n, h, g, a = len(x_ND), self.heads, self.kv_heads, self.head_dim
        ops, parallel = self.operators, self.parallel
        qkv = parallel.column_parallel(ops, x_ND, self.qkv)
        qkv = hook("attention.qkv", qkv if self.bias is None else qkv + self.bias.to(qkv.dtype))
        gate = None
        if self.gated:
            both, kv = torch.split(qkv, [self.rows[0], sum(self.rows[1:])], -1)
            q, gate = both.view(n, h, 2, a).unbind(2)
            qkv = torch.cat([q.flatten(1), kv], -1)
        qk, v = torch.split(qkv.view(n, h + 2 * g, a), [h + g, g], 1)
        if self.q_norm is not None and self.k_norm is not None:
            qk = hook("attention.qk_norm", self._normed(qk, self.q_norm, self.k_norm))
        q, k = torch.split(hook("attention.rotated", self._rotated(qk, rope)), [h, g], 1)
        window, sinks = self.windows.get(layer), self.sinks
        options = () if window is None and sinks is None else (None, AttentionOptions(window, sinks))
        o = hook("attention.attended", cache.attend(layer, q, k, v, *options).reshape(n, h * a))
        if gate is not None:
            o = hook("attention.gated", (o * ops.elementwise(torch.sigmoid, gate.flatten(1))).to(o.dtype))
        y = parallel.row_parallel(ops, o, self.out, "attention.out")
        return hook("attention.out", y if self.out_bias is None else y + self.out_bias.to(y.dtype))

    def _rotated(self, qk: torch.Tensor, rope: Rope) -> torch.Tensor:
        """Return queries and keys after RoPE, [N, H + G, A]. Numbers beyond the width of `rope` stay as they are."""
        width = rope.cos.shape[-1]
        turned = self.operators.rotate(qk[..., :width], rope.cos, rope.sin)
        return turned if width == self.head_dim else torch.cat([turned, qk[..., width:]], -1)

    def _normed(self, qk: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        """Return queries and keys after their norms, [N, H + G, A]."""
        ops, parts = self.operators, [self.heads, self.kv_heads]
        if self.qk_norm is QkNorm.WIDTH:
            wide = zip(torch.split(qk, parts, 1), weights, strict=True)
            return torch.cat([ops.rms_norm(x.flatten(1), w, self.eps).view_as(x) for x, w in wide], 1)
        norms = (self.parallel.copy_to_ranks(ops, weight) for weight in weights)
        if self.centred:
            each = zip(torch.split(qk, parts, 1), norms, strict=True)
            return torch.cat([ops.centred_rms_norm(x, norm, self.eps) for x, norm in each], 1)
        scale = torch.cat([norm.expand(n, self.head_dim) for norm, n in zip(norms, parts, strict=True)]).to(qk.dtype)
        return ops.rms_norm(qk, None, self.eps) * scale

    def views(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for part, fused in (("weight", self.qkv), ("bias", self.bias)):
            if fused is not None:
                parts = zip("qkv", torch.split(fused, self.rows), strict=True)
                found |= {f"{letter}_proj.{part}": view for letter, view in parts}
        found["o_proj.weight"] = self.out
        others = {"o_proj.bias": self.out_bias, "sinks": self.sinks}
        others |= {"q_norm.weight": self.q_norm, "k_norm.weight": self.k_norm}
        return found | {name: other for name, other in others.items() if other is not None}

    def matrices(self) -> dict[str, list[int]]:
        return {"qkv": [self.head_dim] * (self.qkv.shape[0] // self.head_dim), "out": [self.out.shape[0]]}
