"""Converts completions to OpenAI's response bodies. `streams` does this for streamed responses."""

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
    """The model's answer to one request, before it is written as a response body. `make_response` makes one.

    - `created`: Unix seconds.
    - `text`: the text of the answer, without tool calls and without the stop text.
    - `calls`: tool calls, each as ``{"name": str, "arguments": dict}``.
    - `finish_reason`: "stop", "length" or "tool_calls".
    - `stopped_by_text`: whether one of the request's stop texts cut the answer off.
    - `prompt_ids`: the token ids that the model read, [P] int32.
    - `completion`: what the policy returned for this request."""

    response_id: str  # "chatcmpl-...", "cmpl-..."
    created: int
    model: str
    text: str
    calls: tuple[dict[str, Any], ...]
    finish_reason: str
    stopped_by_text: bool
    prompt_ids: I32
    completion: Completion

    @property
    def fingerprint(self) -> str | None:
        """The version of the weights that sampled the last token, as text; None if no token was sampled."""
        spans = self.completion.spans
        return str(spans[-1].version) if spans else None

    def usage(self) -> dict[str, Any]:
        """Return OpenAI's usage object. `cached_tokens` in it counts prompt tokens whose KV was reused."""
        prompt, sampled = len(self.prompt_ids), len(self.completion.token_ids)
        cached = {"cached_tokens": self.completion.num_cached}
        return {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
            "prompt_tokens_details": cached,
        }

    def message(self) -> dict[str, Any]:
        """Return the assistant's message in OpenAI's format, for a response that is not streamed."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text, "refusal": None}
        if self.calls:
            message |= {"content": self.text or None, "tool_calls": self.tool_calls()}
        return message

    def canonical_message(self) -> Message:
        """Return the message as a later request will repeat it, in the form of `ChatRequest.messages`.

        The gateway records the turn under this message and so finds it again."""
        calls = [{"type": "function", "function": call} for call in self.calls]
        return {"role": "assistant", "content": self.text} | ({"tool_calls": calls} if calls else {})

    def tool_calls(self) -> list[dict[str, Any]]:
        """Return the tool calls in OpenAI's format, with arguments as JSON text.

        The id of a call consists of the end of the response's id and the call's index."""
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
    """Parse a completion and cut it off before the first stop text.

    `signatures` are the tools, as returned by `chat.signatures`. If None, the completion is not searched for tool
    calls. A malformed tool call is returned as text. `stop` are the stop texts, and `created` is in Unix seconds."""
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
    """Return the JSON body of a chat completion (`chat.completion`).

    With `return_token_ids` it also has the token ids of prompt and answer."""
    return _body(answer, "chat.completion", {"message": answer.message()}, return_token_ids)


def text_body(answer: ModelResponse, *, return_token_ids: bool) -> dict[str, Any]:
    """Return the JSON body of a text completion (`text_completion`).

    With `return_token_ids` it also has the token ids of prompt and answer."""
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
