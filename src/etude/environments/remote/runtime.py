"""A `Runtime` with the machines of a remote service: E2B, AgentENV, CubeSandbox, or `etude machines serve`.

The runtime asks the service once what it can do. etude's own server supports the full `Machine` protocol; the weaker
guarantees of other services are listed in `info.notes`. Each machine has a lease at the service, which the runtime
renews. If the process of the runtime is killed, the machines end with their leases.
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
from etude.environments.remote.config import ClientConfig
from etude.environments.remote.http_client import HttpClient, Reply
from etude.environments.remote.machine import RemoteMachine, name_of
from etude.environments.remote.machine_client import MachineClient
from etude.errors import InputError, MachineError
from etude.records.command import check_count
from etude.records.image import Image
from etude.seams import Machine, RuntimeInfo

_PORT = 49983  # of E2B's daemon
_SEAL_BYTES = 1024  # upper bound of the seal before a state
_MAX_PREPARED = 16_384
_UPLOAD_BYTES = 256 << 20  # of all files that are uploaded to each machine again
_EXTERNAL_NOTES = (
    "at a deadline only the first process of a command is certain to be killed",
    "frozen by killing the processes of the machine's user; others can continue",
    "links are checked before a file is read, not during the read",
    "the result of a command that ends while its connection is broken is lost, which raises an error",
)


class RemoteRuntime:
    """A `Runtime` whose machines are sandboxes of the service at `url`.

    `key` is an API key of the service. `sandbox_url` is the URL of its sandboxes, with `{id}` for the sandbox if each
    has its own host, such as "https://49983-{id}.e2b.app". By default it is what the service returns, or else `url`.
    Methods raise `MachineError` if the service refuses a request or cannot be reached."""

    def __init__(self, url: str, *, key: str, config: ClientConfig | None = None, sandbox_url: str = "") -> None:
        self.url, self._sandbox_url = url.rstrip("/"), sandbox_url.rstrip("/")
        self._config = config or ClientConfig()
        self._headers = {"x-api-key": key, "content-type": "application/json"}
        self._client = HttpClient(tries=self._config.tries)
        self._slots = asyncio.Semaphore(self._config.parallel)
        self._properties: m.About | None = None
        self._probing: asyncio.Task[m.About | None] | None = None
        self._prepared: dict[
            str, asyncio.Task[str]
        ] = {}  # by digest of the content: the name at the service; oldest first
        self._uploads: dict[str, Mapping[str, bytes]] = {}  # for services without snapshots
        self._alive: dict[str, RemoteMachine] = {}
        self._renewing: asyncio.Task[None] | None = None
        self._aborting: set[asyncio.Task[None]] = set()

    @property
    def info(self) -> RuntimeInfo:
        """Properties of the service's machines; complete only after the first call to the service."""
        if self._probing is None or not self._probing.done():
            return RuntimeInfo(name="remote", isolation="not known yet", users=("",), images=True)
        if self._properties is None:
            users = self._config.users
            return RuntimeInfo(
                name="remote", isolation="the service's", users=users, images=True, notes=_EXTERNAL_NOTES
            )
        properties = self._properties
        return RuntimeInfo(
            name="remote",
            isolation=properties.isolation,
            users=tuple(properties.users),
            images=properties.images,
            forks_memory=properties.forks_memory,
            whole_snapshots=properties.whole_snapshots,
            notes=(f"machines of a server's {properties.backend} runtime", *properties.notes),
        )

    @classmethod
    def of_environment(cls, environment: Mapping[str, str], config: ClientConfig | None = None) -> RemoteRuntime:
        """Create a runtime from the environment variables that E2B's clients use.

        They are `E2B_API_KEY`, and either `E2B_DOMAIN` or `E2B_API_URL` and, if needed, `E2B_SANDBOX_URL`.
        `environment` is usually `os.environ`. Raises `MachineError` if the key or the URL is missing."""
        key, domain = environment.get("E2B_API_KEY", ""), environment.get("E2B_DOMAIN", "")
        url = environment.get("E2B_API_URL") or (f"https://api.{domain}" if domain else "")
        if not key or not url:
            hint = "set E2B_API_KEY, and E2B_API_URL (etude machines serve prints both) or E2B_DOMAIN"
            raise MachineError("the service of the remote machines is not configured", hint=hint)
        by_host = f"https://{_PORT}-{{id}}.{domain}" if domain else ""
        return cls(url, key=key, config=config, sandbox_url=environment.get("E2B_SANDBOX_URL") or by_host)

    async def prepare(self, files: Mapping[str, bytes], *, image: Image | None = None) -> str:
        """Store files at the service as a snapshot, and return the id to `fork`.

        If the service has no snapshots, each fork uploads the files again. `image` names the service's template by its
        digest; None stands for `ClientConfig.template`. Raises `ValueError` for invalid or conflicting paths."""
        normalized = {name_of(path): bytes(data) for path, data in files.items()}
        folders = {str(parent) for path in normalized for parent in PurePosixPath(path).parents}
        if len(normalized) < len(files) or folders & normalized.keys():
            raise ValueError("two files have the same path, or one is a folder of another")
        template = image.digest if image is not None else self._config.template
        digest = hashlib.sha256(msgspec.msgpack.encode([template, sorted(normalized.items())])).hexdigest()
        if digest not in self._prepared:
            self._prepared[digest] = asyncio.create_task(self._prepare(digest, template, normalized))
        try:
            await asyncio.shield(self._prepared[digest])
        except (MachineError, ValueError, OSError):
            self._prepared.pop(digest, None)
            raise
        self._forget_oldest()
        return digest

    def _forget_oldest(self) -> None:
        num_bytes = sum(len(data) for files in self._uploads.values() for data in files.values())
        while len(self._prepared) > 1 and (len(self._prepared) > _MAX_PREPARED or num_bytes > _UPLOAD_BYTES):
            digest = next(iter(self._prepared))
            del self._prepared[digest]
            num_bytes -= sum(map(len, self._uploads.pop(digest, {}).values()))

    async def _forget(self, template: str) -> None:
        """Forget a prepared template that the service may have dropped; the next `prepare` uploads it again."""
        done = [(digest, task) for digest, task in self._prepared.items() if task.done() and not task.cancelled()]
        of_it = [digest for digest, task in done if task.exception() is None and task.result() == template]
        for digest in of_it:
            self._prepared.pop(digest, None)
            self._uploads.pop(digest, None)
        if of_it:
            path = f"/templates/{quote(template, safe='')}"
            with contextlib.suppress(MachineError):
                await self._call("DELETE", path, what="the deletion of a snapshot")

    async def _prepare(self, digest: str, template: str, files: Mapping[str, bytes]) -> str:
        await self._load_properties()
        if not files:
            return template
        name = f"etude-{digest[:40]}"
        known = await self._call("GET", f"/snapshots?name={name}", what="a search for a snapshot")
        if known.status == 200:
            for found in known.read(list[m.SnapshotInfo]):
                if name in found.names or any(n.endswith(f"/{name}") for n in found.names):
                    return found.snapshot_id
        machine = await self._create(template, self._config.call_s)
        try:
            await machine.write_all(files)
            snapshot_id = await machine.take_snapshot(name)
        finally:
            await machine.close()
        if snapshot_id is None:
            self._uploads[digest] = files
            return template
        return snapshot_id

    async def fork(self, snapshot: str, n: int, *, deadline_s: float = 30.0) -> list[Machine]:
        """Create `n` machines from a snapshot, or none if one of them fails.

        Sends `n` requests, at most `ClientConfig.parallel` at a time. Raises `MachineError` after `deadline_s` seconds.
        """
        check_count(n)
        await self._load_properties()
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
            self._abort(making, stop)
            raise
        aborting = self._abort(making, stop)
        errors = [error for task in making if task.done() and (error := task.exception()) is not None]
        if errors:
            await asyncio.shield(aborting)
            raise errors[0]
        facts = f"waited {deadline_s:g} s for {self.url}; {len(self._alive)} machines are alive"
        raise MachineError(f"{n} machines could not be forked", facts, hint="close machines, or wait longer")

    async def pack(self, snapshot: str, *, max_bytes: int) -> bytes:
        """Export a snapshot as bytes, for `unpack` on another server with the same API keys.

        Raises `ValueError` if it has more than `max_bytes`, and `MachineError` if the service is not etude's or its
        runtime cannot export snapshots."""
        name = await self._prepared[snapshot] if snapshot in self._prepared else snapshot
        path = f"/etude/snapshots/{quote(name, safe='')}?max_bytes={max_bytes}"
        reply = await self._state("GET", path, None, max_bytes=max_bytes + _SEAL_BYTES)
        if reply.status == 413:
            raise ValueError(reply.message)
        if reply.status != 200:
            raise self._refusal("the state of a machine", reply)
        return reply.body

    async def unpack(self, packed: bytes) -> str:
        """Import a snapshot exported by `pack`, and return the id to `fork`.

        Raises `ValueError` if it is damaged or too large, `MachineError` if the server has other API keys."""
        reply = await self._state("POST", "/etude/snapshots", packed)
        if reply.status in (400, 413):
            raise ValueError(reply.message)
        if reply.status != 201:
            raise self._refusal("the import of a state", reply)
        return reply.read(m.SnapshotInfo).snapshot_id

    async def _state(self, method: str, path: str, body: bytes | None, *, max_bytes: int = 1 << 20) -> Reply:
        await self._load_properties()
        if self._properties is None:
            hint = "use etude machines serve, or a local backend"
            raise MachineError(f"{self.url} cannot export states of machines", "it is not an etude server", hint=hint)
        return await self._client.request(
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
        async with self._slots:
            if stop.is_set():
                raise MachineError(
                    "the machine is not needed any more", hint="see the error of the other machines of this fork"
                )
            machine = await self._create(template, deadline_s)
            try:
                if files is not None:
                    await machine.write_all(files)
            except BaseException:
                await machine.close()
                raise
            return machine

    def _abort(self, making: list[asyncio.Task[RemoteMachine]], stop: asyncio.Event) -> asyncio.Task[None]:
        """End the machines of a failed fork, also those still being created: cancelling a creation would leave a
        machine."""

        async def abort() -> None:
            stop.set()
            created = await asyncio.gather(*making, return_exceptions=True)
            ending = (one.close() for one in created if isinstance(one, RemoteMachine))
            await asyncio.gather(*ending, return_exceptions=True)

        aborting = asyncio.create_task(abort())
        self._aborting.add(aborting)
        aborting.add_done_callback(self._aborting.discard)
        return aborting

    async def _create(self, template: str, deadline_s: float) -> RemoteMachine:
        spec = m.NewSandbox(template_id=template, timeout=self._config.lease_s)
        key = {"idempotency-key": uuid.uuid4().hex}
        what = f"a machine from {template[:80]!r}"
        reply = await self._call("POST", "/v2/sandboxes", spec, what=what, headers=key, deadline_s=deadline_s)
        if reply.status in (404, 405) and self._properties is None:  # older services lack /v2
            reply = await self._call("POST", "/sandboxes", spec, what=what, headers=key, deadline_s=deadline_s)
        if reply.status in (404, 503):
            await self._forget(template)
        if reply.status not in (200, 201):
            raise self._refusal(what, reply)
        created = reply.read(m.Sandbox)
        machine = RemoteMachine(
            MachineClient(
                self._client, self._url_of(created), created, self._config, is_etude=self._properties is not None
            ),
            self,
        )
        self._alive[machine.id] = machine
        if self._renewing is None:
            self._renewing = asyncio.create_task(self._renew())
        return machine

    def _url_of(self, created: m.Sandbox) -> str:
        if self._sandbox_url:
            return self._sandbox_url.replace("{id}", created.sandbox_id)
        return f"https://{_PORT}-{created.sandbox_id}.{created.domain}" if created.domain else self.url

    async def _renew(self) -> None:
        """Renew the leases of all machines, every third of a lease."""
        while True:
            await asyncio.sleep(self._config.lease_s / 3)
            await asyncio.gather(*(self._renew_one(machine_id) for machine_id in list(self._alive)))

    async def _renew_one(self, machine_id: str) -> None:
        lease, path = m.Lease(timeout=self._config.lease_s), f"/sandboxes/{quote(machine_id)}/timeout"
        async with self._slots:
            with contextlib.suppress(MachineError):  # the next call to the machine reports the error
                deadline_s = self._config.lease_s / 3
                reply = await self._call("POST", path, lease, what="renewing a lease", deadline_s=deadline_s)
                if reply.status == 404:
                    self._alive.pop(machine_id, None)  # it has ended at the service

    # called by machines

    async def take_snapshot(self, machine_id: str, name: str | None) -> str | None:
        """Take a snapshot of a machine at the service, with an optional name.

        Returns the snapshot's id, or None if the service has no snapshots."""
        path = f"/sandboxes/{quote(machine_id)}/snapshots"
        reply = await self._call("POST", path, m.Pause(name=name), what="a snapshot", idempotent=False)
        if reply.status in (200, 201):
            return reply.read(m.SnapshotInfo).snapshot_id
        if reply.status in (405, 501) or (reply.status == 404 and self._properties is None):
            return None
        raise self._of_the_machine(reply) or self._refusal("a snapshot", reply)

    async def freeze(self, machine_id: str) -> None:
        """Stop all processes of a machine of etude's server for good."""
        path = f"/etude/sandboxes/{quote(machine_id)}/freeze"
        reply = await self._call("POST", path, what="the freezing of a machine")
        if reply.status >= 300:
            raise self._of_the_machine(reply) or self._refusal("the freezing of a machine", reply)

    def _of_the_machine(self, reply: Reply) -> Exception | None:
        """The error that the machine's own runtime raised (state too large, disk full), if the server is etude's."""
        kinds = {400: ValueError, 507: OSError} if self._properties is not None else {}
        return kinds[reply.status](reply.message) if reply.status in kinds else None

    async def end(self, machine_id: str) -> None:
        """End a machine at the service. Does nothing if it has ended."""
        if self._alive.pop(machine_id, None) is None:
            return
        reply = await self._call("DELETE", f"/sandboxes/{quote(machine_id)}", what="the end of a machine")
        if reply.status >= 300 and reply.status != 404:
            raise self._refusal("the end of a machine", reply)

    async def close(self) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
        for task in (*self._prepared.values(), *([self._probing] if self._probing else [])):
            task.cancel()
        try:
            await asyncio.gather(*self._aborting, return_exceptions=True)
            await asyncio.gather(*(machine.close() for machine in list(self._alive.values())), return_exceptions=True)
        finally:
            await self._client.close()

    # inside

    async def _load_properties(self) -> None:
        if self._probing is None or (self._probing.done() and self._probing.exception() is not None):
            self._probing = asyncio.create_task(self._probe())
        self._properties = await asyncio.shield(self._probing)

    async def _probe(self) -> m.About | None:
        reply = await self._call("GET", "/etude/about", what="the properties of its machines")
        if reply.status in (401, 403):
            raise self._refusal("the properties of its machines", reply)
        return reply.read(m.About) if reply.status == 200 else None

    async def _call(
        self,
        method: str,
        path: str,
        message: object = None,
        *,
        what: str,
        idempotent: bool = True,
        headers: Mapping[str, str] | None = None,
        deadline_s: float = 0.0,
    ) -> Reply:
        body = None if message is None else msgspec.json.encode(message)
        return await self._client.request(
            method,
            self.url + path,
            what=what,
            deadline_s=deadline_s or self._config.call_s,
            headers={**self._headers, **(headers or {})},
            body=body,
            idempotent=idempotent,
        )

    def _refusal(self, what: str, reply: Reply) -> MachineError:
        hints = {401: "use a valid key of the service", 404: "prepare it, or use a template of the service"}
        hints |= {429: "close machines, or increase the quota", 403: "use a key with this permission"}
        hint = hints.get(reply.status, "see the log of the service")
        return MachineError(f"{self.url} refused {what}", f"HTTP {reply.status}: {reply.message}", hint=hint)


def open_remote(limits: MachineLimits | None = None) -> RemoteRuntime:
    """Create a `RemoteRuntime` from E2B's environment variables, as `RemoteRuntime.of_environment` does.

    Raises `InputError` if `limits` are given, since the service sets the limits of machines."""
    if limits is not None:
        raise InputError("a remote service sets the limits of machines", hint="set them at the server")
    return RemoteRuntime.of_environment(os.environ)
