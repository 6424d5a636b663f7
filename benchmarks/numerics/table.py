"""The tables and the pictures of docs/concepts/numerics.md, made from results: what is told is what was measured.

`python -m benchmarks.numerics.table` writes them; a test holds the page to them. A result that is not there yet has no
row.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS
from benchmarks.weights.delta_table import markdown
from etude.dashboard.plot import WIDE, Series, bar_chart, line_chart, standalone_svg

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "numerics.md"
FROM, TO = "<!-- results -->\n", "<!-- end -->\n"
SHORT = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
SHOWN = [("float32", "float32"), ("float16", "float16"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")]
MIXED = SHOWN[-1]
TOKENS = (1, 64, 2048)
MANY = 3  # flipped experts: so many and more are one group
Result = Mapping[str, Any]


def result(name: str) -> Any:
    """A committed result; None where nobody has measured it yet."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else None


def parts() -> Iterator[tuple[str, ...]]:
    """How far engine and trainer are apart: who computes, tokens compared, k3, |r - 1| at the 99th percentile and at
    most, how many tokens are not equal to the bit."""
    floats = result("floating_point")
    for row in floats["rows"]:
        name = f"{row['mode']}, {_pair(row)}"
        for how in ("live", "replayed") if row["flipped_share"] else ("live",):
            told = row[how]
            words = f"{name}; {100 * row['flipped_share']:.2g} % of routers flip" if row["flipped_share"] else name
            differing = told["num_tokens"] - told["num_equal"]
            yield (
                words if how == "live" else "the same, routes replayed",
                *(f"{told['num_tokens']:,}", _short(told["k3"]), _short(told["ratio_p99"]), _short(told["ratio_max"])),
                _share(differing, told["num_tokens"]),
            )
    yield from _trained()
    yield from _rounded()


def _trained() -> Iterator[tuple[str, ...]]:
    """A trained model whose engine computes in bf16, beside the floor that no replay gets under."""
    routes = result("replay_routes")
    said = {"live": "each routes by itself", "replayed": "routes replayed", "floor": "both given the same routes"}
    for row in routes["agreement"] if routes else ():
        name = f"trained model, bf16 engine, {SHORT[row['learner']]} trainer; {said[row['routing']]}"
        yield name, f"{routes['num_sampled']:,}", *map(_short, (row["k3"], row["off_p99"], row["off_max"])), ""


def _rounded() -> Iterator[tuple[str, ...]]:
    """Formats of low precision that both sides round to."""
    low = result("quantised")
    for kind, row in low["formats"].items() if low else ():
        if kind != "none":
            told = [found for name, found in row.items() if name.startswith("exact")]
            tokens, differing = sum(one["tokens"] for one in told), sum(one["differing"] for one in told)
            yield f"exact, rounded to {kind}", f"{tokens:,}", "", "", "", _share(differing, tokens)


def costs() -> Iterator[tuple[str, str]]:
    """What a defence takes."""
    routes, low = result("replay_routes"), result("quantised")
    if routes:
        size, step = routes["bytes_a_token"]["routes"], routes["step"]
        yield "router replay", f"{100 * step['overhead']:.1f} % of a training step"
        yield (
            "",
            f"{size['layers_x_top_k_x_item']} bytes a token ({size['layers']} layers, {size['top_k']} experts each)",
        )
    for kind, row in low["formats"].items() if low else ():
        if kind != "none":
            told = f"decoding × {row['decode_ratio']:.2f}, training × {row['training_ratio']:.2f} (emulated)"
            yield f"rounding to {kind}", told


def bits() -> Iterator[tuple[str, ...]]:
    """Log-probabilities that have other bits in another circumstance: compared, in exact mode, in native mode."""
    exact = result("exact") or {}
    told: dict[tuple[str, str], dict[str, Result]] = {}
    for row in exact.get("bits", ()):
        told.setdefault((row["family"], row["dtype"]), {})[row["mode"]] = row
    for (family, dtype), of in told.items():
        shares = [_share(of[mode]["differing"], of[mode]["compared"]) for mode in ("exact", "native")]
        yield f"{family}, {SHORT[dtype]}", f"{of['exact']['compared']:,}", *shares


def exact_costs() -> Iterator[tuple[str, ...]]:
    """How much longer exact mode takes than native, by what is done and dtype."""
    yield from _crossed((result("exact") or {}).get("cost", ()), "what", "dtype", list(SHORT))


def operator_costs() -> Iterator[tuple[str, ...]]:
    """The same of each operator alone, by the number of tokens."""
    yield from _crossed((result("exact") or {}).get("operators", ()), "operator", "tokens", TOKENS)


def _crossed(rows: Iterable[Result], by: str, across: str, columns: Sequence[object]) -> Iterator[tuple[str, ...]]:
    told: dict[str, dict[object, str]] = {}
    for row in rows:
        told.setdefault(row[by], {})[row[across]] = f"× {row['exact_costs']:.2f}"
    for name, found in told.items():
        yield name, *(found.get(column, "") for column in columns)


def doctor() -> Iterator[tuple[str, ...]]:
    """What the parity doctor says of planted faults whose numbers are far off, and of clean engines."""
    told = result("parity_doctor") or {}
    for name, row in told.get("far_by_dtype_and_mode", {}).items():
        dtype, mode = name.split()
        clean = [one for one in told["clean"] if (one["dtype"], one["mode"]) == (dtype, mode)]
        alarms, engines = (sum(one[key] for one in clean) for key in ("false_alarms", "engines"))
        counts = row["cases"], row["named"], row["blamed"] - row["named"], row["cases"] - row["blamed"]
        yield f"{mode}, {SHORT[dtype]}", *map(str, counts), f"{alarms} in {engines} engines"


