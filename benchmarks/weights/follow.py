"""What following costs an engine: memory, the pause, and catching up. A model of 1 GB in bf16, real optimiser steps.

The versions are those of `benchmarks.weights.delta_pairs` at 1e-6, of which 1.1 % change in a step, `--copies` times
over, in two layouts, since what is kept for each tensor does not depend on its size:

    stacked    each tensor is `--copies` copies, stacked: 2.9 MB a tensor. In Qwen3-30B-A3B an expert's matrix is 3.1 MB
    named      each copy has names of its own, as if the model had more layers: 143 KB a tensor, smaller than in any
               model that is served

A writer publishes them to a directory, a compactor adds composed deltas. Then an engine-like process, live
weights and no more, follows version by version, each publish being the move of the pointer:

    process    by a `FollowerProcess`: a child decodes and proves, and hands over an image
    library    by a `Follower` in the engine's own process
    on live    the same, which holds the live memory itself between updates (`Follower.hold`)
    lists      by a `LiveFollower` in the engine's own process: no image ever, the live memory is what it decodes from

*Advance* is fetching, decoding, proving; *prepare* makes the lists of what goes where; the *pause* is `Swap.apply`: the
scatter. Extra memory is the proportional set size of the engine and its children less that of the engine before
anything was followed, and less the lists: while it waits, and at most while it moves, looked at every 10 ms during the
first updates; times are of the others. `--copies 20` is 1 GB and needs about 8 GB of memory.
`python -m benchmarks.weights.follow [--copies N] [--layouts stacked named] [--ways process library on_live lists]`
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.report import report
from benchmarks.weights import delta_pairs
from etude.loop.usage import Processes, pss_bytes
from etude.records import Version
from etude.stores import DirectoryStore
from etude.weights import Channel, Follower, FollowerProcess, Tensor, Update, chain
from etude.weights.chain.compactor import SPANS, Compactor
from etude.weights.chain.history import pointer_key
from etude.weights.follow.live_follower import LiveFollower
from etude.weights.follow.runtime_map import Map, named
from etude.weights.follow.targets import Target

CHANNEL = "policy"
Layout = Callable[[dict[str, Tensor], int], dict[str, Tensor]]
WAYS = ("process", "library", "on_live", "lists")
WATCHED, TIMED = 2, 4
"""Updates whose memory is looked at, and updates whose times are taken."""

BEHIND = max(SPANS)
GOALS = {"extra_share_of_model": 0.02, "catch_up_share_of_chain": 0.45}
PATIENCE_S = 600.0


def named_copies(tensors: dict[str, Tensor], copies: int) -> dict[str, Tensor]:
    """The same tensors under several names."""
    return {f"c{i:03d}.{name}": tensor for i in range(copies) for name, tensor in tensors.items()}


def stacked_copies(tensors: dict[str, Tensor], copies: int) -> dict[str, Tensor]:
    """Each tensor several times over, along its first axis."""
    return {
        name: Tensor(tensor.dtype, (copies * tensor.shape[0], *tensor.shape[1:]), np.tile(tensor.codes, copies))
        for name, tensor in tensors.items()
    }


LAYOUTS: dict[str, Layout] = {"stacked": stacked_copies, "named": named_copies}


def publish(root: Path, versions: Iterator[dict[str, Tensor]]) -> tuple[list[bytes], float]:
    """Every version and its composed deltas, durable; the pointer to each, and the share that changes in a step."""
    store = DirectoryStore(root)
    channel, compactor, parent = Channel(store, CHANNEL), Compactor(store, CHANNEL), None
    pointers, shares = [], []
    for step, tensors in enumerate(versions):
        made = channel.publish(tensors, step=step, parent=parent, rollout_ids=[], owned=True)
        parent = made.version
        shares.append(made.changed_share)
        compactor.step()
        pointers.append(store.get(pointer_key(CHANNEL)))
    return pointers, median(shares[1:])


def engine(root: Path, way: str, first: dict[str, tuple[int, ...]], told: Connection) -> None:
    """The engine-like process: says what it is about to do, does it when answered, says what it took."""
    live = {name: np.zeros(shape, np.uint16) for name, shape in first.items()}
    for buffer in live.values():
        buffer.fill(1)
    target, store = Target(Map(named(live))), DirectoryStore(root)
    _turn(told, {})
    with ExitStack() as running:
        follower: Follower | FollowerProcess | LiveFollower
        if way == "lists":
            views = {name: Tensor("bf16", memory.shape, memory.reshape(-1)) for name, memory in live.items()}
            follower = LiveFollower(store, views, CHANNEL)
            if not follower.start_from(_load(store, target)):
                raise SystemExit("the first version was not loaded")
        elif way == "process":
            follower = running.enter_context(FollowerProcess(store, CHANNEL))
        else:
            follower = Follower(store, CHANNEL, can_undo=way == "library")
        if way != "lists":
            _update(follower, target, live if way == "on_live" else None, undoable=False)
        _turn(told, {})
        for _ in range(WATCHED + TIMED):
            _turn(told, _update(follower, target, live if way == "on_live" else None))
    found = follower.check() if isinstance(follower, LiveFollower) else target.differing(follower.tensors)
    _turn(told, {"differing": found})


def _update(
    follower: Follower | FollowerProcess | LiveFollower,
    target: Target,
    live: dict[str, np.ndarray[Any, Any]] | None,
    *,
    undoable: bool = True,
) -> dict[str, Any]:
    """Come to the head, write it, commit; what that took."""
    started, end = time.perf_counter(), time.monotonic() + PATIENCE_S
    while (update := _next(follower)) is None:
        if time.monotonic() > end:
            raise SystemExit(f"waited {PATIENCE_S:g} s for a version")
    advanced = time.perf_counter()
    tensors = follower.specs if isinstance(follower, LiveFollower) else follower.tensors
    swap = target.prepare(update, tensors, undoable=undoable)
    prepared = time.perf_counter()
    swap.apply()
    applied = time.perf_counter()
    lists, undo = swap.list_bytes, swap.undo_bytes
    swap.commit()
    if isinstance(follower, LiveFollower):
        follower.mark_adopted(update)
    if live is not None and isinstance(follower, Follower):
        follower.rebind({n: Tensor(t.dtype, t.shape, live[n].reshape(-1)) for n, t in follower.tensors.items()})
    return {
        "advance_s": advanced - started,
        "prepare_s": prepared - advanced,
        "pause_s": applied - prepared,
        "list_bytes": lists,
        "undo_bytes": undo,
    }


def _load(store: DirectoryStore, target: Target) -> Version:
    """The head into live memory, as an engine loads a checkpoint: by another's image, which is let go of."""
    with FollowerProcess(store, CHANNEL) as loader:
        _update(loader, target, None, undoable=False)
        assert loader.version is not None
        return loader.version


