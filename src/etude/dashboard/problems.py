"""Lists the failures that a run recovered from, and the damaged files of its folder."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import pyarrow as pa
import pyarrow.parquet as pq

from etude.dashboard.run_view import Event, RunView, number, text

OFTEN = 0.1
"""A reward term that is unknown for a larger share of the rollouts is named at the end of a run."""
STATES = {"restart": "was restarted", "hung": "did not answer and was killed"}


def recovered_failures(view: RunView) -> list[tuple[str, int]]:
    """List the failures from which a run recovered, each with the number of times that it occurred.

    They are sorted by kind: losses of processes, lost steps, troubles of engines, repairs, unknown reward terms, parity
    alarms."""
    found: Counter[str] = Counter()
    for event in losses(view):
        found[f"{text(event, 'name')} {STATES[text(event, 'state')]}"] += 1
    lost = sum(text(event, "state") == "lost" for event in view.events("lineage"))
    found.update({"the learner was lost, and training continued from a checkpoint": lost} if lost else {})
    gone = sum(int(number(event, "gone") or 0) for event in view.events("lineage"))
    found.update({"a rollout of a lost step has no record, and is not trained again": gone} if gone else {})
    for event in view.events("engine.trouble"):
        found[f"{text(event, 'process')}: {text(event, 'reason')}"] += 1
    for event in view.events("weights.mend"):
        found[f"weights repaired: {text(event, 'reason')}"] += 1
    found.update(sentence for _, sentence in unknown_terms(view))
    for event in view.events("parity.alarm"):
        found[f"{text(event, 'engine')} was over the parity budget"] += 1
    return list(found.items())


def unknown_terms(view: RunView) -> Iterator[tuple[float, str]]:
    """Yield (time, sentence) for each group that waits for a reward term, or is trained on without it."""
    said = {"waiting": "a group waits for", "without": "a group goes without"}
    for event in {text(event, "group_id"): event for event in view.events("rewards.unknown")}.values():
        names, reasons = event.get("terms"), event.get("reasons")
        if (what := said.get(text(event, "state"))) and isinstance(names, list):
            why = (
                [f": {one}" for one in reasons.values()]
                if isinstance(reasons, dict) and what == said["waiting"]
                else []
            )
            yield (
                float(event["t"]),
                f"{what} the reward term {', '.join(map(str, names))}, which is unknown{''.join(why[:1])}",
            )


def often_unknown(view: RunView) -> list[str]:
    """List a sentence for each weighted reward term that was unknown for more than `OFTEN` of the rollouts trained on.

    The share is the mean over the steps that had the term."""
    shares: dict[str, list[float]] = {}
    for event in view.events("rl.step"):
        weights, unknown = event.get("reward_weights"), event.get("unknown_terms")
        for name in weights if isinstance(weights, dict) else ():
            shares.setdefault(name, []).append((number(unknown, name) or 0.0) if isinstance(unknown, dict) else 0.0)
    return [
        f"the reward term {name} was unknown for {mean:.0%} of the rollouts of {len(found)} steps, whose groups were "
        f"trained on without it; the reasons are the events rewards.unknown in {view.path / 'events'}, and for judges "
        f"in etude judge accounts"
        for name, found in sorted(shares.items())
        if (mean := fmean(found)) > OFTEN
    ]


def losses(view: RunView) -> list[Event]:
    """List one `process` event for each loss of a process: its kill if it hung, otherwise its restart."""
    found, killed = list[Event](), set[str]()
    for event in view.events("process"):
        name, state = text(event, "name"), text(event, "state")
        if state in STATES and name not in killed:
            found.append(event)
        if state == "hung":
            killed.add(name)
        elif state in ("restart", "ready"):
            killed.discard(name)
    return found


def damage(view: RunView) -> list[str]:
    """Describe each damaged part of a run folder in a sentence. A missing file is not damaged."""
    return [*view.unreadable(), *_missing_steps(view), *_damaged_files(view.path)]


def _missing_steps(view: RunView) -> Iterator[str]:
    steps = {int(step) for event in view.events("rl.step") if (step := number(event, "step")) is not None}
    missing = sorted({*range(1, max(steps, default=0))} - steps)
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        yield f"events: step {missing[0]}{more} of {max(steps)} is missing"


def _damaged_files(run: Path) -> Iterator[str]:
    for name, kind in (("run.json", dict), ("phases.json", list)):
        with contextlib.suppress(FileNotFoundError):
            try:
                whole = isinstance(json.loads((run / name).read_bytes()), kind)
            except (OSError, ValueError, RecursionError) as error:
                if isinstance(error, FileNotFoundError):
                    raise
                whole = False
            if not whole:
                yield f"{name} is damaged"
    for path in sorted((run / "evals").glob("*.parquet")):
        try:
            pq.ParquetFile(path, pre_buffer=False).read(columns=["rollout_id", "reward"], use_threads=False)
        except (pa.ArrowException, OSError, ValueError, KeyError) as error:
            yield f"evals/{path.name} cannot be read: {str(error).splitlines()[0][:100]}"
    ledger = run / "ledger.sqlite"
    if ledger.exists():
        try:
            uri = f"{ledger.absolute().as_uri()}?mode=ro"
            with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=1.0)) as connection:
                connection.execute("SELECT count(*) FROM rollouts").fetchone()
        except sqlite3.Error as error:
            yield f"ledger.sqlite cannot be read: {error}"
