"""What vLLM is asked and what it answers, in its words and in ours. Pure: nothing here knows of sockets.

vLLM's answers are read by what they must hold, and everything else in them is left alone: one that holds less, or
disagrees with itself, is an `EngineError`, never a completion. Written against vLLM 0.32's `/inference/v1/generate`.
"""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np

from etude.errors import EngineError
from etude.inference.errors import MalformedRequest
from etude.models.config import ModelConfig
from etude.records.completion import (
    Completion,
    CompletionRequest,
    StopReason,
    Traffic,
    Version,
    VersionSpan,
    missing_route,
)
from etude.records.wire import F32, I32, Routes

LEAST_TEMPERATURE = 0.01
"""Below it vLLM samples at this one, and what it tells are log-probabilities at this one, too."""
NO_NUMBER = -9999.0  # what vLLM sends in the place of a log-probability that is none
T = TypeVar("T")


class Broken(EngineError):
    """vLLM answered something that no vLLM of the tested version answers."""


class _Sampled(msgspec.Struct, frozen=True):
    token_id: int
    logprob: float


class _Logprobs(msgspec.Struct, frozen=True):
    content: list[_Sampled] | None = None


class _Span(msgspec.Struct, frozen=True):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct, frozen=True):
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None
    routed_experts: str | None = None
    weight_versions: list[_Span] | None = None


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


class _Trouble(msgspec.Struct, frozen=True):
    message: str


class _Refusal(msgspec.Struct, frozen=True):
    error: _Trouble


@dataclass(frozen=True)
class Part:
    """Some tokens of an answer, or all of them."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str | None = None
    spans: tuple[tuple[int, int], ...] = ()  # (adoption, tokens) of the whole answer, in its last part
    num_cached: int = 0
    routed: str | None = None  # routes that the build gave by itself

    def __add__(self, other: Part) -> Part:
        return Part(
            [*self.token_ids, *other.token_ids],
            [*self.logprobs, *other.logprobs],
            other.finish_reason or self.finish_reason,
            other.spans or self.spans,
            other.num_cached or self.num_cached,
            other.routed or self.routed,
        )


NOTHING = Part([], [])


def asked(request: CompletionRequest, name: str, *, salt: str, native_routes: bool, stream: bool) -> bytes:
    """The body that asks vLLM for a completion. `name`: what vLLM calls the request; `salt`: prefixes are shared under
    the same one only. Raises `MalformedRequest`."""
    sampling, prompt = request.sampling, request.prompt_ids
    if 0.0 < sampling.temperature < LEAST_TEMPERATURE:
        raise MalformedRequest(
            f"request {request.request_id} asks for temperature {sampling.temperature:g}",
            f"vLLM samples at {LEAST_TEMPERATURE:g} at least, or greedily at 0",
            hint=f"ask for 0, or for {LEAST_TEMPERATURE:g} and more",
        )
    params: dict[str, Any] = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "seed": keyed_seed(sampling.seed, len(prompt)),
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": True,  # a request's own stop tokens are the only ones
        "logprobs": 0,  # the sampled token's own
        "detokenize": False,
    }
    if native_routes and request.routes_from is not None:
        params["routed_experts_prompt_start"] = request.routes_from
    body: dict[str, Any] = {"request_id": name, "token_ids": prompt.tolist(), "sampling_params": params}
    body |= {"cache_salt": salt, "stream": stream, "priority": int(request.traffic is not Traffic.PRODUCTION)}
    if stream:
        body["stream_options"] = {"include_usage": True}
    return msgspec.json.encode(body)


def scored(token_ids: list[int], name: str, *, salt: str) -> bytes:
    """The body that asks for a text's log-probabilities."""
    params = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False, "ignore_eos": True}
    return msgspec.json.encode(
        {"request_id": name, "token_ids": token_ids, "sampling_params": params, "cache_salt": salt}
    )


