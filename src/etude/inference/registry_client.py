"""Clients of the engine registry: `Registration` for engines, `FleetUpdater` for what sends requests to engines.

A `Registration` runs beside an engine of any kind, in its process or in another: it only needs the engine's URL. When
the registry does not respond, it waits, and reports the reason and the end of the wait once. Meanwhile the engine keeps
serving and updating its weights."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import os
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec

from etude.errors import DeadlineExceeded, EngineError, EtudeError, InputError, MalformedRequest
from etude.inference.client import HttpEngine
from etude.inference.errors import EngineGone, EngineUnreachable, ErrorBody, NotRegistered, Unauthorised, from_http
from etude.inference.fleet import Fleet
from etude.inference.registry_messages import (
    ALIVE,
    ENGINES,
    JOIN,
    LEAVE,
    RENEW,
    WANTED,
    EngineRequirements,
    JoinAnswer,
    JoinRequest,
    Renewal,
    RenewalAnswer,
    Roster,
    State,
    environment_token,
)

ANSWER_TIMEOUT_S = 10.0
RETRY_S = 1.0
WAIT_S = 3_600.0  # longest wait for a registry: the run may be starting, or be resumed later
RENEWALS = 4  # renewals per lease
UNAVAILABLE = (502, 503, 504)  # statuses of a proxy whose registry does not respond
T = TypeVar("T")
Report = Callable[[str], None]


def print_to_stderr(text: str) -> None:
    """Print a line to standard error."""
    print(text, file=sys.stderr, flush=True)


class RegistryWait:
    """The wait for a registry that does not respond. It is reported once, and lasts at most `wait_s` seconds from the
    last success.

    `registry` is the URL. `report` is called with a text when a wait begins."""

    def __init__(self, registry: str, wait_s: float, report: Report = print_to_stderr) -> None:
        self._registry, self._wait_s, self._report = registry, wait_s, report
        self._end: float | None = None

    def succeeded(self) -> None:
        """Record a success, which ends the wait."""
        self._end = None

    def failed(self, cause: str, unreached: EngineUnreachable | None = None) -> None:
        """Record a failure. After `wait_s` seconds of failures, raise `unreached` or `DeadlineExceeded`.

        `cause` is the reason for the report. `unreached` is given when the registry responded that it cannot reach the
        engine."""
        now = time.monotonic()
        if self._end is None:
            self._end = now + self._wait_s
            if self._wait_s > 0:
                until = time.strftime("%H:%M:%S", time.localtime(time.time() + self._wait_s))
                who = f"the registry at {self._registry}"
                who = f"{who} to reach the engine" if unreached else who
                self._report(f"waiting for {who} until {until}: {cause}")
        if now >= self._end:
            if unreached is not None:
                raise unreached
            facts = f"{cause}; waited {self._wait_s:g} s"
            hint = "start or resume the run; the URL must be the address of its fleet.listen"
            hint += "; --wait-s sets the longest wait" if self._wait_s > 0 else ""
            raise DeadlineExceeded(f"no registry answers at {self._registry}", facts, hint=hint)


def fetch_requirements(registry: str, token: str | None, *, wait_s: float = WAIT_S) -> EngineRequirements:
    """Fetch what a run requires of an engine from its registry. Waits up to `wait_s` seconds for the registry.

    `registry` is its URL and `token` the bearer token. Raises `InputError` when the URL is not a registry's,
    `Unauthorised` for a wrong token, and `DeadlineExceeded` after the wait."""
    request = urllib.request.Request(registry_url(registry) + WANTED, headers=auth_headers(token))
    waiting = RegistryWait(registry, wait_s)
    while True:
        try:
            try:
                with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as answer:
                    return parse_answer(registry, 200, answer.read(), EngineRequirements)
            except urllib.error.HTTPError as error:
                return parse_answer(registry, error.code, error.read(), EngineRequirements)
        except EngineGone as error:
            waiting.failed(error.facts)
        except OSError as error:
            waiting.failed(str(error))
        except http.client.HTTPException as error:
            raise not_a_registry(registry, repr(error)) from None
        time.sleep(RETRY_S)


def parse_answer(registry: str, status: int, body: bytes, kind: type[T]) -> T:
    """Parse the JSON body of a registry's response as a `kind`.

    Raises the error that the response contains; `EngineGone` if a proxy answered that the registry is unavailable; and
    `InputError` for a response that is not a registry's. `registry` is the URL, for errors."""
    try:
        if status == 200:
            return msgspec.json.decode(body, type=kind)
        msgspec.json.decode(body, type=ErrorBody)
    except ValueError:
        facts = f"its response is {status}: {body[:60]!r}"
        if status in UNAVAILABLE:
            raise EngineGone(
                f"no registry answers at {registry}", facts, hint="check that the run is running"
            ) from None
        raise not_a_registry(registry, facts) from None
    raise from_http(status, body, engine=registry)


