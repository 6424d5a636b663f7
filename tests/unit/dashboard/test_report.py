from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from etude.dashboard import RunView, write_report
from etude.dashboard.panels import PANELS, correction, parity, replay
from etude.dashboard.plot import Scale, Series, bar_chart, domain, line_chart, ticks
from etude.dashboard.report import messages, pair
from etude.errors import RunError, StoreError
from etude.evals import EvalRow, write_rows
from etude.records.rollout import TurnKind
from etude.records.view import RolloutView, Trained, TurnView, transcript
from etude.records.wire import to_json

VOID = {"meta", "br", "path", "line", "circle", "rect"}


class Checker(HTMLParser):
    """Every element is closed in order; notes each element with its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag in VOID and (not self.open or self.open[-1] != tag):
            return
        assert self.open.pop() == tag


def checked(text: str) -> Checker:
    checker = Checker()
    checker.feed(text)
    checker.close()
    assert checker.open == []
    return checker


@pytest.fixture
def report(finished) -> str:
    return write_report(finished).read_text()


def test_the_report_is_one_self_contained_page(report):
    seen = checked(report).seen
    assert not [tag for tag, _ in seen if tag in ("script", "link", "img", "iframe", "object")]
    assert not [a for _, a in seen for name in a if name in ("src", "href") or name.startswith("on")]
    assert "@import" not in report
    assert "url(" not in report


def test_the_report_has_a_plot_for_every_panel_of_a_full_run(report):
    titles = re.findall(r"<h3>([^<]+)</h3>", report)
    expected = [
        *("Solve rate", "Groups without signal", "Length of a rollout", "Utilisation", "Regions", "Lag"),
        *("Where a step&#39;s time goes", "Weights on the wire", "Pauses", "Parity", "Clipped and rerouted"),
        *(
            "With and without replay",
            "What corrections cut",
            "Entropy",
            "Gradient norm",
            "Mid-training loss",
            "Copy probe",
        ),
    ]
    assert titles == expected
    assert report.count("<svg") == len(expected) == sum(len(panels) for _, panels in PANELS)


def test_the_headline_is_the_held_out_result_with_its_intervals(report):
    assert "Held-out solve rate on 512 tasks" in report
    assert ">0.31</span>" in report
    assert ">0.94</span>" in report
    assert "0.919 to 0.961" in report
    assert "oracle agent 1.00, random agent 0.02" in report


def test_everything_a_run_wrote_is_escaped(report):
    assert "<script>" not in report
    assert "&lt;script&gt;" in report  # in the config
    assert "&lt;i&gt;method&lt;/i&gt;" in report  # a family's name
    assert "A &lt;b&gt;fast&lt;/b&gt; one" in report  # the host
    assert "&lt;4 passed&gt;" in report  # a tool's output


def test_a_report_written_again_is_the_same(finished, report):
    assert write_report(finished).read_text() == report
    assert sorted(p.name for p in finished.glob("report*")) == ["report.html"]


def test_the_report_of_a_run_that_never_came_to_rl_leaves_out_what_is_missing(writer):
    writer.everything(until="mid-training")
    text = write_report(writer.path).read_text()
    checked(text)
    assert "Mid-training loss" in text
    assert "Solve rate" not in text
    assert "before and after" not in text


def test_the_report_shows_the_cost_of_replay_and_corrections_if_there_was_any(writer):
    still = {"k3": 1e-4, "ratio_max": 0.1, "live_k3": None, "live_ratio_max": None, "cut_share": 0.0}
    writer.event(1.0, "conductor", "rl.step", step=1, **still, dropped_share=0.0)
    writer.event(2.0, "conductor", "rl.step", step=2, **still)  # of an etude that knew no corrections
    view = RunView(writer.path)
    assert replay(view) is None
    assert correction(view) is None
    cut = {"live_k3": 2e-4, "live_ratio_max": 0.3, "cut_share": 0.0, "dropped_share": 0.25}
    writer.event(3.0, "conductor", "rl.step", step=3, **{**still, **cut})
    view.refresh()
    for made, words in (
        (replay, ("k3, replayed", "k3, live", "max |r − 1|, replayed", "max |r − 1|, live")),
        (correction, ("cut weights", "dropped tokens", "25 %")),
    ):
        panel = made(view)
        assert panel is not None
        checked(panel.svg)
        for word in words:
            assert word in panel.svg + panel.legend


def test_numbers_that_are_zero_are_said_where_they_cannot_be_drawn(writer):
    for step in (1, 2, 3):
        writer.event(1.0, "conductor", "engine.probe", engine="engine-0", step=step, ratio_max=0.0)
        writer.event(1.0, "conductor", "rl.step", step=step, k3=0.0)
    panel = parity(RunView(writer.path))
    assert panel is not None
    assert panel.svg == ""
    assert panel.note.endswith("Not drawn: probe: 0 at all 3 versions; k3: 0 at all 3 steps.")
    writer.event(2.0, "conductor", "rl.step", step=4, k3=1e-4)
    panel = parity(RunView(writer.path))
    assert panel is not None
    checked(panel.svg)
    assert "probe" not in panel.legend
    assert panel.note.endswith("Not drawn: probe: 0 at all 3 versions; k3: 0 at 3 of 4 steps.")


def test_the_report_shows_the_action_of_an_alarm(writer):
    def said() -> str:
        panel = parity(RunView(writer.path))
        assert panel is not None
        return panel.note

    writer.event(1.0, "conductor", "rl.step", step=1, k3=1e-4)
    assert "larms" not in said()
    writer.event(2.0, "conductor", "parity.alarm", engine="engine-0", step=1, k3=1e-4, ratio_max=0.1, defence="")
    assert said().endswith("Alarms that were only reported: 1.")
    for step, defence in ((2, "replay"), (5, "truncated")):
        writer.event(3.0, "conductor", "parity.alarm", engine="engine-0", step=step, defence=defence)
    assert said().endswith("The run fell back to replay at step 2, to truncated at step 5.")


def test_a_report_of_nothing_is_an_error(tmp_path):
    with pytest.raises(RunError, match="no run at"):
        write_report(tmp_path / "nothing")


def test_a_report_that_cannot_be_written_is_a_store_error(finished):
    (finished / "report.html").mkdir()
    with pytest.raises(StoreError, match="cannot be written"):
        write_report(finished)
    assert not (finished / "report.tmp").exists()


def test_the_task_that_is_shown_failed_before_and_is_solved_after(writer):
    rows = {
        "before": [("a", 1.0, "[user] x"), ("b", 0.0, "[user] y"), ("b", 0.0, "[user] y2"), ("c", 0.0, "[user] z")],
        "after": [("a", 1.0, "[user] x"), ("b", 1.0, "[user] y\n[call] submit"), ("c", 0.5, "[user] z")],
    }
    writer.transcripts(rows)
    found = pair(writer.path / "evals")
    assert found.task_id == "b"
    assert (found.before.reward, found.after.reward) == (0.0, 1.0)
    assert [m.role for m in messages(found.after.transcript)] == ["user", "call"]


def view(number: int, reply: str, *, parent: int | None = None, **more: Any) -> TurnView:
    facts = {"kind": TurnKind.ACT, "start": None, "num_new": 3, "num_prompt": 7, "num_sampled": 2, "num_cached": 5}
    shown = {"prompt": f"[user] <{number}>", "reply": f"[assistant] {reply}", "stop_reason": "stop", "engine": "e"}
    return TurnView(**{"number": number, "parent": parent, "steps": (3,), **facts, **shown, **more})


def test_all_conversations_of_a_rollout_are_shown_as_a_tree_that_can_be_closed(writer):
    turns = (
        view(0, "read", trained=(Trained(row=4, num_tokens=2, low=-0.5, high=-0.5),)),
        view(1, "keys a", parent=0, kind=TurnKind.SUMMARY),
        view(2, "first", prompt="[user] go on: keys a"),
        view(3, "again", parent=2),
        view(4, "other", parent=2),
    )
    rows = {"before": 0.0, "after": 1.0}
    for name, reward in rows.items():
        row = EvalRow(
            task_id="t", rollout_id=f"{name}0.0", family="f", problem="t", outcome="graded", reward=reward,
            ending="submitted", reason="", turns=5, sampled=10, malformed=0, wall_s=1.0, tool_s=0.1,
            transcript=transcript(turns), tree=to_json(turns).decode(),
        )  # fmt: skip
        write_rows(writer.path / "evals" / f"{name}.parquet", [row])
    trained = RolloutView(rollout_id="g7.1", source="training", task_id="t", step=3, reward=0.5, turns=turns)
    text = write_report(writer.path, [trained]).read_text()
    seen = checked(text).seen
    opened = [attributes for tag, attributes in seen if tag == "details"]
    assert len([one for one in opened if one.get("class") == "branch" and "open" in one]) == 3 * 3
    assert len([one for one in opened if str(one.get("class")).startswith("turn")]) == 3 * 5
    for words in (
        "conversation 2: goes on from the summary of turn 1",
        "branch from turn 2",
        "prompt 7 (5 cached), sampled 2 · step 3 · trained 2 × -0.5 (row 4)",
        "<pre>&lt;3&gt;</pre>",
        "keys a",
        "g7.1",
    ):
        assert words in text


def test_a_tree_that_cannot_be_read_leaves_the_transcript(writer):
    writer.transcripts({"before": [("b", 0.0, "[user] y")], "after": [("b", 1.0, "[user] yes")]})
    for name in ("before", "after"):
        path = writer.path / "evals" / f"{name}.parquet"
        pq.write_table(pq.read_table(path).append_column("tree", pa.array(["{torn"])), path)
    assert "<pre>yes</pre>" in write_report(writer.path).read_text()


def test_no_pair_is_shown_where_nothing_was_learned(writer):
    writer.transcripts({"before": [("a", 0.0, "x")], "after": [("a", 0.0, "x")]})
    assert pair(writer.path / "evals") is None
    assert pair(writer.path / "nowhere") is None


@given(st.text(max_size=300))
def test_any_text_has_messages_and_loses_nothing_but_space(text):
    kept = "".join(f"[{m.role}]{m.text}" if m.role else m.text for m in messages(text))
    assert re.sub(r"\s", "", kept) == re.sub(r"\s", "", text)


@given(st.text(), st.lists(st.tuples(st.floats(-1e300, 1e300), st.floats(-1e300, 1e300)), max_size=30), st.booleans())
@example("", [(0.0, 5e-324)], True)
@example("", [(0.0, 5e-324), (1.0, 1.0)], True)
@example("", [(0.0, 1e17), (1.0, 1.0000000000000002e17)], False)
@example("", [(0.0, 0.0), (5e-324, 5e-324)], False)
def test_any_series_gives_a_sound_plot_within_its_frame(name, points, log):
    svg = line_chart([Series(name, points, 1)], title=name, x_label=name, log=log)
    for tag, attributes in checked(svg).seen:
        if tag == "circle":
            assert 0 <= float(attributes["cx"]) <= 560
            assert 0 <= float(attributes["cy"]) <= 230
    checked(bar_chart([(name, [y for _, y in points])], [name] * len(points), title=name, x_label=name))


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9), st.integers(2, 9))
def test_ticks_are_few_round_and_inside(low, width, count):
    found = ticks(low, low + width, count)
    assert len(found) <= count + 2
    assert all(low - 1e-6 * width - 1e-9 * abs(low) <= t <= low + width * (1 + 1e-6) + 1e-9 * abs(low) for t in found)


@given(st.lists(st.floats(1e-12, 1e12), min_size=1), st.booleans(), st.booleans())
def test_a_domain_holds_all_its_values(values, zero, log):
    low, high = domain(values, zero=zero, log=log)
    assert low <= min(values) * (1 + 1e-9)
    assert high >= max(values) * (1 - 1e-9)
    assert low < high
    scale = Scale(low, high, 0.0, 100.0, log)
    assert all(0 <= scale(v) <= 100 for v in values)


def test_the_view_writes_nothing(finished):
    before = {p: p.stat().st_mtime_ns for p in finished.rglob("*") if p.is_file()}
    RunView(finished).refresh()
    assert {p: p.stat().st_mtime_ns for p in finished.rglob("*") if p.is_file()} == before
