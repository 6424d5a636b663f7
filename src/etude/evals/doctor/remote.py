"""Engines at a URL: the reference engine, which can report the results of its operators, and vLLM, which returns only
log-probabilities.

vLLM samples through its OpenAI-compatible `/v1/completions` with token ids in and out (`return_token_ids`) at
temperature 1, where its log-probabilities are those of the sampling distribution."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import httpx
import numpy as np

from etude.errors import EngineError, MalformedRequest
from etude.evals.doctor.sides import EngineSide, Sampled, sample_ways
from etude.inference.client import HttpEngine
from etude.inference.operator_trace import Results, as_tensor

T = TypeVar("T")

ANSWER_S = 600.0
"""Deadline for all requests of one way of sampling: an engine on a CPU samples tens of tokens per second."""
PROBE_S = 10.0
SERVER_COMMAND = "python -m etude.inference.server --checkpoint CHECKPOINT --port 8001 --show-operators"
"""Starts the reference engine so that it reports the results of its operators."""


def at_url(url: str, *, token: str | None = None) -> EngineSide:
    """Connect to the engine at a URL, with `token` as bearer token, and detect its kind.

    Raises `EngineError` if there is no answer, or if it is not a supported engine."""
    url = url.rstrip("/").removesuffix("/v1")
    try:
        asyncio.run(_info(url, token))
        return RemoteReferenceEngine(url, token=token)
    except EngineError as first:
        models = _models(url, token)
        if models and models[0].get("owned_by") == "etude":
            raise EngineError(
                f"{url} is the gateway of etude, not an engine",
                "the gateway returns no log-probabilities for token ids",
                hint=f"serve the same checkpoint with an engine: {SERVER_COMMAND}",
            ) from None
        if models is None:
            raise EngineError(
                f"{url} is not a supported engine",
                f"not a reference engine ({first.what}), and there is no OpenAI-compatible /v1/models",
                hint="give the URL of python -m etude.inference.server, or of vllm serve, without a path",
            ) from None
        return VllmEngine(url, str(models[0]["id"]), token=token)


async def _info(url: str, token: str | None) -> None:
    async with HttpEngine(url, token=token) as engine:
        await engine.info(deadline_s=PROBE_S)


def _models(url: str, token: str | None) -> list[dict[str, Any]] | None:
    """The models served at a URL, each with an id; None if there is no such list."""
    try:
        answer = httpx.get(f"{url.rstrip('/')}/v1/models", headers=_bearer(token), timeout=PROBE_S)
        cards = [dict(card) for card in answer.json()["data"] if card["id"]]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError):
        return None
    return cards or None


class RemoteReferenceEngine:
    """The `EngineSide` of etude's own server, `python -m etude.inference.server`.

    The server reports the results of its operators if it was started with `--show-operators`."""

    ways = ("batched", "alone", "cached")

    def __init__(self, url: str, *, token: str | None = None) -> None:
        self.name, self._url, self._token = url, url, token

    def sample(self, way: str, prompts: Sequence[Sequence[int]], *, max_tokens: int, seed: int) -> list[Sampled]:
        return self._with(lambda engine: sample_ways(engine, way, prompts, max_tokens=max_tokens, seed=seed))

    def results(self, token_ids: Sequence[int], *, prompt_tokens: int) -> Results | None:
        try:
            shown = self._with(lambda engine: engine.operators(token_ids, prompt_tokens=prompt_tokens))
        except MalformedRequest:
            return None
        return {one.name: as_tensor(one) for one in shown}

    def _with(self, ask: Callable[[HttpEngine], Coroutine[Any, Any, T]]) -> T:
        async def run() -> T:
            async with HttpEngine(self._url, token=self._token) as engine:
                return await asyncio.wait_for(ask(engine), ANSWER_S)

        try:
            return asyncio.run(run())
        except TimeoutError:
            raise EngineError(
                f"{self._url} did not answer within {ANSWER_S:g} s",
                hint="use fewer --tokens, or check that the engine works: GET /health",
            ) from None


class VllmEngine:
    """A running vLLM server that is compared with the learner (an `EngineSide`), through its OpenAI-compatible API.

    It does not report the outputs of single operators, such as a norm."""

    ways = ("batched", "alone")

    def __init__(self, url: str, model: str, *, token: str | None = None) -> None:
        self.name, self._url, self._model, self._token = f"vLLM at {url}", url.rstrip("/"), model, token

    def sample(self, way: str, prompts: Sequence[Sequence[int]], *, max_tokens: int, seed: int) -> list[Sampled]:
        bodies = [self._body(prompt, max_tokens, seed + i) for i, prompt in enumerate(prompts)]

        async def run() -> list[Sampled]:
            async with httpx.AsyncClient(timeout=ANSWER_S, headers=_bearer(self._token)) as client:
                if way == "alone":
                    return [await self._ask(client, body) for body in bodies]
                return list(await asyncio.gather(*(self._ask(client, body) for body in bodies)))

        return asyncio.run(run())

    def results(self, token_ids: Sequence[int], *, prompt_tokens: int) -> None:
        return None

    def _body(self, prompt: Sequence[int], max_tokens: int, seed: int) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": list(map(int, prompt)),
            "max_tokens": max_tokens,
            "temperature": 1.0,
            "seed": seed,
            "logprobs": 0,  # only for the sampled token
            "return_token_ids": True,
            "ignore_eos": True,
        }

    async def _ask(self, client: httpx.AsyncClient, body: dict[str, Any]) -> Sampled:
        try:
            answer = await client.post(f"{self._url}/v1/completions", json=body)
        except httpx.HTTPError as error:
            raise EngineError(
                f"{self._url} did not complete a prompt",
                f"{type(error).__name__}: {error}",
                hint="check that the engine is running, and read its log",
            ) from None
        if answer.status_code != 200:
            raise EngineError(
                f"{self._url} answered {answer.status_code}", answer.text[:300], hint="see the engine's log"
            )
        return _read(answer, body["prompt"], self._url)


def _read(answer: httpx.Response, prompt: list[int], url: str) -> Sampled:
    try:
        choice = answer.json()["choices"][0]
        ids, values = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        is_valid = len(ids) == len(values) > 0 and all(type(i) is int and i >= 0 for i in ids)
        logprobs = np.array(values, np.float32)
        is_valid = is_valid and logprobs.ndim == 1 and not any(map(math.isnan, values))
    except (ValueError, KeyError, IndexError, TypeError) as error:
        is_valid, values = False, repr(error)
    if not is_valid:
        raise EngineError(
            f"{url} answered without token ids and their log-probabilities",
            str(values)[:200],
            hint="use a vLLM that supports return_token_ids (0.10.2 or later)",
        )
    return Sampled([*prompt, *ids], len(prompt), logprobs, None)


def _bearer(token: str | None) -> dict[str, str]:
    return {} if token is None else {"authorization": f"Bearer {token}"}
