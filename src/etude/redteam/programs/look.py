"""Facts about a machine that a program in it can observe, which could reveal a training machine."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import socket
import subprocess
import sys
import time

from .kit import read

_FILES = {
    "cgroup": "/proc/self/cgroup", "uid_map": "/proc/self/uid_map", "boot_id": "/proc/sys/kernel/random/boot_id",
    "cmdline": "/proc/cmdline", "version": "/proc/version", "hostname": "/etc/hostname", "hosts": "/etc/hosts",
    "resolv": "/etc/resolv.conf", "passwd": "/etc/passwd", "os": "/etc/os-release", "machine_id": "/etc/machine-id",
    "vendor": "/sys/class/dmi/id/sys_vendor", "product": "/sys/class/dmi/id/product_name",
    "hypervisor": "/sys/hypervisor/type",
    "init": "/proc/1/comm", "init_args": "/proc/1/cmdline", "limits": "/proc/self/limits",
    "filesystems": "/proc/filesystems",
    "modules": "/proc/modules", "devices": "/proc/devices", "sched": "/proc/1/sched", "dev": "/proc/net/dev",
    "overcommit": "/proc/sys/vm/overcommit_memory", "attr": "/proc/self/attr/current", "swaps": "/proc/swaps",
}  # fmt: skip


def look() -> None:
    """Print the facts as a JSON object of numbers and texts, after the word SEEN."""
    seen: dict[str, object] = {}
    for part in (_files, _kernel, _processes, _mounts, _identity, _tree, _network, _python, _timing):
        with contextlib.suppress(Exception):
            seen |= part()
    print("\nSEEN " + json.dumps({name: v if isinstance(v, int | float) else str(v)[:400] for name, v in seen.items()}))


def _files() -> dict[str, object]:
    found: dict[str, object] = {}
    for name, path in _FILES.items():
        try:
            found[f"file.{name}"] = read(path, 2000).decode(errors="replace")
        except OSError as error:
            found[f"file.{name}"] = f"errno {error.errno}"
    return found


def _kernel() -> dict[str, object]:
    info = dict(
        line.split(":", 1) for line in read("/proc/cpuinfo").decode().split("\n\n")[0].splitlines() if ":" in line
    )
    memory = dict(line.split(":", 1) for line in read("/proc/meminfo").decode().splitlines())
    status = dict(line.split(":", 1) for line in read("/proc/self/status").decode().splitlines() if ":" in line)
    wanted = (
        "CapEff", "CapBnd", "NoNewPrivs", "Seccomp", "Seccomp_filters", "NSpid", "NSpgid", "NSsid", "TracerPid",
        "Groups",
    )  # fmt: skip
    return {
        "cpu.model": info.get("model name\t", ""),
        "cpu.flags": " ".join(
            f for f in info.get("flags\t\t", "").split() if f in ("hypervisor", "vmx", "svm", "avx512f")
        ),
        "cpu.count": os.cpu_count() or 0,
        "cpu.usable": len(os.sched_getaffinity(0)),
        "memory.total": int(memory["MemTotal"].split()[0]),
        "memory.free": int(memory["MemFree"].split()[0]),
        "uptime": float(read("/proc/uptime").split()[0]),
        "load": float(read("/proc/loadavg").split()[0]),
        "running": int(read("/proc/loadavg").split()[3].split(b"/")[1]),
        "machine": platform.machine(),
        "release": platform.release(),
        **{f"status.{name}": status.get(name, "absent").strip() for name in wanted},
    }


def _processes() -> dict[str, object]:
    names = []
    for pid in (name for name in os.listdir("/proc") if name.isdigit()):
        with contextlib.suppress(OSError):
            names.append(read(f"/proc/{pid}/comm").decode().strip())
    return {
        "processes.count": len(names), "processes.names": " ".join(sorted(set(names))), "processes.pid": os.getpid(),
        "processes.parent": os.getppid(), "processes.session": os.getsid(0), "processes.nice": os.nice(0),
        "processes.fds": len(os.listdir("/proc/self/fd")),
        "processes.stdout": os.readlink("/proc/self/fd/1").split(":")[0],
        "processes.oom": int(read("/proc/self/oom_score_adj")),
    }  # fmt: skip


def _mounts() -> dict[str, object]:
    lines = [line.split() for line in read("/proc/self/mountinfo").decode().splitlines()]
    root = os.statvfs("/")
    work = os.statvfs(".")
    return {
        "mounts.count": len(lines),
        "mounts.kinds": " ".join(sorted({f"{line[4]}:{line[line.index('-') + 1]}" for line in lines})),
        "mounts.root_bytes": root.f_blocks * root.f_frsize, "mounts.root_readonly": root.f_flag & 1,
        "mounts.work_bytes": work.f_blocks * work.f_frsize, "mounts.work_inodes": work.f_files,
        "mounts.first_id": int(lines[0][0]),
    }  # fmt: skip


def _identity() -> dict[str, object]:
    environment = {name: value for name, value in os.environ.items() if name not in ("OLDPWD", "_")}
    return {
        "identity.uid": os.getuid(), "identity.groups": str(os.getgroups()), "identity.host": socket.gethostname(),
        "identity.domain": platform.node(), "environment.names": " ".join(sorted(environment)),
        "environment.path": environment.get("PATH", ""), "environment.home": environment.get("HOME", ""),
        "identity.cwd": os.getcwd(), "identity.umask": os.umask(0o22), "identity.tty": os.isatty(0),
    }  # fmt: skip


def _tree() -> dict[str, object]:
    here, now = os.stat("."), time.time()
    return {
        "tree.top": " ".join(sorted(os.listdir("/"))), "tree.dev": " ".join(sorted(os.listdir("/dev"))),
        "tree.inode": here.st_ino, "tree.device": here.st_dev, "tree.age": now - here.st_mtime,
        "tree.etc": len(os.listdir("/etc")), "tree.bin": len(os.listdir("/usr/bin")),
        "tree.root_inode": os.stat("/").st_ino,
        "tree.owner": here.st_uid, "tree.usr_age": now - os.stat("/usr").st_mtime, "tree.tmp": len(os.listdir("/tmp")),
        "tree.sys": os.path.isdir("/sys/class"),
    }  # fmt: skip


def _network() -> dict[str, object]:
    names = [name for _, name in socket.if_nameindex()]
    try:
        socket.create_connection(("127.0.0.1", 1), 0.2)
        loopback = "open"
    except OSError as error:
        loopback = f"errno {error.errno}"
    return {"network.names": " ".join(names), "network.loopback": loopback}


def _python() -> dict[str, object]:
    return {
        "python.version": sys.version, "python.executable": sys.executable, "python.prefix": sys.prefix,
        "python.path": " ".join(sys.path[1:]), "python.modules": len(sys.modules), "python.flags": str(sys.flags),
        "python.argv": " ".join(getattr(sys, "orig_argv", [])[:3]), "python.hash": hash("etude"),
    }  # fmt: skip


def _timing() -> dict[str, object]:
    def best(work: object, times: int) -> float:
        taken = []
        for _ in range(times):
            began = time.perf_counter_ns()
            work()  # type: ignore[operator]
            taken.append(time.perf_counter_ns() - began)
        return float(sorted(taken)[len(taken) // 2])

    def pipe() -> None:
        for fd in os.pipe():
            os.close(fd)

    def fork() -> None:
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)

    return {
        "timing.getppid_ns": best(os.getppid, 500), "timing.stat_ns": best(lambda: os.stat("/usr"), 200),
        "timing.pipe_ns": best(pipe, 100), "timing.fork_ns": best(fork, 8),
        "timing.exec_ns": best(lambda: subprocess.run(["/bin/true"], check=False), 4),
        "clock.skew_s": round(time.time() - time.monotonic(), -3),
    }  # fmt: skip
