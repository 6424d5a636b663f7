"""Plug-ins: parts of a run that a user's own package provides, named in the config by import path.

A plug-in is a class, or a function that returns an object, named as "my_package.module:Name". Its parameters are its
settings: the keys of its table in the config, converted to the parameters' types. The object must have the methods of
its kind's protocol (`KINDS`). Every process that needs a plug-in imports it by itself, so its package must be
installed, or on PYTHONPATH, on every host of the run.

`check_all` imports and constructs all plug-ins of a config in a process of its own, with a deadline, before a run
starts: one that hangs or kills its process stops nothing else, and a conductor does not load what its learner needs.
Imports no torch.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import hashlib
import importlib
import importlib.metadata
import inspect
import json
import math
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from etude.config import Plugin, arguments
from etude.errors import ConfigError, EtudeError, PluginError, PluginRefused, nearest

T = TypeVar("T")
CHECK_S = 120.0
"""Deadline of importing and constructing all plug-ins of a config: the first import of torch takes seconds."""


class Kind(enum.StrEnum):
    """What plug-ins can be."""

    LOSS = "loss"
    CORRECTION = "correction"
    TRACKER = "tracker"
    SOURCE = "source"
    CORPUS = "corpus"
    TOOL = "tool"
    HARNESS = "harness"
    REWARD = "reward"
    CREDIT = "credit"
    MODEL_FAMILY = "model_family"

    @property
    def noun(self) -> str:
        """In errors: "policy loss"."""
        return KINDS[self].noun


@dataclass(frozen=True)
class KindFacts:
    """Where a kind of plug-in is named, and what it must be. Import paths, so that listing them loads nothing."""

    noun: str
    setting: str  # of the config
    protocol: str  # or a class to derive from
    contract: str  # the contract suite in `etude.testing`
    built_in: str  # an iterable of the names of what etude has itself; "": nothing


KINDS = {
    Kind.LOSS: KindFacts(
        noun="policy loss",
        setting="learner.policy_loss",
        protocol="etude.training.losses:PolicyLossFunction",
        contract="etude.testing.contracts:PolicyLossContract",
        built_in="etude.training.config:PolicyLossKind",
    ),
    Kind.CORRECTION: KindFacts(
        noun="correction",
        setting="learner.correction",
        protocol="etude.training.corrections:Correction",
        contract="etude.testing.contracts:CorrectionContract",
        built_in="etude.training.config:CorrectionKind",
    ),
    Kind.SOURCE: KindFacts(
        noun="task source",
        setting="tasks.source",
        protocol="etude.seams:TaskSource",
        contract="etude.testing.contracts:TaskSourceContract",
        built_in="etude.tasks.config:SOURCES",
    ),
    Kind.CORPUS: KindFacts(
        noun="corpus source",
        setting="corpus.sources",
        protocol="etude.tasks.corpus:CorpusSource",
        contract="etude.testing.contracts:CorpusSourceContract",
        built_in="",
    ),
    Kind.TOOL: KindFacts(
        noun="tool",
        setting="harness.tools",
        protocol="etude.harness.tools:ToolLike",
        contract="etude.testing.contracts:ToolContract",
        built_in="etude.harness.tools:STANDARD_TOOLS",
    ),
    Kind.HARNESS: KindFacts(
        noun="harness",
        setting="harness.program",
        protocol="etude.harness.programs:Harness",
        contract="etude.testing.contracts:HarnessContract",
        built_in="etude.harness.config:PROGRAMS",
    ),
    Kind.REWARD: KindFacts(
        noun="reward term",
        setting="rewards.terms",
        protocol="etude.seams:RewardTerm",
        contract="etude.testing.rewards:RewardTermContract",
        built_in="etude.records.reward:BUILT_IN",
    ),
    Kind.CREDIT: KindFacts(
        noun="credit scheme",
        setting="experience.credit",
        protocol="etude.seams:CreditScheme",
        contract="etude.testing.rewards:CreditSchemeContract",
        built_in="etude.experience.credit:Credit",
    ),
    Kind.TRACKER: KindFacts(
        noun="tracker",
        setting="trackers",
        protocol="etude.seams:Tracker",
        contract="etude.testing.contracts:TrackerContract",
        built_in="",
    ),
    Kind.MODEL_FAMILY: KindFacts(
        noun="model family",
        setting="model.family",
        protocol="etude.models.config:ModelFamily",
        contract="etude.testing.model_family:ModelFamilyContract",
        built_in="etude.models.config:FAMILY_NAMES",
    ),
}


class Identity(msgspec.Struct, frozen=True):
    """Which code a plug-in is. A run's record has it of each of its plug-ins."""

    kind: str
    path: str  # "my_package.module:Name"
    distribution: str  # the installed package that the module belongs to; "": none, the module is found by PYTHONPATH
    version: str  # of the distribution; ""
    digest: str  # SHA-256 of the module's source file; "": it has none

    def __str__(self) -> str:
        package = f"{self.distribution} {self.version}" if self.distribution else "no installed package"
        return f"{self.path} ({package}, source {self.digest[:12] or 'unknown'})"


