"""The request into which all dialects parse their bodies, and the checks that they share. Raises only `RequestRefused`.

An unknown parameter is refused by name. So is a known one that is not supported and would change the answer, unless it
has a value that changes nothing. Parameters that never change the answer are ignored. Unknown fields of messages are
ignored too, since clients send back what other servers put there."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec

from etude.capture import KeptMessage, KeptTools, Message
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
P = TypeVar("P")
V = TypeVar("V")
_path = re.compile(r" - at `\$\.?([^`]*)`")
_unknown = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
ABSENT = msgspec.Raw()
"""The value of a field that is parsed later and that a body does not have."""


class BodyDecoder(Generic[B]):
    """A decoder of the JSON bodies of a dialect, which reads them once.

    - `kind`: the struct of a body.
    - `neutral`: known parameters that are not supported, each with the values that are accepted, as they have no
      effect.
    - `harmless`: parameters that are ignored.

    Any other parameter that is no field of `kind` is refused."""

    def __init__(self, kind: type[B], *, neutral: Mapping[str, Collection[Any]], harmless: Collection[str]) -> None:
        self._neutral, self._known = neutral, {*kind.__struct_fields__, *harmless, *neutral}
        others = [(name, msgspec.Raw, ABSENT) for name in self._known.difference(kind.__struct_fields__)]
        options: Any = {"kw_only": True, "forbid_unknown_fields": True}
        self._decoder: Any = msgspec.json.Decoder(msgspec.defstruct(kind.__name__, others, bases=(kind,), **options))

    def decode(self, data: bytes) -> B:
        """Parse a body. Raises `RequestRefused` (HTTP status 400), which names the invalid field."""
        try:
            body: B = self._decoder.decode(data)
        except msgspec.ValidationError as error:
            if unknown := _unknown.fullmatch(str(error)):
                raise unknown_parameter(unknown[1], self._known) from None
            place = _path.search(str(error))
            raise invalid_request(str(error), place[1] if place else None) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise invalid_request(f"the body is not JSON: {error}") from None
        for name, accepted in self._neutral.items():
            if (raw := getattr(body, name)) is not ABSENT and (value := _decode_value(raw)) not in accepted:
                raise unsupported_value(name, value, list(accepted))
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


class ParseCache(Generic[P, V]):
    """A thread-safe cache of parsed values by their JSON text, since each request repeats all earlier messages.

    `decoder` parses one value, and `convert` turns it into what is kept. The second argument of `convert` is the place
    in the body, for errors. What was not read lately is dropped, so that the JSON texts have at most `max_bytes`."""

    def __init__(
        self, decoder: msgspec.json.Decoder[P], convert: Callable[[P, str], V], *, max_bytes: int = 64 << 20
    ) -> None:
        self._decoder, self._convert, self._max_bytes = decoder, convert, max_bytes
        self._recent, self._older = dict[bytes, V](), dict[bytes, V]()  # each has at most half of the bytes
        self._num_bytes = 0  # of the recent ones

    def read(self, raw: bytes, where: str) -> V:
        """Parse a JSON value, which `where` names in errors. Raises `RequestRefused` (HTTP status 400)."""
        known = self._recent.get(raw)
        if known is None:
            known = self._older.get(raw)
            if known is None:
                known = self._parse(raw, where)
            if self._num_bytes + len(raw) > self._max_bytes // 2:
                self._older, self._recent, self._num_bytes = self._recent, {}, 0
            self._recent[raw] = known
            self._num_bytes += len(raw)
        return known

    def _parse(self, raw: bytes, where: str) -> V:
        try:
            return self._convert(self._decoder.decode(raw), where)
        except msgspec.ValidationError as error:
            place = _path.search(str(error))
            inner = place[1] if place else ""
            dot = "." if inner and inner[0] != "[" else ""
            raise invalid_request(f"{where}: {error}", where + dot + inner) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise invalid_request(f"the body is not JSON: {error}") from None


class MessageCache(Generic[P]):
    """A cache of parsed messages (`ParseCache`).

    `convert` returns a message of the dialect in the format of `ChatRequest.messages`, as one or more messages."""

    def __init__(self, decoder: msgspec.json.Decoder[P], convert: Callable[[P, str], Sequence[Message]]) -> None:
        self._kept = ParseCache(decoder, lambda parsed, where: [KeptMessage(m) for m in convert(parsed, where)])

    def read(self, parts: Sequence[msgspec.Raw], where: str) -> list[Message]:
        """Parse the messages of a conversation. `where` is the name of the request field that has them."""
        found: list[Message] = []
        for i, part in enumerate(parts):
            found += self._kept.read(bytes(part), f"{where}[{i}]")
        return found


class ToolsCache(Generic[P]):
    """A cache of parsed lists of tools (`ParseCache`). `kind` is the type of a tool in the dialect.

    `convert` returns such tools as OpenAI's list."""

    def __init__(self, kind: type[P], convert: Callable[[list[P]], list[dict[str, Any]]]) -> None:
        decoder: Any = msgspec.json.Decoder(list[kind] | None)  # type: ignore[valid-type]
        self._kept = ParseCache[Any, KeptTools](decoder, lambda tools, _: KeptTools(convert(tools or [])))

    def read(self, tools: msgspec.Raw) -> KeptTools:
        """Parse the field `tools` of a body."""
        return self._kept.read(bytes(tools) or b"null", "tools")


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
    for at, message in enumerate(messages):
        if "tool_calls" in message and len(calls := message["tool_calls"] or ()) > 1:
            order = {call["id"]: i for i, call in enumerate(calls) if "id" in call}
            stop = next((i for i in range(at + 1, len(messages)) if messages[i]["role"] != "tool"), len(messages))
            results = messages[at + 1 : stop]
            messages[at + 1 : stop] = sorted(results, key=lambda m: order.get(m.get("tool_call_id", ""), len(order)))
    return messages
