"""Finds held-out texts in documents, also with other names, other formatting, or after a fill-in-the-middle split.

A held-out text is cut into overlapping segments. A document is contaminated if it has a large share of the n-grams of
one segment, anywhere and in any order. There are two views of a text:

- Code: tokens of a lexer, without spaces, comments and docstrings. In an n-gram, each name is replaced by the distance
  to its previous occurrence in the n-gram, so that renaming changes nothing (parameterized matching, Baker 1993).
  Keywords, operators, numbers and strings stay.
- Prose: lower-case words.

Held-out prose is compared by words only, held-out code by lexer tokens only. Both kinds of comments, `#` and `//`,
are tried if a text has both. A document with the sentinels of public tokenizers is put in order first."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from etude.corpus.fim import SENTINELS
from etude.corpus.hashes import U64, codes, mixed, text_key

CODE_GRAM, CODE_SEGMENT = 12, 64
PROSE_GRAM, PROSE_SEGMENT = 8, 48
MIN_RUN = 4
"""A document's n-grams count for a segment in runs of at least so many: single ones are idioms of the language."""
MIN_DISTINCT = 0.8
"""A segment with a smaller share of distinct n-grams is repetitive, such as a table, and is not searched for."""

_PROSE_ENDINGS = (".md", ".rst", ".txt", ".tex", ".html")
_STRING = r"""[rbfuRBFU]{0,2}(?:"(?:[^"\\\n]|\\.){0,400}"|'(?:[^'\\\n]|\\.){0,400}'|`[^`\n]{0,400}`)"""
_REST = rf"{_STRING}|[^\W\d]\w*|\d[\w.]*|[^\s\w]"
_DOC = r"""(?<=:)\s*\n\s*[rR]?(?:\"\"\"[^"]*\"\"\"|'{3}[^']*'{3})"""
_HASH = re.compile(rf"(?:{_DOC}|\#[^\n]*)|({_REST})")
_SLASH = re.compile(rf"(?:{_DOC}|//[^\n]*|/\*[\s\S]{{0,4000}}?\*/)|({_REST})")
_HEADING = re.compile(r"""\A(?:\s|\#[^\n]*\n)*[rR]?(?:\"\"\"[^"]*\"\"\"|'{3}[^']*'{3})""")
_WORD = re.compile(r"[^\W_]+")
# fmt: off
_KEYWORDS = frozenset((
    "False", "None", "True", "abs", "all", "and", "any", "as", "assert", "async", "await", "bool", "break", "bytes",
    "case", "catch", "class", "const", "continue", "def", "default", "del", "dict", "do", "elif", "else", "enum",
    "enumerate", "except", "export", "extends", "extern", "false", "filter", "final", "finally", "float", "fn",
    "for", "from", "func", "function", "global", "go", "goto", "if", "impl", "implements", "import", "in",
    "instanceof", "int", "interface", "is", "isinstance", "iter", "lambda", "len", "let", "list", "loop", "map",
    "match", "max", "min", "mod", "module", "mut", "namespace", "new", "next", "nil", "nonlocal", "not", "null",
    "object", "open", "operator", "or", "package", "pass", "print", "private", "protected", "pub", "public", "raise",
    "range", "repr", "return", "reversed", "round", "self", "set", "sorted", "static", "str", "string", "struct",
    "sum", "super", "switch", "template", "this", "throw", "throws", "trait", "true", "try", "tuple", "type",
    "typedef", "typename", "typeof", "union", "unsafe", "use", "using", "var", "virtual", "void", "where", "while",
    "with", "yield", "zip",
))
# fmt: on
"""Words that stay as they are: keywords of common languages, and built-in functions of Python."""
_NAME = np.uint64(text_key("name"))


def code_tokens(text: str) -> list[list[str]]:
    """Return the tokens of a text as code: one list, or two for a text with both kinds of comments.

    >>> code_tokens('x = f(1)  # one')
    [['x', '=', 'f', '(', '1', ')']]
    """
    patterns = [_SLASH] if ("//" in text or "/*" in text) else []
    if "#" in text or not patterns:
        patterns.insert(0, _HASH)
    return [[token for token in pattern.findall(text) if token] for pattern in patterns]


