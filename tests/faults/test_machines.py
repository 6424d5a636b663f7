"""What machines must withstand: agents that attack the host, its limits, its files and its patience; hosts that die."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.here import opened

import etude
from etude.environments import MachineLimits, NamespaceRuntime
from etude.environments.namespace import runtime as runtimes
from etude.environments.namespace.machine import _pid_of
from etude.environments.namespace.runtime import MachineWarning
from etude.errors import MachineError
from etude.records.command import ExecResult
from etude.seams import Machine

MIB = 1 << 20


def with_machine(
    test: Callable[[Machine], Awaitable[Any]], files: dict[str, bytes] | None = None, **limits: Any
) -> Any:
    """Run an async test in one fresh machine."""

    async def main(runtime: NamespaceRuntime) -> Any:
        [machine] = await runtime.fork(await runtime.prepare(files or {}), 1)
        return await test(machine)

    return with_runtime(main, **limits)


def with_runtime(test: Callable[[NamespaceRuntime], Awaitable[Any]], **limits: Any) -> Any:
    async def main() -> Any:
        runtime = opened("namespace", lambda: NamespaceRuntime(MachineLimits(**limits), spare=0))
        try:
            return await test(runtime)
        finally:
            await runtime.close()

    return asyncio.run(main())


def python(code: str, *, deadline_s: float = 20, output_bytes: int = 65_536, **limits: Any) -> ExecResult:
    """What a Python program does in a fresh machine."""

    async def test(machine: Machine) -> ExecResult:
        command = ["python", "-c", textwrap.dedent(code)]
        return await machine.exec(command, key="1", deadline_s=deadline_s, output_bytes=output_bytes)

    result: ExecResult = with_machine(test, **limits)
    return result


def until(condition: Callable[[], bool], what: str, deadline_s: float = 600) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"waited {deadline_s} s for {what}"
        time.sleep(0.01)


# ---------------------------------------------------------------------------------------------- isolation


def test_no_socket_of_the_host_can_be_reached_not_even_on_loopback():
    name = f"\0etude-test-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(name)
        abstract.listen()
        result = python(f"""
            import socket
            for family, address in ((socket.AF_INET, ("127.0.0.1", {server.getsockname()[1]})),
                                    (socket.AF_INET, ("1.1.1.1", 53)), (socket.AF_UNIX, {name!r})):
                try:
                    socket.socket(family).connect(address); print("connected")
                except OSError as error:
                    print(type(error).__name__)
        """)
    assert b"connected" not in result.output
    assert len(result.output.split()) == 3


LOCKED = """
import fcntl, os, sys, time
def lock(path):
    fd = os.open(path, os.O_RDONLY)
    try: fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError: print(path)
for path in sys.argv[2:]: lock(path)
if sys.argv[1] == "stay":
    if os.fork() == 0: time.sleep(60)