def kind_at(place: str) -> Kind:
    """The kind of the plug-in that a setting names: ``learner.policy_loss``, or ``harness.tools[2]``."""
    setting = place.partition("[")[0]
    return next(kind for kind, facts in KINDS.items() if facts.setting == setting)


@functools.cache
def found(path: str) -> Any:
    """The class or function behind an import path of etude's own or of a plug-in. Raises `PluginRefused` that names
    the host where the module is missing."""
    module_name, _, name = path.partition(":")
    if not name or not all(part.isidentifier() for part in (*module_name.split("."), name)):
        facts = 'an import path has the form "my_package.module:Name"'
        raise PluginRefused(f"{path!r} is no import path", facts, hint="name the module, a colon, and the class")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # as `python -m` has it, which starts the processes of a run
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name == error.name or module_name.startswith(f"{error.name}.")):
            facts = f"{module_name} needs {error.name}, which is not installed on host {socket.gethostname()}"
            raise PluginRefused(
                f"plug-in {path} cannot be imported", facts, hint=f"install {error.name} there"
            ) from None
        facts = f"host {socket.gethostname()} has no module {error.name}"
        hint = "install its package there, or put its folder on PYTHONPATH, on every host of the run"
        raise PluginRefused(f"plug-in {path} cannot be imported", facts, hint=hint) from None
    except (Exception, SystemExit) as error:
        facts = f"importing {module_name} raised {described(error)}"
        raise PluginRefused(f"plug-in {path} cannot be imported", facts, hint="mend the module") from error
    target = getattr(module, name, None)
    if target is None:
        public = [known for known in vars(module) if not known.startswith("_")]
        hint = nearest(name, public) if public else "define the class there"
        raise PluginRefused(f"plug-in {path} does not exist", f"{module_name} has no {name}", hint=hint)
    return target


def make(kind: Kind, plugin: Plugin, *, where: str = "") -> Any:
    """Construct a plug-in with its settings and check that it is of its kind. `where`: the setting that names it.
    Raises `PluginRefused`, `ConfigError` for a setting that its code does not accept, and `PluginError` where its
    source is not the one that the run's record has."""
    owner, target = f"{kind.noun} {plugin.path}", found(plugin.path)
    where = where or KINDS[kind].setting
    if not callable(target):
        facts = f"it is {_a(type(target).__name__)}"
        raise PluginRefused(f"{owner} is no class", facts, hint="name a class, or a function that returns the object")
    if plugin.digest and (here := identity(kind, plugin.path)).digest != plugin.digest:
        facts = f"host {socket.gethostname()} has source {here.digest[:12]}, the run's record {plugin.digest[:12]}"
        hint = "install the same version of its package on every host of the run"
        raise PluginError(f"{owner} is another version here", facts, hint=hint)
    try:
        made = target(**arguments(target, plugin.settings, where))
    except EtudeError:
        raise
    except (Exception, SystemExit) as error:
        facts = f"its constructor raised {described(error)}"
        raise PluginRefused(f"{owner} cannot be made", facts, hint=f"mend it, or its settings in [{where}]") from error
    if problems := lacking(found(KINDS[kind].protocol), made):
        hint = f"write what is named here; etude plugins check {plugin.path} shows every part of the contract"
        raise PluginRefused(f"{plugin.path} is no {kind.noun}", "; ".join(problems), hint=hint)
    return made


