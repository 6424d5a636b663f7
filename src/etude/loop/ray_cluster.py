"""The Ray cluster of a run: connecting to it, the roles that its nodes offer, and checks of its nodes.

A node offers a role ("learner", "engine", "worker", "grader") as a custom resource of Ray. All functions block: call
them before a run begins, or in a thread."""

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
from etude.inference.external.environment import SERVER_KINDS, environment
from etude.loop.config import RunConfig, open_tasks
from etude.loop.devices import gpus_of
from etude.loop.preflight import validate_tasks
from etude.models.family_lookup import own_family_names
from etude.plugins import CHECK_S as PLUGINS_S
from etude.plugins import Kind, check_all, kind_at

ROLES = ("learner", "engine", "worker", "grader")
CHECK_S = 300.0  # deadline of a node's check; before it Ray starts a Python process, with all of the node's load
PROVE_S = 600.0  # deadline for a node to validate the first tasks
_OBJECTS_BYTES = 100 << 20  # object store of a local cluster: no data goes through Ray
LOCAL_CAPACITY = 64.0  # resources per role in a local cluster
_PLUGIN_HINT = "install its package on every node, or put its module where you start etude, in a folder of all nodes"
_LATE_HINT = "free processors of the nodes, or see there why no process starts: /tmp/ray/session_latest/logs"
_SHARED_HINT = "mount one file system on every node at the same path, for runs/ and the files of the config"


