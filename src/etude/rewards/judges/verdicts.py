"""Parses the replies of judges strictly: a reply that is not exactly a verdict in the asked form is unknown, not 0.

A verdict of the form `Form.TOKEN` is computed from the probabilities of the judge's next token: it is the mean score
under the probabilities of the scores (Liu et al. 2023, "G-Eval", arXiv 2303.16634). For scores 0 and 1 it is the
probability of 1, given that the token is one of them."""

from __future__ import annotations

import enum
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

MAX_REPLY_CHARS = 50_000
MAX_REASON_CHARS = 500
MIN_SHARE = 0.5
"""Smallest total probability of the scores as the next token; below it, the reply is not a verdict."""


MAX_UNSEEN = 0.1
"""The largest share of the scores' probability that scores may have which the server does not list."""


class Form(enum.StrEnum):
    """The form of a judge's answer.

    - JSON: one JSON object; its schema is sent with the request.
    - LINE: free text whose last line is the verdict.
    - VALUE: the verdict alone, for small models.
    - TOKEN: the verdict is computed from the probabilities of the first token."""

    JSON = "json"
    LINE = "line"
    VALUE = "value"
    TOKEN = "token"


Likeliest = tuple[tuple[str, float], ...]
"""The likeliest first tokens of a reply: (text, natural logarithm of the probability)."""


class NoVerdict(ValueError):
    """Raised for a reply that is not a verdict; the message says why."""


