"""Attack programs: reach other processes through their memory, descriptors, environment, files and signals.

Each program returns what it reached, as text; "" if it reached nothing. A refused attempt can also raise an error.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal

from .kit import FACTS, Refused, call, first, in_child, others, read, refusal

_ATTACH, _DETACH, _SEIZE = 16, 17, 0x4206


def attach_by_ptrace() -> str:
    """Try to attach a debugger to another process: the first one, our parent, a sibling's; return evidence of success,
    or ""."""

    def attach(pid: int, how: int) -> str:
        call("ptrace", how, pid, 0, 0)
        with contextlib.suppress(OSError, Refused):
            os.waitpid(pid, 0x40000000)  # __WALL
            call("ptrace", _DETACH, pid, 0, 0)
        return f"attached to {pid}"

    return in_child(lambda: first([lambda p=p, h=h: attach(p, h) for p in others() for h in (_ATTACH, _SEIZE)]))  # type: ignore[misc]


def have_the_parent_traced() -> str:
    """Try to make the parent this process's debugger (PTRACE_TRACEME), to confuse it; return evidence of success, or
    ""."""
    return in_child(lambda: "traced" if refusal("ptrace", 0, 0, 0, 0) == "" and not FACTS.get("plain") else "")


def read_memory_by_file() -> str:
    """Try to read another process's memory through /proc/PID/mem; return evidence of success, or ""."""

    def look(pid: int) -> str:
        with open(f"/proc/{pid}/maps") as maps:
            spans = [line.split()[0] for line in maps if " rw-p " in line]
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            for span in spans:
                start, end = (int(part, 16) for part in span.split("-"))
                with contextlib.suppress(OSError, OverflowError):
                    memory.seek(start)
                    if memory.read(min(end - start, 1 << 20)):
                        return f"read memory of {pid}"
        return ""

    return first([lambda p=p: look(p) for p in others()])  # type: ignore[misc]


def write_memory_by_file() -> str:
    """Try to open another process's memory for writing; return evidence of success, or ""."""
    return first([lambda p=p: _opens(f"/proc/{p}/mem", os.O_RDWR) for p in others()])  # type: ignore[misc]


def read_memory_by_call() -> str:
    """Try to read the first mapping of another process (process_vm_readv); return evidence of success, or ""."""

    class Span(ctypes.Structure):
        _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))

    def look(pid: int) -> str:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps") as maps:
            start = int(maps.readline().split("-")[0], 16)
            into = ctypes.create_string_buffer(16)
            mine, theirs = Span(ctypes.addressof(into), 16), Span(start, 16)
            call("process_vm_readv", pid, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0)
            return f"read {into.raw.hex()} of {pid}"
        return ""

    return first([lambda p=p: look(p) for p in others()])  # type: ignore[misc]


def take_descriptors() -> str:
    """Try to copy file descriptors of another process (pidfd_getfd); return evidence of success, or ""."""

    def take(pid: int, number: int) -> str:
        handle = call("pidfd_open", pid, 0)
        return f"have descriptor {call('pidfd_getfd', handle, number, 0)} of {pid}"

    return first([lambda p=p, n=n: take(p, n) for p in others() for n in range(8)])  # type: ignore[misc]


def open_descriptors() -> str:
    """Try to read through /proc/PID/fd which files another process has open; return evidence of success, or ""."""

    def look(pid: int) -> str:
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                return f"{pid} has {os.readlink(f'/proc/{pid}/fd/{name}')}"
        return ""

    return first([lambda p=p: look(p) for p in others()])  # type: ignore[misc]


def enter_roots() -> str:
    """Try to list another process's root or working directory through /proc; return evidence of success, or ""."""

    def look(pid: int, name: str) -> str:
        theirs, ours = os.stat(f"/proc/{pid}/{name}/"), os.stat("/" if name == "root" else ".")
        same = (theirs.st_dev, theirs.st_ino) == (ours.st_dev, ours.st_ino)
        return "" if same else f"/proc/{pid}/{name} is another: {os.listdir(f'/proc/{pid}/{name}/')[:5]}"

    return first([lambda p=p, n=n: look(p, n) for p in others() for n in ("root", "cwd")])  # type: ignore[misc]