"""


def test_a_lock_on_a_file_of_the_system_is_felt_in_one_machine_and_not_in_its_siblings():
    places = ["/", "/usr", "/usr/bin/env", "/etc/passwd", "/opt/python/bin/python", json.__file__]
    places += ["/dev/null"] if os.geteuid() == 0 else []  # the host's own, where none can be made

    async def felt(runtime: NamespaceRuntime) -> list[list[str]]:
        if any(note.startswith("system files") for note in runtime.info.notes):
            pytest.skip("this kernel mounts no overlay here")
        left, right = await runtime.fork(await runtime.prepare({"lock.py": LOCKED.encode()}), 2)
        there = await left.exec(
            ["sh", "-c", 'for p; do if test -e "$p"; then echo "$p"; fi; done', "sh", *places], key="0", deadline_s=20
        )
        paths = there.output.decode().split()
        assert len(paths) >= 5
        tries = [(left, "stay"), (left, "go"), (right, "go")]
        results = [
            await machine.exec(["python", "lock.py", how, *paths], key=str(i), deadline_s=20)
            for i, (machine, how) in enumerate(tries, 1)
        ]
        assert not any(result.exit_code for result in results), results
        return [paths, *(result.output.decode().split() for result in results)]

    paths, first, again, siblings = with_runtime(felt)
    assert (first, again, siblings) == ([], paths, [])


@pytest.mark.parametrize("family", ["AF_VSOCK", "AF_NETLINK", "AF_PACKET", "AF_ALG"])
def test_socket_families_that_reach_past_the_network_namespace_are_refused(family):
    result = python(f"import socket; socket.socket(socket.{family}, socket.SOCK_DGRAM)")
    assert result.exit_code == 1
    assert b"not supported" in result.output


def test_files_of_the_host_are_not_visible(tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("hidden answer")
    package = Path(etude.__file__).parent
    result = python(f"""
        import os
        print(os.path.exists({str(secret)!r}), os.path.exists({str(package)!r}), sorted(os.listdir("/tmp")))
        print(sorted(set(os.listdir("/")) & {{"home", "mnt", "sys", "boot", "run", "srv"}}))
    """)
    assert result.output == b"False False []\n[]\n"


def test_the_system_is_read_only():
    result = python("""
        import os, sys
        for path in ("/x", "/usr/bin/x", "/etc/x", "/opt/python/bin/x", sys.base_prefix + "/x", "/dev/x"):
            try:
                open(path, "w"); print("wrote", path)
            except OSError:
                pass
    """)
    assert (result.exit_code, result.output) == (0, b"")


def test_processes_of_the_host_and_of_other_machines_are_not_visible():
    async def test(runtime):
        left, right = await runtime.fork(await runtime.prepare({}), 2)
        sleeping = asyncio.create_task(left.exec(["sleep", "30"], key="1", deadline_s=3))
        listing = "import os; print(*(p for p in os.listdir('/proc') if p.isdigit()), os.getpid())"
        seen = (await right.exec(["python", "-c", listing], key="1", deadline_s=20)).output.split()
        await left.close()
        with contextlib.suppress(MachineError):
            await sleeping
        return seen

    *seen, own = with_runtime(test)
    assert set(seen) == {b"1", own}


def test_nothing_of_the_parents_environment_or_descriptors_is_there():
    os.environ["ETUDE_TEST_SECRET"] = "hunter2"
    try:
        result = python("""
            import os
            print("hunter2" in str(os.environ), len(os.listdir("/proc/self/fd")) - 1)
            for name in ("environ", "cmdline", "mem", "fd", "maps", "root"):
                try:
                    os.listdir(f"/proc/1/{name}") if name == "fd" else open(f"/proc/1/{name}").read(1)
                    print("read", name)
                except OSError:
                    pass
        """)
    finally:
        del os.environ["ETUDE_TEST_SECRET"]
    assert result.output.replace(b"read cmdline\n", b"") == b"False 3\n"


def test_control_groups_of_the_host_have_no_name_in_a_machine():
    result = python(
        "print({line.rstrip().split(':', 2)[2] for line in open('/proc/self/cgroup') if ':memory:' in line})"
    )
    assert result.output in (b"{'/'}\n", b"set()\n")


def test_a_tool_sees_no_frame_or_module_of_the_machinery():
    result = python("""
        import gc, sys
        frame, names = sys._getframe(), []
        while frame:
            names += [n for n in frame.f_locals if n in ("control", "request", "fields", "stdin", "identity")]
            frame = frame.f_back
        print(names, [m for m in sys.modules if m.startswith("guest")])
    """)
    assert result.output == b"[] []\n"


@pytest.mark.parametrize(
    "call",
    [
        "libc.unshare(0x10000000)",  # a user namespace
        "libc.ptrace(16, 1, 0, 0)",
        "libc.mount(b'none', b'/tmp', b'tmpfs', 0, 0)",
        "libc.umount2(b'/proc', 2)",
        "libc.setns(0, 0)",
        "libc.syscall(321, 0, 0, 0) if os.uname().machine == 'x86_64' else libc.syscall(280, 0, 0, 0)",  # bpf
        "libc.syscall(425, 1, 0)",  # io_uring_setup
        "libc.syscall(438, 0, 0, 0)",  # pidfd_getfd
        "libc.prlimit(1, 7, 0, 0)",  # another process's limits
        "libc.chroot(b'.')",
        "libc.setuid(0)",
        "libc.sethostname(b'x', 1)",
        "libc.kill(1, 9) or (-1 if os.path.exists('/proc/1') else 0)",
    ],
)
def test_a_call_that_reaches_out_of_the_machine_fails(call):
    result = python(f"import ctypes, os; libc = ctypes.CDLL(None); print({call})")
    assert result.output == b"-1\n"


CONFINEMENT = """
import json, os, resource
names = [n for n in dir(resource) if n.startswith("RLIMIT_")]
status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
kept = ("Umask", "Uid", "Gid", "Groups", "SigBlk", "SigIgn", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb",
        "NoNewPrivs", "Seccomp", "Seccomp_filters", "Cpus_allowed_list")
