"""Generate functions with a docstring and one expression, from which the repositories of "repair" are built.

A `Template` is an expression with placeholders, and two phrases that describe it. A `Function` picks a template, a
phrase, variable names and a constant. A `Body` is an expression that a function may return, right or wrong; its value
is computed here without running any text. A model has to learn to write the expression for a docstring. This is tested
on functions with docstrings that it has never seen (`splits`).
"""

from __future__ import annotations

import operator
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from etude.records.task import Split
from etude.tasks.splits import split_of


@dataclass(frozen=True, slots=True)
class Template:
    """An expression over the placeholders A and B (two variables) or A and K (a variable and a constant).

    `family` is the kind of its operands: "ab" two numbers, "ak" a number and a constant, "xs" a list, "s" a string.
    `apply` computes its value from the values of the operands. `phrases` describe it, with the same placeholders."""

    family: str  # "ab" two numbers, "ak" a number and a constant, "xs" a list, "s" a string
    expression: str
    apply: Callable[..., Any]
    phrases: tuple[str, str]


def _fill(text: str, operands: Sequence[str | int]) -> str:
    """Replace the placeholders by operands. These are lower-case names and numbers, so none becomes a placeholder."""
    first, last = str(operands[0]), str(operands[-1])
    return text.replace("A", first).replace("B", last).replace("K", last)


_Rows = tuple[tuple[str, Callable[..., Any], str, str], ...]
"""(expression, function that computes it, first phrase, second phrase)."""
_AB: _Rows = (
    ("A + B", operator.add, "A plus B", "sum of A and B"),
    ("A - B", operator.sub, "A minus B", "B taken from A"),
    ("A * B", operator.mul, "A times B", "product of A and B"),
    ("A // B", operator.floordiv, "A divided by B", "whole quotient of A by B"),
    ("A % B", operator.mod, "remainder of A by B", "A modulo B"),
    ("max(A, B)", max, "larger of A and B", "maximum of A and B"),
    ("min(A, B)", min, "smaller of A and B", "minimum of A and B"),
    ("A < B", operator.lt, "is A less than B", "is A below B"),
    ("A > B", operator.gt, "is A greater than B", "is A above B"),
    ("A == B", operator.eq, "is A equal to B", "are A and B the same"),
    ("A != B", operator.ne, "is A different from B", "do A and B differ"),
)
_AK: _Rows = (
    ("A + K", operator.add, "A plus K", "add K to A"),
    ("A - K", operator.sub, "A minus K", "take K from A"),
    ("A * K", operator.mul, "A times K", "multiply A by K"),
    ("A % K", operator.mod, "A modulo K", "remainder of A by K"),
    ("A // K", operator.floordiv, "A divided by K", "whole quotient of A by K"),
    ("A > K", operator.gt, "is A greater than K", "is A above K"),
    ("A < K", operator.lt, "is A less than K", "is A below K"),
)
_FIRST, _LAST = operator.itemgetter(0), operator.itemgetter(-1)
_BACKWARDS = operator.itemgetter(slice(None, None, -1))
_XS: _Rows = (
    ("sum(A)", sum, "sum of A", "total of A"),
    ("max(A)", max, "maximum of A", "largest in A"),
    ("min(A)", min, "minimum of A", "smallest in A"),
    ("len(A)", len, "length of A", "how many in A"),
    ("A[0]", _FIRST, "first of A", "head of A"),
    ("A[-1]", _LAST, "last of A", "tail of A"),
    ("sorted(A)", sorted, "A sorted", "A in order"),
    ("A[::-1]", _BACKWARDS, "A reversed", "A backwards"),
)
_S: _Rows = (
    ("A.upper()", str.upper, "A in upper case", "A as capitals"),
    ("A.lower()", str.lower, "A in lower case", "A as small letters"),
    ("A[::-1]", _BACKWARDS, "A reversed", "A backwards"),
    ("len(A)", len, "length of A", "size of A"),
    ("A[0]", _FIRST, "first letter of A", "head of A"),
    ("A[-1]", _LAST, "last letter of A", "tail of A"),
    ("A.strip()", str.strip, "A without outer blanks", "A stripped"),
)


def _templates(*families: tuple[str, _Rows]) -> dict[str, tuple[Template, ...]]:
    return {
        family: tuple(Template(family, text, apply, (one, two)) for text, apply, one, two in rows)
        for family, rows in families
    }