class Domain(Protocol):
    """The set of possible verdicts of a question."""

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema that each verdict satisfies."""
        ...

    @property
    def shown(self) -> str:
        """Text for the question that says which verdicts are possible."""
        ...

    def read(self, found: object) -> Any:
        """Parse a verdict from its JSON value, or from its text. Raises `NoVerdict` if it is not a possible verdict."""
        ...


@dataclass(frozen=True)
class Scale:
    """A domain of verdicts: the integers from `lowest` to `highest`."""

    lowest: int
    highest: int

    @property
    def schema(self) -> dict[str, Any]:
        return {"type": "integer", "enum": list(range(self.lowest, self.highest + 1))}

    @property
    def shown(self) -> str:
        return f"an integer from {self.lowest} to {self.highest}"

    def read(self, found: object) -> int:
        if isinstance(found, str) and re.fullmatch(r"-?[0-9]{1,4}", found):
            found = int(found)
        elif isinstance(found, str):
            raise NoVerdict(f"the verdict {found[:40]!r} is no integer")
        if type(found) is not int:
            raise NoVerdict(f"the verdict {str(found)[:40]} is no integer")
        if not self.lowest <= found <= self.highest:
            raise NoVerdict(f"the verdict {found} is outside of {self.lowest} to {self.highest}")
        return found


@dataclass(frozen=True)
class Weighed(Scale):
    """A domain of verdicts: real numbers from `lowest` to `highest`, each the mean of a distribution over scores.

    Scores are from 0 to 9, so that each is one digit and one token. Raises `ValueError` for another scale."""

    def __post_init__(self) -> None:
        if not 0 <= self.lowest < self.highest <= 9:
            raise ValueError(f"the scale is {self.lowest} to {self.highest}, expected a scale within 0 to 9")

    def read(self, found: object) -> float:  # type: ignore[override]
        if not isinstance(found, int | float) or not self.lowest <= found <= self.highest:
            raise NoVerdict(f"the verdict {str(found)[:40]} is outside of {self.lowest} to {self.highest}")
        return float(found)

    def mean(self, likeliest: Likeliest) -> tuple[float, str]:
        """Return (mean score, reason) from the likeliest tokens. A score that is not among them has probability 0.

        Raises `NoVerdict` if the total probability of the scores is below `MIN_SHARE`, or if scores that are not among
        the likeliest tokens may have more than `MAX_UNSEEN` of it.

        >>> Weighed(0, 1).mean((("1", math.log(0.6)), (" 0", math.log(0.2)), ("The", math.log(0.1))))
        (0.75, '0: 0.200, 1: 0.600')
        """
        shares = dict.fromkeys(range(self.lowest, self.highest + 1), 0.0)
        for text, logprob in likeliest:
            word = text.strip()
            if len(word) == 1 and word in "0123456789" and int(word) in shares:
                shares[int(word)] += math.exp(logprob)
        total = sum(shares.values())
        if not MIN_SHARE <= total <= 1.01:
            shown = ", ".join(f"{text!r} {math.exp(logprob):.2f}" for text, logprob in likeliest[:3])
            raise NoVerdict(f"the scores have {total:.0%} of the next token's probability; the likeliest are {shown}")
        listed = [math.exp(logprob) for _, logprob in likeliest]
        num_unseen = sum(not share for share in shares.values())
        unseen = min(num_unseen * min(listed), max(0.0, 1.0 - sum(listed)))  # none is likelier than a listed token
        if unseen > MAX_UNSEEN * (total + unseen):
            facts = f"{num_unseen} scores, which are not listed, may have {unseen:.0%} of the probability"
            raise NoVerdict(f"the server lists too few likely tokens, {len(listed)}: {facts}")
        reason = ", ".join(f"{score}: {share:.3f}" for score, share in shares.items())
        return round(sum(score * share for score, share in shares.items()) / total, 6), reason


@dataclass(frozen=True)
class Choice:
    """A domain of verdicts: one of some words."""

    words: tuple[str, ...]

    @property
    def schema(self) -> dict[str, Any]:
        return {"type": "string", "enum": list(self.words)}

    @property
    def shown(self) -> str:
        return " or ".join((", ".join(self.words[:-1]), self.words[-1]))

    def read(self, found: object) -> str:
        if not isinstance(found, str) or found not in self.words:
            raise NoVerdict(f"the verdict {str(found)[:40]!r} is none of {', '.join(self.words)}")
        return found


@dataclass(frozen=True)
class Order:
    """A domain of verdicts: a ranking, that is the numbers 1 to `count` in some order, each once."""

    count: int

    @property
    def schema(self) -> dict[str, Any]:
        return {"type": "array", "items": {"type": "integer", "enum": list(range(1, self.count + 1))}}

    @property
    def shown(self) -> str:
        return f"the numbers 1 to {self.count}, each once, the best first"

    def read(self, found: object) -> tuple[int, ...]:
        if isinstance(found, str):
            found = [int(word) for word in re.findall(r"[0-9]{1,3}", found)] if re.fullmatch(r"[0-9, ]+", found) else []
        if not isinstance(found, list) or any(type(one) is not int for one in found):
            raise NoVerdict(f"the verdict {str(found)[:40]} is no list of integers")
        if sorted(found) != list(range(1, self.count + 1)):
            raise NoVerdict(f"the verdict {str(found)[:80]} does not have each of 1 to {self.count} once")
        return tuple(found)


def instruction(form: Form, domain: Domain, code: str) -> str:
    """Return the sentences of a question that tell the judge in which form to answer."""
    if form in (Form.VALUE, Form.TOKEN):
        return f"Answer with {domain.shown}, and nothing else."
    if form is Form.LINE:
        return (
            f"Give the reason in one or two sentences. Then write one last line of exactly this form, where VALUE is "
            f"{domain.shown}:\nVERDICT {code}: VALUE"
        )
    return (
        f"Answer with one JSON object and nothing else. Its keys are, in this order: reason (one or two sentences), "
        f'verdict ({domain.shown}), and code (the text "{code}").'
    )


def schema(domain: Domain) -> dict[str, Any]:
    """Return the JSON schema of an answer of the form `Form.JSON`. It does not depend on the question's code, so
    servers can cache it."""
    properties = {"reason": {"type": "string"}, "verdict": domain.schema, "code": {"type": "string"}}
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def read_reply(text: str, form: Form, domain: Domain, code: str, likeliest: Likeliest = ()) -> tuple[Any, str]:
    """Parse the complete reply of a judge. Returns (verdict, reason). Raises `NoVerdict` if it contains no verdict.

    The reply must contain the question's `code`, except in the forms `VALUE` and `TOKEN`. So a verdict that the judge
    quotes from the evidence does not count. `likeliest`: the likeliest first tokens of the reply, for `TOKEN`.

    >>> read_reply("It is short.\\nVERDICT 7f: 4", Form.LINE, Scale(1, 5), "7f")
    (4, 'It is short.')
    """
    if len(text) > MAX_REPLY_CHARS:
        raise NoVerdict(f"the reply has {len(text)} characters")
    if isinstance(domain, Weighed):
        return domain.mean(likeliest)
    if form is Form.VALUE:
        return domain.read(text.strip()), ""
    value, reason = (_read_line if form is Form.LINE else _read_json)(text, domain, code)
    return value, encodable(reason)


def encodable(text: str) -> str:
    """Replace each half of a surrogate pair in a text by "?". JSON may contain such a half, but UTF-8 cannot encode it.

    >>> encodable("a \\ud83d b")
    'a ? b'
    """
    return text.encode(errors="replace").decode()


def _read_line(text: str, domain: Domain, code: str) -> tuple[Any, str]:
    lines = [line.strip() for line in text.strip().splitlines()]
    found = [re.fullmatch(rf"VERDICT {re.escape(code)}: (.{{1,200}})", line) for line in lines]
    if not lines or found[-1] is None:
        raise NoVerdict(f"the last line of the reply is no verdict: {(lines or [''])[-1][:80]!r}")
    if any(found[:-1]):
        raise NoVerdict("the reply has several verdicts")
    return domain.read(found[-1][1]), " ".join(lines[:-1])[:MAX_REASON_CHARS]


def _read_json(text: str, domain: Domain, code: str) -> tuple[Any, str]:
    try:
        found = json.loads(text, object_pairs_hook=_pairs, parse_constant=_no_constant)
    except NoVerdict:
        raise
    except (ValueError, RecursionError):
        raise NoVerdict(f"the reply is not one JSON object: {text.strip()[:80]!r}") from None
    if not isinstance(found, dict) or found.keys() != {"reason", "verdict", "code"}:
        raise NoVerdict(f"the reply does not have the keys reason, verdict and code: {text.strip()[:80]!r}")
    if found["code"] != code:
        raise NoVerdict(f"the reply has the code {str(found['code'])[:20]!r} of no question")
    if not isinstance(found["reason"], str):
        raise NoVerdict("the reason is not a text")
    return domain.read(found["verdict"]), " ".join(found["reason"].split())[:MAX_REASON_CHARS]


def _pairs(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) < len(pairs):
        raise NoVerdict("the reply has a key twice")
    return dict(pairs)


def _no_constant(name: str) -> Any:
    raise NoVerdict(f"the reply has {name}")
