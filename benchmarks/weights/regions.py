"""Four regions behind limited links follow one channel: publish → live, bytes, gap, and what bad days do.

A home publishes versions of a model into a directory store, and a relay serves it. Each region is a network namespace
with a link of its own (`regions_network`: what limits, delays, cuts and partitions it), a cache of its own, and an
engine whose live weights are followed (`regions_follower`). `slow` has half of the bandwidth; `dies` is killed (-9)
in the middle of a download and starts again; `apart` is partitioned for a while; `late` starts when four versions are
out, over a line that cuts connections. All must converge, and every version that is live must have its digest in live
memory. Engines start from the base checkpoint on their disks, as machines do that were set up with an image.

Publish → live runs from the pointer's move to the end of the scatter, on one clock. Beside it: bytes ÷ bandwidth + one
round trip; the bytes are those of objects, also of those that the cache had. `disturbed` cells are those in which that
region was killed, cut off, or came late. The four share this machine's cores, so links must be slow enough to be what
limits; the load average is told. The carried numbers at the end are arithmetic.

    python -m benchmarks.weights.regions [--gb 2] [--mbit 4] [--scratch DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.report import report
from benchmarks.weights.regions_model import make_model, read_model
from benchmarks.weights.regions_network import Link, Network, module_env
from etude.records.sample import Published
from etude.stores import DirectoryStore
from etude.weights import Channel

RELAY_PORT = 8799
NUM_VERSIONS = 8
KILLED_AT, PARTED_AT, LATE_AT = 3, 4, 5


def links(mbit: float) -> dict[str, Link]:
    """The four regions' links, where an ordinary one has so many Mbit/s."""
    return {
        "apart": Link(mbit, 0.04),
        "slow": Link(mbit * 0.5, 0.2),
        "dies": Link(mbit * 0.8, 0.08),
        "late": Link(mbit * 0.9, 0.12, cut_mb=8.0),
    }


