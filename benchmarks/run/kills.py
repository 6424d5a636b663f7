"""A run of the laptop example that is killed again and again, and resumed; then the audit.

SIGKILL at seeded random times to the learner, an engine, the worker, the grader and the conductor; and to the learner
between the steps of the commit: the kernel tells (inotify) that an object, the manifest or the pointer was renamed into
the store, and the kill follows within a fraction of a millisecond. Where the store really stood is read from it
afterwards. A killed conductor's children must be gone before the script resumes the run. Any other end of the run is a
failure of the benchmark.
`python -m benchmarks.run.kills --start CHECKPOINT [--config TOML] [--steps 20] [--kills 24] [--seed 0] [--set a.b=c]`
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import random
import re
import select
import signal
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import report
from benchmarks.runs import ETUDE, LAPTOP, new_folder, overrides, summary

AT_RANDOM = ("learner", "engine", "worker", "grader", "conductor")
IN_COMMIT = ("objects", "manifests", "pointers")
PATIENCE_S = 600.0
_IN_MOVED_TO = 0x80
_EVENT = struct.Struct("iIII")


def plan(kills: int, draw: random.Random) -> list[str]:
    """What is killed, in order: every target about equally often."""
    found: list[str] = []
    while len(found) < kills:
        targets = [*AT_RANDOM, *IN_COMMIT]
        draw.shuffle(targets)
        found += targets
    return found[:kills]


class Run:
    """The run under attack, seen from outside: its processes and its events."""

    def __init__(self, config: Path, settings: Sequence[str], *, again: Path | None = None) -> None:
        """A new run; or `again`, the folder of one that was left."""
        self.folder = again or new_folder("kills")
        self._argv = [*ETUDE, "run", str(config), *overrides(settings)]
        words = ["--name", self.folder.name] if again is None else ["--resume", str(again)]
        self.conductor = subprocess.Popen([*self._argv, *words], stdout=sys.stderr)
        self.resumes = 0

    def resume(self) -> None:
        self.resumes += 1
        self.conductor = subprocess.Popen([*self._argv, "--resume", str(self.folder)], stdout=sys.stderr)

    def events(self, kind: str) -> Iterator[dict[str, Any]]:
        """Of the conductor, oldest first; a line that is being written is skipped."""
        with contextlib.suppress(FileNotFoundError):
            for line in (self.folder / "events" / "conductor.jsonl").read_bytes().splitlines():
                with contextlib.suppress(ValueError):
                    event = json.loads(line)
                    if event["kind"] == kind:
                        yield event

    @property
    def step(self) -> int:
        return max((int(e["step"]) for e in self.events("rl.step")), default=-1)

    def up(self, name: str) -> int | None:
        """The pid of a child that is ready."""
        state = [(e["state"], e.get("pid")) for e in self.events("process") if e["name"] == name]
        return state[-1][1] if state and state[-1][0] == "ready" else None

    def pids(self) -> list[int]:
        return [int(e["pid"]) for e in self.events("process") if e["state"] == "start"]

    def wait(self, condition: Callable[[], Any], what: str) -> Any:
        """What the condition gave, once it is true; None when the run has ended well meanwhile."""
        end = time.monotonic() + PATIENCE_S
        while not (found := condition()):
            code = self.conductor.poll()
            if code == 0:
                return None
            if code is not None:
                raise SystemExit(f"the run ended with exit code {code} while waiting for {what}; see {self.folder}")
            if time.monotonic() > end:
                raise SystemExit(f"waited {PATIENCE_S:g} s for {what}; see {self.folder}")
            time.sleep(0.02)
        return found


def kill(run: Run, target: str, draw: random.Random) -> str | None:
    """Kill one target; the word under which it is counted. None: the run was over first."""
    if target in IN_COMMIT:
        return _kill_in_commit(run, target)
    if target == "conductor":
        return _kill_conductor(run)
    name = {"engine": f"engine-{draw.randrange(2)}", "learner": "learner"}.get(target, f"{target}-0")
    pid = run.wait(lambda: run.up(name), f"{name} to be up")
    if pid is None:
        return None
    _sigkill(pid)
    return target


def _kill_conductor(run: Run) -> str | None:
    if run.conductor.poll() is not None:
        return None
    end_conductor(run)
    run.resume()
    return "conductor"


def end_conductor(run: Run) -> None:
    """Kill it; its children are gone when this returns."""
    run.conductor.kill()
    run.conductor.wait()
    began = time.monotonic()
    while alive := [pid for pid in run.pids() if _is_ours(pid, run.folder)]:
        if time.monotonic() - began > 10.0:
            raise SystemExit(f"orphans 10 s after the conductor was killed: {alive}")
        time.sleep(0.01)


def _kill_in_commit(run: Run, stage: str) -> str | None:
    pid = run.wait(lambda: run.up("learner"), "the learner to be up")
    store = run.folder / "weights"
    if pid is None or not run.wait(lambda: (store / "pointers").is_dir(), "a first version"):
        return None
    before = _contents(store)
    with _Renames([store / "pointers", *(p for p in store.rglob("*") if p.is_dir() and _kept(p, store))]) as renames:
        seen = run.wait(lambda: renames.saw(lambda path: _stage_of(path, store) == stage), f"a rename into {stage}")
        if not seen:
            return None
        _sigkill(pid)
    return f"learner, {_where(before, _contents(store, after=pid))}"


def _where(before: dict[str, Any], after: dict[str, Any]) -> str:
    """How far the commit had come when the learner was dead."""
    if before["pointers"] != after["pointers"]:
        return "pointer moved"
    if before["manifests"] != after["manifests"]:
        return "manifest written, pointer not moved"
    return "objects written, no manifest" if before["objects"] != after["objects"] else "nothing written"


def _contents(store: Path, *, after: int | None = None) -> dict[str, Any]:
    """Keys of objects and manifests, bytes of pointers; once the process `after` is dead."""
    while after is not None and _state(after) not in ("", "Z"):
        time.sleep(0.001)
    keys = [p for p in store.rglob("*") if p.is_file() and _kept(p, store)]
    found: dict[str, Any] = {stage: sorted(str(p) for p in keys if _stage_of(p, store) == stage) for stage in IN_COMMIT}
    return {**found, "pointers": {name: Path(name).read_bytes() for name in found["pointers"]}}


def _kept(path: Path, store: Path) -> bool:
    return not any(part.startswith(".") for part in path.relative_to(store).parts)


def _stage_of(path: Path, store: Path) -> str:
    return path.relative_to(store).parts[0]


class _Renames:
    """Tells of files that are renamed into any of the folders (inotify). New object folders are made by the writer at
    times; their parent tells of them, which comes to the same."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        self._folders: dict[int, Path] = {}
        for folder in folders:
            mask = _IN_MOVED_TO | (0x100 if folder.name == "objects" else 0)  # and IN_CREATE of a folder of objects
            self._folders[self._libc.inotify_add_watch(self._fd, os.fsencode(folder), mask)] = folder

    def __enter__(self) -> _Renames:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def saw(self, wanted: Callable[[Path], bool]) -> bool:
        """Whether a rename into a wanted path is told within a second."""
        if not select.select([self._fd], [], [], 1.0)[0]:
            return False
        data, at = os.read(self._fd, 1 << 16), 0
        while at < len(data):
            watch, _, _, size = _EVENT.unpack_from(data, at)
            name = data[at + _EVENT.size : at + _EVENT.size + size].rstrip(b"\0").decode()
            at += _EVENT.size + size
            if wanted(self._folders[watch] / name):
                return True
        return False


