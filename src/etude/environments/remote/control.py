"""Machines as E2B's REST API has them: made, listed, renewed, paused, kept, forked, killed. Every call needs a key."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import TypeVar
from urllib.parse import parse_qsl, unquote

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from etude.environments.remote import messages as m
from etude.environments.remote.config import ServerConfig
from etude.environments.remote.door import account_of
from etude.environments.remote.keys import Keyring
from etude.environments.remote.refusal import Refused, gone
from etude.environments.remote.sandboxes import Box, Boxes, Made, refusing

T = TypeVar("T")
ENVD_VERSION = "0.6.4"  # of E2B's own daemon: what its clients believe that a machine can do
_MAX_BODY = 1 << 20
_MAX_PAGE = 100
_MAX_KEY = 255


class Control:
    """The handlers of machines."""

    def __init__(self, boxes: Boxes, keys: Keyring, config: ServerConfig) -> None:
        self._boxes, self._keys, self._config = boxes, keys, config

    def routes(self) -> list[Route]:
        """All of them."""
        one = "/sandboxes/{id}"
        table: list[tuple[str, str, Callable[[Request], Awaitable[Response]]]] = [
            ("GET", "/health", self.health),
            ("GET", "/etude/about", self.about),
            ("POST", "/sandboxes", self.create),
            ("POST", "/v2/sandboxes", self.create),
            ("GET", "/sandboxes", self.list),
            ("GET", "/v2/sandboxes", self.list),
            ("GET", one, self.detail),
            ("DELETE", one, self.kill),
            ("POST", f"{one}/timeout", self.timeout),
            ("POST", f"{one}/refreshes", self.refresh),
            ("POST", f"{one}/pause", self.pause),
            ("POST", f"{one}/resume", self.connect),
            ("POST", f"{one}/connect", self.connect),
            ("POST", f"/v2{one}/connect", self.connect),
            ("POST", f"{one}/snapshots", self.snapshot),
            ("POST", f"{one}/fork", self.fork),
            ("POST", f"/etude{one}/freeze", self.freeze),
            ("GET", f"{one}/metrics", self.metrics),
            ("GET", "/snapshots", self.snapshots),
            ("GET", "/templates", self.templates),
            ("DELETE", "/templates/{name:path}", self.forget),
        ]
        return [Route(path, handler, methods=[method]) for method, path, handler in table]

    async def health(self, request: Request) -> Response:
        """Of a machine that the headers name (502 where it has ended), else of the server."""
        box_id = request.headers.get("e2b-sandbox-id", "")
        if box_id:
            try:
                self._boxes.get(box_id)
            except Refused:
                return gone(box_id)
            return Response(status_code=204)
        return JSONResponse({"status": "draining" if self._boxes.draining else "ok"})

    async def about(self, request: Request) -> Response:
        """What the machines here are; nobody else's server has this, so it also says that this one is etude's."""
        account_of(self._keys, request)
        info = self._boxes.runtime.info
        return answer_of(
            m.About(
                backend=info.name,
                isolation=info.isolation,
                users=list(info.users),
                forks_memory=info.forks_memory,
                whole_snapshots=info.whole_snapshots,
                images=info.images,
                notes=list(info.notes),
            )
        )

    async def create(self, request: Request) -> Response:
        """A new machine; with `Idempotency-Key`, the one that was made by it."""
        account = account_of(self._keys, request)
        asked = await _asked(request, m.NewSandbox)
        for name, given in (("mcp", asked.mcp), ("iam", asked.iam), ("volumeMounts", asked.volume_mounts)):
            if given:
                raise Refused(400, f"{name} is not to be had here", hint="ask for a machine without it")
        if asked.network and set(asked.network) - {"allowPublicTraffic"}:
            raise Refused(400, "machines here have no network", hint="ask for one without network settings")
        key = request.headers.get("idempotency-key")
        if key is not None and not 0 < len(key) <= _MAX_KEY:
            raise Refused(400, "an idempotency key of no or too many letters", hint=f"1 to {_MAX_KEY}")
        work = self._boxes.create(account, asked, key)
        made = await self._done(work, f"a machine from {asked.template_id[:80]!r} could not be made")
        return answer_of(self._sandbox(made), status=201)

    async def list(self, request: Request) -> Response:
        """An account's machines, the newest first, by state, metadata, template and age; page by page."""
        account, query = account_of(self._keys, request), request.query_params
        found = self._boxes.of(account)
        if query.get("order") == "asc":
            found.reverse()
        wanted = {unquote(k): unquote(v) for k, v in parse_qsl(query.get("metadata", ""))}
        states = [s for part in query.getlist("state") for s in part.split(",")]
        after = _time(query.get("startedAfter"))
        found = [
            box
            for box in found
            if all(box.metadata.get(k) == v for k, v in wanted.items())
            and (not states or box.state in states)
            and (query.get("template") in (None, box.template_id))
            and (after is None or box.started >= after)
        ]
        page, headers = _page(request, found)
        return answer_of([self._detail(box) for box in page], headers=headers)

    async def detail(self, request: Request) -> Response:
        """One machine."""
        return answer_of(self._detail(self._box(request)))

    async def kill(self, request: Request) -> Response:
        """End it."""
        await self._done(self._boxes.kill(self._box(request)), "it could not be ended")
        return Response(status_code=204)

    async def timeout(self, request: Request) -> Response:
        """Let its lease end so many seconds from now."""
        box = self._box(request)
        self._boxes.renew(box, (await _asked(request, m.Lease)).timeout)
        return Response(status_code=204)

    async def refresh(self, request: Request) -> Response:
        """Let its lease end so many seconds from now, or later."""
        box = self._box(request)
        self._boxes.renew(box, (await _asked(request, m.Refresh)).duration, at_least=True)
        return Response(status_code=204)

    async def pause(self, request: Request) -> Response:
        """Keep its state, end it; 409 where that has been done."""
        box = self._box(request)
        self._check_memory((await _asked(request, m.Pause)).memory)
        if not await self._done(self._boxes.pause(box), "it could not be paused"):
            raise Refused(409, f"{box.id} is paused", hint="connect to it first")
        return Response(status_code=204)

    async def connect(self, request: Request) -> Response:
        """How to reach it; a paused one runs again (201)."""
        box, asked = self._box(request), await _asked(request, m.Lease)
        was_paused = await self._done(self._boxes.resume(box, asked.timeout), "it could not be resumed")
        return answer_of(self._sandbox(box.made), status=201 if was_paused else 200)

    async def snapshot(self, request: Request) -> Response:
        """Keep its state under an id; it goes on."""
        box, asked = self._box(request), await _asked(request, m.Pause)
        self._check_memory(asked.memory)
        found = await self._done(self._boxes.snapshot(box, asked.name), "its state could not be kept")
        return answer_of(m.SnapshotInfo(snapshot_id=found, names=[asked.name] if asked.name else []), status=201)

    async def fork(self, request: Request) -> Response:
        """More machines in its state: all, or why none."""
        box, asked = self._box(request), await _asked(request, m.Fork)
        made = await self._done(self._boxes.fork(box, asked.count, asked.timeout), "it could not be forked")
        return answer_of([{"sandbox": self._sandbox(one.made)} for one in made], status=201)

    async def freeze(self, request: Request) -> Response:
        """Ours: stop everything in it for good; files can be read, snapshots taken."""
        await self._done(self._box(request).machine.freeze(), "it could not be frozen")
        return Response(status_code=204)

    async def metrics(self, request: Request) -> Response:
        """None are taken."""
        self._box(request)
        return JSONResponse([])

    async def snapshots(self, request: Request) -> Response:
        """An account's, by name; page by page."""
        found = self._boxes.kept(account_of(self._keys, request)).names()
        name = request.query_params.get("name")
        rows = [m.SnapshotInfo(snapshot_id=key, names=list(names)) for key, names in found.items()]
        page, headers = _page(request, [row for row in rows if name is None or name in row.names])
        return answer_of(page, headers=headers)

    async def templates(self, request: Request) -> Response:
        """Names that machines can be made from."""
        account_of(self._keys, request)
        names = sorted(self._boxes.templates)
        return JSONResponse([{"templateID": name, "aliases": [name], "names": [name]} for name in names])

    async def forget(self, request: Request) -> Response:
        """Delete a snapshot. Templates are the server's own."""
        account, name = account_of(self._keys, request), unquote(request.path_params["name"])
        if not self._boxes.kept(account).forget(name):
            raise Refused(404, f"no snapshot {name[:80]!r}", hint="GET /snapshots says which there are")
        return Response(status_code=204)

    # inside

    def _box(self, request: Request) -> Box:
        return self._boxes.get(request.path_params["id"], account_of(self._keys, request))

    async def _done(self, work: Awaitable[T], what: str) -> T:
        return await refusing(work, deadline_s=self._config.deadline_s, what=what)

    def _check_memory(self, memory: bool | None) -> None:
        if memory and not self._boxes.runtime.info.forks_memory:
            facts = f"{self._boxes.runtime.info.name} keeps files alone"
            raise Refused(400, "memory is not kept here", facts, hint='ask for mode="filesystem", or for neither')

    def _sandbox(self, made: Made) -> m.Sandbox:
        return m.Sandbox(
            sandbox_id=made.id,
            template_id=made.template_id,
            client_id="etude",
            envd_version=ENVD_VERSION,
            envd_access_token=made.token,
            domain=self._config.domain or None,
        )

    def _detail(self, box: Box) -> m.SandboxDetail:
        return m.SandboxDetail(
            sandbox_id=box.id,
            template_id=box.template_id,
            client_id="etude",
            envd_version=ENVD_VERSION,
            started_at=_stamp(box.started),
            end_at=_stamp(self._boxes.ends_at(box)),
            state=box.state,
            metadata=box.metadata,
        )


