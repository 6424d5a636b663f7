from __future__ import annotations

import io
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from etude.dashboard import RunView, plain_line, render, result_lines, summarise
from etude.dashboard.progress import current_phase, progress
from etude.dashboard.report import page, pair
from etude.errors import RunError


def test_events_of_all_processes_are_merged_by_time(writer):
    writer.event(3.0, "engine-1", "engine.adopt", step=2)
    writer.event(1.0, "engine-0", "engine.adopt", step=1)
    view = RunView(writer.path)
    assert [event["step"] for event in view.events("engine.adopt")] == [1, 2]
    assert (view.began, view.now) == (1.0, 3.0)


def test_a_refresh_reads_only_what_is_new_and_waits_for_whole_lines(writer):
    writer.event(1.0, "learner", "mid.step", step=1)
    view = RunView(writer.path)
    with (writer.path / "events/learner.jsonl").open("a") as file:
        file.write('{"t": 2.0, "kind": "mid.step", "step": 2')
        file.flush()
        view.refresh()
        assert len(view.events("mid.step")) == 1
        file.write("}\n")
    view.refresh()
    assert [event["step"] for event in view.events("mid.step")] == [1, 2]
    writer.event(3.0, "learner", "mid.step", step=3)
    view.refresh()
    assert len(view.events("mid.step")) == 3


def test_a_step_done_again_counts_once_as_it_was_done_last(writer):
    writer.event(1.0, "conductor", "rl.step", step=7, reward_mean=0.1, invalid={"machine": 3}, lag={"1": 2})
    writer.event(2.0, "conductor", "rl.step", step=7, reward_mean=0.5, invalid={"machine": 1}, lag={"1": 2})
    summary = summarise(writer.path)
    assert summary["rl"]["steps"] == 1
    assert summary["rl"]["reward_last"] == 0.5
    assert summary["invalid"] == {"machine": 1}
    assert summary["lag"]["histogram"] == {"1": 2}


def test_a_resumed_phase_is_under_way_again(writer):
    writer.event(1.0, "conductor", "phase", phase="rl", state="start")
    writer.event(9.0, "conductor", "phase", phase="rl", state="start")
    span = RunView(writer.path).phase("rl")
    assert (span.start, span.end) == (9.0, None)


def test_the_time_left_follows_the_pace_since_the_last_start(writer):
    writer.event(0.0, "conductor", "phase", phase="rl", state="start")
    writer.event(10.0, "conductor", "rl.step", step=1, num_steps=5)
    writer.event(1000.0, "conductor", "phase", phase="rl", state="start")  # the run rested
    for i, step in enumerate((2, 3)):
        writer.event(1010.0 + 4 * i, "conductor", "rl.step", step=step, num_steps=5)
    at = progress(RunView(writer.path))
    assert (at.done, at.total, at.left_s, at.share) == (3, 5, 8.0, 0.6)


def test_mid_training_that_is_resumed_shows_nothing_of_before(writer):
    writer.event(0.0, "conductor", "phase", phase="mid-training", state="start")
    writer.event(10.0, "learner", "mid.step", step=187, num_steps=1067, loss=0.769)
    assert "mid-training  187/1067" in plain_line(RunView(writer.path))
    writer.event(1000.0, "conductor", "phase", phase="mid-training", state="start")
    line = plain_line(RunView(writer.path))
    assert line.endswith("mid-training"), line
    assert progress(RunView(writer.path)) is None
    writer.event(1030.0, "learner", "mid.step", step=9, num_steps=1067, loss=4.008)
    assert "mid-training  9/1067" in plain_line(RunView(writer.path))


