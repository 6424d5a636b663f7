"""The state of a request with penalties or a grammar: counts of its tokens, and its place in the grammar.

It belongs to the request and depends only on its tokens. So it survives a swap of weights, a copied KV cache and a step
in any batch. Imports no torch: `sampler` makes tensors from it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from etude.errors import EngineError
from etude.grammars import GrammarError, Matcher
from etude.inference.errors import InvalidGrammar
from etude.records.completion import CompletionRequest

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]


class Changes(NamedTuple):
    """Changes of the logits of N tokens in one row. All arrays have shape [N].

    First `bias` is added. Then a positive logit is divided by `repetition`, and a negative one is multiplied by it.
    Finally `penalty` is subtracted."""

    tokens: I64
    bias: F32
    repetition: F32
    penalty: F32


class Shaping:
    """The state of the penalties and the grammar of one request. `matcher`: its compiled grammar, before the first
    token; None without a grammar.

    `failure`: an error if the grammar has become too complex, or allows no token; the request must then end.
    """

    def __init__(self, request: CompletionRequest, matcher: Matcher | None, *, vocab_size: int) -> None:
        self.request, self.vocab_size = request, vocab_size
        self.failure: EngineError | None = None
        self._num_sampled, self._matcher = 0, matcher
        sampling = request.sampling
        self._stops = np.array([i for i in sampling.stop_token_ids if 0 <= i < vocab_size], np.int64)
        biased = [token for token, _ in sampling.logit_bias]
        repeats = sampling.repetition_penalty != 1.0
        prompt = np.unique(self.request.prompt_ids) if repeats else np.zeros(0, np.int32)
        tokens = np.union1d(prompt, biased).astype(np.int64)
        self._counts_tokens = repeats or sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0
        room = len(tokens) + (min(sampling.max_tokens, self.vocab_size) if self._counts_tokens else 0)
        self._index = {int(token): i for i, token in enumerate(tokens)}
        self._tokens = np.zeros(room, np.int64)
        self._tokens[: len(tokens)] = tokens
        self._bias, self._counts = np.zeros(room, np.float32), np.zeros(room, np.int32)
        self._in_context = np.zeros(room, bool)
        self._in_context[: len(tokens)] = np.isin(tokens, prompt)
        for token, bias in sampling.logit_bias:
            self._bias[self._index[token]] = bias

    def add(self, token: int) -> None:
        """Record a sampled token that does not end the request."""
        self._num_sampled += 1
        if self._counts_tokens:
            i = self._index.setdefault(token, len(self._index))
            self._tokens[i] = token
            self._counts[i] += 1
            self._in_context[i] = True
        if self._matcher is not None and self.failure is None:
            try:
                self._matcher.consume(token)
            except GrammarError as error:
                self._fail(error.facts)

    def changes(self) -> Changes:
        """Return the changes for the next token."""
        sampling, n = self.request.sampling, len(self._index)
        counts = self._counts[:n]
        repetition = np.where(self._in_context[:n], np.float32(sampling.repetition_penalty), np.float32(1.0))
        penalty = sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)
        return Changes(self._tokens[:n], self._bias[:n], repetition, penalty.astype(np.float32))

    def forbidden(self) -> npt.NDArray[np.bool_] | None:
        """Return which tokens may not be sampled next, [V] bool; None when all may.

        A stop token is allowed where the text may end by the grammar, but not before `min_tokens` unless no other token
        is allowed."""
        early = self._num_sampled < self.request.sampling.min_tokens
        if self._matcher is None or self.failure is not None:
            if not early or not len(self._stops):
                return None
            forbidden = np.zeros(self.vocab_size, bool)
            forbidden[self._stops] = True
            return None if forbidden.all() else forbidden
        try:
            allowed, may_end = self._matcher.mask()
        except GrammarError as error:
            self._fail(error.facts)
            return None
        without_stops = allowed.copy()
        without_stops[self._stops] = False
        if may_end and not (early and without_stops.any()):
            allowed[self._stops] = True
        elif early and without_stops.any():
            allowed = without_stops
        if not allowed.any():
            self._fail("no token of the model continues its text")
            return None
        return ~allowed

    def _fail(self, facts: str) -> None:
        self.failure = InvalidGrammar(
            f"request {self.request.request_id} cannot follow its grammar",
            f"{facts}; after {self._num_sampled} tokens",
            hint="simplify the grammar, or send the request without it",
        )