TEMPLATES = _templates(("ab", _AB), ("ak", _AK), ("xs", _XS), ("s", _S))
TRANSFER_TEMPLATES = _templates(
    ("ab", (  # new words
        ("A >= B", operator.ge, "is A at least B", "is A not below B"),
        ("A <= B", operator.le, "is A at most B", "is A not above B"),
    )),
    ("ak", (  # words of two variables, with a constant
        ("max(A, K)", max, "larger of A and K", "maximum of A and K"),
        ("min(A, K)", min, "smaller of A and K", "minimum of A and K"),
        ("A == K", operator.eq, "is A equal to K", "are A and K the same"),
        ("A != K", operator.ne, "is A different from K", "do A and K differ"),
    )),
    ("xs", (  # two known words together
        ("sorted(A)[::-1]", lambda xs: sorted(xs)[::-1], "A sorted and reversed", "A in order backwards"),
        ("sorted(A)[0]", lambda xs: sorted(xs)[0], "first of A sorted", "head of A in order"),
    )),
    ("s", (
        ("A[::-1].upper()", lambda s: s[::-1].upper(), "A reversed in upper case", "A backwards as capitals"),
        ("A.strip().lower()", lambda s: s.strip().lower(), "A stripped in lower case", "A stripped as small letters"),
    )),
)  # fmt: skip
"""The templates of `Split.TRANSFER`. No training, validation or held-out function uses one of them."""
FAMILY_WEIGHTS = {"ab": 0.3, "ak": 0.4, "xs": 0.15, "s": 0.15}
VARIABLES: dict[str, tuple[tuple[str, ...], ...]] = {
    "ab": (("a", "b"), ("x", "y"), ("m", "n"), ("p", "q"), ("left", "right"), ("u", "v")),
    "ak": (("n",), ("x",), ("a",), ("value",), ("count",)),
    "xs": (("xs",), ("items",), ("rows",), ("data",)),
    "s": (("s",), ("text",), ("name",), ("word",)),
}
# fmt: off
MODULE_NAMES = ("calc", "shop", "text", "util", "core", "math2", "data", "stock", "grid", "tools", "score", "bank")
FUNCTION_NAMES = (
    "price", "total", "rate", "step", "shift", "scale", "check", "pick", "area", "cost", "level", "limit", "mark",
    "points", "find", "apply", "delta", "bonus", "grade", "split", "load", "rank", "weigh", "trim", "code", "join",
    "fill", "tax", "gap", "size",
)
# fmt: on
MISSING = Template("", "None", lambda *_: None, ("", ""))
"""The template of a body that was not written: `return None`."""


@dataclass(frozen=True, slots=True)
class Body:
    """An expression that a function returns: a template, and the names or numbers that replace its placeholders."""

    template: Template
    operands: tuple[str | int, ...]

    @property
    def text(self) -> str:
        """The expression as Python source."""
        return _fill(self.template.expression, self.operands)

    def value(self, variables: Sequence[str], args: Sequence[Any]) -> Any:
        """Compute the value of the expression when `variables` have the values `args`."""
        scope = dict(zip(variables, args, strict=True))
        return self.template.apply(*[scope[o] if isinstance(o, str) else o for o in self.operands])


@dataclass(frozen=True, slots=True)
class Function:
    """A function of a generated repository, with the right body.

    `phrasing` (0 or 1) chooses the template's phrase that is the docstring. `constant` is 0 if the template has none.

    >>> f = Function("price", TEMPLATES["ak"][0], 0, ("n",), 3)
    >>> print(f.source(), end="")
    def price(n):
        \"\"\"n plus 3\"\"\"
        return n + 3
    >>> f.key
    '(n) n plus 3'
    """

    name: str
    template: Template
    phrasing: int  # 0 or 1: which of the template's phrases is the docstring
    variables: tuple[str, ...]
    constant: int = 0  # 0 where the template has none

    @property
    def operands(self) -> tuple[str | int, ...]:
        """The values of the template's placeholders: the variables, or the first variable and the constant."""
        return (self.variables[0], self.constant) if self.template.family == "ak" else self.variables

    @property
    def body(self) -> Body:
        """The correct body, which the docstring describes."""
        return Body(self.template, self.operands)

    @property
    def docstring(self) -> str:
        """The docstring, which says in words what the correct body computes."""
        return _fill(self.template.phrases[self.phrasing], self.operands)

    @property
    def key(self) -> str:
        """A text of variables and docstring, whose hash decides the function's split.

        They determine the template, the phrase and the constant."""
        return f"({', '.join(self.variables)}) {self.docstring}"

    @property
    def split(self) -> Split:
        """The split to which the function belongs, by the hash of its `key`."""
        return split_of_key(self.key)

    def source(self, body: Body | None = None) -> str:
        """Return the function as three lines of Python, with `body` or else the right one."""
        text = (body or self.body).text
        return f'def {self.name}({", ".join(self.variables)}):\n    """{self.docstring}"""\n    return {text}\n'

    def wrong_operators(self) -> list[Body]:
        """Return bodies with the other expressions of the template's family and the same operands."""
        return [Body(t, self.operands) for t in TEMPLATES[self.template.family] if t is not self.template]

    def wrong_operands(self) -> list[Body]:
        """Return bodies with one variable used twice, or with both swapped if that changes the value.

        A function of one variable has none."""
        if self.template.family != "ab":
            return []
        a, b = self.variables
        swapped = [Body(self.template, (b, a))] if self.template.apply(1, 2) != self.template.apply(2, 1) else []
        return [*swapped, Body(self.template, (a, a))]

    def wrong_constants(self, rng: random.Random, n: int = 8) -> list[Body]:
        """Return bodies with up to `n` other constants, drawn at random; none if the template has no constant."""
        if self.template.family != "ak":
            return []
        drawn = [rng.randint(2, 19) for _ in range(n)]
        return [Body(self.template, (self.variables[0], k)) for k in drawn if k != self.constant]


