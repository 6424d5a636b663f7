"""A relay and its client: reads, broken connections, and refused writes."""

from __future__ import annotations

import http.client
import os
import pickle
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import uvicorn

from etude.errors import StoreError
from etude.seams import BlobStore
from etude.stores import CachedStore, MemoryStore, open_store
from etude.stores.http import HttpStore
from etude.stores.relay import build_relay


@contextmanager
def relayed(store: BlobStore, **options: Any) -> Iterator[str]:
    """Run a relay in a thread; yields its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(build_relay(store, **options), log_level="error", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while thread.is_alive() and not server.started:
            time.sleep(0.005)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(30)


@contextmanager
def wire(upstream: str, allowed: list[int]) -> Iterator[str]:
    """A TCP proxy to the relay that cuts each connection after so many bytes of responses, then no more."""
    port = int(upstream.rpartition(":")[2])
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def carry(near: socket.socket, most: int | None) -> None:
            with near, socket.create_connection(("127.0.0.1", port)) as far:
                while request := near.recv(65536):
                    far.sendall(request)
                    far.settimeout(5)
                    while most is None or most > 0:
                        try:
                            data = far.recv(65536 if most is None else min(most, 65536))
                        except TimeoutError:
                            return
                        if not data:
                            return
                        near.sendall(data)
                        if most is not None:
                            most -= len(data)
                    return

        def accept() -> None:
            while True:
                try:
                    near, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=carry, args=(near, allowed.pop(0) if allowed else None), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


def test_a_relay_has_the_bytes_ranges_and_keys_of_its_store() -> None:
    store = MemoryStore()
    data = random.Random(0).randbytes((3 << 20) + 1)
    for key, value in (("objects/a", data), ("a.b/=c+d@e", b"x"), ("objects/empty", b"")):
        store.put(key, value)
    with relayed(store) as url:
        client = open_store(url)
        assert isinstance(client, HttpStore)
        assert isinstance(client, BlobStore)
        assert client.get("objects/a") == data
        assert client.get("objects/a", 5, 3 << 20) == data[5 : 3 << 20]
        assert client.get("objects/a", 3 << 20, 9 << 20) == data[3 << 20 :]
        assert client.get("objects/a", 9 << 20) == client.get("objects/empty") == client.get("objects/a", 4, 4) == b""
        assert client.get("a.b/=c+d@e") == b"x"
        assert client.list("") == store.list("")
        assert client.list("objects/") == ["objects/a", "objects/empty"]
        assert pickle.loads(pickle.dumps(client)).get("a.b/=c+d@e") == b"x"
        for key in ("nothing", "objects", "objects/a/b"):
            with pytest.raises(KeyError):
                client.get(key)


def test_nothing_is_written_through_a_relay() -> None:
    client = HttpStore("http://127.0.0.1:1")
    for write in (
        lambda: client.put("a", b""),
        lambda: client.delete("a"),
        lambda: client.compare_and_swap("a", None, b""),
    ):
        with pytest.raises(StoreError, match="is a relay"):
            write()


@pytest.mark.parametrize("key", ["", "../a", "a//b", ".tmp/x"])
def test_a_wild_key_is_refused_on_both_sides(key: str, tmp_path: Path) -> None:
    with relayed(open_store(tmp_path)) as url:
        with pytest.raises(StoreError, match="not allowed"):
            open_store(url).get(key)
        asked = http.client.HTTPConnection(url.removeprefix("http://"), timeout=300)
        asked.request("GET", f"/{key}" if key else "/x", headers={"X-Etude-Range": "9-1"})
        assert asked.getresponse().status == 400
        asked.close()


@pytest.mark.parametrize("prefix", ["../../../../etc/", "/etc/", "objects/../../", ".tmp/", "a//"])
def test_a_wild_prefix_is_refused_on_both_sides(prefix: str, tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/passwd").write_text("x")
    with relayed(open_store(tmp_path / "a/b")) as url:
        with pytest.raises(StoreError, match="not allowed"):
            open_store(url).list(prefix)
        asked = http.client.HTTPConnection(url.removeprefix("http://"), timeout=300)
        asked.request("GET", f"/?prefix={quote(prefix, safe='')}")
        answer = asked.getresponse()
        assert answer.status == 400
        assert b"passwd" not in answer.read()
        asked.close()


def test_a_client_with_another_token_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    store.put("a", b"secret")
    with relayed(store, token="right") as url:
        monkeypatch.setenv("ETUDE_TOKEN", "right")
        assert open_store(url).get("a") == b"secret"
        for token in ("wrong", "", "\u00e9"):
            monkeypatch.setenv("ETUDE_TOKEN", token)
            with pytest.raises(StoreError, match="401") as caught:
                open_store(url).get("a")
            assert "secret" not in str(caught.value)


def test_an_interrupted_read_resumes_where_it_broke_off(tmp_path: Path) -> None:
    data = os.urandom(8 << 20)
    asked = Counter[int]()

    class Store(MemoryStore):
        def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
            asked[start] += 1
            return super().get(key, start, stop)

    store = Store()
    store.put("objects/a", data)
    with relayed(store) as relay, wire(relay, [0, 1000, 3 << 20, 4 << 20]) as url:
        assert HttpStore(url).get("objects/a", 0, len(data) + 1) == data
    assert asked[0] >= 2, "so few bytes are asked for anew"
    assert sum(start > 1 << 20 for start in asked) == 2


def test_a_relay_that_is_gone_is_an_error_that_says_how_often_it_was_asked() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(StoreError, match="cannot be read") as caught:
        HttpStore(url, deadline_s=1.0).get("objects/a")
    assert "refused" in caught.value.facts
    assert "attempts" in caught.value.facts


def test_a_relay_that_says_nothing_is_an_error_at_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(StoreError, match="no response in time"):
            HttpStore(url, silence_s=0.2, deadline_s=0.5).get("objects/a")


def test_a_client_that_takes_nothing_is_let_go_and_another_is_served() -> None:
    store = MemoryStore()
    store.put("objects/large", bytes(64 << 20))
    store.put("small", b"x")
    with relayed(store, at_once=1, send_s=0.2) as url:
        host, _, port = url.removeprefix("http://").rpartition(":")
        with socket.create_connection((host, int(port))) as idle:
            idle.sendall(b"GET /objects/large HTTP/1.1\r\nHost: relay\r\n\r\n")
            assert idle.recv(1)
            assert HttpStore(url).get("small") == b"x"
    with relayed(store) as url:
        assert HttpStore(url).get("objects/large") == bytes(64 << 20)


def test_errors_of_the_store_behind_a_relay_reach_the_client() -> None:
    class Refusing(MemoryStore):
        def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
            raise StoreError("the bucket is on fire", "HTTP 503", hint="run")

    with relayed(Refusing()) as url, pytest.raises(StoreError, match="cannot be read") as caught:
        HttpStore(url, deadline_s=0.5).get("a")
    assert "on fire" in caught.value.facts


@pytest.mark.parametrize(
    "url",
    ["http://", "http://host/path", "http://user:secret@host", "http://:secret@host", "http://host:99999", "http://[x"],
)
def test_a_url_of_another_form_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(StoreError, match="host and a port") as caught:
        open_store(url)
    assert "secret" not in str(caught.value)


def test_a_region_behind_a_relay_downloads_an_object_once(tmp_path: Path) -> None:
    asked = Counter[str]()

    class Far(MemoryStore):
        def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
            asked[key] += 1
            return super().get(key, start, stop)

    far = Far()
    far.put("objects/a", b"x" * 100_000)
    with relayed(CachedStore(far, tmp_path / "relay")) as url:
        for i in range(3):
            assert open_store(url, cache=tmp_path / f"engine-{i}").get("objects/a", 0, 100_001) == b"x" * 100_000
    assert asked["objects/a"] == 1


@contextmanager
def answering(status: str, body: bytes) -> Iterator[str]:
    """Run a server with one response to every request; yields its URL."""
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    near, _ = listener.accept()
                except OSError:
                    return
                with near:
                    near.recv(65536)
                    near.sendall(head + body)

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("body", [b"[" * 200_000, b"[1]", b'["../x"]', b'["other/key"]', b'"manifests/"', b"\xff"])
def test_a_listing_that_no_relay_gives_is_refused(body: bytes) -> None:
    with answering("200 OK", body) as url, pytest.raises(StoreError, match="cannot be listed") as caught:
        HttpStore(url).list("manifests/")
    assert caught.value.facts == "the response is not a list of keys"


def test_a_refusal_that_cannot_be_read_is_one() -> None:
    with answering("400 Bad Request", b"[" * 60_000) as url, pytest.raises(StoreError, match="be read") as caught:
        HttpStore(url).get("key")
    assert caught.value.facts == "HTTP 400"


def test_a_range_beyond_all_memory_has_what_is_there(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.put("key", b"0123456789")
    with relayed(store) as url:
        for held in (store, HttpStore(url)):
            assert held.get("key", 2, 10**18 - 1) == b"23456789"
            assert held.get("key", 10**17, 10**18 - 1) == b""
