"""Errors in three parts: what happened, the facts, and a ``hint:`` on what to do next.

Every error that a user can meet is an `EtudeError`; the command line prints it and exits with its class's `exit_code`,
which is decided here and nowhere else. Anything else that reaches the top is a defect of etude and keeps its traceback.
"""

from __future__ import annotations

import difflib
import enum
from collections.abc import Iterable


class Exit(enum.IntEnum):
    """What a command's exit code says; the guide has the same table."""

    DONE = 0
    FAILED = 1  # a failure that has a name
    BAD_INPUT = 2  # an argument or a config that cannot be what was meant
    OTHER_RUN = 3  # a run that is in use, or of other settings
    INTERRUPTED = 130  # the run can be resumed


EXITS = {
    Exit.DONE: "done",
    Exit.FAILED: "a failure that has a name: the command did not come to what it is for",
    Exit.BAD_INPUT: "bad input: an argument or a setting that cannot be",
    Exit.OTHER_RUN: "a run that is in use, or of other settings, or of another etude",
    Exit.INTERRUPTED: "interrupted; a run can be resumed",
}
"""Each code in words, as `etude --help` has them."""


class EtudeError(Exception):
    """A failure that has an explanation.

    >>> print(EtudeError("delta v42 applies to base 9f3c", "this engine holds v39", hint="fetch the anchor at v40"))
    delta v42 applies to base 9f3c: this engine holds v39
      hint: fetch the anchor at v40
    """

    exit_code: Exit = Exit.FAILED

    def __init__(self, what: str, facts: str = "", *, hint: str) -> None:
        self.what, self.facts, self.hint = what, facts, hint
        super().__init__(what)

    def __str__(self) -> str:
        return f"{self.what}{': ' + self.facts if self.facts else ''}\n  hint: {self.hint}"

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.what, self.facts, self.hint))


def _rebuild(kind: type[EtudeError], what: str, facts: str, hint: str) -> EtudeError:
    return kind(what, facts, hint=hint)


class InputError(EtudeError):
    """What a command was given: it names nothing that is there, or is not of a kind that the command takes."""

    exit_code = Exit.BAD_INPUT


class ConfigError(InputError):
    """An unknown key, a wrong type, a value out of range, a missing file that a config names."""


class ConfigUnreadable(ConfigError):
    """A config whose text is no TOML, or cannot be had at all: nothing is known of its settings."""


class RunError(EtudeError):
    """A run directory that is damaged, incomplete, or cannot be written."""


class NoRun(RunError, InputError):
    """A path that was named as a run and is none, or one for a new run where there is something already."""


class RunRefused(RunError):
    """A run that is in use, or of other settings or another etude than would go on with it."""

    exit_code = Exit.OTHER_RUN


class CheckpointError(EtudeError):
    """A checkpoint that is incomplete, damaged, or of another architecture."""


class NoCheckpoint(CheckpointError, InputError):
    """A path that was named as a checkpoint and is none."""


class TaskError(EtudeError):
    """A task source that is damaged, or a task that does not prove itself."""


class NoSource(TaskError, InputError):
    """A task source whose name is unknown, or at whose path there is none, or no task."""


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


class NotFinite(EtudeError):
    """NaN or an infinity in weights, logits or gradients: `what` names it, and the step."""


class NothingLearnt(EtudeError):
    """A run that came to its end and had nothing to learn from: in no group did one rollout do better than another."""


class DeadlineExceeded(EtudeError):
    """A wait that ended without what it waited for; `what` names it."""


def nearest(word: str, known: Iterable[str], section: str = "") -> str:
    """The nearest match for an unknown key, as the end of a hint. `section`: where `known` are, to name them whole.

    >>> nearest("stpes", ["steps", "lr"])
    "did you mean 'steps'?"
    >>> nearest("stpes", ["steps", "lr"], "rl")
    "did you mean 'rl.steps'?"
    >>> nearest("zzz", ["steps", "lr"])
    'known: lr, steps'
    """
    names = sorted(map(str, known))
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    dot = f"{section}." if section else ""
    return f"did you mean {dot + close[0]!r}?" if close else f"known: {', '.join(dot + name for name in names)}"
