"""Documents, and the interface of the sources that they come from.

Built-in sources (`etude.corpus.sources`) and plug-ins implement `DocumentSource`. A source that can be read in parts,
by several processes, also implements `DividedSource`; any other is read by one process from its start to its end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec

MAX_BYTES = 8 << 20
"""Size of the largest document in bytes of UTF-8. What is larger is dropped without being held in memory."""


class Document(msgspec.Struct, frozen=True):
    """One text with its provenance.

    - `id` names it within its source and stays the same between builds.
    - `path` is its file ("": none); filters use the ending.
    - `licence` is an SPDX expression such as "MIT OR Apache-2.0" ("": not known).
    - `said`, for chats and recorded rollouts only: the [first, stop) range of each answer of the assistant, in order;
      in characters of `text`, or in tokens if there are `token_ids`. `ChatFormat` renders the text of a chat, and
      special tokens in it are encoded as such; in other documents as ordinary text.
    - `token_ids`, for recorded rollouts only: the ids of prompts and answers as recorded, not encoded again. `text` is
      what they decode to, for filters and exact duplicates."""

    id: str
    text: str
    path: str = ""
    licence: str = ""
    said: tuple[tuple[int, int], ...] = ()
    token_ids: tuple[int, ...] = ()


class Dropped(msgspec.Struct, frozen=True):
    """A document that a source could not read, with the `reason`, such as "not-utf-8"."""

    id: str
    reason: str


@runtime_checkable
class DocumentSource(Protocol):
    """A source of documents for a corpus: a built-in one, or a plug-in of the kind "documents"."""

    def documents(self) -> Iterable[Document | Dropped]:
        """Yield all documents. Every call must give the same documents in the same order."""
        ...


@runtime_checkable
class DividedSource(DocumentSource, Protocol):
    """A source whose documents are in pieces, which several processes read at the same time."""

    def pieces(self) -> Sequence[Any]:
        """Return the pieces in order. A piece is plain JSON data that describes where its documents are, and changes if
        they change."""
        ...

    def read(self, piece: Any) -> Iterator[Document | Dropped]:
        """Yield the documents of a piece. `documents` must yield the documents of all pieces, in order."""
        ...


@runtime_checkable
class OfTokenizer(Protocol):
    """A source whose documents need a certain tokenizer."""

    def check_tokenizer(self, sha256: str) -> None:
        """Raise `ConfigError` if this is not the SHA-256 of the tokenizer.json that the documents need."""
        ...


def decoded(name: str, data: bytes, *, path: str = "", licence: str = "") -> Document | Dropped:
    """Return the document with this UTF-8 content, or a `Dropped` with the reason.

    >>> decoded("a", b"x = 1").text, decoded("b", b"\\xff\\xfe").reason, decoded("c", b"").reason
    ('x = 1', 'not-utf-8', 'empty')
    """
    if len(data) > MAX_BYTES:
        return Dropped(name, "too-large")
    if b"\0" in data:
        return Dropped(name, "binary")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return Dropped(name, "not-utf-8")
    return Document(name, text, path, licence) if text.strip() else Dropped(name, "empty")
