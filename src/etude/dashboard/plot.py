"""Small plots as inline SVG: lines with intervals, bars, lanes. They contain no script, font or colour.

Colours are CSS classes (`c1` …) of the page's stylesheet, so that a plot works on light and dark pages. Hovering over a
point shows its value (`<title>`). All drawn text is escaped."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files

from etude.dashboard.formatting import significant

Point = tuple[float, float]
Format = Callable[[float], str]

_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 60, 12, 40
_MAX_DOTS = 90


@dataclass(frozen=True)
class Frame:
    """The size of a plot and the position of its axes, in SVG units."""

    width: int = 560
    height: int = 230

    @property
    def right(self) -> int:
        """The x coordinate at which the axes end on the right."""
        return self.width - _RIGHT

    @property
    def bottom(self) -> int:
        """The y coordinate of the horizontal axis, from the top."""
        return self.height - _BOTTOM


NORMAL, WIDE = Frame(), Frame(1160, 320)


@dataclass(frozen=True)
class Series:
    """One line of a plot, with (x, y) points.

    `colour` is the number n of the CSS class "c" + n, such as c1. With `dots_only` the points are not connected."""

    label: str
    points: Sequence[Point]
    colour: int
    dots_only: bool = False


@dataclass(frozen=True)
class Estimate:
    """A point of a plot with its confidence interval from `low` to `high`. `colour` is the number n of the CSS class
    "c" + n, such as c1."""

    label: str
    x: float
    value: float
    low: float
    high: float
    colour: int


@dataclass(frozen=True)
class LaneRow:
    """One row of a lane chart: bars over time, and a note at the end.

    A bar is (start, end, height from 0 to 1). `colour` is the number n of the CSS class "c" + n, such as c1."""

    label: str
    bars: Sequence[tuple[float, float, float]]
    note: str
    colour: int


def tag(name: str, content: str = "", **attributes: object) -> str:
    """Return an SVG or HTML element as text. `content` is markup; values of attributes are escaped.

    In names of attributes, `cls` stands for class and `_` for a hyphen."""
    words = "".join(
        f' {"class" if key == "cls" else key.replace("_", "-")}="{html.escape(str(value))}"'
        for key, value in attributes.items()
    )
    return f"<{name}{words}>{content}</{name}>" if content else f"<{name}{words}/>"


def label(x: float, y: float, words: str, cls: str = "tick", anchor: str = "middle") -> str:
    """Return an SVG text element with `words` at (x, y). `anchor` is its `text-anchor`."""
    return tag("text", html.escape(words), x=round(x, 1), y=round(y, 1), cls=cls, text_anchor=anchor)


def line_chart(
    series: Sequence[Series],
    *,
    title: str,
    x_label: str,
    estimates: Sequence[Estimate] = (),
    y_range: tuple[float, float] | None = None,
    log: bool = False,
    zero: bool = True,
    x_format: Format = significant,
    y_format: Format = significant,
    frame: Frame = NORMAL,
) -> str:
    """Draw lines and estimates over a common x axis, as an SVG element.

    `y_range` is the range of the y axis; None fits it to the values, from 0 on if `zero`. With `log` the axis is
    logarithmic. `x_format` and `y_format` turn values into text."""
    drawn = [one for one in series if one.points]
    points = [point for one in drawn for point in one.points]
    values = [y for _, y in points] + [v for e in estimates for v in (e.low, e.high)]
    xs = [x for x, _ in points] + [e.x for e in estimates]
    air = 14 if estimates else 0  # space between the axis and the first estimate
    x = Scale(min(xs, default=0.0), max(xs, default=1.0), _LEFT + air, frame.right)
    y = Scale(*(y_range or domain(values, zero=zero, log=log)), frame.bottom, _TOP, log)
    parts = _axes(frame, x, y, x_label, x_format, y_format)
    parts += [_line(one, x, y, x_format, y_format) for one in drawn]
    parts += [_estimate(one, x, y, y_format) for one in estimates]
    parts += [] if estimates else _end_labels(frame, drawn, y, y_format)
    return _svg(title, frame.width, frame.height, parts)


def _axes(frame: Frame, x: Scale, y: Scale, x_label: str, x_format: Format, y_format: Format) -> list[str]:
    parts = []
    for value in y.ticks(4):
        parts.append(tag("line", x1=_LEFT, x2=frame.right, y1=y(value), y2=y(value), cls="grid"))
        parts.append(label(_LEFT - 8, y(value) + 4, y_format(value), anchor="end"))
    bottom = frame.bottom
    parts.append(tag("line", x1=_LEFT, x2=frame.right, y1=bottom, y2=bottom, cls="axis"))
    parts += [label(x(value), bottom + 17, x_format(value)) for value in x.ticks(6)]
    parts.append(label((_LEFT + frame.right) / 2, frame.height - 6, x_label, "label"))
    return parts


def _line(one: Series, x: Scale, y: Scale, x_format: Format, y_format: Format) -> str:
    at = [(x(a), y(b)) for a, b in one.points]
    path = "M" + "L".join(f"{a} {b}" for a, b in at)
    parts = [] if one.dots_only else [tag("path", d=path, cls=f"line c{one.colour}")]
    if one.dots_only or len(at) <= _MAX_DOTS:
        for (a, b), (vx, vy) in zip(at, one.points, strict=True):
            tooltip = html.escape(f"{one.label}: {y_format(vy)} at {x_format(vx)}")
            cls = f"dot c{one.colour}" + (" big" if one.dots_only else "")
            parts.append(tag("circle", tag("title", tooltip), cx=a, cy=b, r=3.5 if one.dots_only else 2, cls=cls))
    return "".join(parts)


def _estimate(one: Estimate, x: Scale, y: Scale, y_format: Format) -> str:
    at, low, high = x(one.x), y(one.low), y(one.high)
    tooltip = f"{one.label}: {y_format(one.value)} [{y_format(one.low)}, {y_format(one.high)}]"
    return tag(
        "g",
        tag("title", html.escape(tooltip))
        + tag("line", x1=at, x2=at, y1=low, y2=high, cls="whisker")
        + "".join(tag("line", x1=at - 4, x2=at + 4, y1=end, y2=end, cls="whisker") for end in (low, high))
        + tag("circle", cx=at, cy=y(one.value), r=4.5, cls="dot big")
        + label(at, low + 15, y_format(one.value), "end"),
        cls=f"c{one.colour}",
    )


def _end_labels(frame: Frame, series: Sequence[Series], y: Scale, y_format: Format) -> list[str]:
    """The last value of each line next to its end, where it does not cover another label."""
    parts: list[str] = []
    used: list[float] = []
    for one in series:
        value = one.points[-1][1]
        if not one.dots_only and all(abs(y(value) - other) >= 12 for other in used):
            used.append(y(value))
            parts.append(label(frame.right + 6, y(value) + 4, y_format(value), "end", "start"))
    return parts


def bar_chart(
    groups: Sequence[tuple[str, Sequence[float]]],
    names: Sequence[str],
    *,
    title: str,
    x_label: str,
    y_format: Format = significant,
    frame: Frame = NORMAL,
) -> str:
    """Draw groups of bars, as an SVG element. A group is (label, values).

    Value i of each group is called `names[i]` and has colour i + 1. `y_format` turns values into text."""
    values = [value for _, bars in groups for value in bars]
    y = Scale(*domain(values, zero=True), frame.bottom, _TOP)
    step = (frame.right - _LEFT) / max(1, len(groups))
    x = Scale(0.0, 1.0, _LEFT, _LEFT)
    parts = _axes(frame, x, y, x_label, lambda _: "", y_format)
    wide = min(44.0, step * 0.7 / max(1, len(names)))
    for i, (name, bars) in enumerate(groups):
        middle = _LEFT + (i + 0.5) * step
        parts.append(label(middle, frame.bottom + 17, name))
        for k, value in enumerate(bars):
            left, top = middle + (k - len(bars) / 2) * wide, y(value)
            tooltip = tag("title", html.escape(f"{names[k]}, {name}: {y_format(value)}"))
            size = {"width": round(wide - 2, 1), "height": round(max(0.0, y(0.0) - top), 1), "rx": 2}
            parts.append(tag("rect", tooltip, x=round(left + 1, 1), y=top, cls=f"bar c{k + 1}", **size))
            if value > 0:
                parts.append(label(left + wide / 2, top - 4, y_format(value), "end"))
    return _svg(title, frame.width, frame.height, parts)


def lane_chart(
    rows: Sequence[LaneRow],
    spans: Sequence[tuple[str, float, float]],
    *,
    title: str,
    x_range: tuple[float, float],
    x_format: Format,
) -> str:
    """Draw rows of bars over a common time axis, as an SVG element.

    `spans` are named periods (name, start, end) that are drawn behind the rows. `x_format` turns times into text."""
    wide, left, right, head, row = WIDE.width, 110, 90, 26, 34
    height = head + row * len(rows) + 26
    x = Scale(*x_range, left, wide - right)
    parts = []
    for i, (name, start, stop) in enumerate(spans):
        a, b = x(start), x(stop)
        size = {"width": round(max(0.5, b - a), 1), "height": head + row * len(rows)}
        parts.append(tag("rect", tag("title", html.escape(name)), x=a, y=0, cls=f"span odd{i % 2}", **size))
        if b - a > 7 * len(name):
            parts.append(label((a + b) / 2, 16, name, "label"))
    for i, one in enumerate(rows):
        base = head + row * (i + 1) - 4
        path = "".join(_step(x(a), x(b), base, base - (row - 10) * min(1.0, share)) for a, b, share in one.bars)
        parts.append(tag("line", x1=left, x2=wide - right, y1=base, y2=base, cls="grid"))
        if path:
            parts.append(tag("path", d=path, cls=f"area c{one.colour}"))
        parts.append(label(left - 10, base - 6, one.label, "label", "end"))
        parts.append(label(wide - right + 8, base - 6, one.note, "end", "start"))
    parts += [label(x(value), height - 8, x_format(value)) for value in time_ticks(*x_range)]
    return _svg(title, wide, height, parts)


def _step(left: float, right: float, base: float, top: float) -> str:
    return f"M{left} {base}V{round(top, 1)}H{right}V{base}Z"


def time_ticks(low: float, high: float, count: int = 8) -> list[float]:
    """Return about `count` ticks from `low` to `high` (seconds) at round seconds, minutes or hours.

    >>> time_ticks(0, 300)
    [0.0, 60.0, 120.0, 180.0, 240.0, 300.0]
    """
    steps = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400)
    step = next((s for s in steps if (high - low) / s <= count), None)
    if step is None:
        return [float(t) for t in ticks(low, high, count)]
    return [float(i * step) for i in range(int(-(-low // step)), int(high // step) + 1)]


def legend(entries: Sequence[tuple[str, int]]) -> str:
    """Return an HTML legend of (name, colour number) entries."""
    keys = (tag("span", tag("i", " ", cls=f"key c{colour}") + html.escape(name)) for name, colour in entries)
    return tag("div", "".join(keys), cls="legend")


def standalone_svg(chart: str, names: Sequence[tuple[str, int]], *, x: int, y: int) -> str:
    """Turn a chart into an SVG file with the page's colours.

    `names` are (name, colour number) entries of a legend that is drawn from (x, y) downwards."""
    css = (files("etude.dashboard") / "report.css").read_text(encoding="utf-8")
    names_svg = "".join(
        f'<text x="{x}" y="{y + 18 * i}" class="end c{colour}" style="fill: currentColor">{html.escape(name)}</text>'
        for i, (name, colour) in enumerate(names)
    )
    head, _, rest = chart.partition(">")
    return f'{head} xmlns="http://www.w3.org/2000/svg"><style>{css}</style>{rest.removesuffix("</svg>")}{names_svg}</svg>\n'


def _svg(title: str, width: int, height: int, parts: Sequence[str]) -> str:
    inside = tag("title", html.escape(title)) + "".join(parts)
    return tag("svg", inside, viewBox=f"0 0 {width} {height}", role="img", aria_label=title)


# Scales and ticks


_TINY = 1e-300  # smaller values count as 0


@dataclass(frozen=True)
class Scale:
    """Maps values from [`low`, `high`] to pixels from [`start`, `stop`], linearly or logarithmically.

    >>> Scale(0.0, 2.0, 100.0, 0.0)(1.0)
    50.0
    >>> Scale(1.0, 100.0, 0.0, 10.0, log=True)(10.0)
    5.0
    """

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high = (math.log10(self.low), math.log10(self.high)) if self.log else (self.low, self.high)
        if self.log:
            value = math.log10(max(value, self.low))
        share = (value - low) / (high - low) if high > low else 0.5
        return round(self.start + min(1.0, max(0.0, share)) * (self.stop - self.start), 2)

    def ticks(self, count: int = 5) -> list[float]:
        """Return about `count` round values from low to high."""
        return log_ticks(self.low, self.high, count) if self.log else ticks(self.low, self.high, count)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about `count` round values from `low` to `high`: multiples of 1, 2, 2.5 or 5 times a power of ten.

    >>> ticks(0.0, 1.0), ticks(0, 45, 4)
    ([0.0, 0.2, 0.4, 0.6, 0.8, 1.0], [0, 20, 40])
    """
    if not high - low > max(_TINY, 1e-12 * abs(high)):
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    values = [round(i * step, 12) for i in range(first, last + 1)]
    return [int(v) for v in values] if step >= 1 and all(v == int(v) for v in values) else values


def log_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about `count` powers of ten from low to high.

    >>> log_ticks(1e-6, 1e-2)
    [1e-06, 1e-05, 0.0001, 0.001, 0.01]
    """
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    every = max(1, math.ceil((last - first + 1) / (count + 1)))
    return [10.0**i for i in range(first, last + 1, every)]


def domain(values: Sequence[float], *, zero: bool = False, log: bool = False) -> tuple[float, float]:
    """Return an axis range (low, high) that shows all values with a margin.

    With `zero` it begins at 0; with `log` it consists of full decades.

    >>> domain([0.2, 0.8], zero=True)
    (0.0, 0.84)
    >>> domain([2e-5, 3e-3], log=True)
    (1e-05, 0.01)
    """
    if log:
        positive = [v for v in values if v > _TINY] or [1e-9, 1.0]
        first, last = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))
        return 10.0**first, 10.0 ** (last if last > first else first + 1)
    least, most = (min(values), max(values)) if values else (0.0, 1.0)
    if zero:
        least = min(0.0, least)
    air = 0.05 * (most - least) or 0.05 * abs(most) or 1.0
    return (least if zero and least == 0.0 else least - air), round(most + air, 12)
