"""The commands ``etude weights diff``, ``encode``, ``apply`` and ``verify`` for checkpoints and delta files.

A delta file has the changes from one checkpoint to another. ``diff --plot`` writes a self-contained page in the style
of a run's report: no script, no external files."""

from __future__ import annotations

import argparse
import html
import re
import sys
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path

from rich.table import Table

from etude.cli.locations import console
from etude.dashboard.formatting import significant, size
from etude.dashboard.plot import WIDE, Series, legend, line_chart
from etude.errors import InputError
from etude.weights.delta import native
from etude.weights.delta.measure import Cost, Costs, measure
from etude.weights.files.checkpoint import is_checkpoint, read_checkpoint
from etude.weights.files.checkpoint_delta import apply_delta, encode_delta, verify_delta
from etude.weights.files.disk import check_file, store_errors

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="etude weights diff"><meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title} · etude</title><style>{css}</style></head>
<body><header><p class="kicker">etude · weights diff</p><h1>{title}</h1><p class="lead">{lead}</p></header>
<main><div class="panels">{panels}</div></main></body></html>
"""

MARK = _PAGE[: _PAGE.index("{title}")].encode()
"""The first bytes of a page that etude wrote: only such a file is overwritten."""
ROWS = 40
"""Number of tensors in a table, the largest deltas first, unless `--all` is given."""


def are_checkpoints(a: str, b: str) -> bool:
    """Return whether two arguments name checkpoints. Raises `InputError` if only one does."""
    found = [is_checkpoint(Path(text)) for text in (a, b)]
    if any(found) and not all(found):
        other = (a, b)[found.index(False)]
        raise InputError(f"no checkpoint at {other}", hint="give two directories with *.safetensors, or two such files")
    return all(found)


def print_if_slow() -> None:
    """Print a note if deltas are encoded with numpy, which is slow."""
    if reason := native.why_not():
        print(f"note: {reason}", file=sys.stderr)


def diff(args: argparse.Namespace) -> int:
    """Print the size of each tensor's delta, the largest first, and the total. Returns 0."""
    if args.plot:
        check_file(args.plot, (Path(args.a), Path(args.b)), MARK, "plot")
    print_if_slow()
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
        screen.print(f"(the {len(shown)} largest of {len(rows)} tensors; --all shows all)")
    gone = sorted(old.tensors.keys() - new.tensors.keys())
    if gone:
        screen.print(f"(removed: {len(gone)}, {', '.join(gone[:3])}{' …' if len(gone) > 3 else ''})")
    if costs.full_tensors:
        screen.print(
            f"(whole: tensors that are stored complete, because they are new or have another dtype or shape:"
            f" {costs.num_whole} of {len(rows)}, {size(costs.full_tensors.delta_bytes)} of"
            f" {size(costs.total.delta_bytes)}."
            " Only deltas of tensors that both checkpoints have are compared with the bound)"
        )
    screen.print(
        "(density: share of weights that changed; ratio: bytes of the weights divided by bytes of the delta; bound:"
        " bytes needed by a code that knows only the old exponents;"
        " the numbers of a tensor are for that tensor coded alone)"
    )
    if args.plot:
        write_plot(args.plot, f"{args.a} → {args.b}", costs)
        screen.print(f"plot: {args.plot}")
    return 0


def encode(args: argparse.Namespace) -> int:
    """Write the delta file from one checkpoint to another. Returns 0."""
    print_if_slow()
    num_bytes = encode_delta(args.a, args.b, args.out, args.mode)
    snapshot = sum(tensor.num_bytes for tensor in read_checkpoint(args.b).tensors.values())
    print(f"{args.out}: {size(num_bytes)}, {snapshot / num_bytes:.1f} times smaller than {size(snapshot)}")
    return 0


def apply(args: argparse.Namespace) -> int:
    """Apply a delta file to a checkpoint, and write the resulting checkpoint. Returns 0."""
    print_if_slow()
    made = apply_delta(args.a, args.delta, args.out)
    print(
        f"{args.out}: {made.num_tensors} tensors, {made.num_changed} of them changed, all digests verified"
        + (f"; copied {', '.join(made.copied)}" if made.copied else "")
    )
    return 0


