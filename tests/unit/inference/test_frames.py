"""Frames of a streamed completion."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import EngineBehind, EngineError
from etude.inference.wire import frame, read_frames
from etude.records import Completion


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
