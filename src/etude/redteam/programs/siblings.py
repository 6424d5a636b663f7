"""Attack programs that pass data over covert channels between siblings, machines forked from the same snapshot.

`hold`, `touch`, `marks` and `able` run in the sibling, `draw` in both.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import random
import socket
import subprocess
import sys
import time
import uuid

from .kit import FACTS, Refused, call, first, read

_SHARED = ("/usr/bin", "/usr/lib/python3", "/etc/passwd", "/usr/bin/env", "/bin/sh", "/usr/share", "/lib")


def hold() -> None:
    """Publish a secret in every place that sibling machines could share, until the end."""
    token, secret = str(FACTS["token"]), str(FACTS["secret"])
    kept: list[object] = [secret.encode() * 64]
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("\0" + token)
    listener.listen()
    for folder in ("/tmp", "/dev/shm", "/var/tmp", os.path.expanduser("~/.cache"), "."):
        with contextlib.suppress(OSError):
            os.makedirs(folder, exist_ok=True)
            with open(f"{folder}/{token}", "w") as file:
                file.write(secret)
    with contextlib.suppress(Refused, OSError):
        queue = call("msgget", _key(), 0o1666)
        message = ctypes.create_string_buffer((1).to_bytes(8, "little") + secret.encode())
        ctypes.CDLL(None).msgsnd(queue, message, len(secret), 0o4000)
    with contextlib.suppress(Refused):
        call("add_key", b"user", token.encode(), secret.encode(), len(secret), -4)
    for path in _lockable():
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            kept.append(fd)
    print("holding", flush=True)
    listener.settimeout(float(FACTS["hold_s"]))
    with contextlib.suppress(OSError):
        while True:
            connection, _ = listener.accept()
            connection.sendall(secret.encode())
            connection.close()


def _key() -> int:
    return int.from_bytes(str(FACTS["token"]).encode()[:3], "little")


def _lockable() -> list[str]:
    found = [path for path in _SHARED if os.path.exists(path)]
    return [*found, *sorted(p for p in sys.path if os.path.isdir(p) and not p.startswith(os.getcwd()))[:2]]


def meet_by_abstract_socket() -> str:
    """Try to read the secret from the sibling machine's abstract UNIX socket; return evidence of success, or ""."""
    with socket.socket(socket.AF_UNIX) as channel:
        channel.settimeout(2)
        channel.connect("\0" + str(FACTS["token"]))
        return channel.recv(64).decode()


def meet_in_files() -> str:
    """Try to read the secret from files of the sibling machine in /tmp, /dev/shm, a cache; return evidence of success,
    or ""."""
    token = str(FACTS["token"])
    folders = ("/tmp", "/dev/shm", "/var/tmp", os.path.expanduser("~/.cache"), ".", "/workspace", "/root/.cache")
    return first([lambda f=f: read(f"{f}/{token}").decode() for f in folders])  # type: ignore[misc]


def meet_in_a_message_queue() -> str:
    """Try to read the secret from a System V message queue whose key both know; return evidence of success, or ""."""
    queue = call("msgget", _key(), 0o666)
    into = ctypes.create_string_buffer(128)
    size = ctypes.CDLL(None).msgrcv(queue, into, 100, 0, 0o4000)
    return into.raw[8 : 8 + size].decode() if size > 0 else ""


def meet_in_a_keyring() -> str:
    """Try to read the secret from the keyring of our user, which a sibling may share; return evidence of success, or
    ""."""
    found = call("keyctl", 10, -4, b"user", str(FACTS["token"]).encode(), 0)
    into = ctypes.create_string_buffer(64)
    call("keyctl", 11, found, into, 64)
    return into.value.decode()


def meet_at_a_lock() -> str:
    """Try to find a sibling machine's lock on a shared file, which would transmit a bit; return evidence of success, or
    ""."""
    for path in _lockable():
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                fcntl.flock(fd, fcntl.LOCK_UN)
            except BlockingIOError:
                return f"the sibling's lock on {path} is felt"
            finally:
                os.close(fd)
    return ""


