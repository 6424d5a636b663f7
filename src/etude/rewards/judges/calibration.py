"""Compares the scores of a judge with the labels of people: agreement, and biases by length, position and author.

A work is a text or rollout that is judged. A hash of the work puts its label into one of two halves. You improve a
rubric with one half and report the numbers of the other, so that a rubric fitted to its labels does not look better
than it is. Works with the same `group`, such as attempts at one task, are in the same half, and the bootstrap of the
intervals resamples them together."""

from __future__ import annotations

import asyncio
import enum
import hashlib
import json
import math
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from etude.errors import InputError
from etude.rewards.judges.evidence import Evidence
from etude.rewards.judges.judge import Judge, Verdict
from etude.rewards.judges.questions import FIRST, SECOND
from etude.rewards.judges.rubrics import Aspect, Rubric

T = TypeVar("T")
RESAMPLED = 1000
_Z = 1.96
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
    author: str = ""
    group: str = ""


@dataclass(frozen=True)
class Label:
    """A person's score of one work (a text or rollout that is judged), or their choice between two works.

    `score`: on the aspect's scale; for two works 1 if the first is better, -1 if the second is, 0 for a tie. `author`:
    who did the work, a name that the judge does not see. `group`: works of one group, such as attempts at one task, are
    not independent; "": the work is independent of all others."""

    aspect: Aspect
    work: Evidence
    other: Evidence | None
    score: int
    author: str
    group: str = ""

    @property
    def cluster(self) -> str:
        """A key that labels have in common if they are not independent: `group`, or else the digests of the works."""
        return self.group or repr(sorted({self.work.digest, self.other.digest if self.other else self.work.digest}))

    @property
    def half(self) -> Half:
        """The half of the labels (for tuning or for reporting) to which this label belongs."""
        return half_of(self.cluster)


