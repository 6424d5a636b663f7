"""What capture costs a request of the gateway: off, without consent, on, with a slow disk and with a full one.

    python -m benchmarks.production.capture [--requests 800]

Five gateways in one process answer the same requests in turn, one at a time. The engine answers at once from a list,
and no socket is between client and gateway, so that little but the gateway's own work is measured. Captured answers
are written by a thread beside them.

- `wall_ms`: from the request to the answer, p50 and p99. With other work on the machine, p99 is mostly that.
- `cpu_ms`: CPU time of the thread that serves, p50 and p99.
- `added_cpu_us`: by how much the median of `cpu_ms` is above that of the gateway without capture.
- `slow`: after the first answer the writer waits for a lock, as it would for a disk that hangs. After 30 s capture
  turns itself off, so later requests are measured without it. `full`: the disk is filled after the first answer, and
  capture turns itself off at once.
- `failed`: requests that were not answered with status 200.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from tests.small_disk import fill, small_disk
from tests.unit.gateway.sdk import MODEL, qwen, said

from benchmarks.report import report
from etude.gateway import GatewayConfig, ServedModel, create_app
from etude.privacy import CaptureWriter, Level, PrivacyFolder, Subject
from etude.testing import ScriptedEngine, StreamingPolicy

BODY: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi " * 200}]}
TEXT = "an answer of some length " * 12
WARM_UP = 50


def client_of(writer: CaptureWriter | None, answers: int) -> httpx.AsyncClient:
    """Return a client of a gateway that captures with `writer`; None: one that does not capture."""
    config = GatewayConfig(port=0)
    policy = StreamingPolicy(ScriptedEngine([said(TEXT)] * answers, context_tokens=4096))
    model = ServedModel(policy, qwen(), name=MODEL, context_tokens=4096, config=config)
    transport = httpx.ASGITransport(create_app([model], config=config, recorder=writer))
    return httpx.AsyncClient(transport=transport, base_url="http://localhost/v1", timeout=300)


async def measure(requests: int, folder: Path) -> dict[str, Any]:
    """Ask every gateway in turn, and return the numbers."""
    with contextlib.ExitStack() as stack:
        disk = stack.enter_context(small_disk(folder / "disk", "2m"))
        places = {name: folder / name for name in ("no consent", "on", "slow")} | {"full": disk / "full"}
        for name, place in places.items():
            with PrivacyFolder(place) as opened:
                opened.consent.set(Subject.of("local"), Level.OFF if name == "no consent" else Level.TRAIN)
        writers = {name: CaptureWriter(place, max_queued=100_000) for name, place in places.items()}
        total = requests + WARM_UP + 1
        clients = {name: client_of(writers.get(name), total) for name in ("off", *writers)}
        slow = stack.enter_context(PrivacyFolder(places["slow"]))
        held = contextlib.ExitStack()
        wall: dict[str, list[float]] = {name: [] for name in clients}
        cpu: dict[str, list[float]] = {name: [] for name in clients}
        failed = dict.fromkeys(clients, 0)
        for number in range(total):
            if number == 1:
                held.enter_context(slow.keys.lock())
                end = time.monotonic() + 120
                while not writers["full"].counts()["captured"] and time.monotonic() < end:  # noqa: ASYNC110  a thread
                    await asyncio.sleep(0.01)
                fill(disk)
            for name in np.roll(list(clients), number):
                headers = {"x-etude-user": f"user-{number % 50}"}
                began, began_cpu = time.perf_counter(), time.thread_time()
                answer = await clients[name].post("/chat/completions", json=BODY, headers=headers)
                wall[name].append(time.perf_counter() - began)
                cpu[name].append(time.thread_time() - began_cpu)
                failed[name] += answer.status_code != 200
        held.close()
        for name, writer in writers.items():
            await asyncio.to_thread(writer.close, 120)
            await clients[name].aclose()
        await clients["off"].aclose()
        base = float(np.median(cpu["off"][-requests:]))
        found = {
            name: {
                "wall_ms": [round(1e3 * float(x), 3) for x in np.percentile(wall[name][-requests:], [50, 99])],
                "cpu_ms": [round(1e3 * float(x), 3) for x in np.percentile(cpu[name][-requests:], [50, 99])],
                "added_cpu_us": round(1e6 * (float(np.median(cpu[name][-requests:])) - base), 1),
                "failed": failed[name],
                **({"answers": writers[name].counts()} if name in writers else {}),
            }
            for name in clients
        }
        return {"requests": requests, "load": round(os.getloadavg()[0], 1), "capture": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=800)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report("capture", asyncio.run(measure(args.requests, Path(folder))))


if __name__ == "__main__":
    main()
