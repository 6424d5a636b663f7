"""Compares the scores of a judge with the labels of people: agreement, and biases by length, position and author.

A work is a text or rollout that is judged. The judge is asked as its reward term asks it (`Mode`): one that compares
works is asked about pairs or groups of labelled works, and its choice in each pair is compared with that of people.

A hash of the work puts its label into one of two halves. You improve a rubric with one half and report the numbers of
the other, so that a rubric fitted to its labels does not look better than it is. Works with the same `group`, such as
attempts at one task, are in the same half, and are one cluster in the intervals."""

from __future__ import annotations

import asyncio
import enum
import hashlib
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from etude.errors import InputError
from etude.rewards.judges.agreement import (
    Counts,
    Estimate,
    by_author,
    clustered_mean,
    concordance,
    correlation,
    in_order,
    kappa,
)
from etude.rewards.judges.evidence import Evidence
from etude.rewards.judges.judge import Judge, Verdict
from etude.rewards.judges.questions import FIRST, SECOND
from etude.rewards.judges.rubrics import Aspect, Rubric
from etude.rewards.judges.terms import GroupJudgeTerm, JudgeTerm, Mode

Given = str | dict[str, Any] | None


class Half(enum.StrEnum):
    """The two halves of the labels. TUNE: used to improve a rubric or train a judge. REPORT: used to measure the
    result."""

    TUNE = "tune"
    REPORT = "report"


def half_of(cluster: str) -> Half:
    """Return the half to which the labels of a cluster (`Label.cluster`, such as their group) belong, by its hash."""
    return list(Half)[hashlib.sha256(cluster.encode()).digest()[0] % 2]


class _Row(msgspec.Struct, forbid_unknown_fields=True):
    """A line of a file of labels."""

    label: int | str
    work: Given = None
    rollout: str | None = None
    first: Given = None
    second: Given = None
    aspect: str = ""
    author: str | tuple[str, str] = ""
    group: str = ""


@dataclass(frozen=True)
class Label:
    """A person's score of one work (a text or rollout that is judged), or their choice between two works.

    `score`: on the aspect's scale; for two works 1 if the first is better, -1 if the second is, 0 for a tie. `author`,
    `other_author`: who did the works, names that the judge does not see; "": unknown. `group`: works of one group, such
    as attempts at one task, are not independent; "": the work is independent of all others."""

    aspect: Aspect
    work: Evidence
    other: Evidence | None
    score: int
    author: str
    group: str = ""
    other_author: str = ""

    @property
    def cluster(self) -> str:
        """A key that labels have in common if they are not independent: `group`, or else the digests of the works."""
        return self.group or repr(sorted({self.work.digest, self.other.digest if self.other else self.work.digest}))

    @property
    def half(self) -> Half:
        """The half of the labels (for tuning or for reporting) to which this label belongs."""
        return half_of(self.cluster)


class AspectReport(msgspec.Struct, frozen=True, kw_only=True):
    """How well a judge agrees with people about one aspect, over `num_labels` works or pairs with a verdict.

    - `num_unknown`: works or pairs without a verdict. They are in no other number. `why_unknown`: the most frequent
      reason; "" if all have a verdict.
    - `kappa`: Cohen's kappa with quadratic weights; on a scale of two scores it equals the unweighted kappa. 1: full
      agreement, 0: agreement by chance.
    - `auc`: of two works that people score differently, the probability that the judge orders them as people do; ties
      count half. On a scale of two scores it is the area under the ROC curve.
    - `exact`: share of equal scores, or choices. For `exact` and `kappa`, fractional scores are rounded.
    - `length`: Spearman correlation of judge minus people with the length of the work; for pairs, with how much longer
      one work is than the other.
    - `prefers_first`: share of pairs in which the work shown first wins in both orders, minus the share in which the
      work shown second does; for rankings over pairs that people score differently. None for a judge that sees one work
      at a time.
    - `authors`: for each author, the mean of judge minus people over their works, minus the same mean over all other
      works, in points of the scale. For pairs: how much more often than people the judge chooses the author's work,
      over pairs with works of this and another author."""

    aspect: str
    num_labels: int
    num_unknown: int
    why_unknown: str
    kappa: Estimate
    auc: Estimate | None
    exact: float
    length: Estimate | None
    prefers_first: Estimate | None
    authors: dict[str, Estimate]

    @property
    def biases(self) -> list[str]:
        """Descriptions of the biases whose interval excludes 0, one text each."""
        found = []
        if self.length is not None and self.length.differs:
            found.append(f"{'longer' if self.length.value > 0 else 'shorter'} works get more than from people")
        if self.prefers_first is not None and self.prefers_first.differs:
            found.append(f"the {'first' if self.prefers_first.value > 0 else 'second'} of two works is preferred")
        for author, one in self.authors.items():
            if one.differs:
                found.append(f"works by {author} get {'more' if one.value > 0 else 'less'} than from people")
        return found


