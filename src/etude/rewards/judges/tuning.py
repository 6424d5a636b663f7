"""Training text for a model of your own as the judge: labelled works as it is asked about them, each with its score.

Only labels of the half `tune` are used, so the other half can report what the tuned model has learned."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.errors import InputError
from etude.records.exchange import Exchange
from etude.records.rollout import Graded
from etude.rewards.judges.calibration import Half, Label, read_labels
from etude.rewards.judges.evidence import Evidence, Section
from etude.rewards.judges.judge import check_form
from etude.rewards.judges.questions import Asking
from etude.rewards.judges.rubrics import Aspect, Rubric, read_rubric
from etude.rewards.judges.verdicts import Form


def exchanges(
    rubric: Rubric, labels: Sequence[Label], *, max_chars: int, seed: int, hide: tuple[str, ...] = ()
) -> Iterator[Exchange]:
    """Yield the question about each labelled work, as a tuned judge is asked, with the score as the answer.

    `max_chars` and `hide` must be those of the judge. The order and the codes of the fences depend on `seed`. Raises
    `InputError` for labels of pairs, and when there is no label."""
    check_form(Form.TOKEN, rubric, tuned=True)
    if not labels:
        raise InputError("there are no labels to tune a judge with", hint="give more: halves are made by a hash")
    secret = hashlib.sha256(f"exchanges {seed}".encode()).digest()
    asking = Asking(rubric, Form.TOKEN, max_chars, hide, secret, tuned=True)
    for label in random.Random(f"exchanges {seed}").sample(labels, len(labels)):
        if label.other is not None:
            raise InputError(
                "a judge of one token is tuned with scores", "a label compares two works", hint="score them"
            )
        yield Exchange(asking.about_one(label.aspect, label.work).user, str(label.score))


@dataclass(frozen=True)
class Verdicts:
    """A corpus source: the labelled works of a file, as a tuned judge is asked about them. Only the scores are learned.

    `labels`, `rubric`: paths. `evidence_chars`, `hide`: as in the judge's settings."""

    labels: Path
    rubric: Path
    evidence_chars: int = 24_000
    hide: tuple[str, ...] = ()

    def documents(self, seed: int) -> Iterator[Exchange]:
        rubric = read_rubric(self.rubric)
        labels = [one for one in read_labels(Path(self.labels), rubric, _no_rollout) if one.half is Half.TUNE]
        return exchanges(rubric, labels, max_chars=self.evidence_chars, seed=seed, hide=self.hide)


def _no_rollout(rollout_id: str) -> Evidence:
    raise InputError(
        f"a label names rollout {rollout_id}",
        "a corpus needs the works themselves",
        hint="write the labels by: etude judge labels RUN --out FILE",
    )


def label_of(aspect: Aspect, graded: Graded) -> int:
    """Return the score of a graded rollout on an aspect's scale: its grade, rounded down to a score.

    On a scale of two the higher score means that all hidden tests pass."""
    share = min(max(graded.grade, 0.0), 1.0)
    return aspect.lowest + math.floor(share * (aspect.highest - aspect.lowest) + 1e-9)


def check_sections(sections: Sequence[Section]) -> None:
    """Raise `InputError` if a judge sees the grade that its labels are made of."""
    if Section.TESTS in sections:
        raise InputError(
            "the judge sees the grade, which is the label",
            f"evidence = {[str(one) for one in sections]}",
            hint="remove 'tests' from evidence: it would learn to read the grade",
        )


def row_of(aspect: Aspect, work: Evidence, label: int, *, group: str) -> dict[str, Any]:
    """Return a line of a file of labels."""
    return {"aspect": aspect.name, "work": work.as_mapping(), "label": label, "group": group}
