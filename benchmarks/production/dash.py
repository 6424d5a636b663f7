"""`etude dash` on a run with a long past: the time of each page, the memory of the server, and what it costs the run.

    python -m benchmarks.production.dash [--rollouts 1000000] [--folder FOLDER]

The run is made by `long_run` (minutes for a million rollouts); with `--folder` an existing one is used. The server is
the command, in a process of its own. `first_page_s` is the first request after it listens, the median of five servers;
their CPU seconds and the load of the host are told, since the server gives way to others (nice). `later_s` is the
median of ten. Then a writer changes states of rollouts in the ledger, alone and beside a browser that asks for four
pages each second: `run_beside`.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.production import long_run
from benchmarks.report import report
from benchmarks.run.ledger import A_STEP, TASK
from etude.experience import Ledger
from etude.records import RolloutSpec

LIMIT_S, LIMIT_BYTES = 1.0, 150_000_000
FRESH, WRITES, ROUNDS = 5, 500, 7


@contextlib.contextmanager
def server(folder: Path) -> Iterator[tuple[str, psutil.Process, float]]:
    """`etude dash`: its URL, its process, and the seconds until it listened."""
    began = time.perf_counter()
    argv = [sys.executable, "-m", "etude.cli", "dash", str(folder), "--port", "0"]
    child = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        line = child.stdout.readline()
        yield line.split(" at ")[1].split()[0], psutil.Process(child.pid), time.perf_counter() - began
    finally:
        child.terminate()
        child.wait(20)


def timed(client: httpx.Client, url: str) -> float:
    began = time.perf_counter()
    found = client.get(url)
    assert found.status_code == 200, (url, found.status_code)
    return time.perf_counter() - began


def fresh_server(folder: Path, page: str) -> dict[str, float]:
    """The first request to a new server: seconds, CPU seconds and memory of the server; and how busy the host is."""
    with server(folder) as (url, process, start_s), httpx.Client(base_url=url, timeout=60.0) as client:
        before = process.cpu_times()
        first_s = timed(client, page)
        used = process.cpu_times()
        return {
            "start_s": start_s,
            "start_cpu_s": before.user + before.system,
            "first_page_s": first_s,
            "first_page_cpu_s": used.user + used.system - before.user - before.system,
            "first_page_bytes": process.memory_info().rss,
            "load": os.getloadavg()[0],
        }


def pages(folder: Path, num_rollouts: int) -> dict[str, Any]:
    """Times and memory of a fresh server."""
    steps, base = num_rollouts // A_STEP, f"/run/{folder.name}"
    names = {
        "overview": f"{base}/",
        "versions": f"{base}/versions",
        "version": f"{base}/versions/{steps // 2}",
        "rollouts": f"{base}/rollouts",
        "rollouts, deep page": f"{base}/rollouts?before={num_rollouts // 2}",
        "rollouts in a state, deep page": f"{base}/rollouts?state=no-signal&before={num_rollouts // 2}",
        "rollout": f"{base}/rollouts/g{1_000_000 + num_rollouts // 16}.3",
        "evaluations": f"{base}/evaluations",
        "fleet": f"{base}/fleet",
    }
    fresh = [fresh_server(folder, names["overview"]) for _ in range(FRESH)]
    first_s = statistics.median(one["first_page_s"] for one in fresh)
    with server(folder) as (url, process, _), httpx.Client(base_url=url, timeout=60.0) as client:
        found: dict[str, Any] = {}
        for name, page in names.items():
            first = timed(client, page)
            found[name] = {"first_s": first, "later_s": statistics.median(timed(client, page) for _ in range(10))}
        began = time.perf_counter()
        while "reading the past" in client.get(names["overview"]).text:
            assert time.perf_counter() - began < 300, "the past is not read"
            time.sleep(0.2)
        past_s = time.perf_counter() - began
        for page in names.values():
            timed(client, page)
        return {
            "fresh_servers": fresh,
            "first_page_s": first_s,
            "pages": found,
            "events_read_s": past_s,
            "memory_bytes": process.memory_info().rss,
            "is_within_limits": first_s <= LIMIT_S and process.memory_info().rss <= LIMIT_BYTES,
        }


def writes(ledger: Ledger, first: int) -> float:
    """Transactions a second of a conductor's kind: admit, start, cancel."""
    began = time.perf_counter()
    for i in range(first, first + WRITES):
        name = f"g{5_000_000 + i}.0"
        ledger.admit(RolloutSpec(rollout_id=name, group_id=name[:-2], attempt=0, task=TASK, seed=0, temperature=1.0))
        ledger.move(name, "running")
        ledger.move(name, "cancelled", reason="a benchmark")
    return 3 * WRITES / (time.perf_counter() - began)


def browse(base: str, stopping: Any, active: Any, asked: Any) -> None:
    """Ask for four pages each second while `active` is set; in a process of its own."""
    with httpx.Client(timeout=60.0) as client:
        while not stopping.is_set():
            if active.wait(0.1):
                for page in ("/", "/versions", "/rollouts", "/rollouts?state=no-signal"):
                    timed(client, base + page)
                    asked.value += 1
                time.sleep(1.0)


def beside(folder: Path) -> dict[str, Any]:
    """Transactions a second alone and beside the server, in turns."""
    ledger = Ledger(folder / "ledger.sqlite", capacity=64)
    found: dict[str, list[float]] = {"alone": [], "beside": []}
    at = int(time.time()) % 1_000_000 * 100_000

    context = multiprocessing.get_context("spawn")
    stopping, active, asked = context.Event(), context.Event(), context.Value("i", 0)
    with server(folder) as (url, _, _):
        browser = context.Process(target=browse, args=(f"{url}/run/{folder.name}", stopping, active, asked))
        browser.start()
        try:
            writes(ledger, at)
            for i in range(ROUNDS):
                for name in ("alone", "beside"):
                    (active.set if name == "beside" else active.clear)()
                    time.sleep(1.0)
                    at += WRITES
                    found[name].append(writes(ledger, at))
                print(f"round {i + 1} of {ROUNDS}", file=sys.stderr)
        finally:
            stopping.set()
            browser.join(60)
    ledger.close()
    medians = {f"{name}_per_s": statistics.median(values) for name, values in found.items()}
    return medians | {"pages_asked": asked.value, "rounds": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or long_run.make(Path(scratch) / "long", args.rollouts)
        sizes = {name: sum(f.stat().st_size for f in (folder / name).rglob("*")) for name in ("events", "weights")}
        numbers = {
            "rollouts": args.rollouts,
            "ledger_bytes": (folder / "ledger.sqlite").stat().st_size,
            **{f"{name}_bytes": size for name, size in sizes.items()},
            "limits": {"first_page_s": LIMIT_S, "memory_bytes": LIMIT_BYTES},
            **pages(folder, args.rollouts),
            "run_beside": beside(folder),
        }
    report("dash", numbers)


if __name__ == "__main__":
    main()
