"""The dialect of OpenAI's Responses API. The server keeps no state: each request has the whole conversation."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Literal

import msgspec

from etude.capture import Chat, KeptMessage, Message
from etude.gateway.answers import Answer, ResponseHead, logprob_entry, summary_usage
from etude.gateway.dialects.declared_tools import DeclaredTool, ToolName, function_name, functions, names_of
from etude.gateway.dialects.dialect import Dialect, EventStream, named_event
from etude.gateway.errors import RequestRefused, invalid_request, not_json, openai_error, unsupported_content
from etude.gateway.requests import (
    ABSENT,
    BodyDecoder,
    ChatRequest,
    Conversations,
    ParseCache,
    ToolsCache,
    canonical_call,
    check_range,
    chosen_tools,
    read_sampling,
)

HARMLESS = frozenset(
    {
        "access_programs",
        "client_metadata",
        "metadata",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "reasoning",  # whether and how long the model reasons is up to its training and its template
        "safety_identifier",
        "service_tier",
        "store",
        "stream_options",
        "user",
    }
)
"""Parameters that clients send and that do not change the answer; they are ignored."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "background": (None, False),
    "context_management": (None, []),
    "conversation": (None,),
    "max_tool_calls": (None,),
    "moderation": (None,),
    "previous_response_id": (None,),
    "prompt": (None,),
    "truncation": (None, "disabled"),
}
"""Known parameters that are not supported, with the values that are accepted because they change nothing."""


class _ContentPart(msgspec.Struct):
    type: str
    text: str = ""
    refusal: str = ""


class _Item(msgspec.Struct):
    type: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[_ContentPart] | None = None
    call_id: str = ""
    name: str = ""
    namespace: str | None = None
    arguments: str = "{}"
    input: str = ""
    output: str | list[_ContentPart] = ""


class _ToolChoice(msgspec.Struct):
    type: str
    name: str = ""
    namespace: str = ""
    mode: Literal["auto", "required"] = "auto"
    tools: list[_ToolChoice] = []


class _TextFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    schema: dict[str, Any] | bool | None = None
    name: str = ""
    description: str | None = None
    strict: bool | None = None
    json_schema: Any = None  # of chat completions


class _Text(msgspec.Struct):
    format: _TextFormat | None = None
    verbosity: str | None = None


class _Body(msgspec.Struct, kw_only=True):
    model: str
    input: str | list[msgspec.Raw]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    stream: bool | None = None
    tools: msgspec.Raw = ABSENT
    tool_choice: Literal["auto", "none", "required"] | _ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: _Text | None = None
    return_token_ids: bool | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None


_decoder = BodyDecoder(
    _Body,
    neutral=NEUTRAL,
    harmless=HARMLESS,
    parts={"input": str | list[_Item], "tools": list[DeclaredTool] | None},
    example='{"model": "NAME", "input": "hello"}',
)
_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
ECHOED = (
    "instructions",
    "max_output_tokens",
    "metadata",
    "parallel_tool_calls",
    "temperature",
    "text",
    "tool_choice",
    "tools",
    "top_p",
    "user",
)
"""Parameters that the response repeats."""


