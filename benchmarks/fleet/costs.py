"""What a host costs, measured on this one, and how well the simulation predicts a real burst from it.

A fork's price is taken under load, since a burst is load: requests are made all at once, and what is fitted is when all
machines were ready. Three prices come of bursts of several sizes (`fitted`): of a batch, of a machine, and what each
machine that is alive already adds to the next. How far the fit is from a burst it has not seen is `held_out`'s to say.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from benchmarks.fleet.hosts import Measured, Network
from benchmarks.fleet.model import Scenario, Simulated, simulate
from etude.seams import Machine, Runtime

_DEADLINE_S = 300.0
_CLOSING = 64  # machines at once
_ENOUGH = 16  # batches of a burst, to say how one differs from the next
_QUANTILES = 33
_NO_NETWORK = Network(latency_s=1e-6)
_WORK = """
import time
while True:
    until = time.perf_counter() + .01
    while time.perf_counter() < until: pass
    time.sleep(.09)
"""


@dataclass(frozen=True)
class Burst:
    """A burst that was made for real. Times in seconds from its begin."""

    all_ready_s: float
    ready_s: tuple[float, ...]  # of each request
    close_s: float  # of one machine, all closed at once


async def burst(
    runtime: Runtime,
    snapshot: str,
    machines: int,
    group: int,
    *,
    alive: Callable[[Sequence[Machine]], Awaitable[None]] | None = None,
) -> Burst:
    """Ask for all machines at once, a group a request; close them when they are all there (and `alive` was called).
    The runtime must allow so many."""
    began = time.perf_counter()
    made: list[Machine] = []

    async def ask(n: int) -> float:
        made.extend(await runtime.fork(snapshot, n, deadline_s=_DEADLINE_S))
        return time.perf_counter() - began

    sizes = [group] * (machines // group) + ([machines % group] if machines % group else [])
    try:
        ready_s = await asyncio.gather(*map(ask, sizes))
        if alive is not None:
            await alive(made)
    finally:
        closing = time.perf_counter()
        await _closed(made)
    close_s = (time.perf_counter() - closing) / max(1, len(made))
    return Burst(all_ready_s=max(ready_s), ready_s=tuple(ready_s), close_s=close_s)


async def _closed(machines: Sequence[Machine]) -> None:
    for i in range(0, len(machines), _CLOSING):
        await asyncio.gather(*(machine.close() for machine in machines[i : i + _CLOSING]))


async def measure(
    runtime: Runtime,
    snapshot: str,
    *,
    plan: Sequence[tuple[int, int]] = ((64, 1), (128, 4), (256, 16), (384, 16), (960, 16)),
    rounds: int = 5,
    tree_bytes: int = 4 << 20,
) -> Measured:
    """The costs of this host, idle but for this, from `rounds` bursts of each (machines, group) of the plan, in turns,
    so that a neighbour slows all of them. The largest is as many as a simulated host holds. The runtime must allow it,
    and ten machines a core."""
    await burst(runtime, snapshot, min(plan[0][0], 64), plan[0][1])  # the first is slower: it is not counted
    done = [(n, group, await burst(runtime, snapshot, n, group)) for _ in range(rounds) for n, group in plan]
    batch_s, fork_s, crowd_s = fitted([(n, group, one.all_ready_s) for n, group, one in done])
    busy = await _busy(runtime, snapshot, *plan[0], rounds)
    [machine] = await runtime.fork(snapshot, 1)
    exec_s = []
    for i in range(50):
        began = time.perf_counter()
        await machine.exec(["true"], key=f"calibrate-{i}", deadline_s=_DEADLINE_S)
        exec_s.append(time.perf_counter() - began)
    await machine.close()
    began = time.perf_counter()
    await runtime.prepare({"tree": bytes(tree_bytes)})
    load_s = time.perf_counter() - began
    found = Measured(
        batch_s=batch_s,
        fork_s=fork_s,
        crowd_s=crowd_s,
        busy=busy,
        close_s=statistics.median(one.close_s for _, _, one in done),
        exec_s=statistics.median(exec_s),
        load_s_per_byte=load_s / tree_bytes,
        spread=_spread([one.ready_s for n, group, one in done if n // group >= _ENOUGH]),
        message_s=await message_s(),
    )
    whole = [one.all_ready_s / burst_s(found, n, group) for n, group, one in done]
    return _with_control(replace(found, host_spread=tuple(round(ratio, 4) for ratio in sorted(whole))))


async def held_out(
    runtime: Runtime, snapshot: str, measured: Measured, plan: Sequence[tuple[int, int]], *, rounds: int = 3
) -> list[dict[str, float]]:
    """Bursts that nothing was fitted to, beside what is predicted of them: a row a burst of the plan, in turns."""
    done = [
        (number, await burst(runtime, snapshot, *plan[number])) for _ in range(rounds) for number in range(len(plan))
    ]
    rows = []
    for number, (machines, group) in enumerate(plan):
        took_s = [one.all_ready_s for which, one in done if which == number]
        predicted_s = predict(measured, machines, group).all_ready_s
        errors = [predicted_s / one - 1 for one in took_s]
        rows.append(
            {
                "machines": machines,
                "group": group,
                "predicted_s": round(predicted_s, 4),
                "measured_s": round(statistics.median(took_s), 4),
                "error": round(statistics.median(errors), 4),
                "error_min": round(min(errors), 4),
                "error_max": round(max(errors), 4),
            }
        )
    return rows


def burst_s(measured: Measured, machines: int, group: int) -> float:
    """A burst on one idle host, by the fitted costs alone."""
    whole = sum(measured.work_s(group, alive=alive) for alive in range(0, machines - group + 1, group))
    left = machines % group
    return whole + (measured.work_s(left, alive=machines - left) if left else 0.0)


def fitted(bursts: Sequence[tuple[int, int, float]]) -> tuple[float, float, float]:
    """(batch_s, fork_s, crowd_s) of (machines, group, seconds): least squares of the relative error, none below 0.

    A burst of m batches of g takes ``m batch_s + m g fork_s + g^2 m (m - 1) / 2 crowd_s``: the k-th batch is forked
    beside the k g machines before it.

    >>> bursts = [(n, g, n / g * 0.002 + n * 0.001) for n, g in ((8, 1), (64, 4), (256, 16))]
    >>> [round(x, 6) for x in fitted(bursts)]
    [0.002, 0.001, 0.0]
    """
    rows = np.array([(n / g, n, n * (n - g) / 2) for n, g, _ in bursts], float)
    took = np.array([seconds for *_, seconds in bursts], float)
    kept = [0, 1, 2]
    while True:
        found, *_ = np.linalg.lstsq(rows[:, kept] / took[:, None], np.ones(len(took)), rcond=None)
        if found.min() >= 0 or len(kept) == 1:
            break
        del kept[int(found.argmin())]
    costs = dict(zip(kept, found.tolist(), strict=True))
    return max(0.0, costs.get(0, 0.0)), max(0.0, costs.get(1, 0.0)), max(0.0, costs.get(2, 0.0))


def _spread(bursts: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Times between one batch and the next over their mean, as so many quantiles. Several are forked at once and come
    together, so this is more than one batch varies."""
    gaps: list[float] = []
    for ready_s in bursts:
        ranked = sorted(ready_s)
        between = [after - before for before, after in pairwise(ranked)]
        mean = statistics.fmean(between)
        gaps += [gap / mean for gap in between]
    if len(gaps) < 2:
        return (1.0,)
    quantiles = statistics.quantiles(gaps, n=_QUANTILES, method="inclusive")
    return tuple(round(value / statistics.fmean(quantiles), 4) for value in quantiles)


