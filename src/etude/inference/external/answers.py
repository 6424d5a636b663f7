"""Converts the responses of vLLM and SGLang to completions, and refuses invalid ones.

An adoption is one replacement of the server's weights; adoptions are numbered. A server labels each token with the
number of the adoption whose weights sampled it (`engine.ExternalEngine`). Labels are read as pairs (adoption, number of
tokens)."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from etude.errors import EngineError, MalformedRequest
from etude.models.config import ModelConfig
from etude.records.completion import (
    Completion,
    CompletionRequest,
    StopReason,
    Version,
    VersionSpan,
    missing_route,
)
from etude.records.wire import F32, I32, Routes

T = TypeVar("T")
ROUTES_PREFIX = "routes"  # prefix of the id of a request whose routes will be fetched
FAILED = "Internal server error"  # vLLM's error text for a request that it ended with the finish reason "error"
NON_FINITE_LOGPROB = -9999.0  # what vLLM sends for a log-probability that is not finite


class BrokenAnswer(EngineError):
    """Raised for a response that does not follow the protocol of the tested version of the server."""


@dataclass(frozen=True)
class AnswerPart:
    """A part of a server's streamed response, or the parts so far together (`JoinedAnswer.part`).

    - `token_ids`, `logprobs`: the sampled tokens, and their log-probabilities.
    - `finish_reason`: "stop", "length" or "abort" in the last part, else None.
    - `spans`: which weights sampled which tokens of the complete response, in its last part: pairs (number of the
      adoption, number of tokens). An adoption is one replacement of the server's weights.
    - `num_cached`: prompt tokens whose KV was reused.
    - `routed`: encoded routes (experts chosen by the MoE routers), when the server sends them.
    - `likeliest`: for each token the most probable tokens, as (log-probability, token id); empty if not requested.
    - `message`: why the server aborted the request, if it says so."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str | None = None
    spans: tuple[tuple[int, int], ...] = ()  # (adoption, number of tokens) of the complete response, in its last part
    num_cached: int = 0
    routed: str | None = None  # encoded routes, when the server sends them
    likeliest: list[list[tuple[float, int]]] = field(default_factory=list)  # (log-probability, id) for each token
    message: str = ""


class JoinedAnswer:
    """Joins the parts of a streamed response as they arrive. `part` has all of them together.

    >>> whole = JoinedAnswer()
    >>> for part in (AnswerPart([7], [-0.5]), AnswerPart([8], [-0.1], "length", ((0, 2),))):
    ...     whole.add(part)
    >>> whole.part.token_ids, whole.part.spans
    ([7, 8], ((0, 2),))
    """

    def __init__(self) -> None:
        self.part = AnswerPart([], [])

    def add(self, other: AnswerPart) -> None:
        """Append the next part."""
        had = self.part
        had.token_ids.extend(other.token_ids)
        had.logprobs.extend(other.logprobs)
        had.likeliest.extend(other.likeliest)
        self.part = replace(
            had,
            finish_reason=other.finish_reason or had.finish_reason,
            spans=other.spans or had.spans,
            num_cached=other.num_cached or had.num_cached,
            routed=other.routed or had.routed,
            message=other.message or had.message,
        )


def keyed_seed(seed: int, num_prompt: int) -> int:
    """Return the seed to send to the server: a 63-bit hash of the request's seed and the length of its prompt.

    A server starts a new stream of random numbers for each request. The turns of a rollout share a seed and have
    prompts of different lengths. Without the hash they would all start with the same random number.

    >>> keyed_seed(7, 10) != keyed_seed(7, 11), 0 <= keyed_seed(7, 10) < 2**63
    (True, True)
    """
    digest = hashlib.sha256(b"%d %d" % (seed, num_prompt)).digest()
    return int.from_bytes(digest[:8], "little") >> 1


class LabelledSpan(msgspec.Struct, frozen=True):
    """A span in a server's response: which weights sampled the output tokens [start, end).

    `version`: the number of the adoption (replacement of the server's weights), as text."""

    version: str
    start: int
    end: int


