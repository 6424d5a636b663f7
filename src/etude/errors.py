"""Errors in three parts: what happened, the facts, and a ``hint:`` on what to do next.

Every error that a user can meet is an `EtudeError`; the command line prints it and exits with its class's `exit_code`,
which is decided here and nowhere else. Anything else that reaches the top is a defect of etude and keeps its traceback.
"""

from __future__ import annotations

import difflib
import enum
from collections.abc import Iterable


class Exit(enum.IntEnum):
    """The exit codes of commands, as in the guide's table."""

    DONE = 0
    FAILED = 1  # an `EtudeError` that is none of the others
    BAD_INPUT = 2  # an argument or a config that is not valid
    OTHER_RUN = 3  # a run that is in use, or was made with other settings
    INTERRUPTED = 130  # the run can be resumed


EXITS = {
    Exit.DONE: "done",
    Exit.FAILED: "the command failed; its error says why",
    Exit.BAD_INPUT: "bad input: an argument that names nothing that exists, or an invalid setting",
    Exit.OTHER_RUN: "a run that is in use, or was made with other settings or by another etude",
    Exit.INTERRUPTED: "interrupted; a run can be resumed",
}
"""The meaning of each exit code, as `etude --help` prints it."""


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
    """A command's argument that names nothing that exists, or something that the command does not take."""

    exit_code = Exit.BAD_INPUT


class ConfigError(InputError):
    """A config with an unknown key, a value of the wrong type or out of range, or a named file that does not exist."""


class ConfigUnreadable(ConfigError):
    """A config file that cannot be read or is not TOML, so that none of its settings are known."""


class RunError(EtudeError):
    """A run directory that is damaged, incomplete, or cannot be written."""


class NoRun(RunError, InputError):
    """A path that is no run though a command needs one, or a path for a new run that exists already."""


class RunRefused(RunError):
    """A run that cannot be resumed: it is in use, or was made with other settings or by another etude."""

    exit_code = Exit.OTHER_RUN


class CheckpointError(EtudeError):
    """A checkpoint that is incomplete, damaged, or of another architecture."""


class NoCheckpoint(CheckpointError, InputError):
    """A path that is no checkpoint though a command needs one."""


class TaskError(EtudeError):
    """A task source that is damaged, or a task whose reference solution does not score 1 or whose untouched state does
    not score 0."""


class NoSource(TaskError, InputError):
    """A task source whose name is unknown, or whose path has no tasks."""


class MachineError(EtudeError):
    """A machine that could not be made, or that died. Never raised for what the agent ran in it."""


class StoreError(EtudeError):
    """A blob store or a disk that refused a request, is full, or returned other bytes than were written."""


class WeightsError(EtudeError):
    """A delta, manifest or pointer that is damaged or does not fit its base, or a write that lost against another
    writer."""


class EngineError(EtudeError):
    """An engine that is gone, refuses a request, makes no progress until a deadline, or cannot be used."""


class EngineBehind(EngineError):
    """The engine holds an older version than the request demands (HTTP 409). Another engine may serve the request."""


class ContextFull(EngineError):
    """The prompt and the tokens asked for exceed the engine's context (HTTP 413)."""


class LedgerError(EtudeError):
    """A ledger that is damaged or missing, a transition that its table forbids, or an audit that found a rollout lost
    or trained twice."""


class ParityError(EtudeError):
    """The probabilities of engine and learner differ by more than the parity budget allows."""


class NotFinite(EtudeError):
    """NaN or an infinity in weights, logits, loss or gradients; `what` names the place and the step."""


class NothingLearnt(EtudeError):
    """A run that ended without learning: in no group did the rewards of two rollouts differ."""


class PluginError(EtudeError):
    """A plug-in that failed in the middle of a run, gave a result that cannot be used, or differs from the run's."""


class PluginRefused(PluginError, InputError):
    """A plug-in that cannot be imported or constructed, or is not of the kind that the setting needs."""


class DeadlineExceeded(EtudeError):
    """A wait that reached its deadline; `what` names what it waited for."""


def nearest(word: str, known: Iterable[str], section: str = "") -> str:
    """The end of a hint for an unknown key: the nearest of `known`, or all of them. `section`: put before each key.

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
