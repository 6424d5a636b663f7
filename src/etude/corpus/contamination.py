"""Finds held-out texts in documents, also with other names, other formatting, or after a fill-in-the-middle split.

A held-out text is cut into overlapping segments. A document is contaminated if it has a large share of the n-grams of
one segment, anywhere and in any order. There are two views of a text:

- Code: tokens of a lexer, without spaces, comments and docstrings. In an n-gram, each name is replaced by the distance
  to its previous occurrence in the n-gram, so that renaming changes nothing (parameterized matching, Baker 1993).
  Keywords, operators, numbers and strings stay.
- Prose: lower-case words.

Held-out prose is compared by words only, held-out code by lexer tokens only. Both kinds of comments, `#` and `//`,
are tried if a text has both. A document with the sentinels of public tokenizers is put in order first.

The n-grams of `embedded` code are added to those of a document: code in docstrings (a cut may open one, which then
hides what follows), in comments, diffs, prompts and escaped strings."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from etude.corpus.fim import SENTINELS
from etude.corpus.hashes import FACTOR, U64, codes, mixed, rolling, text_key
from etude.corpus.tokens import Membership, Tokens

CODE_GRAM, CODE_SEGMENT = 12, 64
PROSE_GRAM, PROSE_SEGMENT = 4, 48  # a changed word changes 4 n-grams
MIN_CODE, MIN_PROSE = 12, 12
"""The least number of n-grams of a segment: of code, of prose. A text with fewer has no segment and is not searched for
(code below 23 tokens, prose below 15 words)."""
MIN_RUN = 4
"""A document's n-grams count for a segment in runs of at least so many: single ones are idioms of the language."""
MIN_DISTINCT = 0.8
"""A segment with a smaller share of distinct n-grams is repetitive, such as a table, and is not searched for."""

_PROSE_ENDINGS = (".md", ".rst", ".txt", ".tex", ".html")
_STRINGS = r"""'(?:[^'\\\n]|\\.){0,400}'|"(?:[^"\\\n]|\\.){0,400}"|`[^`\n]{0,400}`"""
_DOC = r""":\s*\n\s*[rR]?(?:\"\"\"[^"]*\"\"\"|'{3}[^']*'{3})"""  # with the colon before it
_HASH = re.compile(rf"(\#[^\n]*|{_DOC}|{_STRINGS})")  # each alternative begins with a character: `re` is fast then
_SLASH = re.compile(rf"(//[^\n]*|/\*[\s\S]{{0,4000}}?\*/|{_DOC}|{_STRINGS})")
_BODY = re.compile(_DOC)
_MIN_BODY = 80
"""Characters of the shortest docstring in which code is searched for."""
_MARK = re.compile(r"^[ \t]*(?:(?:>>>|\.\.\.|[+>|*]|#+|//+)[ \t]?)*", re.MULTILINE)  # of a comment, diff or prompt
_MARKS = ("#", "+", ">", "...", "//", "|", "*")
_MAY_MARK = np.isin(np.arange(128), [ord(mark[0]) for mark in (*_MARKS, "'", '"')])
_QUOTES = re.compile(r"^[ \t]*[\"']|[\"'],?[ \t]*$", re.MULTILINE)  # around an escaped line
_ESCAPED = re.compile(r"\\(?:n(?:[\"'],?\s*[\"'])?|(.))")
_MIN_LINES = 3
"""Embedded code is searched for in so many consecutive lines, or in a line with so many escaped line breaks."""
_HEADING = re.compile(r"""\A(?:\s|\#[^\n]*\n)*[rR]?(?:\"\"\"[^"]*\"\"\"|'{3}[^']*'{3})""")
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
_PREFIXES = ("".join(both) for both in itertools.product("rbfuRBFU", ("", *"rbfuRBFU")))
_NAMES = mixed(np.uint64(text_key("name")) + np.arange(CODE_GRAM, dtype=np.uint64))
"""A name in an n-gram, by the distance to its previous occurrence in it; at 0 for its first."""


def _membership(words: Iterable[str]) -> Membership:
    return Membership(np.sort(Tokens.of(" ".join(words)).hashes_T))


