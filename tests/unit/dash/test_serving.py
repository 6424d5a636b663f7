"""The server: its live view over a socket, in curl's way and in a real browser, and its command."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
from starlette.responses import HTMLResponse
from tests.shown_run import ShownRunFolder
from tests.unit.dash.browse import tags
from tests.unit.dash.chrome import Chrome, chrome, needs_chromium
from tests.unit.dash.test_hostile import EVIL, hostile

from etude.cli import main
from etude.cli.dash import readers
from etude.dash import Dash, Runs, serving
from etude.errors import ConfigError
from etude.gateway import Keys
from etude.telemetry import Telemetry

__all__ = ["hostile"]
WAIT_S = 60.0


@pytest.fixture
def copy(shown: ShownRunFolder, tmp_path: Path) -> Path:
    return Path(shutil.copytree(shown.path, tmp_path / "runs" / "laptop"))


async def next_parts(lines: AsyncIterator[str]) -> dict[str, str]:
    """The data of the next event of a stream."""
    async with asyncio.timeout(WAIT_S):
        async for line in lines:
            if line.startswith("data: "):
                found: dict[str, str] = json.loads(line.removeprefix("data: "))
                return found
    raise AssertionError("the stream ended")


def test_a_browser_is_sent_what_changes_and_nothing_else(copy: Path) -> None:
    async def work() -> None:
        pages = Dash(Runs(copy, readers()))
        async with (
            serving(pages, host="127.0.0.1", port=0) as url,
            httpx.AsyncClient(base_url=url, timeout=WAIT_S) as client,
            client.stream("GET", "/run/laptop/live") as stream,
        ):
            assert stream.headers["content-type"].startswith("text/event-stream")
            lines = stream.aiter_lines()
            first = await next_parts(lines)
            assert {"status", "tiles", "plots", "warnings"} == set(first)
            log = Telemetry(copy / "events" / "engine-9.jsonl", process="engine-9")
            log.event("engine.trouble", reason=EVIL)
            while "alert(1)" not in (second := await next_parts(lines)).get("warnings", ""):
                assert "plots" not in second
            assert all(tag in ("ul", "li") for tag, _ in tags(second["warnings"]))
            assert "plots" not in second, "no metric of a step has changed"
            log.close()

    asyncio.run(work())


def test_more_browsers_than_can_be_served_are_refused_and_closed_ones_give_their_place_back(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("etude.dash.app.MAX_STREAMS", 2)

    async def work() -> None:
        pages = Dash(Runs(copy, readers()))
        async with (
            serving(pages, host="127.0.0.1", port=0) as url,
            httpx.AsyncClient(base_url=url, timeout=WAIT_S) as client,
        ):
            async with contextlib.AsyncExitStack() as stack:
                for _ in range(2):
                    stream = await stack.enter_async_context(client.stream("GET", "/run/laptop/live"))
                    assert stream.status_code == 200
                assert (await client.get("/run/laptop/live")).status_code == 503
                assert (await client.get("/run/laptop/")).status_code == 200
            async with asyncio.timeout(WAIT_S):
                while True:
                    async with client.stream("GET", "/run/laptop/live") as again:
                        if again.status_code == 200:
                            break
                    await asyncio.sleep(0.1)

    asyncio.run(work())


def test_a_server_that_is_open_to_the_network_needs_a_key(copy: Path) -> None:
    async def work(keys: Keys | None) -> int:
        async with serving(Dash(Runs(copy, readers())), host="0.0.0.0", port=0, keys=keys) as url:
            port = url.rpartition(":")[2]
            async with httpx.AsyncClient(timeout=WAIT_S) as client:
                return (await client.get(f"http://127.0.0.1:{port}/run/laptop/")).status_code

    with pytest.raises(ConfigError, match="open to the network"):
        asyncio.run(work(None))
    assert asyncio.run(work(Keys.of("key"))) == 401


@contextlib.contextmanager
def command(*argv: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """`etude dash` in a process of its own, and its URL."""
    child = subprocess.Popen(
        [sys.executable, "-m", "etude.cli", "dash", *argv, "--port", "0"],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "ETUDE_API_KEY": ""},
    )  # fmt: skip
    dog = threading.Timer(WAIT_S, child.kill)
    dog.start()
    try:
        assert child.stdout is not None
        yield child.stdout.readline().split(" at ")[1].split()[0], child
    finally:
        dog.cancel()
        child.kill()
        child.wait(WAIT_S)
        assert child.stdout is not None
        child.stdout.close()


def test_the_command_serves_until_it_is_interrupted(copy: Path) -> None:
    with command(str(copy)) as (url, child):
        assert httpx.get(f"{url}/run/laptop/", timeout=WAIT_S).status_code == 200
        assert os.getpriority(os.PRIO_PROCESS, child.pid) > os.getpriority(os.PRIO_PROCESS, 0) - 1
        child.send_signal(signal.SIGINT)
        assert child.wait(WAIT_S) == 0


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["nowhere"], "nowhere is not a folder"),
        ([".", "--releases", "none.sqlite"], "--releases: none.sqlite does not exist"),
        ([".", "--host", "0.0.0.0", "--port", "0"], "is open to the network"),
        ([".", "--key", "a", "--keys", "b"], "--keys and --key cannot be used together"),
    ],
)
def test_what_cannot_be_served_is_refused(
    argv: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ETUDE_API_KEY", raising=False)
    monkeypatch.setattr("os.nice", lambda _: 0)
    assert main(["dash", *argv]) != 0
    assert says in capsys.readouterr().err


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    with chrome(tmp_path_factory.mktemp("chromium") / "profile") as found:
        yield found


@needs_chromium
def test_in_chromium_the_overview_follows_the_run(copy: Path, browser: Chrome) -> None:
    with command(str(copy)) as (url, _):
        browser.go(f"{url}/run/laptop/")
        browser.wait("document.getElementById('connection').textContent === 'live'")
        assert browser.run("return document.querySelectorAll('figure svg .line').length") > 3
        styled = "return getComputedStyle(document.querySelector('.tiles > div')).borderRadius"
        assert browser.run(styled) == "12px", "the stylesheet is allowed"
        log = Telemetry(copy / "events" / "engine-9.jsonl", process="engine-9")
        log.event("engine.trouble", reason=EVIL)
        log.close()
        browser.wait(
            "[...document.querySelectorAll('.warnings li')].some((one) => one.textContent.includes('alert(1)'))"
        )
        assert not browser.alert()
        assert browser.run("return document.querySelectorAll('img, iframe, style, [onerror], [onload]').length") == 0


@needs_chromium
def test_in_chromium_no_hostile_text_runs(hostile: ShownRunFolder, browser: Chrome) -> None:
    with command(str(hostile.path)) as (url, _):
        base = httpx.get(url, timeout=WAIT_S).headers["location"]
        for page in ("", "rollouts", "rollouts/g000001.0", "rollouts/g000001.0/turns/0", "fleet", "evaluations"):
            browser.go(f"{url}{base}{page}")
            assert not browser.alert()
            names = browser.run("return [...document.querySelectorAll('*')].flatMap((one) => one.getAttributeNames())")
            assert not [name for name in names if name.startswith("on") or name == "style"]
            assert browser.run("return [...document.scripts].map((one) => one.getAttribute('src'))") == [
                "/static/dash.js"
            ]
            assert browser.run("return document.querySelectorAll('img, iframe, style').length") == 0
        browser.go(f"{url}{base}rollouts/g000001.0")
        assert "<script>alert(1)</script>" in browser.run("return document.body.innerText"), "the text is shown"


@needs_chromium
def test_in_chromium_a_script_that_got_into_a_page_is_stopped_by_its_policy(copy: Path, browser: Chrome) -> None:
    """Were a text written without escaping, the browser would still not run it."""
    pages = Dash(Runs(copy, readers()))

    async def raw(request: object) -> HTMLResponse:
        script = "<script>document.title = 'owned'</script><img src=x onerror=\"document.title = 'owned'\">"
        return HTMLResponse(f"<title>calm</title>{script}<p id=end>")

    async def work() -> None:
        pages.index = raw  # type: ignore[assignment,method-assign]
        async with serving(pages, host="127.0.0.1", port=0) as url:
            await asyncio.to_thread(browser.go, url)

    asyncio.run(work())
    assert browser.run("return document.getElementById('end') !== null")
    assert browser.run("return document.title") == "calm"
