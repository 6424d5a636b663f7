"""Shows the progress of long commands on stderr: a bar in a terminal, otherwise a line every few seconds."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_EVERY_S = 5.0


class ProgressBar:
    """A progress bar that counts up to `total` on stderr, so that the output of a command can be piped.

    `what` is its label. It is a context manager and ends with the block.

    >>> with ProgressBar("tasks", 2) as progress:
    ...     progress.advance("first")
    """

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._count = what, total, 0
        self._console = Console(stderr=True)
        self._last_print = time.monotonic()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=self._console, transient=True, disable=not self._console.is_terminal)
        self._task = self._bar.add_task(what, total=total)

    def __enter__(self) -> ProgressBar:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.stop()

    def note(self, text: str) -> None:
        """Print a line above the bar. Without a terminal, the line begins with the count so far."""
        self._last_print = time.monotonic()
        count = "" if self._console.is_terminal else f"{self._count}/{self._total} {self._what} "
        self._bar.console.print(f"{count}{text}", markup=False, highlight=False)

    def advance(self, note: str = "") -> None:
        """Count one item, and print `note` above the bar.

        Without a terminal, a line is printed for each note, or every five seconds."""
        self._count += 1
        self._bar.advance(self._task)
        now = time.monotonic()
        if self._console.is_terminal:
            if note:
                self._bar.console.print(note, markup=False, highlight=False)
        elif note or now - self._last_print >= _EVERY_S:
            self._last_print = now
            more = f" {note}" if note else ""
            self._console.print(f"{self._count}/{self._total} {self._what}{more}", markup=False, highlight=False)
