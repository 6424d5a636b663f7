"""One region's engine in `benchmarks.weights.regions`: live weights in memory that follow the head through a cache.

    python -m benchmarks.weights.regions_follower STORE_URL CACHE_DIR BASE_FILE BASE_VERSION LOG

It starts from a base checkpoint that its host has, or from nothing (an empty name). Each version is fetched, decoded
and proven beside, then scattered into the live arrays; then the digest of all live arrays is taken, and written to the
log with every number. What it would serve is what the live arrays hold, and the log says from when.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from benchmarks.weights.regions_model import read_model
from etude.errors import EtudeError
from etude.records.completion import Version
from etude.stores import open_store
from etude.weights import Follower, Tensor, content_digest, tensor_digest
from etude.weights.files.folder_follower import list_bytes
from etude.weights.follow.runtime_map import Map, named
from etude.weights.follow.targets import Target

POLL_S = 0.1

T = TypeVar("T")
Live = dict[str, np.ndarray[Any, Any]]


def main(url: str, cache: str, base: str, version: str, log: str) -> None:
    """Follow until killed."""
    follower = Follower(open_store(url, cache=cache), can_undo=False)
    live: Live = {}
    with Path(log).open("a") as out:

        def say(event: str, **facts: Any) -> None:
            out.write(json.dumps({"event": event, "at": time.time(), **facts}) + "\n")
            out.flush()

        if base:
            live = {name: _writable(tensor) for name, tensor in read_model(Path(base)).items()}
            held = msgspec.json.decode(version, type=Version)
            while not _tried(lambda: follower.start_from(held, _seen(live)), say):
                time.sleep(POLL_S)
        say("started", version=str(follower.version))
        while True:
            told = _tried(lambda: _advance(follower, live), say)
            if not told:
                time.sleep(POLL_S)
                continue
            say("live", **told)
            right = follower.version is not None and _digest(live) == follower.version.digest
            say("proven", version=told["version"], right=right)
            if not right:
                raise SystemExit("the live memory does not hold the version")


def _tried(work: Callable[[], T], say: Any) -> T | None:
    try:
        return work()
    except EtudeError as error:
        say("trouble", said=str(error))
        return None


def _advance(follower: Follower, live: Live) -> dict[str, Any] | None:
    """Come to the head; what it took."""
    update = follower.advance()
    if update is None:
        return None
    started = time.perf_counter()
    if update.replaced or update.removed:  # an engine that starts: nothing is served yet
        for name in update.removed:
            del live[name]
        live.update({name: _writable(tensor) for name, tensor in update.replaced.items()})
    target = Target(Map(named(live)))
    swap = target.prepare(update, follower.tensors, undoable=False)
    prepared = time.perf_counter()
    swap.apply()  # the pause
    gap_s, live_at = time.perf_counter() - prepared, time.time()
    lists = list_bytes(update)
    swap.commit()
    follower.rebind(_seen(live))
    return {
        "version": str(update.version),
        "live_at": live_at,
        "fetched_bytes": update.fetched_bytes,
        "fetch_s": update.fetch_s,
        "prepare_s": prepared - started,
        "gap_s": gap_s,
        "list_bytes": lists,
        "healed": list(update.healed),
        "max_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _writable(tensor: Tensor) -> np.ndarray[Any, Any]:
    return tensor.codes.reshape(tensor.shape).copy()


def _seen(live: Live) -> dict[str, Tensor]:
    """The live arrays as tensors: views, which show what is written next."""
    return {name: Tensor("bf16", array.shape, array.reshape(-1)) for name, array in live.items()}


def _digest(live: Live) -> str:
    return content_digest({name: tensor_digest(tensor) for name, tensor in _seen(live).items()})


if __name__ == "__main__":
    main(*sys.argv[1:])
