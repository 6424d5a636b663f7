"""The budget of a run: when an alarm is raised, and what is taken."""

from __future__ import annotations

import pytest

from etude.config import build
from etude.errors import ConfigError
from etude.evals.parity import Parity, compare
from etude.loop.parity import Defence, OverBudget, ParityConfig, ParityMonitor
from etude.numerics.config import ComputeDtype

F32, BF16 = ComputeDtype.FLOAT32, ComputeDtype.BFLOAT16


def off(by: float) -> Parity:
    return compare([-1.0] * 50, [-1.0 - by] * 50)


def test_in_exact_mode_one_bit_is_an_alarm() -> None:
    watch = ParityMonitor(ParityConfig(), exact=True, dtype=F32)
    assert watch.record("a", off(0)) is None
    alarm = watch.record("a", off(1e-7))
    assert alarm is not None
    assert (alarm.engine, alarm.budget.k3, alarm.defence) == ("a", 0.0, None)


def test_in_native_mode_differences_within_the_budget_of_the_dtype_are_no_alarm() -> None:
    usual, mine = ParityConfig(patience=1), ParityConfig(patience=1, k3=1e-9)
    assert ParityMonitor(usual, exact=False, dtype=F32).record("a", off(1e-6)) is None
    assert ParityMonitor(usual, exact=False, dtype=F32).record("a", off(1e-2)) is not None
    assert ParityMonitor(usual, exact=False, dtype=BF16).record("a", off(1e-2)) is None
    assert ParityMonitor(mine, exact=False, dtype=BF16).record("a", off(1e-2)) is not None


def test_patience_counts_an_engines_probes_in_a_row() -> None:
    watch = ParityMonitor(ParityConfig(), exact=False, dtype=BF16)
    seen = [
        watch.record(*probe) for probe in [("a", off(1)), ("b", off(1)), ("a", off(0)), ("a", off(1)), ("a", off(1))]
    ]
    assert seen == [None] * 5
    assert watch.record("a", off(1)) is not None
    assert watch.record("a", off(float("inf"))) is not None, "what is no number is never waited for"


def test_falling_back_takes_the_first_defence_whose_budget_holds() -> None:
    small = ParityMonitor(ParityConfig(over_budget=OverBudget.FALL_BACK), exact=True, dtype=F32)
    alarm = small.record("a", off(1e-6))
    assert alarm is not None
    assert alarm.defence is small.defence is Defence.REPLAY
    assert small.record("a", off(1e-6)) is None
    large = ParityMonitor(ParityConfig(over_budget=OverBudget.FALL_BACK), exact=True, dtype=F32)
    alarm = large.record("a", off(0.5))
    assert alarm is not None
    assert alarm.defence is Defence.TRUNCATED
    assert large.record("a", off(0.5)) is None, "what is corrected for is no alarm"


def test_in_exact_mode_what_the_learners_own_weights_sampled_is_held_to_one_too() -> None:
    watch = ParityMonitor(ParityConfig(over_budget=OverBudget.FALL_BACK), exact=True, dtype=F32)
    assert watch.trained(None) is None
    assert watch.trained(0.0) is None
    alarm = watch.trained(1e-6)
    assert alarm is not None
    assert (alarm.engine, alarm.defence) == ("fresh rollouts", Defence.REPLAY)
    assert watch.trained(1e-2) is None, "with replay rounding is none, and a maximum says nothing of a mean"


def test_over_budget_report_takes_no_defence_and_alarms_at_each_probe() -> None:
    watch = ParityMonitor(ParityConfig(over_budget=OverBudget.REPORT), exact=True, dtype=F32)
    for _ in range(2):
        alarm = watch.record("a", off(1))
        assert alarm is not None
        assert alarm.defence is None
    assert watch.defence is Defence.NONE


@pytest.mark.parametrize("wrong", [{"k3": -1.0}, {"patience": 0}, {"over_budget": "stopp"}, {"k33": 1.0}])
def test_a_wrong_budget_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        build(ParityConfig, wrong)