def formats() -> Iterator[tuple[str, ...]]:
    """What a format of low precision is off by, and what it saves."""
    low = result("quantised")
    for kind, row in low["formats"].items() if low else ():
        if kind != "none":
            off = row["error"]
            yield kind, f"{off['kl']:.2g}", f"{100 * off['same_best_token']:.1f} %", f"{row['shipped']['bytes']:,}"


def trained() -> Iterator[tuple[str, ...]]:
    """Held-out solve rates of runs by each way to keep engine and learner together, and how far behind the default."""
    runs = result("numerics_runs")
    for way, row in runs["ways"].items() if runs else ():
        against = runs["after_minus_default"].get(way)
        behind = f"{against['difference']:+.3f} [{against['low']:+.3f}, {against['high']:+.3f}]" if against else ""
        cpu = f"{runs['seconds'][way]['rl_cpu_s']:.0f} s"
        yield "exact: the default" if way == "default" else way, _rate(row["before"]), _rate(row["after"]), behind, cpu


def _rate(told: Result) -> str:
    return f"{told['rate']:.3f} [{told['low']:.3f}, {told['high']:.3f}]"


def _pair(row: Result) -> str:
    engine, trainer = SHORT[row["engine"]], SHORT[row["trainer"]]
    return engine if engine == trainer else f"{engine} engine, {trainer} trainer"


def _short(value: float) -> str:
    return f"{value:.1e}" if value else "0"


def _share(differing: int, tokens: int) -> str:
    return f"{100 * differing / tokens:.3g} %" if differing else "none"


def tables() -> list[str]:
    """The lines of the page's tables."""
    floats = result("floating_point")
    about = (
        f"{floats['layers']} layers of {floats['experts']} experts, {floats['top_k']} a token, {floats['weights']} "
        f"weights where nothing else is said; one thread of an {floats['host']['cpu']}, torch "
        f"{floats['host']['torch']}."
    )
    head = ["engine and trainer", "tokens", "k3", "abs(r − 1), p99", "most", "tokens that differ"]
    lines = [about, "", *markdown(head, parts())]
    for words, head, rows in _further():
        if found := list(rows):
            lines += ["", *([words, ""] if words else []), *markdown(head, found)]
    return lines


def _further() -> Iterator[tuple[str, list[str], Iterable[tuple[str, ...]]]]:
    """Words, head and rows of each table behind the first."""
    dtypes = [SHORT[dtype] for dtype in SHORT]
    yield "", ["defence", "costs"], costs()
    yield (
        "Texts told again in every other circumstance (alone, in pairs, in chunks, after a cached turn, by two "
        "threads, by two ranks, as a probe, by a learner), and how many log-probabilities have other bits then:",
        ["", "compared", "exact: other bits", "native: other bits"],
        bits(),
    )
    yield "What exact mode takes, native being 1, in CPU time:", ["laptop example's model", *dtypes], exact_costs()
    yield (
        "The same of each operator alone, fp32, by the number of tokens:",
        ["operator", *(f"{n:,}" for n in TOKENS)],
        operator_costs(),
    )
    yield (
        "Faults that engines have had, planted, and what the parity doctor says of those that are far from rounding:",
        ["", "faults", "named", "misnamed", "missed", "false alarms"],
        doctor(),
    )
    yield (
        "Formats of low precision against float32, one checkpoint, no training in them:",
        ["format", "KL a token", "same best token", "bytes of a version"],
        formats(),
    )
    yield (
        "Runs of RL that differ in this alone, held-out solve rates with 95 % intervals, seeds pooled:",
        ["engine and learner", "before RL", "after RL", "ahead of the default", "CPU time of RL"],
        trained(),
    )


def page(text: str) -> str:
    """The page with these tables in it."""
    before, _, rest = text.partition(FROM)
    return before + FROM + "\n".join([*tables(), ""]) + TO + rest.partition(TO)[2]


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
    filled = [i for i, counts in enumerate(zip(*(row["live"]["bins"] for row in shown), strict=True)) if any(counts)]
    some = slice(max(0, min(filled) - 1), max(filled) + 2)
    series = []
    for colour, row in enumerate(shown, 1):
        told = row["live"]
        shares = [count / told["num_tokens"] for count in told["bins"]]
        name = f"{_pair(row)}: {told['num_equal'] / told['num_tokens']:.0%} equal"
        series.append(Series(name, list(zip(_edges(bins)[some], shares[some], strict=True)), colour))
    chart = line_chart(
        series,
        title="share of tokens by how far their ratio is from 1",
        x_label="|r − 1|",
        x_format=_power,
        y_format="{:.0%}".format,
        frame=WIDE,
    )
    return standalone_svg(chart, [(one.label, one.colour) for one in series], x=880, y=40)


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
    return standalone_svg(chart, [(one.label, one.colour) for one in series], x=880, y=40)


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
        x_label="mean |log r| of tokens by the number of layers in which they went to another expert",
        frame=WIDE,
    )
    return standalone_svg(chart, [], x=0, y=0)


def main() -> None:
    PAGE.write_text(page(PAGE.read_text()))
    for name, picture in pictures().items():
        PAGE.with_name(name).write_text(picture)


if __name__ == "__main__":
    main()
