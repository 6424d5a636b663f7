"""A run that learns from production use: the real ledger, learner, traces and weights, and a real privacy folder."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import signal
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.played_run import PlayedRun
from tests.served_answers import served_answer

from etude.errors import ConfigError, DeadlineExceeded, Exit, RunRefused
from etude.experience import Ledger, read_trace
from etude.experience.groups import Row
from etude.experience.trace_reader import read_step
from etude.experience.traces import PRODUCTION_SCHEME, trace_path
from etude.experience.transitions import State
from etude.loop.group_admission import WITHDRAWN
from etude.loop.production import NO_CONSENT, ProductionTrainer
from etude.loop.production_windows import Windows
from etude.loop.replay import replay_step
from etude.privacy import CaptureWriter, Level, PrivacyFolder, Subject
from etude.production import LearnSettings
from etude.production.episodes import Answer
from etude.production.outcomes import Values
from etude.records import Version, VersionSpan
from etude.run import RunFolder
from etude.tasks import DirectorySource

pytestmark = pytest.mark.timeout(1800)
ACME = Subject.of("acme")
SAMPLER = Version(1, "0" * 8, "0" * 64)  # not the learner's: the log-probabilities are made up
SETTINGS = LearnSettings(outcomes={"kept": 1.0}, episodes=4, settle_s=0.0, user_share=0.5, max_wait_s=1e9)


class Killed(BaseException):
    """What stands for a kill: nothing that is to run after an error runs."""


class AllWithdrawn(DirectorySource):
    """Task folders of which all are withdrawn."""

    def withdrawn(self, task_ids: Collection[str]) -> set[str]:
        return set(task_ids)


class Signals:
    """What users said, by the id of the response."""

    def __init__(self) -> None:
        self.kept = dict[str, float]()

    def values_of(self, answers: Sequence[Answer]) -> dict[Answer, Values]:
        return {one: {"kept": [self.kept[one[0]]]} for one in answers if one[0] in self.kept}


class Product:
    """A finished run, its privacy folder and the signals of its users."""

    def __init__(self, path: Path, game: Any) -> None:
        self.run = PlayedRun.create(path / "the-product", game, "rl.steps=2", "evals.every=50", "experience.max_lag=0")
        self.privacy, self.signals, self.number = path / "privacy", Signals(), 0
        with PrivacyFolder(self.privacy) as folder:
            folder.consent.set(ACME, Level.TRAIN)

    async def finish_rl(self) -> None:
        async with self.run.conductor() as conductor:
            await conductor.reinforce()
        self.run.folder.end_phase("rl", wall_s=1.0)

    def ledger(self) -> Ledger:
        return Ledger.open_readonly(self.run.folder / "ledger.sqlite")

    def serve(self, users: Sequence[str], kept: Sequence[float | None], *, organisation: str = "acme") -> list[str]:
        """Capture an answer for each user, with what it said about it. Returns the ids of the responses."""
        writer, ids = CaptureWriter(self.privacy), list[str]()
        for user, value in zip(users, kept, strict=True):
            self.number += 1
            ids.append(f"{self.number:032x}")
            answer = served_answer(user, said=f"r{self.number}", response_id=ids[-1], at=time.time())
            span = VersionSpan(SAMPLER, len(answer.completion.token_ids))
            logprobs = np.full(len(answer.completion.token_ids), -5.0, np.float32)
            completion = msgspec.structs.replace(answer.completion, spans=(span,), logprobs=logprobs)
            writer.offer(msgspec.structs.replace(answer, completion=completion, organisation=organisation))
            if value is not None:
                self.signals.kept[ids[-1]] = value
        assert writer.close(60)
        return ids

    @contextlib.asynccontextmanager
    async def trainer(self, settings: LearnSettings = SETTINGS) -> AsyncIterator[ProductionTrainer]:
        async with self.run.conductor() as conductor:
            conductor.close()  # its ledger: the trainer writes it now
            with PrivacyFolder(self.privacy) as folder:
                run, config = self.run.folder, self.run.config
                made = Windows(run, config, settings, folder, self.signals, log=print)
                with contextlib.closing(made) as windows:
                    yield ProductionTrainer(windows, conductor.telemetry, conductor.processes)

    async def learn(self, steps: int, settings: LearnSettings = SETTINGS) -> list[tuple[int, Version, dict[str, Any]]]:
        made = list[tuple[int, Version, dict[str, Any]]]()
        async with self.trainer(settings) as trainer, asyncio.timeout(600):
            await trainer.train(steps, poll_s=0.05, on_step=lambda *one: made.append(one), on_wait=lambda _: None)
        return made


@pytest.fixture(scope="module")
def finished(game: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Product]:
    def make(path: Path) -> Product:
        product = Product(path, game)
        asyncio.run(product.finish_rl())
        return product

    return make


def test_a_run_learns_from_signals_replays_to_the_bit_and_trains_on_no_episode_twice(
    finished: Callable[[Path], Product], tmp_path: Path
) -> None:
    product = finished(tmp_path)
    product.serve(["bob", "eve", "ann", "joe"], [1.0, 0.0, 1.0, 0.0])
    product.serve(["zoe"], [None])  # without a signal: not trained on
    product.serve(["bob", "eve", "ann", "joe"], [1.0, 0.0, 0.0, 1.0])
    steps = asyncio.run(product.learn(2))
    assert [step for step, _, _ in steps] == [3, 4]
    assert [facts["reward_mean"] for _, _, facts in steps] == [0.5, 0.5]
    assert [version.step for _, version, _ in steps] == [3, 4]
    assert steps[0][1].digest != steps[1][1].digest
    with contextlib.closing(product.ledger()) as ledger:
        rows = [row for row in ledger.rows() if row.rollout_id.startswith("production-")]
        assert [row.state for row in rows] == [State.TRAINED] * 8
        assert {row.version for row in rows} == {str(version) for _, version, _ in steps}
    product.run.assert_sound(4)
    replayed = replay_step(product.run.folder, 4)
    assert replayed.equal


def test_two_runs_learn_from_one_privacy_folder_each_from_all_of_it(
    finished: Callable[[Path], Product], tmp_path: Path
) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    one, two = finished(tmp_path / "one"), finished(tmp_path / "two")
    two.privacy, two.signals = one.privacy, one.signals
    one.serve(["bob", "eve", "ann", "joe"], [1.0, 0.0, 1.0, 0.0])
    for product in (one, two):
        assert [step for step, _, _ in asyncio.run(product.learn(1))] == [3]
        with contextlib.closing(product.ledger()) as ledger:
            states = [row.state for row in ledger.rows() if row.rollout_id.startswith("production-")]
        assert states == [State.TRAINED] * 4


def test_a_step_waits_for_settled_episodes_and_for_no_more_of_one_user_than_its_share(
    finished: Callable[[Path], Product], tmp_path: Path
) -> None:
    product = finished(tmp_path)
    product.serve(["loud"] * 6, [1.0, 0.0] * 3)
    told = list[str]()

    async def main() -> None:
        async with product.trainer() as trainer:
            work = asyncio.create_task(trainer.train(1, poll_s=0.02, on_step=lambda *_: None, on_wait=told.append))
            async with asyncio.timeout(300):
                while not told:  # noqa: ASYNC110  the other task makes it
                    await asyncio.sleep(0.02)
            assert told == [
                "window 1: 2 of 4 episodes settled, no deadline (6 with a signal that counts, 6 settled, 6 in all)"
            ]
            product.serve(["bob", "eve"], [1.0, 0.0])
            async with asyncio.timeout(600):
                await work

    asyncio.run(main())
    with contextlib.closing(product.ledger()) as ledger:
        assert sum(row.rollout_id.startswith("production-") for row in ledger.rows()) == 4


@pytest.mark.parametrize("when", ["after the rollouts were stored", "after the batch", "after the optimiser step"])
def test_consent_that_is_withdrawn_before_the_commit_takes_every_token_out_of_the_step(
    finished: Callable[[Path], Product], tmp_path: Path, when: str
) -> None:
    product = finished(tmp_path)
    product.serve(["bob", "eve", "ann", "joe"], [1.0, 0.0, 1.0, 0.0])
    call = {
        "after the rollouts were stored": "record",
        "after the batch": "forward_backward",
        "after the optimiser step": "optim_step",
    }[when]
    withdrawn = False

    async def main() -> None:
        nonlocal withdrawn
        async with product.trainer() as trainer, asyncio.timeout(600):
            asked = trainer._call

            async def watched(method: str, kind: Any, *args: object) -> Any:
                nonlocal withdrawn
                found = await asked(method, kind, *args)
                if method == call and not withdrawn:
                    withdrawn = True
                    with PrivacyFolder(product.privacy) as folder:
                        folder.consent.set(Subject.of("acme", "bob"), Level.CAPTURE)
                return found

            trainer._call = watched  # type: ignore[method-assign]
            await trainer.train(1, poll_s=0.02, on_step=lambda *_: None, on_wait=lambda _: None)

    asyncio.run(main())
    assert withdrawn
    with contextlib.closing(product.ledger()) as ledger:
        rows = {row.rollout_id: row for row in ledger.rows() if row.rollout_id.startswith("production-")}
        gone = [row for row in rows.values() if row.state is State.QUARANTINED]
        assert [row.reason for row in gone] == [NO_CONSENT]
        assert sum(row.state is State.TRAINED for row in rows.values()) == 3
    names = product.run.folder / "rollouts"
    assert not list(names.glob(f"{gone[0].rollout_id}*")), "its tokens are deleted"
    recorded = read_trace(trace_path(product.run.folder / "traces", 3))
    assert gone[0].rollout_id not in {sample.rollout_id for sample in recorded.batch.samples}
    assert replay_step(product.run.folder, 3).equal, "the published weights are those of the batch without it"
    product.run.assert_sound(3)


MOMENTS = (
    "captured", "read", "linked", "stored", "recorded", "batched", "forward_backward", "optim_step",
)  # fmt: skip
KINDS = ("its user allows less", "its organisation allows nothing", "it is erased")


def test_whenever_and_however_consent_is_withdrawn_before_the_commit_no_token_is_in_a_version(
    finished: Callable[[Path], Product], tmp_path: Path
) -> None:
    """Withdraws in each of `KINDS` at each of `MOMENTS`, between the captured answer and the commit."""
    product = finished(tmp_path)
    settings = dataclasses.replace(SETTINGS, max_wait_s=0.0, user_share=0.25, max_lag=256)
    now, withdrawn = "", dict[str, Callable[[], None]]()

    def reached(moment: str) -> None:
        if now == moment and (act := withdrawn.pop(moment, None)):
            act()

    def withdraw(kind: str, subject: Subject) -> None:
        with PrivacyFolder(product.privacy) as folder:
            match kind:
                case "its user allows less":
                    folder.consent.set(subject, Level.CAPTURE)
                case "its organisation allows nothing":
                    folder.consent.set(Subject.of(subject.organisation), Level.OFF)
                case _:
                    folder.erase(subject)

    async def main() -> list[tuple[str, str, int]]:
        nonlocal now
        cells = list[tuple[str, str, int]]()
        async with product.trainer(settings) as trainer, asyncio.timeout(1500):
            windows, call, admit = trainer.windows, trainer._call, trainer.windows._admit
            read, write, take = windows._read, windows.files.write, trainer._take

            def watched_read(episodes: Any) -> Any:
                found = read(episodes)
                reached("read")
                return found

            def watched_write(rollout: Any) -> Any:
                reached("linked")
                return write(rollout)

            async def watched_admit(*args: Any) -> Any:
                found = await admit(*args)
                reached("stored")
                return found

            def watched_take(*args: Any) -> None:
                take(*args)
                reached("batched")

            async def watched_call(method: str, kind: Any, *args: object) -> Any:
                found = await call(method, kind, *args)
                reached("recorded" if method == "record" else method)
                return found

            windows._read, windows._admit = watched_read, watched_admit  # type: ignore[method-assign]
            windows.files.write = watched_write  # type: ignore[method-assign]
            trainer._take, trainer._call = watched_take, watched_call  # type: ignore[method-assign]
            for kind in KINDS:
                for number, now in enumerate(MOMENTS):
                    subject = Subject.of(f"org-{KINDS.index(kind)}-{number}", "bob")
                    with PrivacyFolder(product.privacy) as folder:
                        folder.consent.set(Subject.of(subject.organisation), Level.TRAIN)
                        folder.consent.set(subject, Level.TRAIN)
                    product.serve(["bob"], [1.0], organisation=subject.organisation)
                    product.serve(["eve", "ann", "joe"], [1.0, 0.0, 1.0])
                    with PrivacyFolder(product.privacy) as folder:
                        [record] = folder.records.of(folder.keys.names(subject))
                    withdrawn[now] = functools.partial(withdraw, kind, subject)
                    reached("captured")
                    made = list[int]()
                    await trainer.train(
                        1, poll_s=0.02, on_step=lambda step, *_, m=made: m.append(step), on_wait=lambda _: None
                    )
                    assert not withdrawn, (now, kind)
                    cells.append((record.record_id, f"{now}: {kind}", made[0]))
        return cells

    cells = asyncio.run(main())
    assert len(cells) == len(MOMENTS) * len(KINDS)
    with PrivacyFolder(product.privacy) as folder, contextlib.closing(product.ledger()) as ledger:
        rows = {row.rollout_id: row for row in ledger.rows()}
        for record_id, cell, step in cells:
            mine = folder.records.uses([record_id]).get(record_id, set())
            assert all(rows[i].state is State.QUARANTINED for i in mine if i in rows), cell
            assert not [name for i in mine for name in (product.run.folder / "rollouts").glob(f"{i}*")], cell
            trained = {
                one.rollout_id for one in read_trace(trace_path(product.run.folder / "traces", step)).batch.samples
            }
            assert len(trained) == 3, cell
            assert not trained & mine, cell
    product.run.assert_sound(cells[-1][2])


def test_a_change_of_consent_while_a_version_is_published_waits_and_holds_for_the_next_one(
    finished: Callable[[Path], Product], tmp_path: Path
) -> None:
    """The moment that no look at consent can see: between the last look and the published version."""
    product = finished(tmp_path)
    settings = dataclasses.replace(SETTINGS, max_wait_s=0.0, user_share=0.25, max_lag=256)
    published = dict[str, float]()
    changes = dict[str, threading.Thread]()
    kind = ""

    def withdraw(kind: str) -> None:
        with PrivacyFolder(product.privacy) as folder:
            match kind:
                case "its user allows less":
                    folder.consent.set(Subject.of(kind, "bob"), Level.CAPTURE)
                case "its organisation allows nothing":
                    folder.consent.set(Subject.of(kind), Level.OFF)
                case _:
                    folder.erase(Subject.of(kind, "bob"))

    async def main() -> list[tuple[str, str, int]]:
        nonlocal kind
        cells = list[tuple[str, str, int]]()
        async with product.trainer(settings) as trainer, asyncio.timeout(900):
            call = trainer._call

            async def watched(method: str, result: Any, *args: object) -> Any:
                if method == "offer" and kind not in changes and args != ((),):
                    changes[kind] = threading.Thread(target=withdraw, args=(kind,))
                    changes[kind].start()
                found = await call(method, result, *args)
                if method == "published" and kind in changes and kind not in published:
                    published[kind] = time.time()
                    with PrivacyFolder(product.privacy) as folder:
                        assert folder.consent.level(Subject.of(kind, "bob")) is Level.TRAIN
                    assert changes[kind].is_alive()
                return found

            trainer._call = watched  # type: ignore[method-assign]
            for kind in KINDS:
                with PrivacyFolder(product.privacy) as folder:
                    folder.consent.set(Subject.of(kind), Level.TRAIN)
                    folder.consent.set(Subject.of(kind, "bob"), Level.TRAIN)
                product.serve(["bob"], [1.0], organisation=kind)
                product.serve(["eve", "ann", "joe"], [1.0, 0.0, 1.0])
                with PrivacyFolder(product.privacy) as folder:
                    [record] = folder.records.of(folder.keys.names(Subject.of(kind, "bob")))
                made = list[int]()
                await trainer.train(
                    1, poll_s=0.02, on_step=lambda step, *_, m=made: m.append(step), on_wait=lambda _: None
                )
                await asyncio.to_thread(changes[kind].join, 60)
                assert not changes[kind].is_alive()
                cells.append((record.record_id, kind, made[0]))
        return cells

    cells = asyncio.run(main())
    assert [kind for _, kind, _ in cells] == list(KINDS)
    with PrivacyFolder(product.privacy) as folder, contextlib.closing(product.ledger()) as ledger:
        rows = {row.rollout_id: row for row in ledger.rows()}
        for record_id, kind, step in cells:
            mine = Subject.of(kind, "bob")
            assert folder.consent.level(mine) < Level.TRAIN, kind
            changed = [*folder.consent.history(mine), *folder.consent.history(Subject.of(kind))]
            assert max(one.at for one in changed) >= published[kind], kind
            assert not folder.usable([record_id], Level.TRAIN), kind
            [rollout_id] = folder.records.rollouts_of(folder.keys.names(mine))
            assert (rows[rollout_id].state, rows[rollout_id].step) == (State.TRAINED, step), kind
    product.run.assert_sound(cells[-1][2])


def test_a_killed_program_goes_on_where_it_stopped_and_trains_on_every_episode_once(
    finished: Callable[[Path], Product], tmp_path: Path
) -> None:
    product = finished(tmp_path)
    product.serve(["bob", "eve", "ann", "joe"] * 2, [1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0])
    for method in ("record", "forward_backward", "optim_step", "offer"):

        async def main(method: str = method) -> None:
            async with product.trainer() as trainer:
                asked = trainer._call

                async def dies(name: str, kind: Any, *args: object) -> Any:
                    if name == method and trainer._learner is not None and args:
                        raise KeyboardInterrupt
                    if name == method == "optim_step":
                        raise KeyboardInterrupt
                    return await asked(name, kind, *args)

                trainer._call = dies  # type: ignore[method-assign]
                with contextlib.suppress(KeyboardInterrupt):
                    await trainer.train(1, poll_s=0.02, on_step=lambda *_: None, on_wait=lambda _: None)

        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(main())
    steps = asyncio.run(product.learn(2))
    assert [step for step, _, _ in steps] == [3, 4]
    with contextlib.closing(product.ledger()) as ledger:
        rows = [row for row in ledger.rows() if row.rollout_id.startswith("production-")]
        assert [row.state for row in rows] == [State.TRAINED] * 8
    product.run.assert_sound(4)


MIXED = dataclasses.replace(SETTINGS, simulated=0.5)  # four rollouts of one task beside four episodes


def simulated_rows(product: Product) -> list[Row]:
    """Of the groups of tasks that were admitted after the run's RL: it had two steps of three groups."""
    with contextlib.closing(product.ledger()) as ledger:
        return [row for row in ledger.rows() if row.group_id.startswith("g") and int(row.group_id[1:]) >= 6]