def resumed(writer):
    """RL in three sessions: 4 s until it was killed, 2 s until it was stopped, 3 s to its end; hours between them."""
    rests = {"killed": 100.0, "stopped": 20_000.0, "ended": 90_000.0}
    writer.event(rests["killed"], "conductor", "session")
    for t, state in ((101.0, "start"), (102.0, "end")):
        writer.event(
            t, "conductor", "phase", phase="corpus", state=state, **({"wall_s": 1.0} if state == "end" else {})
        )
    for began, lasted in zip(rests.values(), (4.0, 2.0, 3.0), strict=True):
        if began != rests["killed"]:
            writer.event(began, "conductor", "session")
        writer.event(began + 5, "engine-0", "engine.load", tokens=1)  # before the phase: its engines come up
        writer.event(began + 10, "conductor", "phase", phase="rl", state="start")
        writer.event(began + 11, "conductor", "rl.step", step=1)
        writer.event(began + 10 + lasted, "engine-0", "engine.load", tokens=1)
    writer.event(90_013.0, "conductor", "phase", phase="rl", state="end", wall_s=3.0)


def test_the_wall_time_of_a_phase_is_that_of_all_its_sessions_and_not_of_the_hours_between(writer):
    resumed(writer)
    span = RunView(writer.path).phase("rl")
    assert (span.start, span.end, span.wall_s) == (90_010.0, 90_013.0, 9.0)
    assert summarise(writer.path)["wall_s"] == {"total": 10.0, "corpus": 1.0, "rl": 9.0}
    assert "10 s in all: corpus 1.0 s, rl 9.0 s" in result_lines(writer.path)


def test_time_between_sessions_is_not_the_runs(writer):
    resumed(writer)
    view = RunView(writer.path)
    assert view.wall_s == 14.0 + 12.0 + 13.0
    assert plain_line(view).startswith("39 s  rl")
    writer.event(180_000.0, "conductor", "session")  # an ended run that is resumed has nothing to do
    writer.event(180_000.5, "conductor", "usage", processes={})
    view.refresh()
    assert view.wall_s == 39.5
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(render(view))
    assert console.export_text().splitlines()[0].endswith("40 s")


def test_a_phase_without_steps_has_no_progress(writer):
    writer.event(0.0, "conductor", "phase", phase="eval-before", state="start")
    view = RunView(writer.path)
    assert current_phase(view).name == "eval-before"
    assert progress(view) is None


def test_processes_that_are_not_ready_yet_are_named(writer):
    writer.event(0.0, "conductor", "process", name="corpus", state="start")
    writer.event(1.0, "conductor", "phase", phase="eval-before", state="start")
    for name in ("learner", "engine-0"):
        writer.event(2.0, "conductor", "process", name=name, state="start")
    writer.event(3.0, "conductor", "process", name="learner", state="ready")
    writer.event(3.0, "learner", "process", name="learner rank 1", state="start")
    assert plain_line(RunView(writer.path)) == "3.0 s  eval-before  starting engine-0"
    writer.event(4.0, "conductor", "process", name="engine-0", state="ready")
    assert plain_line(RunView(writer.path)) == "4.0 s  eval-before"


def test_what_is_waited_for_is_told_until_it_has_come(writer):
    writer.event(1.0, "conductor", "phase", phase="eval-before", state="start")
    reason = "they join at 127.0.0.1:8790, none has joined"
    writer.event(2.0, "conductor", "process", name="engines", state="waiting", reason=reason)
    assert plain_line(RunView(writer.path)) == f"1.0 s  eval-before  waiting for engines: {reason}"
    ranks = "1 of 1 ranks have not connected to 127.0.0.1:7000"
    writer.event(3.0, "learner", "process", name="learner ranks", state="waiting", reason=ranks)
    writer.event(3.0, "conductor", "process", name="engines", state="ready")
    assert plain_line(RunView(writer.path)) == f"2.0 s  eval-before  waiting for learner ranks: {ranks}"