def _sigkill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _is_ours(pid: int, folder: Path) -> bool:
    try:
        return str(folder) in Path(f"/proc/{pid}/cmdline").read_text() and _state(pid) != "Z"
    except OSError:
        return False


def audit(run: Path) -> dict[str, int]:
    """The numbers of ``etude ledger audit``."""
    done = subprocess.run([*ETUDE, "ledger", "audit", str(run)], stdout=subprocess.PIPE, text=True)
    lost, twice, leaked, consumed, rollouts, steps = map(int, re.findall(r"\d+", done.stdout))
    return {
        "exit_code": done.returncode,
        "lost": lost,
        "trained_twice": twice,
        "leaked_slots": leaked,
        "rollouts": rollouts,
        "consumed": consumed,
        "steps": steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--start", type=Path, required=True, help="a mid-trained checkpoint")
    parser.add_argument("--config", type=Path, default=LAPTOP)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--kills", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c")
    args = parser.parse_args()
    draw = random.Random(args.seed)
    began = time.perf_counter()
    run = Run(args.config, [f"start={args.start.resolve()}", f"rl.steps={args.steps}", *args.set])
    counts: Counter[str] = Counter()
    try:
        for number, target in enumerate(plan(args.kills, draw)):
            if run.wait(lambda due=number * args.steps // args.kills: run.step >= due, "the next step") is None:
                break
            time.sleep(draw.uniform(0.0, 3.0))  # anywhere within a step
            killed = kill(run, target, draw)
            if killed is None:
                break
            counts[killed] += 1
            print(f"kill {sum(counts.values())} at step {run.step}: {killed}", file=sys.stderr, flush=True)
        run.wait(lambda: False, "the end")
    finally:
        if run.conductor.poll() is None:
            run.conductor.kill()
    told = summary(run.folder)
    lineages = [e["state"] for e in run.events("lineage")]
    report(
        "kills",
        {
            **audit(run.folder),
            "finished": told["finished"],
            "kills": sum(counts.values()),
            "killed": dict(sorted(counts.items())),
            "resumes": run.resumes,
            "lineages_lost": lineages.count("lost"),
            "restarts": dict(Counter(e["name"] for e in run.events("process") if e["state"] == "restart")),
            "invalid": told["invalid"],
            "seed": args.seed,
            "wall_s": round(time.perf_counter() - began, 1),
        },
    )


if __name__ == "__main__":
    main()