print(json.dumps({
    **{name: status[name] for name in kept},
    "limits": {n: resource.getrlimit(getattr(resource, n)) for n in names},
    "namespaces": {n: os.readlink(f"/proc/self/ns/{n}") for n in sorted(os.listdir("/proc/self/ns")) if n != "cgroup"},
    "environ": {k: v for k, v in sorted(os.environ.items())},
    "files": [open(f"/proc/self/{n}").read() for n in ("cgroup", "oom_score_adj", "uid_map", "gid_map", "mountinfo")],
    "session": os.getsid(0) == os.getpgrp() == os.getpid(),
    "cwd": os.getcwd(),
    "descriptors": sorted(os.listdir("/proc/self/fd"), key=int)[:-1],  # the last is the listing's
    "streams": [oct(os.fstat(fd).st_mode) for fd in (0, 1, 2)],
}, indent=1))
"""


def test_a_command_is_confined_alike_whether_the_agent_runs_it_or_the_prepared_interpreter():
    async def test(machine):
        if machine._agent is None:
            pytest.skip("no agent was built")
        alike = {"deadline_s": 20, "output_bytes": 1 << 20, "cwd": "sub", "env": {"WORD": "x"}, "stdin": b"in"}
        ways = ["python", "/opt/python/bin/python"]
        return [await machine.exec([way, "-c", CONFINEMENT], key=way, **alike) for way in ways]

    quick, agents = (json.loads(result.output) for result in with_machine(test, {"sub/x": b""}))
    assert quick == agents
    assert quick["descriptors"] == ["0", "1", "2"]
    assert quick["CapPrm"].strip("\t0") == ""


def test_root_of_a_machine_owns_its_files_and_nothing_else():
    attempts = {
        "its own files": "touch mine; chown user mine; chmod 0 mine; cat mine; kill -0 1",
        "the system": "touch /usr/bin/x",
        "a mount": "mount -t tmpfs none /tmp",
        "a device": "mknod /tmp/null c 1 3",
        "the host's name": "hostname other",
        "the agent's memory": "cat /proc/1/mem",
        "the agent's descriptors": "ls /proc/1/fd",
        "the agent's life": "kill -9 1; sleep 0.1; kill -0 1 && exit 9",
        "the clock": "date -s @0",
        "a namespace": "unshare -n true",
    }

    async def test(machine):
        if "root" not in machine._users:
            pytest.skip("machines have one user here")
        return {
            what: await machine.exec(["sh", "-c", script], key=what, deadline_s=20, user="root")
            for what, script in attempts.items()
        }

    codes = {what: result.exit_code for what, result in with_machine(test).items()}
    assert codes.pop("its own files") == 0
    assert codes.pop("the agent's life") == 9
    assert 0 not in codes.values(), codes


def test_nothing_in_a_machine_is_spared_before_the_hosts_own_when_memory_runs_out():
    script = "cd /proc/self; cat oom_score_adj ../1/oom_score_adj; echo 0 > oom_score_adj; cat oom_score_adj"

    async def test(machine):
        if machine._agent is None:
            pytest.skip("no agent was built")
        return await machine.exec(["sh", "-c", script], key="score", deadline_s=20)

    own, first, *_, lowered = with_machine(test).output.decode().split()
    may_pin = may(CAP_SYS_RESOURCE)
    assert (own, first, int(lowered) >= 900 or not may_pin) == ("1000", "900", True)


CAP_SYS_RESOURCE = 24


def may(bit: int) -> bool:
    """Whether this process has a capability, and has it over the whole host."""
    held = int(Path("/proc/self/status").read_text().partition("CapEff:")[2].split()[0], 16)
    return bool(held >> bit & 1) and Path("/proc/self/uid_map").read_text().split() == ["0", "0", str(2**32 - 1)]


def test_adopting_orphans_cannot_be_given_up():
    code = "import ctypes; prctl = ctypes.CDLL(None).prctl; print(prctl(36, 0), prctl(36, 1))"

    async def test(machine):
        ways = ["python", "/opt/python/bin/python"]
        return [(await machine.exec([way, "-c", code], key=way, deadline_s=20)).output for way in ways]

    assert with_machine(test) == [b"-1 0\n"] * 2


def test_clone3_is_unknown_so_that_programs_fall_back():
    result = python(
        "import ctypes; l = ctypes.CDLL(None, use_errno=True); l.syscall(435, 0, 0); print(ctypes.get_errno())"
    )
    assert result.output == b"38\n"


def test_threads_and_subprocesses_work_all_the_same():
    result = python("""
        import subprocess, sys, threading
        out = []
        thread = threading.Thread(target=lambda: out.append(subprocess.check_output(["sh", "-c", "echo $((6*7))"])))
        thread.start(); thread.join()
        print(out, subprocess.check_output([sys.executable, "-c", "print(1)"]))
    """)
    assert result.output == b"[b'42\\n'] b'1\\n'\n"


# ---------------------------------------------------------------------------------------------- limits


def test_a_fork_bomb_stays_inside_its_limit_and_dies_at_the_deadline():
    bomb = """
        import os
        while True:
            try:
                if os.fork() == 0: continue
            except OSError: pass
            with open("peak", "a") as peak: peak.write("x" * sum(p.isdigit() for p in os.listdir("/proc")) + "\\n")
    """

    async def test(machine):
        result = await machine.exec(["python", "bomb.py"], key="1", deadline_s=5)
        after = await machine.exec(["python", "-c", "print('alive')"], key="2", deadline_s=20)
        return result, after, await machine.read("peak", max_bytes=1 << 30)

    result, after, seen = with_machine(test, {"bomb.py": textwrap.dedent(bomb).encode()}, processes=32)
    assert (result.timed_out, result.exit_code) == (True, 137)
    assert after.output == b"alive\n"
    assert 16 <= max(map(len, seen.split())) <= 33, "and the machine's first process"


def test_the_number_of_processes_is_bounded():
    result = python(
        """
        import os, time
        n = 0
        try:
            while True:
                if os.fork() == 0:
                    time.sleep(60)
                n += 1
        except OSError:
            print(n)
        """,
        processes=16,
    )
    assert 8 <= int(result.output) <= 16


def test_a_gibibyte_of_output_comes_back_capped_with_head_and_tail():
    script = "echo first; head -c 1073741824 /dev/zero; echo; echo last"

    async def test(machine):
        return await machine.exec(["sh", "-c", script], key="1", deadline_s=600, output_bytes=4096)

    result = with_machine(test)
    assert result.truncated
    assert len(result.output) <= 4096
    assert result.output.startswith(b"first\n")
    assert result.output.endswith(b"last\n")
    assert b"left out" in result.output


def test_everything_a_command_started_is_dead_at_its_deadline():
    script = """
        import os, signal, time
        for _ in range(3):
            if os.fork() == 0:
                os.setsid()
                for s in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT): signal.signal(s, signal.SIG_IGN)
                if os.fork() == 0: time.sleep(1000)
                time.sleep(1000)
        time.sleep(1000)
    """

    async def test(machine):
        hung = await machine.exec(["python", "-c", textwrap.dedent(script)], key="1", deadline_s=0.5)
        listing = "import os; print(*(p for p in os.listdir('/proc') if p.isdigit() and p != str(os.getpid())))"
        left = await machine.exec(["python", "-c", listing], key="2", deadline_s=20)
        return hung, left

    hung, left = with_machine(test)
    assert hung.timed_out
    assert hung.wall_s < 100
    assert left.output == b"1\n"


def test_a_daemon_that_outlives_its_command_ends_when_the_machine_is_frozen():
    mark = f"a daemon of {os.getpid()}"
    daemon = 'sh -c "while :; do printf . >> tick; done" "$0" & echo up'

    def runs():
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark.encode() in (process / "cmdline").read_bytes():
                    return True
        return False

    async def test(machine):
        up = await machine.exec(["sh", "-c", daemon, mark], key="1", deadline_s=20)
        grows = await machine.exec(
            ["sh", "-c", "a=$(wc -c < tick || echo 0); while test $(wc -c < tick) -le $a; do :; done"],
            key="2",
            deadline_s=20,
        )
        assert runs(), "the host sees it"
        await machine.freeze()
        return up, grows, runs(), await machine.read("tick", max_bytes=1 << 30)

    up, grows, lives_on, left = with_machine(test)
    assert (up.exit_code, up.output, grows.exit_code) == (0, b"up\n", 0)
    assert not lives_on
    assert left.strip(b".") == b""


@pytest.mark.parametrize(
    ("limits", "exit_code", "says"),
    [
        ({"memory_bytes": 64 * MIB, "address_bytes": 8192 * MIB}, 137, b""),  # its control group's
        ({"memory_bytes": 1024 * MIB, "address_bytes": 512 * MIB}, 1, b"MemoryError"),
    ],
)
def test_a_memory_hog_is_killed_and_the_machine_goes_on(limits, exit_code, says):
    hog = "x = []\nwhile len(x) < 512: x.append(bytearray(8 * 2**20))"

    async def test(machine):
        result = await machine.exec(["python", "-c", hog], key="1", deadline_s=30)
        after = await machine.exec(["python", "-c", "print('alive')"], key="2", deadline_s=20)
        return result, after

    result, after = with_machine(test, **limits)
    assert (result.exit_code, result.timed_out) == (exit_code, False)
    assert says in result.output
    assert after.output == b"alive\n"


@pytest.mark.parametrize("folder", [".", "/tmp"])
def test_a_disk_filler_gets_no_more_than_the_machine_has(folder):
    filler = f"""
        import os
        n = 0
        try:
            while True:
                with open(f"{folder}/{{n}}", "wb") as file: file.write(bytes(2**20))
                n += 1
        except OSError as error:
            print(n, error.errno)
    """
    result = python(filler, work_bytes=16 * MIB, tmp_bytes=16 * MIB)
    assert result.output == b"16 28\n" or result.output == b"15 28\n"


def test_a_million_empty_files_are_refused_by_number():
    code = "n = 0\ntry:\n    while True: open(str(n), 'w').close(); n += 1\nexcept OSError: print(n < 1100)"
    assert python(code, inodes=1024).output == b"True\n"


def test_a_file_that_is_too_large_for_the_disk_is_an_error_to_the_writer():
    async def test(machine):
        with pytest.raises(OSError, match=r"No space|too large"):
            await machine.write("big", bytes(3 * MIB))
        await machine.write("small", b"x")

    with_machine(test, work_bytes=2 * MIB)


# ---------------------------------------------------------------------------------------------- links


@pytest.mark.parametrize("target", ["/etc/passwd", "../../etc/passwd", "real.txt", "/proc/self/environ", "/dev/zero"])
def test_a_link_is_neither_read_nor_written_through(target):
    async def test(machine):
        await machine.exec(["ln", "-s", target, "link"], key="1", deadline_s=20)
        with pytest.raises(ValueError, match="link"):
            await machine.read("link")
        with pytest.raises(ValueError, match="link"):
            await machine.write("link", b"x")
        assert await machine.read("real.txt") == b"real"

    with_machine(test, {"real.txt": b"real"})


def test_a_linked_folder_is_no_way_out():
    async def test(machine):
        await machine.exec(["ln", "-s", "/tmp", "out"], key="1", deadline_s=20)
        with pytest.raises(ValueError, match="link"):
            await machine.write("out/x", b"x")
        with pytest.raises(ValueError, match="link"):
            await machine.read("out/x")

    with_machine(test)


def test_a_pipe_in_place_of_a_file_does_not_hang_the_reader():
    async def test(machine):
        await machine.exec(["mkfifo", "calc.py"], key="1", deadline_s=20)
        for attempt in (machine.read("calc.py"), machine.write("calc.py", b"x")):
            with pytest.raises(ValueError, match="not a regular file"):
                await attempt

    with_machine(test)


def test_links_survive_a_snapshot_as_links_and_pipes_are_left_out():
    async def test(runtime):
        [machine] = await runtime.fork(await runtime.prepare({"a.txt": b"a"}), 1)
        await machine.exec(
            ["sh", "-c", "ln -s a.txt b; ln -s /etc e; mkfifo p; mkdir d; chmod +x a.txt"], key="1", deadline_s=20
        )
        [child] = await runtime.fork(await machine.snapshot(), 1)
        return await child.exec(["sh", "-c", "readlink b e; ls; test -x a.txt"], key="1", deadline_s=20)

    result = with_runtime(test)
    assert (result.exit_code, result.output) == (0, b"a.txt\n/etc\na.txt\nb\nd\ne\n")


# ---------------------------------------------------------------------------------------------- commands


def test_a_cancelled_caller_gets_the_same_run_by_its_key():
    async def test(machine):
        command = ["python", "-c", "import time; time.sleep(0.3); open('runs', 'a').write('x'); print('done')"]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await machine.exec(command, key="k", deadline_s=20)
        again = await machine.exec(command, key="k", deadline_s=20)
        return again.output, await machine.read("runs")

    assert with_machine(test) == (b"done\n", b"x")


def test_an_edit_within_the_same_second_and_of_the_same_size_is_seen():
    async def test(machine):
        outputs = []
        for i, sign in enumerate("+-+"):
            await machine.write("calc.py", f"def f(): return 3 {sign} 2\n".encode())
            outputs.append((await machine.exec(["python", "run.py"], key=str(i), deadline_s=20)).output)
        return outputs

    assert with_machine(test, {"run.py": b"import calc; print(calc.f())\n"}) == [b"5\n", b"1\n", b"5\n"]


@pytest.mark.parametrize(
    ("argv", "code", "output"),
    [
        (["python", "-c", "import sys; print(sys.argv)", "a", "-b"], 0, b"['-c', 'a', '-b']\n"),
        (["python", "-m", "pkg", "z"], 0, b"pkg ['z']\n"),
        (["python3", "sub/show.py", "1"], 0, b"__main__ ['sub/show.py', '1'] /workspace/sub\n"),
        (["python", "-c", "import sys; sys.exit('bye')"], 1, b"bye\n"),
        (["python", "-c", "raise SystemExit(7)"], 7, b""),
        (["python", "-c", "import atexit; atexit.register(print, 'last'); print('first')"], 0, b"first\nlast\n"),
        (["python", "-c", "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"], 143, b""),
        (["python", "-c", "import os; os._exit(9)"], 9, b""),
        (
            ["python", "absent.py"],
            2,
            b"python: can't open file '/workspace/absent.py': [Errno 2] No such file or directory\n",
        ),
        (["sh", "-c", "exit 4"], 4, b""),
        (["/workspace/sub"], 126, b"/workspace/sub: Permission denied\n"),
    ],
)
def test_a_command_behaves_as_from_a_shell(argv, code, output):
    files = {
        "pkg/__main__.py": b"import sys; print('pkg', sys.argv[1:])\n",
        "sub/show.py": b"import sys; print(__name__, sys.argv, sys.path[0])\n",
    }

    async def test(machine):
        return await machine.exec(argv, key="1", deadline_s=20)

    result = with_machine(test, files)
    assert (result.exit_code, result.output) == (code, output)


def test_the_prepared_interpreter_answers_as_a_fresh_one_does():
    probe = b"""
