"""The tables of docs/concepts/scale.md, from committed results; `python -m benchmarks.run.scale_table` writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "scale.md"
FROM, TO = "<!-- scale:begin -->\n", "<!-- scale:end -->\n"
SHOWN = {
    "admit a group": "admit a group of 8",
    "start": "start a rollout",
    "finish": "finish one",
    "start 16": "start 16 at once",
    "finish 16": "finish 16 at once",
    "open_groups": "which groups are open",
    "ready_groups": "is a group ready",
    "group": "a group's records",
    "batch of a step": "the batch of a step of 128",
    "commit of a step": "the commit of one",
}


def result(name: str) -> dict[str, Any] | None:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def page(text: str) -> str:
    """The page with these tables in it."""
    before, _, rest = text.partition(FROM)
    return before + FROM + "\n".join([*tables(), ""]) + TO + rest.partition(TO)[2]


def tables() -> list[str]:
    """Of what was measured."""
    ledgers, loop = [result("ledger_sqlite"), result("ledger_postgres")], result("loop_scale")
    lines = [line for found in ledgers if found for line in _ledger(found)]
    return [*lines, *(_loop(loop) if loop else [])]


def _ledger(found: dict[str, Any]) -> list[str]:
    rows = found["by_length"]
    lengths = [f"{row['rollouts']:,}" for row in rows]
    lines = ["", f"| {found['kind']}: rollouts in its past | " + " | ".join(lengths) + " |"]
    lines.append("| --- " * (1 + len(rows)) + "|")
    lines.append("| transitions a second | " + " | ".join(f"{row['transitions_a_s']:,}" for row in rows) + " |")
    lines.append("| CPU µs a transition | " + " | ".join(f"{row['cpu_us_a_transition']:.0f}" for row in rows) + " |")
    for name, words in ((name, words) for name, words in SHOWN.items() if name in rows[0]["us"]):
        lines.append(f"| {words}, ms | " + " | ".join(f"{row['us'][name] / 1e3:.2f}" for row in rows) + " |")
    looks = ("audit --new", "audit", "reconcile")
    lines += [f"| `{name}`, s | " + " | ".join(f"{row[name]['s']:.2f}" for row in rows) + " |" for name in looks]
    peaks = [max(row[name]["peak_mb"] for name in ("playing", "audit", "audit --new", "reconcile")) for row in rows]
    lines.append("| memory at its peak, MB | " + " | ".join(f"{peak:.0f}" for peak in peaks) + " |")
    return lines


def _loop(found: dict[str, Any]) -> list[str]:
    lines = [
        "",
        "| groups a step | ledger | rollouts a second | in proportion | CPU ms a rollout | stall p99, ms | MB |",
    ]
    lines.append("| --- " * 7 + "|")
    for kind, rows in found["kinds"].items():
        for row in rows:
            share = row["rollouts_a_s"] / (rows[0]["rollouts_a_s"] * row["scale"] / rows[0]["scale"])
            cells = (row["groups"], kind, f"{row['rollouts_a_s']:,}", f"{share:.0%}", row["conductor_cpu_ms_a_rollout"])
            told = (*cells, row.get("stall_ms_p99", ""), round(row["peak_mb"]))
            lines.append("| " + " | ".join(map(str, told)) + " |")
    return lines


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
