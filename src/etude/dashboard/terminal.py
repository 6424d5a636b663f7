"""Shows a run in a terminal: a live view, one plain line for pipes, and the result lines at the end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from etude.dashboard import formatting
from etude.dashboard.glossary import GLOSSARY, legend
from etude.dashboard.problems import STATES, losses, often_unknown, unknown_terms
from etude.dashboard.progress import current_phase, progress
from etude.dashboard.run_view import PHASES, Event, RunView, number, text
from etude.dashboard.summary import PRODUCTION, heldout, invalid, is_delta, lag_by_origin, summarise_view, weights
from etude.dashboard.utilisation import idle


def render(view: RunView) -> RenderableType:
    """Render the live view as of the newest event. It is computed from the events alone."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True, min_width=10)
    facts.add_column()
    for name, value in _facts(view):
        facts.add_row(name, value)
    return Group(_title(view), _phases(view), Text(), _bar(view), facts)


def terms_legend(view: RunView) -> RenderableType:
    """Render the definitions of the terms in the current view, to be shown once below it."""
    return Text(legend(terms_in(view)), "dim")


PLAIN = ("starting", "waiting", "evaluating", "loss", "reward", "validation", "engines", "learner", "problem")
"""The facts of a view that are shown in a plain line."""
PLAIN_CHARS = 240


def plain_line(view: RunView) -> str:
    """Return the most important numbers of a run in one line of at most `PLAIN_CHARS` characters, for pipes and
    logs."""
    phase = current_phase(view)
    if phase is None:
        return "starting"
    at = progress(view)
    found = [formatting.duration(view.wall_s), phase.name]
    if at is not None:
        left = f" ({formatting.duration(at.left_s)} left)" if at.left_s and at.phase.end is None else ""
        found.append(f"{at.done}/{at.total}{left}")
    facts = dict(_facts(view))
    found += [f"{name} {facts[name].plain.lstrip(formatting.BARS)}" for name in PLAIN if name in facts]
    line = "  ".join(" ".join(one.split()) for one in found)
    return line if len(line) <= PLAIN_CHARS else line[: PLAIN_CHARS - 1] + "…"


def terms_in(view: RunView) -> list[str]:
    """List the glossary terms in the current view, in order."""
    shown = " ".join(f"{name} {value.plain}" for name, value in _facts(view))
    return [term for term in GLOSSARY if term in shown]


def result_lines(run_dir: Path | str) -> list[str]:
    """Return the results of a finished run in a few lines of text."""
    view = RunView(run_dir)
    summary = summarise_view(view)
    found, spent, sent = summary["heldout"], summary["wall_s"], summary["weights"]
    lines = [_verdict(found), *_transfer(summary["transfer"]), *often_unknown(view)]
    parts = ", ".join(f"{name} {formatting.duration(spent[name])}" for name in PHASES if spent.get(name, 0) >= 0.05)
    if parts:
        lines.append(f"{formatting.duration(spent['total'])} in all: {parts}")
    if sent["ratio"] is not None:
        near = (
            f", {formatting.percent(share)} of the bound ({GLOSSARY['bound']})"
            if (share := sent["share_of_bound"])
            else ""
        )
        lines.append(
            f"weights: {sent['num_publishes']} versions, {formatting.size(sent['object_bytes'])}; deltas "
            f"{sent['ratio']:.1f}x smaller than the weights{near}"
        )
    elif sent["num_publishes"] > 1:
        lines.append(f"weights: {sent['num_publishes']} versions without any difference")
    lines.append(f"report: {view.path / 'report.html'}")
    lines.append(f"talk to it: etude serve {view.path}")
    return lines


def _verdict(found: Mapping[str, Any]) -> str:
    before, after = found["before"], found["after"]
    if before is None or after is None or before["rate"] is None or after["rate"] is None:
        return "no held-out result: the run ended before its last evaluation"
    return (
        f"held-out solve rate {before['rate']:.3f} [{before['low']:.3f}, {before['high']:.3f}] → "
        f"{after['rate']:.3f} [{after['low']:.3f}, {after['high']:.3f}] on "
        f"{formatting.number(after['num_tasks'], 'task')}"
        f"{formatting.problems_note(after)}{formatting.cheats_note(after)}"
    )