def not_a_registry(registry: str, facts: str) -> InputError:
    """Return the error for a URL that is not a registry's."""
    return InputError(
        f"{registry} is not a registry",
        facts,
        hint="give the address of fleet.listen in the run's config: http://HOST:PORT",
    )


async def call_registry(
    session: aiohttp.ClientSession,
    registry: str,
    path: str,
    kind: type[T],
    *,
    body: object = None,
    deadline_s: float = ANSWER_TIMEOUT_S,
) -> T:
    """Send a request to a registry and parse the JSON response as a `kind`.

    It is a GET request, or a POST request with `body` as JSON. Raises the errors of `parse_answer`, and `EngineGone` if
    the registry does not respond within `deadline_s` seconds."""
    method, data = ("GET", None) if body is None else ("POST", msgspec.json.encode(body))
    timeout = aiohttp.ClientTimeout(total=deadline_s)
    try:
        async with session.request(method, registry_url(registry) + path, data=data, timeout=timeout) as answer:
            status, data = answer.status, await answer.read()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        facts = f"{type(error).__name__}: {error}"
        raise EngineGone(f"no registry answers at {registry}", facts, hint="check that the run is running") from None
    return parse_answer(registry, status, data, kind)


class Registration:
    """Keeps one engine registered in a fleet: joins, renews the lease, and joins again when the lease was lost.

    A lease makes the engine a member of the fleet for some seconds. The attribute `state` is the engine's state as of
    the last response.

    - `registry`, `token`: the URL of the registry, and the bearer token.
    - `wait_s`: for how many seconds the registry may not respond.
    - `report`: called with texts about the progress.
    - `must_answer`: whether the engine is running already. If True, it is an error if the registry cannot reach the
      engine at the first join, since its URL must be wrong. If False, the registration waits for the engine."""

    def __init__(
        self,
        registry: str,
        join_request: JoinRequest,
        *,
        token: str | None,
        wait_s: float = WAIT_S,
        report: Report = print_to_stderr,
        must_answer: bool = False,
    ) -> None:
        self._must_answer = must_answer
        self.join_request, self.state = join_request, State.LOST
        self._registry, self._token, self._report = registry_url(registry), token, report
        self._wait = RegistryWait(self._registry, wait_s, report)
        self._lease, self._every_s, self._reported = "", RETRY_S, ""

    async def run(self) -> None:
        """Keep the engine registered. Returns when it was drained.

        Raises `MalformedRequest` and `Unauthorised` when the registry refuses the engine, `InputError` when the URL is
        not a registry's, `DeadlineExceeded` when the registry did not respond for `wait_s`, and `EngineUnreachable`
        when the registry cannot reach the engine."""
        async with aiohttp.ClientSession(headers=auth_headers(self._token)) as session:
            while self.state is not State.LEFT:  # noqa: ASYNC110  the state is the registry's
                await asyncio.sleep(await self._join_or_renew(session))

    async def leave(self) -> None:
        """Leave the fleet, if joined. A registry that does not respond is ignored."""
        if not self._lease or self.state is State.LEFT:
            return
        renewal = Renewal(name=self.join_request.name, lease=self._lease)
        async with aiohttp.ClientSession(headers=auth_headers(self._token)) as session:
            with contextlib.suppress(EngineError, InputError):
                await call_registry(session, self._registry, LEAVE, RenewalAnswer, body=renewal, deadline_s=2.0)

    async def _join_or_renew(self, session: aiohttp.ClientSession) -> float:
        """Join or renew the lease. Returns the seconds until the next call."""
        try:
            if not self._lease:
                welcome = await call_registry(session, self._registry, JOIN, JoinAnswer, body=self.join_request)
                self._wait.succeeded()
                self._must_answer = False
                self._lease, self.state, self._every_s = welcome.lease, State.CATCHING_UP, welcome.lease_s / RENEWALS
                self._report_change(f"{self.join_request.name} has joined {self._registry}")
                return 0.0
            renewal = Renewal(name=self.join_request.name, lease=self._lease)
            every_s = self._every_s
            self.state = (
                await call_registry(session, self._registry, RENEW, RenewalAnswer, body=renewal, deadline_s=every_s)
            ).state
            self._wait.succeeded()
            self._report_change(f"{self.join_request.name} is {self.state}")
            return every_s
        except (MalformedRequest, Unauthorised):
            raise
        except NotRegistered as error:
            self._lease = ""
            self._report_change(error.what)
            return 0.0
        except EngineUnreachable as error:
            if self._must_answer:
                raise
            self._reported = ""
            self._wait.failed(f"{error.what}: {error.facts}", error)
            return RETRY_S
        except EngineError as error:
            self._reported = ""
            self._wait.failed(error.facts if isinstance(error, EngineGone) else f"{error.what}: {error.facts}")
            return RETRY_S

    def _report_change(self, text: str) -> None:
        """Report a text unless it was the last one reported."""
        if text != self._reported:
            self._report(text)
        self._reported = text


