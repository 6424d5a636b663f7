"""Users of a served run for tests of the endless loop: they ask, are captured, and send signals. No engine computes.

Who gets which version is decided by the file of releases and the branches of the weights, as the gateway decides it.
The tokens of the answers are made up, so the run must only report the difference (`parity.over_budget = "report"`)."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import numpy as np
from tests.served_answers import served_answer

from etude.errors import StoreError
from etude.loop.locations import weights_store
from etude.privacy import CaptureWriter, Level, PrivacyFolder, Subject
from etude.records import Version, VersionSpan
from etude.releases import Arm, Release, Releases, arm_of
from etude.releases.pointers import CANARY, STABLE, branch_version
from etude.run import RunFolder
from etude.signals import FeedbackFile, GivenSignal, Status
from etude.signals.file import Sent
from etude.signals.versions import Observation

ACME, MODEL = "acme", "the-product"


class Users:
    """`kept`: the probability that a user keeps an answer, by its version. `acknowledged`: ids of the signals that were
    stored, with their values. Close it."""

    def __init__(
        self, run: RunFolder, folder: Path, *, seed: int = 0, kept: Callable[[Version], float] = lambda _: 0.5
    ) -> None:
        self.run, self.releases, self.kept = run, folder / "releases.sqlite", kept
        self.privacy, self.feedback = folder / "privacy", folder / "feedback.sqlite"
        self.acknowledged = dict[str, float]()
        self._draw, self._number = random.Random(seed), 0
        self._folder = PrivacyFolder(self.privacy)
        self._folder.consent.set(Subject.of(ACME), Level.TRAIN)
        self._file = FeedbackFile(self.feedback, privacy=self._folder, create=True)
        time.sleep(0.01)  # ids have milliseconds, and the consent must be older

    def close(self) -> None:
        self._file.close()
        self._folder.close()

    def visit(self, users: Iterable[str]) -> None:
        """One answer for each user, with a signal about it."""
        writer, begun, store = CaptureWriter(self.privacy), self.begun(), weights_store(self.run, readonly=True)
        release = begun[-1] if begun else None
        for user in users:
            share = 0 if release is None else release.share
            arm = Arm.STABLE if release is None else arm_of(release.salt, user, share)
            version = branch_version(store, "policy", CANARY if arm is Arm.CANARY else STABLE)
            if version is None:  # the loop has not begun
                version = branch_version(store, "policy", "")
            assert version is not None
            self._number += 1
            model = MODEL if arm is Arm.STABLE else f"{MODEL}-canary"
            response_id = self._file.ids.new(ACME, user, model)
            began = time.time()
            signal_id, value = f"s{self._number}", float(self._draw.random() < self.kept(version))
            given = GivenSignal(id=signal_id, response_id=response_id, name="kept", value=value)
            [receipts] = self._file.add([Sent(ACME, user, [given])], [Observation(model, began, str(version))])
            assert isinstance(receipts, list), receipts
            assert receipts[0].status is Status.STORED, receipts
            self.acknowledged[signal_id] = value
            answer = served_answer(user, said=f"r{self._number}", response_id=response_id, at=began, organisation=ACME)
            number = len(answer.completion.token_ids)
            completion = msgspec.structs.replace(
                answer.completion,
                spans=(VersionSpan(version, number),),
                logprobs=np.full(number, -5.0, np.float32),
            )
            writer.offer(msgspec.structs.replace(answer, completion=completion))
        assert writer.close(60)

    def stored(self) -> list[float]:
        """The values of the signals in the file."""
        return [one.value for one in self._file.signals()]

    def begun(self) -> list[Release]:
        """All releases; none while the file is being created."""
        if not self.releases.is_file():
            return []
        with contextlib.suppress(StoreError), contextlib.closing(Releases(self.releases, readonly=True)) as releases:
            return releases.all()
        return []
