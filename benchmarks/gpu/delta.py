"""Speed of deltas from and into a GPU's memory, against its own memcpy and comparison, all in one run.

Random normals (sigma 0.02) in bf16; of a share of them the code moves by a step up or down. In GB of snapshot a second:
`copy` is a copy of the snapshot, `compare` marks what differs; `scan` finds, classes and numbers what changed, `encode`
goes on to the object's bytes (the host packs them); `prepare` goes from those bytes to lists on the device, `write` is
what the pause sees, `apply` decodes in place without lists. Device programs are timed by events, the rest by the
clock; the shortest of a few repeats. Checks that the object is the CPU's and the live memory the new version.

Needs a GPU and `pip install 'etude[gpu]'`. `python -m benchmarks.gpu.delta [--elements N] [--repeats R] [--sweep]`
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.report import report
from etude.weights import Tensor
from etude.weights.delta import codec
from etude.weights.delta.layout import MAX_TILE, Piece, Tile
from etude.weights.gpu import DeviceKernels, Items, apply, encode, prepare
from etude.weights.tensors import DTYPES, Spec

SHARES = (0.001, 0.012, 0.08, 0.3)
SHAPES = ((2048, 4), (2048, 8), (4096, 8), (4096, 16))  # items of a block, warps of its program
COLUMNS = 4096
HIGH, CLASSES = 122, 12  # the octaves of such weights


def on_device(repeats: int, work: Callable[[], object]) -> float:
    """Seconds between two events around it, once it is compiled."""
    shortest = float("inf")
    for _ in range(repeats + 1):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        stop.record()
        stop.synchronize()
        shortest = min(shortest, start.elapsed_time(stop) / 1000)
    return shortest


def by_clock(repeats: int, work: Callable[[], object]) -> float:
    """Seconds until its work on the device is done, too."""
    shortest = float("inf")
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        torch.cuda.synchronize()
        shortest = min(shortest, time.perf_counter() - started)
    return shortest


def snapshots(rows: int, share: float) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator("cuda").manual_seed(0)
    old = torch.randn(rows, COLUMNS, device="cuda", generator=drawn).mul_(0.02).bfloat16().view(torch.int16)
    draw = torch.rand(rows, COLUMNS, device="cuda", generator=drawn)
    return old, old + (draw < share / 2).to(torch.int16) - (draw > 1 - share / 2).to(torch.int16)


def scan(old: torch.Tensor, new: torch.Tensor, kernels: DeviceKernels) -> Callable[[], object]:
    """The encoder's part on the device alone, over tiles of the largest size."""
    spec = Spec("bf16", tuple(old.shape))
    sides = [[Items.of("w", tensor, spec)] for tensor in (old, new)]
    rows = MAX_TILE // COLUMNS
    tiles = [
        Tile(HIGH, CLASSES, (Piece(0, row * COLUMNS, min(rows, len(old) - row), COLUMNS, COLUMNS),))
        for row in range(0, len(old), rows)
    ]
    return lambda: kernels.changed(DTYPES["bf16"], tiles, *sides)


def measure(rows: int, share: float, repeats: int) -> dict[str, Any]:
    old, new = snapshots(rows, share)
    specs = {"w": Spec("bf16", tuple(old.shape))}
    room, flags = torch.empty_like(old), torch.empty_like(old, dtype=torch.bool)
    data = encode({"w": new}, {"w": old}, specs)
    host = [Tensor("bf16", specs["w"].shape, t.cpu().numpy().view(np.uint16).reshape(-1)) for t in (new, old)]
    live = {"w": old.clone()}
    update = prepare(data, specs, live)
    update.write()
    written = torch.equal(live["w"], new)
    update.undo()
    undone = torch.equal(live["w"], old)
    apply(data, specs, live)
    if data != codec.encode(host[:1], host[1:]) or not (written and undone and torch.equal(live["w"], new)):
        raise SystemExit(f"share {share}: other bits than the CPU's")
    seconds = {
        "copy": on_device(repeats, lambda: room.copy_(old)),
        "compare": on_device(repeats, lambda: torch.ne(old, new, out=flags)),
        "scan": by_clock(repeats, scan(old, new, DeviceKernels())),
        "encode": by_clock(repeats, lambda: encode({"w": new}, {"w": old}, specs)),
        "prepare": by_clock(repeats, lambda: prepare(data, specs, {"w": old}, undoable=False)),
        "write": on_device(repeats, update.write),
    }
    seconds["apply"] = min(_applied(data, specs, old, room) for _ in range(repeats + 1))
    num_bytes = old.numel() * 2
    return {
        "share": share,
        "delta_bytes": len(data),
        "ratio": round(num_bytes / len(data), 1),
        "list_bytes": update.num_bytes,
        **{f"{name}_gb_per_s": round(num_bytes / each / 1e9, 2) for name, each in seconds.items()},
        "scan_by_compare": round(seconds["compare"] / seconds["scan"], 3),
        "write_by_copy": round(seconds["copy"] / seconds["write"], 3),
    }


def _applied(data: bytes, specs: dict[str, Spec], old: torch.Tensor, room: torch.Tensor) -> float:
    room.copy_(old)
    return by_clock(0, lambda: apply(data, specs, {"w": room}))


def sweep(rows: int, repeats: int) -> list[dict[str, Any]]:
    """The scan in other blocks and warps."""
    old, new = snapshots(rows, 0.012)
    made = []
    for block, warps in SHAPES:
        seconds = by_clock(repeats, scan(old, new, DeviceKernels(block, warps)))
        made.append({"block": block, "warps": warps, "scan_gb_per_s": round(old.numel() * 2 / seconds / 1e9, 2)})
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--elements", type=int, default=1 << 28)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sweep", action="store_true", help="the scan in other blocks and warps, too")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.gpu.delta needs a GPU that torch sees; there is none here")
    rows = max(1, args.elements // COLUMNS)
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "num_elements": rows * COLUMNS,
        "dtype": "bf16",
        "rows": [measure(rows, share, args.repeats) for share in SHARES],
    }
    if args.sweep:
        found["sweep"] = sweep(rows, args.repeats)
    report("delta_gpu", found)


if __name__ == "__main__":
    main()
