"""The request into which all dialects parse their bodies, and the checks that they share. Raises only `RequestRefused`.

An unknown parameter is refused by name. So is a known one that is not supported and would change the answer, unless it
has a value that changes nothing. Parameters that never change the answer are ignored. Unknown fields of messages are
ignored too, since clients send back what other servers put there."""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from etude.capture import KeptMessage, KeptMessages, KeptTools, Message
from etude.errors import nearest
from etude.gateway.errors import RequestRefused, invalid_request, not_json, unknown_parameter, unsupported_value

MAX_STOPS, MAX_STOP_CHARS = 16, 1_000
MAX_ANSWERS, MAX_TOP_LOGPROBS = 16, 20
MAX_TOP_K = 2**31 - 1  # of engines
_MAX_SIMILAR = 64  # kept conversations with the same beginning
NEUTRAL_SAMPLING = {"top_p": 1, "repetition_penalty": 1}  # of the others it is 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A request for the next message of a conversation, checked and with defaults filled in. A dialect's `read` returns
    one.

    - `model`: the model's name, as the client sent it.
    - `messages`: OpenAI's messages with `content` as a string and the arguments of tool calls as a dict. Results of
      tools follow in the order of their calls.
    - `prompt`: a text or token ids to continue, in place of `messages`.
    - `tools`: OpenAI's list of tools. It is empty when the client forbids tool calls.
    - `must_call`: the answer must be a call of one of the tools. `parallel`: it may have several calls.
    - `n`: the number of answers.
    - `max_tokens`: the maximum number of tokens to sample; None leaves the limit to the gateway. With `clamp` it is
      lowered to what the context has left; otherwise a request that does not fit is refused.
    - `temperature`: the sampling temperature. `stream`: whether the response is a stream of events.
    - `seed`: the seed of the sampling; None: a random one.
    - `stop`: the answer is cut off before the first of these texts.
    - `include_usage`: a stream ends with the token counts.
    - `return_token_ids`: the response also has the token ids of prompt and answer.
    - `sampling`: further parameters of `records.Sampling` by name, without those whose value has no effect.
    - `prompt_field`: the field of the body that has the conversation or the prompt, for errors.
    - `schema_field`: the field of the body that has `schema`, for errors.
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
    prompt_field: str = "messages"
    schema_field: str = "response_format"
    summaries: bool = True
    echo: dict[str, Any] = field(default_factory=dict)


B = TypeVar("B", bound=msgspec.Struct)
P = TypeVar("P")
V = TypeVar("V")
_path = re.compile(r" - at `\$\.?([^`]*)`")
_unknown = re.compile(r"Object contains unknown field `((?:(?! - at `).)*)`", re.DOTALL)
_missing = re.compile(r"Object missing required field `(.*)`")
_expected = re.compile(r"Expected `([a-z |]+)`, got")
_KINDS = {
    "object": "a JSON object",
    "array": "a list",
    "str": "a string",
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
}
"""The names of types in hints, by their names in msgspec's errors."""
ABSENT = msgspec.Raw()
"""The default of a field that is kept as raw JSON. It means that the body does not have the field."""


