"""Start and end one sandbox: a `runsc run` process with the machine agent inside, reached over two pipes."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from etude.environments.child_process import ChildProcess, require_programs
from etude.environments.gvisor.cgroups import SandboxCgroups
from etude.errors import MachineError

PLATFORMS = ("systrap", "ptrace")  # how runsc intercepts system calls, the faster first; KVM would need /dev/kvm
_PROBE_S = 20.0
_RUNSC = ("env", "-u", "TMPDIR", "runsc")  # its sandbox runs as nobody, who cannot enter a private TMPDIR


def require_runsc() -> str:
    """Return the version of the installed runsc. Raises `MachineError` if it is missing or does not run."""
    require_programs({"runsc": "runsc (or gvisor.dev's)"}, "machines of gVisor")
    done = subprocess.run(["runsc", "--version"], capture_output=True, text=True, timeout=20.0)
    words = done.stdout.split()
    if done.returncode or len(words) < 3:
        raise MachineError("runsc does not run", done.stderr.strip()[:300], hint="install runsc again")
    return words[2]


def memory_overlay() -> str:
    """Return the flag of the installed runsc that keeps writes to an image in memory; it was renamed in 2023."""
    done = subprocess.run(["runsc", "flags"], capture_output=True, text=True, timeout=20.0)
    return "--overlay2=all:memory" if "overlay2" in done.stdout + done.stderr else "--overlay"


def probe_platform() -> str:
    """Return the first of `PLATFORMS` (how runsc intercepts system calls) that works on this host.

    Blocks for about a second. Raises `MachineError` if none works.
    """
    problem = ""
    for name in PLATFORMS:
        try:
            done = subprocess.run(
                [*_RUNSC, *_flags(name), "do", "/bin/true"], capture_output=True, text=True, timeout=_PROBE_S, cwd="/"
            )
        except subprocess.TimeoutExpired:
            problem = f"{name}: no answer within {_PROBE_S:g} s"
            continue
        if done.returncode == 0:
            return name
        problem = f"{name}: {done.stderr.strip().splitlines()[-1:] or ['no reason given']}"
    raise MachineError(
        "gVisor does not work on this host", problem, hint="allow user namespaces and ptrace, or run as root"
    )


def _flags(platform: str) -> list[str]:
    flags = [f"--platform={platform}", "--network=none", "--ignore-cgroups"]
    return flags if os.geteuid() == 0 else [*flags, "--rootless"]


class Sandbox:
    """A started sandbox: a `runsc` process. `read_fd` and `write_fd` are the pipes from and to its agent.

    - `folder`: contains its config.json; removed when the sandbox closes
    - `platform`: the result of `probe_platform`
    - `overlay`: for a writable root, the result of `memory_overlay`; else ""
    - `on_close`: called once when it closes
    - `groups`: the control groups to run in

    The constructor raises `MachineError` if it cannot be started, `OSError` if the kernel refuses a control group.
    """

    def __init__(
        self, folder: Path, platform: str, *, overlay: str, on_close: Callable[[Sandbox], None], groups: SandboxCgroups
    ) -> None:
        self._folder, self._on_close, self._closed = folder, on_close, False
        self._groups, self._slot = groups, groups.take()
        self._log_fd = os.memfd_create("etude-log", os.MFD_CLOEXEC)
        agent_stdin, self.write_fd = os.pipe2(os.O_CLOEXEC)
        self.read_fd, agent_stdout = os.pipe2(os.O_CLOEXEC)
        flags = [f"--root={folder}/state", *_flags(platform), *([overlay] if overlay else [])]
        runsc = [*_RUNSC, *flags, "run", "--bundle", str(folder), f"etude-{secrets.token_hex(6)}"]
        command = groups.inside(self._slot, runsc)
        try:
            self.process = ChildProcess(command, log_fd=self._log_fd, stdin=agent_stdin, stdout=agent_stdout, fds=())
        except MachineError:
            for fd in (self.read_fd, self.write_fd, self._log_fd):
                os.close(fd)
            groups.give_back(self._slot)
            raise
        finally:
            os.close(agent_stdin)
            os.close(agent_stdout)

    async def close(self) -> None:
        """Kill the sandbox, wait for its processes, and remove its folder. Idempotent.

        `read_fd` and `write_fd` are left open: the `Channel` on them closes them.
        """
        if self._closed:
            return
        self._closed = True
        self._on_close(self)
        try:
            await self.process.close()  # its children die with it
            self._groups.give_back(self._slot)
        finally:
            os.close(self._log_fd)
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
