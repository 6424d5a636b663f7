"""Formats numbers for people. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

BARS = "▁▂▃▄▅▆▇█"


def duration(seconds: float) -> str:
    """Format seconds as text.

    >>> duration(0.4), duration(42), duration(312), duration(7325)
    ('0.4 s', '42 s', '5:12', '2:02:05')
    """
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    return clock(seconds)


def clock(seconds: float) -> str:
    """Format seconds as hours, minutes and seconds.

    >>> clock(0), clock(90)
    ('0:00', '1:30')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def size(num_bytes: float) -> str:
    """Format a number of bytes with three significant digits and a decimal unit.

    >>> size(812), size(214_300), size(3_070_000_000)
    ('812 B', '214 kB', '3.07 GB')
    """
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale:
            return f"{significant(num_bytes / scale)} {unit}"
    return f"{num_bytes:.0f} B"


def number(count: int, of: str) -> str:
    """Format a count with its noun `of`, in the plural if needed.

    >>> number(0, "problem"), number(1, "problem"), number(2, "problem")
    ('0 problems', '1 problem', '2 problems')
    """
    return f"{count} {of}{'' if count == 1 else 's'}"


def significant(value: float, digits: int = 3) -> str:
    """Format a number with `digits` significant digits.

    >>> significant(0.00012345), significant(12.345), significant(1234.5), significant(0)
    ('1.23e-4', '12.3', '1234', '0')
    >>> significant(4.4449e-6), significant(1e-6)
    ('4.44e-6', '1e-6')
    """
    if value and abs(value) < 1e-3:
        mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def percent(share: float) -> str:
    """Format a share from 0 to 1 as a percentage.

    >>> percent(0.123), percent(0.0042), percent(0), percent(1)
    ('12 %', '0.4 %', '0 %', '100 %')
    """
    value = 100 * share
    return f"{value:.1f} %" if 0 < abs(value) < 1 else f"{value:.0f} %"


def money(dollars: float | None) -> str:
    """Format dollars.

    >>> money(None), money(0.000412), money(1.5)
    ('unknown', '$4.12e-4', '$1.5')
    """
    return "unknown" if dollars is None else f"${significant(dollars)}"


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """Draw values from 0 to 1 as block characters. More than `width` values are averaged to `width`.

    >>> sparkline([0.0, 0.5, 1.0])
    '▁▅█'
    """
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    return "".join(BARS[min(len(BARS) - 1, max(0, int(value * len(BARS))))] for value in values)


def problems_note(one: Mapping[str, Any]) -> str:
    """Return a note on how many different problems the tasks of an evaluation have; "" if all differ.

    `one` is an `eval.result` event.

    >>> problems_note({"num_tasks": 512, "num_problems": 127}), problems_note({"num_tasks": 5, "num_problems": 5})
    (' (127 different problems)', '')
    """
    tasks, problems = one.get("num_tasks"), one.get("num_problems")
    return f" ({problems} different problems)" if tasks and problems and problems < tasks else ""


def cheats_note(one: Mapping[str, Any]) -> str:
    """Return a note on how many rollouts of an evaluation show signs of cheating; "" if there are none.

    `one` is an `eval.result` event.

    >>> cheats_note({"cheats": 3}), cheats_note({"cheats": 0}), cheats_note({})
    (' (3 cheats, not counted as solved)', '', '')
    """
    number = one.get("cheats")
    if not isinstance(number, int | float) or number <= 0:
        return ""
    return f" ({number:.0f} cheat{'' if number == 1 else 's'}, not counted as solved)"
