"""Documents for mid-training: generated functions, and the interpreter's own standard library.

Two thirds of the generated documents draw their functions wide (see `wide_function`), one third as the repositories
do. No held-out function is ever among them; `assert_no_heldout` proves it from the texts themselves, by hash.
Knows nothing of tokens: documents are plain text.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol, runtime_checkable

from etude.config import Plugin
from etude.errors import TaskError
from etude.plugins import Kind, bounded, make, unusable
from etude.records.task import Split
from etude.tasks.repair.functions import FUNCTION_NAMES, keys_in, random_function, split_of_key, wide_function

DOCUMENT_S, MAX_DOCUMENT_CHARS, MAX_CHARS = 600.0, 4_000_000, 1_000_000_000
"""Of a plug-in: the deadline of one document, and the most characters of one and of all."""


@runtime_checkable
class CorpusSource(Protocol):
    """Further texts for mid-training. A plug-in of kind "corpus source" is one."""

    def documents(self, seed: int) -> Iterable[str]:
        """The texts, as many as are to be trained on: the same for the same seed."""
        ...


def code_documents(*, count: int, seed: int) -> Iterator[str]:
    """Modules of one to four training functions, docstring and right body.

    >>> text = next(code_documents(count=1, seed=0))
    >>> assert_no_heldout([text]) >= 1
    True
    """
    for index in range(count):
        rng = random.Random(f"code {seed} {index}")
        names = rng.choices(FUNCTION_NAMES, k=rng.randint(1, 4))
        wide = index % 3 != 0
        made = [wide_function(rng, n) if wide else random_function(rng, n, Split.TRAIN) for n in names]
        yield "".join(f.source() for f in made)


def library_documents(
    *, budget_chars: int, seed: int, piece_chars: int = 1_200, root: Path | None = None
) -> Iterator[str]:
    """Pieces of ASCII modules of the standard library, cut between lines, until the budget is spent.

    Every module gives at most ten pieces, so that the budget sees many. The library is the interpreter's own: the
    same interpreter gives the same documents. Raises `TaskError` where there is none to read.
    """
    folder = root or Path(os.__file__).parent
    paths = sorted(folder.glob("*.py"))
    random.Random(f"library {seed}").shuffle(paths)
    left = budget_chars
    for path in paths:
        text = path.read_bytes()
        if not text.isascii():
            continue
        for piece in _pieces(text.decode("ascii"), piece_chars)[:10]:
            if len(piece) > left:
                return
            left -= len(piece)
            yield piece
    if left == budget_chars > 0:
        raise TaskError(f"no Python source in {folder}", hint="set library_chars = 0, or install the standard library")


def _pieces(text: str, piece_chars: int) -> list[str]:
    """The text cut at line ends into pieces of at most piece_chars; a line longer than that is dropped."""
    pieces, at = [], ""
    for line in text.splitlines(keepends=True):
        if len(line) > piece_chars:
            continue
        if len(at) + len(line) > piece_chars:
            pieces.append(at)
            at = ""
        at += line
    return [*pieces, at] if at.strip() else pieces


def plugged_documents(plugin: Plugin, *, seed: int) -> Iterator[str]:
    """The texts of a plug-in, each awaited for at most `DOCUMENT_S`. Raises `PluginError`, `PluginRefused`."""
    source: CorpusSource = make(Kind.CORPUS, plugin)
    texts = bounded(Kind.CORPUS, plugin, "documents", lambda: iter(source.documents(seed)), deadline_s=DOCUMENT_S)
    count = chars = 0
    while True:
        text = bounded(Kind.CORPUS, plugin, f"document {count}", lambda: next(texts, None), deadline_s=DOCUMENT_S)
        if text is None:
            break
        if not isinstance(text, str) or not text.strip() or len(text) > MAX_DOCUMENT_CHARS:
            found = f"has {len(text):,} characters" if isinstance(text, str) else f"is {type(text).__name__}"
            facts = f"document {count} {found}, and a text of 1 to {MAX_DOCUMENT_CHARS:,} characters is wanted"
            raise unusable(Kind.CORPUS, plugin, facts)
        count, chars = count + 1, chars + len(text)
        if chars > MAX_CHARS:
            raise unusable(Kind.CORPUS, plugin, f"its first {count:,} documents have over {MAX_CHARS:,} characters")
        yield text
    if not count:
        raise unusable(Kind.CORPUS, plugin, "it has no document")


def assert_no_heldout(texts: Iterable[str]) -> int:
    """How many functions the texts show, none of which is a validation or held-out one; else `TaskError`.

    Reads code as well as the numbered lines that an agent saw, so whole demonstrations can be checked.
    """
    checked = 0
    for text in texts:
        for key in keys_in(text):
            checked += 1
            if (split := split_of_key(key)) is not Split.TRAIN:
                raise TaskError(
                    f"a {split} function is in the corpus", key, hint="draw the corpus from training functions"
                )
    return checked
