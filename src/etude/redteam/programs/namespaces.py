"""Attack programs that create, join or leave namespaces, mounts and root folders."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
from collections.abc import Callable

from .kit import Refused, call, first, in_child, libc, refusal

_KINDS = {"user": 0x1000_0000, "mnt": 0x2_0000, "pid": 0x2000_0000, "net": 0x4000_0000, "ipc": 0x800_0000,
          "uts": 0x400_0000, "cgroup": 0x200_0000, "time": 0x80}  # fmt: skip
_CAN_BE_32_BIT = platform.machine() == "x86_64"


def make_by_unshare() -> str:
    """Try to create a namespace with unshare, which can give all capabilities; return evidence of success, or ""."""

    def make(kind: str) -> str:
        call("unshare", _KINDS[kind])
        with open("/proc/self/status") as status:
            caps = next(line.split()[1] for line in status if line.startswith("CapEff"))
        return f"a new {kind} namespace, capabilities {caps}"

    return first([lambda k=k: in_child(lambda: make(k)) for k in _KINDS])  # type: ignore[misc]


def make_by_clone() -> str:
    """Try to create namespaces with clone, by the raw call; return evidence of success, or ""."""

    def make(flags: int) -> str:
        pid = call("clone", flags | 17, 0, 0, 0, 0)
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        return f"cloned with {flags:#x}"

    return first([lambda f=f: in_child(lambda: make(f)) for f in _KINDS.values() if f != 0x80])  # type: ignore[misc]


def make_by_clone3() -> str:
    """Try to create a user namespace with clone3, whose flags are hidden from filters; return evidence of success, or
    ""."""

    def make() -> str:
        arguments = (ctypes.c_uint64 * 11)(_KINDS["user"], 0, 0, 0, 17)
        pid = call("clone3", ctypes.byref(arguments), ctypes.sizeof(arguments))
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        return "clone3 made a user namespace"

    return in_child(make)


def make_by_other_numbers() -> str:
    """Try to call unshare by its x32 or 32-bit number, which a filter may not know; return evidence of success, or
    ""."""
    if not _CAN_BE_32_BIT:
        return ""

    def x32() -> str:
        result = libc.syscall(ctypes.c_long(0x4000_0000 | 272), ctypes.c_long(_KINDS["user"]))
        return "unshare by x32" if result == 0 else ""

    def int80() -> str:
        import mmap

        code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        # push rbx; mov eax, 310 (unshare); mov ebx, CLONE_NEWUSER; int 0x80; pop rbx; ret
        code.write(bytes.fromhex("53b836010000bb00000010cd805bc3"))
        address = ctypes.addressof(ctypes.c_char.from_buffer(code))
        return "unshare by int 0x80" if ctypes.CFUNCTYPE(ctypes.c_int)(address)() == 0 else ""

    return first([lambda: in_child(x32), lambda: in_child(int80)])


def join_others() -> str:
    """Try to join the namespaces of other processes, found in /proc (setns); return evidence of success, or ""."""

    def join(path: str) -> str:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        call("setns", fd, 0)
        return f"joined {path}"

    paths = [f"/proc/{pid}/ns/{kind}" for pid in (1, os.getppid(), "self") for kind in os.listdir("/proc/self/ns")]
    return first([lambda p=p: in_child(lambda: join(p)) for p in paths])  # type: ignore[misc]


def join_by_handle() -> str:
    """Try to join the namespaces of process 1 with a pidfd (setns); return evidence of success, or ""."""
    return in_child(lambda: "joined PID 1's" if refusal("setns", call("pidfd_open", 1, 0), 0x7E02_0000) == "" else "")


def mount_anything() -> str:
    """Try to mount a tmpfs, a bind, a proc or an overlay, or remount the root writable; return evidence of success, or
    ""."""
    os.makedirs("/tmp/mounted", exist_ok=True)

    def attempt(source: bytes, target: bytes, kind: bytes, flags: int, data: bytes = b"") -> str:
        call("mount", source, target, kind, flags, data)
        return f"mounted {kind.decode() or 'bind'} on {target.decode()}"

    tries: list[Callable[[], str]] = [
        lambda k=k: in_child(lambda: attempt(k, b"/tmp/mounted", k, 0))  # type: ignore[misc]
        for k in (b"tmpfs", b"proc", b"sysfs", b"cgroup", b"cgroup2", b"devpts", b"mqueue", b"debugfs", b"overlay")
    ]
    tries.append(lambda: in_child(lambda: attempt(b"/", b"/tmp/mounted", b"", 4096 | 16384)))
    tries.append(lambda: in_child(lambda: attempt(b"none", b"/", b"", 32 | 4096)))
    return first(tries)


def mount_the_new_way() -> str:
    """Try to mount with the newer calls: fsopen, open_tree, mount_setattr; return evidence of success, or ""."""

    def opened() -> str:
        return f"fsopen gave {call('fsopen', b'tmpfs', 0)}"

    def copied() -> str:
        return f"open_tree gave {call('open_tree', -100, b'/', 1)}"

    def changed() -> str:
        attributes = (ctypes.c_uint64 * 4)(0, 1, 0, 0)
        call("mount_setattr", -100, b"/", 0x8000, ctypes.byref(attributes), 32)
        return "mount_setattr made / writable"

    return first([lambda w=w: in_child(w) for w in (opened, copied, changed)])  # type: ignore[misc]


def unmount_what_hides() -> str:
    """Try to unmount /proc, /tmp, the root and all other mounts, to see what is below; return evidence of success, or
    ""."""

    def unmount(target: str) -> str:
        call("umount2", target.encode(), 2)
        return f"unmounted {target}"

    with open("/proc/self/mounts") as mounts:
        targets = [line.split()[1] for line in mounts]
    return first([lambda t=t: in_child(lambda: unmount(t)) for t in targets])  # type: ignore[misc]


def leave_the_root() -> str:
    """Try to leave the root folder, by chroot with a descriptor outside, or by pivot_root; return evidence of success,
    or ""."""

    def climb() -> str:
        os.makedirs("/tmp/cage", exist_ok=True)
        outside = os.open("/", os.O_RDONLY | os.O_DIRECTORY)
        call("chroot", b"/tmp/cage")
        os.fchdir(outside)
        for _ in range(64):
            os.chdir("..")
        return "chroot and climb"

    def pivot() -> str:
        call("pivot_root", b"/", b"/tmp")
        return "pivot_root"

    return first([lambda: in_child(climb), lambda: in_child(pivot)])


def open_by_handle() -> str:
    """Try to open files by handle, which bypasses mounts (a known container escape); return evidence of success, or
    ""."""
    handle = (ctypes.c_uint32 * 34)(128, 0)
    mount_id = ctypes.c_int(0)
    with contextlib.suppress(Refused):
        call("name_to_handle_at", -100, b"/etc/passwd", handle, ctypes.byref(mount_id), 0)
    handle[0], handle[1], handle[2] = 8, 1, 2  # inode 2, the root of an ext4
    root = os.open("/", os.O_RDONLY)
    return f"opened inode 2: {os.listdir(call('open_by_handle_at', root, handle, os.O_RDONLY))[:5]}"


def rename_the_machine() -> str:
    """Try to change the host name; return evidence of success, or ""."""
    return in_child(lambda: "sethostname" if refusal("sethostname", b"x", 1) == "" else "")
