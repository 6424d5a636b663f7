"""Machines as others start them, to be measured beside ours: bubblewrap, and OCI runtimes (runc, crun) with a bundle.

Each machine is a shell that says "ready" and then runs what it is told, line by line: what `docker run -i image sh`
comes to, without the daemon. Namespaces as ours: user (bubblewrap), mount, pid, net, ipc, uts, cgroup; no new
privileges. They lack what ours have beside: a tree of files of its own, limits, a system call filter, an agent. So
each does less than ours, and is not slowed by it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import subprocess
import uuid
from pathlib import Path

from etude.environments.namespace.launcher import default_python

SHELL = ["/bin/sh", "-c", 'echo ready; while IFS= read -r line; do eval "$line"; done']
_TIMEOUT_S = 30.0
_CLONE_NEWNS, _MS_REC, _MS_PRIVATE, _MNT_DETACH = 0x20000, 0x4000, 0x40000, 2


class Peer:
    """A way to start machines. Raises `RuntimeError`, with the reason, where it does not work here."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        path = shutil.which(name)
        if path is None:
            raise RuntimeError(f"{name} is not installed")
        self.path = path
        with self.machine() as machine:
            answer = machine.ask('echo "$((6 * 7))"')
        if answer != b"42\n":
            raise RuntimeError(f"{name} cannot run a command: {answer!r}")

    def command(self, name: str) -> list[str]:
        raise NotImplementedError

    def exec_true(self, machine: PeerMachine) -> None:
        """Run ``true`` in a machine that is there."""
        if machine.ask("/bin/true; echo done") != b"done\n":
            raise RuntimeError(f"{self.name}: no answer")

    def enter(self) -> None:
        """What a thread has to do before it starts machines."""

    def end(self, name: str) -> None:
        """What is to be done when the machine's first process has ended."""

    def machine(self) -> PeerMachine:
        """A machine that has said that it is ready."""
        return PeerMachine(self)


class PeerMachine:
    """One of them; ends with the block."""

    def __init__(self, peer: Peer) -> None:
        peer.enter()
        self.peer, self.name = peer, f"etude-{uuid.uuid4().hex[:12]}"
        self.process = subprocess.Popen(
            peer.command(self.name), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
        )
        assert self.process.stdout is not None
        if self._line() != b"ready\n":
            self.process.kill()
            _, said = self.process.communicate(timeout=_TIMEOUT_S)
            raise RuntimeError(f"{peer.name} cannot start a machine: {said.decode(errors='replace').strip()[-300:]}")

    def _line(self) -> bytes:
        assert self.process.stdout is not None
        line = b""
        while not line.endswith(b"\n"):
            piece = self.process.stdout.read(4096)
            if not piece:
                break
            line += piece
        return line

    def ask(self, line: str) -> bytes:
        """The line that a command prints."""
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        return self._line()

    def __enter__(self) -> PeerMachine:
        return self

    def __exit__(self, *error: object) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(_TIMEOUT_S)
        finally:
            self.process.kill()
            self.process.stdout.close()
            self.process.stderr.close()
            self.peer.end(self.name)


class Bubblewrap(Peer):
    """``bwrap``, the host's root read-only in it."""

    def __init__(self, folder: Path) -> None:
        super().__init__("bwrap", folder)

    def command(self, name: str) -> list[str]:
        apart = ["--unshare-all", "--unshare-user", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
        root = ["--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp", "--tmpfs", "/mnt"]
        return [self.path, *apart, *root, "--chdir", "/mnt", "--hostname", "machine", *SHELL]


class Bundle(Peer):
    """runc or crun, with a bundle whose root is the host's folders, read-only."""

    def __init__(self, name: str, folder: Path) -> None:
        self._state = folder / f"{name}-state"
        self._bundle = folder / f"{name}-bundle"
        self._options = ["--root", str(self._state)]
        if name == "crun":
            self._options.append("--cgroup-manager=disabled")
        rootfs = self._bundle / "rootfs"
        for inside in ("proc", "dev", "sys", "tmp", "work"):
            (rootfs / inside).mkdir(parents=True, exist_ok=True)
        config = json.dumps(_config(rootfs))
        (self._bundle / "config.json").write_text(config)
        super().__init__(name, folder)

    def command(self, name: str) -> list[str]:
        return [self.path, *self._options, "run", "--bundle", str(self._bundle), name]

    def enter(self) -> None:
        """crun refuses a host with both versions of control groups: it is not shown the second."""
        if self.name == "crun" and os.path.ismount("/sys/fs/cgroup/unified"):  # as this thread, or what began it, sees
            libc = ctypes.CDLL(None, use_errno=True)
            done = libc.unshare(_CLONE_NEWNS) or libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None)
            if done or libc.umount2(b"/sys/fs/cgroup/unified", _MNT_DETACH):
                raise RuntimeError(f"crun: {os.strerror(ctypes.get_errno())}")

    def exec_true(self, machine: PeerMachine) -> None:
        command = [self.path, *self._options, "exec", machine.name, "/bin/true"]
        subprocess.run(command, check=True, capture_output=True, timeout=_TIMEOUT_S)

    def end(self, name: str) -> None:
        if (self._state / name).exists():
            command = [self.path, *self._options, "delete", "--force", name]
            subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S)


def _config(rootfs: Path) -> dict[str, object]:
    """An OCI bundle's config. Makes what is to be mounted upon, in `rootfs`."""
    mounts: list[dict[str, object]] = [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755", "size=64k"]},
        {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "nodev", "size=32m"]},
        {"destination": "/work", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "nodev", "size=64m"]},
    ]
    prefix = str(Path(default_python()).parents[1])
    for name in dict.fromkeys(("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc", prefix)):
        path, inside = Path(name), rootfs / name.lstrip("/")
        if path.is_symlink():
            if not inside.is_symlink():
                inside.symlink_to(os.readlink(path))
        elif path.is_dir():
            inside.mkdir(parents=True, exist_ok=True)
            mounts.append({"destination": name, "type": "bind", "source": name, "options": ["rbind", "ro"]})
    return {
        "ociVersion": "1.0.2",
        "process": {
            "terminal": False,
            "user": {"uid": 0, "gid": 0},
            "args": SHELL,
            "env": ["PATH=/usr/local/bin:/usr/bin:/bin"],
            "cwd": "/work",
            "capabilities": {kind: [] for kind in ("bounding", "effective", "permitted")},
            "noNewPrivileges": True,
        },
        "root": {"path": str(rootfs), "readonly": True},
        "hostname": "machine",
        "mounts": mounts,
        "linux": {"namespaces": [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount")]},
    }
