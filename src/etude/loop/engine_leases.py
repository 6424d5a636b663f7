"""Leases of engines: an evaluation borrows some engines of a running run for a limited time.

The evaluation and the conductor are processes of one machine. They communicate by files in the run's folder ``lease``:

| file | written by | content |
| --- | --- | --- |
| ``lock`` | the evaluation | a kernel lock for the time of the lease; released when the process ends or dies |
| ``request.json`` | the evaluation | `Request` |
| ``answer.json`` | the conductor | `Answer`, written again when the lease ends |

A lent engine gets no new sessions of training, and keeps its version; its running sessions continue there. When the
evaluation ends or dies, or its time is over, the engine adopts the newest version and serves training again. A lease
changes only the speed of training: with ``max_lag = 0`` the results are bit-identical."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from etude.errors import DeadlineExceeded, EngineError, EtudeError, RunRefused
from etude.inference import HttpEngine
from etude.inference.config import EngineKind
from etude.loop.run_processes import RunProcesses
from etude.records.completion import Version
from etude.run import RunFolder, lock_holder, take_lock, write_durably
from etude.telemetry import Telemetry

FOLDER = "lease"
MAX_SHARE = 0.5
"""The largest share of a run's engines that may be lent."""
MAX_LEASE_S = 3_600.0
POLL_S, HOLD_S = 0.5, 15.0
"""In seconds: how often both sides read the files, and for how long one call makes an engine keep its version."""
ANSWER_S = 120.0
"""Longest wait for an answer, in seconds: engines may be loading, or about to adopt a version."""
T = TypeVar("T")


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """An evaluation's request to borrow a share (0 to 1) of a run's engines for some seconds. `id` is random."""

    id: str
    share: float
    seconds: float


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The conductor's answer to the request `id`.

    `engines`: URLs of the lent engines, by name. `version`: the version that they keep; None: the request is refused.
    `ended`: why the lease has ended, or why it is refused; "": it is active."""

    id: str
    engines: dict[str, str] = {}
    version: Version | None = None
    ended: str = ""


class EngineLeases:
    """Lends engines of a running run to one evaluation at a time: the conductor's part of a lease."""

    def __init__(self, run: RunFolder, processes: RunProcesses, telemetry: Telemetry) -> None:
        self._folder, self._processes, self._telemetry = run / FOLDER, processes, telemetry
        self._answer: Answer | None = None  # of the active lease
        self._ends, self._held_until = 0.0, 0.0  # monotonic: end of the lease; until when its engines surely hold
        self._seen = ""  # id of the last request that was answered

    async def watch(self) -> None:
        """Answer requests for leases and end leases whose time is over, until cancelled. Then end an active lease."""
        self._folder.mkdir(exist_ok=True)
        try:
            while True:
                await asyncio.sleep(POLL_S)
                try:
                    await self._look()
                except Exception as error:  # noqa: BLE001  training does not depend on leases: it continues
                    self._telemetry.event("fleet.lease", state="failed", engines=[], version="", reason=repr(error))
        finally:
            if self._answer is not None:
                with contextlib.suppress(EtudeError):
                    self._write(msgspec.structs.replace(self._answer, ended="the run has stopped"))

    async def _look(self) -> None:
        held = lock_holder(self._folder / "lock") is not None
        request = self._request() if held else None
        if self._answer is not None:  # another request: that evaluation has ended, and the next one has the lock
            over = "" if request is not None and request.id == self._answer.id else "the evaluation has ended"
            over = over or ("the time of the lease is over" if time.monotonic() >= self._ends else "")
            over = over or await self._renew(self._answer)
            if over:
                await self._take_back(self._answer, over)
        elif request is not None and request.id != self._seen:
            await self._lend(request)

    def _request(self) -> Request | None:
        try:
            return msgspec.json.decode((self._folder / "request.json").read_bytes(), type=Request)
        except (OSError, msgspec.MsgspecError):
            return None

    async def _lend(self, request: Request) -> None:
        """Lend engines that have the newest version. If they do not have it yet, wait for the next call."""
        kinds = self._processes.config.fleet.engines
        able = [f"engine-{i}" for i, kind in enumerate(kinds) if kind is EngineKind.REFERENCE]
        able = [name for name in able if name in self._processes.lendable]
        others = len(self._processes.engines) - len(able)
        count = min(int(min(request.share, MAX_SHARE) * len(kinds)), len(able) - (not others))
        if count < 1:
            facts = (
                f"{len(able)} of its {len(kinds)} engines can be lent now; a lease takes a share of {request.share:g} "
                f"of all, at most {MAX_SHARE:g}, and must leave one to training"
            )
            self._refuse(request, facts)
            return
        lent, began = await self._processes.lend(able[-count:]), time.monotonic()
        versions = await self._hold(lent, HOLD_S)
        if len(lent) < count or {*versions.values()} != {self._processes.head}:
            await self._release(lent)
            return
        self._seen, self._held_until = request.id, began + HOLD_S
        self._ends = time.monotonic() + min(request.seconds, MAX_LEASE_S)
        urls = {name: engine.url for name, engine in lent.items()}
        self._answer = Answer(id=request.id, engines=urls, version=self._processes.head)
        self._write(self._answer)
        self._event("lent", self._answer)

    async def _hold(self, engines: dict[str, HttpEngine], seconds: float) -> dict[str, Version | None]:
        """Make engines keep their versions, and return the versions; None for an engine that does not answer."""

        async def one(engine: HttpEngine) -> Version | None:
            with contextlib.suppress(EngineError):
                return await engine.hold(seconds)
            return None

        return dict(zip(engines, await asyncio.gather(*map(one, engines.values())), strict=True))

    async def _renew(self, answer: Answer) -> str:
        """Make the lent engines keep their version for longer. Returns why that failed; "": it succeeded.

        An engine that does not answer, as in a long computation, is not lost while its last answer makes it hold."""
        lent, began = await self._processes.lend(answer.engines), time.monotonic()
        versions = await self._hold(lent, HOLD_S)
        same = {name: engine.url for name, engine in lent.items()} == answer.engines
        if same and {*versions.values()} == {answer.version}:
            self._held_until = began + HOLD_S
        elif not same or {*versions.values()} - {answer.version, None} or time.monotonic() >= self._held_until:
            return "an engine was lost"
        return ""

    async def _take_back(self, answer: Answer, reason: str) -> None:
        self._answer = None
        try:
            self._event("returned", answer, reason)
            self._write(msgspec.structs.replace(answer, ended=reason))
        finally:
            await self._release(await self._processes.lend(answer.engines))

    async def _release(self, lent: dict[str, HttpEngine]) -> None:
        await self._hold(lent, 0.0)
        await self._processes.lend(())

    def _refuse(self, request: Request, reason: str) -> None:
        self._seen = request.id
        self._write(Answer(id=request.id, ended=reason))
        self._event("refused", Answer(id=request.id), reason)

    def _write(self, answer: Answer) -> None:
        write_durably(self._folder / "answer.json", msgspec.json.encode(answer))

    def _event(self, state: str, answer: Answer, reason: str = "") -> None:
        version = str(answer.version) if answer.version else ""
        self._telemetry.event("fleet.lease", state=state, engines=[*answer.engines], version=version, reason=reason)


