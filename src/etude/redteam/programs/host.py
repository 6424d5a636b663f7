"""Attack programs that reach the host through files: /proc, /sys, /dev, descriptors, users, mounts."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import socket
import stat
import subprocess
import sys

from .kit import FACTS, first, reached, read, refusal, settable, writable

_DEVICES = {"null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts", "fd", "stdin", "stdout", "stderr", "shm",
            "mqueue", "core", "console", "log", "initctl"}  # fmt: skip


def read_a_secret_file() -> str:
    """Try to read a file of the host by its path, through /proc/1/root, or with ../; return evidence of success, or
    ""."""
    path = str(FACTS["secret_file"])
    ways = [path, f"/proc/1/root{path}", f"/proc/self/root{path}", "../" * 32 + path.lstrip("/"), f"/host{path}"]
    return first([lambda w=w: read(w).decode() for w in ways])  # type: ignore[misc]


def read_a_secret_variable() -> str:
    """Try to read an environment variable of the host from any readable process; return evidence of success, or ""."""
    name = str(FACTS["variable"]).encode()
    for pid in ["self", *(n for n in os.listdir("/proc") if n.isdigit())]:
        with contextlib.suppress(OSError):
            found = re.search(name + rb"=([^\0]+)", read(f"/proc/{pid}/environ"))
            if found:
                return found[1].decode()
    return os.environ.get(name.decode(), "")


def find_open_descriptors() -> str:
    """Try to find inherited descriptors, such as a socket or folder of the host; return evidence of success, or ""."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if int(name) > 2 and not target.startswith(f"/proc/{os.getpid()}/fd"):
                found.append(f"{name} is {target}")
    return ", ".join(found)


def climb_from_descriptors() -> str:
    """Try to find a standard descriptor (0, 1 or 2) that is a folder or a device, or a socket that sends further
    descriptors. Return evidence of success, or ""."""
    for number in range(3):
        mode = os.fstat(number).st_mode
        if stat.S_ISDIR(mode) or stat.S_ISBLK(mode):
            return f"descriptor {number} is {os.readlink(f'/proc/self/fd/{number}')}"
        if stat.S_ISSOCK(mode):
            with contextlib.suppress(OSError):
                channel = socket.socket(fileno=os.dup(number))
                channel.setblocking(False)
                _, given, _, _ = socket.recv_fds(channel, 1, 8)
                if given:
                    return f"descriptor {number} gave {len(given)} more"
    return ""


def write_kernel_settings() -> str:
    """Try to write to files in /proc/sys and /sys, or open /proc/sysrq-trigger; return evidence of success, or ""."""
    for top in ("/proc/sys", "/sys"):
        for folder, _, names in os.walk(top):
            for name in names:
                with contextlib.suppress(OSError):
                    return settable(f"{folder}/{name}")
    return first([lambda p=p: writable(p) for p in ("/proc/sysrq-trigger", "/proc/kcore", "/proc/kmsg", "/proc/mtrr")])  # type: ignore[misc]


def set_the_core_pattern() -> str:
    """Try to write to the kernel settings that name a program to start, such as core_pattern; return evidence of
    success, or ""."""
    paths = ("/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe", "/sys/kernel/uevent_helper",
             "/proc/sys/fs/binfmt_misc/register", "/proc/sys/kernel/poweroff_cmd")  # fmt: skip
    return first([lambda p=p: writable(p) for p in paths])  # type: ignore[misc]


def change_control_groups() -> str:
    """Try to open control group files for writing, to leave our group or raise its limits; return evidence of success,
    or ""."""
    for top in ("/sys/fs/cgroup", "/cgroup"):
        for folder, _, names in os.walk(top):
            for name in names:
                if name in ("tasks", "cgroup.procs", "release_agent", "memory.max", "memory.limit_in_bytes"):
                    with contextlib.suppress(OSError):
                        return writable(f"{folder}/{name}")
    return ""


