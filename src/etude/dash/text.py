"""Makes text of agents and models harmless to look at: characters that are invisible, or move others, become visible.

HTML is escaped by the templates. Unicode's bidirectional controls would still let a transcript reorder what stands
around it on a page (CVE-2021-42574), and control characters would hide in it."""

from __future__ import annotations

import re

_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u115f\u1160\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\u3164"
    "\ufeff\uffa0\ufff0-\ufffb\ud800-\udfff\U000e0000-\U000e0fff]"
)
_MARKS = "[\u0300-\u036f\u0483-\u0489\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff\ufe20-\ufe2f]"
MAX_COMBINING = 8
_STACKED = re.compile(f"({_MARKS}{{{MAX_COMBINING}}}){_MARKS}+")


def visible(text: str) -> str:
    """Replace control, bidirectional and invisible characters by their code, except for newline and tab.

    Of combining marks in a row, `MAX_COMBINING` are kept, so that no character covers the lines above it.

    >>> visible("a\\u202eb\\x1b[2J")
    'a⟦202E⟧b⟦1B⟧[2J'
    """
    return _STACKED.sub(r"\1", _HIDDEN.sub(lambda found: f"⟦{ord(found[0]):02X}⟧", text))


def cut(text: str, chars: int) -> str:
    """Return the first `chars` characters of a text; if it is longer, with a note of how many are left out.

    >>> cut("abcdef", 4)
    'abcd\\n… 2 more characters'
    """
    more = len(text) - chars
    return text if more <= 0 else f"{text[:chars]}\n… {more:,} more character{'s' if more > 1 else ''}"
