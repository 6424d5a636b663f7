"""The interface of a dialect: how requests are read, and how responses, events and errors are written."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from etude.capture import Chat
from etude.capture.streams import StreamedText
from etude.gateway.answers import Answer, ResponseHead
from etude.gateway.errors import RequestRefused
from etude.gateway.requests import BodyDecoder, ChatRequest
from etude.records.wire import I32


class EventStream(ABC):
    """The server-sent events of one streamed response, as bytes. Each dialect has a subclass. It does no I/O itself.

    Call `start`, then `tokens` for each part that the policy samples, `finish` once with each complete answer, then
    `end`. `start` and `tokens` are optional: `finish` sends everything that was not sent before. `index` is the number
    of the answer, for requests that ask for several."""

    ping = b": keep-alive\n\n"
    """The keep-alive event that is sent while nothing is sampled, so that no proxy closes the connection."""

    def __init__(self, request: ChatRequest, head: ResponseHead, chat: Chat) -> None:
        self.request, self.head = request, head
        self._chat, self._started = chat, False
        self._texts = [StreamedText(chat, request.stop) for _ in range(request.n)]

    def start(self, prompt_ids: I32) -> Iterator[bytes]:
        """Yield the events before the first token. `prompt_ids` are the token ids that the model reads, [P] int32."""
        if not self._started:
            self._started = True
            thinking = self._chat.in_reasoning(prompt_ids)
            self._texts = [StreamedText(self._chat, self.request.stop, in_reasoning=thinking) for _ in self._texts]
            yield from self._start(len(prompt_ids))

    def tokens(self, ids: list[int], index: int = 0) -> Iterator[bytes]:
        """Yield the events for the newly sampled token ids of answer `index`. `start` must have been called.

        Text that may not be sent yet, such as the beginning of a stop text, gives no event."""
        assert self._started, "start comes first"
        yield from self._pieces(*self._texts[index].add(ids), index)

    def finish(self, answer: Answer, index: int = 0) -> Iterator[bytes]:
        """Yield the last events of a complete answer: all that was not sent before, then its end."""
        yield from self.start(answer.prompt_ids)
        yield from self._pieces(*self._texts[index].left(answer.reasoning, answer.text), index)
        yield from self._finish(answer, index)

    def end(self) -> Iterator[bytes]:
        """Yield the last events of the response, when all answers are finished."""
        yield from ()

    @abstractmethod
    def error(self, refused: RequestRefused) -> bytes:
        """Return the event of an error, the last of the stream. The vendor's clients raise it as an exception."""

    def _pieces(self, reasoning: str, text: str, index: int) -> Iterator[bytes]:
        if reasoning:
            yield from self._reasoning(reasoning, index)
        if text:
            yield from self._text(text, index)

    def _start(self, num_prompt: int) -> Iterator[bytes]:
        yield from ()

    @abstractmethod
    def _reasoning(self, piece: str, index: int) -> Iterator[bytes]: ...

    @abstractmethod
    def _text(self, piece: str, index: int) -> Iterator[bytes]: ...

    @abstractmethod
    def _finish(self, answer: Answer, index: int) -> Iterator[bytes]: ...


@dataclass(frozen=True, slots=True)
class Dialect:
    """One API of a vendor: how its requests are read, and how its responses, events and errors are written.

    - `name`: "chat", "text", "responses" or "messages".
    - `path`: the URL path of its requests, such as "/v1/chat/completions".
    - `read`: parse and check the JSON body of a request. Raises only `RequestRefused`.
    - `body`: return the JSON body of a whole response.
    - `stream`: return the `EventStream` of a streamed response.
    - `error`: return the JSON body of an error.
    - `decoder`: parses the bodies that `read` gets; for the OpenAPI document.
    - `prefix`: the beginning of the ids of its responses, such as "chatcmpl-"."""

    name: str
    path: str
    read: Callable[[bytes], ChatRequest]
    body: Callable[[ChatRequest, ResponseHead, Sequence[Answer]], dict[str, Any]]
    stream: Callable[[ChatRequest, ResponseHead, Chat], EventStream]
    error: Callable[[RequestRefused], dict[str, Any]]
    decoder: BodyDecoder[Any]
    prefix: str


def new_head(request: ChatRequest, response_id: str = "") -> ResponseHead:
    """Return the head of a new response. `response_id` is hexadecimal; "": a random one."""
    return ResponseHead(response_id or uuid.uuid4().hex, request.model, int(time.time()))


def data_event(body: dict[str, Any]) -> bytes:
    """Encode a JSON body as a server-sent event without a name."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def named_event(body: dict[str, Any]) -> bytes:
    """Encode a JSON body as a server-sent event whose name is the body's `type`."""
    return b"event: " + str(body["type"]).encode() + b"\ndata: " + msgspec.json.encode(body) + b"\n\n"
