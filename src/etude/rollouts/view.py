"""Makes the text of a rollout's turns from their tokens, for the command line, reports and evaluations."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from etude.records.rollout import Trace
from etude.records.sample import Sample
from etude.records.view import Trained, TurnTokens, TurnView
from etude.records.wire import F32, I32

_REPLY_BEGINS = re.compile(r"\n?\[(\w+)\][ \n]?(assistant|model)?\s*$")  # as templates begin the model's message


class ReadableChat(Protocol):
    """A chat format that shows tokens as text. `etude.harness.ChatFormat` is one."""

    def readable(self, ids: Iterable[int]) -> str:
        """Return tokens as text, one message per line with its role."""
        ...


class TokenChat(Protocol):
    """A chat format that shows single tokens as text. `etude.harness.ChatFormat` is one."""

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Return tokens as text, special tokens too with `special`."""
        ...


def turn_tokens(
    trace: Trace, chat: TokenChat, turn: int, samples: Sequence[tuple[int, Sample]] = (), *, start: int, stop: int
) -> TurnTokens:
    """Return the sampled tokens [start, stop) of a turn, with what a step trained of them.

    `samples`: pairs (number of the last turn of the path, sample). Limits beyond the turn's tokens are cut."""
    done = trace.turns[turn].completion
    num = len(done.token_ids)
    start, stop = max(0, min(start, num)), max(0, min(stop, num))
    trained, given = np.zeros(num, bool), np.zeros(num, np.float32)  # [T] of the turn's completion
    for leaf, sample in samples:
        own = _of_turn(trace, leaf, sample, turn)
        if own is not None:
            mask, advantages = own
            given = np.where(mask, advantages, given)
            trained |= mask
    steps = [span.version.step for span in done.spans for _ in range(span.num_tokens)]
    steps_or_none: list[int | None] = [*steps[:num], *[None] * (num - len(steps))]
    part = slice(start, stop)
    return TurnTokens(
        turn=turn,
        start=start,
        num_tokens=num,
        texts=tuple(chat.decode([token], special=True) for token in done.token_ids[part].tolist()),
        logprobs=tuple(done.logprobs[part].tolist()),
        steps=tuple(steps_or_none[part]),
        trained=tuple(trained[part].tolist()),
        advantages=tuple(
            value if is_trained else None
            for value, is_trained in zip(given[part].tolist(), trained[part].tolist(), strict=True)
        ),
    )


def _of_turn(trace: Trace, leaf: int, sample: Sample, turn: int) -> tuple[NDArray[np.bool_], F32] | None:
    """Return mask and advantages, [T], of the completion of a turn in a sample; None if its path lacks the turn."""
    mask, end = sample.path.mask, 0
    given = np.zeros(len(mask), np.float32)
    given[mask] = sample.advantages
    for at in trace.chain(leaf):
        begin = end + len(trace.turns[at].prompt_ids)
        end = begin + len(trace.turns[at].completion.token_ids)
        if at == turn:
            return mask[begin:end], given[begin:end]
    return None


def view_turns(
    trace: Trace, chat: ReadableChat, samples: Sequence[tuple[int, Sample]] = (), *, first_row: int = 0
) -> tuple[TurnView, ...]:
    """Return the turns of a trace as text, with the tokens and advantages that a step trained on.

    `samples`: pairs (number of the last turn of the path, sample), in the order of the batch. `first_row`: the position
    of the first sample in the batch."""
    trained: dict[int, list[Trained]] = {}
    for row, (leaf, sample) in enumerate(samples, first_row):
        for at, one in _trained(trace, leaf, sample, row):
            trained.setdefault(at, []).append(one)
    found, contexts, seen = list[TurnView](), list[int](), dict[tuple[int | None, bytes], int]()
    for number, turn in enumerate(trace.turns):
        done = turn.completion
        before = 0 if turn.parent is None else contexts[turn.parent]
        prompt, reply = _texts(chat, turn.prompt_ids, done.token_ids)
        key = (turn.parent, turn.prompt_ids.tobytes())
        found.append(
            TurnView(
                number=number,
                parent=turn.parent,
                kind=turn.kind,
                start=turn.start,
                prompt=prompt,
                reply=reply,
                num_new=len(turn.prompt_ids),
                num_prompt=before + len(turn.prompt_ids),
                num_sampled=len(done.token_ids),
                num_cached=None if turn.start is None and not done.num_cached else done.num_cached,
                stop_reason=str(done.stop_reason),
                engine=done.engine,
                steps=tuple(dict.fromkeys(span.version.step for span in done.spans if span.num_tokens)),
                same_prompt=seen.get(key),
                num_malformed=sum(call.malformed for call in turn.calls),
                trained=tuple(trained.get(number, ())),
            )
        )
        seen.setdefault(key, number)
        contexts.append(before + len(turn.prompt_ids) + len(done.token_ids))
    return tuple(found)


def _trained(trace: Trace, leaf: int, sample: Sample, row: int) -> Iterable[tuple[int, Trained]]:
    """Yield (turn, what was trained of it) of each turn of a sample that has loss."""
    mask, end = sample.path.mask, 0
    given = np.zeros(len(mask), np.float32)
    given[mask] = sample.advantages
    for at in trace.chain(leaf):
        begin, end = end, end + len(trace.turns[at].prompt_ids) + len(trace.turns[at].completion.token_ids)
        own = given[begin:end][mask[begin:end]]
        if len(own):
            yield at, Trained(row=row, num_tokens=len(own), low=float(own.min()), high=float(own.max()))


def _texts(chat: ReadableChat, prompt_ids: I32, token_ids: I32) -> tuple[str, str]:
    """Return the text of the new messages and of the reply, which takes the role that ends the prompt."""
    prompt, reply, role = chat.readable(prompt_ids), chat.readable(token_ids), ""
    if begins := _REPLY_BEGINS.search(prompt):
        prompt, role = prompt[: begins.start()], f"[{begins[2] or begins[1]}] "
    return prompt.strip("\n"), reply if reply.startswith("[call] ") or not reply else role + reply
