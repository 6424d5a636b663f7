"""How many engines a learner needs, by formulas and by simulation."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.plan.models import QWEN

from etude import cli
from etude.errors import Exit
from etude.plan import Layout, Shape, Training, device, plan
from etude.plan.balance import balance, variations
from etude.plan.simulation import simulate_steps

SHAPE = Shape(16, 8, turns=4.0, prompt_tokens=2000.0, sampled_tokens=4000.0, tool_tokens=2000.0, tool_s=1.0)
LAYOUT = Layout(learner_ranks=8, engines=4, max_running=256, max_lag=4, training=Training(recompute=True))
H200 = device("h200")


def test_the_balance_is_the_fewest_engines_with_which_the_learner_does_not_wait() -> None:
    found = balance(QWEN, SHAPE, LAYOUT, H200, check=False)
    assert found.engines > 4

    def bound(engines: int) -> str:
        layout = replace(LAYOUT, engines=engines, max_running=64 * engines)
        return plan(QWEN, SHAPE, layout, H200).bound_by

    assert bound(found.engines) == "the learner"
    assert bound(found.engines - 1) == "the engines"
    assert found.ratio == found.engines / 8


def test_half_of_the_rollouts_trained_on_needs_more_engines_and_faster_engines_fewer() -> None:
    given = (SHAPE, LAYOUT, H200, H200)
    changes = variations(SHAPE)
    plain, half, faster = (
        balance(QWEN, *changes[name](given), check=False).engines
        for name in ("as given", "half of the rollouts trained on", "decoding at 4/3 of its share")
    )
    assert faster < plain < half


def test_rollouts_that_are_too_long_for_any_number_of_engines_have_no_balance() -> None:
    assert balance(QWEN, replace(SHAPE, tool_s=1e5), LAYOUT, H200, check=False).engines == 0


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.integers(1, 3), st.floats(0.1, 50.0), st.integers(0, 3))
def test_the_simulated_step_of_equal_rollouts_is_that_of_the_bottleneck(
    engines: int, turns: int, learner_s: float, max_lag: int
) -> None:
    """With one rollout for each slot, steps of constant duration and no tools, time is the longest of the parts."""
    per_engine, token_s = 4, 0.01
    shape = Shape(engines, per_engine, float(turns), 0.0, 300.0, 0.0)
    layout = Layout(engines=engines, max_running=per_engine * engines, max_lag=max_lag)
    found = simulate_steps(shape, layout, lambda _: token_s, 0.0, learner_s=learner_s, spread=0.0)
    rollout_s = 300 * token_s
    expected = max(rollout_s, learner_s) if max_lag else rollout_s + learner_s
    assert found == pytest.approx(expected, rel=0.02)


def test_rollouts_of_different_lengths_take_longer_without_lag_and_lag_hides_it() -> None:
    def step_s(spread: float, max_lag: int) -> float:
        shape = Shape(8, 8, 1.0, 0.0, 300.0, 0.0)
        layout = Layout(engines=4, max_running=64 * (max_lag + 1), max_lag=max_lag)
        return simulate_steps(shape, layout, lambda n: 0.01 * n, 0.0, learner_s=1.0, spread=spread)

    assert step_s(0.8, 0) > 1.1 * step_s(0.0, 0)
    assert step_s(0.8, 2) < step_s(0.8, 0)


def test_the_command_says_how_many_engines_production_can_lend(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet, config = tmp_path / "fleet.toml", tmp_path / "config.toml"
    fleet.write_text("[fleet]\nengines = 3\n[traffic]\nrequests_s = 0.01\n")
    config.write_text("")
    argv = ["plan", str(config), "--hardware", "h200", "--production", str(fleet), "--json"]
    assert cli.main(argv) == Exit.DONE
    found = json.loads(capsys.readouterr().out)["production"]
    assert found["engines"] == 3
    assert 1.5 < found["lent"] <= 2.0
    fleet.write_text("[fleet]\nengine = 3\n")
    assert cli.main(argv) != Exit.DONE
    assert "did you mean 'fleet.engines'" in capsys.readouterr().err


def test_a_balance_on_the_cpu_of_this_machine_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("")
    assert cli.main(["plan", str(tmp_path / "config.toml"), "--balance"]) != Exit.DONE
    assert "--hardware h200" in capsys.readouterr().err
