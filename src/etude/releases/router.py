"""Routes requests of users to the stable or the canary version of the newest release, for a gateway."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from etude.errors import EtudeError, InputError
from etude.releases.assignment import MAX_AGE_S, Arm, arm_of
from etude.releases.releases import Releases
from etude.releases.states import Release


class ReleaseRouter:
    """Decides which of two served models answers a request. `stable` and `canary` are their names.

    It reads the file of the releases again after `MAX_AGE_S` seconds. It never fails a request: requests for other
    models are not changed, and users with an invalid name get the stable version. All users get it before the first
    release, and while the file cannot be read. `clock` returns the time in seconds. Raises `StoreError` if the file is
    damaged."""

    def __init__(self, path: Path, *, stable: str, canary: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._releases, self._stable, self._canary, self._clock = Releases(path), stable, canary, clock
        self._release: Release | None = None
        self._read_at = -MAX_AGE_S

    def close(self) -> None:
        """Close the file."""
        self._releases.close()

    def __call__(self, model: str, subject: str) -> str:
        """Return the name of the model that answers a request for `model` by a user."""
        release = self._now() if model == self._stable else None
        if release is None or not release.share:
            return model
        try:
            arm = arm_of(release.salt, subject, release.share)
        except InputError:
            return model
        return self._canary if arm is Arm.CANARY else model

    def _now(self) -> Release | None:
        if self._clock() - self._read_at >= MAX_AGE_S:
            self._read_at = self._clock()
            try:
                self._release = self._releases.newest()
            except EtudeError:
                self._release = None
        return self._release
