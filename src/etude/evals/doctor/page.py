"""Writes a diagnosis as a self-contained HTML page: no scripts, no external files, plots as inline SVG."""

from __future__ import annotations

import html
from pathlib import Path

from etude.evals.doctor.diagnosis import Diagnosis, WayResult
from etude.evals.parity import LEGEND, edges

_CSS = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
td, th { padding: .2rem .8rem .2rem 0; text-align: right } td:first-child, th:first-child { text-align: left }
svg { width: 100%; height: auto } text { font-size: 11px; fill: currentColor; text-anchor: middle }
rect { fill: #3b76c4 } line { stroke: currentColor; opacity: .4 } .off { color: #c0392b }
"""
_WIDTH, _HEIGHT, _FLOOR = 720, 160, 120


def write_page(path: Path, found: Diagnosis, *, title: str) -> None:
    """Write a diagnosis to an HTML file.

    The page has the verdict, the metrics of each way of sampling, the wrong operators, and histograms of the
    differences between log-probabilities."""
    rows = "".join(_row(way) for way in found.ways)
    off = "".join(
        f"<li class=off><b>{html.escape(f.name)}</b>: error {f.error:.2e}, allowed by rounding {f.allowed:.2e}, "
        f"worst at position {f.position}, {f.num_rows} rows</li>"
        for f in found.findings
    )
    plots = "".join(f"<h2>{html.escape(way.way)}</h2>{_histogram(way)}" for way in found.ways)
    heading = html.escape(title)
    path.write_text(
        f"""<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{heading} · etude parity</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'"><style>{_CSS}</style>
</head><body><h1>{heading}</h1><p>{html.escape(found.engine)} against the learner: <b>{found.verdict}</b></p>
<table><tr><th>way</th><th>tokens</th><th>differing</th><th>k1</th><th>k3</th><th>p99 |r-1|</th><th>max |r-1|</th>
<th>flipped</th><th>k3 replayed</th></tr>{rows}</table><p>{html.escape(LEGEND)}</p><ul>{off}</ul>{plots}</body></html>
""",
        encoding="utf-8",
    )


def _row(way: WayResult) -> str:
    one = way.parity
    flipped = "-" if one.flipped is None else f"{one.flipped:.2%}"
    replayed = "-" if way.replayed is None else f"{way.replayed.k3:.2e}"
    cells = [
        html.escape(way.way),
        str(one.num_tokens),
        str(one.num_differing),
        *(f"{value:.2e}" for value in (one.k1, one.k3, one.ratio_p99, one.ratio_max)),
        flipped,
        replayed,
    ]
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _histogram(way: WayResult) -> str:
    counts, bounds = way.parity.histogram, edges()
    labels = ["0", f"<{bounds[0]:.0e}", *(f"{bound:.0e}" if i % 2 == 0 else "" for i, bound in enumerate(bounds))]
    wide, most = _WIDTH / len(counts), max(counts)
    parts = [f'<line x1="0" x2="{_WIDTH}" y1="{_FLOOR}" y2="{_FLOOR}"/>']
    for i, (count, label) in enumerate(zip(counts, labels, strict=True)):
        high = (_FLOOR - 20) * count / most
        at = i * wide
        parts.append(
            f'<rect x="{at + 2:.1f}" y="{_FLOOR - high:.1f}" width="{wide - 4:.1f}" height="{high:.1f}">'
            f"<title>{count} tokens</title></rect>"
        )
        middle = at + wide / 2
        parts.append(f'<text x="{middle:.1f}" y="{_FLOOR + 16}">{html.escape(label)}</text>')
        if count:
            parts.append(f'<text x="{middle:.1f}" y="{_FLOOR - high - 4:.1f}">{count}</text>')
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="tokens by difference">{"".join(parts)}</svg>'
