"""One machine's inside as E2B's daemon has it: processes and the file system, over Connect."""

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
from etude.environments.remote.config import ServerConfig
from etude.environments.remote.connect import Code, RpcError
from etude.environments.remote.control import body_of
from etude.environments.remote.door import box_of, shut, user_of
from etude.environments.remote.files import Files
from etude.environments.remote.processes import Process
from etude.environments.remote.refusal import Refused
from etude.environments.remote.sandboxes import Box, Boxes
from etude.environments.remote.shells import quoted
from etude.environments.remote.watch import Watch
from etude.errors import MachineError
from etude.seams import Machine

T = TypeVar("T")
_KEEPALIVE = "keepalive-ping-interval"
_LONGEST_S = 604_800.0  # that a command may run
_MAX_KEY = 1024
_WATCH_S = 0.25  # between two looks at a watched folder
_SIGNALS = {"SIGNAL_SIGTERM": "TERM", "SIGNAL_SIGKILL": "KILL", 15: "TERM", 9: "KILL"}


class Envd:
    """The handlers of one machine's inside."""

    def __init__(self, boxes: Boxes, config: ServerConfig) -> None:
        self._boxes, self._config = boxes, config

    def routes(self) -> list[Route]:
        """All of them."""
        unary: dict[str, tuple[type[Any], Callable[[Box, Request, Any], Awaitable[object]]]] = {
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
        streaming: dict[str, tuple[type[Any], Callable[[Box, Request, Any], AsyncIterator[object]]]] = {
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

    async def processes(self, box: Box, request: Request, asked: dict[str, Any]) -> object:
        """Those that run."""
        return m.ProcessList(processes=[process.info for process in box.processes.running() if process.pid])

    async def start(self, box: Box, request: Request, asked: m.Start) -> AsyncIterator[object]:
        """Run a command and tell of it; it goes on where nobody listens any more."""
        if not asked.process.cmd:
            raise RpcError(Code.INVALID_ARGUMENT, "there is no command")
        exact, given_s = asked.etude, connect.read_timeout(request.headers)
        deadline_s = min(exact.deadline_ms / 1000 if exact else given_s or self._config.command_s, _LONGEST_S)
        if exact and not (exact.deadline_ms > 0 and 0 <= exact.output_bytes <= self._config.max_file_bytes):
            raise RpcError(Code.INVALID_ARGUMENT, "a deadline, or a bound of output, that is none")
        if exact and len(exact.key) > _MAX_KEY:
            raise RpcError(Code.INVALID_ARGUMENT, f"a key has at most {_MAX_KEY} letters")
        if asked.pty is not None:
            asked = in_terminal(asked)
        process = box.processes.start(asked, user=user_of(request), deadline_s=deadline_s)
        async for event in process.events(exact.after if exact else 0, every_s=_every_s(request)):
            yield event

    async def connect(self, box: Box, request: Request, asked: m.Selected) -> AsyncIterator[object]:
        """Tell of a command that runs, from now on."""
        process = box.processes.find(asked.process)
        now = process.log.position
        yield m.Happened(event=m.Event(start=m.Began(pid=process.pid or 0)))
        async for event in process.events(now, every_s=_every_s(request)):
            yield event

    async def send_input(self, box: Box, request: Request, asked: m.SendInput) -> object:
        """More standard input."""
        await _give(box.processes.find(asked.process), asked.input, asked.etude_offset)
        return {}

    async def close_stdin(self, box: Box, request: Request, asked: m.Selected) -> object:
        """No more standard input."""
        process = box.processes.find(asked.process)
        if process.asked.pty is not None:
            raise RpcError(Code.FAILED_PRECONDITION, "a terminal's input has no end", hint="send it Ctrl-D, byte 4")
        if process.input is not None:
            await process.input.close()
        return {}

    async def stream_input(self, request: Request) -> Response:
        """Standard input in pieces, for a process that the first message names."""
        try:
            box = box_of(self._boxes, request)
        except Refused as error:
            return shut(error)
        refused = connect.check_type(request.headers, streaming=True)
        if refused:
            return Response(refused, 415)
        process: Process | None = None
        try:
            async with asyncio.timeout(connect.read_timeout(request.headers) or self._config.command_s):
                async for asked in connect.envelopes(request.stream(), m.StreamInput, is_answer=False):
                    if asked.start is not None:
                        process = box.processes.find(asked.start.process)
                    elif asked.data is not None:
                        if process is None:
                            raise RpcError(Code.INVALID_ARGUMENT, "input before it was said whose")
                        await _give(process, asked.data.input, None)
            if process is None:
                raise RpcError(Code.INVALID_ARGUMENT, "it was not said whose input it is")
            body = connect.envelope({}) + connect.end()
        except RpcError as error:
            body = connect.end(error)
        except TimeoutError:
            body = connect.end(RpcError(Code.DEADLINE_EXCEEDED, "the stream of input is longer than its deadline"))
        return Response(body, media_type=connect.STREAM)

    async def send_signal(self, box: Box, request: Request, asked: m.SendSignal) -> object:
        """End a process and its group."""
        process = box.processes.find(asked.process)
        name = _SIGNALS.get(asked.signal)
        if name is None:
            raise RpcError(Code.INVALID_ARGUMENT, f"signal {str(asked.signal)[:40]!r}", hint="SIGTERM, SIGKILL")
        await box.processes.signal(process, name)
        return {}

    async def update(self, box: Box, request: Request, asked: m.Update) -> object:
        """Another size of its terminal."""
        process = box.processes.find(asked.process)
        if process.asked.pty is None or asked.pty is None:
            raise RpcError(Code.FAILED_PRECONDITION, "it has no terminal, or no size was given")
        await resize(box.machine, process, asked.pty.size)
        return {}

    # files

    async def stat(self, box: Box, request: Request, asked: m.Path) -> object:
        """One entry."""
        return m.WithEntry(entry=(await self._files(box, request).stat(asked.path)).entry)

    async def list_dir(self, box: Box, request: Request, asked: m.ListDir) -> object:
        """What is in a folder."""
        return m.Entries(entries=await self._files(box, request).entries(asked.path, asked.depth))

    async def make_dir(self, box: Box, request: Request, asked: m.Path) -> object:
        """A new folder."""
        return m.WithEntry(entry=await self._files(box, request).make_dir(asked.path))

    async def move(self, box: Box, request: Request, asked: m.Move) -> object:
        """Rename."""
        return m.WithEntry(entry=await self._files(box, request).move(asked.source, asked.destination))

    async def remove(self, box: Box, request: Request, asked: m.Path) -> object:
        """Delete."""
        await self._files(box, request).remove(asked.path)
        return {}

    async def watch_dir(self, box: Box, request: Request, asked: m.Watch) -> AsyncIterator[object]:
        """Tell what changes in a folder, by looking again and again."""
        watch = self._watch(box, request, asked)
        await watch.begin()
        yield m.Watched(start={})
        deadline_s, every_s = connect.read_timeout(request.headers) or self._config.command_s, _every_s(request)
        end = time.monotonic() + deadline_s
        last = time.monotonic()
        while time.monotonic() < end:
            await asyncio.sleep(_WATCH_S)
            for change in await watch.changes():
                yield m.Watched(filesystem=change)
                last = time.monotonic()
            if time.monotonic() - last > every_s:
                yield m.Watched(keepalive={})
                last = time.monotonic()
        raise RpcError(Code.DEADLINE_EXCEEDED, f"watched for {deadline_s:g} s")

    async def create_watcher(self, box: Box, request: Request, asked: m.Watch) -> object:
        """A watch that is asked from time to time."""
        watch = self._watch(box, request, asked)
        await watch.begin()
        return m.Watcher(watcher_id=box.watches.add(watch))

    async def watcher_events(self, box: Box, request: Request, asked: m.Watcher) -> object:
        """Since it was asked last."""
        return m.Changes(events=await box.watches.get(asked.watcher_id).changes())

    async def remove_watcher(self, box: Box, request: Request, asked: m.Watcher) -> object:
        """Ask no more."""
        box.watches.remove(asked.watcher_id)
        return {}

    def _watch(self, box: Box, request: Request, asked: m.Watch) -> Watch:
        files, depth = self._files(box, request), 64 if asked.recursive else 1
        return Watch(lambda: files.tree(asked.path, depth), include_entry=asked.include_entry)

    # inside

    def _files(self, box: Box, request: Request) -> Files:
        return Files(box.machine, box.shells, user=user_of(request), max_bytes=self._config.max_file_bytes)

    def _unary(self, kind: type[T], work: Callable[[Box, Request, T], Awaitable[object]]) -> Any:
        async def handle(request: Request) -> Response:
            try:
                box = box_of(self._boxes, request)
            except Refused as error:
                return shut(error)
            refused = connect.check_type(request.headers, streaming=False)
            if refused:
                return Response(refused, 415)
            try:
                given_s = connect.read_timeout(request.headers) or self._config.deadline_s
                async with asyncio.timeout(min(given_s, self._config.deadline_s)):
                    body = await body_of(request, connect.MAX_MESSAGE_BYTES)
                    said = await work(box, request, connect.decode(kind, body or b"{}"))
            except RpcError as error:
                return Response(error.body(), error.code.status, media_type=connect.JSON)
            except TimeoutError:
                late = RpcError(Code.DEADLINE_EXCEEDED, f"{request.url.path}: not within the deadline")
                return Response(late.body(), late.code.status, media_type=connect.JSON)
            return Response(msgspec.json.encode(said), media_type=connect.JSON)

        return handle

    def _streaming(self, kind: type[T], work: Callable[[Box, Request, T], AsyncIterator[object]]) -> Any:
        async def handle(request: Request) -> Response:
            try:
                box = box_of(self._boxes, request)
            except Refused as error:
                return shut(error)
            refused = connect.check_type(request.headers, streaming=True)
            if refused:
                return Response(refused, 415)

            asked = await _one(request, kind)  # before the answer begins: from then on, reading watches for a farewell

            async def told() -> AsyncIterator[bytes]:
                try:
                    if isinstance(asked, RpcError):
                        raise asked
                    async for message in work(box, request, asked):
                        yield connect.envelope(message)
                except RpcError as error:
                    yield connect.end(error)
                else:
                    yield connect.end()

            return StreamingResponse(told(), media_type=connect.STREAM, headers={"cache-control": "no-store"})

        return handle


async def _one(request: Request, kind: type[T]) -> T | RpcError:
    try:
        async with asyncio.timeout(30.0):
            asked = [a async for a in connect.envelopes(request.stream(), kind, is_answer=False)]
    except RpcError as error:
        return error
    except (TimeoutError, ClientDisconnect):
        return RpcError(Code.CANCELED, "the request did not come whole")
    return asked[0] if len(asked) == 1 else RpcError(Code.INVALID_ARGUMENT, f"{len(asked)} messages; one is expected")


async def _give(process: Process, given: m.Input, offset: int | None) -> None:
    if (given.pty is not None) != (process.asked.pty is not None):
        raise RpcError(Code.INVALID_ARGUMENT, "input for a terminal where there is none, or the other way round")
    if process.input is None:
        raise RpcError(Code.FAILED_PRECONDITION, "it was started without standard input", hint="stdin=True")
    await process.input.give(given.stdin or given.pty or b"", offset)


def _every_s(request: Request) -> float:
    text = request.headers.get(_KEEPALIVE, "")
    return float(min(max(int(text), 1), 3600)) if text.isascii() and text.isdigit() and len(text) < 6 else 90.0


# ---------------------------------------------------------------------------------------------- commands in a terminal
# The seam of machines has no terminals: util-linux's `script` makes one in the machine, `stty` sets its size. Both and
# `/dev/ptmx` are needed; where one is missing, the command ends with 127 and says so.


_MAX_SIDE = 10_000
_START: Final = """command -v script >/dev/null || { echo 'no terminal: this machine has no `script`'; exit 127; }
[ -c /dev/ptmx ] || { echo 'no terminal: this machine has no /dev/ptmx'; exit 127; }
exec script -q -e -f -c "$1" /dev/null"""
_INSIDE: Final = 'tty > "$ETUDE_TTY"; stty rows "$ETUDE_ROWS" cols "$ETUDE_COLS"; '
_RESIZE: Final = """n=0; until [ -s "$1" ] || [ $n -ge 50 ]; do n=$((n + 1)); sleep 0.1; done
exec stty -F "$(cat -- "$1")" rows "$2" cols "$3\""""


def in_terminal(asked: m.Start) -> m.Start:
    """The same request as one that `Machine.exec` can run."""
    assert asked.pty is not None, "asks for a terminal"
    size, config = asked.pty.size, asked.process
    _check(size)
    note = f"/tmp/.etude-tty-{secrets.token_hex(8)}"
    env = {"ETUDE_TTY": note, "ETUDE_ROWS": str(size.rows), "ETUDE_COLS": str(size.cols)}
    program = _INSIDE + "exec " + " ".join(quoted(word) for word in [config.cmd, *config.args])
    process = m.Config(cmd="sh", args=["-c", _START, "sh", program], envs={**config.envs, **env}, cwd=config.cwd)
    return msgspec.structs.replace(asked, process=process, stdin=True)


async def resize(machine: Machine, process: Process, size: m.Size) -> None:
    """Tell the terminal, which tells who runs in it. Raises `RpcError`."""
    _check(size)
    note = process.asked.process.envs["ETUDE_TTY"]
    words = ["sh", "-c", _RESIZE, "sh", note, str(size.rows), str(size.cols)]
    try:
        done = await machine.exec(words, key=f"tty-{secrets.token_hex(8)}", deadline_s=10.0, user=process.user)
    except MachineError as error:
        raise RpcError(Code.UNAVAILABLE, error.what, hint=error.hint) from None
    if done.exit_code:
        raise RpcError(Code.FAILED_PRECONDITION, done.output[:200].decode(errors="replace"), hint="try again")


def _check(size: m.Size) -> None:
    if not (0 < size.rows <= _MAX_SIDE and 0 < size.cols <= _MAX_SIDE):
        raise RpcError(Code.INVALID_ARGUMENT, f"a terminal of {size.rows} rows and {size.cols} columns")
