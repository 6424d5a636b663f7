"""Request and result of one model call. No part of a result can be rebuilt later, so none is dropped or
re-tokenised."""

from __future__ import annotations

import enum
from typing import Any

import msgspec
import numpy as np

from etude.records.wire import F32, I32, Routes


def route_dtype(num_experts: int) -> type[np.uint8 | np.uint16]:
    """What a route of a model with so many experts is stored as: the last value of a dtype is kept for `missing_route`.

    >>> route_dtype(255).__name__, route_dtype(256).__name__
    ('uint8', 'uint16')
    """
    return np.uint8 if num_experts <= np.iinfo(np.uint8).max else np.uint16


def missing_route(dtype: Any) -> int:
    """The value in an array of routes that says: none is known here. Never a zero, which is an expert.

    >>> missing_route(np.uint8), missing_route(np.uint16)
    (255, 65535)
    """
    return int(np.iinfo(dtype).max)


class Version(msgspec.Struct, frozen=True, order=True):
    """A policy's weights. A restart never reuses a name for other bytes.

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

    `kv_epoch` counts the swaps that the request's kept KV has lived through: 0 means that every key and value the
    tokens attended to was computed by `version` itself. A version that read some of the prompt and sampled nothing has
    a span of no tokens, so that the first span is always of the oldest version behind a completion.
    """

    version: Version
    num_tokens: int
    kv_epoch: int = 0


class StopReason(enum.StrEnum):
    STOP = "stop"  # a stop token was sampled; it is the last of token_ids
    LENGTH = "length"  # max_tokens were sampled
    CANCELLED = "cancelled"  # the caller went away


class Traffic(enum.StrEnum):
    """The class of a request. Production goes before rollouts."""

    ROLLOUT = "rollout"
    PRODUCTION = "production"


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How to sample. `seed` keys the randomness together with the token's position in the context, so the same
    request gives the same tokens on any engine, in any batch."""

    max_tokens: int
    stop_token_ids: tuple[int, ...]
    temperature: float = 1.0  # 0.0 is greedy
    seed: int = 0


class CompletionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens in. Made by a `Policy`, read by engines.

    `session_id` names the conversation: later requests of a session whose prompt extends the earlier context reuse
    its KV if the version is the same. `routes_from` says from which position on the caller wants routes (it holds
    the earlier ones already); None wants none.

    `fork_from` names another session: where the engine still holds that session's KV under the same version, the new
    session begins with a copy of it, as far as both contexts have the same tokens. It saves work and changes no result:
    an engine without that KV computes the prompt. Engines with a prefix cache of their own (vLLM, SGLang) ignore it.

    `deadline_s` bounds how long nothing may happen: it begins anew whenever the engine that has the request makes a
    step. So a long completion on a slow engine lives, one on an engine that hangs or is paused does not. To bound the
    whole time, cancel the call.
    """

    request_id: str
    session_id: str
    prompt_ids: I32  # [P]
    sampling: Sampling
    min_step: int = 0  # refuse (EngineBehind) under this version step
    pin_step: int | None = None  # an evaluation's demand: exactly this step, never swapped in mid-generation
    routes_from: int | None = 0
    deadline_s: float = 60.0  # without a step of the engine
    keep_session: bool = True  # False: the last call of a session, its KV may go at once
    fork_from: str | None = None  # id of the session that this new one branches off
    traffic: Traffic = Traffic.ROLLOUT


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens out.

    `routes[i]` are the experts of context position `routes_start + i`; they cover every position that was computed
    up to and including the one that predicted the last token, so `routes_start + len(routes) == P + T - 1`; when none
    were wanted there are none.
    """

    request_id: str
    token_ids: I32  # [T]
    logprobs: F32  # [T] under the sampling distribution, at the temperature sampled with (1.0 when greedy)
    routes: Routes  # [R, MoE layers, top_k]
    routes_start: int
    spans: tuple[VersionSpan, ...]  # sum of num_tokens == T
    stop_reason: StopReason
    engine: str  # name of the engine that served it
    num_cached: int = 0  # prompt tokens whose KV was reused

    def __post_init__(self) -> None:
        n = len(self.token_ids)
        if len(self.logprobs) != n or sum(s.num_tokens for s in self.spans) != n:
            raise ValueError(f"completion {self.request_id}: token ids, logprobs and spans cover different lengths")

    @property
    def oldest_steps(self) -> I32:
        """[T] the oldest version step behind each token: of the keys that it attended to, or its own."""
        oldest: list[int] = []
        for span in self.spans:
            behind = oldest[-1:] if span.kv_epoch else []  # keys of the spans before were kept
            oldest.append(min([span.version.step, *behind]))
        return np.repeat(np.array(oldest, np.int32), [span.num_tokens for span in self.spans])
