"""Serve pip, npm and apt packages from a folder, by an allow-list.

===========================================  ==========================================================
``pip --index-url http://HOST/pip/simple``   PEP 503, with hashes
``npm --registry http://HOST/npm``           one document per package; this mirror serves its tarballs
``deb [trusted=yes] http://HOST/apt ./``     a flat repository; `Packages` lists the allowed packages
===========================================  ==========================================================

It serves GET and HEAD, one request per connection, on sockets that it is given, such as one inside a machine
(`loopback`). It reads only the folder; the files' digests are verified when the mirror is created.
"""

from __future__ import annotations

import asyncio
import contextlib
import html
import json
import socket
import urllib.parse
from collections.abc import Collection, Iterable
from typing import BinaryIO, NamedTuple

from etude.environments.network.http import BadRequest, ConnectionServer, RequestHead, close_writer, parse_head
from etude.environments.network.packages import Package, Packages, PackageSpec, normalize_name, npm_document

_CHUNK_BYTES = 1 << 18
_CONNECTIONS = 64
_OVERLOAD = 4  # beyond `_CONNECTIONS` times this, connections are dropped without a response
_REQUEST_S, _ANSWER_S, _CLOSE_S = 10.0, 600.0, 10.0


class Answer(NamedTuple):
    """A response of the mirror: HTTP status, content type `kind`, and the body, or a package `file` to send."""

    status: int
    kind: str
    body: bytes
    file: Package | None = None


