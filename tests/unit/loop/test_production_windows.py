"""Which rollouts of production steps may be trained on again, after the learner has gone back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.small_rollouts import Kit, finishing

from etude.experience import Ledger, plan_batch, record_batch
from etude.experience.transitions import State
from etude.loop import production
from etude.loop.production import NOT_PROMOTED, ProductionTrainer
from etude.loop.production_windows import Window, Windows
from etude.records import Version

DEPLOYED = Version(2, "a" * 8, "b" * 64)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    opened = Ledger(tmp_path / "ledger.sqlite", capacity=32)
    yield opened
    opened.close()


def batched(ledger: Ledger, traces: Path, *group_ids: str) -> None:
    """Record a batch of these groups as step 3, which no manifest lists."""
    plan = plan_batch([ledger.group(one) for one in group_ids], batch_id="b000003", step=3, max_lag=9)
    _, batch = record_batch(traces, plan, Kit().read)
    ledger.batch(batch)


def states(ledger: Ledger) -> dict[str, set[tuple[State, str]]]:
    found = dict[str, set[tuple[State, str]]]()
    for row in ledger.rows():
        found.setdefault(row.group_id, set()).add((row.state, row.reason if row.state is State.QUARANTINED else ""))
    return found


def test_a_simulated_group_that_an_earlier_window_left_is_free_again_after_a_step_of_this_window_is_undone(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(production, "weights_store", lambda run: None)
    monkeypatch.setattr(production, "LineageSteps", lambda store: Lineage())
    finish = finishing(ledger)
    windows = SimpleNamespace(prefix="production-")
    windows.is_episode = lambda one: Windows.is_episode(windows, one)  # type: ignore[arg-type]
    windows.number = lambda one: Windows.number(windows, one)  # type: ignore[arg-type]
    trainer = SimpleNamespace(ledger=ledger, run=tmp_path, windows=windows)

    def reconcile(first: int) -> None:
        trainer._window = Window(number=1, first=first, per_step=1, base=DEPLOYED)
        ProductionTrainer._reconcile(trainer, DEPLOYED)  # type: ignore[arg-type]

    for name in ("production-g000000", "g000001", "g000002"):
        finish(name, [1.0, 0.0])
    batched(ledger, tmp_path / "1", "production-g000000", "g000001")  # of the first window, which leaves g000002 open
    finish("production-g000003", [1.0, 0.0])
    reconcile(first=3)  # the second window goes back to the deployed version
    spent, free = {(State.QUARANTINED, NOT_PROMOTED)}, {(State.GRADED, "")}
    assert states(ledger) == {
        "production-g000000": spent,
        "g000001": spent,
        "g000002": free,
        "production-g000003": free,
    }
    batched(ledger, tmp_path / "2", "production-g000003", "g000002")
    reconcile(first=3)  # the learner was killed before it committed the step
    assert states(ledger)["g000002"] == states(ledger)["production-g000003"] == free
    assert states(ledger)["g000001"] == spent


class Lineage(list[tuple[int, list[str]]]):
    """The steps of a learner that was set back to the deployed version: none after it."""

    def unread_up_to(self) -> int:
        return 0
