"""Parses request bodies into a checked `ChatRequest` or `TextRequest`. Raises only `RequestRefused`.

An unknown parameter is refused by name. So is a known one that is not supported and would change the answer, unless it
has a value that changes nothing (`NEUTRAL`). Parameters that never change the answer (`HARMLESS`) are ignored. Unknown
fields of messages are ignored too, since clients send back what other servers put there."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec

from etude.gateway.errors import invalid_request, unknown_parameter, unsupported_value

Message = dict[str, Any]

MAX_STOPS, MAX_STOP_CHARS = 16, 1_000
HARMLESS = frozenset(
    {
        "metadata",
        "parallel_tool_calls",  # an answer has one call at most
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""Parameters that clients send and that do not change the answer; they are ignored."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "top_p": (None, 1),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "logit_bias": (None, {}),
    # parameters of other servers
    "add_generation_prompt": (None, True),
    "add_special_tokens": (None, False, True),  # the template or the prompt has them
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "best_of": (None, 1),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "continue_final_message": (None, False),
    "documents": (None, []),
    "echo": (None, False),
    "guided_choice": (None,),
    "guided_decoding_backend": (None,),
    "guided_grammar": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "ignore_eos": (None, False),
    "include_stop_str_in_output": (None, False),
    "length_penalty": (None, 1),
    "logits_processors": (None, []),
    "min_p": (None, 0),
    "min_tokens": (None, 0),
    "prompt_logprobs": (None,),
    "repetition_penalty": (None, 1),
    "skip_special_tokens": (None, True),
    "spaces_between_special_tokens": (None, True),
    "stop_token_ids": (None, []),
    "structured_outputs": (None,),
    "top_k": (None, -1, 0),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": (None, False),
}
"""Known parameters that are not supported, with the values that are accepted because they change nothing."""
NEUTRAL_OF_CHAT: dict[str, tuple[Any, ...]] = {
    **NEUTRAL,
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "auto", "none"),
    "functions": (None, []),
    "function_call": (None, "auto", "none"),
    "audio": (None,),
    "modalities": (None, ["text"]),
    "moderation": (None,),
    "reasoning_effort": (None, "none"),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
}
NEUTRAL_OF_TEXT: dict[str, tuple[Any, ...]] = {**NEUTRAL, "logprobs": (None,), "suffix": (None, "")}
TEXT_TOKENS = 16
"""Token limit of a text completion without one, as in OpenAI's API."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseRequest:
    """The fields that chat and text requests share, checked and with defaults filled in.

    `max_tokens` limits the sampled tokens; None leaves the limit to the gateway. The answer is cut off before the first
    text of `stop`. `seed` None means a random seed. With `include_usage` a stream ends with the token counts. With
    `return_token_ids` the response also has the token ids of prompt and answer."""

    model: str
    max_tokens: int | None
    temperature: float
    seed: int | None
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    return_token_ids: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(BaseRequest):
    """A request for the next message of a conversation. `read_request` makes one.

    Each of `messages` is an OpenAI message with `content` as a text and the arguments of tool calls as a dict. `tools`
    is OpenAI's list of tools; it is empty when the client forbids tool calls."""

    messages: list[Message]
    tools: list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest(BaseRequest):
    """A request to continue a prompt, which is a text or a list of token ids. `read_text_request` makes one."""

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
    function_call: Any = None


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


class _TextBody(_Body, kw_only=True):
    prompt: str | list[Any]


class _ChatBody(_Body, kw_only=True):
    messages: list[_Message]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None


B = TypeVar("B", bound=_Body)
_path = re.compile(r" - at `\$\.?([^`]*)`")


def read_request(data: bytes) -> ChatRequest:
    """Parse and check the JSON body of a chat completion request. Raises `RequestRefused` with status 400."""
    body = _decoded(data, _chat_decoder, NEUTRAL_OF_CHAT)
    messages = [_canonical(m, f"messages[{i}]") for i, m in enumerate(body.messages)]
    if not messages or messages[-1]["role"] == "assistant":
        raise invalid_request("messages must end with a system, user or tool message", "messages")
    tools = [] if body.tool_choice == "none" else body.tools or []
    return ChatRequest(messages=messages, tools=tools, **_common(body))


def read_text_request(data: bytes) -> TextRequest:
    """Parse and check the JSON body of a text completion request. Raises `RequestRefused` with status 400."""
    body = _decoded(data, _text_decoder, NEUTRAL_OF_TEXT)
    prompt = body.prompt
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]  # a batch of one
    if not prompt or (isinstance(prompt, list) and not all(type(token) is int for token in prompt)):
        raise invalid_request("prompt must be one text, or one list of token ids, and not empty", "prompt")
    common = _common(body)
    return TextRequest(prompt=prompt, **{**common, "max_tokens": common["max_tokens"] or TEXT_TOKENS})


_names_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_chat_decoder, _text_decoder = msgspec.json.Decoder(_ChatBody), msgspec.json.Decoder(_TextBody)


def _decoded(data: bytes, decoder: msgspec.json.Decoder[B], neutral: dict[str, tuple[Any, ...]]) -> B:
    try:
        body = decoder.decode(data)
    except msgspec.ValidationError as error:
        place = _path.search(str(error))
        raise invalid_request(str(error), place[1] if place else None) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid_request(f"the body is not JSON: {error}") from None
    for name, raw in _names_decoder.decode(data).items():
        if name in neutral:
            if (value := msgspec.json.decode(raw)) not in neutral[name]:
                raise unsupported_value(name, value, neutral[name])
        elif name not in body.__struct_fields__ and name not in HARMLESS:
            raise unknown_parameter(name, {*body.__struct_fields__, *HARMLESS, *neutral})
    _check_ranges(body)
    return body


def _common(body: _Body) -> dict[str, Any]:
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
            raise invalid_request(f"{name} = {limit} must be at least 1", name)
    if body.temperature is not None and not 0.0 <= body.temperature <= 2.0:
        raise invalid_request(f"temperature = {body.temperature} must be from 0 to 2", "temperature")


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOPS or not all(0 < len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise invalid_request(f"stop must be at most {MAX_STOPS} texts of 1 to {MAX_STOP_CHARS} characters", "stop")
    return stops


def _canonical(message: _Message, where: str) -> Message:
    """Convert a message to its canonical form, in which it is rendered and compared."""
    content = message.content
    if isinstance(content, list):
        if any(part.type not in ("text", "input_text", "output_text") for part in content):
            raise invalid_request("only text content is offered by this model", f"{where}.content")
        content = "".join(part.text for part in content)
    role = "system" if message.role == "developer" else message.role
    canonical: Message = {"role": role, "content": content or ""}
    if message.function_call is not None:
        raise invalid_request(
            "calls of the old form function_call are not rendered: send tool_calls", f"{where}.function_call"
        )
    if message.tool_calls:
        if role != "assistant":
            raise invalid_request(f"a {role} message has tool_calls", f"{where}.tool_calls")
        canonical["tool_calls"] = [_canonical_call(c, where) for c in message.tool_calls]
    return canonical


def _canonical_call(call: _ToolCall, where: str) -> dict[str, Any]:
    try:
        arguments = json.loads(call.function.arguments or "{}")
        json.dumps(arguments, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise invalid_request(
            "a tool call's arguments must be a JSON object of whole characters", f"{where}.tool_calls"
        )
    return {"type": "function", "function": {"name": call.function.name, "arguments": arguments}}