def test_a_step_trains_on_episodes_and_on_simulated_groups_in_one_batch_that_replays_to_the_bit(
    finished: Callable[[Path], Product], tmp_path: Path
) -> None:
    product = finished(tmp_path)
    product.serve(["bob", "eve", "ann", "joe"] * 2, [1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0])
    steps = asyncio.run(product.learn(2, MIXED))
    simulated = simulated_rows(product)
    assert {row.state for row in simulated} <= {State.TRAINED, State.NO_SIGNAL}
    assert [(row.group_id, row.step) for row in simulated] == [("g000010", 3)] * 4 + [("g000015", 4)] * 4
    for step, version, facts in steps:
        assert facts["origin"] == "mixed"
        users, tasks = facts["origins"]["production"], facts["origins"]["simulated"]
        assert (users["num_groups"], users["num_rollouts"], tasks["num_groups"], tasks["num_rollouts"]) == (4, 4, 1, 4)
        assert users["lag"] == {str(step - 2): 4}, "they were sampled by version 1"
        assert tasks["lag"] == {"0": 4}, "they are sampled by the version that the step is made from"
        assert {row.version for row in simulated if row.step == step} == {str(version)}
        trace = trace_path(product.run.folder / "traces", step)
        recorded, rewards = read_trace(trace), read_step(trace).rewards
        tokens = [sum(part["token_lag"].values()) for part in (users, tasks)]
        assert recorded.batch.num_loss_tokens == sum(tokens), "the loss is divided by the tokens of both"
        given = dict[str, list[float]]()
        for one in recorded.batch.samples:
            given.setdefault(one.rollout_id.partition("-")[0][:1], []).append(float(one.advantages[0]))
        assert sorted(given["g"]) == [-0.5, -0.5, 0.5, 0.5], "Dr. GRPO among the siblings of their group"
        assert max(map(abs, given["p"])) >= 1.0, "over the deviation of the episodes alone"
        assert (rewards["scheme"], rewards["simulated"]["scheme"]) == (PRODUCTION_SCHEME, "dr-grpo")
    product.run.assert_sound(4)
    assert replay_step(product.run.folder, 4).equal