def keyed_seed(seed: int, num_prompt: int) -> int:
    """vLLM draws a stream of numbers for a seed, beginning with the first token that it samples. Turns of a rollout
    have one seed and longer and longer prompts: they must not begin with the same number.

    >>> keyed_seed(7, 10) != keyed_seed(7, 11), 0 <= keyed_seed(7, 10) < 2**63
    (True, True)
    """
    digest = hashlib.sha256(b"%d %d" % (seed, num_prompt)).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def read_answer(body: bytes, *, engine: str) -> Part:
    """A whole answer. Raises `Broken`."""
    return _part(_decoded(body, _Answer, engine), engine, whole=True)


def read_scores(body: bytes, token_ids: list[int], *, engine: str) -> tuple[int | None, list[float]]:
    """(which adoption computed it, log-probability of each token but the first) of an answer to `scored`. None: vLLM
    has no label for it. Raises `Broken`."""
    answer = _decoded(body, _Answer, engine)
    rows = answer.prompt_logprobs or []
    found = [row.get(str(token)) if row else None for row, token in zip(rows[1:], token_ids[1:], strict=False)]
    logprobs = [one.logprob for one in found if one is not None]
    if len(rows) != len(token_ids) or len(logprobs) != len(token_ids) - 1:
        raise broken(engine, f"{len(logprobs)} log-probabilities of {len(token_ids)} tokens")
    spans = _spans(answer.choices[0], engine) if answer.choices else ()
    return (spans[-1][0] if spans else None), logprobs


def read_event(line: bytes, *, engine: str) -> Part | None:
    """A line of a streamed answer: some tokens; None for one that says nothing. Raises `Broken`, and `EngineError` for
    what vLLM ended it with."""
    if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
        return None
    body = line[len(b"data: ") :]
    if body.lstrip().startswith(b'{"error"'):
        raise refused(500, body, engine=engine)
    return _part(_decoded(body, _Answer, engine), engine, whole=False)


def is_end(line: bytes) -> bool:
    """Whether a line is the last of a streamed answer."""
    return line.strip() == b"data: [DONE]"


def refused(status: int, body: bytes, *, engine: str) -> EngineError:
    """The exception behind an answer that is not 200; never raises, whatever the bytes are.

    >>> print(refused(400, b'{"error": {"message": "too long"}}', engine="engine-1"))
    vLLM of engine-1 answered 400: too long
      hint: its log says why
    """
    try:
        said = msgspec.json.decode(body, type=_Refusal).error.message
    except ValueError:
        said = repr(body[:200])
    return EngineError(f"vLLM of {engine} answered {status}", said[:500], hint="its log says why")


def completed(
    request: CompletionRequest,
    answer: Part,
    *,
    engine: str,
    versions: Mapping[int, Version],
    adoption: int,
    routes: Routes,
) -> Completion:
    """The completion that vLLM's answer is. `versions`: what each adoption brought; `adoption`: the one that held when
    the request was handed to vLLM. Raises `Broken`.

    What a request that lived through a swap had read before it is not known: that it had is assumed, and the version of
    then stands first among the spans, with no token.
    """
    count = len(answer.token_ids)
    if not count or sum(n for _, n in answer.spans) != count:
        raise broken(engine, f"{count} tokens, and spans of {sum(n for _, n in answer.spans)}")
    if any(number not in versions for number, _ in answer.spans):
        raise broken(engine, f"tokens of adoptions {[n for n, _ in answer.spans]}, of which not all are known")
    if min(answer.logprobs) <= NO_NUMBER or not np.isfinite(answer.logprobs).all():
        raise broken(engine, "a sampled token whose log-probability is no number")
    stopped = answer.token_ids[-1] in request.sampling.stop_token_ids
    if answer.finish_reason not in ("stop", "length") or stopped != (answer.finish_reason == "stop"):
        raise broken(engine, f"an end by {answer.finish_reason!r} at token {answer.token_ids[-1]}")
    spans = tuple(VersionSpan(versions[number], n, number - adoption) for number, n in answer.spans)
    if spans[0].kv_epoch:
        spans = (VersionSpan(versions[adoption], 0), *spans)
    ids: I32 = np.array(answer.token_ids, np.int32)
    logprobs: F32 = np.array(answer.logprobs, np.float32)
    return Completion(
        request_id=request.request_id,
        token_ids=ids,
        logprobs=logprobs,
        routes=routes,
        routes_start=len(request.prompt_ids) + count - 1 - len(routes),
        spans=spans,
        stop_reason=StopReason.STOP if stopped else StopReason.LENGTH,
        engine=engine,
        num_cached=answer.num_cached,
    )


