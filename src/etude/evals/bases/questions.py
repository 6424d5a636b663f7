"""Questions with four options whose answers are known: look-ups mined from Python files, and state tracking.

A model answers by log-probability, so a base model needs no instructions. Each option ends with a newline, and is
complete."""

from __future__ import annotations

import ast
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from etude.corpus.documents import Document
from etude.syntax import parse

OPTIONS = 4
CONTEXT_CHARS = 6000
"""The most characters of a file before a question about it."""
STEPS = (2, 4, 8)
"""Assignments in the questions about state."""
IN_FILE, MODULE = "value of a constant above", "module of a name"
_NAMES = "abcde"


@dataclass(frozen=True)
class Question:
    """A text and its possible continuations, of which one is right.

    - `kind`: questions of one kind are counted together.
    - `context`: the text that each of the `options` continues. If there is only one option, the model must generate it
      (greedily); otherwise it must be the likeliest of them.
    - `neutral`: a text without the information of `context`. The log-probability of an option after it is subtracted,
      because some options are likely anyway (pointwise mutual information, arXiv 2104.08315). "": nothing is
      subtracted.
    - `answer`: index of the right option.
    - `origin`: the document that the question is about; the results of questions about one document are correlated."""

    kind: str
    context: str
    options: tuple[str, ...]
    answer: int
    origin: str
    neutral: str = ""


def look_ups(documents: Iterable[Document], *, count: int, seed: int = 0) -> list[Question]:
    """Mine questions from Python files: at most `count` of each of two kinds.

    - The first kind asks for the value of a constant that the context assigns; the wrong options are values of other
      constants in the same file. It measures how well the model reads its context.
    - The second kind asks in which module a class or function is defined, without showing any module. It measures what
      the model knows about the repository.
    Files that are not Python, and those with too few constants, give no questions."""
    values: list[Question] = []
    definitions: dict[str, set[str]] = {}
    for document in documents:
        if not document.path.endswith(".py"):
            continue
        try:
            tree = parse(document.text)
        except SyntaxError:
            continue
        draw = random.Random(f"{seed} {document.id}")
        values += _values(document, tree, draw)
        for name in _defined(tree):
            definitions.setdefault(name, set()).add(_module(document.path))
    draw = random.Random(seed)
    modules = list(_modules(definitions, draw))
    return [*_some(values, count, draw), *_some(modules, count, draw)]


def state_questions(*, count: int, seed: int = 0) -> list[Question]:
    """Make `count` questions for each number in `STEPS`: what is the value of a variable after that many assignments?

    An assignment copies another variable, or adds a number."""
    found = []
    for steps in STEPS:
        for i in range(count):
            draw = random.Random(f"{seed} {steps} {i}")
            found.append(_state_question(steps, draw, f"{steps}-{i}"))
    return found


def _state_question(steps: int, draw: random.Random, origin: str) -> Question:
    state = dict(zip(_NAMES, draw.sample(range(10), len(_NAMES)), strict=True))
    lines = [f"{name} = {value}" for name, value in state.items()]
    for _ in range(steps):
        to, source = draw.sample(_NAMES, 2)
        if draw.random() < 0.5:
            state[to] = state[source]
            lines.append(f"{to} = {source}")
        else:
            added = draw.randint(1, 3)
            state[to] = (state[source] + added) % 10
            lines.append(f"{to} = ({source} + {added}) % 10")
    asked = to
    others = draw.sample([value for value in range(10) if value != state[asked]], OPTIONS - 1)
    options, answer = _shuffled(str(state[asked]), [str(value) for value in others], draw)
    context = "\n".join([*lines, f"assert {asked} == "])
    return Question(f"state after {steps} assignments", context, options, answer, origin)


def _values(document: Document, tree: ast.Module, draw: random.Random) -> Iterator[Question]:
    """Yield at most two questions about constants in the first `CONTEXT_CHARS` characters of a file."""
    lines = document.text.splitlines()
    shown, chars = 0, 0
    while shown < len(lines) and chars + len(lines[shown]) < CONTEXT_CHARS:
        chars += len(lines[shown]) + 1
        shown += 1
    stored = Counter(
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    )
    found: dict[str, str] = {}
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=int() | float() | str() as value)):
                is_shown = (node.end_lineno or 0) <= shown
                if is_shown and stored[name] == 1 and not isinstance(value, bool) and _is_short(repr(value)):
                    found[name] = repr(value)
    different = sorted(set(found.values()))
    if len(different) < OPTIONS:
        return
    for name in draw.sample(sorted(found), 2):
        others = draw.sample([value for value in different if value != found[name]], OPTIONS - 1)
        options, answer = _shuffled(found[name], others, draw)
        context = "\n".join([*lines[:shown], "", f"assert {name} == "])
        neutral = f"assert {name} == "
        yield Question(IN_FILE, context, options, answer, document.id, neutral)


def _is_short(text: str) -> bool:
    return len(text) <= 40 and text.isprintable()


def _defined(tree: ast.Module) -> list[str]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return [node.name for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")]


def _module(path: str) -> str:
    """Return the dotted name of a file.

    >>> _module("src/shop/cart/__init__.py")
    'shop.cart'
    """
    parts = path.removesuffix(".py").split("/")
    parts = parts[1:] if parts[0] in ("src", "lib") and len(parts) > 1 else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def _modules(definitions: dict[str, set[str]], draw: random.Random) -> Iterator[Question]:
    every = sorted({module for modules in definitions.values() for module in modules})
    if len(every) < OPTIONS:
        return
    for name, modules in sorted(definitions.items()):
        if len(modules) > 1 or len(name) < 4:
            continue
        (module,) = modules
        others = draw.sample([one for one in every if one != module], OPTIONS - 1)
        options, answer = _shuffled(module, others, draw)
        context, neutral = (f"# The module that defines {what}: " for what in (name, "it"))
        yield Question(MODULE, context, options, answer, module, neutral)


def _some(questions: Sequence[Question], count: int, draw: random.Random) -> list[Question]:
    return list(questions) if len(questions) <= count else draw.sample(questions, count)


def _shuffled(right: str, wrong: Sequence[str], draw: random.Random) -> tuple[tuple[str, ...], int]:
    options = [right, *wrong]
    draw.shuffle(options)
    return tuple(f"{option}\n" for option in options), options.index(right)