class Lease:
    """The engines of a run that this process has borrowed, with their URLs by name, and the version of the weights that
    they keep."""

    def __init__(self, engines: dict[str, str], version: Version, ended: Callable[[], str]) -> None:
        self.engines, self.version, self._ended = engines, version, ended

    async def during(self, work: Awaitable[T]) -> T:
        """Await `work` and return its result. If the lease ends first, cancel `work` and raise `DeadlineExceeded`."""
        task, watch = asyncio.ensure_future(work), asyncio.ensure_future(self._until_ended())
        both: tuple[asyncio.Future[Any], ...] = (task, watch)
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                hint = "give more --seconds or fewer --tasks, or evaluate the newest checkpoint, which needs no lease"
                what = "the run took its engines back before the evaluation ended"
                raise DeadlineExceeded(what, watch.result(), hint=hint)
            return task.result()
        finally:
            for one in both:
                one.cancel()
            await asyncio.gather(*both, return_exceptions=True)

    async def _until_ended(self) -> str:
        while not (reason := self._ended()):  # noqa: ASYNC110  the conductor is another process
            await asyncio.sleep(POLL_S)
        return reason


@contextlib.asynccontextmanager
async def borrowed_engines(run: RunFolder, *, share: float, seconds: float) -> AsyncIterator[Lease]:
    """Borrow engines of a running run for the `async with` block.

    `share`: the largest share of the run's engines, at most `MAX_SHARE`. `seconds`: the longest time, at most
    `MAX_LEASE_S`. Raises `RunRefused` if the run is not running or lends no engines, or if another evaluation has
    borrowed some."""
    folder, request = run / FOLDER, Request(id=secrets.token_hex(8), share=share, seconds=seconds)
    alone = f"evaluate its newest checkpoint: etude eval SUITE --checkpoint {run.path}"
    if run.holder() is None:
        raise RunRefused(f"{run.path} is not running", "engines can be borrowed only from a running run", hint=alone)
    folder.mkdir(exist_ok=True)
    fd, holder = take_lock(folder / "lock")
    if fd is None:
        what, hint = f"engines of {run.path} are lent already", "wait until that process ends"
        raise RunRefused(what, f"process {holder} has borrowed them", hint=hint)
    try:
        write_durably(folder / "request.json", msgspec.json.encode(request))
        answer = await _answer_to(request, run)
        if answer.version is None:
            raise RunRefused(f"{run.path} lends no engines", answer.ended, hint=alone)
        yield Lease(answer.engines, answer.version, lambda: _ended(request, run))
    finally:
        os.close(fd)


async def _answer_to(request: Request, run: RunFolder) -> Answer:
    for _ in range(int(ANSWER_S / POLL_S)):
        answer = _read(run / FOLDER)
        if answer is not None and answer.id == request.id:
            return answer
        if run.holder() is None:
            return Answer(id=request.id, ended="the run has stopped")
        await asyncio.sleep(POLL_S)
    facts = f"no answer within {ANSWER_S:g} s: RL has not begun, or the engines do not reach the newest version"
    return Answer(id=request.id, ended=facts)


def _ended(request: Request, run: RunFolder) -> str:
    answer = _read(run / FOLDER)
    if answer is None or answer.id != request.id:
        return "the conductor's answer was deleted or replaced"
    return answer.ended or ("" if run.holder() is not None else "the run has stopped")


def _read(folder: Path) -> Answer | None:
    try:
        return msgspec.json.decode((folder / "answer.json").read_bytes(), type=Answer)
    except (OSError, msgspec.MsgspecError):
        return None
