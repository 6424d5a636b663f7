"""The text of a task whose user says something more while the agent works."""

from __future__ import annotations

import re

_MARK = re.compile(r"\n--- the user says after turn (\d{1,4}): ---\n")


def interrupted(first: str, second: str, *, after: int) -> str:
    """Return the instruction of a task that begins with the message `first`; `second` comes after turn `after`.

    >>> interrupted("fix a.py", "stop", after=2)
    'fix a.py\\n--- the user says after turn 2: ---\\nstop'
    """
    return f"{first}\n--- the user says after turn {after}: ---\n{second}"


def interruption_of(instruction: str) -> tuple[str, int, str]:
    """Split an instruction into its first message, the turn after which the user says more, and that text.

    Without an interruption the turn is 0 and the text is "".

    >>> interruption_of(interrupted("fix a.py", "stop", after=2)), interruption_of("fix a.py")
    (('fix a.py', 2, 'stop'), ('fix a.py', 0, ''))
    """
    first, *later = _MARK.split(instruction, maxsplit=1)
    return (first, int(later[0]), later[1]) if later else (first, 0, "")
