"""Inserts hints (texts that tell the model what a turn did wrong) as tokens into the contexts of their turns.

A hint is appended to the message before the turn, which is one of the user or of a tool. A separate message would
follow another message of the same role, which many chat templates refuse. Of the chat format this module needs only the
encoding of text, and the tokens that follow the text of a message (`HintFormat`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from etude.records.reward import Hint
from etude.records.rollout import Path, Trace
from etude.records.sample import PlacedHint
from etude.records.wire import I32


@dataclass(frozen=True)
class HintFormat:
    """How a hint is written as tokens.

    - `encode`: encodes text as token ids, [T] int32.
    - `message_ends`: the tokens between the text of a message and the reply of the model, each [E] int32: one sequence
      for messages of the user, one for those of a tool. The longest comes first.
    - `context_tokens`: the largest number of tokens in a context, with the hint and the turn."""

    encode: Callable[[str], I32]
    message_ends: tuple[I32, ...]
    context_tokens: int

    def place(self, hint: Hint, path: Path, trace: Trace, chain: Sequence[int]) -> PlacedHint | None:
        """Return the tokens of a hint and their position in a path. `chain`: indices in `trace.turns` of its turns.

        Returns None if the hint's turn is not in the path or has no token with loss in it, if the context with the hint
        is too long, or if the prompt of the turn ends with none of `message_ends`."""
        if hint.turn not in chain:
            return None
        before = [trace.turns[at] for at in chain[: chain.index(hint.turn)]]
        turn = trace.turns[hint.turn]
        start = sum(len(one.prompt_ids) + len(one.completion.token_ids) for one in before) + len(turn.prompt_ids)
        stop, prompt_ids = start + len(turn.completion.token_ids), turn.prompt_ids
        ends = (len(one) for one in self.message_ends if np.array_equal(prompt_ids[-len(one) :], one))
        at = start - next(ends, start)
        token_ids = self.encode("\n" + hint.text)
        if at == 0 or not path.mask[start:stop].any() or stop + len(token_ids) > self.context_tokens:
            return None
        return PlacedHint(at=at, stop=stop, token_ids=token_ids, weight=hint.weight)
