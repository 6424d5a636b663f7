"""The sandboxes of a server: created from templates and snapshots, leased, paused, ended. Independent of HTTP.

A sandbox is a machine of the server's runtime together with its owner, its access token and its lease. It belongs to
the account that created it and lives until its lease ends. The lease can be renewed up to the account's maximum
lifetime. A creation can have an idempotency key: repeating it returns the same sandbox, even if that has ended since.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeVar

from etude.environments.remote.api_errors import ApiError, api_error_of
from etude.environments.remote.config import ServerConfig
from etude.environments.remote.files import PROGRAMS
from etude.environments.remote.folder_watcher import FolderWatchers
from etude.environments.remote.keys import Account
from etude.environments.remote.messages import NewSandbox
from etude.environments.remote.processes import Processes
from etude.environments.remote.shells import Shells
from etude.errors import MachineError
from etude.records.image import Image
from etude.seams import Holding, Machine, Runtime

T = TypeVar("T")
_MAX_CREATIONS = 4096  # remembered idempotency keys
_MAX_FORKS = 128  # in one request
_TICK_S = 0.5  # between two checks of leases


@dataclass(frozen=True)
class Template:
    """A template for sandboxes: files for the working directory, and an image.

    Without an image, the machine has the runtime's default root filesystem."""

    files: Mapping[str, bytes] = field(default_factory=dict)
    image: Image | None = None


@dataclass(frozen=True)
class CreatedSandbox:
    """The response to the creation of a sandbox: its id, its access token and the template from which it was
    created."""

    id: str
    token: str
    template_id: str


class Hold:
    """Protects a snapshot from being dropped by the runtime, until `release`. Its size counts for the account's quota.

    A runtime drops snapshots when it has too many. Without this protection, one account could thus remove the snapshots
    of others. `state` is the runtime's id of the snapshot. Raises `ApiError` (429) over the quota, `MachineError` if
    the runtime has dropped the snapshot already."""

    def __init__(self, runtime: Runtime, account: Account, state: str) -> None:
        self.state, self._account = state, account
        self._runtime = runtime if isinstance(runtime, Holding) else None  # other runtimes have their own limits
        self._num_bytes = 0 if self._runtime is None else self._runtime.hold(state)
        try:
            account.add_state_bytes(self._num_bytes)
        except BaseException:
            self._num_bytes = 0
            self.release()
            raise

    def release(self) -> None:
        """Let the runtime drop the snapshot, and give its bytes back to the quota. Can be repeated."""
        runtime, self._runtime = self._runtime, None
        if runtime is not None:
            runtime.release(self.state)
            self._account.remove_state_bytes(self._num_bytes)


class Sandbox:
    """One sandbox of a server, running or paused; `SandboxManager` makes it."""

    def __init__(self, account: Account, spec: NewSandbox, machine: Machine, config: ServerConfig) -> None:
        self.created = CreatedSandbox(secrets.token_hex(10), secrets.token_hex(24), spec.template_id)
        self.id, self.token, self.template_id = self.created.id, self.created.token, self.created.template_id
        self.account = account
        self.metadata, self.env = dict(spec.metadata or {}), dict(spec.env_vars or {})
        self.auto_pause = spec.auto_pause
        self.started = time.time()
        self.ends = self.dies = 0.0  # by the clock of `SandboxManager`: end of the lease, and of its last renewal
        self.paused: Hold | None = None  # its state while it is paused
        self.lock = asyncio.Lock()  # held while it is paused, resumed or ended
        self.has_ended = False
        self._config = config
        self.attach(machine)

    def attach(self, machine: Machine) -> None:
        """Give the sandbox a new machine, at its creation or when it is resumed."""
        self.release_state()
        self.machine = machine
        config = self._config
        self.processes = Processes(machine, self.env, max_running=config.max_running, log_bytes=config.log_bytes)
        self.shells = Shells(machine, PROGRAMS)
        self.watches = FolderWatchers()

    def disconnect(self) -> None:
        """End all commands and shells, and thus the streams of all clients, before the machine ends."""
        self.processes.close()
        self.shells.close()

    def release_state(self) -> None:
        """Release the snapshot that was taken for a pause, if there is one."""
        hold, self.paused = self.paused, None
        if hold is not None:
            hold.release()

    @property
    def state(self) -> str:
        """State of the sandbox: "running" or "paused"."""
        return "running" if self.paused is None else "paused"