@dataclass
class Region:
    """One region's engine, which may be killed and started again, and what it wrote down."""

    name: str
    network: Network
    folder: Path
    base: Path | None
    base_version: str
    process: subprocess.Popen[str] | None = None

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    def start(self) -> None:
        command = [sys.executable, "-m", "benchmarks.weights.regions_follower", self.network.url(self.name)]
        command += [str(self.folder / f"{self.name}-cache"), str(self.base or ""), self.base_version, str(self.log)]
        with (self.folder / f"{self.name}.err").open("a") as errors:
            self.process = self.network.regions[self.name].spawn(command, self.network.env, stderr=errors)

    def kill(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()

    def events(self, kind: str) -> list[dict[str, Any]]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [event for event in map(json.loads, lines) if event["event"] == kind]

    def proven(self, version: str) -> bool:
        if self.process is not None and self.process.poll() is not None:
            raise SystemExit(f"{self.name} ended: {(self.folder / f'{self.name}.err').read_text()[-2000:]}")
        return any(event["version"] == version and event["right"] for event in self.events("proven"))


@dataclass
class Home:
    """Publishes, and remembers when."""

    store: Path
    models: list[Path]
    published: list[Published] = field(default_factory=list)
    at: list[float] = field(default_factory=list)
    took_s: list[float] = field(default_factory=list)
    load: list[float] = field(default_factory=list)  # average of the machine's last minute, at each publish

    def __post_init__(self) -> None:
        self._channel = Channel(DirectoryStore(self.store))

    def publish(self) -> str:
        """The next version's name."""
        step, started = len(self.published), time.perf_counter()
        moved: list[float] = []
        self.load.append(os.getloadavg()[0])

        def note(what: str) -> None:
            if what == "pointer":
                moved.append(time.time())

        parent = self.published[-1].version if self.published else None
        told = self._channel.publish(
            read_model(self.models[step]), step=step, parent=parent, rollout_ids=[], owned=True, after=note
        )
        self.published.append(told)
        self.at += moved
        self.took_s.append(time.perf_counter() - started)
        return str(told.version)


def until(what: str, done: Callable[[], bool], deadline_s: float) -> None:
    end = time.monotonic() + deadline_s
    while not done():
        if time.monotonic() > end:
            raise SystemExit(f"{what} did not happen within {deadline_s:g} s")
        time.sleep(0.05)


def measure(gb: float, mbit: float, scratch: Path, *, late_from_base: bool = True) -> dict[str, Any]:
    """Everything; the numbers."""
    models = make_model(scratch, int(gb * 1e9), NUM_VERSIONS)
    home = Home(scratch / "store", models)
    home.publish()
    base = msgspec.json.encode(home.published[0].version).decode()
    env, ways = module_env(), links(mbit)
    network = Network(ways, RELAY_PORT, env)
    relay = [sys.executable, "-m", "etude.cli", "weights", "relay", str(home.store)]
    server = network.home.spawn([*relay, "--listen", f"127.0.0.1:{RELAY_PORT}"], env, stdout=subprocess.DEVNULL)
    regions = {
        name: Region(name, network, scratch, models[0] if late_from_base or name != "late" else None, base)
        for name in ways
    }
    try:
        for region in regions.values():
            if region.name != "late":
                region.start()
        for region in regions.values():
            if region.name != "late":
                until(f"{region.name}'s start", lambda region=region: bool(region.events("started")), 120 + 60 * gb)
        disturbed = play(home, regions, network)
        return summary(home, regions, network, disturbed)
    finally:
        for region in regions.values():
            region.kill()
        server.kill()
        server.wait()
        network.close()


def play(home: Home, regions: Mapping[str, Region], network: Network) -> set[tuple[str, str]]:
    """Publish version after version, and do to the regions what they are named after; the disturbed cells."""
    disturbed: set[tuple[str, str]] = set()
    for step in range(1, NUM_VERSIONS):
        if step == PARTED_AT:
            network.partition("apart", whole=False)
        before = network.received_bytes("dies")
        version = home.publish()
        num_bytes = home.published[-1].object_bytes
        patience_s = 60 + 20 * num_bytes / min(link.bytes_per_s for link in network.links.values())
        if step == KILLED_AT:
            disturbed.add(("dies", version))
            some = lambda before=before, num_bytes=num_bytes: network.received_bytes("dies") - before > num_bytes * 0.4  # noqa: E731
            until("the middle of a download", some, patience_s)
            regions["dies"].kill()
            regions["dies"].start()
        if step == PARTED_AT:
            disturbed.add(("apart", version))
            until("the others' adoption", lambda v=version: regions["dies"].proven(v), patience_s)
            if regions["apart"].proven(version):
                raise SystemExit("a region that is cut off has what was published meanwhile")
            network.partition("apart", whole=True)
        if step == LATE_AT:
            disturbed.add(("late", version))
            regions["late"].start()
        for region in regions.values():
            if region.process is not None:
                until(f"{region.name}'s adoption of {version}", lambda r=region, v=version: r.proven(v), patience_s)
        print(f"{version} is live everywhere", file=sys.stderr, flush=True)
    return disturbed


def summary(
    home: Home, regions: Mapping[str, Region], network: Network, disturbed: set[tuple[str, str]]
) -> dict[str, Any]:
    """What the logs say, cell by cell and region by region."""
    at = {str(told.version): moved for told, moved in zip(home.published, home.at, strict=True)}
    cells, by_region, unproven = [], {}, 0
    for name, region in regions.items():
        link, live = network.links[name], region.events("live")
        right = {event["version"] for event in region.events("proven") if event["right"]}
        unproven += sum(event["version"] not in right or event["version"] not in at for event in live)
        own = []
        for event in live:
            least_s = event["fetched_bytes"] / link.bytes_per_s + link.rtt_s
            seconds = event["live_at"] - at[event["version"]]
            cell = {
                key: event[key] for key in ("version", "fetched_bytes", "fetch_s", "prepare_s", "gap_s", "list_bytes")
            }
            cell |= {"region": name, "publish_to_live_s": seconds, "least_s": least_s, "of_least": seconds / least_s}
            own.append(cell | {"disturbed": (name, event["version"]) in disturbed})
        cells += own
        calm = [cell for cell in own if not cell["disturbed"]]
        by_region[name] = {
            "mbit_per_s": link.mbit,
            "round_trip_s": link.rtt_s,
            "cut_after_mb": link.cut_mb,
            "versions": len(own),
            "undisturbed": len(calm),
            **{
                f"{key}_{label}": float(np.quantile([cell[key] for cell in calm], q))
                for key in ("publish_to_live_s", "of_least", "gap_s")
                for label, q in (("p50", 0.5), ("p99", 0.99))
            },
            "object_bytes": sum(cell["fetched_bytes"] for cell in own),
            "link_bytes": network.received_bytes(name),
            "troubles": len(region.events("trouble")),
            "starts": len(region.events("started")),
            "max_rss_bytes": max(event["max_rss_bytes"] for event in live),
        }
    last = home.published[-1]
    deltas = home.published[1:]
    numbers = {
        "model_bytes": last.snapshot_bytes,
        "dtype": "bf16",
        "changed_share": last.changed_share,
        "delta_bytes": float(np.mean([told.object_bytes for told in deltas])),
        "ratio": last.snapshot_bytes / float(np.mean([told.object_bytes for told in deltas])),
        "publish_s_p50": float(np.median(home.took_s[1:])),
        "load_average_p50": float(np.median(home.load)),
        "cores": os.cpu_count(),
        "unproven_versions_served": unproven,
        "converged": all(region.proven(str(last.version)) for region in regions.values()),
        "network": "namespaces, veth, tbf; delay and cut connections by a user-space relay; partition: link down",
        "regions": by_region,
        "cells": cells,
    }
    return numbers | {"arithmetic_not_measured": carried(numbers)}


def carried(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """The measured ratio, and the measured share beyond the wire, carried to 1 TB and ten regions: arithmetic."""
    worst = max(region["of_least_p50"] for region in numbers["regions"].values())
    delta_bytes = 1e12 / numbers["ratio"]
    rows = {
        f"{gbit:g} Gbit/s a region": {
            "bytes_over_rate_s": delta_bytes * 8 / (gbit * 1e9),
            "publish_to_live_s_at_the_worst_measured_p50_of_least": worst * (delta_bytes * 8 / (gbit * 1e9) + 0.2),
            "home_sends_gbit_per_s_for_ten_regions": 10 * gbit,
        }
        for gbit in (1.0, 10.0, 25.0)
    }
    return {
        "assumes": "1 TB of bf16 at the measured ratio, ten regions that download once each, a round trip of 0.2 s;"
        " that decoding keeps up because a region's hosts share it",
        "delta_bytes": delta_bytes,
        "ten_regions_bytes": 10 * delta_bytes,
        "ten_regions_bytes_without_deltas": 10e12,
        **rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--mbit", type=float, default=4.0, help="of an ordinary link")
    parser.add_argument("--scratch", type=Path, help="where the model and the store go, and are removed from")
    parser.add_argument("--dry", action="store_true", help="print, and keep no result")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything is cleaned up
    with tempfile.TemporaryDirectory(prefix="regions-", dir=options.scratch) as scratch:
        numbers = {"gb": options.gb, **measure(options.gb, options.mbit, Path(scratch))}
    if options.dry:
        print(json.dumps(numbers, indent=1))
    else:
        report("regions", numbers)


if __name__ == "__main__":
    main()
