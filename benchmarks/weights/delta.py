"""Deltas of real optimiser steps against their bound, against the memory's speed, and against what others do.

Pairs are of `benchmarks.weights.delta_pairs`. For each pair, mode `best` and `fast`: bytes, ratio, ratio ÷ bound; and
GB of snapshot a second, on one core, in CPU time of the whole process, four ways:

    kernels    the coding of all tiles alone, in memory that is there: `Kernels.encode`; `Kernels.apply` in place
    codec      `codec.encode`, and `codec.decode` into new memory: sampling, header, digests of the delta's pages, too
    public     `etude.weights.encode`, and `apply(old, delta, out=old)`: checksums of every old and new tensor, too
    small      as codec, on the checkpoint's own tensors, of 160 KB each: what a tensor costs beside its bytes

*Scan* is one pass that counts differing codes of both snapshots, *memcpy* one copy of a snapshot: both of the same
run, and what speeds are divided by. Snapshots are repeated to over 100 MB, so that no cache holds them, and tensors of
one shape stacked, since those of large models are large. Both modes take turns, `--repeats` times,
and the shortest counts. 2 threads ÷ 1 is of wall time, kernels alone; beside it that of the scan, which only reads:
where this is below 2 it is the memory that has no more to give. Peers are to be compared with *codec*, and those
that can write in place, there with *kernels*. At the pair that has goals every setting of every peer runs, elsewhere
each peer as its users run it; those that are too slow for it run once, on the snapshots as they are. `python -m
benchmarks.weights.delta_peers` installs the packages that some of them need.
`python -m benchmarks.weights.delta [--pairs 'bf16/adamw-1e-6/*' ...] [--repeats N]`
"""

from __future__ import annotations

import argparse
import fnmatch
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.report import report
from benchmarks.weights import delta_pairs
from benchmarks.weights.delta_pairs import Pair, changed_share
from benchmarks.weights.delta_peers import Peer, Side, peers, side, versions
from etude.weights import Tensor, apply, encode
from etude.weights.delta import codec, native
from etude.weights.delta.bound import bound_bytes
from etude.weights.delta.choices import Mode
from etude.weights.delta.layout import Tile, read_header
from etude.weights.delta.native import NativeKernels
from etude.weights.tensors import DTYPES, Codes, DType, Spec, to_items

LEAST_BYTES = 100_000_000
"""Of a snapshot whose speed is measured."""

ALIGNMENT = 64
LEVELS = ("kernels", "codec", "public", "small")
MODES: tuple[Mode, ...] = get_args(Mode)
GOAL_PAIR = "bf16/adamw-1e-6/1"
"""p is about .012: where speeds have goals."""

COMPARED = ("encode_codec", "apply_codec", "apply_kernels")
"""Speeds that peers have, too."""

GOALS = {
    "best": {"of_bound": 0.95, "encode_of_scan": 0.45, "apply_of_memcpy": 0.5, "two_threads": 1.7},
    "fast": {"of_bound": 0.65, "encode_of_scan": 0.6, "apply_of_memcpy": 1.0, "two_threads": 1.7},
}