import os, sys, threading, traceback
print(sys.path, __name__, __file__, sys.argv, os.getcwd(), hash("x"), sys.flags.hash_randomization)
print(sys.stdin.read(), sys.stdout.encoding, sys.stderr.encoding, sys.stdin.seekable())
print([threading.current_thread().name], sys.getrecursionlimit(), "exit" in dir(__builtins__))
def f(): raise KeyError("k")
try: f()
except KeyError: traceback.print_exc()
f()
"""

    async def test(machine):
        quick = await machine.exec(["python", "probe.py", "a"], key="1", deadline_s=20, stdin=b"in")
        fresh = await machine.exec(["/opt/python/bin/python", "probe.py", "a"], key="2", deadline_s=20, stdin=b"in")
        return quick, fresh

    quick, fresh = with_machine(test, {"probe.py": probe})
    assert quick.output == fresh.output
    assert quick.exit_code == fresh.exit_code == 1


def test_randomness_differs_between_siblings_and_between_commands():
    async def test(runtime):
        machines = await runtime.fork(await runtime.prepare({}), 2)
        code = "import random, uuid; print(random.random(), uuid.uuid4())"
        return [(await m.exec(["python", "-c", code], key=k, deadline_s=20)).output for m in machines for k in "ab"]

    assert len(set(with_runtime(test))) == 4


# ---------------------------------------------------------------------------------------------- hosts and launchers


HOST = """
import asyncio, sys
from etude.environments import NamespaceRuntime

