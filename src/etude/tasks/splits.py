"""Assign content to splits by its hash, and look up the rows of a split.

The rule has no seed: content that one run holds out is held out in every run, and a corpus can be checked without the
task source.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeVar

from etude.errors import TaskError
from etude.records.task import Split

T = TypeVar("T")

SHARES = 10
"""One tenth of all content is for validation, one tenth is held out, the rest is for training."""


def row_at(rows: Sequence[T], split: Split, index: int, source: object) -> T:
    """Return `rows[index]`, where `rows` are the rows of a split. Raises `TaskError`, which names `source`, if there is
    no such row."""
    if not 0 <= index < len(rows):
        facts = f"{source} has {len(rows)} in that split"
        raise TaskError(f"no task {index} in {split}", facts, hint="indices start at 0")
    return rows[index]


def split_of(content: str) -> Split:
    """Return the split of a content key: the first 8 bytes of its SHA-256, modulo ten.

    0 is validation, 1 is held out, all others are training.

    >>> split_of("(n) n plus 4")
    <Split.HELDOUT: 'heldout'>
    """
    digest = hashlib.sha256(content.encode("utf-8", "surrogatepass")).digest()
    share = int.from_bytes(digest[:8], "big") % SHARES
    return {0: Split.VALIDATION, 1: Split.HELDOUT}.get(share, Split.TRAIN)
