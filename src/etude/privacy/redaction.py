"""Hides from people what they need not see in a conversation: secrets, e-mail addresses, paths, long keys.

Names of people are not found: that takes a language model. More is hidden than in a corpus (`corpus.find_secrets`): a
value after "password=" is hidden whatever it looks like."""

from __future__ import annotations

import re
from typing import Any

from etude.secrets import find_secrets

_PATTERNS = (
    ("email", re.compile(r"[A-Za-z0-9._%+-]{1,64}@[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{1,63}){1,8}")),
    (
        "secret",
        re.compile(
            r"(?i)(?:passw(?:or)?d|passphrase|secret|token|api[_-]?key|access[_-]?key|authorization|bearer)"
            r"[\"']?\s{0,4}(?:[:=]|\s)\s{0,4}(?:bearer\s{1,4})?[\"']?(?P<value>[^\s\"',;]{6,512})"
        ),
    ),
    ("path", re.compile(r"(?<![\w/.:-])(?:~|\.{0,2})?/[\w.+@-]{1,255}(?:/[\w.+@-]{1,255})+/?")),
    ("path", re.compile(r"(?<![\w])[A-Za-z]:\\(?:[^\\/:*?\"<>|\r\n\s]{1,255}\\?){1,64}")),
    ("key", re.compile(r"(?<![0-9A-Za-z])[0-9A-Fa-f]{24,}(?![0-9A-Za-z])")),
)


def redact_text(text: str) -> str:
    """Return a text with each secret, e-mail address, path and long hexadecimal key replaced by its kind.

    >>> redact_text("bob@example.org wrote to /home/bob/notes.txt; password=correct-horse")
    '<email> wrote to <path>; password=<secret>'
    """
    found = [(start, stop, "secret") for _, start, stop in find_secrets(text)]
    for kind, pattern in _PATTERNS:
        group: str | int = "value" if "value" in pattern.groupindex else 0
        found += [(*match.span(group), kind) for match in pattern.finditer(text)]
    parts, at = list[str](), 0
    for start, stop, kind in sorted(found):
        if start >= at:
            parts += [text[at:start], f"<{kind}>"]
        at = max(at, stop)
    return "".join([*parts, text[at:]])


def redact_value(value: Any) -> Any:
    """Return a JSON value with all its texts redacted, also the names of its fields.

    >>> redact_value({"content": ["see ~/a/b"], "n": 1})
    {'content': ['see <path>'], 'n': 1}
    """
    if isinstance(value, str):
        return redact_text(value)
    if isinstance(value, list):
        return [redact_value(one) for one in value]
    if isinstance(value, dict):
        return {redact_text(name): redact_value(one) for name, one in value.items()}
    return value