async def main():
    runtime = NamespaceRuntime(spare=3)
    machines = await runtime.fork(await runtime.prepare({}), 4)
    work = [asyncio.create_task(m.exec(["sleep", "1000"], key="1", deadline_s=1000)) for m in machines]
    print(runtime._pool.launcher.pid, runtime._pool.launcher._process.pid, flush=True)
    await asyncio.gather(*work)

asyncio.run(main())
"""


def groups_of(pid: int) -> list[Path]:
    own = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    folders = [Path(f"/sys/fs/cgroup/{names}{path}") for _, names, path in own]
    return [g for f in folders if f.is_dir() for g in f.glob(f"etude-{pid}-*")]


def descendants(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        children = [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        return [*children, *(d for c in children for d in descendants(c))]
    return []


@pytest.mark.parametrize("victim", ["host", "steward", "launcher"])
def test_killing_the_host_or_a_launcher_leaves_no_process_and_no_mount(victim):
    with_runtime(lambda _: asyncio.sleep(0))  # skips where there are no namespaces
    mounts = Path("/proc/self/mounts").read_text()
    host = subprocess.Popen([sys.executable, "-c", HOST], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert host.stdout is not None
    launcher, steward = map(int, host.stdout.readline().split())
    until(lambda: len(descendants(steward)) >= 13, "the machines and their commands")
    everybody = [steward, *descendants(steward)]
    os.kill({"host": host.pid, "steward": steward, "launcher": launcher}[victim], signal.SIGKILL)
    try:
        until(lambda: not any(_runs(p) for p in everybody), "every process to end")
        if victim != "steward":  # who removes them; the next start sweeps
            until(lambda: not groups_of(host.pid), "the control groups to go")
    finally:
        host.kill()
        host.wait()
        host.stdout.close()
    with_runtime(lambda _: asyncio.sleep(0))
    assert not groups_of(host.pid)
    assert Path("/proc/self/mounts").read_text() == mounts


def _runs(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.parametrize("victim", ["launcher", "runner", "template"])
def test_a_dead_launcher_is_evidence_and_the_next_fork_starts_another(victim):
    async def test(runtime):
        launcher = runtime._pool.launcher
        if victim == "template" and not launcher.info["agent"]:
            pytest.skip("no agent was built")
        snapshot = await runtime.prepare({"a": b"1"})
        [machine] = await runtime.fork(snapshot, 1)
        processes = descendants(launcher.pid)  # the machine's first one is the last of them
        helpers = dict(zip(("runner", "template"), processes[:-1], strict=False))
        running = asyncio.create_task(machine.exec(["sleep", "100"], key="1", deadline_s=100))
        os.kill({"launcher": launcher.pid, **helpers}[victim], signal.SIGKILL)
        with pytest.raises(MachineError, match="launcher"):
            await running
        with pytest.raises(MachineError, match="launcher"):
            await machine.read("a")
        [another] = await runtime.fork(snapshot, 1)
        return await another.read("a")

    assert with_runtime(test) == b"1"


def test_closing_a_runtime_leaves_nothing():
    async def test(runtime):
        await runtime.fork(await runtime.prepare({}), 5)
        return runtime._pool.launcher._process.pid, descendants(runtime._pool.launcher._process.pid)

    steward, machines = with_runtime(test)
    assert machines
    assert not any(_runs(p) for p in (steward, *machines))
    assert not groups_of(os.getpid())


def test_a_machine_killed_from_outside_counts_as_a_killed_command_not_as_an_error():
    async def test(runtime):
        [machine] = await runtime.fork(await runtime.prepare({}), 1)
        signal.pidfd_send_signal(machine._handle.init, signal.SIGKILL)
        result = await machine.exec(["true"], key="1", deadline_s=20)
        with pytest.raises(FileNotFoundError, match="gone"):
            await machine.read("x")
        return result

    assert with_runtime(test).exit_code == 137


def test_a_machine_that_was_killed_from_outside_is_closed_at_once():
    async def test(machine):
        signal.pidfd_send_signal(machine._handle.init, signal.SIGKILL)
        assert (await machine.exec(["true"], key="1", deadline_s=20)).exit_code == 137
        before = time.monotonic()
        await machine.close()
        return time.monotonic() - before

    assert with_machine(test) < runtimes._END_S


PTRACE_ATTACH, WALL = 16, 0x40000000


def begin_tracing(pid: int) -> bool:
    """Trace a process from now on. False: this process may not."""
    if ctypes.CDLL(None).ptrace(PTRACE_ATTACH, pid, 0, 0) != 0:
        return False
    wait_traced(pid)
    return True


def wait_traced(pid: int) -> None:
    os.waitpid(pid, WALL)


def test_the_slot_of_a_killed_machine_that_does_not_end_is_free_again_once_it_has(monkeypatch):
    """A traced process is not gone before its tracer has waited for it, and so neither is its machine."""
    monkeypatch.setattr(runtimes, "_END_S", 0.2)

    async def hold(machine: Any) -> int:
        """Trace a process of the machine; returns its PID."""
        init = _pid_of(machine._handle.init)
        begun = asyncio.Event()
        command = ["sh", "-c", "echo; sleep 600 & wait"]
        running = asyncio.create_task(
            machine.exec(command, key="1", deadline_s=600, on_output=lambda chunk: begun.set())
        )
        async with asyncio.timeout(60):
            await begun.wait()
        [child, *_] = map(int, Path(f"/proc/{init}/task/{init}/children").read_text().split())
        if not begin_tracing(child):
            pytest.skip("this process may not trace others")
        running.cancel()
        return child

    async def main() -> None:
        runtime = opened("namespace", lambda: NamespaceRuntime(max_machines=2, spare=0))
        held: list[int] = []
        try:
            tree = await runtime.prepare({})
            left, right = await runtime.fork(tree, 2)
            held.append(await hold(left))
            with pytest.warns(MachineWarning, match="machine 1 has not ended 0.2 s .* occupy 1 of 2 slots"):
                await left.close()  # no error: what it was for is known
            held.append(await hold(right))
            with pytest.raises(MachineError, match=r"machine 2 has not ended.*: killed machines occupy 2 of 2"):
                await right.close()
            with pytest.raises(MachineError, match="2 are alive, 2 of them killed"):
                await runtime.fork(tree, 1, deadline_s=0.5)
            while held:
                wait_traced(held.pop())
            [again, _] = await runtime.fork(tree, 2, deadline_s=60)
            assert (await again.exec(["true"], key="1", deadline_s=20)).exit_code == 0
        finally:
            for pid in held:
                os.kill(pid, signal.SIGKILL)
                wait_traced(pid)
            await runtime.close()

    asyncio.run(main())


def test_more_machines_than_there_is_room_for_wait_until_others_are_closed_or_the_deadline():
    async def main():
        runtime = opened("namespace", lambda: NamespaceRuntime(max_machines=2, spare=1))
        snapshot = await runtime.prepare({})
        first, second = await runtime.fork(snapshot, 2)
        with pytest.raises(MachineError, match="free slots"):
            await runtime.fork(snapshot, 1, deadline_s=0.1)
        waiting = asyncio.create_task(runtime.fork(snapshot, 1))
        await first.close()
        [third] = await waiting
        await asyncio.gather(second.close(), third.close())
        assert len(await runtime.fork(snapshot, 2)) == 2
        with pytest.raises(MachineError, match="at most 2"):
            await runtime.fork(snapshot, 3)
        await runtime.close()

    asyncio.run(main())


def test_files_that_cannot_be_a_tree_are_refused():
    async def test(runtime):
        for files in ({"a": b"", "a/b": b""}, {"../a": b""}, {"": b""}):
            with pytest.raises(ValueError):  # noqa: PT011 - the kind is the promise
                await runtime.prepare(files)

    with_runtime(test)


def test_without_user_namespaces_the_error_names_the_alternatives():
    script = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$0" -c "$1"'
    code = "from etude.environments import NamespaceRuntime; NamespaceRuntime()"
    command = ["unshare", "--user", "--map-root-user", "sh", "-c", script, sys.executable, code]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    except FileNotFoundError:
        pytest.skip("no unshare(1)")
    if "user namespace" not in done.stderr:
        pytest.skip(done.stderr[-300:])
    assert "MachineError: machines cannot be created here: making a user namespace" in done.stderr
    for way in ("sysctl", "CAP_SYS_ADMIN", "container", "remote backend"):
        assert way in done.stderr


def test_an_interpreter_that_is_not_there_is_named():
    with pytest.raises(MachineError, match="/no/such/python"):
        NamespaceRuntime(python="/no/such/python")


# ---------------------------------------------------------------------------------------------- without privilege


ROOTLESS = """
import asyncio, json
from etude.environments import NamespaceRuntime, MachineLimits