def read_environments() -> str:
    """Try to read the environment, stack or I/O counters of another process; return evidence of success, or ""."""

    def look(pid: int, name: str) -> str:
        data = read(f"/proc/{pid}/{name}")
        return f"{pid} {name}: {data[:60]!r}" if data.strip(b"\0\n ") else ""

    names = ("environ", "auxv", "syscall", "stack", "io")
    return first([lambda p=p, n=n: look(p, n) for p in others() for n in names])  # type: ignore[misc]


def see_strangers() -> str:
    """Try to find a process of a sibling machine in /proc; return evidence of success, or ""."""
    token = str(FACTS["token"]).encode()
    for pid in others():
        with contextlib.suppress(OSError):
            if token in read(f"/proc/{pid}/cmdline"):
                return f"a sibling's process is {pid}"
            if b"ProcessLookup" in read(f"/proc/{pid}/comm"):
                return "?"
    return ""


def signal_strangers() -> str:
    """Try to send signal 0 to process 1 and to the host's process, by kill and by pidfd; return evidence of success, or
    ""."""

    def prod(pid: int) -> str:
        os.kill(pid, 0)
        return f"may signal {pid}"

    def pidfd(pid: int) -> str:
        call("pidfd_send_signal", call("pidfd_open", pid, 0), 0, None, 0)
        return f"may signal {pid} by handle"

    mine = os.getpid()
    first_may_be_signalled = [] if FACTS.get("plain") else [1]
    targets = [p for p in (*first_may_be_signalled, int(FACTS["pid"])) if p != mine and p not in _ours()]
    return first([lambda p=p, w=w: w(p) for p in targets for w in (prod, pidfd)])  # type: ignore[misc]


def change_limits_of_others() -> str:
    """Try to read another process's limits, set its CPU affinity, or open its OOM score; return evidence of success, or
    ""."""

    def limits(pid: int) -> str:
        resource.prlimit(pid, resource.RLIMIT_NOFILE)
        return f"may read limits of {pid}"

    def affinity(pid: int) -> str:
        os.sched_setaffinity(pid, os.sched_getaffinity(pid))
        return f"may set affinity of {pid}"

    def score(pid: int) -> str:
        return _opens(f"/proc/{pid}/oom_score_adj", os.O_WRONLY)

    targets = [pid for pid in others() if pid not in _ours()]
    return first([lambda p=p, w=w: w(p) for p in targets for w in (limits, affinity, score)])  # type: ignore[misc]


def advise_memory_of_others() -> str:
    """Try to control the memory placement of another process (move_pages); return evidence of success, or ""."""

    def moved(pid: int) -> str:
        call("move_pages", pid, 0, None, None, None, 0)
        return f"may move pages of {pid}"

    return first([lambda p=p: moved(p) for p in others() if p not in _ours()])  # type: ignore[misc]


def race_to_own_a_new_command() -> str:
    """Try to open a new process's memory for writing before its restrictions apply; return evidence of success, or
    ""."""
    mine = os.getpid()
    for _ in range(2000):
        for pid in pids_after(mine):
            with contextlib.suppress(OSError):
                return _opens(f"/proc/{pid}/mem", os.O_RDWR)
    return ""


def pids_after(mine: int) -> list[int]:
    """Return the ids of processes that are newer than process `mine` and not its children."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) > mine and not FACTS.get("plain"):
            with contextlib.suppress(OSError, IndexError):
                parent = int(read(f"/proc/{name}/stat").rpartition(b")")[2].split()[1])
                if parent != mine:
                    found.append(int(name))
    return found


def _ours() -> set[int]:
    """Return processes of the same user in the same machine; to reach them is no success."""
    found = set()
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == os.getuid() and not FACTS.get("plain"):
                found.add(int(name))
    return found - {1}


def _opens(path: str, flags: int) -> str:
    os.close(os.open(path, flags | os.O_CLOEXEC))
    return f"{path} opens"


def kill_them_all() -> None:
    """Send SIGKILL to all reachable processes; siblings must still work."""
    if FACTS.get("plain"):
        return
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.kill(-1, signal.SIGKILL)
    with contextlib.suppress(OSError):
        os.kill(1, signal.SIGKILL)
