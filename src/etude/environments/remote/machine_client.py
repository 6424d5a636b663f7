"""Client of one sandbox: RPC calls, streams of events, files. Raises `RpcError` and `MachineError`."""

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
    """The connection to one sandbox: its URL, its headers, its settings."""

    def __init__(
        self, client: HttpClient, url: str, created: m.Sandbox, config: ClientConfig, *, is_etude: bool
    ) -> None:
        self._client, self.url, self.id, self.config, self.is_etude = (
            client,
            url.rstrip("/"),
            created.sandbox_id,
            config,
            is_etude,
        )
        self._headers = {"e2b-sandbox-id": created.sandbox_id, "e2b-sandbox-port": _PORT}
        if created.envd_access_token:
            self._headers["x-access-token"] = created.envd_access_token

    async def unary(self, method: str, message: object, kind: type[T], *, user: str = "", idempotent: bool = True) -> T:
        """Call an RPC with a single response. `idempotent`: retry it if the connection breaks."""
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
        """Call an RPC that streams the events of a command."""
        headers = {**self._as(user), "keepalive-ping-interval": "20"}
        if timeout_ms is not None:
            headers[connect.TIMEOUT] = str(timeout_ms)
        url = f"{self.url}/{method}"
        async with self._client.stream(url, message, m.ProcessEvent, deadline_s=deadline_s, headers=headers) as events:
            yield events

    async def download(self, path: str, *, headers: Mapping[str, str], max_bytes: int) -> Reply:
        """Download a file. Raises `ValueError` if it is larger than `max_bytes`."""
        return await self._client.request(
            "GET",
            f"{self.url}/files?path={quote(path, safe='')}",
            what=f"reading {path} of {self.id}",
            deadline_s=self.config.call_s,
            headers={**self._headers, **headers},
            max_bytes=max_bytes,
        )

    async def upload(self, files: Mapping[str, bytes], *, headers: Mapping[str, str]) -> Reply:
        """Upload files as a multipart form, which all services accept."""
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
