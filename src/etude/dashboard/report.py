"""report.html: a run on one self-contained page without scripts or external resources.

All data of a run is escaped, by the template or by `plot`. The page is made from `report.html.jinja` and `report.css`
in this folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from markupsafe import Markup

from etude.dashboard import formatting
from etude.dashboard.glossary import meaning
from etude.dashboard.messages import messages
from etude.dashboard.pages import render, write_page
from etude.dashboard.panels import PANELS, Panel
from etude.dashboard.problems import damage, often_unknown, recovered_failures
from etude.dashboard.run_view import PHASES, RunView, counts, number, text
from etude.dashboard.summary import summarise_view
from etude.file_checksums import ChecksumMismatch, verify_parquet
from etude.records.view import RolloutView, TurnView, conversations, turn_facts
from etude.records.wire import from_json

Row = tuple[str, ...]


def write_report(run_dir: Path | str, rollouts: Sequence[RolloutView] = ()) -> Path:
    """Write report.html into a run folder and return its path. The run may still be running.

    `rollouts`: rollouts of training to show. Raises `NoRun` when the folder does not exist, and `StoreError` when the
    file cannot be written.
    """
    view = RunView(run_dir)
    return write_page(view.path / "report.html", page(view, rollouts), hint="free disk space, then etude report")


def page(view: RunView, rollouts: Sequence[RolloutView] = ()) -> str:
    """Render the HTML of the report."""
    summary = summarise_view(view)
    return render(
        "report.html.jinja",
        name=view.path.name,
        origin=_origin(view),
        heldout=_headline(summary),
        transfer=" → ".join(_rate(one) for one in summary["transfer"].values() if one),
        nothing_learnt=summary["nothing_learnt"],
        baselines=[f"{name} agent {rate:.2f}" for name, rate in summary["baselines"].items() if rate is not None],
        tiles=[(*tile, meaning(f"{tile[0]} {tile[2]}")) for tile in _tiles(summary)],
        sections=[(title, found) for title, made in PANELS if (found := [_marked(p) for f in made if (p := f(view))])],
        families=list(_families(view)),
        invalid=sorted(summary["invalid"].items()),
        states=[*sorted(summary["rollouts"].items()), *_quarantined(summary)],
        times=[(name, formatting.duration(summary["wall_s"][name])) for name in PHASES if name in summary["wall_s"]],
        cpu=[(name, formatting.duration(s)) for name, s in sorted(summary["cpu_s"].items(), key=lambda one: -one[1])],
        host=_host(summary["host"]),
        problems=recovered_failures(view),
        damage=damage(view),
        often_unknown=often_unknown(view),
        pair=pair(view.path / "evals"),
        rollouts=[_bounded(one) for one in rollouts],
        conversations=conversations,
        facts=turn_facts,
        messages=messages,
        config=_text(view.path / "config.toml"),
    )


def _marked(panel: Panel) -> Mapping[str, Any]:
    return {**vars(panel), "svg": Markup(panel.svg), "legend": Markup(panel.legend)}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _quarantined(summary: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """A row below the states: the number of rollouts with signs of cheating, which are also counted in their states."""
    if number := summary["quarantined"]:
        yield "of these, with signs of cheating (reward 0)", number


def _headline(summary: Mapping[str, Any]) -> Mapping[str, str] | None:
    before, after = summary["heldout"]["before"], summary["heldout"]["after"]
    shown = {name: one for name, one in (("before", before), ("after", after)) if one and one["rate"] is not None}
    if not shown:
        return None
    facts = {name: f"{one['rate']:.2f}" for name, one in shown.items()}
    for name, one in shown.items():
        if one["low"] is not None and one["high"] is not None:
            facts[f"{name}_interval"] = f"{one['low']:.3f} to {one['high']:.3f}"
    tasks = [str(one["num_tasks"]) for one in shown.values() if one["num_tasks"] is not None]
    last = list(shown.values())[-1]
    problems = formatting.problems_note(last) + formatting.cheats_note(last)
    return {**facts, "num_tasks": tasks[-1] if tasks else "?", "problems": problems}


def _rate(one: Mapping[str, Any]) -> str:
    return f"{one['rate']:.2f} [{one['low']:.2f}, {one['high']:.2f}]{formatting.cheats_note(one)}"


def _tiles(summary: Mapping[str, Any]) -> Iterator[Row]:
    """(name, value, remark) of the numbers at the top."""
    if summary["wall_s"]["total"]:
        yield "wall time", formatting.duration(summary["wall_s"]["total"]), "all phases that have ended"
    if summary["cpu_s"]["total"]:
        yield "CPU time", formatting.duration(summary["cpu_s"]["total"]), "all processes"
    solved = summary["heldout"]["after"] or summary["heldout"]["before"] or {}
    if solved.get("dollars_per_solved") is not None:
        value = formatting.money(solved["dollars_per_solved"])
        once = formatting.money(solved["dollars_per_solved_task"])
        yield "per solution", value, f"held-out; per task that was solved at least once {once}"
    if solved.get("latency_p50_s") is not None and solved["latency_p99_s"] is not None:
        longest = formatting.duration(solved["latency_p99_s"])
        yield "time of a task", formatting.duration(solved["latency_p50_s"]), f"held-out, median; p99 {longest}"
    if summary["rl"]["judge_dollars"] is not None:
        yield "judges", formatting.money(summary["rl"]["judge_dollars"]), "all answers for reward terms of RL"
    idle = summary["idle"]
    if idle["learner"] is not None:
        yield "learner idle", formatting.percent(idle["learner"]), "of the RL phase, from CPU time"
    if idle["engines"] is not None:
        yield "engines idle", formatting.percent(idle["engines"]), "mean, from CPU time"
    lag = summary["lag"]
    if lag["mean"] is not None:
        yield "lag", formatting.significant(lag["mean"]), f"mean steps; at most {lag['max']}"
    production = summary["production"]
    if production["steps"]:
        own = production["sampled_by"]
        of_own = own.get("deployed", 0.0) + own.get("before", 0.0)
        remark = f"steps on {production['episodes']} episodes of users"
        remark += f"; lag {formatting.significant(production['lag']['mean'])}" if production["lag"]["histogram"] else ""
        remark += f"; {formatting.percent(of_own)} of tokens by deployed versions" if of_own else ""
        if production["mixed_steps"]:
            beside = f"{production['simulated_groups']} simulated groups in {production['mixed_steps']} of them"
            remark += f"; {beside}"
        yield "production", str(production["steps"]), remark
    if kept := production["dollars_per_kept"]:
        each = ", ".join(f"{arm} ${formatting.significant(value)}" for arm, value in sorted(kept.items()))
        yield "dollars per kept change", each, "all answers of a version, divided by the changes that users kept"
    drafts = summary["drafts"]
    if drafts["accepted_share"] is not None:
        of_tokens = (
            "" if drafts["share_of_tokens"] is None else f"{formatting.percent(drafts['share_of_tokens'])} of tokens"
        )
        yield "drafts accepted", formatting.percent(drafts["accepted_share"]), of_tokens
    sent = summary["weights"]
    if sent["share_of_bound"] is not None:
        yield "of the delta bound", formatting.percent(sent["share_of_bound"]), f"deltas {sent['ratio']:.1f}x smaller"
    if sent["pause_ms_p99"] is not None:
        yield "pause p99", f"{formatting.significant(sent['pause_ms_p99'])} ms", "to swap weights while serving"
    probe = summary["parity"]["probe_ratio_max"]
    if probe is not None:
        yield "probe |r − 1|", formatting.significant(probe), "largest, engine against learner"
    if summary["peak_memory_bytes"] is not None:
        yield "peak memory", formatting.size(summary["peak_memory_bytes"]), "PSS of all processes"


def _families(view: RunView) -> Iterator[Row]:
    """(family, rate before, rate after) of the held-out evaluations."""
    before, after = (view.evaluation(name) or {} for name in ("before", "after"))
    old, new = counts(before, "by_family"), counts(after, "by_family")
    for family in sorted({*old, *new}):
        yield family, *(f"{found[family]:.2f}" if family in found else "–" for found in (old, new))


def _origin(view: RunView) -> list[str]:
    identity = view.identity()
    etude = text(identity, "etude")
    found = (text(identity, "run_id") or view.path.name, etude and f"etude {etude}", text(identity, "created"))
    return [one for one in found if one]


def _host(host: Any) -> list[tuple[str, str]]:
    if not isinstance(host, Mapping):
        return []
    shown = [(str(name), str(value)) for name, value in host.items() if name != "memory_bytes"]
    memory = number(host, "memory_bytes")
    return shown + ([("memory", formatting.size(memory))] if memory else [])


# Transcripts of one task, before and after RL, from the evaluations' Parquet files


_COLUMNS = ("task_id", "rollout_id", "reward", "family", "transcript")
_TREE = "tree"  # a column that files of earlier versions do not have
_MAX_CHARS = 20_000
_MAX_TURN_CHARS = 4_000


@dataclass(frozen=True)
class Pair:
    """One task as tried by the model before and after RL, for the report."""

    task_id: str
    family: str
    before: RolloutView
    after: RolloutView


def pair(evals: Path) -> Pair | None:
    """Choose a task of medium length that failed before and is solved after RL; None if there is none, or no files.

    `evals` is the folder of evaluations. The choice depends only on their content, so that a report that is written
    again shows the same task."""
    before = {row["task_id"]: row for row in reversed(_rows(evals / "before.parquet"))}
    solved_before = {row["task_id"] for row in _rows(evals / "before.parquet") if row["reward"] >= 1.0}
    found = [
        row
        for row in _rows(evals / "after.parquet")
        if row["reward"] >= 1.0 and row["task_id"] in before and row["task_id"] not in solved_before
    ]
    if not found:
        return None
    found.sort(key=lambda row: (len(row["transcript"]), row["task_id"], row["rollout_id"]))
    after = found[len(found) // 2]
    return Pair(after["task_id"], after["family"], _view(before[after["task_id"]]), _view(after))


def _view(row: dict[str, Any]) -> RolloutView:
    """The rollout of an evaluation's row: its turns, or in files of earlier versions its transcript."""
    try:
        turns = from_json(row.get(_TREE) or "[]", tuple[TurnView, ...])
    except ValueError:
        turns = ()
    view = RolloutView(
        rollout_id=row["rollout_id"],
        source="evaluation",
        reward=row["reward"],
        turns=turns,
        transcript="" if turns else row["transcript"],
    )
    return _bounded(view)


