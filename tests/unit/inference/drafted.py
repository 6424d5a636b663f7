"""Helpers of the tests of speculative decoding: engines that are stepped by hand, and drafters that know the answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from functools import cache
from typing import Any

import msgspec
import numpy as np

from etude.inference import EngineConfig
from etude.inference.engine import ReferenceEngine
from etude.inference.look_up import Drafter
from etude.inference.scheduler import Sequence
from etude.inference.speculation import StepCosts
from etude.models import Transformer, hf_views
from etude.numerics.operators import Operators
from etude.records import Completion, CompletionRequest
from etude.weights import Tensor

from .helpers import TINY, ask, everything, version

Weights = dict[str, Tensor]
SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"stop_token_ids": tuple(range(0, 64, 9))},
    {"stop_token_ids": tuple(range(0, 64, 3)), "min_tokens": 6},
    {"top_p": 0.7, "top_k": 9},
    {"frequency_penalty": 1.2, "presence_penalty": 0.4, "top_logprobs": 2},
    {"repetition_penalty": 1.6, "temperature": 0.0},
    {"logit_bias": ((5, 6.0), (6, -100.0)), "top_logprobs": 3},
]


Make = Callable[[int], Transformer]


def tiny(step: int) -> Transformer:
    """The model at version `step`."""
    return Transformer(TINY, seed=1 + step)


@cache
def weights(step: int, make: Make = tiny) -> Weights:
    """The weights of version `step`."""
    views = hf_views(make(step))
    return {n: Tensor("f32", tuple(v.shape), v.contiguous().numpy().view(np.uint32).ravel()) for n, v in views.items()}


class NoCosts(StepCosts):
    """A step takes a second, and drafts take no time: as many are computed as fit."""

    @property
    def costs(self) -> np.ndarray[Any, Any]:
        return np.array([1.0, 0.0, 0.0, 0.0])


class Known:
    """Drafts the tokens of known completions; each is right with probability `right`."""

    def __init__(self, answers: dict[tuple[int, ...], list[int]], *, right: float, seed: int = 0) -> None:
        self.answers, self.right, self.rng = answers, right, np.random.default_rng(seed)
        self.ids: dict[int, list[int]] = {}

    def begin(self, slot: int, token_ids: Many[int]) -> None:
        self.ids[slot] = list(token_ids)

    def extend(self, slot: int, token_ids: Many[int]) -> None:
        self.ids[slot] += token_ids

    def draft(self, slot: int, most: int) -> list[int]:
        ids = self.ids[slot]
        prompt, answer = next((p, a) for p, a in self.answers.items() if ids[: len(p)] == list(p))
        found = answer[len(ids) - len(prompt) :][:most]
        return [token if self.rng.random() < self.right else (token + 1) % TINY.vocab_size for token in found]


class ByHand:
    """An engine whose steps are made by the caller. It begins with version `step`."""

    def __init__(
        self,
        *,
        step: int = 0,
        drafter: Drafter | None = None,
        operators: Operators | None = None,
        model: Transformer | None = None,
        make: Make = tiny,
        **settings: Any,
    ) -> None:
        plain = Transformer(TINY, seed=1 + step, operators=operators) if make is tiny else make(step)
        self.model, self.make = model or plain, make
        config = EngineConfig(**{"max_sequences": 24, "context_tokens": 256, **settings})
        self.engine = ReferenceEngine(self.model, version=version(step), config=config, drafter=drafter)
        if self.engine._speculator is not None:
            self.engine._speculator.costs = NoCosts()

    def submit(self, request: CompletionRequest) -> Sequence:
        running = asyncio.run(self.engine._running(request))
        self.engine._submit(running)
        return running

    def swap(self, step: int) -> None:
        """Replace the weights before the next step."""
        done = self.engine.swap(everything(self.model, weights(step, self.make), step))
        self._calls()
        self.engine._apply_swaps()
        assert done.result().version == version(step)

    def step(self) -> None:
        self._calls()
        self.engine._advance()

    def _calls(self) -> None:
        inbox = self.engine._thread._inbox
        while inbox:
            inbox.popleft().run()

    def finish(self, running: Many[Sequence], *, most: int = 3000) -> list[Completion]:
        """Step until all are done."""
        ending = time.monotonic() + 600
        while not all(one.future.done() for one in running):
            most -= 1
            assert most >= 0
            assert time.monotonic() < ending
            self.step()
        return [one.future.result() for one in running]

    def answers(self, *requests: CompletionRequest) -> list[Completion]:
        return self.finish([self.submit(request) for request in requests])


def alone(request: CompletionRequest, like: Completion, make: Make = tiny, **settings: Any) -> Completion:
    """What one request is answered without speculation, under the versions of the tokens of `like`."""
    by_hand = ByHand(step=like.spans[0].version.step, max_sequences=1, make=make, **settings)
    running, num = by_hand.submit(request), 0
    for before, after in zip(like.spans, like.spans[1:], strict=False):
        num += before.num_tokens
        while len(running.token_ids) < num:
            by_hand.step()
        if not after.kv_epoch:  # it was preempted: all keys are of this version
            assert by_hand.engine._scheduler._preempt()
        if after.version != before.version:
            by_hand.swap(after.version.step)
    return by_hand.finish([running])[0]


def said(done: Completion) -> dict[str, Any]:
    """All of a completion but what depends on other requests and on the time."""
    fields = {name: getattr(done, name) for name in done.__struct_fields__}
    del fields["num_cached"], fields["engine"], fields["spans"]
    spans = [(span.version, span.num_tokens) for span in done.spans]
    values = {k: (v.dtype, v.tolist()) if isinstance(v, np.ndarray) else v for k, v in fields.items()}
    return {**values, "spans": spans}


def made_request(rng: np.random.Generator, name: str, **fields: Any) -> CompletionRequest:
    """A random request, half of them with a prompt that repeats itself."""
    size = int(rng.integers(1, 40))
    ids = rng.integers(0, TINY.vocab_size, size).astype(np.int32)
    if rng.random() < 0.5:
        ids = np.tile(ids[:4], 10)[:size]
    request = ask(name, ids, int(rng.integers(1, 25)), **fields)
    chosen = SAMPLINGS[rng.integers(len(SAMPLINGS))]
    given = {**chosen, "min_tokens": min(chosen.get("min_tokens", 0), request.sampling.max_tokens)}
    return msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, **given))


def answers_of(requests: Many[CompletionRequest], done: Many[Completion]) -> dict[tuple[int, ...], list[int]]:
    """What `Known` takes. The prompts must differ."""
    return {tuple(r.prompt_ids.tolist()): d.token_ids.tolist() for r, d in zip(requests, done, strict=True)}
