"""Completions in parts: a request that an engine ended early goes on at another engine.

The sampled tokens become part of the next prompt. Random numbers depend on the seed and the position alone, so under
the same weights the tokens are those of an undisturbed request. Only for requests whose sampling is
`Sampling.plain`: penalties and grammars depend on where the prompt ends."""

from __future__ import annotations

import msgspec
import numpy as np

from etude.records.completion import Completion, CompletionRequest, StopReason, VersionSpan


def is_complete(request: CompletionRequest, done: Completion) -> bool:
    """Return whether a completion has all tokens that its request asks for: it ends with a stop token, or has
    `max_tokens` tokens."""
    sampling = request.sampling
    return len(done.token_ids) >= sampling.max_tokens or done.stop_reason is StopReason.STOP


def rest_of(request: CompletionRequest, done: Completion | None) -> CompletionRequest:
    """Return the request for the tokens that are missing after `done`."""
    if done is None or not len(done.token_ids):
        return request
    number = len(done.token_ids)
    return msgspec.structs.replace(
        request,
        prompt_ids=np.concatenate([request.prompt_ids, done.token_ids]),
        sampling=msgspec.structs.replace(request.sampling, max_tokens=request.sampling.max_tokens - number),
        routes_from=None if request.routes_from is None else len(request.prompt_ids) + number - 1,
    )


def joined(request: CompletionRequest, first: Completion | None, second: Completion) -> Completion:
    """Join two parts of a completion of `request`. The prompt of `second` ended with the tokens of `first`."""
    if first is None or not len(first.token_ids):
        return second
    spans = list(first.spans)
    for span in second.spans:
        before = spans[-1]
        if before == VersionSpan(span.version, before.num_tokens, span.kv_epoch):
            spans[-1] = VersionSpan(span.version, before.num_tokens + span.num_tokens, span.kv_epoch)
        elif span.num_tokens:
            spans.append(span)
    return Completion(
        request_id=request.request_id,
        token_ids=np.concatenate([first.token_ids, second.token_ids]),
        logprobs=np.concatenate([first.logprobs, second.logprobs]),
        routes=np.concatenate([first.routes, second.routes]),
        routes_start=first.routes_start if len(first.routes) else second.routes_start,
        spans=tuple(spans),
        stop_reason=second.stop_reason,
        engine=second.engine,
        num_cached=first.num_cached,
    )
