"""Renders the pages from the templates of this folder. Every text is escaped, and made visible (`text.visible`)."""

from __future__ import annotations

import datetime
import functools
import json
import math
from importlib.resources import files
from typing import Any
from urllib.parse import quote

import jinja2
from markupsafe import Markup

from etude.dash.text import cut, visible
from etude.dashboard import formatting
from etude.dashboard.glossary import meaning
from etude.dashboard.messages import messages
from etude.records.view import TurnTokens, conversations, turn_facts

STATIC = {"dash.css": "text/css", "dash.js": "text/javascript", "icon.svg": "image/svg+xml"}
"""Files that are served, and their types."""
SHADES = (0.01, 0.1, 0.5, 0.9)
"""Probabilities between which the shades of sampled tokens change."""


@functools.cache
def static(name: str) -> bytes:
    """Return the content of a file of `STATIC`."""
    return (files("etude.dash") / "static" / name).read_bytes()


def render(template: str, **values: object) -> str:
    """Return a page from a template."""
    return _environment().get_template(template).render(**values)


def warm() -> None:
    """Compile all templates, so that the first page does not wait for it."""
    for name in _environment().list_templates():
        _environment().get_template(name)


@functools.cache
def _environment() -> jinja2.Environment:
    found = jinja2.Environment(
        loader=jinja2.PackageLoader("etude.dash", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_harmless,
    )
    found.filters |= {
        "bytes": _bytes,
        "cut": cut,
        "date": _date,
        "fixed": _fixed,
        "duration": lambda value: "–" if value is None else formatting.duration(value),
        "percent": lambda value: "–" if value is None else formatting.percent(value),
        "thousands": lambda value: "–" if value is None else f"{value:,.0f}",
        "seg": lambda value: quote(str(value), safe=""),
        "markup": Markup,
        "json": lambda value: json.dumps(value, indent=2, default=str),
        "num": lambda value: formatting.significant(value) if isinstance(value, int | float) else "–",
    }
    found.globals |= {
        "conversations": conversations,
        "meaning": meaning,
        "messages": messages,
        "turn_facts": turn_facts,
        "strip": strip,
    }
    return found


def _harmless(value: object) -> object:
    """Make a text visible before it is escaped. Markup was made by our own code."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return visible(value)
    return value


def _bytes(value: float | None) -> str:
    return "–" if value is None else formatting.size(value)


def _fixed(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _date(value: float | None) -> str:
    """A unix time in UTC; a time that no calendar has as a number."""
    if value is None:
        return "–"
    try:
        return datetime.datetime.fromtimestamp(value, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, ValueError, OSError):
        return f"{value:g}"


def strip(tokens: TurnTokens) -> list[dict[str, Any]]:
    """Return for each sampled token a dict of strings, from which the page shows the tokens in a row.

    "text": the token's text. "look": CSS classes by its probability, loss and advantage. "facts": a line with its
    numbers. "version": "v" and the step of the weights that sampled it, where this step changes; "" elsewhere."""
    found, before = list[dict[str, Any]](), None
    rows = zip(tokens.texts, tokens.logprobs, tokens.steps, tokens.trained, tokens.advantages, strict=True)
    for at, (word, logprob, step, trained, advantage) in enumerate(rows, tokens.start):
        shade = sum(logprob >= math.log(least) for least in SHADES)
        look = f"p{shade}" + (" trained" if trained else "") + _tone(advantage)
        fate = f"trained, advantage {advantage:+.3g}" if advantage is not None else "not trained"
        weights = "weights unknown" if step is None else f"weights of step {step}"
        facts = f"token {at}: {word!r}, {weights}, log-probability {logprob:.3f}, {fate}"
        changed = f"v{step}" if step is not None and step != before else ""
        found.append({"text": _shown(word), "look": look, "facts": facts, "version": changed})
        before = step
    return found


def _tone(advantage: float | None) -> str:
    if advantage is None or advantage == 0:
        return ""
    size = 1 if abs(advantage) < 0.25 else 2 if abs(advantage) < 1 else 3
    return f" {'up' if advantage > 0 else 'down'}{size}"


def _shown(word: str) -> str:
    """The text of a token, with its ends of lines shown."""
    return word.replace("\n", "↵\n").replace("\t", "→\t") or "∅"
