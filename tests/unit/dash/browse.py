"""Asks the app for pages, as a browser would, without a socket."""

from __future__ import annotations

import asyncio
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import urldefrag, urljoin

import httpx

from etude.cli.dash import readers
from etude.dash import Dash, Runs, create_app
from etude.gateway import Keys


class Browser:
    """Pages of the runs at `path`. `get` returns the response to a GET."""

    def __init__(
        self,
        path: Path,
        *,
        releases: Path | None = None,
        privacy: Path | None = None,
        feedback: Path | None = None,
        keys: Keys | None = None,
    ) -> None:
        self.dash = Dash(Runs(path, readers()), releases=releases, privacy=privacy, feedback=feedback)
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


class _Reader(HTMLParser):
    """Collects tags with their attributes, and the text of a page."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_data(self, data: str) -> None:
        self.words += data.split()


def tags(html: str) -> list[tuple[str, dict[str, str]]]:
    """All elements of a page: (name, attributes)."""
    reader = _Reader()
    reader.feed(html)
    return reader.tags


def texts(found: httpx.Response) -> str:
    """The text of a page, with single spaces."""
    reader = _Reader()
    reader.feed(found.text)
    return " ".join(reader.words)


def links(found: httpx.Response, url: str, *, rel: str = "") -> list[str]:
    """The targets of the links of the page `url`, without fragments; with `rel`, only of such links."""
    return [
        urldefrag(urljoin(url, attributes["href"]))[0]
        for tag, attributes in tags(found.text)
        if tag == "a" and (not rel or attributes.get("rel") == rel)
    ]
