"""Training data for a tuned judge: for each label the judge's question as the prompt, and the score as the answer.

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
from etude.rewards.judges.questions import Asking
from etude.rewards.judges.rubrics import Aspect, Rubric, read_rubric
from etude.rewards.judges.verdicts import Form


def exchanges(
    rubric: Rubric, labels: Sequence[Label], *, max_chars: int, seed: int, hide: tuple[str, ...] = ()
) -> Iterator[Exchange]:
    """Yield for each label the question to a tuned judge about the work, with the score as the answer.

    `max_chars`, `hide`: as in the judge's settings. `seed`: of the order and the codes of the fences. Raises
    `InputError` for labels of pairs and if there is no label, and `ConfigError` for a scale with scores of several
    digits."""
    check_form(Form.TOKEN, rubric, tuned=True)
    if not labels:
        hint = "add labels: a hash puts each into the half for tuning or the other one"
        raise InputError("no label is in the half for tuning", hint=hint)
    secret = hashlib.sha256(f"exchanges {seed}".encode()).digest()
    asking = Asking(rubric, Form.TOKEN, max_chars, hide, secret, tuned=True)
    for label in random.Random(f"exchanges {seed}").sample(labels, len(labels)):
        if label.other is not None:
            facts, hint = "a label compares two works", "give a score to each of the two works"
            raise InputError("a judge is tuned only with labels that score one work", facts, hint=hint)
        yield Exchange(asking.about_one(label.aspect, label.work).user, str(label.score))


@dataclass(frozen=True)
class Verdicts:
    """A corpus source for mid-training that teaches a model to judge: questions about labelled works, and scores.

    Only the scores are trained on. `labels`: path of a file of labels, of which the half for tuning is used. `rubric`:
    path of the rubric. `evidence_chars`, `hide`: as in the judge's settings."""

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
        f"a label has the id of a rollout, {rollout_id}, in place of the work",
        "a corpus source has no run to read it from",
        hint="write labels with works: etude judge labels RUN --config CONFIG --term NAME --out FILE",
    )


def label_of(aspect: Aspect, graded: Graded) -> int:
    """Return the grade of a rollout as a score on an aspect's scale, rounded down.

    On a scale of two scores, the higher one means that all hidden tests pass."""
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
    """Return one label as a JSON object, as `read_labels` reads it. `group`: see `Label`."""
    return {"aspect": aspect.name, "work": work.as_mapping(), "label": label, "group": group}
