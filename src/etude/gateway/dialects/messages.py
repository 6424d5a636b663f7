"""The dialect of Anthropic's Messages API: messages, and the count of a prompt's tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

from etude.capture import Chat, Message
from etude.gateway.answers import Answer, ResponseHead, summary_usage
from etude.gateway.dialects.dialect import Dialect, EventStream, named_event
from etude.gateway.errors import RequestRefused, invalid_request, unsupported_content
from etude.gateway.requests import (
    ABSENT,
    BodyDecoder,
    ChatRequest,
    Conversations,
    ToolsCache,
    canonical_call,
    check_range,
    check_stops,
    chosen_tools,
    function_tool,
    message_reader,
    read_sampling,
)

BILLING = "x-anthropic-billing-header"
"""The beginning of a system block of Claude Code that differs in every request. The block is dropped: the model does
not need it, and with it no two requests would have a common prefix."""
SIGNATURE = "etude"  # of thinking blocks: some clients drop those that have none
HARMLESS = frozenset(
    {
        "betas",
        "billing_policy",
        "cache_control",
        "diagnostics",
        "inference_geo",
        "metadata",
        "service_tier",
        "speed",
        "thinking",  # whether and how long the model reasons is up to its training and its template
        "user_profile_id",
        "workspace_id",
    }
)
"""Parameters that clients send and that do not change the answer; they are ignored."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "compaction": (None,),
    "container": (None,),
    "fallback_credit_token": (None,),
    "fallbacks": (None, []),
    "mcp_servers": (None, []),
    "thread": (None,),
}
"""Known parameters that are not supported, with the values that are accepted because they change nothing."""
ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class _Block(msgspec.Struct):
    type: str
    text: str = ""
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: Any = None
    tool_use_id: str = ""
    content: str | list[_Block] | None = None
    is_error: bool | None = None


