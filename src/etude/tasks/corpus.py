"""Yields documents for mid-training: generated functions, the Python standard library, and those of plug-ins.

Two thirds of the generated documents use functions from a wide distribution (`wide_function`), one third uses the
distribution of the "repair" repositories. Held-out functions are never used; `assert_no_heldout` checks that in the
texts. Documents are plain text; those of plug-ins may also be exchanges, of which only the answer is trained on.
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
from etude.records.exchange import Exchange
from etude.records.task import Split
from etude.tasks.repair.functions import FUNCTION_NAMES, keys_in, random_function, split_of_key, wide_function

DOCUMENT_S, MAX_DOCUMENT_CHARS, MAX_CHARS = 600.0, 4_000_000, 1_000_000_000
"""Limits for a plug-in: seconds for one document, characters of one document, and characters of all documents."""
PIECE_CHARS, USED_PIECES = 1_200, 10
"""Characters per piece of a module of the standard library, and how many pieces of a module are trained on at most."""


@runtime_checkable
class CorpusSource(Protocol):
    """A source of documents for mid-training, implemented by a plug-in of the kind "corpus source"."""

    def documents(self, seed: int) -> Iterable[str | Exchange]:
        """Yield all documents to train on. The same seed must give the same documents.

        All tokens of a text are trained on, and of an `Exchange` those of the answer only. An exchange must fit into
        the context; longer texts are split."""
        ...


def text_of(document: str | Exchange) -> str:
    """Return all text of a document; for an exchange its messages and its answer, joined by line breaks."""
    return document if isinstance(document, str) else "\n".join([document.system, document.user, document.answer])


def code_documents(*, count: int, seed: int) -> Iterator[str]:
    """Yield `count` Python modules of one to four generated functions, each with docstring and correct body.

    All functions are of the training split.

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
    *, budget_chars: int, seed: int, piece_chars: int = PIECE_CHARS, root: Path | None = None
) -> Iterator[str]:
    """Yield pieces of Python standard-library modules, with at most `budget_chars` characters in total.

    A piece consists of complete lines and has at most `piece_chars` characters. At most ten pieces are from one module,
    so that many modules are used; only ASCII modules are used. The same interpreter and seed give the same documents.
    `root` is a folder to use in place of the standard library. Raises `TaskError` if it has no Python source."""
    folder = root or Path(os.__file__).parent
    paths = sorted(folder.glob("*.py"))
    random.Random(f"library {seed}").shuffle(paths)
    left = budget_chars
    for path in paths:
        text = path.read_bytes()
        if not text.isascii():
            continue
        for piece in _pieces(text.decode("ascii"), piece_chars)[:USED_PIECES]:
            if len(piece) > left:
                return
            left -= len(piece)
            yield piece
    if left == budget_chars > 0:
        raise TaskError(f"no Python source in {folder}", hint="set library_chars = 0, or install the standard library")


def unused_library(num_chars: int) -> str:
    """Return text of the standard library, at most `num_chars` characters, that `library_documents` never yields.

    It is for measuring a loss on unseen text. From each module with more than `USED_PIECES` pieces, the first piece
    after these is taken. The same interpreter gives the same text.

    >>> text = unused_library(16_384)
    >>> len(text) > 12_000, any(piece in text for piece in library_documents(budget_chars=10**9, seed=0))
    (True, False)
    """
    found, left = list[str](), num_chars
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        text = path.read_bytes()
        unused = _pieces(text.decode("ascii"), PIECE_CHARS)[USED_PIECES:] if text.isascii() else []
        if unused and len(unused[0]) <= left:
            found.append(unused[0])
            left -= len(unused[0])
    return "".join(found)


def _pieces(text: str, piece_chars: int) -> list[str]:
    """Cut a text at line ends into pieces of at most `piece_chars` characters. Longer lines are dropped."""
    pieces, at = [], ""
    for line in text.splitlines(keepends=True):
        if len(line) > piece_chars:
            continue
        if len(at) + len(line) > piece_chars:
            pieces.append(at)
            at = ""
        at += line
    return [*pieces, at] if at.strip() else pieces


def _is_document(found: object) -> bool:
    return all(isinstance(text, str) for text in (vars(found).values() if isinstance(found, Exchange) else [found]))


def plugin_documents(plugin: Plugin, *, seed: int) -> Iterator[str | Exchange]:
    """Yield the documents of a corpus plug-in; it may take `DOCUMENT_S` seconds for each.

    Raises `PluginError` if it fails or yields something else, and `PluginRefused` if it cannot be used."""
    source: CorpusSource = make(Kind.CORPUS, plugin)
    found = bounded(Kind.CORPUS, plugin, "documents", lambda: iter(source.documents(seed)), deadline_s=DOCUMENT_S)
    count = chars = 0
    while True:
        one = bounded(Kind.CORPUS, plugin, f"document {count}", lambda: next(found, None), deadline_s=DOCUMENT_S)
        if one is None:
            break
        text = text_of(one) if _is_document(one) else None
        if text is None or not text.strip() or len(text) > MAX_DOCUMENT_CHARS:
            words = f"is {type(one).__name__}" if text is None else f"has {len(text):,} characters"
            facts = (
                f"document {count} {words}, expected a text of 1 to {MAX_DOCUMENT_CHARS:,} characters, or an Exchange"
            )
            raise unusable(Kind.CORPUS, plugin, facts)
        count, chars = count + 1, chars + len(text)
        if chars > MAX_CHARS:
            raise unusable(Kind.CORPUS, plugin, f"its first {count:,} documents have over {MAX_CHARS:,} characters")
        yield one
    if not count:
        raise unusable(Kind.CORPUS, plugin, "it has no document")


def assert_no_heldout(texts: Iterable[str]) -> int:
    """Check that all generated functions in texts are of the training split, and return their number.

    The texts can be code or the numbered lines of tool outputs, so complete demonstrations can be checked. Raises
    `TaskError` for a validation, held-out or transfer function."""
    checked = 0
    for text in texts:
        for key in keys_in(text):
            checked += 1
            if (split := split_of_key(key)) is not Split.TRAIN:
                raise TaskError(
                    f"the corpus has a {split} function, which must not be trained on",
                    key,
                    hint="use only functions of the training split in the corpus",
                )
    return checked
