"""The Ray cluster that a run is placed on: connecting to it, what its nodes offer, whether they can take part.

Everything here blocks: it is done before a run begins, or in a thread. Knows nothing of actors.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from etude import __version__
from etude.config import Plugin, plugins_in
from etude.errors import ConfigError, EtudeError, TaskError
from etude.inference.config import EngineKind
from etude.inference.foreign.environment import MAKES, environment
from etude.loop.config import RunConfig, open_tasks
from etude.loop.devices import gpus_of
from etude.loop.preflight import prove_tasks
from etude.plugins import CHECK_S as PLUGINS_S
from etude.plugins import Kind, check_all, kind_at

ROLES = ("learner", "engine", "worker", "grader")
CHECK_S = 60.0  # for a node to say what it lacks
PROVE_S = 600.0  # for its machines to prove the first tasks
_OBJECTS_BYTES = 100 << 20  # of a cluster that is started here: no data goes through Ray
ROOM_HERE = 64.0  # of each role, in a cluster that is started here
_SHARED = "mount one file system on every node at the same path, for runs/ and for what the config names"


def connect(on: str) -> None:
    """Connect this process to a cluster: "HOST:PORT" is one that this machine is a node of, "ray://HOST:PORT" one by
    its client's port, "ray" the one that RAY_ADDRESS names; without that one is started here, for this process alone.
    Raises `ConfigError`."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # of what is started here
    os.environ.setdefault("RAY_SCHEDULER_EVENTS", "0")  # who waits for room is in our own events
    os.environ.setdefault("RAY_worker_niceness", "0")  # its 15 would starve components beside anything else
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        if on != "ray":
            _must_listen(on.removeprefix("ray://"))
            ray.init(on, **quiet)
        elif "RAY_ADDRESS" in os.environ:
            ray.init("auto", **quiet)
        else:
            room = dict.fromkeys(ROLES, ROOM_HERE)
            here: dict[str, Any] = {"num_cpus": 0, "resources": room, "object_store_memory": _OBJECTS_BYTES}
            ray.init("local", include_dashboard=False, **here, **quiet)
    except (OSError, RuntimeError, ValueError, ImportError, RayError) as error:
        raise ConfigError(
            f"no Ray cluster answers at {on}",
            " ".join(str(error).split())[:500],
            hint="HOST:PORT is that of `ray start --head`, and wants `ray start --address=HOST:PORT` on this machine; "
            "ray://HOST:PORT is that of its client server, 10001",
        ) from None
    finally:
        if signal.getsignal(signal.SIGTERM) is not on_sigterm:  # Ray's would exit from wherever the program is
            signal.signal(signal.SIGTERM, on_sigterm)


def disconnect() -> None:
    """Let go of the cluster; one that was started here ends. Idempotent."""
    ray.shutdown()


def _must_listen(place: str) -> None:
    """Raise `OSError` now where Ray would try for a minute."""
    host, _, port = place.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=5.0).close()


def nodes(roles: Sequence[str] = ROLES) -> list[dict[str, Any]]:
    """The nodes that live and offer one of the roles."""
    return [n for n in ray.nodes() if n["Alive"] and any(role in n["Resources"] for role in roles)]