def read_labels(path: Path, rubric: Rubric, of_rollout: Callable[[str], Evidence]) -> list[Label]:
    """Read a file of labels with one JSON object per line. Its keys are:

    - What was labelled, one of: `work` (a text, or a mapping of kinds of evidence to texts); `rollout` (the id of a
      rollout, from which `of_rollout` makes evidence); `first` and `second` (two works to compare).
    - `label`: a score on the aspect's scale; for two works "first", "second" or "tie".
    - `aspect`: may be left out if the rubric has only one.
    - `author`, `group`: optional, as in `Label`. For two works, `author` is a list of two names.

    Raises `InputError`, which names the line, for a label that is not valid."""
    try:
        lines = path.read_text().split("\n")  # other line breaks may be inside of a JSON text
    except (OSError, UnicodeDecodeError) as error:
        hint = "give a file of JSON lines; see docs/guides/judges.md"
        raise InputError(f"the labels in {path} cannot be read", str(error), hint=hint) from None
    labels = list[Label]()
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                labels.append(_label(msgspec.json.decode(line, type=_Row), rubric, of_rollout))
            except (msgspec.DecodeError, ValueError) as error:
                hint = 'write e.g. {"work": "a text", "label": 4}; see docs/guides/judges.md'
                raise InputError(f"line {number} of {path} is not a label", str(error), hint=hint) from None
    return labels


def _label(row: _Row, rubric: Rubric, of_rollout: Callable[[str], Evidence]) -> Label:
    aspects = {aspect.name: aspect for aspect in rubric.aspects}
    name = row.aspect or (rubric.aspects[0].name if len(aspects) == 1 else "")
    if name not in aspects:
        raise ValueError(f"aspect is {name!r}, expected one of the rubric: {', '.join(aspects)}")
    aspect = aspects[name]
    given = [what for what in ("work", "rollout", "first", "second") if getattr(row, what) is not None]
    if given not in (["work"], ["rollout"], ["first", "second"]):
        raise ValueError(f"it has {' and '.join(given) or 'no work'}: give work, or rollout, or first and second")
    if isinstance(row.author, str) != (row.first is None) and row.author:
        raise ValueError(f"author is {row.author!r}: give one name for one work, and a list of two names for two works")
    author, other_author = (row.author, "") if isinstance(row.author, str) else row.author
    if row.first is not None:
        scores = {"first": 1, "second": -1, "tie": 0}
        if row.label not in scores:
            raise ValueError(f"label is {row.label!r}, expected first, second or tie for two works")
        works = _evidence(row.first), _evidence(row.second)
        return Label(aspect, *works, scores[str(row.label)], author, row.group, other_author)
    if not isinstance(row.label, int) or not aspect.lowest <= row.label <= aspect.highest:
        raise ValueError(f"label is {row.label!r}, expected a score from {aspect.lowest} to {aspect.highest}")
    work = of_rollout(row.rollout) if row.rollout is not None else _evidence(row.work)
    return Label(aspect, work, None, row.label, author, row.group)


def _evidence(given: Given) -> Evidence:
    if isinstance(given, str):
        return Evidence.of_text(given)
    return Evidence.of_mapping(given or {})


