"""Checks requests before an engine runs them, and records the sessions that delay a replacement of the weights.

All kinds of engines use this. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from etude.errors import ContextFull, EngineBehind, MalformedRequest
from etude.grammars import GrammarError, kind_of
from etude.inference.errors import InvalidGrammar
from etude.records.completion import CompletionRequest, Version

MAX_TOP_LOGPROBS = 20  # as OpenAI's API and vLLM's default
_SAMPLING_HINT = (
    "allowed: top_p above 0 and at most 1, top_k not negative, min_p in [0, 1], frequency and presence penalties in "
    "[-2, 2], "
    "repetition_penalty in [0.01, 100], logit_bias in [-100, 100] for different ids in [0, {vocab_size}), min_tokens "
    f"at most max_tokens, top_logprobs at most {MAX_TOP_LOGPROBS}"
)


@dataclass(frozen=True)
class RequestChecks:
    """Checks requests against the limits of the engine `name`.

    >>> RequestChecks("engine-0", vocab_size=8, context_tokens=4).text([1, 9])
    Traceback (most recent call last):
    etude.errors.MalformedRequest: the token ids are invalid: they have dtype int64 and shape [2]
      hint: send one row of 2 to 4 integers from 0 to 7
    """

    name: str
    vocab_size: int
    context_tokens: int

    def request(self, request: CompletionRequest) -> None:
        """Raise `MalformedRequest` or `ContextFull` for a completion request that the engine cannot serve."""
        sampling, num_prompt = request.sampling, len(request.prompt_ids)
        self.ids(request.prompt_ids, min_tokens=1, max_tokens=None)
        if not (sampling.max_tokens >= 1 and 0.0 <= sampling.temperature < 1e4 and 0 <= sampling.seed < 2**63):
            raise MalformedRequest(
                f"request {request.request_id} has invalid sampling parameters",
                f"max_tokens {sampling.max_tokens}, temperature {sampling.temperature}, seed {sampling.seed}",
                hint="set max_tokens to at least 1, temperature to at least 0, and seed from 0 to 2**63 - 1",
            )
        if not sampling.plain or sampling.top_logprobs:
            self._sampling(request)
        if not 0 <= (request.routes_from or 0) <= num_prompt or not 0.0 < request.deadline_s < 1e6:
            raise MalformedRequest(
                f"request {request.request_id} has an invalid routes_from or deadline_s",
                f"routes_from {request.routes_from} of {num_prompt} prompt tokens, deadline_s {request.deadline_s}",
                hint="set routes_from to a position in the prompt, and deadline_s above 0",
            )
        if num_prompt + sampling.max_tokens > self.context_tokens:
            raise ContextFull(
                f"request {request.request_id} needs {num_prompt + sampling.max_tokens} tokens of context",
                f"{num_prompt} of the prompt and {sampling.max_tokens} to sample; the context of {self.name} has "
                f"{self.context_tokens}",
                hint="shorten the prompt, lower max_tokens, or raise the engine's context_tokens",
            )

    def _sampling(self, request: CompletionRequest) -> None:
        """Check the parameters of sampling that are neutral by default. Comparisons are written so that NaN fails."""
        sampling, biased = request.sampling, [token for token, _ in request.sampling.logit_bias]
        valid = {
            "top_p": 0.0 < sampling.top_p <= 1.0,
            "top_k": 0 <= sampling.top_k < 2**31,
            "min_p": 0.0 <= sampling.min_p <= 1.0,
            "frequency_penalty": -2.0 <= sampling.frequency_penalty <= 2.0,
            "presence_penalty": -2.0 <= sampling.presence_penalty <= 2.0,
            "repetition_penalty": 0.01 <= sampling.repetition_penalty <= 100.0,
            "logit_bias": all(0 <= token < self.vocab_size for token in biased)
            and len(set(biased)) == len(biased)
            and all(-100.0 <= bias <= 100.0 for _, bias in sampling.logit_bias),
            "min_tokens": 0 <= sampling.min_tokens <= sampling.max_tokens,
            "top_logprobs": 0 <= sampling.top_logprobs <= min(MAX_TOP_LOGPROBS, self.vocab_size),
        }
        if wrong := [name for name, is_valid in valid.items() if not is_valid]:
            raise MalformedRequest(
                f"request {request.request_id} has invalid sampling parameters",
                ", ".join(f"{name} {str(getattr(sampling, name))[:80]}" for name in wrong),
                hint=_SAMPLING_HINT.format(vocab_size=self.vocab_size),
            )
        if not sampling.grammar:
            return
        try:
            kind_of(sampling.grammar)
        except GrammarError as error:
            raise InvalidGrammar(f"request {request.request_id}: {error.what}", error.facts, hint=error.hint) from None
        if not any(0 <= token < self.vocab_size for token in sampling.stop_token_ids):
            raise InvalidGrammar(
                f"request {request.request_id} has a grammar but no stop token",
                "without one the model cannot end a text that the grammar limits",
                hint="give stop_token_ids, ids of the vocabulary",
            )

    def text(self, token_ids: Sequence[int]) -> list[int]:
        """Check the token ids of a text to score, and return them as a list.

        Raises `MalformedRequest` for invalid ids, or too many for the engine's context."""
        ids = [t if 0 <= t < self.vocab_size else -1 for t in map(int, token_ids)]  # an invalid id may not fit an int64
        self.ids(np.array(ids, np.int64), min_tokens=2, max_tokens=self.context_tokens)
        return ids

    def ids(self, ids: np.ndarray[Any, Any], *, min_tokens: int, max_tokens: int | None) -> None:
        """Raise `MalformedRequest` unless `ids` has shape [n] with `min_tokens` ≤ n ≤ `max_tokens` and only ids of the
        vocabulary.

        With `max_tokens` None there may be any number of ids."""
        valid = ids.ndim == 1 and ids.dtype.kind in "iu" and len(ids) >= min_tokens
        if (
            not valid
            or (max_tokens is not None and len(ids) > max_tokens)
            or ids.min() < 0
            or ids.max() >= self.vocab_size
        ):
            raise MalformedRequest(
                "the token ids are invalid",
                f"they have dtype {ids.dtype} and shape {list(ids.shape)}",
                hint=f"send one row of {min_tokens} to {max_tokens or self.context_tokens} integers from 0 to "
                f"{self.vocab_size - 1}",
            )

    def version(self, request: CompletionRequest, held: Version) -> None:
        """Raise `EngineBehind` if the loaded version, `held`, does not satisfy the request.

        A request demands at least version step `min_step`, or exactly `pin_step`."""
        if held.step < request.min_step or (request.pin_step is not None and held.step != request.pin_step):
            raise behind(request, self.name, held)