def _transfer(found: Mapping[str, Any]) -> Iterator[str]:
    """The solve rate on kinds of tasks that were never trained on, if it was measured."""
    rates = [
        f"{one['rate']:.3f} [{one['low']:.3f}, {one['high']:.3f}]{formatting.cheats_note(one)}"
        for one in found.values()
        if one
    ]
    if rates:
        yield f"on kinds of tasks never trained on: {' → '.join(rates)}"


def _title(view: RunView) -> RenderableType:
    line = Table.grid(expand=True)
    line.add_column(no_wrap=True, overflow="ellipsis")
    line.add_column(justify="right", style="dim", no_wrap=True)
    line.add_row(Text(view.path.name, "bold"), formatting.duration(view.wall_s))
    return line


def _phases(view: RunView) -> Text:
    spans = {span.name: span for span in view.phases()}
    line = Text()
    for name in PHASES:
        span = spans.get(name)
        if span is None:
            line.append(f"· {name}   ", "dim")
        elif span.end is None:
            line.append(f"▸ {name}   ", "bold cyan")
        else:
            line.append("✓ ", "green")
            line.append(f"{name} ").append(f"{formatting.duration(span.wall_s or span.end - span.start)}   ", "dim")
    return line


def _bar(view: RunView) -> RenderableType:
    at = progress(view)
    if at is None:
        return Text("starting" if current_phase(view) is None else "", "dim")
    line = Table.grid(padding=(0, 2))
    left = f"{formatting.duration(at.left_s)} left" if at.left_s is not None and at.phase.end is None else ""
    line.add_row(
        Text(f"{at.phase.name} {at.done}/{at.total}", "bold"),
        ProgressBar(total=max(1, at.total), completed=at.done, width=32),
        formatting.percent(at.share),
        Text(left, "dim"),
    )
    return line


def _facts(view: RunView) -> Iterator[tuple[str, Text]]:
    phase = current_phase(view)
    if phase is not None and phase.name == "mid-training":
        yield from _mid_training(view, since=phase.start)
    if phase is not None and phase.end is None:
        yield from _starting(view)
    if phase is not None and phase.name == "rl" and phase.end is None:
        yield from _evaluating(view, since=phase.start)
    steps = view.by_step("rl.step")
    rewards = [value for event in steps if (value := number(event, "reward_mean")) is not None]
    if rewards:
        yield "reward", Text(formatting.sparkline(rewards) + f" {rewards[-1]:.2f}", "bold green")
    yield from _evaluations(view)
    yield from _lost_learner(view)
    yield from _fleet(view)
    if not steps:
        return
    lags = lag_by_origin(steps)
    if lags:
        said = [f"{origin}: mean {one['mean']:.2f}, at most {one['max']}" for origin, one in lags.items()]
        yield "lag", Text("; ".join(said) if PRODUCTION in lags else said[0].partition(": ")[2])
    shares = [f"{name} {formatting.percent(share)}" for name, share in idle(view).items() if share is not None]
    if shares:
        yield "idle", Text(", ".join(shares))
    yield from _delta(view)
    found = invalid(view)
    bad = ", ".join(f"{name} {n}" for name, n in found.items()) or "none"
    yield "invalid", Text(bad, "yellow" if found else "")
    yield from _problem(view)


def _mid_training(view: RunView, *, since: float) -> Iterator[tuple[str, Text]]:
    event = view.latest("mid.step")
    loss = number(event, "loss") if event else None
    if event is None or loss is None or float(event["t"]) < since:
        return
    speed = number(event, "tokens_per_s")
    yield "loss", Text(f"{loss:.3f}" + (f" at {formatting.significant(speed)} tokens/s" if speed else ""))
    held = view.latest("mid.eval")
    found = [
        f"{label} {value:.3f}"
        for key, label in (("heldout_loss", "loss"), ("copy_probe", "copies"))
        if held and (value := number(held, key)) is not None
    ]
    if found:
        yield "held-out", Text(", ".join(found))


def _evaluations(view: RunView) -> Iterator[tuple[str, Text]]:
    during = view.evaluations_during()
    if during and (rate := number(during[-1], "rate")) is not None:
        yield (
            "validation",
            Text(
                f"{rate:.2f}{_interval(during[-1])} at step {during[-1].get('step')}"
                f"{formatting.cheats_note(during[-1])}"
            ),
        )
    found = heldout(view)
    known = [(name, one) for name in ("before", "after") if (one := found[name]) and one["rate"] is not None]
    if known:
        yield (
            "held-out",
            Text(
                " → ".join(
                    f"{one['rate']:.2f}{_interval(one)} {name}{formatting.cheats_note(one)}" for name, one in known
                )
            ),
        )


