"""Calls between the conductor and its children."""

from __future__ import annotations

import asyncio
import socket

import pytest

from etude.errors import DeadlineExceeded, WeightsError
from etude.loop.wire import Caller, Failed, Lost, kept_alive, serve
from etude.records import Version


async def _pair(handlers):
    ours, theirs = socket.socketpair()
    server = asyncio.create_task(serve(theirs, handlers))
    caller = Caller(ours, "child")
    await caller.open()
    return caller, server


async def _echo(version: Version, number: int) -> Version:
    return Version(version.step + number, version.incarnation, version.digest)


async def _refuse() -> None:
    raise WeightsError("delta v2", "does not fit", hint="fetch the anchor")


async def _break() -> None:
    raise KeyError("oops")


cancelled: list[asyncio.Event] = []  # of the event loop that runs now


async def _hang() -> None:
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        cancelled[0].set()
        raise


HANDLERS = {"echo": ((Version, int), _echo), "refuse": ((), _refuse), "break": ((), _break), "hang": ((), _hang)}


def run(work):
    async def main():
        caller, server = await _pair(HANDLERS)
        try:
            await work(caller, server)
        finally:
            caller.close()
            server.cancel()
            await asyncio.gather(server, return_exceptions=True)
            await caller.lost.wait()
            await asyncio.sleep(0)

    asyncio.run(main())


def test_a_call_carries_records_both_ways():
    async def work(caller, server):
        sent = Version(3, "0" * 8, "a" * 64)
        results = await asyncio.gather(*(caller.call("echo", Version, sent, n, deadline_s=5) for n in range(20)))
        assert [v.step for v in results] == list(range(3, 23))

    run(work)


def test_an_error_arrives_as_the_type_that_was_raised_with_its_hint():
    async def work(caller, server):
        with pytest.raises(WeightsError, match="hint: fetch the anchor"):
            await caller.call("refuse", type(None), deadline_s=5)

    run(work)


def test_a_defect_arrives_with_its_traceback():
    async def work(caller, server):
        with pytest.raises(Failed, match="KeyError: 'oops'"):
            await caller.call("break", type(None), deadline_s=5)

    run(work)


def test_a_hung_call_ends_at_its_deadline_and_names_what_was_called():
    async def work(caller, server):
        with pytest.raises(DeadlineExceeded, match="child did not answer hang"):
            await caller.call("hang", type(None), deadline_s=0.05)

    run(work)


def test_a_call_that_is_no_longer_waited_for_is_cancelled_in_the_child():
    async def work(caller, server):
        cancelled[:] = [asyncio.Event()]
        pending = asyncio.create_task(caller.call("hang", type(None), deadline_s=5))
        await caller.call("echo", Version, Version(0, "0" * 8, "a" * 64), 1, deadline_s=5)
        pending.cancel()
        await asyncio.wait_for(cancelled[0].wait(), 5)

    run(work)


def test_a_call_past_its_deadline_is_cancelled_in_the_child_so_that_it_keeps_nothing():
    async def work(caller, server):
        cancelled[:] = [asyncio.Event()]
        with pytest.raises(DeadlineExceeded):
            await caller.call("hang", type(None), deadline_s=0.05)
        await asyncio.wait_for(cancelled[0].wait(), 5)
        sent = Version(3, "0" * 8, "a" * 64)
        assert (await caller.call("echo", Version, sent, 1, deadline_s=5)).step == 4, "the child answers on"

    run(work)


def test_a_lost_child_fails_the_calls_that_wait_for_it_and_those_that_come_later():
    async def work(caller, server):
        pending = asyncio.create_task(caller.call("hang", type(None), deadline_s=5))
        await asyncio.sleep(0)
        server.cancel()
        with pytest.raises((Lost, Failed)):
            await pending
        await caller.lost.wait()
        with pytest.raises(Lost):
            await caller.call("echo", Version, deadline_s=5)

    run(work)


def test_a_call_between_machines_waits_for_no_acknowledgement():
    with socket.socket(socket.AF_INET) as sock:
        assert sock.proto == 0, "asyncio leaves such a one as it is"
        assert kept_alive(sock).getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
