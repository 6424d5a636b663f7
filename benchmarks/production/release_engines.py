"""Releases on engines of one kind, behind `etude serve --releases`: how fast promotion and rollback reach the engines.

    python -m benchmarks.production.release_engines [--engine vllm] [--seconds 10]

A run with three versions of small random weights is served. Users have conversations of some turns, one after the
other; every second request is streamed. A canary gets half of the users, is promoted, and is rolled back; then a
canary of the third version is rolled back before it is promoted.

- `switch_s`: from the call that moves a branch until the engine that follows it has the version.
- `last_old_s`: how long after that call the last request was sent that the other version answered. For users a rollback
  is complete then.
- `sessions`: conversations with an answer, and those of them that an answer of another version continued.
  `sessions_dropped`: conversations with an answer of which a later turn failed.
- `wrong`: answers of a version that their user does not get, among requests that were sent while no release changed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import psutil
import torch

from benchmarks.report import report
from etude.config import to_toml
from etude.errors import DeadlineExceeded
from etude.harness import chat_template
from etude.harness.chat import SPECIAL_TOKENS
from etude.inference import EngineConfig
from etude.loop.config import RunConfig
from etude.loop.locations import weights_store
from etude.models import ModelConfig, Transformer, hf_views, save_model
from etude.numerics.config import Mode, NumericsConfig
from etude.records import Version
from etude.releases import Arm, GateResult, Releases, ReleaseSettings, arm_of
from etude.releases.settings import Metric, SuiteGate
from etude.run import RunFolder
from etude.seams import BlobStore
from etude.training.tokenizer import train_tokenizer
from etude.weights import Channel, Tensor
from etude.weights.chain import branches

MODEL = ModelConfig(
    vocab_size=320, hidden_size=128, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32, expert_size=128,
    num_experts=8, top_k=2, context_tokens=512,
)  # fmt: skip
CHANGED = 0.02  # share of the weights that differ between two versions
SHARES = (50, 100)
SETTINGS = ReleaseSettings(gate=(SuiteGate("repair"),), metrics=(Metric("kept"),), shares=SHARES)
TOKENS, CLIENTS, USERS, TURNS = 24, 3, 13, 6  # users of each client, turns of a conversation
READY_S, SWITCH_S = 1800.0, 120.0
SETTLE_S = 0.5  # after a change: the gateway reads the release anew every .2 s


@dataclass(frozen=True)
class Answer:
    """One request: its user, when it was sent and answered, the version of the answer; "" for one that failed."""

    user: str
    sent: float
    done: float
    version: str


@dataclass
class Session:
    """A conversation: its messages, and the version of each answer."""

    messages: list[dict[str, str]]
    versions: list[str]
    dropped: bool = False


def make_run(folder: Path) -> tuple[RunFolder, list[Version]]:
    """A run with three published versions, whose branches are at the first."""
    config = RunConfig(numerics=NumericsConfig(Mode.NATIVE), engine=EngineConfig(max_sequences=8, context_tokens=512))
    run = RunFolder.create(folder / "runs" / "product", config_toml=to_toml(config), seed=0)
    checkpoint, model = run / "checkpoints" / "mid", Transformer(MODEL, seed=1)
    words = ["edit m.py 2 return 1", "submit", "ok", "write 12"] * 20
    train_tokenizer(
        words, folder / "tokenizer", vocab_size=320, special_tokens=SPECIAL_TOKENS, chat_template=chat_template()
    )
    save_model(model, checkpoint, dtype="f32", assets=folder / "tokenizer")
    views = {name: view.detach().numpy().view(np.uint32).copy() for name, view in hf_views(model).items()}
    rng, store, versions = np.random.default_rng(0), weights_store(run), list[Version]()
    for step in (1, 2, 3):
        tensors = {name: Tensor("f32", codes.shape, codes.ravel().copy()) for name, codes in views.items()}
        parent = versions[-1] if versions else None
        versions.append(Channel(store).publish(tensors, step=step, parent=parent, rollout_ids=[]).version)
        for codes in views.values():
            codes[rng.random(codes.shape) < CHANGED] ^= 1 << 12
    for branch in ("stable", "canary"):
        branches.point(store, "policy", versions[0], branch=branch)
    return run, versions


class Clients:
    """Threads that send requests to the gateway until `stop`. `answers` has one entry for each request."""

    def __init__(self, url: str) -> None:
        self.answers, self.errors, self.sessions = list[Answer](), list[str](), list[Session]()
        self._url, self._stop = url, threading.Event()
        self._threads = [threading.Thread(target=self._use, args=(i,)) for i in range(CLIENTS)]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(300)

    def _use(self, number: int) -> None:
        talks = dict[str, Session]()
        with httpx.Client(timeout=120) as http:
            for turn in range(number, 10**9, CLIENTS):
                if self._stop.is_set():
                    return
                user, sent, version = f"user-{number}-{turn // CLIENTS % USERS}", time.perf_counter(), ""
                talk = talks.get(user)
                if talk is None or len(talk.versions) >= TURNS:
                    talk = talks[user] = Session([], [])
                    self.sessions.append(talk)
                talk.messages.append({"role": "user", "content": f"write {turn}"})
                try:
                    text, version = _ask(http, self._url, user, talk.messages, turn)
                    talk.messages.append({"role": "assistant", "content": text})
                    talk.versions.append(version)
                except (httpx.HTTPError, RuntimeError, msgspec.DecodeError) as error:
                    self.errors.append(f"{user}: {error!r}")
                    talk.dropped = bool(talk.versions)
                    del talks[user]
                self.answers.append(Answer(user, sent, time.perf_counter(), version))


def _ask(http: httpx.Client, url: str, user: str, messages: list[dict[str, str]], turn: int) -> tuple[str, str]:
    """Ask for `TOKENS` tokens. Returns the answer's text and version. Raises `RuntimeError` if it is not whole."""
    body: dict[str, Any] = {"model": "product", "max_tokens": TOKENS, "logit_bias": {"1": -100}, "seed": turn}
    body |= {"messages": messages, "stream": bool(turn % 2)}
    answer = http.post(f"{url}/v1/chat/completions", json=body, headers={"x-etude-user": user})
    if answer.status_code != 200:
        raise RuntimeError(answer.text)
    if not turn % 2:
        found = answer.json()
        return found["choices"][0]["message"]["content"] or "", str(found["system_fingerprint"])
    parts = [msgspec.json.decode(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    if not answer.text.rstrip().endswith("data: [DONE]") or any("error" in part for part in parts):
        raise RuntimeError(answer.text[-300:])
    told = [one["delta"].get("content") or "" for part in parts for one in part["choices"]]
    return "".join(told), str(parts[-1]["system_fingerprint"])


class Site:
    """What serves: the gateway's URL, and the URLs of its engines by branch."""

    def __init__(self, url: str, engines: dict[str, str], store: BlobStore, releases: Releases) -> None:
        self.url, self.engines, self.store, self.releases = url, engines, store, releases

    def switched(self, change: Callable[[], object], wanted: dict[str, Version]) -> dict[str, float]:
        """Make a change and return, for each branch, after how many seconds its engine has the wanted version."""
        found, threads = dict[str, float](), list[threading.Thread]()

        def watch(branch: str, version: Version) -> None:
            with httpx.Client(timeout=30, headers={"accept": "application/json"}) as http:
                while time.perf_counter() - begun < SWITCH_S:
                    if http.get(f"{self.engines[branch]}/info").json()["version"] == msgspec.to_builtins(version):
                        found[branch] = time.perf_counter() - begun
                        return
                    time.sleep(0.01)

        begun = time.perf_counter()
        for branch, version in wanted.items():
            threads.append(threading.Thread(target=watch, args=(branch, version)))
            threads[-1].start()
        change()
        for thread in threads:
            thread.join()
        if missing := wanted.keys() - found.keys():
            raise DeadlineExceeded(f"no {missing} after {SWITCH_S} s", hint="see the output of the gateway")
        return {branch: round(seconds, 3) for branch, seconds in found.items()}


@contextlib.contextmanager
def site(run: RunFolder, kind: str, releases: Releases, file: Path) -> Iterator[Site]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    argv = [sys.executable, "-m", "etude.cli", "serve", str(run.path), "--port", str(port)]
    argv += ["--releases", str(file), "--engine", kind]
    gateway = subprocess.Popen(argv, cwd=file.parent, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        url, begun = f"http://127.0.0.1:{port}", time.monotonic()
        while gateway.poll() is None and time.monotonic() - begun < READY_S:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{url}/v1/models").status_code == 200:
                    break
            time.sleep(0.5)
        else:
            raise DeadlineExceeded("the gateway does not serve", f"exit code {gateway.poll()}", hint="see its output")
        yield Site(url, engines_of(gateway.pid), weights_store(run), releases)
    finally:
        gateway.send_signal(signal.SIGINT)
        try:
            gateway.wait(120)
        finally:
            gateway.kill()


def engines_of(pid: int) -> dict[str, str]:
    """The URLs of a gateway's engines by the branch that each follows: where its child processes listen."""
    found = {}
    for child in psutil.Process(pid).children():
        words = child.cmdline()
        if "--branch" in words:
            [port] = [one.laddr.port for one in child.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
            found[words[words.index("--branch") + 1]] = f"http://127.0.0.1:{port}"
    return found


def begin(site: Site, stable: Version, candidate: Version) -> str:
    """Begin a release whose gate is passed, as a canary of half of the users. Returns the salt of its assignment."""
    settings, releases = SETTINGS, site.releases
    releases.begin(site.store, candidate, settings, channel="policy", location=str(site.store.root), now=time.time())  # type: ignore[attr-defined]
    releases.gate(GateResult(candidate=str(candidate), stable=str(stable), suites=(), failures=()), now=time.time())
    return releases.newest().salt


def measure(kind: str, seconds: float) -> dict[str, Any]:
    """Serve, release, promote and roll back, and return the numbers."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        run, (first, second, third) = make_run(folder)
        file = folder / "releases.sqlite"
        releases = Releases(file)
        with site(run, kind, releases, file) as here, Clients(here.url) as clients:
            asked, settled, phases = clients.answers, list[tuple[float, float, str, Version, Version]](), {}

            def rest(salt: str, stable: Version, canary: Version) -> None:
                time.sleep(SETTLE_S)
                began = time.perf_counter()
                time.sleep(seconds)
                settled.append((began, time.perf_counter(), salt, stable, canary))

            def phase(name: str, change: Callable[[], object], wanted: dict[str, Version], old: Version | None) -> None:
                at = time.perf_counter()
                switch_s = here.switched(change, wanted)
                time.sleep(seconds)
                late = [one.sent - at for one in asked if one.sent > at and old and one.version == str(old)]
                running = sum(one.sent < at < one.done for one in asked)
                last = round(max(late, default=0.0), 3)
                phases[name] = {"switch_s": switch_s, "requests_running": running, "last_old_s": last}
                print(f"{name}: {phases[name]}", flush=True)

            def advance() -> object:
                return releases.advance(here.store, now=time.time())

            def move(to: str) -> Callable[[], object]:
                change = getattr(releases, to)
                return lambda: change(here.store, reason="measured", now=time.time())

            salt = begin(here, first, second)
            phase("canary", advance, {"canary": second}, None)
            rest(salt, first, second)
            phase("promotion", move("promote"), {"stable": second}, first)
            phase("rollback of a promoted version", move("rollback"), {"stable": first, "canary": first}, second)
            salt = begin(here, first, third)
            phase("second canary", advance, {"canary": third}, None)
            rest(salt, first, third)
            phase("rollback of a canary", move("rollback"), {"canary": first}, third)
        wrong, talks = 0, [one for one in clients.sessions if one.versions]
        for began, ended, salt, stable, canary in settled:
            inside = [one for one in asked if began < one.sent and one.done < ended and one.version]
            wanted = {Arm.CANARY: str(canary), Arm.STABLE: str(stable)}
            wrong += sum(one.version != wanted[arm_of(salt, one.user, SHARES[0])] for one in inside)
        by_version = {str(v): sum(one.version == str(v) for one in asked) for v in (first, second, third)}
        releases.close()
        return {
            "engine": kind,
            "load": round(os.getloadavg()[0], 1),
            "requests": len(asked),
            "failed": len(clients.errors),
            "errors": clients.errors[:3],
            "answers_of_steps_1_2_3": list(by_version.values()),
            "of_no_version": len(asked) - sum(by_version.values()),
            "settled_requests": sum(b < one.sent and one.done < e for b, e, *_ in settled for one in asked),
            "wrong": wrong,
            "sessions": [len(talks), sum(len(set(one.versions)) > 1 for one in talks)],
            "sessions_dropped": sum(one.dropped for one in talks),
            "phases": phases,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="vllm", choices=["reference", "vllm"])
    parser.add_argument("--seconds", type=float, default=10.0, help="length of each phase")
    args = parser.parse_args()
    torch.set_num_threads(1)
    report(f"release_engines_{args.engine}", measure(args.engine, args.seconds))


if __name__ == "__main__":
    main()