def _next(follower: Follower | FollowerProcess | LiveFollower) -> Update | None:
    return follower.prepare() if isinstance(follower, LiveFollower) else follower.advance()


def _turn(told: Connection, said: dict[str, Any]) -> None:
    told.send(said)
    if told.poll(PATIENCE_S):
        told.recv()


def follow(root: Path, way: str, pointers: list[bytes], first: dict[str, Tensor]) -> dict[str, Any]:
    """Let one engine follow, version by version."""
    store = DirectoryStore(root)
    _point(store, pointers[0])
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    shapes = {name: tensor.shape for name, tensor in first.items()}
    child = spawn.Process(target=engine, args=(root, way, shapes, theirs))
    child.start()
    theirs.close()
    assert child.pid is not None
    try:
        _heard(ours, child.pid)
        bare = _pss(child.pid)
        ours.send(True)
        _heard(ours, child.pid)
        idle, peaks, updates = [_pss(child.pid)], [], []
        for number, pointer in enumerate(pointers[1 : 1 + WATCHED + TIMED]):
            _point(store, pointer)
            ours.send(True)
            said, peak = _heard(ours, child.pid, watch=number < WATCHED)
            if number < WATCHED:
                peaks.append(peak)
                idle.append(_pss(child.pid))
            else:
                updates.append(said)
        ours.send(True)
        differing = _heard(ours, child.pid)[0]["differing"]
        if differing:
            raise SystemExit(f"live memory differs in {len(differing)} tensors")
        ours.send(True)
        child.join(PATIENCE_S)
    finally:
        child.kill()
    model = sum(tensor.num_bytes for tensor in first.values())
    lists = round(median(said["list_bytes"] for said in updates))
    return {
        "bare_bytes": bare,
        "list_bytes": lists,
        "undo_bytes": round(median(said["undo_bytes"] for said in updates)),
        "extra_share_while_waiting": round((idle[-1] - bare) / model, 4),
        "extra_share_while_moving": round((max(peaks) - bare - lists) / model, 4),
        "advance_s": round(median(said["advance_s"] for said in updates), 3),
        "prepare_s": round(median(said["prepare_s"] for said in updates), 4),
        "pause_ms": round(1e3 * median(said["pause_s"] for said in updates), 3),
        "pause_ms_max": round(1e3 * max(said["pause_s"] for said in updates), 3),
    }


