"""Signals of product use: how many a gateway takes, what a signed id costs, and how fast the join with answers is.

    python -m benchmarks.production.feedback [--signals 5000] [--folder DIR]

Over HTTP, each client sends one request after the other, and waits until its signals are on the disk; clients and
gateway share the processor. `--folder` is where the files are; put it on the disk that is to be measured.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from tests.served_answers import served_answer
from tests.unit.harness.tokeniser import laptop_chat

from benchmarks.report import report
from etude.gateway import GatewayConfig, ServedModel, create_app, serving
from etude.privacy import CaptureWriter, Level, PrivacyFolder, Subject
from etude.signals import FeedbackFile, FeedbackWriter, GivenSignal, ResponseIds, settled_answers
from etude.signals.file import Sent
from etude.signals.join import GRACE_S
from etude.testing import ScriptedEngine

HOUR_S = 3600.0


def signed_ids(number: int = 20_000) -> dict[str, float]:
    """Microseconds for a new id, and for a verification."""
    ids, begin = ResponseIds(bytes(32)), time.perf_counter()
    made = [ids.new("acme", "bob", "laptop") for _ in range(number)]
    middle = time.perf_counter()
    assert all(ids.verify(one, "acme", "bob") for one in made)
    end = time.perf_counter()
    return {
        "new_us": round(1e6 * (middle - begin) / number, 2),
        "verify_us": round(1e6 * (end - middle) / number, 2),
    }


async def over_http(folder: Path, num_signals: int, clients: int, per_request: int, *, consent: bool) -> dict[str, Any]:
    """Signals per second, the latency of a request in ms, and the CPU time of gateway and clients together."""
    privacy = folder / "privacy" if consent else None
    if privacy is not None:
        with PrivacyFolder(privacy) as opened:
            opened.consent.set(Subject.of("local"), Level.TRAIN)
    chat, config = laptop_chat(), GatewayConfig(port=0)
    model = ServedModel(ScriptedEngine([]), chat, name="m", context_tokens=512, config=config)  # type: ignore[arg-type]
    writer = FeedbackWriter(folder / f"{clients}-{per_request}.sqlite", privacy=privacy, cap=1 << 30)
    latencies, left = list[float](), num_signals // per_request

    async def client(url: str, number: int) -> None:
        nonlocal left
        user = f"user-{number}"
        response_id = writer.new_id("local", user, "m")
        async with httpx.AsyncClient(headers={"x-etude-user": user}, timeout=60) as http:
            while left > 0:
                left -= 1
                name = f"{number}-{left}"
                known = {"response_id": response_id, "name": "kept", "value": 1}
                body = {"signals": [{"id": f"{name}-{i}", **known} for i in range(per_request)]}
                begin = time.perf_counter()
                answer = await http.post(f"{url}/feedback", json=body)
                latencies.append(time.perf_counter() - begin)
                assert answer.status_code == 200, answer.text

    async with serving(create_app([model], config=config, feedback=writer), config=config) as url:
        begin, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*(client(url, number) for number in range(clients)))
        wall_s, cpu_s = time.perf_counter() - begin, time.process_time() - cpu
    stored = writer.counts()["stored"]
    await asyncio.to_thread(writer.close, 60)
    p50, p99 = np.percentile(latencies, [50, 99]) * 1000
    return {
        "clients": clients,
        "signals_per_request": per_request,
        "consent": consent,
        "signals_per_s": round(stored / wall_s),
        "cpu_us_per_signal": round(1e6 * cpu_s / stored),
        "p50_ms": round(float(p50), 2),
        "p99_ms": round(float(p99), 2),
    }


def joined(folder: Path, number: int) -> dict[str, Any]:
    """Answers per second of the join, with two signals each."""
    with PrivacyFolder(folder / "privacy") as opened:
        opened.consent.set(Subject.of("acme"), Level.TRAIN)
        with FeedbackFile(folder / "join.sqlite", privacy=opened, create=True, cap=1 << 30) as file:
            time.sleep(0.01)  # ids have milliseconds, and the consent must be older
            ids = [file.ids.new("acme", "bob", "m") for _ in range(number)]
            writer = CaptureWriter(folder / "privacy", max_queued=number)
            for one in ids:
                writer.offer(served_answer("bob", response_id=one))
            assert writer.close(600)
            for first in range(0, number, 500):
                signals = [
                    GivenSignal(id=f"{one}-{name}", response_id=one, name=name, value=1)
                    for one in ids[first : first + 500]
                    for name in ("kept", "rated")
                ]
                file.add([Sent("acme", "bob", signals)])
            begin = time.perf_counter()
            later = time.time() + HOUR_S + GRACE_S
            told = [one.outcomes() for one in settled_answers(opened, file, settle_s=HOUR_S, clock=lambda: later)]
            wall_s = time.perf_counter() - begin
    assert told == [{"kept": 1.0, "rated": 1.0}] * number
    return {"answers": number, "answers_per_s": round(number / wall_s)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--signals", type=int, default=5000)
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    rows = list[dict[str, Any]]()
    for clients, per_request, consent in ((1, 1, False), (32, 1, False), (32, 1, True), (4, 100, False)):
        with tempfile.TemporaryDirectory(dir=args.folder) as name:
            num = max(clients, args.signals // 5) if clients * per_request == 1 else args.signals
            rows.append(asyncio.run(over_http(Path(name), num, clients, per_request, consent=consent)))
            print(rows[-1], flush=True)
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        join = joined(Path(name), args.signals)
    report("feedback", {"ids": signed_ids(), "over_http": rows, "join": join})


if __name__ == "__main__":
    main()
