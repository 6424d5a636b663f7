"""Export snapshots as bytes, and import them on this server or another one with the same API keys.

This is an extension of E2B's API. A runtime trusts the content of an exported snapshot, such as the memory of a
machine. So exported snapshots are sealed (HMAC) with a secret derived from all API keys of the server, and only sealed
ones are imported. No account can forge a snapshot unless it has all keys.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Iterable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from etude.environments.remote import messages as m
from etude.environments.remote.api_errors import ApiError
from etude.environments.remote.auth import account_of
from etude.environments.remote.config import ServerConfig
from etude.environments.remote.control import json_response, read_body
from etude.environments.remote.keys import Keyring
from etude.environments.remote.sandboxes import SandboxManager, run_backend_call
from etude.seams import Portable

MAX_STATE_BYTES = 256 << 20
_AT_ONCE = 2  # states in memory
_MAGIC = b"etude-state-1\n"
_OF = 16  # bytes that identify the secret
_MAC = 32


class Seal:
    """Signs bytes with a secret that is derived from `secrets`, and verifies them.

    The order of `secrets` does not matter.

    >>> seal = Seal([b"one", b"two"])
    >>> seal.open(seal.close(b"state"))
    b'state'
    >>> seal.open(b"state")
    Traceback (most recent call last):
    ValueError: these bytes are not a sealed state
    """

    def __init__(self, secrets: Iterable[bytes]) -> None:
        parts = [hashlib.sha256(secret).digest() for secret in secrets]
        self._secret = hashlib.sha256(b"etude-state" + b"".join(sorted(parts))).digest()
        self._head = _MAGIC + hashlib.sha256(self._secret).digest()[:_OF]

    def close(self, packed: bytes) -> bytes:
        """Return the bytes with the seal in front."""
        return b"".join([self._head, hmac.digest(self._secret, packed, "sha256"), packed])

    def open(self, sealed: bytes) -> bytes:
        """Verify the seal, and return the bytes without it.

        Raises `ValueError` if the seal is missing or invalid, `ApiError` (409) if it was made with other secrets."""
        start = len(self._head)
        if not sealed.startswith(_MAGIC) or len(sealed) < start + _MAC:
            raise ValueError("these bytes are not a sealed state")
        if sealed[:start] != self._head:
            hint = "send it to that server, or to one with the same keys"
            raise ApiError(409, "the state was packed by another server", hint=hint)
        packed = sealed[start + _MAC :]
        if not hmac.compare_digest(hmac.digest(self._secret, packed, "sha256"), sealed[start : start + _MAC]):
            raise ValueError("the state is not as it was packed")
        return packed


class StateRoutes:
    """The HTTP handlers that export and import snapshots; `create_app` makes one instance."""

    def __init__(self, manager: SandboxManager, keys: Keyring, config: ServerConfig) -> None:
        self._manager, self._keys, self._config = manager, keys, config
        self._seal = Seal(keys.secrets())
        self._slots = asyncio.Semaphore(_AT_ONCE)

    def routes(self) -> list[Route]:
        """Return the Starlette routes to the handlers of this class."""
        return [
            Route("/etude/snapshots/{id}", self.pack, methods=["GET"]),
            Route("/etude/snapshots", self.unpack, methods=["POST"]),
        ]

    async def pack(self, request: Request) -> Response:
        """Handle `GET /etude/snapshots/{id}`: return a snapshot or template as sealed bytes.

        The query parameter `max_bytes` limits their number; above it the status is 413."""
        account, runtime = account_of(self._keys, request), self._portable()
        wanted = request.query_params.get("max_bytes", "")
        if not (wanted.isascii() and wanted.isdigit() and len(wanted) < 19):
            raise ApiError(400, f"max_bytes = {wanted[:20]!r} is invalid", hint="give a number of bytes")

        async def work() -> bytes:
            async with self._slots:
                snapshot = await self._manager.snapshot_of(account, request.path_params["id"])
                try:
                    return self._seal.close(await runtime.pack(snapshot, max_bytes=min(int(wanted), MAX_STATE_BYTES)))
                except ValueError as error:
                    raise ApiError(
                        413, str(error), hint="increase max_bytes, or have fewer changes in the machine"
                    ) from None

        sealed = await run_backend_call(
            work(), deadline_s=self._config.deadline_s, what="the snapshot could not be exported"
        )
        return Response(sealed, media_type="application/octet-stream")

    async def unpack(self, request: Request) -> Response:
        """Handle `POST /etude/snapshots`: import sealed bytes as a snapshot of the account, and return its id."""
        account, runtime = account_of(self._keys, request), self._portable()

        async def work() -> str:
            async with self._slots:
                packed = self._seal.open(await read_body(request, MAX_STATE_BYTES + 256))
                return self._manager.snapshots(account).add_imported(await runtime.unpack(packed))

        snapshot_id = await run_backend_call(
            work(), deadline_s=self._config.deadline_s, what="the snapshot could not be imported"
        )
        return json_response(m.SnapshotInfo(snapshot_id=snapshot_id), status=201)

    def _portable(self) -> Portable:
        runtime = self._manager.runtime
        if not isinstance(runtime, Portable):
            facts = f"the {runtime.info.name} runtime cannot export them"
            raise ApiError(501, "this server cannot export snapshots", facts, hint="serve a backend that is `Portable`")
        return runtime
