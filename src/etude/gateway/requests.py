"""The one request of all dialects, and the checks that they share. Raises only `RequestRefused`.

An unknown parameter is refused by name. So is a known one that is not supported and would change the answer, unless it
has a value that changes nothing. Parameters that never change the answer are ignored. Unknown fields of messages are
ignored too, since clients send back what other servers put there."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from etude.capture import Message
from etude.gateway.errors import invalid_request, unknown_parameter, unsupported_value

MAX_STOPS, MAX_STOP_CHARS = 16, 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A request for the next message of a conversation, checked and with defaults filled in. A dialect reads one.

    - `messages`: OpenAI's messages with `content` as a text and the arguments of tool calls as a dict. Results of tools
      follow in the order of their calls.
    - `prompt`: a text or token ids to continue, in place of `messages`.
    - `tools`: OpenAI's list of tools. It is empty when the client forbids tool calls.
    - `must_call`: the answer must be a call of one of the tools. `parallel`: it may have several calls.
    - `n`: the number of answers.
    - `max_tokens`: the most tokens to sample; None leaves the limit to the gateway. With `clamp` it is lowered to what
      the context has left; otherwise a request that does not fit is refused.
    - `seed`: None means a random seed.
    - `stop`: the answer is cut off before the first of these texts.
    - `include_usage`: a stream ends with the token counts.
    - `return_token_ids`: the response also has the token ids of prompt and answer.
    - `echo`: fields of the body that the dialect repeats in its response."""

    model: str
    messages: list[Message] = field(default_factory=list)
    prompt: str | list[int] | None = None
    tools: list[dict[str, Any]] = field(default_factory=list)
    must_call: bool = False
    parallel: bool = True
    n: int = 1
    max_tokens: int | None = None
    clamp: bool = False
    temperature: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    return_token_ids: bool = False
    echo: dict[str, Any] = field(default_factory=dict)


B = TypeVar("B", bound=msgspec.Struct)
_path = re.compile(r" - at `\$\.?([^`]*)`")
_names_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


def decode_body(
    data: bytes,
    decoder: msgspec.json.Decoder[B],
    *,
    neutral: Mapping[str, Collection[Any]],
    harmless: Collection[str],
) -> B:
    """Parse a JSON body. Raises `RequestRefused` with status 400, which names the field.

    `neutral`: known parameters that are not supported, with the values that change nothing. `harmless`: parameters that
    are ignored. Any other one that the decoder does not know is refused."""
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
                raise unsupported_value(name, value, list(neutral[name]))
        elif name not in body.__struct_fields__ and name not in harmless:
            raise unknown_parameter(name, {*body.__struct_fields__, *harmless, *neutral})
    return body


def check_range(name: str, value: float | None, low: float, high: float = float("inf")) -> None:
    """Check that a parameter is within a range, bounds included. None is accepted."""
    if value is not None and not low <= value <= high:
        bounds = f"at least {low:g}" if high == float("inf") else f"from {low:g} to {high:g}"
        raise invalid_request(f"{name} = {value} must be {bounds}", name)


def check_stops(stop: str | Sequence[str] | None, name: str = "stop") -> tuple[str, ...]:
    """Return the stop texts of a request as a tuple. `name` is the name of the parameter."""
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOPS or not all(0 < len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise invalid_request(f"{name} must be at most {MAX_STOPS} texts of 1 to {MAX_STOP_CHARS} characters", name)
    return stops


def canonical_call(name: str, arguments: Any, call_id: str, where: str) -> dict[str, Any]:
    """Return a tool call in the form of `ChatRequest.messages`.

    `arguments` is a dict or JSON text. `where` is the place in the body that an error names."""
    try:
        parsed = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
        json.dumps(parsed, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise invalid_request("a tool call's arguments must be a JSON object of whole characters", where)
    identity = {"id": call_id} if call_id else {}
    return {**identity, "type": "function", "function": {"name": name, "arguments": parsed}}


def function_tool(name: str, description: str | None, schema: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return an entry of OpenAI's list of tools. `schema` is the JSON schema of the arguments."""
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = description
    return {"type": "function", "function": {**function, "parameters": schema or {"type": "object", "properties": {}}}}


def chosen_tools(
    tools: list[dict[str, Any]], only: str | Sequence[str] | None, *, none: bool = False
) -> list[dict[str, Any]]:
    """Return the tools that the model may call.

    `only` is the name, or the names, that the client chose; None allows all. With `none` the client forbids calls.
    Raises `RequestRefused` when a chosen tool is not in the list."""
    if none:
        return []
    if only is None:
        return tools
    names = [only] if isinstance(only, str) else list(only)
    known = {tool.get("function", {}).get("name"): tool for tool in tools}
    for name in names:
        if name not in known:
            raise invalid_request(f"tool_choice names {name[:100]!r}, which is not among the tools", "tool_choice")
    return [known[name] for name in names]


def checked_messages(messages: list[Message], where: str) -> list[Message]:
    """Put the results of tools in the order of their calls, and check that the model's turn is next.

    `where` is the name of the parameter."""
    if not messages or messages[-1]["role"] == "assistant":
        raise invalid_request(f"{where} must end with a system, user or tool message", where)
    at = 0
    while at < len(messages):
        order = {call["id"]: i for i, call in enumerate(messages[at].get("tool_calls") or ()) if "id" in call}
        start = at = at + 1
        while at < len(messages) and messages[at]["role"] == "tool":
            at += 1
        if len(order) > 1:
            last = len(order)
            messages[start:at] = sorted(messages[start:at], key=lambda m: order.get(m.get("tool_call_id", ""), last))
    return messages
