"""``etude weights diff | encode | apply | verify`` on checkpoints and delta files: nothing here needs a run."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.table import Table

from etude.cli.places import console
from etude.cli.weights_plot import MARK, write_plot
from etude.dashboard.formatting import size
from etude.errors import InputError
from etude.weights.delta import native
from etude.weights.delta.measure import Cost, measure
from etude.weights.files.checkpoint import is_checkpoint, read_checkpoint
from etude.weights.files.checkpoint_delta import apply_delta, encode_delta, verify_delta
from etude.weights.files.disk import check_file

ROWS = 40
"""The heaviest tensors that a table shows unless all are asked for."""


def are_checkpoints(a: str, b: str) -> bool:
    """Whether two arguments name checkpoints. Raises `InputError` where one does and the other does not."""
    found = [is_checkpoint(Path(text)) for text in (a, b)]
    if any(found) and not all(found):
        other = (a, b)[found.index(False)]
        raise InputError(f"no checkpoint at {other}", hint="give two directories with *.safetensors, or two such files")
    return all(found)


def say_if_slow() -> None:
    """A line for whoever waits for deltas that numpy codes."""
    if reason := native.why_not():
        print(f"note: {reason}", file=sys.stderr)


def diff(args: argparse.Namespace) -> int:
    """What each tensor's delta costs, the heaviest first, and all of them together."""
    if args.plot:
        check_file(args.plot, (Path(args.a), Path(args.b)), MARK, "plot")
    say_if_slow()
    old, new = read_checkpoint(Path(args.a)), read_checkpoint(Path(args.b))
    costs = measure(old.tensors, new.tensors, args.mode)
    rows = costs.tensors
    shown = sorted(rows, key=lambda row: -row.delta_bytes)[: None if args.all else ROWS]
    table = Table("tensor", "dtype", "elements", "density", "bits per weight", "ratio", "ratio ÷ bound")
    for row in shown:
        table.add_row(row.name, row.dtype, f"{row.num_elements:,}", *_numbers(row), end_section=row is shown[-1])
    parts = [row for row in (costs.deltas, costs.full_tensors) if row and costs.full_tensors]
    for row in (*parts, costs.total):
        table.add_row(row.name, row.dtype, f"{row.num_elements:,}", *_numbers(row))
    screen = console()
    screen.print(table)
    if len(shown) < len(rows):
        screen.print(f"(the {len(shown)} heaviest of {len(rows)} tensors; --all shows the rest)")
    gone = sorted(old.tensors.keys() - new.tensors.keys())
    if gone:
        screen.print(f"(gone: {len(gone)}, {', '.join(gone[:3])}{' …' if len(gone) > 3 else ''})")
    if costs.full_tensors:
        screen.print(
            f"(whole: new, or of another dtype or shape: {costs.num_whole} of {len(rows)} tensors, which add"
            f" {size(costs.full_tensors.delta_bytes)} of {size(costs.total.delta_bytes)}. The bound is one of changes:"
            " deltas alone, of what both sides have, are compared with it)"
        )
    screen.print(
        "(density: share of weights that changed; ratio: bytes of the weights over those of the delta; bound: what a"
        " coder needs that knows each old exponent and no more; a tensor's own numbers are of it coded alone)"
    )
    if args.plot:
        write_plot(args.plot, f"{args.a} → {args.b}", costs)
        screen.print(f"plot: {args.plot}")
    return 0


def encode(args: argparse.Namespace) -> int:
    """Write the delta file between two checkpoints."""
    say_if_slow()
    num_bytes = encode_delta(args.a, args.b, args.out, args.mode)
    snapshot = sum(tensor.num_bytes for tensor in read_checkpoint(args.b).tensors.values())
    print(f"{args.out}: {size(num_bytes)}, {snapshot / num_bytes:.1f} times less than {size(snapshot)}")
    return 0


def apply(args: argparse.Namespace) -> int:
    """Write the checkpoint that a delta file leads to."""
    say_if_slow()
    made = apply_delta(args.a, args.delta, args.out)
    print(
        f"{args.out}: {made.num_tensors} tensors, {made.num_changed} of them changed, every digest as the delta says"
        + (f"; copied {', '.join(made.copied)}" if made.copied else "")
    )
    return 0


def verify(delta: Path, base: Path) -> int:
    """Compare every digest of a delta file's base and target."""
    found = verify_delta(delta, base)
    print(
        f"{delta} applies to {base}: {found.num_tensors} tensors, {size(found.target_bytes)},"
        f" {found.num_changed} changed, every digest as it says"
    )
    return 0


def _numbers(row: Cost) -> tuple[str, str, str, str]:
    if not row.num_changed:
        return "unchanged", "", "", ""
    bound = "–" if row.share_of_bound is None else f"{row.share_of_bound:.3f}"
    return f"{row.density:.4f}", f"{row.bits_per_weight:.4f}", f"{row.ratio:.1f}", bound
