"""RPC handlers for the processes and the file system of a sandbox, over the Connect protocol.

They stand in for envd, the daemon that E2B runs in each sandbox.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from etude.environments.remote import connect
from etude.environments.remote import messages as m
from etude.environments.remote.api_errors import ApiError
from etude.environments.remote.auth import refusal_response, sandbox_of, user_of
from etude.environments.remote.config import ServerConfig
from etude.environments.remote.connect import Code, RpcError
from etude.environments.remote.control import read_body
from etude.environments.remote.files import Files
from etude.environments.remote.folder_watcher import FolderWatcher
from etude.environments.remote.processes import Process
from etude.environments.remote.sandboxes import Sandbox, SandboxManager
from etude.environments.remote.shells import quote
from etude.errors import MachineError
from etude.seams import Machine

T = TypeVar("T")
_KEEPALIVE = "keepalive-ping-interval"
_LONGEST_S = 604_800.0  # the longest time limit of a command
_MAX_KEY = 1024
_WATCH_S = 0.25  # between two listings of a watched folder
_SIGNALS = {"SIGNAL_SIGTERM": "TERM", "SIGNAL_SIGKILL": "KILL", 15: "TERM", 9: "KILL"}


class EnvdRoutes:
    """The RPC handlers for processes and files; `create_app` makes one instance.

    A handler gets the sandbox that the request names, the HTTP request (for its headers) and the decoded message. It
    returns the response message, or yields the messages of the response stream. An `RpcError` is sent to the client."""

    def __init__(self, manager: SandboxManager, config: ServerConfig) -> None:
        self._manager, self._config = manager, config

    def routes(self) -> list[Route]:
        """Return the Starlette routes to the handlers of this class."""
        unary: dict[str, tuple[type[Any], Callable[[Sandbox, Request, Any], Awaitable[object]]]] = {
            "process.Process/List": (dict, self.processes),
            "process.Process/SendInput": (m.SendInput, self.send_input),
            "process.Process/CloseStdin": (m.Selected, self.close_stdin),
            "process.Process/SendSignal": (m.SendSignal, self.send_signal),
            "process.Process/Update": (m.Update, self.update),
            "filesystem.Filesystem/Stat": (m.Path, self.stat),
            "filesystem.Filesystem/ListDir": (m.ListDir, self.list_dir),
            "filesystem.Filesystem/MakeDir": (m.Path, self.make_dir),
            "filesystem.Filesystem/Move": (m.Move, self.move),
            "filesystem.Filesystem/Remove": (m.Path, self.remove),
            "filesystem.Filesystem/CreateWatcher": (m.Watch, self.create_watcher),
            "filesystem.Filesystem/GetWatcherEvents": (m.Watcher, self.watcher_events),
            "filesystem.Filesystem/RemoveWatcher": (m.Watcher, self.remove_watcher),
        }
        streaming: dict[str, tuple[type[Any], Callable[[Sandbox, Request, Any], AsyncIterator[object]]]] = {
            "process.Process/Start": (m.Start, self.start),
            "process.Process/Connect": (m.Selected, self.connect),
            "filesystem.Filesystem/WatchDir": (m.Watch, self.watch_dir),
        }
        return [
            Route("/process.Process/StreamInput", self.stream_input, methods=["POST"]),
            *(Route(f"/{name}", self._unary(*how), methods=["POST"]) for name, how in unary.items()),
            *(Route(f"/{name}", self._streaming(*how), methods=["POST"]) for name, how in streaming.items()),
        ]

    # processes

    async def processes(self, sandbox: Sandbox, request: Request, message: dict[str, Any]) -> object:
        """Handle the RPC `Process/List`: return the running processes as a `ProcessList`."""
        return m.ProcessList(processes=[process.info for process in sandbox.processes.running() if process.pid])

    async def start(self, sandbox: Sandbox, request: Request, message: m.Start) -> AsyncIterator[object]:
        """Handle the RPC `Process/Start`: run a command and yield its events until it ends.

        The command continues if the client disconnects."""
        if not message.process.cmd:
            raise RpcError(Code.INVALID_ARGUMENT, "there is no command")
        exact, timeout_s = message.etude, connect.read_timeout(request.headers)
        deadline_s = min(exact.deadline_ms / 1000 if exact else timeout_s or self._config.command_s, _LONGEST_S)
        if exact and not (exact.deadline_ms > 0 and 0 <= exact.output_bytes <= self._config.max_file_bytes):
            raise RpcError(Code.INVALID_ARGUMENT, "the deadline or the output limit is invalid")
        if exact and len(exact.key) > _MAX_KEY:
            raise RpcError(Code.INVALID_ARGUMENT, f"a key has at most {_MAX_KEY} characters")
        if message.pty is not None:
            message = in_terminal(message)
        process = sandbox.processes.start(message, user=user_of(request), deadline_s=deadline_s)
        async for event in process.events(exact.after if exact else 0, every_s=_every_s(request)):
            yield event

    async def connect(self, sandbox: Sandbox, request: Request, message: m.Selected) -> AsyncIterator[object]:
        """Handle the RPC `Process/Connect`: yield the future events of a command that runs already."""
        process = sandbox.processes.find(message.process)
        now = process.log.position
        yield m.ProcessEvent(event=m.Event(start=m.Began(pid=process.pid or 0)))
        async for event in process.events(now, every_s=_every_s(request)):
            yield event

    async def send_input(self, sandbox: Sandbox, request: Request, message: m.SendInput) -> object:
        """Handle the RPC `Process/SendInput`: send bytes to the standard input or terminal of a process."""
        await _send_input(sandbox.processes.find(message.process), message.input, message.etude_offset)
        return {}

    async def close_stdin(self, sandbox: Sandbox, request: Request, message: m.Selected) -> object:
        """Handle the RPC `Process/CloseStdin`: close the standard input of a process."""
        process = sandbox.processes.find(message.process)
        if process.spec.pty is not None:
            raise RpcError(
                Code.FAILED_PRECONDITION, "the input of a terminal cannot be closed", hint="send Ctrl-D, byte 4"
            )
        if process.input is not None:
            await process.input.close()
        return {}

    async def stream_input(self, request: Request) -> Response:
        """Handle the RPC `Process/StreamInput`: send a stream of input to a process.

        The first message of the stream names the process."""
        try:
            sandbox = sandbox_of(self._manager, request)
        except ApiError as error:
            return refusal_response(error)
        refused = connect.check_type(request.headers, streaming=True)
        if refused:
            return Response(refused, 415)
        process: Process | None = None
        try:
            async with asyncio.timeout(connect.read_timeout(request.headers) or self._config.command_s):
                async for message in connect.envelopes(request.stream(), m.StreamInput, is_response=False):
                    if message.start is not None:
                        process = sandbox.processes.find(message.start.process)
                    elif message.data is not None:
                        if process is None:
                            raise RpcError(Code.INVALID_ARGUMENT, "input before the process was named")
                        await _send_input(process, message.data.input, None)
            if process is None:
                raise RpcError(Code.INVALID_ARGUMENT, "the stream names no process")
            body = connect.envelope({}) + connect.end()
        except RpcError as error:
            body = connect.end(error)
        except TimeoutError:
            body = connect.end(RpcError(Code.DEADLINE_EXCEEDED, "the stream of input exceeded its deadline"))
        return Response(body, media_type=connect.STREAM)

    async def send_signal(self, sandbox: Sandbox, request: Request, message: m.SendSignal) -> object:
        """Handle the RPC `Process/SendSignal`: send TERM or KILL to a process and its process group."""
        process = sandbox.processes.find(message.process)
        name = _SIGNALS.get(message.signal)
        if name is None:
            raise RpcError(
                Code.INVALID_ARGUMENT,
                f"signal {str(message.signal)[:40]!r} is not supported",
                hint="send SIGTERM or SIGKILL",
            )
        await sandbox.processes.signal(process, name)
        return {}

    async def update(self, sandbox: Sandbox, request: Request, message: m.Update) -> object:
        """Handle the RPC `Process/Update`: resize the terminal of a process."""
        process = sandbox.processes.find(message.process)
        if process.spec.pty is None or message.pty is None:
            raise RpcError(Code.FAILED_PRECONDITION, "the process has no terminal, or the size is missing")
        await resize(sandbox.machine, process, message.pty.size)
        return {}

    # files

    async def stat(self, sandbox: Sandbox, request: Request, message: m.Path) -> object:
        """Handle the RPC `Filesystem/Stat`: return the file, folder or link at a path."""
        return m.WithEntry(entry=(await self._files(sandbox, request).stat(message.path)).entry)

    async def list_dir(self, sandbox: Sandbox, request: Request, message: m.ListDir) -> object:
        """Handle the RPC `Filesystem/ListDir`: return the entries of a folder."""
        return m.Entries(entries=await self._files(sandbox, request).entries(message.path, message.depth))

    async def make_dir(self, sandbox: Sandbox, request: Request, message: m.Path) -> object:
        """Handle the RPC `Filesystem/MakeDir`: create a folder and return its entry."""
        return m.WithEntry(entry=await self._files(sandbox, request).make_dir(message.path))

    async def move(self, sandbox: Sandbox, request: Request, message: m.Move) -> object:
        """Handle the RPC `Filesystem/Move`: move a file or folder and return its new entry."""
        return m.WithEntry(entry=await self._files(sandbox, request).move(message.source, message.destination))

    async def remove(self, sandbox: Sandbox, request: Request, message: m.Path) -> object:
        """Handle the RPC `Filesystem/Remove`: delete a file or folder."""
        await self._files(sandbox, request).remove(message.path)
        return {}

    async def watch_dir(self, sandbox: Sandbox, request: Request, message: m.Watch) -> AsyncIterator[object]:
        """Handle the RPC `Filesystem/WatchDir`: yield the changes in a folder until the deadline.

        The folder is listed four times a second."""
        watcher = self._watch(sandbox, request, message)
        await watcher.start()
        yield m.Watched(start={})
        deadline_s, every_s = connect.read_timeout(request.headers) or self._config.command_s, _every_s(request)
        end = time.monotonic() + deadline_s
        last = time.monotonic()
        while time.monotonic() < end:
            await asyncio.sleep(_WATCH_S)
            for change in await watcher.changes():
                yield m.Watched(filesystem=change)
                last = time.monotonic()
            if time.monotonic() - last > every_s:
                yield m.Watched(keepalive={})
                last = time.monotonic()
        raise RpcError(Code.DEADLINE_EXCEEDED, f"the deadline of {deadline_s:g} s has passed")

    async def create_watcher(self, sandbox: Sandbox, request: Request, message: m.Watch) -> object:
        """Handle the RPC `Filesystem/CreateWatcher`: begin to watch a folder and return the watcher's id.

        The client asks for the changes with `GetWatcherEvents`."""
        watcher = self._watch(sandbox, request, message)
        await watcher.start()
        return m.Watcher(watcher_id=sandbox.watches.add(watcher))

    async def watcher_events(self, sandbox: Sandbox, request: Request, message: m.Watcher) -> object:
        """Handle the RPC `Filesystem/GetWatcherEvents`: return a watcher's changes since the last call."""
        return m.Changes(events=await sandbox.watches.get(message.watcher_id).changes())

    async def remove_watcher(self, sandbox: Sandbox, request: Request, message: m.Watcher) -> object:
        """Handle the RPC `Filesystem/RemoveWatcher`: end a watcher."""
        sandbox.watches.remove(message.watcher_id)
        return {}

    def _watch(self, sandbox: Sandbox, request: Request, message: m.Watch) -> FolderWatcher:
        files, depth = self._files(sandbox, request), 64 if message.recursive else 1
        return FolderWatcher(lambda: files.tree(message.path, depth), include_entry=message.include_entry)

    # inside

    def _files(self, sandbox: Sandbox, request: Request) -> Files:
        return Files(sandbox.machine, sandbox.shells, user=user_of(request), max_bytes=self._config.max_file_bytes)

    def _unary(self, kind: type[T], work: Callable[[Sandbox, Request, T], Awaitable[object]]) -> Any:
        async def handle(request: Request) -> Response:
            try:
                sandbox = sandbox_of(self._manager, request)
            except ApiError as error:
                return refusal_response(error)
            refused = connect.check_type(request.headers, streaming=False)
            if refused:
                return Response(refused, 415)
            try:
                timeout_s = connect.read_timeout(request.headers) or self._config.deadline_s
                async with asyncio.timeout(min(timeout_s, self._config.deadline_s)):
                    body = await read_body(request, connect.MAX_MESSAGE_BYTES)
                    reply = await work(sandbox, request, connect.decode(kind, body or b"{}"))
            except RpcError as error:
                return Response(error.body(), error.code.status, media_type=connect.JSON)
            except TimeoutError:
                late = RpcError(Code.DEADLINE_EXCEEDED, f"{request.url.path} took longer than its deadline")
                return Response(late.body(), late.code.status, media_type=connect.JSON)
            return Response(msgspec.json.encode(reply), media_type=connect.JSON)

        return handle

    def _streaming(self, kind: type[T], work: Callable[[Sandbox, Request, T], AsyncIterator[object]]) -> Any:
        async def handle(request: Request) -> Response:
            try:
                sandbox = sandbox_of(self._manager, request)
            except ApiError as error:
                return refusal_response(error)
            refused = connect.check_type(request.headers, streaming=True)
            if refused:
                return Response(refused, 415)

            # before the response starts, since Starlette then reads the request to detect a disconnect
            message = await _read_one_message(request, kind)

            async def body() -> AsyncIterator[bytes]:
                try:
                    if isinstance(message, RpcError):
                        raise message
                    async for event in work(sandbox, request, message):
                        yield connect.envelope(event)
                except RpcError as error:
                    yield connect.end(error)
                else:
                    yield connect.end()

            return StreamingResponse(body(), media_type=connect.STREAM, headers={"cache-control": "no-store"})

        return handle


