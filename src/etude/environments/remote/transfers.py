"""`/files` of a machine: content in and out, whole."""

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

from etude.environments.remote.config import ServerConfig
from etude.environments.remote.connect import Code, RpcError
from etude.environments.remote.control import body_of
from etude.environments.remote.door import box_of, shut, user_of
from etude.environments.remote.files import Files
from etude.environments.remote.multipart import parts
from etude.environments.remote.refusal import Refused
from etude.environments.remote.sandboxes import Box, Boxes

EXACTLY = "etude-exactly"  # a request of ours: no link is followed; its value bounds what is read
_UPLOADS = 8  # that are held in memory at the same time


class Transfers:
    """The handlers of content."""

    def __init__(self, boxes: Boxes, config: ServerConfig) -> None:
        self._boxes, self._config = boxes, config
        self._uploads = asyncio.Semaphore(_UPLOADS)

    def routes(self) -> list[Route]:
        """Both of them."""
        return [Route("/files", self.download, methods=["GET"]), Route("/files", self.upload, methods=["POST"])]

    async def download(self, request: Request) -> Response:
        """A file's content."""
        path = request.query_params.get("path", "")
        try:
            box = box_of(self._boxes, request, signed=f"{path}:read:{request.query_params.get('username', '')}")
        except Refused as error:
            return shut(error)
        exactly = request.headers.get(EXACTLY)
        if exactly is not None and not (exactly.isascii() and exactly.isdigit() and len(exactly) < 19):
            raise Refused(400, f"{EXACTLY}: {exactly[:20]!r}", hint="a number of bytes")
        try:
            files = self._files(box, request)
            async with asyncio.timeout(self._config.deadline_s):
                if exactly is None:
                    data = await files.read(path)
                else:
                    data = await files.read(path, exactly=True, max_bytes=int(exactly))
        except RpcError as error:
            return _of_file(error)
        except TimeoutError:
            facts = f"not within {self._config.deadline_s:g} s"
            raise Refused(504, "the file was not read", facts, hint="try again later") from None
        name = quote(posixpath.basename(path))
        headers = {"content-disposition": f"inline; filename*=UTF-8''{name}"}
        if "gzip" in request.headers.get("accept-encoding", "") and exactly is None and len(data) > 1024:
            data, headers["content-encoding"] = await asyncio.to_thread(gzip.compress, data, 1), "gzip"
        return Response(data, headers=headers, media_type="application/octet-stream")

    async def upload(self, request: Request) -> Response:
        """One file as the body, or several as a form."""
        try:
            async with asyncio.timeout(self._config.deadline_s), self._uploads:
                return await self._upload(request)
        except TimeoutError:
            facts = f"not within {self._config.deadline_s:g} s"
            raise Refused(504, "the files were not written", facts, hint="send less at a time") from None

    async def _upload(self, request: Request) -> Response:
        path = request.query_params.get("path", "")
        try:
            box = box_of(self._boxes, request, signed=f"{path}:write:{request.query_params.get('username', '')}")
        except Refused as error:
            return shut(error)
        kind, limit = request.headers.get("content-type", ""), self._config.max_file_bytes
        body = await body_of(request, limit + (1 << 20))  # before refusals: who still sends may not hear an answer
        if any(name.startswith("x-metadata-") for name in request.headers):
            raise Refused(400, "metadata of files is not kept here", hint="write the file without it")
        if request.headers.get("content-encoding", "identity") == "gzip":
            body = await asyncio.to_thread(_unzipped, body, limit)
        if kind.startswith("multipart/"):
            given = [(path or name, data) for name, data in parts(kind, body)]
        elif kind.split(";")[0] == "application/octet-stream" and path:
            given = [(path, body)]
        else:
            raise Refused(400, f"content-type {kind[:60]!r}, or no path", hint="send a form, or a path and octets")
        if len({name for name, _ in given}) < len(given):
            raise Refused(400, "two files of one upload have the same path", hint="send them one after the other")
        written, exactly = [], EXACTLY in request.headers
        try:
            files = self._files(box, request)
            for name, data in given:
                await files.write(name, data, exactly=exactly)
                written.append({"path": name, "name": posixpath.basename(name), "type": "file"})
            if not exactly:
                written = [one | {"path": (await files.stat(one["path"])).entry.path} for one in written]
        except RpcError as error:
            return _of_file(error)
        return JSONResponse(written)

    def _files(self, box: Box, request: Request) -> Files:
        user = request.query_params.get("username") or user_of(request)
        return Files(box.machine, box.shells, user=user, max_bytes=self._config.max_file_bytes)


def _of_file(error: RpcError) -> Response:
    no_room = error.code is Code.RESOURCE_EXHAUSTED and error.hint == "disk"
    status = 507 if no_room else 413 if error.code is Code.RESOURCE_EXHAUSTED else error.code.status
    return Refused(status, error.message, hint=error.hint or "see the message").response()


def _unzipped(data: bytes, max_bytes: int) -> bytes:
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            found = file.read(max_bytes + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise Refused(400, "the body is not gzip", str(error), hint="send it as it is") from None
    if len(found) > max_bytes:
        raise Refused(413, f"unpacked, the body has more than {max_bytes} bytes", hint="send less at a time")
    return found
