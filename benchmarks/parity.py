"""Can machines made for training be told from those of a product? Each backend that works here, against three products.

``plain``: tools as processes of a host. ``booted``: a virtual machine that booted, as ours boot, and was never forked.
And each backend against itself, halved, as the control: an AUC outside of chance there would be the probe's fault.
All machines of all kinds are made in one random order, so that what only drifts with time tells nothing.

    python -m benchmarks.parity [--machines 20] [--kinds namespace,gvisor,microvm]
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Sequence

import msgspec

from benchmarks.report import report
from etude.environments.backends import open_runtime
from etude.environments.cheats.booted import BootedRuntime
from etude.environments.cheats.parity import Parity, Seen, compare, look_at
from etude.environments.cheats.plain import PlainRuntime
from etude.errors import MachineError
from etude.seams import Runtime

KINDS = ("namespace", "gvisor", "microvm")
PRODUCTS: dict[str, Callable[[], Runtime]] = {"plain": PlainRuntime, "booted": BootedRuntime}


async def seen_in(kinds: Sequence[str], num_machines: int) -> tuple[dict[str, list[Seen]], dict[str, str]]:
    """What is seen in machines of each kind, and why the others are not to be had."""
    runtimes: dict[str, Runtime] = {}
    missing: dict[str, str] = {}
    for name in (*PRODUCTS, *kinds):
        try:
            runtimes[name] = PRODUCTS[name]() if name in PRODUCTS else open_runtime(name)
        except MachineError as error:
            missing[name] = f"{error.what}: {error.facts}"
    try:
        seen = await look_at(list(runtimes.values()), num_machines=num_machines)
    finally:
        for runtime in runtimes.values():
            await runtime.close()
    return dict(zip(runtimes, seen, strict=True)), missing


def told(found: Parity) -> dict[str, object]:
    """A comparison as plain data, its ten strongest giveaways."""
    whole = msgspec.to_builtins(found)
    return {**whole, "told_apart": found.told_apart, "giveaways": whole["giveaways"][:10]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machines", type=int, default=20, help="of each kind")
    parser.add_argument("--kinds", default=",".join(KINDS))
    args = parser.parse_args()
    kinds = args.kinds.split(",")
    seen, missing = asyncio.run(seen_in(kinds, args.machines))
    results: dict[str, object] = {}
    for kind in (kind for kind in kinds if kind in seen):
        half = len(seen[kind]) // 2
        results[f"{kind}, {kind}"] = told(compare(seen[kind][:half], seen[kind][half:], names=(kind, kind)))
        for product in (product for product in PRODUCTS if product in seen):
            results[f"{kind}, {product}"] = told(compare(seen[kind], seen[product], names=(kind, product)))
    report("parity", {"num_machines": args.machines, "missing": missing, "pairs": results})


if __name__ == "__main__":
    main()
