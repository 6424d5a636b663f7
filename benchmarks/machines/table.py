"""The table of docs/guides/machines-alone.md, made from the results that it names: what is told is what was measured.

`python -m benchmarks.machines.table` writes it into the page; a test holds the page to it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS
from benchmarks.weights.delta_table import markdown

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "machines-alone.md"
FROM, TO = "<!-- numbers:begin -->\n", "<!-- numbers:end -->\n"


def table() -> list[str]:
    """Markdown, a row a measurement."""
    burst, alone, vm, remote = map(_result, ("machines_burst", "machines", "microvm", "machines_remote"))
    ready, python, memory = burst["fork_to_ready"], burst["fork_to_python"], burst["memory"]
    served = remote["remote"]
    rows = [
        ("`namespace`", "fork to ready, sustained, with removal", f"**{ready['a_second']:.0f} a second**; "
         f"{_ms(ready['ready_ms'])}"),
        ("", "fork to the first `python -c` answered, the same way", f"{python['a_second']:.0f} a second; "
         f"{_ms(python['python_answered_ms'])} (an interpreter alone: {burst['python_alone_ms']['p50']:.0f} ms)"),
        ("", "`true`", _ms(alone["true_ms"])),
        ("", f"memory of one, {memory['alive']} alive", f"{memory['pss_mib_each']:.2f} MiB; "
         f"{memory['host_memory_mib_each']:.2f} MiB with the kernel's"),
        *(("", f"machines a second ÷ {name}'s", f"{peer['ours_over_it']['machines_a_second']:.1f}")
          for name, peer in burst["beside"].items() if "ours_over_it" in peer),
        ("`microvm`", "restore into a machine; snapshot of one", f"{vm['restore_ms_p50']:.1f}; "
         f"{vm['snapshot_ms_p50']:.1f} ms (p50)"),
        ("", "first command; each after it", f"{vm['first_exec_ms_p50']:.0f}; {vm['exec_ms_p50']:.0f} ms (p50)"),
        ("", f"{vm['forked_at_once']} at once", f"{vm['forks_per_s']:.0f} a second; {vm['pss_mib_each']:.0f} MiB each, "
         f"{vm['pss_mib_each_after_python']:.0f} after Python ran"),
        ("`remote`, our server on loopback", "fork; `true`", f"{served['fork']['ms_p50']:.1f}; "
         f"{served['exec_true']['ms_p50']:.1f} ms (p50)"),
    ]  # fmt: skip
    return markdown(["", "what", "measured"], rows)


def page(text: str) -> str:
    """The page with this table in it."""
    before, _, rest = text.partition(FROM)
    return before + FROM + "\n".join([*table(), ""]) + TO + rest.partition(TO)[2]


def _result(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def _ms(quantiles: dict[str, float]) -> str:
    return f"p50 {quantiles['p50']:.2f}, p99 {quantiles['p99']:.1f} ms"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
