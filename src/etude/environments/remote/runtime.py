"""`Runtime` whose machines are a service's: E2B, AgentENV, CubeSandbox, or etude's own `machines serve`.

What a service can do is asked once. etude's own keeps the whole seam; with another's, what is weaker is said in
`info.notes`. A machine's lease is renewed as long as its runtime lives: whoever is killed leaves nothing for longer.
Knows nothing of tasks and rewards.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import uuid
from collections.abc import Mapping
from pathlib import PurePosixPath
from urllib.parse import quote

import msgspec

from etude.environments.config import MachineLimits
from etude.environments.remote import messages as m
from etude.environments.remote.calls import Answer, Calls
from etude.environments.remote.config import ClientConfig
from etude.environments.remote.machine import RemoteMachine, name_of
from etude.environments.remote.service import Service
from etude.errors import InputError, MachineError
from etude.records.command import check_count
from etude.records.image import Image
from etude.seams import Machine, RuntimeInfo

_PORT = 49983  # of E2B's daemon
_SEAL_BYTES = 1024  # more than a server puts before a state
_MAX_PREPARED = 16_384
_UPLOAD_BYTES = 256 << 20  # of all files that are sent again to each machine
_FOREIGN = (
    "at a deadline only a command's first process is known to be killed",
    "frozen by killing the processes of the machine's user; others may go on",
    "links are looked for before a file is read, not while",
    "the result of a command that ends while its connection is broken is lost, and said to be",
)


class RemoteRuntime:
    """Forks machines of the service at `url`, with an API `key` of it.

    `sandbox_url` is where machines answer, with `{id}` in it if each has its own host, e.g. "https://49983-{id}.e2b.app";
    "": where the service says, or at `url`. Raises `MachineError`.
    """

    def __init__(self, url: str, *, key: str, config: ClientConfig | None = None, sandbox_url: str = "") -> None:
        self.url, self._sandbox_url = url.rstrip("/"), sandbox_url.rstrip("/")
        self._config = config or ClientConfig()
        self._headers = {"x-api-key": key, "content-type": "application/json"}
        self._calls = Calls(tries=self._config.tries)
        self._room = asyncio.Semaphore(self._config.parallel)
        self._about: m.About | None = None
        self._asking: asyncio.Task[m.About | None] | None = None
        self._prepared: dict[str, asyncio.Task[str]] = {}  # by content: the service's name; oldest first
        self._uploads: dict[str, Mapping[str, bytes]] = {}  # where the service keeps no snapshots
        self._alive: dict[str, RemoteMachine] = {}
        self._renewing: asyncio.Task[None] | None = None
        self._undoing: set[asyncio.Task[None]] = set()

    @property
    def info(self) -> RuntimeInfo:
        """What its machines are; less is known before the first call than after."""
        if self._asking is None or not self._asking.done():
            return RuntimeInfo(name="remote", isolation="not asked yet", users=("",), images=True)
        if self._about is None:
            users = self._config.users
            return RuntimeInfo(name="remote", isolation="the service's", users=users, images=True, notes=_FOREIGN)
        about = self._about
        return RuntimeInfo(
            name="remote",
            isolation=about.isolation,
            users=tuple(about.users),
            images=about.images,
            forks_memory=about.forks_memory,
            whole_snapshots=about.whole_snapshots,
            notes=(f"machines of a server's {about.backend} runtime", *about.notes),
        )

    @classmethod
    def of_environment(cls, environment: Mapping[str, str], config: ClientConfig | None = None) -> RemoteRuntime:
        """The service that E2B's own clients would speak to with these variables: `E2B_API_KEY`, and `E2B_API_URL` and
        `E2B_SANDBOX_URL`, or `E2B_DOMAIN`."""
        key, domain = environment.get("E2B_API_KEY", ""), environment.get("E2B_DOMAIN", "")
        url = environment.get("E2B_API_URL") or (f"https://api.{domain}" if domain else "")
        if not key or not url:
            hint = "set E2B_API_KEY, and E2B_API_URL (etude machines serve says both) or E2B_DOMAIN"
            raise MachineError("the service of the remote machines is not configured", hint=hint)
        by_host = f"https://{_PORT}-{{id}}.{domain}" if domain else ""
        return cls(url, key=key, config=config, sandbox_url=environment.get("E2B_SANDBOX_URL") or by_host)

    async def prepare(self, files: Mapping[str, bytes], *, image: Image | None = None) -> str:
        """See `Runtime.prepare`. An image is the template of its digest. Uploaded once, and kept by the service."""
        plain = {name_of(path): bytes(data) for path, data in files.items()}
        folders = {str(parent) for path in plain for parent in PurePosixPath(path).parents}
        if len(plain) < len(files) or folders & plain.keys():
            raise ValueError("two files have the same path, or one is a folder of another")
        template = image.digest if image is not None else self._config.template
        digest = hashlib.sha256(msgspec.msgpack.encode([template, sorted(plain.items())])).hexdigest()
        if digest not in self._prepared:
            self._prepared[digest] = asyncio.create_task(self._prepare(digest, template, plain))
        try:
            await asyncio.shield(self._prepared[digest])
        except (MachineError, ValueError, OSError):
            self._prepared.pop(digest, None)
            raise
        self._forget_oldest()
        return digest

    def _forget_oldest(self) -> None:
        held = sum(len(data) for files in self._uploads.values() for data in files.values())
        while len(self._prepared) > 1 and (len(self._prepared) > _MAX_PREPARED or held > _UPLOAD_BYTES):
            digest = next(iter(self._prepared))
            del self._prepared[digest]
            held -= sum(map(len, self._uploads.pop(digest, {}).values()))

    async def _forget(self, template: str) -> None:
        """The service may have had to let go of what was prepared there: the next `prepare` sends it again."""
        done = [(digest, task) for digest, task in self._prepared.items() if task.done() and not task.cancelled()]
        of_it = [digest for digest, task in done if task.exception() is None and task.result() == template]
        for digest in of_it:
            self._prepared.pop(digest, None)
            self._uploads.pop(digest, None)
        if of_it:
            path = f"/templates/{quote(template, safe='')}"
            with contextlib.suppress(MachineError):
                await self._call("DELETE", path, what="forgetting a snapshot")

    async def _prepare(self, digest: str, template: str, files: Mapping[str, bytes]) -> str:
        await self._ask_about()
        if not files:
            return template
        name = f"etude-{digest[:40]}"
        known = await self._call("GET", f"/snapshots?name={name}", what="looking for a snapshot")
        if known.status == 200:
            for found in known.read(list[m.SnapshotInfo]):
                if name in found.names or any(n.endswith(f"/{name}") for n in found.names):
                    return found.snapshot_id
        machine = await self._create(template, self._config.call_s)
        try:
            await machine.write_all(files)
            kept = await machine.keep(name)
        finally:
            await machine.close()
        if kept is None:
            self._uploads[digest] = files
            return template
        return kept

    async def fork(self, snapshot: str, n: int, *, deadline_s: float = 30.0) -> list[Machine]:
        """See `Runtime.fork`: n calls, so many at a time as `ClientConfig.parallel`."""
        check_count(n)
        await self._ask_about()
        template, files = snapshot, None
        if snapshot in self._prepared:
            template = await self._prepared[snapshot]
            files = self._uploads.get(snapshot)
        stop = asyncio.Event()
        making = [asyncio.create_task(self._make(template, files, deadline_s, stop)) for _ in range(n)]
        try:
            await asyncio.wait(making, timeout=deadline_s, return_when=asyncio.FIRST_EXCEPTION)
            if all(task.done() and task.exception() is None for task in making):
                return [task.result() for task in making]
        except BaseException:
            self._undo(making, stop)
            raise
        undoing = self._undo(making, stop)
        errors = [error for task in making if task.done() and (error := task.exception()) is not None]
        if errors:
            await asyncio.shield(undoing)
            raise errors[0]
        facts = f"waited {deadline_s:g} s for {self.url} to make them; {len(self._alive)} are alive"
        raise MachineError(f"{n} machines could not be forked", facts, hint="close machines, or wait longer")

    async def pack(self, snapshot: str, *, max_bytes: int) -> bytes:
        """See `Portable.pack`. `MachineError` where the service is not etude's, or its runtime is not `Portable`."""
        name = await self._prepared[snapshot] if snapshot in self._prepared else snapshot
        path = f"/etude/snapshots/{quote(name, safe='')}?max_bytes={max_bytes}"
        answer = await self._state("GET", path, None, max_bytes=max_bytes + _SEAL_BYTES)
        if answer.status == 413:
            raise ValueError(answer.message)
        if answer.status != 200:
            raise self._refusal("the state of a machine", answer)
        return answer.body

    async def unpack(self, packed: bytes) -> str:
        """See `Portable.unpack`. `MachineError` for what a service with other keys has packed."""
        answer = await self._state("POST", "/etude/snapshots", packed)
        if answer.status in (400, 413):
            raise ValueError(answer.message)
        if answer.status != 201:
            raise self._refusal("to take a state over", answer)
        return answer.read(m.SnapshotInfo).snapshot_id

    async def _state(self, method: str, path: str, body: bytes | None, *, max_bytes: int = 1 << 20) -> Answer:
        await self._ask_about()
        if self._about is None:
            hint = "use etude machines serve, or a backend here"
            raise MachineError(f"{self.url} gives no states of machines away", "it is not etude's", hint=hint)
        return await self._calls.ask(
            method,
            self.url + path,
            what="the state of a machine",
            deadline_s=self._config.call_s,
            headers={**self._headers, "content-type": "application/octet-stream"},
            body=body,
            max_bytes=max_bytes,
        )

    async def _make(
        self, template: str, files: Mapping[str, bytes] | None, deadline_s: float, stop: asyncio.Event
    ) -> RemoteMachine:
        async with self._room:
            if stop.is_set():
                raise MachineError("it is not needed any more", hint="see why its siblings could not be made")
            machine = await self._create(template, deadline_s)
            try:
                if files is not None:
                    await machine.write_all(files)
            except BaseException:
                await machine.close()
                raise
            return machine

    def _undo(self, making: list[asyncio.Task[RemoteMachine]], stop: asyncio.Event) -> asyncio.Task[None]:
        """End what was made, and what is being made once it is there: who is cut off in the middle leaves a machine."""

        async def undo() -> None:
            stop.set()
            made = await asyncio.gather(*making, return_exceptions=True)
            ending = (one.close() for one in made if isinstance(one, RemoteMachine))
            await asyncio.gather(*ending, return_exceptions=True)

        undoing = asyncio.create_task(undo())
        self._undoing.add(undoing)
        undoing.add_done_callback(self._undoing.discard)
        return undoing

    async def _create(self, template: str, deadline_s: float) -> RemoteMachine:
        asked = m.NewSandbox(template_id=template, timeout=self._config.lease_s)
        key = {"idempotency-key": uuid.uuid4().hex}
        what = f"a machine from {template[:80]!r}"
        answer = await self._call("POST", "/v2/sandboxes", asked, what=what, headers=key, deadline_s=deadline_s)
        if answer.status in (404, 405) and self._about is None:  # older services
            answer = await self._call("POST", "/sandboxes", asked, what=what, headers=key, deadline_s=deadline_s)
        if answer.status in (404, 503):
            await self._forget(template)
        if answer.status not in (200, 201):
            raise self._refusal(what, answer)
        made = answer.read(m.Sandbox)
        machine = RemoteMachine(
            Service(self._calls, self._url_of(made), made, self._config, is_etude=self._about is not None), self
        )
        self._alive[machine.id] = machine
        if self._renewing is None:
            self._renewing = asyncio.create_task(self._renew())
        return machine

    def _url_of(self, made: m.Sandbox) -> str:
        if self._sandbox_url:
            return self._sandbox_url.replace("{id}", made.sandbox_id)
        return f"https://{_PORT}-{made.sandbox_id}.{made.domain}" if made.domain else self.url

    async def _renew(self) -> None:
        """Keep the leases of all machines, one third of one at a time."""
        while True:
            await asyncio.sleep(self._config.lease_s / 3)
            await asyncio.gather(*(self._renew_one(machine_id) for machine_id in list(self._alive)))

    async def _renew_one(self, machine_id: str) -> None:
        lease, path = m.Lease(timeout=self._config.lease_s), f"/sandboxes/{quote(machine_id)}/timeout"
        async with self._room:
            with contextlib.suppress(MachineError):  # the next call to the machine says what is wrong
                deadline_s = self._config.lease_s / 3
                answer = await self._call("POST", path, lease, what="renewing a lease", deadline_s=deadline_s)
                if answer.status == 404:
                    self._alive.pop(machine_id, None)  # it has ended there

    # what machines ask of their runtime

    async def keep(self, machine_id: str, name: str | None) -> str | None:
        """A machine's state as the service's snapshot; None where it has no snapshots."""
        path = f"/sandboxes/{quote(machine_id)}/snapshots"
        answer = await self._call("POST", path, m.Pause(name=name), what="a snapshot", again=False)
        if answer.status in (200, 201):
            return answer.read(m.SnapshotInfo).snapshot_id
        if answer.status in (405, 501) or (answer.status == 404 and self._about is None):
            return None
        raise self._of_the_machine(answer) or self._refusal("a snapshot", answer)

    async def freeze(self, machine_id: str) -> None:
        """Of a machine of etude's own server."""
        path = f"/etude/sandboxes/{quote(machine_id)}/freeze"
        answer = await self._call("POST", path, what="to freeze")
        if answer.status >= 300:
            raise self._of_the_machine(answer) or self._refusal("a frozen machine", answer)

    def _of_the_machine(self, answer: Answer) -> Exception | None:
        """What etude's server says of a machine's own state, as its runtime would: too large, or nothing is left."""
        kinds = {400: ValueError, 507: OSError} if self._about is not None else {}
        return kinds[answer.status](answer.message) if answer.status in kinds else None

    async def end(self, machine_id: str) -> None:
        """Kill a machine. One that is gone is gone."""
        if self._alive.pop(machine_id, None) is None:
            return
        answer = await self._call("DELETE", f"/sandboxes/{quote(machine_id)}", what="the end of a machine")
        if answer.status >= 300 and answer.status != 404:
            raise self._refusal("the end of a machine", answer)

    async def close(self) -> None:
        """See `Runtime.close`."""
        if self._renewing is not None:
            self._renewing.cancel()
        for task in (*self._prepared.values(), *([self._asking] if self._asking else [])):
            task.cancel()
        try:
            await asyncio.gather(*self._undoing, return_exceptions=True)
            await asyncio.gather(*(machine.close() for machine in list(self._alive.values())), return_exceptions=True)
        finally:
            await self._calls.close()

    # inside

    async def _ask_about(self) -> None:
        if self._asking is None or (self._asking.done() and self._asking.exception() is not None):
            self._asking = asyncio.create_task(self._probe())
        self._about = await asyncio.shield(self._asking)

    async def _probe(self) -> m.About | None:
        answer = await self._call("GET", "/etude/about", what="what its machines are")
        if answer.status in (401, 403):
            raise self._refusal("what its machines are", answer)
        return answer.read(m.About) if answer.status == 200 else None

    async def _call(
        self,
        method: str,
        path: str,
        message: object = None,
        *,
        what: str,
        again: bool = True,
        headers: Mapping[str, str] | None = None,
        deadline_s: float = 0.0,
    ) -> Answer:
        body = None if message is None else msgspec.json.encode(message)
        return await self._calls.ask(
            method,
            self.url + path,
            what=what,
            deadline_s=deadline_s or self._config.call_s,
            headers={**self._headers, **(headers or {})},
            body=body,
            again=again,
        )

    def _refusal(self, what: str, answer: Answer) -> MachineError:
        hints = {401: "give a key that it knows", 404: "is it prepared, or a template of the service?"}
        hints |= {429: "close machines, or ask for a larger quota", 403: "give a key that may do this"}
        hint = hints.get(answer.status, "see the service's log")
        return MachineError(f"{self.url} refused {what}", f"HTTP {answer.status}: {answer.message}", hint=hint)


def open_remote(limits: MachineLimits | None = None) -> RemoteRuntime:
    """The service that E2B's variables name. Limits are its own: none can be asked of it."""
    if limits is not None:
        raise InputError("a service's machines have its own limits", hint="set them where the service is served")
    return RemoteRuntime.of_environment(os.environ)
