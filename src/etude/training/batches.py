"""Plans the batches of mid-training: which tokens each step trains on.

The plan depends on the seed and the corpus only. It is the same in every process and after every restart, for any
number of ranks. Each document is its own sequence; long documents are split. A batch is as many documents as fit into a
token budget, without padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from etude.errors import TaskError
from etude.training.corpus import Spans, TokenizedDocuments


def plan_batches(
    documents: TokenizedDocuments,
    *,
    num_tokens: int | None,
    batch_tokens: int,
    document_tokens: int,
    seed: int,
    phase: int = 0,
) -> list[Spans]:
    """Plan the batches of a training run until they hold `num_tokens`; None: every document once.

    The corpus is shuffled again for each epoch and for each phase (`phase` is its number). `batch_tokens`: the most
    tokens in a batch. `document_tokens`: longer documents are split. Raises `TaskError` when no document has a token to
    predict.

    >>> from etude.training.corpus import Documents
    >>> docs = Documents(tokens=np.arange(9, dtype=np.uint16), offsets=np.array([0, 4, 9]))
    >>> [b.tolist() for b in plan_batches(docs, num_tokens=9, batch_tokens=6, document_tokens=5, seed=0)]
    [[[0, 4]], [[4, 9]]]
    """
    spans = split_documents(documents, document_tokens=min(document_tokens, batch_tokens))
    if not len(spans):
        raise TaskError(
            "the corpus has no token to predict",
            "every document has fewer than two tokens, or no token with loss",
            hint="add documents of at least two tokens, or exchanges with an answer",
        )
    if num_tokens is None:
        num_tokens = int((spans[:, 1] - spans[:, 0]).sum())
    batches: list[Spans] = []
    planned, epoch = 0, 0
    while planned < num_tokens:
        shuffled = spans[np.random.default_rng([seed, epoch, *([phase] if phase else [])]).permutation(len(spans))]
        for part in group_by_budget((shuffled[:, 1] - shuffled[:, 0]).tolist(), batch_tokens):
            batches.append(shuffled[part])
            planned += int((shuffled[part, 1] - shuffled[part, 0]).sum())
            if planned >= num_tokens:
                break
        epoch += 1
    return batches


def split_documents(documents: TokenizedDocuments, *, document_tokens: int) -> Spans:
    """Split documents into pieces of at most `document_tokens`.

    Pieces without a token to predict are dropped: they have only one token, or no token with loss."""
    starts, stops = documents.spans.T
    counts = -(-(stops - starts) // document_tokens)
    of = np.repeat(np.arange(len(counts)), counts)  # the document of each piece
    first = starts[of] + document_tokens * (np.arange(len(of)) - (np.cumsum(counts) - counts)[of])
    pieces = np.stack([first, np.minimum(first + document_tokens, stops[of])], 1)
    return pieces[documents.num_targets(pieces) > 0]


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