def kept_routes(data: str | None, model: ModelConfig, *, start: int, stop: int) -> Routes:
    """Routes of positions [start, stop) by `RouteTable.take`; what is not there is `missing_route`."""
    layers, top_k, dtype = model.num_moe_layers, model.top_k, model.route_dtype
    routes = np.full((stop - start, layers, top_k), missing_route(dtype), dtype)
    if data is not None and layers:
        found = np.frombuffer(base64.b64decode(data), "<i2").reshape(-1, layers, top_k)[start:stop]
        routes[: len(found)] = found
    return routes


def any_missing(routes: Routes) -> bool:
    """Whether some of them are not known."""
    return bool((routes == missing_route(routes.dtype)).any())


def given_routes(data: str | None, model: ModelConfig, *, count: int) -> Routes:
    """Routes that the build told itself: base64 of an .npy, [positions, layers, top_k]. Raises `ValueError`."""
    if data is None:
        return kept_routes(None, model, start=0, stop=count)
    told = np.load(io.BytesIO(base64.b64decode(data)), allow_pickle=False)
    if told.shape != (count, model.num_layers, model.top_k):
        raise ValueError(f"routes of shape {list(told.shape)} for {count} positions")
    return np.ascontiguousarray(told[:, list(model.moe_layers)]).astype(model.route_dtype)


def _part(answer: _Answer, engine: str, *, whole: bool) -> Part:
    if len(answer.choices) != 1:
        if not whole and not answer.choices:
            return Part([], [], num_cached=_cached(answer))
        raise broken(engine, f"{len(answer.choices)} choices")
    choice = answer.choices[0]
    ids, told = choice.token_ids or [], (choice.logprobs.content if choice.logprobs else None) or []
    if [one.token_id for one in told] != ids:
        raise broken(engine, f"log-probabilities of {len(told)} tokens, {len(ids)} tokens")
    if whole and choice.finish_reason is None:
        raise broken(engine, "no reason why it ended")
    if choice.finish_reason == "abort":
        raise EngineError(f"vLLM of {engine} dropped a request", hint="ask again; its log says why")
    spans = _spans(choice, engine) if choice.finish_reason else ()
    return Part(ids, [one.logprob for one in told], choice.finish_reason, spans, _cached(answer), choice.routed_experts)


def _spans(choice: _Choice, engine: str) -> tuple[tuple[int, int], ...]:
    """(adoption, number of tokens) after each other."""
    spans, at = [], 0
    for span in choice.weight_versions or []:
        if span.start != at or span.end < at or not span.version.isdigit():
            raise broken(engine, f"a span {span.version!r} of [{span.start}, {span.end}) after {at}")
        spans.append((int(span.version), span.end - at))
        at = span.end
    return tuple(spans)


def _cached(answer: _Answer) -> int:
    details = answer.usage.prompt_tokens_details if answer.usage else None
    return (details.cached_tokens if details else None) or 0


def _decoded(body: bytes, kind: type[T], engine: str) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except ValueError as error:
        raise broken(engine, f"{error}; {body[:200]!r}") from None


def broken(engine: str, facts: str) -> Broken:
    """For what no vLLM of the tested version answers."""
    return Broken(f"vLLM of {engine} answered what cannot be a completion", facts, hint="its log says what happened")
