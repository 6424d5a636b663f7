"""E2B's Python client from PyPI with etude's server and namespace machines: the supported part of its API."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import httpx
import pytest
from tests.here import needs
from tests.local_agent import LocalAgents
from tests.virtual import microvm

from etude.environments import NamespaceRuntime
from etude.environments.gvisor import GVisorRuntime
from etude.environments.remote import Keyring, Quota, Template, create_app, serving
from etude.errors import MachineError
from etude.seams import Runtime

e2b = pytest.importorskip("e2b", reason="pip install e2b: it is in the extra `dev`")

KEY = "e2b_" + "0123456789" * 4
TEMPLATES = {"tpl": Template({"hello.txt": b"hello", "sub/data.bin": bytes(range(256))})}


@contextlib.contextmanager
def served(backend: str, make: Callable[[], Runtime]) -> Iterator[str]:
    """Run a server in a thread, since the synchronous client blocks, and set E2B's variables. Yields its URL."""
    needs(backend)
    told: SimpleQueue[str | Exception] = SimpleQueue()
    stop = threading.Event()

    async def main() -> None:
        try:
            runtime = make()
        except MachineError as error:
            told.put(error)
            return
        quota = Quota(key=KEY, max_live=64, creations_per_minute=6000)
        async with serving(create_app(runtime, Keyring({"tests": quota}), templates=TEMPLATES)) as url:
            told.put(url)
            await asyncio.to_thread(stop.wait)
        await runtime.close()

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    try:
        url = told.get(timeout=30)
        if isinstance(url, Exception):
            raise url
        with pytest.MonkeyPatch.context() as environment:
            for name, value in (("E2B_API_URL", url), ("E2B_SANDBOX_URL", url), ("E2B_API_KEY", KEY)):
                environment.setenv(name, value)
            yield url
    finally:
        stop.set()
        thread.join(30)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with served("namespace", NamespaceRuntime) as url:
        yield url


@pytest.fixture
def sandbox(server: str) -> Iterator[Any]:
    with e2b.Sandbox.create("tpl", timeout=60, envs={"FROM_CREATE": "here"}) as made:
        yield made


def test_a_command_has_its_output_streams_environment_folder_and_exit_code(sandbox):
    told: list[str] = []
    command = "echo out; echo err >&2; echo $FROM_CREATE $WORD; pwd"
    done = sandbox.commands.run(command, envs={"WORD": "grüße"}, cwd="/tmp", on_stdout=told.append)
    assert (done.stdout, done.stderr, done.exit_code) == ("out\nhere grüße\n/tmp\n", "err\n", 0)
    assert "".join(told) == done.stdout
    with pytest.raises(e2b.CommandExitException) as caught:
        sandbox.commands.run("echo no >&2; exit 3")
    assert (caught.value.exit_code, caught.value.stderr) == (3, "no\n")


def test_a_command_in_the_background_is_listed_fed_connected_to_and_killed(sandbox):
    handle = sandbox.commands.run("read word; echo got $word; exec sleep 1000", background=True, stdin=True)
    assert [process.pid for process in sandbox.commands.list()] == [handle.pid]
    again = sandbox.commands.connect(handle.pid)
    sandbox.commands.send_stdin(handle.pid, "it\n")
    assert next(iter(handle)) == ("got it\n", None, None)
    assert next(iter(again)) == ("got it\n", None, None)
    assert handle.kill() is True
    with pytest.raises(e2b.CommandExitException) as caught:
        handle.wait()
    assert caught.value.exit_code == 137
    assert sandbox.commands.kill(handle.pid) is False
    assert sandbox.commands.list() == []


def test_standard_input_comes_in_pieces_and_ends(sandbox):
    handle = sandbox.commands.run("cat; echo over", background=True, stdin=True)
    sandbox.commands.stream_input(handle.pid, [b"one ", "two "])
    handle.send_stdin("three ")
    handle.close_stdin()
    assert handle.wait().stdout == "one two three over\n"


def test_a_command_continues_after_its_client_disconnects(sandbox):
    handle = sandbox.commands.run("read word; echo $word > left.txt", background=True, stdin=True)
    handle.disconnect()
    sandbox.commands.send_stdin(handle.pid, "still here\n")
    sandbox.commands.run("until [ -s left.txt ]; do :; done")
    assert sandbox.files.read("left.txt") == "still here\n"


