"""Plans the batches of mid-training: which tokens each step trains on.

The plan depends on the seed and the corpus only. It is the same in every process and after every restart, for any
number of ranks. Each document is its own sequence; long documents are split. A batch is as many documents as fit into a
token budget, without padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from etude.errors import TaskError
from etude.training.corpus import Documents

Spans = npt.NDArray[np.int64]
"""[documents, 2]: start and stop in `Documents.tokens`."""


def plan_batches(
    documents: Documents, *, num_tokens: int, batch_tokens: int, document_tokens: int, seed: int
) -> list[Spans]:
    """Plan the batches of a training run until they hold `num_tokens`. The corpus is reshuffled for each epoch.

    `batch_tokens`: the most tokens in a batch. `document_tokens`: longer documents are split. Raises `TaskError` when
    no document has a token to predict.

    >>> docs = Documents(tokens=np.arange(9, dtype=np.uint16), offsets=np.array([0, 4, 9]))
    >>> [b.tolist() for b in plan_batches(docs, num_tokens=9, batch_tokens=6, document_tokens=5, seed=0)]
    [[[0, 4]], [[4, 9]]]
    """
    spans = split_documents(documents, document_tokens=min(document_tokens, batch_tokens))
    if not len(spans):
        raise TaskError(
            "the corpus has no token to predict",
            "every document has fewer than two tokens, or is only context",
            hint="add documents of at least two tokens, or exchanges with an answer",
        )
    batches: list[Spans] = []
    planned, epoch = 0, 0
    while planned < num_tokens:
        shuffled = spans[np.random.default_rng([seed, epoch]).permutation(len(spans))]
        for part in group_by_budget((shuffled[:, 1] - shuffled[:, 0]).tolist(), batch_tokens):
            batches.append(shuffled[part])
            planned += int((shuffled[part, 1] - shuffled[part, 0]).sum())
            if planned >= num_tokens:
                break
        epoch += 1
    return batches


def split_documents(documents: Documents, *, document_tokens: int) -> Spans:
    """Split documents into pieces of at most `document_tokens`.

    Pieces without a token to predict are dropped: those of one token, and those that are only context."""
    cut = [
        (at, min(at + document_tokens, int(stop)))
        for start, stop in zip(documents.offsets[:-1], documents.offsets[1:], strict=True)
        for at in range(int(start), int(stop), document_tokens)
    ]
    pieces = np.array(cut, np.int64).reshape(-1, 2)
    return pieces[targets_per_span(documents, pieces) > 0]


def targets_per_span(documents: Documents, spans: Spans) -> npt.NDArray[np.int64]:
    """Return the number of tokens to predict in each span, int64 [spans].

    They are its tokens with loss after the first token of the span."""
    before = documents.num_learned_before
    return before[spans[:, 1]] - before[np.minimum(spans[:, 0] + 1, spans[:, 1])]


def rank_share(spans: Spans, rank: int, ranks: int) -> Spans:
    """Return a rank's part of a batch.

    Documents are assigned from the longest to the shortest, each to the rank with the fewest tokens so far."""
    lengths = spans[:, 1] - spans[:, 0]
    load = [0] * ranks
    mine = []
    for i in np.argsort(-lengths, kind="stable"):
        lightest = load.index(min(load))
        load[lightest] += int(lengths[i])
        if lightest == rank:
            mine.append(int(i))
    return spans[sorted(mine)]


def group_by_budget(lengths: Sequence[int], budget: int) -> Iterator[slice]:
    """Yield slices of consecutive items with a total length of at most `budget`. A longer item is alone.

    >>> list(group_by_budget([3, 3, 9, 1], 6))
    [slice(0, 2, None), slice(2, 3, None), slice(3, 4, None)]
    """
    start = size = 0
    for i, length in enumerate(lengths):
        if i > start and size + length > budget:
            yield slice(start, i)
            start, size = i, 0
        size += length
    if start < len(lengths):
        yield slice(start, len(lengths))