def behind(request: CompletionRequest, engine: str, held: Version) -> EngineBehind:
    """Create the error for a request that requires another version than the loaded one, `held`. `engine` is the
    engine's name."""
    demanded = f"step {request.pin_step}" if request.pin_step is not None else f"step {request.min_step} or later"
    return EngineBehind(
        f"request {request.request_id} needs weights of {demanded}",
        f"{engine} has version {held}",
        hint="load that version first, or send the request to an engine that has it",
    )


class VersionPins:
    """Records which sessions pin the loaded version. While a session pins it, the weights must not be replaced.

    A request with `pin_step` (of an evaluation) must be served by one version from start to end, and the next call of
    its session needs the same version. So a session pins the version while this engine serves its request, and for
    `lease_s` seconds after that. If the session sends no further request, it delays the next version by at most
    `lease_s` seconds. All times are arguments, on the caller's clock.

    >>> pins = VersionPins(lease_s=10.0)
    >>> pins.enter("eval.0")
    >>> pins.held(now=0.0), pins.leave("eval.0", now=5.0, may_return=True), pins.held(now=14.0), pins.held(now=15.0)
    (True, None, True, False)
    """

    def __init__(self, *, lease_s: float) -> None:
        self.lease_s = lease_s
        self._running: dict[str, int] = {}
        self._leases: dict[str, float] = {}  # session -> when its lease ends
        self._held_until = float("-inf")

    def enter(self, session_id: str) -> None:
        """Record that a request with a `pin_step` was accepted."""
        self._running[session_id] = self._running.get(session_id, 0) + 1

    def leave(self, session_id: str, *, now: float, may_return: bool) -> None:
        """Record that a request of a session that is pinned to a version has ended at the time `now`.

        `may_return` says whether the session may send further requests."""
        self._running[session_id] -= 1
        if not self._running[session_id]:
            del self._running[session_id]
        if may_return:
            self._leases[session_id] = now + self.lease_s
        else:
            self._leases.pop(session_id, None)

    def hold(self, *, until: float) -> None:
        """Pin the loaded version until the monotonic time `until`, in seconds. A later call replaces the time of an
        earlier one."""
        self._held_until = until

    def held(self, *, now: float) -> bool:
        """Return whether the version is pinned at the monotonic time `now`, in seconds."""
        self._leases = {s: end for s, end in self._leases.items() if end > now}
        return bool(self._running or self._leases) or now < self._held_until