def verify(delta: Path, base: Path) -> int:
    """Verify every digest in a delta file: of the tensors of its base, and of the tensors that result.

    Returns the exit code."""
    found = verify_delta(delta, base)
    print(
        f"{delta} applies to {base}: {found.num_tensors} tensors, {size(found.target_bytes)},"
        f" {found.num_changed} changed, all digests verified"
    )
    return 0


def _numbers(row: Cost) -> tuple[str, str, str, str]:
    if not row.num_changed:
        return "unchanged", "", "", ""
    bound = "–" if row.share_of_bound is None else f"{row.share_of_bound:.3f}"
    return f"{row.density:.4f}", f"{row.bits_per_weight:.4f}", f"{row.ratio:.1f}", bound


def write_plot(path: Path, title: str, costs: Costs) -> None:
    """Write an HTML page with plots of each tensor's delta, in order of layers.

    They show the share of changed elements, the bits per weight, and the nearness to the smallest possible size. Raises
    `StoreError`."""
    rows, total = sorted(costs.tensors, key=lambda row: _natural(row.name)), costs.total
    changed = [(i, row) for i, row in enumerate(rows) if row.num_changed]
    lead = (
        f"{total.num_elements:,} weights, {total.num_changed:,} of them changed ({significant(total.density)}). "
        f"The delta has {size(total.delta_bytes)}: {significant(total.bits_per_weight)} bits a weight, "
        f"{significant(total.ratio)} times smaller than the weights{_share_of_bound(costs)}."
    )
    panels = [
        _panel("Density", "share of a tensor's weights that changed", changed, {"density": lambda c: c.density}),
        _panel(
            "Bits per weight",
            "of each tensor's delta, coded alone, and its bound",
            changed,
            {"delta": lambda c: c.bits_per_weight, "bound": lambda c: c.bound_bits_per_weight},
        ),
        _panel(
            "Ratio ÷ bound",
            "1 is the bound. Deltas of bf16 training are within about 5 % of it; complete tensors have none",
            changed,
            {"share": lambda c: c.share_of_bound},
            log=False,
        ),
    ]
    css = (files("etude.dashboard") / "report.css").read_text(encoding="utf-8")
    page = _PAGE.format(title=html.escape(title), css=css, lead=html.escape(lead), panels="".join(panels))
    with store_errors(f"{path} cannot be written"):
        path.write_text(page, encoding="utf-8")


def _share_of_bound(costs: Costs) -> str:
    """How close the deltas are to their bound, and which tensors have no bound, as text."""
    share = costs.deltas.share_of_bound if costs.deltas else None
    if costs.full_tensors is None:
        return f", {significant(share)} of the bound" if share is not None else ""
    others = f"; the deltas of the others are at {significant(share)} of their bound" if share is not None else ""
    what = f"{costs.num_whole} tensors that are stored complete, which have no bound"
    if costs.num_whole == 1:
        what = "1 tensor that is stored complete, which has no bound"
    return f". Of the delta, {size(costs.full_tensors.delta_bytes)} are for {what}{others}"


def _panel(
    title: str,
    note: str,
    changed: Sequence[tuple[int, Cost]],
    values: dict[str, Callable[[Cost], float | None]],
    *,
    log: bool = True,
) -> str:
    series = [
        Series(name, [(i, number) for i, row in changed if (number := value(row) or 0.0) > 0], colour, dots_only=True)
        for colour, (name, value) in enumerate(values.items(), 1)
    ]
    chart = line_chart(series, title=title, x_label="tensor, in order of layers", log=log, zero=not log, frame=WIDE)
    names = legend([(one.label, one.colour) for one in series]) if len(series) > 1 else ""
    return f'<figure class="wide"><figcaption><h3>{title}</h3><p>{note}</p>{names}</figcaption>{chart}</figure>'


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key that puts layer 10 after layer 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
