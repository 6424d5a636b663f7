"""States that leave a server as bytes and come back, to it or to another with the same keys: ours, E2B has none such.

A runtime may believe what it has packed itself, such as a machine's memory, and not what a client made up. So what
leaves is sealed by all keys of the server together, and nothing else is taken back: accounts cannot make states up,
unless one of them has every key there is.
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
from etude.environments.remote.config import ServerConfig
from etude.environments.remote.control import answer_of, body_of
from etude.environments.remote.door import account_of
from etude.environments.remote.keys import Keyring
from etude.environments.remote.refusal import Refused
from etude.environments.remote.sandboxes import Boxes, refusing
from etude.seams import Portable

MAX_STATE_BYTES = 256 << 20
_AT_ONCE = 2  # that are held in memory
_MAGIC = b"etude-state-1\n"
_OF = 16  # bytes that say whose seal it is
_MAC = 32


class Seal:
    """What states are sealed with: the same for the same secrets.

    >>> seal = Seal([b"one", b"two"])
    >>> seal.open(seal.close(b"state"))
    b'state'
    >>> seal.open(b"state")
    Traceback (most recent call last):
    ValueError: these bytes are no state
    """

    def __init__(self, secrets: Iterable[bytes]) -> None:
        parts = [hashlib.sha256(secret).digest() for secret in secrets]
        self._secret = hashlib.sha256(b"etude-state" + b"".join(sorted(parts))).digest()
        self._head = _MAGIC + hashlib.sha256(self._secret).digest()[:_OF]

    def close(self, packed: bytes) -> bytes:
        """With its seal."""
        return b"".join([self._head, hmac.digest(self._secret, packed, "sha256"), packed])

    def open(self, sealed: bytes) -> bytes:
        """What was sealed. `ValueError` for what nobody has, `Refused` (409) for what another server has."""
        start = len(self._head)
        if not sealed.startswith(_MAGIC) or len(sealed) < start + _MAC:
            raise ValueError("these bytes are no state")
        if sealed[:start] != self._head:
            hint = "ask where it was packed, or a server with the same keys"
            raise Refused(409, "the state is of another server", hint=hint)
        packed = sealed[start + _MAC :]
        if not hmac.compare_digest(hmac.digest(self._secret, packed, "sha256"), sealed[start : start + _MAC]):
            raise ValueError("the state is not as it was packed")
        return packed


class States:
    """The handlers of states."""

    def __init__(self, boxes: Boxes, keys: Keyring, config: ServerConfig) -> None:
        self._boxes, self._keys, self._config = boxes, keys, config
        self._seal = Seal(keys.secrets())
        self._room = asyncio.Semaphore(_AT_ONCE)

    def routes(self) -> list[Route]:
        """Both of them."""
        return [
            Route("/etude/snapshots/{id}", self.pack, methods=["GET"]),
            Route("/etude/snapshots", self.unpack, methods=["POST"]),
        ]

    async def pack(self, request: Request) -> Response:
        """A snapshot, or a template, as bytes."""
        account, runtime = account_of(self._keys, request), self._portable()
        wanted = request.query_params.get("max_bytes", "")
        if not (wanted.isascii() and wanted.isdigit() and len(wanted) < 19):
            raise Refused(400, f"max_bytes: {wanted[:20]!r}", hint="a number of bytes")

        async def work() -> bytes:
            async with self._room:
                snapshot = await self._boxes.snapshot_of(account, request.path_params["id"])
                try:
                    return self._seal.close(await runtime.pack(snapshot, max_bytes=min(int(wanted), MAX_STATE_BYTES)))
                except ValueError as error:
                    raise Refused(413, str(error), hint="allow more, or keep less") from None

        sealed = await refusing(work(), deadline_s=self._config.deadline_s, what="the state was not packed")
        return Response(sealed, media_type="application/octet-stream")

    async def unpack(self, request: Request) -> Response:
        """Bytes of `pack` as a snapshot."""
        account, runtime = account_of(self._keys, request), self._portable()

        async def work() -> str:
            async with self._room:
                packed = self._seal.open(await body_of(request, MAX_STATE_BYTES + 256))
                return self._boxes.kept(account).adopt(await runtime.unpack(packed))

        kept = await refusing(work(), deadline_s=self._config.deadline_s, what="the state cannot be taken over")
        return answer_of(m.SnapshotInfo(snapshot_id=kept), status=201)

    def _portable(self) -> Portable:
        runtime = self._boxes.runtime
        if not isinstance(runtime, Portable):
            facts = f"{runtime.info.name} machines stay where they are"
            raise Refused(501, "states cannot leave this server", facts, hint="serve a backend that is `Portable`")
        return runtime