def read(data: bytes) -> ChatRequest:
    """Parse and check the JSON body of a request of the Responses API. Raises `RequestRefused` (HTTP status 400)."""
    body = _decoder.decode(data)
    check_range("max_output_tokens", body.max_output_tokens, 1)
    if isinstance(body.input, str):
        messages: list[Message] = [{"role": "system", "content": body.instructions}] if body.instructions else []
        messages.append({"role": "user", "content": body.input})
    else:
        messages = _conversations.read(body.input, len(data), body.instructions or "")
    choice = body.tool_choice or "auto"
    only: list[str] | None = None
    if isinstance(choice, _ToolChoice):
        if choice.type not in ("function", "custom", "allowed_tools"):
            hint = "send auto, none, required, or an object of type function, custom or allowed_tools"
            what = f"tool_choice of type {choice.type[:100]!r} is not supported"
            raise invalid_request(what, hint=hint, param="tool_choice")
        chosen = choice.tools if choice.type == "allowed_tools" else [choice]
        only = [function_name(one.namespace, one.name) for one in chosen]
        must = choice.type != "allowed_tools" or choice.mode == "required"
    else:
        must = choice == "required"
    tools = _tools[must].read(body.tools)
    form = body.text.format if body.text is not None else None
    schema: dict[str, Any] | bool | None = None
    if form is not None and form.type == "json_schema":
        schema = form.schema
        if schema is None:
            hint = 'send {"type": "json_schema", "name": ..., "schema": {...}}'
            raise invalid_request("text.format lacks schema", hint=hint, param="text.format")
    elif form is not None and form.type == "json_object":
        schema = {"type": "object"}
    offered = chosen_tools(tools, only, none=choice == "none")
    logprobs = bool(body.top_logprobs) or "message.output_text.logprobs" in (body.include or ())
    return ChatRequest(
        model=body.model,
        messages=messages,
        tools=offered,
        sampling=read_sampling(body),
        schema=schema,
        prompt_field="input",
        schema_field="text.format",
        top_logprobs=(body.top_logprobs or 0) if logprobs else None,
        must_call=must,
        parallel=body.parallel_tool_calls is not False,
        max_tokens=body.max_output_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        stream=bool(body.stream),
        return_token_ids=bool(body.return_token_ids),
        echo=_echoed(data),
    )


def _echoed(data: bytes) -> dict[str, Any]:
    """Return the fields of a body that the response repeats. The tools are JSON text."""
    fields = _fields_decoder.decode(data)
    tools = bytes(fields.pop("tools", b"null"))
    try:
        found = {name: msgspec.json.decode(fields[name]) for name in ECHOED if name in fields}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise not_json(error, data) from None
    found["tools"] = None if tools == b"null" else _echoed_tools.read(tools, "tools")
    return {name: value for name, value in found.items() if value is not None}


def _messages(items: Sequence[msgspec.Raw], first: int) -> list[Message]:
    """Convert items of a conversation to messages. The items of one turn of the model become one message. `first`: the
    number of the first item."""
    messages: list[Message] = []
    turn: list[bytes] = []  # the items of the model's turn that is being put together
    is_said = False  # whether they have a text or a call

    def end_turn() -> None:
        nonlocal is_said
        if is_said:
            messages.append(_turns.read(b"[" + b",".join(turn) + b"]", "input"))
        turn.clear()
        is_said = False

    for i, item in enumerate(items, first):
        raw = bytes(item)
        message = _items.read(raw, f"input[{i}]")
        if message["role"] == "assistant":
            if is_said and "tool_calls" not in message:
                end_turn()
            turn.append(raw)
            is_said |= bool(message["content"] or message.get("tool_calls"))
        else:
            end_turn()
            messages.append(message)
    end_turn()
    return messages


def _message(item: _Item, where: str) -> KeptMessage:
    """Convert one item to a message; for an item of the model, to a part of one."""
    kind = item.type or "message"
    message: Message = {"role": "assistant", "content": ""}
    if kind == "message":
        if item.role is None:
            hint = "send user, assistant, system or developer"
            raise invalid_request(f"{where}.role is missing", hint=hint, param=f"{where}.role")
        role = "system" if item.role == "developer" else item.role
        message = {"role": role, "content": _text(item.content, f"{where}.content")}
    elif kind == "reasoning":
        if text := _text(item.content, f"{where}.content"):
            message["reasoning_content"] = text
    elif kind in ("function_call", "custom_tool_call"):
        arguments = item.arguments if kind == "function_call" else {"input": item.input}
        name = function_name(item.namespace or "", item.name)
        message["tool_calls"] = [canonical_call(name, arguments, item.call_id, f"{where}.arguments")]
    elif kind in ("function_call_output", "custom_tool_call_output"):
        message = {"role": "tool", "content": _text(item.output, f"{where}.output"), "tool_call_id": item.call_id}
    else:
        hint = "send messages, reasoning, and calls of functions and custom tools with their outputs"
        raise invalid_request(f"an item of type {kind[:100]!r} is not supported by this model", hint=hint, param=where)
    return KeptMessage(message)


