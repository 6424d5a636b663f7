"""Bytes of a request → a checked `ChatRequest` or `TextRequest`, or `Refused`. Nothing else, whatever goes in.

Unknown fields are skipped, as clients send many. A field that would change the answer and cannot be honoured is
refused unless it holds its neutral value: silence would be a lie.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec

from etude.gateway.refusal import invalid, not_offered

Message = dict[str, Any]

MAX_STOPS = 16
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "top_p": (None, 1),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "logit_bias": (None, {}),
    "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "auto", "none"),
    "functions": (None, []),
    "audio": (None,),
}
"""Fields that are understood and not offered, with the values under which they change nothing."""


NEUTRAL_OF_TEXT: dict[str, tuple[Any, ...]] = {
    **{name: NEUTRAL[name] for name in ("n", "top_p", "frequency_penalty", "presence_penalty", "logit_bias")},
    "best_of": (None, 1),
    "echo": (None, False),
    "logprobs": (None,),
    "suffix": (None, ""),
}
TEXT_TOKENS = 16
"""Of a text completion whose request names no limit, as OpenAI has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What every request for a completion says."""

    model: str
    max_tokens: int | None
    temperature: float
    seed: int | None
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    return_token_ids: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(Asked):
    """The next message of a conversation. `messages` are canonical: text content, arguments as mappings."""

    messages: list[Message]
    tools: list[dict[str, Any]]  # as offered to the model; empty when the client forbids them


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest(Asked):
    """What comes after a text, given as such or as token ids."""

    prompt: str | list[int]


class _Part(msgspec.Struct):
    type: str
    text: str = ""


class _Function(msgspec.Struct):
    name: str
    arguments: str = "{}"


class _ToolCall(msgspec.Struct):
    function: _Function
    id: str = ""


class _Message(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_Part] | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False


class _Body(msgspec.Struct, kw_only=True):
    model: str
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    return_token_ids: bool | None = None
    n: Any = None
    top_p: Any = None
    frequency_penalty: Any = None
    presence_penalty: Any = None
    logprobs: Any = None
    logit_bias: Any = None


class _TextBody(_Body, kw_only=True):
    prompt: str | list[Any]
    best_of: Any = None
    echo: Any = None
    suffix: Any = None


class _ChatBody(_Body, kw_only=True):
    messages: list[_Message]
    tools: list[dict[str, Any]] | None = None
    top_logprobs: Any = None
    response_format: Any = None
    tool_choice: Any = None
    functions: Any = None
    audio: Any = None


B = TypeVar("B", bound=_Body)
_path = re.compile(r" - at `\$\.?([^`]*)`")


def read_request(data: bytes) -> ChatRequest:
    """The chat request in a body. Raises `Refused` (400)."""
    body = _decoded(data, _chat_decoder, NEUTRAL)
    messages = [_canonical(m, f"messages[{i}]") for i, m in enumerate(body.messages)]
    if not messages or messages[-1]["role"] == "assistant":
        raise invalid("messages must end with a system, user or tool message", "messages")
    tools = [] if body.tool_choice == "none" else body.tools or []
    return ChatRequest(messages=messages, tools=tools, **_common(body))


def read_text_request(data: bytes) -> TextRequest:
    """The text request in a body. Raises `Refused` (400)."""
    body = _decoded(data, _text_decoder, NEUTRAL_OF_TEXT)
    prompt = body.prompt
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]  # a batch of one
    if not prompt or (isinstance(prompt, list) and not all(type(token) is int for token in prompt)):
        raise invalid("prompt must be one text, or one list of token ids, and not empty", "prompt")
    common = _common(body)
    return TextRequest(prompt=prompt, **{**common, "max_tokens": common["max_tokens"] or TEXT_TOKENS})


_chat_decoder, _text_decoder = msgspec.json.Decoder(_ChatBody), msgspec.json.Decoder(_TextBody)


def _decoded(data: bytes, decoder: msgspec.json.Decoder[B], neutral: dict[str, tuple[Any, ...]]) -> B:
    try:
        body = decoder.decode(data)
    except msgspec.ValidationError as error:
        place = _path.search(str(error))
        raise invalid(str(error), place[1] if place else None) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(f"the body is not JSON: {error}") from None
    for name, values in neutral.items():
        if getattr(body, name) not in values:
            raise not_offered(name, getattr(body, name), values)
    _check_ranges(body)
    return body


def _common(body: _Body) -> dict[str, Any]:
    """The fields of `Asked`."""
    return {
        "model": body.model,
        "max_tokens": body.max_completion_tokens or body.max_tokens,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "seed": body.seed,
        "stop": _stops(body.stop),
        "stream": bool(body.stream),
        "include_usage": body.stream_options is not None and body.stream_options.include_usage,
        "return_token_ids": bool(body.return_token_ids),
    }


def _check_ranges(body: _Body) -> None:
    for name, limit in (("max_tokens", body.max_tokens), ("max_completion_tokens", body.max_completion_tokens)):
        if limit is not None and limit < 1:
            raise invalid(f"{name} = {limit} must be at least 1", name)
    if body.temperature is not None and not 0.0 <= body.temperature <= 2.0:
        raise invalid(f"temperature = {body.temperature} must be from 0 to 2", "temperature")


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOPS or not all(stops):
        raise invalid(f"stop must be at most {MAX_STOPS} non-empty texts", "stop")
    return stops


def _canonical(message: _Message, where: str) -> Message:
    """The message in the one form that is rendered and remembered: whatever a client leaves out or adds vanishes."""
    content = message.content
    if isinstance(content, list):
        if any(part.type not in ("text", "input_text", "output_text") for part in content):
            raise invalid("only text content is offered by this model", f"{where}.content")
        content = "".join(part.text for part in content)
    role = "system" if message.role == "developer" else message.role
    canonical: Message = {"role": role, "content": content or ""}
    if message.tool_calls:
        if role != "assistant":
            raise invalid(f"a {role} message has tool_calls", f"{where}.tool_calls")
        canonical["tool_calls"] = [_canonical_call(c, where) for c in message.tool_calls]
    return canonical


def _canonical_call(call: _ToolCall, where: str) -> dict[str, Any]:
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise invalid("a tool call's arguments must be a JSON object", f"{where}.tool_calls")
    return {"type": "function", "function": {"name": call.function.name, "arguments": arguments}}
