"""The interface of chat formats: messages to tokens and back. `etude.harness.ChatFormat` implements it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from etude.records.wire import I32

Message = dict[str, Any]
"""A message in OpenAI's format: role, content, tool_calls, tool_call_id."""


class ParsedCall(Protocol):
    """A tool call that was parsed from a completion."""

    @property
    def name(self) -> str: ...
    @property
    def arguments(self) -> dict[str, Any]: ...


class ParsedReply(Protocol):
    """A parsed completion: its text, its reasoning ("" without) and its tool calls, in order. With an `error` a call
    could not be parsed; then `text` is the complete completion and `calls` is empty."""

    @property
    def text(self) -> str: ...
    @property
    def reasoning(self) -> str: ...
    @property
    def calls(self) -> Sequence[ParsedCall]: ...
    @property
    def error(self) -> str: ...


class Chat(Protocol):
    """Encodes messages as tokens, and parses completions. `signatures` is always a result of `signatures()`.

    `encode_prompt`, `continuation` and `encode` may be called from any thread. Each raises `ContextFull`, before it
    tokenises, for a text that certainly has more than `max_tokens` tokens.
    """

    stop_token_ids: tuple[int, ...]
    vocab_size: int

    def signatures(self, tools: Iterable[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Convert tools in OpenAI's format to the form that the other methods take. Raises `ValueError` for an invalid
        tool."""
        ...

    def encode_prompt(self, messages: Sequence[Message], signatures: Any, *, max_tokens: int | None = None) -> I32:
        """Encode a conversation and the generation prompt, [P] int32."""
        ...

    def continuation(
        self,
        previous: Sequence[Message],
        new: Sequence[Message],
        signatures: Any,
        *,
        ended: bool,
        max_tokens: int | None = None,
    ) -> I32:
        """Encode only what `new` adds after `previous`, whose last message the model sampled, and the generation
        prompt, [P] int32. `ended`: whether that message ends with a stop token; if not, the tokens begin with one."""
        ...

    def parse(self, ids: I32, signatures: Any, *, strict: bool = True) -> ParsedReply:
        """Parse the token ids of a completion. Never raises.

        `strict`: a call of an unknown tool, or with arguments that do not fit the tool's signature, is an error.
        Without it such a call is returned as it is, where its format allows this: the caller checks it."""
        ...

    def num_text_tokens(self, ids: Sequence[int]) -> int:
        """Number of leading tokens of a completion that are text, whatever follows: those before a tool call."""
        ...

    def encode(self, text: str, *, max_tokens: int | None = None) -> I32:
        """Encode plain text, [T] int32. The spelling of a special token in it is plain text too."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Decode token ids to text, without special tokens."""
        ...