class SandboxManager:
    """All sandboxes of a server, with their leases and snapshots.

    `templates` are named; the name "base" exists always and has no files. `clock` returns seconds, for the leases."""

    def __init__(
        self,
        runtime: Runtime,
        templates: Mapping[str, Template],
        config: ServerConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.runtime, self.config, self.clock = runtime, config, clock
        self.templates = {"base": Template()} | dict(templates)
        self.draining = self._closed = False
        self._sandboxes: dict[str, Sandbox] = {}
        self._prepared: dict[str, asyncio.Task[str]] = {}
        self._snapshots: dict[str, AccountSnapshots] = {}  # by account
        self._creations: dict[tuple[str, str], asyncio.Task[CreatedSandbox]] = {}
        self._ended = asyncio.Condition()  # or paused

    # making

    async def create(self, account: Account, spec: NewSandbox, key: str | None) -> CreatedSandbox:
        """Create a sandbox from a template or a snapshot.

        `key` is an idempotency key: the same account and key return the same sandbox. Raises `ApiError` for an unknown
        template, an invalid lease, or over the quota."""
        if key is None:
            return await self._create(account, spec)
        name = (account.name, key)
        making = self._creations.get(name)
        if making is None:
            while len(self._creations) >= _MAX_CREATIONS:
                del self._creations[next(iter(self._creations))]
            making = self._creations[name] = asyncio.create_task(self._create(account, spec))
            making.add_done_callback(lambda task: self._forget(name, task))
        return await asyncio.shield(making)

    def _forget(self, name: tuple[str, str], task: asyncio.Task[CreatedSandbox]) -> None:
        if (task.cancelled() or task.exception() is not None) and self._creations.get(name) is task:
            del self._creations[name]  # nothing was created, so it can be retried

    async def _create(self, account: Account, spec: NewSandbox) -> CreatedSandbox:
        self._check_lease(account, spec.timeout)
        self._check_open()
        snapshot = await self.snapshot_of(account, spec.template_id)
        try:
            [sandbox] = await self._fork(account, spec, snapshot, 1)
        except MachineError:
            if self._prepared.pop(spec.template_id, None) is None:
                raise
            again = await self.snapshot_of(account, spec.template_id)  # the runtime may have dropped it
            [sandbox] = await self._fork(account, spec, again, 1)
        return sandbox.created

    async def _fork(self, account: Account, spec: NewSandbox, snapshot: str, n: int) -> list[Sandbox]:
        account.add_live(n)
        try:
            machines = await self.runtime.fork(snapshot, n, deadline_s=self.config.deadline_s)
        except BaseException:
            account.remove_live(n)
            raise
        if self._closed:  # meanwhile
            account.remove_live(n)
            await asyncio.gather(*(machine.close() for machine in machines), return_exceptions=True)
            raise ApiError(503, "the server has ended", hint="use another server")
        sandboxes = [Sandbox(account, spec, machine, self.config) for machine in machines]
        now = self.clock()
        for sandbox in sandboxes:
            sandbox.dies = now + account.quota.max_lifetime_s
            sandbox.ends = min(now + spec.timeout, sandbox.dies)
            self._sandboxes[sandbox.id] = sandbox
        return sandboxes

    async def fork(self, sandbox: Sandbox, n: int, timeout: int) -> list[Sandbox]:
        """Create `n` sandboxes with the current state of `sandbox`, each with a lease of `timeout` seconds.

        Raises `ApiError` for an invalid number or lease, or over the quota."""
        if not 1 <= n <= _MAX_FORKS:
            raise ApiError(
                400,
                f"{n} forks were requested",
                f"at most {_MAX_FORKS} are allowed in one request",
                hint="send more requests",
            )
        self._check_lease(sandbox.account, timeout)
        self._check_open()
        async with self._locked(sandbox):
            snapshot = await self._state_of(sandbox)
        spec = NewSandbox(
            template_id=sandbox.template_id,
            timeout=timeout,
            metadata=dict(sandbox.metadata),
            env_vars=dict(sandbox.env),
        )
        return await self._fork(sandbox.account, spec, snapshot, n)

    async def snapshot_of(self, account: Account, template: str) -> str:
        """Return the runtime's snapshot for `template`: the name of a template, or the name or id of a snapshot.

        Raises `ApiError` (404) if the account has none."""
        snapshot = self.snapshots(account).find(template)
        if snapshot is not None:
            return snapshot
        if template not in self.templates:
            facts = f"templates: {', '.join(sorted(self.templates)[:20])}"
            raise ApiError(404, f"no snapshot or template {template[:80]!r}", facts, hint="use one of them")
        return await self._prepare(template)

    async def prepare(self) -> None:
        """Prepare all templates in the runtime, so that the first sandboxes start fast.

        Raises `MachineError`, and `ValueError` for invalid files."""
        for template in self.templates:
            await self._prepare(template)

    async def _prepare(self, template: str) -> str:
        if template not in self._prepared:
            of = self.templates[template]
            self._prepared[template] = asyncio.create_task(self.runtime.prepare(of.files, image=of.image))
        try:
            return await asyncio.shield(self._prepared[template])
        except (MachineError, ValueError, OSError):
            self._prepared.pop(template, None)
            raise

    # looking up

    def get(self, sandbox_id: str, account: Account | None = None) -> Sandbox:
        """Return the sandbox with this id; with `account`, only if it belongs to that account.

        Raises `ApiError` (404) if there is none or it has ended."""
        sandbox = self._sandboxes.get(sandbox_id)
        if sandbox is None or sandbox.has_ended or (account is not None and sandbox.account is not account):
            hint = "it was killed, its lease has ended, or the server was restarted: create another one"
            raise ApiError(404, f"no sandbox {sandbox_id[:40]!r}", hint=hint)
        return sandbox

    def of(self, account: Account) -> list[Sandbox]:
        """Return the sandboxes of an account that have not ended, newest first."""
        found = (one for one in self._sandboxes.values() if one.account is account and not one.has_ended)
        return sorted(found, key=lambda one: -one.started)

    @property
    def num_alive(self) -> int:
        """Number of sandboxes of all accounts, including paused ones."""
        return len(self._sandboxes)

    @property
    def num_snapshots(self) -> int:
        """Number of snapshots of all accounts."""
        return sum(map(len, self._snapshots.values()))

    def renew(self, sandbox: Sandbox, seconds: int, *, at_least: bool = False) -> None:
        """Set the end of a sandbox's lease to `seconds` from now; with `at_least`, only if this extends it.

        The lease never exceeds the account's maximum lifetime. Raises `ApiError` (400) for an invalid lease."""
        self._check_lease(sandbox.account, seconds)
        ends = min(self.clock() + seconds, sandbox.dies)
        sandbox.ends = max(sandbox.ends, ends) if at_least else ends

    def ends_at(self, sandbox: Sandbox) -> float:
        """Return the end of the lease, in seconds since 1970."""
        return time.time() + sandbox.ends - self.clock()

    def _check_lease(self, account: Account, seconds: int) -> None:
        longest = account.quota.max_lifetime_s
        if not 0 <= seconds <= longest:
            raise ApiError(
                400,
                f"a lease of {seconds} s is too long",
                f"{account.name!r} may have at most {longest} s",
                hint="use a shorter lease",
            )

    def _check_open(self) -> None:
        if self.draining:
            headers = {"should-retry": "true", "retry-after": "5"}
            raise ApiError(503, "the server is about to end", hint="use another server", headers=headers)

    # states

    def snapshots(self, account: Account) -> AccountSnapshots:
        """Return the collection of an account's snapshots."""
        return self._snapshots.setdefault(account.name, AccountSnapshots(partial(Hold, self.runtime, account)))

    async def snapshot(self, sandbox: Sandbox, name: str | None) -> str:
        """Take a snapshot of a sandbox, with an optional name, and return its id. The sandbox keeps running."""
        async with self._locked(sandbox):
            state = await self._state_of(sandbox)
        return self.snapshots(sandbox.account).add(state, name)

    async def pause(self, sandbox: Sandbox) -> bool:
        """Store the state of a sandbox and end its machine; return False if it was paused already.

        If the state cannot be stored, the sandbox keeps running and the error is raised."""
        async with self._locked(sandbox):
            if sandbox.paused is not None:
                return False
            sandbox.paused = Hold(self.runtime, sandbox.account, await sandbox.machine.snapshot())
            sandbox.disconnect()
            await sandbox.machine.close()
            sandbox.ends = self.clock() + self.config.paused_s
        await self._notify_ended()
        return True

    async def resume(self, sandbox: Sandbox, timeout: int) -> bool:
        """Start a machine for a paused sandbox, with a lease of `timeout` seconds; return whether it was paused.

        The lease of a running sandbox is extended to at least `timeout` seconds."""
        self._check_lease(sandbox.account, timeout)
        async with self._locked(sandbox):
            if sandbox.paused is None:
                self.renew(sandbox, timeout, at_least=True)
                return False
            self._check_open()
            [machine] = await self.runtime.fork(sandbox.paused.state, 1, deadline_s=self.config.deadline_s)
            sandbox.attach(machine)
            now = self.clock()
            sandbox.dies = now + sandbox.account.quota.max_lifetime_s
            sandbox.ends = min(now + timeout, sandbox.dies)
            return True

    @contextlib.asynccontextmanager
    async def _locked(self, sandbox: Sandbox) -> AsyncIterator[None]:
        """Lock a sandbox. Raises `ApiError` (404) if it has ended meanwhile."""
        async with sandbox.lock:
            self.get(sandbox.id)
            yield

    async def _state_of(self, sandbox: Sandbox) -> str:
        return sandbox.paused.state if sandbox.paused is not None else await sandbox.machine.snapshot()

    # ending

    async def kill(self, sandbox: Sandbox) -> None:
        """End a sandbox and its machine. Does nothing if it has ended."""
        async with sandbox.lock:
            if sandbox.has_ended:
                return
            sandbox.has_ended = True
            try:
                sandbox.disconnect()
                if sandbox.paused is None:
                    await sandbox.machine.close()
            finally:
                sandbox.release_state()
                self._sandboxes.pop(sandbox.id, None)
                sandbox.account.remove_live()
        await self._notify_ended()

    async def _notify_ended(self) -> None:
        async with self._ended:
            self._ended.notify_all()

    async def expire(self) -> None:
        """End all sandboxes whose lease has ended; those with `auto_pause` are paused."""
        now = self.clock()
        late = [sandbox for sandbox in self._sandboxes.values() if sandbox.ends <= now]
        await asyncio.gather(*(self._expire(sandbox) for sandbox in late), return_exceptions=True)

    async def _expire(self, sandbox: Sandbox) -> None:
        """Pause or end one sandbox; it is ended if it cannot be paused."""
        if sandbox.auto_pause and sandbox.paused is None and sandbox.dies > self.clock():
            with contextlib.suppress(MachineError, ValueError, OSError, ApiError):
                await self.pause(sandbox)
                return
        await self.kill(sandbox)

    async def reap(self) -> None:
        """Call `expire` again and again, until the task is cancelled."""
        while True:
            nearest = min((sandbox.ends for sandbox in self._sandboxes.values()), default=math.inf)
            await asyncio.sleep(min(max(nearest - self.clock(), 0.02), _TICK_S))
            await self.expire()

    async def drain(self, deadline_s: float) -> None:
        """Refuse new sandboxes, and wait until none is running, at most `deadline_s` seconds."""
        self.draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s), self._ended:
                await self._ended.wait_for(
                    lambda: all(sandbox.paused is not None for sandbox in self._sandboxes.values())
                )

    async def close(self) -> None:
        """End all sandboxes, including those that are being created."""
        self.draining = self._closed = True
        for task in (*self._creations.values(), *self._prepared.values()):
            task.cancel()
        await asyncio.gather(
            *(self.kill(sandbox) for sandbox in list(self._sandboxes.values())), return_exceptions=True
        )


