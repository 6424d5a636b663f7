"""The product's work: a request for a small edit, what the agent answered, and the file after it.

    request = Requests(seed=0).request(Split.TRAIN, 3)
    request.text                      # what the agent reads: 'set owner=river', and the file with line numbers
    answer = read_answer(message)     # of OpenAI's client: an edit, a question, or a call that cannot be carried out
    answer.file_after(request)        # the file with the edit

An edit may be right in several styles: quotes, a comment on what was there before. Correctness does not depend on them;
users do (`examples.product.users`)."""

from __future__ import annotations

import ast
import enum
import json
import random
import re
from dataclasses import dataclass
from typing import Any, Protocol

from etude.records.task import Split
from etude.tasks.splits import split_of

# fmt: off
WORDS = (
    "amber", "birch", "cedar", "delta", "ember", "flint", "grove", "haven", "iris", "jade", "karst", "lotus", "maple",
    "north", "ocean", "pearl", "quartz", "river", "stone", "tulip", "umber", "violet", "willow", "xenon", "yarrow",
    "zinc", "apple", "bronze", "copper", "dune", "elm", "fern",
)
FIELDS = ("title", "owner", "city", "colour", "label", "theme", "place", "team", "shop", "lead", "brand", "series")
FILES = ("page.py", "shop.py", "card.py", "menu.py")
# fmt: on
LINE = 2
"""The line of every file that has the value."""
TOOL = {
    "type": "function",
    "function": {
        "name": "edit",
        "description": "Replace a line of a file. Its indentation is kept.",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string"}, "line": {"type": "string"}, "text": {"type": "string"}},
            "required": ["path", "line", "text"],
        },
    },
}
"""The agent's only tool, in OpenAI's format. It is etude's standard tool of this name."""


@dataclass(frozen=True)
class Request:
    """A request for an edit: function `field` of the file `path` returns `old`, and should return `new`.

    `hard`: the new value is a code of random letters, which the small model of this example cannot copy."""

    path: str
    field: str
    old: str
    new: str
    quote: str
    hard: bool = False

    @property
    def file(self) -> str:
        """The file as it is."""
        return f"def {self.field}():\n    return {self.quote}{self.old}{self.quote}\n"

    @property
    def text(self) -> str:
        """What the agent reads."""
        return prompt_of(f"set {self.field}={self.new}", self.path, self.file)


def prompt_of(wish: str, path: str, file: str) -> str:
    """Return what the agent reads: the wish, the path, and the file with line numbers."""
    lines = [f"{number} {line}" for number, line in enumerate(file.splitlines(), 1)]
    return "\n".join([wish, path, *lines])


class Requests:
    """Requests without end. The hash of field and new value decides the split, so held-out ones occur in no training
    text. `hard`: the share of hard ones; `seed` decides the order."""

    def __init__(self, seed: int = 0, *, hard: float = 0.1) -> None:
        self.seed, self.hard = seed, hard

    def request(self, split: Split, index: int) -> Request:
        """Return request `index` of a split; the same arguments give the same request."""
        rng = random.Random(f"request {self.seed} {self.hard} {split} {index}")
        is_hard = rng.random() < self.hard
        while True:
            new = code(rng) if is_hard else rng.choice(WORDS)
            field, old = rng.choice(FIELDS), rng.choice(WORDS)
            if old != new and split_of(f"{field} {new}") is split:
                return Request(rng.choice(FILES), field, old, new, rng.choice("'\""), is_hard)


def code(rng: random.Random) -> str:
    """Return a code of eight letters."""
    return "".join(rng.choices("bcdfghjklmnpqrstvwxz", k=8))


class Kind(enum.StrEnum):
    """What the agent answered: an edit, words without an edit, or a tool call that cannot be carried out."""

    EDIT = "edit"
    QUESTION = "question"
    BROKEN = "broken"


@dataclass(frozen=True)
class Answer:
    """An answer of the agent. `text`: the new line, or what the agent said. `path`, `line`: of an edit."""

    kind: Kind
    text: str
    path: str = ""
    line: int = 0

    def file_after(self, request: Request) -> str:
        """Return the request's file after the edit; unchanged without one, or if it is of another place."""
        return edited(request.file, self) if self.path == request.path else request.file

    def value(self, request: Request) -> str | None:
        """Return the text that the function returns after the edit; None if it is not a function that returns one."""
        return value_of(self.file_after(request), request.field)

    def is_right(self, request: Request) -> bool:
        """Return whether the file after the edit does what was asked for, in whatever style."""
        return self.kind is Kind.EDIT and self.value(request) == request.new

    @property
    def quote(self) -> str:
        """The kind of quotes in the new line: `'`, `"`, or "" without any."""
        found = re.search("['\"]", self.text)
        return found[0] if found else ""

    @property
    def has_comment(self) -> bool:
        """Whether the new line has a comment."""
        return "#" in self.text


def edited(file: str, answer: Answer) -> str:
    """Return a file after an edit of one of its lines, whose indentation is kept; unchanged if it has no such line."""
    lines = file.splitlines()
    if answer.kind is not Kind.EDIT or not 1 <= answer.line <= len(lines):
        return file
    old = lines[answer.line - 1]
    lines[answer.line - 1] = old[: len(old) - len(old.lstrip())] + answer.text.strip()
    return "\n".join(lines) + "\n"


def value_of(file: str, field: str) -> str | None:
    """Return the text that the function `field` of a file returns, without running it; None if it returns no text."""
    try:
        [function] = ast.parse(file).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if not isinstance(function, ast.FunctionDef) or function.name != field or len(function.body) != 1:
        return None
    [statement] = function.body
    if not isinstance(statement, ast.Return) or not isinstance(statement.value, ast.Constant):
        return None
    return statement.value.value if isinstance(statement.value.value, str) else None


class Message(Protocol):
    """The message of a chat completion, as OpenAI's client returns it."""

    content: str | None
    tool_calls: Any


def read_answer(message: Message) -> Answer:
    """Return what the agent answered. A call with missing or unusable arguments is `Kind.BROKEN`."""
    text = message.content or ""
    if not message.tool_calls:
        return Answer(Kind.QUESTION if text.strip().endswith("?") else Kind.BROKEN, text)
    function = message.tool_calls[0].function
    try:
        given = json.loads(function.arguments)
        answer = Answer(Kind.EDIT, str(given["text"]), str(given["path"]), int(given["line"]))
    except (ValueError, KeyError, TypeError):
        return Answer(Kind.BROKEN, f"{function.name} {function.arguments}")
    return answer if function.name == "edit" and len(message.tool_calls) == 1 else Answer(Kind.BROKEN, answer.text)
