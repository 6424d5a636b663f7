"""The results of base models on the same texts and questions, and their differences. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from etude.corpus.documents import Document
from etude.errors import InputError
from etude.evals.bases.measures import POSITIONS, LossMeasure, Scorer, document_loss, is_right
from etude.evals.bases.questions import Question
from etude.evals.intervals import Interval, clustered_rate, paired_difference, ratio
from etude.harness.tokenizer import SafeTokenizer


@dataclass(frozen=True)
class Candidate:
    """A base model to measure.

    `load`: loads the model; only one candidate is in memory at a time. `start_id`: the id of the token that is put
    before each text."""

    name: str
    tokenizer: SafeTokenizer
    start_id: int
    load: Callable[[], Scorer]


@dataclass(frozen=True)
class BaseResult:
    """The measurements of one candidate.

    - `losses`: the loss of each document. `right`: whether each question was answered correctly.
    - `loss`: bits per byte over all documents. `by_position`: the same for ranges of positions within documents, by the
      first byte of the range; ranges that fewer than two documents reach are left out.
    - `accuracy`: share of correct answers, by kind of question; guessing among four options gives 0.25.
    - `bytes_per_token`: mean bytes of text per token of its tokeniser on these documents."""

    name: str
    losses: tuple[LossMeasure, ...]
    right: tuple[bool, ...]
    loss: Interval
    by_position: Mapping[int, Interval]
    accuracy: Mapping[str, Interval]
    bytes_per_token: float


@dataclass(frozen=True)
class Comparison:
    """The difference between a candidate and the first one, on the same documents and questions.

    `name`: the candidate. A negative `loss` (bits per byte) and a positive `accuracy` mean that it is better than the
    first one. The intervals are narrower than those of the candidates, since both had the same texts."""

    name: str
    loss: Interval
    accuracy: Mapping[str, Interval]


def compare_bases(
    candidates: Sequence[Candidate],
    documents: Sequence[Document],
    questions: Sequence[Question],
    *,
    on_done: Callable[[], object] = lambda: None,
) -> tuple[list[BaseResult], list[Comparison]]:
    """Measure every candidate on the same documents and questions, and compare each with the first.

    The 95 % intervals say what to expect for other documents of the same kind. `on_done` is called after each document
    and each question. Raises `InputError` for fewer than two documents with text, since they give no interval."""
    documents = [one for one in documents if one.text]
    if len(documents) < 2:
        raise InputError(
            "there is too little text to compare models on",
            f"{len(documents)} documents have text, and an interval needs at least 2",
            hint="give a folder with more text files",
        )
    results = [_measure(one, documents, questions, on_done) for one in candidates]
    return results, [_compared(results[0], one, questions) for one in results[1:]]


def _measure(
    one: Candidate, documents: Sequence[Document], questions: Sequence[Question], on_done: Callable[[], object]
) -> BaseResult:
    scorer, losses, right = one.load(), [], []
    for document in documents:
        losses.append(document_loss(scorer, one.tokenizer, document.text, one.start_id))
        on_done()
    for question in questions:
        right.append(is_right(scorer, one.tokenizer, question, one.start_id))
        on_done()
    bits, num_bytes = [x.bits.sum() for x in losses], [x.num_bytes.sum() for x in losses]
    by_position = {}
    for i, start in enumerate(POSITIONS):
        reach = [x for x in losses if x.num_bytes[i] > 0]
        if len(reach) > 1:
            by_position[start] = ratio([x.bits[i] for x in reach], [x.num_bytes[i] for x in reach])
    accuracy = {
        kind: clustered_rate([float(right[i]) for i in found], [questions[i].origin for i in found])
        for kind, found in _by_kind(questions).items()
    }
    tokens = sum(x.tokens for x in losses)
    loss = ratio(bits, num_bytes)
    return BaseResult(
        one.name, tuple(losses), tuple(right), loss, by_position, accuracy, float(sum(num_bytes)) / max(1, tokens)
    )


def _compared(first: BaseResult, other: BaseResult, questions: Sequence[Question]) -> Comparison:
    apart = [b.bits.sum() - a.bits.sum() for a, b in zip(first.losses, other.losses, strict=True)]
    accuracy = {
        kind: paired_difference(
            [float(other.right[i]) - float(first.right[i]) for i in found], [questions[i].origin for i in found]
        )
        for kind, found in _by_kind(questions).items()
    }
    return Comparison(other.name, ratio(apart, [x.num_bytes.sum() for x in first.losses]), accuracy)


def _by_kind(questions: Sequence[Question]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for i, question in enumerate(questions):
        found.setdefault(question.kind, []).append(i)
    return found


def plain(results: Sequence[BaseResult], comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """Return results as plain data for JSON. An interval is [value, low, high]."""

    def numbers(one: Interval) -> list[float]:
        return [one.value, one.low, one.high]

    return {
        "results": [
            {
                "name": one.name,
                "bits_per_byte": numbers(one.loss),
                "by_position": {str(start): numbers(x) for start, x in one.by_position.items()},
                "accuracy": {kind: numbers(x) for kind, x in one.accuracy.items()},
                "bytes_per_token": one.bytes_per_token,
            }
            for one in results
        ],
        "differences": [
            {
                "name": one.name,
                "bits_per_byte": numbers(one.loss),
                "accuracy": {kind: numbers(x) for kind, x in one.accuracy.items()},
            }
            for one in comparisons
        ],
    }
