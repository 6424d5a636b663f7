"""The gateway of a served run in a process of its own, which is killed, and clients that use it all the time.

The gateway is `etude serve --releases --capture --feedback`, with its engines. Each client asks, whole and streamed,
and sends a signal about each answer. It tries again as those of `examples/product` do: OpenAI's client, whose errors it
takes as "ask again", and `send_feedback`."""

from __future__ import annotations

import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import openai

from etude.privacy import Level, PrivacyFolder, Subject
from etude.signals import FeedbackFailed, send_feedback

ORGANISATION, NUM_CLIENTS = "local", 2
READY_S, ANSWERED_S = 900.0, 1800.0
"""Longest time until a gateway that was started serves, and until a request is answered by one of its tries."""
WRITTEN_S = 30.0
"""An answer is captured within this time, if the gateway is not killed before: only its queue is lost then."""


class ServedGateway:
    """Serves the run `model` in the folder `path`. `cli`: the command line there. `pause_s`: what each client waits
    between two requests, and before it asks again. Close it."""

    def __init__(self, path: Path, model: str, cli: Any, *, pause_s: float = 1.0) -> None:
        self.path, self.model, self.cli, self._pause_s = path, model, cli, pause_s
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.log = path / "gateway.log"
        self.answered = dict[str, float]()  # when each answer was whole, by its id without prefix
        self.acknowledged = dict[
            str, float
        ]()  # the value of each signal that the gateway stored, by the id of its answer
        self.counts, self.failures = Counter[str](), list[str]()
        self._killed_at = list[float]()
        self._process: subprocess.Popen[str] | None = None
        self._stop, self._clients = threading.Event(), list[threading.Thread]()
        with PrivacyFolder(path / "privacy") as folder:
            folder.consent.set(Subject.of(ORGANISATION), Level.TRAIN)

    def check(self) -> None:
        """Start the gateway as soon as there is a file of releases, and its clients. Raises `AssertionError` if it has
        ended by itself, or a client has failed."""
        if self._process is None and (self.path / "releases.sqlite").is_file():
            self._start()
            self._clients = [threading.Thread(target=self._use, args=(i,), daemon=True) for i in range(NUM_CLIENTS)]
            for client in self._clients:
                client.start()
        assert self._process is None or self._process.poll() is None, self.log.read_text()[-4000:]
        assert not self.failures, self.failures

    def kill(self) -> bool:
        """Kill the gateway, and start it again. Returns whether it was there."""
        if self._process is None:
            return False
        self._process.kill()
        self._process.wait(60)
        self._killed_at.append(time.time())
        self._start()
        return True

    def close(self) -> None:
        """Let each client end its request, and end the gateway as by Ctrl-C."""
        self._stop.set()
        for client in self._clients:
            client.join(2 * ANSWERED_S)
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(120)
            finally:
                self._process.kill()

    def facts(self, privacy: PrivacyFolder) -> dict[str, int]:
        """Counts after `close`. Those that begin with bad_ must be 0."""
        records = {one: len(privacy.records.of_response(one)) for one in self.answered}
        lost = [one for one, number in records.items() if not number]
        early = [one for one in lost if any(0 <= at - self.answered[one] < WRITTEN_S for at in self._killed_at)]
        return {
            "answers": len(self.answered),
            "answers_asked_again": self.counts["again"],
            "answers_of_a_killed_queue": len(early),
            "signals_of_the_gateway": len(self.acknowledged),
            "bad_answers_lost": len(lost) - len(early),
            "bad_answers_captured_twice": sum(number > 1 for number in records.values()),
            "bad_answers_cut": self.counts["cut"],
            "bad_signals_refused": self.counts["refused"],
            "bad_requests_unanswered": self.counts["unanswered"],
        }

    def _start(self) -> None:
        files = ["--releases", "releases.sqlite", "--capture", "privacy", "--feedback", "feedback.sqlite"]
        self._process = self.cli.start("serve", self.model, "--port", str(self.port), *files, log=self.log)

    def _use(self, number: int) -> None:
        """Ask and send signals until the end."""
        url, user, turn = f"http://127.0.0.1:{self.port}/v1", f"client-{number}", 0
        try:
            with openai.OpenAI(base_url=url, api_key="none", timeout=120, max_retries=0) as client:
                while not self._stop.is_set():
                    turn += 1
                    answer_id = self._ask(client, user, turn)
                    if answer_id is None:
                        continue
                    self.answered[answer_id] = time.time()
                    value, name = float(turn % 2), f"{user}-{turn}"
                    try:
                        found = send_feedback(
                            url, "", answer_id, user=user, signal_id=name, deadline_s=READY_S, kept=value
                        )
                    except FeedbackFailed as error:
                        self.counts["refused"] += 1
                        print(f"{name}: {error}")
                        continue
                    assert found["kept"] in ("stored", "duplicate"), found
                    self.acknowledged[answer_id] = value
                    self._stop.wait(self._pause_s)
        except Exception as error:  # noqa: BLE001  `check` raises it
            self.failures.append(f"{user}: {error!r}")

    def _ask(self, client: openai.OpenAI, user: str, turn: int) -> str | None:
        """Ask until there is a whole answer; every second request is streamed. Returns its id without prefix, or None
        at the end."""
        end, stream = time.monotonic() + ANSWERED_S, bool(turn % 2)
        asked: Any = {"model": self.model, "messages": [{"role": "user", "content": f"write {turn}"}], "max_tokens": 8}
        asked["extra_headers"] = {"x-etude-user": user}
        while time.monotonic() < end:
            try:
                if not stream:
                    answer = client.chat.completions.create(**asked)
                    finish, answer_id = answer.choices[0].finish_reason, answer.id
                else:
                    finish, answer_id = "", ""
                    for chunk in client.chat.completions.create(stream=True, **asked):
                        answer_id = chunk.id
                        finish = chunk.choices[0].finish_reason or finish
                if finish:
                    return answer_id.removeprefix("chatcmpl-")
                self.counts["cut"] += 1
            except (httpx.HTTPError, openai.APIError) as error:  # of httpx: a stream that was cut
                if getattr(error, "status_code", 503) < 500:
                    raise
                self.counts["again"] += 1
            if self._stop.wait(self._pause_s) and not self._is_up():
                return None
        self.counts["unanswered"] += 1
        return None

    def _is_up(self) -> bool:
        return self._process is not None and self._process.poll() is None