def _starting(view: RunView) -> Iterator[tuple[str, Text]]:
    """Processes that are not up, and the reasons of those that wait. Programs of a phase are not waited for; nor are
    learner ranks, since the learner is not ready before they are."""
    now = {text(event, "name"): event for event in view.events("process")}
    begun = {name for name, event in now.items() if event["state"] in ("start", "restart")}
    waited = {name for name in begun if now[name]["process"] == "conductor" and name not in PHASES}
    if waited:
        yield "starting", Text(", ".join(name for name in now if name in waited))
    waiting = [f"{name}: {text(event, 'reason')}" for name, event in now.items() if event["state"] == "waiting"]
    if waiting:
        yield "waiting", Text("for " + "; ".join(waiting), "yellow")


def _evaluating(view: RunView, *, since: float) -> Iterator[tuple[str, Text]]:
    event = view.latest("eval.progress")
    if event is None or float(event["t"]) < since:
        return
    done, total = number(event, "done"), number(event, "total")
    if done is not None and total is not None and done < total:
        yield "evaluating", Text(f"{text(event, 'name')} {done:.0f}/{total:.0f} rollouts")


def _lost_learner(view: RunView) -> Iterator[tuple[str, Text]]:
    lost = [e for e in view.events("lineage") if text(e, "state") == "lost"]
    restarts = [e for e in view.events("process") if text(e, "name") == "learner" and text(e, "state") == "restart"]
    times = max(len(lost), len(restarts))
    if times:
        last = f", the last time at step {lost[-1].get('step')}: {text(lost[-1], 'reason')}" if lost else ""
        yield "learner", Text(f"lost and replaced {times} time{'s' if times > 1 else ''}{last}", "yellow")


def _fleet(view: RunView) -> Iterator[tuple[str, Text]]:
    """States of the remote engines; engines that get no work are named."""
    now = {text(event, "engine"): text(event, "state") for event in view.events("fleet.state")}
    names = defaultdict(list)
    for name, state in sorted(now.items()):
        names[state].append(name)
    if names:
        named = {state: "" if state == "serving" else f" ({', '.join(who)})" for state, who in names.items()}
        states = ", ".join(f"{len(who)} {state}{named[state]}" for state, who in names.items())
        yield "engines", Text(states, "yellow" if "lost" in names else "")


def _interval(event: Event) -> str:
    low, high = number(event, "low"), number(event, "high")
    return "" if low is None or high is None else f" [{low:.2f}, {high:.2f}]"


def _delta(view: RunView) -> Iterator[tuple[str, Text]]:
    sent = [number(event, "object_bytes") for event in view.events("weights.publish") if is_delta(event)]
    total = weights(view)
    if not sent or sent[-1] is None:
        return
    parts = [f"{formatting.size(sent[-1])} a step"]
    if total["ratio"] is None:
        parts.append("no weight has changed")
    elif total["share_of_bound"] is None:
        parts.append(f"{total['ratio']:.1f}x smaller than a snapshot")
    else:
        parts.append(f"{formatting.percent(total['share_of_bound'])} of the bound")
    if total["pause_ms_p99"] is not None:
        parts.append(f"pause p99 {formatting.significant(total['pause_ms_p99'])} ms")
    yield "delta", Text(", ".join(parts))


def _problem(view: RunView) -> Iterator[tuple[str, Text]]:
    found = [(float(e["t"]), f"{text(e, 'name')} {STATES[text(e, 'state')]}") for e in losses(view)]
    found += [(float(e["t"]), f"{text(e, 'process')}: {text(e, 'reason')}") for e in view.events("engine.trouble")]
    found += [(float(e["t"]), f"weights repaired: {text(e, 'reason')}") for e in view.events("weights.mend")]
    found += [(float(e["t"]), _alarm(e)) for e in view.events("parity.alarm")]
    found += unknown_terms(view)
    if found:
        newest, more = max(found)[1], len(found) - 1
        yield "problem", Text(newest + (f"; before it {more} more" if more else ""), "yellow")


def _alarm(event: Event) -> str:
    taken = f"; the learner now uses {text(event, 'defence')}" if text(event, "defence") else ""
    return f"{text(event, 'engine')}: over the parity budget at step {event.get('step')}{taken}"
