"""The two sides of a comparison: an engine that samples, and the learner that scores the same tokens.

The reference engine in this process is here; other engines are in `remote` and `transformers_engine`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from etude.inference.config import EngineConfig
from etude.inference.engine import ReferenceEngine
from etude.inference.operator_trace import CHUNK, Results, engine_results
from etude.models import Packed, Transformer
from etude.records.completion import Completion, CompletionRequest, Sampling, Version
from etude.seams import Engine
from etude.training.batches import group_by_budget

NO_VERSION = Version(step=0, incarnation="00000000", digest="0" * 64)


@dataclass(frozen=True)
class Sampled:
    """A sampled text, as the engine returned it.

    `token_ids` are prompt and completion, of which the first `num_prompt` are the prompt. `logprobs` are those of the T
    completion tokens at temperature 1: [T]. `routes` are the K experts that the engine chose at each position in each
    of L layers: [len(token_ids) - 1, L, K]; None if the engine does not return them."""

    token_ids: list[int]
    num_prompt: int
    logprobs: npt.NDArray[np.float32]
    routes: npt.NDArray[np.integer] | None


class EngineSide(Protocol):
    """An engine to be compared with the learner."""

    @property
    def name(self) -> str: ...

    @property
    def ways(self) -> tuple[str, ...]:
        """The ways of sampling that the engine supports, of "batched", "alone", "chunked" and "cached"
        (`sample_ways`)."""
        ...

    def sample(self, way: str, prompts: Sequence[Sequence[int]], *, max_tokens: int, seed: int) -> list[Sampled]:
        """Complete each prompt (token ids) by `max_tokens` tokens at temperature 1, in one of `ways`. Raises
        `EngineError`."""
        ...

    def results(self, token_ids: Sequence[int], *, prompt_tokens: int) -> Results | None:
        """Compute these tokens and return the result of every operator, by operator name.

        The first `prompt_tokens` of them are computed as a prompt. Returns None if the engine does not report results.
        """
        ...


class ReferenceEngineSide:
    """The `EngineSide` of a reference engine in this process. `model` must not be the learner's model object."""

    name = "etude"
    ways = ("batched", "alone", "chunked", "cached")

    def __init__(self, model: Transformer) -> None:
        self._model = model

    def sample(self, way: str, prompts: Sequence[Sequence[int]], *, max_tokens: int, seed: int) -> list[Sampled]:
        longest = max(map(len, prompts)) + max_tokens
        config = EngineConfig(
            context_tokens=longest, max_sequences=64, chunk_tokens=CHUNK if way == "chunked" else max(2, longest)
        )

        async def run() -> list[Sampled]:
            async with ReferenceEngine(self._model, version=NO_VERSION, name=self.name, config=config) as engine:
                return await sample_ways(engine, way, prompts, max_tokens=max_tokens, seed=seed)

        return asyncio.run(run())

    def results(self, token_ids: Sequence[int], *, prompt_tokens: int) -> Results:
        return engine_results(self._model, token_ids, prompt_tokens=prompt_tokens)


async def sample_ways(
    engine: Engine, way: str, prompts: Sequence[Sequence[int]], *, max_tokens: int, seed: int
) -> list[Sampled]:
    """Complete each prompt by `max_tokens` tokens at temperature 1, with requests made in the way that `way` names.

    - "batched": all prompts at once. "chunked" is the same, for an engine that computes prompts in chunks.
    - "alone": one after another.
    - "cached": each in two requests of one session; the second uses the KV cache of the first."""

    def one(i: int) -> Awaitable[Sampled]:
        if way == "cached":
            return _complete_cached(engine, i, prompts[i], max_tokens=max_tokens, seed=seed)
        return _complete(engine, f"{way}-{i}", prompts[i], max_tokens=max_tokens, seed=seed + i)

    if way == "alone":
        return [await one(i) for i in range(len(prompts))]
    return list(await asyncio.gather(*(one(i) for i in range(len(prompts)))))


async def _complete(engine: Engine, name: str, prompt: Sequence[int], *, max_tokens: int, seed: int) -> Sampled:
    return _sampled(prompt, await _complete_once(engine, name, name, prompt, max_tokens, seed))


async def _complete_cached(engine: Engine, i: int, prompt: Sequence[int], *, max_tokens: int, seed: int) -> Sampled:
    half, session = max(1, len(prompt) // 2), f"cached-{i}"
    await _complete_once(engine, f"{session}-first", session, prompt[:half], 1, seed + i)
    return _sampled(prompt, await _complete_once(engine, f"{session}-second", session, prompt, max_tokens, seed + i))


async def _complete_once(
    engine: Engine, name: str, session: str, prompt: Sequence[int], max_tokens: int, seed: int
) -> Completion:
    return await engine.generate(
        CompletionRequest(
            request_id=name,
            session_id=session,
            prompt_ids=np.array(prompt, np.int32),
            sampling=Sampling(max_tokens=max_tokens, stop_token_ids=(), temperature=1.0, seed=seed),
            deadline_s=600.0,
        )
    )


def _sampled(prompt: Sequence[int], completion: Completion) -> Sampled:
    ids = [*map(int, prompt), *completion.token_ids.tolist()]
    return Sampled(ids, len(prompt), completion.logprobs, completion.routes if completion.routes.size else None)


@dataclass(frozen=True)
class Scored:
    """The learner's result for one `Sampled` text.

    `logprobs` are those of the T completion tokens: [T]. `routes` are the experts that the learner's router chooses:
    [len(token_ids) - 1, L, K]."""

    logprobs: npt.NDArray[np.float32]
    routes: npt.NDArray[np.integer]


class LearnerSide:
    """Scores texts with the learner's forward pass, in which several texts are packed into up to `budget_tokens`
    tokens."""

    def __init__(self, model: Transformer, *, budget_tokens: int = 8192) -> None:
        self.model = model.train()
        self._budget = budget_tokens

    @torch.no_grad()
    def score(self, texts: Sequence[Sampled], *, replay: bool = False) -> list[Scored]:
        """Compute the log-probabilities of the completions of texts, in order.

        With `replay` the forward pass uses the engine's experts (`Sampled.routes`). `Scored.routes` are in both cases
        those that the learner's router chooses."""
        return [scored for part in self._parts(texts) for scored in self._forward(part, replay)]

    def _parts(self, texts: Sequence[Sampled]) -> Iterator[Sequence[Sampled]]:
        for part in group_by_budget([len(text.token_ids) - 1 for text in texts], self._budget):
            yield texts[part]

    def _forward(self, texts: Sequence[Sampled], replay: bool) -> Iterator[Scored]:
        lengths = [len(text.token_ids) - 1 for text in texts]
        tokens = torch.tensor([token for text in texts for token in text.token_ids[:-1]])
        routes = torch.from_numpy(np.concatenate([_routes(text) for text in texts])) if replay else None
        done = self.model.run(tokens, Packed(lengths, self.model.operators), routes)
        logprobs = self.model.operators.log_softmax(done.logits)
        start = 0
        for text, length in zip(texts, lengths, strict=True):
            rows = torch.arange(start + text.num_prompt - 1, start + length)
            targets = torch.tensor(text.token_ids[text.num_prompt :])
            scores = logprobs[rows].gather(1, targets[:, None])[:, 0]
            yield Scored(scores.numpy(), done.live[start : start + length].numpy())
            start += length


def _routes(text: Sampled) -> npt.NDArray[np.integer]:
    assert text.routes is not None, "checked by the caller"
    return text.routes
