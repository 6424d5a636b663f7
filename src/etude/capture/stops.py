"""Ends a completion at a stop text (a stop sequence of the request), and cuts it off there, in whole tokens.

A client that gives a stop text gets the text before it, and repeats only that text in its next request. So only the
tokens before the stop text stay in the conversation. The tokens of the stop text itself were sampled too, and are
trained on: writing it ended the turn. A request is ended when its stop text has appeared (`stop_watch`). The few tokens
that were sampled until then had no effect and are dropped."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import msgspec

from etude.capture.chat import Chat
from etude.capture.streams import StreamedText, first_stop
from etude.errors import ContextFull, EngineError, MalformedRequest
from etude.records.completion import Completion, CompletionRequest, StopReason
from etude.seams import Policy, stream_or_complete

_THOUGHT = "</think>"


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """A completion that a stop text cuts off.

    - `text`: the text that the client gets, which ends before `stop_text`. `reasoning`: the reasoning before the text.
    - `sampled`: the tokens up to the end of the stop text, which are `kept` and `tail`.
    - `kept`: the tokens before the one with which the stop text begins. They stay in the conversation.
    - `tail`: the tokens from there to the end of the stop text.
    - `rest`: the characters of the first token of `tail` that come before the stop text; usually ""."""

    text: str
    reasoning: str
    stop_text: str
    sampled: Completion
    kept: Completion
    tail: Completion
    rest: str


def stop_watch(chat: Chat, stops: Sequence[str], *, in_reasoning: bool | None) -> Callable[[list[int]], bool] | None:
    """Return a function that takes a completion's new token ids, and returns whether a stop text has appeared so far.

    Stop texts in reasoning, in tool calls and after tool calls do not count. `in_reasoning` is what `Chat.in_reasoning`
    returns for the prompt. Without `stops`, None is returned."""
    text = StreamedText(chat, stops, in_reasoning=in_reasoning)

    def enough(ids: list[int]) -> bool:
        text.add(ids)
        return bool(text.stop_text)

    return enough if stops else None


async def complete_until_stop(
    policy: Policy, request: CompletionRequest, chat: Chat, stops: Sequence[str], *, in_reasoning: bool | None
) -> Completion:
    """Sample a completion as `policy.complete` does, and end it when one of `stops` has appeared.

    If the engine fails after the first token, the request is sent again. For the other arguments see `stop_watch`."""
    enough = stop_watch(chat, stops, in_reasoning=in_reasoning)
    if enough is None:
        return await policy.complete(request)
    begun = False
    try:
        async with aclosing(stream_or_complete(policy, policy.complete, request, enough=enough)) as parts:
            async for part in parts:
                if isinstance(part, Completion):
                    return part
                begun = True
    except (ContextFull, MalformedRequest):
        raise
    except EngineError:
        if not begun:
            raise
    return await policy.complete(request)


def cut_at_stop(
    chat: Chat,
    completion: Completion,
    reply: str,
    stops: Sequence[str],
    *,
    num_prompt: int,
    in_reasoning: bool | None = None,
) -> Cut | None:
    """Cut a completion off at its first stop text. Returns None if it contains none of `stops`.

    `reply`: the text of the completion that the client would get, without reasoning and calls. It is only needed for a
    stop text that `stop_watch` does not see, such as one in a malformed call that is returned as text. `num_prompt`:
    the number of tokens of the prompt."""
    ids = completion.token_ids.tolist()
    whole = chat.decode(ids) if stops else ""
    if not any(stop in whole for stop in stops):
        return None
    streamed = StreamedText(chat, stops, in_reasoning=in_reasoning)
    for token in ids:  # one by one, since half a character after the stop text would hold it back
        streamed.add([token])
    reply = streamed.sent + streamed.stop_text if streamed.stop_text else reply
    begin, stop = first_stop(reply, stops)
    if not stop:
        return None
    until = reply[: begin + len(stop)]
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
    sampled = _part(completion, 0, num_sampled, routes=(min(known, last), last))
    kept = _part(completion, 0, num_kept, routes=(min(known, middle), middle))
    tail = _part(completion, num_kept, num_sampled, routes=(min(max(known, middle), last), last))
    return Cut(text, streamed.sent_reasoning, stop, sampled, kept, tail, whole[len(before) : begin])


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
