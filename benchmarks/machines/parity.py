"""Can machines made for training be told from those of a product? Each backend that works here, against three products.

``plain``: tools as processes of a host. ``booted``: a virtual machine that booted, as ours boot, and was never forked.
And each backend against itself, every other machine, as the control: an AUC outside of chance there would be the
probe's fault. All machines of all kinds are made in one random order, so that what only drifts with time tells nothing.

Forks of one boot share what chance made of that boot, and a detector that has seen some knows others by it. So there
are two kinds of virtual machine: ``microvm``, forks of one boot, and ``microvm, other boots``, each a fork of a boot of
its own, by which it would know that a machine was forked at all.

    python -m benchmarks.machines.parity [--machines 20] [--kinds KIND ...]

With `--kinds` the pairs of others keep what they had, each with its commit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from benchmarks.report import RESULTS, commit, report
from etude.environments.backends import open_runtime
from etude.environments.microvm import MicroVMRuntime, find
from etude.errors import MachineError
from etude.records.image import Image
from etude.redteam.booted import BootedRuntime
from etude.redteam.parity import Facts, Parity, compare, observe
from etude.redteam.plain import PlainRuntime
from etude.seams import Machine, Runtime, RuntimeInfo


class OtherBoots:
    """A `Runtime` of forks, each of a boot of its own. One fork lives at a time."""

    info = RuntimeInfo(name="microvm", isolation="own kernel", users=("user", "root"), forks_memory=True)

    def __init__(self) -> None:
        self._image = find()
        self._home = tempfile.TemporaryDirectory(prefix="parity-")
        self._num_boots = 0
        self._inner: Runtime | None = None
        self._files: Mapping[str, bytes] = {}

    async def prepare(self, files: Mapping[str, bytes], *, image: Image | None = None) -> str:
        """See `Runtime.prepare`: nothing boots yet."""
        assert image is None, "the runtime's own image"
        self._files = files
        return "these"

    async def fork(self, snapshot: str, n: int, *, deadline_s: float = 30.0) -> list[Machine]:
        """See `Runtime.fork`."""
        await self._end()
        self._num_boots += 1
        folder = Path(self._home.name, str(self._num_boots), "microvm")
        folder.mkdir(parents=True)
        (folder / "current").write_text(self._image.digest)
        (folder / self._image.digest).symlink_to(self._image.disk.parent)
        self._inner = MicroVMRuntime(folder=folder.parent, spare=1)
        return await self._inner.fork(await self._inner.prepare(self._files), n, deadline_s=deadline_s)

    async def _end(self) -> None:
        if self._inner is not None:
            await self._inner.close()
            shutil.rmtree(Path(self._home.name, str(self._num_boots)))

    async def close(self) -> None:
        """See `Runtime.close`."""
        await self._end()
        self._home.cleanup()


KEPT = RESULTS / "parity.json"
KINDS: dict[str, Callable[[], Runtime]] = {
    "namespace": lambda: open_runtime("namespace"),
    "gvisor": lambda: open_runtime("gvisor"),
    "microvm": lambda: open_runtime("microvm"),
    "microvm, other boots": OtherBoots,
}
PRODUCTS: dict[str, Callable[[], Runtime]] = {"plain": PlainRuntime, "booted": BootedRuntime}


async def seen_in(kinds: Sequence[str], num_machines: int) -> tuple[dict[str, list[Facts]], dict[str, str]]:
    """What is seen in machines of each kind, and why the others are not to be had."""
    runtimes: dict[str, Runtime] = {}
    missing: dict[str, str] = {}
    for name in (*PRODUCTS, *kinds):
        try:
            runtimes[name] = (PRODUCTS | KINDS)[name]()
        except MachineError as error:
            missing[name] = f"{error.what}: {error.facts}"
    try:
        seen = await observe(list(runtimes.values()), num_machines=num_machines)
    finally:
        for runtime in runtimes.values():
            await runtime.close()
    return dict(zip(runtimes, seen, strict=True)), missing


def told(found: Parity) -> dict[str, object]:
    """A comparison as plain data, its ten strongest giveaways. What this host has by itself is its owner's."""
    whole = msgspec.to_builtins(found)
    if found.b == "plain":
        whole["giveaways"] = [{**each, "of_b": "this host's"} for each in whole["giveaways"]]
    return {"commit": commit(), **whole, "told_apart": found.is_distinguishable, "giveaways": whole["giveaways"][:10]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machines", type=int, default=20, help="of each kind")
    parser.add_argument("--kinds", action="append", choices=[*KINDS], help="(repeatable; default: all)")
    args = parser.parse_args()
    kinds = [kind for kind in KINDS if kind in (args.kinds or KINDS)]
    seen, missing = asyncio.run(seen_in(kinds, args.machines))
    results: dict[str, object] = json.loads(KEPT.read_text())["pairs"] if args.kinds and KEPT.exists() else {}
    for kind in (kind for kind in kinds if kind in seen):
        results[f"{kind} | {kind}"] = told(compare(seen[kind][::2], seen[kind][1::2], names=(kind, kind)))
        for product in (product for product in PRODUCTS if product in seen):
            results[f"{kind} | {product}"] = told(compare(seen[kind], seen[product], names=(kind, product)))
    report("parity", {"missing": missing, "pairs": results})


if __name__ == "__main__":
    main()