def test_a_command_is_killed_at_its_deadline(sandbox):
    with pytest.raises(e2b.TimeoutException):
        sandbox.commands.run("echo $$ > pid; exec sleep 1000", timeout=1)
    sandbox.commands.run("while kill -0 $(cat pid); do :; done 2>/dev/null")
    assert sandbox.commands.list() == []


def test_commands_and_files_are_those_of_the_user_who_is_named(sandbox):
    assert sandbox.commands.run("id -un", user="user").stdout == "user\n"
    assert sandbox.commands.run("id -un", user="root").stdout == "root\n"
    sandbox.files.write("/tmp/roots", "x", user="root")
    assert [sandbox.files.get_info(path).owner for path in ("/tmp/roots", "hello.txt")] == ["root", "user"]
    with pytest.raises(e2b.InvalidArgumentException, match="nobody-here"):
        sandbox.commands.run("true", user="nobody-here")
    with pytest.raises(e2b.InvalidArgumentException, match="nobody-here"):
        sandbox.files.list(".", user="nobody-here")


def test_files_are_written_and_read_wherever_they_are(sandbox):
    files = sandbox.files
    assert files.read("hello.txt") == "hello"
    assert files.write('new/ü "q".txt', "text").path.endswith('/new/ü "q".txt')
    assert files.write("/tmp/deep/er.bin", b"\0\xff").path == "/tmp/deep/er.bin"
    many = [{"path": "/tmp/a b.txt", "data": "1"}, {"path": "two.txt", "data": b"2"}]
    assert [one.name for one in files.write_files(many)] == ["a b.txt", "two.txt"]
    files.write("zipped.bin", b"x" * 100_000, gzip=True)
    assert files.read('new/ü "q".txt') == "text"
    assert bytes(files.read("/tmp/deep/er.bin", format="bytes")) == b"\0\xff"
    assert (files.read("/tmp/a b.txt"), files.read("two.txt")) == ("1", "2")
    assert bytes(files.read("zipped.bin", format="bytes", gzip=True)) == b"x" * 100_000
    assert b"".join(files.read("sub/data.bin", format="stream")) == bytes(range(256))
    sandbox.commands.run("ln -s hello.txt link")
    assert files.read("link") == "hello"
    with pytest.raises(e2b.FileNotFoundException):
        files.read("/absent")
    with pytest.raises(e2b.InvalidArgumentException):
        files.read("sub")


def test_files_are_listed_described_made_moved_and_removed(sandbox):
    files = sandbox.files
    sandbox.commands.run("ln -s hello.txt link; chmod 640 hello.txt")
    here = sandbox.commands.run("pwd").stdout.strip()
    assert sorted(one.name for one in files.list(".")) == ["hello.txt", "link", "sub"]
    assert f"{here}/sub/data.bin" in [one.path for one in files.list(here, depth=2)]
    info = files.get_info("hello.txt")
    assert (info.type, info.size, info.mode, info.permissions) == (e2b.FileType.FILE, 5, 0o640, "-rw-r-----")
    assert files.get_info("link").symlink_target == "hello.txt"
    assert (files.exists("sub"), files.exists("absent")) == (True, False)
    assert (files.make_dir("d/e"), files.make_dir("d/e")) == (True, False)
    assert files.rename("hello.txt", "d/e/moved.txt").path == f"{here}/d/e/moved.txt"
    files.remove("d")
    assert not files.exists("d")
    with pytest.raises(e2b.FileNotFoundException):
        files.list("absent")
    with pytest.raises(e2b.FileNotFoundException):
        files.rename("absent", "other")


@pytest.mark.parametrize(
    "name", ["$(touch ran)", "it's `touch ran`", 'a"b; touch ran', "two\nlines", "-rf", " ", "*", "\\"]
)
def test_a_name_that_a_shell_would_run_is_a_name(sandbox, name):
    path = f"/tmp/{name}"
    sandbox.files.write(path, "x")
    assert [one.path for one in sandbox.files.list("/tmp")] == [path]
    assert (sandbox.files.read(path), sandbox.files.get_info(path).name) == ("x", name)
    assert sandbox.files.rename(path, f"{path}2").path == f"{path}2"
    sandbox.files.remove(f"{path}2")
    assert (sandbox.files.exists(f"{path}2"), sandbox.files.exists("ran")) == (False, False)


