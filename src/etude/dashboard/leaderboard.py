"""The leaderboard: results of suites on several models as one self-contained HTML page (`etude leaderboard`).

It has a section for each version of a suite: a table, and plots of the solve rates with their intervals, of pass@k by
k, and of the solve rate by dollars per solved rollout. Plots and colours are as in a run's report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from etude.dashboard.formatting import duration, money, percent, significant
from etude.dashboard.pages import render, write_page
from etude.dashboard.plot import Estimate, Series, legend, line_chart
from etude.evals import compare
from etude.evals.records import EvalRecord, SeedsRecord, rows_beside
from etude.evals.result import TermMean
from etude.evals.rows import EvalRow

_COLOURS = 5  # classes c1 to c5 of the stylesheet


def write_leaderboard(
    path: Path, records: Sequence[tuple[EvalRecord, Path]], seeds: Sequence[SeedsRecord] = ()
) -> Path:
    """Write the leaderboard as an HTML page to `path`, and return `path`.

    `records`: (result, path that it was read from). `seeds`: results of recipes over training seeds. Raises
    `StoreError` if the page cannot be written."""
    html = page(records, seeds)
    return write_page(path, html, hint="free disk space, or choose another file with --html")


def page(records: Sequence[tuple[EvalRecord, Path]], seeds: Sequence[SeedsRecord] = ()) -> str:
    """Return the HTML of the leaderboard. The parameters are those of `write_leaderboard`."""
    suites: dict[tuple[str, str], list[tuple[EvalRecord, Path]]] = {}
    for record, path in records:
        suites.setdefault((record.suite, record.suite_digest), []).append((record, path))
    return render(
        "leaderboard.html.jinja",
        models=len({record.label for record, _ in records}),
        sections=[
            _section(found, [one for one in seeds if (one.suite, one.suite_digest) == suite])
            for suite, found in suites.items()
        ],
    )


def _section(found: Sequence[tuple[EvalRecord, Path]], seeds: Sequence[SeedsRecord]) -> Mapping[str, Any]:
    ordered = sorted(found, key=lambda one: -one[0].result.rate)
    records = [record for record, _ in ordered]
    first = records[0]
    terms = sorted({name for record in records for name in record.result.terms})
    return {
        "title": first.suite,
        "purpose": first.purpose,
        "facts": f"{first.result.num_tasks} tasks of {first.result.num_problems} problems, split {first.result.split}; "
        f"digest {first.suite_digest}",
        "terms": terms,
        "rows": _rows(ordered, terms),
        "recipes": [_recipe(one) for one in sorted(seeds, key=lambda one: -one.result.rate)],
        "panels": [
            {"title": title, "note": note, "svg": Markup(svg), "legend": Markup(keys)}
            for title, note, svg, keys in _panels(records)
        ],
    }


def _rows(ordered: Sequence[tuple[EvalRecord, Path]], terms: Sequence[str]) -> list[Mapping[str, Any]]:
    """The rows of a table, the best model first, each compared with the best one on the same tasks."""
    best = rows_beside(ordered[0][1])
    return [_row(record, path, best, terms, first=at == 0) for at, (record, path) in enumerate(ordered)]


def _row(
    record: EvalRecord, path: Path, best: Sequence[EvalRow], terms: Sequence[str], *, first: bool
) -> Mapping[str, Any]:
    result = record.result
    behind = ""
    if not first:
        found = compare(best, rows_beside(path)).decisive
        behind = f"{found.value:+.3f} [{found.low:+.3f}, {found.high:+.3f}]"
    failures = [report.failure for report in record.gates if report.failure]
    gates = f"{len(record.gates) - len(failures)} of {len(record.gates)} passed" if record.gates else ""
    return {
        "label": record.label,
        "from": record.url or record.model,
        "rate": f"{result.rate:.3f}",
        "interval": f"{result.low:.3f} to {result.high:.3f}",
        "behind": behind,
        "solved": money(result.dollars_per_solved),
        "solved_task": money(result.dollars_per_solved_task),
        "judges": money(result.judge_dollars) if result.terms else "–",
        "terms": [term_text(result.terms.get(name)) for name in terms],
        "latency": f"{_shown(result.latency_p50_s, duration)} / {_shown(result.latency_p99_s, duration)}",
        "tokens": f"{_shown(result.prompt_mean, significant)} / {significant(result.sampled_mean)}",
        "cached": _shown(result.cached_share, percent),
        "machine": duration(result.machine_s),
        "general": _shown(record.general_bits_per_byte, significant)
        if record.general_bits_per_byte is not None
        else "–",
        "invalid": sum(result.invalid.values()),
        "gates": gates,
        "failures": failures,
    }


def term_text(mean: TermMean | None) -> str:
    """Return the mean of a reward term with its interval as text; "–" if the evaluation did not measure it."""
    if mean is None:
        return "–"
    text = "unknown" if mean.value is None else f"{mean.value:.3f}"
    if mean.low is not None and mean.high is not None:
        text += f" ({mean.low:.3f} to {mean.high:.3f})"
    return f"{text}, {mean.num_unknown} unknown" if mean.num_unknown and mean.num_known else text


def _recipe(record: SeedsRecord) -> Mapping[str, Any]:
    """The row of a recipe over training seeds."""
    result = record.result

    def shown(found: tuple[float, float, float] | None) -> str:
        return "–" if found is None else "{:+.3f} [{:+.3f}, {:+.3f}]".format(*found)

    return {
        "label": record.label,
        "rate": f"{result.rate:.3f}",
        "interval": f"{result.low:.3f} to {result.high:.3f}",
        "seeds": ", ".join(f"{label} {rate:.3f}" for label, rate in result.by_seed.items()),
        "gain": shown(result.gain),
        "rise": shown(result.general_rise),
    }


def _shown(value: float | None, text: Callable[[float], str]) -> str:
    return "unknown" if value is None else text(value)


def _panels(records: Sequence[EvalRecord]) -> list[tuple[str, str, str, str]]:
    """(title, note, SVG, legend) of the plots of a suite."""
    colours = {record.label: 1 + at % _COLOURS for at, record in enumerate(records)}
    keys = legend(list(colours.items()))
    rates = [
        Estimate(one.label, at, one.result.rate, one.result.low, one.result.high, colours[one.label])
        for at, one in enumerate(records)
    ]
    rounded = lambda value: f"{value:.2f}"  # noqa: E731
    panels = [
        (
            "Solve rate",
            "With 95 % intervals that count problems, the best model first.",
            line_chart(
                [], title="Solve rate by model", x_label="model", estimates=rates, y_range=(0.0, 1.0),
                x_format=lambda _: "", y_format=rounded,
            ),
            keys,
        )
    ]  # fmt: skip
    curves = [
        Series(one.label, [(k, point[0]) for k, point in sorted(one.result.pass_at_k.items())], colours[one.label])
        for one in records
        if len(one.result.pass_at_k) > 1
    ]
    if curves:
        svg = line_chart(
            curves, title="pass@k by k", x_label="rollouts of a task", y_range=(0.0, 1.0), y_format=rounded
        )
        note = "The probability that one of k rollouts solves a task, estimated without bias. A model that was only "
        note += "sharpened gains at k = 1 and not at the largest k."
        panels.append(("pass@k", note, svg, keys))
    priced = [
        Series(one.label, [(one.result.dollars_per_solved, one.result.rate)], colours[one.label], dots_only=True)
        for one in records
        if one.result.dollars_per_solved is not None
    ]
    if priced:
        svg = line_chart(
            priced, title="Solve rate by dollars", x_label="dollars per solved rollout", y_range=(0.0, 1.0),
            x_format=money, y_format=rounded,
        )  # fmt: skip
        panels.append(("Solve rate and money", "Models whose prices are known; left and up is better.", svg, keys))
    return panels
