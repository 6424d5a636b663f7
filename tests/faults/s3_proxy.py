"""A proxy in front of the S3 server that injects faults of networks and servers.

Each matching request takes the next fault of the plan; others are passed on. Requests are counted.
"""

from __future__ import annotations

import http.client
import threading
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

LONGEST_HANG_S = 30.0
REFUSALS = {
    "500": (500, "InternalError"),
    "slow down": (503, "SlowDown"),
    "conflict": (409, "ConditionalRequestConflict"),
    "forbidden": (403, "SignatureDoesNotMatch"),
}


class Proxy(ThreadingHTTPServer):
    """`play("500", "hang", on="PUT", path="pointers/")` says what becomes of the next two such requests.

    Tricks: those of REFUSALS; "hang" (no answer), "drop" (the connection closes), "swallow" (the request is carried
    out, and its answer lost), "cut" (half the body, then the connection closes), "shorten" (half the body, and a length
    that fits), "meet" (wait for `together` such requests at once).
    """

    daemon_threads = True

    def __init__(self, upstream: str, *, together: int = 1) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = urlsplit(upstream).netloc
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.asked: Counter[str] = Counter()  # by method
        self.peak = 0
        self.released = threading.Event()
        self.meeting = threading.Barrier(together)
        self.hanging = threading.Event()
        self._now = 0
        self._lock = threading.Lock()
        self._plan: deque[str] = deque()
        self._on, self._path = "", ""

    def play(self, *tricks: str, on: str = "", path: str = "") -> None:
        """Tricks for the next requests with this method whose path holds `path`. Forgets what was planned and asked."""
        with self._lock:
            self._plan, self._on, self._path = deque(tricks), on, path
            self.asked.clear()

    @contextmanager
    def serving(self) -> Iterator[None]:
        """While a request is being answered."""
        with self._lock:
            self._now += 1
            self.peak = max(self.peak, self._now)
        try:
            yield
        finally:
            with self._lock:
                self._now -= 1

    def trick(self, method: str, path: str) -> str:
        """What becomes of this request; "" for nothing."""
        with self._lock:
            self.asked[method] += 1
            fits = self._plan and method in (self._on or method) and self._path in path
            return self._plan.popleft() if fits else ""

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect."""


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    data: bytes
    length: int  # what is said; cut short when it is more than there is


class _Handler(BaseHTTPRequestHandler):
    server: Proxy

    def _serve(self) -> None:
        self.close_connection = True
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        if len(body) < length:  # the client is gone
            return
        with self.server.serving():  # over before the client can know the answer, and ask the next
            answer = self._answer(self.server.trick(self.command, self.path), body)
        if answer is not None:
            self.send_response_only(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(answer.length))
            self.end_headers()
            self.wfile.write(answer.data)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve

    def _answer(self, trick: str, body: bytes) -> Answer | None:
        if trick in REFUSALS:
            status, code = REFUSALS[trick]
            said = f"signed {self.headers.get('Authorization')}"  # as real servers do, too
            text = f"<Error><Code>{code}</Code><Message>{said}</Message></Error>".encode()
            return Answer(status, {}, text, len(text))
        if trick in ("hang", "drop"):
            if trick == "hang":
                self.server.hanging.set()
                self.server.released.wait(LONGEST_HANG_S)
            return None
        if trick == "meet":
            self.server.meeting.wait(LONGEST_HANG_S)
        answer = self._pass_on(body)
        if trick == "swallow":
            return None
        if trick in ("cut", "shorten"):
            half = answer.data[: len(answer.data) // 2]
            return replace(answer, data=half, length=len(half) if trick == "shorten" else answer.length)
        return answer

    def _pass_on(self, body: bytes) -> Answer:
        upstream = http.client.HTTPConnection(self.server.upstream, timeout=LONGEST_HANG_S)
        try:
            upstream.request(self.command, self.path, body, dict(self.headers))
            got = upstream.getresponse()
            data = got.read()
        finally:
            upstream.close()
        ours = ("connection", "content-length", "transfer-encoding")
        headers = {name: value for name, value in got.headers.items() if name.lower() not in ours}
        return Answer(got.status, headers, data, int(got.headers.get("Content-Length") or len(data)))

    def log_message(self, format: str, *args: object) -> None:
        pass