async def _read_one_message(request: Request, kind: type[T]) -> T | RpcError:
    try:
        async with asyncio.timeout(30.0):
            messages = [one async for one in connect.envelopes(request.stream(), kind, is_response=False)]
    except RpcError as error:
        return error
    except (TimeoutError, ClientDisconnect):
        return RpcError(Code.CANCELED, "the request is incomplete")
    if len(messages) != 1:
        return RpcError(Code.INVALID_ARGUMENT, f"{len(messages)} messages; one is expected")
    return messages[0]


async def _send_input(process: Process, given: m.Input, offset: int | None) -> None:
    if (given.pty is not None) != (process.spec.pty is not None):
        raise RpcError(Code.INVALID_ARGUMENT, "terminal input for a process without a terminal, or the reverse")
    if process.input is None:
        raise RpcError(
            Code.FAILED_PRECONDITION, "the process was started without standard input", hint="start it with stdin=True"
        )
    await process.input.add(given.stdin or given.pty or b"", offset)


def _every_s(request: Request) -> float:
    text = request.headers.get(_KEEPALIVE, "")
    return float(min(max(int(text), 1), 3600)) if text.isascii() and text.isdigit() and len(text) < 6 else 90.0


# `Machine` has no terminals: `script` of util-linux makes one in the machine, and `stty` sets its size. If one of them
# or /dev/ptmx is missing, the command ends with exit code 127 and a message.
_MAX_SIDE = 10_000
_START: Final = """command -v script >/dev/null || { echo 'no terminal: this machine has no `script`'; exit 127; }
[ -c /dev/ptmx ] || { echo 'no terminal: this machine has no /dev/ptmx'; exit 127; }
exec script -q -e -f -c "$1" /dev/null"""
_INSIDE: Final = 'tty > "$ETUDE_TTY"; stty rows "$ETUDE_ROWS" cols "$ETUDE_COLS"; '
_RESIZE: Final = """n=0; until [ -s "$1" ] || [ $n -ge 50 ]; do n=$((n + 1)); sleep 0.1; done
exec stty -F "$(cat -- "$1")" rows "$2" cols "$3\""""


