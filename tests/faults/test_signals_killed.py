"""kill -9 of a gateway that takes signals: what it acknowledged is there, and nothing counts twice."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from tests.served_gateway import ServedGateway

from etude.privacy import Level, PrivacyFolder, Subject
from etude.signals import FeedbackFailed, FeedbackFile, send_feedback

ROOT = Path(__file__).parents[2]
SERVES = """
import asyncio, sys
from pathlib import Path
from tests.unit.harness.tokeniser import laptop_chat
from etude.gateway import GatewayConfig, ServedModel, create_app, serving
from etude.privacy import CaptureWriter
from etude.signals import FeedbackWriter
from etude.testing import ScriptedEngine, StreamingPolicy

async def main():
    config = GatewayConfig(port=int(sys.argv[3]))
    chat = laptop_chat()
    policy = StreamingPolicy(ScriptedEngine([[*chat.encode("a").tolist(), chat.end_id]] * 10_000, context_tokens=512))
    model = ServedModel(policy, chat, name="small", context_tokens=512, config=config)
    privacy = Path(sys.argv[2]) if sys.argv[2] else None
    feedback = FeedbackWriter(Path(sys.argv[1]), privacy=privacy, cap=10**6)
    recorder = CaptureWriter(privacy) if sys.argv[4:] else None
    app = create_app([model], config=config, recorder=recorder, feedback=feedback)
    async with serving(app, config=config) as url:
        print(url, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def started(*words: str, log: Path | None = None) -> subprocess.Popen[str]:
    """A gateway in a process of its own. `words`: its arguments; `log`: where its output goes, None for a pipe."""
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    with contextlib.nullcontext(subprocess.PIPE) if log is None else log.open("a") as out:
        argv, env = [sys.executable, "-c", SERVES, *words], {**os.environ, "PYTHONPATH": paths}
        return subprocess.Popen(argv, env=env, text=True, stdout=out)


def serving(path: Path, privacy: Path | None, port: str = "0") -> tuple[subprocess.Popen[str], str]:
    """A gateway in a process of its own, and its URL."""
    process = started(str(path), "" if privacy is None else str(privacy), port)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("http://"):
            return process, line.strip()
    raise AssertionError("the gateway did not start")


class Client(threading.Thread):
    """Sends signals about one answer until it is stopped; what was acknowledged is in `acknowledged`."""

    def __init__(self, url: str, response_id: str, name: str) -> None:
        super().__init__(daemon=True)
        self.url, self.response_id, self.label = url, response_id, name
        self.sent, self.acknowledged, self.told = 0, set[str](), Counter[str]()
        self.stop = threading.Event()

    def run(self) -> None:
        while not self.stop.is_set():
            signal_id = f"{self.label}-{self.sent}"
            self.sent += 1
            try:
                self.send(signal_id)
            except FeedbackFailed:
                return  # killed meanwhile: nobody knows whether it was stored

    def send(self, signal_id: str, deadline_s: float = 0.0) -> None:
        how = {"signal_id": signal_id, "at": 1.8e9, "deadline_s": deadline_s}
        done = send_feedback(self.url, "", self.response_id, **how, kept=1)
        self.told.update(done.values())
        self.acknowledged.add(signal_id)


@pytest.mark.parametrize("seed", range(3))
def test_no_acknowledged_signal_is_lost_and_none_counts_twice(tmp_path: Path, seed: int) -> None:
    import httpx

    path, privacy = tmp_path / "f.sqlite", tmp_path / "privacy" if seed % 2 else None
    if privacy is not None:
        with PrivacyFolder(privacy) as folder:
            folder.consent.set(Subject.of("local"), Level.TRAIN)
    process, url = serving(path, privacy)
    port = url.rsplit(":", 1)[1].removesuffix("/v1")
    try:
        body = {"model": "small", "messages": [{"role": "user", "content": "hi"}]}
        ids = [httpx.post(f"{url}/chat/completions", json=body, timeout=60).json()["id"] for _ in range(8)]
        clients = [Client(url, one, str(i)) for i, one in enumerate(ids)]
        for _ in range(2):
            for client in clients:
                client.start()
            time.sleep(random.Random(seed).uniform(0.2, 0.6))
            process.send_signal(signal.SIGKILL)
            process.communicate(timeout=60)
            for client in clients:
                client.stop.set()
                client.join(60)
            process, url = serving(path, privacy, port)
            for client in clients:  # as a client does: it repeats what was not acknowledged, and some that was
                for number in range(client.sent):
                    signal_id = f"{client.label}-{number}"
                    if signal_id not in client.acknowledged or number % 7 == 0:
                        client.send(signal_id, deadline_s=60)
            fresh = [Client(url, one.response_id, one.label) for one in clients]
            for new, old in zip(fresh, clients, strict=True):
                new.sent, new.acknowledged, new.told = old.sent, old.acknowledged, old.told
            clients = fresh
    finally:
        process.kill()
        process.communicate(timeout=60)
    with (
        PrivacyFolder(tmp_path / "privacy") as folder,
        FeedbackFile(path, privacy=folder if privacy else None) as file,
    ):
        found = Counter(one.response_id for one in file.signals())
    for client in clients:
        assert client.sent == len(client.acknowledged) > 10
        assert found[client.response_id.removeprefix("chatcmpl-")] == client.sent
    assert sum(client.told["duplicate"] for client in clients) > 0


class Capturing:
    """Starts gateways that capture, in place of `etude serve` with its engines."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def start(self, *words: str | Path, log: Path) -> subprocess.Popen[str]:
        files = str(self.path / "feedback.sqlite"), str(self.path / "privacy")
        return started(*files, str(words[words.index("--port") + 1]), "capture", log=log)


def test_clients_that_try_again_lose_no_answer_and_no_signal_when_the_gateway_is_killed(tmp_path: Path) -> None:
    draw = random.Random(1)
    (tmp_path / "releases.sqlite").touch()  # without it the gateway is not started
    gateway = ServedGateway(tmp_path, "small", Capturing(tmp_path), pause_s=0.05)
    try:
        for kills_left in range(6, -1, -1):
            number, end = len(gateway.acknowledged), time.monotonic() + 600
            while len(gateway.acknowledged) < number + 5:
                gateway.check()
                assert time.monotonic() < end, "no answers"
                time.sleep(0.05)
            time.sleep(draw.uniform(0.0, 0.3))
            assert not kills_left or gateway.kill()
    finally:
        gateway.close()
    with PrivacyFolder(tmp_path / "privacy") as folder, FeedbackFile(tmp_path / "feedback.sqlite", privacy=folder) as f:
        facts, signals = gateway.facts(folder), Counter(one.response_id for one in f.signals())
    assert {name: number for name, number in facts.items() if name.startswith("bad_") and number} == {}, facts
    assert facts["answers"] >= 30
    assert facts["answers_asked_again"] > 0
    assert signals.keys() >= gateway.acknowledged.keys()
    assert set(signals.values()) == {1}
