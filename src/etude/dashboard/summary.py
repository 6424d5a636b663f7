"""Computes summary.json, a run in numbers (`docs/formats/run.md`), from a view of the run.

A number that the run has not measured is null, never zero."""

from __future__ import annotations

import math
import sqlite3
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from etude.dashboard.run_view import Event, RunView, counts, number, read_json, text
from etude.dashboard.utilisation import cpu_s, idle, peak_memory_bytes

FORMAT = 1
PRODUCTION, SIMULATED, MIXED = "production", "simulated", "mixed"
"""The `origin` in events of production steps: on production episodes alone, or mixed with simulated rollouts of tasks.
Events of RL on tasks have none."""
_HELDOUT = (
    "num_tasks",
    "num_problems",
    "solved",
    "cheats",
    "rate",
    "low",
    "high",
    "best_of_k",
    "turns_mean",
    "sampled_mean",
    "prompt_mean",
    "cached_share",
    "latency_p50_s",
    "latency_p99_s",
    "machine_s",
    "dollars",
    "dollars_per_solved",
    "dollars_per_solved_task",
)


def summarise(run_dir: Path | str, *, rollouts: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Compute summary.json of a run folder, finished or not. Raises `NoRun` when the folder does not exist.

    `rollouts` is the number of rollouts by state; None reads it from the ledger (the database of rollouts) in the
    folder."""
    return summarise_view(RunView(run_dir), rollouts)


def summarise_view(view: RunView, rollouts: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Compute summary.json from a view. `rollouts` is the number of rollouts by state, as for `summarise`."""
    identity = view.identity()
    ended = {span.name for span in view.phases() if span.end is not None}
    return {
        "format": FORMAT,
        "run_id": identity.get("run_id"),
        "finished": "eval-after" in ended,
        "etude": identity.get("etude"),
        "host": identity.get("host"),
        "heldout": heldout(view),
        "transfer": transfer(view),
        "baselines": _baselines(view),
        "wall_s": wall_s(view),
        "cpu_s": _cpu_s(view),
        "idle": _rounded(idle(view)),
        "lag": lag(of_origin(view.by_step("rl.step"), SIMULATED)),
        "production": production(view),
        "drafts": drafts(view),
        "weights": weights(view),
        "parity": parity(view),
        "invalid": invalid(view),
        "quarantined": quarantined(view),
        "rollouts": rollout_states(view.path / "ledger.sqlite") if rollouts is None else dict(rollouts),
        "rl": _rl(view.by_step("rl.step")),
        "nothing_learnt": nothing_learnt(view),
        "peak_memory_bytes": peak_memory_bytes(view),
    }


def nothing_learnt(view: RunView) -> str | None:
    """Return a sentence on why no step of a run could learn; None if a step could learn, and before the first step.

    The policy learns from a group of rollouts only if they have advantages. With the built-in credit schemes, rollouts
    have advantages if the rewards of their group differ."""
    steps = view.by_step("rl.step")
    if not steps or any(number(event, "no_signal_share") != 1.0 for event in steps):
        return None
    rollouts = [event for event in view.events("rollout") if text(event, "outcome") == "graded"]
    rewards = {reward for event in rollouts if (reward := number(event, "reward")) is not None}
    endings = Counter(text(event, "ending") for event in rollouts)
    turns = _mean(_values(rollouts, "turns"))
    why = f"in none of {len(steps)} steps did a rollout have an advantage"
    if len(rewards) == 1:
        why += f"; all {len(rollouts)} rollouts have reward {rewards.pop():g}"
    if endings:
        why += "; they ended by " + ", ".join(f"{name} ({count})" for name, count in endings.most_common())
    if turns is not None:
        why += f", after {turns:.1f} turns on average" if turns else ", before the model was called"
    return why


def heldout(view: RunView) -> dict[str, Any]:
    """Return the evaluations before, during and after RL, each by name.

    Those before and after RL use held-out tasks. Those during RL use the tasks of the split that `split` names."""
    before, after = view.evaluation("before"), view.evaluation("after")
    during = view.evaluations_during()
    return {
        "before": _pick(before, _HELDOUT) if before else None,
        "during": [{"split": event.get("split"), **_pick(event, ("step", *_HELDOUT))} for event in during],
        "after": _pick(after, _HELDOUT) if after else None,
    }


def transfer(view: RunView) -> dict[str, Any]:
    """Return the evaluations before and after RL on families of tasks that were never trained on; None in place of an
    evaluation that was not made."""
    found = {name: view.evaluation(f"{name}-transfer") for name in ("before", "after")}
    return {name: _pick(event, _HELDOUT) if event else None for name, event in found.items()}


def _baselines(view: RunView) -> dict[str, float | None]:
    event = view.latest("eval.baselines") or {}
    return {name: number(event, name) for name in ("oracle", "random")}


def wall_s(view: RunView) -> dict[str, float]:
    """Return the wall time in seconds of each phase that has ended, by name, and their sum as "total"."""
    found = {span.name: span.wall_s for span in view.phases() if span.end is not None and span.wall_s is not None}
    for one in read_json(view.path / "phases.json", list):
        seconds = number(one, "wall_s") if isinstance(one, dict) else None
        if seconds is not None:
            found.setdefault(str(one.get("phase")), seconds)
    return {"total": round(math.fsum(found.values()), 3), **found}


def _cpu_s(view: RunView) -> dict[str, float]:
    found = cpu_s(view)
    return {"total": round(math.fsum(found.values()), 3), **_rounded(found)}


def lag(steps: Sequence[Event]) -> dict[str, Any]:
    """Compute mean, maximum and histogram of the lag of rollouts from `rl.step` events.

    The lag of a rollout is the age, in training steps, of the weights that sampled its oldest token when it was trained
    on."""
    histogram: Counter[int] = Counter()
    for event in steps:
        for name, n in counts(event, "lag").items():
            if name.lstrip("-").isdecimal():
                histogram[int(name)] += int(n)
    total = sum(histogram.values())
    return {
        "mean": sum(k * n for k, n in histogram.items()) / total if total else None,
        "max": max(histogram, default=None),
        "histogram": {str(k): histogram[k] for k in sorted(histogram)},
    }


def of_origin(steps: Iterable[Event], origin: str) -> list[Event]:
    """Return what `rl.step` events say of rollouts of one origin: `SIMULATED` (of tasks) or `PRODUCTION` (of users).

    Of a step that has both, it is the part with the metrics of this origin; of any other step the whole event."""
    found = list[Event]()
    for event in steps:
        parts = event.get("origins")
        if isinstance(parts, dict) and len(parts) > 1:
            found += [part for name, part in parts.items() if name == origin and isinstance(part, dict)]
        elif (text(event, "origin") == PRODUCTION) is (origin == PRODUCTION):
            found.append(event)
    return found


def lag_by_origin(steps: Sequence[Event]) -> dict[str, dict[str, Any]]:
    """Return `lag` of the rollouts of each origin, by its name, without those that have none."""
    each = {origin: lag(of_origin(steps, origin)) for origin in (SIMULATED, PRODUCTION)}
    return {origin: found for origin, found in each.items() if found["histogram"]}


def production(view: RunView) -> dict[str, Any]:
    """Return the numbers of the steps with production episodes, apart from those on tasks.

    `steps`, `episodes`, `reward_mean` (over episodes; None without one), `lag` as of the tasks, and `sampled_by`: the
    shares of the episodes' sampled tokens by what their version was when the window was formed, as means over steps.
    `mixed_steps`, `simulated_groups`: how many of the steps have simulated rollouts, too, and how many groups of
    them. `dollars_per_kept`: what a change that users kept cost, by arm, in the last release whose costs are known."""
    events = view.by_step("rl.step")
    steps, mixed = of_origin(events, PRODUCTION), [event for event in events if text(event, "origin") == MIXED]
    episodes = [(number(event, "num_groups") or 0.0, number(event, "reward_mean") or 0.0) for event in steps]
    total = math.fsum(count for count, _ in episodes)
    shares = [found for event in events if (found := counts(event, "sampled_by"))]
    names = sorted({name for one in shares for name in one})
    kept = [counts(event, "dollars_per_kept") for event in view.events("production.window")]
    return {
        "steps": len(steps),
        "episodes": int(total),
        "reward_mean": math.fsum(count * reward for count, reward in episodes) / total if total else None,
        "lag": lag(steps),
        "sampled_by": {name: _mean([one.get(name, 0.0) for one in shares]) for name in names},
        "mixed_steps": len(mixed),
        "simulated_groups": int(_total(of_origin(mixed, SIMULATED), "num_groups")),
        "dollars_per_kept": next(filter(None, reversed(kept)), {}),
    }


def drafts(view: RunView) -> dict[str, Any]:
    """Count the drafts of speculative decoding in all engines. `accepted_share` is None if there were none."""
    loads = view.events("engine.load")
    computed, accepted = (int(_total(loads, f"{name}_tokens")) for name in ("drafted", "accepted"))
    tokens = int(_total(loads, "tokens"))
    return {
        "computed": computed,
        "accepted": accepted,
        "accepted_share": accepted / computed if computed else None,
        "share_of_tokens": accepted / tokens if computed and tokens else None,
    }


MOST_CHANGE = 0.5
"""If versions change this share of the weights or more on average, `share_of_bound` is None: the bound is for sparse
changes."""


def is_delta(event: Event) -> bool:
    """Return whether a `weights.publish` event is of a delta: only the changes since the previous version.

    A run's first version is a full snapshot."""
    bound, whole = number(event, "bound_bytes"), number(event, "snapshot_bytes")
    return bound is not None and whole is not None and bound < whole


def weights(view: RunView) -> dict[str, Any]:
    """Compute the bytes of published weights, and the milliseconds for which engines paused to swap weights.

    `ratio` (snapshot ÷ delta) and `share_of_bound` (theoretical bound ÷ delta) are over deltas, and None if no delta
    changed a weight. `share_of_bound` is also None if most weights change, as with adapters. Pauses are of engines that
    had requests in flight."""
    published = view.events("weights.publish")
    deltas = [event for event in published if is_delta(event)]
    sent, bound = _total(deltas, "object_bytes"), _total(deltas, "bound_bytes")
    dense = _total(deltas, "changed_share") > MOST_CHANGE * len(deltas)
    adopted = [event for event in view.events("engine.adopt") if number(event, "num_running")]
    pauses = sorted(1e3 * pause for event in adopted if (pause := number(event, "pause_s")) is not None)
    return {
        "num_publishes": len(published),
        "object_bytes": int(_total(published, "object_bytes")),
        "ratio": _total(deltas, "snapshot_bytes") / sent if sent and bound else None,
        "share_of_bound": bound / sent if sent and bound and not dense else None,
        "pause_ms_p50": quantile(pauses, 0.5),
        "pause_ms_p99": quantile(pauses, 0.99),
        "pause_ms_max": pauses[-1] if pauses else None,
    }


def parity(view: RunView) -> dict[str, float | None]:
    """Compute the differences between the probabilities of engines and learner over a run.

    These are maximum ratios, the mean of k3 (an estimate of the KL divergence), and the mean share of experts that
    differ."""
    steps = view.by_step("rl.step")
    return {
        "probe_ratio_max": max(_values(view.events("engine.probe"), "ratio_max"), default=None),
        "fresh_ratio_max": max(_values(steps, "fresh_ratio_max"), default=None),
        "k3_mean": _mean(_values(steps, "k3")),
        "flipped_share_mean": _mean(_values(steps, "flipped_share")),
    }


def invalid(view: RunView) -> dict[str, int]:
    """Count the invalid training rollouts by the component that failed."""
    found: Counter[str] = Counter()
    for event in view.by_step("rl.step"):
        found.update({name: int(n) for name, n in counts(event, "invalid").items()})
    return dict(sorted(found.items()))


def quarantined(view: RunView) -> int:
    """Count the rollouts with signs of cheating. They were trained on with reward 0."""
    signs = (event for event in view.events("rollout.signs") if text(event, "state") == "quarantined")
    return len({text(event, "rollout_id") for event in signs})


def rollout_states(ledger: Path) -> dict[str, int]:
    """Count the rollouts in each state in a ledger, the database of rollouts (SQLite), also while it is written.

    Returns {} when the file is missing or damaged."""
    try:
        connection = sqlite3.connect(f"{ledger.absolute().as_uri()}?mode=ro", uri=True, timeout=1.0)
    except sqlite3.Error:
        return {}
    try:
        return dict(connection.execute("SELECT state, count(*) FROM rollouts GROUP BY state").fetchall())
    except sqlite3.Error:
        return {}
    finally:
        connection.close()


def _rl(steps: Sequence[Event]) -> dict[str, Any]:
    rewards = _values(steps, "reward_mean")
    return {
        "steps": len(steps),
        "reward_first": rewards[0] if rewards else None,
        "reward_last": rewards[-1] if rewards else None,
        "no_signal_share": _mean(_values(steps, "no_signal_share")),
        "judge_dollars": number(steps[-1], "judge_dollars") if steps else None,
    }


def quantile(ordered: Sequence[float], share: float) -> float | None:
    """Return the smallest of the ascending values that at least `share` of them (0 to 1) do not exceed; None without
    values.

    >>> quantile([1.0, 2.0, 3.0, 4.0], 0.5), quantile([], 0.5)
    (2.0, None)
    """
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None


def _pick(event: Event, names: Iterable[str]) -> dict[str, float | int | None]:
    found = {name: number(event, name) for name in names}
    whole = {"step", "num_tasks", "num_problems", "solved", "cheats"}
    return {name: int(v) if name in whole and v is not None else v for name, v in found.items()}


def _values(events: Iterable[Event], key: str) -> list[float]:
    return [value for event in events if (value := number(event, key)) is not None]


def _total(events: Iterable[Event], key: str) -> float:
    return math.fsum(_values(events, key))


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _rounded(values: dict[str, Any]) -> dict[str, Any]:
    return {name: None if value is None else round(value, 4) for name, value in values.items()}
