"""Request and result of one model call.

No part of a result can be recomputed later, so never drop or re-tokenise any."""

from __future__ import annotations

import enum
from typing import Any

import msgspec
import numpy as np

from etude.records.wire import F32, I32, Routes


def route_dtype(num_experts: int) -> type[np.uint8 | np.uint16]:
    """Return the dtype of routes (the recorded expert indices of each token) for a model with `num_experts` experts.

    The largest value of the dtype is reserved for "unknown" (`missing_route`).

    >>> route_dtype(255).__name__, route_dtype(256).__name__
    ('uint8', 'uint16')
    """
    return np.uint8 if num_experts <= np.iinfo(np.uint8).max else np.uint16


def missing_route(dtype: Any) -> int:
    """Return the value that means "unknown expert" in an array of routes of this dtype: the dtype's largest value.

    >>> missing_route(np.uint8), missing_route(np.uint16)
    (255, 65535)
    """
    return int(np.iinfo(dtype).max)


class Version(msgspec.Struct, frozen=True, order=True):
    """Identifies one state of a policy's weights, as the learner published it.

    `step`: the number of RL optimiser steps behind these weights; 0 is the starting checkpoint. `incarnation`: 8 hex
    characters, drawn anew at each start of a learner. `digest`: SHA-256 over the digests of all tensors, 64 hex
    characters. A restarted learner never reuses a version for other bytes.

    >>> str(Version(step=3, incarnation="0a1b2c3d", digest="ab" * 32))
    'v000003-0a1b2c3d-abababababab'
    """

    step: int
    incarnation: str
    digest: str

    def __str__(self) -> str:
        return f"v{self.step:06d}-{self.incarnation}-{self.digest[:12]}"


class VersionSpan(msgspec.Struct, frozen=True):
    """A sequence of `num_tokens` consecutive sampled tokens that one version of the weights produced.

    `kv_epoch` is the number of times that the engine replaced its weights since it computed the oldest KV of the
    request. If it is 0, `version` computed every key and value to which the tokens attended. A version that computed
    part of the prompt but sampled nothing has a span of 0 tokens. So the first span of a completion always has its
    oldest version."""

    version: Version
    num_tokens: int
    kv_epoch: int = 0


