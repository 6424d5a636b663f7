"""The dialect of OpenAI's chat completions API."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec

from etude.capture import Message
from etude.gateway.answers import Answer, ResponseHead, logprob_entry
from etude.gateway.dialects.dialect import Dialect
from etude.gateway.dialects.shared import HARMLESS, NEUTRAL, Body, CompletionStream, common, head_fields, whole_body
from etude.gateway.errors import invalid_request, openai_error, unsupported_content
from etude.gateway.requests import (
    ABSENT,
    BodyDecoder,
    ChatRequest,
    Conversations,
    ToolsCache,
    canonical_call,
    chosen_tools,
    message_reader,
)

NEUTRAL_OF_CHAT: dict[str, tuple[Any, ...]] = {
    **NEUTRAL,
    "functions": (None, []),
    "function_call": (None, "auto", "none"),
    "audio": (None,),
    "modalities": (None, ["text"]),
    "moderation": (None,),
    "web_search_options": (None,),
}
"""Known parameters that are not supported, with the values that are accepted because they change nothing."""


_TEXTS = ("text", "input_text", "output_text")  # types of parts of a message


class _ContentPart(msgspec.Struct):
    type: Annotated[str, msgspec.Meta(extra_json_schema={"enum": list(_TEXTS)})]
    text: str = ""


class _Function(msgspec.Struct):
    name: str
    arguments: str = "{}"


class _ToolCall(msgspec.Struct):
    function: _Function
    id: str = ""


class _Message(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_ContentPart] | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: Any = None
    reasoning_content: Any = None  # a text; what others put there is ignored
    reasoning: Any = None  # the same field of other servers


class _NamedFunction(msgspec.Struct):
    name: str


class _AllowedTools(msgspec.Struct):
    mode: Literal["auto", "required"]
    tools: list[dict[str, Any]]


class _ToolChoice(msgspec.Struct):
    type: Literal["function", "allowed_tools"]
    function: _NamedFunction | None = None
    allowed_tools: _AllowedTools | None = None


class _JsonSchema(msgspec.Struct, forbid_unknown_fields=True):
    schema: dict[str, Any] | bool | None = None
    name: str = ""
    description: str | None = None
    strict: bool | None = None


class _ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JsonSchema | None = None
    schema: Any = None  # of Responses
    name: Any = None
    strict: Any = None
    description: Any = None


class _ChatBody(Body, kw_only=True):
    messages: list[msgspec.Raw]
    tools: msgspec.Raw = ABSENT
    tool_choice: Literal["none", "auto", "required"] | _ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: _ResponseFormat | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


_decoder = BodyDecoder(
    _ChatBody,
    neutral=NEUTRAL_OF_CHAT,
    harmless=HARMLESS,
    parts={"messages": list[_Message], "tools": list[dict[str, Any]] | None},
    example='{"model": "NAME", "messages": [{"role": "user", "content": "hello"}]}',
)


def read(data: bytes) -> ChatRequest:
    """Parse and check the JSON body of a chat completion request. Raises `RequestRefused` (HTTP status 400)."""
    body = _decoder.decode(data)
    fields = common(body)
    messages = _conversations.read(body.messages, len(data))
    tools, must_call = _tools(body)
    form, schema = body.response_format, None
    if form is not None and (form.type == "json_schema" or form.schema is not None):
        schema = form.json_schema.schema if form.json_schema is not None else None
        if schema is None:
            hint = 'send {"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}'
            what = "response_format lacks json_schema.schema"
            raise invalid_request(what, hint=hint, param="response_format")
    elif form is not None and form.type == "json_object":
        schema = {"type": "object"}
    if body.top_logprobs and not body.logprobs:
        hint = "send logprobs = true too, or leave top_logprobs out"
        raise invalid_request("top_logprobs is given without logprobs", hint=hint, param="top_logprobs")
    return ChatRequest(
        messages=messages,
        tools=tools,
        must_call=must_call,
        parallel=body.parallel_tool_calls is not False,
        schema=schema,
        top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        **fields,
    )


def _tools(body: _ChatBody) -> tuple[list[dict[str, Any]], bool]:
    """Return the tools that the model may call, and whether it must call one."""
    tools, choice = _tools_cache.read(body.tools), body.tool_choice
    if not isinstance(choice, _ToolChoice):
        return chosen_tools(tools, None, none=choice == "none"), choice == "required"
    if choice.type == "function" and choice.function is not None:
        return chosen_tools(tools, choice.function.name), True
    if choice.allowed_tools is None:
        what, hint = f"tool_choice of type {choice.type!r} lacks the field {choice.type!r}", f"send {choice.type}"
        raise invalid_request(what, hint=hint, param="tool_choice")
    functions = [tool.get("function") for tool in choice.allowed_tools.tools]
    names = [str(function.get("name")) if isinstance(function, dict) else "" for function in functions]
    return chosen_tools(tools, names), choice.allowed_tools.mode == "required"


def _canonical(message: _Message, where: str) -> list[Message]:
    """Convert a message to its canonical form, in which it is rendered and compared."""
    content = message.content
    if isinstance(content, list):
        for part in content:
            if part.type not in _TEXTS:
                raise unsupported_content(part.type, f"{where}.content", "text")
        content = "".join(part.text for part in content)
    role = "system" if message.role == "developer" else message.role
    canonical: Message = {"role": role, "content": content or ""}
    thought = message.reasoning_content or message.reasoning
    if role == "assistant" and thought and isinstance(thought, str):
        canonical["reasoning_content"] = thought
    if message.function_call is not None:
        what = "the old field function_call is not supported"
        raise invalid_request(what, hint="send tool_calls", param=f"{where}.function_call")
    if role == "tool" and message.tool_call_id:
        canonical["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        if role != "assistant":
            hint = "send tool_calls in messages of the role assistant only"
            raise invalid_request(f"a {role} message has tool_calls", hint=hint, param=f"{where}.tool_calls")
        canonical["tool_calls"] = [
            canonical_call(c.function.name, c.function.arguments, c.id, f"{where}.tool_calls")
            for c in message.tool_calls
        ]
    return [canonical]


_conversations = Conversations(message_reader(msgspec.json.Decoder(_Message), _canonical, "messages"), "messages")
_tools_cache = ToolsCache(dict[str, Any], lambda tools: tools)


def _tool_calls(answer: Answer, head: ResponseHead, index: int) -> list[dict[str, Any]]:
    return [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for call_id, name, arguments in answer.calls_with_ids("call_", head, index)
    ]


def _logprobs(answer: Answer) -> dict[str, Any] | None:
    if answer.logprobs is None:
        return None
    return {"content": [logprob_entry(token) for token in answer.logprobs], "refusal": None}


def body(request: ChatRequest, head: ResponseHead, answers: Sequence[Answer]) -> dict[str, Any]:
    """Return the JSON body of a response, an object `chat.completion` with one choice for each answer."""
    messages = []
    for index, answer in enumerate(answers):
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            message |= {"content": answer.text or None, "tool_calls": _tool_calls(answer, head, index)}
        messages.append({"message": message, "logprobs": _logprobs(answer)})
    return whole_body(request, head_fields(head, "chatcmpl-", "chat.completion"), answers, messages)


class _ChatStream(CompletionStream):
    """Makes the events of type `chat.completion.chunk`."""

    prefix, kind = "chatcmpl-", "chat.completion.chunk"

    def _start(self, num_prompt: int) -> Iterator[bytes]:
        for index in range(self.request.n):
            yield self._event({"delta": {"role": "assistant", "content": ""}}, index)

    def _reasoning(self, piece: str, index: int) -> Iterator[bytes]:
        yield self._event({"delta": {"reasoning_content": piece}}, index)

    def _content(self, piece: str) -> dict[str, Any]:
        return {"delta": {"content": piece} if piece else {}}

    def _logprobs(self, answer: Answer) -> dict[str, Any] | None:
        return _logprobs(answer)

    def _calls(self, answer: Answer, index: int) -> Iterator[dict[str, Any]]:
        for number, call in enumerate(_tool_calls(answer, self.head, index)):
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            yield {"delta": {"tool_calls": [{"index": number, **call, "function": {"name": name, "arguments": ""}}]}}
            yield {"delta": {"tool_calls": [{"index": number, "function": {"arguments": arguments}}]}}


DIALECT = Dialect("chat", "/v1/chat/completions", read, body, _ChatStream, openai_error, _decoder, _ChatStream.prefix)
