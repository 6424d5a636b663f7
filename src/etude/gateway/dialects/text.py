"""The dialect of OpenAI's text completions, which continue a prompt without a chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from etude.gateway.answers import Answer, ResponseHead
from etude.gateway.dialects.dialect import Dialect
from etude.gateway.dialects.shared import HARMLESS, NEUTRAL, Body, CompletionStream, common, head_fields, whole_body
from etude.gateway.errors import invalid_request, openai_error
from etude.gateway.requests import ChatRequest, decode_body

NEUTRAL_OF_TEXT: dict[str, tuple[Any, ...]] = {**NEUTRAL, "logprobs": (None,), "suffix": (None, "")}
"""Known parameters that are not supported, with the values that are accepted because they change nothing."""
TEXT_TOKENS = 16
"""Token limit of a text completion without one, as in OpenAI's API."""


class _TextBody(Body, kw_only=True):
    prompt: str | list[Any]


_decoder = msgspec.json.Decoder(_TextBody)


def read(data: bytes) -> ChatRequest:
    """Parse and check the JSON body of a text completion request. Raises `RequestRefused` with status 400."""
    body = decode_body(data, _decoder, neutral=NEUTRAL_OF_TEXT, harmless=HARMLESS)
    prompt = body.prompt
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]  # a batch of one
    if not prompt or (isinstance(prompt, list) and not all(type(token) is int for token in prompt)):
        raise invalid_request("prompt must be one text, or one list of token ids, and not empty", "prompt")
    fields = common(body)
    return ChatRequest(prompt=prompt, **{**fields, "max_tokens": fields["max_tokens"] or TEXT_TOKENS})


def body(request: ChatRequest, head: ResponseHead, answers: Sequence[Answer]) -> dict[str, Any]:
    """Return the JSON body of a text completion (`text_completion`)."""
    texts = [{"text": answer.text} for answer in answers]
    return whole_body(request, head_fields(head, "cmpl-", "text_completion"), answers, texts)


class _TextStream(CompletionStream):
    """Makes the events of type `text_completion`."""

    prefix, kind = "cmpl-", "text_completion"

    def _content(self, piece: str) -> dict[str, Any]:
        return {"text": piece}


DIALECT = Dialect("text", "/v1/completions", read, body, _TextStream, openai_error)
