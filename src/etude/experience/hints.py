"""Places hints as tokens into the contexts of the turns that they are for.

A hint becomes the end of the message before the turn, where the text of the user or of a tool ends. So it needs no
message of its own, which many chat templates would refuse there. This module knows a chat format only by two facts: how
text is encoded, and which tokens follow the text of a message."""

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

    - `encode`: text as token ids, [T] int32.
    - `message_ends`: the tokens between the text of a message and the reply of the model, each [E] int32, the longest
      first: after a message of the user, and after one of a tool.
    - `context_tokens`: the most tokens of a context, the hint and the turn included."""

    encode: Callable[[str], I32]
    message_ends: tuple[I32, ...]
    context_tokens: int

    def place(self, hint: Hint, path: Path, trace: Trace, chain: Sequence[int]) -> PlacedHint | None:
        """Return the tokens of a hint and their place in a path, whose turns are `chain`.

        None if the turn is not in the path or has no token with loss there, if the hinted context is too long, or if
        the turn's prompt does not end as that of a reply to a message does."""
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