def lacking(protocol: type, made: object) -> list[str]:
    """What an object lacks of a protocol: each member that is missing, or is not called as the protocol calls it. Where
    `protocol` is a plain class, the object must be derived from it and set the attributes that the class only declares.
    """
    if not getattr(protocol, "_is_protocol", False):
        if not isinstance(made, protocol):
            return [
                f"it is {_a(type(made).__name__)}, which is not derived from {protocol.__module__}.{protocol.__name__}"
            ]
        return [f"it has no attribute {name}" for name in inspect.get_annotations(protocol) if not hasattr(made, name)]
    problems = []
    for name, wanted in _members(protocol).items():
        has = getattr(made, name, None)
        if has is None:
            problems.append(f"it has no {_call(name, wanted)}")
        elif not inspect.isfunction(wanted):
            continue
        elif not callable(has):
            problems.append(f"its {name} is {_a(type(has).__name__)}, and {_call(name, wanted)} is called")
        elif _is_async(wanted) and not _is_async(has):
            problems.append(f"its {name} must be `async def`")
        elif _is_async(has) and not _is_async(wanted):
            problems.append(f"its {name} must be a plain `def`, not `async def`")
        elif not _takes(has, wanted):
            problems.append(f"its {name}{_signature(has)} cannot be called as {_call(name, wanted)}")
    return problems


def _members(protocol: type) -> dict[str, Any]:
    """The members of a protocol by name: functions, and None for an attribute."""
    bases = [base for base in reversed(protocol.__mro__) if getattr(base, "_is_protocol", False)]
    members: dict[str, Any] = {}
    for base in bases:
        members |= {n: None for n in inspect.get_annotations(base) if not n.startswith("_")}
        members |= {
            n: v for n, v in vars(base).items() if inspect.isfunction(v) and (n == "__call__" or not n.startswith("_"))
        }
    return members


def _is_async(function: Any) -> bool:
    function = function if inspect.isroutine(function) else type(function).__call__
    return inspect.iscoroutinefunction(function)


def _takes(has: Any, wanted: Any) -> bool:
    """Whether a method can be called with the arguments of a protocol's."""
    parameters = list(inspect.signature(wanted).parameters.values())[1:]
    by_name = {p.name: None for p in parameters if p.kind is p.KEYWORD_ONLY}
    try:
        signature = inspect.signature(has)
        bind = signature.bind_partial if any(p.kind is p.VAR_KEYWORD for p in parameters) else signature.bind
        bind(*(None for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD), **by_name)
    except TypeError:
        return False
    except ValueError:  # written in C, without a signature
        return True
    return True


def _signature(has: Any) -> str:
    return f"({', '.join(inspect.signature(has).parameters)})"


def _call(name: str, wanted: Any) -> str:
    if wanted is None:
        return f"attribute {name}"
    parameters = ", ".join(list(inspect.signature(wanted).parameters)[1:])
    return f"{'async ' if inspect.iscoroutinefunction(wanted) else ''}method {name}({parameters})"


