"""Bits per byte and accuracy of a model on given texts and questions, from log-probabilities. Imports no torch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from etude.evals.bases.questions import Question
from etude.harness.tokenizer import SafeTokenizer

F64 = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

POSITIONS = (0, 1 << 10, 1 << 12, 1 << 14, 1 << 16)
"""Starts of the ranges of positions, in bytes from the start of a document. The last one has no end."""


class Scorer(Protocol):
    """Computes log-probabilities of token ids under a model."""

    context_tokens: int
    """The most tokens of one call."""

    def logprobs(self, ids: Sequence[int], first: int) -> F64:
        """Return the log-probability, in nats, of each of `ids[first:]` given all tokens before it.

        `first` is at least 1."""
        ...

    def likeliest(self, ids: Sequence[int], first: int) -> Bools:
        """Return for each of `ids[first:]` whether it is the most likely token after all tokens before it.

        `first` is at least 1."""
        ...


@dataclass(frozen=True)
class LossMeasure:
    """The loss of one document: the sum of bits and the number of bytes in each range of `POSITIONS`, and the number of
    tokens."""

    bits: F64
    num_bytes: F64
    tokens: int


def document_loss(scorer: Scorer, tokenizer: SafeTokenizer, text: str, start_id: int) -> LossMeasure:
    """Compute the loss of a document. Every token counts once, and is predicted from at least half a context of earlier
    tokens, or from all if there are fewer.

    `start_id`: the token before the document's first."""
    encoded = tokenizer.tokenizer.encode(text, add_special_tokens=False)
    byte_of_char = np.cumsum([0, *(len(char.encode("utf-8", "replace")) for char in text)])
    starts = byte_of_char[[min(begin, len(text)) for begin, _ in encoded.offsets]]
    where = np.searchsorted(POSITIONS, starts, side="right") - 1
    logprobs = rolling_logprobs(scorer, encoded.ids, start_id)
    bits = np.bincount(where, weights=-logprobs / np.log(2), minlength=len(POSITIONS)).astype(np.float64)
    ends = [*POSITIONS[1:], np.inf]
    total = byte_of_char[-1]
    num_bytes = [max(0.0, min(total, end) - start) for start, end in zip(POSITIONS, ends, strict=True)]
    return LossMeasure(bits, np.array(num_bytes, np.float64), len(encoded.ids))


def rolling_logprobs(scorer: Scorer, ids: Sequence[int], start_id: int) -> F64:
    """Compute the log-probability of each token of a document of any length, in nats: [T]. `start_id`: the token before
    the first.

    Windows have `scorer.context_tokens` tokens, and each overlaps the one before it by half."""
    context, at, found = scorer.context_tokens - 1, 0, list[F64]()
    before = [start_id, *ids]  # the token before each token
    while at < len(ids):
        begin = max(0, at - context // 2)
        stop = min(len(ids), begin + context)
        window = [before[begin], *ids[begin:stop]]
        found.append(scorer.logprobs(window, at - begin + 1))
        at = stop
    return np.concatenate(found) if found else np.zeros(0)


def is_right(scorer: Scorer, tokenizer: SafeTokenizer, question: Question, start_id: int) -> bool:
    """Return whether the model answers a question correctly: by `answer_of`, or, if there is one option, whether the
    greedy continuation of the context begins with it.

    A text that is longer than the model's context loses its start. `start_id`: the token before the text."""
    if len(question.options) > 1:
        return answer_of(scorer, tokenizer, question, start_id) == question.answer
    texts = [(start_id, *tokenizer.encode(question.context + option)) for option in ("", *question.options)]
    cut = max(0, len(texts[1]) - scorer.context_tokens)
    return bool(scorer.likeliest(texts[1][cut:], max(1, _num_common(texts) - cut)).all())


def answer_of(scorer: Scorer, tokenizer: SafeTokenizer, question: Question, start_id: int) -> int:
    """Return the index of the option that the model finds likeliest.

    The log-probability is that of the complete text. So it does not matter how a tokeniser joins the end of the context
    and the start of an option. If the text is longer than the model's context, the start of the question's context is
    cut off. `start_id`: the token before the text."""
    scores = _option_scores(scorer, tokenizer, question.context, question.options, start_id)
    if question.neutral:
        scores = scores - _option_scores(scorer, tokenizer, question.neutral, question.options, start_id)
    return int(scores.argmax())


def _option_scores(
    scorer: Scorer, tokenizer: SafeTokenizer, context: str, options: Sequence[str], start_id: int
) -> F64:
    texts = [(start_id, *tokenizer.encode(context + option)) for option in options]
    common, scores = _num_common(texts), []
    for ids in texts:
        cut = max(0, len(ids) - scorer.context_tokens)
        first = max(1, common - cut)
        scores.append(float(scorer.logprobs(ids[cut:], first).sum()))
    return np.array(scores)


def _num_common(texts: Sequence[Sequence[int]]) -> int:
    """Return how many tokens at the start all texts share."""
    columns = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*texts, strict=False))
    return sum(1 for _ in columns)
