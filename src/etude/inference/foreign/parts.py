"""An answer of a server of another make in our terms, and what no such answer can be. Pure.

A server labels tokens by the number of an adoption (`engine.ForeignEngine`); labels are read to (adoption, tokens).
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from etude.errors import EngineError
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

WANTED = "routes"  # begins the name of a request whose routes will be fetched
NO_NUMBER = -9999.0  # what vLLM sends in the place of a log-probability that is none


class Broken(EngineError):
    """A server answered something that none of the tested version answers."""


@dataclass(frozen=True)
class Part:
    """Some tokens of an answer, or all of them (`Whole` puts them together)."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str | None = None
    spans: tuple[tuple[int, int], ...] = ()  # (adoption, tokens) of the whole answer, in its last part
    num_cached: int = 0
    routed: str | None = None  # routes that the build gave by itself


class Whole:
    """Parts put together as they come, each token once.

    >>> whole = Whole()
    >>> for part in (Part([7], [-0.5]), Part([8], [-0.1], "length", ((0, 2),))):
    ...     whole.add(part)
    >>> whole.part.token_ids, whole.part.spans
    ([7, 8], ((0, 2),))
    """

    def __init__(self) -> None:
        self.part = Part([], [])

    def add(self, other: Part) -> None:
        """The next part."""
        had = self.part
        had.token_ids.extend(other.token_ids)
        had.logprobs.extend(other.logprobs)
        self.part = replace(
            had,
            finish_reason=other.finish_reason or had.finish_reason,
            spans=other.spans or had.spans,
            num_cached=other.num_cached or had.num_cached,
            routed=other.routed or had.routed,
        )


def keyed_seed(seed: int, num_prompt: int) -> int:
    """A server draws a stream of numbers for a seed, beginning with the first token that it samples. Turns of a rollout
    have one seed and longer and longer prompts: they must not begin with the same number.

    >>> keyed_seed(7, 10) != keyed_seed(7, 11), 0 <= keyed_seed(7, 10) < 2**63
    (True, True)
    """
    digest = hashlib.sha256(b"%d %d" % (seed, num_prompt)).digest()
    return int.from_bytes(digest[:8], "little") >> 1


class Labelled(Protocol):
    """A span of a server's own: output tokens [start, end) under a label."""

    @property
    def version(self) -> str: ...
    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...


def labelled(told: Iterable[Labelled], make: str, engine: str) -> tuple[tuple[int, int], ...]:
    """(adoption, number of tokens) after each other. Raises `Broken`."""
    spans, at = [], 0
    for span in told:
        if span.start != at or span.end < at or not span.version.isdigit():
            raise broken(make, engine, f"a span {span.version!r} of [{span.start}, {span.end}) after {at}")
        spans.append((int(span.version), span.end - at))
        at = span.end
    return tuple(spans)


def completed(
    request: CompletionRequest,
    answer: Part,
    *,
    make: str,
    engine: str,
    versions: Mapping[int, Version],
    adoption: int,
    routes: Routes,
) -> Completion:
    """The completion that a server's answer is. `versions`: what each adoption brought; `adoption`: the one that held
    when the request was handed over. Raises `Broken`.

    What a request that lived through a swap had read before it is not known: that it had is assumed, and the version of
    then stands first among the spans, with no token.
    """
    count = len(answer.token_ids)
    if not count or sum(n for _, n in answer.spans) != count:
        raise broken(make, engine, f"{count} tokens, and spans of {sum(n for _, n in answer.spans)}")
    if any(number not in versions for number, _ in answer.spans):
        raise broken(make, engine, f"tokens of adoptions {[n for n, _ in answer.spans]}, of which not all are known")
    if min(answer.logprobs) <= NO_NUMBER or not np.isfinite(answer.logprobs).all():
        raise broken(make, engine, "a sampled token whose log-probability is no number")
    stopped = answer.token_ids[-1] in request.sampling.stop_token_ids
    if answer.finish_reason not in ("stop", "length") or stopped != (answer.finish_reason == "stop"):
        raise broken(make, engine, f"an end by {answer.finish_reason!r} at token {answer.token_ids[-1]}")
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
    """Routes of positions [start, stop) by base64 of int16 [positions, MoE layers, top_k]; what is not there is
    `missing_route`. Raises `ValueError` for experts that the model does not have."""
    layers, top_k, dtype = model.num_moe_layers, model.top_k, model.route_dtype
    routes = np.full((stop - start, layers, top_k), missing_route(dtype), dtype)
    if data is not None and layers:
        found = np.frombuffer(base64.b64decode(data), "<i2").reshape(-1, layers, top_k)[start:stop]
        routes[: len(found)] = as_routes(found, model)
    return routes


def as_routes(told: npt.NDArray[np.integer], model: ModelConfig) -> Routes:
    """Experts as a server numbers them, of any integer dtype, in the model's `route_dtype`; a negative number says that
    none is known. Raises `ValueError` for an expert that the model does not have: a cast would make another of it.

    >>> from etude.models import ModelConfig
    >>> as_routes(np.array([[[-1, 7]]]), ModelConfig(num_experts=8)).tolist()
    [[[255, 7]]]
    """
    if told.dtype.kind not in "iu":
        raise ValueError(f"routes of dtype {told.dtype}")
    if told.size and int(told.max()) >= model.num_experts:
        raise ValueError(f"a route to expert {int(told.max())} of {model.num_experts}")
    return np.where(told < 0, missing_route(model.route_dtype), told).astype(model.route_dtype)


def any_missing(routes: Routes) -> bool:
    """Whether some of them are not known."""
    return bool((routes == missing_route(routes.dtype)).any())


def broken(make: str, engine: str, facts: str) -> Broken:
    """For what no server of the tested version answers."""
    return Broken(f"{make} of {engine} answered what cannot be a completion", facts, hint="its log says what happened")