BOMB = '''import os, time
n, mine = 0, os.getpid()
try:
    while True:
        if os.fork() == 0: time.sleep(60)
        n += 1
except OSError: print(n, flush=True); os.kill(0, 9)'''

async def main():
    runtime = NamespaceRuntime(MachineLimits(processes=16))
    left, right = await runtime.fork(await runtime.prepare({"hi.py": b"print('hi')"}), 2)
    async def out(machine, code):
        out.n += 1
        return (await machine.exec(["python", "-c", code], key=str(out.n), deadline_s=20)).output.decode()
    out.n = 0
    facts = {
        "hi": (await left.exec(["python", "hi.py"], key="hi", deadline_s=20)).output.decode(),
        "ids": await out(left, "import os; print(os.getuid(), os.getgid())"),
        "caps": await out(left, "print(int(open('/proc/self/status').read().split('CapEff:')[1].split()[0], 16))"),
        "processes": int(await out(left, BOMB)) + 0 * int(await out(right, BOMB)),
        "kill": await out(left, "import os; os.kill(1, 9); print('sent')"),
        "memory": await out(left, "open('/proc/1/mem')"),
        "loop": await out(left, "import socket; print(socket.socket().connect_ex(('127.0.0.1', 22)) != 0)"),
        "again": (await left.exec(["sh", "-c", "cat hi.py"], key="again", deadline_s=20)).output.decode(),
        "limits": runtime.limits,
    }
    await runtime.close()
    print(json.dumps(facts))