def in_terminal(message: m.Start) -> m.Start:
    """Convert a request for a command in a terminal to one that `Machine.exec` can run.

    `Machine` has no terminals, so the command is wrapped in the program `script`, which makes one. Raises `RpcError`
    for an invalid terminal size."""
    assert message.pty is not None, "needs a terminal"
    size, config = message.pty.size, message.process
    _check(size)
    note = f"/tmp/.etude-tty-{secrets.token_hex(8)}"
    env = {"ETUDE_TTY": note, "ETUDE_ROWS": str(size.rows), "ETUDE_COLS": str(size.cols)}
    program = _INSIDE + "exec " + " ".join(quote(word) for word in [config.cmd, *config.args])
    process = m.Config(cmd="sh", args=["-c", _START, "sh", program], envs={**config.envs, **env}, cwd=config.cwd)
    return msgspec.structs.replace(message, process=process, stdin=True)


async def resize(machine: Machine, process: Process, size: m.Size) -> None:
    """Resize the terminal of a process that was started with `in_terminal`. Raises `RpcError` if this fails."""
    _check(size)
    note = process.spec.process.envs["ETUDE_TTY"]
    args = ["sh", "-c", _RESIZE, "sh", note, str(size.rows), str(size.cols)]
    try:
        done = await machine.exec(args, key=f"tty-{secrets.token_hex(8)}", deadline_s=10.0, user=process.user)
    except MachineError as error:
        raise RpcError(Code.UNAVAILABLE, error.what, hint=error.hint) from None
    if done.exit_code:
        raise RpcError(Code.FAILED_PRECONDITION, done.output[:200].decode(errors="replace"), hint="try again")


def _check(size: m.Size) -> None:
    if not (0 < size.rows <= _MAX_SIDE and 0 < size.cols <= _MAX_SIDE):
        raise RpcError(Code.INVALID_ARGUMENT, f"a terminal cannot have {size.rows} rows and {size.cols} columns")
