"""The dashboard: shows a run folder in a terminal, as summary numbers, and as an HTML page.

It only reads, and starts no process; the only file that it writes is the report of `write_report`. Modules are imported
when first used.

>>> from etude.dashboard.formatting import duration, sparkline
>>> duration(312), sparkline([0.1, 0.4, 0.9])
('5:12', '▁▄█')
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from etude.dashboard.problems import damage
    from etude.dashboard.report import write_report
    from etude.dashboard.run_view import RunView
    from etude.dashboard.summary import nothing_learnt, summarise
    from etude.dashboard.terminal import plain_line, render, result_lines, terms_legend

__all__ = [
    "RunView",
    "damage",
    "nothing_learnt",
    "plain_line",
    "render",
    "result_lines",
    "summarise",
    "terms_legend",
    "write_report",
]

_HOME = {
    "RunView": "run_view",
    "damage": "problems",
    "terms_legend": "terminal",
    "nothing_learnt": "summary",
    "plain_line": "terminal",
    "render": "terminal",
    "result_lines": "terminal",
    "summarise": "summary",
    "write_report": "report",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