def _heard(ours: Connection, pid: int, *, watch: bool = False) -> tuple[dict[str, Any], int]:
    """What the engine says next, and the most memory it had until then, if that is watched."""
    most, end = 0, time.monotonic() + PATIENCE_S
    while not ours.poll(0.01 if watch else 1.0):
        most = max(most, _pss(pid)) if watch else 0
        if time.monotonic() > end:
            raise SystemExit(f"waited {PATIENCE_S:g} s for the engine")
    return ours.recv(), most


def _pss(pid: int) -> int:
    return pss_bytes(Processes().tree(pid))


def _point(store: DirectoryStore, pointer: bytes) -> None:
    now = store.get(pointer_key(CHANNEL))
    if now != pointer and not store.compare_and_swap(pointer_key(CHANNEL), now, pointer):
        raise SystemExit("somebody else moved the pointer")


def catch_up(root: Path, pointers: list[bytes]) -> dict[str, Any]:
    """Bytes and seconds of a follower that is 16 versions behind, against the chain's own."""
    store = DirectoryStore(root)
    _point(store, pointers[-1 - BEHIND])
    late = Follower(store, CHANNEL)
    late.advance()
    _point(store, pointers[-1])
    started = time.perf_counter()
    update = late.advance()
    took = time.perf_counter() - started
    assert update is not None
    chained = sum(manifest.delta.num_bytes for manifest in chain(store, CHANNEL)[-BEHIND:] if manifest.delta)
    return {
        "fetched_bytes": update.fetched_bytes,
        "chain_bytes": chained,
        "share_of_chain": round(update.fetched_bytes / chained, 4),
        "seconds": round(took, 2),
    }


def measure(root: Path, folder: Path, copies: int, ways: list[str], layout: str = "named") -> dict[str, Any]:
    """Publish, follow each way, catch up."""
    copied = LAYOUTS[layout]
    first = copied(next(delta_pairs.versions(folder)), copies)
    started = time.perf_counter()
    pointers, share = publish(root, (copied(tensors, copies) for tensors in delta_pairs.versions(folder)))
    return {
        "model_bytes": sum(tensor.num_bytes for tensor in first.values()),
        "tensors": len(first),
        "changed_share": round(share, 5),
        "publish_s": round((time.perf_counter() - started) / len(pointers), 2),
        "follow": {way: follow(root, way, pointers, first) for way in ways},
        "catch_up": catch_up(root, pointers),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--copies", type=int, default=20)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--folder", type=Path, default=delta_pairs.FOLDER, help="where the pairs are kept")
    args = parser.parse_args()
    found = {}
    for layout in args.layouts:
        with tempfile.TemporaryDirectory() as root:
            found[layout] = measure(Path(root), args.folder, args.copies, args.ways, layout)
    report("weights_follow", {"copies": args.copies, "goals": GOALS, **found})


if __name__ == "__main__":
    main()
