"""The dashboard: a run folder as people see it: in a terminal, as numbers, as one page. Reads, and starts nothing.

The only file it ever writes is the report that `write_report` is asked for. A dead viewer never hurts a run. The words
alone need nothing; what needs more is imported when first used.

>>> from etude.dashboard.words import duration, sparkline
>>> duration(312), sparkline([0.1, 0.4, 0.9])
('5:12', '▁▄█')
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from etude.dashboard.read import RunView
    from etude.dashboard.report import write_report
    from etude.dashboard.summary import nothing_learnt, summarise
    from etude.dashboard.terminal import explained, plain_line, render, result_lines
    from etude.dashboard.troubles import damage

__all__ = [
    "RunView",
    "damage",
    "explained",
    "nothing_learnt",
    "plain_line",
    "render",
    "result_lines",
    "summarise",
    "write_report",
]

_HOME = {
    "damage": "troubles",
    "RunView": "read",
    "explained": "terminal",
    "plain_line": "terminal",
    "render": "terminal",
    "result_lines": "terminal",
    "nothing_learnt": "summary",
    "summarise": "summary",
    "write_report": "report",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