def test_questions_about_files_are_answered_by_one_shell_and_by_another_when_it_was_killed(sandbox):
    for _ in range(10):
        assert sandbox.files.exists("hello.txt")
    shells = "ps -eo args | grep -c '^sh -c e_[s]tat'"
    assert sandbox.commands.run(shells).stdout == "1\n"
    sandbox.commands.run("kill -9 -1")  # all but who says so
    assert sandbox.files.exists("hello.txt")


def test_a_folder_is_watched(sandbox):
    watch = sandbox.files.watch_dir(".", recursive=True, include_entry=True)
    sandbox.files.write("sub/new.txt", "1")
    [made, written] = watch.get_new_events()
    assert (made.name, made.type.value, made.entry.name) == ("sub/new.txt", "create", "new.txt")
    assert written.type.value == "write"
    sandbox.files.remove("sub/new.txt")
    assert [(one.name, one.type.value) for one in watch.get_new_events()] == [("sub/new.txt", "remove")]
    watch.stop()


def test_a_machine_is_described_listed_renewed_and_killed(server):
    made = e2b.Sandbox.create(metadata={"who is": "this & that"}, timeout=100)
    info = made.get_info()
    assert (info.template_id, info.metadata, info.state.value) == ("base", {"who is": "this & that"}, "running")
    query = e2b.SandboxQuery(metadata={"who is": "this & that"})
    assert [one.sandbox_id for one in e2b.Sandbox.list(query=query).next_items()] == [made.sandbox_id]
    made.set_timeout(1000)
    assert made.get_info().end_at > info.end_at
    assert e2b.Sandbox.connect(made.sandbox_id).is_running()
    assert (made.kill(), made.kill(), made.is_running()) == (True, False, False)
    with pytest.raises(e2b.SandboxException):
        made.commands.run("true")
    with pytest.raises(e2b.SandboxNotFoundException):
        made.get_info()


def test_a_machine_is_made_once_for_a_key_and_not_without_a_good_api_key(server):
    made = [e2b.Sandbox.create(idempotency_key="only-once") for _ in range(2)]
    assert made[0].sandbox_id == made[1].sandbox_id
    made[0].kill()
    with pytest.raises(e2b.AuthenticationException):
        e2b.Sandbox.create(api_key="e2b_wrong")
    with pytest.raises(e2b.SandboxException, match="no snapshot or template"):
        e2b.Sandbox.create("absent")


def test_a_state_is_kept_paused_and_forked(sandbox):
    sandbox.files.write("state.txt", "before")
    kept = sandbox.create_snapshot("kept")
    assert [one.snapshot_id for one in sandbox.list_snapshots(name="kept").next_items()] == [kept.snapshot_id]
    forks = sandbox.fork(count=2, timeout=60)
    sandbox.files.write("state.txt", "after")
    for other in [*forks, e2b.Sandbox.create("kept")]:
        assert other.files.read("state.txt") == "before"
        other.kill()
    assert sandbox.pause() is True
    assert sandbox.get_info().state.value == "paused"
    with pytest.raises(e2b.TimeoutException):
        sandbox.commands.run("true")
    assert e2b.Sandbox.connect(sandbox.sandbox_id).files.read("state.txt") == "after"
    assert e2b.Sandbox.delete_snapshot("kept") is True
    with pytest.raises(e2b.SandboxException, match="memory"):
        sandbox.pause(mode="full")


def test_a_signed_address_of_a_file_is_good_until_it_runs_out(sandbox, server):
    host = {"host": f"49983-{sandbox.sandbox_id}.machines.example"}
    assert httpx.get(sandbox.download_url("hello.txt", use_signature_expiration=60), headers=host).text == "hello"
    assert httpx.get(sandbox.download_url("hello.txt"), headers=host).text == "hello"
    assert httpx.get(sandbox.download_url("hello.txt", use_signature_expiration=-1), headers=host).status_code == 401
    other = sandbox.download_url("hello.txt").replace("hello.txt", "sub%2Fdata.bin")
    assert httpx.get(other, headers=host).status_code == 401
    sent = httpx.post(sandbox.upload_url("up.txt"), headers=host, files={"file": ("ignored", b"sent")})
    assert (sent.status_code, sandbox.files.read("up.txt")) == (200, "sent")


def test_git_works_by_commands(sandbox):
    sandbox.git.init("/tmp/repository")
    assert sandbox.git.status("/tmp/repository").current_branch is not None


