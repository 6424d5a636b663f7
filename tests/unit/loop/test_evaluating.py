"""What an evaluation tells while it is under way."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from etude.loop.evaluating import played
from etude.loop.room import Limit
from etude.telemetry import Telemetry, read_events


def test_an_evaluation_tells_its_begin_and_its_end_however_quick_it_is(tmp_path: Path) -> None:
    crew: Any = SimpleNamespace(max_running=Limit(2))
    running, most = 0, 0

    async def one(spec: Any) -> Any:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return spec

    telemetry = Telemetry(tmp_path / "conductor.jsonl", process="conductor")
    specs: Any = list(range(7))
    counted: list[None] = []
    each = lambda: counted.append(None)  # noqa: E731
    assert asyncio.run(played(crew, specs, one, name="before", telemetry=telemetry, each=each)) == specs
    assert len(counted) == 7
    assert asyncio.run(played(crew, [], one, name="oracle", telemetry=telemetry)) == []
    telemetry.close()
    said = [(e["name"], e["done"], e["total"]) for e in read_events(tmp_path) if e["kind"] == "eval.progress"]
    assert (said[0], said[-2], said[-1]) == (("before", 0, 7), ("before", 7, 7), ("oracle", 0, 0))
    assert most == 2
