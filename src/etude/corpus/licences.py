"""Licences of documents: SPDX headers, licence files, and whether an SPDX expression is allowed."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

UNKNOWN = "unknown"
_HEADER_CHARS = 4_096
_HEADER = re.compile(r"SPDX-License-Identifier:[ \t]*([A-Za-z0-9.+()\- ]+)")
_FILE = re.compile(r"(un)?licen[cs]e|copying|copyright", re.IGNORECASE)
_PHRASES = (  # of the text of a licence, in the order in which they are searched; spaces are single
    ("AGPL-3.0", ("gnu affero general public license",)),
    ("LGPL", ("gnu lesser general public license",)),
    ("GPL-3.0", ("gnu general public license", "version 3")),
    ("GPL-2.0", ("gnu general public license",)),
    ("Apache-2.0", ("apache license", "version 2.0")),
    ("MPL-2.0", ("mozilla public license", "2.0")),
    ("PSF-2.0", ("python software foundation license version 2",)),
    ("BSD-3-Clause", ("redistribution and use in source and binary forms", "neither the name")),
    ("BSD-2-Clause", ("redistribution and use in source and binary forms",)),
    ("ISC", ("permission to use, copy, modify, and/or distribute",)),
    ("MIT", ("permission is hereby granted, free of charge", "the above copyright notice")),
    ("Unlicense", ("this is free and unencumbered software",)),
    ("CC0-1.0", ("cc0 1.0",)),
)


def header_licence(text: str) -> str:
    """Return the SPDX expression in the first 4,096 characters of a document, or "".

    >>> header_licence("# SPDX-License-Identifier: MIT OR Apache-2.0\\nimport os\\n")
    'MIT OR Apache-2.0'
    """
    found = _HEADER.search(text, 0, _HEADER_CHARS)
    return found[1].strip() if found else ""


def is_licence_file(name: str) -> bool:
    """Return whether a file name (without folders) is that of a licence, such as "LICENSE.txt" or "COPYING"."""
    return _FILE.fullmatch(re.split(r"[.-]", name, maxsplit=1)[0]) is not None


def licence_of(text: str) -> str:
    """Return the SPDX id of the licence whose text this is, or "" for one that is not known."""
    words = " ".join(text.lower().split())
    return header_licence(text) or next((i for i, parts in _PHRASES if all(one in words for one in parts)), "")


def nearest_licence(path: str, by_folder: Mapping[str, str]) -> str:
    """Return the licence of the nearest folder above a path ("a/b.py") that has one, or "".

    `by_folder`: folder -> licence; the topmost folder is "".

    >>> nearest_licence("a/b/c.py", {"": "MIT", "a": "ISC"}), nearest_licence("c.py", {"": "MIT"})
    ('ISC', 'MIT')
    """
    while path:
        path = path.rpartition("/")[0]
        if path in by_folder:
            return by_folder[path]
    return ""


def is_allowed(expression: str, allowed: Collection[str]) -> bool:
    """Return whether an SPDX expression is satisfied by the `allowed` ids: all of an AND, one of an OR. Case and
    exceptions ("WITH ...") do not count, nor do "-only" and "-or-later".

    >>> is_allowed("GPL-3.0-only OR MIT", ["MIT"]), is_allowed("MIT AND GPL-3.0", ["MIT"]), is_allowed("", ["MIT"])
    (True, False, False)
    >>> is_allowed("(MIT OR ISC) AND BSD-3-Clause", ["mit", "BSD-3-Clause"]), is_allowed("", ["unknown"])
    (True, True)
    """
    known = {_plain(one) for one in allowed}
    tokens = re.findall(r"[()]|[^\s()]+", expression) or [UNKNOWN]
    try:
        value, rest = _either(tokens, known)
    except (IndexError, RecursionError):
        return False
    return value and not rest


def _either(tokens: list[str], known: Collection[str]) -> tuple[bool, list[str]]:
    value, tokens = _both(tokens, known)
    while tokens and tokens[0].upper() == "OR":
        more, tokens = _both(tokens[1:], known)
        value = value or more
    return value, tokens


def _both(tokens: list[str], known: Collection[str]) -> tuple[bool, list[str]]:
    value, tokens = _one(tokens, known)
    while tokens and tokens[0].upper() == "AND":
        more, tokens = _one(tokens[1:], known)
        value = value and more
    return value, tokens


def _one(tokens: list[str], known: Collection[str]) -> tuple[bool, list[str]]:
    if tokens[0] == "(":
        value, tokens = _either(tokens[1:], known)
        if tokens[0] != ")":
            raise IndexError
        return value, tokens[1:]
    value, tokens = _plain(tokens[0]) in known, tokens[1:]
    return (value, tokens[2:]) if tokens and tokens[0].upper() == "WITH" else (value, tokens)


def _plain(name: str) -> str:
    return name.lower().removesuffix("+").removesuffix("-only").removesuffix("-or-later")
