"""The fifty kills of `benchmarks.run.kills_long_steps`, in small: real processes, a learner that takes its time."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.run.kills_long_steps import played


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_kills_in_a_run_of_long_steps_lose_nothing_and_make_nothing_invalid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "")
    found = played(tmp_path, kills=8, steps=4, step_s=3.0, seed=1)
    assert found is not None
    assert (found["exit_code"], found["lost"], found["trained_twice"], found["leaked_slots"]) == (0, 0, 0, 0)
    assert found["finished"] is True
    assert found["kills"] == 8
    assert found["invalid"] == {}
    assert found["train_s_least"] >= found["turn_deadline_s"]
