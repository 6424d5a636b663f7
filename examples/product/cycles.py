"""Runs the production loop with simulated users: `etude learn --releases` and `etude serve --releases`.

    PYTHONPATH=. python -m examples.product.cycles runs/product [--cycles 3] [--seed 0] [--set simulated=0.5]

The users work with the product until a window is full. The loop trains, plays the gate, and gives the candidate to half
of the users as a canary. Now a larger crowd of other users comes, each with a few requests: 64 users are too few for a
decision about a canary. Before the first and after every cycle the true opinions of the 64 users are measured, on
held-out requests of which nothing is captured."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from examples.product.agent import Agent
from examples.product.simulate import Say, give_consent, honest, measure, use
from examples.product.users import User, crowd

from etude.environments.child_process import die_with_parent
from etude.evals.intervals import clustered_rate
from etude.privacy import PrivacyFolder
from etude.signals import FeedbackFile

HOME = Path(__file__).parents[2]
SETTINGS = Path(__file__).with_name("learn.toml")
WAIT_S = 1800.0
"""The longest time without a line of a command, in seconds."""
SPREAD_S = 3.0
"""Signals come within this time; `settle_s` of learn.toml is longer."""
STEP = re.compile(r"window (\d+): step \d+: .* mean reward ([-.\d]+)")
END = re.compile(r"^window (\d+): (promoted|refused|rolled back|no change)")
CANARY = re.compile(r"canary at \d+ %")


class Command:
    """An `etude` command whose output is read line by line."""

    def __init__(self, process: asyncio.subprocess.Process, name: str) -> None:
        self.lines, self.process, self.name = list[str](), process, name
        self._reading = asyncio.create_task(self._read())
        self._more = asyncio.Event()

    async def _read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            self.lines.append(line.decode().rstrip())
            print(f"{self.name}: {self.lines[-1]}", file=sys.stderr)
            self._more.set()
        self._more.set()

    async def wait_for(self, pattern: str | re.Pattern[str], *, after: int = 0) -> int:
        """Wait for a line that matches, from line `after` on. Returns its number. Raises `RuntimeError` if the command
        ends before, `TimeoutError` after `WAIT_S` seconds without a new line."""
        at = after
        while True:
            self._more.clear()
            while at < len(self.lines):
                if re.search(pattern, self.lines[at]):
                    return at
                at += 1
            if self._reading.done():
                raise RuntimeError(
                    f"{self.name} has ended with exit code {await self.process.wait()}: {self.lines[-5:]}"
                )
            async with asyncio.timeout(WAIT_S):
                await self._more.wait()

    def found(self, pattern: re.Pattern[str], *, after: int = 0) -> bool:
        """Return whether a line from number `after` on matches, or the command has ended."""
        return self._reading.done() or any(pattern.search(line) for line in self.lines[after:])


@contextlib.asynccontextmanager
async def started(name: str, *words: str | Path) -> AsyncIterator[Command]:
    """Run an `etude` command while the block runs; then it is interrupted as by Ctrl-C."""
    argv = die_with_parent([sys.executable, "-m", "etude.cli", name, *map(str, words)], signal_name="INT")
    out, err = asyncio.subprocess.PIPE, None if name == "learn" else asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(*argv, cwd=HOME, stdout=out, stderr=err, start_new_session=True)
    command = Command(process, name)
    try:
        yield command
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
        try:
            async with asyncio.timeout(60):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


async def url_of(serve: Command) -> str:
    """Return the URL that `etude serve` prints when it is ready."""
    at = await serve.wait_for(r"^serving .* at http")
    return serve.lines[at].split(" at ")[1].split()[0]


def prepare(folder: Path, users: Sequence[User]) -> list[str]:
    """Create the folder of a product: the consent of its users, and an empty file of signals. Returns the arguments of
    `etude learn` that name them."""
    give_consent(folder / "privacy", users)
    with PrivacyFolder(folder / "privacy") as privacy:
        FeedbackFile(folder / "feedback.sqlite", privacy=privacy, create=True).close()
    return ["--privacy", str(folder / "privacy"), "--feedback", str(folder / "feedback.sqlite")]


async def run_cycles(
    run: Path,
    folder: Path,
    *,
    seed: int,
    cycles: int,
    per_user: int = 8,
    visitors: int = 128,
    settings: Path = SETTINGS,
    overrides: Sequence[str] = (),
    say: Say = honest,
    tell: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """Run cycles of the loop on a run whose model is served. `folder`: of consent, answers, signals and releases.

    `per_user`: measured requests of each of the 64 users. `visitors`: users who come during a canary. `say`: what users
    tell. `overrides`: settings of `etude learn`, such as "episodes=64". `tell` is called with the result of each cycle.

    Returns the opinions before and after each cycle, and what became of each candidate."""
    folder = folder.absolute()
    users, releases = crowd(64, seed), folder / "releases.sqlite"
    words = [
        *prepare(folder, users),
        "--settings",
        str(settings),
        *(word for one in overrides for word in ("--set", one)),
    ]
    words += ["--releases", str(releases), "--cycles", str(cycles), "--poll-s", "2"]
    began, cpu = time.monotonic(), cpu_s()
    made = list[dict[str, Any]]()
    async with contextlib.AsyncExitStack() as stack:
        learn = await stack.enter_async_context(started("learn", run.absolute(), *words))
        await learn.wait_for("^loop: ")
        capture = ["--capture", str(folder / "privacy"), "--feedback", str(folder / "feedback.sqlite")]
        serving = started("serve", run.absolute(), "--port", "0", "--releases", releases, *capture)
        url = await url_of(await stack.enter_async_context(serving))
        agent = await stack.enter_async_context(Agent(url, run.name))
        before = await opinions(agent, users, per_user)
        tell({"cycle": 0, **before})
        at, rounds = 0, 0
        for cycle in range(1, cycles + 1):
            counts = Counter[str]()
            while not learn.found(STEP, after=at):  # the 64 users fill the window
                rounds += 1
                counts.update(await use(agent, users, seed=1_000 * seed + rounds, rounds=2, spread_s=SPREAD_S, say=say))
            others = crowd(visitors, 1_000 * seed + cycle, prefix=f"visitor-{cycle}")
            end = asyncio.create_task(learn.wait_for(END, after=at))
            canary = asyncio.create_task(learn.wait_for(CANARY, after=at))
            await asyncio.wait({end, canary}, return_when=asyncio.FIRST_COMPLETED)
            while not end.done():  # half of the visitors get the canary, the others the stable version
                rounds += 1
                asked = use(agent, others, seed=1_000 * seed + rounds, rounds=1, spread_s=SPREAD_S, say=say)
                counts.update(await asked)
            canary.cancel()
            rewards = [float(found[2]) for line in learn.lines[at:] if (found := STEP.search(line))]
            line, at = learn.lines[await end], await end + 1
            found = END.search(line)
            assert found is not None
            row = {"cycle": cycle, "result": found[2], "reason": line.split(": ", 1)[1], "rewards": rewards}
            row["counts"] = dict(sorted(counts.items()))
            made.append(row | await opinions(agent, users, per_user))
            tell(made[-1])
    wall_s = time.monotonic() - began
    return {"before": before, "cycles": made, "wall_s": round(wall_s, 1), "cpu_s": round(cpu_s() - cpu, 1)}


async def opinions(agent: Agent, users: Sequence[User], per_user: int) -> dict[str, Any]:
    """Measure what share of held-out edits the users would keep, with a 95 % interval over users, and the share of each
    kind of answer."""
    found = await measure(agent, users, per_user=per_user)
    rate = clustered_rate([float(kept) for _, kept, _ in found], [user for user, _, _ in found])
    kinds = Counter(str(kind) for _, _, kind in found)
    shares = {kind: round(number / len(found), 4) for kind, number in sorted(kinds.items())}
    return {"kept": round(rate.value, 4), "low": round(rate.low, 4), "high": round(rate.high, 4), "kinds": shares}


def cpu_s() -> float:
    """CPU seconds of this process and of all children that have ended."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(one.ru_utime + one.ru_stime for one in map(resource.getrusage, kinds))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, help="a run of examples/product/config.toml")
    parser.add_argument("--folder", type=Path, help="a new folder for consent, answers, signals and releases")
    parser.add_argument("--cycles", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of etude learn")
    args = parser.parse_args()
    folder = args.folder or args.run.with_name(f"{args.run.name}-product")
    rules = {"seed": args.seed, "cycles": args.cycles, "overrides": args.set}
    done = run_cycles(args.run, folder, **rules, tell=lambda row: print(json.dumps(row)))
    print(json.dumps(asyncio.run(done), indent=2))


if __name__ == "__main__":
    main()
