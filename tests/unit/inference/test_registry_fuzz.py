"""Requests that no engine sends, to every route of the registry."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter

import httpx

from etude.inference.registry_server import RegistryServer

from .test_registrar import WANTED

ODD = [
    "\ud800", "\0", "", "\u202e", "\u0301" * 50, "a/b", "x" * 101, "x" * 90_000, 1, 1e400, -1, None, [], {}, True,
    "http://", "http://[", "http://[::1", "http://a b", "http://x:99999", "http://x:-1", "http://x:abc",
    "http://" + "a." * 130,
    "http://user:pw@127.0.0.1:1", "http://127.0.0.1:1/\r\nx: y", "http://127.0.0.1:0", "http://*", "http://%00",
    "file:///etc/passwd",
]  # fmt: skip


def test_no_request_to_any_route_of_the_registry_is_answered_with_an_error_of_the_server() -> None:
    chance, statuses = random.Random(0), Counter[int]()
    registrar = RegistryServer(WANTED, token="t")
    routes = [(method, one.path) for one in registrar.app.routes for method in one.methods]  # type: ignore[attr-defined]
    given = {"name": "far-1", "url": "http://127.0.0.1:1", "lease": "0" * 32, "region": "", "standby": False}

    def body() -> bytes:
        told: dict[str, object] = dict(given)
        for name in chance.sample(sorted(told), chance.randrange(3)):
            told[name] = chance.choice(ODD)
        data = json.dumps(told).encode()
        if chance.random() < 0.3:
            cut = chance.randrange(len(data) + 1)
            data = data[:cut] + bytes([chance.randrange(256)]) + data[cut + chance.randrange(3) :]
        return data

    async def work() -> None:
        transport = httpx.ASGITransport(registrar.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://run", timeout=120) as client:
            for method, path in routes * 60:
                headers = {b"authorization": chance.choice([b"Bearer t"] * 8 + [b"Bearer \xff", b""])}
                asked = await client.request(method, path, content=body(), headers=headers)
                statuses[asked.status_code] += 1
                assert asked.status_code < 500, (path, asked.text)
        assert not registrar.registry.members
        await registrar.close()

    asyncio.run(work())
    assert min(statuses[status] for status in (200, 400, 401, 410)) > 5, statuses
