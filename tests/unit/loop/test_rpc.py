"""Calls between the conductor and its children."""

from __future__ import annotations

import asyncio
import socket

import pytest

from etude import progress
from etude.errors import DeadlineExceeded, EtudeError, WeightsError
from etude.loop.rpc import Caller, CallFailed, MessageTooLarge, ProcessLost, enable_keepalive, serve
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
        results = await asyncio.gather(*(caller.call("echo", Version, sent, n, deadline_s=60) for n in range(20)))
        assert [v.step for v in results] == list(range(3, 23))

    run(work)


def test_an_error_arrives_as_the_type_that_was_raised_with_its_hint():
    async def work(caller, server):
        with pytest.raises(WeightsError, match="hint: fetch the anchor"):
            await caller.call("refuse", type(None), deadline_s=60)

    run(work)


def test_a_defect_arrives_with_its_traceback():
    async def work(caller, server):
        with pytest.raises(CallFailed, match="KeyError: 'oops'"):
            await caller.call("break", type(None), deadline_s=60)

    run(work)


def test_a_hung_call_ends_at_its_deadline_and_names_what_was_called():
    async def work(caller, server):
        with pytest.raises(DeadlineExceeded, match="child did not answer hang"):
            await caller.call("hang", type(None), deadline_s=0.05)

    run(work)


def test_a_call_that_is_no_longer_waited_for_is_cancelled_in_the_child():
    async def work(caller, server):
        cancelled[:] = [asyncio.Event()]
        pending = asyncio.create_task(caller.call("hang", type(None), deadline_s=60))
        await caller.call("echo", Version, Version(0, "0" * 8, "a" * 64), 1, deadline_s=60)
        pending.cancel()
        await asyncio.wait_for(cancelled[0].wait(), 60)

    run(work)


def test_a_call_past_its_deadline_is_cancelled_in_the_child_so_that_it_keeps_nothing():
    async def work(caller, server):
        cancelled[:] = [asyncio.Event()]
        with pytest.raises(DeadlineExceeded):
            await caller.call("hang", type(None), deadline_s=0.05)
        await asyncio.wait_for(cancelled[0].wait(), 60)
        sent = Version(3, "0" * 8, "a" * 64)
        assert (await caller.call("echo", Version, sent, 1, deadline_s=60)).step == 4, "the child answers on"

    run(work)


def test_a_lost_child_fails_the_calls_that_wait_for_it_and_those_that_come_later():
    async def work(caller, server):
        pending = asyncio.create_task(caller.call("hang", type(None), deadline_s=60))
        await asyncio.sleep(0)
        server.cancel()
        with pytest.raises((ProcessLost, CallFailed)):
            await pending
        await caller.lost.wait()
        with pytest.raises(ProcessLost):
            await caller.call("echo", Version, deadline_s=60)

    run(work)


def test_a_call_between_machines_waits_for_no_acknowledgement():
    with socket.socket(socket.AF_INET) as sock:
        assert sock.proto == 0, "asyncio leaves such a one as it is"
        assert enable_keepalive(sock).getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


async def _long(seconds: float) -> str:
    """Work that gets on all the time."""
    ends = asyncio.get_running_loop().time() + seconds
    while asyncio.get_running_loop().time() < ends:
        progress.tick()
        await asyncio.sleep(0.01)
    return "done"


async def _stalls(seconds: float) -> str:
    await _long(seconds)
    await asyncio.Event().wait()
    raise AssertionError


async def _large(num_bytes: int) -> bytes:
    return bytes(num_bytes)


LONG = {"long": ((float,), _long), "stalls": ((float,), _stalls), "large": ((int,), _large), "take": ((bytes,), _hang)}


def run_limited(work):
    async def main():
        ours, theirs = socket.socketpair()
        server = asyncio.create_task(serve(theirs, LONG, max_frame_bytes=10_000, beat_s=0.02))
        caller = Caller(ours, "child", max_frame_bytes=10_000)
        await caller.open()
        try:
            await work(caller)
        finally:
            caller.close()
            await server
            await caller.lost.wait()

    asyncio.run(main())


def test_a_call_that_gets_on_may_take_longer_than_its_deadline():
    async def work(caller):
        assert await caller.call("long", str, 2.5, deadline_s=1.0) == "done"

    run_limited(work)


def test_a_call_that_got_on_and_falls_silent_is_named_with_how_long_it_did():
    async def work(caller):
        with pytest.raises(
            DeadlineExceeded, match="child did not answer stalls: silent for 1 s, after it made progress for"
        ):
            await caller.call("stalls", str, 0.5, deadline_s=1.0)

    run_limited(work)


def test_what_fits_into_no_frame_is_named_and_the_child_lives_on():
    async def work(caller):
        with pytest.raises(EtudeError, match="the answer of a call is too large: it has 2"):
            await caller.call("large", bytes, 20_000, deadline_s=60)
        with pytest.raises(
            MessageTooLarge, match=r"a call of take is too large: it has 2.* bytes, at most 10000 are allowed"
        ):
            await caller.call("take", bytes, bytes(20_000), deadline_s=60)
        assert await caller.call("large", bytes, 5_000, deadline_s=60) == bytes(5_000)

    run_limited(work)
