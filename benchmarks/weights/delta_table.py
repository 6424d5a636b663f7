"""The tables of docs/concepts/deltas.md, made from `results/delta.json` and `results/delta_public.json`.

`python -m benchmarks.weights.delta_table` writes them into the page; a test holds the page to them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS
from benchmarks.weights.delta import COMPARED, GOAL_PAIR, MODES, ahead

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "deltas.md"
FROM, TO = "<!-- results/delta.json -->\n", "<!-- end -->\n"
FROM_PUBLIC = "<!-- results/delta_public.json -->\n"
CALLS = {
    "encode": "`encode`",
    "apply in place": "`apply`, in place",
    "apply new": "`apply`, into new memory",
    "update": "a `LiveFollower`'s update, from pointer to live memory",
}
SPEEDS = dict(zip(COMPARED, ("encode", "decode into new memory", "in place"), strict=True))


def tables(result: Mapping[str, Any]) -> str:
    """Markdown: every pair in both modes, then every coder at the pair that has goals."""
    host, rows = result["host"], result["rows"]
    at_goal = next(row for row in rows if row["pair"] == GOAL_PAIR)
    return "\n".join([
        f"One core of an {host['cpu']}, {result['kernels']}, commit {result['commit']}; GB of snapshot a CPU second.",
        "",
        *markdown(
            ["pair", "change", "bound", "mode", "ratio", "÷ bound", "encode", "÷ scan", "apply in place", "÷ memcpy"],
            (_ours(row, mode) for row in rows for mode in MODES),
        ),
        "",
        f"The same and what others do, at `{GOAL_PAIR}`; in place where a coder can:",
        "",
        *markdown(
            ["coder", "ratio", "÷ bound", *SPEEDS.values()],
            (_coder(name, coder) for name, coder in at_goal["coders"].items()),
        ),
        "",
        "Ours ÷ theirs, of the one with the best ratio and of the fastest in each:",
        "",
        *markdown(
            ["etude", "beside", "its name", "ratio", *SPEEDS.values()],
            (row for mode, found in ahead(at_goal["coders"]).items() for row in _beside(mode, found)),
        ),
        "",
    ])  # fmt: skip


def public_table(result: Mapping[str, Any]) -> str:
    """Markdown: what the public calls cost at the pair that has goals, on one core, and what a second core gains."""
    pair = next(pair for pair in result["pairs"] if pair["pair"] == GOAL_PAIR)
    copy, scan, host = pair["memcpy"], pair["scan"], result["host"]
    calls = {told: [pair.get(f"{mode} {call}") for mode in MODES] for call, told in CALLS.items()}
    return "\n".join([
        f"One core of an {host['cpu']}, commit {result['commit']}, at `{GOAL_PAIR}`; GB of snapshot a CPU second.",
        f"A copy of a snapshot makes {copy['gb_per_s']:.1f}. *2 cores* is two cores to one, by wall time: a copy gains",
        f"{copy['two_cores']:.2f} there, a scan of both snapshots {scan['two_cores']:.2f}. One core takes nearly all",
        "that the memory gives.",
        "",
        *markdown(
            ["call", "best", "÷ memcpy", "2 cores", "fast", "÷ memcpy", "2 cores"],
            ([told, *(cell for one in found for cell in _call(one))] for told, found in calls.items()),
        ),
        "",
    ])  # fmt: skip


def _call(found: Mapping[str, float] | None) -> list[str]:
    if found is None:
        return ["", "", ""]
    return [f"{found['gb_per_s']:.1f}", f"{found['of_memcpy']:.2f}", f"{found['two_cores']:.2f}"]


def _ours(row: Mapping[str, Any], mode: str) -> list[str]:
    coder = row["coders"][mode]
    encode, apply = coder["encode_kernels"], coder["apply_kernels"]
    named = [f"`{row['pair']}`", f"{100 * row['changed_share']:.2g} %", _ratio(row["bound_ratio"])]
    return [
        *(named if mode == MODES[0] else ["", "", ""]),
        *(mode, _ratio(coder["ratio"]), f"{coder['of_bound']:.3f}"),
        *(f"{encode['gb_per_s']:.1f}", f"{encode['of_scan']:.2f}"),
        *(f"{apply['gb_per_s']:.1f}", f"{apply['of_memcpy']:.2f}"),
    ]


def _coder(name: str, coder: Mapping[str, Any]) -> list[str]:
    if "missing" in coder:
        return [name, coder["missing"], "", "", "", ""]
    speeds = (coder.get(level) for level in ("encode_codec", "apply_codec", "apply_kernels"))
    told = (f"{speed['gb_per_s']:.2f}" if speed else "–" for speed in speeds)
    return [f"etude, {name}" if name in MODES else name, _ratio(coder["ratio"]), f"{coder['of_bound']:.3f}", *told]


def _beside(mode: str, found: Mapping[str, Any]) -> Iterable[list[str]]:
    best = found["best_ratio"]
    yield [mode, "best ratio", best["peer"], f"{best['ratio']:.2f}", *(_factor(best.get(what)) for what in SPEEDS)]
    for what, name in SPEEDS.items():
        if fastest := found["fastest"][what]:
            times = (_factor(fastest["times"] if other == what else None) for other in SPEEDS)
            yield ["", f"fastest: {name}", fastest["peer"], f"{fastest['ratio']:.2f}", *times]


def _factor(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _ratio(ratio: float) -> str:
    return f"{ratio:.0f}" if ratio >= 100 else f"{ratio:.1f}"


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def page(text: str) -> str:
    """The page's text with the tables of the results that are committed."""
    made = {FROM: ("delta", tables), FROM_PUBLIC: ("delta_public", public_table)}
    for start, (name, table) in made.items():
        before, _, rest = text.partition(start)
        text = before + start + table(json.loads((RESULTS / f"{name}.json").read_text())) + TO + rest.partition(TO)[2]
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