class BodyDecoder(Generic[B]):
    """A decoder of a dialect's JSON bodies. It parses each body only once.

    - `kind`: the struct of a body.
    - `neutral`: parameters that are not supported, each with the values that are accepted because they have no effect.
    - `harmless`: parameters that are ignored.
    - `parts`: the types of the fields whose JSON text is parsed later, by field; for the OpenAPI document.
    - `example`: a short body that is taken, for hints.

    Any other parameter that is not a field of `kind` is refused. `of_all`: the fields of all decoders, for hints."""

    of_all: ClassVar[set[str]] = set()

    def __init__(
        self,
        kind: type[B],
        *,
        neutral: Mapping[str, Sequence[Any]],
        harmless: Collection[str],
        parts: Mapping[str, Any] | None = None,
        example: str,
    ) -> None:
        self.kind, self.neutral, self.harmless, self.parts = kind, neutral, harmless, parts or {}
        self.example = example
        self._known = {*kind.__struct_fields__, *harmless, *neutral}
        self.of_all.update(self._known)
        others = [(name, msgspec.Raw, ABSENT) for name in self._known.difference(kind.__struct_fields__)]
        options: Any = {"kw_only": True, "forbid_unknown_fields": True}
        self._decoder: Any = msgspec.json.Decoder(msgspec.defstruct(kind.__name__, others, bases=(kind,), **options))

    def decode(self, data: bytes) -> B:
        """Parse a body. Raises `RequestRefused` (HTTP status 400), which names the invalid field."""
        try:
            body: B = self._decoder.decode(data)
        except msgspec.ValidationError as error:
            if unknown := _unknown.fullmatch(str(error)):
                raise unknown_parameter(unknown[1], self._known, self.of_all) from None
            raise invalid_value(error, self._decoder.type, example=self.example) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            if not data.strip():
                raise invalid_request("the body is empty", hint=f"send a JSON object, such as {self.example}") from None
            raise not_json(error, data, self.example) from None
        for name, accepted in self.neutral.items():
            if (raw := getattr(body, name)) is not ABSENT and not _is_one_of(value := _decode_value(raw), accepted):
                raise unsupported_value(name, value, list(accepted))
        return body


def invalid_value(error: msgspec.ValidationError, kind: Any, where: str = "", example: str = "") -> RequestRefused:
    """Return the error of a JSON value that is not of the type `kind`: its place, the fault, and the expected type.

    `where`: the place of the value in the body; "": it is the body. `example`: a body that is taken, for hints."""
    message, found = str(error), _path.search(str(error))
    inner = found[1] if found else ""
    facts = message[: found.start()] if found else message
    place = f"{where}.{inner}" if where and inner and inner[0] != "[" else where + inner
    kinds = _members(msgspec.inspect.type_info(kind))
    for name in re.findall(r"[^.\[]+|\[[^\]]*\]", inner):
        kinds = [one for outer in kinds if (of := _inside(outer, name)) is not None for one in _members(of)]
    allowed = [json.dumps(v) for one in kinds if isinstance(one, msgspec.inspect.LiteralType) for v in one.values]
    if missing := _missing.fullmatch(facts):
        hint = "send this field, which is required" + ("" if place else f", as in {example}")
        place = f"{place}.{missing[1]}" if place else missing[1]
        return invalid_request(f"{place} is missing", hint=hint, param=place)
    if unknown := _unknown.fullmatch(facts):
        fields = [one.encode_name for of in kinds if isinstance(of, msgspec.inspect.StructType) for one in of.fields]
        what, hint = f"{place} has an unknown field", nearest(unknown[1][:100], fields)
        return invalid_request(what, repr(unknown[1][:100]), hint=hint, param=place)
    if allowed:
        hint = f"send {' or '.join(allowed)}"
    elif not place:
        hint = f"send a JSON object, such as {example}"
    elif expected := _expected.match(facts):
        hint = f"send {' or '.join(_KINDS.get(one, one) for one in expected[1].split(' | ') if one != 'null')}"
    else:
        hint = "send a value in the range of the field, or leave it out"
    return invalid_request(f"{place or 'the body'} has an invalid value", facts, hint=hint, param=place or None)


def _members(kind: msgspec.inspect.Type) -> list[msgspec.inspect.Type]:
    return list(kind.types) if isinstance(kind, msgspec.inspect.UnionType) else [kind]


def _inside(kind: msgspec.inspect.Type, name: str) -> msgspec.inspect.Type | None:
    """Return the type of a field of a struct, or of an item of a list ("[...]"); None if there is none."""
    if isinstance(kind, msgspec.inspect.ListType) and name[0] == "[":
        return kind.item_type
    if isinstance(kind, msgspec.inspect.StructType):
        return next((one.type for one in kind.fields if one.encode_name == name), None)
    return None


