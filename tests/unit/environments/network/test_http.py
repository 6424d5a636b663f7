"""Request heads that every server reads alike pass; whatever two could read differently does not."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.environments.network.http import BadRequest, authority, parse_head, target_of


def head(text: str) -> bytes:
    return text.replace("\n", "\r\n").encode("latin-1") + b"\r\n\r\n"


def test_a_plain_request_is_read():
    found = parse_head(head("POST http://A.example:8080/p?q HTTP/1.1\nHost: x\nContent-Length: 3\nX-Y:  z \t"))
    assert (found.method, found.body) == ("POST", 3)
    assert dict(found.fields)["x-y"] == b"z"
    assert target_of(found) == ("a.example", 8080, "/p?q")
    assert target_of(parse_head(head("CONNECT [2001:db8::1]:443 HTTP/1.1"))) == ("2001:db8::1", 443, "")
    assert parse_head(head("PUT http://a/ HTTP/1.1\nTransfer-Encoding: Chunked")).body is None


@pytest.mark.parametrize(
    "data",
    [
        head("GET http://a/ HTTP/1.1\nContent-Length: 1\nTransfer-Encoding: chunked"),
        head("GET http://a/ HTTP/1.1\nContent-Length: 1\nContent-Length: 1"),
        head("GET http://a/ HTTP/1.1\nContent-Length: 1, 2"),
        head("GET http://a/ HTTP/1.1\nContent-Length: +1"),
        head("GET http://a/ HTTP/1.1\nContent-Length: -1"),
        head("GET http://a/ HTTP/1.1\nContent-Length: 0x10"),
        head("GET http://a/ HTTP/1.1\nTransfer-Encoding: identity, chunked"),
        head("GET http://a/ HTTP/1.1\nTransfer-Encoding: xchunked"),
        head("GET http://a/ HTTP/1.1\nTransfer-Encoding : chunked"),
        head("GET http://a/ HTTP/1.1\nTransfer-Encoding:\x0bchunked"),
        head("GET http://a/ HTTP/1.1\nX: a\n Transfer-Encoding: chunked"),
        head("GET http://a/ HTTP/1.1\nX: a\x00b"),
        b"GET http://a/ HTTP/1.1\nX: y\n\r\n\r\n",
        b"GET http://a/ HTTP/1.1\r\nX: a\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET http://a/ HTTP/1.1\r\nX: a\rTransfer-Encoding: chunked\r\n\r\n",
        head("GET  http://a/ HTTP/1.1"),
        head("GET http://a/ HTTP/2.0"),
        head("GET http://a/ http/1.1"),
        head("GET http://a/\x7f HTTP/1.1"),
        head("GET http://a/ HTTP/1.1\n: x"),
        head("GET http://a/ HTTP/1.1" + "\nA: b" * 101),
        b"GET http://a/ HTTP/1.1\r\nA: " + b"b" * 40_000 + b"\r\n\r\n",
        b"",
        b"\r\n\r\n",
    ],
)
def test_a_head_that_two_could_read_differently_is_refused(data):
    with pytest.raises(BadRequest):
        parse_head(data)


@pytest.mark.parametrize(
    "line",
    [
        "GET / HTTP/1.1",
        "GET https://a/ HTTP/1.1",
        "GET http:/a HTTP/1.1",
        "GET http:// HTTP/1.1",
        "GET http://user@a/ HTTP/1.1",
        "GET http://good@evil/ HTTP/1.1",
        "GET http://a?.b/ HTTP/1.1",
        "GET http://a#.b/ HTTP/1.1",
        "GET http://a:0/ HTTP/1.1",
        "GET http://a:99999/ HTTP/1.1",
        "GET http://a:80:80/ HTTP/1.1",
        "GET http://a\\b/ HTTP/1.1",
        "GET http://.a/ HTTP/1.1",
        "GET http://a..b/ HTTP/1.1",
        "GET http://a%2eb/ HTTP/1.1",
        "CONNECT a HTTP/1.1",
        "CONNECT a:443/x HTTP/1.1",
        "CONNECT http://a:443 HTTP/1.1",
        "OPTIONS * HTTP/1.1",
    ],
)
def test_a_target_that_is_not_plain_is_refused(line):
    with pytest.raises(BadRequest):
        target_of(parse_head(head(line)))


@settings(max_examples=400)
@given(st.data())
def test_mutated_heads_are_read_or_refused(data):
    whole = bytearray(head("POST http://a.b:80/c HTTP/1.1\nHost: a\nContent-Length: 12\nConnection: x"))
    for _ in range(data.draw(st.integers(1, 5))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(BadRequest):
        found = target_of(parse_head(bytes(whole)))
        assert authority(f"[{found.host}]" if ":" in found.host else found.host)[0] == found.host
        assert 0 < found.port < 65_536


@settings(max_examples=300)
@given(st.text(max_size=40))
def test_any_text_is_an_authority_or_refused(text):
    with contextlib.suppress(BadRequest):
        host, port = authority(text)
        assert host == host.lower()
        assert port is None or 0 < port < 65_536