def test_an_evaluation_tells_how_far_it_is_alone_and_between_two_steps(writer):
    writer.event(0.0, "conductor", "phase", phase="eval-before", state="start")
    for done in (0, 40, 60):
        writer.event(1.0 + done / 10, "conductor", "eval.progress", name="before", done=done, total=100)
    at = progress(RunView(writer.path))
    assert (at.done, at.total, at.left_s) == (60, 100, 4.0)
    assert plain_line(RunView(writer.path)).startswith("7.0 s  eval-before  60/100 (4.0 s left)")
    writer.event(9.0, "conductor", "eval.progress", name="oracle", done=0, total=8)
    at = progress(RunView(writer.path))
    assert (at.done, at.total, at.left_s) == (0, 8, None)
    writer.event(20.0, "conductor", "phase", phase="eval-before", state="end", wall_s=20.0)
    writer.event(20.0, "conductor", "phase", phase="rl", state="start")
    writer.event(21.0, "conductor", "rl.step", step=1, num_steps=5)
    assert "evaluating" not in plain_line(RunView(writer.path)), "that one was broken off"
    writer.event(22.0, "conductor", "eval.progress", name="during", done=3, total=9)
    assert "rl  1/5  evaluating during 3/9 rollouts" in plain_line(RunView(writer.path))
    writer.event(23.0, "conductor", "eval.progress", name="during", done=9, total=9)
    assert "evaluating" not in plain_line(RunView(writer.path))


def test_a_view_of_a_missing_run_is_an_error(tmp_path):
    with pytest.raises(RunError, match="no run at"):
        RunView(tmp_path / "nothing")


def test_an_empty_folder_can_be_looked_at(tmp_path):
    look_everywhere(tmp_path)
    assert plain_line(RunView(tmp_path)) == "starting"


def look_everywhere(path) -> None:
    view = RunView(path)
    Console(quiet=True).print(render(view))
    plain_line(view)
    result_lines(path)
    json.dumps(summarise(path))
    assert page(view).startswith("<!doctype html>")


KINDS = [
    *("phase", "mid.step", "mid.eval", "rl.step", "weights.publish", "engine.adopt", "engine.probe", "engine.load"),
    *("engine.trouble", "eval.result", "eval.baselines", "usage", "process", "lineage", "rollout"),
]
KEYS = [
    *("step", "num_steps", "phase", "state", "wall_s", "reward_mean", "best_of_k", "lag", "token_lag", "invalid"),
    *("tokens", "loss", "name", "rate", "low", "high", "by_family", "object_bytes", "bound_bytes", "snapshot_bytes"),
    *("anchor", "pause_s", "num_running", "ratio_max", "processes", "entropy", "k3", "no_signal_share", "num_tasks"),
    *("solved", "copy_probe", "oracle", "reason", "wait_s", "origin", "origins"),
]
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.sampled_from(["rl", "start", "end", "before", "after", "during", "mid-training", "<b>", "lost", "restart"])
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["0", "1", "-2", "cpu_s", "x", "simulated", "lag"]), inner)
    ),
    max_leaves=6,
)
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(KINDS),
        st.floats(0, 2e9),
        st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=12),
    ),
    max_size=12,
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=EVENTS)
def test_no_event_however_odd_makes_a_look_at_a_run_fail(tmp_path, events):
    (tmp_path / "events").mkdir(exist_ok=True)
    lines = [json.dumps({"t": t, "kind": kind, "process": "p", **facts}) for kind, t, facts in events]
    (tmp_path / "events/p.jsonl").write_text("\n".join(lines) + "\n")
    look_everywhere(tmp_path)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_files_of_a_run_never_make_a_look_fail(small, data):
    names = ["run.json", "phases.json", "ledger.sqlite", "evals/before.parquet", "evals/after.parquet", "config.toml"]
    names += [f"events/{name}.jsonl" for name in ("conductor", "learner", "engine-0")]
    path = small / data.draw(st.sampled_from(names))
    whole = path.read_bytes()
    content = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 5))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        look_everywhere(small)
        pair(small / "evals")
    finally:
        path.write_bytes(whole)