async def calibrate(judge: Judge, labels: Sequence[Label], mode: Mode = Mode.POINTWISE) -> list[AspectReport]:
    """Ask a judge about labelled works, as a reward term of this mode does, and return how well it agrees with people.

    There is one report for the single works of an aspect, and one for its pairs. A judge that compares works is asked
    about the works of each `group`, and the report on single works is about all pairs of works of a group.

    Raises `InputError` if there are no labels, if the labels of an aspect are all equal (agreement cannot be measured
    then), or if a judge that compares works has no two works of one group."""
    reports = []
    kinds = dict.fromkeys((label.aspect.name, label.other is not None) for label in labels)
    for name, of_pairs in kinds:
        own = [one for one in labels if one.aspect.name == name and (one.other is not None) == of_pairs]
        _check_classes(name, own)
        if not of_pairs and mode is Mode.POINTWISE:
            reports.append(await _of_works(judge, own))
        else:
            reports.append(await _of_pairs(judge, own if of_pairs else _pairs_in(_siblings(own)), mode))
    if not reports:
        raise InputError(
            "there are no labels in this half", hint="add labels: a hash of each label decides to which half it belongs"
        )
    return reports


def _siblings(labels: Iterable[Label]) -> list[list[Label]]:
    """Return the labels of single works by `group`, for groups with at least two different works of one aspect.

    A work that is labelled twice counts once. Raises `InputError` if there is no such group."""
    groups: dict[tuple[str, str], dict[str, Label]] = {}
    for label in labels:
        if label.group and label.other is None:
            groups.setdefault((label.group, label.aspect.name), {}).setdefault(label.work.digest, label)
    found = [list(group.values()) for group in groups.values() if len(group) > 1]
    if not found:
        facts = "it compares the works of a group, and no two labels have the same `group`"
        hint = 'give attempts at one task the same "group"; or label pairs, with "first" and "second"'
        raise InputError("the judge cannot be calibrated on these labels", facts, hint=hint)
    return found


def _pairs_in(groups: Iterable[Sequence[Label]]) -> list[Label]:
    """Return what people say of all pairs of works of a group."""
    return [
        Label(a.aspect, a.work, b.work, (a.score > b.score) - (a.score < b.score), a.author, a.group, b.author)
        for group in groups
        for a, b in itertools.combinations(group, 2)
    ]


def _check_classes(name: str, labels: Sequence[Label]) -> None:
    classes = sorted({label.score for label in labels})
    if len(classes) < 2:
        raise InputError(
            f"the labels of aspect {name!r} are all equal",
            f"{len(labels)} labels, all {classes[0]}",
            hint="add labels with other scores: agreement can be measured only if labels differ",
        )


async def _of_works(judge: Judge, labels: Sequence[Label]) -> AspectReport:
    aspect = labels[0].aspect
    verdicts = await asyncio.gather(*(judge.score(aspect, label.work) for label in labels))
    known, found = _known(labels, [one.value for one in verdicts], verdicts)
    people, said = [label.score for label in known], list(map(float, found))
    lengths = [float(_length(label.work)) for label in known]
    more = [s - p for s, p in zip(said, people, strict=True)]
    rounded = [math.floor(s + 0.5) for s in said]
    levels = range(aspect.lowest, aspect.highest + 1)
    clusters = [label.cluster for label in known]
    agreed = Counts(people, levels, rounded, levels, clusters)
    ordered = Counts(people, levels, said, sorted(set(said)), clusters)
    table = agreed.table()
    return AspectReport(
        aspect=aspect.name,
        num_labels=len(known),
        num_unknown=len(labels) - len(known),
        why_unknown=_most_frequent_reason(verdicts),
        kappa=agreed.estimate(kappa, -1.0),
        auc=ordered.estimate(concordance),
        exact=float(np.trace(table) / table.sum()),
        length=correlation(clusters, more, lengths),
        prefers_first=None,
        authors=by_author(clusters, [label.author for label in known], more),
    )


