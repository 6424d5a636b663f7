"""Asks the app for pages, as a browser would, without a socket."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx

from etude.cli.dash import readers
from etude.dash import Dash, Runs, create_app
from etude.gateway import Keys


class Browser:
    """Pages of the runs at `path`. `get` returns the response to a GET."""

    def __init__(
        self, path: Path, *, releases: Path | None = None, privacy: Path | None = None, keys: Keys | None = None
    ) -> None:
        self.dash = Dash(Runs(path, readers()), releases=releases, privacy=privacy)
        self.app = create_app(self.dash, keys=keys)

    def get(self, url: str, **headers: str) -> httpx.Response:
        return self.all([url], **headers)[0]

    def all(self, urls: list[str], *, method: str = "GET", **headers: str) -> list[httpx.Response]:
        async def work() -> list[httpx.Response]:
            transport = httpx.ASGITransport(self.app, client=("127.0.0.1", 1234))
            given: dict[str, Any] = {name.replace("_", "-"): value for name, value in headers.items()}
            base = f"http://{given.pop('host', '127.0.0.1:8080')}"
            async with httpx.AsyncClient(transport=transport, base_url=base) as client:
                return [await client.request(method, url, headers=given) for url in urls]

        return asyncio.run(work())
