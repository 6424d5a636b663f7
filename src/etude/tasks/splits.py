"""Which split a piece of content belongs to, by its hash alone.

The rule knows no seed, so a function that one run holds out is held out in every run, and a corpus can be checked
against it without any source at hand. Knows nothing of what the content is.
"""

from __future__ import annotations

import hashlib

from etude.records.task import Split

SHARES = 10
"""One tenth of all content is for validation, one tenth is held out, the rest trains."""


def split_of(content: str) -> Split:
    """The split of a content key: SHA-256, its first 8 bytes modulo ten.

    >>> split_of("(n) n plus 4")
    <Split.HELDOUT: 'heldout'>
    """
    digest = hashlib.sha256(content.encode("utf-8", "surrogatepass")).digest()
    share = int.from_bytes(digest[:8], "big") % SHARES
    return {0: Split.VALIDATION, 1: Split.HELDOUT}.get(share, Split.TRAIN)
