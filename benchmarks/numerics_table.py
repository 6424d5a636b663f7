"""The table and the pictures of docs/concepts/numerics.md, made from results: what is told is what was measured.

`python -m benchmarks.numerics_table` writes them; a test holds the page to them. A result that is not there yet has no
row.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.delta_table import markdown
from benchmarks.report import RESULTS
from etude.dashboard.plot import WIDE, Series, alone, bar_chart, line_chart

PAGE = Path(__file__).parents[1] / "docs" / "concepts" / "numerics.md"
FROM, TO = "<!-- results -->\n", "<!-- end -->\n"
SHORT = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
SHOWN = [("float32", "float32"), ("float16", "float16"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")]
MIXED = SHOWN[-1]
MANY = 3  # flipped experts: so many and more are one group
Result = Mapping[str, Any]


def result(name: str) -> Any:
    """A committed result; None where nobody has measured it yet."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else None


def rows() -> Iterator[tuple[str, ...]]:
    """Markdown cells: what computes, what was compared, what came out."""
    floats = result("floating_point")
    for row in floats["rows"]:
        if row["mode"] == "native":
            yield from _native(row)
    exact = [row for row in floats["rows"] if row["mode"] == "exact"]
    differing = sum(row["live"]["num_tokens"] - row["live"]["num_equal"] for row in exact)
    names = ", ".join(SHORT[row["engine"]] for row in exact)
    tokens = sum(row["live"]["num_tokens"] for row in exact)
    yield f"exact ({names})", f"{tokens:,}", "–", "–", f"{differing} tokens differ"


def _native(row: Result) -> Iterator[tuple[str, ...]]:
    name = f"native, {_pair(row)}"
    for how in ("live", "replayed") if row["flipped_share"] else ("live",):
        told = row[how]
        flips = f"{100 * row['flipped_share']:.2g} %" if how == "live" else "replayed"
        far = f"p99 {told['ratio_p99']:.1e}, max {told['ratio_max']:.1e}"
        yield name if how == "live" else "", f"{told['num_tokens']:,}", flips, f"{told['k3']:.1e}", far


def _pair(row: Result) -> str:
    engine, trainer = SHORT[row["engine"]], SHORT[row["trainer"]]
    return engine if engine == trainer else f"{engine} engine, {trainer} trainer"


def table() -> list[str]:
    """The lines of the page's table."""
    floats = result("floating_point")
    about = (
        f"{floats['layers']} layers of {floats['experts']} experts, {floats['top_k']} a token, {floats['weights']} "
        f"weights; one thread of an {floats['host']['cpu']}, torch {floats['host']['torch']}."
    )
    head = ["engine and trainer", "tokens", "routers that flip", "k3", "abs(r − 1)"]
    return [about, "", *markdown(head, rows())]


def page(text: str) -> str:
    """The page with this table in it."""
    before, _, rest = text.partition(FROM)
    return before + FROM + "\n".join([*table(), ""]) + TO + rest.partition(TO)[2]


def pictures() -> dict[str, str]:
    """SVG by file name."""
    floats = result("floating_point")
    found = {(row["engine"], row["trainer"]): row for row in floats["rows"] if row["mode"] == "native"}
    shown = {pair: found[pair] for pair in SHOWN if pair in found}
    return {
        "numerics-ratios.svg": _histogram(list(shown.values()), floats["bins"]),
        "numerics-tails.svg": _tails(shown[MIXED], floats["bins"]),
        "numerics-flips.svg": _flips(shown[MIXED]),
    }


def _edges(bins: Result) -> list[float]:
    """Lower edges of the bins, as powers of ten."""
    count = (bins["highest"] - bins["lowest"]) * bins["a_decade"]
    return [bins["lowest"] + i / bins["a_decade"] for i in range(count)]


def _power(exponent: float) -> str:
    return f"1e{exponent:g}"


def _histogram(shown: list[Result], bins: Result) -> str:
    """How far ratios are from 1: a line a pair of dtypes. Equal ones have no logarithm: their share is in the name."""
    edges = _edges(bins)
    series = []
    for colour, row in enumerate(shown, 1):
        told = row["live"]
        shares = [count / told["num_tokens"] for count in told["bins"]]
        name = f"{_pair(row)}: {told['num_equal'] / told['num_tokens']:.0%} equal"
        series.append(Series(name, list(zip(edges, shares, strict=True)), colour))
    chart = line_chart(
        series,
        title="share of tokens by how far their ratio is from 1",
        x_label="|r − 1|",
        x_format=_power,
        y_format="{:.0%}".format,
        frame=WIDE,
    )
    return alone(chart, [(one.label, one.colour) for one in series], x=880, y=40)


def _tails(row: Result, bins: Result) -> str:
    """Share of tokens whose ratio is at least so far from 1, routed live and replayed."""
    series = []
    for colour, how in enumerate(("live", "replayed"), 1):
        told, left, points = row[how], 0, []
        for edge, count in reversed(list(zip(_edges(bins), told["bins"], strict=True))):
            left += count
            if left:
                points.append((edge, left / told["num_tokens"]))
        name = {"live": "each routes by itself", "replayed": "the engine's experts replayed"}[how]
        series.append(Series(name, [point for point in points[::-1] if point[0] >= -4], colour))
    chart = line_chart(
        series,
        title=f"share of tokens whose ratio is further from 1 than this ({_pair(row)})",
        x_label="|r − 1|, at least",
        log=True,
        x_format=_power,
        frame=WIDE,
    )
    return alone(chart, [(one.label, one.colour) for one in series], x=880, y=40)


def _flips(row: Result) -> str:
    """How far ratios are off by the number of layers in which the token went to another expert."""
    groups: dict[int, list[Result]] = {}
    for told in row["by_flips"]:
        if told["num_tokens"]:
            groups.setdefault(min(told["flips"], MANY), []).append(told)
    bars = []
    for flips, parts in sorted(groups.items()):
        tokens = sum(told["num_tokens"] for told in parts)
        mean = math.fsum(told["mean_abs_log_ratio"] * told["num_tokens"] for told in parts) / tokens
        name = f"{flips} or more" if flips == MANY else str(flips) if flips else "none"
        bars.append((f"{name} ({tokens:,} tokens)", [mean]))
    chart = bar_chart(
        bars,
        ["mean |log r|"],
        title=f"mean |log r| by flipped experts ({_pair(row)})",
        x_label="layers in which the token went to another expert",
        frame=WIDE,
    )
    return alone(chart, [("mean |log r|", 1)], x=880, y=40)


def main() -> None:
    PAGE.write_text(page(PAGE.read_text()))
    for name, picture in pictures().items():
        PAGE.with_name(name).write_text(picture)


if __name__ == "__main__":
    main()
