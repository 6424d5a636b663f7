"""Are rewards what was earned? References that are rejected, states that are rewarded untouched, cheats that succeed:
all three must be none, on every backend that can be had here.

    python -m benchmarks.grading.integrity HUMANEVAL.jsonl.gz [--backend B ...] [--part P] [--every B=N ...]
        [--within S]

References and untouched states: every task of the file, generated tasks (with canary tasks among them, whose reference
knows their word), and tasks mined here from a repository that is made for it (`integrity_tasks`), each judged in
machines of the backend. Cheats: the whole catalogue of `etude machines check`. A backend whose machines cannot be had
is named with the reason. With `--backend` the others keep what they had, each with its commit. Emulated machines are
slow: `--every microvm=8` takes every eighth task and cheat there, `--within S` leaves out the cheats that would be
played later than that, `--part references` or `--part cheats` does one of the two and keeps the other, and the result
says so; `--source humaneval mined` does these sources of references and keeps the others. With `--journal` every play
is kept as soon as it is over, with its commit, and the same command goes on with those that are missing; another
process may play `--backwards` meanwhile. Deadlines are several times the usual ones, so that what else a host does is
no verdict; how many programs their own deadline ended is told.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.grading.integrity_tasks import EveryNth, mined
from benchmarks.machines.server import served
from benchmarks.report import RESULTS, commit, report
from etude.environments import MachineGrader, simulate_exports
from etude.environments.backends import BACKENDS, open_runtime
from etude.environments.remote import RemoteRuntime
from etude.errors import MachineError, TaskError
from etude.records.task import Split
from etude.redteam import CATALOGUE, Cheat, Finding, Verdict
from etude.redteam import check as play
from etude.seams import Runtime, TaskSource
from etude.tasks import HumanEvalSource, Proof, RepairSource, check
from etude.tasks.canaries import WithCanaries
from etude.tasks.journal import Journal

KEY = "e2b_" + "0123456789" * 4
QUOTA = f'[bench]\nkey = "{KEY}"\nmax_live = 256\ncreations_per_minute = 1000000\n'
GENERATED, CANARIES = 64, 0.25
VERDICT_S, TESTS_S = 1800.0, 300.0
CALLS_S, PROGRAM_S, PLAY_S = 30.0, 60.0, 600.0
STRIDE, TOLD_EVERY = 8, 20
PARTS = ("references", "cheats")
SOURCES = ["humaneval", "generated", "mined"]
KEPT = RESULTS / "integrity.json"


@contextlib.asynccontextmanager
async def machines_of(backend: str) -> AsyncIterator[Runtime]:
    """A runtime; "remote" is our own server on loopback, a process of its own, over machines of namespaces."""
    async with contextlib.AsyncExitStack() as stack:
        if backend == "remote":
            runtime: Runtime = RemoteRuntime(stack.enter_context(served(QUOTA)), key=KEY)
        else:
            runtime = open_runtime(backend)
        try:
            yield runtime
        finally:
            await runtime.close()


async def references(runtime: Runtime, sources: dict[str, TaskSource], at_once: int) -> dict[str, Any]:
    """For each source: tasks, what was wrong of which, seconds."""
    num_proven = 0

    def tell() -> None:
        nonlocal num_proven
        num_proven += 1
        if num_proven % TOLD_EVERY == 0:
            print(f"{runtime.info.name}: {num_proven} tasks proven or not", file=sys.stderr, flush=True)

    grader, found = MachineGrader(runtime, deadline_s=TESTS_S), dict[str, Any]()
    for name, source in sources.items():
        began, proofs = time.perf_counter(), list[Proof]()
        for split in Split:
            size = source.size(split)
            if size != 0:
                export = partial(simulate_exports, runtime)
                settings: dict[str, Any] = {
                    "concurrency": at_once,
                    "deadline_s": VERDICT_S,
                    "export": export,
                    "told": tell,
                }
                proofs.append(await check(source, grader, split, size, **settings))
        found[name] = {
            "commit": commit(),
            "tasks": sum(proof.num_tasks for proof in proofs),
            "rejected_references_and_accepted_untouched_states": [
                f"{proof.split} {failure.index}: {failure.reason}" for proof in proofs for failure in proof.failures
            ],
            "wall_s": round(time.perf_counter() - began, 1),
        }
        print(f"{runtime.info.name}: {name}: {found[name]}", file=sys.stderr, flush=True)
    return found


@dataclass(frozen=True)
class Played:
    """A play, and what it was played with."""

    backend: str
    commit: str
    finding: Finding

    @property
    def key(self) -> str:
        return f"{self.backend} {self.finding.cheat} {self.finding.kind}"


async def cheats(
    runtime: Runtime,
    backend: str,
    chosen: Sequence[Cheat],
    at_once: int,
    within_s: float,
    journal: Journal[Played],
) -> dict[str, Any]:
    """What came of these cheats: every verdict counted, those worth reading by name."""
    began = time.perf_counter()
    keys = {f"{backend} {cheat.name} {kind}": (cheat, kind) for cheat in chosen for kind in cheat.kinds}
    left = [replace(cheat, kinds=(kind,)) for key, (cheat, kind) in keys.items() if key not in journal.entries]
    grader = MachineGrader(runtime, deadline_s=CALLS_S)
    playing = play(runtime, grader, cheats=left, at_once=at_once, program_s=PROGRAM_S, play_s=PLAY_S)
    now = commit()
    with contextlib.suppress(TimeoutError):
        async with contextlib.aclosing(playing), asyncio.timeout(within_s):
            async for finding in playing:
                journal.add(Played(backend, now, finding))
                verdict, num = finding.verdict, len(journal.entries)
                if verdict not in (Verdict.RESISTED, Verdict.SKIPPED) or num % TOLD_EVERY == 0:
                    told = f"{finding.cheat} ({finding.kind}): {verdict}: {finding.evidence}"
                    print(f"{backend}: {num} plays: {told}", file=sys.stderr, flush=True)
    entries = [entry for key, entry in journal.entries.items() if key in keys]
    found, num_plays = [entry.finding for entry in entries], len(keys)
    counts = Counter(finding.verdict for finding in found)

    def named(verdict: Verdict) -> list[str]:
        return [f"{f.cheat} ({f.kind}): {f.evidence}" for f in found if f.verdict is verdict]

    return {
        "commits": dict(Counter(entry.commit for entry in entries)),
        "plays": "all" if len(found) == num_plays else f"{len(found)} of {num_plays}",
        "programs": len({finding.cheat for finding in found}),
        "tried": len(found) - counts[Verdict.SKIPPED],
        "succeeded": named(Verdict.SUCCEEDED),
        "known": named(Verdict.KNOWN),
        "caught": named(Verdict.CAUGHT),
        "resisted": counts[Verdict.RESISTED],
        "ended_by_their_deadline": sum(f.evidence.startswith("it ended at its deadline") for f in found),
        "skipped": dict(Counter(f"{f.kind}: {f.evidence}" for f in found if f.verdict is Verdict.SKIPPED)),
        "wall_s": round(time.perf_counter() - began, 1),
    }


def _mixed(chosen: Sequence[Cheat]) -> list[Cheat]:
    """In another order, of which any beginning has cheats of every row."""
    return [cheat for first in range(STRIDE) for cheat in chosen[first::STRIDE]]


async def of_backend(
    backend: str, sources: dict[str, TaskSource], said: argparse.Namespace, scratch: Path
) -> dict[str, Any]:
    """Everything on one backend, or why it is not to be had here."""
    began, every = time.perf_counter(), dict(said.every).get(backend, 1)
    sample = "all" if every == 1 else f"every {every}th task of each split and every {every}th cheat"
    chosen: dict[str, TaskSource] = {name: EveryNth(source, None, every) for name, source in sources.items()}
    parts: dict[str, Any] = {}
    try:
        async with machines_of(backend) as runtime:
            isolation = runtime.info.isolation
            if "references" in (said.part or PARTS):
                proven = await references(runtime, chosen, said.jobs)
                parts["references"] = {"sample": sample, "sources": proven}
            if "cheats" in (said.part or PARTS):
                left_s = said.within - (time.perf_counter() - began)
                some = _mixed(CATALOGUE[::every])[:: -1 if said.backwards else 1]
                played = await cheats(runtime, backend, some, said.jobs, left_s, _journal(said.journal, scratch))
                print(f"{backend}: cheats: {played}", file=sys.stderr, flush=True)
                parts["cheats"] = {"sample": sample, **played}
            return {"isolation": isolation, **parts}
    except MachineError as error:
        return {"not_to_be_had": f"{error.what}: {error.facts}"}


async def measure(said: argparse.Namespace, folder: Path) -> dict[str, Any]:
    generated = WithCanaries(RepairSource(seed=0), share=CANARIES, seed=0)
    everything: dict[str, TaskSource] = {
        "humaneval": HumanEvalSource(said.data),
        "generated": EveryNth(generated, {Split.TRAIN: GENERATED, Split.HELDOUT: GENERATED}, 1),
    }
    kept = json.loads(KEPT.read_text()) if (said.backend or said.part) and KEPT.exists() else {"backends": {}}
    mining = kept.get("mining", {})
    if "references" in (said.part or PARTS) and "mined" in said.source:
        began = time.perf_counter()
        try:
            async with machines_of("namespace") as runtime:
                everything["mined"] = await mined(runtime, folder, at_once=said.jobs)
            mining = {"wall_s": round(time.perf_counter() - began, 1)}
        except (MachineError, TaskError) as error:
            mining = {"none": f"{error.what}: {error.facts}"}
    chosen = {name: source for name, source in everything.items() if name in said.source}
    rows = dict(kept["backends"])
    for backend in said.backend or BACKENDS:
        row, before = await of_backend(backend, chosen, said, folder), rows.get(backend, {})
        if "references" in row and said.source != SOURCES:
            row["references"]["sources"] = (
                before.get("references", {}).get("sources", {}) | row["references"]["sources"]
            )
        rows[backend] = before | row
    return {"mining": mining, "backends": rows, **_totals(rows)}


def _journal(named: Path | None, scratch: Path) -> Journal[Played]:
    return Journal(named or scratch / "plays.jsonl", Played)


def _totals(found: dict[str, Any]) -> dict[str, int]:
    """The two numbers that must be 0, over all backends, and of how many."""
    told = [source for each in found.values() for source in each.get("references", {}).get("sources", {}).values()]
    played = [each["cheats"] for each in found.values() if "cheats" in each]
    return {
        "proofs": sum(source["tasks"] for source in told),
        "wrong_proofs": sum(len(source["rejected_references_and_accepted_untouched_states"]) for source in told),
        "cheats_tried": sum(each["tried"] for each in played),
        "cheats_succeeded": sum(len(each["succeeded"]) for each in played),
    }


def _share(text: str) -> tuple[str, int]:
    backend, _, n = text.partition("=")
    if backend not in BACKENDS or not n.isdecimal() or int(n) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not BACKEND=N, with N from 1")
    return backend, int(n)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="a HumanEval-style .jsonl or .jsonl.gz")
    parser.add_argument("--backend", action="append", choices=list(BACKENDS), help="(repeatable; default: all)")
    parser.add_argument("--every", type=_share, action="append", default=[], metavar="B=N", help="only every Nth there")
    parser.add_argument("--within", type=float, default=math.inf, metavar="S", help="no cheats later, on each backend")
    parser.add_argument("--jobs", type=int, default=4, metavar="N", help="verdicts and cheats at once")
    parser.add_argument("--journal", type=Path, metavar="FILE", help="keep plays there, and play none of those in it")
    parser.add_argument("--backwards", action="store_true", help="play the last cheat first")
    parser.add_argument("--part", action="append", choices=PARTS, help="only this of the two (default: both)")
    parser.add_argument("--source", nargs="+", choices=SOURCES, default=SOURCES, help="only these references")
    said = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="integrity-") as folder:
        numbers = asyncio.run(measure(said, Path(folder)))
    report("integrity", numbers)
    if numbers["wrong_proofs"] or numbers["cheats_succeeded"]:
        raise SystemExit("rewards are not what was earned: see wrong proofs and cheats that succeeded")


if __name__ == "__main__":
    main()