async def _of_pairs(judge: Judge, labels: Sequence[Label], mode: Mode) -> AspectReport:
    answers = await _choices(judge, labels, mode)
    known, found = _known(labels, [None if isinstance(one, Verdict) else one for one in answers], answers)
    said = [int(np.sign(sum(ahead for ahead, _ in both))) for both in found]
    clusters = [label.cluster for label in known]
    counts = Counts([label.score for label in known], range(-1, 2), said, range(-1, 2), clusters)
    table = counts.table()
    more = [(one - label.score) / 2 for one, label in zip(said, known, strict=True)]
    longer = [float(_length(label.work) - _length(label.other)) for label in known if label.other is not None]
    compared = [  # a ranking has no ties, so works that are equally good may well be left as they were shown
        (label.cluster, sum(ahead * place for ahead, place in both))
        for label, both in zip(known, found, strict=True)
        if label.score or mode is Mode.PAIRWISE
    ]
    first = [float((times == 2) - (times == -2)) for _, times in compared]
    return AspectReport(
        aspect=labels[0].aspect.name,
        num_labels=len(known),
        num_unknown=len(labels) - len(known),
        why_unknown=_most_frequent_reason(answers),
        kappa=counts.estimate(kappa, -1.0),
        auc=counts.estimate(in_order),
        exact=float(np.trace(table) / table.sum()),
        length=correlation(clusters, more, longer),
        prefers_first=None if mode is Mode.POINTWISE else clustered_mean([cluster for cluster, _ in compared], first),
        authors=_by_author_of_pairs(known, more),
    )


Choice = list[tuple[int, int]]
"""For two presentations of a pair: 1 if the label's first work was chosen, -1 if the other one was, 0 for a tie; and 1
if the label's first work was shown first, else -1."""


async def _choices(judge: Judge, labels: Sequence[Label], mode: Mode) -> list[Choice | Verdict]:
    """Return which work of each pair a judge chooses in both presentations; or a verdict that says why it is unknown.

    All pairs have one aspect. A judge that ranks is asked about all works of a cluster at once."""
    aspect = labels[0].aspect
    pairs = [(label.work, label.other) for label in labels if label.other is not None]
    if mode is Mode.PAIRWISE:
        both = await asyncio.gather(*(judge.in_both_orders(aspect, *pair) for pair in pairs))
        return list(itertools.starmap(_of_orders, both))
    if mode is Mode.RANKING:
        groups: dict[str, dict[str, Evidence]] = {}
        for label, pair in zip(labels, pairs, strict=True):
            groups.setdefault(label.cluster, {}).update({work.digest: work for work in pair})
        ranked = await asyncio.gather(*(judge.in_two_orders(aspect, [*works.values()]) for works in groups.values()))
        found = dict(zip(groups, ranked, strict=True))
        return [_of_rankings(found[label.cluster], *pair) for label, pair in zip(labels, pairs, strict=True)]
    works = {work.digest: work for pair in pairs for work in pair}
    scores = dict(
        zip(works, await asyncio.gather(*(judge.score(aspect, work) for work in works.values())), strict=True)
    )
    return [_of_scores(scores[a.digest], scores[b.digest]) for a, b in pairs]


def _of_orders(a: Verdict, b: Verdict) -> Choice | Verdict:
    if a.value is None or b.value is None:
        return a if a.value is None else b
    ahead = {FIRST: 1, SECOND: -1}
    return [(ahead.get(a.value, 0), 1), (-ahead.get(b.value, 0), -1)]


def _of_scores(a: Verdict, b: Verdict) -> Choice | Verdict:
    if a.value is None or b.value is None:
        return a if a.value is None else b
    return [(int(np.sign(a.value - b.value)), 0)] * 2


def _of_rankings(
    presentations: Sequence[tuple[Sequence[Evidence], Verdict]], a: Evidence, b: Evidence
) -> Choice | Verdict:
    choice: Choice = []
    for shown, verdict in presentations:
        if verdict.value is None:
            return verdict
        at = {work.digest: number for number, work in enumerate(shown, 1)}
        numbers = at[a.digest], at[b.digest]
        places = [verdict.value.index(number) for number in numbers]
        choice.append((int(np.sign(places[1] - places[0])), int(np.sign(numbers[1] - numbers[0]))))
    return choice


def _by_author_of_pairs(labels: Sequence[Label], more: Sequence[float]) -> dict[str, Estimate]:
    found = dict[str, Estimate]()
    for author in sorted({one for label in labels for one in (label.author, label.other_author)} - {""}):
        own = [
            (label.cluster, value if label.author == author else -value)
            for label, value in zip(labels, more, strict=True)
            if (label.author == author) != (label.other_author == author) and label.author and label.other_author
        ]
        if len(own) > 1:
            found[author] = clustered_mean(*map(list, zip(*own, strict=True)))
    return found


def _length(work: Evidence) -> int:
    return sum(len(part.text) for part in work.parts)


