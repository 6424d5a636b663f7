"""The version-matched probe: which engine it asks, what it reports, and what an alarm does."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.clock import run_at_once

from etude.errors import EngineError, ParityError
from etude.inference.errors import EngineGone, Unauthorised
from etude.loop.parity import Defence, OverBudget, ParityConfig, ParityMonitor
from etude.loop.parity_probe import ParityProbe, Unreachable, probe_text
from etude.numerics.config import ComputeDtype
from etude.records import Version
from etude.telemetry import Telemetry, read_events

VERSION = Version(step=3, incarnation="0a1b2c3d", digest="ab" * 32)
MINE = [-1.0, -2.0, -0.5]
CHAT: Any = SimpleNamespace(vocab_size=200)
PUBLISHED: Any = SimpleNamespace(version=VERSION)


class Engine:
    """What the probe asks of an engine."""

    def __init__(
        self, says: list[float] | EngineError, version: Version = VERSION, *, takes_s: float = 0.0, trouble: str = ""
    ) -> None:
        self.says, self.version, self.takes_s, self.trouble = says, version, takes_s, trouble

    async def adopt(self, step: int, *, deadline_s: float) -> Version:
        assert step == VERSION.step
        await asyncio.sleep(min(self.takes_s, deadline_s))
        self.takes_s -= deadline_s
        if self.takes_s > 0.0:
            raise EngineError(f"did not reach step {step}", hint="later")
        if isinstance(self.says, EngineError):
            raise self.says
        return self.version

    async def verify(self, token_ids: list[int]) -> tuple[Version, list[float]]:
        assert len(token_ids) == 128
        assert not isinstance(self.says, EngineError)
        return self.version, self.says

    async def info(self) -> Any:
        return SimpleNamespace(parity="class-a", trouble=self.trouble)


def probed(
    tmp_path: Path, *engines: Engine, exact: bool = True, **settings: Any
) -> tuple[list[Defence], list[dict[str, Any]]]:
    """What the learner was told to take, and the events."""
    taken: list[Defence] = []

    config = ParityConfig(**settings)
    telemetry = Telemetry(tmp_path / "conductor.jsonl", process="conductor")
    watch = ParityMonitor(config, exact=exact, dtype=ComputeDtype.FLOAT32)

    async def defend(defence):
        taken.append(defence)

    probe = ParityProbe(CHAT, config, watch, telemetry, defend)
    probe.learner_class = "class-b"
    run_at_once(probe.run({f"e{i}": e for i, e in enumerate(engines)}, PUBLISHED, MINE))  # type: ignore[misc]
    telemetry.close()
    return taken, list(read_events(tmp_path))


def test_equal_numbers_are_told_and_nothing_else_happens(tmp_path: Path) -> None:
    taken, events = probed(tmp_path, Engine(MINE))
    assert taken == []
    assert [(e["kind"], e["ratio_max"], e["same_class"]) for e in events] == [("engine.probe", 0.0, False)]


def test_one_bit_ends_a_run_in_exact_mode_and_both_classes_are_named(tmp_path: Path) -> None:
    with pytest.raises(ParityError, match="compute different probabilities with v000003") as raised:
        probed(tmp_path, Engine([-1.0, -2.0, -0.5000001]))
    assert "'class-a', the learner's 'class-b'" in raised.value.facts
    assert "numerics.mode" in raised.value.hint


def test_an_engine_over_the_budget_of_its_dtype_ends_the_run_by_name(tmp_path: Path) -> None:
    rounded = Engine([-1.000001, -2.0, -0.5])  # in native mode that is allowed
    assert probed(tmp_path, rounded, exact=False, patience=1)[0] == []
    wrong = Engine([-1.5, -2.0, -0.1])  # other weights than the version's, whatever bytes it says that it holds
    with pytest.raises(ParityError, match="e0 and the learner compute different probabilities with v000003"):
        probed(tmp_path, wrong, exact=False, patience=1)


def test_a_run_that_falls_back_has_the_learner_take_a_defence(tmp_path: Path) -> None:
    off = Engine([-1.0, -2.0, -0.5000001])
    taken, events = probed(tmp_path, off, over_budget=OverBudget.FALL_BACK)
    assert taken == [Defence.REPLAY]
    assert events[-1]["kind"] == "parity.alarm"
    assert events[-1]["defence"] == "replay"


def test_a_run_that_only_reports_goes_on(tmp_path: Path) -> None:
    taken, events = probed(tmp_path, Engine([-1.0, -2.0, -0.4]), over_budget=OverBudget.REPORT)
    assert taken == []
    assert events[-1]["defence"] == ""


def test_numbers_that_are_none_end_any_run(tmp_path: Path) -> None:
    with pytest.raises(ParityError):
        probed(tmp_path, Engine([-1.0, math.nan, -0.5]), exact=False, over_budget=OverBudget.FALL_BACK)


def test_an_engine_that_is_gone_or_moved_on_is_passed_over(tmp_path: Path) -> None:
    gone = EngineGone("no engine answers", hint="see")
    newer = Version(step=4, incarnation="0a1b2c3d", digest="cd" * 32)
    _, events = probed(tmp_path, Engine(gone), Engine([-9.0, -9.0, -9.0], newer), Engine(MINE))
    assert [e["engine"] for e in events] == ["e2"]


def test_engines_that_are_there_and_cannot_come_are_told_together(tmp_path: Path) -> None:
    late = EngineError("did not reach step 3", hint="see")
    with pytest.raises(Unreachable, match="no engine can load"):
        probed(tmp_path, Engine(late, trouble="its chain is damaged"), Engine(late, trouble="so is mine"))
    probed(tmp_path, Engine(late, trouble="its chain is damaged"), Engine(MINE))


def test_an_engine_that_takes_ten_minutes_to_fetch_a_version_is_probed_then(tmp_path: Path) -> None:
    _, events = probed(tmp_path, Engine(MINE, takes_s=600.0), Engine(MINE, takes_s=1_200.0))
    assert [e["engine"] for e in events] == ["e0", "e1"]


def test_engines_that_never_come_end_the_wait(tmp_path: Path) -> None:
    with pytest.raises(Unreachable, match="did not reach step 3"):
        probed(tmp_path, Engine(MINE, takes_s=1e9))


def test_engines_with_another_token_are_not_told_as_damage_to_the_weights(tmp_path: Path) -> None:
    refused = Unauthorised("the bearer token is missing or wrong", hint="see")
    with pytest.raises(Unreachable) as error:
        probed(tmp_path, Engine(refused), Engine(refused))
    assert error.value.facts.startswith("e0: the bearer token is missing or wrong")
    assert "ETUDE_TOKEN" in error.value.hint


def test_the_probe_text_has_128_different_tokens() -> None:
    assert len(set(probe_text(CHAT))) == 128
