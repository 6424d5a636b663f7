"""What is said of a child that does not come up."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from etude.errors import DeadlineExceeded, EtudeError
from etude.loop.processes import READY_S, Child, Role, Supervisor
from etude.telemetry import Telemetry


def brought_up(tmp_path: Path, program: str, ready_s: float) -> None:
    """A child that runs a program and is never ready."""

    async def never(_: Child) -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        telemetry = Telemetry(tmp_path / "events.jsonl", process="test")
        supervisor = Supervisor(telemetry)
        child = Child("learner", ["-c", program], logs=tmp_path / "logs", telemetry=telemetry)
        try:
            await supervisor.add(child, Role(never, never, ready_s=ready_s))
        finally:
            await supervisor.close()
            telemetry.close()

    asyncio.run(main())


def test_a_child_that_lives_and_is_not_ready_is_told_with_its_log_and_what_it_has_done(tmp_path: Path) -> None:
    with pytest.raises(DeadlineExceeded, match="waited for learner to be ready") as caught:
        brought_up(tmp_path, "import time; time.sleep(3600)", 0.2)
    assert "it is alive and has used" in caught.value.facts
    assert str(tmp_path / "logs" / "learner.log") in caught.value.hint


def test_a_child_that_dies_is_not_waited_for(tmp_path: Path) -> None:
    with pytest.raises(EtudeError, match="learner ended while starting") as caught:
        brought_up(tmp_path, "raise SystemExit('no room')", READY_S)
    assert "no room" in caught.value.facts


def test_no_children_are_not_waited_for(tmp_path: Path) -> None:
    async def story() -> None:
        async with asyncio.timeout(10):
            await Supervisor(Telemetry(tmp_path / "events.jsonl", process="test")).add_all([])

    asyncio.run(story())