def _known(labels: Sequence[Label], values: Sequence[Any], verdicts: Sequence[Any]) -> tuple[list[Label], list[Any]]:
    """Return the labels with a verdict, and the verdicts. Raises `InputError` if people or judge leave one class."""
    both = [(label, value) for label, value in zip(labels, values, strict=True) if value is not None]
    if len({label.score for label, _ in both}) < 2:
        facts = f"{len(both)} of {len(labels)} have a verdict; {_most_frequent_reason(verdicts)}"
        hint = "correct the cause that is named, then calibrate again"
        raise InputError("the judge gave too few verdicts to compare them with the labels", facts, hint=hint)
    return [label for label, _ in both], [value for _, value in both]


def _most_frequent_reason(verdicts: Iterable[object]) -> str:
    reasons = Counter(one.reason for one in verdicts if isinstance(one, Verdict) and one.value is None)
    return reasons.most_common(1)[0][0] if reasons else ""


async def distance(
    term: JudgeTerm | GroupJudgeTerm, auditor: JudgeTerm | GroupJudgeTerm, groups: Sequence[Sequence[Evidence]]
) -> Estimate:
    """Measure the root mean square difference between the values that two terms give the works of each group.

    The `high` of the result can be used as the tolerance of an audit. Raises `InputError` for terms of different modes,
    and if fewer than two groups have values of both terms."""
    if term.mode is not auditor.mode:
        facts = f"one has mode = '{term.mode}', the other '{auditor.mode}', so their values mean different things"
        raise InputError("the distance to the auditor cannot be measured", facts, hint="give both the same mode")
    scores = [await asyncio.gather(*map(one.scores, groups)) for one in (term, auditor)]
    pairs = [
        (at, a.value, b.value) for at, both in enumerate(zip(*scores, strict=True)) for a, b in zip(*both, strict=True)
    ]
    known = [(at, (a - b) ** 2) for at, a, b in pairs if a is not None and b is not None]
    if len({at for at, _ in known}) < 2:
        raise InputError(
            "the distance to the auditor cannot be measured",
            f"only {len(known)} of {len(pairs)} works have a value of both judges, and at least two groups are needed",
            hint="calibrate each judge alone: its report says why values are unknown; or label works of more groups",
        )
    found = clustered_mean(*map(list, zip(*known, strict=True)))
    return Estimate(*(math.sqrt(max(0.0, one)) for one in (found.value, found.low, found.high)))


async def order_of(
    auditor: JudgeTerm | GroupJudgeTerm, labels: Sequence[Label], groups: Sequence[Sequence[Evidence]]
) -> dict[str, Estimate]:
    """Measure how well the values that an auditor gives the works of each group order them, as `AspectReport.auc` does.

    Returns one estimate for each aspect of the labels of single works; 0.5: order by chance. For an auditor that
    compares works, only works of one group are compared."""
    scores = await asyncio.gather(*map(auditor.scores, groups))
    values = {
        work.digest: one.value
        for works, some in zip(groups, scores, strict=True)
        for work, one in zip(works, some, strict=True)
        if one.value is not None
    }
    found = dict[str, Estimate]()
    singles = [label for label in labels if label.other is None and label.work.digest in values]
    for name in dict.fromkeys(label.aspect.name for label in singles):
        own = [label for label in singles if label.aspect.name == name]
        statistic = concordance
        if auditor.mode is Mode.POINTWISE:
            said = [values[label.work.digest] for label in own]
        else:
            own, statistic = _pairs_in(_siblings(own)), in_order
            ahead = [(values[one.work.digest], values[one.other.digest]) for one in own if one.other is not None]
            said = [float(a > b) - float(a < b) for a, b in ahead]
        pairwise = statistic is in_order
        rows = range(-1, 2) if pairwise else sorted({label.score for label in own})
        columns = range(-1, 2) if pairwise else sorted(set(said))
        counts = Counts([label.score for label in own], rows, said, columns, [label.cluster for label in own])
        found[name] = counts.estimate(statistic)
    return found


def as_json(reports: Sequence[AspectReport], **facts: Mapping[str, Any] | str | float | None) -> str:
    """Return reports as JSON text, with further facts about how they were made."""
    return json.dumps(facts | {"aspects": msgspec.to_builtins(reports)}, indent=2) + "\n"