def test_a_killed_program_trains_on_every_episode_and_on_every_simulated_group_once(
    finished: Callable[[Path], Product], tmp_path: Path
) -> None:
    product = finished(tmp_path)
    product.serve(["bob", "eve", "ann", "joe"] * 2, [1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0])
    for method in ("rollout", "record", "forward_backward", "optim_step", "offer", "save"):

        async def main(method: str = method) -> None:
            async with product.trainer(MIXED) as trainer:
                asked, rolled, ended = trainer._call, trainer.processes.rollout, 0

                async def dies(name: str, kind: Any, *args: object) -> Any:
                    if name == method and trainer.version is not None:
                        raise Killed
                    return await asked(name, kind, *args)

                async def dies_rolling(*args: Any, **named: Any) -> Any:
                    nonlocal ended
                    if method == "rollout" and ended == 2:
                        raise Killed
                    ended += 1
                    return await rolled(*args, **named)

                trainer._call = dies  # type: ignore[method-assign]
                trainer.processes.rollout = dies_rolling  # type: ignore[method-assign]
                await trainer.train(1, poll_s=0.02, on_step=lambda *_: None, on_wait=lambda _: None)

        with pytest.raises(Killed):
            asyncio.run(main())
    assert [step for step, _, _ in asyncio.run(product.learn(2, MIXED))] == [3, 4]
    product.run.assert_sound(4)
    with contextlib.closing(product.ledger()) as ledger:
        states = [row.state for row in ledger.rows() if row.group_id.startswith("production-")]
    assert states == [State.TRAINED] * 8
    simulated = simulated_rows(product)
    assert {row.state for row in simulated} <= {State.TRAINED, State.NO_SIGNAL}
    assert Counter(row.step for row in simulated) == {3: 4, 4: 4}


