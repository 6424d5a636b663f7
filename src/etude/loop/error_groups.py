"""Finds the single error behind the failure of a task group."""

from __future__ import annotations

from etude.errors import EtudeError


def first_cause(
    group: BaseExceptionGroup[BaseException], *, minor: tuple[type[BaseException], ...] = ()
) -> BaseException:
    """Return the single error behind a task group's failure: an `EtudeError`, if there is one.

    Errors of the kinds `minor` are returned only if there is no other.

    >>> first_cause(ExceptionGroup("", [ValueError(), ExceptionGroup("", [EtudeError("it failed", hint="wait")])]))
    EtudeError('it failed')
    """
    leaves = [first_cause(e, minor=minor) if isinstance(e, BaseExceptionGroup) else e for e in group.exceptions]
    return min(leaves, key=lambda e: (isinstance(e, minor), not isinstance(e, EtudeError)))