_IS_KEYWORD, _IS_PREFIX = _membership(_KEYWORDS), _membership(_PREFIXES)


@dataclass(frozen=True)
class Code:
    """The tokens of a program text: the hash of each (uint64 [T]), and whether it is a name (bool [T]). A string is one
    token."""

    hashes_T: U64
    is_name_T: npt.NDArray[np.bool_]


def code_of(text: str, tokens: Tokens) -> list[Code]:
    """Return the tokens of a program text without its comments and docstrings.

    If it is not known whether "#" or "//" begins a comment, the list has two elements, one for each.

    >>> text = "x = f('a b', 1)  # one"
    >>> [code.is_name_T.tolist() for code in code_of(text, Tokens.of(text))]
    [[True, False, True, False, False, False, False, False]]
    """
    views, slashes = list[Code](), "//" in text or "/*" in text
    if "#" in text or not slashes:
        parts = _HASH.split(text)
        views.append(_without(parts, tokens))
        slashes = slashes and any("//" in part or "/*" in part for part in parts[::2])
    if slashes:
        views.append(_without(_SLASH.split(text), tokens))
    return views


def embedded(text: str, tokens: Tokens) -> str:
    """Return the code that may stand in docstrings, comments, diffs, prompts and escaped strings, without what marks it
    there. It can be searched with `code_of`: it has no triple quotes, which would hide a part.

    >>> text = "x = 1\\n# def f():\\n#     y = 2\\n#     return y\\n"
    >>> embedded(text, Tokens.of(text))
    'def f():\\n    y = 2\\n    return y'
    >>> text = r'{"text": "def f():\\n    y = 2\\n    return y\\n"}'
    >>> embedded(text, Tokens.of(text))
    '{"text": "def f():\\n    y = 2\\n    return y\\n"}'
    """
    found = [body for body in _BODY.findall(text) if len(body) >= _MIN_BODY]
    marked, quoted = list[str](), list[str]()

    def take() -> None:
        if len(marked) >= _MIN_LINES:
            found.append(_MARK.sub("", "\n".join(marked)))
        if len(quoted) >= _MIN_LINES:
            found.append(_unescaped("\n".join(quoted)))
        marked.clear()
        quoted.clear()

    last = -1
    for number, line, escapes in _candidates(text, tokens):
        if number != last + 1:
            take()
        last = number
        bare = line.lstrip()
        if bare.startswith(_MARKS):
            marked.append(line)
        elif bare[:1] in ("'", '"') and (quoted or "\\n" in bare):  # the last one may have no line break
            quoted.append(line)
        else:
            take()
            if escapes >= _MIN_LINES:
                found.append(_unescaped(line))
    take()
    return "\n".join(found).replace('"""', " ").replace("'''", " ")


def _candidates(text: str, tokens: Tokens) -> Iterator[tuple[int, str, int]]:
    """Yield the lines that may be embedded code, each as (number of the line, line, number of escaped line breaks).

    These lines begin with a mark or a quote, or have at least `_MIN_LINES` escaped line breaks."""
    breaks = np.flatnonzero(tokens.chars == ord("\n"))
    firsts, ends = np.concatenate([[0], breaks + 1]), np.append(breaks, len(tokens.chars))
    escapes = np.zeros(len(firsts), np.int64)
    if "\\n" in text:
        chars = tokens.chars
        places = np.flatnonzero((chars[:-1] == ord("\\")) & (chars[1:] == ord("n")))
        escapes = np.bincount(np.searchsorted(ends, places), minlength=len(firsts))
    wanted = escapes >= _MIN_LINES
    if len(tokens):
        token = np.minimum(np.searchsorted(tokens.starts_T, firsts), len(tokens) - 1)
        starts = tokens.starts_T[token]
        wanted |= (starts < ends) & (starts >= firsts) & _MAY_MARK[np.minimum(tokens.chars[starts], 127)]
    for number in np.flatnonzero(wanted).tolist():
        yield number, text[firsts[number] : ends[number]], int(escapes[number])


def _unescaped(lines: str) -> str:
    return _ESCAPED.sub(lambda match: match[1].replace("t", " ") if match[1] else "\n", _QUOTES.sub("", lines))