async def body_of(request: Request, max_bytes: int) -> bytes:
    """A request's body, bounded. Raises `Refused`."""
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > max_bytes:
                raise Refused(413, f"the body has more than {max_bytes} bytes", hint="send less at a time")
    except ClientDisconnect:
        raise Refused(400, "the body broke off", hint="send it again") from None
    return bytes(body)


async def _asked(request: Request, kind: type[T]) -> T:
    try:
        async with asyncio.timeout(30.0):
            body = await body_of(request, _MAX_BODY)
        return msgspec.json.decode(body or b"{}", type=kind)
    except TimeoutError:
        raise Refused(408, "the body did not come", hint="send it at once") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(400, f"the body is no {kind.__name__}", str(error), hint="see E2B's API reference") from None


def _page(request: Request, rows: list[T]) -> tuple[list[T], dict[str, str]]:
    limit, start = request.query_params.get("limit", str(_MAX_PAGE)), request.query_params.get("nextToken", "0")
    for text in (limit, start):
        if not (text.isascii() and text.isdigit() and len(text) < 10):
            raise Refused(400, f"{text[:20]!r} is no limit, or no token of ours", hint="send what x-next-token said")
    at, size = int(start), max(1, min(int(limit), _MAX_PAGE))
    headers = {"x-next-token": str(at + size)} if at + size < len(rows) else {}
    return rows[at : at + size], headers


def answer_of(value: object, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A message as an answer."""
    return Response(msgspec.json.encode(value), status, headers=headers, media_type="application/json")


def _stamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _time(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        return datetime.fromisoformat(text.replace(" ", "+")).timestamp()
    except ValueError:
        raise Refused(400, f"{text[:40]!r} is no time", hint="write it as 2026-01-31T12:00:00Z") from None
