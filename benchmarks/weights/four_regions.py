"""A whole RL run whose engines are four regions behind limited links: one slow, one killed, one cut off, one late.

The home is a network namespace with learner, conductor, worker, grader, the registry of engines and a relay of the
weights; each region one with an engine (`benchmarks.weights.regions_network`: `tbf` limits, a relay delays and cuts,
and a partition is a link that is down). `dies` is killed (-9) and stays dead, `apart` is cut off for a while, `late`
joins when the run is under way, `slow` has a tenth of the bandwidth, a long way, and connections that break. The same
run with these faults and an ordinary link to `slow`, and one over four equal links without any fault, are the controls.

What a region cost the learner, by attribution of each of its waits: a rollout is *touched* if `slow` served it, or
`dies` or `apart` while their fault began or lasted. The learner waits *for* touched ones while no other rollout of its
batch is left (`held_up`). That is idleness of the fault's making (`caused`) where nothing else is being sampled either:
as long as healthy engines have rollouts of the next batch to run, its wait is shorter by what this one is longer. One
turn there touches a rollout, whoever served the others. How much of it is nobody's fault is seen in `late`, in which
nothing is wrong once it has joined, and in `slow` of the run in which it has an ordinary link. Beside it stands the
share that the learner waits in all. All regions and the learner share this machine's cores; the load average is told.

    python -m benchmarks.weights.four_regions --start CHECKPOINT [--config TOML] [--steps 20] [--set a.b=c] [--dry]
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report import report
from benchmarks.runs import ETUDE, LAPTOP, new_folder, overrides
from benchmarks.weights.regions_network import Link, Network, module_env
from etude.telemetry import read_events

RELAY, REGISTRY, ENGINE, BACK = 8799, 8790, 8000, 8900
FAULTS: Mapping[str, Link] = {
    "apart": Link(20.0, 0.04),
    "slow": Link(2.0, 0.2, cut_mb=2.0),
    "dies": Link(20.0, 0.08),
    "late": Link(20.0, 0.06),
}
ORDINARY = Link(20.0, 0.04)
PATIENCE_S = 600.0
Event = dict[str, Any]


@dataclass
class World:
    """The network, the run in its home, and an engine in each region."""

    folder: Path
    links: Mapping[str, Link]
    settings: Sequence[str]
    config: Path
    env: dict[str, str] = field(default_factory=lambda: module_env() | {"ETUDE_TOKEN": secrets.token_hex(8)})
    engines: dict[str, subprocess.Popen[str]] = field(default_factory=dict)
    at: dict[str, float] = field(default_factory=dict)  # when what was done, unix seconds
    load: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder.parent.mkdir(exist_ok=True)
        self.network = Network(self.links, RELAY, self.env)
        for number, name in enumerate(self.links):
            self.network.carry(name, 8810 + number, f"127.0.0.1:{REGISTRY}")
            self.network.carry(name, BACK + number, f"{self.network.address(name, of_region=True)}:{ENGINE}")
        sets = [*self.settings, "fleet.engines=[]", f"fleet.listen=0.0.0.0:{REGISTRY}"]
        argv = [*ETUDE, "run", str(self.config), "--name", self.folder.name, *overrides(sets)]
        self.run = self.network.home.spawn(argv, self.env, stdout=sys.stderr)
        self.relay: subprocess.Popen[str] | None = None

    def serve_weights(self) -> None:
        """Once there are some."""
        store = self.folder / "weights"
        self.until("a first version", lambda: (store / "pointers").is_dir())
        argv = [*ETUDE, "weights", "relay", str(store), "--listen", f"127.0.0.1:{RELAY}"]
        self.relay = self.network.home.spawn(argv, self.env, stdout=subprocess.DEVNULL)

    def start(self, name: str) -> None:
        """A region's engine, from nothing: it knows the registry and the store."""
        number, home = list(self.links).index(name), self.network.address(name, of_region=False)
        argv = ["nice", "-n", "5", sys.executable, "-m", "etude.inference.server", "--name", name, "--poll-s", "0.2"]
        argv += ["--host", "0.0.0.0", "--port", str(ENGINE), "--store", self.network.url(name)]
        argv += ["--register", f"http://{home}:{8810 + number}", "--advertise", f"http://127.0.0.1:{BACK + number}"]
        with (self.folder.parent / f"{self.folder.name}-{name}.log").open("a") as log:
            self.engines[name] = self.network.regions[name].spawn(argv, self.env, stdout=log, stderr=log)
        self.at[f"{name} started"] = time.time()

    def until(self, what: str, done: Callable[[], Any]) -> None:
        end = time.monotonic() + PATIENCE_S
        while not done():
            if self.run.poll() is not None:
                raise SystemExit(f"the run ended with exit code {self.run.returncode} before {what}; see {self.folder}")
            if time.monotonic() > end:
                raise SystemExit(f"waited {PATIENCE_S:g} s for {what}; see {self.folder}")
            time.sleep(0.1)

    def at_step(self, step: int) -> None:
        self.until(f"step {step}", lambda: any(e["step"] >= step for e in self.events("rl.step")))
        self.load.append(os.getloadavg()[0])

    def events(self, kind: str) -> Iterator[Event]:
        folder = self.folder / "events"
        return (e for e in read_events(folder) if e["kind"] == kind) if folder.is_dir() else iter(())

    def close(self) -> None:
        for process in (self.run, self.relay, *self.engines.values()):
            if process is not None:
                process.kill()
                process.wait()
        self.network.close()