def watch_a_shared_file() -> str:
    """Try to watch files that all machines share (inotify), to learn what a sibling runs; return evidence of success,
    or ""."""
    libc = ctypes.CDLL(None, use_errno=True)
    watcher = libc.inotify_init1(os.O_NONBLOCK)
    for path in {
        *_lockable(),
        os.path.dirname(json.__file__),
        os.path.realpath("/bin/sh"),
        os.path.realpath("/bin/ls"),
    }:
        libc.inotify_add_watch(watcher, path.encode(), 0x20 | 0x1)  # opened, read
    print("holding", flush=True)  # the sibling now runs `touch`
    end = time.monotonic() + 9.0
    while time.monotonic() < end:
        with contextlib.suppress(BlockingIOError):
            return f"{len(os.read(watcher, 4096))} bytes of events of others"
        time.sleep(0.05)
    return ""


def touch() -> None:
    """Access commonly used files while another machine runs `watch_a_shared_file`."""
    for path in _lockable():
        with contextlib.suppress(OSError):
            os.listdir(path) if os.path.isdir(path) else read(path, 16)
    subprocess.run(["/bin/sh", "-c", "/bin/ls / >/dev/null"], check=False)


def change_what_is_shared() -> None:
    """Write a marker to all writable places outside of the work folder, for `marks` in another machine."""
    token, left = str(FACTS["token"]), []
    for folder, folders, _ in os.walk("/"):
        if folder.count("/") > 4 or folder.startswith(("/proc", "/sys", os.getcwd())):
            folders[:] = []
            continue
        folders[:] = folders[:64]
        with contextlib.suppress(OSError):
            with open(f"{folder}/mark-{token}", "w") as file:
                file.write("x")
            left.append(folder)
    print(json.dumps(left[:64]))


def marks() -> str:
    """Try to find the markers that a sibling machine wrote with `change_what_is_shared`; return evidence of success, or
    ""."""
    token = str(FACTS["token"])
    found = []
    for folder, folders, names in os.walk("/"):
        if folder.count("/") > 4 or folder.startswith(("/proc", "/sys")):
            folders[:] = []
            continue
        folders[:] = folders[:64]
        if f"mark-{token}" in names:
            found.append(folder)
    return f"a sibling's mark in {', '.join(found)}" if found else ""


def draw() -> str:
    """Return random values as JSON; equal ones in two machines show that both were forked with the same state."""
    code = "import os,random,uuid,secrets;print(random.random(),uuid.uuid4(),secrets.token_hex(8),os.urandom(8).hex())"
    fresh = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=30)
    kernel = ""
    with contextlib.suppress(OSError):
        kernel = read("/proc/sys/kernel/random/uuid").decode().strip()
    drawn = {
        "random": repr(random.random()), "uuid4": str(uuid.uuid4()), "urandom": os.urandom(8).hex(), "kernel": kernel,
        "fresh": fresh.stdout.strip(),
    }  # fmt: skip
    return json.dumps(drawn)


def able() -> str:
    """Check that a machine still works while a bomb runs in another one: files, memory, processes and output. Returns
    "able".

    Raises `OSError` if a resource is exhausted."""
    libc = ctypes.CDLL(None, use_errno=True)
    for make in (libc.inotify_init1, libc.epoll_create1):
        fd = make(0)
        if fd < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        os.close(fd)
    for _ in range(8):
        left, right = socket.socketpair()
        reader, writer = os.pipe()
        os.write(writer, bytes(4096))
        for fd in (left.fileno(), right.fileno(), reader, writer):
            os.close(fd)
        left.detach(), right.detach()
    with open("able", "wb") as file:
        file.write(bytes(1 << 16))
    os.unlink("able")
    subprocess.run(["/bin/sh", "-c", "true"], check=True)
    context = ctypes.c_ulong(0)
    with contextlib.suppress(Refused):  # a filter can refuse it; EAGAIN: all contexts are used up
        call("io_destroy", ctypes.c_ulong(context.value)) if _aio(context) else None
    return "able"


def _aio(context: ctypes.c_ulong) -> bool:
    try:
        call("io_setup", 16, ctypes.byref(context))
    except Refused as refused:
        if str(refused).endswith("EAGAIN"):
            raise OSError("asynchronous I/O is used up") from None
        return False
    return True
