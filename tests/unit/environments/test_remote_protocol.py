"""Parsers of the protocol: envelopes, messages, forms, listings, also truncated and altered ones."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.environments.remote import connect
from etude.environments.remote import messages as m
from etude.environments.remote.api_errors import ApiError
from etude.environments.remote.connect import Code, RpcError
from etude.environments.remote.external_service import OutputCollector, result_of_error
from etude.environments.remote.files import entry_of
from etude.environments.remote.folder_watcher import changes
from etude.environments.remote.multipart import parts
from etude.environments.remote.processes import Log

HAPPENED = [
    m.ProcessEvent(event=m.Event(start=m.Began(pid=7))),
    m.ProcessEvent(event=m.Event(data=m.Output(stdout=b"\0\xff"))),
    m.ProcessEvent(event=m.Event(end=m.Ended(exit_code=3, status="exit status 3"))),
]
STREAM = b"".join(map(connect.envelope, HAPPENED)) + connect.end()


def read(data: bytes, sizes: list[int], *, is_answer: bool = True, max_bytes: int = 1 << 16) -> list[m.ProcessEvent]:
    """Read the messages in `data`, received in pieces of these sizes."""

    async def chunks() -> AsyncIterator[bytes]:
        at, number = 0, 0
        while at < len(data):
            size = sizes[number % len(sizes)]
            yield data[at : at + size]
            at, number = at + size, number + 1

    async def main() -> list[m.ProcessEvent]:
        stream = connect.envelopes(chunks(), m.ProcessEvent, is_response=is_answer, max_bytes=max_bytes)
        return [message async for message in stream]

    return asyncio.run(main())


@given(st.lists(st.integers(1, 40), min_size=1, max_size=4))
@settings(max_examples=30)
def test_messages_come_back_however_their_bytes_are_cut(sizes):
    assert read(STREAM, sizes) == HAPPENED


@given(st.binary(max_size=200))
@settings(max_examples=150)
def test_bytes_that_are_no_stream_are_refused_by_name(data):
    with contextlib.suppress(RpcError):
        read(data, [50])


@given(st.data())
@settings(max_examples=150)
def test_a_changed_stream_is_read_or_refused_by_name(data):
    changed = bytearray(STREAM)
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(RpcError):
        read(bytes(changed), [64])


@given(st.integers(0, len(STREAM) - 1))
@settings(max_examples=40)
def test_an_answer_that_is_cut_off_is_known_to_be(at):
    with pytest.raises(RpcError) as caught:
        read(STREAM[:at], [64])
    assert caught.value.code is Code.UNAVAILABLE


def test_an_answers_error_is_raised_with_its_code_and_hint():
    with pytest.raises(RpcError) as caught:
        read(connect.end(RpcError(Code.NOT_FOUND, "no process 7", hint="see List")), [64])
    assert (caught.value.code, caught.value.message, caught.value.hint) == (Code.NOT_FOUND, "no process 7", "see List")


def test_a_message_larger_than_allowed_is_refused_before_it_is_held():
    head = b"\0" + (1 << 30).to_bytes(4, "big")
    with pytest.raises(RpcError, match="at most 65536"):
        read(head, [64])


def test_compressed_messages_are_refused_by_name():
    with pytest.raises(RpcError, match="compressed"):
        read(b"\1\0\0\0\2{}", [64])


@pytest.mark.parametrize("text", ["-1", "1e3", "99999999999", "", "x"])
def test_a_deadline_that_is_no_number_is_refused(text):
    with pytest.raises(RpcError):
        connect.read_timeout({connect.TIMEOUT: text})


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=9), st.lists, max_leaves=9))
@settings(max_examples=80)
def test_json_of_another_shape_is_refused_by_name(value):
    with pytest.raises(RpcError):
        connect.decode(m.Start, msgspec.json.encode(value))


@pytest.mark.parametrize("status", [400, 401, 404, 409, 418, 429, 500, 502, 503, 504])
@pytest.mark.parametrize(
    "body", [b"", b"<html>", b"[]", b'{"code": 7}', b'{"code": "no_such_code", "message": 3}', b"\xff"]
)
def test_a_proxys_error_page_has_a_code_all_the_same(status, body):
    assert connect.error_of_response(status, body).code in set(Code)


FORM = (
    b'--B\r\nContent-Disposition: form-data; name="file"; filename="/a b/\xc3\xbc%22.txt"\r\n\r\none\r\n\r\n--x\r\n'
    b'--B\r\nX: y\r\ncontent-disposition: form-data; filename="two"; name="file"\r\n\r\n\r\n'
    b'--B\r\nContent-Disposition: form-data; name="other"\r\n\r\nno file\r\n--B--\r\n'
)


def test_a_forms_files_come_with_their_names_and_bytes():
    found = parts('multipart/form-data; boundary="B"', FORM)
    assert found == [('/a b/ü".txt', b"one\r\n\r\n--x"), ("two", b"")]


@given(st.data())
@settings(max_examples=150)
def test_a_changed_form_is_read_or_refused_by_name(data):
    changed = bytearray(FORM[: data.draw(st.integers(0, len(FORM)))])
    for _ in range(data.draw(st.integers(0, 4)) if changed else 0):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ApiError):
        parts("multipart/form-data; boundary=B", bytes(changed))


NUMBERS = st.integers(-(1 << 70), 1 << 70).map(str) | st.text("0123456789abcdef", max_size=12) | st.text(max_size=5)


@given(st.text(max_size=40), st.lists(NUMBERS, max_size=9).map(" ".join), NUMBERS)
@settings(max_examples=200)
def test_a_listing_that_a_machine_made_up_is_read_or_refused(path, line, target):
    with contextlib.suppress(ValueError):
        entry_of(path, line, target, "")


def entry(name: str, line: str) -> dict:
    found = entry_of(f"/w/{name}", line, line.split()[0], "")
    assert found is not None
    return {name: found}


def test_a_change_between_two_polls_is_reported_once():
    old = entry("a", "81a4 5 1 me us 7 1 one") | entry("b", "81a4 5 1 me us 8 1 one")
    new = entry("a", "81a4 6 1 me us 7 1 two") | entry("c", "81a4 0 1 me us 9 1 one")
    told = [(change.name, change.type.removeprefix("EVENT_TYPE_")) for change in changes(old, new, include_entry=False)]
    assert told == [("b", "REMOVE"), ("a", "WRITE"), ("c", "CREATE")]
    mode = entry("a", "81ff 6 1 me us 7 1 two") | entry("c", "81a4 0 1 me us 9 1 one")
    [change] = changes(new, mode, include_entry=True)
    assert (change.type, change.entry.permissions) == ("EVENT_TYPE_CHMOD", "-rwxrwxrwx")


@given(st.lists(st.binary(max_size=9), max_size=9), st.integers(0, 20))
@settings(max_examples=60)
def test_output_of_another_service_is_cut_in_the_middle_to_its_cap(pieces, cap):
    got, whole = OutputCollector(cap, None, began=0.0), b"".join(pieces)
    for piece in pieces:
        got.add(m.Event(data=m.Output(stdout=piece)))
    result = got.result(0)
    assert result.truncated == (len(whole) > cap)
    assert len(result.output) <= cap if result.truncated else result.output == whole


def test_a_reader_that_falls_behind_a_commands_log_gets_an_error():
    async def main():
        log = Log(1000)
        for _ in range(100):
            log.append(m.Event(data=m.Output(stdout=b"x" * 100)))
        log.end()
        latest = [event async for event in log.read(log.position - 3, every_s=1.0)]
        with pytest.raises(RpcError) as caught:
            [event async for event in log.read(0, every_s=1.0)]
        return len(latest), caught.value.code

    assert asyncio.run(main()) == (3, Code.OUT_OF_RANGE)


def test_an_answer_that_is_nested_without_end_is_a_proxys_error_page() -> None:
    assert connect.error_of_response(502, b"[" * 60_000).code is Code.UNAVAILABLE


@pytest.mark.parametrize(
    ("message", "exit_code"),
    [
        ("error starting process: exec: no-such: executable file not found in $PATH", 127),
        ("error starting process: fork/exec /bin/x: no such file or directory", 127),
        ("error starting process: fork/exec ./notes.txt: permission denied", 126),
        ("cwd /gone: no such file or directory", 126),
    ],
)
def test_a_program_that_cannot_start_exits_with_127_if_missing_and_126_otherwise(message: str, exit_code: int) -> None:
    collector = OutputCollector(1 << 16, None, began=0.0)
    result = result_of_error(RpcError(Code.INVALID_ARGUMENT, message), collector)
    assert result is not None
    assert (result.exit_code, result.output) == (exit_code, f"{message}\n".encode())
