"""Converts completions to OpenAI's response bodies. `streams` does the same for streamed responses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from etude.capture import Chat, Message
from etude.records.completion import Completion, StopReason
from etude.records.wire import I32


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelResponse:
    """The model's response to one request, as the client gets it."""

    response_id: str  # "chatcmpl-...", "cmpl-..."
    created: int  # unix seconds
    model: str
    text: str
    calls: tuple[dict[str, Any], ...]  # tool calls: {"name", "arguments": a mapping}
    finish_reason: str  # "stop", "length" or "tool_calls"
    stopped_by_text: bool  # whether a stop text cut the completion off
    prompt_ids: I32
    completion: Completion

    @property
    def fingerprint(self) -> str | None:
        """The version of the weights that sampled the last token; None without tokens."""
        spans = self.completion.spans
        return str(spans[-1].version) if spans else None

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object; `cached_tokens` are prompt tokens whose KV was reused."""
        prompt, sampled = len(self.prompt_ids), len(self.completion.token_ids)
        cached = {"cached_tokens": self.completion.num_cached}
        return {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
            "prompt_tokens_details": cached,
        }

    def message(self) -> dict[str, Any]:
        """The assistant's message in OpenAI's format."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text, "refusal": None}
        if self.calls:
            message |= {"content": self.text or None, "tool_calls": self.tool_calls()}
        return message

    def canonical_message(self) -> Message:
        """The message in the form of `ChatRequest.messages`, by which the tree finds the turn again."""
        calls = [{"type": "function", "function": call} for call in self.calls]
        return {"role": "assistant", "content": self.text} | ({"tool_calls": calls} if calls else {})

    def tool_calls(self) -> list[dict[str, Any]]:
        """The calls in OpenAI's format: ids from the index in the response, arguments as JSON text."""
        return [
            {
                "id": f"call_{self.response_id[-12:]}{index}",
                "type": "function",
                "function": {"name": c["name"], "arguments": json.dumps(c["arguments"], ensure_ascii=False)},
            }
            for index, c in enumerate(self.calls)
        ]


def make_response(
    completion: Completion,
    *,
    chat: Chat,
    signatures: Any,
    stop: Sequence[str],
    prompt_ids: I32,
    response_id: str,
    model: str,
    created: int,
) -> ModelResponse:
    """Parse a completion and apply the stop texts.

    `signatures`: the tools; None: do not look for tool calls. A malformed call is returned as text. `created`: unix
    seconds."""
    reply = chat.parse(completion.token_ids, signatures, strict=False) if signatures is not None else None
    calls: tuple[dict[str, Any], ...] = ()
    if reply is not None:
        calls = tuple({"name": call.name, "arguments": call.arguments} for call in reply.calls)
    text = reply.text if reply is not None and not reply.error else chat.decode(completion.token_ids)
    end = min((at for s in stop if (at := text.find(s)) >= 0), default=-1)
    stopped_by_text = end >= 0
    if stopped_by_text:
        text, calls = text[:end], ()
    length = completion.stop_reason is StopReason.LENGTH and not stopped_by_text
    return ModelResponse(
        response_id=response_id,
        created=created,
        model=model,
        text=text,
        calls=calls,
        finish_reason="tool_calls" if calls else "length" if length else "stop",
        stopped_by_text=stopped_by_text,
        prompt_ids=prompt_ids,
        completion=completion,
    )


def chat_body(answer: ModelResponse, *, return_token_ids: bool) -> dict[str, Any]:
    """The body of a chat completion (`chat.completion`)."""
    return _body(answer, "chat.completion", {"message": answer.message()}, return_token_ids)


def text_body(answer: ModelResponse, *, return_token_ids: bool) -> dict[str, Any]:
    """The body of a text completion (`text_completion`)."""
    return _body(answer, "text_completion", {"text": answer.text}, return_token_ids)


def _body(answer: ModelResponse, kind: str, content: dict[str, Any], return_token_ids: bool) -> dict[str, Any]:
    choice = {"index": 0, **content, "logprobs": None, "finish_reason": answer.finish_reason}
    body = {
        "id": answer.response_id,
        "object": kind,
        "created": answer.created,
        "model": answer.model,
        "system_fingerprint": answer.fingerprint,
        "choices": [choice],
        "usage": answer.usage(),
    }
    if return_token_ids:
        choice["token_ids"] = answer.completion.token_ids.tolist()
        body["prompt_token_ids"] = answer.prompt_ids.tolist()
    return body
