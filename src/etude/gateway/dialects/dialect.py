"""What a dialect is: how its requests are read, and how its responses, events and errors are written."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from etude.capture import Chat
from etude.gateway.answers import Answer, ResponseHead
from etude.gateway.errors import RequestRefused
from etude.gateway.requests import ChatRequest


class EventStream(Protocol):
    """Makes the server-sent events of one response. It does no input or output itself.

    Call `tokens` for each part that the policy samples, `finish` once with each complete answer, then `end`. The calls
    of `tokens` may be left out: `finish` sends all that was not sent before. `index` is the number of the answer, for
    requests that ask for several."""

    ping: bytes
    """What is sent while nothing is sampled, so that no proxy closes the connection."""

    def start(self) -> Iterator[bytes]:
        """Yield the events before the first token. `tokens` and `finish` yield them if this was not called."""
        ...

    def tokens(self, ids: list[int], index: int = 0) -> Iterator[bytes]:
        """Yield the events for newly sampled token ids. Text that may not be sent yet gives no event."""
        ...

    def finish(self, answer: Answer, index: int = 0) -> Iterator[bytes]:
        """Yield the last events of an answer, which includes what was streamed before."""
        ...

    def end(self) -> Iterator[bytes]:
        """Yield the last events of the response."""
        ...

    def error(self, refused: RequestRefused) -> bytes:
        """Return the event of an error after which nothing follows. The vendor's clients raise it as an exception."""
        ...


@dataclass(frozen=True, slots=True)
class Dialect:
    """One API that clients speak.

    - `name`: "chat", "text", "responses" or "messages".
    - `path`: of its requests, such as "/v1/chat/completions".
    - `read`: parse and check the JSON body of a request. Raises only `RequestRefused`.
    - `body`: return the JSON body of a whole response from the request, the head, and the answers.
    - `stream`: return the maker of events for a streamed response.
    - `error`: return the JSON body of an error."""

    name: str
    path: str
    read: Callable[[bytes], ChatRequest]
    body: Callable[[ChatRequest, ResponseHead, Sequence[Answer]], dict[str, Any]]
    stream: Callable[[ChatRequest, ResponseHead, Chat], EventStream]
    error: Callable[[RequestRefused], dict[str, Any]]


def new_head(request: ChatRequest) -> ResponseHead:
    """Return the head of a new response, with a random id."""
    return ResponseHead(uuid.uuid4().hex, request.model, int(time.time()))


def data_event(body: dict[str, Any]) -> bytes:
    """Encode a JSON body as a server-sent event without a name."""
    return b"data: " + _json(body) + b"\n\n"


def named_event(body: dict[str, Any]) -> bytes:
    """Encode a JSON body as a server-sent event whose name is the body's `type`."""
    return b"event: " + str(body["type"]).encode() + b"\ndata: " + _json(body) + b"\n\n"


def _json(body: dict[str, Any]) -> bytes:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
