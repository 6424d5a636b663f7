"""Errors in three parts: what happened, the facts, and a ``hint:`` on what to do.

Every error that a user may see is an `EtudeError`. The command line prints it and exits with the `exit_code` of its
class. Any other exception is a bug in etude and is printed with its traceback.
"""

from __future__ import annotations

import difflib
import enum
from collections.abc import Iterable, Sequence


class Exit(enum.IntEnum):
    """The exit codes of the command `etude`. `EXITS` has their meanings."""

    DONE = 0
    FAILED = 1  # an `EtudeError` of no other kind
    BAD_INPUT = 2  # an invalid argument or config
    OTHER_RUN = 3  # the run is in use, or was made with other settings
    HELD = 4  # the run stopped itself, and a person must decide before it goes on
    INTERRUPTED = 130  # the run can be resumed


EXITS = {
    Exit.DONE: "done",
    Exit.FAILED: "the command failed (see its error)",
    Exit.BAD_INPUT: "invalid input (an argument names something that does not exist, or a setting is invalid)",
    Exit.OTHER_RUN: "the run is in use, or was made with other settings or another version of etude",
    Exit.HELD: "the run stopped itself, and a person must decide (drift, parity, a number that is not finite)",
    Exit.INTERRUPTED: "interrupted (a run can be resumed)",
}
"""The meaning of each exit code, as `etude --help` prints it."""


class EtudeError(Exception):
    """An error in three parts: `what` happened, the `facts`, and a `hint` on what to do.

    `exit_code` is the exit code of the command that ends with this error.

    >>> print(EtudeError("delta v42 applies to base 9f3c", "this engine has v39", hint="fetch the anchor at v40"))
    delta v42 applies to base 9f3c: this engine has v39
      hint: fetch the anchor at v40
    """

    exit_code: Exit = Exit.FAILED

    def __init__(self, what: str, facts: str = "", *, hint: str) -> None:
        self.what, self.facts, self.hint = what, facts, hint
        super().__init__(what)

    def __str__(self) -> str:
        return f"{self.what}{': ' + self.facts if self.facts else ''}\n  hint: {self.hint}"

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.args), self.__dict__)  # whatever arguments a subclass takes


def _rebuild(kind: type[EtudeError], args: tuple[object, ...]) -> EtudeError:
    return kind.__new__(kind, *args)


class InputError(EtudeError):
    """An argument of a command names something that does not exist, or that the command does not accept."""

    exit_code = Exit.BAD_INPUT


class ConfigError(InputError):
    """A config has an unknown key, a value of a wrong type or out of range, or names a file that does not exist."""


class ConfigErrors(ConfigError):
    """Several independent errors of a config, which `errors` lists. Raised by `raise_all`."""

    errors: tuple[EtudeError, ...] = ()

    def __str__(self) -> str:
        return f"{self.what}:{self.facts}\n  hint: {self.hint}"


class ConfigUnreadable(ConfigError):
    """A config file cannot be read or is not valid TOML, so its settings are unknown."""


class RunError(EtudeError):
    """A run folder is damaged, incomplete, or not writable."""


class NoRun(RunError, InputError):
    """A path is not a run, or the path for a new run already exists."""


class RunRefused(RunError):
    """A run cannot be resumed: it is in use, or was made with other settings or another version of etude."""

    exit_code = Exit.OTHER_RUN


class CheckpointError(EtudeError):
    """A checkpoint is incomplete, damaged, or has an unsupported or different architecture."""


class NoCheckpoint(CheckpointError, InputError):
    """A path is not a checkpoint."""


class TaskError(EtudeError):
    """A task source is damaged, or a task is not valid.

    A task is valid if its reference solution scores 1 and the unmodified task scores 0."""


class TaskWithdrawn(TaskError):
    """A task may not be used any more: a person whose data it holds withdrew consent or was erased."""


class NoSource(TaskError, InputError):
    """The name of a task source is unknown, or its path has no tasks."""


