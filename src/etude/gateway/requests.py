"""Bytes of a chat request → a checked `ChatRequest`, or `Refused`. Nothing else comes out, whatever goes in.

Unknown fields are skipped, as clients send many. A field that would change the answer and cannot be honoured is
refused unless it holds its neutral value: silence would be a lie.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from etude.gateway.refusal import invalid

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """What a client asks for. `messages` are canonical: text content, arguments as mappings."""

    model: str
    messages: list[Message]
    tools: list[dict[str, Any]]  # as offered to the model; empty when the client forbids them
    max_tokens: int | None
    temperature: float
    seed: int | None
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    return_token_ids: bool


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


class _Body(msgspec.Struct):
    model: str
    messages: list[_Message]
    tools: list[dict[str, Any]] | None = None
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
    top_logprobs: Any = None
    logit_bias: Any = None
    response_format: Any = None
    tool_choice: Any = None
    functions: Any = None
    audio: Any = None


_decoder = msgspec.json.Decoder(_Body)
_path = re.compile(r" - at `\$\.?([^`]*)`")


def read_request(data: bytes) -> ChatRequest:
    """The request in a body. Raises `Refused` (400)."""
    try:
        body = _decoder.decode(data)
    except msgspec.ValidationError as error:
        place = _path.search(str(error))
        raise invalid(str(error), place[1] if place else None) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(f"the body is not JSON: {error}") from None
    for name, values in NEUTRAL.items():
        if getattr(body, name) not in values:
            raise invalid(f"{name} = {getattr(body, name)!r} is not offered by this model", name)
    _check_ranges(body)
    messages = [_canonical(m, f"messages[{i}]") for i, m in enumerate(body.messages)]
    if not messages or messages[-1]["role"] == "assistant":
        raise invalid("messages must end with a system, user or tool message", "messages")
    return ChatRequest(
        model=body.model,
        messages=messages,
        tools=[] if body.tool_choice == "none" else body.tools or [],
        max_tokens=body.max_completion_tokens or body.max_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        seed=body.seed,
        stop=_stops(body.stop),
        stream=bool(body.stream),
        include_usage=body.stream_options is not None and body.stream_options.include_usage,
        return_token_ids=bool(body.return_token_ids),
    )


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