def play(world: World, steps: int, *, faults: bool) -> None:
    """The run, and what is done to its regions."""
    for name in world.links:
        if name != "late" or not faults:
            world.start(name)
    world.serve_weights()
    if faults:
        world.at_step(max(1, steps // 5))
        world.start("late")
        world.at_step(max(2, steps * 2 // 5))
        world.at["dies killed"] = time.time()
        world.engines["dies"].send_signal(signal.SIGKILL)
        world.at_step(max(3, steps // 2))
        world.at["apart cut off"] = time.time()
        world.network.partition("apart", whole=False)
        world.at_step(max(4, steps * 3 // 4))
        gone = lambda: any(e["engine"] == "apart" and e["state"] == "lost" for e in world.events("fleet.state"))  # noqa: E731
        world.until("the loss of a region to be seen", gone)
        world.network.partition("apart", whole=True)
        world.at["apart joined"] = time.time()
    world.at_step(steps)
    if world.run.wait(PATIENCE_S):
        raise SystemExit(f"the run ended with exit code {world.run.returncode}; see {world.folder}")


def measure(
    config: Path, settings: Sequence[str], steps: int, *, faults: bool, links: Mapping[str, Link] = FAULTS
) -> dict[str, Any]:
    """One run; its numbers."""
    sets = [*settings, f"rl.steps={steps}"]
    world = World(new_folder("four-regions"), links, sets, config)
    try:
        play(world, steps, faults=faults)
        return numbers(world, faults=faults)
    finally:
        world.close()


def numbers(world: World, *, faults: bool) -> dict[str, Any]:
    """What the run folder says."""
    rollouts = {e["rollout_id"]: e for e in world.events("rollout")}
    steps = list(world.events("rl.step"))
    phase = {e["state"]: e["t"] for e in world.events("phase") if e["phase"] == "rl"}
    wall_s = phase["end"] - phase["start"]
    waits = [(row["step"], row["wait_s"], batch_of(world.folder, row["step"])) for row in steps]
    audit = subprocess.run([*ETUDE, "ledger", "audit", str(world.folder)], capture_output=True, text=True)
    told: dict[str, Any] = {
        "steps": len(steps),
        "rl_wall_s": round(wall_s, 2),
        "audit": audit.stdout.splitlines()[0] if audit.returncode == 0 else audit.stderr,
        "lost": int(audit.stdout.split(" lost")[0]) if audit.returncode == 0 else None,
        "trained_twice": int(audit.stdout.split("lost, ")[1].split(" trained")[0]) if audit.returncode == 0 else None,
        "invalid": sum(e["outcome"] == "invalid" for e in rollouts.values()),
        "requeued": moves(world.folder, "requeued"),
        "turns": sum(e["turns"] for e in rollouts.values()),
        "turns_elsewhere": sum(e["moves"] for e in rollouts.values()),  # than the turn before
        "learner_waits_share": round(sum(w for _, w, _ in waits) / wall_s, 4),
        "load_average_p50": median(world.load),
        "regions": {name: region(world, name, rollouts) for name in world.links},
    }
    if faults:
        touched = {name: touches(world, name) for name in world.links}
        bad = {name: [touched[name]] for name in touched} | {
            "together": [touched[n] for n in ("slow", "dies", "apart")]
        }
        for name, faulty in bad.items():
            held, caused = held_up_s(waits, rollouts, faulty)
            told.setdefault("held_up_share", {})[name] = round(held / wall_s, 4)
            told.setdefault("caused_share", {})[name] = round(caused / wall_s, 4)
        told["done"] = {what: round(t - phase["start"], 2) for what, t in world.at.items()}
    return told


def region(world: World, name: str, rollouts: Mapping[str, Event]) -> dict[str, Any]:
    """One lane: what it served, what it was, and what came over its link."""
    states = [e for e in world.events("fleet.state") if e["engine"] == name]
    loads = [e for e in world.events("fleet.load") if e["engine"] == name]
    link = world.links[name]
    begin = world.at.get(f"{name} started", 0.0)
    lost = next((e["t"] for e in states if e["state"] == "lost"), None)
    done = world.at.get("dies killed" if name == "dies" else "apart cut off")
    return {
        "mbit_per_s": link.mbit,
        "round_trip_s": link.rtt_s,
        "cut_after_mb": link.cut_mb,
        "rollouts": sum(name in e["engines"] for e in rollouts.values()),
        "versions_seen": len({e["step"] for e in loads if e["step"] is not None and e["step"] >= 0}),
        "states": [e["state"] for e in states],
        "join_to_serving_s": round(next((e["t"] for e in states if e["state"] == "serving"), begin) - begin, 2),
        "fault_to_lost_s": round(lost - done, 2) if lost is not None and done is not None else None,
        "link_bytes": world.network.received_bytes(name),
    }


def touches(world: World, name: str) -> Callable[[Event], bool]:
    """Whether a fault of this region may have held a rollout up."""
    begin = {"dies": "dies killed", "apart": "apart cut off"}.get(name)
    since = world.at.get(begin, 0.0) if begin else 0.0
    serving = [e["t"] for e in world.events("fleet.state") if e["engine"] == name and e["state"] == "serving"]
    until = serving[-1] if name == "apart" else float("inf")  # it was given work again

    def touched(e: Event) -> bool:
        return name in e["engines"] and e["t"] >= since and e["t"] - e["wall_s"] <= until

    return touched


def held_up_s(
    waits: Sequence[tuple[int, float, Sequence[str]]],
    rollouts: Mapping[str, Event],
    faults: Sequence[Callable[[Event], bool]],
) -> tuple[float, float]:
    """Seconds that the learner waited for touched rollouts alone, and those of them in which nothing else was being
    sampled."""
    bad = {name: any(touched(event) for touched in faults) for name, event in rollouts.items()}
    healthy = [(e["t"] - e["wall_s"], e["t"]) for name, e in rollouts.items() if not bad[name]]
    held = caused = 0.0
    for _, wait_s, batch in waits:
        last = max(rollouts[i]["t"] for i in batch)
        others = max((rollouts[i]["t"] for i in batch if not bad[i]), default=0.0)
        begin = max(last - wait_s, others)
        if begin < last:
            held += last - begin
            caused += uncovered_s(begin, last, healthy)
    return held, caused


def uncovered_s(begin: float, end: float, spans: Sequence[tuple[float, float]]) -> float:
    """Seconds between two times in no span."""
    total, at = 0.0, begin
    for a, b in sorted(spans):
        if b > at and a < end:
            total += max(0.0, min(a, end) - at)
            at = max(at, b)
    return total + max(0.0, end - at)


def batch_of(folder: Path, step: int) -> list[str]:
    """The rollouts of a step."""
    return [str(row[0]) for row in asked(folder, "SELECT rollout_id FROM rollouts WHERE step = ?", step)]


def moves(folder: Path, state: str) -> int:
    """How often a rollout became this."""
    return int(asked(folder, "SELECT count(*) FROM transitions WHERE state = ?", state)[0][0])


def asked(folder: Path, query: str, value: Any) -> list[tuple[Any, ...]]:
    """Rows of the ledger."""
    ledger = sqlite3.connect(f"file:{folder / 'ledger.sqlite'}?mode=ro", uri=True)
    try:
        return ledger.execute(query, (value,)).fetchall()
    finally:
        ledger.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", type=Path, required=True, help="a mid-trained checkpoint")
    parser.add_argument("--config", type=Path, default=LAPTOP)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c")
    parser.add_argument("--dry", action="store_true", help="print, and keep no result")
    parser.add_argument("--no-control", action="store_true")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything is cleaned up
    small = ["evals.heldout_tasks=64", "evals.baseline_tasks=8", "evals.every=1000", "engine.max_sequences=48"]
    settings = [f"start={options.start}", *small, *options.set]
    told: dict[str, Any] = {"cores": os.cpu_count(), "settings": [*small, *options.set]}
    told["faults"] = measure(options.config, settings, options.steps, faults=True)
    print(json.dumps(told), file=sys.stderr, flush=True)
    if not options.no_control:
        without = FAULTS | {"slow": ORDINARY}
        told["without_slow"] = measure(options.config, settings, options.steps, faults=True, links=without)
        equal = dict.fromkeys(FAULTS, ORDINARY)
        told["control"] = measure(options.config, settings, options.steps, faults=False, links=equal)
    if options.dry:
        print(json.dumps(told, indent=1))
    else:
        report("four_regions", told)


if __name__ == "__main__":
    main()