class CorpusError(EtudeError):
    """A corpus of `etude corpus build` is damaged or incomplete, or was made with another tokeniser or config."""


class MachineError(EtudeError):
    """A machine (a sandbox in which an agent's commands run) could not be created, or died.

    It is never raised for a failure of the agent's programs."""


class StoreError(EtudeError):
    """A blob store or disk refused a request, is full, or returned other bytes than were written."""


class WeightsError(EtudeError):
    """Published weights are damaged or do not fit their base version, or another writer published first."""


class EngineError(EtudeError):
    """An engine is unreachable, refuses a request, makes no progress before a deadline, or cannot be used."""


class EngineBehind(EngineError):
    """The engine has older weights than the request requires (HTTP 409). Another engine may serve the request."""


class ContextFull(EngineError):
    """The prompt and the requested tokens exceed the context of the engine (HTTP 413)."""


class MalformedRequest(EngineError):
    """A request that every engine would refuse (HTTP 400). It must not be sent to another one."""


class LedgerError(EtudeError):
    """The ledger, a run's database of rollout states, is damaged or missing, or refused a change.

    Also raised when an audit finds that a rollout was lost or trained on twice."""


class PrivacyError(EtudeError):
    """Captured conversations, their keys or the record of consent are damaged, missing, or cannot be written."""


class SignalRefused(InputError):
    """A signal about an answer is not accepted.

    `reason`: "invalid"; "unknown" (its sender was given no such answer); "expired" (its answer is too old); "conflict"
    (a signal with its id and other content is known). `param`: the field that is wrong, or ""."""

    def __init__(self, what: str, facts: str = "", *, hint: str, reason: str = "invalid", param: str = "") -> None:
        super().__init__(what, facts, hint=hint)
        self.reason, self.param = reason, param


class BackupError(EtudeError):
    """A backup is incomplete or damaged, cannot be written, or cannot be restored."""


class ParityError(EtudeError):
    """The log-probabilities of engine and learner for the same tokens differ by more than the config allows."""

    exit_code = Exit.HELD


class NotFinite(EtudeError):
    """NaN or infinity in weights, logits, loss or gradients; `what` names the tensor and the step."""

    exit_code = Exit.HELD


class SuiteRefused(InputError):
    """A suite cannot be run on a model, for example because the model was trained on the suite's tasks."""


class GateFailed(EtudeError):
    """A metric of an evaluation is outside a bound that a gate of the suite sets, or is unknown."""


class NothingLearnt(EtudeError):
    """A run ended without learning: in every group, all rollouts had the same reward."""


class RewardDrift(EtudeError):
    """A reward term no longer agrees with its auditor or with the grade, so the run stopped. It can be resumed."""

    exit_code = Exit.HELD


class PluginError(EtudeError):
    """A plug-in failed during a run, returned an invalid result, or has other code than the run recorded."""


class PluginRefused(PluginError, InputError):
    """A plug-in cannot be imported or constructed, or is of another kind than the setting requires."""


class DeadlineExceeded(EtudeError):
    """A wait reached its deadline. `what` names the event for which it waited."""


def raise_all(errors: Sequence[EtudeError]) -> None:
    """Raise the errors of a config: nothing for none, a single error as it is, several as one `ConfigErrors`."""
    flat = [one for error in errors for one in (error.errors if isinstance(error, ConfigErrors) else [error])]
    if len(flat) == 1:
        raise flat[0] from None
    if flat:
        facts = "".join(f"\n  {i}. " + str(error).replace("\n", "\n   ") for i, error in enumerate(flat, 1))
        found = ConfigErrors(f"the config has {len(flat)} errors", facts, hint="correct each of these settings")
        found.errors = tuple(flat)
        raise found from None


def nearest(word: str, known: Iterable[str], section: str = "") -> str:
    """Return a hint for an unknown word: the most similar one of the `known` words, or, if none is similar, all of
    them.

    `section` is a dotted prefix that the hint puts before each word.

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
