"""Encodes requests to vLLM and parses its responses. The functions are those of `external.client.Dialect`.

Its log-probabilities are those of the distribution that was sampled from: after penalties, biases and truncation, where
a request asks for them. Grammars are sent as Lark. vLLM's backend "guidance" compiles them with llguidance, as etude's
own engine does. Each grammar ends with one of the request's stop tokens, since vLLM itself would allow only the
tokeniser's end token there.

Only the needed fields of a response are parsed. A response that lacks one, or contradicts itself, raises `EngineError`.
Written for `/inference/v1/generate` of vLLM 0.32."""

from __future__ import annotations

import base64
import io
from typing import Any

import msgspec
import numpy as np

from etude import grammars
from etude.inference.errors import InvalidGrammar
from etude.inference.external.answers import (
    AnswerPart,
    LabelledSpan,
    broken_answer,
    check_temperature,
    convert_routes,
    decode,
    decode_kept_routes,
    event_body,
    keyed_seed,
    read_spans,
)
from etude.inference.wire import GENERATE
from etude.models.config import ModelConfig
from etude.records.completion import CompletionRequest, Sampling, Traffic
from etude.records.wire import Routes

__all__ = [
    "GENERATE",
    "decode_routes",
    "encode_request",
    "encode_scoring_request",
    "read_event",
    "read_scores",
]

MIN_TEMPERATURE = 0.01
"""The lowest temperature above 0. At a lower one vLLM samples, and computes log-probabilities, at this temperature."""
SERVER = "vLLM"
ID_PREFIX = "generate-tokens-"
"""The prefix that vLLM adds to the id of each request."""


class _Likely(msgspec.Struct, frozen=True):
    token_id: int
    logprob: float


class _Sampled(msgspec.Struct, frozen=True):
    token_id: int
    logprob: float
    top_logprobs: list[_Likely] | None = None


class _Logprobs(msgspec.Struct, frozen=True):
    content: list[_Sampled] | None = None


class _Choice(msgspec.Struct, frozen=True):
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None
    routed_experts: str | None = None
    weight_versions: list[LabelledSpan] | None = None


class _Details(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens_details: _Details | None = None


class _Scored(msgspec.Struct, frozen=True):
    logprob: float


class _Answer(msgspec.Struct, frozen=True):
    choices: list[_Choice]
    usage: _Usage | None = None
    prompt_logprobs: list[dict[str, _Scored] | None] | None = None


def encode_request(request: CompletionRequest, name: str, *, salt: str, native_routes: bool) -> bytes:
    """Return the body of a completion request.

    `name` is the request's id in vLLM. Requests share cached prefixes only with others of the same `salt`.
    `native_routes`: whether to ask the server for routes, if the request wants some. Raises `MalformedRequest` for
    settings that vLLM does not support."""
    sampling, prompt = request.sampling, request.prompt_ids
    check_temperature(request, MIN_TEMPERATURE, SERVER)
    params: dict[str, Any] = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "seed": keyed_seed(sampling.seed, len(prompt)),
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": True,  # a request's own stop tokens are the only ones
        "logprobs": sampling.top_logprobs,  # besides the sampled token's own
        "detokenize": False,
    }
    if not sampling.plain:
        params |= _sampling_params(sampling)
    if native_routes and request.routes_from is not None:
        params["routed_experts_prompt_start"] = request.routes_from
    body: dict[str, Any] = {"request_id": name, "token_ids": prompt.tolist(), "sampling_params": params}
    body |= {"cache_salt": salt, "stream": True, "priority": int(request.traffic is not Traffic.PRODUCTION)}
    body["stream_options"] = {"include_usage": True}
    return msgspec.json.encode(body)


