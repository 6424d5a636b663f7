"""Errors in three parts: what happened, the facts, and a ``hint:`` on what to do next.

Every error that a user can meet is an `EtudeError`; the command line prints it and exits with `exit_code`.
Anything else that reaches the top is a defect of etude and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class EtudeError(Exception):
    """A failure that has an explanation.

    >>> print(EtudeError("delta v42 applies to base 9f3c", "this engine holds v39", hint="fetch the anchor at v40"))
    delta v42 applies to base 9f3c: this engine holds v39
      hint: fetch the anchor at v40
    """

    exit_code = 1

    def __init__(self, what: str, facts: str = "", *, hint: str) -> None:
        self.what, self.facts, self.hint = what, facts, hint
        super().__init__(what)

    def __str__(self) -> str:
        return f"{self.what}{': ' + self.facts if self.facts else ''}\n  hint: {self.hint}"

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.what, self.facts, self.hint))


def _rebuild(kind: type[EtudeError], what: str, facts: str, hint: str) -> EtudeError:
    return kind(what, facts, hint=hint)


class ConfigError(EtudeError):
    """An unknown key, a wrong type, a value out of range, a missing file that a config names."""

    exit_code = 2


class RunError(EtudeError):
    """A run directory that is in use, of another config, or not a run at all."""

    exit_code = 3


class CheckpointError(EtudeError):
    """A checkpoint that is missing, damaged, or of another architecture."""


class TaskError(EtudeError):
    """A task source without tasks, or a task that does not prove itself."""


class MachineError(EtudeError):
    """A machine that could not be made or that died. Never caused by what the agent ran in it."""


class StoreError(EtudeError):
    """A blob store or a disk that refused, is full, or returned something else than was put."""


class WeightsError(EtudeError):
    """A delta, manifest or pointer that is damaged, does not fit, or lost a race."""


class EngineError(EtudeError):
    """An engine that is gone, refused, hung past its deadline, or failed its probe."""


class EngineBehind(EngineError):
    """The engine holds an older version than the request demands (HTTP 409); another engine may serve it."""


class ContextFull(EngineError):
    """The prompt and the tokens asked for exceed the engine's context (HTTP 413)."""


class LedgerError(EtudeError):
    """A transition that the table forbids, or an audit that found a lost or doubly trained rollout."""


class ParityError(EtudeError):
    """Sampler and trainer disagree where they must agree."""


class DeadlineExceeded(EtudeError):
    """A wait that ended without what it waited for; `what` names it."""


def nearest(word: str, known: Iterable[str]) -> str:
    """The nearest match for an unknown key, as the end of a hint.

    >>> nearest("stpes", ["steps", "lr"])
    "did you mean 'steps'?"
    >>> nearest("zzz", ["steps", "lr"])
    'known: lr, steps'
    """
    names = sorted(map(str, known))
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}"
