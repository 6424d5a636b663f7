"""Requests of users through a gateway to the stable and the canary version, while a release changes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import openai
import pytest
from tests.unit.gateway.test_gateway import CHAT, text
from tests.unit.releases.played import begun

from etude.gateway import GatewayConfig, Keys, ServedModel, create_app, serving
from etude.records import Completion, CompletionRequest
from etude.releases import Arm
from etude.releases.assignment import MAX_AGE_S
from etude.releases.router import ReleaseRouter
from etude.stores import MemoryStore
from etude.testing import ScriptedEngine


class Version:
    """A policy that answers with its name, once it may, and tells that it was asked."""

    def __init__(self, name: str) -> None:
        self.engine = ScriptedEngine([text(name)] * 1000)
        self.let, self.asked = asyncio.Event(), asyncio.Queue[str]()
        self.let.set()

    async def complete(self, request: CompletionRequest) -> Completion:
        self.asked.put_nowait(request.request_id)
        await self.let.wait()
        return await self.engine.generate(request)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_users_get_their_version_and_a_rollback_fails_no_request_in_flight(tmp_path: Path) -> None:
    store, clock = MemoryStore(), Clock()
    releases = begun(tmp_path / "releases.sqlite", store, shares=(50,))
    users = [f"user-{i}" for i in range(30)]
    canary = {user for user in users if releases.assign(user) is Arm.CANARY}
    router = ReleaseRouter(tmp_path / "releases.sqlite", stable="m", canary="m-canary", clock=clock)
    config = GatewayConfig(port=0, max_running=64)

    async def main() -> None:
        policies = {"m": Version("stable"), "m-canary": Version("canary")}
        models = [
            ServedModel(policy, CHAT, name=name, context_tokens=512, config=config)  # type: ignore[arg-type]
            for name, policy in policies.items()
        ]
        app = create_app(models, config=config, router=router)
        async with (
            serving(app, config=config) as url,
            openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client,
        ):

            async def ask(user: str) -> str:
                headers = {"x-etude-user": user} if user else {}
                messages = [{"role": "user", "content": "hello"}]
                answer = await client.chat.completions.create(model="m", messages=messages, extra_headers=headers)  # type: ignore[call-overload]
                return str(answer.choices[0].message.content)

            said = dict(zip(users, await asyncio.gather(*map(ask, users)), strict=True))
            assert {user for user, answer in said.items() if answer == "canary"} == canary
            assert 0 < len(canary) < len(users)
            assert await ask("") == "stable"
            with pytest.raises(openai.BadRequestError, match="x-etude-user is not a name"):
                await ask("x" * 2000)

            policies["m-canary"].let.clear()
            while not policies["m-canary"].asked.empty():
                policies["m-canary"].asked.get_nowait()
            flying = [asyncio.create_task(ask(user)) for user in sorted(canary)]
            async with asyncio.timeout(60):
                for _ in flying:
                    await policies["m-canary"].asked.get()
            releases.rollback(store, reason="bad", now=1.0)
            clock.now += MAX_AGE_S
            assert {*await asyncio.gather(*map(ask, users))} == {"stable"}
            policies["m-canary"].let.set()
            assert {*await asyncio.gather(*flying)} == {"canary"}

    asyncio.run(main())
    router.close()


def test_without_a_header_the_user_is_the_name_of_the_key(tmp_path: Path) -> None:
    seen = list[tuple[str, str]]()

    def route(model: str, subject: str) -> str:
        seen.append((model, subject))
        return "b"

    async def main() -> None:
        config = GatewayConfig(port=0)
        models = [
            ServedModel(Version(name), CHAT, name=name, context_tokens=512, config=config)  # type: ignore[arg-type]
            for name in ("a", "b")
        ]
        app = create_app(models, config=config, keys=Keys.of("secret"), router=route)
        async with serving(app, config=config) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
            body = {"model": "a", "messages": [{"role": "user", "content": "hello"}]}
            headers = {"authorization": "Bearer secret"}
            answer = await client.post("/chat/completions", json=body, headers=headers)
            assert answer.json()["choices"][0]["message"]["content"] == "b"
            assert (
                await client.post("/chat/completions", json=body | {"model": "c"}, headers=headers)
            ).status_code == 404

    asyncio.run(main())
    [(model, subject)] = seen
    assert model == "a"
    assert subject


def test_a_file_without_releases_routes_all_to_the_stable_version_until_there_is_one(tmp_path: Path) -> None:
    clock = Clock()
    router = ReleaseRouter(tmp_path / "releases.sqlite", stable="m", canary="m-canary", clock=clock)
    assert {router("m", f"user-{i}") for i in range(50)} == {"m"}
    begun(tmp_path / "releases.sqlite", MemoryStore(), shares=(99,)).close()
    assert router("m", "user-1") == "m"  # read less than MAX_AGE_S ago
    clock.now += MAX_AGE_S
    assert "m-canary" in {router("m", f"user-{i}") for i in range(50)}
    assert router("other", "user-1") == "other"
    router.close()
