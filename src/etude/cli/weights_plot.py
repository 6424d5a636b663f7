"""``etude weights diff --plot``: one self-contained page in the style of a run's report: no script, nothing fetched."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path

from etude.dashboard.formatting import significant, size
from etude.dashboard.plot import WIDE, Series, legend, line_chart
from etude.weights.delta.measure import Cost, Costs
from etude.weights.files.disk import store_errors

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="etude weights diff"><meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title} · etude</title><style>{css}</style></head>
<body><header><p class="kicker">etude · weights diff</p><h1>{title}</h1><p class="lead">{lead}</p></header>
<main><div class="panels">{panels}</div></main></body></html>
"""

MARK = _PAGE[: _PAGE.index("{title}")].encode()
"""What a page of ours begins with."""


def write_plot(path: Path, title: str, costs: Costs) -> None:
    """Density, bits per weight and share of the bound, by tensor in order of their layers. Raises `StoreError`."""
    rows, total = sorted(costs.tensors, key=lambda row: _natural(row.name)), costs.total
    changed = [(i, row) for i, row in enumerate(rows) if row.num_changed]
    lead = (
        f"{total.num_elements:,} weights, {total.num_changed:,} of them changed ({significant(total.density)}). "
        f"The delta has {size(total.delta_bytes)}: {significant(total.bits_per_weight)} bits a weight, "
        f"{significant(total.ratio)} times less than the weights{_near(costs)}."
    )
    panels = [
        _panel("Density", "share of a tensor's weights that changed", changed, {"density": lambda c: c.density}),
        _panel(
            "Bits per weight",
            "of each tensor's delta, coded alone, and of its bound",
            changed,
            {"delta": lambda c: c.bits_per_weight, "bound": lambda c: c.bound_bits_per_weight},
        ),
        _panel(
            "Ratio ÷ bound",
            "1 is the bound: deltas of training in bf16 come within some 5 per cent; what is whole has none",
            changed,
            {"share": lambda c: c.share_of_bound},
            log=False,
        ),
    ]
    css = (files("etude.dashboard") / "report.css").read_text(encoding="utf-8")
    page = _PAGE.format(title=html.escape(title), css=css, lead=html.escape(lead), panels="".join(panels))
    with store_errors(f"{path} cannot be written"):
        path.write_text(page, encoding="utf-8")


def _near(costs: Costs) -> str:
    """How near the deltas are to their bound, and what takes no part in that."""
    share = costs.deltas.share_of_bound if costs.deltas else None
    if costs.full_tensors is None:
        return f", {significant(share)} of the bound" if share is not None else ""
    near = f"; the others' deltas are at {significant(share)} of their bound" if share is not None else ""
    what = f"{costs.num_whole} tensors that go whole, which have no bound"
    if costs.num_whole == 1:
        what = "1 tensor that goes whole, which has no bound"
    return f". Of it {size(costs.full_tensors.delta_bytes)} are of {what}{near}"


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
    """So that layer 10 comes after layer 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
