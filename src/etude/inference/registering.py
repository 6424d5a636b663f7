"""An engine's side of the registry: ask what is wanted, join, renew, join again when the lease was lost, leave.

A `Registration` is kept beside an engine of any kind, in its process or in one of its own: it knows the engine by its
URL. The registry away, or a partition, is waited out for ever, told once: the engine goes on with what it has, and
follows the weights.
"""

from __future__ import annotations

import argparse
import asyncio
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

from etude.errors import DeadlineExceeded, EngineError, EtudeError, InputError
from etude.inference.errors import EngineGone, MalformedRequest, NotRegistered, Unauthorised, from_http
from etude.inference.membership import (
    JOIN,
    LEAVE,
    RENEW,
    WANTED,
    Join,
    Renewal,
    Standing,
    State,
    Wanted,
    Welcome,
)

ANSWER_S = 10.0
AGAIN_S = 1.0
WAIT_S = 600.0  # for a registry that is not there yet
RENEWALS = 4  # in the time of a lease
T = TypeVar("T")


def wanted(registry: str, token: str | None, *, wait_s: float = WAIT_S) -> Wanted:
    """What the run wants of an engine; waits for a registry that is not there yet. Raises `InputError` for what is no
    registry, `Unauthorised`, `DeadlineExceeded`."""
    asked = urllib.request.Request(base(registry) + WANTED, headers=bearing(token))
    end = time.monotonic() + wait_s
    while True:
        try:
            with urllib.request.urlopen(asked, timeout=ANSWER_S) as answer:
                return msgspec.json.decode(answer.read(), type=Wanted)
        except urllib.error.HTTPError as error:
            raise from_http(error.code, error.read(), engine=registry) from None
        except ValueError as error:
            raise InputError(f"{registry} is no registry", str(error), hint="it is the run's fleet.listen") from None
        except OSError as error:
            if time.monotonic() > end:
                facts = f"{error}; waited {wait_s:g} s"
                raise DeadlineExceeded(f"no registry at {registry}", facts, hint="start the run first") from None
        time.sleep(AGAIN_S)


class Registration:
    """One engine's place in a fleet."""

    def __init__(
        self,
        registry: str,
        asked: Join,
        *,
        token: str | None,
        said: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
    ) -> None:
        self.asked, self.state = asked, State.LOST
        self._registry, self._token, self._said = base(registry), token, said
        self._lease, self._every_s, self._told = "", AGAIN_S, ""

    async def keep(self) -> None:
        """Be a member until drained; returns then. Raises `MalformedRequest` and `Unauthorised`: the registry will not
        have it."""
        async with aiohttp.ClientSession(headers=bearing(self._token)) as session:
            while self.state is not State.LEFT:  # noqa: ASYNC110  the state is the registry's
                await asyncio.sleep(await self._tried(session))

    async def leave(self) -> None:
        """Say goodbye, if there is a lease and somebody listens."""
        if not self._lease or self.state is State.LEFT:
            return
        renewal = Renewal(name=self.asked.name, lease=self._lease)
        async with aiohttp.ClientSession(headers=bearing(self._token)) as session:
            try:
                await self._post(session, LEAVE, renewal, Standing, deadline_s=2.0)
            except EngineError:
                return

    async def _tried(self, session: aiohttp.ClientSession) -> float:
        """Join or renew; the seconds until the next."""
        try:
            if not self._lease:
                welcome = await self._post(session, JOIN, self.asked, Welcome)
                self._lease, self.state, self._every_s = welcome.lease, State.CATCHING_UP, welcome.lease_s / RENEWALS
                self._tell(f"{self.asked.name} has joined {self._registry}")
                return 0.0
            renewal = Renewal(name=self.asked.name, lease=self._lease)
            self.state = (await self._post(session, RENEW, renewal, Standing, deadline_s=self._every_s)).state
            self._tell(f"{self.asked.name} is {self.state}")
            return self._every_s
        except (MalformedRequest, Unauthorised):
            raise
        except NotRegistered as error:
            self._lease = ""
            self._tell(error.what)
            return 0.0
        except EngineError as error:
            self._tell(f"{error.what}: {error.facts}; asked again every {AGAIN_S:g} s")
            return AGAIN_S

    def _tell(self, text: str) -> None:
        """What is new, once."""
        if text != self._told:
            self._said(text)
        self._told = text

    async def _post(
        self, session: aiohttp.ClientSession, path: str, asked: object, kind: type[T], *, deadline_s: float = ANSWER_S
    ) -> T:
        timeout = aiohttp.ClientTimeout(total=deadline_s)
        try:
            body = msgspec.json.encode(asked)
            async with session.post(self._registry + path, data=body, timeout=timeout) as answer:
                said = await answer.read()
                if answer.status != 200:
                    raise from_http(answer.status, said, engine=self._registry)
                return msgspec.json.decode(said, type=kind)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            facts = f"{type(error).__name__}: {error}"
            raise EngineGone(f"no registry answers at {self._registry}", facts, hint="is the run up?") from None


def registration_of(args: argparse.Namespace, listener: socket.socket, token: str | None) -> Registration | None:
    """The place that an engine is to have in a fleet elsewhere, not yet taken; None where it joins none."""
    if not args.register:
        return None
    listener.listen()  # whoever calls before the engine serves waits for it, instead of being refused
    host, port = listener.getsockname()[:2]
    host = address_towards(args.register) if host in ("0.0.0.0", "::") else host
    url = args.advertise or f"http://{f'[{host}]' if ':' in host else host}:{port}"
    asked = Join(name=args.name, url=url, region=args.region, standby=args.standby)
    return Registration(args.register, asked, token=token)


async def be_member(registration: Registration) -> None:
    """Until it is drained, or the registry will not have it: then the process ends."""
    try:
        await registration.keep()
    except EtudeError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        os._exit(error.exit_code)
    os._exit(0)  # it has finished what it had; what it started ends with it


def address_towards(registry: str) -> str:
    """This host's address on its way to the registry: what others may reach it at, behind no translation."""
    parts = urlsplit(registry)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    with socket.socket(socket.AF_INET6 if ":" in (parts.hostname or "") else socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((parts.hostname, port))  # sends nothing
        return str(way.getsockname()[0])


def base(registry: str) -> str:
    """The URL of a registry, checked. Raises `InputError`."""
    if urlsplit(registry).scheme not in ("http", "https") or not urlsplit(registry).hostname:
        raise InputError(f"{registry!r} is no registry", hint="write http://HOST:PORT, the run's fleet.listen")
    return registry.rstrip("/")


def bearing(token: str | None) -> dict[str, str]:
    """The headers of a request to a registry."""
    return {"authorization": f"Bearer {token}"} if token else {}