def _turn(items: Sequence[_Item], where: str) -> KeptMessage:
    """Join the items of one turn of the model to one message."""
    turn: Message = {"role": "assistant", "content": ""}
    for part in (_message(item, where) for item in items):
        turn |= {name: value for name, value in part.items() if value and name != "tool_calls"}
        turn |= {"tool_calls": turn.get("tool_calls", []) + part["tool_calls"]} if "tool_calls" in part else {}
    return KeptMessage(turn)


_conversations = Conversations(_messages, "input")
_items = ParseCache(msgspec.json.Decoder(_Item), _message)
_turns = ParseCache(msgspec.json.Decoder(list[_Item]), _turn)
_echoed_tools: ParseCache[Any, msgspec.Raw] = ParseCache(
    msgspec.json.Decoder(), lambda tools, _: msgspec.Raw(msgspec.json.encode(tools))
)
_tools = {must: ToolsCache(DeclaredTool, partial(functions, must_call=must)) for must in (False, True)}


def _text(content: str | list[_ContentPart] | None, where: str) -> str:
    if not isinstance(content, list):
        return content or ""
    for part in content:
        if part.type not in ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"):
            raise unsupported_content(part.type, where, "input_text")
    return "".join(part.text or part.refusal for part in content)


def _output(request: ChatRequest, head: ResponseHead, answer: Answer) -> list[dict[str, Any]]:
    """Return the output items of an answer: reasoning, message and calls."""
    status = "incomplete" if answer.finish == "length" else "completed"
    items: list[dict[str, Any]] = []
    if answer.reasoning:
        items.append(_reasoning_item(head, answer.reasoning))
    if answer.text or not answer.calls:
        items.append(_message_item(head, answer.text, status, _logprobs(answer)))
    declared = names_of(msgspec.json.decode(request.echo["tools"])) if answer.calls and "tools" in request.echo else {}
    for number, (call_id, function, arguments) in enumerate(answer.calls_with_ids("call_", head)):
        namespace, name, custom = declared.get(function, ToolName("", function, custom=False))
        if custom:
            text = answer.calls[number]["arguments"].get("input", "")
            content = {"type": "custom_tool_call", "input": text if isinstance(text, str) else json.dumps(text)}
        else:
            content = {"type": "function_call", "arguments": arguments}
        content |= {"call_id": call_id, "name": name, "status": "completed"}
        items.append({"id": f"fc_{head.id}{number}", **content} | ({"namespace": namespace} if namespace else {}))
    return items


def _reasoning_item(head: ResponseHead, text: str | None) -> dict[str, Any]:
    content = [] if text is None else [{"type": "reasoning_text", "text": text}]
    return {"id": f"rs_{head.id}", "type": "reasoning", "summary": [], "content": content}