class Mirror(ConnectionServer):
    """An HTTP server for the packages of a folder, restricted to those that `allow` lists (None: all).

    Raises `StoreError` if the folder is damaged."""

    def __init__(self, packages: Packages, allow: Collection[PackageSpec] | None = None) -> None:
        super().__init__()
        packages.verify()
        self._packages = packages
        listed = [p for p in packages.known if allow is None or PackageSpec(p.kind, p.name, p.version) in allow]
        self._listed = sorted(listed, key=lambda p: (p.kind, p.name, p.file))

    async def serve(self, listener: socket.socket) -> asyncio.Server:
        """Serve on a listening socket of any address family, until the returned server is closed."""
        return await self._serve(listener, self._connection)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if len(self._serving) <= _OVERLOAD * _CONNECTIONS:
                await self._one_request(reader, writer)
        finally:
            await close_writer(writer, _CLOSE_S)

    async def _one_request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_REQUEST_S):
                head = parse_head(await reader.readuntil(b"\r\n\r\n"))
            answer = _text(503, "busy") if len(self._serving) > _CONNECTIONS else self.answer(head)
        except BadRequest as error:
            head, answer = None, _text(400, str(error))
        except (OSError, EOFError, TimeoutError, asyncio.LimitOverrunError):
            return
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_ANSWER_S):
                await self._send(answer, writer, with_body=head is None or head.method != "HEAD")

    async def _send(self, answer: Answer, writer: asyncio.StreamWriter, *, with_body: bool) -> None:
        size = len(answer.body) if answer.file is None else answer.file.size
        lines = f"HTTP/1.1 {answer.status} -", f"content-type: {answer.kind}", f"content-length: {size}"
        writer.write(("\r\n".join(lines) + "\r\nconnection: close\r\n\r\n").encode())
        if with_body and answer.file is not None:
            file: BinaryIO = await asyncio.to_thread(open, self._packages.path(answer.file), "rb")
            with file:
                while chunk := await asyncio.to_thread(file.read, _CHUNK_BYTES):
                    writer.write(chunk)
                    await writer.drain()
        elif with_body:
            writer.write(answer.body)
        await writer.drain()

    def answer(self, head: RequestHead) -> Answer:
        """Return the response to a request."""
        if head.method not in ("GET", "HEAD") or head.body:
            return _text(405, "a mirror is only read")
        path = urllib.parse.unquote(head.target.partition("?")[0], errors="replace")
        kind, _, rest = path.removeprefix("/").partition("/")
        host = dict(head.fields).get("host", b"localhost").decode(errors="replace")
        of_kind = {"pip": self._pip, "npm": self._npm, "apt": self._apt}.get(kind)
        found = None if of_kind is None else of_kind(rest, f"http://{host}/{kind}")
        return found if found is not None else _text(404, "not on this mirror")

    def _packages_of(self, kind: str, name: str = "") -> list[Package]:
        return [p for p in self._listed if p.kind == kind and name in ("", p.name)]

    def _file(self, kind: str, name: str, file: str) -> Answer | None:
        found = next((p for p in self._packages_of(kind, name) if p.file == file), None)
        return None if found is None else Answer(200, "application/octet-stream", b"", found)

    def _pip(self, rest: str, base: str) -> Answer | None:
        parts = rest.strip("/").split("/")
        if parts[0] == "files" and len(parts) == 3:
            return self._file("pip", parts[1], parts[2])
        if parts[0] != "simple" or len(parts) > 2:
            return None
        if len(parts) == 1:
            names = sorted({p.name for p in self._packages_of("pip")})
            return _page(f'<a href="/pip/simple/{html.escape(name)}/">{html.escape(name)}</a>' for name in names)
        files = self._packages_of("pip", normalize_name("pip", parts[1]))
        if not files:
            return None
        return _page(
            f'<a href="/pip/files/{p.name}/{urllib.parse.quote(p.file)}#sha256={p.sha256}">{html.escape(p.file)}</a>'
            for p in files
        )

    def _npm(self, rest: str, base: str) -> Answer | None:
        if rest.startswith("-/files/"):
            name, _, file = rest.removeprefix("-/files/").rpartition("/")
            return self._file("npm", name, file)
        found = self._packages_of("npm", rest.strip("/"))
        if not found or not rest:
            return None
        versions = {}
        for package in found:
            manifest = npm_document(package)
            dist = manifest.get("dist")
            kept = {k: v for k, v in dist.items() if k in ("integrity", "shasum")} if isinstance(dist, dict) else {}
            place = f"{base}/-/files/{package.name}/{package.file}"
            versions[package.version] = {**manifest, "name": package.name, "version": package.version,
                                         "dist": {**kept, "tarball": place}}  # fmt: skip
        packument = {"name": found[0].name, "dist-tags": {"latest": found[-1].version}, "versions": versions}
        return Answer(200, "application/json", json.dumps(packument).encode())

    def _apt(self, rest: str, base: str) -> Answer | None:
        rest = rest.removeprefix("./")
        if rest == "Packages":
            return Answer(200, "text/plain", "\n".join(map(_stanza, self._packages_of("apt"))).encode())
        folder, _, file = rest.rpartition("/")
        return self._file("apt", folder.removeprefix("pool/"), file) if folder.startswith("pool/") else None


def _stanza(package: Package) -> str:
    """The apt entry of a package: the registry's fields, with this mirror's path, size and hash."""
    replaced = ("filename:", "size:", "sha256:", "sha1:", "md5sum:", "sha512:", "status:", "package:", "version:")
    kept: list[str] = []
    skipping = False
    for line in package.facts.splitlines():
        skipping = line.lower().startswith(replaced) or (skipping and line[:1] in (" ", "\t"))
        if not skipping and line.strip():
            kept.append(line)
    place = f"./pool/{package.name}/{package.file}"
    head = [f"Package: {package.name}", f"Version: {package.version}"]
    tail = [f"Filename: {place}", f"Size: {package.size}", f"SHA256: {package.sha256}"]
    return "\n".join([*head, *kept, *tail]) + "\n"


def _page(links: Iterable[str]) -> Answer:
    lines = "\n".join(f"{link}<br>" for link in links)
    return Answer(200, "text/html", f"<!DOCTYPE html><html><body>\n{lines}\n</body></html>\n".encode())


def _text(status: int, text: str) -> Answer:
    return Answer(status, "text/plain", f"{text}\n".encode())