class Estimate(msgspec.Struct, frozen=True):
    """A number with its 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def differs(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low > 0.0 or self.high < 0.0


class AspectReport(msgspec.Struct, frozen=True, kw_only=True):
    """How well a judge agrees with people about one aspect, over `num_labels` works or pairs with a verdict.

    - `num_unknown`: works or pairs without a verdict. They are in no other number.
    - `kappa`: Cohen's kappa with quadratic weights; on a scale of two scores it equals the unweighted kappa. 1: full
      agreement, 0: agreement by chance.
    - `auc`: of two works that people score differently, the probability that the judge orders them as people do; ties
      count half. On a scale of two scores it is the area under the ROC curve. None for pairs.
    - `exact`: share of equal scores. For `exact` and `kappa`, fractional scores are rounded.
    - `length`: Spearman correlation of judge minus people with the length of the work. None for pairs.
    - `prefers_first`: share of pairs in which the work shown first wins in both orders, minus the share in which the
      work shown second does. None for single works.
    - `authors`: for each author, the mean of judge minus people over their works, minus the same mean over all other
      works, in points of the scale."""

    aspect: str
    num_labels: int
    num_unknown: int
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
    - `author`, `group`: optional, as in `Label`.

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
    if row.first is not None:
        scores = {"first": 1, "second": -1, "tie": 0}
        if row.label not in scores:
            raise ValueError(f"label is {row.label!r}, expected first, second or tie for two works")
        return Label(aspect, _evidence(row.first), _evidence(row.second), scores[str(row.label)], row.author, row.group)
    if not isinstance(row.label, int) or not aspect.lowest <= row.label <= aspect.highest:
        raise ValueError(f"label is {row.label!r}, expected a score from {aspect.lowest} to {aspect.highest}")
    work = of_rollout(row.rollout) if row.rollout is not None else _evidence(row.work)
    return Label(aspect, work, None, row.label, row.author, row.group)


def _evidence(given: Given) -> Evidence:
    if isinstance(given, str):
        return Evidence.of_text(given)
    return Evidence.of_mapping(given or {})


async def calibrate(judge: Judge, labels: Sequence[Label]) -> list[AspectReport]:
    """Ask a judge for its scores of labelled works, and return how well they agree with the labels.

    There is one report for the single works of an aspect, and one for its pairs. Raises `InputError` if an aspect has
    fewer than two labels, or if all its labels are equal: then agreement cannot be measured."""
    reports = []
    kinds = dict.fromkeys((label.aspect.name, label.other is not None) for label in labels)
    for name, of_pairs in kinds:
        own = [one for one in labels if one.aspect.name == name and (one.other is not None) == of_pairs]
        _check_classes(name, own)
        reports.append(await (_of_pairs if of_pairs else _of_works)(judge, own))
    if not reports:
        raise InputError(
            "there are no labels in this half", hint="add labels: a hash of each label decides to which half it belongs"
        )
    return reports


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
    verdicts = await _few_at_once(judge, (judge.score(aspect, label.work) for label in labels))
    known, found = _known(labels, [one.value for one in verdicts], verdicts)
    people, said = [label.score for label in known], list(map(float, found))
    lengths = [float(sum(len(part.text) for part in label.work.parts)) for label in known]
    more = [s - p for s, p in zip(said, people, strict=True)]
    rounded = [math.floor(s + 0.5) for s in said]
    levels = range(aspect.lowest, aspect.highest + 1)
    agreed = _Counts(people, levels, rounded, levels, known)
    ordered = _Counts(people, levels, said, sorted(set(said)), known)
    table = agreed.table()
    return AspectReport(
        aspect=aspect.name,
        num_labels=len(known),
        num_unknown=len(labels) - len(known),
        kappa=agreed.estimate(kappa),
        auc=ordered.estimate(concordance),
        exact=float(np.trace(table) / table.sum()),
        length=_correlation(known, more, lengths),
        prefers_first=None,
        authors=_by_author(known, more),
    )


async def _of_pairs(judge: Judge, labels: Sequence[Label]) -> AspectReport:
    aspect = labels[0].aspect
    answers = await _few_at_once(
        judge, (judge.in_both_orders(aspect, label.work, label.other) for label in labels if label.other is not None)
    )
    shown = [None if None in (a.value, b.value) else (a.value, b.value) for a, b in answers]
    unknown = [next((one for one in pair if one.value is None), pair[0]) for pair in answers]
    known, found = _known(labels, shown, unknown)
    ahead = {FIRST: 1, SECOND: -1}
    said = [int(np.sign(ahead.get(a, 0) - ahead.get(b, 0))) for a, b in found]
    counts = _Counts([label.score for label in known], range(-1, 2), said, range(-1, 2), known)
    table = counts.table()
    first = [float((a == b == FIRST) - (a == b == SECOND)) for a, b in found]
    return AspectReport(
        aspect=aspect.name,
        num_labels=len(known),
        num_unknown=len(labels) - len(known),
        kappa=counts.estimate(kappa),
        auc=None,
        exact=float(np.trace(table) / table.sum()),
        length=None,
        prefers_first=_clustered(known, _mean(first), lambda at: float(np.mean(np.array(first)[at]))),
        authors={},
    )


async def _few_at_once(judge: Judge, calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Await calls of a judge, so many at once as it allows: the deadline of a question counts its wait for a place."""
    places = asyncio.Semaphore(judge.limits.at_once)

    async def one(call: Coroutine[Any, Any, T]) -> T:
        async with places:
            return await call

    return await asyncio.gather(*map(one, calls))


def _known(
    labels: Sequence[Label], values: Sequence[Any], verdicts: Sequence[Verdict]
) -> tuple[list[Label], list[Any]]:
    """Return the labels with a verdict, and the verdicts. Raises `InputError` if people or judge leave one class."""
    both = [(label, value) for label, value in zip(labels, values, strict=True) if value is not None]
    if len({label.score for label, _ in both}) < 2:
        why = next((one.reason for one in verdicts if one.value is None), "")
        facts = f"{len(both)} of {len(labels)} have a verdict; {why}"
        hint = "correct the cause that is named, then calibrate again"
        raise InputError("the judge gave too few verdicts to compare them with the labels", facts, hint=hint)
    return [label for label, _ in both], [value for _, value in both]