def test_a_step_whose_episodes_were_all_withdrawn_trains_on_no_simulated_group(
    finished: Callable[[Path], Product], tmp_path: Path
) -> None:
    product = finished(tmp_path)
    product.serve(["bob", "eve", "ann", "joe"], [1.0, 0.0, 1.0, 0.0])

    async def main() -> list[dict[str, Any]]:
        made = list[dict[str, Any]]()
        async with product.trainer(MIXED) as trainer, asyncio.timeout(600):
            rolled = trainer.processes.rollout

            async def withdrawing(*args: Any, **named: Any) -> Any:
                with PrivacyFolder(product.privacy) as folder:
                    folder.consent.set(ACME, Level.CAPTURE)
                return await rolled(*args, **named)

            trainer.processes.rollout = withdrawing  # type: ignore[method-assign]
            await trainer.train(1, poll_s=0.02, on_step=lambda *one: made.append(one[2]), on_wait=lambda _: None)
        return made

    [facts] = asyncio.run(main())
    assert list(facts["origins"]) == ["production"]
    with contextlib.closing(product.ledger()) as ledger:
        assert [row.reason for row in ledger.rows(step=3)] == [NO_CONSENT] * 4
        assert ledger.versions()[-1].digest == ledger.versions()[-2].digest, "the step changed no weight"
    left = {(row.state, row.step) for row in simulated_rows(product)}
    assert left == {(State.GRADED, None)}, "a later step takes them"