def random_function(rng: random.Random, name: str, split: Split) -> Function:
    """Draw a function of a split for a repository: constants from 2 to 19, common variable names."""
    templates = TRANSFER_TEMPLATES if split is Split.TRANSFER else TEMPLATES
    weights = [FAMILY_WEIGHTS[f] for f in templates]  # the same in all splits that share templates
    family = rng.choices(list(templates), weights)[0]
    while True:
        template, variables = rng.choice(templates[family]), rng.choice(VARIABLES[family])
        constant = rng.randint(2, 19) if family == "ak" else 0
        function = Function(name, template, rng.randrange(2), variables, constant)
        if function.split is split:
            return function


_ALL = tuple(t for family in TEMPLATES.values() for t in family)


def wide_function(rng: random.Random, name: str) -> Function:
    """Draw a training function for the mid-training corpus, from a wider range than the repositories use.

    All templates are equally likely, constants are from 2 to 99, and half of the variables have unusual names. A model
    learns late to copy a constant or a name from the docstring to the expression, and RL depends on it."""
    names = [n for n in FUNCTION_NAMES if n != name]
    while True:
        template = rng.choice(_ALL)
        variables = rng.choice(VARIABLES[template.family])
        if rng.random() < 0.5:
            variables = tuple(rng.sample(names, len(variables)))
        constant = rng.randint(2, 99) if template.family == "ak" else 0
        function = Function(name, template, rng.randrange(2), variables, constant)
        if function.split is Split.TRAIN:
            return function


def random_args(rng: random.Random, function: Function) -> list[Any]:
    """Draw arguments for one call of a function: small numbers, short lists or short words.

    If the function has a constant, an argument is often close to its value."""
    match function.template.family:
        case "ab":
            first = rng.randint(1, 12)
            return [first, first if rng.random() < 0.2 else rng.randint(1, 12)]
        case "ak":
            near = function.constant + rng.randint(-1, 1)
            return [rng.randint(0, 30) if rng.random() < 0.7 else near]
        case "xs":
            return [[rng.randint(0, 9) for _ in range(rng.randint(2, 4))]]
        case _:
            word = "".join(rng.choice("abcdeABCDE") for _ in range(rng.randint(2, 4)))
            return [f" {word}" if rng.random() < 0.3 else word]


def border_args(rng: random.Random, function: Function) -> list[list[Any]]:
    """Return arguments for several calls that distinguish similar functions.

    They are below, at and above the constant, or pairs with the smaller first, the larger first, and equal."""
    match function.template.family:
        case "ab":
            low, high = sorted(rng.sample(range(1, 13), 2))
            return [[low, high], [high, low], [high, high]]
        case "ak":
            return [[function.constant + d] for d in (-1, 0, 1)]
        case _:
            return []


_DEFINITION = re.compile(r'def \w+\(([\w, ]*)\):\n(?:\d+)? *"""([^"\n]+)"""')


def _measure(phrase: str, num_variables: int) -> tuple[int, int]:
    return num_variables, len(phrase.split())


def _phrases(templates: Iterable[Template]) -> dict[tuple[int, int], list[str]]:
    """Phrases by (number of variables, number of words), so that a docstring is compared with few of them."""
    shelves: dict[tuple[int, int], list[str]] = {}
    for phrase in (p for t in templates for p in t.phrases):
        shelves.setdefault(_measure(phrase, 2 if "B" in phrase else 1), []).append(phrase)
    return shelves


_PHRASES = _phrases(_ALL)
_TRANSFER_PHRASES = _phrases(t for family in TRANSFER_TEMPLATES.values() for t in family)


def _is_phrase(phrases: dict[tuple[int, int], list[str]], variables: str, docstring: str) -> bool:
    operands = variables.split(", ")
    constant = re.search(r"\d+", docstring)
    filled = [*operands, constant[0]] if constant else operands
    return any(_fill(p, filled) == docstring for p in phrases.get(_measure(docstring, len(operands)), ()))


def split_of_key(key: str) -> Split:
    """Return the split of the function with this key.

    >>> split_of_key("(n) n plus 4"), split_of_key("(n) larger of n and 4")
    (<Split.HELDOUT: 'heldout'>, <Split.TRANSFER: 'transfer'>)
    """
    variables, _, docstring = key.removeprefix("(").partition(") ")
    return Split.TRANSFER if _is_phrase(_TRANSFER_PHRASES, variables, docstring) else split_of(key)


def keys_in(text: str) -> Iterator[str]:
    """Yield the keys of all generated functions in a text, which may be code or the numbered lines of a `cat`.

    >>> list(keys_in('1 def price(n):\\n2  \"\"\"n plus 3\"\"\"\\n3  return None'))
    ['(n) n plus 3']
    """
    for variables, docstring in _DEFINITION.findall(text):
        if _is_phrase(_PHRASES, variables, docstring) or _is_phrase(_TRANSFER_PHRASES, variables, docstring):
            yield f"({variables}) {docstring}"