async def distance(judge: Judge, auditor: Judge, works: Sequence[Evidence]) -> Estimate:
    """Measure the root mean square difference between the values of two judges on the same works.

    The `high` of the result can be used as the tolerance of an audit. Raises `InputError` if fewer than two works have
    a value of both judges."""
    values = [await _few_at_once(one, (_value(one, work) for work in works)) for one in (judge, auditor)]
    squares = [(a - b) ** 2 for a, b in zip(*values, strict=True) if a is not None and b is not None]
    if len(squares) < 2:
        raise InputError(
            "the distance to the auditor cannot be measured",
            f"only {len(squares)} works have a value of both judges",
            hint="calibrate each judge alone: its report says why values are unknown",
        )
    mean = _mean(squares)
    return Estimate(math.sqrt(mean.value), math.sqrt(max(0.0, mean.low)), math.sqrt(max(0.0, mean.high)))


async def _value(judge: Judge, work: Evidence) -> float | None:
    found = await asyncio.gather(*(judge.score(aspect, work) for aspect in judge.rubric.aspects))
    scores = {aspect.name: one.value for aspect, one in zip(judge.rubric.aspects, found, strict=True)}
    return None if None in scores.values() else judge.rubric.value(scores)


# statistics


Table = npt.NDArray[np.float64]


class _Counts:
    """Counts of pairs (people's score, judge's score), over all works and over works that are drawn again."""

    def __init__(
        self,
        people: Sequence[int],
        rows: Sequence[int],
        judge: Sequence[float],
        columns: Sequence[float],
        labels: Sequence[Label],
    ) -> None:
        places = [{score: i for i, score in enumerate(scores)} for scores in (rows, columns)]
        self.shape = len(rows), len(columns)
        pairs = zip(people, judge, strict=True)
        self.cells = np.array([places[0][p] * self.shape[1] + places[1][j] for p, j in pairs])
        clusters: dict[str, int] = {}
        self.cluster = np.array([clusters.setdefault(label.cluster, len(clusters)) for label in labels])

    def table(self, weights: Table | None = None) -> Table:
        """[people's scores, judge's scores] The number of works, each with its weight."""
        found = np.bincount(self.cells, weights, minlength=self.shape[0] * self.shape[1])
        return found.reshape(self.shape).astype(float)

    def estimate(self, statistic: Callable[[Table], float]) -> Estimate:
        """A statistic of the table, with the interval of its bootstrap over clusters. The draws are always the same."""
        n = int(self.cluster.max()) + 1
        drawn = np.random.default_rng(0).multinomial(n, np.full(n, 1.0 / n), RESAMPLED)
        found = [statistic(self.table(counts[self.cluster].astype(float))) for counts in drawn]
        low, high = np.quantile(found, [0.025, 0.975])
        return Estimate(statistic(self.table()), float(low), float(high))


def kappa(table: Table) -> float:
    """Compute Cohen's kappa with squared weights (Cohen 1968) from a table of counts [people's class, judge's class].

    It is 0.0 if both have one class only.

    >>> float(kappa(np.array([[20.0, 5.0], [10.0, 15.0]])))
    0.4
    """
    levels = np.arange(len(table))
    weights = (levels[:, None] - levels) ** 2
    chance = np.outer(table.sum(1), table.sum(0)) / table.sum()
    expected = (weights * chance).sum()
    return float(1.0 - (weights * table).sum() / expected) if expected else 0.0


