"""Outcomes of users, from which a release learns whether its canary is better, and their file of JSON lines.

The file comes from another system, so every line is checked, and an error names it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

import msgspec

from etude.errors import InputError, nearest
from etude.releases.assignment import Arm, place_of

MAX_LINE_BYTES = 65_536


class Outcome(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One outcome of one subject.

    - `id`: the id of the outcome. It counts once for each metric, also if it is sent again.
    - `subject`: the user, or what else the client names. `metric`: a metric of the release. `value`: from 0 to 1.
    - `version`: the weights that answered, as in `system_fingerprint`: the outcome counts for them. None: it counts for
      the version that the subject is assigned to now.
    - `arm`, `share`: which of the two versions served the subject, and the percent of the subjects that had the canary
      at that time. The outcome counts only if `arm` is the version above and `share` the present share. None: not
      compared.
    - `answered`: when the answer was begun, Unix time in s. If the share was changed after that, the outcome is not
      counted."""

    id: str
    subject: str
    metric: str
    value: float
    arm: Arm | None = None
    share: int | None = None
    version: str | None = None
    answered: float | None = None

    def check(self, metrics: Collection[str]) -> None:
        """Raise `InputError` if the metric is none of `metrics`, the value is outside [0, 1], or a name is invalid."""
        if self.metric not in metrics:
            raise InputError(f"no metric {self.metric!r} in this release", hint=nearest(self.metric, metrics))
        if not 0.0 <= self.value <= 1.0:
            raise InputError(
                f"the value {self.value} of outcome {self.id!r} is outside [0, 1]", hint="scale its metric to [0, 1]"
            )
        if not 0 < len(self.id) <= 256:
            raise InputError(
                f"an outcome has an id of {len(self.id)} characters", hint="give an id of 1 to 256 characters"
            )
        place_of(b"", self.subject)


_DECODER = msgspec.json.Decoder(Outcome)


def parse_outcome(line: bytes) -> Outcome:
    """Parse an outcome from a line of JSON. Raises `InputError` if the line is not an outcome."""
    try:
        return _DECODER.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        hint = "write one object in each line, with id, subject, metric and value; see docs/formats/releases.md"
        raise InputError("a line is not an outcome", str(error), hint=hint) from None


def read_outcomes(path: Path) -> Iterator[Outcome]:
    """Yield the outcomes of a file, one a line; empty lines are left out.

    Raises `InputError` for a file that cannot be read, and for a line that is not an outcome; the error has the line's
    number."""
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    raise InputError(
                        f"line {number} of {path} is too long",
                        f"over {MAX_LINE_BYTES} bytes",
                        hint="give a file with one outcome, a JSON object, in each line",
                    )
                if not line.strip():
                    continue
                try:
                    yield parse_outcome(line)
                except InputError as error:
                    raise InputError(
                        f"line {number} of {path} is not an outcome", error.facts, hint=error.hint
                    ) from None
    except OSError as error:
        raise InputError(f"{path} cannot be read", str(error.strerror), hint="give a file of JSON lines") from None
