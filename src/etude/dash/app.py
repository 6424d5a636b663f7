"""The web pages of runs as an ASGI app, and its server."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from etude.dash import overview as overviews
from etude.dash.fleet import fleet
from etude.dash.lineage import Lineage, version_page, versions_page
from etude.dash.live import MAX_STREAMS, EventStream, LivePage
from etude.dash.pages import STATIC, render, static, warm
from etude.dash.rollouts import RolloutPage, turn_page
from etude.dash.runs import Part, Runs, ShownRun, part
from etude.dash.security import Guard
from etude.errors import ConfigError, EtudeError
from etude.experience.transitions import State
from etude.gateway import Keys
from etude.gateway.http import is_loopback
from etude.http_server import bind, run_http_server
from etude.privacy.counts import ConsentCounts, read_counts
from etude.releases import Release, Releases
from etude.releases.states import Transition, shares_now
from etude.signals import Summary
from etude.signals.store import read_summaries

T = TypeVar("T")
MAX_AT_ONCE = 4
WAIT_S = 20.0
"""Longest wait for one of `MAX_AT_ONCE` threads."""
PAGE_ROLLOUTS, PAGE_VERSIONS = 50, 20
_MAX_INT = 1 << 53
_ID = re.compile(r"[\x21-\x7e]{1,200}")


class PageRefused(Exception):
    """A request that has no page: `status`, a sentence, and a hint."""

    def __init__(self, status: int, what: str, hint: str) -> None:
        super().__init__(what)
        self.status, self.what, self.hint = status, what, hint


class Dash:
    """The pages of `runs`, with the releases of a file, the counts of a privacy folder and the signals of a file of
    feedback, if they are given."""

    def __init__(
        self, runs: Runs, *, releases: Path | None = None, privacy: Path | None = None, feedback: Path | None = None
    ) -> None:
        self.runs, self.releases_path, self.privacy_path, self.feedback_path = runs, releases, privacy, feedback
        self.stopping = asyncio.Event()
        self._places = asyncio.Semaphore(MAX_AT_ONCE)
        self._streams = threading.Semaphore(MAX_STREAMS)
        self._live: OrderedDict[str, LivePage] = OrderedDict()
        self._read: OrderedDict[tuple[Any, ...], RolloutPage] = OrderedDict()
        self._read_lock = threading.Lock()

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run a function that reads files in a thread. At most `MAX_AT_ONCE` run at once; others wait."""
        try:
            await asyncio.wait_for(self._places.acquire(), WAIT_S)
        except TimeoutError:
            raise PageRefused(503, "too many pages are asked for at once", "try again in a moment") from None
        try:
            return await run_in_threadpool(work)
        finally:
            self._places.release()

    # pages

    async def index(self, request: Request) -> Response:
        names = await self.in_thread(self.runs.names)
        if self.runs.is_single:
            return RedirectResponse(f"/run/{quote(names[0], safe='')}/", 302)
        return await self._page("index.jinja", None, names=names, folder=str(self.runs.path))

    async def to_overview(self, request: Request) -> Response:
        return RedirectResponse(f"/run/{quote(request.path_params['run'], safe='')}/", 302)

    async def overview(self, request: Request) -> Response:
        run = await self._run(request)

        def made() -> dict[str, str]:
            return self._live_page(run).parts()

        parts = await self.in_thread(made)
        identity = run.identity()
        return await self._page("overview.jinja", run, tab="overview", parts=parts, identity=identity)

    async def live(self, request: Request) -> Response:
        page = self._live_page(await self._run(request))
        if not self._streams.acquire(blocking=False):
            raise PageRefused(503, "too many browsers are connected", "close some of them, or reload the page by hand")
        return EventStream(page, self.stopping, self._streams)

    async def versions(self, request: Request) -> Response:
        run, query = await self._run(request), request.query_params
        after = (query["at"], query.get("of", "")) if "at" in query else None
        before = _integer(query, "before")

        def made() -> Lineage:
            run.refresh()
            return versions_page(run, limit=PAGE_VERSIONS, after=after, before=before, releases=self.releases())

        return await self._page("versions.jinja", run, tab="versions", page=await self.in_thread(made))

    async def version(self, request: Request) -> Response:
        run = await self._run(request)
        found = re.fullmatch(r"v?([0-9]{1,12})(-[0-9a-f-]{1,40})?", request.path_params["version"])
        if not found:
            raise PageRefused(404, "that is not a version", "a version is a step, such as 12, or v000012-0a1b2c3d-…")
        step, before, state = int(found[1]), _integer(request.query_params, "before"), _state(request)

        def made() -> Any:
            run.refresh()
            given: dict[str, Any] = {"releases": self.releases(), "signals": self.signals()}
            return version_page(run, step, limit=PAGE_ROLLOUTS, before=before, state=state, **given)

        page = await self.in_thread(made)
        return await self._page("version.jinja", run, tab="versions", page=page, states=list(State))

    async def rollouts(self, request: Request) -> Response:
        run, before, state = await self._run(request), _integer(request.query_params, "before"), _state(request)

        def made() -> tuple[Part[Any], Mapping[str, int]]:
            def read() -> Any:
                with run.ledger() as ledger:
                    return ledger.page(limit=PAGE_ROLLOUTS, before=before, state=state)

            return part(read), run.counts.get(0.0).value or {}

        rows, counts = await self.in_thread(made)
        return await self._page(
            "rollouts.jinja", run, tab="rollouts", rows=rows, counts=counts, state=state, states=list(State),
            limit=PAGE_ROLLOUTS,
        )  # fmt: skip

    async def find(self, request: Request) -> Response:
        """Redirect to the page of the rollout or version that is named in the search field."""
        run, text = await self._run(request), request.query_params.get("q", "").strip()[:200]
        kind = "versions" if re.fullmatch("[0-9]{1,12}|v[0-9]{1,12}(-[0-9a-f-]*)?", text) else "rollouts"
        return RedirectResponse(f"/run/{quote(run.name, safe='')}/{kind}/{quote(text, safe='')}", 302)

    async def rollout(self, request: Request) -> Response:
        run = await self._run(request)
        page = await self.in_thread(lambda: self._rollout(run, request.path_params["rollout"]))
        return await self._page("rollout.jinja", run, tab="rollouts", page=page)

    async def turn(self, request: Request) -> Response:
        run, turn = await self._run(request), request.path_params["turn"]
        query = request.query_params
        at, token = _integer(query, "at") or 0, _integer(query, "token") or 0

        def made() -> Any:
            page = self._rollout(run, request.path_params["rollout"])
            found = turn_page(page, turn, text_at=at, token_at=token)
            if found is None:
                raise PageRefused(404, f"the rollout has no stored turn {turn}", "go back to the rollout")
            return page, found

        page, found = await self.in_thread(made)
        return await self._page("turn.jinja", run, tab="rollouts", page=page, turn=found)

    async def evaluations(self, request: Request) -> Response:
        run = await self._run(request)

        def made() -> list[dict[str, Any]]:
            run.refresh()
            with run.frozen() as view:
                return overviews.evaluations(view)

        return await self._page("evaluations.jinja", run, tab="evaluations", rows=await self.in_thread(made))

    async def fleet(self, request: Request) -> Response:
        run = await self._run(request)

        def made() -> Any:
            run.refresh()
            with run.frozen() as view:
                return fleet(view)

        return await self._page("fleet.jinja", run, tab="fleet", fleet=await self.in_thread(made))

    async def release_list(self, request: Request) -> Response:
        found = await self.in_thread(self.releases)
        shares = shares_now(next(iter(found.value or ()), None))
        return await self._page("releases.jinja", None, tab="releases", found=found, shares=shares)

    async def release(self, request: Request) -> Response:
        number = request.path_params["number"]
        if self.releases_path is None:
            raise PageRefused(404, "no file of releases is given", "start with --releases FILE")

        def made() -> tuple[Release, int, Part[list[Transition]]]:
            listed = self.releases()
            found = next((one for one in listed.value or () if one.number == number), None)
            if found is None:
                raise PageRefused(404, f"there is no release {number}", listed.missing or "see the list of releases")
            share = shares_now(next(iter(listed.value or ()), None)).get(found.candidate, 0)
            return found, share, part(lambda: self._read_releases(lambda releases: releases.why(number)))

        found, share, why = await self.in_thread(made)
        return await self._page("release.jinja", None, tab="releases", release=found, share=share, why=why)

    async def consent(self, request: Request) -> Response:
        folder = self.privacy_path

        def made() -> Part[ConsentCounts]:
            if folder is None:
                return Part(None, "no privacy folder is given: start with --privacy DIR")
            return part(lambda: read_counts(folder))

        return await self._page("consent.jinja", None, tab="consent", found=await self.in_thread(made))

    async def asset(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in STATIC:
            raise PageRefused(404, "there is no such file", "go to the first page")
        headers = {"cache-control": "private, max-age=300"}
        return Response(static(name), media_type=STATIC[name], headers=headers)

    async def health(self, request: Request) -> Response:
        return PlainTextResponse("ok\n")

    # parts

    def releases(self) -> Part[Sequence[Release]]:
        """Return the releases of the file, the newest first."""
        if self.releases_path is None:
            return Part(None, "no file of releases is given: start with --releases FILE")
        return part(lambda: self._read_releases(lambda releases: releases.all()[::-1][:500]))

    def signals(self) -> Part[Sequence[Summary]]:
        """Return the signals of the file, by name and version."""
        path = self.feedback_path
        if path is None:
            return Part(None, "start with --feedback FILE to see what users did with its answers")
        return part(lambda: read_summaries(path))

    def _read_releases(self, work: Callable[[Releases], T]) -> T:
        assert self.releases_path is not None
        with contextlib.closing(Releases(self.releases_path, readonly=True)) as releases:
            return work(releases)

    def _rollout(self, run: ShownRun, rollout_id: str) -> RolloutPage:
        """Read a rollout, or take it from those that were read last. Raises `PageRefused`."""
        if not _ID.fullmatch(rollout_id):
            raise PageRefused(404, "that is not the id of a rollout", "ids are like g000012.3")
        found = RolloutPage.row_of(run, rollout_id)
        if found.missing:
            raise PageRefused(404, "the rollout cannot be found", found.missing)
        if found.value is None:
            raise PageRefused(404, f"there is no rollout {rollout_id[:80]}", "see the list of rollouts")
        key = (run.name, run.path, found.value)
        with self._read_lock:
            if known := self._read.get(key):
                return known
        page = RolloutPage.read(run, found.value)
        with self._read_lock:
            self._read[key] = page
            while len(self._read) > 2:
                self._read.popitem(last=False)
        return page

    def _live_page(self, run: ShownRun) -> LivePage:
        with self._read_lock:
            found = self._live.get(run.name)
            if found is None or found.run is not run:
                found = self._live[run.name] = LivePage(run)
                while len(self._live) > 8:
                    self._live.popitem(last=False)
            return found

    async def _run(self, request: Request) -> ShownRun:
        name = request.path_params["run"]
        found = await self.in_thread(lambda: self.runs.get(name))
        if found is None:
            raise PageRefused(404, "there is no such run", "the first page lists all runs")
        return found

    async def _page(self, template: str, run: ShownRun | None, *, tab: str = "", **values: object) -> Response:
        base = "" if run is None else f"/run/{quote(run.name, safe='')}"
        given = self._common(tab) | values
        html = await run_in_threadpool(lambda: render(template, base=base, run=run, **given))
        return HTMLResponse(html)

    def _common(self, tab: str) -> dict[str, object]:
        names = [self.runs.path.name or "run"] if self.runs.is_single else []
        return {
            "tab": tab,
            "home": f"/run/{quote(names[0], safe='')}" if names else "",
            "is_single": self.runs.is_single,
            "has_releases": self.releases_path is not None,
            "has_privacy": self.privacy_path is not None,
        }

    async def refused(self, request: Request, error: Exception) -> Response:
        """Return the page of an error."""
        status, what, hint = 404, "there is no such page", "go to the first page"
        if isinstance(error, PageRefused):
            status, what, hint = error.status, error.what, error.hint
        elif isinstance(error, HTTPException):
            status = error.status_code
        elif isinstance(error, EtudeError):  # a part was deleted or damaged a moment ago
            what, hint = f"{error.what}: {error.facts}" if error.facts else error.what, error.hint
        body = render("error.jinja", **self._common(""), base="", run=None, status=status, what=what, hint=hint)
        return HTMLResponse(body, status)


def create_app(dash: Dash, *, keys: Keys | None = None) -> Starlette:
    """Make the ASGI app. With `keys`, every request needs one; without, only requests to loopback are answered."""
    run = "/run/{run}"
    routes = [
        Route("/", dash.index),
        Route("/health", dash.health),
        Route("/static/{name}", dash.asset),
        Route("/releases", dash.release_list),
        Route("/releases/{number:int}", dash.release),
        Route("/consent", dash.consent),
        Route(run, dash.to_overview),
        Route(f"{run}/", dash.overview),
        Route(f"{run}/live", dash.live),
        Route(f"{run}/find", dash.find),
        Route(f"{run}/versions", dash.versions),
        Route(f"{run}/versions/{{version}}", dash.version),
        Route(f"{run}/rollouts", dash.rollouts),
        Route(f"{run}/rollouts/{{rollout}}", dash.rollout),
        Route(f"{run}/rollouts/{{rollout}}/turns/{{turn:int}}", dash.turn),
        Route(f"{run}/evaluations", dash.evaluations),
        Route(f"{run}/fleet", dash.fleet),
    ]
    handlers: Any = {PageRefused: dash.refused, EtudeError: dash.refused, HTTPException: dash.refused}
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False  # its redirects name the host of the request
    app.add_middleware(Guard, keys=keys)
    app.state.needs_key = keys is not None
    return app


@contextlib.asynccontextmanager
async def serving(dash: Dash, *, host: str, port: int, keys: Keys | None = None) -> AsyncIterator[str]:
    """Serve the pages while the block runs. Yields the URL.

    Raises `ConfigError` when the port is in use, and when there is no key but `host` is not a loopback address."""
    if keys is None and not is_loopback(host):
        hint = "give a key (--key, or ETUDE_API_KEY), or keep --host 127.0.0.1"
        raise ConfigError(f"host {host!r} is open to the network", "there is no key", hint=hint)
    app = create_app(dash, keys=keys)
    warm()
    if dash.runs.is_single:
        dash.runs.get(dash.runs.names()[0])
    async with run_http_server(app, bind(host, port), name="the dash", grace_s=1, max_connections=256) as url:
        try:
            yield url
        finally:
            dash.stopping.set()


def _integer(query: Mapping[str, str], name: str) -> int | None:
    text = query.get(name)
    if text is None or text == "":
        return None
    if not re.fullmatch("[0-9]{1,16}", text) or int(text) > _MAX_INT:
        raise PageRefused(404, f"{name} is not a number of this list", "go back to its first page")
    return int(text)


def _state(request: Request) -> State | None:
    text = request.query_params.get("state", "")
    if not text:
        return None
    if text not in list(State):
        raise PageRefused(404, "that is not a state of rollouts", f"states are {', '.join(State)}")
    return State(text)
