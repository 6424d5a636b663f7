"""The dashboard: a run folder as people see it: in a terminal, as numbers, as one page. Reads, and starts nothing.

The only file it ever writes is the report that `write_report` is asked for. A dead viewer never hurts a run.

>>> from etude.dashboard.words import duration, sparkline
>>> duration(312), sparkline([0.1, 0.4, 0.9])
('5:12', '▁▄█')
"""

from etude.dashboard.read import RunView
from etude.dashboard.report import write_report
from etude.dashboard.summary import nothing_learnt, summarise
from etude.dashboard.terminal import explained, plain_line, render, result_lines

__all__ = [
    "RunView",
    "explained",
    "nothing_learnt",
    "plain_line",
    "render",
    "result_lines",
    "summarise",
    "write_report",
]
