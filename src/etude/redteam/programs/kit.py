"""Helpers of the attack programs: raw system calls, other processes, and facts that the attacker knows."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
from collections.abc import Callable
from typing import Any

FACTS: dict[str, Any] = {}
"""Facts that the attacker knows. `token`: marks the processes and names of a sibling. `secret_file`, `port`,
`abstract`, `pid`: of the host. `plain`: there is no isolation, so other processes must not be touched."""

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
_CALLS = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "pidfd_open": (434, 434), "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424), "process_madvise": (440, 440), "kcmp": (312, 272), "mount": (165, 40),
    "umount2": (166, 39), "chroot": (161, 51), "pivot_root": (155, 41), "open_tree": (428, 428), "fsopen": (430, 430),
    "mount_setattr": (442, 442), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "clone": (56, 220),
    "clone3": (435, 435), "unshare": (272, 97), "setns": (308, 268), "bpf": (321, 280), "io_uring_setup": (425, 425),
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218), "userfaultfd": (323, 282),
    "perf_event_open": (298, 241), "kexec_load": (246, 104), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "swapon": (167, 224), "reboot": (169, 142), "acct": (163, 89), "syslog": (103, 116),
    "sethostname": (170, 161), "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171),
    "fanotify_init": (300, 262), "iopl": (172, None), "ioperm": (173, None), "modify_ldt": (154, None),
    "move_pages": (279, 239), "migrate_pages": (256, 238), "quotactl": (179, 60), "capset": (126, 91),
    "io_setup": (206, 0), "io_destroy": (207, 1), "landlock_create_ruleset": (444, 444), "setuid": (105, 146),
    "prlimit64": (302, 261),
    "lsm_list_modules": (461, 461), "listmount": (458, 458), "statmount": (457, 457), "cachestat": (451, 451),
    "memfd_secret": (447, 447), "shmget": (29, 194), "shmat": (30, 196), "msgget": (68, 186), "semget": (64, 190),
    "fsmount": (432, 432), "move_mount": (429, 429), "mseal": (462, 462), "vhangup": (153, 58), "getpid": (39, 172),
}  # fmt: skip


class Refused(Exception):
    """Raised if the kernel or a filter refuses a system call."""


def call(name: str, *args: Any) -> int:
    """Make a system call by its number, without the C library's wrapper, and return its result. Raises `Refused`."""
    number = _CALLS[name][0 if platform.machine() == "x86_64" else 1]
    if number is None:
        raise Refused(f"no {name} on this architecture")
    result = int(libc.syscall(ctypes.c_long(number), *(ctypes.c_long(a) if isinstance(a, int) else a for a in args)))
    if result < 0:
        number = ctypes.get_errno()
        raise Refused(f"{name}: {errno.errorcode.get(number, number)}")
    return result


def refusal(name: str, *args: Any) -> str:
    """Make a system call and return the name of its errno, such as "EPERM"; "" if it succeeds."""
    try:
        call(name, *args)
    except Refused as refused:
        return str(refused).rpartition(" ")[2]
    return ""


def reached(name: str, *args: Any) -> str:
    """Make a system call and return a message if the kernel executed it; "" if it was refused.

    A call with invalid arguments counts as executed."""
    answer = refusal(name, *args)
    return (
        ""
        if answer in ("EPERM", "ENOSYS", "EACCES", "ENODEV", "EOPNOTSUPP", "architecture")
        else f"{name}: {answer or 'done'}"
    )


def first(tries: list[Callable[[], str]]) -> str:
    """Call the functions in order, and return the first result that is not empty.

    If there is none, raises the last error, or returns "" if there was no error."""
    last: Exception | None = None
    for each in tries:
        try:
            got = each()
        except Exception as error:  # noqa: BLE001 - another way may do
            last = error
            continue
        if got:
            return got
    if last is not None:
        raise last
    return ""


def in_child(work: Callable[[], str]) -> str:
    """Run `work` in a forked child and return its result. Raises `Refused` if it fails or is killed."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        try:
            got = work()
        except BaseException as error:  # noqa: BLE001 - told to the parent
            got = f"\0{type(error).__name__}: {error}"
        os.write(writer, got.encode()[:4000])
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as file:
        got = file.read().decode()
    _, status = os.waitpid(pid, 0)
    if got.startswith("\0"):
        raise Refused(got[1:])
    if os.WIFSIGNALED(status):
        raise Refused(f"killed by signal {os.WTERMSIG(status)}")
    return got


def pids() -> list[int]:
    """Return the ids of all visible processes."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def others() -> list[int]:
    """Return the ids of the processes to attack: those of a sibling machine, and all others except this program's."""
    mine, marked, ours = os.getpid(), list[int](), {os.getpid(), os.getppid()}
    token = str(FACTS.get("token", "?")).encode()
    for pid in pids():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
            text = file.read()
            if pid != mine and token in text and b"\0siblings\0hold\0" in text:
                marked.append(pid)
            elif b"\0programs\0" in text:
                ours.add(pid)  # this program, before it forked
    if not FACTS.get("plain"):
        marked += [pid for pid in pids() if pid not in ours and pid not in marked]
    return marked


def read(path: str, limit: int = 1 << 16) -> bytes:
    """Read at most `limit` bytes from the beginning of a file."""
    with open(path, "rb", buffering=0) as file:
        return file.read(limit) or b""


def writable(path: str) -> str:
    """Open a file for writing, and return a message. Raises `OSError` if this is refused."""
    os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    return f"{path} opens for writing"


def settable(path: str) -> str:
    """Write the current value of a file to it, and return a message. Raises `OSError` if this is refused."""
    value = read(path)
    fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        os.write(fd, value)
    finally:
        os.close(fd)
    return f"{path} can be set"