def room(role: str, gpus: int = 0) -> int:
    """How many of a role that wants so many GPUs of its node the nodes that live could take, if nothing ran. Where no
    node has a GPU none is wanted."""
    there = [node["Resources"] for node in nodes()]
    gpus = gpus if any(has.get("GPU") for has in there) else 0
    taken = (min(has.get(role, 0), has.get("GPU", 0) // gpus if gpus else has.get(role, 0)) for has in there)
    return sum(map(int, taken))


def offers() -> str:
    """The roles that each node takes, in words for an error."""
    named = [(n, [r for r in (*ROLES, "GPU") if r != "GPU" or n["Resources"].get(r)]) for n in nodes()]
    told = [f"{_name(n)}: " + ", ".join(f"{r} {n['Resources'].get(r, 0):g}" for r in names) for n, names in named]
    return "; ".join(told) or f"none of {sum(n['Alive'] for n in ray.nodes())} nodes offers a role"


def _name(node: Mapping[str, Any]) -> str:
    return f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"


def check(config: RunConfig, runs: Path) -> None:
    """Whether every node that offers a role sees the folder of runs and what the config names, and has this etude;
    whether machines can be made on those that offer workers and graders. Raises `ConfigError` that names the nodes, and
    `TaskError` for tasks that are not even here."""
    open_tasks(config, canaries=False)
    runs.mkdir(parents=True, exist_ok=True)
    mark = runs.absolute() / f".seen-{secrets.token_hex(8)}"
    named = [str(config.tasks.source), config.machines.images]
    kinds = {*config.fleet.engines} - {EngineKind.REFERENCE}
    named += [str(environment(config.foreign(kind).environment, MAKES[kind]).folder) for kind in kinds]
    files: dict[str, str | None] = {str(Path(p).absolute()): None for p in named if p and Path(p).exists()}
    mark.write_text(mark.name)
    try:
        _each(ROLES, CHECK_S, _lacking, {**files, str(mark): mark.name}, __version__)
    finally:
        mark.unlink()
    used = [(place, plugin) for place, plugin in plugins_in(config) if kind_at(place) is not Kind.TRACKER]
    if plugins := used:  # trackers run beside the conductor only
        _each(("learner", "worker", "grader"), CHECK_S + PLUGINS_S, _without_plugins, plugins, os.getcwd())
    _check_devices(config)
    _each(("worker", "grader"), PROVE_S, _unproven, config, os.getcwd())
    _enough_gpus(config)


def _enough_gpus(config: RunConfig) -> None:
    """Raises `ConfigError` for an engine that is wider than any node."""
    most = max((int(node["Resources"].get("GPU", 0)) for node in nodes(("engine",))), default=0)
    for kind in {*config.fleet.engines}:
        if 0 < most < (wanted := config.devices_of(kind)):
            raise ConfigError(
                f"no node has the {wanted} GPUs of an engine",
                f"{kind}.arguments = {list(config.foreign(kind).arguments)}; the most on a node for engines are {most}",
                hint="an engine is on one node: smaller sizes, or let those that span nodes join by themselves",
            )


def _check_devices(config: RunConfig) -> None:
    """Raises `ConfigError` for a GPU that is named and that no node with its role has. Ray gives each process one."""
    for role, device in (("engine", config.engine.device), ("learner", config.learner.device)):
        if gpus_of(device) > 1:
            hint = f"set {role}.device = 'cuda'"
            raise ConfigError(
                f"{role}.device = {device!r}", "Ray shows a process only the GPU that is its own", hint=hint
            )
        if gpus_of(device) and not any(node["Resources"].get("GPU", 0) >= 1 for node in nodes((role,))):
            hint = f"add a node: ray start --num-gpus=1 --resources='{{\"{role}\": 1}}'; or set {role}.device = 'auto'"
            raise ConfigError(f"{role}.device = {device!r}", f"no node that offers {role} has a GPU", hint=hint)


def _each(roles: Sequence[str], deadline_s: float, work: Callable[..., str], *given: object) -> None:
    """Ask every node that offers one of the roles what is wrong with it; one that is lost meanwhile does not count.
    Raises `ConfigError`."""
    task, asked = ray.remote(num_cpus=0)(work), {}
    for node in nodes(roles):
        strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        asked[node["NodeID"]] = task.options(scheduling_strategy=strategy, max_retries=0).remote(*given)
    if asked:
        ray.wait(list(asked.values()), num_returns=len(asked), timeout=deadline_s)
    told = {node: _said(ref, deadline_s) for node, ref in asked.items()}
    there = {node["NodeID"]: _name(node) for node in nodes(roles)}
    if not there:
        hint = """start nodes with what they take: ray start --resources='{"learner": 1, "engine": 2, "worker": 1}'"""
        raise ConfigError(f"no node of the cluster offers {' or '.join(roles)}", offers(), hint=hint)
    wrong = [f"{name} {told[node]}" for node, name in there.items() if told.get(node)]
    if wrong:
        what = f"{len(wrong)} of {len(there)} nodes cannot take part"
        raise ConfigError(what, "; ".join(wrong), hint=_SHARED)


def _said(ref: Any, deadline_s: float) -> str:
    try:
        return str(ray.get(ref, timeout=1.0))
    except GetTimeoutError:
        return f"did not answer within {deadline_s:g} s"
    except RayError as error:
        last = str(error).strip().rpartition("\n")[2]
        return f"cannot run etude {__version__}: {last}"


def _lacking(files: Mapping[str, str | None], version: str) -> str:
    """What the node that this runs on lacks."""
    lacks = [f"does not see {path}" for path, text in files.items() if not _holds(Path(path), text)]
    mine = import_module("etude").__version__  # as it is installed there
    return ", ".join(lacks + ([f"has etude {mine}, this is {version}"] if mine != version else []))


def _holds(path: Path, text: str | None) -> bool:
    try:
        return path.exists() if text is None else path.read_text() == text
    except OSError:
        return False


def _without_plugins(plugins: Sequence[tuple[str, Plugin]], folder: str) -> str:
    """Which plug-in the node that this runs on cannot use."""
    os.chdir(folder)
    try:
        check_all(plugins)
    except EtudeError as error:
        return f"cannot use a plug-in: {error.what}: {error.facts}"
    return ""


def _unproven(config: RunConfig, folder: str) -> str:
    """Why the node that this runs on cannot judge the run's tasks."""
    os.chdir(folder)
    try:
        prove_tasks(config)
    except TaskError as error:
        return f"cannot judge the tasks: {error.what}: {error.facts}"
    except EtudeError as error:
        return f"cannot make machines: {error.what}: {error.facts}"
    return ""
