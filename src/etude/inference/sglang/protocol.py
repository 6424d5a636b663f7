"""Encodes requests to SGLang and parses its responses. The functions are those of `external.client.Dialect`.

Grammars need SGLang's tokeniser: `sglang.arguments = ["--grammar-backend=xgrammar"]` keeps it.

Only the needed fields of a response are parsed. A response that lacks one, or contradicts itself, raises `EngineError`.
Written for `/generate` of SGLang 0.5.23."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import numpy as np

from etude.grammars import kind_of
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
from etude.models.config import ModelConfig
from etude.records.completion import CompletionRequest, Sampling, Traffic
from etude.records.wire import Routes

SERVER, GENERATE = "SGLang", "/generate"
MIN_TEMPERATURE = 1e-6
"""Below this temperature SGLang samples greedily, and returns log-probabilities at temperature 1."""


class _Finish(msgspec.Struct, frozen=True):
    type: str
    message: str = ""


class _Sampled(msgspec.Struct, frozen=True, array_like=True):
    """[log-probability, token id, its text]; the first token of a text has no log-probability."""

    logprob: float | None
    token_id: int


class _Meta(msgspec.Struct, frozen=True):
    finish_reason: _Finish | None = None
    output_token_logprobs: list[_Sampled] | None = None
    output_top_logprobs: list[list[_Sampled]] | None = None
    input_token_logprobs: list[_Sampled] | None = None
    weight_versions: list[LabelledSpan] | None = None
    cached_tokens: int = 0
    routed_experts: str | None = None


class _Answer(msgspec.Struct, frozen=True):
    output_ids: list[int]
    meta_info: _Meta


def encode_request(request: CompletionRequest, name: str, *, salt: str, native_routes: bool) -> bytes:
    """Return the body of a completion request.

    `name` is the request's id in SGLang. Requests share cached prefixes only with others of the same `salt`.
    `native_routes`: whether to ask the server for routes, if the request wants some. Raises `MalformedRequest` for
    settings that SGLang does not support."""
    sampling, prompt = request.sampling, request.prompt_ids
    check_temperature(request, MIN_TEMPERATURE, SERVER)
    params: dict[str, Any] = {
        "max_new_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "sampling_seed": keyed_seed(sampling.seed, len(prompt)),
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": not sampling.stop_token_ids,  # it would also ignore the request's own stop tokens
    }
    if not sampling.plain:
        params |= _sampling_params(sampling)
    body: dict[str, Any] = {"rid": name, "input_ids": prompt.tolist(), "sampling_params": params, "extra_key": salt}
    body |= {"top_logprobs_num": sampling.top_logprobs} if sampling.top_logprobs else {}
    body |= {"return_logprob": True, "stream": True, "priority": int(request.traffic is Traffic.PRODUCTION)}
    if native_routes and request.routes_from is not None:
        body |= {"return_routed_experts": True, "routed_experts_start_len": request.routes_from}
    return msgspec.json.encode(body)


def _sampling_params(sampling: Sampling) -> dict[str, Any]:
    """The parameters of a request that is not sampled plainly, by SGLang's names. Raises `InvalidGrammar` for a Lark
    grammar."""
    params: dict[str, Any] = {name: getattr(sampling, name) for name in _SAME_NAMES}
    params |= {"top_k": sampling.top_k or -1, "min_new_tokens": sampling.min_tokens}
    if sampling.logit_bias:
        params["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    if sampling.grammar:
        params |= _grammar(sampling.grammar)
    return params


def _grammar(grammar: str) -> dict[str, str]:
    """Return the sampling parameter of a grammar. The schemas true and false become objects, as SGLang requires.

    Raises `InvalidGrammar` for a Lark grammar."""
    kind, value = kind_of(grammar)
    if kind == "lark":
        hint = "use an engine of kind reference or vllm, or a grammar of a JSON schema or a regular expression"
        facts = "etude sends forced tool calls, and JSON beside tools, as Lark grammars"
        raise InvalidGrammar(f"{SERVER} does not support Lark grammars", facts, hint=hint)
    if kind == "regex":
        return {"regex": value}
    schema = value if not isinstance(value, bool) else {} if value else {"not": {}}
    return {"json_schema": msgspec.json.encode(schema).decode()}


_SAME_NAMES = ("top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")


def encode_scoring_request(token_ids: list[int], name: str, *, salt: str) -> bytes:
    """Return the body of a request for the log-probabilities of a text.

    `name` is the request's id in SGLang. Requests share cached prefixes only with others of the same `salt`."""
    params = {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True}
    body = {"rid": name, "input_ids": token_ids, "sampling_params": params, "extra_key": salt, "priority": 1}
    return msgspec.json.encode(body | {"return_logprob": True, "logprob_start_len": 0})


