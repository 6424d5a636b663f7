"""The request into which all dialects parse their bodies, and the checks that they share. Raises only `RequestRefused`.

An unknown parameter is refused by name. So is a known one that is not supported and would change the answer, unless it
has a value that changes nothing. Parameters that never change the answer are ignored. Unknown fields of messages are
ignored too, since clients send back what other servers put there."""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec

from etude.capture import KeptMessage, Message
from etude.gateway.errors import invalid_request, unknown_parameter, unsupported_value

MAX_STOPS, MAX_STOP_CHARS = 16, 1_000
MAX_ANSWERS, MAX_TOP_LOGPROBS = 16, 20
NEUTRAL_SAMPLING = {"top_p": 1, "repetition_penalty": 1}  # of the others it is 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A request for the next message of a conversation, checked and with defaults filled in. A dialect's `read` returns
    one.

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
    - `sampling`: further parameters of `records.Sampling` by name, without those whose value has no effect.
    - `schema`: the answer must be JSON that is valid under this JSON schema, or a call if there are `tools`; None: any
      text.
    - `top_logprobs`: how many of the likeliest tokens the response has at each position; None: no log-probabilities.
    - `summaries`: whether the model may summarise the conversation.
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
    sampling: dict[str, Any] = field(default_factory=dict)
    schema: dict[str, Any] | bool | None = None
    top_logprobs: int | None = None
    summaries: bool = True
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
    """Parse a JSON body with `decoder`. Raises `RequestRefused` (HTTP status 400), which names the invalid field.

    - `neutral`: known parameters that are not supported, each with the values that are accepted, as they have no
      effect.
    - `harmless`: parameters that are ignored.

    Any other parameter that the decoder does not know is refused."""
    try:
        body = decoder.decode(data)
        fields = _names_decoder.decode(data)
    except msgspec.ValidationError as error:
        place = _path.search(str(error))
        raise invalid_request(str(error), place[1] if place else None) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid_request(f"the body is not JSON: {error}") from None
    for name, raw in fields.items():
        if name in neutral:
            if (value := _decode_value(raw)) not in neutral[name]:
                raise unsupported_value(name, value, list(neutral[name]))
        elif name not in body.__struct_fields__ and name not in harmless:
            raise unknown_parameter(name, {*body.__struct_fields__, *harmless, *neutral})
    return body


RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "frequency_penalty": (-2, 2),
    "presence_penalty": (-2, 2),
    "repetition_penalty": (0.01, 100),
    "top_logprobs": (0, MAX_TOP_LOGPROBS),
    "n": (1, MAX_ANSWERS),
}
"""The smallest and the largest value of parameters."""
SAMPLING = ("top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "min_tokens")


def read_sampling(body: msgspec.Struct) -> dict[str, Any]:
    """Check the sampling parameters of a body, and return by name those whose value has an effect. Raises
    `RequestRefused`."""
    for name, (low, high) in RANGES.items():
        check_range(name, getattr(body, name, None), low, high)
    found: dict[str, Any] = {}
    for name in SAMPLING:
        value = getattr(body, name, None)
        if value is not None and value != NEUTRAL_SAMPLING.get(name, 0):
            found[name] = value
    if "top_p" in found and found["top_p"] == 0:
        found |= {"top_p": 1.0, "top_k": 1}  # OpenAI's servers take the likeliest token
    if found.get("top_k", 0) < 0 or found.get("min_tokens", 0) < 0:
        if found.get("top_k") == -1:  # of vLLM: from all tokens
            del found["top_k"]
        else:
            raise invalid_request(
                "top_k and min_tokens must be at least 0", "top_k" if "top_k" in found else "min_tokens"
            )
    if bias := getattr(body, "logit_bias", None):
        found["logit_bias"] = _logit_bias(bias)
    return found


def _logit_bias(bias: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    try:
        found = {int(token): float(value) for token, value in bias.items() if token.isascii() and token.isdigit()}
    except ValueError:  # more digits than Python converts
        found = {}
    if len(found) != len(bias) or not all(-100 <= value <= 100 for value in found.values()):
        raise invalid_request("logit_bias maps token ids to numbers from -100 to 100", "logit_bias")
    return tuple(sorted(found.items()))


def _decode_value(raw: msgspec.Raw) -> Any:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid_request(f"the body is not JSON: {error}") from None


class MessageCache(Generic[B]):
    """A thread-safe cache of parsed messages by their JSON text, since each request repeats all earlier messages.

    `decoder` parses one message, and `convert` turns it into canonical messages (`ChatRequest.messages`). The second
    argument of `convert` is the place in the body, for errors. The least recently used messages are dropped when the
    JSON texts have more than `max_bytes` in total."""

    def __init__(
        self,
        decoder: msgspec.json.Decoder[B],
        convert: Callable[[B, str], Sequence[Message]],
        *,
        max_bytes: int = 64 << 20,
    ) -> None:
        self._decoder, self._convert, self._max_bytes = decoder, convert, max_bytes
        self._kept: OrderedDict[bytes, list[Message]] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def read(self, parts: Sequence[msgspec.Raw], where: str) -> list[Message]:
        """Parse the messages of a conversation. `where` is the name of the request field that has them."""
        found: list[Message] = []
        for i, part in enumerate(parts):
            raw = bytes(part)
            with self._lock:
                if (known := self._kept.get(raw)) is not None:
                    self._kept.move_to_end(raw)
            found += known if known is not None else self._parse(raw, f"{where}[{i}]")
        return found

    def _parse(self, raw: bytes, where: str) -> list[Message]:
        try:
            message = self._decoder.decode(raw)
        except msgspec.ValidationError as error:
            place = _path.search(str(error))
            raise invalid_request(f"{where}: {error}", where + (f".{place[1]}" if place and place[1] else "")) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise invalid_request(f"the body is not JSON: {error}") from None
        parsed: list[Message] = [KeptMessage(one) for one in self._convert(message, where)]
        with self._lock:
            self._num_bytes += 0 if raw in self._kept else len(raw)
            self._kept[raw] = parsed
            while self._num_bytes > self._max_bytes:
                old, _ = self._kept.popitem(last=False)
                self._num_bytes -= len(old)
        return parsed


def check_range(name: str, value: float | None, low: float, high: float = float("inf")) -> None:
    """Check that a request parameter lies within [low, high]. None is accepted. Raises `RequestRefused`."""
    if value is not None and not low <= value <= high:
        bounds = f"at least {low:g}" if high == float("inf") else f"from {low:g} to {high:g}"
        raise invalid_request(f"{name} = {value} must be {bounds}", name)


def check_stops(stop: str | Sequence[str] | None, name: str = "stop") -> tuple[str, ...]:
    """Return the stop texts of a request as a tuple. `name` is the name of the parameter. Raises `RequestRefused`."""
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOPS or not all(0 < len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise invalid_request(f"{name} must be at most {MAX_STOPS} texts of 1 to {MAX_STOP_CHARS} characters", name)
    return stops


def canonical_call(name: str, arguments: Any, call_id: str, where: str) -> dict[str, Any]:
    """Return a tool call in the format of `ChatRequest.messages`. Raises `RequestRefused` for invalid arguments.

    `arguments` is a dict or JSON text. `where` is the place in the body, for errors."""
    try:
        parsed = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
        json.dumps(parsed, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise invalid_request("a tool call's arguments must be a JSON object of valid Unicode text", where)
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
    functions = [(tool, tool.get("function")) for tool in tools]
    known = {str(function.get("name")): tool for tool, function in functions if isinstance(function, dict)}
    for name in names:
        if name not in known:
            raise invalid_request(f"tool_choice names {name[:100]!r}, which is not among the tools", "tool_choice")
    return [known[name] for name in names]


def checked_messages(messages: list[Message], where: str) -> list[Message]:
    """Return the messages with the results of tools in the order of their calls.

    Raises `RequestRefused` unless the model's turn is next. `where` is the name of the request parameter with the
    messages."""
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
