"""Lanes of engines from elsewhere."""

from __future__ import annotations

from etude.dashboard.panels import fleet
from etude.dashboard.regions import engines, rows
from etude.dashboard.run_view import RunView

T0 = 1000.0


def told(writer, name, states, loads):
    for t, state in states:
        writer.event(T0 + t, "conductor", "fleet.state", engine=name, region=f"of {name}", state=state, url="")
    for t, state, step, running in loads:
        facts = {"state": state, "step": step, "num_running": running, "max_sequences": 10}
        writer.event(T0 + t, "conductor", "fleet.load", engine=name, region=f"of {name}", **facts)


def test_a_lane_is_empty_while_an_engine_is_lost_and_half_full_while_it_catches_up(writer):
    told(
        writer,
        "far",
        [(0, "catching-up"), (2, "serving"), (6, "lost"), (8, "catching-up"), (9, "serving")],
        [
            (1, "catching-up", None, 0),
            (2, "serving", 3, 5),
            (4, "serving", 4, 5),
            (6, "lost", 4, 5),
            (9, "serving", 8, 0),
        ],
    )
    [far] = engines(RunView(writer.path))
    assert (far.name, far.region) == ("far", "of far")
    state, running, version = rows([far], T0, T0 + 10)
    assert state.bars == [(0, 2, 0.5), (2, 6, 1.0), (8, 9, 0.5), (9, 10, 1.0)]
    assert running.bars == [(2, 4, 0.5), (4, 6, 0.5)]
    assert version.bars == [(2, 4, 3 / 8), (4, 6, 0.5), (8, 9, 0.5), (9, 10, 1.0)]
    assert (state.note, running.note, version.note) == ("serving", "20% of its capacity", "step 8")


def test_an_engine_that_never_held_a_version_has_a_lane_and_no_run_without_any_has_one(writer):
    writer.event(T0, "conductor", "session")
    assert fleet(RunView(writer.path)) is None
    told(writer, "<b>", [(1, "catching-up")], [(2, "catching-up", -1, 0)])
    panel = fleet(RunView(writer.path))
    assert panel is not None
    assert "&lt;b&gt;" in panel.svg
    assert "none" in panel.svg
