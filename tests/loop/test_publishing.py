"""Publishing beside a step: the real conductor, ledger and learner over their socket, with a store that is held up.

Only sampling is played: rollouts are made up, and there is no engine to adopt or to probe.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.played_run import PlayedRun

from etude.errors import StoreError
from etude.experience import Ledger
from etude.loop import learner
from etude.loop.conductor import Conductor
from etude.stores import DirectoryStore
from etude.telemetry import read_events

pytestmark = pytest.mark.timeout(1800)


class Held(DirectoryStore):
    """A store that puts the manifest of version 1 when it is told to, or refuses it then."""

    opened = threading.Event()
    full = False

    def put(self, key: str, data: bytes) -> None:
        if key.startswith("manifests/policy/v000001-"):
            assert self.opened.wait(600.0), "nobody opened it"
            if self.full:
                raise StoreError(f"object {key!r} cannot be written", "No space left on device", hint="free disk space")
        super().put(key, data)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> type[Held]:
    """The learner's store holds version 1 back until it is opened."""
    monkeypatch.setattr(learner, "weights_store", lambda run: Held(run / "weights"))
    monkeypatch.setattr(Held, "opened", threading.Event())
    monkeypatch.setattr(Held, "full", False)
    return Held


@pytest.fixture
def run(game: Any, tmp_path: Path) -> Callable[..., PlayedRun]:
    """A run of some steps that is checkpointed at its end only."""

    def make(*sets: str) -> PlayedRun:
        return PlayedRun.create(tmp_path / "r", game, "rl.checkpoint_every=50", "evals.every=50", *sets)

    return make


async def some_turns(conductor: Conductor) -> None:
    """Whatever the conductor would do now, it has done: each turn is a call to the learner and back."""
    for _ in range(4):
        await conductor._call("ready", bool)


def test_the_next_batch_is_trained_beside_a_publish_and_the_optimiser_step_waits_for_the_commit(
    run: Callable[..., PlayedRun], held: type[Held]
) -> None:
    async def main() -> None:
        this = run("rl.steps=3")
        async with this.conductor() as conductor:
            work = asyncio.create_task(conductor.reinforce())
            await this.until(2, ("end", "forward_backward"))
            await some_turns(conductor)
            assert this.calls.count(("end", "published")) == 1, "the checkpoint that it began with, alone"
            assert this.calls.count(("begin", "optim_step")) == 1
            assert (conductor.step, conductor.trained) == (0, 1)
            assert conductor.ledger.states()["batched"] == 24, "both batches: no version has learned from them yet"
            assert "trained" not in conductor.ledger.states()
            held.opened.set()
            await work
            assert conductor.step == 3
        after = this.calls[this.calls.index(("end", "optim_step")) :]
        committed = after.index(("end", "published"))
        assert after.index(("end", "forward_backward")) < committed < after.index(("begin", "optim_step"))
        offers = [i for i, call in enumerate(this.calls) if call == ("end", "offer")]
        assert len(offers) == 4
        assert all(("begin", "probe") in this.calls[i : i + 2] for i in offers), "of these weights, before others come"
        this.assert_sound(3)
        steps = [e for e in read_events(this.folder / "events") if e["kind"] == "rl.step"]
        assert [e["step"] for e in steps] == [1, 2, 3]
        assert all(e["stall_s"] >= 0 and e["train_s"] > 0 for e in steps)

    asyncio.run(main())


def test_a_publish_that_fails_beside_the_next_batch_ends_the_run_by_name_and_loses_nothing(
    run: Callable[..., PlayedRun], held: type[Held]
) -> None:
    async def main() -> None:
        this = run("rl.steps=3")
        async with this.conductor() as conductor:
            work = asyncio.create_task(conductor.reinforce())
            await this.until(2, ("begin", "forward_backward"))
            held.full = True
            held.opened.set()
            with pytest.raises(StoreError, match=r"v000001.* cannot be written") as caught:
                await work
            assert caught.value.hint == "free disk space"
            assert this.calls.count(("begin", "optim_step")) == 1
            assert conductor.step == 0
            assert "trained" not in conductor.ledger.states()
        held.full = False
        again = PlayedRun(this.folder, this.config)
        async with again.conductor() as conductor:
            await conductor.reinforce()
        again.assert_sound(3)

    asyncio.run(main())


def test_nothing_runs_beside_a_publish_of_a_synchronous_run(run: Callable[..., PlayedRun]) -> None:
    async def main() -> None:
        this = run("rl.steps=2", "experience.max_lag=0")
        async with this.conductor() as conductor:
            await conductor.reinforce()
        work = [call for call in this.calls if call[1] in ("forward_backward", "optim_step", "offer", "published")]
        each = [
            (when, name)
            for name in ("forward_backward", "optim_step", "offer", "published")
            for when in ("begin", "end")
        ]
        assert work == [*each[4:], *each, *each]
        this.assert_sound(2)
        ledger = Ledger.open_readonly(this.folder / "ledger.sqlite")
        assert [version.step for version in ledger.versions()] == [0, 1, 2], "by which lost lineages are known"
        ledger.close()

    asyncio.run(main())
