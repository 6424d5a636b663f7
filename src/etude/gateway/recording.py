"""Passes complete answers to the gateway's recorders, with the sender of the request and the tokens of the model."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing

from starlette.requests import Request

from etude.gateway.access_log import Record
from etude.gateway.answers import Answer, ResponseHead
from etude.gateway.errors import invalid_request
from etude.gateway.model import StreamPart
from etude.gateway.requests import ChatRequest
from etude.records.served import ServedAnswer
from etude.seams import AnswerRecorder

USER = "x-etude-user"
"""The header in which a client names the user, of its organisation, for whom it sends a request."""
MAX_USER_CHARS = 256
"""The maximum length of a user's name, in characters."""
WITHOUT_KEY = "local"
"""The name of the organisation that sends the requests to a gateway without keys."""


def offer_answers(
    recorders: Sequence[AnswerRecorder],
    request: Request,
    record: Record,
    parsed: ChatRequest,
    head: ResponseHead,
    answers: Iterable[tuple[int, Answer]],
) -> None:
    """Pass the answers to a request to the recorders. `answers`: pairs (number of the answer, answer)."""
    organisation, user = sender(request, record)
    for index, answer in answers:
        served = ServedAnswer(
            response_id=head.id,
            index=index,
            organisation=organisation,
            user=user,
            model=record.model,
            dialect=record.dialect,
            at=time.time(),
            messages=parsed.messages if parsed.prompt is None else parsed.prompt,
            reply=answer.message(),
            finish=answer.finish,
            prompt_ids=answer.prompt_ids,
            completion=answer.completion,
            sampling=answer.sampling,
            summary_tokens=(answer.summaries.num_prompt, answer.summaries.num_sampled),
        )
        for recorder in recorders:
            recorder.offer(served)


def sender(request: Request, record: Record) -> tuple[str, str]:
    """Return the organisation and the user ("": not named) who sent a request. Raises as `user_of`."""
    return WITHOUT_KEY if record.key is None else record.key.name, user_of(request)


def user_of(request: Request) -> str:
    """Return the user name in the header `USER` of a request, in UTF-8; "" without one.

    Raises `RequestRefused` (HTTP status 400) for several headers, and for a name under which no answer could be
    captured or erased: too long, not printable, or not UTF-8."""
    found = request.headers.getlist(USER)
    if len(found) > 1:
        raise invalid_request(f"the request has {len(found)} headers {USER}", hint="send one, or none", param=USER)
    data = found[0].encode("latin-1") if found else b""  # as servers decode headers
    facts, name = "", ""
    try:
        name = data.decode()
    except UnicodeDecodeError:
        facts = "it is not UTF-8"
    if len(name) > MAX_USER_CHARS:
        facts = f"it has {len(name)} characters"
    elif not name.isprintable():
        facts = f"{sum(not c.isprintable() for c in name)} of its characters are not printable"
    if facts:
        hint = f"send at most {MAX_USER_CHARS} printable characters in UTF-8, such as an id of the user"
        raise invalid_request(f"the header {USER} is not a name", facts, hint=hint, param=USER)
    return name


async def offering(
    parts: AsyncGenerator[StreamPart], offer: Callable[[Iterable[tuple[int, Answer]]], None]
) -> AsyncGenerator[StreamPart]:
    """Yield the parts of a stream (`ServedModel.stream`) unchanged, and call `offer` with each answer when it is
    complete."""
    async with aclosing(parts):
        async for part in parts:
            if isinstance(part, tuple) and isinstance(part[1], Answer):
                offer([(part[0], part[1])])
            yield part
