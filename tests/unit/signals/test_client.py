"""The clients in Python and JavaScript, against a gateway, also one that is away for a while."""

from __future__ import annotations

import asyncio
import email.utils
import json
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.unit.gateway.sdk import run
from tests.unit.gateway.test_feedback import ask, served
from tests.unit.gateway.test_serving import limits

from etude.gateway import Keys
from etude.signals import FeedbackFailed, FeedbackFile, FeedbackWriter, send_feedback

ROOT = Path(__file__).parents[3]
MODULE = ROOT / "clients" / "javascript" / "etude-feedback.mjs"
NODE = """
import {{ sendFeedback }} from "{module}";
const [url, key, id, signals, options] = JSON.parse(process.argv[2]);
try {{
  console.log(JSON.stringify(await sendFeedback(url, key, id, signals, options)));
}} catch (error) {{
  console.log(JSON.stringify({{ error: error.name, status: error.status, message: error.message }}));
}}
"""
Send = Callable[..., dict[str, Any]]


def by_python(url: str, key: str, response_id: str, signals: dict[str, Any], **options: Any) -> dict[str, Any]:
    try:
        return dict(send_feedback(url, key, response_id, **options, **signals))
    except FeedbackFailed as error:
        return {"error": "FeedbackFailed", "status": error.status, "message": str(error)}


def by_node(folder: Path) -> Send:
    import subprocess

    script = folder / "send.mjs"
    script.write_text(NODE.format(module=MODULE.as_uri()))

    def send(url: str, key: str, response_id: str, signals: dict[str, Any], **options: Any) -> dict[str, Any]:
        names = {"signal_id": "signalId", "deadline_s": "deadlineMs"}
        told = {names.get(name, name): 1000 * one if name == "deadline_s" else one for name, one in options.items()}
        argv = ["node", str(script), json.dumps([url, key, response_id, signals, told])]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True)
        return dict(json.loads(done.stdout))

    return send


@pytest.fixture(params=["python", "javascript"])
def send(request: pytest.FixtureRequest, tmp_path: Path) -> Send:
    if request.param == "python":
        return by_python
    if shutil.which("node") is None:
        pytest.skip("needs node")
    return by_node(tmp_path)


def test_a_client_sends_signals_of_its_user_once(tmp_path: Path, send: Send) -> None:
    async def work() -> None:
        writer = FeedbackWriter(tmp_path / "f.sqlite")
        async with served(writer, keys=Keys({"acme": limits("a" * 20)}), key="a" * 20) as http:
            url, key = str(http.base_url), "a" * 20
            response_id = await ask(http, "bob")
            signals = {"kept": True, "reverted": False, "rated": 0.25}
            options = {"user": "bob", "signal_id": "mine", "at": 1.8e9, "answer": 0}
            for status in ("stored", "duplicate"):
                told = await asyncio.to_thread(send, url, key, response_id, signals, **options)
                assert told == dict.fromkeys(signals, status)
            assert await asyncio.to_thread(send, url, key, response_id, {"kept": True}, user="bob") == {
                "kept": "stored"
            }
            other = await asyncio.to_thread(send, url, key, response_id, {"kept": True}, user="eve")
            assert (other["error"], other["status"]) == ("FeedbackFailed", 404)
            assert "hint: " in other["message"]
            wrong = await asyncio.to_thread(send, url, "wrong", response_id, {"kept": True}, user="bob")
            assert wrong["status"] == 401
        assert await asyncio.to_thread(writer.close, 60)
        with FeedbackFile(tmp_path / "f.sqlite") as file:
            told = Counter((one.name, one.value) for one in file.signals())
            assert told == Counter({("kept", 1.0): 2, ("reverted", 0.0): 1, ("rated", 0.25): 1})

    run(work)


class Unreliable(BaseHTTPRequestHandler):
    """Passes requests on to a gateway; says 503 to the first, and cuts off the answer to the second."""

    url, retry_after = "", "0"
    bodies: list[bytes]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.bodies.append(body)
        if len(self.bodies) == 1:
            self.send_response(503)
            self.send_header("retry-after", self.retry_after)
            self.send_header("content-length", "0")
            self.end_headers()
            return
        answer = httpx.post(f"{self.url}feedback", content=body, headers={"content-type": "application/json"})
        if len(self.bodies) == 2:
            return  # stored, and the connection is closed without a word
        self.send_response(answer.status_code)
        self.send_header("content-length", str(len(answer.content)))
        self.end_headers()
        self.wfile.write(answer.content)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize("retry_after", ["0", "a date"])
def test_a_client_repeats_what_was_not_answered_under_the_same_ids(
    tmp_path: Path, send: Send, retry_after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    date = int(time.time()) + 4.0
    told_date = email.utils.formatdate(date, usegmt=True)
    monkeypatch.setattr(Unreliable, "retry_after", told_date if retry_after == "a date" else retry_after)

    async def work() -> None:
        writer = FeedbackWriter(tmp_path / "f.sqlite")
        async with served(writer) as http:
            Unreliable.url, Unreliable.bodies = str(http.base_url), []
            server = ThreadingHTTPServer(("127.0.0.1", 0), Unreliable)
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            try:
                url = f"http://127.0.0.1:{server.server_port}/v1"
                told = await asyncio.to_thread(send, url, "", await ask(http), {"kept": True})
            finally:
                await asyncio.to_thread(server.shutdown)
                server.server_close()
                thread.join(60)
            assert told == {"kept": "duplicate"}
            assert retry_after == "0" or time.time() >= date
            assert len(Unreliable.bodies) == 3
            assert len(set(Unreliable.bodies)) == 1
            assert writer.counts()["stored"] == 1
        assert await asyncio.to_thread(writer.close, 60)

    run(work)


def test_a_gateway_that_stays_away_is_told_at_the_deadline(send: Send) -> None:
    told = send("http://127.0.0.1:9/v1", "", "chatcmpl-1", {"kept": True}, deadline_s=1)
    assert (told["error"], told["status"]) == ("FeedbackFailed", 0)
    assert "before the deadline" in told["message"]


def test_the_python_client_needs_no_other_file(tmp_path: Path) -> None:
    """A product may copy it."""
    import subprocess
    import sys

    copied = tmp_path / "client.py"
    shutil.copy(ROOT / "src" / "etude" / "signals" / "client.py", copied)
    code = "import sys, client; sys.exit(any(m.split('.')[0] in ('etude', 'msgspec') for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path).returncode == 0
