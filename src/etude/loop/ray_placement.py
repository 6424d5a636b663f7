"""A `Placement` on a Ray cluster: each program is hosted by an actor on a node that offers its role.

Nodes offer roles as custom resources: ``ray start --resources='{"engine": 2, "worker": 1}'``. The learner has a
placement group with a bundle for each rank, on as few nodes as possible, which it keeps from mid-training on, also
while ranks restart. Engines are spread over nodes; workers and graders run where they are offered. A program that finds
no free resources waits, and the run continues without it as long as another one with its role runs. So a fleet grows
when nodes join and shrinks when they leave. Restarts are done by the supervisor, not by Ray. All nodes see the run
folder on a shared file system."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from etude.errors import DeadlineExceeded, EtudeError, RunError
from etude.loop import usage
from etude.loop.placement import NoCapacity, OnWait, Process, Program
from etude.loop.ray_cluster import ROLES, capacity, offers
from etude.loop.ray_host import RayHost
from etude.loop.rpc import LINK_S, Caller, CallFailed, ProcessLost, enable_keepalive
from etude.models.family_lookup import OWN_FAMILIES, own_family_names

CAPACITY_S = 600.0
"""Seconds to wait for a node for a component that the run needs: an autoscaler takes minutes to add one."""
PLACED_S = 30.0  # an actor that is not up by then waits for resources, perhaps of another run
LOOK_S = 1.0
ANSWER_S = 60.0  # deadline of a call to an actor that is up
USAGE_EVERY_S = 5.0  # each call costs a pass over /proc on the node


def role_of(name: str) -> str:
    """Return the role of a program by its name. Programs that run before the learner use the learner's role.

    >>> [role_of(name) for name in ("engine-3", "learner", "mid-training")]
    ['engine', 'learner', 'learner']
    """
    role = name.partition("-")[0]
    return role if role in ROLES else "learner"


class RayProcess:
    """A `Process` that a `RayHost` actor hosts. `link` is the connection to that actor."""

    def __init__(self, program: Program, actor: Any, pid: int, link: socket.socket) -> None:
        self.role, self.pid = role_of(program.name), pid
        self.caller = Caller(link, program.name) if program.with_socket else None
        self._actor, self._link = actor, link
        self._ended = asyncio.create_task(self._end(), name=f"end of {program.name}")

    async def _end(self) -> int:
        try:
            code = int(await _result(self._actor.exited.remote()))
        except ProcessLost:
            code = -signal.SIGKILL  # its actor or node was lost
        if self.caller is not None:
            self.caller.abort()  # a lost node does not close its sockets
        self.release()
        return code

    def release(self) -> None:
        """Kill the actor and close the connection, which ends the program if it still runs. Idempotent."""
        if self.caller is None:
            self._link.close()
        _kill(self._actor)

    @property
    def returncode(self) -> int | None:
        return self._ended.result() if self._ended.done() else None

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    def signal(self, signum: int) -> None:
        if self._ended.done():
            return
        if signum == signal.SIGKILL:
            _kill(self._actor)  # through the node's raylet, which also works for a stopped process
        else:
            with contextlib.suppress(RayError):
                self._actor.signal.remote(signum)

    async def cpu_s(self) -> float:
        return float((await self.usage(with_memory=False)).get("cpu_s", 0.0))

    async def queued_s(self) -> dict[int, float]:
        return await self._ask(self._actor.queued_s)

    async def usage(self, *, with_memory: bool) -> dict[str, Any]:
        """Return the result of `RayHost.usage`; {} if the node does not answer in time."""
        return await self._ask(self._actor.usage, with_memory)

    async def _ask(self, method: Any, *args: object) -> dict[Any, Any]:
        """What a method of the actor returns; {} when the node does not answer in time."""
        try:
            async with asyncio.timeout(USAGE_EVERY_S):
                return dict(await _result(method.remote(*args)))
        except (EtudeError, TimeoutError):
            return {}


class RayPlacement:
    """Places the programs of one run on the cluster that `ray_cluster.connect` connected to.

    `ranks` is the number of learner ranks. Each gets its own bundle, with a GPU if the cluster has any."""

    spreads = True

    def __init__(self, run: Path, *, ranks: int = 1) -> None:
        self._token = os.environ.setdefault("ETUDE_TOKEN", secrets.token_hex(16))  # engines are on a network
        self._run, self._ranks = run.absolute(), ranks
        self._secret = secrets.token_bytes(32)
        self._reserved: PlacementGroup | None = None
        self._pending: dict[str, list[object]] = {role: [] for role in ROLES}  # actors without a node yet, in order
        self._running: set[RayProcess] = set()
        self._unfit: dict[str, str] = {}  # nodes that cannot take part: id → reason
        self._looked_at = 0.0

    async def start(self, program: Program, waits: OnWait) -> Process:
        host, link, address = self._host(program), None, ""
        try:
            while (found := await self._wait_for_actor(program, host, waits)) is None:
                _kill(host)
                host = self._host(program)
            address, port = found
            link = await _connect(program.name, address, port, self._secret)
            program = replace(program, env={**program.env, OWN_FAMILIES: ",".join(own_family_names())})
            async with asyncio.timeout(ANSWER_S):
                pid = int(await _result(host.start.remote(program, self._secret)))
        except BaseException as error:
            _kill(host)
            if link is not None:
                link.close()
            if isinstance(error, TimeoutError):
                facts = f"its node, {address}, did not answer within {ANSWER_S:g} s"
                raise ProcessLost(f"{program.name} was not started", facts, hint="see the node's Ray logs") from None
            raise
        process = RayProcess(program, host, pid, link)
        self._running.add(process)
        if process.caller is not None:
            await process.caller.open()
        return process

    def _host(self, program: Program) -> Any:
        """Create an actor for a component. It starts when a node has free resources."""
        role = role_of(program.name)
        gpus = _gpus(program) if ray.cluster_resources().get("GPU", 0) else 0
        options: dict[str, Any] = {"num_cpus": 0, "num_gpus": gpus, "resources": {role: 1}, "max_restarts": 0}
        if role == "learner":
            if self._reserved is None:
                place = {"learner": 1, **({"GPU": gpus} if gpus else {})}
                self._reserved = placement_group([place] * self._ranks, strategy="PACK")
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(self._reserved)
        elif role == "engine":
            options["scheduling_strategy"] = "SPREAD"
        if self._unfit and role != "learner":  # placement groups have no label selectors
            options["label_selector"] = {"ray.io/node-id": f"!in({','.join(sorted(self._unfit))})"}
        return ray.remote(RayHost).options(**options).remote(self._token)

    async def _wait_for_actor(self, program: Program, host: Any, waits: OnWait) -> tuple[str, int] | None:
        """Wait for the actor; returns the (address, port) of its listener. None when its node cannot take part, which
        is remembered. Raises `NoCapacity`, `ProcessLost`."""
        role, began, waited = role_of(program.name), time.monotonic(), False
        offered = asyncio.ensure_future(_result(host.offer.remote(str(self._run), os.getcwd())))
        self._pending[role].append(host)
        try:
            while not (await asyncio.wait({offered}, timeout=LOOK_S))[0]:
                seconds = time.monotonic() - began
                if not waited and (seconds > PLACED_S or await self._lacks_capacity(program, host)):
                    waited = True
                    await waits(f"no node has free resources: {await asyncio.to_thread(offers)}")
                if seconds > CAPACITY_S and not self._num_running(role):
                    raise NoCapacity(
                        f"no node has free resources for {program.name}{_gpus_text(program)}",
                        f"waited {seconds:.0f} s; {await asyncio.to_thread(offers)}{self._unfit_text()}",
                        hint=f"add a node: ray start --address=... --resources='{{\"{role}\": 1}}'; then --resume",
                    )
            node, address, port, lacks = offered.result()
            if not lacks:
                return str(address), int(port)
            self._unfit[node] = f"{address}: {lacks}"
            await waits(self._unfit[node])
            if role == "learner":
                raise _unfit(self._unfit[node])
            return None
        finally:
            offered.cancel()
            self._pending[role].remove(host)

    async def _lacks_capacity(self, program: Program, host: object) -> bool:
        """Whether earlier components of this role use all existing resources."""
        role = role_of(program.name)
        before = self._num_running(role) + self._pending[role].index(host)
        return before >= await asyncio.to_thread(capacity, role, _gpus(program))

    def _num_running(self, role: str) -> int:
        self._running = {process for process in self._running if process.returncode is None}
        return sum(process.role == role for process in self._running)

    def _unfit_text(self) -> str:
        return "".join(f"; {why}" for why in self._unfit.values())

    async def usage(self, running: Mapping[str, Process], *, with_memory: bool) -> dict[str, dict[str, Any]]:
        used = await asyncio.to_thread(usage.sample, {}, with_memory)
        if not with_memory and time.monotonic() < self._looked_at + USAGE_EVERY_S:
            return used
        self._looked_at = time.monotonic()
        there = {name: process for name, process in running.items() if isinstance(process, RayProcess)}
        found = await asyncio.gather(*(process.usage(with_memory=with_memory) for process in there.values()))
        return used | {name: usage for name, usage in zip(there, found, strict=True) if usage}

    async def close(self) -> None:
        for process in self._running:
            process.release()
        self._running.clear()
        if self._reserved is not None:
            with contextlib.suppress(RayError):
                remove_placement_group(self._reserved)
            self._reserved = None


def _gpus(program: Program) -> int:
    """GPUs of a component on a node that has any: an engine as many as its parallel sizes need; the learner, and what
    runs before it, one per rank."""
    return 1 if role_of(program.name) == "learner" else program.devices


def _gpus_text(program: Program) -> str:
    return f" with {program.devices} GPUs" if program.devices > 1 else ""


async def _result(reference: Any) -> Any:
    """Wait for the result of an actor call. Raises what the call raised, or `ProcessLost` when its actor is gone."""
    try:
        return await asyncio.wrap_future(reference.future())
    except RayTaskError as error:
        if isinstance(error.cause, EtudeError):
            raise error.cause from None
        raise CallFailed(
            "the Ray actor of a program failed", str(error), hint="this is a defect of etude: report it"
        ) from None
    except RayError as error:
        first = str(error).strip().partition("\n")[0]
        hint = "its node was lost, or its process was killed: see the node's Ray logs"
        raise ProcessLost("the Ray actor of a program is gone", first, hint=hint) from None


def _kill(actor: Any) -> None:
    with contextlib.suppress(RayError, RuntimeError, ValueError):
        ray.kill(actor)


def _unfit(why: str) -> RunError:
    hint = "put the run folder and the working directory on a file system that all nodes mount at the same path"
    return RunError("the node of the learner cannot take part in the run", why, hint=hint)


async def _connect(name: str, address: str, port: int, secret: bytes) -> socket.socket:
    """Connect to a host's listener and send the secret. Raises `ProcessLost`, `DeadlineExceeded`."""
    loop = asyncio.get_running_loop()
    link = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    link.setblocking(False)
    try:
        async with asyncio.timeout(LINK_S):
            await loop.sock_connect(link, (address, port))
            await loop.sock_sendall(enable_keepalive(link), secret)
    except TimeoutError:
        link.close()
        raise DeadlineExceeded(
            f"waited for {address}, the node of {name}, to accept a connection",
            f"for {LINK_S:g} s",
            hint="the machine that runs `etude run` must reach the nodes by TCP: check firewalls",
        ) from None
    except OSError as error:
        link.close()
        raise ProcessLost(
            f"{address}, the node of {name}, refused the connection",
            str(error),
            hint="its actor has ended: see the node's Ray logs",
        ) from None
    return link