def _sampling_params(sampling: Sampling) -> dict[str, Any]:
    """The parameters of a request that is not sampled plainly. Their names and meanings are vLLM's own. Raises
    `InvalidGrammar`."""
    params: dict[str, Any] = {name: getattr(sampling, name) for name in _SAME_NAMES}
    if sampling.logit_bias:
        params["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    if sampling.grammar:
        try:
            lark = grammars.to_lark(sampling.grammar, sampling.stop_token_ids)
        except grammars.GrammarError as error:
            raise InvalidGrammar(error.what, error.facts, hint=error.hint) from None
        params["structured_outputs"] = {"grammar": lark}
    return params


_SAME_NAMES = (
    "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "min_tokens",
)  # fmt: skip


def encode_scoring_request(token_ids: list[int], name: str, *, salt: str) -> bytes:
    """Return the body of a request for the log-probabilities of a text.

    `name` is the request's id in vLLM. Requests share cached prefixes only with others of the same `salt`."""
    params = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False, "ignore_eos": True}
    return msgspec.json.encode(
        {"request_id": name, "token_ids": token_ids, "sampling_params": params, "cache_salt": salt}
    )


def read_scores(body: bytes, token_ids: list[int], *, engine: str) -> tuple[int | None, list[float]]:
    """Parse the response to `encode_scoring_request`.

    Returns (adoption, log-probabilities). `adoption` is the number of the replacement of the weights with which the
    text was computed; None if the response does not say. There is one log-probability for each token but the first.
    Raises `BrokenAnswer` for an invalid response."""
    answer = decode(body, _Answer, SERVER, engine)
    rows = answer.prompt_logprobs or []
    found = [row.get(str(token)) if row else None for row, token in zip(rows[1:], token_ids[1:], strict=False)]
    logprobs = [one.logprob for one in found if one is not None]
    if len(rows) != len(token_ids) or len(logprobs) != len(token_ids) - 1:
        raise broken_answer(SERVER, engine, f"{len(logprobs)} log-probabilities of {len(token_ids)} tokens")
    spans = _spans(answer.choices[0], engine) if answer.choices else ()
    return (spans[-1][0] if spans else None), logprobs


def read_event(line: bytes, *, engine: str) -> AnswerPart | None:
    """Parse one line of a streamed response: a part with some tokens, or None for a line without tokens.

    Raises `BrokenAnswer` for an invalid line, and `EngineError` when the server ended the request with an error."""
    body = event_body(line, SERVER, engine)
    return None if body is None else _part(decode(body, _Answer, SERVER, engine), engine)


def decode_routes(data: str | None, model: ModelConfig, *, count: int) -> Routes:
    """Decode the routes (experts chosen by the MoE routers) of `count` positions in a response.

    `data` is base64 of an .npy file, [positions, layers, top_k]; None: all routes are unknown. Returns [count, MoE
    layers, top_k]. Raises `ValueError` if the shape is wrong."""
    if data is None:
        return decode_kept_routes(None, model, start=0, stop=count)
    values = np.load(io.BytesIO(base64.b64decode(data)), allow_pickle=False)
    if values.shape != (count, model.num_layers, model.top_k):
        expected = [count, model.num_layers, model.top_k]
        raise ValueError(f"routes have shape {list(values.shape)}, expected {expected}")
    return convert_routes(values[:, list(model.moe_layers)], model)


def _part(answer: _Answer, engine: str) -> AnswerPart:
    if len(answer.choices) != 1:
        if not answer.choices:
            return AnswerPart([], [], num_cached=_cached(answer))
        raise broken_answer(SERVER, engine, f"{len(answer.choices)} choices")
    choice = answer.choices[0]
    ids, sampled = choice.token_ids or [], (choice.logprobs.content if choice.logprobs else None) or []
    if [one.token_id for one in sampled] != ids:
        raise broken_answer(SERVER, engine, f"log-probabilities of {len(sampled)} tokens, {len(ids)} tokens")
    spans = _spans(choice, engine) if choice.finish_reason else ()
    likeliest = [[(one.logprob, one.token_id) for one in token.top_logprobs or []] for token in sampled]
    logprobs, reason = [one.logprob for one in sampled], choice.finish_reason
    return AnswerPart(ids, logprobs, reason, spans, _cached(answer), choice.routed_experts, likeliest)


def _cached(answer: _Answer) -> int:
    details = answer.usage.prompt_tokens_details if answer.usage else None
    return (details.cached_tokens if details else None) or 0


def _spans(choice: _Choice, engine: str) -> tuple[tuple[int, int], ...]:
    return read_spans(choice.weight_versions or [], SERVER, engine)
