"""The commands ``etude machines check``, which attacks machines, and ``parity``, which compares two kinds of
machines."""

from __future__ import annotations

import argparse
import asyncio
from collections import Counter
from collections.abc import Callable

import msgspec
from rich.table import Table
from rich.text import Text

from etude.cli.locations import console
from etude.environments import MachineGrader
from etude.environments.backends import open_runtime
from etude.errors import InputError, nearest
from etude.redteam import CATALOGUE, Cheat, Finding, Row, Verdict
from etude.redteam import check as play_all
from etude.redteam.booted import BootedRuntime
from etude.redteam.parity import Parity, probe_parity
from etude.redteam.plain import PlainRuntime
from etude.seams import Runtime

_HIGH_CHANCE_AUC = 0.8  # if chance alone reaches this AUC, there were too few machines
_PRINTED = (Verdict.SUCCEEDED, Verdict.CAUGHT, Verdict.KNOWN)


def check(args: argparse.Namespace) -> int:
    """Run all attacks on machines and print their results.

    Returns exit code 1 if an attack succeeds that was not expected to."""
    screen, found = console(), list[Finding]()

    def add(finding: Finding) -> None:
        found.append(finding)
        if args.verbose or finding.verdict in _PRINTED:
            screen.print(f"{finding.verdict}: {finding.cheat} ({finding.kind}): {finding.evidence}", markup=False)

    asyncio.run(_play(args.backend, _chosen(args.only), args.jobs or 1, add))
    if args.out is not None:
        args.out.write_bytes(msgspec.json.format(msgspec.json.encode(_report(args.backend, found))) + b"\n")
    screen.print(_table(found))
    skipped = {(f.kind, f.evidence) for f in found if f.verdict is Verdict.SKIPPED}
    for kind, why in sorted(skipped):
        screen.print(f"skipped on {kind}: {why}", markup=False)
    return int(any(finding.verdict is Verdict.SUCCEEDED for finding in found))


def _chosen(names: list[str]) -> list[Cheat]:
    """The attacks with these names or in these rows; all attacks if there are no names. Raises `InputError`."""
    rows = {row.name.lower() for row in Row}
    known = {cheat.name for cheat in CATALOGUE} | rows
    for name in names:
        if name not in known:
            hint = nearest(name, known)
            raise InputError(f"unknown attack {name!r}", hint=hint if len(hint) < 100 else nearest(name, rows))
    return [c for c in CATALOGUE if not names or c.name in names or c.row.name.lower() in names]


async def _play(backend: str, cheats: list[Cheat], jobs: int, add: Callable[[Finding], None]) -> None:
    runtime = open_runtime(backend)
    try:
        async for finding in play_all(runtime, MachineGrader(runtime), cheats=cheats, at_once=jobs):
            add(finding)
    finally:
        await runtime.close()


def _report(backend: str, found: list[Finding]) -> dict[str, object]:
    return {"backend": backend, "verdicts": dict(Counter(str(f.verdict) for f in found)), "findings": found}


def _table(found: list[Finding]) -> Table:
    table = Table("row", "programs", *Verdict)
    for row in Row:
        of_row = [finding for finding in found if finding.row is row]
        if of_row:
            count = Counter(finding.verdict for finding in of_row)
            programs = len({finding.cheat for finding in of_row})
            table.add_row(row, str(programs), *(str(count[verdict] or "") for verdict in Verdict))
    total = Counter(finding.verdict for finding in found)
    table.add_section()
    table.add_row("all", str(len({f.cheat for f in found})), *(str(total[v] or "") for v in Verdict))
    return table


def parity(args: argparse.Namespace) -> int:
    """Train a classifier to tell two kinds of machines apart, and print its accuracy and the facts that it uses.

    Returns the exit code."""
    if args.machines < 5:
        raise InputError(
            f"--machines {args.machines} is too few", hint="one fifth is used for testing: give at least 5"
        )
    result = asyncio.run(_probe_parity(args.a, args.b, args.machines))
    if args.out is not None:
        args.out.write_bytes(msgspec.json.format(msgspec.json.encode(result)) + b"\n")
    screen = console()
    (low, high), (chance_low, chance_high) = result.interval, result.chance
    verdict = "can be distinguished" if result.is_distinguishable else "cannot be distinguished by this classifier"
    screen.print(f"{result.a} and {result.b} {verdict}: AUC {result.auc:.3f} ({low:.3f} to {high:.3f}, 95 %)")
    screen.print(f"by chance: {chance_low:.3f} to {chance_high:.3f}; {result.num_machines} machines of each")
    table = Table("fact", "AUC of this fact alone", result.a, result.b)
    for each in result.giveaways:
        table.add_row(each.fact, f"{each.auc:.2f}", Text(each.of_a), Text(each.of_b))
    if chance_high > _HIGH_CHANCE_AUC:
        screen.print("too few machines for a clear result: increase --machines")
    if result.giveaways:
        screen.print(table)
    return 0


async def _probe_parity(a: str, b: str, num_machines: int) -> Parity:
    first = _open(a)
    second = first if a == b else _open(b)
    try:
        return await probe_parity(first, second, num_machines=num_machines, names=(a, b))
    finally:
        await first.close()
        await second.close()


def _open(name: str) -> Runtime:
    """A runtime: a backend, or one of the two kinds that exist only for this comparison."""
    if name == "booted":
        return BootedRuntime()
    return PlainRuntime() if name == "plain" else open_runtime(name)
