"""CPU time of a look of `etude learn` for the next window, with thousands of captured answers that wait.

    PYTHONPATH=. python -m benchmarks.production.poll [--answers 10000] [--users 2000] [--tokens 1000]

Each answer has a prompt of `--tokens` tokens and a signal about it. The first look is that of a program that has just
started; before the last one a twentieth of the users have a further answer."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from pathlib import Path

import numpy as np
from tests.served_answers import served_answer
from tests.unit.releases.played import published

from benchmarks.report import report
from etude.cli.learn import FeedbackSignals
from etude.config import build, to_toml
from etude.loop.config import RunConfig
from etude.loop.locations import weights_store
from etude.loop.production_windows import Windows
from etude.privacy import CaptureWriter, Level, PrivacyFolder, Subject
from etude.production import LearnSettings
from etude.run import RunFolder
from etude.signals import FeedbackFile, GivenSignal
from etude.signals.file import Sent
from etude.signals.versions import Observation

LOOKS = 5


def ask(path: Path, file: FeedbackFile, numbers: range, users: int, tokens: int) -> None:
    """Capture an answer for each number, with a signal about it."""
    writer = CaptureWriter(path / "privacy", max_queued=1 << 20, max_queued_bytes=1 << 30)
    for number in numbers:
        user = f"user-{number % users}"
        response_id, at = file.ids.new("acme", user, "laptop"), time.time()
        prompt = np.full(tokens, number, np.int32)
        writer.offer(served_answer(user, said=f"r{number}", response_id=response_id, prompt_ids=prompt, at=at))
        given = GivenSignal(id=f"s{number}", response_id=response_id, name="kept", value=1.0)
        file.add([Sent("acme", user, [given])], [Observation("laptop", at, "v")])
    if not writer.close(600):
        raise SystemExit("the answers were not stored in 600 s")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--answers", type=int, default=10_000, help="that wait (default: %(default)s)")
    parser.add_argument("--users", type=int, default=2000, help="whose answers they are (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=1000, help="of a prompt (default: %(default)s)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="etude-poll-") as name, contextlib.ExitStack() as stack:
        path, config = Path(name), build(RunConfig, {})
        run = RunFolder.create(path / "run", config_toml=to_toml(config), seed=0)
        published(weights_store(run))
        run.end_phase("rl", wall_s=1.0)
        folder = stack.enter_context(PrivacyFolder(path / "privacy"))
        folder.consent.set(Subject.of("acme"), Level.TRAIN)
        time.sleep(0.01)  # answers must be later
        file = FeedbackFile(path / "feedback.sqlite", privacy=folder, create=True, cap=1 << 30)
        stack.callback(file.close)
        settings = LearnSettings(outcomes={"kept": 1.0}, settle_s=0.0)
        windows = stack.enter_context(
            contextlib.closing(Windows(run, config, settings, folder, FeedbackSignals(file), log=print))
        )
        ask(path, file, range(args.answers), args.users, args.tokens)

        def look() -> float:
            began = time.process_time()
            windows._ready(time.time(), None)
            return round(time.process_time() - began, 3)

        first, others = look(), sorted(look() for _ in range(LOOKS))
        ask(path, file, range(args.answers, args.answers + args.users // 20), args.users, args.tokens)
        numbers = {"first_cpu_s": first, "next_cpu_s": others[LOOKS // 2], "after_new_answers_cpu_s": look()}
    report("production_poll", {**vars(args), **numbers})


if __name__ == "__main__":
    main()
