"""Plug-ins: components of a run from a user's own package, named in the config by import path.

A plug-in is a class, or a function that returns an object, such as "my_package.module:Name". Its parameters are its
settings: the keys of its table in the config, converted to the types of the parameters. The object must implement the
protocol of its kind (`KINDS`). Every process that needs a plug-in imports it, so its package must be installed, or on
PYTHONPATH, on every host of the run.

Before a run starts, `check_all` imports and constructs all plug-ins of a config in a separate process with a deadline,
so that a plug-in that hangs or crashes does no harm. This module does not import torch."""

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
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from etude.config import Plugin, arguments
from etude.errors import ConfigError, ConfigErrors, EtudeError, PluginError, PluginRefused, nearest, raise_all

T = TypeVar("T")
CHECK_S = 120.0
"""Deadline for importing and constructing all plug-ins of a config; the first import of torch takes seconds."""


class Kind(enum.StrEnum):
    """The kinds of plug-ins. `KINDS` has the facts of each."""

    LOSS = "loss"
    CORRECTION = "correction"
    TRACKER = "tracker"
    SOURCE = "source"
    CORPUS = "corpus"
    DOCUMENTS = "documents"
    TOOL = "tool"
    HARNESS = "harness"
    REWARD = "reward"
    CREDIT = "credit"
    MODEL_FAMILY = "model_family"
    DRAFTER = "drafter"
    FORECAST = "forecast"

    @property
    def noun(self) -> str:
        """The name of the kind in errors, such as "policy loss"."""
        return KINDS[self].noun


@dataclass(frozen=True)
class KindFacts:
    """The facts of one kind of plug-in: a row of the table `KINDS`.

    `noun` names the kind in errors, and `setting` is the dotted config setting that selects a plug-in. The other fields
    are import paths ("module:name"), so that the table imports nothing: `protocol` is the protocol or base class that a
    plug-in implements, `contract` its suite of tests, and `built_in` a collection of the built-in names ("" if there
    are none)."""

    noun: str
    setting: str
    protocol: str
    contract: str
    built_in: str


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
    Kind.DOCUMENTS: KindFacts(
        noun="document source",
        setting="sources",
        protocol="etude.corpus.documents:DocumentSource",
        contract="etude.testing.contracts:DocumentSourceContract",
        built_in="etude.corpus.config:SOURCES",
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
        protocol="etude.seams:AnyRewardTerm",
        contract="etude.testing.rewards:RewardTermContract",
        built_in="etude.rewards.config:TERMS",
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
        built_in="etude.trackers:BUILT_IN",
    ),
    Kind.MODEL_FAMILY: KindFacts(
        noun="model family",
        setting="model.family",
        protocol="etude.models.config:ModelFamily",
        contract="etude.testing.model_family:ModelFamilyContract",
        built_in="etude.models.family_lookup:FAMILY_NAMES",
    ),
    Kind.DRAFTER: KindFacts(
        noun="drafter",
        setting="engine.speculation",
        protocol="etude.inference.look_up:Drafter",
        contract="etude.testing.drafters:DrafterContract",
        built_in="etude.inference.config:Speculation",
    ),
    Kind.FORECAST: KindFacts(
        noun="forecast",
        setting="forecast",
        protocol="etude.harvest.forecast:Forecast",
        contract="etude.testing.forecasts:ForecastContract",
        built_in="etude.harvest.forecast:FORECASTS",
    ),
}


class Identity(msgspec.Struct, frozen=True):
    """The code of one plug-in, as a run records it: which package, version and source were used.

    `path` is the import path. `distribution` is the installed package that has the module, and `version` its version;
    both are "" for a module found through PYTHONPATH. `digest` is the SHA-256 of the module's source file, or ""."""

    kind: str
    path: str
    distribution: str
    version: str
    digest: str

    def __str__(self) -> str:
        package = f"{self.distribution} {self.version}" if self.distribution else "no installed package"
        return f"{self.path} ({package}, source {self.digest[:12] or 'unknown'})"


