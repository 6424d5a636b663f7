"""A gateway lends its idle engines to the rollouts of a run, and takes them back when its users need them."""

from __future__ import annotations

import pytest
from benchmarks.production.lend_run import measure


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_gateway_lends_engines_to_a_run_and_takes_them_back_under_load() -> None:
    found = measure(rounds=2)
    assert found["requests"] > 0
    assert (found["failed"], found["wrong"], found["invalid"]) == (0, 0, 0), found
    assert found["rollouts_of"].keys() & {"serve-0", "serve-1"}, found
    assert len(found["hand_back_s"]) >= 3, "two under load, one after the end of the run"
    assert found["audit"].startswith("0 lost, 0 trained twice, 0 slots leaked;"), found
    assert found["branches_left"] == ["stable"]
