"""The interface of chat formats: messages to tokens and back. `etude.harness.ChatFormat` has it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from etude.records.wire import I32

Message = dict[str, Any]


class ParsedCall(Protocol):
    """A tool call that could be read."""

    @property
    def name(self) -> str: ...
    @property
    def arguments(self) -> dict[str, Any]: ...


class ParsedReply(Protocol):
    """A completion, parsed: its text and its tool call. With an `error` the call could not be parsed."""

    @property
    def text(self) -> str: ...
    @property
    def call(self) -> ParsedCall | None: ...
    @property
    def error(self) -> str: ...


class Chat(Protocol):
    """Messages to tokens and back. `signatures` is what `signatures()` made of a request's tools."""

    stop_token_ids: tuple[int, ...]
    vocab_size: int

    def signatures(self, tools: Iterable[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Raises `ValueError` for what is no tool."""
        ...

    def encode_prompt(self, messages: Sequence[Message], signatures: Any, *, max_tokens: int | None = None) -> I32:
        """May be called in any thread, as `continuation` and `encode` may. Raises `ContextFull`, before it tokenises,
        for what surely has more than `max_tokens` tokens."""
        ...

    def continuation(
        self,
        previous: Sequence[Message],
        new: Sequence[Message],
        signatures: Any,
        *,
        ended: bool,
        max_tokens: int | None = None,
    ) -> I32: ...

    def parse(self, ids: I32, signatures: Any) -> ParsedReply: ...

    def num_text_tokens(self, ids: Sequence[int]) -> int:
        """How many of a completion's first tokens are surely said as text, whatever follows."""
        ...

    def encode(self, text: str, *, max_tokens: int | None = None) -> I32: ...

    def decode(self, ids: Iterable[int]) -> str: ...
