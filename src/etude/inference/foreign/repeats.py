"""A server's output in which each traceback stands once: a server that fails at every request, or twice a second, would
fill the disk with one and the same.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Iterator

MAX_LINES, MAX_KNOWN = 400, 64
"""Of a traceback that is compared with others (a longer one passes); of tracebacks that are remembered."""
BEGIN = "Traceback (most recent call last):"
JOINTS = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
_PREFIX = re.compile(r"^(?:\([^)\n]* pid=\d+\) ?)?(?:[A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)? \[[^\]\n]*\] ?)?")
_VARIES = re.compile(r"0x[0-9a-f]+|[0-9a-f]{8,}(?:-[0-9a-f]{4,})*|\d+")


class Repeats:
    """Lets lines through but for tracebacks that were there before, which it counts. `line` and `end` give the lines to
    print, each with its line end.

    >>> repeats, report = Repeats(), [BEGIN, "  File 'a.py', line 3, in f", "ValueError: request 7"]
    >>> for _ in range(3):
    ...     for text in report:
    ...         print(*repeats.line(text + "\\n"), sep="", end="")
    Traceback (most recent call last):
      File 'a.py', line 3, in f
    ValueError: request 7
    >>> print(*repeats.end(), sep="", end="")
    (the same traceback 2 more times: ValueError: request 7)
    """

    def __init__(self) -> None:
        self._held: list[str] = []  # of a traceback that has not ended
        self._known: collections.OrderedDict[tuple[str, ...], str] = collections.OrderedDict()  # with its last line
        self._more: collections.Counter[tuple[str, ...]] = collections.Counter()
        self._is_left_out = False  # whether the lines before this one were

    def line(self, text: str) -> Iterator[str]:
        """What to print once this line has come."""
        bare = _PREFIX.sub("", text).rstrip()
        if bare.endswith(BEGIN):  # where one is held, two processes print at once
            yield from self._given_up()
            self._held = [text]
        elif self._held:
            self._held.append(text)
            if len(self._held) > MAX_LINES:
                yield from self._given_up()
            elif bare and not bare[0].isspace():
                yield from self._ended(bare)
        elif not (self._is_left_out and (not bare or bare in JOINTS)):
            self._is_left_out = False
            yield text

    def end(self) -> Iterator[str]:
        """What is left to print when no more lines come."""
        yield from self._given_up()
        yield from (self._told(key) for key in list(self._more))

    def _given_up(self) -> list[str]:
        held, self._held, self._is_left_out = self._held, [], False
        return held

    def _ended(self, last: str) -> Iterator[str]:
        held = self._given_up()
        key = (*(_PREFIX.sub("", one) for one in held[1:-1]), _VARIES.sub("#", last))
        if key not in self._known:
            self._known[key] = last
            if len(self._known) > MAX_KNOWN:
                oldest = next(iter(self._known))
                yield from [self._told(oldest)] if self._more[oldest] else []
                del self._known[oldest]
            yield from held
            return
        self._known.move_to_end(key)
        self._more[key] += 1
        self._is_left_out = True
        if re.fullmatch("10+", str(self._more[key])):  # so that one who reads meanwhile sees that it goes on
            yield self._line(key)

    def _told(self, key: tuple[str, ...]) -> str:
        said = self._line(key)
        del self._more[key]
        return said

    def _line(self, key: tuple[str, ...]) -> str:
        times = "1 more time" if self._more[key] == 1 else f"{self._more[key]} more times"
        return f"(the same traceback {times}: {self._known[key][:200]})\n"