def _bounded(view: RolloutView) -> RolloutView:
    """A copy with texts of bounded length, so that the page stays small."""
    left, turns = _MAX_CHARS, list[TurnView]()
    for turn in view.turns:
        prompt = _cut(turn.prompt, min(left, _MAX_TURN_CHARS))
        reply = _cut(turn.reply, min(left - len(prompt), _MAX_TURN_CHARS))
        left = max(0, left - len(prompt) - len(reply))
        turns.append(msgspec.structs.replace(turn, prompt=prompt, reply=reply))
    return msgspec.structs.replace(view, turns=tuple(turns), transcript=_cut(view.transcript, _MAX_CHARS))


def _cut(text: str, chars: int) -> str:
    return text if len(text) <= chars else text[: max(0, chars)] + "\n…"


def _rows(path: Path) -> list[dict[str, Any]]:
    """The rows of an evaluation; empty when the file is missing or damaged."""
    try:
        with path.open("rb") as handle:
            verify_parquet(handle, path, kind=ChecksumMismatch)
        file = pq.ParquetFile(path, pre_buffer=False)  # no threads: they may abort the interpreter at exit
        columns = [*_COLUMNS, *({_TREE} & set(file.schema_arrow.names))]
        rows: list[dict[str, Any]] = file.read(columns=columns, use_threads=False).to_pylist()
    except (pa.ArrowException, OSError, ValueError, KeyError, ChecksumMismatch):
        return []
    kinds = {name: float if name == "reward" else str for name in columns}
    return [row for row in rows if all(isinstance(row.get(name), kind) for name, kind in kinds.items())]
