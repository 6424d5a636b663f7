"""The command ``etude learn``."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence
from typing import Any

from etude.cli.feedback import opened_feedback
from etude.cli.locations import open_run
from etude.errors import EtudeError, Exit, InputError
from etude.privacy import PrivacyFolder
from etude.production import LearnSettings, read_settings
from etude.production.outcomes import Values
from etude.records import Version
from etude.run import RunFolder
from etude.signals import FeedbackFile
from etude.telemetry import Telemetry

_AT_ONCE = 1000  # ids of one query


class FeedbackSignals:
    """The signals of a file of `etude serve --feedback`, as training reads them."""

    def __init__(self, file: FeedbackFile) -> None:
        self._file = file

    def values_of(self, response_ids: Sequence[str]) -> Values:
        """Return the values of the signals about these responses, by name."""
        found = dict[str, list[float]]()
        for start in range(0, len(response_ids), _AT_ONCE):
            for one in self._file.signals(response_ids=response_ids[start : start + _AT_ONCE]):
                found.setdefault(one.name, []).append(one.value)
        return found


def learn(args: argparse.Namespace) -> int:
    """Train a run on captured answers and signals about them until `--steps` are made, or until Ctrl-C. Returns the
    exit code."""
    run, settings = open_run(args.run), read_settings(args.settings, args.set)
    if not (args.privacy / "consent.sqlite").is_file():
        hint = "give the folder of etude serve --capture; etude privacy set creates it"
        raise InputError(f"{args.privacy} is not a folder of consent and captured answers", hint=hint)
    run.lock()
    try:
        with PrivacyFolder(args.privacy) as folder, opened_feedback(args.feedback, args.privacy) as file:
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


async def _learn(
    run: RunFolder, settings: LearnSettings, folder: PrivacyFolder, signals: FeedbackSignals, args: argparse.Namespace
) -> bool:
    """Run the trainer. Returns whether a signal stopped it."""
    from etude.loop.config import read_config
    from etude.loop.production import learn as train

    def on_step(step: int, version: Version, facts: dict[str, Any]) -> None:
        reward, number = facts["reward_mean"], facts["num_groups"]
        print(f"step {step}: {number} episodes, mean reward {reward:.3f}, {version}", flush=True)
        print(f"  release it: etude release begin {run.path} {step} --settings FILE", flush=True)

    telemetry = Telemetry(run / "events" / "conductor.jsonl", process="conductor")
    work = asyncio.create_task(
        train(
            run,
            read_config(run),
            settings,
            telemetry,
            folder,
            signals,
            steps=args.steps,
            poll_s=args.poll_s,
            on_step=on_step,
            on_wait=lambda why: print(f"waiting: {why}", flush=True),
        )
    )
    stopped = False

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
