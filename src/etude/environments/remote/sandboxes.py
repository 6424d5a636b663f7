"""The machines that are served: made from templates and snapshots, leased, paused, ended. Knows nothing of HTTP.

A machine belongs to the account that made it and lives as long as its lease, which can be renewed up to the account's
longest life. Creations have a key: whoever repeats one gets the machine that was made, however dead by now.
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

from etude.environments.remote.config import ServerConfig
from etude.environments.remote.files import PROGRAMS
from etude.environments.remote.holds import Hold
from etude.environments.remote.keys import Account
from etude.environments.remote.messages import NewSandbox
from etude.environments.remote.processes import Processes
from etude.environments.remote.refusal import Refused, of_error
from etude.environments.remote.shells import Shells
from etude.environments.remote.watch import Watches
from etude.errors import MachineError
from etude.records.image import Image
from etude.seams import Machine, Runtime

T = TypeVar("T")
_MAX_CREATIONS = 4096  # remembered by their keys
_MAX_FORKS = 128  # of one request
_TICK_S = 0.5  # between two looks at leases


@dataclass(frozen=True)
class Template:
    """What machines are made from by its name: files in the working directory of an image (None: the runtime's own)."""

    files: Mapping[str, bytes] = field(default_factory=dict)
    image: Image | None = None


@dataclass(frozen=True)
class Made:
    """What whoever makes a machine is told, now and whenever the creation is repeated."""

    id: str
    token: str
    template_id: str


class Box:
    """One machine, running or paused."""

    def __init__(self, account: Account, asked: NewSandbox, machine: Machine, config: ServerConfig) -> None:
        self.made = Made(secrets.token_hex(10), secrets.token_hex(24), asked.template_id)
        self.id, self.token, self.template_id = self.made.id, self.made.token, self.made.template_id
        self.account = account
        self.metadata, self.env = dict(asked.metadata or {}), dict(asked.env_vars or {})
        self.auto_pause = asked.auto_pause
        self.started = time.time()
        self.ends = self.dies = 0.0  # by the clock of `Boxes`; the second, however often the lease is renewed
        self.paused: Hold | None = None  # what it is while it has no machine
        self.turn = asyncio.Lock()  # of pausing, resuming and ending
        self.over = False
        self._config = config
        self.put(machine)

    def put(self, machine: Machine) -> None:
        """Have a machine: a new one, or one again."""
        self.let_go()
        self.machine = machine
        config = self._config
        self.processes = Processes(machine, self.env, max_running=config.max_running, log_bytes=config.log_bytes)
        self.shells = Shells(machine, PROGRAMS)
        self.watches = Watches()

    def leave(self) -> None:
        """Its machine is about to end: nobody hears of it any more."""
        self.processes.close()
        self.shells.close()

    def let_go(self) -> None:
        """Of the state of its pause."""
        hold, self.paused = self.paused, None
        if hold is not None:
            hold.release()

    @property
    def state(self) -> str:
        return "running" if self.paused is None else "paused"


class Boxes:
    """All machines of a server."""

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
        self._boxes: dict[str, Box] = {}
        self._prepared: dict[str, asyncio.Task[str]] = {}
        self._kept: dict[str, KeptStates] = {}  # by account
        self._creations: dict[tuple[str, str], asyncio.Task[Made]] = {}
        self._ended = asyncio.Condition()  # or paused

    # making

    async def create(self, account: Account, asked: NewSandbox, key: str | None) -> Made:
        """A machine from a template or a snapshot; the same one for the same key. Raises `Refused`."""
        if key is None:
            return await self._create(account, asked)
        name = (account.name, key)
        making = self._creations.get(name)
        if making is None:
            while len(self._creations) >= _MAX_CREATIONS:
                del self._creations[next(iter(self._creations))]
            making = self._creations[name] = asyncio.create_task(self._create(account, asked))
            making.add_done_callback(lambda task: self._forget(name, task))
        return await asyncio.shield(making)

    def _forget(self, name: tuple[str, str], task: asyncio.Task[Made]) -> None:
        if (task.cancelled() or task.exception() is not None) and self._creations.get(name) is task:
            del self._creations[name]  # nothing was made: it may be tried again

    async def _create(self, account: Account, asked: NewSandbox) -> Made:
        self._check_lease(account, asked.timeout)
        self._check_open()
        snapshot = await self.snapshot_of(account, asked.template_id)
        try:
            [box] = await self._fork(account, asked, snapshot, 1)
        except MachineError:
            if self._prepared.pop(asked.template_id, None) is None:
                raise
            again = await self.snapshot_of(account, asked.template_id)  # the runtime may have had to let go of it
            [box] = await self._fork(account, asked, again, 1)
        return box.made

    async def _fork(self, account: Account, asked: NewSandbox, snapshot: str, n: int) -> list[Box]:
        account.take(n)
        try:
            machines = await self.runtime.fork(snapshot, n, deadline_s=self.config.deadline_s)
        except BaseException:
            account.give_back(n)
            raise
        if self._closed:  # meanwhile
            account.give_back(n)
            await asyncio.gather(*(machine.close() for machine in machines), return_exceptions=True)
            raise Refused(503, "the server has ended", hint="ask another one")
        boxes = [Box(account, asked, machine, self.config) for machine in machines]
        now = self.clock()
        for box in boxes:
            box.dies = now + account.quota.max_lifetime_s
            box.ends = min(now + asked.timeout, box.dies)
            self._boxes[box.id] = box
        return boxes

    async def fork(self, box: Box, n: int, timeout: int) -> list[Box]:
        """A machine in use becomes n more."""
        if not 1 <= n <= _MAX_FORKS:
            raise Refused(400, f"{n} forks", f"at most {_MAX_FORKS} at a time", hint="ask again for more")
        self._check_lease(box.account, timeout)
        self._check_open()
        async with self._turn(box):
            snapshot = await self._state_of(box)
        asked = NewSandbox(
            template_id=box.template_id, timeout=timeout, metadata=dict(box.metadata), env_vars=dict(box.env)
        )
        return await self._fork(box.account, asked, snapshot, n)

    async def snapshot_of(self, account: Account, template: str) -> str:
        """The runtime's snapshot behind a template's name, or a kept state's name or id. Raises `Refused` (404)."""
        kept = self.kept(account).find(template)
        if kept is not None:
            return kept
        if template not in self.templates:
            facts = f"templates: {', '.join(sorted(self.templates)[:20])}"
            raise Refused(404, f"no snapshot or template {template[:80]!r}", facts, hint="name one of them")
        return await self._prepare(template)

    async def prepare(self) -> None:
        """All templates, before anybody asks for one. Raises `MachineError`; `ValueError` for files that are none."""
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

    # having

    def get(self, box_id: str, account: Account | None = None) -> Box:
        """A machine that has not ended, of the account's. Raises `Refused` (404)."""
        box = self._boxes.get(box_id)
        if box is None or box.over or (account is not None and box.account is not account):
            hint = "it was killed, its lease has ended, or the server was started again: make another"
            raise Refused(404, f"no machine {box_id[:40]!r}", hint=hint)
        return box

    def of(self, account: Account) -> list[Box]:
        """An account's, the newest first."""
        return sorted((b for b in self._boxes.values() if b.account is account and not b.over), key=_age)

    @property
    def num_alive(self) -> int:
        """Of all accounts, paused ones among them."""
        return len(self._boxes)

    @property
    def num_snapshots(self) -> int:
        """Of all accounts."""
        return sum(map(len, self._kept.values()))

    def renew(self, box: Box, seconds: int, *, at_least: bool = False) -> None:
        """Let a lease end so many seconds from now, and not before it would anyway with `at_least`."""
        self._check_lease(box.account, seconds)
        ends = min(self.clock() + seconds, box.dies)
        box.ends = max(box.ends, ends) if at_least else ends

    def ends_at(self, box: Box) -> float:
        """When the lease ends, in seconds since 1970."""
        return time.time() + box.ends - self.clock()

    def _check_lease(self, account: Account, seconds: int) -> None:
        longest = account.quota.max_lifetime_s
        if not 0 <= seconds <= longest:
            raise Refused(
                400, f"a lease of {seconds} s", f"at most {longest} for {account.name!r}", hint="ask for less"
            )

    def _check_open(self) -> None:
        if self.draining:
            headers = {"should-retry": "true", "retry-after": "5"}
            raise Refused(503, "the server is about to end", hint="ask another one", headers=headers)

    # states

    def kept(self, account: Account) -> KeptStates:
        """What the account keeps."""
        return self._kept.setdefault(account.name, KeptStates(partial(Hold, self.runtime, account)))

    async def snapshot(self, box: Box, name: str | None) -> str:
        """Keep a machine's state under an id, which is returned, and a name. The machine goes on."""
        async with self._turn(box):
            state = await self._state_of(box)
        return self.kept(box.account).keep(state, name)

    async def pause(self, box: Box) -> bool:
        """Keep its state and end the machine; whether it was running. Where the state cannot be held, it runs on."""
        async with self._turn(box):
            if box.paused is not None:
                return False
            box.paused = Hold(self.runtime, box.account, await box.machine.snapshot())
            box.leave()
            await box.machine.close()
            box.ends = self.clock() + self.config.paused_s
        await self._tell_ended()
        return True

    async def resume(self, box: Box, timeout: int) -> bool:
        """Let it run, for so long at least; whether it was paused."""
        self._check_lease(box.account, timeout)
        async with self._turn(box):
            if box.paused is None:
                self.renew(box, timeout, at_least=True)
                return False
            self._check_open()
            [machine] = await self.runtime.fork(box.paused.state, 1, deadline_s=self.config.deadline_s)
            box.put(machine)
            now = self.clock()
            box.dies = now + box.account.quota.max_lifetime_s
            box.ends = min(now + timeout, box.dies)
            return True

    @contextlib.asynccontextmanager
    async def _turn(self, box: Box) -> AsyncIterator[None]:
        """Have a machine to oneself that has not ended meanwhile. Raises `Refused`."""
        async with box.turn:
            self.get(box.id)
            yield

    async def _state_of(self, box: Box) -> str:
        return box.paused.state if box.paused is not None else await box.machine.snapshot()

    # ending

    async def kill(self, box: Box) -> None:
        """End a machine. Idempotent."""
        async with box.turn:
            if box.over:
                return
            box.over = True
            try:
                box.leave()
                if box.paused is None:
                    await box.machine.close()
            finally:
                box.let_go()
                self._boxes.pop(box.id, None)
                box.account.give_back()
        await self._tell_ended()

    async def _tell_ended(self) -> None:
        async with self._ended:
            self._ended.notify_all()

    async def expire(self) -> None:
        """End, or pause, what has outlived its lease."""
        now = self.clock()
        late = [box for box in self._boxes.values() if box.ends <= now]
        await asyncio.gather(*(self._expire(box) for box in late), return_exceptions=True)

    async def _expire(self, box: Box) -> None:
        """Pausing it may be refused: then it ends."""
        if box.auto_pause and box.paused is None and box.dies > self.clock():
            with contextlib.suppress(MachineError, ValueError, OSError, Refused):
                await self.pause(box)
                return
        await self.kill(box)

    async def reap(self) -> None:
        """Expire for ever."""
        while True:
            nearest = min((box.ends for box in self._boxes.values()), default=math.inf)
            await asyncio.sleep(min(max(nearest - self.clock(), 0.02), _TICK_S))
            await self.expire()

    async def drain(self, deadline_s: float) -> None:
        """No new machines; wait until none runs any more, or the deadline."""
        self.draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s), self._ended:
                await self._ended.wait_for(lambda: all(box.paused is not None for box in self._boxes.values()))

    async def close(self) -> None:
        """End all, and what is being made once it is there."""
        self.draining = self._closed = True
        for task in (*self._creations.values(), *self._prepared.values()):
            task.cancel()
        await asyncio.gather(*(self.kill(box) for box in list(self._boxes.values())), return_exceptions=True)