def kind_at(place: str) -> Kind:
    """Return the kind of plug-in that a config setting selects: ``learner.policy_loss`` or ``harness.tools[2]``."""
    setting = place.partition("[")[0]
    return next(kind for kind, facts in KINDS.items() if facts.setting == setting)


def import_path(kind: Kind, path: str) -> str:
    """Return the import path of a plug-in: `path` itself, or the import path of the built-in plug-in with this name.

    >>> import_path(Kind.TRACKER, "tensorboard"), import_path(Kind.TRACKER, "a.b:C")
    ('etude.trackers.tensorboard:TensorBoard', 'a.b:C')
    """
    if ":" in path or not KINDS[kind].built_in:
        return path
    built_in = found(KINDS[kind].built_in)
    known = built_in.get(path) if isinstance(built_in, Mapping) else None
    return known if isinstance(known, str) else path


@functools.cache
def found(path: str) -> Any:
    """Import and return the object at an import path, "module:Name". Raises `PluginRefused` if that fails.

    The error for a missing module names the host on which it is missing."""
    module_name, _, name = path.partition(":")
    if not name or not all(part.isidentifier() for part in (*module_name.split("."), name)):
        facts = 'an import path has the form "my_package.module:Name"'
        raise PluginRefused(
            f"{path!r} is not an import path", facts, hint="give the module (not its file), a colon, and the class"
        )
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # like `python -m`, which starts the processes of a run
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name == error.name or module_name.startswith(f"{error.name}.")):
            facts = f"{module_name} needs {error.name}, which is not installed on host {socket.gethostname()}"
            raise PluginRefused(
                f"plug-in {path} cannot be imported", facts, hint=f"install {error.name} there"
            ) from None
        facts = f"host {socket.gethostname()} has no module {error.name!r}"
        hint = "install its package there, or put its folder on PYTHONPATH, on every host of the run"
        raise PluginRefused(f"plug-in {path} cannot be imported", facts, hint=hint) from None
    except (Exception, SystemExit) as error:
        facts = f"importing {module_name} raised {described(error)}"
        raise PluginRefused(f"plug-in {path} cannot be imported", facts, hint="fix the error in the module") from error
    target = getattr(module, name, None)
    if target is None:
        package = module_name.partition(".")[0]  # what the module imports from elsewhere is no plug-in of it
        public = [
            known
            for known, value in vars(module).items()
            if not known.startswith("_") and str(getattr(value, "__module__", "")).partition(".")[0] == package
        ]
        hint = nearest(name, public) if public else "define the class in the module"
        raise PluginRefused(f"plug-in {path} does not exist", f"{module_name} has no {name}", hint=hint)
    return target


def make(kind: Kind, plugin: Plugin, *, where: str = "") -> Any:
    """Construct a plug-in with its settings, and check that it implements the protocol of its kind.

    `where` is the config setting that names it. Raises `PluginRefused` if it cannot be used, `ConfigError` for a
    setting that it does not accept, and `PluginError` if its source differs from the source that the run recorded."""
    owner, target = f"{kind.noun} {plugin.path}", found(import_path(kind, plugin.path))
    where = where or KINDS[kind].setting
    if not callable(target):
        facts = f"it is {_a(type(target).__name__)}"
        raise PluginRefused(
            f"{owner} is not a class", facts, hint="give a class, or a function that returns the object"
        )
    if plugin.digest and (here := identity(kind, plugin.path)).digest != plugin.digest:
        facts = f"source {here.digest[:12]} on host {socket.gethostname()}, the run recorded {plugin.digest[:12]}"
        hint = "install the same version of its package on every host of the run"
        raise PluginError(f"{owner} has other code than the run recorded", facts, hint=hint)
    try:
        made = target(**arguments(target, plugin.settings, where))
    except EtudeError:
        raise
    except (Exception, SystemExit) as error:
        facts = f"its constructor raised {described(error)}"
        raise PluginRefused(
            f"{owner} cannot be constructed", facts, hint=f"correct its code, or its settings in [{where}]"
        ) from error
    if problems := protocol_problems(found(KINDS[kind].protocol), made):
        hint = f"add what is missing; etude plugins check {plugin.path} runs the contract tests"
        raise PluginRefused(f"{plugin.path} is not a {kind.noun}", "; ".join(problems), hint=hint)
    return made


