"""Questions about a number that a text states once, many bytes before it is asked for.

They measure how far back a model finds what it needs. The text between is the user's own. Names and numbers are random,
so nothing can be known beforehand."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

from etude.corpus.documents import Document
from etude.evals.bases.questions import Question

RETRIEVED = "number stated"
"""What the kinds of these questions begin with."""
STATED = 4
"""Numbers that a text states. One of them is asked for, so copying any number is right once in four times."""


def retrieval_questions(
    documents: Sequence[Document], *, distances: Sequence[int], count: int, seed: int = 0
) -> list[Question]:
    """Make `count` questions for each distance: the bytes of text between a stated number and the question for it.

    Each has one option (see `Question.options`). The text is that of `documents`, drawn line by line from a random
    document on. Another number is stated before the asked one, the rest at random lines after it. Without any text
    there are no questions."""
    documents = [one for one in documents if one.text.strip()]
    if not documents:
        return []
    found = []
    for distance in distances:
        for i in range(count):
            draw = random.Random(f"{seed} {distance} {i}")
            found.append(_question(documents, distance, draw))
    return found


def statement(name: str, number: str) -> str:
    """Return the line that states a number."""
    return f"{name} = {number}"


def asked(name: str) -> str:
    """Return the text that the number of `name` continues."""
    return f"assert {name} == "


def named_numbers(draw: random.Random, count: int) -> dict[str, str]:
    """Draw different names of three syllables, each with another number of five digits.

    >>> named_numbers(random.Random(0), 2)
    {'qocivo': '76150', 'qitixe': '28254'}
    """
    names: dict[str, None] = {}
    while len(names) < count:
        names["".join(draw.choice("bcdfghjklmnpqrstvwxz") + draw.choice("aeiou") for _ in range(3))] = None
    return dict(zip(names, map(str, draw.sample(range(10_000, 100_000), count)), strict=True))


def _question(documents: Sequence[Document], distance: int, draw: random.Random) -> Question:
    first = draw.randrange(len(documents))
    lines = list(_lines(documents, first, distance, draw))
    numbers = named_numbers(draw, STATED)
    (name, number), before, *others = numbers.items()
    for other in others:
        lines.insert(draw.randint(0, len(lines)), statement(*other))
    context = "\n".join([statement(*before), statement(name, number), *lines, asked(name)])
    return Question(f"{RETRIEVED} {_size(distance)} before", context, (number,), 0, documents[first].id)


def _lines(documents: Sequence[Document], first: int, size: int, draw: random.Random) -> Iterator[str]:
    """Yield lines of `size` bytes in all, line ends included, from a random line of document `first` on."""
    lines = documents[first].text.splitlines()
    rest = itertools.cycle([*documents[first + 1 :], *documents[: first + 1]])
    lines = lines[draw.randrange(len(lines)) :]
    while size > 0:
        for line in lines:
            encoded = line.encode("utf-8", "replace")[: max(0, size - 1)]
            yield encoded.decode("utf-8", "ignore")
            size -= len(encoded) + 1
            if size <= 0:
                return
        lines = next(rest).text.splitlines()


def _size(num_bytes: int) -> str:
    return f"{num_bytes >> 10} KiB" if num_bytes % 1024 == 0 else f"{num_bytes} bytes"
