"""The registry over HTTP with running engines, and its clients."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer

import aiohttp
import msgspec
import pytest

from etude.cli import main
from etude.errors import DeadlineExceeded, InputError
from etude.http_server import bind, run_http_server
from etude.inference import EngineGone, MalformedRequest, Unauthorised
from etude.inference.app import build_app
from etude.inference.engine import ReferenceEngine
from etude.inference.errors import to_http
from etude.inference.fleet import Fleet
from etude.inference.registry import Registry
from etude.inference.registry_client import (
    FleetUpdater,
    Registration,
    fetch_requirements,
    local_address_for,
    parse_answer,
)
from etude.inference.registry_messages import DRAIN, JOIN, EngineRequirements, JoinRequest, ListedEngine, Roster, State
from etude.inference.registry_server import RegistryServer

from .helpers import ask, engine, version

WANTED = EngineRequirements(
    model="{}",
    mode="exact",
    quantise="none",
    degree=1,
    dtype="float32",
    context_tokens=512,
    max_sequences=8,
    routes=True,
)


@dataclass
class World:
    """A running registry, its reported changes, and the number of sessions of its engines."""

    registrar: RegistryServer
    url: str
    told: list[tuple[str, State]] = field(default_factory=list)
    sessions: dict[str, int] = field(default_factory=dict)

    async def until(self, name: str, state: State) -> None:
        async with asyncio.timeout(60):
            while (name, state) not in self.told:  # noqa: ASYNC110  it is told from a beat
                await asyncio.sleep(0.01)

    def registration(self, name: str, url: str, **facts: bool) -> Registration:
        return Registration(self.url, JoinRequest(name=name, url=url, **facts), token="t", report=lambda _: None)


@asynccontextmanager
async def world(what: EngineRequirements = WANTED, *, lease_s: float = 1.0) -> AsyncIterator[World]:
    registrar = RegistryServer(
        what, token="t", reserved={"engine-0"}, registry=Registry(lease_s=lease_s), interval_s=0.02
    )
    async with run_http_server(registrar.app, bind("127.0.0.1", 0), name="a registry") as url:
        made = World(registrar, url)

        def changed(name: str, listed: ListedEngine) -> None:
            made.told.append((name, listed.state))

        async def beat(_: Roster) -> dict[str, int]:
            return made.sessions

        watch = asyncio.create_task(registrar.watch(changed, beat))
        try:
            yield made
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
            await registrar.close()


@asynccontextmanager
async def served(port: int = 0, token: str = "t", **settings: int) -> AsyncIterator[tuple[ReferenceEngine, str]]:
    """An engine over HTTP with a version of step 3."""
    async with engine(step=3, **settings) as made:
        app = build_app(made, token=token)
        async with run_http_server(app, bind("127.0.0.1", port), name="an engine", grace_s=0) as url:  # type: ignore[arg-type]
            yield made, url


def run(story: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(200):
            await story()

    asyncio.run(bounded())


class SomethingElse(BaseHTTPRequestHandler):
    """A server that returns a web page for every path."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<!doctype html><html>")

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def web_page() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), SomethingElse) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def nobody() -> str:
    with closing(bind("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


COMMANDS = [("list",), ("drain", "west"), ("join", "http://127.0.0.1:1", "--name", "west", "--wait-s", "0")]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_url_that_is_no_registry_and_an_unreachable_registry_are_different_errors(
    command: tuple[str, ...], web_page: str, nobody: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *rest = command
    assert main(["fleet", name, web_page, *rest]) == 2
    said = capsys.readouterr().err
    assert "is not a registry: its response is 200: b'<!doctype html><html>'" in said
    assert "hint: " in said
    assert main(["fleet", name, nobody, *rest]) == 1
    assert "no registry" in capsys.readouterr().err


def test_a_registry_that_is_away_is_waited_for_by_name_and_not_for_ever(nobody: str) -> None:
    told: list[str] = []
    asked = JoinRequest(name="west", url="http://127.0.0.1:1")
    with pytest.raises(DeadlineExceeded, match="no registry answers at") as error:
        asyncio.run(Registration(nobody, asked, token=None, wait_s=0.1, report=told.append).run())
    assert "waited 0.1 s" in error.value.facts
    assert len(told) == 1
    assert told[0].startswith(f"waiting for the registry at {nobody} until ")


def test_an_engine_that_joins_something_else_is_told_so(web_page: str) -> None:
    with pytest.raises(InputError, match="is not a registry"):
        fetch_requirements(web_page, None)


def test_a_proxy_before_a_registry_that_is_away_is_no_other_thing() -> None:
    with pytest.raises(EngineGone, match="no registry answers"):
        parse_answer("http://home", 502, b"<html>bad gateway", EngineRequirements)
    with pytest.raises(InputError, match="is not a registry"):
        parse_answer("http://home", 404, b"Not Found", EngineRequirements)
    with pytest.raises(Unauthorised):
        parse_answer("http://home", *to_http(Unauthorised("no", hint="a token")), EngineRequirements)


def test_an_engine_joins_catches_up_works_is_drained_and_leaves(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def story() -> None:
        async with world() as home, served() as (_, url):
            home.registrar.set_head(version(3))
            member = home.registration("west", url)
            keeping = asyncio.create_task(member.run())
            await home.until("west", State.SERVING)
            fleet = Fleet({})
            follower = FleetUpdater(fleet, token="t")
            following = asyncio.create_task(follower.poll_registry(home.url))
            done = await fleet.complete(ask("r", min_step=3))
            assert done.spans[0].version == version(3)
            home.sessions = fleet.sessions()
            async with aiohttp.ClientSession(headers={"authorization": "Bearer t"}) as session:
                assert (await session.post(home.url + DRAIN, json={"name": "west"})).status == 200
                assert (await session.post(home.url + DRAIN, json={"name": "east"})).status == 410
            await home.until("west", State.DRAINING)
            await asyncio.sleep(0.1)
            assert ("west", State.LEFT) not in home.told, "a session of it is under way"
            home.sessions = {}
            await home.until("west", State.LEFT)
            await keeping
            assert member.state is State.LEFT
            monkeypatch.setenv("ETUDE_TOKEN", "t")
            assert await asyncio.to_thread(main, ["fleet", "drain", home.url, "west"]) == 1
            said = capsys.readouterr()
            assert said.err.startswith("error: west has left: ")
            assert not said.out
            following.cancel()
            await follower.close()

    run(story)


def test_an_engine_that_stops_answering_is_lost_a_standby_stands_in_and_back_it_catches_up() -> None:
    async def story() -> None:
        async with world() as home, served() as (_, standing_by):
            home.registrar.set_head(version(3))
            beside = asyncio.create_task(home.registration("spare", standing_by, standby=True).run())
            async with served() as (_, url):
                port = int(url.rpartition(":")[2])
                keeping = asyncio.create_task(home.registration("west", url).run())
                await home.until("west", State.SERVING)
                await home.until("spare", State.STANDBY)
            await home.until("west", State.LOST)
            await home.until("spare", State.SERVING)
            home.told.clear()
            async with served(port):
                await home.until("west", State.SERVING)
                await home.until("spare", State.STANDBY)
            keeping.cancel()
            beside.cancel()

    run(story)


def test_a_list_of_the_fleet_has_no_numbers_of_who_is_lost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ETUDE_TOKEN", "t")

    async def story() -> None:
        async with world(lease_s=0.5) as home, served() as (_, url):
            home.registrar.set_head(version(3))
            keeping = asyncio.create_task(home.registration("west", url).run())
            await home.until("west", State.SERVING)
            assert await asyncio.to_thread(main, ["fleet", "list", home.url]) == 0
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)  # a renewal may be under way
            await home.until("west", State.LOST)
            assert await asyncio.to_thread(main, ["fleet", "list", home.url]) == 0

    run(story)
    _, serving, _, lost = capsys.readouterr().out.splitlines()
    assert serving.split()[:6] == ["west", "west", "serving", "3", "0", "0"]
    assert lost.split()[:7] == ["west", "west", "lost", "3", "-", "-", "-"]


def test_an_engine_that_follows_another_runs_store_is_told_so_in_the_list(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ETUDE_TOKEN", "t")

    async def story() -> None:
        async with world(lease_s=10.0) as home, served() as (_, url):
            home.registrar.set_head(msgspec.structs.replace(version(3), incarnation="0ther000"))
            keeping = asyncio.create_task(home.registration("west", url).run())
            await home.until("west", State.CATCHING_UP)
            assert await asyncio.to_thread(main, ["fleet", "list", home.url]) == 0
            home.registrar.set_head(version(3))
            assert await asyncio.to_thread(main, ["fleet", "list", home.url]) == 0
            keeping.cancel()

    run(story)
    _, west, reason, _, serving = capsys.readouterr().out.splitlines()
    assert west.split()[2] == "catching-up"
    assert reason.startswith("  west is catching up: it has v000003")
    assert reason.endswith("is its --store the run's?")
    assert serving.split()[2] == "serving"


def test_an_engine_whose_renewals_stop_is_lost_though_it_answers_and_joins_again() -> None:
    async def story() -> None:
        async with world(lease_s=0.3) as home, served() as (_, url):
            home.registrar.set_head(version(3))
            cut_off = asyncio.create_task(home.registration("west", url).run())
            await home.until("west", State.SERVING)
            waiting = asyncio.create_task(home.registrar.serving()["west"].adopt(99, deadline_s=100.0))
            await asyncio.sleep(0.05)
            cut_off.cancel()
            await home.until("west", State.LOST)
            with pytest.raises(EngineGone):
                await waiting
            assert "west" not in home.registrar.serving()
            home.told.clear()
            back = asyncio.create_task(home.registration("west", url).run())
            await home.until("west", State.SERVING)
            back.cancel()

    run(story)


def test_an_engine_that_cannot_work_in_the_run_is_refused_when_it_joins() -> None:
    async def story() -> None:
        async with world() as home, served() as (_, url), served(context_tokens=64) as (_, small):
            refusals = [
                (
                    home.registration("engine-0", url),
                    MalformedRequest,
                    "the fleet already has an engine with the name 'engine-0'",
                ),
                (home.registration("", url), MalformedRequest, "a valid name and URL"),
                (home.registration("west", "ftp://there"), MalformedRequest, "a valid name and URL"),
                (home.registration("small", small), MalformedRequest, "has a context of 64 tokens"),
                (
                    Registration(home.url, JoinRequest(name="west", url=url), token="other"),
                    Unauthorised,
                    "missing or wrong",
                ),
            ]
            for registration, kind, said in refusals:
                with pytest.raises(kind, match=said):
                    await registration.run()
            keeping = asyncio.create_task(home.registration("west", url).run())
            await home.until("west", State.CATCHING_UP)
            with pytest.raises(MalformedRequest, match="the fleet already has an engine with the name 'west'"):
                await home.registration("west", small).run()
            keeping.cancel()
            async with aiohttp.ClientSession(headers={"authorization": "Bearer t"}) as session:
                assert (await session.post(home.url + JOIN, data=b"{")).status == 400
                assert (await session.post(home.url + JOIN, data=b" " * 20_000)).status == 400

    run(story)


def test_an_engine_with_another_token_than_the_run_is_refused_when_it_joins() -> None:
    async def story() -> None:
        async with world() as home, served(token="another") as (_, url):
            with pytest.raises(Unauthorised, match="west does not accept the run's token") as error:
                await home.registration("west", url).run()
            assert url in error.value.facts
            assert "ETUDE_TOKEN" in error.value.hint
            assert not home.registrar.engines

    run(story)


def test_an_engine_with_other_bits_than_the_learner_is_refused_in_exact_mode() -> None:
    other = msgspec.structs.replace(WANTED, parity="another")

    async def story() -> None:
        async with world(other) as home, served() as (_, url):
            with pytest.raises(MalformedRequest, match="does not compute the same bits"):
                await home.registration("west", url).run()

    run(story)


def test_an_engine_that_cannot_be_reached_is_told_how_to_say_where_it_is() -> None:
    async def story() -> None:
        said: list[str] = []
        async with world() as home:
            asked = JoinRequest(name="west", url="http://127.0.0.1:9")
            keeping = asyncio.create_task(Registration(home.url, asked, token="t", report=said.append).run())
            async with asyncio.timeout(60):
                while not said:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            keeping.cancel()
        assert "west does not answer at http://127.0.0.1:9" in said[0]

    run(story)


def test_a_wrong_url_of_an_engine_that_runs_is_refused_at_once_and_the_registry_is_not_blamed(
    web_page: str, nobody: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ETUDE_TOKEN", "t")

    async def story() -> None:
        async with world() as home:
            for url in (nobody, web_page, home.url):
                assert await asyncio.to_thread(main, ["fleet", "join", home.url, url, "--name", "west"]) == 1
                said = capsys.readouterr().err
                assert said.startswith(f"error: west does not answer at {url}: ")
                assert "hint: give the URL at which the run reaches the engine" in said
                assert "no registry" not in said

    run(story)


def test_a_registry_that_nobody_waits_for_is_not_told_with_an_option_for_waiting(nobody: str) -> None:
    with pytest.raises(DeadlineExceeded) as error:
        fetch_requirements(nobody, None, wait_s=0.0)
    assert "--wait-s" not in error.value.hint


def test_what_the_run_wants_is_asked_before_anything_is_loaded() -> None:
    async def story() -> None:
        async with world() as home:
            assert await asyncio.to_thread(fetch_requirements, home.url, "t") == WANTED
            with pytest.raises(Unauthorised):
                await asyncio.to_thread(fetch_requirements, home.url, None)
        with pytest.raises(DeadlineExceeded, match="no registry answers at"):
            await asyncio.to_thread(fetch_requirements, home.url, "t", wait_s=0.0)

    run(story)


def test_an_engine_finds_its_own_address() -> None:
    assert local_address_for("http://127.0.0.1:8790") == "127.0.0.1"
    with pytest.raises(InputError, match="is not a registry"):
        fetch_requirements("127.0.0.1:8790", None)
