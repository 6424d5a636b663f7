"""The results of `etude base compare` as one self-contained HTML page, with the plots and the style of a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from markupsafe import Markup

from etude.dashboard.pages import render
from etude.dashboard.plot import Estimate, Series, legend, line_chart
from etude.evals.bases import BaseResult
from etude.evals.intervals import Interval

_COLOURS = 5  # classes c1 to c5 of the stylesheet


def bases_page(results: Sequence[BaseResult], facts: str) -> str:
    """Return the HTML of the page. `facts`: a line about the text that the models were compared on."""
    colours = {one.name: 1 + at % _COLOURS for at, one in enumerate(results)}
    keys = legend(list(colours.items()))
    starts = sorted({start for one in results for start in one.by_position})
    lines = [
        Series(one.name, [(starts.index(x), y.value) for x, y in one.by_position.items()], colours[one.name])
        for one in results
    ]
    note = "Bits per byte of your text, by the distance from the start of the document: a model that uses its context "
    note += "falls from left to right. Fewer bits are better."
    svg = line_chart(
        lines,
        title="Loss by position",
        x_label="from this byte of a document on",
        x_format=lambda at: _bytes(starts[round(at)]) if starts and at == round(at) else "",
        zero=False,
    )
    panels = [{"title": "Loss by position", "note": note, "svg": Markup(svg), "legend": Markup(keys)}]
    panels.append(
        _panel("Loss", "Over all documents, with 95 % intervals.", {r.name: r.loss for r in results}, colours, None)
    )
    for kind in results[0].accuracy:
        found = {one.name: one.accuracy[kind] for one in results}
        title = kind[0].upper() + kind[1:]
        panels.append(
            _panel(
                title,
                "Share of right answers; chance is .25 with four options, and 0 for a stated number.",
                found,
                colours,
                (0.0, 1.0),
            )
        )
    return render("bases.html.jinja", names=list(colours), facts=facts, panels=panels)


def _panel(
    title: str,
    note: str,
    found: Mapping[str, Interval],
    colours: Mapping[str, int],
    y_range: tuple[float, float] | None,
) -> dict[str, str]:
    points = [
        Estimate(name, at, one.value, one.low, one.high, colours[name]) for at, (name, one) in enumerate(found.items())
    ]
    svg = line_chart(
        [], title=title, x_label="model", estimates=points, y_range=y_range, zero=False, x_format=lambda _: ""
    )
    return {"title": title, "note": note, "svg": Markup(svg), "legend": Markup(legend(list(colours.items())))}


def _bytes(start: int) -> str:
    return f"{start >> 10} KiB" if start else "0"