def protocol_problems(protocol: type | types.UnionType, made: object) -> list[str]:
    """List the reasons why an object does not implement a protocol; empty if it does. Of a union of protocols, it must
    implement one.

    There is one line for each member that is missing or cannot be called as the protocol requires. If `protocol` is an
    ordinary class, the object must be an instance of it and have the attributes that the class only declares."""
    if isinstance(protocol, types.UnionType):
        return min((protocol_problems(one, made) for one in protocol.__args__), key=len)
    if not getattr(protocol, "_is_protocol", False):
        if not isinstance(made, protocol):
            base = f"{protocol.__module__}.{protocol.__name__}"
            return [f"it is {_a(type(made).__name__)}, which is not derived from {base}"]
        return [f"it has no attribute {name}" for name in inspect.get_annotations(protocol) if not hasattr(made, name)]
    problems = []
    for name, wanted in _members(protocol).items():
        has = getattr(made, name, None)
        if has is None:
            problems.append(f"it has no {_call(name, wanted)}")
        elif not inspect.isfunction(wanted):
            continue
        elif not callable(has):
            problems.append(f"its {name} is {_a(type(has).__name__)}, expected {_call(name, wanted)}")
        elif _is_async(wanted) and not _is_async(has):
            problems.append(f"its {name} must be `async def`")
        elif _is_async(has) and not _is_async(wanted):
            problems.append(f"its {name} must be a plain `def`, not `async def`")
        elif not _takes(has, wanted):
            problems.append(f"its {name}{_signature(has)} cannot be called as {_call(name, wanted)}")
    return problems


def _members(protocol: type) -> dict[str, Any]:
    """The members of a protocol: name -> function, or None for an attribute."""
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
    """Whether a method can be called with the arguments of the protocol's method `wanted`."""
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
    """Return an exception as text, with the line that raised it: ``ValueError: no such mode (losses.py, line 12)``."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"


@contextlib.contextmanager
def called(kind: Kind, plugin: Plugin | str, doing: str) -> Iterator[None]:
    """Turn an exception raised in the block into a `PluginError` that names the plug-in.

    An `EtudeError` is raised unchanged. `doing` names the called function in the error, such as "its method score"."""
    try:
        yield
    except EtudeError:
        raise
    except Exception as error:
        facts = f"{doing} raised {described(error)}"
        raise PluginError(f"{kind.noun} {plugin} failed", facts, hint="fix its code; the run can be resumed") from error


def bounded(kind: Kind, plugin: Plugin | str, doing: str, work: Callable[[], T], *, deadline_s: float) -> T:
    """Call `work`, a function of a plug-in, in a separate thread, and return its result.

    Raises `PluginError` if it raises an exception, or has not returned after `deadline_s` seconds; its thread then
    keeps running. `doing` names the called function in the error, such as "its method score"."""
    done = queue.SimpleQueue[tuple[T | None, BaseException | None]]()

    def call() -> None:
        try:
            done.put((work(), None))
        except BaseException as error:  # noqa: BLE001  raised again in the waiting thread
            done.put((None, error))

    threading.Thread(target=call, name=f"{kind.noun} {plugin}", daemon=True).start()
    try:
        result, error = done.get(timeout=deadline_s)
    except queue.Empty:
        facts = f"{doing} has not returned within {deadline_s:g} s"
        raise PluginError(
            f"{kind.noun} {plugin} hangs", facts, hint="find out what its code waits for; the run can be resumed"
        ) from None
    with called(kind, plugin, doing):
        if error is not None:
            raise error
    return result  # type: ignore[return-value]  # a T if there is no error


def unusable(kind: Kind, plugin: Plugin | str, facts: str) -> PluginError:
    """Return the error for a plug-in that returned an invalid result. `facts` describes the fault of the result."""
    return PluginError(
        f"{kind.noun} {plugin} returned an invalid result", facts, hint="correct its code; the run can be resumed"
    )


def finite(kind: Kind, plugin: Plugin | str, name: str, value: object) -> float:
    """Return `value`, which a plug-in returned, as a float. Raises `PluginError` if it is not a finite number.

    `name` is the name of the value in the error."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise unusable(kind, plugin, f"{name} is {value!r}, expected a finite number")
    return float(value)