class _Message(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[_Block]


class _Tool(msgspec.Struct):
    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class _ToolChoice(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    disable_parallel_tool_use: bool | None = None


class _Format(msgspec.Struct):
    type: Literal["json_schema"]
    schema: dict[str, Any] | bool


class _OutputConfig(msgspec.Struct):
    effort: str | None = None
    format: _Format | None = None


class _Edit(msgspec.Struct):
    type: str


class _ContextManagement(msgspec.Struct):
    edits: list[_Edit] = []


class _Body(msgspec.Struct, kw_only=True):
    model: str
    messages: list[msgspec.Raw]
    max_tokens: int | None = None
    system: str | list[_Block] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    tools: msgspec.Raw = ABSENT
    tool_choice: _ToolChoice | None = None
    output_config: _OutputConfig | None = None
    context_management: _ContextManagement | None = None
    return_token_ids: bool | None = None
    top_p: float | None = None
    top_k: int | None = None


_decoder = BodyDecoder(
    _Body,
    neutral=NEUTRAL,
    harmless=HARMLESS,
    parts={"messages": list[_Message], "tools": list[_Tool] | None},
)


def read(data: bytes) -> ChatRequest:
    """Parse and check the JSON body of a request for a message. Raises `RequestRefused` (HTTP status 400)."""
    request = read_count(data)
    if request.max_tokens is None:
        raise invalid_request("max_tokens is missing", hint="send this field, which is required", param="max_tokens")
    return request


def read_count(data: bytes) -> ChatRequest:
    """Parse and check the JSON body of a request to count the prompt's tokens. Raises `RequestRefused` (HTTP status
    400)."""
    body = _decoder.decode(data)
    check_range("max_tokens", body.max_tokens, 1)
    for edit in body.context_management.edits if body.context_management else ():
        if not edit.type.startswith("clear_thinking"):  # earlier reasoning is in the context only as it was sampled
            what = f"context_management of type {edit.type[:100]!r} is not supported by this model"
            raise invalid_request(what, hint="leave it out, or send clear_thinking", param="context_management")
    messages = _conversations.read(body.messages, len(data), _system(body.system))
    choice = body.tool_choice or _ToolChoice("auto")
    tools = _tools_cache.read(body.tools)
    form = body.output_config.format if body.output_config is not None else None
    return ChatRequest(
        sampling=read_sampling(body),
        schema=None if form is None else form.schema,
        schema_field="output_config.format",
        model=body.model,
        messages=messages,
        tools=chosen_tools(tools, choice.name if choice.type == "tool" else None, none=choice.type == "none"),
        must_call=choice.type in ("any", "tool"),
        parallel=not choice.disable_parallel_tool_use,
        max_tokens=body.max_tokens,
        clamp=True,
        temperature=1.0 if body.temperature is None else body.temperature,
        stop=check_stops(body.stop_sequences, "stop_sequences"),
        stream=bool(body.stream),
        return_token_ids=bool(body.return_token_ids),
    )


def _system(system: str | list[_Block] | None) -> str:
    if isinstance(system, list):
        blocks = [b for i, b in enumerate(system) if not b.text.startswith(BILLING) and _is_text(b, f"system[{i}]")]
        return "\n".join(block.text for block in blocks)
    return system or ""


def _is_text(block: _Block, where: str) -> bool:
    if block.type != "text":
        raise unsupported_content(block.type, where, "text")
    return True


def _text_of(blocks: Sequence[_Block], where: str) -> str:
    return "\n".join(block.text for i, block in enumerate(blocks) if _is_text(block, f"{where}[{i}]"))


def _canonical(message: _Message, where: str) -> list[Message]:
    """Convert a message to `ChatRequest.messages`: each tool result is a separate message, before the user's text."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    if message.role == "assistant":
        return [_assistant(message.content, where)]
    results: list[Message] = []
    others: list[_Block] = []
    for i, block in enumerate(message.content):
        if block.type == "tool_result":
            content = block.content or ""
            text = content if isinstance(content, str) else _text_of(content, f"{where}.content[{i}].content")
            text = text or ("error" if block.is_error else "")
            results.append({"role": "tool", "content": text, "tool_call_id": block.tool_use_id})
        else:
            _is_text(block, f"{where}.content[{i}]")
            others.append(block)
    if others or not results:
        results.append({"role": message.role, "content": "\n".join(block.text for block in others)})
    return results


def _assistant(blocks: Sequence[_Block], where: str) -> Message:
    texts, thoughts, calls = [], [], []
    for i, block in enumerate(blocks):
        if block.type == "tool_use":
            place = f"{where}.content[{i}].input"
            calls.append(canonical_call(block.name, {} if block.input is None else block.input, block.id, place))
        elif block.type == "thinking":
            thoughts.append(block.thinking)
        elif block.type != "redacted_thinking" and _is_text(block, f"{where}.content[{i}]"):
            texts.append(block.text)
    message: Message = {"role": "assistant", "content": "\n".join(texts)}
    if any(thoughts):
        message["reasoning_content"] = "\n".join(thoughts)
    return message | ({"tool_calls": calls} if calls else {})


_conversations = Conversations(message_reader(msgspec.json.Decoder(_Message), _canonical, "messages"), "messages")


def _tool(tool: _Tool, where: str) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        hint = "send tools with an input_schema"
        what = f"{where}: tools of type {tool.type[:100]!r} are not supported by this model"
        raise invalid_request(what, "the client must execute them", hint=hint, param=where)
    return function_tool(tool.name, tool.description, tool.input_schema)


_tools_cache = ToolsCache(_Tool, lambda tools: [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)])


def _usage(answer: Answer) -> dict[str, Any]:
    cached = answer.completion.num_cached
    return {
        "input_tokens": len(answer.prompt_ids) - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": len(answer.completion.token_ids),
        "output_tokens_details": {"thinking_tokens": answer.num_reasoning},
        **summary_usage([answer]),
    }


def _stop(answer: Answer) -> dict[str, Any]:
    reason = STOP_REASONS[answer.finish] if answer.stop_text is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": answer.stop_text}


def _message(head: ResponseHead) -> dict[str, Any]:
    return {"id": f"msg_{head.id}", "type": "message", "role": "assistant", "model": head.model}


def _calls(answer: Answer, head: ResponseHead) -> list[dict[str, Any]]:
    return [
        {"type": "tool_use", "id": call_id, "name": name, "input": json.loads(arguments)}
        for call_id, name, arguments in answer.calls_with_ids("toolu_", head)
    ]


def body(request: ChatRequest, head: ResponseHead, answers: Sequence[Answer]) -> dict[str, Any]:
    """Return the JSON body of a response with one message, made from the first answer."""
    answer = answers[0]
    content: list[dict[str, Any]] = []
    if answer.reasoning:
        content.append({"type": "thinking", "thinking": answer.reasoning, "signature": SIGNATURE})
    if answer.text or not (content or answer.calls):
        content.append({"type": "text", "text": answer.text})
    content += _calls(answer, head)
    message = {**_message(head), "content": content, **_stop(answer), "usage": _usage(answer)}
    if request.return_token_ids:
        message |= {"token_ids": answer.completion.token_ids.tolist(), "prompt_token_ids": answer.prompt_ids.tolist()}
    return message


def error(refused: RequestRefused) -> dict[str, Any]:
    """Return the JSON body of an error. For a full context it has the text "prompt is too long", by which Anthropic's
    clients recognise this error."""
    kind = ERRORS.get(refused.status, "api_error" if refused.status >= 500 else "invalid_request_error")
    message = refused.message
    if refused.code == "context_length_exceeded":
        message = "prompt is too long"
        if refused.context is not None:
            prompt_tokens, context_tokens = refused.context
            message += f": {prompt_tokens} tokens > {context_tokens} maximum"
        message += f"\n  hint: {refused.hint}"
    return {"type": "error", "error": {"type": kind, "message": message}}


class _MessageStream(EventStream):
    """Makes the events from `message_start` to `message_stop`. At any time one content block is open, or none."""

    ping = named_event({"type": "ping"})

    def __init__(self, request: ChatRequest, head: ResponseHead, chat: Chat) -> None:
        super().__init__(request, head, chat)
        self._open, self._num_blocks = "", 0  # type of the open block

    def _start(self, num_prompt: int) -> Iterator[bytes]:
        usage = {"input_tokens": num_prompt, "output_tokens": 0}
        stop = {"stop_reason": None, "stop_sequence": None}
        message = {**_message(self.head), "content": [], **stop, "usage": usage}
        yield named_event({"type": "message_start", "message": message})
        yield self.ping

    def _block(self, block: dict[str, Any]) -> Iterator[bytes]:
        yield from self._close()
        self._open = block["type"]
        yield named_event({"type": "content_block_start", "index": self._num_blocks, "content_block": block})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return named_event({"type": "content_block_delta", "index": self._num_blocks, "delta": delta})

    def _close(self) -> Iterator[bytes]:
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": SIGNATURE})
        if self._open:
            yield named_event({"type": "content_block_stop", "index": self._num_blocks})
            self._open, self._num_blocks = "", self._num_blocks + 1

    def _reasoning(self, piece: str, index: int) -> Iterator[bytes]:
        if self._open != "thinking":
            yield from self._block({"type": "thinking", "thinking": "", "signature": ""})
        yield self._delta({"type": "thinking_delta", "thinking": piece})

    def _text(self, piece: str, index: int) -> Iterator[bytes]:
        if self._open != "text":
            yield from self._block({"type": "text", "text": ""})
        yield self._delta({"type": "text_delta", "text": piece})

    def _finish(self, answer: Answer, index: int) -> Iterator[bytes]:
        for call in _calls(answer, self.head):
            yield from self._block({**call, "input": {}})
            arguments = json.dumps(call["input"], ensure_ascii=False)
            yield self._delta({"type": "input_json_delta", "partial_json": arguments})
        if not (self._open or self._num_blocks):
            yield from self._block({"type": "text", "text": ""})
        yield from self._close()
        yield named_event({"type": "message_delta", "delta": _stop(answer), "usage": _usage(answer)})

    def end(self) -> Iterator[bytes]:
        yield named_event({"type": "message_stop"})

    def error(self, refused: RequestRefused) -> bytes:
        return named_event(error(refused))


DIALECT = Dialect("messages", "/v1/messages", read, body, _MessageStream, error, _decoder, "msg_")