def check_names(tools: Sequence[Mapping[str, Any]]) -> None:
    """Check that the tools have different names. Raises `RequestRefused`."""
    functions = [tool.get("function") for tool in tools]
    names = [function.get("name") for function in functions if isinstance(function, dict)]
    counts = Counter(name for name in names if isinstance(name, str))
    if twice := next((name for name, num in counts.items() if num > 1), None):
        raise invalid_request(f"two tools have the name {twice[:100]!r}", hint="rename one", param="tools")


def check_results(messages: Sequence[Message], where: str) -> None:
    """Check that each tool call has exactly one result, which comes after it, and each result has a call. Raises
    `RequestRefused` otherwise.

    A call without an id matches any result, and a result without an id any call. `where`: the field of the body with
    the messages."""
    waiting: list[str] = []  # the ids of calls without a result
    for message in messages[messages.known :] if isinstance(messages, KeptMessages) else messages:
        for call in message.get("tool_calls") or ():
            if (call_id := call.get("id", "")) and call_id in waiting:
                what = f"two tool calls have the id {call_id[:100]!r}"
                raise invalid_request(what, hint="give each call an id of its own", param=where)
            waiting.append(call_id)
        if message["role"] != "tool":
            continue
        result = message.get("tool_call_id", "")
        match = result if result in waiting else next((one for one in waiting if not one or not result), None)
        if match is None:
            what = f"the tool result {result[:100]!r} belongs to no call before it"
            hint = "send the model's message with this call first, and one result"
            raise invalid_request(what, hint=hint, param=where)
        waiting.remove(match)
    if waiting:
        named = ", ".join(repr(one[:100]) for one in waiting[:8])
        hint = "send one tool result for each call"
        raise invalid_request("these tool calls have no result", named, hint=hint, param=where)


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
"""The minimum and maximum of parameters."""
SAMPLING = ("top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "min_tokens")


def read_sampling(body: msgspec.Struct) -> dict[str, Any]:
    """Check the sampling parameters of a body. Returns those whose value has an effect, by name.

    Raises `RequestRefused` for a value out of range."""
    for name, (low, high) in RANGES.items():
        check_range(name, getattr(body, name, None), low, high)
    found: dict[str, Any] = {}
    for name in SAMPLING:
        value = getattr(body, name, None)
        if value is not None and value != NEUTRAL_SAMPLING.get(name, 0):
            found[name] = value
    if "top_p" in found and found["top_p"] == 0:
        found |= {"top_p": 1.0, "top_k": 1}  # OpenAI's servers take the likeliest token
    if found.get("top_k") == -1:  # of vLLM: from all tokens
        del found["top_k"]
    check_range("top_k", found.get("top_k"), 0, MAX_TOP_K)
    check_range("min_tokens", found.get("min_tokens"), 0)
    if bias := getattr(body, "logit_bias", None):
        found["logit_bias"] = _logit_bias(bias)
    return found


def _logit_bias(bias: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    try:
        found = {int(token): float(value) for token, value in bias.items() if token.isascii() and token.isdigit()}
    except ValueError:  # more digits than Python converts
        found = {}
    if len(found) != len(bias) or not all(-100 <= value <= 100 for value in found.values()):
        facts = "its keys must be token ids, and its values numbers from -100 to 100"
        hint = 'send an object such as {"42": -100}'
        raise invalid_request("logit_bias has an invalid key or value", facts, hint=hint, param="logit_bias")
    return tuple(sorted(found.items()))


def _decode_value(raw: msgspec.Raw) -> Any:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise not_json(error, bytes(raw)) from None


def _is_one_of(value: Any, accepted: Sequence[Any]) -> bool:
    """Return whether a JSON value is among others. Unlike in Python, true is not 1."""
    return any(value == one and isinstance(value, bool) is isinstance(one, bool) for one in accepted)


class ParseCache(Generic[P, V]):
    """A thread-safe cache of parsed values by their JSON text, since each request repeats all earlier messages.

    `decoder` parses one value, and `convert(value, place)` turns it into the value to keep; `place` is its position in
    the body, for errors. When the JSON texts exceed `max_bytes`, the least recently read values are dropped."""

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
            raise invalid_value(error, self._decoder.type, where) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise not_json(error, raw) from None


def message_reader(
    decoder: msgspec.json.Decoder[P], convert: Callable[[P, str], Sequence[Message]], where: str
) -> Callable[[Sequence[msgspec.Raw], int], list[Message]]:
    """Return the argument `read` of `Conversations` for a dialect in which each part of a body is one message.

    `convert(part, place)` turns a message of the dialect into one or more of `ChatRequest.messages`. `place` is its
    place in the body, for errors. `where`: the field of the body that has the parts."""
    kept = ParseCache(decoder, lambda parsed, place: [KeptMessage(message) for message in convert(parsed, place)])

    def read(parts: Sequence[msgspec.Raw], first: int) -> list[Message]:
        return [m for i, part in enumerate(parts, first) for m in kept.read(bytes(part), f"{where}[{i}]")]

    return read


@dataclass(frozen=True, slots=True)
class _Talk:
    """A conversation that a request sent: its parts, which are views of the body, and its messages."""

    parts: Sequence[msgspec.Raw]
    messages: KeptMessages
    num_bytes: int  # of the body

    def begins(self, parts: Sequence[msgspec.Raw]) -> bool:
        """Return whether `parts` begins with this conversation."""
        num = len(self.parts)
        return num <= len(parts) and self.parts[-1] == parts[num - 1] and self.parts == parts[:num]


_Beginning = tuple[str | bytes, ...]
"""The system message and the first two parts of a conversation."""


class Conversations:
    """Reads the messages of requests, each of which repeats all earlier messages of its conversation. Thread-safe.

    Only new parts are read: those after the longest earlier conversation with which the request begins, found by
    comparing bytes. `read(parts, first)` converts the parts of a body from number `first` on to `ChatRequest.messages`.
    `where` is the field of the body that has the parts. Conversations that were not repeated lately are dropped, so
    that the bodies of all others have at most `max_bytes`."""

    def __init__(
        self, read: Callable[[Sequence[msgspec.Raw], int], list[Message]], where: str, *, max_bytes: int = 64 << 20
    ) -> None:
        self._read, self._where, self._max_bytes = read, where, max_bytes
        # by their beginnings; each has at most half of the bytes
        self._recent, self._older = dict[_Beginning, tuple[_Talk, ...]](), dict[_Beginning, tuple[_Talk, ...]]()
        self._num_bytes, self._lock = 0, threading.Lock()  # of the recent ones

    def read(self, parts: Sequence[msgspec.Raw], num_bytes: int, system: str = "") -> KeptMessages:
        """Return the messages of a request, with the results of tools in the order of their calls.

        `parts`: the parts of the body, which has `num_bytes` bytes. `system`: the text of a system message that comes
        before them; "": none. Raises `RequestRefused` for an invalid part, and if the last message is the model's."""
        beginning: _Beginning = (system, *map(bytes, parts[:2]))
        talks = (*self._recent.get(beginning, ()), *self._older.get(beginning, ()))
        earlier = max((one for one in talks if one.begins(parts)), key=lambda one: len(one.parts), default=None)
        known = 0 if earlier is None else len(earlier.parts)
        new = self._read(parts[known:], known)
        if earlier is not None and new and new[0]["role"] == "tool":  # its place may be among the known messages
            earlier, new = None, self._read(parts, 0)
        if earlier is not None:
            messages = KeptMessages([*earlier.messages, *new], earlier.messages)
        else:
            messages = KeptMessages([KeptMessage({"role": "system", "content": system}), *new] if system else new)
        check_order(messages, self._where)
        if parts and self._is_whole(parts, messages):
            self._keep(beginning, _Talk(parts, messages, num_bytes), earlier)
        return messages

    def _is_whole(self, parts: Sequence[msgspec.Raw], messages: KeptMessages) -> bool:
        """Return whether each call has its result, and the last part does not begin a turn of the model."""
        try:
            check_results(messages, self._where)
        except RequestRefused:
            return False
        return bool(self._read(parts[-1:], len(parts) - 1))

    def _keep(self, beginning: _Beginning, talk: _Talk, earlier: _Talk | None) -> None:
        """Store a conversation. It replaces an earlier one of which it is the continuation."""
        with self._lock:
            if self._num_bytes + talk.num_bytes > self._max_bytes // 2:
                self._older, self._recent, self._num_bytes = self._recent, {}, 0
            similar = self._recent.get(beginning, ())
            others = [one for one in similar if one is not earlier][-_MAX_SIMILAR:]
            self._recent[beginning] = (*others, talk)
            self._num_bytes += talk.num_bytes + sum(one.num_bytes for one in others)
            self._num_bytes -= sum(one.num_bytes for one in similar)


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
        bounds = f"of at least {low}" if high == float("inf") else f"from {low} to {high}"
        raise invalid_request(f"{name} = {value} is out of range", hint=f"send a number {bounds}", param=name)


def check_stops(stop: str | Sequence[str] | None, name: str = "stop") -> tuple[str, ...]:
    """Return the stop texts of a request as a tuple. `name` is the parameter's name.

    Raises `RequestRefused` for more than `MAX_STOPS` texts, and for one with 0 or over `MAX_STOP_CHARS` characters."""
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    wrong = next((len(stop) for stop in stops if not 0 < len(stop) <= MAX_STOP_CHARS), None)
    if len(stops) > MAX_STOPS or wrong is not None:
        facts = f"{len(stops)} texts" if wrong is None else f"a text of {wrong} characters"
        hint = f"send at most {MAX_STOPS} texts of 1 to {MAX_STOP_CHARS} characters"
        raise invalid_request(f"{name} has an invalid value", facts, hint=hint, param=name)
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
        hint = "send the arguments as the model gave them"
        what, facts = "a tool call has invalid arguments", "they are not a JSON object of valid Unicode text"
        raise invalid_request(what, facts, hint=hint, param=where)
    identity = {"id": call_id} if call_id else {}
    return {**identity, "type": "function", "function": {"name": name, "arguments": parsed}}


def function_tool(name: str, description: str | None, schema: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a function as an entry of OpenAI's `tools` list. `schema` is the JSON schema of the arguments."""
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
            what = f"tool_choice names {name[:100]!r}, which is not among the tools"
            hint = nearest(name[:100], list(known)[:20]) if known else "send the tools"
            raise invalid_request(what, hint=hint, param="tool_choice")
    return [known[name] for name in names]


def check_order(messages: list[Message], where: str) -> None:
    """Put the results of tools into the order of their calls. Raises `RequestRefused` if the last message is the
    model's.

    `where` is the name of the request parameter with the messages."""
    if not messages or messages[-1]["role"] == "assistant":
        what = f"{where} does not end with a system, user or tool message"
        facts = "the last message is the model's, which it cannot continue" if messages else "there are no messages"
        raise invalid_request(what, facts, hint="send the message to answer as the last one", param=where)
    for at in range(messages.known if isinstance(messages, KeptMessages) else 0, len(messages)):
        if len(calls := messages[at].get("tool_calls") or ()) > 1:
            order = {call["id"]: i for i, call in enumerate(calls) if "id" in call}
            stop = next((i for i in range(at + 1, len(messages)) if messages[i]["role"] != "tool"), len(messages))
            results = messages[at + 1 : stop]
            messages[at + 1 : stop] = sorted(results, key=lambda m: order.get(m.get("tool_call_id", ""), len(order)))
