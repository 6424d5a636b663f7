"""Stop texts of requests: cuts a completion off at one, in whole tokens.

A client that gives a stop text gets the text before it, and repeats only that text in its next request. So only the
tokens before the stop text stay in the conversation. The tokens of the stop text itself were sampled too, and are
trained on: writing it ended the turn. Tokens after the stop text had no effect and are dropped."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from etude.capture.chat import Chat
from etude.records.completion import Completion, StopReason

_THOUGHT = "</think>"


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """A completion that a stop text cuts off.

    - `text`: the text that the client gets, which ends before `stop_text`.
    - `kept`: the tokens before the one with which the stop text begins. They stay in the conversation.
    - `tail`: the tokens from there to the end of the stop text.
    - `rest`: the characters before the stop text that the first token of `tail` contains; mostly ""."""

    text: str
    stop_text: str
    kept: Completion
    tail: Completion
    rest: str


def cut_at_stop(chat: Chat, completion: Completion, reply: str, stops: Sequence[str], *, num_prompt: int) -> Cut | None:
    """Return how the first stop text in a completion cuts it off; None if the completion contains none of `stops`.

    `reply`: the text of the completion that the client would get, without reasoning and calls. `num_prompt`: the number
    of tokens of the prompt."""
    begin, stop = min(((at, s) for s in stops if (at := reply.find(s)) >= 0), default=(-1, ""))
    if begin < 0:
        return None
    ids, until = completion.token_ids.tolist(), reply[: begin + len(stop)]
    whole = chat.decode(ids)
    at = max(whole.find(until, max(0, whole.find(_THOUGHT))), whole.find(until))
    if at < 0:
        return None
    text, begin, end = reply[:begin], at + begin, at + len(until)

    def length(n: int) -> int:
        return len(chat.decode(ids[:n]))

    num_sampled = bisect.bisect_left(range(len(ids)), end, key=length)
    while not chat.decode(ids[:num_sampled]).startswith(whole[:end]):  # in the middle of a character
        num_sampled += 1
    num_kept = bisect.bisect_right(range(num_sampled), begin, key=length) - 1
    while len(before := chat.decode(ids[:num_kept])) > begin or not whole.startswith(before):
        num_kept -= 1
    known = completion.routes_start  # a completion has routes up to the position that predicts its last token
    middle, last = num_prompt + num_kept - 1, num_prompt + num_sampled - 1
    kept = _part(completion, 0, num_kept, routes=(min(known, middle), middle))
    tail = _part(completion, num_kept, num_sampled, routes=(min(max(known, middle), last), last))
    return Cut(text, stop, kept, tail, whole[len(before) : begin])


def _part(completion: Completion, start: int, stop: int, *, routes: tuple[int, int]) -> Completion:
    """Return the sampled tokens from `start` to before `stop` as a completion, with the routes of these positions."""
    spans, at, known = [], 0, completion.routes_start
    for span in completion.spans:
        num = min(at + span.num_tokens, stop) - max(at, start)
        if num > 0 or at == start == 0:  # the first one has the oldest version, even if it sampled nothing
            spans.append(msgspec.structs.replace(span, num_tokens=max(0, num)))
        at += span.num_tokens
    return msgspec.structs.replace(
        completion,
        token_ids=completion.token_ids[start:stop],
        logprobs=completion.logprobs[start:stop],
        routes=completion.routes[max(0, routes[0] - known) : max(0, routes[1] - known)],
        routes_start=routes[0],
        spans=tuple(spans),
        stop_reason=StopReason.LENGTH,
        top_ids=completion.top_ids[start:stop],
        top_logprobs=completion.top_logprobs[start:stop],
    )