def identity(kind: Kind, path: str) -> Identity:
    """Import a plug-in and return the identity of its code. Raises `PluginRefused`."""
    found(import_path(kind, path))
    module = sys.modules[import_path(kind, path).partition(":")[0]]
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
    """Import and construct plug-ins in a separate process, and return their identities without the built-in ones.

    `uses` are (setting, plug-in) pairs from `config.plugins_in`. Raises `PluginRefused` for a plug-in that cannot be
    used or takes longer than `deadline_s` seconds, `ConfigError` for settings that it does not accept, and
    `ConfigErrors` for several errors. Checking stops at a plug-in that hangs or ends its process."""
    if not uses:
        return []
    requests = [(place, plugin.path, dict(plugin.settings)) for place, plugin in uses]
    argv = [sys.executable, "-m", "etude.plugins"]
    try:
        done = subprocess.run(
            argv, input=json.dumps(requests, default=str).encode(), capture_output=True, timeout=deadline_s, check=False
        )
        output, stderr, ending = done.stdout, done.stderr, _ending(done.returncode)
    except subprocess.TimeoutExpired as late:
        output, stderr, ending = late.stdout or b"", late.stderr or b"", f"did not end within {deadline_s:g} s"
    answers = [json.loads(line) for line in output.splitlines()]
    identities, errors = list[Identity](), list[EtudeError]()
    for answer in answers:
        if isinstance(answer, dict):
            identities.append(msgspec.convert(answer, Identity))
            continue
        for is_config, what, facts, hint in answer:
            errors.append((ConfigError if is_config else PluginRefused)(what, facts, hint=hint))
    if len(answers) < len(uses):
        place, plugin = uses[len(answers)]
        last = stderr.decode(errors="replace").strip().rpartition("\n")[2]
        facts = f"importing and constructing it {ending}{f': {last}' if last else ''}"
        what = f"{kind_at(place).noun} {plugin.path} cannot be constructed"
        errors.append(PluginRefused(what, facts, hint="correct the module, or remove the plug-in from the config"))
    raise_all(errors)
    return [one for one in identities if ":" in one.path]


def _ending(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended its process with exit code {code}"


def _answers(requests: Iterable[tuple[str, str, dict[str, Any]]]) -> Iterator[dict[str, Any] | list[Any]]:
    """The identity of each plug-in, or the list of its errors, as the checking process prints them."""
    for place, path, settings in requests:
        try:
            kind = kind_at(place)
            make(kind, Plugin(path, settings), where=place)
            yield msgspec.to_builtins(identity(kind, path))
        except EtudeError as error:
            every = error.errors if isinstance(error, ConfigErrors) else [error]
            yield [(isinstance(one, ConfigError), one.what, one.facts, one.hint) for one in every]


def _main() -> None:
    requests, out = json.load(sys.stdin), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of plug-ins is not part of the answer
    for answer in _answers(requests):
        print(json.dumps(answer), file=out, flush=True)
    os._exit(0)  # do not wait for threads that a plug-in started


if __name__ == "__main__":
    _main()
