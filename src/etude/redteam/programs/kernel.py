"""Attack programs: use large or recent interfaces of a shared kernel, none of which should be reachable.

Each program returns what it reached, as text; "" if all of it was refused.
"""

from __future__ import annotations

import ctypes
import os
import socket

from .kit import first, in_child, reached


def load_a_bpf_program() -> str:
    """Try to create a BPF map and load a BPF program; return evidence of success, or ""."""
    attributes = (ctypes.c_uint32 * 32)(2, 4, 4, 1)
    return reached("bpf", 0, ctypes.byref(attributes), 128) or reached("bpf", 5, ctypes.byref(attributes), 128)


def make_an_io_uring() -> str:
    """Try to create an io_uring, whose operations bypass system call filters; return evidence of success, or ""."""
    return reached("io_uring_setup", 4, ctypes.byref((ctypes.c_uint32 * 30)()))


def open_a_perf_event() -> str:
    """Try to measure this process, or all processes on a CPU (perf_event_open); return evidence of success, or ""."""
    attributes = (ctypes.c_uint32 * 32)(1, 128, 0)
    tries = [(0, -1), (-1, 0)]
    return first([lambda t=t: reached("perf_event_open", ctypes.byref(attributes), *t, -1, 0) for t in tries])  # type: ignore[misc]


def handle_page_faults() -> str:
    """Try to handle page faults in user space, which helps to win races in the kernel; return evidence of success, or
    ""."""
    return reached("userfaultfd", 0) or reached("userfaultfd", 1)


def use_keyrings() -> str:
    """Try to use kernel keyrings, which belong to a user and outlive processes; return evidence of success, or ""."""
    return (
        reached("add_key", b"user", b"etude", b"x", 1, -3)
        or reached("keyctl", 0, -3, 1)
        or reached("request_key", b"user", b"etude", None, 0)
    )


def load_modules_and_kernels() -> str:
    """Try to call init_module, kexec_load, swapon and others with harmless arguments; return evidence of success, or
    ""."""
    tries = [("init_module", None, 0, b""), ("finit_module", -1, b"", 0), ("delete_module", b"etude-none", 0),
             ("kexec_load", 0, 99, None, 0), ("swapon", b"/nonexistent", 0), ("acct", b"/nonexistent"),
             ("quotactl", 0, None, 0, None)]  # fmt: skip
    return first([lambda t=t: in_child(lambda: reached(*t)) for t in tries])  # type: ignore[misc]


def reboot() -> str:
    """Try to call reboot(2), only to turn Ctrl-Alt-Del off; return evidence of success, or ""."""
    return reached("reboot", 0xFEE1DEAD, 672274793, 0, None)


def touch_ports() -> str:
    """Try to get access to I/O ports (iopl, ioperm); return evidence of success, or ""."""
    return reached("iopl", 3) or reached("ioperm", 0x80, 1, 1)


def read_the_kernels_log() -> str:
    """Try to read the kernel's log by syslog(2), or open /dev/kmsg; return evidence of success, or ""."""
    into = ctypes.create_string_buffer(64)

    def kmsg() -> str:
        os.close(os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK))
        return "/dev/kmsg opens"

    return first([lambda: reached("syslog", 3, into, 64), kmsg])


def set_clocks() -> str:
    """Try to set the host's clock (settimeofday, clock_settime, adjtimex); return evidence of success, or ""."""
    now = (ctypes.c_int64 * 2)(0, -1)  # an impossible time: nothing moves even where it is allowed
    timex = (ctypes.c_int64 * 32)(0x4000)  # ADJ_TICK with tick 0: refused after the check of privilege
    return (
        reached("clock_settime", 0, ctypes.byref(now))
        or reached("settimeofday", ctypes.byref(now), None)
        or reached("adjtimex", ctypes.byref(timex))
    )


def watch_file_systems() -> str:
    """Try to monitor all file accesses in a mount (fanotify_init); return evidence of success, or ""."""
    return reached("fanotify_init", 0, 0) or reached("fanotify_init", 0x200, 0)


def open_socket_families() -> str:
    """Try to open sockets of families without namespaces or with past flaws (vsock, alg); return evidence of success,
    or ""."""
    found = []
    for family in range(3, 46):
        if family == 10:
            continue
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET):
            try:
                socket.socket(family, kind).close()
            except OSError:
                continue
            found.append(str(family))
            break
    return f"socket families {' '.join(found)}" if found else ""


def open_raw_sockets() -> str:
    """Try to open raw IPv4 and IPv6 sockets; return evidence of success, or ""."""

    def raw(family: int, protocol: int) -> str:
        socket.socket(family, socket.SOCK_RAW, protocol).close()
        return f"a raw socket of protocol {protocol}"

    return first([lambda f=f, p=p: raw(f, p) for f in (2, 10) for p in (1, 58, 255)])  # type: ignore[misc]


def pin_memory_in_secret() -> str:
    """Try to get memory that the host cannot read and no limit counts (memfd_secret); return evidence of success, or
    ""."""
    return reached("memfd_secret", 0)
