"""Engines at a URL: ours, which may show its operators, and any vLLM, which shows log-probabilities only.

What is sampled by vLLM is asked for by its OpenAI-compatible `/v1/completions` with token ids in and out
(`return_token_ids`), at temperature 1, where its log-probabilities are those of the distribution sampled from.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import httpx
import numpy as np

from etude.errors import EngineError
from etude.evals.doctor.sides import EngineSide, Sampled, sample_ways
from etude.inference.client import HttpEngine
from etude.inference.errors import MalformedRequest
from etude.inference.operator_trace import Results, as_tensor

T = TypeVar("T")

ANSWER_S = 600.0
"""For all of a way's answers: an engine on a CPU samples some tens of tokens a second."""
LOOK_S = 10.0
OUR_SERVER = "python -m etude.inference.server --checkpoint CHECKPOINT --port 8001 --show-operators"
"""What starts our engine so that it can be examined."""


def at_url(url: str, *, token: str | None = None) -> EngineSide:
    """The side that an address is. Raises `EngineError` where nobody answers, or something else than an engine."""
    url = url.rstrip("/").removesuffix("/v1")
    try:
        asyncio.run(_info(url, token))
        return OurRemoteEngine(url, token=token)
    except EngineError as first:
        models = _models(url, token)
        if models and models[0].get("owned_by") == "etude":
            raise EngineError(
                f"{url} is etude's gateway, the door for a product's requests",
                "it gives no log-probabilities by token ids",
                hint=f"serve the same checkpoint by the engine itself: {OUR_SERVER}",
            ) from None
        if models is None:
            raise EngineError(
                f"{url} is no engine that the doctor knows",
                f"neither ours ({first.what}) nor an OpenAI-compatible one with /v1/models",
                hint="give the URL of python -m etude.inference.server, or of vllm serve, without a path",
            ) from None
        return VllmEngine(url, str(models[0]["id"]), token=token)


async def _info(url: str, token: str | None) -> None:
    async with HttpEngine(url, token=token) as engine:
        await engine.info(deadline_s=LOOK_S)


def _models(url: str, token: str | None) -> list[dict[str, Any]] | None:
    """What is served there, each with an id; None where no such list is had."""
    try:
        answer = httpx.get(f"{url.rstrip('/')}/v1/models", headers=_bearer(token), timeout=LOOK_S)
        cards = [dict(card) for card in answer.json()["data"] if card["id"]]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError):
        return None
    return cards or None


class OurRemoteEngine:
    """`python -m etude.inference.server`; with `--show-operators` it shows them."""

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
                f"{self._url} did not answer within {ANSWER_S:g} s", hint="ask for fewer --tokens, or see its /health"
            ) from None


class VllmEngine:
    """vLLM behind its OpenAI-compatible server."""

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
            "logprobs": 0,  # of the sampled token alone
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
                hint="see whether it lives, and its log",
            ) from None
        if answer.status_code != 200:
            raise EngineError(f"{self._url} answered {answer.status_code}", answer.text[:300], hint="its log says why")
        return _read(answer, body["prompt"], self._url)


def _read(answer: httpx.Response, prompt: list[int], url: str) -> Sampled:
    """A completion's tokens and log-probabilities. Raises `EngineError` for an answer of another form."""
    try:
        choice = answer.json()["choices"][0]
        ids, said = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        good = len(ids) == len(said) > 0 and all(type(i) is int and i >= 0 for i in ids)
        logprobs = np.array(said, np.float32)
        good = good and logprobs.ndim == 1 and not any(map(math.isnan, said))
    except (ValueError, KeyError, IndexError, TypeError) as error:
        good, said = False, repr(error)
    if not good:
        raise EngineError(
            f"{url} answered without token ids and their log-probabilities",
            str(said)[:200],
            hint="take a vLLM that knows return_token_ids (from 0.10.2 on)",
        )
    return Sampled([*prompt, *ids], len(prompt), logprobs, None)


def _bearer(token: str | None) -> dict[str, str]:
    return {} if token is None else {"authorization": f"Bearer {token}"}