async def _busy(runtime: Runtime, snapshot: str, machines: int, group: int, rounds: int) -> float:
    """How many times longer a burst takes beside machines that ask for all cores, a tenth of one each."""
    alone, beside = [], []
    for _ in range(rounds):
        alone.append((await burst(runtime, snapshot, machines, group)).all_ready_s)
        workers = [m for _ in range(os.cpu_count() or 1) for m in await runtime.fork(snapshot, 10)]
        for number, worker in enumerate(workers):
            command = ["sh", "-c", f"python3 -c '{_WORK}' >/dev/null 2>&1 &"]
            await worker.exec(command, key=f"work-{number}", deadline_s=_DEADLINE_S)
        beside.append((await burst(runtime, snapshot, machines, group)).all_ready_s)
        await _closed(workers)
    return max(1.0, statistics.median(beside) / statistics.median(alone))


async def message_s(messages: int = 2000) -> float:
    """CPU of a message that is read, parsed and answered, and of the answer read: both ends are counted."""
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)
    try:
        began = time.process_time()
        for number in range(messages):
            theirs.sendall(json.dumps({"what": "started", "batch": number, "host": "host017"}).encode() + b"\n")
            told = json.loads(await reader.readline())
            writer.write(json.dumps({"known": told["batch"]}).encode() + b"\n")
            theirs.recv(256)
        return (time.process_time() - began) / messages
    finally:
        writer.close()
        theirs.close()


def _with_control(measured: Measured) -> Measured:
    """With what the placement itself takes, as it was when it placed a small fleet full."""
    calls = simulate(Scenario(machines=20_000, hosts=21, horizon_s=8.0), measured=measured).calls

    def each_s(*names: str) -> float:
        number, sum_s = map(sum, zip(*(calls.get(name, (0, 0.0)) for name in names), strict=True))
        return round(sum_s / max(1, number), 7)

    return replace(
        measured,
        place_s=each_s("place", "retry", "failed"),
        started_s=each_s("started"),
        ended_s=each_s("ended"),
        review_s=each_s("review"),
    )


def predict(measured: Measured, machines: int, group: int) -> Simulated:
    """The simulation of `burst` on one host, whose machines do nothing."""
    scenario = Scenario(
        machines=machines,
        group=group,
        snapshots=1,
        hosts=1,
        cores=1000 * machines,
        mean_life_s=1e9,
        horizon_s=20.0 + 4 * machines * (measured.fork_s + measured.batch_s),
    )
    one = replace(measured, spread=(1.0,), host_spread=(1.0,), message_s=0.0, place_s=0.0, started_s=0.0, ended_s=0.0)
    return simulate(scenario, measured=one, network=_NO_NETWORK)