def test_a_wait_for_simulated_rollouts_that_do_not_end_has_a_deadline(
    finished: Callable[[Path], Product], tmp_path: Path
) -> None:
    product = finished(tmp_path)
    product.serve(["bob", "eve", "ann", "joe"], [1.0, 0.0, 1.0, 0.0])

    async def main() -> None:
        async with product.trainer(dataclasses.replace(MIXED, simulated_wait_s=1.0)) as trainer, asyncio.timeout(240):

            async def hangs(*args: Any, **named: Any) -> Any:
                await asyncio.Event().wait()

            trainer.processes.rollout = hangs  # type: ignore[method-assign]
            await trainer.train(1, poll_s=0.02, on_step=lambda *_: None, on_wait=lambda _: None)

    with pytest.raises(DeadlineExceeded, match="no simulated rollout has ended for 1 s") as caught:
        asyncio.run(main())
    assert "step 3 waits for 4 of them; no engine is up" in str(caught.value)
    assert [step for step, _, _ in asyncio.run(product.learn(1, MIXED))] == [3]
    assert Counter(row.step for row in simulated_rows(product)) == {3: 4}, "the same group, rolled out again"


def test_simulated_rollouts_of_a_withdrawn_task_are_in_no_version(
    finished: Callable[[Path], Product], tmp_path: Path
) -> None:
    product = finished(tmp_path)
    product.serve(["bob", "eve", "ann", "joe"], [1.0, 0.0, 1.0, 0.0])

    async def main() -> None:
        async with product.trainer(MIXED) as trainer, asyncio.timeout(600):
            assert trainer.simulated is not None
            asked = trainer._call

            async def withdraws(name: str, kind: Any, *args: object) -> Any:
                found = await asked(name, kind, *args)
                if name == "optim_step":
                    trainer.simulated._admission.source = withdrawing  # type: ignore[union-attr]
                return found

            withdrawing = AllWithdrawn(str(product.run.config.tasks.source))
            trainer._call = withdraws  # type: ignore[method-assign]
            await trainer.train(1, poll_s=0.02, on_step=lambda *_: None, on_wait=lambda _: None)

    asyncio.run(main())
    product.run.assert_sound(3)
    first, second = simulated_rows(product)[:4], simulated_rows(product)[4:]
    assert [row.reason for row in first] == [WITHDRAWN] * 4
    assert not second