def read_spans(values: Iterable[LabelledSpan], server: str, engine: str) -> tuple[tuple[int, int], ...]:
    """Convert the spans of a response to pairs (number of the adoption, number of tokens), in order.

    An adoption is one replacement of the server's weights. `server` and `engine` are names for errors. Raises
    `BrokenAnswer` for gaps, overlaps, or a label that is not a number."""
    spans, at = [], 0
    for span in values:
        if span.start != at or span.end < at or not span.version.isdigit():
            raise broken_answer(server, engine, f"a span {span.version!r} of [{span.start}, {span.end}) after {at}")
        spans.append((int(span.version), span.end - at))
        at = span.end
    return tuple(spans)


def make_completion(
    request: CompletionRequest,
    answer: AnswerPart,
    *,
    server: str,
    engine: str,
    versions: Mapping[int, Version],
    adoption: int,
    routes: Routes,
) -> Completion:
    """Convert a server's complete response to a completion. Raises `BrokenAnswer` for an invalid one.

    An adoption is one replacement of the server's weights. `versions` has the version that each adoption loaded, and
    `adoption` is the number of the last one when the request was sent. `server` and `engine` are names. The response
    does not say whether the server computed a part of the prompt with earlier weights, before a swap. This function
    assumes so: the version at the time of sending gets a first span, without tokens."""
    count = len(answer.token_ids)
    if not count or sum(n for _, n in answer.spans) != count:
        raise broken_answer(server, engine, f"{count} tokens, and spans of {sum(n for _, n in answer.spans)}")
    if any(number not in versions for number, _ in answer.spans):
        raise broken_answer(
            server, engine, f"tokens of adoptions {[n for n, _ in answer.spans]}, of which not all are known"
        )
    if min(answer.logprobs) <= NON_FINITE_LOGPROB or not np.isfinite(answer.logprobs).all():
        raise broken_answer(server, engine, "a sampled token whose log-probability is not finite")
    stopped = answer.token_ids[-1] in request.sampling.stop_token_ids
    ended = answer.finish_reason == "abort"  # by the caller, maybe after a stop token
    if not ended and (answer.finish_reason not in ("stop", "length") or stopped != (answer.finish_reason == "stop")):
        raise broken_answer(server, engine, f"an end by {answer.finish_reason!r} at token {answer.token_ids[-1]}")
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
        **_likeliest(request.sampling.top_logprobs, answer, server, engine),
    )


def _likeliest(top: int, answer: AnswerPart, server: str, engine: str) -> dict[str, Any]:
    """The fields `top_ids` and `top_logprobs` of a completion; none when the request did not want them. A server may
    send the sampled token beside the `top` likeliest ones."""
    if not top:
        return {}
    rows = [sorted(set(row), key=lambda one: (-one[0], one[1]))[:top] for row in answer.likeliest]
    if len(rows) != len(answer.token_ids) or any(len(row) != top for row in rows):
        counts = sorted({len(row) for row in rows})
        raise broken_answer(server, engine, f"{len(rows)} rows of {counts} likeliest tokens, asked for {top}")
    return {
        "top_ids": np.array([[token for _, token in row] for row in rows], np.int32),
        "top_logprobs": np.array([[logprob for logprob, _ in row] for row in rows], np.float32),
    }


def decode_kept_routes(data: str | None, model: ModelConfig, *, start: int, stop: int) -> Routes:
    """Decode the routes that the worker extension recorded, for positions [start, stop) of a context.

    `data` is base64 of int16 [positions, MoE layers, top_k], from position 0, or None. Returns [stop - start, MoE
    layers, top_k]. Positions without a route get the value `missing_route`. Raises `ValueError` for an expert that the
    model does not have."""
    layers, top_k, dtype = model.num_moe_layers, model.top_k, model.route_dtype
    routes = np.full((stop - start, layers, top_k), missing_route(dtype), dtype)
    if data is not None and layers:
        found = np.frombuffer(base64.b64decode(data), "<i2").reshape(-1, layers, top_k)[start:stop]
        routes[: len(found)] = convert_routes(found, model)
    return routes


