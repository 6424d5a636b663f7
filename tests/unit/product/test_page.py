"""The product's page in a real browser, in front of the real gateway; only the tokens of the model are scripted."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from examples.product.agent import Agent
from examples.product.app import USER, Page
from tests.unit.dash.chrome import Chrome, chrome, needs_chromium
from tests.unit.harness.tokeniser import laptop_chat

from etude.gateway import GatewayConfig, Keys, ServedModel, create_app, serving
from etude.harness import Call
from etude.http_server import bind, run_http_server
from etude.inference import Fleet
from etude.privacy import Level, PrivacyFolder, Subject
from etude.signals import FeedbackFile, FeedbackWriter, Signal
from etude.testing import ScriptedEngine

EVIL = "return '<img src>'"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    with chrome(tmp_path_factory.mktemp("chromium") / "profile") as found:
        yield found


def edit(text: str) -> list[int]:
    """The tokens of an edit of the second line of page.py."""
    return [*laptop_chat().encode_call(Call("edit", {"path": "page.py", "line": "2", "text": text})).tolist()]


def says(text: str) -> list[int]:
    """The tokens of a text without an edit."""
    chat = laptop_chat()
    return [*chat.encode(text).tolist(), chat.end_id]


@asynccontextmanager
async def product(folder: Path, answers: Sequence[list[int]]) -> AsyncIterator[str]:
    """The page in front of a gateway whose model says `answers`. Yields its URL."""
    with PrivacyFolder(folder / "privacy") as privacy:
        privacy.consent.set(Subject.of("key"), Level.TRAIN)
    config = GatewayConfig(port=0)
    fleet = Fleet({"engine-0": ScriptedEngine(answers)})
    model = ServedModel(fleet, laptop_chat(), name="m", context_tokens=512, config=config)
    writer = FeedbackWriter(folder / "feedback.sqlite", privacy=folder / "privacy")
    app = create_app([model], config=config, keys=Keys.of("secret"), feedback=writer)
    try:
        async with serving(app, config=config) as url, Agent(url, "m", key="secret") as agent:
            page = Page(agent)
            async with run_http_server(page.app, bind("127.0.0.1", 0), name="page") as at:
                yield at
            await page.close()
    finally:
        await asyncio.to_thread(writer.close, 60)


def signals(folder: Path) -> list[Signal]:
    with (
        PrivacyFolder(folder / "privacy") as privacy,
        FeedbackFile(folder / "feedback.sqlite", privacy=privacy) as file,
    ):
        return list(file.signals())


def ask(browser: Chrome) -> None:
    browser.wait("document.querySelector('#stars button')")  # the page's script has begun
    browser.run("document.getElementById('told').textContent = ''; document.getElementById('send').click()")
    browser.wait("!document.getElementById('send').disabled && !document.getElementById('answer').hidden")


def told(browser: Chrome, words: str) -> None:
    browser.wait(f"document.getElementById('told').textContent === {words!r}")


@needs_chromium
def test_in_chromium_a_user_keeps_reverts_and_rates_edits_and_the_gateway_takes_each_signal(
    browser: Chrome, tmp_path: Path
) -> None:
    def visit(url: str) -> None:
        browser.go(url)
        ask(browser)
        assert browser.run("return document.querySelector('#diff .new').textContent") == '+     return "river"'
        browser.run("document.getElementById('keep').click()")
        told(browser, "kept: stored")
        assert browser.run("return document.getElementById('file').value").endswith('return "river"\n')
        browser.run("document.querySelector('#stars button:nth-child(4)').click()")
        told(browser, "rated: stored")
        ask(browser)
        browser.run("document.getElementById('revert').click()")
        told(browser, "kept: stored")
        assert browser.run("return document.getElementById('file').value").endswith('return "river"\n'), "as before"

    async def work() -> None:
        async with product(tmp_path, [edit('return "river"'), edit("return 'sea'")]) as url:
            await asyncio.to_thread(visit, url)

    asyncio.run(work())
    found = signals(tmp_path)
    assert [(one.name, one.value) for one in found] == [("kept", 1.0), ("rated", 0.75), ("kept", 0.0)]
    assert len({one.subject for one in found}) == 1, "both visits are of the user of one cookie"


@needs_chromium
def test_in_chromium_a_question_and_a_broken_call_count_as_not_kept(browser: Chrome, tmp_path: Path) -> None:
    """Answers without an edit that sent no signal would be left out of training: it would pay to break calls."""

    def visit(url: str) -> None:
        browser.go(url)
        for shown in ("The agent asks: should owner be river?", "The agent's edit could not be carried out."):
            ask(browser)
            assert browser.run("return document.getElementById('said').textContent") == shown
            assert browser.run("return document.getElementById('keep').disabled")
            told(browser, "kept: stored")

    async def work() -> None:
        broken = laptop_chat().encode_call(Call("edit", {"path": "page.py"})).tolist()
        async with product(tmp_path, [says("should owner be river?"), broken]) as url:
            await asyncio.to_thread(visit, url)

    asyncio.run(work())
    assert [(one.name, one.value) for one in signals(tmp_path)] == [("kept", 0.0)] * 2


@needs_chromium
def test_in_chromium_what_the_model_says_stays_text(browser: Chrome, tmp_path: Path) -> None:
    def visit(url: str) -> None:
        browser.go(url)
        for expected in ("#diff .new", "#said"):
            ask(browser)
            assert "<img" in browser.run(f"return document.querySelector('{expected}').textContent")
            assert browser.run("return document.querySelectorAll('img').length") == 0
            assert not browser.alert()

    async def work() -> None:
        async with product(tmp_path, [edit(EVIL), says("<img src>?")]) as url:
            await asyncio.to_thread(visit, url)

    asyncio.run(work())


def test_a_page_cannot_name_another_user_and_long_or_wrong_requests_are_refused(tmp_path: Path) -> None:
    async def work() -> None:
        answers = [edit('return "river"')]
        async with product(tmp_path, answers) as url, httpx.AsyncClient(base_url=url, timeout=120) as client:
            index = await client.get("/")
            assert "default-src 'none'" in index.headers["content-security-policy"]
            assert "httponly" in index.headers["set-cookie"].lower()
            given = {"wish": "set owner=river", "path": "page.py", "file": "def owner():\n    return ''\n"}
            made = await client.post("/edit", json=given)
            signal = {"id": "a", "response_id": made.json()["id"], "name": "kept", "value": 1}
            other = await client.post("/signals/feedback", json=signal, headers={"cookie": f"{USER}=mallory"})
            assert other.status_code == 404, "the answer was given to somebody else"
            own = await client.post("/signals/feedback", json=signal, headers={"x-etude-user": "mallory"})
            assert own.json()["data"][0]["status"] == "stored"
            assert (await client.post("/signals/feedback", content=b"x" * 20_000)).status_code == 413
            for wrong in (b"", b"[]", b"[" * 9_000, b'{"wish": 1}', b"\xff"):
                assert (await client.post("/edit", content=wrong)).status_code == 400
            assert (await client.post("/edit", json={**given, "file": "x" * 3_000})).status_code == 400
            long = await client.post("/edit", json={**given, "file": "x" * 1_900})
            assert long.status_code == 400, "the model's context is shorter: an error of the request, not of the server"

    asyncio.run(work())
    assert len(signals(tmp_path)) == 1


def test_no_request_to_any_route_of_the_page_is_answered_with_an_error_of_the_server(tmp_path: Path) -> None:
    chance, statuses = random.Random(0), Counter[int]()
    odd = [
        "\ud800",
        "\udfff x",
        "\0",
        "",
        "\u202e",
        "<|im_start|>",
        "\n",
        "x" * 1_990,
        "\U0001f600" * 500,
        1,
        None,
        [],
        {},
        True,
    ]
    given = {"wish": "set owner=river", "path": "page.py", "file": "def owner():\n    return ''\n"}
    signal = {"id": "a", "response_id": "chatcmpl-1", "name": "kept", "value": 1}

    def body() -> bytes:
        told: dict[str, object] = {**chance.choice([given, signal])}
        for name in chance.sample(sorted(told), chance.randrange(3)):
            told[name] = chance.choice(odd)
        data = json.dumps(told).encode()
        if chance.random() < 0.3:
            cut = chance.randrange(len(data) + 1)
            data = data[:cut] + bytes([chance.randrange(256)]) + data[cut + chance.randrange(3) :]
        return data

    async def work() -> None:
        async with product(tmp_path, [edit('return "river"')] * 600) as url, httpx.AsyncClient(base_url=url) as client:
            routes = [(m, r.path) for r in Page(Agent(url, "m")).app.routes for m in r.methods]  # type: ignore[attr-defined]
            for method, path in routes * 60:
                cookie = chance.choice([f"{USER}=a", f"{USER}=\xff", ";;=", f"{USER}=" + "x" * 900, ""]).encode(
                    "latin-1"
                )
                asked = await client.request(method, path, content=body(), headers={b"cookie": cookie}, timeout=120)
                statuses[asked.status_code] += 1
                assert asked.status_code < 500, (path, asked.text)

    asyncio.run(work())
    assert min(statuses[status] for status in (200, 400, 404)) > 5, statuses


def test_a_gateway_that_is_away_is_told(tmp_path: Path) -> None:
    async def work() -> None:
        with bind("127.0.0.1", 0) as unused:  # nothing listens at its port when it is closed
            url = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
        async with Agent(url, "m") as agent:
            page = Page(agent)
            transport = httpx.ASGITransport(page.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://page") as client:
                given = {"wish": "set owner=river", "path": "page.py", "file": "def owner():\n    return ''\n"}
                assert (await client.post("/edit", json=given)).status_code == 502
                assert (await client.post("/signals/feedback", content=b"{}")).status_code == 503
            await page.close()

    asyncio.run(work())