def test_unsupported_options_are_refused_and_not_ignored(sandbox):
    with pytest.raises(e2b.InvalidArgumentException, match="metadata"):
        sandbox.files.write("x", "x", metadata={"a": "b"})
    with pytest.raises(e2b.SandboxException, match="mcp"):
        e2b.Sandbox.create(mcp={"x": {}})
    assert sandbox.get_metrics() == []


def test_a_machine_without_terminals_says_so(sandbox):
    told: list[bytes] = []
    terminal = sandbox.pty.create(e2b.PtySize(24, 80))
    with pytest.raises(e2b.CommandExitException) as caught:
        terminal.wait(on_pty=told.append)
    assert caught.value.exit_code == 127
    assert b"no terminal: this machine has no /dev/ptmx" in b"".join(told)


@pytest.mark.skipif(shutil.which("script") is None or not Path("/dev/ptmx").exists(), reason="no terminals here")
def test_a_command_in_a_terminal_is_sized_fed_and_killed():
    with served("agent", LocalAgents), e2b.Sandbox.create() as made:
        told: list[bytes] = []
        terminal = made.pty.create(e2b.PtySize(24, 80), envs={"WORD": "hi"})
        made.pty.resize(terminal.pid, e2b.PtySize(10, 44))
        made.pty.send_stdin(terminal.pid, b"stty size; echo $WORD $((6 * 7)); exit 3\n")
        with pytest.raises(e2b.CommandExitException) as caught:
            terminal.wait(on_pty=told.append)
        assert caught.value.exit_code == 3
        assert b"10 44\r\nhi 42\r\n" in b"".join(told)
        terminal = made.pty.create(e2b.PtySize(24, 80))
        assert made.pty.kill(terminal.pid) is True
        with pytest.raises(e2b.CommandExitException):
            terminal.wait()
        assert made.commands.list() == []


def test_the_asynchronous_client_does_the_same(server):
    async def main() -> None:
        async with await e2b.AsyncSandbox.create("tpl") as made:
            told: asyncio.Queue[Any] = asyncio.Queue()
            watch = await made.files.watch_dir(".", on_event=told.put_nowait)
            done = await made.commands.run("echo from; echo made > here.txt")
            assert done.stdout == "from\n"
            assert (await asyncio.wait_for(told.get(), 20)).name == "here.txt"
            await watch.stop()
            handle = await made.commands.run("cat", background=True, stdin=True)
            async with made.commands.stream_input(handle.pid) as given:
                await given.send("piece ")
                await given.send("by piece")
            await handle.close_stdin()
            assert (await handle.wait()).stdout == "piece by piece"
            runs = [made.commands.run(f"echo {number}") for number in range(8)]
            assert [one.stdout for one in await asyncio.gather(*runs)] == [f"{number}\n" for number in range(8)]
            await made.files.write("stream.bin", b"y" * 300_000)
            async with await made.files.read("stream.bin", format="stream") as stream:
                assert sum([len(chunk) async for chunk in stream]) == 300_000

    asyncio.run(main())


@pytest.mark.parametrize(("backend", "make"), [("gvisor", GVisorRuntime), ("microvm", microvm)])
def test_a_session_over_machines_with_a_kernel_of_their_own(backend, make):
    with served(backend, make):
        made = e2b.Sandbox.create("tpl", timeout=1000)
        running = made.commands.run("echo $$ > pid; exec sleep 1000", background=True)
        told: list[str] = []
        made.commands.run("id -un; cat hello.txt; until [ -s pid ]; do :; done", on_stdout=told.append)
        assert ("".join(told), [one.pid for one in made.commands.list()]) == ("user\nhello", [running.pid])
        with pytest.raises(e2b.TimeoutException):
            made.commands.run("exec sleep 1000", timeout=0.2)
        assert made.files.write("state.txt", "before").path.endswith("/state.txt")
        made.pause()
        again = e2b.Sandbox.connect(made.sandbox_id, timeout=1000)
        assert again.files.read("state.txt") == "before"
        sleeping = again.commands.run("ps -eo args | grep -c '^sleep 1000' || true").stdout
        assert sleeping == ("1\n" if make is microvm else "0\n")  # a snapshot has the memory, or the files alone
        assert (again.kill(), again.is_running()) == (True, False)
