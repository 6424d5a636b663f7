"""The three processes of a runtime: steward, launcher and runner. Each starts in `main`, with an empty stack.

- The **steward** is the process that the host starts. It outlives the launcher and removes the control groups, even
  when the host process was killed: then the host's end of the `life` pipe closes.
- The **launcher** is PID 1 of a PID namespace, so all machines die with it. It creates machines (`machines`).
- The **runner**, the launcher's first child, is a started interpreter that forks the commands of machines (`commands`).
  Messages to it contain no bytes of commands or files, so the process that commands are forked from never holds data
  of a machine.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import resource
import select
import signal
import site
import socket
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from . import cgroups, commands, confine, machines, overlay, root, seccomp
from . import syscalls as sys_
from .packets import FAILED, HEAD, STARTED
from .processes import Become
from .tools import ENVIRONMENT

_OF_THE_C_LIBRARY = (32, 33)  # reserved signals, which are inherited too
_ALONE = 71
_USER_BASE = 1_900_000_000  # host ids of machines; above the ranges of distributions and systemd


def main(config_json: str) -> None:
    """Run the steward, and the other roles in processes forked from it. Never returns.

    `config_json`: the launcher's configuration, made by `namespace.launcher`.
    """
    role: Callable[[], object] = partial(_steward, json.loads(config_json))
    while True:
        try:
            role()
            os._exit(0)
        except Become as change:
            role = change.role
        except ConnectionError:  # the host has closed the channel
            os._exit(_ALONE)
        except BaseException:  # noqa: BLE001 - the outermost frame: say why on stderr and end
            sys.excepthook(*sys.exc_info())
            os._exit(70)


def _steward(config: dict[str, Any]) -> None:
    _forget_signals()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    for name in ("control", "commands", "life"):
        os.set_inheritable(config[name], False)
    os.dup2(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC), 0)  # it was the pipe with the program
    control = socket.socket(fileno=config["control"])
    step = "finding control groups"
    try:
        hierarchies = cgroups.claim_all(config["name"], _text_of("/proc/self/cgroup"))
        ids = confine.IDS if config["image"] is None else overlay.NUM_IDS
        base = _first_user(ids * (config["max_machines"] + 1))
        if base is None:
            step = "making a user namespace"
            _enter_user_namespace()
        step = "making a PID namespace"
        sys_.unshare(sys_.CLONE_NEWPID)
    except OSError as error:
        control.send(HEAD.pack(FAILED, error.errno or 0) + f"{step}: {error}".encode())
        os._exit(1)
    pid = os.fork()
    if pid == 0:
        os.close(config["life"])
        raise Become(partial(_launcher, config, control.detach(), hierarchies, base))
    control.close()
    os.close(config["commands"])
    _wait_for_end(config["life"], os.pidfd_open(pid))
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    cgroups.remove_all(hierarchies)


def _forget_signals() -> None:
    """Reset ignored and blocked signals of the caller (such as nohup's), so that machines do not inherit them.
    Python's own stay."""
    for number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    for hidden in _OF_THE_C_LIBRARY:
        sys_.forget_signal(hidden)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _wait_for_end(life: int, launcher: int) -> None:
    """Wait until the host closes its end of `life`, or the launcher is dead."""
    poller = select.poll()
    poller.register(life, select.POLLIN)
    poller.register(launcher, select.POLLIN)
    poller.poll()


def _first_user(num_users: int) -> int | None:
    """The first of `num_users` host ids for machines; None if this process may not map ids (rootless)."""
    effective = int(_text_of("/proc/self/status").partition("CapEff:")[2].split()[0], 16)
    needed = (sys_.CAP_SYS_ADMIN, sys_.CAP_SETUID, sys_.CAP_SETGID)
    if os.geteuid() != 0 or not all(effective >> c & 1 for c in needed):
        return None
    inside, _, count = max(list(map(int, line.split())) for line in _text_of("/proc/self/uid_map").splitlines())
    base = min(_USER_BASE, inside + count - num_users - 1024)
    return base if base > 1024 else None


def _enter_user_namespace() -> None:
    uid, gid = os.geteuid(), os.getegid()
    sys_.unshare(sys_.CLONE_NEWUSER)
    confine.write("/proc/self/setgroups", "deny")
    confine.write("/proc/self/uid_map", f"0 {uid} 1")
    confine.write("/proc/self/gid_map", f"0 {gid} 1")


def _launcher(config: dict[str, Any], control: int, hierarchies: list[cgroups.Hierarchy], base: int | None) -> None:
    channel = socket.socket(fileno=control)
    limits, image = confine.Limits(*config["limits"]), config["image"]
    command_user, roots, frame = confine.CommandUser(), None, None
    try:
        sys_.prctl(sys_.PR_SET_PDEATHSIG, 9)
        for name in config["preload"]:
            importlib.import_module(name)
        _prepare_interpreter(config["folder"])
        os.environ.clear()
        os.environ.update(ENVIRONMENT if image is None else image["env"])
        sys.orig_argv = [config["python"]]
        # Namespaces to return to between machines.
        sys_.unshare(sys_.CLONE_NEWNET | sys_.CLONE_NEWIPC | sys_.CLONE_NEWUTS)
        program = _open_program(config["agent"])
        if image is None:
            frame = root.enter(config["python"], config["prefix"])
        else:
            overlay.enter_frame(image["path"])
            command_user = confine.CommandUser(
                image["uid"], image["gid"], image["workdir"], image["user"], image["env"]["PATH"]
            )
            roots = overlay.Roots(
                base, overlay.Size(*image["size"]), command_user.work, command_user.uid, command_user.gid
            )
        filter_ = seccomp.build()
    except (OSError, ImportError, KeyError) as error:
        channel.send(HEAD.pack(FAILED, getattr(error, "errno", 0) or 0) + f"building the root: {error}".encode())
        os._exit(1)
    gc.collect()
    gc.freeze()
    gc.disable()
    runner = os.fork()
    if runner == 0:
        channel.close()
        confinement = confine.Confinement(
            limits, base, hierarchies, filter_, os.stat("/proc").st_dev, command_user, roots is None
        )
        raise Become(partial(commands.serve, config["commands"], confinement))
    os.close(config["commands"])
    root_maker = roots or frame
    assert root_maker is not None
    bounded = {c: h.version for h in hierarchies for c in h.controllers}
    accounts = next((h.accounts for h in hierarchies if h.accounts[0]), None)
    facts = {
        "base": base,
        "cgroups": bounded,
        "accounts": accounts,
        "agent": program is not None,
        "root": root_maker.mode,
    }
    channel.send(HEAD.pack(STARTED, os.getpid()) + json.dumps(facts).encode())
    machines.Machines(
        channel,
        hierarchies,
        base,
        limits,
        config["max_machines"],
        runner,
        program,
        seccomp.packed(),
        command_user,
        root_maker,
    ).serve()


def _open_program(path: str) -> int | None:
    """Descriptor of the agent's program; None if there is none or this machine cannot run it."""
    if not path:
        return None
    program = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    with contextlib.suppress(OSError):
        if os.waitpid(os.posix_spawn(f"/proc/self/fd/{program}", ["init", "--check"], {}), 0)[1] == 0:
            return program
    os.close(program)
    return None


def _prepare_interpreter(folder: str) -> None:
    """Give this process the state of a freshly started interpreter, once, so that its forks need not do it.

    It does what `site` does, but does not run .pth files: they are somebody's code, and this process has privileges.
    Standard input gets a new stream; the old one was used to read this program.
    """
    for step in (site.setquit, site.setcopyright, site.sethelper):
        step()
    sys.path += [p for p in site.getsitepackages() if os.path.isdir(p)]
    reading, writing = os.pipe()  # a pipe, as commands get; a stream checks once whether it can seek
    nothing = os.dup(0)
    os.dup2(reading, 0)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - for the life of the process
    setattr(sys, "__stdin__", sys.stdin)  # noqa: B010 - a Final name to type checkers
    os.dup2(nothing, 0)
    for fd in (reading, writing, nothing):
        os.close(fd)
    sys.path.remove(folder)
    for name in [n for n in sys.modules if n.partition(".")[0] == __package__]:
        del sys.modules[name]


def _text_of(path: str) -> str:
    with open(path, encoding="ascii") as file:
        return file.read()
