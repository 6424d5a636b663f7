"""What a user's calls cost, all proofs included: `encode`, `apply` into new memory and in place, following.

One child process for each number of cores, held to so many by its affinity, as a user's process is. It measures the
calls and, in turn with them, *memcpy* (a copy of a snapshot into memory that is there, a part by each core: two cores
to one of this is the roof of what two cores can gain), *fresh copy* (by one core, into memory that is not there, which
`apply` into new memory cannot beat) and *scan* (one pass that compares both snapshots, by all cores). GB of snapshot a
second: on one core by CPU time, and the ratio of two cores to one by wall time, the shortest of `--repeats`. Pairs are
those of `benchmarks.weights.delta_pairs`, stacked to over 100 MB as in `benchmarks.weights.delta`; every result is
compared with the target. *update* is `LiveFollower.prepare`, `Target.prepare` and `Swap.apply` over one published
version. *of bound* is of the objects; *file of bound* of the whole delta file, whose table is long where tensors are as
small as these.

A wrong base and a flipped bit must be refused here, too: each call is tried with both.
`python -m benchmarks.weights.delta_public [--pairs PAIR ...] [--repeats N]`
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

PAIRS = ("bf16/adamw-1e-6/1", "bf16/adamw-3e-6/1", "fp8/adamw-1e-6/1")
GOALS = {
    "best": {"encode": 0.2, "apply in place": 0.25},
    "fast": {"encode": 0.25, "apply in place": 0.4},
    "two_cores": 1.7,
    "of_bound": 0.95,
}
CALLS = ("encode", "apply new", "apply in place", "update")


def measure(name: str, repeats: int) -> dict[str, Any]:
    """One pair, in this process, on the cores that it has."""
    from concurrent.futures import ThreadPoolExecutor

    import numpy as np

    from benchmarks.weights import delta_pairs
    from benchmarks.weights.delta import LEAST_BYTES, MODES, Arena, _copy, _same, _tensors, stacked
    from etude.errors import WeightsError
    from etude.stores import MemoryStore
    from etude.weights import Channel, apply, bound, encode
    from etude.weights.delta.delta_file import read
    from etude.weights.delta.native import NativeKernels
    from etude.weights.follow.live_follower import LiveFollower
    from etude.weights.follow.runtime_map import Map, named
    from etude.weights.follow.targets import Target

    pair = delta_pairs.load(name)
    copies = -(-LEAST_BYTES // pair.num_bytes)
    old, new = (Arena(stacked(tensors, copies)) for tensors in (pair.old, pair.new))
    live, spare = Arena(old.tensors), np.zeros_like(old.bytes)
    shortest: dict[str, list[float]] = {}

    def took(what: str, work: Callable[[], Any]) -> Any:
        wall, cpu = time.perf_counter(), time.process_time()
        made = work()
        found = [time.process_time() - cpu, time.perf_counter() - wall]
        shortest[what] = [min(pair) for pair in zip(shortest.get(what, found), found, strict=True)]
        return made

    kernels, width = NativeKernels(), old.codes[0].itemsize
    flat = [side.bytes[: side.bytes.size // width * width].view(f"u{width}") for side in (old, new)]

    def by_threads(work: Callable[..., Any], *sides: Any) -> None:
        if kernels.threads == 1:
            work(*sides)
            return
        with ThreadPoolExecutor(kernels.threads) as pool:
            list(pool.map(work, *(np.array_split(one, kernels.threads) for one in sides)))

    store, names = MemoryStore(), [*live.named()]
    channel = Channel(store)
    first = channel.publish(_tensors(old), step=0, parent=None, rollout_ids=[])
    pointer = store.get("pointers/policy")
    channel.publish(_tensors(new), step=1, parent=first.version, rollout_ids=[])
    ahead = store.get("pointers/policy")
    follower = LiveFollower(store, dict(zip(names, live.tensors, strict=True)))
    places = zip(names, live.codes, live.specs, strict=True)
    target = Target(Map(named({key: codes.reshape(spec.shape) for key, codes, spec in places})))

    def update() -> None:
        coming = follower.prepare()
        assert coming is not None
        target.prepare(coming, follower.specs, undoable=False).apply()

    files: dict[str, bytes] = {}
    for _ in range(repeats):
        took("memcpy", partial(by_threads, np.copyto, spare, old.bytes))
        took("fresh copy", lambda: old.bytes.copy())
        took("scan", partial(by_threads, kernels.count_changed, *flat))
        for mode in MODES:
            files[mode] = took(f"{mode} encode", partial(encode, _tensors(old), _tensors(new), mode=mode))
            made = took(f"{mode} apply new", partial(apply, _tensors(old), files[mode]))
            _same([made[key].reshape(-1).view(c.dtype) for key, c in zip(names, new.codes, strict=True)], new.codes)
            _copy(live, old)
            took(f"{mode} apply in place", partial(apply, _tensors(live), files[mode], live.named()))
            _same(live.codes, new.codes)
        _copy(live, old)
        store.compare_and_swap("pointers/policy", ahead, pointer)
        follower = LiveFollower(store, dict(zip(names, live.tensors, strict=True)))
        assert follower.start_from(first.version)
        store.compare_and_swap("pointers/policy", pointer, ahead)
        took("best update", update)
        _same(live.codes, new.codes)
    for mode in MODES:
        live.codes[-1][-1] ^= 1
        for wrong in (new, live):
            try:
                apply(_tensors(wrong), files[mode])
            except WeightsError as error:
                if error.what != "this delta is for another base":
                    raise
            else:
                raise SystemExit("a wrong base was taken")
        live.codes[-1][-1] ^= 1
    sides = [{str(i): tensor for i, tensor in enumerate(side)} for side in (pair.old, pair.new)]
    files = {mode: encode(*sides, mode=mode) for mode in MODES}
    objects = {mode: sum(len(data) for _, data in read(file).objects) for mode, file in files.items()}
    least = bound(*sides)
    return {
        "seconds": {what: {"cpu": cpu, "wall": wall} for what, (cpu, wall) in shortest.items()},
        "num_bytes": old.num_bytes,
        "of_bound": {mode: round(least / size, 4) for mode, size in objects.items()},
        "file_of_bound": {mode: round(least / len(file), 4) for mode, file in files.items()},
        "load_average": os.getloadavg()[0],
    }


def child(name: str, repeats: int, cores: int) -> dict[str, Any]:
    """`measure` in a process that has so many cores."""
    held = sorted(os.sched_getaffinity(0))[:cores]
    command = [sys.executable, "-m", "benchmarks.weights.delta_public", "--one", name, "--repeats", str(repeats)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, preexec_fn=lambda: os.sched_setaffinity(0, held))
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def row(name: str, repeats: int) -> dict[str, Any]:
    """One pair on one core and on two."""
    one, two = child(name, repeats, 1), child(name, repeats, 2)
    seconds, num_bytes = one["seconds"], one["num_bytes"]
    memcpy = seconds["memcpy"]["cpu"]
    found: dict[str, Any] = {
        "pair": name,
        "num_bytes": num_bytes,
        "of_bound": one["of_bound"],
        "file_of_bound": one["file_of_bound"],
        "load_average": [one["load_average"], two["load_average"]],
    }
    for what in seconds:
        cpu = seconds[what]["cpu"]
        found[what] = {
            "gb_per_s": round(num_bytes / 1e9 / cpu, 3),
            "of_memcpy": round(memcpy / cpu, 4),
            "two_cores": round(seconds[what]["wall"] / two["seconds"][what]["wall"], 3),
        }
    return found


def main() -> None:
    from benchmarks.report import report

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", nargs="+", default=list(PAIRS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        json.dump(measure(args.one, args.repeats), sys.stdout)
        return
    report("delta_public", {"goals": GOALS, "pairs": [row(name, args.repeats) for name in args.pairs]})


if __name__ == "__main__":
    main()
