"""Client of one sandbox: RPC calls, event streams, file transfers."""

from __future__ import annotations

import base64
import contextlib
import secrets
from collections.abc import AsyncIterator, Mapping
from typing import TypeVar
from urllib.parse import quote

import msgspec

from etude.environments.remote import connect
from etude.environments.remote import messages as m
from etude.environments.remote.config import ClientConfig
from etude.environments.remote.http_client import HttpClient, Reply

T = TypeVar("T")
_PORT = "49983"


class MachineClient:
    """The connection to one sandbox of a service.

    `url` is where the sandbox is reached, `created` the service's response to its creation. `is_etude` says whether the
    service is etude's server. Raises `RpcError` for errors of the sandbox, `MachineError` if it cannot be reached."""

    def __init__(
        self, client: HttpClient, url: str, created: m.Sandbox, config: ClientConfig, *, is_etude: bool
    ) -> None:
        self._client, self.url, self.id = client, url.rstrip("/"), created.sandbox_id
        self.config, self.is_etude = config, is_etude
        self._headers = {"e2b-sandbox-id": created.sandbox_id, "e2b-sandbox-port": _PORT}
        if created.envd_access_token:
            self._headers["x-access-token"] = created.envd_access_token

    async def unary(self, method: str, message: object, kind: type[T], *, user: str = "", idempotent: bool = True) -> T:
        """Call an RPC that has one response, and return it as an object of type `kind`.

        `method` is the RPC's path, such as "process.Process/List". `user` is the machine user that it acts as; "" is
        the default. `idempotent` allows a retry if the connection breaks."""
        reply = await self._client.request(
            "POST",
            f"{self.url}/{method}",
            what=f"{method} of {self.id}",
            deadline_s=self.config.call_s,
            headers={**self._as(user), "content-type": connect.JSON, "connect-protocol-version": "1"},
            body=msgspec.json.encode(message),
            idempotent=idempotent,
        )
        if reply.status != 200:
            raise connect.error_of_response(reply.status, reply.body)
        return connect.decode(kind, reply.body)

    @contextlib.asynccontextmanager
    async def stream(
        self, method: str, message: object, *, user: str, deadline_s: float, timeout_ms: int | None
    ) -> AsyncIterator[AsyncIterator[m.ProcessEvent]]:
        """Start or join a command, and yield an iterator over its events.

        `method` is the path of the RPC and `message` its request. `deadline_s` limits the whole stream on this side,
        `timeout_ms` on the service's side (None: no limit). The connection is closed at the end of the `with` block."""
        headers = {**self._as(user), "keepalive-ping-interval": "20"}
        if timeout_ms is not None:
            headers[connect.TIMEOUT] = str(timeout_ms)
        url = f"{self.url}/{method}"
        async with self._client.stream(url, message, m.ProcessEvent, deadline_s=deadline_s, headers=headers) as events:
            yield events

    async def download(self, path: str, *, headers: Mapping[str, str], max_bytes: int) -> Reply:
        """Request a file; the caller checks the status. Raises `ValueError` if it exceeds `max_bytes`."""
        return await self._client.request(
            "GET",
            f"{self.url}/files?path={quote(path, safe='')}",
            what=f"reading {path} of {self.id}",
            deadline_s=self.config.call_s,
            headers={**self._headers, **headers},
            max_bytes=max_bytes,
        )

    async def upload(self, files: Mapping[str, bytes], *, headers: Mapping[str, str]) -> Reply:
        """Send files, given by path, as one multipart form, and return the response. `files` must not be empty."""
        border = f"etude-{secrets.token_hex(16)}"
        parts = [
            b'--%b\r\ncontent-disposition: form-data; name="file"; filename="%b"\r\n'
            b"content-type: application/octet-stream\r\n\r\n%b\r\n" % (border.encode(), _escaped(name), data)
            for name, data in files.items()
        ]
        first = next(iter(files))
        query = f"?path={quote(first, safe='')}" if len(files) == 1 else ""
        return await self._client.request(
            "POST",
            f"{self.url}/files{query}",
            what=f"writing {first} to {self.id}",
            deadline_s=self.config.call_s,
            headers={**self._headers, **headers, "content-type": f"multipart/form-data; boundary={border}"},
            body=b"".join([*parts, f"--{border}--\r\n".encode()]),
        )

    def _as(self, user: str) -> dict[str, str]:
        if not user:
            return self._headers
        return {**self._headers, "authorization": "Basic " + base64.b64encode(f"{user}:".encode()).decode()}


def _escaped(name: str) -> bytes:
    return name.replace("\\", "\\\\").replace('"', "%22").replace("\r", "%0D").replace("\n", "%0A").encode()