class Clock:
    """The shortest of some measurements, by name."""

    def __init__(self) -> None:
        self.shortest: dict[str, float] = defaultdict(lambda: float("inf"))

    def cpu(self, name: str, work: Callable[..., Any], *arguments: Any) -> Any:
        """CPU seconds of this process, all its threads together, and of children that ended."""
        return self._took(name, _cpu_s, work, arguments)

    def wall(self, name: str, work: Callable[..., Any], *arguments: Any) -> Any:
        return self._took(name, time.perf_counter, work, arguments)

    def _took(self, name: str, now: Callable[[], float], work: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        started = now()
        result = work(*arguments)
        self.shortest[name] = min(self.shortest[name], now() - started)
        return result


def _cpu_s() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


class Arena:
    """A version in one piece of memory, what a scan and a copy go through at once."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        sizes = [-(-t.num_bytes // ALIGNMENT) * ALIGNMENT for t in tensors]
        self.bytes = np.empty(sum(sizes) + ALIGNMENT, np.uint8)
        self.bytes.fill(0)
        at = -self.bytes.ctypes.data % ALIGNMENT
        self.codes: list[Codes] = []
        for tensor, size in zip(tensors, sizes, strict=True):
            place = self.bytes[at : at + tensor.num_bytes].view(tensor.codes.dtype)
            place[:] = tensor.codes
            self.codes.append(place)
            at += size
        self.specs = [tensor.spec for tensor in tensors]
        self.tensors = [Tensor(s.dtype, s.shape, c) for s, c in zip(self.specs, self.codes, strict=True)]

    @property
    def num_bytes(self) -> int:
        return sum(codes.nbytes for codes in self.codes)

    def items(self) -> list[Codes]:
        """As kernels take them: the codes themselves, or the numbers packed in them in memory of their own."""
        return [to_items(codes, DTYPES[s.dtype]) for s, codes in zip(self.specs, self.codes, strict=True)]

    def named(self) -> dict[str, Codes]:
        return {f"t{i:05d}": codes for i, codes in enumerate(self.codes)}


def stacked(tensors: Sequence[Tensor], copies: int) -> list[Tensor]:
    """Tensors of one dtype and shape as one, each of them several times."""
    alike: dict[Spec, list[Codes]] = defaultdict(list)
    for tensor in tensors:
        alike[tensor.spec] += [tensor.codes] * copies
    return [Tensor(s.dtype, (len(found), *s.shape), np.concatenate(found)) for s, found in alike.items()]


@dataclass(frozen=True)
class Work:
    """The tiles of one delta, as kernels take them: to encode, and with their bytes, to apply."""

    tiles: list[tuple[DType, list[Tile]]]
    coded: list[tuple[DType, list[Tile], list[memoryview]]]

    @classmethod
    def of(cls, data: bytes, arena: Arena) -> Work:
        header, view = read_header(data, arena.specs), memoryview(data)
        tiles, coded = [], []
        for kind in DTYPES.values():
            numbered = list(header.layout.tiles(kind))
            some = [(n, tile) for n, tile in numbered if header.offsets[n] < header.offsets[n + 1]]
            tiles.append((kind, [tile for _, tile in numbered]))
            payloads = [codec.for_kernels(view[header.offsets[n] : header.offsets[n + 1]], t, kind) for n, t in some]
            coded.append((kind, [tile for _, tile in some], payloads))
        return cls([part for part in tiles if part[1]], [part for part in coded if part[1]])

    def encode(self, kernels: NativeKernels, old: list[Codes], new: list[Codes]) -> None:
        for kind, tiles in self.tiles:
            kernels.encode(kind, tiles, old, new)

    def apply(self, kernels: NativeKernels, items: list[Codes]) -> None:
        for kind, tiles, payloads in self.coded:
            kernels.apply(kind, tiles, items, items, payloads)


def measure(pair: Pair, others: Sequence[Peer], *, repeats: int, least_bytes: int) -> dict[str, Any]:
    """One pair: what it is, each mode, each peer."""
    bound, num_bytes = bound_bytes(pair.new, pair.old), pair.num_bytes
    share = changed_share(pair.old, pair.new)
    facts = {
        "pair": pair.name,
        "changed_share": round(share, 6),
        "snapshot_bytes": num_bytes,
        "bound_bytes": round(bound),
    }
    print(f"{pair.name}: p {share:.5f}, bound {num_bytes / bound:.1f}x", file=sys.stderr)
    copies = -(-least_bytes // num_bytes)
    old, new = (Arena(stacked(tensors, copies)) for tensors in (pair.old, pair.new))
    speeds = _speeds(pair, old, new, repeats)
    coders: dict[str, Any] = {}
    for mode in MODES:
        size = len(codec.encode(pair.new, pair.old, mode))
        coders[mode] = {**_density(size, num_bytes, bound), **speeds.pop(mode)}
    large = side(old.tensors), side(new.tensors)
    for peer in others:
        coders[peer.name] = _peer(peer, pair, bound, large, min(repeats, 2))
    return {**facts, "bound_ratio": round(num_bytes / bound, 2), **speeds, "coders": coders}


def _speeds(pair: Pair, old: Arena, new: Arena, repeats: int) -> dict[str, Any]:
    """GB a second of scan and memcpy, and of both modes."""
    clock, one, two = Clock(), NativeKernels(threads=1), NativeKernels(threads=2)
    before, after = old.items(), new.items()
    live, spare = Arena(old.tensors), np.empty_like(old.bytes)
    width = old.codes[0].itemsize
    flat_old, flat_new = (a.bytes[: a.bytes.size // width * width].view(f"u{width}") for a in (old, new))
    data = {mode: codec.encode(new.tensors, old.tensors, mode) for mode in MODES}
    files = {mode: encode(_tensors(old), _tensors(new), mode=mode) for mode in MODES}
    small, specs = {mode: codec.encode(pair.new, pair.old, mode) for mode in MODES}, [t.spec for t in pair.new]
    work = {mode: Work.of(data[mode], old) for mode in MODES}
    np.copyto(spare, old.bytes)
    halves = [np.array_split(flat, 2) for flat in (flat_old, flat_new)]
    for _ in range(repeats):
        clock.cpu("scan", one.count_changed, flat_old, flat_new)
        with ThreadPoolExecutor(2) as pool:
            clock.wall("scan wall 2", lambda: list(pool.map(one.count_changed, *halves)))
        clock.wall("scan wall 1", one.count_changed, flat_old, flat_new)
        clock.cpu("memcpy", np.copyto, spare, old.bytes)
        for mode in MODES:
            tiles = work[mode]
            clock.cpu(f"{mode} encode codec", partial(codec.encode, kernels=one), new.tensors, old.tensors, mode)
            clock.cpu(f"{mode} encode public", partial(encode, mode=mode), _tensors(old), _tensors(new))
            clock.cpu(f"{mode} apply codec", partial(codec.decode, kernels=one), data[mode], old.specs, old.tensors)
            clock.cpu(f"{mode} encode small", partial(codec.encode, kernels=one), pair.new, pair.old, mode)
            clock.cpu(f"{mode} apply small", partial(codec.decode, kernels=one), small[mode], specs, pair.old)
            _copy(live, old)
            clock.cpu(f"{mode} apply public", apply, _tensors(live), files[mode], live.named())
            _same(live.codes, new.codes)
            for timed, name, kernels in (
                (clock.cpu, "kernels", one),
                (clock.wall, "wall 1", one),
                (clock.wall, "wall 2", two),
            ):
                timed(f"{mode} encode {name}", tiles.encode, kernels, before, after)
                _copy(live, old)
                items = live.items()
                timed(f"{mode} apply {name}", tiles.apply, kernels, items)
                _same(items, after)
    return _rates(clock.shortest, old.num_bytes, pair.num_bytes)


def _copy(live: Arena, old: Arena) -> None:
    for to, codes in zip(live.codes, old.codes, strict=True):
        np.copyto(to, codes)


def _same(made: Sequence[Codes], new: Sequence[Codes]) -> None:
    if not all(map(np.array_equal, made, new)):
        raise SystemExit("other bits came back")


def _tensors(arena: Arena) -> dict[str, Tensor]:
    return dict(zip(arena.named(), arena.tensors, strict=True))


def _rates(shortest: Mapping[str, float], num_bytes: int, small_bytes: int) -> dict[str, Any]:
    rate = {name: (small_bytes if "small" in name else num_bytes) / 1e9 / s for name, s in shortest.items()}
    found: dict[str, Any] = {f"{name}_gb_per_s": round(rate[name], 3) for name in ("scan", "memcpy")}
    found["scan_two_threads"] = round(shortest["scan wall 1"] / shortest["scan wall 2"], 3)
    for mode in MODES:
        found[mode] = {}
        for what, by in ("encode", "scan"), ("apply", "memcpy"):
            for level in LEVELS:
                speed = rate[f"{mode} {what} {level}"]
                found[mode][f"{what}_{level}"] = {"gb_per_s": round(speed, 3), f"of_{by}": round(speed / rate[by], 4)}
            one, two = (shortest[f"{mode} {what} wall {threads}"] for threads in (1, 2))
            found[mode][f"{what}_two_threads"] = round(one / two, 3)
    return found


def _density(size: int, num_bytes: int, bound: float) -> dict[str, float]:
    return {"bytes": size, "ratio": round(num_bytes / size, 2), "of_bound": round(bound / size, 4)}


def _peer(peer: Peer, pair: Pair, bound: float, large: tuple[Side, Side], repeats: int) -> dict[str, Any]:
    """Bytes of the pair as it is, speeds over the same memory as ours; of slow ones over the pair as it is, once."""
    if peer.why_not:
        return {"missing": peer.why_not}
    small = side(pair.old), side(pair.new)
    old, new = small if peer.slow else large
    num_bytes, clock = sum(codes.nbytes for codes in new), Clock()
    for _ in range(1 if peer.slow else repeats):
        coded = clock.cpu("encode", peer.encode, old, new)
        made = clock.cpu("apply", peer.decode, coded, old)
        _same(made, new)
        if peer.write:
            for live, codes in zip(made, old, strict=True):
                np.copyto(live, codes)
            clock.cpu("write", peer.write, coded, made)
            _same(made, new)
    size = sum(map(len, coded if peer.slow else peer.encode(*small)))
    levels = {"encode": "encode_codec", "apply": "apply_codec", "write": "apply_kernels"}
    speeds = {levels[what]: {"gb_per_s": round(num_bytes / 1e9 / s, 3)} for what, s in clock.shortest.items()}
    return {**_density(size, pair.num_bytes, bound), **speeds}


def goals(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the rows say to each goal: ratio ÷ bound at its worst where it is promised, speeds at p of about .012."""
    found: dict[str, Any] = {}
    for mode, wanted in GOALS.items():
        held = (
            [row for row in rows if _promised(row)] if mode == "best" else [r for r in rows if r["pair"] == GOAL_PAIR]
        )
        if held:
            found[f"{mode}_of_bound"] = {
                "goal": wanted["of_bound"],
                "is": min(r["coders"][mode]["of_bound"] for r in held),
            }
    for row in rows:
        if row["pair"] == GOAL_PAIR:
            found["ahead_of_peers"] = ahead(row["coders"])
            for mode, wanted in GOALS.items():
                coder = row["coders"][mode]
                for what, by in ("encode", "of_scan"), ("apply", "of_memcpy"):
                    levels = {level: coder[f"{what}_{level}"][by] for level in LEVELS}
                    found[f"{mode}_{what}_{by}"] = {"goal": wanted[f"{what}_{by}"], **levels}
                    two = coder[f"{what}_two_threads"]
                    found[f"{mode}_{what}_two_threads"] = {"goal": wanted["two_threads"], "is": two}
    return found


def ahead(coders: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """How far each mode is ahead of its peers: of the one with the best ratio, in ratio and speeds; in each speed of
    the fastest of all, and of the fastest of those with at least the mode's ratio (None: there is none)."""
    others = {name: coder for name, coder in coders.items() if name not in MODES and "missing" not in coder}
    found: dict[str, dict[str, Any]] = {}
    for mode in MODES if others else ():
        mine, dense = coders[mode], max(others, key=lambda name: others[name]["ratio"])
        found[mode] = {
            "best_ratio": {
                "peer": dense,
                "ratio": round(mine["ratio"] / others[dense]["ratio"], 2),
                **{what: _times(mine, others[dense], what) for what in COMPARED if what in others[dense]},
            },
            "fastest": {what: _fastest(mine, others, what) for what in COMPARED},
            "fastest_of_our_ratio": {
                what: _fastest(mine, {n: c for n, c in others.items() if c["ratio"] >= mine["ratio"]}, what)
                for what in COMPARED
            },
        }
    return found


def _times(mine: Mapping[str, Any], other: Mapping[str, Any], what: str) -> float:
    return round(mine[what]["gb_per_s"] / other[what]["gb_per_s"], 2)


def _fastest(mine: Mapping[str, Any], others: Mapping[str, Any], what: str) -> dict[str, Any] | None:
    able = [name for name in others if what in others[name]]
    if not able:
        return None
    peer = max(able, key=lambda name: others[name][what]["gb_per_s"])
    ratio = round(mine["ratio"] / others[peer]["ratio"], 2)
    return {"peer": peer, "times": _times(mine, others[peer], what), "ratio": ratio}


def _promised(row: Mapping[str, Any]) -> bool:
    form, share = row["pair"].split("/")[0], row["changed_share"]
    return (form == "bf16" and 0.001 <= share <= 0.2) or (form == "fp8" and share >= 0.001)


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """All rows, for eyes: GB a second, and shares of scan and memcpy in brackets."""
    drawn = Table()
    for name in ("pair", "p", "coder", "bytes", "ratio", "÷ bound"):
        drawn.add_column(name, no_wrap=True)
    for name in ("encode", *LEVELS[1:], "2 thr.", "apply", *LEVELS[1:], "2 thr."):
        drawn.add_column(name, justify="right")
    for row in rows:
        head = row["pair"], f"{row['changed_share']:.5f}"
        rest = f"scan {row['scan_gb_per_s']}", "", "", "", "", f"memcpy {row['memcpy_gb_per_s']}"
        drawn.add_row(*head, "bound", str(row["bound_bytes"]), str(row["bound_ratio"]), "1", *rest, style="bold")
        for name, coder in row["coders"].items():
            if "missing" in coder:
                drawn.add_row("", "", name, coder["missing"])
                continue
            cells = [
                _told(coder.get(f"{what}_{level}"))
                for what in ("encode", "apply")
                for level in (*LEVELS, "two_threads")
            ]
            drawn.add_row("", "", name, str(coder["bytes"]), str(coder["ratio"]), str(coder["of_bound"]), *cells)
        drawn.add_section()
    return drawn


def _told(speed: Any) -> str:
    if not isinstance(speed, Mapping):
        return "" if speed is None else f"{speed}x"
    share = next((value for key, value in speed.items() if key.startswith("of_")), None)
    return f"{speed['gb_per_s']:.2f}" + (f" ({share:.2f})" if share is not None else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--pairs", nargs="+", default=["*"], metavar="PATTERN", help="names as in benchmarks.weights.delta_pairs"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--least-bytes", type=int, default=LEAST_BYTES, help="of a snapshot whose speed is measured")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--folder", type=Path, default=delta_pairs.FOLDER, help="where the pairs are kept")
    args = parser.parse_args()
    if native.why_not():
        raise SystemExit(native.why_not())
    names = [name for name in delta_pairs.names() if any(fnmatch.fnmatch(name, pattern) for pattern in args.pairs)]
    others = [] if args.no_peers else peers()
    usual = [peer for peer in others if peer.usual]
    rows = [
        measure(
            delta_pairs.load(name, args.folder),
            others if name == GOAL_PAIR else usual,
            repeats=args.repeats,
            least_bytes=args.least_bytes,
        )
        for name in names
    ]
    Console(stderr=True, width=240).print(table(rows))
    one = NativeKernels(threads=1)
    facts = {"kernels": one.level, "repeats": args.repeats, "peers": versions() if others else {}}
    report("delta", {**facts, "goals": goals(rows), "rows": rows})


if __name__ == "__main__":
    main()