def code_grams(tokens: list[str], width: int = CODE_GRAM) -> U64:
    """Return a hash for each window of tokens, equal for windows that differ in their names only: [T - width + 1].

    It is 0 for a window in which fewer than a third of the tokens are not names: such windows are all alike.

    >>> one, other = (code_tokens(text)[0] for text in ("a = b + a * 2", "x=y  + x*2"))
    >>> bool((code_grams(one, 5) == code_grams(other, 5)).all())
    True
    """
    count = len(tokens) - width + 1
    if count <= 0:
        return np.zeros(0, np.uint64)
    plain = [_unquoted(token) for token in tokens]
    values = codes(plain)
    last: dict[str, int] = {}
    back = np.zeros(len(tokens), np.int64)  # distance to the previous occurrence of a name; 0: none; -1: not a name
    for i, token in enumerate(plain):
        if token in _KEYWORDS or not (token[0].isalpha() or token[0] == "_"):
            back[i] = -1
        else:
            back[i] = i - last.get(token, i)
            last[token] = i
    total, said = np.zeros(count, np.uint64), np.zeros(count, np.int64)
    for offset in range(width):
        distance = back[offset : offset + count]
        inside = np.where(distance <= offset, distance, 0).astype(np.uint64)
        value = np.where(distance < 0, values[offset : offset + count], _NAME + inside)
        total = mixed(total + value + np.uint64(offset + 1))
        said += distance < 0
    total[3 * said < width] = 0
    return total


def _unquoted(token: str) -> str:
    """A string as its content, whatever its quotes; any other token unchanged."""
    if token[-1] in "\"'`" and len(token) > 1:
        return "'" + token.lstrip("rbfuRBFU")[1:-1]
    return token


def prose_grams(words: list[str], width: int = PROSE_GRAM) -> U64:
    """Return a hash for each window of words: [W - width + 1]."""
    count = len(words) - width + 1
    if count <= 0:
        return np.zeros(0, np.uint64)
    values, total = codes(words), np.full(count, np.uint64(1))
    for offset in range(width):
        total = mixed(total + values[offset : offset + count])
    return total


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case."""
    return _WORD.findall(text.lower())


def joined(text: str) -> str:
    """Return a text with each fill-in-the-middle split by known sentinels put in order: prefix, middle, suffix.

    >>> joined("<PRE>def f():<SUF>  return 2<MID> x = 1;")
    'def f(): x = 1;  return 2'
    """
    for prefix, suffix, middle in SENTINELS:
        if prefix in text and suffix in text and middle in text:
            pieces = re.split(f"({'|'.join(map(re.escape, (prefix, suffix, middle)))})", text)
            parts = {prefix: "", suffix: "", middle: ""}
            for sentinel, piece in zip(pieces[1::2], pieces[2::2], strict=True):
                parts[sentinel] += piece
            return f"{pieces[0]}{parts[prefix]}{parts[middle]}{parts[suffix]}"  # in SPM `middle` begins with the prefix
    return text


@dataclass(frozen=True)
class HeldOutText:
    """One text that must not be in a corpus. `name` says what it is. `is_prose`: words are compared, not tokens."""

    name: str
    text: str
    is_prose: bool

    @classmethod
    def of(cls, name: str, text: str) -> HeldOutText:
        """Return the held-out text of a file or of an answer; its name's ending decides whether it is prose."""
        return cls(name, text, name.lower().endswith(_PROSE_ENDINGS))