def _without(parts: Sequence[str], tokens: Tokens) -> Code:
    """Drop comments, and make each string one token. `parts`: code, and what a pattern found, in turn."""
    ends = np.cumsum(np.fromiter(map(len, parts), np.int64, len(parts)))
    firsts = np.searchsorted(tokens.starts_T, ends[:-1:2])
    lasts = np.searchsorted(tokens.starts_T, ends[1::2])
    depth = np.zeros(len(tokens) + 1, np.int8)
    depth[firsts] = 1
    depth[lasts] -= 1
    keep = np.cumsum(depth[:-1], dtype=np.int8) == 0
    hashes, is_name = tokens.hashes_T.copy(), tokens.is_name_T & ~_IS_KEYWORD.contains(tokens.hashes_T)
    found = parts[1::2]
    keep[firsts[[part[0] == ":" for part in found]]] = True
    strings = firsts[[part[0] in "\"'`" for part in found]]
    if len(strings):
        keep[strings] = True
        hashes[strings] = codes([part[1:-1] for part in found if part[0] in "\"'`"])
        before = strings[strings > 0] - 1
        is_prefix = (tokens.ends_T[before] == tokens.starts_T[before + 1]) & _IS_PREFIX.contains(
            tokens.hashes_T[before]
        )
        keep[before[is_prefix]] = False
    return Code(hashes[keep], is_name[keep])


def code_grams(code: Code, width: int = CODE_GRAM) -> U64:
    """Return a hash for each window of `width` tokens: uint64 [T - width + 1]. Windows that differ only in their names
    have the same hash.

    The hash is 0 if fewer than a third of the window's tokens are not names: such windows are too similar to each other
    to be compared.

    >>> one, other = (code_of(text, Tokens.of(text))[0] for text in ("a = b + a * 2", "x=y  + x*2"))
    >>> bool((code_grams(one, 5) == code_grams(other, 5)).all())
    True
    """
    size = len(code.hashes_T)
    count = size - width + 1
    if count <= 0:
        return np.zeros(0, np.uint64)
    back = np.zeros(size, np.int8)  # distance to the previous occurrence of a name; 0: it is far, or no name
    for distance in range(width - 1, 0, -1):
        back[distance:][code.hashes_T[distance:] == code.hashes_T[:-distance]] = distance
    back[~code.is_name_T] = 0
    alone = np.where(code.is_name_T, _NAMES[0], code.hashes_T)
    again = np.where(code.is_name_T, _NAMES[back], code.hashes_T)
    total = np.zeros(count, np.uint64)
    for offset in range(width):
        part = slice(offset, offset + count)
        total = total * FACTOR + np.where(back[part] <= offset, again[part], alone[part])
    total = mixed(total)
    named = np.cumsum(np.r_[0, code.is_name_T])
    total[3 * (width - (named[width:] - named[:-width])) < width] = 0
    return total


def prose_grams(text: str) -> U64:
    """Return a hash for each window of 4 words in lower case: uint64 [W - 3] for a text of W words."""
    words = Tokens.of(text.lower(), underscores=False)
    hashes = words.hashes_T[words.is_word_T]
    return rolling(hashes, PROSE_GRAM) if len(hashes) >= PROSE_GRAM else np.zeros(0, np.uint64)