def _message_item(
    head: ResponseHead, text: str | None, status: str, logprobs: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    content = [] if text is None else [_text_part(text, logprobs)]
    return {"id": f"msg_{head.id}", "type": "message", "role": "assistant", "status": status, "content": content}


def _text_part(text: str, logprobs: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def _logprobs(answer: Answer) -> list[dict[str, Any]]:
    return [logprob_entry(token) for token in answer.logprobs or ()]


def _response(request: ChatRequest, head: ResponseHead, status: str) -> dict[str, Any]:
    return {
        "id": f"resp_{head.id}",
        "object": "response",
        "created_at": head.created,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": None,
        "metadata": {},
        "model": head.model,
        "output": [],
        "parallel_tool_calls": request.parallel,
        "previous_response_id": None,
        "store": False,
        "temperature": request.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": 1.0,
        "truncation": "disabled",
        "usage": None,
        **request.echo,
    }


def body(request: ChatRequest, head: ResponseHead, answers: Sequence[Answer]) -> dict[str, Any]:
    """Return the JSON body of a response, made from the first answer."""
    answer = answers[0]
    prompt, sampled, cut = len(answer.prompt_ids), len(answer.completion.token_ids), answer.finish == "length"
    response = _response(request, head, "incomplete" if cut else "completed")
    response["output"] = _output(request, head, answer)
    response["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
    response["usage"] = {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": answer.completion.num_cached, "cache_write_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": answer.num_reasoning},
        "total_tokens": prompt + sampled,
        **summary_usage(answers),
    }
    if request.return_token_ids:
        response |= {"token_ids": answer.completion.token_ids.tolist(), "prompt_token_ids": answer.prompt_ids.tolist()}
    return response


class _ResponseStream(EventStream):
    """Makes the events from `response.created` to `response.completed`. At any time one item is open, or none."""

    def __init__(self, request: ChatRequest, head: ResponseHead, chat: Chat) -> None:
        super().__init__(request, head, chat)
        self._number = -1
        self._open, self._num_items, self._sent = "", 0, ""  # type of the open item, and its text so far

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return named_event({"type": kind, "sequence_number": self._number, **fields})

    def _start(self, num_prompt: int) -> Iterator[bytes]:
        response = _response(self.request, self.head, "in_progress")
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)

    def _item(self, kind: str, item: dict[str, Any]) -> bytes:
        return self._event(f"response.output_item.{kind}", output_index=self._num_items, item=item)

    def _place(self, item: dict[str, Any]) -> dict[str, Any]:
        return {"item_id": item["id"], "output_index": self._num_items, "content_index": 0}

    def _begin(self, kind: str) -> Iterator[bytes]:
        if self._open == kind:
            return
        yield from self._close("completed")
        self._open, self._sent = kind, ""
        item = (
            _reasoning_item(self.head, None) if kind == "reasoning" else _message_item(self.head, None, "in_progress")
        )
        yield self._item("added", item)
        part = {"type": "reasoning_text", "text": ""} if kind == "reasoning" else _text_part("")
        yield self._event("response.content_part.added", **self._place(item), part=part)

    def _close(self, status: str, logprobs: Sequence[dict[str, Any]] = ()) -> Iterator[bytes]:
        if self._open == "reasoning":
            item = _reasoning_item(self.head, self._sent)
            yield self._event("response.reasoning_text.done", **self._place(item), text=self._sent)
        elif self._open == "message":
            item = _message_item(self.head, self._sent, status, logprobs)
            done = "response.output_text.done"
            yield self._event(done, **self._place(item), text=self._sent, logprobs=list(logprobs))
        else:
            return
        yield self._event("response.content_part.done", **self._place(item), part=item["content"][0])
        yield self._item("done", item)
        self._open, self._num_items = "", self._num_items + 1

    def _reasoning(self, piece: str, index: int) -> Iterator[bytes]:
        yield from self._begin("reasoning")
        self._sent += piece
        place = self._place(_reasoning_item(self.head, None))
        yield self._event("response.reasoning_text.delta", **place, delta=piece)

    def _text(self, piece: str, index: int) -> Iterator[bytes]:
        yield from self._begin("message")
        self._sent += piece
        place = self._place(_message_item(self.head, None, ""))
        yield self._event("response.output_text.delta", **place, delta=piece, logprobs=[])

    def _finish(self, answer: Answer, index: int) -> Iterator[bytes]:
        response = body(self.request, self.head, [answer])
        if not answer.text and not answer.calls:
            yield from self._begin("message")
        yield from self._close("incomplete" if answer.finish == "length" else "completed", _logprobs(answer))
        for item in response["output"]:
            if item["type"] in ("function_call", "custom_tool_call"):
                yield from self._call(item)
        kind = "response.incomplete" if answer.finish == "length" else "response.completed"
        yield self._event(kind, response=response)

    def _call(self, item: dict[str, Any]) -> Iterator[bytes]:
        name = "arguments" if item["type"] == "function_call" else "input"
        kind = f"response.{item['type']}_{name}"
        place = {"item_id": item["id"], "output_index": self._num_items}
        yield self._item("added", {**item, name: "", "status": "in_progress"})
        yield self._event(f"{kind}.delta", **place, delta=item[name])
        yield self._event(f"{kind}.done", **place, **{name: item[name]}, name=item["name"])
        yield self._item("done", item)
        self._num_items += 1

    def error(self, refused: RequestRefused) -> bytes:
        failed = _response(self.request, self.head, "failed")
        failed["error"] = {"code": refused.code, "message": refused.message}
        first = self._event("error", code=refused.code, message=refused.message, param=refused.param)
        return first + self._event("response.failed", response=failed)


DIALECT = Dialect("responses", "/v1/responses", read, body, _ResponseStream, openai_error, _decoder, "resp_")
