"""The interface of chat formats, which convert messages to tokens and back.

`etude.harness.ChatFormat` implements it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from etude.records.wire import I32

Message = dict[str, Any]
"""A message in OpenAI's format: role, content, tool_calls, tool_call_id."""


class ParsedCall(Protocol):
    """A tool call that was parsed from a completion: the tool's name, and its arguments by parameter name."""

    @property
    def name(self) -> str: ...
    @property
    def arguments(self) -> dict[str, Any]: ...


class ParsedReply(Protocol):
    """A parsed completion. `Chat.parse` returns one.

    - `text`: the text without reasoning and tool calls.
    - `reasoning`: the text of the model's reasoning, or "".
    - `calls`: the tool calls, in order.
    - `error`: what is wrong with a tool call, or "". With an error, `text` is the whole completion and `calls` is
      empty."""

    @property
    def text(self) -> str: ...
    @property
    def reasoning(self) -> str: ...
    @property
    def calls(self) -> Sequence[ParsedCall]: ...
    @property
    def error(self) -> str: ...


class Chat(Protocol):
    """A chat format: encodes messages as tokens, and parses completions.

    `stop_token_ids` end a message; `vocab_size` is the number of token ids. Where a method takes `signatures`, pass the
    result of the method `signatures`.

    `encode_prompt`, `continuation` and `encode` may be called from any thread. Each raises `ContextFull`, before it
    tokenises, for a text that certainly has more than `max_tokens` tokens. None means no limit."""

    stop_token_ids: tuple[int, ...]
    vocab_size: int

    def signatures(self, tools: Iterable[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Convert OpenAI's list of tools to the form that the other methods take.

        Raises `ValueError` for an invalid tool."""
        ...

    def encode_prompt(self, messages: Sequence[Message], signatures: Any, *, max_tokens: int | None = None) -> I32:
        """Encode a conversation as token ids, [P] int32. They end with the tokens that begin the model's reply."""
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
        """Encode only what the messages `new` add after `previous`, as token ids, [P] int32.

        The last message of `previous` is one that the model sampled. The result ends with the tokens that begin the
        model's next reply. `ended` says whether the sampled message ends with a stop token; if not, the result begins
        with one."""
        ...

    def parse(self, ids: I32, signatures: Any, *, strict: bool = True) -> ParsedReply:
        """Parse the token ids of a completion. Never raises: `ParsedReply.error` says what could not be parsed.

        With `strict`, a call of an unknown tool, or with arguments that do not fit the tool's signature, is an error.
        Without it such a call is returned as it is, where its format allows this, and the caller checks it."""
        ...

    def in_reasoning(self, prompt_ids: I32) -> bool | None:
        """Return whether a prompt ends within the model's reasoning, because the template wrote ``<think>``.

        If False, a completion may begin with ``<think>``. None: completions of this format have no reasoning."""
        ...

    def call_grammar(self, signatures: Any, *, max_calls: int) -> str:
        """Return a grammar (JSON text, see `etude.grammars`) that allows 1 to `max_calls` calls of the given tools, and
        nothing else.

        Raises `ValueError` when this format cannot call tools."""
        ...

    def num_text_tokens(self, ids: Sequence[int], *, begun: bool = False) -> int:
        """Return how many leading tokens of a completion come before its first tool call.

        These tokens are text, whatever is sampled later. `ids` may be only a part of a completion. `begun`: whether
        other tokens of it came before."""
        ...

    def encode(self, text: str, *, max_tokens: int | None = None) -> I32:
        """Encode plain text as token ids, [T] int32.

        Text that spells a special token is encoded as ordinary characters. For `max_tokens` see `Chat`."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Decode token ids to text, without special tokens."""
        ...
