"""A namespace runtime behind etude's server and a `RemoteRuntime`, in one process, for contract tests.

`PlainRuntime` is the same without etude's extensions, like other services with E2B's API.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from etude.environments import NamespaceRuntime
from etude.environments.remote import ClientConfig, Keyring, Quota, RemoteRuntime, create_app, serving
from etude.http_server import bind
from etude.records.image import Image
from etude.seams import Machine, Runtime

KEY = "e2b_" + "0123456789abcdef" * 2


class ServedRuntime(RemoteRuntime):
    """A runtime with its own server, which starts with the first call and ends with the runtime."""

    plain = False

    def __init__(self, behind: Runtime | None = None, *, key: str = KEY) -> None:
        self._key = key
        self._behind: Runtime = behind if behind is not None else NamespaceRuntime()
        self._sock = bind("127.0.0.1", 0)
        self._serving: contextlib.AsyncExitStack | None = None
        super().__init__(
            f"http://127.0.0.1:{self._sock.getsockname()[1]}",
            key=key,
            config=ClientConfig(workdir="/workspace", users=("user",)),
        )

    async def prepare(self, files: Mapping[str, bytes], *, image: Image | None = None) -> str:
        await self._serve()
        return await super().prepare(files, image=image)

    async def fork(self, snapshot: str, n: int, *, deadline_s: float = 30.0) -> list[Machine]:
        await self._serve()
        return await super().fork(snapshot, n, deadline_s=deadline_s)

    async def unpack(self, packed: bytes) -> str:
        await self._serve()
        return await super().unpack(packed)

    async def _serve(self) -> None:
        if self._serving is None:
            self._serving = contextlib.AsyncExitStack()
            app = create_app(
                self._behind, Keyring({"tests": Quota(key=self._key, max_live=64, creations_per_minute=6000)})
            )
            if self.plain:
                app.router.routes[:] = [r for r in app.router.routes if not getattr(r, "path", "").startswith("/etude")]
            await self._serving.enter_async_context(serving(app, sock=self._sock))

    async def close(self) -> None:
        await super().close()
        serving, self._serving = self._serving, None
        if serving is not None:
            await serving.aclose()
        self._sock.close()
        await self._behind.close()


class PlainRuntime(ServedRuntime):
    """The same without etude's extensions."""

    plain = True