@dataclass(frozen=True)
class HeldOutIndex:
    """The n-grams of all segments of held-out texts.

    - `grams_G`: sorted uint64, one entry for each pair of n-gram and segment; `segments_G`: the segment, int32.
    - `needs_S`: number of n-grams of a segment with which a document is contaminated; `texts_S`: its text's index.
    - `names`: of the texts. `too_short`: names of texts that have too few tokens to be found.
    - `has_code`, `has_prose`: which views are needed."""

    grams_G: U64
    segments_G: npt.NDArray[np.int32]
    needs_S: npt.NDArray[np.int32]
    texts_S: npt.NDArray[np.int32]
    names: tuple[str, ...]
    too_short: tuple[str, ...]
    has_code: bool
    has_prose: bool

    @classmethod
    def build(cls, texts: Iterable[HeldOutText]) -> HeldOutIndex:
        """Index held-out texts. A text without a segment is listed in `too_short`."""
        grams, segments = list[U64](), list[npt.NDArray[np.int32]]()
        needs, owners, names, too_short = list[int](), list[int](), list[str](), list[str]()
        has = {True: False, False: False}
        for text in texts:
            found = list(_segments(text))
            if not found:
                too_short.append(text.name)
                continue
            has[text.is_prose] = True
            for segment in found:
                grams.append(segment)
                segments.append(np.full(len(segment), len(needs), np.int32))
                needs.append(_need(len(segment), PROSE_GRAM if text.is_prose else CODE_GRAM))
                owners.append(len(names))
            names.append(text.name)
        every = np.concatenate([np.zeros(0, np.uint64), *grams])
        order = np.argsort(every, kind="stable")
        owned = np.concatenate([np.zeros(0, np.int32), *segments])[order]
        return cls(
            every[order],
            owned,
            np.array(needs, np.int32),
            np.array(owners, np.int32),
            tuple(names),
            tuple(too_short),
            has_code=has[False],
            has_prose=has[True],
        )

    def find(self, text: str) -> str | None:
        """Return the name of a held-out text that a document contains, or None."""
        if not len(self.grams_G):
            return None
        text = joined(text)
        views = [code_grams(tokens) for tokens in code_tokens(text)] if self.has_code else []
        if self.has_prose:
            views.append(prose_grams(words_of(text)))
        return next((name for name in map(self._hit, views) if name is not None), None)

    def _hit(self, grams_D: U64) -> str | None:
        first = np.searchsorted(self.grams_G, grams_D, "left")
        last = np.searchsorted(self.grams_G, grams_D, "right")
        places_H = np.flatnonzero(last > first)
        if not len(places_H):
            return None
        counts_H = last[places_H] - first[places_H]
        ends_H = np.cumsum(counts_H)
        index = np.arange(ends_H[-1]) + np.repeat(first[places_H] - ends_H + counts_H, counts_H)
        segments, places = self.segments_G[index], np.repeat(places_H, counts_H)
        order = np.lexsort((places, segments))
        segments, places, index = segments[order], places[order], index[order]
        starts = np.flatnonzero(np.r_[True, (np.diff(segments) != 0) | (np.diff(places) != 1)])
        lengths = np.diff(np.r_[starts, len(places)])
        in_run = np.repeat(lengths >= MIN_RUN, lengths)
        found, counts = np.unique(self.segments_G[np.unique(index[in_run])], return_counts=True)
        over = found[counts >= self.needs_S[found]]
        return self.names[self.texts_S[over[0]]] if len(over) else None

    def save(self, path: Path) -> None:
        """Write the index as an .npz file."""
        np.savez(
            path,
            grams=self.grams_G,
            segments=self.segments_G,
            needs=self.needs_S,
            texts=self.texts_S,
            names=np.array(self.names, dtype=np.str_),
            views=np.array([self.has_code, self.has_prose]),
        )

    @classmethod
    def load(cls, path: Path) -> HeldOutIndex:
        """Read an index that `save` wrote, without the names of texts that are too short."""
        with np.load(path) as file:
            has_code, has_prose = map(bool, file["views"])
            names = tuple(map(str, file["names"]))
            arrays = (file["grams"], file["segments"], file["needs"], file["texts"])
            return cls(*arrays, names, (), has_code=has_code, has_prose=has_prose)


def _need(num_grams: int, width: int) -> int:
    """Return how many n-grams of a segment a contaminated document has: half, or what two cuts leave, but a third."""
    return max(-(-num_grams // 3), min(num_grams - 2 * (width - 1), -(-num_grams // 2)))


def _segments(text: HeldOutText) -> Iterator[U64]:
    """Yield the distinct n-grams of each segment of a text: half of a segment overlaps with the next."""
    gram, size = (PROSE_GRAM, PROSE_SEGMENT) if text.is_prose else (CODE_GRAM, CODE_SEGMENT)
    views = [words_of(text.text)] if text.is_prose else code_tokens(_HEADING.sub("", text.text))
    for tokens in views:
        grams = prose_grams(tokens) if text.is_prose else code_grams(tokens)
        width = size - gram + 1
        for start in range(0, max(1, len(grams) - width // 2), width // 2):
            part = grams[start : start + width]
            distinct = np.unique(part[part != 0])
            if len(part) >= gram and len(distinct) >= MIN_DISTINCT * len(part):
                yield distinct