def open_devices() -> str:
    """Try to open devices that reach hardware, other machines or the hypervisor; return evidence of success, or ""."""
    found = []
    for folder, _, names in os.walk("/dev"):
        if folder == "/dev":
            names = [name for name in names if name not in _DEVICES]
        elif folder.startswith(("/dev/pts", "/dev/shm", "/dev/mqueue", "/dev/fd")):
            continue
        for name in names:
            with contextlib.suppress(OSError):
                if stat.S_ISBLK(os.stat(f"{folder}/{name}").st_mode) or stat.S_ISCHR(
                    os.stat(f"{folder}/{name}").st_mode
                ):
                    os.close(os.open(f"{folder}/{name}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
                    found.append(name)
    return f"devices {' '.join(found)}" if found else ""


def make_a_device() -> str:
    """Try to create devices for the host's disk, memory and kernel log (mknod); return evidence of success, or ""."""

    def make(kind: int, major: int, minor: int) -> str:
        path = f"/tmp/device-{major}-{minor}"
        os.mknod(path, kind | 0o600, os.makedev(major, minor))
        try:
            os.close(os.open(path, os.O_RDONLY))
        finally:
            os.unlink(path)
        return f"made and opened device {major}:{minor}"

    kinds = [(stat.S_IFBLK, 254, 0), (stat.S_IFBLK, 8, 0), (stat.S_IFCHR, 1, 1), (stat.S_IFCHR, 1, 11)]
    return first([lambda k=k: make(*k) for k in kinds])  # type: ignore[misc]


def inject_into_a_terminal() -> str:
    """Try to inject input into a terminal of the host (TIOCSTI); return evidence of success, or ""."""
    import fcntl

    def type_into(path: str) -> str:
        fd = os.open(path, os.O_RDWR | os.O_NOCTTY)
        fcntl.ioctl(fd, 0x5412, b"x")
        return f"typed into {path}"

    paths = ["/dev/tty", "/dev/console", "/proc/self/fd/0", "/proc/self/fd/1", "/proc/self/fd/2"]
    return first([lambda p=p: type_into(p) for p in paths])  # type: ignore[misc]


def overwrite_programs() -> str:
    """Try to open the interpreter, process 1's program or programs in PATH for writing; return evidence of success, or
    ""."""
    image = bool(FACTS.get("image"))
    paths = ["/proc/1/exe"] if image else ["/proc/1/exe", "/proc/self/exe", sys.executable]
    if not image:
        for folder in os.environ.get("PATH", "").split(":"):
            with contextlib.suppress(OSError):
                paths += [f"{folder}/{name}" for name in os.listdir(folder)[:400]]
    return first([lambda p=p: writable(p) for p in paths])  # type: ignore[misc]


def become_root() -> str:
    """Try to become root by setuid, setresuid or setgroups, by wrapper or raw call; return evidence of success, or
    ""."""
    if os.getuid() == 0 and not FACTS.get("own_kernel"):
        with open("/proc/self/uid_map") as mapping:
            if mapping.read().split()[:3] == ["0", "0", "4294967295"]:
                return "we are the host's root"
    if os.getuid() == 0:
        return ""

    def raw() -> str:
        return "setuid(0)" if refusal("setuid", 0) == "" else ""

    def wrapped() -> str:
        os.setresuid(0, 0, 0)
        return f"uid {os.getuid()}"

    def groups() -> str:
        os.setgroups([0])
        return "setgroups"

    return first([raw, wrapped, groups])


def use_setuid_programs() -> str:
    """Try to become root with su, sudo or another set-user-id program; return evidence of success, or ""."""
    if os.getuid() == 0:
        return ""
    barred = ctypes.CDLL(None).prctl(39, 0, 0, 0, 0) == 1  # NoNewPrivs is set; gVisor does not show it in a file
    for folder in ("/bin", "/sbin", "/usr/bin", "/usr/sbin", "/usr/lib", "/usr/libexec"):
        with contextlib.suppress(OSError):
            for name in os.listdir(folder):
                with contextlib.suppress(OSError):
                    path = f"{folder}/{name}"
                    if os.stat(path).st_mode & stat.S_ISUID and os.stat(path).st_uid == 0:
                        mounted_nosuid = os.statvfs(path).f_flag & 2
                        if not mounted_nosuid and not barred:
                            return f"{path} would run as root"
    for command in (["su", "-c", "id -u"], ["sudo", "-n", "id", "-u"], ["pkexec", "id", "-u"]):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=5, check=False)
            if done.stdout.strip() == b"0":
                return f"{command[0]} made us root"
    return ""


def hold_capabilities() -> str:
    """Return the capabilities of this process; "" if it has none, or has its own kernel."""
    with open("/proc/self/status") as status:
        fields = dict(line.rstrip("\n").split(":\t", 1) for line in status if ":\t" in line)
    held = [f"{name} {fields[name]}" for name in ("CapEff", "CapPrm", "CapInh", "CapAmb") if int(fields[name], 16)]
    if held and os.getuid() != 0:
        return ", ".join(held)
    if held and not FACTS.get("own_kernel"):
        return ", ".join(held)
    return ""


def learn_kernel_addresses() -> str:
    """Try to read kernel addresses from /proc/kallsyms, /proc/modules or /proc/kcore; return evidence of success, or
    ""."""
    for path in ("/proc/kallsyms", "/proc/modules"):
        with contextlib.suppress(OSError, ValueError):
            for word in re.findall(rb"\b(?:0x)?([0-9a-f]{16})\b", read(path)):
                if int(word, 16):
                    return f"{path} tells {word.decode()}"
    others = ("/proc/timer_list", "/proc/kcore", "/proc/vmallocinfo")
    return first([lambda p=p: f"{p}: {read(p, 64)!r}" for p in others])  # type: ignore[misc]


def find_what_is_mounted_from_outside() -> str:
    """Try to find a writable mount of a disk of the host; return evidence of success, or ""."""
    if FACTS.get("image") or FACTS.get("own_kernel"):
        return ""
    with open("/proc/self/mounts") as mounts:
        for line in mounts:
            source, target, kind, options = line.split()[:4]
            if kind not in ("tmpfs", "proc", "overlay", "mqueue", "devpts") and "rw" in options.split(","):
                with contextlib.suppress(OSError):
                    probe = os.path.join(target, ".etude-probe")
                    os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
                    os.unlink(probe)
                    return f"{source} ({kind}) on {target} takes files"
    return ""


def talk_to_daemons() -> str:
    """Try to connect to sockets of host services: docker, containerd, systemd, D-Bus; return evidence of success, or
    ""."""
    paths = ["/var/run/docker.sock", "/run/docker.sock", "/run/containerd/containerd.sock", "/run/systemd/private",
             "/run/dbus/system_bus_socket", "/run/crio/crio.sock", "/run/snapd.socket"]  # fmt: skip
    for folder, folders, names in os.walk("/run"):
        folders[:] = folders[:16]
        paths += [f"{folder}/{name}" for name in names[:64]]

    def connect(path: str) -> str:
        with socket.socket(socket.AF_UNIX) as channel:
            channel.settimeout(1)
            channel.connect(path)
        return f"connected to {path}"

    return first([lambda p=p: connect(p) for p in paths])  # type: ignore[misc]


def count_filters() -> str:
    """Return which of a seccomp filter and NoNewPrivs this process lacks; "" if it has both."""
    with open("/proc/self/status") as status:
        text = status.read()
    missing = [name for name, want in (("Seccomp", "2"), ("NoNewPrivs", "1")) if f"{name}:\t{want}" not in text]
    return f"without {' and '.join(missing)}" if missing else ""


def exhaust_asynchronous_io() -> str:
    """Try to take so many contexts of asynchronous I/O that the host has few left; return evidence of success, or
    ""."""
    import ctypes

    taken = 0
    for _ in range(64):
        context = ctypes.c_ulong(0)
        if reached("io_setup", 4096, ctypes.byref(context)) != "io_setup: done":
            break
        taken += 4096
    limit = 65536
    with contextlib.suppress(OSError, ValueError):
        limit = int(read("/proc/sys/fs/aio-max-nr"))
    return f"took {taken} of {limit} contexts" if taken * 2 >= limit or taken >= 32768 else ""
