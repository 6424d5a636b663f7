"""The common part of chat completions and text completions: parameters, usage, and the frame of bodies and events."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from etude.capture import Chat
from etude.gateway.answers import Answer, ResponseHead, num_sampled, summary_usage
from etude.gateway.dialects.dialect import EventStream, data_event
from etude.gateway.errors import RequestRefused, invalid_request, openai_error
from etude.gateway.requests import ChatRequest, check_range, check_stops, read_sampling

DONE = b"data: [DONE]\n\n"
HARMLESS = frozenset(
    {
        "metadata",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "reasoning_effort",  # whether and how long the model reasons is up to its training and its template
        "safety_identifier",
        "service_tier",
        "store",
        "user",
        "verbosity",
    }
)
"""Parameters that clients send and that do not change the answer; they are ignored."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    # parameters of other servers
    "add_generation_prompt": (None, True),
    "add_special_tokens": (None, False, True),  # the template or the prompt has them
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "best_of": (None, 1),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "continue_final_message": (None, False),
    "documents": (None, []),
    "echo": (None, False),
    "guided_choice": (None,),
    "guided_decoding_backend": (None,),
    "guided_grammar": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "ignore_eos": (None, False),
    "include_stop_str_in_output": (None, False),
    "length_penalty": (None, 1),
    "logits_processors": (None, []),
    "prompt_logprobs": (None,),
    "skip_special_tokens": (None, True),
    "spaces_between_special_tokens": (None, True),
    "stop_token_ids": (None, []),
    "structured_outputs": (None,),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": (None, False),
}
"""Known parameters that are not supported, with the values that are accepted because they change nothing."""


class StreamOptions(msgspec.Struct):
    """The request parameter `stream_options`. `include_usage`: whether a stream ends with an event of token counts."""

    include_usage: bool = False


class Body(msgspec.Struct, kw_only=True):
    """The parameters that chat completions and text completions have in common, as the client sent them. None: the
    client did not send the parameter."""

    model: str
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    n: int | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: int | None = None


def common(body: Body) -> dict[str, Any]:
    """Check the shared parameters, and return them as keyword arguments of `ChatRequest`. Raises `RequestRefused`."""
    check_range("max_tokens", body.max_tokens, 1)
    check_range("max_completion_tokens", body.max_completion_tokens, 1)
    if body.max_tokens and body.max_completion_tokens and body.max_tokens != body.max_completion_tokens:
        what = f"max_tokens = {body.max_tokens} and max_completion_tokens = {body.max_completion_tokens} differ"
        raise invalid_request(what, hint="send only one of them", param="max_tokens")
    return {
        "sampling": read_sampling(body),
        "n": body.n or 1,
        "model": body.model,
        "max_tokens": body.max_completion_tokens or body.max_tokens,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "seed": body.seed,
        "stop": check_stops(body.stop),
        "stream": bool(body.stream),
        "include_usage": body.stream_options is not None and body.stream_options.include_usage,
        "return_token_ids": bool(body.return_token_ids),
    }


def usage(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return OpenAI's `usage` object, the token counts of a response. `cached_tokens` are prompt tokens whose KV was
    reused."""
    prompt, sampled = len(answers[0].prompt_ids), num_sampled(answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": answers[0].completion.num_cached},
        **summary_usage(answers),
    }


def whole_body(
    request: ChatRequest, head: dict[str, Any], answers: Sequence[Answer], contents: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Return the JSON body of a complete response.

    `head` are its first fields (`head_fields`). `contents` has, for each answer, the fields of its choice that differ
    between the APIs, such as its message."""
    choices = [
        {"index": i, **content, "finish_reason": answer.finish}
        for i, (answer, content) in enumerate(zip(answers, contents, strict=True))
    ]
    body = {**head, "system_fingerprint": answers[0].fingerprint, "choices": choices, "usage": usage(answers)}
    if request.return_token_ids:
        for choice, answer in zip(choices, answers, strict=True):
            choice["token_ids"] = answer.completion.token_ids.tolist()
        body["prompt_token_ids"] = answers[0].prompt_ids.tolist()
    return body


class CompletionStream(EventStream):
    """The events of a streamed response of OpenAI's chat or text completions. Subclasses encode the choices."""

    prefix = kind = ""

    def __init__(self, request: ChatRequest, head: ResponseHead, chat: Chat) -> None:
        super().__init__(request, head, chat)
        self._head = head_fields(head, self.prefix, self.kind)
        self._fingerprint: str | None = None
        self._answers: list[Answer] = []

    def _finish(self, answer: Answer, index: int) -> Iterator[bytes]:
        self._answers.append(answer)
        self._fingerprint = answer.fingerprint
        for content in self._calls(answer, index):
            yield self._event(content, index)
        yield self._event({**self._content(""), "logprobs": self._logprobs(answer)}, index, answer.finish)

    def end(self) -> Iterator[bytes]:
        if self.request.include_usage:
            yield data_event({**self._header(), "choices": [], "usage": usage(self._answers)})
        yield DONE

    def error(self, refused: RequestRefused) -> bytes:
        return data_event(openai_error(refused))

    def _text(self, piece: str, index: int) -> Iterator[bytes]:
        yield self._event(self._content(piece), index)

    @abstractmethod
    def _content(self, piece: str) -> dict[str, Any]: ...

    def _calls(self, answer: Answer, index: int) -> Iterator[dict[str, Any]]:
        yield from ()

    @abstractmethod
    def _logprobs(self, answer: Answer) -> dict[str, Any] | None: ...

    def _header(self) -> dict[str, Any]:
        return {**self._head, "system_fingerprint": self._fingerprint}

    def _event(self, content: dict[str, Any], index: int, finish_reason: str | None = None) -> bytes:
        choice = {"index": index, "logprobs": None, **content, "finish_reason": finish_reason}
        no_usage = {"usage": None} if self.request.include_usage else {}
        return data_event({**self._header(), "choices": [choice]} | no_usage)


def head_fields(head: ResponseHead, prefix: str, kind: str) -> dict[str, Any]:
    """Return the fields with which every body and event of a response begins.

    `prefix` begins the response's id, such as "chatcmpl-", and `kind` is the value of `object`."""
    return {"id": prefix + head.id, "object": kind, "created": head.created, "model": head.model}