def test_a_run_whose_rl_has_not_ended_and_steps_larger_than_its_ledger_are_refused(
    game: Any, finished: Callable[[Path], Product], tmp_path: Path
) -> None:
    product = Product(tmp_path / "new", game)

    async def refused(product: Product, settings: LearnSettings) -> None:
        async with product.trainer(settings):
            pass

    with pytest.raises(RunRefused, match="its RL has not ended"):
        asyncio.run(refused(product, SETTINGS))
    (tmp_path / "done").mkdir()
    done = finished(tmp_path / "done")
    with pytest.raises(ConfigError, match="larger than the run"):
        asyncio.run(refused(done, LearnSettings(outcomes={"kept": 1.0}, episodes=4096)))
    with pytest.raises(ConfigError, match="a window of 8 episodes with 8 simulated rollouts of a step is larger"):
        asyncio.run(refused(done, dataclasses.replace(MIXED, episodes=8)))


LEARN = """
episodes = 8
settle_s = 0.0
user_share = 1.0

[outcomes]
kept = 1.0
"""


def use(command: Any, path: Path, game: Any, *, answers: int) -> None:
    """Run the game, serve it, and have users ask it and say what they think."""
    import openai

    from etude.signals import send_feedback

    few = ["rl.steps=1", "evals.every=50", "evals.heldout_tasks=2", "evals.baseline_tasks=1"]
    done = command("run", game.config, "--name", "game", *(word for one in few for word in ("--set", one)))
    assert (path / "runs" / "game" / "checkpoints" / "step-000001").is_dir(), done.stderr
    assert command("privacy", "set", "local", "train").returncode == 0
    (path / "learn.toml").write_text(LEARN)
    server = command.start("serve", "runs/game", "--port", "0", "--capture", "privacy", "--feedback", "feedback.sqlite")
    try:
        url = server.stdout.readline().split(" at ")[1].split()[0]
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=300) as client:
            for number in range(answers):
                user = f"user-{number}"
                answer = client.chat.completions.create(
                    model="game",
                    messages=[{"role": "user", "content": f"m{number} 3"}],
                    max_tokens=8,
                    extra_headers={"x-etude-user": user},
                )
                send_feedback(url, "none", answer.id, user=user, kept=number % 2 == 0)
        server.send_signal(signal.SIGINT)
        assert server.wait(300) == 0
    finally:
        server.kill()
        server.communicate()