def _a(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def described(error: BaseException) -> str:
    """An exception with the place that raised it: ``ValueError: no such mode (losses.py, line 12)``."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"


@contextlib.contextmanager
def called(kind: Kind, plugin: Plugin | str, doing: str) -> Iterator[None]:
    """Around a call of a plug-in: what it raises becomes a `PluginError` that names it. Errors of etude pass."""
    try:
        yield
    except EtudeError:
        raise
    except Exception as error:
        facts = f"{doing} raised {described(error)}"
        raise PluginError(
            f"{kind.noun} {plugin} failed", facts, hint="mend its code; the run can be resumed"
        ) from error


def bounded(kind: Kind, plugin: Plugin | str, doing: str, work: Callable[[], T], *, deadline_s: float) -> T:
    """Call a plug-in in a thread of its own, and wait for at most `deadline_s`. Raises `PluginError` for what it
    raises and for a call that does not return, whose thread is left behind."""
    done = queue.SimpleQueue[tuple[T | None, BaseException | None]]()

    def call() -> None:
        try:
            done.put((work(), None))
        except BaseException as error:  # noqa: BLE001  raised again where it is waited for
            done.put((None, error))

    threading.Thread(target=call, name=f"{kind.noun} {plugin}", daemon=True).start()
    try:
        result, error = done.get(timeout=deadline_s)
    except queue.Empty:
        facts = f"{doing} has not returned within {deadline_s:g} s"
        raise PluginError(
            f"{kind.noun} {plugin} hangs", facts, hint="see what it waits for; the run can be resumed"
        ) from None
    with called(kind, plugin, doing):
        if error is not None:
            raise error
    return result  # type: ignore[return-value]  # of T where there is no error


def unusable(kind: Kind, plugin: Plugin | str, facts: str) -> PluginError:
    """The error for a result of a plug-in that cannot be used."""
    return PluginError(
        f"{kind.noun} {plugin} gave a result that cannot be used", facts, hint="mend it; the run can be resumed"
    )


def finite(kind: Kind, plugin: Plugin | str, name: str, value: object) -> float:
    """A number that a plug-in gave. Raises `PluginError` for anything but a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise unusable(kind, plugin, f"{name} is {value!r}, and a finite number is wanted")
    return float(value)


def identity(kind: Kind, path: str) -> Identity:
    """Which code a plug-in is, as this process would import it."""
    found(path)
    module = sys.modules[path.partition(":")[0]]
    distribution, version = _distribution(module.__name__.partition(".")[0])
    source = getattr(module, "__file__", None)
    digest = hashlib.sha256(Path(source).read_bytes()).hexdigest() if source and Path(source).is_file() else ""
    return Identity(str(kind), path, distribution, version, digest)


@functools.cache
def _distribution(package: str) -> tuple[str, str]:
    names = importlib.metadata.packages_distributions().get(package, [])
    return (names[0], importlib.metadata.version(names[0])) if names else ("", "")


# before a run starts


def check_all(uses: Sequence[tuple[str, Plugin]], *, deadline_s: float = CHECK_S) -> list[Identity]:
    """Import and construct the plug-ins of a config in a process of its own; returns which code each is. `uses`: each
    with the setting that names it (`config.plugins_in`). Raises `PluginRefused`, `ConfigError`."""
    if not uses:
        return []
    asked = [(place, plugin.path, dict(plugin.settings)) for place, plugin in uses]
    argv = [sys.executable, "-m", "etude.plugins"]
    try:
        done = subprocess.run(
            argv, input=json.dumps(asked, default=str).encode(), capture_output=True, timeout=deadline_s, check=False
        )
        output, words, ending = done.stdout, done.stderr, _ending(done.returncode)
    except subprocess.TimeoutExpired as late:
        output, words, ending = late.stdout or b"", late.stderr or b"", f"did not end within {deadline_s:g} s"
    identities = []
    for line in output.splitlines():
        answer = json.loads(line)
        if "what" in answer:
            refused = ConfigError if answer["is_config"] else PluginRefused
            raise refused(answer["what"], answer["facts"], hint=answer["hint"])
        identities.append(msgspec.convert(answer, Identity))
    if len(identities) < len(uses):
        place, plugin = uses[len(identities)]
        last = words.decode(errors="replace").strip().rpartition("\n")[2]
        facts = f"importing and constructing it {ending}{f': {last}' if last else ''}"
        raise PluginRefused(
            f"{kind_at(place).noun} {plugin.path} cannot be made", facts, hint="mend the module"
        ) from None
    return identities


def _ending(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended its process with exit code {code}"


def _answers(asked: Iterable[tuple[str, str, dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """What the checking process prints of each plug-in."""
    for place, path, settings in asked:
        try:
            kind = kind_at(place)
            make(kind, Plugin(path, settings), where=place)
            yield msgspec.to_builtins(identity(kind, path))
        except EtudeError as error:
            is_config = isinstance(error, ConfigError)
            yield {"what": error.what, "facts": error.facts, "hint": error.hint, "is_config": is_config}


def _main() -> None:
    asked, out = json.load(sys.stdin), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what plug-ins print is not part of the answer
    for answer in _answers(asked):
        print(json.dumps(answer), file=out, flush=True)
    os._exit(0)  # threads that a plug-in has started do not hold this process up


if __name__ == "__main__":
    _main()
