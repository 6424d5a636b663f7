"""How a forked process leaves its parent's work behind."""

from __future__ import annotations

from collections.abc import Callable


class Become(BaseException):
    """Unwind a forked process to its outermost frame and be `role` there: nothing of its parent's frames remains."""

    def __init__(self, role: Callable[[], object]) -> None:
        super().__init__()
        self.role = role
