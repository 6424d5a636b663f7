"""The words of a Dockerfile's instruction: quotes, variables, pairs. Pure text; knows nothing of what they are for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Protocol

from etude.environments.images.limits import BadSource

_NAME = re.compile("[A-Za-z_][A-Za-z0-9_]*")
_VARIABLE = re.compile(r"\\(.)|\$(?:\{([A-Za-z_]\w*)(?:(:?[-+])([^{}]*))?\}|([A-Za-z_]\w*))")
_PART = r"'[^']*'|\"(?:\\.|[^\"\\])*\"|(?:\\.|[^'\"\\\s])+"
_WORD = rf"(?:{_PART})+"


class Written(Protocol):
    """The part of an instruction that is read here."""

    @property
    def name(self) -> str: ...
    @property
    def words(self) -> Sequence[str]: ...
    @property
    def is_exec(self) -> bool: ...
    def error(self, what: str, hint: str) -> BadSource: ...


def raw_words(text: str) -> list[str]:
    """A text's words, with their quotes."""
    return re.findall(_WORD, text)


def unsupported(text: str) -> str:
    """The first substitution in a text that `expand` does not know, outside of single quotes; "" for none.

    >>> unsupported("${A:-b} '${C%d}' ${E##*/}")
    '${E##*/}'
    """
    left = _VARIABLE.sub("", re.sub("'[^']*'", "", text))
    found = re.search(r"\$\{[^}]*\}?", left)
    return found[0] if found else ""


def expand(text: str, variables: Mapping[str, str]) -> str:
    """A text with $NAME, ${NAME}, ${NAME:-default} and ${NAME:+other} replaced; a backslash keeps a dollar. Without
    the colon, what counts is whether the name is known, not whether it is empty.

    >>> expand(r"${A}/$B/${C:-c}/\\$A", {"A": "1"})
    '1//c/$A'
    """

    def value(found: re.Match[str]) -> str:
        if found[1] is not None:
            return found[1] if found[1] == "$" else found[0]
        name, how = found[2] or found[5], found[3]
        known = variables.get(name, "")
        if not how:
            return known
        there = bool(known) if how[0] == ":" else name in variables
        return (known if there else found[4]) if how[-1] == "-" else (found[4] if there else "")

    return _VARIABLE.sub(value, text)


def pairs(instruction: Written, variables: Mapping[str, str]) -> dict[str, str]:
    """The NAME=value pairs of ENV and LABEL, expanded; ``ENV NAME value``, too."""
    text = instruction.words[0]
    name, rest = (*re.split(r"\s+", text, maxsplit=1), "")[:2]
    if "=" not in name:
        if not rest or not _NAME.fullmatch(name):
            raise instruction.error(f"{instruction.name} without a value", "write NAME=value")
        return {name: expand(rest.strip(), variables)}
    found = {}
    for word in words_of(instruction, variables):
        name, equals, value = word.partition("=")
        if not equals or not name or (instruction.name == "ENV" and not _NAME.fullmatch(name)):
            raise instruction.error(f"{word[:60]!r} is no pair", "write NAME=value")
        found[name] = value
    return found


def words_of(instruction: Written, variables: Mapping[str, str]) -> list[str]:
    """An instruction's words: variables expanded but in single quotes, quotes taken away."""
    if instruction.is_exec:
        return [expand(word, variables) for word in instruction.words]
    text = instruction.words[0]
    if re.search(r"\S", re.sub(_WORD, "", text)):
        raise instruction.error("its quotes do not end", "close them")
    return [_unquoted(word, variables) for word in raw_words(text)]


def _unquoted(word: str, variables: Mapping[str, str]) -> str:
    out = []
    for part in re.findall(_PART, word):
        if part[0] == "'":
            out.append(part[1:-1])
        elif part[0] == '"':
            out.append(re.sub(r'\\(["\\$])', r"\1", expand(part[1:-1], variables)))
        else:
            out.append(re.sub(r"\\(.)", r"\1", expand(part, variables)))
    return "".join(out)


def arguments(
    instruction: Written, given: Mapping[str, str], variables: Mapping[str, str]
) -> list[tuple[str, str | None]]:
    """The names of an ARG, each with its value: the one given, else its default, else None."""
    found: list[tuple[str, str | None]] = []
    for word in words_of(instruction, variables):
        name, equals, default = word.partition("=")
        if not _NAME.fullmatch(name):
            raise instruction.error(f"{name[:40]!r} is no name of an argument", "write ARG NAME=default")
        found.append((name, given.get(name, default if equals else None)))
    return found