asyncio.run(main())
"""


def test_without_any_privilege_machines_are_the_same(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("not root: every other test here already runs without privilege")
    nobody: dict[str, Any] = {"user": 65534, "group": 65534, "extra_groups": [], "cwd": "/", "timeout": 600}
    packages = os.pathsep.join(p for p in sys.path if p)
    environment = {"PYTHONPATH": packages, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    for python in (os.path.realpath(sys.executable), "/usr/bin/python3"):
        with contextlib.suppress(OSError):
            command = [python, "-c", "import numpy, msgspec, etude"]
            if subprocess.run(command, env=environment, capture_output=True, **nobody).returncode == 0:
                break
    else:
        pytest.skip("nobody can run an interpreter with etude's dependencies")
    done = subprocess.run([python, "-c", ROOTLESS], env=environment, capture_output=True, text=True, **nobody)
    if "user namespace" in done.stderr:
        pytest.skip(done.stderr[-500:])
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["hi"] == "hi\n"
    assert facts["ids"] == "1000 1000\n"
    assert facts["caps"] == "0\n"
    assert 8 <= facts["processes"] <= 16
    assert facts["kill"] == "sent\n"
    assert "Permission denied" in facts["memory"]
    assert facts["loop"] == "True\n"
    assert facts["again"] == "print('hi')"
    assert "per process" in facts["limits"]["memory"]