async def run_backend_call(work: Awaitable[T], *, deadline_s: float, what: str) -> T:
    """Await `work` for at most `deadline_s` seconds, and convert errors of the runtime to `ApiError`.

    `what` is the first part of the error's text, such as "it could not be paused"."""
    try:
        async with asyncio.timeout(deadline_s):
            return await work
    except MachineError as error:
        raise api_error_of(error) from None
    except ValueError as error:
        raise ApiError(400, what, str(error), hint="correct the request as the message says") from None
    except TimeoutError:
        raise ApiError(504, what, f"it took more than {deadline_s:g} s", hint="try again later") from None
    except OSError as error:
        raise ApiError(507, what, str(error), hint="check the disks of the sandbox and of the server") from None


PREPARED = "etude-"  # prefix of the names of snapshots that etude's clients prepare and can prepare again
MAX_SNAPSHOTS = 1024  # snapshots of one account


class _Snapshot(NamedTuple):
    state: str  # the runtime's snapshot
    names: tuple[str, ...]
    hold: Hold | None = None


class AccountSnapshots:
    """The snapshots of one account, found by id or name.

    A snapshot is disposable if it has no name, or only a name that etude's clients gave, since these prepare a missing
    snapshot again. An account has at most `MAX_SNAPSHOTS`; when another is added, the least recently used disposable
    one is deleted. All others stay until the account deletes them. `hold` is called with the runtime's id of each of
    these, so that the runtime keeps it.

    >>> snapshots = AccountSnapshots(lambda state: None)
    >>> first = snapshots.add("tree", "mine")
    >>> snapshots.find("mine") == snapshots.find(first) == "tree"
    True
    """

    def __init__(self, hold: Callable[[str], Hold | None]) -> None:
        self._make_hold = hold
        self._snapshots: OrderedDict[str, _Snapshot] = OrderedDict()  # by id, least recently used first

    def __len__(self) -> int:
        return len(self._snapshots)

    def find(self, name: str) -> str | None:
        """Return the runtime's id of the snapshot with this id or name; None if there is none.

        Of several with the same name, the newest is returned."""
        for snapshot_id, snapshot in reversed(self._snapshots.items()):
            if name == snapshot_id or name in snapshot.names:
                self._snapshots.move_to_end(snapshot_id)
                return snapshot.state
        return None

    def add(self, state: str, name: str | None) -> str:
        """Add a snapshot and return its new id.

        `state` is its id in the runtime; `name` is another name for `find`. If there are `MAX_SNAPSHOTS`, one is
        deleted. Raises `ApiError` (429) if none can be deleted or the quota is used up, `MachineError` if the runtime
        has dropped the snapshot."""
        if len(self._snapshots) >= MAX_SNAPSHOTS:
            disposable = next(
                (snapshot_id for snapshot_id, snapshot in self._snapshots.items() if _is_disposable(snapshot.names)),
                None,
            )
            if disposable is None:
                raise ApiError(429, f"the account has {len(self._snapshots)} snapshots already", hint="delete some")
            del self._snapshots[disposable]
        snapshot_id = f"snap-{secrets.token_hex(10)}"
        names = (name,) if name else ()
        self._snapshots[snapshot_id] = _Snapshot(
            state, names, None if _is_disposable(names) else self._make_hold(state)
        )
        return snapshot_id

    def add_imported(self, state: str) -> str:
        """Add a snapshot without a name, unless it is known already, and return its id.

        `state` is its id in the runtime. Raises the errors of `add`."""
        wanted = _Snapshot(state, ())
        known = next((snapshot_id for snapshot_id, snapshot in self._snapshots.items() if snapshot == wanted), None)
        return known or self.add(state, None)

    def names(self) -> dict[str, tuple[str, ...]]:
        """Return the names of each snapshot, by its id."""
        return {snapshot_id: snapshot.names for snapshot_id, snapshot in self._snapshots.items()}

    def delete(self, name: str) -> bool:
        """Delete the snapshots with this id or name; return whether there was one."""
        deleted = [
            snapshot_id
            for snapshot_id, snapshot in self._snapshots.items()
            if name == snapshot_id or name in snapshot.names
        ]
        for snapshot_id in deleted:
            hold = self._snapshots.pop(snapshot_id).hold
            if hold is not None:
                hold.release()
        return bool(deleted)


def _is_disposable(names: tuple[str, ...]) -> bool:
    return all(name.startswith(PREPARED) for name in names)
