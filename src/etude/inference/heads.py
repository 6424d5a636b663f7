"""Drafts by a model's multi-token prediction heads (`models.mtp`), for speculative decoding on a CPU.

A head needs the trunk's outputs, and keys and values of its own, at all positions before. Both are kept by slot:

- The residual stream of each computed position, `num_slots` × `context_tokens` × width numbers.
- The heads' keys and values, as further layers of the engine's KV cache. They are computed when a sequence is drafted,
  for all positions since it last was. So steps without drafts cost a copy of the stream, and no more.

A position of a head counts as computed once all of its tokens are part of the sequence. Entries that were computed from
drafts are computed again, so nothing of a rejected draft stays.

Draft j of a sequence is drawn from head j's distribution with the random number of its position: the same number with
which the token itself is drawn. Where the distributions are equal, so are the tokens. Behind its last head a model goes
on with that head, as vLLM does with models of one head.

Shapes: N rows, D width."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import torch

from etude.inference.kv import I64, KVCache, Span, StepCache, lazy_zeros
from etude.inference.scheduler import Sequence
from etude.models import Transformer
from etude.models.mtp import apply_head, head_logits, trunk_output
from etude.numerics.sampling import sample

CATCH_UP = 256  # positions of a sequence that one step computes at most without drafting it


@dataclass(frozen=True, slots=True)
class _Rows:
    """Positions from `start` on of a slot, as one head computes them. `before`: outputs of the head before, or of the
    trunk, [N, D]. `token_ids`: the token that the head gets at each position."""

    slot: int
    start: int
    before: torch.Tensor
    token_ids: list[int]


@dataclass(slots=True)
class _Drafted:
    """A sequence while it is drafted. `first`: the first position that heads compute. `token_ids`: its tokens from
    `first` + 1 on, then its drafts. `outputs`: the latest outputs, of a head or of the trunk, [N, D]."""

    sequence: Sequence
    most: int
    first: int
    token_ids: list[int]
    outputs: torch.Tensor

    def rows(self, step: int, num_heads: int) -> _Rows:
        """Return what the head of a step computes: all missing positions; behind the last head, one more position."""
        if step < num_heads:
            num = self.sequence.num_computed - self.first
            return _Rows(self.sequence.row, self.first, self.outputs, self.token_ids[step : step + num])
        start = self.sequence.num_computed + step - num_heads
        return _Rows(self.sequence.row, start, self.outputs[-1:], self.token_ids[-1:])


class Heads:
    """Drafts tokens with the MTP heads of the model of an engine.

    `kv`: the engine's cache, with a further layer for each head. `num_slots`, `context_tokens`: as in `Runner`."""

    def __init__(self, model: Transformer, kv: KVCache, *, num_slots: int, context_tokens: int) -> None:
        self._model, self._kv, self._num = model, kv, len(model.mtp)
        self._streams = lazy_zeros((num_slots, context_tokens, model.config.hidden_size), model.operators.dtype)
        self._done: I64 = np.zeros((num_slots, self._num), np.int64)  # leading positions with keys of each head
        self.caught_up = False
        """Whether the last call of `draft_all` computed many positions that were left out before, which takes long."""

    def keep(self, slots: I64, positions: I64, stream_ND: torch.Tensor) -> None:
        """Keep the residual stream of N computed rows, which are at these positions of these slots."""
        self._streams[torch.from_numpy(slots), torch.from_numpy(positions)] = stream_ND.to(self._streams.dtype)

    def copy(self, source: int, target: int, stop: int) -> None:
        """Copy what belongs to positions [0, stop) of slot `source` to slot `target`. The KV cache copies its part."""
        self._streams[target, :stop] = self._streams[source, :stop]
        self._done[target] = self._done[source]
        self.cut(target, stop)

    def cut(self, slot: int, start: int) -> None:
        """Record that the tokens of a slot from position `start` on are others than before."""
        for number in range(self._num):  # head k at position i has seen token i + k + 1
            self._done[slot, number] = min(self._done[slot, number], max(0, start - number - 1))

    @torch.inference_mode()
    def draft_all(self, wanted: Many[tuple[Sequence, int]]) -> list[list[int]]:
        """Return drafts of the next tokens of decoding sequences, in the same order.

        `wanted`: sequences, each with the number of its drafts, at least 1. A sequence with more than `CATCH_UP`
        positions that a head has not computed gets none: some of these positions are computed now."""
        self.caught_up = False
        begun = [self._begun(sequence, most) for sequence, most in wanted]
        going = [one for one in begun if one is not None]
        for step in range(max((one.most for one in going), default=0)):
            going = [one for one in going if one.most > step]
            self._draft_one(going, step)
        return [[] if one is None else one.token_ids[-one.most :] for one in begun]

    def _begun(self, sequence: Sequence, most: int) -> _Drafted | None:
        used, num, row = min(most, self._num), sequence.num_computed, sequence.row
        first = min(int(self._done[row, :used].min()), num - 1)
        self.caught_up |= num - first > CATCH_UP // 8
        if num - first > CATCH_UP + self._num:
            self._catch_up(sequence, first, used)
            return None
        self._done[row, :used] = np.maximum(num - np.arange(used), 0)
        outputs = trunk_output(self._model, self._streams[row, first:num])
        return _Drafted(sequence, most, first, _tokens(sequence, first + 1, num + 1), outputs)

    def _catch_up(self, sequence: Sequence, first: int, used: int) -> None:
        """Compute `CATCH_UP` positions with the first `used` heads."""
        stop, row = first + CATCH_UP, sequence.row
        outputs = trunk_output(self._model, self._streams[row, first:stop])
        for number in range(used):
            token_ids = _tokens(sequence, first + number + 1, stop + number + 1)
            [outputs] = self._compute(number, [_Rows(row, first, outputs, token_ids)])
            self._done[row, number] = stop

    def _draft_one(self, going: list[_Drafted], step: int) -> None:
        """Draft one more token of each sequence."""
        outputs = self._compute(min(step, self._num - 1), [one.rows(step, self._num) for one in going])
        logits = head_logits(self._model, torch.cat([some[-1:] for some in outputs]))
        samplings = [one.sequence.request.sampling for one in going]
        positions = [one.sequence.num_computed + 1 + step for one in going]
        temperatures, seeds = [a.temperature for a in samplings], [a.seed for a in samplings]
        tokens, _ = sample(logits, temperatures, seeds, positions, self._model.operators)
        for one, some, token in zip(going, outputs, tokens.tolist(), strict=True):
            one.outputs = some
            one.token_ids.append(token)

    def _compute(self, number: int, parts: Many[_Rows]) -> list[torch.Tensor]:
        """Compute one head for several slots. Returns its outputs for each of them, [N, D]."""
        single = sorted((p for p in parts if len(p.token_ids) == 1), key=attrgetter("slot"))
        ordered = [*single, *(p for p in parts if len(p.token_ids) > 1)]
        slots, starts = (np.array([getattr(p, name) for p in single], np.int64) for name in ("slot", "start"))
        spans = [Span(p.slot, p.start, p.start + len(p.token_ids)) for p in ordered[len(single) :]]
        following = torch.tensor([token for p in ordered for token in p.token_ids])
        before = torch.cat([p.before for p in ordered])
        done, _ = apply_head(self._model, number, before, following, StepCache(self._kv, slots, starts, spans))
        found = dict(
            zip((p.slot for p in ordered), torch.split(done, [len(p.token_ids) for p in ordered]), strict=True)
        )
        return [found[p.slot] for p in parts]


def _tokens(sequence: Sequence, start: int, stop: int) -> list[int]:
    """Return the tokens of a sequence, prompt included, at positions [start, stop)."""
    num, prompt = sequence.num_prompt, sequence.request.prompt_ids
    return [*prompt[start:stop].tolist(), *sequence.token_ids[max(0, start - num) : max(0, stop - num)]]
