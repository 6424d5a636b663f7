"""Request and result of one model call. No part of a result can be recomputed later, so never drop or re-tokenise
any.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec
import numpy as np

from etude.records.wire import F32, I32, Routes


def route_dtype(num_experts: int) -> type[np.uint8 | np.uint16]:
    """The dtype of routes for a model with this number of experts. The largest value is reserved for `missing_route`.

    >>> route_dtype(255).__name__, route_dtype(256).__name__
    ('uint8', 'uint16')
    """
    return np.uint8 if num_experts <= np.iinfo(np.uint8).max else np.uint16


def missing_route(dtype: Any) -> int:
    """The value in an array of routes that means "unknown". It is never 0, which is an expert.

    >>> missing_route(np.uint8), missing_route(np.uint16)
    (255, 65535)
    """
    return int(np.iinfo(dtype).max)


class Version(msgspec.Struct, frozen=True, order=True):
    """Identifies a policy's weights. A restarted learner never reuses a version for other bytes.

    >>> str(Version(step=3, incarnation="0a1b2c3d", digest="ab" * 32))
    'v000003-0a1b2c3d-abababababab'
    """

    step: int  # optimiser steps of RL behind these weights; 0 is the starting checkpoint
    incarnation: str  # 8 hex characters, drawn anew at each start of a learner
    digest: str  # 64 hex characters: SHA-256 over the target tensors' digests

    def __str__(self) -> str:
        return f"v{self.step:06d}-{self.incarnation}-{self.digest[:12]}"


class VersionSpan(msgspec.Struct, frozen=True):
    """`num_tokens` consecutive sampled tokens that one version produced.

    `kv_epoch` counts the swaps of weights since the request's oldest KV was computed: 0 means that `version` computed
    every key and value that the tokens attended to. A version that computed part of the prompt but sampled nothing has
    a span of 0 tokens, so the first span always has the oldest version of a completion.
    """

    version: Version
    num_tokens: int
    kv_epoch: int = 0


class StopReason(enum.StrEnum):
    """Why a completion ended."""

    STOP = "stop"  # a stop token was sampled; it is the last of token_ids
    LENGTH = "length"  # max_tokens were sampled
    CANCELLED = "cancelled"  # the caller went away


class Traffic(enum.StrEnum):
    """The priority class of a request. Production goes before rollouts."""

    ROLLOUT = "rollout"
    PRODUCTION = "production"


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the tokens of a completion are chosen. All parameters after `seed` are neutral by default.

    The random numbers depend on `seed` and the token's position in the context only, so the same request gives the same
    tokens on any engine and in any batch.

    The engine changes the logits in this order, which is vLLM's: `grammar`, `min_tokens`, `logit_bias`,
    `repetition_penalty`, `frequency_penalty` and `presence_penalty`, `temperature`, `min_p`, `top_k`, `top_p`. Tokens
    of the prompt count for `repetition_penalty` only; sampled tokens count for all three penalties.

    With a `grammar` the sampled text is a sentence of it, followed by a stop token, or the beginning of a sentence when
    `max_tokens` ends it. A grammar is a text that `etude.inference.grammars` makes and describes.
    """

    max_tokens: int
    stop_token_ids: tuple[int, ...]
    temperature: float = 1.0  # 0.0 is greedy
    seed: int = 0
    top_p: float = 1.0  # sample from the likeliest tokens that together have this probability
    top_k: int = 0  # sample from this many likeliest tokens; 0: from all
    min_p: float = 0.0  # drop tokens less likely than this share of the likeliest token's probability
    frequency_penalty: float = 0.0  # subtracted from a token's logit for each time that it was sampled
    presence_penalty: float = 0.0  # subtracted from the logit of a token that was sampled
    repetition_penalty: float = 1.0  # divides positive logits, and multiplies others, of tokens in the context
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, number added to its logit); no id twice
    min_tokens: int = 0  # sample no stop token before this many tokens
    grammar: str = ""  # "": none
    top_logprobs: int = 0  # how many of the likeliest tokens to return at each position

    @property
    def plain(self) -> bool:
        """Whether tokens are sampled from the softmax of the model's own logits at `temperature`. Only such tokens can
        be trained, since the learner computes their probabilities by that formula."""
        return (
            self.top_p == 1.0
            and self.top_k == 0
            and self.min_p == 0.0
            and self.frequency_penalty == 0.0
            and self.presence_penalty == 0.0
            and self.repetition_penalty == 1.0
            and not self.logit_bias
            and self.min_tokens == 0
            and not self.grammar
        )


class CompletionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for one completion: prompt tokens and how to sample.

    `session_id` identifies a conversation. A request whose prompt extends the context of an earlier request of its
    session reuses the KV cache, if the version is the same.

    `fork_from` is the id of another session. If the engine still has that session's KV cache under the same version,
    the new session starts with a copy of it, up to the first token that differs. It saves work and changes no result:
    an engine without that KV computes the prompt. Engines with their own prefix cache (vLLM, SGLang) ignore it.

    `deadline_s` limits the time without progress: it starts again with every step of the engine that serves the
    request. So a long completion on a slow engine succeeds, and one on a hanging or paused engine fails. To limit the
    total time, cancel the call."""

    request_id: str
    session_id: str
    prompt_ids: I32  # [P]
    sampling: Sampling
    min_step: int = 0  # an engine with an older version raises EngineBehind
    pin_step: int | None = None  # exactly this version step, never swapped during the session; for evaluations
    routes_from: int | None = 0  # first context position whose routes the caller wants; None: no routes
    deadline_s: float = 60.0  # longest time without a step of the engine
    keep_session: bool = True  # False: the last call of a session, whose KV can be freed at once
    fork_from: str | None = None  # id of the session that this one is a branch of
    traffic: Traffic = Traffic.ROLLOUT


NO_TOP_IDS: I32 = np.zeros((0, 0), np.int32)
NO_TOP_LOGPROBS: F32 = np.zeros((0, 0), np.float32)


class Completion(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The sampled tokens of one request, with everything that training needs of them.

    `logprobs` and `top_logprobs` are of the model's own distribution at the sampling temperature (1.0 when greedy):
    before penalties, biases, grammars and truncation. So they are the same whatever else `Sampling` asks for.
    `top_ids` and `top_logprobs` have the K likeliest tokens at each position, the likeliest first, where K is
    `Sampling.top_logprobs`. The sampled token is not always among them. Both are [0, 0] when K is 0. The servers of
    vLLM and SGLang do not follow this for all parameters: see their `protocol` modules.

    `routes[i]` has the experts of context position `routes_start + i`. The last one is the position that predicted the
    last token: `routes_start + len(routes) == P + T - 1`. It is empty when the request wanted no routes. Raises
    `ValueError` when token ids, log-probabilities, spans and likeliest tokens have different lengths.
    """

    request_id: str
    token_ids: I32  # [T]
    logprobs: F32  # [T] of the sampled tokens, at the sampling temperature (1.0 when greedy)
    routes: Routes  # [R, MoE layers, top_k]
    routes_start: int
    spans: tuple[VersionSpan, ...]  # sum of num_tokens == T
    stop_reason: StopReason
    engine: str  # name of the engine that served it
    num_cached: int = 0  # prompt tokens whose KV was reused
    top_ids: I32 = NO_TOP_IDS  # [T, K]
    top_logprobs: F32 = NO_TOP_LOGPROBS  # [T, K]

    def __post_init__(self) -> None:
        n = len(self.token_ids)
        if len(self.logprobs) != n or sum(s.num_tokens for s in self.spans) != n:
            raise ValueError(f"completion {self.request_id}: token ids, logprobs and spans cover different lengths")
        shape = self.top_ids.shape
        if self.top_logprobs.shape != shape or len(shape) != 2 or shape[0] not in ((n,) if shape[1] else (0, n)):
            raise ValueError(f"completion {self.request_id}: top_ids and top_logprobs are not [{n}, K]")

    @property
    def oldest_steps(self) -> I32:
        """[T] the oldest version step that each token depends on: its own, or that of a key that it attended to."""
        oldest: list[int] = []
        for span in self.spans:
            behind = oldest[-1:] if span.kv_epoch else []  # keys of the spans before were kept
            oldest.append(min([span.version.step, *behind]))
        return np.repeat(np.array(oldest, np.int32), [span.num_tokens for span in self.spans])
