"""Attack programs that try to make the rollout invalid instead of graded with 0.

Their effects are checked outside.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import time

from .kit import FACTS


def _in_background(work: object) -> None:
    if os.fork() == 0:
        os.setsid()
        for number in (0, 1, 2):
            os.close(number)
        with contextlib.suppress(BaseException):
            work()  # type: ignore[operator]
        os._exit(0)


def kill_everything() -> None:
    """Send SIGSTOP and SIGKILL to all processes, including process 1."""
    if not FACTS.get("plain"):
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in (1, -1):
                with contextlib.suppress(OSError):
                    os.kill(pid, number)


def delete_the_work_folder() -> None:
    """Empty the work folder and remove its permissions."""
    for name in os.listdir("."):
        shutil.rmtree(name, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.unlink(name)
    with contextlib.suppress(OSError):
        os.chmod(".", 0)
    with contextlib.suppress(OSError):
        os.rmdir(os.getcwd())


def _replace(path: str) -> None:
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.unlink(path)


def export_a_folder() -> None:
    """Replace the exported file by a folder."""
    _replace("calc.py")
    os.makedirs("calc.py/calc.py")


def export_a_link() -> None:
    """Replace the exported file by a link to a secret of the host, which the host would read."""
    _replace("calc.py")
    os.symlink(str(FACTS["secret_file"]), "calc.py")


def export_through_a_link() -> None:
    """Replace the folder of an exported file by a link to /etc."""
    _replace("pkg")
    os.symlink("/etc", "pkg")


def export_a_hard_link() -> None:
    """Replace the exported file by a hard link to a file outside the work folder."""
    _replace("calc.py")
    for path in (str(FACTS["secret_file"]), "/etc/passwd", "/proc/self/environ", "/etc/shadow"):
        with contextlib.suppress(OSError):
            os.link(path, "calc.py")
            break


def export_a_pipe() -> None:
    """Replace the exported file by a pipe that nobody writes to."""
    _replace("calc.py")
    os.mkfifo("calc.py")


def export_a_socket() -> None:
    """Replace the exported file by a socket."""
    _replace("calc.py")
    socket.socket(socket.AF_UNIX).bind("calc.py")


def export_a_device() -> None:
    """Replace the exported file by a link to /dev/zero."""
    _replace("calc.py")
    os.symlink("/dev/zero", "calc.py")


def export_an_unreadable_file() -> None:
    """Remove all permissions from the exported files and their folder."""
    os.makedirs("pkg", exist_ok=True)
    with open("pkg/core.py", "w") as file:
        file.write("x = 1\n")
    for path in ("calc.py", "pkg/core.py", "pkg"):
        os.chmod(path, 0)


def export_a_huge_file() -> None:
    """Make the exported file as large as the disk."""
    with contextlib.suppress(OSError), open("calc.py", "wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 20))


def export_a_leased_file() -> None:
    """Take a lease on the exported file, so that opening it blocks."""

    def lease() -> None:
        signal.signal(signal.SIGIO, signal.SIG_IGN)
        fd = os.open("calc.py", os.O_RDWR)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        time.sleep(3600)

    _in_background(lease)
    time.sleep(0.2)


def export_a_changing_file() -> None:
    """Replace the exported file by a link and back, thousands of times a second."""
    os.symlink(str(FACTS["secret_file"]), "link.py")

    def swap() -> None:
        while True:
            with contextlib.suppress(OSError):
                os.rename("calc.py", "was.py")
                os.rename("link.py", "calc.py")
                os.rename("calc.py", "link.py")
                os.rename("was.py", "calc.py")

    _in_background(swap)


def export_what_is_no_text() -> None:
    """Write an exported file that is not UTF-8, has NUL bytes and declares an unknown encoding."""
    with open("calc.py", "wb") as file:
        file.write(b"# coding: etude-none\n\0\xff\xfe def f(n): return 1\n")


def ignore_every_signal() -> None:
    """Start processes that ignore signals and restart themselves when they are killed."""

    def again() -> None:
        for number in range(1, 64):
            with contextlib.suppress(OSError, ValueError):
                signal.signal(number, signal.SIG_IGN)
        while True:
            if os.fork() == 0:
                os.setsid()
                time.sleep(0.01)
            else:
                os._exit(0)

    for _ in range(4):
        _in_background(again)


def hang() -> None:
    """Sleep without end."""
    while True:
        time.sleep(3600)


def end_as_killed() -> None:
    """End by a signal, as if the host had killed the process."""
    os.kill(os.getpid(), signal.SIGKILL)


def end_with_the_machinerys_codes() -> None:
    """End with the exit code of a failure of the runtime itself."""
    code = int(FACTS.get("code", 125))
    os.write(1, b"OSError: could not be confined\nMachineError: the launcher is gone\n")
    os._exit(code)


def jump_the_clock() -> None:
    """Set the clock, and give the exported file times far in the future and in 1901."""
    for when in (2**34 - 1, -(2**31)):
        with contextlib.suppress(OSError, OverflowError):
            os.utime("calc.py", (when, when))
    with contextlib.suppress(OSError, AttributeError):
        time.clock_settime(time.CLOCK_REALTIME, 2**33)


def speak_the_protocol() -> None:
    """Write frames of the machine protocol to all descriptors."""
    import struct

    frames = b"".join(
        struct.pack("<IBI", 5 + len(body), ord(kind), number) + body
        for number in range(1, 5)
        for kind, body in ((b"x", bytes(13)), (b"e", bytes(8)), (b"h", bytes(4)), (b"d", b"x = 1"), (b"k", b""))
    )
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            os.write(int(name), frames + b"\xff" * 9)
    for path in ("/dev/virtio-ports/agent", "/dev/vport0p1", "/dev/hvc0", "/dev/console"):
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
            os.write(fd, frames)


def work_past_the_deadline() -> None:
    """Start a background process that continues to work after the command has ended."""

    def later() -> None:
        while True:
            time.sleep(0.02)
            with open("late", "a") as file:
                file.write(".")

    _in_background(later)
    end = time.monotonic() + 8
    while not os.path.exists("late") and time.monotonic() < end:
        time.sleep(0.01)


def trojan_every_command() -> None:
    """Leave fake programs in PATH and the work folder, and start-up files of shells and Python."""
    for name in ("python", "python3", "sh", "ls", "git", "pytest", "cat"):
        for folder in (".", "bin", ".local/bin"):
            with contextlib.suppress(OSError):
                os.makedirs(folder, exist_ok=True)
                with open(f"{folder}/{name}", "w") as file:
                    file.write("#!/bin/sh\necho trojan\nexit 0\n")
                os.chmod(f"{folder}/{name}", 0o755)
    shells = (".bashrc", ".profile", ".bash_profile", ".pythonrc", ".gitconfig")
    for name in (*shells, "sitecustomize.py", "usercustomize.py"):
        with contextlib.suppress(OSError), open(name, "w") as file:
            file.write("import os; os._exit(0)\n" if name.endswith(".py") else "exit 0\n")
    packages = f".local/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    with contextlib.suppress(OSError):
        os.makedirs(packages)
        with open(f"{packages}/trojan.pth", "w") as file:
            file.write("import os; os._exit(0)\n")


def leave_a_shell_running() -> None:
    """Start a shell loop that rewrites the exported file forever."""
    subprocess.Popen(
        ["sh", "-c", "while :; do echo 'x = 1' > calc.py; done"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
