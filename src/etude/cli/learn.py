"""The command ``etude learn``."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from etude.cli.feedback import opened_feedback
from etude.cli.locations import open_run
from etude.cli.releases import refuse_other_releases
from etude.config import plugins_in
from etude.dashboard.formatting import number, size
from etude.dashboard.run_view import read_json
from etude.errors import EtudeError, Exit, InputError
from etude.plugins import check_all
from etude.prices import Prices, read_prices
from etude.privacy import Level, PrivacyFolder
from etude.production import LearnSettings, read_settings
from etude.production.episodes import SIMULATED, SOURCE, Answer
from etude.production.outcomes import Values
from etude.records import Version
from etude.records.task import Split
from etude.releases import Outcome, Release
from etude.releases.costs import Costs
from etude.releases.feedback import CostReader, outcomes_of
from etude.releases.settings import read_settings as read_release
from etude.run import RunFolder
from etude.signals import FeedbackFile
from etude.telemetry import Telemetry

if TYPE_CHECKING:
    from etude.loop.production_windows import Windows

_AT_ONCE = 1000  # ids of one query


class FeedbackSignals:
    """The signals of a file of `etude serve --feedback`, as training reads them."""

    def __init__(self, file: FeedbackFile) -> None:
        self._file = file
        self._costs: CostReader | None = None

    def values_of(self, answers: Sequence[Answer]) -> dict[Answer, Values]:
        """Return the values of the signals about these answers, by answer and name.

        Signals that were kept under a lower level than `train` are left out."""
        found, wanted = dict[Answer, dict[str, list[float]]](), set(answers)
        response_ids = list(dict.fromkeys(response_id for response_id, _ in answers))
        for start in range(0, len(response_ids), _AT_ONCE):
            for one in self._file.signals(response_ids=response_ids[start : start + _AT_ONCE]):
                answer = one.response_id, one.answer
                if answer in wanted and one.level == Level.TRAIN:
                    found.setdefault(answer, {}).setdefault(one.name, []).append(one.value)
        return {**found}

    def outcomes(self, since: float, metrics: Collection[str]) -> Iterable[Outcome]:
        """Yield the signals about answers that began at `since` (Unix time in s) or later, for the canary of a
        release."""
        return outcomes_of(self._file.signals(since=since), metrics)

    def costs(self, folder: PrivacyFolder, prices: Prices, release: Release, since: float) -> Costs:
        """Return the dollars per kept change of answers served since the present share of a canary began (Unix time in
        s). What was read in an earlier call is not read again."""
        known = self._costs
        if known is None or (known.release.number, known.since) != (release.number, since):
            known = self._costs = CostReader(release, prices, since=since)
        return known.read(folder, self._file)


def learn(args: argparse.Namespace) -> int:
    """Train a run on captured answers and on signals about them, for `--steps` steps or until Ctrl-C.

    With `--releases`, each window of episodes is trained on, and the new version is released. Returns the exit code."""
    run, settings = open_run(args.run), read_settings(args.settings, args.set)
    if args.releases is None and args.cycles is not None:
        raise InputError(
            "--cycles needs --releases", "it counts windows that were released", hint="add --releases FILE"
        )
    if args.releases is not None and args.steps is not None:
        hint = "give --cycles N for the number of windows, and steps in the section [loop] of --settings"
        facts = "a release always has all steps of its window"
        raise InputError("--steps cannot be used with --releases", facts, hint=hint)
    if not (args.privacy / "consent.sqlite").is_file():
        hint = "give the folder of etude serve --capture; etude privacy set creates it"
        raise InputError(f"{args.privacy} is not a folder of consent and captured answers", hint=hint)
    if args.releases is not None and args.releases.is_file():
        from etude.loop.locations import weights_location

        refuse_other_releases(args.releases, str(weights_location(run)))
    _check_plugins(run)
    run.lock()
    try:
        new = args.releases is not None and not args.feedback.is_file()  # etude serve needs the file of releases first
        with (
            PrivacyFolder(args.privacy) as folder,
            opened_feedback(args.feedback, args.privacy, create=new) as file,
        ):
            if args.releases is not None:
                file.attach_outcomes(args.releases)
            if new:
                print(f"feedback: there was no {args.feedback}; it is created", flush=True)
            from etude.loop import event_loop

            interrupted = event_loop.run(_learn(run, settings, folder, FeedbackSignals(file), args))
    except EtudeError as error:
        error.hint += "; nothing is lost: the same command goes on"
        raise
    finally:
        run.unlock()
    if interrupted:
        print("stopped; the same command goes on", file=sys.stderr)
    return Exit.INTERRUPTED if interrupted else Exit.DONE


def _check_plugins(run: RunFolder) -> None:
    """Raise `RunRefused` if a plug-in of the run has other code than its steps so far used."""
    from etude.loop.config import check_same_plugins, read_config

    check_same_plugins(run, check_all(list(dict.fromkeys(plugins_in(read_config(run))))), accept=False)


async def _learn(
    run: RunFolder, settings: LearnSettings, folder: PrivacyFolder, signals: FeedbackSignals, args: argparse.Namespace
) -> bool:
    """Run the trainer or the endless loop. Returns whether a signal stopped it."""
    from etude.loop.config import read_config
    from etude.loop.production_windows import Windows

    telemetry = Telemetry(run / "events" / "conductor.jsonl", process="conductor")

    def log(words: str) -> None:
        telemetry.event("ledger", reason=words)

    stopped = False
    try:
        with contextlib.closing(Windows(run, read_config(run), settings, folder, signals, log=log)) as windows:
            work = asyncio.create_task(_work(windows, signals, telemetry, args))

            def stop() -> None:
                nonlocal stopped
                stopped = True
                work.cancel()

            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop)
            try:
                await work
            except asyncio.CancelledError:
                if not stopped:
                    raise
    finally:
        telemetry.close()
    return stopped


async def _work(windows: Windows, signals: FeedbackSignals, telemetry: Telemetry, args: argparse.Namespace) -> None:
    from etude.loop.production import learn as train
    from etude.loop.production_loop import ProductionLoop
    from etude.loop.run_in_thread import run_in_thread
    from etude.loop.suites import check_suite

    def tell(line: str) -> None:
        print(line, flush=True)

    def on_step(step: int, version: Version, facts: dict[str, Any]) -> None:
        parts = facts["origins"]
        episodes, beside = parts[SOURCE], parts.get(SIMULATED)
        told = f"{episodes['num_groups']} episodes, mean reward {episodes['reward_mean']:.3f}"
        if beside is not None:
            told += f"; {beside['num_rollouts']} simulated rollouts of {beside['num_groups']} tasks"
            told += f", theirs {beside['reward_mean']:.3f}"
        tell(f"window {facts['window']}: step {step}: {told}, {version}")
        if args.releases is None:
            tell(f"  release it: etude release begin {windows.run.path} {step} --settings FILE")

    if windows.settings.simulated:
        await _check_simulated(windows, tell)
    if args.releases is None:
        await train(windows, telemetry, steps=args.steps, poll_s=args.poll_s, on_step=on_step, on_wait=tell)
        return
    if windows.settings.loop is None:
        what, facts = "the settings have no section [loop]", "it names the settings of the releases"
        raise InputError(what, facts, hint='write [loop] and release = "release.toml" in the file of --settings')
    release, prices = read_release(windows.settings.loop.release), windows.settings.loop.prices
    uses = [(f"the metric {one.name}", one.cost_rise) for one in release.metrics]
    for gate in release.gate:  # before hours of training
        await run_in_thread(partial(check_suite, gate.suite, windows.run))
        uses.append((f"the gate of {gate.name}", gate.cost_rise))
    for name, rise in uses:
        if rise is not None and prices is None:
            what, facts = f"{name} has cost_rise, and there are no prices", "a cost would be unknown"
            raise InputError(
                what, facts, hint='write prices = "prices.toml" in [loop] of --settings, or remove cost_rise'
            )
    costs = {} if prices is None else {"costs": partial(signals.costs, windows.folder, read_prices(prices))}
    outcomes, releases = signals.outcomes, args.releases
    loop = ProductionLoop(windows, release, telemetry, outcomes, releases, poll_s=args.poll_s, tell=tell, **costs)
    try:
        await loop.forever(args.cycles, on_step=on_step)
    finally:
        await loop.close()


async def _check_simulated(windows: Windows, tell: Callable[[str], None]) -> None:
    """Check that simulated rollouts are possible, and tell what they need, before hours of waiting.

    Raises `TaskError` for a task source without training tasks, and `EngineError` for engines that are not installed.
    """
    from etude.loop.preflight import check_foreign, check_tasks
    from etude.loop.run_in_thread import run_in_thread

    config, fleet = windows.config, windows.config.fleet
    source = await run_in_thread(partial(check_tasks, config, [Split.TRAIN]))
    check_foreign(config, adopted=True)
    counts = (len(fleet.engines), "engine"), (fleet.num_workers, "worker"), (fleet.num_graders, "grader")
    processes = ", ".join(number(count, of) for count, of in counts)
    peak = read_json(windows.run / "summary.json", dict).get("peak_memory_bytes")
    memory = f"; the run's processes took at most {size(peak)} of memory" if isinstance(peak, int) else ""
    tell(f"simulated: tasks of {source.name}; each window starts {processes} beside the learner{memory}")
