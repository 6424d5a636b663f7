"""A completion → OpenAI's answer, whole or as the chunks of a stream. Pure."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from etude.gateway.seam import Chat
from etude.records.completion import Completion, StopReason
from etude.records.wire import I32


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One completion as a client is told it."""

    answer_id: str  # "chatcmpl-..."
    created: int  # unix seconds
    model: str
    text: str
    calls: tuple[dict[str, Any], ...]  # {"name", "arguments": a mapping}
    finish_reason: str  # "stop", "length" or "tool_calls"
    cut: bool  # a stop text ended it before its tokens did
    prompt_ids: I32
    completion: Completion

    @property
    def fingerprint(self) -> str | None:
        """The version that sampled the answer's last token."""
        spans = self.completion.spans
        return str(spans[-1].version) if spans else None

    def usage(self) -> dict[str, Any]:
        """Token counts, those whose KV was reused included."""
        prompt, sampled = len(self.prompt_ids), len(self.completion.token_ids)
        cached = {"cached_tokens": self.completion.num_cached}
        return {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
            "prompt_tokens_details": cached,
        }

    def message(self) -> dict[str, Any]:
        """The assistant's message; a client that sends it back is recognised by it."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text, "refusal": None}
        if self.calls:
            message |= {"content": self.text or None, "tool_calls": self.tool_calls()}
        return message

    def tool_calls(self) -> list[dict[str, Any]]:
        """The calls in OpenAI's shape: named by their place in the answer, arguments as a JSON text."""
        return [
            {
                "id": f"call_{self.answer_id[-12:]}{index}",
                "type": "function",
                "function": {"name": c["name"], "arguments": json.dumps(c["arguments"], ensure_ascii=False)},
            }
            for index, c in enumerate(self.calls)
        ]


def make_answer(
    completion: Completion,
    *,
    chat: Chat,
    signatures: Any,
    stop: Sequence[str],
    prompt_ids: I32,
    model: str,
    created: int,
) -> Answer:
    """Read a completion for a client. A call that cannot be read is told as the text it is."""
    reply = chat.parse(completion.token_ids, signatures)
    calls: tuple[dict[str, Any], ...] = ()
    if reply.call is not None:
        calls = ({"name": reply.call.name, "arguments": reply.call.arguments},)
    text = reply.text if not reply.error else chat.decode(completion.token_ids)
    end = min((at for s in stop if (at := text.find(s)) >= 0), default=-1)
    cut = end >= 0
    if cut:
        text, calls = text[:end], ()
    length = completion.stop_reason is StopReason.LENGTH and not cut
    return Answer(
        answer_id=f"chatcmpl-{uuid.uuid4().hex}",
        created=created,
        model=model,
        text=text,
        calls=calls,
        finish_reason="tool_calls" if calls else "length" if length else "stop",
        cut=cut,
        prompt_ids=prompt_ids,
        completion=completion,
    )


def whole(answer: Answer, *, return_token_ids: bool) -> dict[str, Any]:
    """The `chat.completion` object."""
    choice: dict[str, Any] = {
        "index": 0,
        "message": answer.message(),
        "logprobs": None,
        "finish_reason": answer.finish_reason,
    }
    body = _head(answer, "chat.completion") | {"choices": [choice], "usage": answer.usage()}
    if return_token_ids:
        choice["token_ids"] = answer.completion.token_ids.tolist()
        body["prompt_token_ids"] = answer.prompt_ids.tolist()
    return body


def chunks(answer: Answer, chat: Chat, *, include_usage: bool) -> Iterator[bytes]:
    """The `chat.completion.chunk` events of a stream, the last ``[DONE]`` included."""
    head = _head(answer, "chat.completion.chunk")

    def event(delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        body = head | {"choices": [choice]} | ({"usage": None} if include_usage else {})
        return _event(body)

    yield event({"role": "assistant", "content": "" if answer.text or not answer.calls else None})
    for piece in pieces(answer, chat):
        yield event({"content": piece})
    for index, call in enumerate(answer.tool_calls()):
        function = call["function"]
        yield event({"tool_calls": [{"index": index, **call, "function": {"name": function["name"], "arguments": ""}}]})
        yield event({"tool_calls": [{"index": index, "function": {"arguments": function["arguments"]}}]})
    yield event({}, answer.finish_reason)
    if include_usage:
        yield _event(head | {"choices": [], "usage": answer.usage()})
    yield b"data: [DONE]\n\n"


def pieces(answer: Answer, chat: Chat) -> Iterator[str]:
    """The text, a piece a token: never half a character, and never more than the answer's text."""
    left, pending = answer.text, list[int]()
    for token in answer.completion.token_ids.tolist():
        pending.append(token)
        piece = chat.decode(pending)
        if not piece.endswith("\ufffd") and piece:
            pending.clear()
            piece = piece[: len(left)]
            if not left.startswith(piece):
                break
            left = left[len(piece) :]
            if piece:
                yield piece
    if left:
        yield left


def _head(answer: Answer, kind: str) -> dict[str, Any]:
    return {
        "id": answer.answer_id,
        "object": kind,
        "created": answer.created,
        "model": answer.model,
        "system_fingerprint": answer.fingerprint,
    }


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
