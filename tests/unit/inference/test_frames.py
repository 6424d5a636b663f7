"""Frames of a streamed completion."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import EngineBehind, EngineError
from etude.inference import HttpEngine, client
from etude.inference.errors import EngineLate
from etude.inference.wire import frame, read_frames
from etude.records import Completion, CompletionRequest, Sampling
from etude.testing import ScriptedEngine


async def read(data: bytes) -> list[list[int] | Completion]:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    return [part async for part in read_frames(reader.readexactly, engine="engine-0")]


def test_an_error_after_tokens_is_raised_as_what_it_was() -> None:
    behind = EngineBehind("step 4 asked", "this engine holds 3", hint="adopt first")
    with pytest.raises(EngineBehind, match="step 4 asked"):
        asyncio.run(read(frame([1, 2]) + frame(behind)))


def test_a_body_that_ends_without_a_completion_is_an_engine_error() -> None:
    with pytest.raises(EngineError, match="is invalid or ended early"):
        asyncio.run(read(frame([1, 2])))


@given(st.binary(max_size=60))
def test_any_bytes_are_an_engine_error_and_nothing_else(data: bytes) -> None:
    with pytest.raises(EngineError):
        asyncio.run(read(data))


@pytest.mark.parametrize("ends", [True, False])
def test_a_stream_may_take_longer_than_its_deadline_but_not_be_silent_for_so_long(
    monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    monkeypatch.setattr(client, "GRACE_S", 0.0)
    sampling = Sampling(max_tokens=5, stop_token_ids=())
    request = CompletionRequest(
        request_id="r", session_id="s", prompt_ids=np.ones(3, np.int32), sampling=sampling, deadline_s=1.5
    )

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n")
        for _ in range(5 if ends else 1):
            await asyncio.sleep(0.4)
            writer.write(frame([7]))
        if ends:
            writer.write(frame(await ScriptedEngine([[7] * 5]).generate(request)))
        else:
            await silent.wait()
        writer.close()
        await writer.wait_closed()
        closed.set()

    silent, closed = asyncio.Event(), asyncio.Event()

    async def story() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with asyncio.timeout(100), server, HttpEngine(url) as engine:
            try:
                parts = [part async for part in engine.stream(request)]
                assert parts[:-1] == [[7]] * 5
            finally:
                silent.set()
                await closed.wait()

    if ends:
        asyncio.run(story())
    else:
        with pytest.raises(EngineLate, match="did not answer request r within"):
            asyncio.run(story())