def joined(text: str) -> str:
    """Undo fill-in-the-middle splits with known sentinels: return the text in the order prefix, middle, suffix.

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
    """One text that must not be in a corpus. `name` describes it. `is_prose`: words are compared; otherwise it is code,
    and tokens are compared."""

    name: str
    text: str
    is_prose: bool

    @classmethod
    def of(cls, name: str, text: str) -> HeldOutText:
        """Create a held-out text from the content of a file or an answer. The ending of `name` decides whether it is
        prose."""
        return cls(name, text, name.lower().endswith(_PROSE_ENDINGS))

    @cached_property
    def segments(self) -> tuple[U64, ...]:
        """The distinct n-grams of each segment of the text. Empty: it is too short, or too repetitive, to be found."""
        return tuple(_segments(self))


@dataclass(frozen=True)
class HeldOutIndex:
    """The n-grams of all segments of held-out texts.

    - `grams_G`: sorted uint64, one entry for each pair of n-gram and segment; `segments_G`: the segment, int32.
    - `needs_S`: for each segment, the number of its n-grams that a document must contain to be dropped; `texts_S`: the
      index of the text that the segment is from.
    - `names`: of the texts. `too_short`: names of texts that have too few tokens to be found.
    - `has_code`, `has_prose`: whether any of the texts is code, or prose."""

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
        """Index held-out texts. The names of texts that are too short to have a segment are in `too_short`."""
        grams, segments = list[U64](), list[npt.NDArray[np.int32]]()
        needs, owners, names, too_short = list[int](), list[int](), list[str](), list[str]()
        has = {True: False, False: False}
        for text in texts:
            found = text.segments
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

    @cached_property
    def _grams(self) -> Membership:
        return Membership(self.grams_G)

    def find(self, text: str, tokens: Tokens | None = None) -> str | None:
        """Return the name of a held-out text that a document contains, or None. `tokens`: the document's tokens, if
        they were computed before."""
        if not len(self.grams_G):
            return None
        ordered = joined(text)
        if self.has_code:
            known = Tokens.of(ordered) if tokens is None or ordered != text else tokens
            inside = embedded(ordered, known)
            added = [code_grams(code) for code in code_of(inside, Tokens.of(inside))] if inside else []
            for code in code_of(ordered, known):
                if (name := self._hit(_separate([code_grams(code), *added]))) is not None:
                    return name
        return self._hit(prose_grams(ordered)) if self.has_prose else None

    def _hit(self, grams_D: U64) -> str | None:
        maybe = self._grams.maybe(grams_D)
        begins = maybe
        for _ in range(MIN_RUN - 1):
            begins = begins[:-1] & maybe[len(maybe) - len(begins) + 1 :]
        if not begins.any():  # no run of hits begins anywhere
            return None
        places_H = np.flatnonzero(maybe)
        grams_H = grams_D[places_H]
        first = np.searchsorted(self.grams_G, grams_H, "left")
        last = np.searchsorted(self.grams_G, grams_H, "right")
        is_hit = last > first
        places_H, first, last = places_H[is_hit], first[is_hit], last[is_hit]
        if not len(places_H):
            return None
        counts_H = last - first
        ends_H = np.cumsum(counts_H)
        index = np.arange(ends_H[-1]) + np.repeat(first - ends_H + counts_H, counts_H)
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
        """Read an index that `save` wrote. `too_short` is empty, since the file does not have these names."""
        with np.load(path) as file:
            has_code, has_prose = map(bool, file["views"])
            names = tuple(map(str, file["names"]))
            arrays = (file["grams"], file["segments"], file["needs"], file["texts"])
            return cls(*arrays, names, (), has_code=has_code, has_prose=has_prose)


def _separate(parts: Sequence[U64]) -> U64:
    """Join n-grams of several views, with a 0 after each, so that no run goes from one into the next."""
    return np.concatenate([np.append(part, np.uint64(0)) for part in parts])


def _need(num_grams: int, width: int) -> int:
    """Return how many n-grams of a segment a contaminated document has: half, or what two cuts leave, but a third."""
    return max(-(-num_grams // 3), min(num_grams - 2 * (width - 1), -(-num_grams // 2)))


def _segments(text: HeldOutText) -> Iterator[U64]:
    """Yield the distinct n-grams of each segment of a text: half of a segment overlaps with the next."""
    gram, size, least = (PROSE_GRAM, PROSE_SEGMENT, MIN_PROSE) if text.is_prose else (CODE_GRAM, CODE_SEGMENT, MIN_CODE)
    source = text.text if text.is_prose else _HEADING.sub("", text.text)
    views = [prose_grams(source)] if text.is_prose else map(code_grams, code_of(source, Tokens.of(source)))
    for grams in views:
        width = size - gram + 1
        for start in range(0, max(1, len(grams) - width // 2), width // 2):
            part = grams[start : start + width]
            distinct = np.unique(part[part != 0])
            if len(part) >= least and len(distinct) >= MIN_DISTINCT * len(part):
                yield distinct
