"""HTTP handlers of E2B's REST API for sandboxes: create, list, renew, pause, snapshot, fork, kill.

Each request needs an API key.
"""

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
from etude.environments.remote.api_errors import ApiError, sandbox_gone
from etude.environments.remote.auth import account_of
from etude.environments.remote.config import ServerConfig
from etude.environments.remote.keys import Keyring
from etude.environments.remote.sandboxes import CreatedSandbox, Sandbox, SandboxManager, run_backend_call

T = TypeVar("T")
ENVD_VERSION = "0.6.4"  # a version of E2B's daemon; clients derive from it what a sandbox supports
_MAX_BODY = 1 << 20
_MAX_PAGE = 100
_MAX_KEY = 255


class SandboxRoutes:
    """The HTTP handlers that manage the sandboxes of a server; `create_app` makes one instance.

    Each handler gets a Starlette request and returns its response. Those for `/sandboxes/{id}` find only sandboxes of
    the account whose API key the request has; for others they raise `ApiError` (404)."""

    def __init__(self, manager: SandboxManager, keys: Keyring, config: ServerConfig) -> None:
        self._manager, self._keys, self._config = manager, keys, config

    def routes(self) -> list[Route]:
        """Return the Starlette routes to the handlers of this class."""
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
            ("DELETE", "/templates/{name:path}", self.delete_snapshot),
        ]
        return [Route(path, handler, methods=[method]) for method, path, handler in table]

    async def health(self, request: Request) -> Response:
        """Handle `GET /health`.

        If the header `E2b-Sandbox-Id` names a sandbox, the status is 204 while it exists and 502 after its end.
        Otherwise the response says whether the server accepts new sandboxes ("ok") or shuts down ("draining")."""
        sandbox_id = request.headers.get("e2b-sandbox-id", "")
        if sandbox_id:
            try:
                self._manager.get(sandbox_id)
            except ApiError:
                return sandbox_gone(sandbox_id)
            return Response(status_code=204)
        return JSONResponse({"status": "draining" if self._manager.draining else "ok"})

    async def about(self, request: Request) -> Response:
        """Handle `GET /etude/about`: return the properties of the server's machines.

        Only etude's server has this route. Its client uses it to tell etude from other services."""
        account_of(self._keys, request)
        info = self._manager.runtime.info
        return json_response(
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
        """Handle `POST /sandboxes`: create a sandbox from a template or a snapshot.

        A request with an `Idempotency-Key` can be repeated: it returns the sandbox of the first one."""
        account = account_of(self._keys, request)
        body = await _read_message(request, m.NewSandbox)
        for name, given in (("mcp", body.mcp), ("iam", body.iam), ("volumeMounts", body.volume_mounts)):
            if given:
                raise ApiError(400, f"{name} is not supported", hint="leave it out")
        if body.network and set(body.network) - {"allowPublicTraffic"}:
            raise ApiError(400, "sandboxes have no network", hint="leave the network settings out")
        key = request.headers.get("idempotency-key")
        if key is not None and not 0 < len(key) <= _MAX_KEY:
            raise ApiError(400, "the idempotency key has an invalid length", hint=f"1 to {_MAX_KEY} characters")
        work = self._manager.create(account, body, key)
        created = await self._call(work, f"a machine from {body.template_id[:80]!r} could not be created")
        return json_response(self._sandbox(created), status=201)

    async def list(self, request: Request) -> Response:
        """Handle `GET /sandboxes`: list the account's sandboxes, newest first, in pages.

        The query can filter them by state, metadata, template and start time."""
        account, query = account_of(self._keys, request), request.query_params
        found = self._manager.of(account)
        if query.get("order") == "asc":
            found.reverse()
        wanted = {unquote(k): unquote(v) for k, v in parse_qsl(query.get("metadata", ""))}
        states = [s for part in query.getlist("state") for s in part.split(",")]
        after = _time(query.get("startedAfter"))
        found = [
            sandbox
            for sandbox in found
            if all(sandbox.metadata.get(k) == v for k, v in wanted.items())
            and (not states or sandbox.state in states)
            and (query.get("template") in (None, sandbox.template_id))
            and (after is None or sandbox.started >= after)
        ]
        page, headers = _page(request, found)
        return json_response([self._detail(sandbox) for sandbox in page], headers=headers)

    async def detail(self, request: Request) -> Response:
        """Handle `GET /sandboxes/{id}`: return the details of a sandbox."""
        return json_response(self._detail(self._find_sandbox(request)))

    async def kill(self, request: Request) -> Response:
        """Handle `DELETE /sandboxes/{id}`: end a sandbox."""
        await self._call(self._manager.kill(self._find_sandbox(request)), "it could not be ended")
        return Response(status_code=204)

    async def timeout(self, request: Request) -> Response:
        """Handle `POST /sandboxes/{id}/timeout`: let the sandbox's lease end this many seconds from now."""
        sandbox = self._find_sandbox(request)
        self._manager.renew(sandbox, (await _read_message(request, m.Lease)).timeout)
        return Response(status_code=204)

    async def refresh(self, request: Request) -> Response:
        """Handle `POST /sandboxes/{id}/refreshes`: extend the sandbox's lease to at least this many seconds from
        now."""
        sandbox = self._find_sandbox(request)
        self._manager.renew(sandbox, (await _read_message(request, m.Refresh)).duration, at_least=True)
        return Response(status_code=204)

    async def pause(self, request: Request) -> Response:
        """Handle `POST /sandboxes/{id}/pause`: store a sandbox's state and end its machine (409 if paused)."""
        sandbox = self._find_sandbox(request)
        self._check_memory((await _read_message(request, m.Pause)).memory)
        if not await self._call(self._manager.pause(sandbox), "it could not be paused"):
            raise ApiError(409, f"sandbox {sandbox.id} is paused", hint="connect to it first")
        return Response(status_code=204)

    async def connect(self, request: Request) -> Response:
        """Handle `POST /sandboxes/{id}/connect`: return how to reach a sandbox.

        A paused sandbox is resumed (status 201, else 200)."""
        sandbox, body = self._find_sandbox(request), await _read_message(request, m.Lease)
        was_paused = await self._call(self._manager.resume(sandbox, body.timeout), "it could not be resumed")
        return json_response(self._sandbox(sandbox.created), status=201 if was_paused else 200)

    async def snapshot(self, request: Request) -> Response:
        """Handle `POST /sandboxes/{id}/snapshots`: take a snapshot of a sandbox, which keeps running."""
        sandbox, body = self._find_sandbox(request), await _read_message(request, m.Pause)
        self._check_memory(body.memory)
        found = await self._call(self._manager.snapshot(sandbox, body.name), "its state could not be kept")
        return json_response(m.SnapshotInfo(snapshot_id=found, names=[body.name] if body.name else []), status=201)

    async def fork(self, request: Request) -> Response:
        """Handle `POST /sandboxes/{id}/fork`: create more sandboxes with the same state.

        If one of them cannot be created, none is."""
        sandbox, body = self._find_sandbox(request), await _read_message(request, m.Fork)
        created = await self._call(self._manager.fork(sandbox, body.count, body.timeout), "it could not be forked")
        return json_response([{"sandbox": self._sandbox(one.created)} for one in created], status=201)

    async def freeze(self, request: Request) -> Response:
        """Handle `POST /etude/sandboxes/{id}/freeze`: stop all processes of a sandbox for good.

        Its files can still be read, and snapshots can be taken. This route is etude's own."""
        await self._call(self._find_sandbox(request).machine.freeze(), "it could not be frozen")
        return Response(status_code=204)

    async def metrics(self, request: Request) -> Response:
        """Handle `GET /sandboxes/{id}/metrics`: return an empty list, since none are recorded."""
        self._find_sandbox(request)
        return JSONResponse([])

    async def snapshots(self, request: Request) -> Response:
        """Handle `GET /snapshots`: list the account's snapshots, or those with the query's `name`, in pages."""
        found = self._manager.snapshots(account_of(self._keys, request)).names()
        name = request.query_params.get("name")
        rows = [m.SnapshotInfo(snapshot_id=key, names=list(names)) for key, names in found.items()]
        page, headers = _page(request, [row for row in rows if name is None or name in row.names])
        return json_response(page, headers=headers)

    async def templates(self, request: Request) -> Response:
        """Handle `GET /templates`: list the names of the server's templates."""
        account_of(self._keys, request)
        names = sorted(self._manager.templates)
        return JSONResponse([{"templateID": name, "aliases": [name], "names": [name]} for name in names])

    async def delete_snapshot(self, request: Request) -> Response:
        """Handle `DELETE /templates/{name}`: delete the account's snapshots with this name or id.

        The templates of the server cannot be deleted."""
        account, name = account_of(self._keys, request), unquote(request.path_params["name"])
        if not self._manager.snapshots(account).delete(name):
            raise ApiError(404, f"no snapshot {name[:80]!r}", hint="GET /snapshots lists them")
        return Response(status_code=204)

    # inside

    def _find_sandbox(self, request: Request) -> Sandbox:
        return self._manager.get(request.path_params["id"], account_of(self._keys, request))

    async def _call(self, work: Awaitable[T], what: str) -> T:
        return await run_backend_call(work, deadline_s=self._config.deadline_s, what=what)

    def _check_memory(self, memory: bool | None) -> None:
        if memory and not self._manager.runtime.info.forks_memory:
            facts = f"the {self._manager.runtime.info.name} runtime stores only files"
            raise ApiError(400, "memory cannot be stored", facts, hint='use mode="filesystem", or leave it out')

    def _sandbox(self, created: CreatedSandbox) -> m.Sandbox:
        return m.Sandbox(
            sandbox_id=created.id,
            template_id=created.template_id,
            client_id="etude",
            envd_version=ENVD_VERSION,
            envd_access_token=created.token,
            domain=self._config.domain or None,
        )

    def _detail(self, sandbox: Sandbox) -> m.SandboxDetail:
        return m.SandboxDetail(
            sandbox_id=sandbox.id,
            template_id=sandbox.template_id,
            client_id="etude",
            envd_version=ENVD_VERSION,
            started_at=_stamp(sandbox.started),
            end_at=_stamp(self._manager.ends_at(sandbox)),
            state=sandbox.state,
            metadata=sandbox.metadata,
        )


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Read the body of a request. Raises `ApiError`: 413 above `max_bytes`, 400 if the client disconnects."""
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > max_bytes:
                raise ApiError(413, f"the body has more than {max_bytes} bytes", hint="send less at a time")
    except ClientDisconnect:
        raise ApiError(400, "the body broke off", hint="send it again") from None
    return bytes(body)


async def _read_message(request: Request, kind: type[T]) -> T:
    try:
        async with asyncio.timeout(30.0):
            body = await read_body(request, _MAX_BODY)
        return msgspec.json.decode(body or b"{}", type=kind)
    except TimeoutError:
        raise ApiError(408, "the body did not arrive in time", hint="send it again") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not a {kind.__name__}", str(error), hint="see E2B's API reference") from None


def _page(request: Request, rows: list[T]) -> tuple[list[T], dict[str, str]]:
    limit, start = request.query_params.get("limit", str(_MAX_PAGE)), request.query_params.get("nextToken", "0")
    for text in (limit, start):
        if not (text.isascii() and text.isdigit() and len(text) < 10):
            raise ApiError(400, f"{text[:20]!r} is not a valid limit or token", hint="send the value of x-next-token")
    at, size = int(start), max(1, min(int(limit), _MAX_PAGE))
    headers = {"x-next-token": str(at + size)} if at + size < len(rows) else {}
    return rows[at : at + size], headers


def json_response(value: object, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return an HTTP response with `value` as JSON, and with this status and these headers."""
    return Response(msgspec.json.encode(value), status, headers=headers, media_type="application/json")


def _stamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _time(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        return datetime.fromisoformat(text.replace(" ", "+")).timestamp()
    except ValueError:
        raise ApiError(400, f"{text[:40]!r} is not a time", hint="write it as 2026-01-31T12:00:00Z") from None
