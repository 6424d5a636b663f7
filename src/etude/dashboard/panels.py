"""The plots of the report. Each function draws one plot of a run as a `Panel`, or returns None without data for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from etude.dashboard import regions
from etude.dashboard.formatting import clock, duration, percent, significant, size
from etude.dashboard.plot import WIDE, Estimate, LaneRow, Series, bar_chart, lane_chart, legend, line_chart
from etude.dashboard.run_view import Event, RunView, counts, number, text
from etude.dashboard.summary import SIMULATED, is_delta, of_origin, quantile, weights
from etude.dashboard.utilisation import Lane, lanes

_MAX_BARS = 400


@dataclass(frozen=True)
class Panel:
    """A plot with its texts, as the report shows it.

    `svg` and `legend` are markup; `title` and `note` are plain text. A `wide` panel takes the full width of the page.
    """

    title: str
    note: str
    svg: str
    legend: str = ""
    wide: bool = False


def learning(view: RunView) -> Panel | None:
    """Plot the reward of each step, and the evaluations with their confidence intervals."""
    steps = view.by_step("rl.step")
    rewards, best = _points(steps, "reward_mean"), _points(steps, "best_of_k")
    last = max((x for x, _ in rewards), default=0.0)
    estimates = _estimates(view.evaluations_during(), "validation", 3)
    for name, at in (("before", 0.0), ("after", last)):
        event = view.evaluation(name)
        estimates += _estimates([{**event, "step": at}] if event else [], f"held-out, {name}", 2)
    if not rewards and not estimates:
        return None
    series = [Series("best of a group", best, 4), Series("reward", rewards, 1)]
    return Panel(
        "Solve rate",
        "Mean reward of the rollouts that each step trained on, the share of groups with at least one success, and "
        "evaluations with 95 % intervals. Settings were chosen on validation tasks, never on held-out ones.",
        line_chart(
            series,
            title="Solve rate by step",
            x_label="step",
            estimates=estimates,
            y_range=(0.0, 1.0),
            x_format=_whole,
            y_format=lambda value: f"{value:.2f}",
            frame=WIDE,
        ),
        legend([("reward", 1), ("best of a group", 4), ("held-out", 2), ("validation", 3)]),
        wide=True,
    )


def lag_histogram(view: RunView) -> Panel | None:
    """Plot a histogram of the lag of trained rollouts and tokens.

    Lag is the age, in training steps, of the weights that sampled them."""
    steps = of_origin(view.by_step("rl.step"), SIMULATED)
    rollouts, tokens = (_shares(steps, key) for key in ("lag", "token_lag"))
    lags = sorted({*rollouts, *tokens})
    if not lags:
        return None
    names = ["rollouts, by their oldest token", "sampled tokens"]
    groups = [(str(k), [rollouts.get(k, 0.0), tokens.get(k, 0.0)]) for k in lags]
    return Panel(
        "Lag",
        "The learner's step when it trained, minus the step that sampled: of each rollout's oldest token, and of all "
        "tokens. Production episodes are not counted.",
        bar_chart(groups, names, title="Lag", x_label="steps behind the learner", y_format=percent),
        legend([(names[0], 1), (names[1], 2)]),
    )


def utilisation(view: RunView) -> Panel | None:
    """Plot the CPU share of each process over time."""
    found, began, now = lanes(view), view.began, view.now
    if not any(lane.samples for lane in found.values()) or began is None or now is None:
        return None
    spans = [(s.name, s.start - began, (s.end or now) - began) for s in view.phases()]
    rows = [_row(lane, began) for lane in sorted(found.values(), key=lambda lane: _rank(lane.name)) if lane.samples]
    return Panel(
        "Utilisation",
        "CPU time of each process, a full bar being one core (or its own peak, where that is more); at the right the "
        "CPU time in all.",
        lane_chart(
            rows, spans, title="CPU share of each process over time", x_range=(0.0, now - began), x_format=clock
        ),
        wide=True,
    )


def fleet(view: RunView) -> Panel | None:
    """Plot the state, load and weights of each remote engine over time; None if the run had none."""
    found, began, now = regions.engines(view), view.began, view.now
    if not found or began is None or now is None:
        return None
    spans = [(s.name, s.start - began, (s.end or now) - began) for s in view.phases()]
    return Panel(
        "Regions",
        "Remote engines, three lanes each. State: full while the engine got work, half while it was catching up or on "
        "standby, empty while it was lost. Running requests: a full bar is its capacity. Version: the step of its "
        "weights; full is the run's last step.",
        lane_chart(
            regions.rows(found, began, now),
            spans,
            title="State, load and version of each remote engine over time",
            x_range=(0.0, now - began),
            x_format=clock,
        ),
        wide=True,
    )


def _row(lane: Lane, began: float) -> LaneRow:
    top = max(1.0, *(cpu / (b - a) for a, b, cpu in lane.samples))
    every = -(-len(lane.samples) // _MAX_BARS)
    merged = [lane.samples[i : i + every] for i in range(0, len(lane.samples), every)]
    bars = [
        (m[0][0] - began, m[-1][1] - began, sum(c for *_, c in m) / sum(b - a for a, b, _ in m) / top) for m in merged
    ]
    note = duration(lane.cpu_s()) + (f" · {top:.1f}x" if top > 1.5 else "")
    return LaneRow(lane.name, bars, note, 1 + _rank(lane.name)[0] % 5)


def _rank(name: str) -> tuple[int, str]:
    kinds = ("learner", "engine", "worker", "grader", "conductor")
    return next((i for i, kind in enumerate(kinds) if name.startswith(kind)), len(kinds)), name


def deltas(view: RunView) -> Panel | None:
    """Plot the bytes that engines fetch for each new version of the weights, compared with the theoretical bound."""
    events = view.by_step("weights.publish")
    small = [event for event in events if is_delta(event)]
    sent, bound = _points(small, "object_bytes"), _points(small, "bound_bytes")
    if not sent:
        return None
    anchors = [bytes_ for event in events if (bytes_ := number(event, "anchor_bytes"))]
    omitted = f" {len(anchors)} snapshots of {size(max(anchors))}, for late engines, are not shown." if anchors else ""
    total = weights(view)
    share, unchanged = total["share_of_bound"], total["ratio"] is None
    many = " Most values change in a step, so the bound, which is for few changes, does not apply."
    reached = f" In all {percent(share)} of the bound." if share else " No weight has changed." if unchanged else many
    return Panel(
        "Weights on the wire",
        "Bytes of each version's delta, and an estimate of the smallest possible size (the bound). A delta of "
        "training in bf16 is within about 5 per cent of it, above or below." + reached + omitted,
        line_chart(
            [Series("sent", sent, 1), Series("bound", bound, 2)],
            title="Delta bytes by step",
            x_label="step",
            x_format=_whole,
            y_format=size,
        ),
        legend([("sent", 1), ("bound", 2)]),
    )


def pauses(view: RunView) -> Panel | None:
    """Plot the durations of the pauses in which engines loaded new weights."""
    events = [event for event in view.events("engine.adopt") if number(event, "num_running")]
    points = [(x, 1e3 * y) for x, y in _points(events, "pause_s")]
    if not points:
        return None
    ordered = sorted(y for _, y in points)
    middle, worst = quantile(ordered, 0.5), quantile(ordered, 0.99)
    return Panel(
        "Pauses",
        f"Milliseconds that an engine with requests in flight paused to swap its weights: median "
        f"{significant(middle or 0)}, p99 {significant(worst or 0)}.",
        line_chart(
            [Series("pause", points, 1, dots_only=True)],
            title="Pauses in ms by step",
            x_label="step",
            x_format=_whole,
            y_format=lambda v: f"{significant(v)} ms",
        ),
    )


def parity(view: RunView) -> Panel | None:
    """Plot the difference between the probabilities of engines and learner, on a logarithmic scale, and the reactions
    of the run."""
    steps = view.by_step("rl.step")
    kinds = (("fresh rollouts", "fresh_ratio_max", 2), ("all, 99th percentile", "ratio_p99", 4), ("k3", "k3", 3))
    probes: dict[float, float] = {}
    for x, y in _points(view.events("engine.probe"), "ratio_max"):
        probes[x] = max(y, probes.get(x, 0.0))
    series = [Series("probe", sorted(probes.items()), 1)]
    series += [Series(name, _points(steps, key), colour) for name, key, colour in kinds]
    note = (
        "max |r − 1| of the version-matched probe and of fresh rollouts (one version sampled the whole context), the "
        "99th percentile over all tokens, and k3, an estimate of the KL divergence from sampler to trainer."
    )
    return _disagreement("Parity", note + _zeros(series) + _alarms(view), series)


def _zeros(series: Sequence[Series]) -> str:
    """A sentence on values of 0, which cannot be drawn on a logarithmic scale; "" if there are none."""
    parts = []
    for one in series:
        zeros, what = sum(y == 0 for _, y in one.points), "versions" if one.label == "probe" else "steps"
        if zeros:
            of = f"all {zeros} {what}" if zeros == len(one.points) else f"{zeros} of {len(one.points)} {what}"
            parts.append(f"{one.label}: 0 at {of}")
    return f" Not drawn: {'; '.join(parts)}." if parts else ""


def _alarms(view: RunView) -> str:
    """A sentence on parity alarms and how the run reacted; "" if there were none."""
    alarms = view.events("parity.alarm")
    taken = [f"to {text(e, 'defence')} at step {e.get('step')}" for e in alarms if text(e, "defence")]
    if taken:
        return f" The run fell back {', '.join(taken)}."
    return f" Alarms that were only reported: {len(alarms)}." if alarms else ""


def replay(view: RunView) -> Panel | None:
    """Plot the difference between engines and learner with the engines' choice of experts, and with the learner's
    own."""
    steps = view.by_step("rl.step")
    if not _points(steps, "live_k3"):
        return None
    kinds = (
        ("k3, replayed", "k3"), ("k3, live", "live_k3"),
        ("max |r − 1|, replayed", "ratio_max"), ("max |r − 1|, live", "live_ratio_max"),
    )  # fmt: skip
    return _disagreement(
        "With and without replay",
        "k3 and max |r − 1| of all tokens with the engines' experts, and of one sample in 64 with those that the "
        "router chooses now. Zeros are not shown.",
        [Series(name, _points(steps, key), i + 1) for i, (name, key) in enumerate(kinds)],
    )


def _disagreement(title: str, note: str, series: Sequence[Series]) -> Panel | None:
    """A panel of small numbers by step on a logarithmic scale; only the note if no number is above 0."""
    drawn = [replace(one, points=_positive(one.points)) for one in series if _positive(one.points)]
    if not drawn:
        return Panel(title, note, "") if any(one.points for one in series) else None
    return Panel(
        title,
        note,
        line_chart(drawn, title=f"{title} by step", x_label="step", log=True, x_format=_whole),
        legend([(one.label, one.colour) for one in drawn]),
    )


def correction(view: RunView) -> Panel | None:
    """Plot the shares of importance weights and tokens that the loss correction cut off; None if it cut nothing."""
    cut = [event for event in view.by_step("rl.step") if number(event, "cut_share") or number(event, "dropped_share")]
    return _corrected(view) if cut else None


def mid_training(view: RunView) -> Panel | None:
    """Plot the training loss and held-out loss of mid-training, by tokens."""
    trained, held = (
        _points(view.events("mid.step"), "loss", "tokens"),
        _points(view.events("mid.eval"), "heldout_loss", "tokens"),
    )
    if not trained and not held:
        return None
    return Panel(
        "Mid-training loss",
        "Nats per token, on the training corpus and on held-out text.",
        line_chart(
            [Series("training", trained, 1), Series("held-out", held, 2)],
            title="Mid-training loss by tokens",
            x_label="tokens",
            zero=False,
            x_format=_tokens,
        ),
        legend([("training", 1), ("held-out", 2)]),
    )


def copy_probe(view: RunView) -> Panel | None:
    """Plot the share of code edits that the model copied exactly during mid-training, a skill that the loss does not
    show."""
    points = _points(view.events("mid.eval"), "copy_probe", "tokens")
    if not points:
        return None
    return Panel(
        "Copy probe",
        "Share of edits that are right to the last token, given the error message and the file. RL needs this skill; "
        "the loss does not show it.",
        line_chart(
            [Series("copied", points, 3)],
            title="Copy probe by tokens",
            x_label="tokens",
            y_range=(0.0, 1.0),
            x_format=_tokens,
        ),
    )


def _step_panel(
    title: str, note: str, *keys: tuple[str, str], shown: Callable[[float], str] = significant
) -> Callable[[RunView], Panel | None]:
    """Make a panel function for one or several metrics of each step."""

    def panel(view: RunView) -> Panel | None:
        steps = view.by_step("rl.step")
        series = [Series(name, _points(steps, key), i + 1) for i, (name, key) in enumerate(keys)]
        if not any(one.points for one in series):
            return None
        svg = line_chart(series, title=f"{title} by step", x_label="step", x_format=_whole, y_format=shown)
        return Panel(title, note, svg, legend([(s.label, s.colour) for s in series]) if len(series) > 1 else "")

    return panel


entropy = _step_panel("Entropy", "Nats per sampled token; a sudden fall is a collapse.", ("entropy", "entropy"))
gradient = _step_panel("Gradient norm", "Before clipping.", ("gradient norm", "grad_norm"))
no_signal = _step_panel(
    "Groups without signal",
    "Share of groups without an advantage: siblings had equal rewards, or too few were valid. They have no gradient.",
    ("groups", "no_signal_share"),
    shown=percent,
)
shares = _step_panel(
    "Clipped and rerouted",
    "Shares of tokens whose ratio was clipped, and of token-layers whose live top-k differs from the replayed experts.",
    ("clipped tokens", "clip_share"),
    ("flipped experts", "flipped_share"),
    shown=percent,
)
_corrected = _step_panel(
    "What corrections cut",
    "Share of the importance weights that the correction cuts off, and share of tokens whose weight it sets to 0. Both "
    "bias the gradient.",
    ("cut weights", "cut_share"),
    ("dropped tokens", "dropped_share"),
    shown=percent,
)
lengths = _step_panel(
    "Length of a rollout", "Turns per rollout, mean over a step.", ("turns", "turns_mean"), shown=significant
)
waiting = _step_panel(
    "Where a step's time goes",
    "Seconds that the learner waited for its batch, trained, and was blocked by publishing.",
    ("waited", "wait_s"),
    ("trained", "train_s"),
    ("blocked", "stall_s"),
)

PANELS: tuple[tuple[str, tuple[Callable[[RunView], Panel | None], ...]], ...] = (
    ("Learning", (learning, no_signal, lengths)),
    ("Asynchrony", (utilisation, fleet, lag_histogram, waiting)),
    ("Weights", (deltas, pauses)),
    ("Sampler and trainer", (parity, shares, replay, correction)),
    ("Optimisation", (entropy, gradient)),
    ("Mid-training", (mid_training, copy_probe)),
)
"""The report's sections, in order."""


def _points(events: Iterable[Event], key: str, x: str = "step") -> list[tuple[float, float]]:
    found = ((number(event, x), number(event, key)) for event in events)
    return [(a, b) for a, b in found if a is not None and b is not None]


def _positive(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(x, y) for x, y in points if y > 0]


def _estimates(events: Iterable[Event], name: str, colour: int) -> list[Estimate]:
    found = []
    for event in events:
        step, rate, low, high = (number(event, key) for key in ("step", "rate", "low", "high"))
        if step is not None and rate is not None and low is not None and high is not None:
            found.append(Estimate(name, step, rate, low, high, colour))
    return found


def _shares(steps: Sequence[Event], key: str) -> dict[int, float]:
    total: Counter[int] = Counter()
    for event in steps:
        total.update({int(k): int(n) for k, n in counts(event, key).items() if k.lstrip("-").isdecimal()})
    whole = sum(total.values())
    return {k: n / whole for k, n in total.items()} if whole else {}


def _whole(value: float) -> str:
    return f"{value:.0f}" if value == int(value) else ""


def _tokens(value: float) -> str:
    return f"{significant(value / 1e6)}M" if value >= 1e5 else f"{value:.0f}"
