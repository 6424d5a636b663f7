"""Makes training data for a judge from labels: the judge's question is the prompt, and the label's score the answer.

Only labels of the half `tune` are trained on. The other half measures what the tuned model has learned."""

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
from etude.rewards.judges.questions import QuestionMaker
from etude.rewards.judges.rubrics import Aspect, Rubric, read_rubric
from etude.rewards.judges.verdicts import Form


def exchanges(
    rubric: Rubric, labels: Sequence[Label], *, max_chars: int, seed: int, hide: tuple[str, ...] = ()
) -> Iterator[Exchange]:
    """Yield for each label the question to the judge about the labelled work, with the label's score as the answer.

    `max_chars`: characters of evidence in one question. `hide`: names to replace in it. `seed`: determines the order,
    and the codes around the evidence. Raises `InputError` for labels of pairs and if there is no label, and
    `ConfigError` for a scale with scores of several digits."""
    check_form(Form.TOKEN, rubric, tuned=True)
    if not labels:
        hint = "add labels: a hash puts each into the half for tuning or the half for reporting"
        raise InputError("no label is in the half for tuning", hint=hint)
    secret = hashlib.sha256(f"exchanges {seed}".encode()).digest()
    maker = QuestionMaker(rubric, Form.TOKEN, max_chars, hide, secret, tuned=True)
    for label in random.Random(f"exchanges {seed}").sample(labels, len(labels)):
        if label.other is not None:
            facts, hint = "a label compares two works", "give a score to each of the two works"
            raise InputError("a judge is tuned only with labels that score one work", facts, hint=hint)
        yield Exchange(maker.about_one(label.aspect, label.work).user, str(label.score))


@dataclass(frozen=True)
class Verdicts:
    """A corpus source for mid-training that teaches a model to judge: questions about labelled works, and scores.

    Only the scores are trained on. `labels`: path of a file of labels, of which the half for tuning is used. `rubric`:
    path of the rubric. `evidence_chars`: characters of evidence in one question. `hide`: names to replace in it."""

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
        f"a label has only the id of a rollout, {rollout_id}, and not its text",
        "a corpus source has no run to read it from",
        hint="write labels with works: etude judge labels RUN --config CONFIG --term NAME --out FILE",
    )


def label_of(aspect: Aspect, graded: Graded) -> int:
    """Return the grade of a rollout, 0 to 1, as a score on an aspect's scale, rounded down.

    On a scale of two scores, the higher score thus means grade 1: all hidden tests pass."""
    share = min(max(graded.grade, 0.0), 1.0)
    return aspect.lowest + math.floor(share * (aspect.highest - aspect.lowest) + 1e-9)


def check_sections(sections: Sequence[Section]) -> None:
    """Raise `InputError` if the evidence contains the grade, from which the labels are made."""
    if Section.TESTS in sections:
        raise InputError(
            "the judge sees the grade, which is the label",
            f"evidence = {[str(one) for one in sections]}",
            hint="remove 'tests' from evidence: the judge would learn to copy the grade",
        )


def row_of(aspect: Aspect, work: Evidence, label: int, *, group: str) -> dict[str, Any]:
    """Return the label of one work as a dict for a line of a file of labels, which `read_labels` reads.

    `group`: works of one group, such as attempts at one task, are not independent of each other."""
    return {"aspect": aspect.name, "work": work.as_mapping(), "label": label, "group": group}