def make_registration(args: argparse.Namespace, listener: socket.socket, token: str | None) -> Registration | None:
    """Return the registration that an engine's command-line arguments ask for, or None without --register.

    `listener` is the engine's socket, whose address is registered unless --advertise names another."""
    if not args.register:
        return None
    listener.listen()  # early connections wait until the engine serves, instead of being refused
    host, port = listener.getsockname()[:2]
    host = local_address_for(args.register) if host in ("0.0.0.0", "::") else host
    url = args.advertise or f"http://{f'[{host}]' if ':' in host else host}:{port}"
    request = JoinRequest(name=args.name, url=url, region=args.region, standby=args.standby)
    return Registration(args.register, request, token=token, wait_s=args.wait_s)


async def run_registration(registration: Registration) -> None:
    """Keep an engine registered until it is drained or refused, then exit the process."""
    try:
        await registration.run()
    except EtudeError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        os._exit(error.exit_code)
    os._exit(0)  # it is drained; child processes end with it


def local_address_for(registry: str) -> str:
    """Return the local IP address that the route to the registry uses.

    Other hosts can reach this host at that address, unless there is NAT between them."""
    parts = urlsplit(registry)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    with socket.socket(socket.AF_INET6 if ":" in (parts.hostname or "") else socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((parts.hostname, port))  # sends nothing
        return str(way.getsockname()[0])


def registry_url(registry: str) -> str:
    """Return the URL of a registry without trailing slashes. Raises `InputError` when it is not an HTTP URL."""
    if urlsplit(registry).scheme not in ("http", "https") or not urlsplit(registry).hostname:
        raise not_a_registry(repr(registry), "it is not an http:// or https:// address")
    return registry.rstrip("/")


def auth_headers(token: str | None) -> dict[str, str]:
    """Return the authorization header of a request to a registry, or no header without a token."""
    return {"authorization": f"Bearer {token}"} if token else {}


POLL_S, ROSTER_TIMEOUT_S = 1.0, 5.0
RETIRE_S = 600.0  # longest time that requests have to end on an engine that has left
USABLE = ALIVE - {State.CATCHING_UP}


class FleetUpdater:
    """Keeps a `Fleet` up to date with the registry's list of engines.

    `token` is the bearer token of requests to the registry and the engines. None: that of the environment, if there is
    one."""

    def __init__(self, fleet: Fleet, *, token: str | None = None) -> None:
        self.fleet, self._token = fleet, token or environment_token()
        self._known: dict[str, HttpEngine] = {}
        self._leaving: dict[asyncio.Task[None], HttpEngine] = {}

    async def apply(self, roster: Roster) -> None:
        """Add, remove and update the fleet's engines. Requests on a lost engine are retried on another at once; those
        on one that has left (it is not in `roster`) end there."""
        listed = {name: one for name, one in roster.items() if one.state in USABLE}
        for name in self._known.keys() - listed.keys():
            engine = self._known.pop(name)
            if name in roster:
                self.fleet.remove(name)
                await engine.close()
            else:
                task = asyncio.create_task(self._retire(name, engine), name=f"retire {name}")
                self._leaving[task] = engine
                task.add_done_callback(lambda done: self._leaving.pop(done, None))
        for name, one in listed.items():
            old = self._known.get(name)
            if old is None or old.url != one.url:
                self._known[name] = HttpEngine(one.url, token=self._token)
                self.fleet.add(name, self._known[name])
                if old is not None:
                    await old.close()
            self.fleet.update(name, one)

    async def close(self) -> None:
        """Remove all engines and close their connections."""
        for name in self._known:
            self.fleet.remove(name)
        for task in self._leaving:
            task.cancel()
        for engine in [*self._known.values(), *self._leaving.values()]:
            await engine.close()
        self._known.clear()

    async def _retire(self, name: str, engine: HttpEngine) -> None:
        await self.fleet.retire(name, deadline_s=RETIRE_S)
        await engine.close()

    async def poll_registry(self, url: str) -> None:
        """Poll the registry at `url` and apply its list, forever.

        When it does not respond, the fleet stays as it is."""
        async with aiohttp.ClientSession(headers=auth_headers(self._token)) as session:
            while True:
                with contextlib.suppress(EngineGone, InputError):
                    await self.apply(await fetch_roster(session, url))
                await asyncio.sleep(POLL_S)


async def fetch_roster(session: aiohttp.ClientSession, url: str) -> Roster:
    """Fetch the list of engines from the registry at `url`. Raises the errors of `call_registry`."""
    return await call_registry(session, url, ENGINES, Roster, deadline_s=ROSTER_TIMEOUT_S)