def _age(box: Box) -> float:
    return -box.started


async def refusing(work: Awaitable[T], *, deadline_s: float, what: str) -> T:
    """Work on a machine within a deadline; what goes wrong becomes `Refused`."""
    try:
        async with asyncio.timeout(deadline_s):
            return await work
    except MachineError as error:
        raise of_error(error) from None
    except ValueError as error:
        raise Refused(400, what, str(error), hint="see the message") from None
    except TimeoutError:
        raise Refused(504, what, f"not within {deadline_s:g} s", hint="try again later") from None
    except OSError as error:
        raise Refused(507, what, str(error), hint="is its disk full, or one of the server?") from None


# --------------------------------------------------------------------------------- machines' states that accounts keep
# What somebody has named is held in the runtime. What clients of ours keep is not: they keep it again.


PREPARED = "etude-"  # how what clients of ours have prepared is named
MAX_KEPT = 1024  # of one account


class _Kept(NamedTuple):
    state: str  # the runtime's snapshot
    names: tuple[str, ...]
    hold: Hold | None = None


class KeptStates:
    """Of one account. Where there is too much, what clients of ours have kept goes, least recently used first; what
    others have named is theirs to delete.

    >>> kept = KeptStates(lambda state: None)
    >>> first = kept.keep("tree", "mine")
    >>> kept.find("mine") == kept.find(first) == "tree"
    True
    """

    def __init__(self, hold: Callable[[str], Hold | None]) -> None:
        self._hold = hold
        self._kept: OrderedDict[str, _Kept] = OrderedDict()  # by id, least recently used first

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, name: str) -> str | None:
        """The runtime's snapshot by an id, or the newest of a name."""
        for kept_id, kept in reversed(self._kept.items()):
            if name == kept_id or name in kept.names:
                self._kept.move_to_end(kept_id)
                return kept.state
        return None

    def keep(self, state: str, name: str | None) -> str:
        """Its id. Raises `Refused` (429)."""
        if len(self._kept) >= MAX_KEPT:
            passing = next((kept_id for kept_id, kept in self._kept.items() if _is_passing(kept.names)), None)
            if passing is None:
                raise Refused(429, f"{len(self._kept)} snapshots are kept", hint="delete those that are done with")
            del self._kept[passing]
        kept_id = f"snap-{secrets.token_hex(10)}"
        names = (name,) if name else ()
        self._kept[kept_id] = _Kept(state, names, None if _is_passing(names) else self._hold(state))
        return kept_id

    def adopt(self, state: str) -> str:
        """The id of a state that came from elsewhere: the same one as long as it is kept."""
        wanted = _Kept(state, ())
        known = next((kept_id for kept_id, kept in self._kept.items() if kept == wanted), None)
        return known or self.keep(state, None)

    def names(self) -> dict[str, tuple[str, ...]]:
        """Names of all by their ids."""
        return {kept_id: kept.names for kept_id, kept in self._kept.items()}

    def forget(self, name: str) -> bool:
        """Whether there was one of this id or name; there is none now."""
        gone = [kept_id for kept_id, kept in self._kept.items() if name == kept_id or name in kept.names]
        for kept_id in gone:
            hold = self._kept.pop(kept_id).hold
            if hold is not None:
                hold.release()
        return bool(gone)


def _is_passing(names: tuple[str, ...]) -> bool:
    """Nobody misses it."""
    return all(name.startswith(PREPARED) for name in names)