def read_scores(body: bytes, token_ids: list[int], *, engine: str) -> tuple[int | None, list[float]]:
    """Parse the response to `encode_scoring_request`.

    Returns (adoption, log-probabilities). `adoption` is the number of the replacement of the weights with which the
    text was computed; None if the response does not say. There is one log-probability for each token but the first.
    Raises `BrokenAnswer` for an invalid response."""
    meta = decode(body, _Answer, SERVER, engine).meta_info
    rows = meta.input_token_logprobs or []
    logprobs = [row.logprob for row in rows[1:] if row.logprob is not None]
    if [row.token_id for row in rows] != token_ids or len(logprobs) != len(token_ids) - 1:
        raise broken_answer(SERVER, engine, f"{len(logprobs)} log-probabilities of {len(token_ids)} tokens")
    spans = read_spans(meta.weight_versions or [], SERVER, engine)
    return (spans[-1][0] if spans else None), logprobs


def read_event(line: bytes, *, engine: str) -> AnswerPart | None:
    """Parse one line of a streamed response: a part with some tokens, or None for a line without tokens.

    Raises `BrokenAnswer` for an invalid line, and `EngineError` when the server ended the request with an error."""
    body = event_body(line, SERVER, engine)
    return None if body is None else _part(decode(body, _Answer, SERVER, engine), engine)


def decode_routes(data: str | None, model: ModelConfig, *, count: int) -> Routes:
    """Decode the routes (experts chosen by the MoE routers) of `count` positions in a response.

    `data` is base64 of int32 [positions, layers, top_k]; None: all routes are unknown. Returns [count, MoE layers,
    top_k]. Raises `ValueError` if the size is wrong."""
    if data is None:
        return decode_kept_routes(None, model, start=0, stop=count)
    values = np.frombuffer(base64.b64decode(data), "<i4")
    if values.size != count * model.num_layers * model.top_k:
        expected = count * model.num_layers * model.top_k
        raise ValueError(f"the routes of {count} positions have {values.size} numbers, expected {expected}")
    shaped = values.reshape(count, model.num_layers, model.top_k)
    return convert_routes(shaped[:, list(model.moe_layers)], model)


def _part(answer: _Answer, engine: str) -> AnswerPart:
    ids, meta = answer.output_ids, answer.meta_info
    sampled, finish = meta.output_token_logprobs or [], meta.finish_reason
    if [one.token_id for one in sampled] != ids:
        raise broken_answer(SERVER, engine, f"log-probabilities of {len(sampled)} tokens, {len(ids)} tokens")
    logprobs = [one.logprob for one in sampled if one.logprob is not None]
    if len(logprobs) != len(ids):
        raise broken_answer(SERVER, engine, f"{len(logprobs)} log-probabilities of {len(ids)} tokens")
    spans = read_spans(meta.weight_versions or [], SERVER, engine) if finish is not None else ()
    rows = meta.output_top_logprobs or []
    likeliest = [[(one.logprob, one.token_id) for one in row if one.logprob is not None] for row in rows]
    reason, message = (finish.type, finish.message) if finish else (None, "")
    return AnswerPart(ids, logprobs, reason, spans, meta.cached_tokens, meta.routed_experts, likeliest, message)