WHERE = ["runs/game", "--privacy", "privacy", "--feedback", "feedback.sqlite", "--settings", "learn.toml"]


def test_the_commands_of_the_guide_serve_a_run_take_feedback_and_learn_from_it(
    game: Any, tmp_path: Path, cli_in: Callable[[Path], Any]
) -> None:
    command = cli_in(tmp_path)
    use(command, tmp_path, game, answers=8)
    learnt = command("learn", *WHERE, "--steps", "1", "--poll-s", "0.1")
    assert learnt.returncode == 0, learnt.stderr
    assert "window 1: step 2: 8 episodes, mean reward 0.500, v000002" in learnt.stdout
    assert command("ledger", "audit", "runs/game").returncode == 0
    assert command("fsck", "runs/game").returncode == 0
    again = command("rewards", "recompute", "runs/game")
    assert again.returncode == 0, again.stderr
    assert "left out: steps of production" in again.stderr
    events = (tmp_path / "runs" / "game" / "events" / "conductor.jsonl").read_text().splitlines()
    steps = [one for one in map(json.loads, events) if one["kind"] == "rl.step"]
    assert steps[-1]["origin"] == "production"
    assert steps[-1]["fresh_ratio_max"] == 0.0, "the log-probabilities are those of the served engine"
    erased = command("privacy", "erase", "local/user-0", "--run", "runs/game")
    assert "in the batch of step 2, trained into v000002" in erased.stdout, erased.stderr
    waiting = command.start("learn", *WHERE, "--poll-s", "0.1")
    assert waiting.stdout.readline() == (
        "window 2: 0 of 8 episodes settled, no deadline (0 with a signal that counts, 0 settled, 0 in all)\n"
    )
    waiting.send_signal(signal.SIGINT)
    waiting.communicate(timeout=300)
    assert waiting.returncode == Exit.INTERRUPTED