def concordance(table: Table) -> float:
    """Compute the probability that the judge orders two works as people do, if people score them differently.

    `table`: counts [people's class, judge's class]. Works that the judge scores equally count half.

    >>> float(concordance(np.array([[3.0, 1.0], [1.0, 3.0]])))
    0.75
    """
    right = total = 0.0
    for low in range(len(table)):
        for high in range(low + 1, len(table)):
            below = np.concatenate([[0.0], np.cumsum(table[low])[:-1]])
            right += float((table[high] * (below + table[low] / 2)).sum())
            total += float(table[high].sum() * table[low].sum())
    return right / total if total else 0.5


def _mean(values: Sequence[float]) -> Estimate:
    mean = float(np.mean(values))
    half = _Z * float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.inf
    return Estimate(mean, mean - half, mean + half)


Places = npt.NDArray[np.intp]


def _clustered(labels: Sequence[Label], plain: Estimate, statistic: Callable[[Places], float | None]) -> Estimate:
    """Return an estimate; if there are clusters of several works, with the interval of its bootstrap over clusters.

    `plain`: the estimate for independent works. `statistic`: the value of the works at some places, with repetitions;
    None if they have none. The draws are always the same."""
    clusters: dict[str, list[int]] = {}
    for place, label in enumerate(labels):
        clusters.setdefault(label.cluster, []).append(place)
    if len(clusters) == len(labels):
        return plain
    if len(clusters) == 1:
        return Estimate(plain.value, -math.inf, math.inf)
    places, draws = [np.array(some) for some in clusters.values()], np.random.default_rng(0)
    drawn = (draws.integers(len(places), size=len(places)) for _ in range(RESAMPLED))
    found = [statistic(np.concatenate([places[i] for i in some])) for some in drawn]
    low, high = np.quantile([value for value in found if value is not None], [0.025, 0.975])
    return Estimate(plain.value, float(low), float(high))


def _correlation(labels: Sequence[Label], first: Sequence[float], second: Sequence[float]) -> Estimate | None:
    """Spearman's rank correlation, with Fisher's interval; None for fewer than 5 values, or constant ones."""
    both = np.array([first, second])

    def spearman(at: Places) -> float | None:
        ranks = [_ranks(values[at]) for values in both]
        return float(np.corrcoef(ranks[0], ranks[1])[0, 1]) if all(one.std() for one in ranks) else None

    value = spearman(np.arange(len(first)))
    if len(first) < 5 or value is None:
        return None
    centre, half = math.atanh(min(max(value, -0.999999), 0.999999)), _Z * 1.03 / math.sqrt(len(first) - 3)
    return _clustered(labels, Estimate(value, math.tanh(centre - half), math.tanh(centre + half)), spearman)


def _ranks(values: Table) -> Table:
    """The ranks of values; equal ones share their mean rank."""
    ordered = np.sort(values)
    return (np.searchsorted(ordered, values, "left") + np.searchsorted(ordered, values, "right")) / 2.0


def _by_author(labels: Sequence[Label], more: Sequence[float]) -> dict[str, Estimate]:
    found, values = dict[str, Estimate](), np.array(more)
    for author in sorted({label.author for label in labels} - {""}):
        own = np.array([label.author == author for label in labels])

        def difference(at: Places, own: npt.NDArray[np.bool_] = own) -> float | None:
            mine, others = values[at][own[at]], values[at][~own[at]]
            return float(mine.mean() - others.mean()) if len(mine) and len(others) else None

        if own.sum() > 1 and (~own).sum() > 1:
            a, b = _mean(values[own].tolist()), _mean(values[~own].tolist())
            half = math.hypot(a.high - a.value, b.high - b.value)
            plain = Estimate(a.value - b.value, a.value - b.value - half, a.value - b.value + half)
            found[author] = _clustered(labels, plain, difference)
    return found


def as_json(reports: Sequence[AspectReport], **facts: Mapping[str, Any] | str | float | None) -> str:
    """Return reports as JSON text, with further facts about how they were made."""
    return json.dumps(facts | {"aspects": msgspec.to_builtins(reports)}, indent=2) + "\n"
