"""What it costs to catch up from 16 versions behind: over composed deltas, and over the chain alone.

Weights are random normals (sigma .02) in bf16, moved by AdamW on fp32 masters; gradients are noise with a share of
`--signal` that stays the same from step to step, so that some weights drift and most wander. A compactor follows the
writer. For each learning rate: the share that changes in one step and in 16, bytes of a follower that is 16 behind, of
the chain's last 16 deltas, and the same ratio of the bounds. `--store DIRECTORY` takes the versions of a channel
instead, for instance a run's `weights` folder. `python -m benchmarks.weights.catch_up [--elements N] [--store
DIRECTORY]`
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import report
from etude.stores import DirectoryStore, MemoryStore
from etude.weights import Channel, Follower, Tensor, chain
from etude.weights.chain.compactor import SPANS, Compactor
from etude.weights.delta.bound import bound_bytes

BEHIND = max(SPANS)
RATES = (1e-6, 3e-6, 1e-5)

NUM_TENSORS = 100

Weights = dict[str, Tensor]


def bf16(values: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """Codes of the nearest bf16, ties to even."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def steps(rate: float, num_elements: int, num_steps: int, signal: float) -> Iterator[Weights]:
    """Weights after each of the steps, those before the first among them."""
    rng = np.random.default_rng(0)
    master = rng.standard_normal(num_elements, np.float32) * np.float32(0.02)
    lasting = rng.standard_normal(num_elements, np.float32) * np.float32(signal)
    momentum = np.zeros(num_elements, np.float32)
    for step in range(num_steps + 50):
        momentum = 0.9 * momentum + 0.1 * (lasting + rng.standard_normal(num_elements, np.float32))
        if step >= 50:  # moments have settled
            parts = np.array_split(bf16(master), NUM_TENSORS)
            yield {f"t{i}": Tensor("bf16", part.shape, part) for i, part in enumerate(parts)}
            master -= np.float32(rate) * momentum / np.sqrt(1 + np.float32(signal) ** 2)


def replayed(root: Path, num_steps: int) -> Iterator[Weights]:
    """The last versions of a stored channel."""
    follower = Follower(DirectoryStore(root))
    for manifest in chain(DirectoryStore(root), "policy")[-num_steps:]:
        follower.advance(exactly=manifest.version)
        yield dict(follower.tensors)


def measure(versions: Iterator[Weights]) -> dict[str, Any]:
    """Publish and compose all of them; numbers of who was left 16 behind."""
    store = MemoryStore()
    writer, compactor, parent = Channel(store), Compactor(store), None
    late: deque[tuple[Follower, Weights]] = deque(maxlen=BEHIND + 1)
    shares, bounds = deque[float](maxlen=BEHIND), deque[float](maxlen=BEHIND)
    for step, version in enumerate(versions):
        published = writer.publish(version, step=step, parent=parent, rollout_ids=[])
        parent = published.version
        shares.append(published.changed_share)
        bounds.append(published.bound_bytes)
        compactor.step()
        late.append((Follower(store), version))
        late[-1][0].advance()
    follower, old = late[0]
    update = follower.advance()
    assert update is not None
    chained = sum(m.delta.num_bytes for m in chain(store, "policy")[-BEHIND:] if m.delta)
    new = dict(follower.tensors)
    bound = bound_bytes(list(new.values()), [old.get(name) for name in new])
    changed = sum(int(np.count_nonzero(new[name].codes != old[name].codes)) for name in new)
    return {
        "share_changed_in_1": sum(shares) / len(shares),
        "share_changed_in_16": changed / sum(tensor.codes.size for tensor in new.values()),
        "catch_up_bytes": update.fetched_bytes,
        "chain_bytes": chained,
        "catch_up_share_of_chain": update.fetched_bytes / chained,
        "the_same_of_the_bounds": bound / sum(bounds),
        "undo_bytes_of_the_compactor": compactor.undo_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=2_000_000)
    parser.add_argument("--signal", type=float, default=0.05)
    parser.add_argument("--store", type=Path)
    options = parser.parse_args()
    num_steps = BEHIND + 1
    if options.store:
        report("catch_up_replayed", {"replayed": measure(replayed(options.store, num_steps))})
        return
    runs = {str(rate): measure(steps(rate, options.elements, num_steps, options.signal)) for rate in RATES}
    report("catch_up", {"elements": options.elements, "signal": options.signal, "by_learning_rate": runs})


if __name__ == "__main__":
    main()