def convert_routes(values: npt.NDArray[np.integer], model: ModelConfig) -> Routes:
    """Convert a server's routes, of any integer dtype, to the model's `route_dtype`.

    A negative number (unknown expert) becomes the value `missing_route`. Raises `ValueError` for an expert that the
    model does not have, which a cast would map to another.

    >>> from etude.models import ModelConfig
    >>> convert_routes(np.array([[[-1, 7]]]), ModelConfig(num_experts=8)).tolist()
    [[[255, 7]]]
    """
    if values.dtype.kind not in "iu":
        raise ValueError(f"routes have dtype {values.dtype}, expected an integer dtype")
    if values.size and int(values.max()) >= model.num_experts:
        raise ValueError(f"a route names expert {int(values.max())}, but the model has {model.num_experts} experts")
    return np.where(values < 0, missing_route(model.route_dtype), values).astype(model.route_dtype)


def any_missing(routes: Routes) -> bool:
    """Return whether any of the routes is unknown (`missing_route`)."""
    return bool((routes == missing_route(routes.dtype)).any())


def check_temperature(request: CompletionRequest, lowest: float, server: str) -> None:
    """Raise `MalformedRequest` for a temperature above 0 and below `lowest`, the lowest at which the server can sample.

    `server` is the name of the software, for the error."""
    if 0.0 < request.sampling.temperature < lowest:
        raise MalformedRequest(
            f"request {request.request_id} asks for temperature {request.sampling.temperature:g}",
            f"{server} supports 0 (greedy), and {lowest:g} or more",
            hint=f"set the temperature to 0, or to at least {lowest:g}",
        )


def decode(body: bytes, kind: type[T], server: str, engine: str) -> T:
    """Parse the JSON body of a response as a `kind`. Raises `BrokenAnswer` if it is not one.

    `server` is the name of the software, and `engine` that of the engine, for the error."""
    try:
        return msgspec.json.decode(body, type=kind)
    except ValueError as error:
        raise broken_answer(server, engine, f"{error}; {body[:200]!r}") from None


def event_body(line: bytes, server: str, engine: str) -> bytes | None:
    """Return the JSON in one line of a streamed response, or None for a line without tokens.

    Raises `EngineError` when the server ended the request with an error, `MalformedRequest` when it refused it."""
    if not line.startswith(b"data: ") or is_end(line):
        return None
    body = line[len(b"data: ") :]
    if body.lstrip().startswith(b'{"error"'):
        raise read_error(server, 500, body, engine=engine)
    return body


def is_end(line: bytes) -> bool:
    """Return whether this is the last line of a streamed response."""
    return line.strip() == b"data: [DONE]"


class _ErrorMessage(msgspec.Struct, frozen=True):
    message: str
    code: int | str | None = None


class _ErrorBody(msgspec.Struct, frozen=True):
    error: _ErrorMessage | str


def read_error(server: str, status: int, body: bytes, *, engine: str) -> EngineError:
    """Return the exception for a response whose status is not 200. Accepts any `body` without raising.

    `status`: of the response. A code in the body goes before it, since a stream begins with the status 200. The error
    is a `MalformedRequest` for 400.

    >>> print(read_error("vLLM", 400, b'{"error": {"message": "too long"}}', engine="engine-1"))
    vLLM of engine-1 answered 400: too long
      hint: change the request as the message says, or see the engine's log
    """
    try:
        error = msgspec.json.decode(body, type=_ErrorBody).error
        message = error if isinstance(error, str) else error.message
        if isinstance(error, _ErrorMessage) and isinstance(error.code, int):
            status = error.code
    except ValueError:
        message = repr(body[:200])
    kind, hint = EngineError, "see the engine's log"
    if status == 400:
        kind, hint = MalformedRequest, f"change the request as the message says, or {hint}"
    return kind(f"{server} of {engine} answered {status}", message[:500], hint=hint)


def broken_answer(server: str, engine: str, facts: str) -> BrokenAnswer:
    """Return the error for a response that does not follow the server's protocol.

    `server` is the kind ("vLLM", "SGLang"), `engine` its name in the run, and `facts` says what is wrong."""
    return BrokenAnswer(f"{server} of {engine} sent an invalid response", facts, hint="see the engine's log")