class StopReason(enum.StrEnum):
    """Why a completion ended.

    STOP: a stop token was sampled, and it is the last of the token ids. LENGTH: `max_tokens` tokens were sampled, or a
    client's stop text cut the completion off. CANCELLED: the engine ended it, since it went back to an older version
    than the request demands; another engine can go on after its tokens (`inference.partial_completions`)."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


class Traffic(enum.StrEnum):
    """The priority class of a request. Engines serve production requests before those of rollouts."""

    ROLLOUT = "rollout"
    PRODUCTION = "production"


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The parameters that choose the tokens of one completion.

    Temperature 0.0 is greedy. By default the parameters after `seed` have no effect. The random numbers depend only on
    `seed` and the token's position in the context. So the same request gives the same tokens on any engine and in any
    batch.

    - `top_p`: sample from the likeliest tokens that together have this probability; 1.0 means all.
    - `top_k`: sample from this many likeliest tokens; 0 means all.
    - `min_p`: drop tokens less likely than this share of the likeliest token's probability.
    - `frequency_penalty`: subtracted from a token's logit for each time that this request sampled it.
    - `presence_penalty`: subtracted from the logit of a token that this request sampled.
    - `repetition_penalty`: for each token that is in the prompt or was sampled, a positive logit is divided by this
      number, and a negative one is multiplied by it.
    - `logit_bias`: pairs of a token id and a number to add to the token's logit. No id occurs twice.
    - `min_tokens`: no stop token is sampled before this many tokens.
    - `grammar`: a text made by `etude.grammars`. The sampled text is a sentence of it, followed by a stop token, or the
      beginning of a sentence when `max_tokens` ends it. "" means none.
    - `top_logprobs`: how many of the likeliest tokens to return at each position, in `Completion.top_ids`.

    The logits change in this order, which is vLLM's: grammar, `min_tokens`, `logit_bias`, repetition, frequency and
    presence penalty, temperature, `min_p`, `top_k`, `top_p`."""

    max_tokens: int
    stop_token_ids: tuple[int, ...]
    temperature: float = 1.0
    seed: int = 0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    grammar: str = ""
    top_logprobs: int = 0

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

    - `prompt_ids`: the tokens of the whole context, [P] int32.
    - `session_id`: the id of a conversation. An engine keeps the KV cache of a session for its next request, whose
      prompt extends the context. Requests of other sessions may begin with it too, if the weights are the same.
    - `fork_from`: the id of another session, whose context this prompt begins with. A fleet sends the request to the
      engine of that session. It saves work and changes no result.
    - `min_step`: the lowest version step of the weights; an engine with an older version raises `EngineBehind`.
    - `pin_step`: the only version step that may serve the request; the engine keeps it during the session. For
      evaluations. None: any step.
    - `routes_from`: the first context position whose routes (expert indices) the caller wants; None: no routes.
    - `deadline_s`: the longest time without a step of the engine that serves the request. So a long completion on a
      slow engine succeeds, and one on a hanging or paused engine fails. To limit the total time, cancel the call.
    - `keep_session`: False for the last call of a session, whose KV is the first to be dropped."""

    request_id: str
    session_id: str
    prompt_ids: I32
    sampling: Sampling
    min_step: int = 0
    pin_step: int | None = None
    routes_from: int | None = 0
    deadline_s: float = 60.0
    keep_session: bool = True
    fork_from: str | None = None
    traffic: Traffic = Traffic.ROLLOUT


NO_TOP_IDS: I32 = np.zeros((0, 0), np.int32)
NO_TOP_LOGPROBS: F32 = np.zeros((0, 0), np.float32)


class Completion(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The T tokens that were sampled for one request with P prompt tokens, and the data about them that training needs.

    - `logprobs`: [T] log-probabilities of the sampled tokens, under the model's own distribution at the sampling
      temperature (at 1.0 when greedy): before penalties, biases, grammars and truncation. vLLM and SGLang return
      log-probabilities after these changes (see their `protocol` modules).
    - `routes`: [R, MoE layers, top_k] expert indices; `routes[i]` belongs to context position `routes_start + i`. The
      last is the position that predicted the last token: `routes_start + R == P + T - 1`. R is 0 when none were
      requested.
    - `spans`: which version of the weights sampled which tokens; their `num_tokens` sum to T.
    - `engine`: the name of the engine that served the request.
    - `num_cached`: the number of prompt tokens whose KV was reused.
    - `top_ids`: [T, K] the K = `Sampling.top_logprobs` likeliest tokens at each position, the likeliest first. The
      sampled token is not always among them. [0, 0] when K is 0.
    - `top_logprobs`: [T, K] their log-probabilities, under the same distribution as `logprobs`.

    Raises `ValueError` when token ids, log-probabilities, spans and likeliest tokens have different lengths."""

    request_id: str
    token_ids: I32  # [T]
    logprobs: F32
    routes: Routes
    routes_start: int
    spans: tuple[VersionSpan, ...]
    stop_reason: StopReason
    engine: str
    num_cached: int = 0
    top_ids: I32 = NO_TOP_IDS
    top_logprobs: F32 = NO_TOP_LOGPROBS

    def __post_init__(self) -> None:
        n = len(self.token_ids)
        if len(self.logprobs) != n or sum(s.num_tokens for s in self.spans) != n:
            raise ValueError(f"completion {self.request_id}: token ids, logprobs and spans cover different lengths")
        shape = self.top_ids.shape
        if self.top_logprobs.shape != shape or len(shape) != 2 or shape[0] not in ((n,) if shape[1] else (0, n)):
            raise ValueError(f"completion {self.request_id}: top_ids and top_logprobs are not [{n}, K]")

    @property
    def oldest_steps(self) -> I32:
        """[T] The oldest version step that each token depends on: its own, or that of a key that it attended to."""
        oldest: list[int] = []
        for span in self.spans:
            behind = oldest[-1:] if span.kv_epoch else []  # keys of the spans before were kept
            oldest.append(min([span.version.step, *behind]))
        return np.repeat(np.array(oldest, np.int32), [span.num_tokens for span in self.spans])