def test_real_engines_roll_out_the_simulated_half_of_a_step_also_after_a_kill(
    game: Any, tmp_path: Path, cli_in: Callable[[Path], Any]
) -> None:
    command, run = cli_in(tmp_path), tmp_path / "runs" / "game"
    use(command, tmp_path, game, answers=8)
    mixed = [*WHERE, "--set", "simulated=0.5", "--steps", "1", "--poll-s", "0.1"]
    first = command.start("learn", *mixed)
    until = time.monotonic() + 600
    while not {State.RUNNING, State.GRADED} & {row.state for row in simulated(run)}:
        assert first.poll() is None, first.communicate()
        assert time.monotonic() < until, simulated(run)
        time.sleep(0.01)
    first.kill()
    first.communicate(timeout=60)
    learnt = command("learn", *mixed)
    assert learnt.returncode == 0, learnt.stderr
    assert "step 2: 8 episodes, mean reward 0.500; 8 simulated rollouts of 2 tasks, theirs" in learnt.stdout
    assert {row.state for row in simulated(run)} <= {State.TRAINED, State.NO_SIGNAL}
    assert Counter(row.step for row in simulated(run)) == {2: 8}
    assert command("ledger", "audit", run).returncode == 0
    assert command("fsck", run).returncode == 0
    assert replay_step(RunFolder(run), 2).equal
    events = map(json.loads, (run / "events" / "conductor.jsonl").read_text().splitlines())
    step = [one for one in events if one["kind"] == "rl.step"][-1]
    assert step["origins"]["production"]["lag"] == step["origins"]["simulated"]["lag"] == {"0": 8}
    assert step["fresh_ratio_max"] == 0.0, "the log-probabilities are those of the engines, of both"
    assert "simulated: mean 0.00, at most 0; production: mean 0.00" in " ".join(command("status", run).stdout.split())


def simulated(run: Path) -> list[Row]:
    """The rollouts that were admitted after the run's RL: it had one step of three groups."""
    with contextlib.closing(Ledger.open_readonly(run / "ledger.sqlite")) as ledger:
        return [row for row in ledger.rows() if row.group_id.startswith("g") and int(row.group_id[1:]) >= 3]
