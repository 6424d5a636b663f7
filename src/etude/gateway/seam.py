"""What the gateway asks of a chat format; `etude.harness.ChatFormat` has this shape. The gateway imports no sibling."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from etude.records.wire import I32

Message = dict[str, Any]


class Called(Protocol):
    """A tool call that could be read."""

    @property
    def name(self) -> str: ...
    @property
    def arguments(self) -> dict[str, Any]: ...


class Said(Protocol):
    """What a completion says; with an `error` the call in it could not be read."""

    @property
    def text(self) -> str: ...
    @property
    def call(self) -> Called | None: ...
    @property
    def error(self) -> str: ...


class Chat(Protocol):
    """Messages to tokens and back. `signatures` is what `signatures()` made of a request's tools."""

    stop_token_ids: tuple[int, ...]
    vocab_size: int

    def signatures(self, tools: Iterable[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Raises `ValueError` for what is no tool."""
        ...

    def first(self, messages: Sequence[Message], signatures: Any, *, most: int | None = None) -> I32:
        """May be called in any thread, as `continuation` and `encode` may. Raises `ContextFull`, before it tokenises,
        for what surely has more than `most` tokens."""
        ...

    def continuation(
        self,
        previous: Sequence[Message],
        new: Sequence[Message],
        signatures: Any,
        *,
        ended: bool,
        most: int | None = None,
    ) -> I32: ...

    def parse(self, ids: I32, signatures: Any) -> Said: ...

    def leading_text(self, ids: Sequence[int]) -> int:
        """How many of a completion's first tokens are surely said as text, whatever follows."""
        ...

    def encode(self, text: str, *, most: int | None = None) -> I32: ...

    def decode(self, ids: Iterable[int]) -> str: ...