def connect(on: str) -> None:
    """Connect this process to a Ray cluster. Raises `ConfigError`.

    `on` is "HOST:PORT" for a cluster that this machine is a node of, "ray://HOST:PORT" for a cluster's client server,
    or "ray" for the cluster named by RAY_ADDRESS; without that variable it starts a local cluster for this process
    only."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # of a local cluster
    os.environ.setdefault("RAY_SCHEDULER_EVENTS", "0")  # the run's own events report who waits
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's default of 15 would starve components
    os.environ.setdefault("RAY_worker_register_timeout_seconds", f"{CHECK_S:g}")  # of a local cluster: Ray's is 60
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        if on != "ray":
            _check_port(on.removeprefix("ray://"))
            ray.init(on, **quiet)
        elif "RAY_ADDRESS" in os.environ:
            ray.init("auto", **quiet)
        else:
            resources = dict.fromkeys(ROLES, LOCAL_CAPACITY)
            here: dict[str, Any] = {"num_cpus": 0, "resources": resources, "object_store_memory": _OBJECTS_BYTES}
            _start_local(**here, **quiet)
    except (OSError, RuntimeError, ValueError, ImportError, RayError) as error:
        raise ConfigError(
            f"no Ray cluster answers at {on}",
            " ".join(str(error).split())[:500],
            hint="HOST:PORT: give the address of `ray start --head`, and run `ray start --address=HOST:PORT` on this "
            "machine; ray://HOST:PORT: give the port of the cluster's client server, by default 10001",
        ) from None
    finally:
        if signal.getsignal(signal.SIGTERM) is not on_sigterm:  # Ray's handler would exit at any point of the program
            signal.signal(signal.SIGTERM, on_sigterm)


def disconnect() -> None:
    """Disconnect from the cluster, and end it if it is a local one. Idempotent."""
    ray.shutdown()


def _start_local(**settings: Any) -> None:
    """Start a local cluster. Ray gives its node a fixed 30 seconds to start; on a busy host it gets three tries."""
    for tries_left in (2, 1, 0):
        try:
            ray.init("local", include_dashboard=False, **settings)
        except Exception as error:
            ray.shutdown()
            if type(error) is not Exception:  # Ray raises a bare one when its time is over
                raise
            if not tries_left:
                raise ConfigError(
                    "Ray's local node did not start in three tries of 30 s",
                    " ".join(str(error).split())[:500],
                    hint="free processors or memory of this machine; Ray's logs are in /tmp/ray/session_latest/logs",
                ) from None
        else:
            return


def _check_port(place: str) -> None:
    """Raise `OSError` at once when nothing listens there, where Ray would retry for a minute."""
    host, _, port = place.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=5.0).close()


def nodes(roles: Sequence[str] = ROLES) -> list[dict[str, Any]]:
    """Return the live nodes that offer one of the roles, as `ray.nodes` describes them."""
    return [n for n in ray.nodes() if n["Alive"] and any(role in n["Resources"] for role in roles)]


def capacity(role: str, gpus: int = 0) -> int:
    """Count how many processes of a role, each with `gpus` GPUs, the live nodes could host in total.

    When no node has a GPU, none is required."""
    there = [node["Resources"] for node in nodes()]
    gpus = gpus if any(has.get("GPU") for has in there) else 0
    taken = (min(has.get(role, 0), has.get("GPU", 0) // gpus if gpus else has.get(role, 0)) for has in there)
    return sum(map(int, taken))


def offers() -> str:
    """Return the roles that each node offers as text for an error."""
    named = [(n, [r for r in (*ROLES, "GPU") if r != "GPU" or n["Resources"].get(r)]) for n in nodes()]
    parts = [f"{_name(n)}: " + ", ".join(f"{r} {n['Resources'].get(r, 0):g}" for r in names) for n, names in named]
    return "; ".join(parts) or f"none of {sum(n['Alive'] for n in ray.nodes())} nodes offers a role"


def _name(node: Mapping[str, Any]) -> str:
    return f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"


def check(config: RunConfig, runs: Path) -> None:
    """Check that every node that offers a role can take part in runs of this config.

    Nodes must see the folder `runs` and the files that the config names, and have this etude version. Those that offer
    workers or graders must be able to create machines. Raises `ConfigError`, which names the nodes, and `TaskError` for
    tasks that cannot be opened here."""
    open_tasks(config, canaries=False)
    runs.mkdir(parents=True, exist_ok=True)
    mark = runs.absolute() / f".seen-{secrets.token_hex(8)}"
    named = [str(config.tasks.source), config.machines.images]
    kinds = {*config.fleet.engines} - {EngineKind.REFERENCE}
    named += [str(environment(config.foreign(kind).environment, SERVER_KINDS[kind]).folder) for kind in kinds]
    files: dict[str, str | None] = {str(Path(p).absolute()): None for p in named if p and Path(p).exists()}
    mark.write_text(mark.name)
    try:
        _check_nodes(ROLES, CHECK_S, _missing_on_node, {**files, str(mark): mark.name}, __version__)
    finally:
        mark.unlink()
    families = [("model.family", Plugin(name)) for name in own_family_names()]  # also those of `model.family`
    used = [(place, plugin) for place, plugin in plugins_in(config) if kind_at(place) is not Kind.TRACKER]
    if plugins := list(dict.fromkeys([*used, *families])):  # trackers run beside the conductor only
        users, limit_s = ROLES if families else ("learner", "worker", "grader"), CHECK_S + PLUGINS_S
        _check_nodes(users, limit_s, _plugin_problem, plugins, os.getcwd(), hint=_PLUGIN_HINT)
    _check_devices(config)
    _check_nodes(("worker", "grader"), PROVE_S, _task_problem, config, os.getcwd())
    _enough_gpus(config)


def _enough_gpus(config: RunConfig) -> None:
    """Raise `ConfigError` for an engine that needs more GPUs than any node has."""
    most = max((int(node["Resources"].get("GPU", 0)) for node in nodes(("engine",))), default=0)
    for kind in {*config.fleet.engines}:
        if 0 < most < (wanted := config.devices_of(kind)):
            raise ConfigError(
                f"no node has the {wanted} GPUs of an engine",
                f"{kind}.arguments = {list(config.foreign(kind).arguments)}; the most on a node for engines are {most}",
                hint="use smaller parallel sizes; engines that span nodes can join as remote engines",
            )


def _check_devices(config: RunConfig) -> None:
    """Raise `ConfigError` for a configured GPU that no node with the role has. Ray gives each process one GPU."""
    for role, device in (("engine", config.engine.device), ("learner", config.learner.device)):
        if gpus_of(device) > 1:
            hint = f"set {role}.device = 'cuda'"
            raise ConfigError(
                f"{role}.device = {device!r} is not possible", "Ray shows each process only its own GPU", hint=hint
            )
        if gpus_of(device) and not any(node["Resources"].get("GPU", 0) >= 1 for node in nodes((role,))):
            hint = f"add a node: ray start --num-gpus=1 --resources='{{\"{role}\": 1}}'; or set {role}.device = 'auto'"
            raise ConfigError(
                f"{role}.device = {device!r} is not possible", f"no node that offers {role} has a GPU", hint=hint
            )


def _check_nodes(
    roles: Sequence[str], deadline_s: float, work: Callable[..., str], *given: object, hint: str = _SHARED_HINT
) -> None:
    """Run `work` on every node that offers one of the roles; it returns what is wrong with the node, or "". A node that
    is lost meanwhile does not count. Raises `ConfigError`."""
    task, pending = ray.remote(num_cpus=0)(work), {}
    for node in nodes(roles):
        strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        pending[node["NodeID"]] = task.options(scheduling_strategy=strategy, max_retries=0).remote(*given)
    if pending:
        ray.wait(list(pending.values()), num_returns=len(pending), timeout=deadline_s)
    late = f"did not answer within {deadline_s:g} s"
    results = {node: _result(ref, late) for node, ref in pending.items()}
    there = {node["NodeID"]: _name(node) for node in nodes(roles)}
    if not there:
        hint = """start nodes with their roles: ray start --resources='{"learner": 1, "engine": 2, "worker": 1}'"""
        raise ConfigError(f"no node of the cluster offers {' or '.join(roles)}", offers(), hint=hint)
    wrong = [f"{name} {results[node]}" for node, name in there.items() if results.get(node)]
    if wrong:
        what = f"{len(wrong)} of {len(there)} nodes cannot take part"
        is_late = all(result in ("", late) for result in results.values())
        raise ConfigError(what, "; ".join(wrong), hint=_LATE_HINT if is_late else hint)


def _result(ref: Any, late: str) -> str:
    try:
        return str(ray.get(ref, timeout=1.0))
    except GetTimeoutError:
        return late
    except RayError as error:
        last = str(error).strip().rpartition("\n")[2]
        return f"cannot run etude {__version__}: {last}"


def _missing_on_node(files: Mapping[str, str | None], version: str) -> str:
    lacks = [f"does not see {path}" for path, text in files.items() if not _has_content(Path(path), text)]
    mine = import_module("etude").__version__  # as installed on the node
    return ", ".join(lacks + ([f"has etude {mine}, this is {version}"] if mine != version else []))


def _has_content(path: Path, text: str | None) -> bool:
    try:
        return path.exists() if text is None else path.read_text() == text
    except OSError:
        return False


def _plugin_problem(plugins: Sequence[tuple[str, Plugin]], folder: str) -> str:
    """Why the node that runs this cannot use a plug-in; "" if it can."""
    os.chdir(folder)
    try:
        check_all(plugins)
    except EtudeError as error:
        return f"cannot use a plug-in: {error.what}: {error.facts}"
    return ""


def _task_problem(config: RunConfig, folder: str) -> str:
    """Why the node that runs this cannot grade the run's tasks; "" if it can."""
    os.chdir(folder)
    try:
        validate_tasks(config)
    except TaskError as error:
        return f"cannot grade the tasks: {error.what}: {error.facts}"
    except EtudeError as error:
        return f"cannot make machines: {error.what}: {error.facts}"
    return ""
