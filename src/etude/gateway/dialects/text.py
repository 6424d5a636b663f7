"""The dialect of OpenAI's text completions API, which continues a prompt without a chat template."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from etude.gateway.answers import Answer, ResponseHead
from etude.gateway.dialects.dialect import Dialect
from etude.gateway.dialects.shared import HARMLESS, NEUTRAL, Body, CompletionStream, common, head_fields, whole_body
from etude.gateway.errors import invalid_request, openai_error
from etude.gateway.requests import MAX_TOP_LOGPROBS, BodyDecoder, ChatRequest, check_range

NEUTRAL_OF_TEXT: dict[str, tuple[Any, ...]] = {**NEUTRAL, "suffix": (None, "")}
"""Known parameters that are not supported, with the values that are accepted because they change nothing."""
TEXT_TOKENS = 16
"""Token limit of a text completion without one, as in OpenAI's API."""


class _TextBody(Body, kw_only=True):
    prompt: str | list[Any]
    logprobs: int | None = None


_decoder = BodyDecoder(
    _TextBody, neutral=NEUTRAL_OF_TEXT, harmless=HARMLESS, example='{"model": "NAME", "prompt": "once upon a time"}'
)


def read(data: bytes) -> ChatRequest:
    """Parse and check the JSON body of a text completion request. Raises `RequestRefused` (HTTP status 400)."""
    body = _decoder.decode(data)
    prompt = body.prompt
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]  # a batch of one
    if not prompt or (isinstance(prompt, list) and not all(type(token) is int for token in prompt)):
        facts = "it is empty, or a list of several prompts, or of other values than token ids"
        hint = "send one text, or one list of token ids"
        raise invalid_request("prompt is invalid", facts, hint=hint, param="prompt")
    check_range("logprobs", body.logprobs, 0, MAX_TOP_LOGPROBS)
    fields = common(body)
    return ChatRequest(
        prompt=prompt,
        prompt_field="prompt",
        top_logprobs=body.logprobs,
        **{**fields, "max_tokens": fields["max_tokens"] or TEXT_TOKENS},
    )


def _logprobs(answer: Answer) -> dict[str, Any] | None:
    if answer.logprobs is None:
        return None
    texts = [token.text for token in answer.logprobs]
    return {
        "tokens": texts,
        "token_logprobs": [token.logprob for token in answer.logprobs],
        "top_logprobs": [dict(token.top) for token in answer.logprobs],
        "text_offset": list(itertools.accumulate(map(len, texts), initial=0))[:-1],
    }


def body(request: ChatRequest, head: ResponseHead, answers: Sequence[Answer]) -> dict[str, Any]:
    """Return the JSON body of a response, an object `text_completion` with one choice for each answer."""
    texts = [{"text": answer.text, "logprobs": _logprobs(answer)} for answer in answers]
    return whole_body(request, head_fields(head, "cmpl-", "text_completion"), answers, texts)


class _TextStream(CompletionStream):
    """Makes the events of type `text_completion`."""

    prefix, kind = "cmpl-", "text_completion"

    def _logprobs(self, answer: Answer) -> dict[str, Any] | None:
        return _logprobs(answer)

    def _content(self, piece: str) -> dict[str, Any]:
        return {"text": piece}

    def _reasoning(self, piece: str, index: int) -> Iterator[bytes]:
        return self._text(piece, index)  # there is no template that would mark reasoning


DIALECT = Dialect("text", "/v1/completions", read, body, _TextStream, openai_error, _decoder, _TextStream.prefix)
