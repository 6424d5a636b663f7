"""A store that says so when it does not answer: a far one is asked again for a minute before that is an error.

What is watched are pointers: they are small and read before anything else, so one that takes seconds has a store that
is away, where an object may only be large. Knows nothing of how a store asks again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from etude.seams import BlobStore

AFTER_S = 2.5
_POINTERS = ("pointers/", "branches/")


class Watched:
    """A `BlobStore`; `tell` is given a line when a pointer does not come in `after_s`, and one when it came after all.

    `place`: what to call it. `deadline_s`: how long the store asks again. A line for each time that it is away. For one
    thread; `tell` is called from another.
    """

    def __init__(
        self, store: BlobStore, place: str, deadline_s: float, tell: Callable[[str], None], *, after_s: float = AFTER_S
    ) -> None:
        self._store, self._place, self._deadline_s = store, place, deadline_s
        self._tell, self._after_s = tell, after_s
        self._away = threading.Event()

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        if not key.startswith(_POINTERS):
            return self._store.get(key, start, stop)
        timer = threading.Timer(self._after_s, self._say, (key, time.time()))
        timer.daemon = True
        timer.start()
        answered = False
        try:
            data = self._store.get(key, start, stop)
            answered = True
            return data
        except KeyError:
            answered = True
            raise
        finally:
            timer.cancel()
            timer.join()
            if answered and self._away.is_set():
                self._away.clear()
                self._tell(f"{self._place} answers again")

    def put(self, key: str, data: bytes) -> None:
        self._store.put(key, data)

    def list(self, prefix: str) -> list[str]:
        return self._store.list(prefix)

    def delete(self, key: str) -> None:
        self._store.delete(key)

    def compare_and_swap(self, key: str, expected: bytes | None, data: bytes) -> bool:
        return self._store.compare_and_swap(key, expected, data)

    def _say(self, key: str, since: float) -> None:
        if not self._away.is_set():
            self._away.set()
            until = since + self._deadline_s
            self._tell(
                f"waiting: {self._place} has given no answer since {_clock(since)} ({key}); it is asked until"
                f" {_clock(until)}"
            )


def _clock(time_s: float) -> str:
    """Of the day, here."""
    return time.strftime("%H:%M:%S", time.localtime(time_s))
