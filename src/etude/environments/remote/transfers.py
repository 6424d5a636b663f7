"""HTTP handlers of `/files`: download and upload complete files of a sandbox."""

from __future__ import annotations

import asyncio
import gzip
import io
import posixpath
import zlib
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from etude.environments.remote.api_errors import ApiError
from etude.environments.remote.auth import refusal_response, sandbox_of, user_of
from etude.environments.remote.config import ServerConfig
from etude.environments.remote.connect import Code, RpcError
from etude.environments.remote.control import read_body
from etude.environments.remote.files import Files
from etude.environments.remote.multipart import parts
from etude.environments.remote.sandboxes import Sandbox, SandboxManager

EXACTLY = "etude-exactly"  # header of etude's client: follow no links; its value limits the bytes to read
_UPLOADS = 8  # in memory at the same time


class FileRoutes:
    """The HTTP handlers that download and upload files of a sandbox; `create_app` makes one instance."""

    def __init__(self, manager: SandboxManager, config: ServerConfig) -> None:
        self._manager, self._config = manager, config
        self._uploads = asyncio.Semaphore(_UPLOADS)

    def routes(self) -> list[Route]:
        """Return the Starlette routes to the handlers of this class."""
        return [Route("/files", self.download, methods=["GET"]), Route("/files", self.upload, methods=["POST"])]

    async def download(self, request: Request) -> Response:
        """Handle `GET /files`: return the content of the file at the query parameter `path`."""
        path = request.query_params.get("path", "")
        try:
            sandbox = sandbox_of(
                self._manager, request, signed=f"{path}:read:{request.query_params.get('username', '')}"
            )
        except ApiError as error:
            return refusal_response(error)
        exactly = request.headers.get(EXACTLY)
        if exactly is not None and not (exactly.isascii() and exactly.isdigit() and len(exactly) < 19):
            raise ApiError(400, f"{EXACTLY} = {exactly[:20]!r} is invalid", hint="give a number of bytes")
        try:
            files = self._files(sandbox, request)
            async with asyncio.timeout(self._config.deadline_s):
                if exactly is None:
                    data = await files.read(path)
                else:
                    data = await files.read(path, exactly=True, max_bytes=int(exactly))
        except RpcError as error:
            return _file_error(error)
        except TimeoutError:
            facts = f"it took more than {self._config.deadline_s:g} s"
            raise ApiError(504, "the file was not read", facts, hint="try again later") from None
        name = quote(posixpath.basename(path))
        headers = {"content-disposition": f"inline; filename*=UTF-8''{name}"}
        if "gzip" in request.headers.get("accept-encoding", "") and exactly is None and len(data) > 1024:
            data, headers["content-encoding"] = await asyncio.to_thread(gzip.compress, data, 1), "gzip"
        return Response(data, headers=headers, media_type="application/octet-stream")

    async def upload(self, request: Request) -> Response:
        """Handle `POST /files`: write one file from the body, or several from a multipart form."""
        try:
            async with asyncio.timeout(self._config.deadline_s), self._uploads:
                return await self._upload(request)
        except TimeoutError:
            facts = f"it took more than {self._config.deadline_s:g} s"
            raise ApiError(504, "the files were not written", facts, hint="send less at a time") from None

    async def _upload(self, request: Request) -> Response:
        path = request.query_params.get("path", "")
        try:
            sandbox = sandbox_of(
                self._manager, request, signed=f"{path}:write:{request.query_params.get('username', '')}"
            )
        except ApiError as error:
            return refusal_response(error)
        content_type, limit = request.headers.get("content-type", ""), self._config.max_file_bytes
        # before any refusal: a client that still sends may not read the response
        body = await read_body(request, limit + (1 << 20))
        if any(name.startswith("x-metadata-") for name in request.headers):
            raise ApiError(400, "metadata of files is not supported", hint="write the file without it")
        if request.headers.get("content-encoding", "identity") == "gzip":
            body = await asyncio.to_thread(_decompress, body, limit)
        if content_type.startswith("multipart/"):
            uploads = [(path or name, data) for name, data in parts(content_type, body)]
        elif content_type.split(";")[0] == "application/octet-stream" and path:
            uploads = [(path, body)]
        else:
            raise ApiError(
                400,
                f"content-type {content_type[:60]!r} is not supported, or the path is missing",
                hint="send a form, or a path and application/octet-stream",
            )
        if len({name for name, _ in uploads}) < len(uploads):
            raise ApiError(400, "two files of one upload have the same path", hint="send them one after the other")
        written, exactly = [], EXACTLY in request.headers
        try:
            files = self._files(sandbox, request)
            for name, data in uploads:
                await files.write(name, data, exactly=exactly)
                written.append({"path": name, "name": posixpath.basename(name), "type": "file"})
            if not exactly:
                written = [one | {"path": (await files.stat(one["path"])).entry.path} for one in written]
        except RpcError as error:
            return _file_error(error)
        return JSONResponse(written)

    def _files(self, sandbox: Sandbox, request: Request) -> Files:
        user = request.query_params.get("username") or user_of(request)
        return Files(sandbox.machine, sandbox.shells, user=user, max_bytes=self._config.max_file_bytes)


def _file_error(error: RpcError) -> Response:
    is_full = error.code is Code.RESOURCE_EXHAUSTED and error.hint == "disk"
    status = 507 if is_full else 413 if error.code is Code.RESOURCE_EXHAUSTED else error.code.status
    return ApiError(status, error.message, hint=error.hint or "correct the request as the message says").response()


def _decompress(data: bytes, max_bytes: int) -> bytes:
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            found = file.read(max_bytes + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ApiError(400, "the body is not gzip", str(error), hint="send it uncompressed") from None
    if len(found) > max_bytes:
        raise ApiError(413, f"the decompressed body has more than {max_bytes} bytes", hint="send less at a time")
    return found
